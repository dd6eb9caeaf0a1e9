"""The library: folders that become documents, and what is found in the order of its meaning."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.http_servers import http_server
from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace.core.records import Document
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


async def listed(harness: ServiceHarness) -> dict[str | None, Document]:
    found = await harness.ledger.read(documents.list_documents, harness.agent)
    return {document.source: document for document in found}


async def found(library: DocumentLibrary, harness: ServiceHarness, query: str) -> list[str | None]:
    return [hit.source for hit in (await library.search(harness.agent, query)).matches]


async def test_a_folder_becomes_documents(harness: ServiceHarness, library: DocumentLibrary, folder: Path) -> None:
    synced = await library.sync_folders(harness.agent, [folder])
    assert (synced.written, synced.unchanged, synced.removed, synced.skipped) == (3, 0, 0, [])
    titles = {source: document.title for source, document in (await listed(harness)).items()}
    assert titles == {
        "handbook/people/leave.md": "Parental leave",
        "handbook/faq.html": "Frequent & good",
        "handbook/prices.json": "prices",
    }
    assert {document.origin for document in (await listed(harness)).values()} == {"folder"}
    assert await found(library, harness, "sixteen") == ["handbook/people/leave.md"]
    assert await found(library, harness, "espresso") == ["handbook/prices.json"]
    (hit,) = (await library.search(harness.agent, "printer")).matches
    assert hit.text == "Ask\n\nWhere is the printer?\n\nCellar."
    assert await found(library, harness, "alert hidden color") == []


async def test_only_what_changed_is_read_again_and_what_is_gone_goes(
    harness: ServiceHarness, library: DocumentLibrary, folder: Path
) -> None:
    await library.save(harness.agent, "mine", title="Mine", text="Added by a program: walrus.")
    await library.sync_folders(harness.agent, [folder])
    before = await listed(harness)
    (folder / "prices.json").write_text('{"matcha": 4}')
    (folder / "faq.html").unlink()
    (folder / "new.txt").write_text("A narwhal.")
    synced = await library.sync_folders(harness.agent, [folder])
    assert (synced.written, synced.unchanged, synced.removed) == (2, 1, 1)
    after = await listed(harness)
    assert after["handbook/people/leave.md"].updated_at == before["handbook/people/leave.md"].updated_at
    assert after["handbook/prices.json"].id == before["handbook/prices.json"].id
    assert await found(library, harness, "espresso printer") == []
    assert await found(library, harness, "narwhal") == ["handbook/new.txt"]
    synced = await library.sync_folders(harness.agent, [])
    assert synced.removed == 3
    assert list(await listed(harness)) == [None]  # What a program added stays.
    assert await found(library, harness, "walrus") == [None]


async def test_links_lead_nowhere(
    harness: ServiceHarness, library: DocumentLibrary, folder: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("The secret is marzipan.")
    (folder / "linked").symlink_to(outside)
    (folder / "linked.txt").symlink_to(outside / "secret.txt")
    (folder / "people" / "round").symlink_to(folder)
    (folder / ".hidden.txt").write_text("marzipan")
    (folder / ".git").mkdir()
    (folder / ".git" / "notes.txt").write_text("marzipan")
    os.mkfifo(folder / "pipe.txt")
    await library.sync_folders(harness.agent, [folder])
    assert len(await listed(harness)) == 3
    assert await found(library, harness, "marzipan") == []


async def test_what_is_no_text_is_left_out_with_the_reason(
    harness: ServiceHarness, library: DocumentLibrary, folder: Path
) -> None:
    (folder / "image.txt").write_bytes(b"\x89PNG\0\0\0")
    (folder / "huge.txt").write_text("word " * 200_001)
    (folder / "photo.png").write_bytes(b"\x89PNG")
    (folder / "utf16.txt").write_text("Grüße aus Köln", encoding="utf-16")
    (folder / "latin.txt").write_bytes("Grüße aus Bonn".encode("latin-1"))
    (folder / os.fsdecode(b"na\xefve.txt")).write_text("Odd name: quokka.")
    missing = folder / "missing"
    synced = await library.sync_folders(harness.agent, [folder, missing])
    assert sorted(synced.skipped) == [
        "handbook/huge.txt: its text has 1,000,005 bytes; a document has at most 1,000,000",
        "handbook/image.txt: it is binary",
        "missing: No such file or directory",
    ]
    assert await found(library, harness, "Köln") == ["handbook/utf16.txt"]
    assert await found(library, harness, "Bonn") == ["handbook/latin.txt"]
    assert await found(library, harness, "quokka") == ["handbook/na\ufffdve.txt"]


async def test_a_file_that_is_named_itself_is_read_whatever_its_name(
    harness: ServiceHarness, library: DocumentLibrary, tmp_path: Path
) -> None:
    file = tmp_path / "NOTES"
    file.write_text("About okapis.")
    link = tmp_path / "link"
    link.symlink_to(file)
    synced = await library.sync_folders(harness.agent, [link, file])  # The operator's own link is meant.
    assert synced.written == 1
    assert await found(library, harness, "okapi") == ["NOTES"]


async def test_a_document_that_is_too_large_is_refused(harness: ServiceHarness, library: DocumentLibrary) -> None:
    with pytest.raises(RefusedError, match="so split it"):
        await library.save(harness.agent, title="Big", text="x" * 1_000_001)
    added = await library.save(harness.agent, title="Small", text="x")
    assert added.id.startswith("doc_")


MEANINGS = {"car": (1.0, 0.0), "automobile": (1.0, 0.1), "banana": (0.0, 1.0)}


async def by_meaning(request: web.Request) -> web.Response:
    """Vectors by the words that have a meaning here."""
    texts = json.loads(await request.text())["input"]
    vectors = [[sum(MEANINGS[w][n] for w in MEANINGS if w in text.lower()) for n in (0, 1)] for text in texts]
    return web.json_response({"data": [{"index": n, "embedding": vector} for n, vector in enumerate(vectors)]})


async def test_with_an_embedder_what_was_found_is_in_the_order_of_its_meaning(harness: ServiceHarness) -> None:
    async with http_server(by_meaning) as server:
        embedder = HttpEmbedder("m", base_url=server.url("/v1"))
        library = DocumentLibrary(harness.ledger, embedder)
        await library.save(
            harness.agent, "fruit", title="Fruit", text="Red red red: a banana has the repair price of a red banana."
        )
        await library.save(harness.agent, "car", title="Workshop", text="A red automobile has its price too.")
        query = "price of a red car"
        plain = await DocumentLibrary(harness.ledger).search(harness.agent, query)
        assert [hit.document_id for hit in plain.matches] == ["fruit", "car"]
        ordered = await library.search(harness.agent, query, limit=1)
        assert ([hit.document_id for hit in ordered.matches], ordered.total) == (["car"], 2)
        await library.search(harness.agent, "red price")
        assert [len(json.loads(seen.body)["input"]) for seen in server.requests] == [3, 1]  # Passages are known by now.
        await embedder.aclose()


async def test_without_an_answer_of_the_embedder_words_have_to_do(harness: ServiceHarness) -> None:
    async with http_server(by_meaning) as server:
        pass
    embedder = HttpEmbedder("m", base_url=server.url("/v1"))
    library = DocumentLibrary(harness.ledger, embedder)
    for n in range(2):
        await library.save(harness.agent, f"doc_{n}", title="Tea", text="Tea. " * (n + 1) + "And more than that.")
    assert len((await library.search(harness.agent, "tea")).matches) == 2
    await embedder.aclose()
