"""Documents, on each database: stored, searched, ranked and deleted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toolspace.errors import RefusedError
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import documents, entities_and_spaces
from toolspace.storage.queries.documents import SearchMatches, prepare

pytestmark = [pytest.mark.spec("9.5")]

CORPUS = {
    "whales": ("Whales", "The blue whale is the largest animal on earth. It eats krill, and lives in every ocean."),
    "sky": ("The sky", "The sky is blue because air scatters light. At dusk it is red. A whale cannot see it."),
    "leave": ("Parental leave", "Employees get sixteen weeks of paid leave when a child is born or adopted."),
    "holiday": ("Holidays", "Employees get thirty days of paid holiday a year. Days that are left expire in March."),
    "expenses": ("Expenses", "Employees hand in receipts within thirty days. Flights are booked by the travel desk."),
    "tokyo": ("東京", "東京タワーは港区にある塔です。高さは333メートル。"),
    "kyoto": ("京都", "京都には寺が多い。金閣寺は有名です。"),
    "ml": ("Zürich office", "The office in Zürich is open from eight. Ask Müller for a badge: xk-4711."),
}


async def setup(database: Database, *names: str) -> None:
    for name in names or ("robot",):
        program = entities_and_spaces.create_entity(name, "agent", name, {})
        await database.run(lambda program=program: program)


async def save(
    database: Database, document_id: str, title: str, text: str, *, agent: str = "robot", **more: Any
) -> Any:
    new = prepare(document_id, title=title, text=text, **more)
    return await database.run(lambda: documents.save(agent, new))


async def fill(database: Database) -> None:
    await setup(database)
    for document_id, (title, text) in CORPUS.items():
        await save(database, document_id, title, text)


async def search(database: Database, query: str, *, agent: str = "robot", limit: int = 10) -> SearchMatches:
    return await database.read(lambda: documents.search(agent, query, limit=limit))


async def matching_ids(database: Database, query: str, **options: Any) -> list[str]:
    return [hit.document_id for hit in (await search(database, query, **options)).matches]


async def count_rows(database: Database, document_id: str) -> list[str]:
    def look() -> Program[list[str]]:
        rows = yield "SELECT word FROM document_words WHERE document_id = ? ORDER BY word", (document_id,)
        return [row[0] for row in rows]

    return await database.read(look)


async def test_best_match_comes_first(database: Database) -> None:
    await fill(database)
    for query, best in (
        ("how many weeks of leave for a new child", ["leave"]),
        ("paid holiday", ["holiday", "leave"]),
        ("receipts", ["expenses"]),
        ("RECEIPT", ["expenses"]),
        ("Tokyo 東京", ["tokyo"]),
        ("金閣寺", ["kyoto"]),
        ("塔", ["tokyo"]),
        ("zürich badge", ["ml"]),
        ("4711", ["ml"]),
        ("blue whale", ["whales", "sky"]),
        ("krill employees", ["whales"]),
    ):
        assert (await matching_ids(database, query))[: len(best)] == best, query


async def test_a_rare_word_counts_more_than_a_common_one(database: Database) -> None:
    await setup(database)
    for n in range(20):
        await save(database, f"doc_{n:02}", f"Report {n}", "The quarterly report speaks of sales and of costs.")
    await save(database, "rare", "Note", "A short remark on the axolotl.")
    assert (await matching_ids(database, "quarterly report axolotl"))[0] == "rare"
    common = await search(database, "report", limit=5)
    assert (len(common.matches), common.total) == (5, 20)


async def test_adjacent_words_count_more_than_separate_ones(database: Database) -> None:
    await setup(database)
    filler = "nothing of interest is said in this part of the text at all " * 2
    await save(database, "apart", "One", f"The engine is loud. {filler} Search is hard.")
    await save(database, "near", "Two", f"The search engine is loud. {filler} It is hard.")
    await save(database, "other", "Three", "Something else.")
    assert await matching_ids(database, "search engine") == ["near", "apart"]


async def test_match_is_a_passage_not_the_whole_document(database: Database) -> None:
    await setup(database)
    chapters = [f"Chapter {n}. " + "Words that mean little here. " * 40 for n in range(30)]
    chapters[17] += "The password of the printer is swordfish. "
    await save(database, "book", "A book", "\n\n".join(chapters), source="https://example.com/book")
    result = await search(database, "printer password")
    hit = result.matches[0]
    assert "swordfish" in hit.text
    assert len(hit.text) < 1_200
    assert (hit.title, hit.source) == ("A book", "https://example.com/book")
    assert [match.score for match in result.matches] == sorted((match.score for match in result.matches), reverse=True)


async def test_text_with_astral_characters_is_split_correctly(database: Database) -> None:
    await setup(database)
    text = "\n\n".join("🦊 𝔉𝔬𝔵 🦊 " * 60 + f"marker{n} end." for n in range(6))
    await save(database, "fox", "Foxes", text)
    hit = (await search(database, "marker4")).matches[0]
    assert "marker4" in hit.text
    assert hit.text in text


async def test_replaced_document_leaves_no_old_words(database: Database) -> None:
    await setup(database)
    first = await save(database, "faq", "FAQ", "The zebra lives in Africa.", metadata={"v": 1})
    second = await save(database, "faq", "Questions", "The tapir lives in Asia.", metadata={"v": 2})
    assert (first.created_at, second.title, second.metadata) == (second.created_at, "Questions", {"v": 2})
    assert await matching_ids(database, "zebra") == []
    assert await matching_ids(database, "FAQ") == []
    assert await matching_ids(database, "tapir") == ["faq"]
    assert "zebra" not in await count_rows(database, "faq")
    document = await database.read(lambda: documents.find("robot", "faq"))
    assert document is not None
    assert (document.text, document.size) == ("The tapir lives in Asia.", 24)


async def test_deleted_document_leaves_no_rows(database: Database) -> None:
    await fill(database)
    assert await database.run(lambda: documents.delete("robot", ["whales", "none", "whales"])) == 1
    assert await matching_ids(database, "krill") == []
    assert await count_rows(database, "whales") == []
    assert await database.read(lambda: documents.find("robot", "whales")) is None
    await database.run(lambda: entities_and_spaces.delete_entity("robot"))
    assert await count_rows(database, "sky") == []


async def test_agent_finds_and_deletes_only_its_own_documents(database: Database) -> None:
    await setup(database, "robot", "other")
    await save(database, "plan", "Plan", "The secret is marzipan.")
    await save(database, "plan", "Plan", "Something else.", agent="other")
    assert await matching_ids(database, "marzipan", agent="other") == []
    assert await database.run(lambda: documents.delete("other", ["plan"])) == 1
    assert await matching_ids(database, "marzipan") == ["plan"]


async def test_query_without_matches_is_empty(database: Database) -> None:
    await fill(database)
    for query in ("", "   ", "!?", "nothingofthesort", "\0", "\ud800", "' UNION 1=1 --", "x" * 5000, "% _"):
        assert await search(database, query) == SearchMatches([], 0), query
    await setup(database, "newcomer")
    assert await search(database, "whale", agent="newcomer") == SearchMatches([], 0)


async def test_query_with_very_many_words_works(database: Database) -> None:
    await fill(database)
    query = " ".join(f"word{n}" for n in range(1000)) + " krill"
    assert await matching_ids(database, query) == ["whales"]


async def test_too_large_document_is_refused_with_advice(database: Database) -> None:
    with pytest.raises(RefusedError, match=r'"Big" has 1,000,002 bytes; the limit is 1,000,000, so split it'):
        prepare("big", title="Big", text="é" * 500_001)
    await setup(database)
    assert (await save(database, "full", "Full", "word " * 200_000)).size == 1_000_000
    assert await matching_ids(database, "word full", limit=1) == ["full"]


async def test_number_and_size_of_documents_are_limited(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    await setup(database)
    monkeypatch.setattr(documents, "MAX_DOCUMENTS", 2)
    monkeypatch.setattr(documents, "MAX_TOTAL_BYTES", 100)
    await save(database, "a", "A", "x" * 50)
    await save(database, "b", "B", "y" * 50)
    with pytest.raises(RefusedError, match="at most 2 documents"):
        await save(database, "c", "C", "z")
    with pytest.raises(RefusedError, match="at most 100 bytes in all"):
        await save(database, "b", "B", "y" * 51)
    await save(database, "b", "B", "z" * 50)  # It replaces itself, so it fits.


async def test_unstorable_characters_of_a_document_are_replaced(database: Database) -> None:
    await setup(database)
    document = await save(database, "odd", "A\0B", "one\0two \ud800 three", source="s\0")
    assert (document.title, document.source) == ("A B", "s ")
    assert await matching_ids(database, "two") == ["odd"]


async def test_documents_of_folder_and_api_do_not_replace_each_other(database: Database) -> None:
    await setup(database)
    await save(database, "a", "A", "from a folder", origin="folder", stamp="1")
    with pytest.raises(RefusedError, match="folder"):
        await save(database, "a", "A", "from a program")
    assert await database.read(lambda: documents.list_file_stamps("robot")) == {"a": "1"}


async def test_concurrent_writers_of_a_document_leave_the_words_of_the_last(database: Database) -> None:
    await setup(database)
    texts = [f"animal{n} lives here" for n in range(8)]
    await asyncio.gather(*(save(database, "faq", "FAQ", text) for text in texts * 3))
    document = await database.read(lambda: documents.find("robot", "faq"))
    assert document is not None
    animal = document.text.split()[0]
    assert [word for word in await count_rows(database, "faq") if word.startswith("animal")] == [animal]


async def test_documents_are_listed_by_id_in_pages(database: Database) -> None:
    await fill(database)
    first = await database.read(lambda: documents.list_documents("robot", limit=3))
    rest = await database.read(lambda: documents.list_documents("robot", after=first[-1].id))
    assert [document.id for document in (*first, *rest)] == sorted(CORPUS)
