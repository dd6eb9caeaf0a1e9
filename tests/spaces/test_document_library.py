"""The document library: text files of folders, and ranking by meaning."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.http_servers import http_server
from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace.core.stored_records import Document
from toolspace.errors import RefusedError
from toolspace.models.embeddings import HttpEmbedder
from toolspace.spaces.document_library import DocumentLibrary
from toolspace.storage.database import Database
from toolspace.storage.queries import documents

pytestmark = [pytest.mark.spec("9.5")]


@pytest.fixture
async def harness(database: Database) -> AsyncIterator[ServiceHarness]:
    async with service_harness(database) as services:
        yield services


@pytest.fixture
def library(harness: ServiceHarness) -> DocumentLibrary:
    return DocumentLibrary(harness.ledger)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "handbook"
    (root / "people").mkdir(parents=True)
    (root / "people" / "leave.md").write_text("Intro\n\n# Parental  leave\n\nSixteen weeks.\n")
    (root / "faq.html").write_text(
        "<html><head><title>Frequent &amp; good</title><style>p{color:red}</style></head>"
        "<body><h1>Ask</h1><p>Where is the&nbsp;printer?</p><script>alert('hidden')</script><p>Cellar.</body>"
    )
    (root / "prices.json").write_text('{"espresso": 2.5}')
    return root


async def list_sources(harness: ServiceHarness) -> dict[str | None, Document]:
    page = await harness.ledger.read(documents.list_documents, harness.agent)
    return {document.source: document for document in page}


async def matching_titles(library: DocumentLibrary, harness: ServiceHarness, query: str) -> list[str | None]:
    return [hit.source for hit in (await library.search(harness.agent, query)).matches]


async def test_a_folder_becomes_documents(harness: ServiceHarness, library: DocumentLibrary, folder: Path) -> None:
    summary = await library.sync_folders(harness.agent, [folder])
    assert (summary.written_count, summary.unchanged_count, summary.removed_count, summary.skipped_files) == (
        3,
        0,
        0,
        [],
    )
    titles = {source: document.title for source, document in (await list_sources(harness)).items()}
    assert titles == {
        "handbook/people/leave.md": "Parental leave",
        "handbook/faq.html": "Frequent & good",
        "handbook/prices.json": "prices",
    }
    assert {document.origin for document in (await list_sources(harness)).values()} == {"folder"}
    assert await matching_titles(library, harness, "sixteen") == ["handbook/people/leave.md"]
    assert await matching_titles(library, harness, "espresso") == ["handbook/prices.json"]
    (hit,) = (await library.search(harness.agent, "printer")).matches
    assert hit.text == "Ask\n\nWhere is the printer?\n\nCellar."
    assert await matching_titles(library, harness, "alert hidden color") == []


async def test_only_changed_files_are_read_again_and_missing_ones_removed(
    harness: ServiceHarness, library: DocumentLibrary, folder: Path
) -> None:
    await harness.save_document("mine", title="Mine", text="Added by a program: walrus.")
    await library.sync_folders(harness.agent, [folder])
    before = await list_sources(harness)
    (folder / "prices.json").write_text('{"matcha": 4}')
    (folder / "faq.html").unlink()
    (folder / "new.txt").write_text("A narwhal.")
    summary = await library.sync_folders(harness.agent, [folder])
    assert (summary.written_count, summary.unchanged_count, summary.removed_count) == (2, 1, 1)
    after = await list_sources(harness)
    assert after["handbook/people/leave.md"].updated_at == before["handbook/people/leave.md"].updated_at
    assert after["handbook/prices.json"].id == before["handbook/prices.json"].id
    assert await matching_titles(library, harness, "espresso printer") == []
    assert await matching_titles(library, harness, "narwhal") == ["handbook/new.txt"]
    summary = await library.sync_folders(harness.agent, [])
    assert summary.removed_count == 3
    assert list(await list_sources(harness)) == [None]  # Documents of other origin stay.
    assert await matching_titles(library, harness, "walrus") == [None]


async def test_symbolic_links_are_not_followed(
    harness: ServiceHarness, library: DocumentLibrary, folder: Path, tmp_path: Path
) -> None:
    outer_folder = tmp_path / "outside"
    outer_folder.mkdir()
    (outer_folder / "secret.txt").write_text("The secret is marzipan.")
    (folder / "linked").symlink_to(outer_folder)
    (folder / "linked.txt").symlink_to(outer_folder / "secret.txt")
    (folder / "people" / "round").symlink_to(folder)
    (folder / ".hidden.txt").write_text("marzipan")
    (folder / ".git").mkdir()
    (folder / ".git" / "notes.txt").write_text("marzipan")
    os.mkfifo(folder / "pipe.txt")
    await library.sync_folders(harness.agent, [folder])
    assert len(await list_sources(harness)) == 3
    assert await matching_titles(library, harness, "marzipan") == []


async def test_files_that_are_not_text_are_skipped_with_the_reason(
    harness: ServiceHarness, library: DocumentLibrary, folder: Path
) -> None:
    (folder / "image.txt").write_bytes(b"\x89PNG\0\0\0")
    (folder / "huge.txt").write_text("word " * 200_001)
    (folder / "photo.png").write_bytes(b"\x89PNG")
    (folder / "utf16.txt").write_text("Grüße aus Köln", encoding="utf-16")
    (folder / "latin.txt").write_bytes("Grüße aus Bonn".encode("latin-1"))
    (folder / os.fsdecode(b"na\xefve.txt")).write_text("Odd name: quokka.")
    missing = folder / "missing"
    summary = await library.sync_folders(harness.agent, [folder, missing])
    assert sorted(summary.skipped_files) == [
        "handbook/huge.txt: its text has 1,000,005 bytes; a document has at most 1,000,000",
        "handbook/image.txt: it is binary",
        "missing: No such file or directory",
    ]
    assert await matching_titles(library, harness, "Köln") == ["handbook/utf16.txt"]
    assert await matching_titles(library, harness, "Bonn") == ["handbook/latin.txt"]
    assert await matching_titles(library, harness, "quokka") == ["handbook/na\ufffdve.txt"]


async def test_explicitly_configured_file_is_read_whatever_its_suffix(
    harness: ServiceHarness, library: DocumentLibrary, tmp_path: Path
) -> None:
    file = tmp_path / "NOTES"
    file.write_text("About okapis.")
    link = tmp_path / "link"
    link.symlink_to(file)
    summary = await library.sync_folders(harness.agent, [link, file])  # A configured path may be a link.
    assert summary.written_count == 1
    assert await matching_titles(library, harness, "okapi") == ["NOTES"]


async def test_a_document_that_is_too_large_is_refused(harness: ServiceHarness, library: DocumentLibrary) -> None:
    with pytest.raises(RefusedError, match="so split it"):
        await harness.save_document(title="Big", text="x" * 1_000_001)
    document = await harness.save_document(title="Small", text="x")
    assert document.id.startswith("doc_")


MEANINGS = {"car": (1.0, 0.0), "automobile": (1.0, 0.1), "banana": (0.0, 1.0)}


async def by_meaning(request: web.Request) -> web.Response:
    """Vectors that depend on a few words of the text."""
    texts = json.loads(await request.text())["input"]
    vectors = [[sum(MEANINGS[w][n] for w in MEANINGS if w in text.lower()) for n in (0, 1)] for text in texts]
    return web.json_response({"data": [{"index": n, "embedding": vector} for n, vector in enumerate(vectors)]})


async def test_embedder_ranks_matches_by_meaning(harness: ServiceHarness) -> None:
    async with http_server(by_meaning) as server:
        embedder = HttpEmbedder("m", base_url=server.url("/v1"))
        library = DocumentLibrary(harness.ledger, embedder)
        await harness.save_document(
            "fruit", title="Fruit", text="Red red red: a banana has the repair price of a red banana."
        )
        await harness.save_document("car", title="Workshop", text="A red automobile has its price too.")
        query = "price of a red car"
        plain = await DocumentLibrary(harness.ledger).search(harness.agent, query)
        assert [hit.document_id for hit in plain.matches] == ["fruit", "car"]
        matches = await library.search(harness.agent, query, limit=1)
        assert ([hit.document_id for hit in matches.matches], matches.total) == (["car"], 2)
        await library.search(harness.agent, "red price")
        assert [len(json.loads(request.body)["input"]) for request in server.requests] == [
            3,
            1,
        ]  # The vectors of the passages are cached by then.
        await embedder.aclose()


async def test_matches_are_ranked_by_words_if_the_embedder_fails(harness: ServiceHarness) -> None:
    async with http_server(by_meaning) as server:
        pass
    embedder = HttpEmbedder("m", base_url=server.url("/v1"))
    library = DocumentLibrary(harness.ledger, embedder)
    for n in range(2):
        await harness.save_document(f"doc_{n}", title="Tea", text="Tea. " * (n + 1) + "And more than that.")
    assert len((await library.search(harness.agent, "tea")).matches) == 2
    await embedder.aclose()
