"""Contract tests of `OutputStore`, `ResultCache` and `ConversationStore`.

Subclass one, add its fixture, and pytest runs the tests.
"""

from __future__ import annotations

import asyncio
import re
from typing import ClassVar

import pytest

from toolspace.core.extension_points import CachedResult, ConversationStore, OutputStore, ResultCache, StoredOutput
from toolspace.core.language_model import ModelCall, ModelToolResult, ModelTurn, ResultsTurn, Turn, UserTurn
from toolspace.core.result import ImagePart
from toolspace.errors import ToolspaceError
from toolspace.testing import mark_coroutine_tests
from toolspace.testing.doubles import FakeClock

MEBIBYTE = 1 << 20
TTL = 600.0


async def store(
    outputs: OutputStore, *pieces: str, session: str = "s1", owner: str | None = None, is_json: bool = False
) -> StoredOutput:
    writer = await outputs.create(session=session, owner=owner, tool="read_file")
    for piece in pieces:
        await writer.write(piece)
    return await writer.commit(is_json=is_json)


async def all_lines(outputs: OutputStore, output: StoredOutput) -> list[str]:
    return [line async for batch in outputs.lines(output) for line in batch]


@mark_coroutine_tests
class OutputsContract:
    """Tests of an output store. A subclass defines the fixture `outputs`, which uses the fixture `clock` and `ttl`."""

    ttl: ClassVar[float] = TTL

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def outputs(self, clock: FakeClock) -> OutputStore:
        """Yields a new, empty store that uses the clock and keeps outputs for `ttl` seconds; closes it afterwards."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `outputs` of its own")

    async def test_a_stored_output_has_its_metadata(self, outputs: OutputStore, clock: FakeClock) -> None:
        output = await store(outputs, "first\nsec", "ond\nπ", owner="ann", is_json=True)
        assert re.fullmatch(r"session-s1/[0-9a-f]{16,}", output.handle)
        assert (output.session, output.owner, output.tool, output.is_json) == ("s1", "ann", "read_file", True)
        assert (output.bytes, output.lines) == (len("first\nsecond\nπ".encode()), 3)
        assert output.tokens > 0
        assert (output.created_at, output.expires_at) == (clock.now, clock.now + self.ttl)

    async def test_a_stored_output_can_be_read_back(self, outputs: OutputStore) -> None:
        output = await store(outputs, "first\nsec", "ond\n\nlast")
        assert await outputs.find(output.handle, session="s1", owner=None) == output
        assert await all_lines(outputs, output) == ["first", "second", "", "last"]
        assert await outputs.text(output, limit=1000) == "first\nsecond\n\nlast"

    @pytest.mark.parametrize(
        ("text", "lines"),
        [
            ("", []),
            ("\n", [""]),
            ("a", ["a"]),
            ("a\n", ["a"]),
            ("a\n\n", ["a", ""]),
            ("a\r\nb\u2028c", ["a\r", "b\u2028c"]),
        ],
    )
    async def test_lines_end_at_newlines_only(self, outputs: OutputStore, text: str, lines: list[str]) -> None:
        output = await store(outputs, text)
        assert output.lines == len(lines)
        assert await all_lines(outputs, output) == lines

    async def test_an_operator_sees_every_output_that_has_not_expired(
        self, outputs: OutputStore, clock: FakeClock
    ) -> None:
        output = await store(outputs, "mine", owner="ann")
        assert await outputs.inspect(output.handle) == output
        assert await outputs.inspect("session-s1/0000000000000000") is None
        assert await outputs.inspect("../s1") is None
        clock.now += self.ttl + 1
        assert await outputs.inspect(output.handle) is None

    async def test_an_output_of_many_blocks_comes_back_whole(self, outputs: OutputStore) -> None:
        lines = [f"line {number} – größer" for number in range(60_000)]
        text = "\n".join(lines)
        output = await store(outputs, *(text[start : start + 65_536] for start in range(0, len(text), 65_536)))
        assert output.bytes == len(text.encode())
        assert output.lines == len(lines)
        assert await all_lines(outputs, output) == lines
        batches = [batch async for batch in outputs.lines(output)]
        assert len(batches) > 3

    async def test_a_line_longer_than_a_mebibyte_comes_in_pieces(self, outputs: OutputStore) -> None:
        output = await store(outputs, "x" * (2 * MEBIBYTE + 5), "\n", "y" * MEBIBYTE, "\nend")
        pieces = await all_lines(outputs, output)
        assert [len(piece) for piece in pieces] == [MEBIBYTE, MEBIBYTE, 5, MEBIBYTE, 3]
        assert output.lines == 3

    async def test_the_first_bytes_are_cut_between_characters(self, outputs: OutputStore) -> None:
        output = await store(outputs, "aπ漢🎉z")
        starts = [await outputs.text(output, limit=limit) for limit in range(12)]
        assert starts == ["", "a", "a", "aπ", "aπ", "aπ", "aπ漢", "aπ漢", "aπ漢", "aπ漢", "aπ漢🎉", "aπ漢🎉z"]

    async def test_tokens_are_about_those_of_the_whole_text(self, outputs: OutputStore) -> None:
        from toolspace.core.token_count import estimate_tokens

        text = "The quick brown fox, 1234 times; and so on.\n" * 20_000
        output = await store(outputs, *(text[start : start + 10_000] for start in range(0, len(text), 10_000)))
        assert output.tokens == pytest.approx(estimate_tokens(text), rel=0.01)

    async def test_an_output_cannot_be_found_before_it_is_committed(self, outputs: OutputStore) -> None:
        writer = await outputs.create(session="s1", owner=None, tool="t")
        await writer.write("x" * 1_000_000)
        assert await outputs.sessions() == []
        output = await writer.commit()
        assert await outputs.sessions() == ["s1"]
        assert await outputs.find(output.handle, session="s1", owner=None) == output

    async def test_a_discarded_output_does_not_exist(self, outputs: OutputStore) -> None:
        writer = await outputs.create(session="s1", owner=None, tool="t")
        await writer.write("x" * 1_000_000)
        await writer.discard()
        await writer.discard()
        assert await outputs.sessions() == []
        with pytest.raises(ToolspaceError, match="ended"):
            await writer.write("more")
        with pytest.raises(ToolspaceError, match="ended"):
            await writer.commit()

    async def test_discarding_after_a_commit_changes_nothing(self, outputs: OutputStore) -> None:
        writer = await outputs.create(session="s1", owner=None, tool="t")
        await writer.write("text")
        output = await writer.commit()
        await writer.discard()
        assert await outputs.find(output.handle, session="s1", owner=None) == output
        with pytest.raises(ToolspaceError, match="ended"):
            await writer.write("more")

    @pytest.mark.parametrize(
        ("owner", "reader_session", "reader", "readable"),
        [
            (None, "s1", None, True),
            (None, "s2", None, False),
            (None, "s1", "ann", False),
            ("ann", "s1", "ann", True),
            ("ann", "s2", "ann", True),
            ("ann", "s1", "bob", False),
            ("ann", "s1", None, False),
            ("", "s2", "", True),
            (None, "session-s1", None, False),
        ],
    )
    async def test_only_its_owner_reads_an_output(
        self, outputs: OutputStore, owner: str | None, reader_session: str, reader: str | None, readable: bool
    ) -> None:
        output = await store(outputs, "private", session="s1", owner=owner)
        result = await outputs.find(output.handle, session=reader_session, owner=reader)
        assert result == (output if readable else None)

    async def test_an_output_expires(self, outputs: OutputStore, clock: FakeClock) -> None:
        old = await store(outputs, "old", session="s1")
        clock.now += self.ttl - 1
        new = await store(outputs, "new", session="s2")
        assert await outputs.find(old.handle, session="s1", owner=None) == old
        clock.now += 1
        assert await outputs.find(old.handle, session="s1", owner=None) is None
        assert await outputs.sessions() == ["s2"]
        assert await outputs.find(new.handle, session="s2", owner=None) == new

    async def test_a_sweep_removes_what_has_expired_and_only_that(self, outputs: OutputStore, clock: FakeClock) -> None:
        assert await outputs.sweep() == 0
        old = [await store(outputs, "old") for _ in range(3)]
        clock.now += self.ttl
        new = await store(outputs, "new")
        assert await outputs.sweep() == 3
        assert await outputs.sweep() == 0
        assert await outputs.text(new, limit=10) == "new"
        with pytest.raises(ToolspaceError, match="gone"):
            await outputs.text(old[0], limit=10)
        with pytest.raises(ToolspaceError, match="gone"):
            await all_lines(outputs, old[0])

    @pytest.mark.parametrize(
        ("session", "folder_name"),
        [
            ("abc", "session-abc"),
            ("session-abc", "session-abc"),
            ("A_b-9", "session-A_b-9"),
            ("x" * 64, "session-" + "x" * 64),
            ("x" * 65, None),
            ("session-", None),
            ("", None),
            ("../../etc", None),
            ("a/b", None),
            (".", None),
            ("名前", None),
            ("a\n", None),
            ("\x00\ud800", None),
        ],
    )
    async def test_a_session_is_any_text_and_plain_ones_stay_readable(
        self, outputs: OutputStore, session: str, folder_name: str | None
    ) -> None:
        output = await store(outputs, "text", session=session, owner="\ud800 owner")
        folder, _, identifier = output.handle.partition("/")
        assert re.fullmatch(r"session-[A-Za-z0-9_-]{1,64}", folder)
        assert re.fullmatch(r"[0-9a-f]{16,}", identifier)
        assert folder_name is None or folder == folder_name
        assert await outputs.find(output.handle, session=session, owner="\ud800 owner") == output
        assert await outputs.sessions() == [session]

    async def test_a_handle_must_be_exact(self, outputs: OutputStore) -> None:
        output = await store(outputs, "text")
        folder, _, identifier = output.handle.partition("/")
        for handle in (
            output.handle + "\n",
            output.handle + "/",
            f" {output.handle}",
            f"{folder}/./{identifier}",
            f"{folder}//{identifier}",
            f"{folder}/{identifier}.json",
            f"./{output.handle}",
            output.handle.upper(),
            identifier,
            folder,
        ):
            assert await outputs.find(handle, session="s1", owner=None) is None

    async def test_reading_can_stop_early(self, outputs: OutputStore) -> None:
        output = await store(outputs, "line\n" * 500_000)
        batches = outputs.lines(output)
        assert (await anext(batches))[0] == "line"
        await batches.aclose()  # type: ignore[attr-defined]
        assert len(await all_lines(outputs, output)) == 500_000

    async def test_many_outputs_are_written_at_once(self, outputs: OutputStore) -> None:
        async def store_number(number: int) -> StoredOutput:
            return await store(outputs, *[f"{number} " * 5_000] * 20, session=f"s{number % 3}")

        results = await asyncio.gather(*(store_number(number) for number in range(12)))
        assert len({output.handle for output in results}) == 12
        for number, output in enumerate(results):
            assert await outputs.text(output, limit=1 << 22) == f"{number} " * 100_000
        assert await outputs.sessions() == ["s0", "s1", "s2"]


@mark_coroutine_tests
class CacheContract:
    """Tests of a result cache. A subclass defines the fixture `cache`, which uses the fixture `clock`."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def cache(self, clock: FakeClock) -> ResultCache:
        """Yields a new, empty cache that uses the clock; closes it afterwards."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `cache` of its own")

    async def test_a_cached_result_is_returned(self, cache: ResultCache) -> None:
        await cache.set("a", CachedResult(text=b'{"n":1}', parts=b"[1]"), 60)
        assert await cache.get("a") == CachedResult(text=b'{"n":1}', parts=b"[1]")

    async def test_an_unknown_key_is_none(self, cache: ResultCache) -> None:
        assert await cache.get("nothing") is None

    async def test_results_without_parts_and_empty_results_are_cached(self, cache: ResultCache) -> None:
        await cache.set("null", CachedResult(text=b"null"), 60)
        await cache.set("empty", CachedResult(text=b""), 60)
        assert await cache.get("null") == CachedResult(text=b"null")
        assert await cache.get("empty") == CachedResult(text=b"")

    async def test_a_newer_result_replaces_the_older(self, cache: ResultCache) -> None:
        await cache.set("a", CachedResult(text=b"1"), 60)
        await cache.set("a", CachedResult(text=b"2"), 60)
        assert await cache.get("a") == CachedResult(text=b"2")

    async def test_a_result_expires_after_its_ttl(self, cache: ResultCache, clock: FakeClock) -> None:
        await cache.set("short", CachedResult(text=b"1"), 10)
        await cache.set("long", CachedResult(text=b"2"), 100)
        clock.now += 9.5
        assert await cache.get("short") is not None
        clock.now += 1
        assert await cache.get("short") is None
        assert await cache.get("long") == CachedResult(text=b"2")

    async def test_a_ttl_of_zero_removes_the_key(self, cache: ResultCache) -> None:
        await cache.set("a", CachedResult(text=b"1"), 60)
        await cache.set("a", CachedResult(text=b"2"), 0)
        assert await cache.get("a") is None

    async def test_a_replaced_result_has_its_new_ttl(self, cache: ResultCache, clock: FakeClock) -> None:
        await cache.set("a", CachedResult(text=b"1"), 10)
        clock.now += 8
        await cache.set("a", CachedResult(text=b"2"), 10)
        clock.now += 8
        assert await cache.get("a") == CachedResult(text=b"2")

    async def test_clear_removes_everything(self, cache: ResultCache) -> None:
        for number in range(5):
            await cache.set(str(number), CachedResult(text=b"x"), 60)
        await cache.clear()
        assert [await cache.get(str(number)) for number in range(5)] == [None] * 5
        await cache.set("after", CachedResult(text=b"x"), 60)
        assert await cache.get("after") is not None

    async def test_keys_are_any_text(self, cache: ResultCache) -> None:
        keys = ["", "a" * 100_000, "日本語", "\ud800", "a\x00b", "a\x00c", "'; DROP TABLE results; --"]
        for number, key in enumerate(keys):
            await cache.set(key, CachedResult(text=str(number).encode()), 60)
        assert [await cache.get(key) for key in keys] == [
            CachedResult(text=str(number).encode()) for number in range(len(keys))
        ]

    async def test_parallel_callers_get_their_own_results(self, cache: ResultCache) -> None:
        async def set_and_get(number: int) -> CachedResult | None:
            await cache.set(f"k{number}", CachedResult(text=str(number).encode()), 60)
            return await cache.get(f"k{number}")

        results = await asyncio.gather(*(set_and_get(number) for number in range(100)))
        assert results == [CachedResult(text=str(number).encode()) for number in range(100)]


@mark_coroutine_tests
class ConversationsContract:
    """Tests of a conversation store. A subclass defines the fixture `conversations`."""

    turns: ClassVar[tuple[Turn, ...]] = (
        UserTurn("How warm is it?", (ImagePart(data="aGk="),)),
        ModelTurn(
            text="Let me see.",
            calls=(ModelCall("c1", "temperature", '{"city": '),),
            model="x:y",
            thinking_data=({"type": "thinking", "signature": "s"},),
        ),
        ResultsTurn((ModelToolResult("c1", "temperature", "(tool failed: π)", True),)),
        ModelTurn(text="I do not know."),
    )

    @pytest.fixture
    def conversations(self) -> ConversationStore:
        """Yields a new, empty store."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `conversations` of its own")

    async def test_a_conversation_is_loaded_as_it_was_saved(self, conversations: ConversationStore) -> None:
        assert await conversations.load("s", owner="ann") == ()
        for turns in (self.turns[:1], self.turns):
            async with conversations.lock("s", owner="ann"):
                await conversations.save("s", list(turns), owner="ann")
            assert await conversations.load("s", owner="ann") == turns

    async def test_conversations_belong_to_their_session_and_owner(self, conversations: ConversationStore) -> None:
        keys = [
            ("s", "ann"),
            ("s", "bob"),
            ("t", "ann"),
            ("sann", ""),
            ("", "sann"),
            ("../s", "a/b"),
            ("\ud800", "日本"),
        ]
        for number, (session, owner) in enumerate(keys):
            await conversations.save(session, [UserTurn(str(number))], owner=owner)
        for number, (session, owner) in enumerate(keys):
            assert await conversations.load(session, owner=owner) == (UserTurn(str(number)),)

    async def test_a_deleted_conversation_is_empty(self, conversations: ConversationStore) -> None:
        await conversations.save("s", self.turns, owner="ann")
        assert not await conversations.delete("s", owner="bob")
        assert await conversations.delete("s", owner="ann")
        assert not await conversations.delete("s", owner="ann")
        assert await conversations.load("s", owner="ann") == ()

    async def test_one_at_a_time_has_the_lock_of_a_session(self, conversations: ConversationStore) -> None:
        active: list[int] = []
        most_active: list[int] = []

        async def add_turn(number: int) -> None:
            async with conversations.lock("s", owner="ann"):
                active.append(number)
                most_active.append(len(active))
                turns = await conversations.load("s", owner="ann")
                await conversations.save("s", (*turns, UserTurn(str(number))), owner="ann")
                active.remove(number)

        async with conversations.lock("other", owner="ann"), conversations.lock("s", owner="bob"):
            await asyncio.gather(*map(add_turn, range(20)))
        assert set(most_active) == {1}
        assert len(await conversations.load("s", owner="ann")) == 20

    async def test_a_cancelled_caller_gives_its_place_up(self, conversations: ConversationStore) -> None:
        async def wait() -> None:
            async with conversations.lock("s", owner="ann"):
                pass

        async with conversations.lock("s", owner="ann"):
            waiting_task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            waiting_task.cancel()
            await asyncio.gather(waiting_task, return_exceptions=True)
        await wait()
