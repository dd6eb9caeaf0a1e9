"""What agents can look up, on both databases: kept, found, ranked, and gone when it is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toolspace.errors import RefusedError
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import documents, entities
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
        program = entities.create_entity(name, "agent", name, {})
        await database.run(lambda program=program: program)


async def put(database: Database, document_id: str, title: str, text: str, *, agent: str = "robot", **more: Any) -> Any:
    new = prepare(document_id, title=title, text=text, **more)
    return await database.run(lambda: documents.save(agent, new))


async def fill(database: Database) -> None:
    await setup(database)
    for document_id, (title, text) in CORPUS.items():
        await put(database, document_id, title, text)


async def search(database: Database, query: str, *, agent: str = "robot", limit: int = 10) -> SearchMatches:
    return await database.read(lambda: documents.search(agent, query, limit=limit))


async def found(database: Database, query: str, **options: Any) -> list[str]:
    return [hit.document_id for hit in (await search(database, query, **options)).matches]


async def left_behind(database: Database, document_id: str) -> list[str]:
    def look() -> Program[list[str]]:
        rows = yield "SELECT word FROM document_words WHERE document_id = ? ORDER BY word", (document_id,)
        return [row[0] for row in rows]

    return await database.read(look)


async def test_what_fits_best_comes_first(database: Database) -> None:
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
        assert (await found(database, query))[: len(best)] == best, query


async def test_a_rare_word_counts_more_than_a_common_one(database: Database) -> None:
    await setup(database)
    for n in range(20):
        await put(database, f"doc_{n:02}", f"Report {n}", "The quarterly report speaks of sales and of costs.")
    await put(database, "rare", "Note", "A short remark on the axolotl.")
    assert (await found(database, "quarterly report axolotl"))[0] == "rare"
    common = await search(database, "report", limit=5)
    assert (len(common.matches), common.total) == (5, 20)


async def test_words_that_stand_together_count_more_than_the_same_words_apart(database: Database) -> None:
    await setup(database)
    filler = "nothing of interest is said in this part of the text at all " * 2
    await put(database, "apart", "One", f"The engine is loud. {filler} Search is hard.")
    await put(database, "near", "Two", f"The search engine is loud. {filler} It is hard.")
    await put(database, "other", "Three", "Something else.")
    assert await found(database, "search engine") == ["near", "apart"]


async def test_the_passage_is_given_that_fits_and_not_the_whole_document(database: Database) -> None:
    await setup(database)
    chapters = [f"Chapter {n}. " + "Words that mean little here. " * 40 for n in range(30)]
    chapters[17] += "The password of the printer is swordfish. "
    await put(database, "book", "A book", "\n\n".join(chapters), source="https://example.com/book")
    result = await search(database, "printer password")
    hit = result.matches[0]
    assert "swordfish" in hit.text
    assert len(hit.text) < 1_200
    assert (hit.title, hit.source) == ("A book", "https://example.com/book")
    assert [one.score for one in result.matches] == sorted((one.score for one in result.matches), reverse=True)


async def test_a_text_outside_of_the_basic_plane_is_cut_where_it_should_be(database: Database) -> None:
    await setup(database)
    text = "\n\n".join("🦊 𝔉𝔬𝔵 🦊 " * 60 + f"marker{n} end." for n in range(6))
    await put(database, "fox", "Foxes", text)
    hit = (await search(database, "marker4")).matches[0]
    assert "marker4" in hit.text
    assert hit.text in text


async def test_what_changes_leaves_nothing_of_before(database: Database) -> None:
    await setup(database)
    first = await put(database, "faq", "FAQ", "The zebra lives in Africa.", metadata={"v": 1})
    second = await put(database, "faq", "Questions", "The tapir lives in Asia.", metadata={"v": 2})
    assert (first.created_at, second.title, second.metadata) == (second.created_at, "Questions", {"v": 2})
    assert await found(database, "zebra") == []
    assert await found(database, "FAQ") == []
    assert await found(database, "tapir") == ["faq"]
    assert "zebra" not in await left_behind(database, "faq")
    whole = await database.read(lambda: documents.find("robot", "faq"))
    assert whole is not None
    assert (whole.text, whole.size) == ("The tapir lives in Asia.", 24)


async def test_what_is_deleted_leaves_nothing(database: Database) -> None:
    await fill(database)
    assert await database.run(lambda: documents.delete("robot", ["whales", "none", "whales"])) == 1
    assert await found(database, "krill") == []
    assert await left_behind(database, "whales") == []
    assert await database.read(lambda: documents.find("robot", "whales")) is None
    await database.run(lambda: entities.delete_entity("robot"))
    assert await left_behind(database, "sky") == []


async def test_an_agent_finds_and_deletes_only_its_own(database: Database) -> None:
    await setup(database, "robot", "other")
    await put(database, "plan", "Plan", "The secret is marzipan.")
    await put(database, "plan", "Plan", "Something else.", agent="other")
    assert await found(database, "marzipan", agent="other") == []
    assert await database.run(lambda: documents.delete("other", ["plan"])) == 1
    assert await found(database, "marzipan") == ["plan"]


async def test_a_query_that_fits_nothing_finds_nothing(database: Database) -> None:
    await fill(database)
    for query in ("", "   ", "!?", "nothingofthesort", "\0", "\ud800", "' UNION 1=1 --", "x" * 5000, "% _"):
        assert await search(database, query) == SearchMatches([], 0), query
    await setup(database, "newcomer")
    assert await search(database, "whale", agent="newcomer") == SearchMatches([], 0)


async def test_a_query_of_very_many_words_is_answered(database: Database) -> None:
    await fill(database)
    query = " ".join(f"word{n}" for n in range(1000)) + " krill"
    assert await found(database, query) == ["whales"]


async def test_a_document_that_is_too_large_is_refused_with_what_to_do(database: Database) -> None:
    with pytest.raises(RefusedError, match=r'"Big" has 1,000,002 bytes; one has at most 1,000,000, so split it'):
        prepare("big", title="Big", text="é" * 500_001)
    await setup(database)
    assert (await put(database, "full", "Full", "word " * 200_000)).size == 1_000_000
    assert await found(database, "word full", limit=1) == ["full"]


async def test_an_agent_has_room_for_so_much(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    await setup(database)
    monkeypatch.setattr(documents, "MAX_DOCUMENTS", 2)
    monkeypatch.setattr(documents, "MAX_TOTAL_BYTES", 100)
    await put(database, "a", "A", "x" * 50)
    await put(database, "b", "B", "y" * 50)
    with pytest.raises(RefusedError, match="at most 2 documents"):
        await put(database, "c", "C", "z")
    with pytest.raises(RefusedError, match="at most 100 bytes in all"):
        await put(database, "b", "B", "y" * 51)
    await put(database, "b", "B", "z" * 50)  # In its own place it fits.


async def test_text_that_no_database_takes_is_made_fit(database: Database) -> None:
    await setup(database)
    kept = await put(database, "odd", "A\0B", "one\0two \ud800 three", source="s\0")
    assert (kept.title, kept.source) == ("A B", "s ")
    assert await found(database, "two") == ["odd"]


async def test_a_document_of_a_folder_and_one_of_the_api_do_not_replace_each_other(database: Database) -> None:
    await setup(database)
    await put(database, "a", "A", "from a folder", origin="folder", stamp="1")
    with pytest.raises(RefusedError, match="folder"):
        await put(database, "a", "A", "from a program")
    assert await database.read(lambda: documents.list_file_stamps("robot")) == {"a": "1"}


async def test_writers_of_one_document_leave_the_words_of_the_last(database: Database) -> None:
    await setup(database)
    texts = [f"animal{n} lives here" for n in range(8)]
    await asyncio.gather(*(put(database, "faq", "FAQ", text) for text in texts * 3))
    whole = await database.read(lambda: documents.find("robot", "faq"))
    assert whole is not None
    animal = whole.text.split()[0]
    assert [word for word in await left_behind(database, "faq") if word.startswith("animal")] == [animal]


async def test_documents_are_listed_by_id_page_by_page(database: Database) -> None:
    await fill(database)
    first = await database.read(lambda: documents.list_documents("robot", limit=3))
    rest = await database.read(lambda: documents.list_documents("robot", after=first[-1].id))
    assert [document.id for document in (*first, *rest)] == sorted(CORPUS)
