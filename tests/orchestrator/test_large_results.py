"""SPEC 4.6, 4.7 and 3.33: large results are stored, replaced by handles, and read back by their owner."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from toolspace import ImagePart, Settings, TextPart, ToolContext, Toolspace, tool
from toolspace.core.extension_points import OutputStore, OutputWriter
from toolspace.errors import ToolCanceledError
from toolspace.providers.json_path import find_values
from toolspace.storage.disk_outputs import DiskOutputs
from toolspace.storage.memory_outputs import MemoryOutputs


@tool
async def text(size: int, word: str = "x") -> str:
    return word * size


@tool
async def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": n, "name": f"row {n}"} for n in range(count)]


@tool
async def lines(count: int) -> str:
    return "\n".join(f"line {n}" for n in range(1, count + 1))


def small(limit: int = 1_000, **more: Any) -> Settings:
    return Settings(tool_response_max_bytes=limit, **{"max_inline_bytes": limit, **more})


@pytest.mark.spec("4.6")
async def test_a_large_result_is_stored_and_replaced_by_a_handle_with_head_and_tail() -> None:
    async with Toolspace(tools=[lines], settings=small()) as ts:
        result = await ts.call("lines", {"count": 500})
    assert result.ok
    output = result.result["tool_output"]
    full = "\n".join(f"line {n}" for n in range(1, 501))
    assert output["handle"].startswith("session-")
    assert output["reason"] == "size_limit_exceeded"
    assert (output["bytes"], output["lines"]) == (len(full), 500)
    assert output["tokens"] > 100
    assert output["preview"].startswith("line 1\n")
    assert output["preview"].endswith("line 500")
    assert len(result.text.encode()) <= 1_000


@pytest.mark.spec("4.6")
async def test_the_tokens_of_a_stored_output_are_counted_as_the_settings_say() -> None:
    async with Toolspace(tools=[text], settings=small(count_tokens=len)) as ts:
        result = await ts.call("text", {"size": 5_000})
    assert result.result["tool_output"]["tokens"] == 5_000


@pytest.mark.spec("4.6")
async def test_the_limit_counts_bytes_not_characters() -> None:
    async with Toolspace(tools=[text], settings=small(1_000)) as ts:
        assert (await ts.call("text", {"size": 1_000})).result == "x" * 1_000
        assert "tool_output" in (await ts.call("text", {"size": 1_001})).result
        assert "tool_output" in (await ts.call("text", {"size": 400, "word": "漢"})).result


@pytest.mark.spec("4.6")
async def test_stored_files_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    async with Toolspace(tools=[text], settings=small(state_dir=tmp_path / "s")) as ts:
        await ts.call("text", {"size": 5_000})
    paths = list((tmp_path / "s").rglob("*"))
    assert any(path.is_file() for path in paths)
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.spec("3.33")
async def test_read_output_is_listed_only_after_something_is_stored() -> None:
    async with Toolspace(tools=[text], settings=small()) as ts:
        assert "agent__read_output" not in [listed_tool.name for listed_tool in ts.list_tools()]
        await ts.call("text", {"size": 5_000})
        assert "agent__read_output" in [listed_tool.name for listed_tool in ts.list_tools()]
        other_context = ToolContext(session_id="another")
        assert "agent__read_output" not in [listed_tool.name for listed_tool in ts.list_tools(context=other_context)]


async def _store(ts: Toolspace, name: str, arguments: Any, **call: Any) -> str:
    result = await ts.call(name, arguments, **call)
    return result.result["tool_output"]["handle"]


@pytest.mark.spec("3.33")
async def test_lines_are_read_by_offset_and_limit_to_the_very_end() -> None:
    async with Toolspace(tools=[lines], settings=small()) as ts:
        handle = await _store(ts, "lines", {"count": 1_000})
        page = (await ts.call("agent__read_output", {"handle": handle, "offset": 998, "limit": 2})).result
        assert (page["content"], page["totalLines"], page["nextOffset"]) == ("line 998\nline 999", 1_000, 1_000)
        last = (await ts.call("agent__read_output", {"handle": handle, "offset": 1_000})).result
        assert last["content"] == "line 1000"
        assert "nextOffset" not in last
        past = (await ts.call("agent__read_output", {"handle": handle, "offset": 5_000})).result
        assert (past["content"], past["lines"]) == ("", 0)


@pytest.mark.spec("3.33")
async def test_everything_can_be_read_back_piece_by_piece() -> None:
    async with Toolspace(tools=[lines, text], settings=small()) as ts:
        for name, arguments, full in (
            ("lines", {"count": 5_000}, "\n".join(f"line {n}" for n in range(1, 5_001))),
            ("text", {"size": 50_000}, "x" * 50_000),
        ):
            handle = await _store(ts, name, arguments)
            offset: int | None = 1
            pieces: list[str] = []
            while offset is not None:
                page = (
                    await ts.call("agent__read_output", {"handle": handle, "offset": offset, "limit": 5_000})
                ).unwrap()
                assert "tool_output" not in page
                pieces.append(page["content"])
                offset = page.get("nextOffset")
            assert "\n".join(pieces).replace("\n", "") == full.replace("\n", "")


@pytest.mark.spec("3.33")
async def test_lines_are_found_by_pattern_with_their_numbers() -> None:
    async with Toolspace(tools=[lines], settings=small()) as ts:
        handle = await _store(ts, "lines", {"count": 1_000})
        matches = (await ts.call("agent__read_output", {"handle": handle, "pattern": r"^line 9\d9$"})).result
        assert [match["line"] for match in matches["matches"]] == [909, 919, 929, 939, 949, 959, 969, 979, 989, 999]
        wrong = await ts.call("agent__read_output", {"handle": handle, "pattern": "("})
    assert wrong.error_kind == "invalid_parameters"


@pytest.mark.spec("3.33")
async def test_a_pattern_that_takes_too_long_is_stopped() -> None:
    async with Toolspace(tools=[text], settings=small()) as ts:
        handle = await _store(ts, "text", {"size": 1_500, "word": "a"})
        result = await ts.call("agent__read_output", {"handle": handle, "pattern": r"(a|aa)+$b"})
    assert result.error_kind == "execution_error"
    assert "takes longer than" in (result.error or "")


@pytest.mark.spec("3.33")
@pytest.mark.parametrize("pattern", ["(?:(?:a|bc){1000}){1000}", "((a{1000}){1000}){1000}", "(?R)", "(a" * 500])
async def test_a_hostile_pattern_is_refused(pattern: str) -> None:
    async with Toolspace(tools=[text], settings=small()) as ts:
        handle = await _store(ts, "text", {"size": 1_500, "word": "a"})
        assert (await ts.call("agent__read_output", {"handle": handle, "pattern": pattern})).error_kind == (
            "invalid_parameters"
        )


@pytest.mark.spec("3.33")
async def test_json_is_read_by_path() -> None:
    async with Toolspace(tools=[rows, lines], settings=small()) as ts:
        handle = await _store(ts, "rows", {"count": 300})
        value = (await ts.call("agent__read_output", {"handle": handle, "jsonPath": "$[299].name"})).result
        assert value["values"] == ["row 299"]
        many = (await ts.call("agent__read_output", {"handle": handle, "jsonPath": "$[*].id", "limit": 3})).result
        assert (many["values"], many["found"], many["truncated"]) == ([0, 1, 2], 300, True)
        for path in ("$[[", "$[?search(@.name, '(a|aa)+$')]", "$[?@.name =~ /(a|aa)+$/]", "", "x" * 100_000):
            wrong = await ts.call("agent__read_output", {"handle": handle, "jsonPath": path})
            assert wrong.error_kind == "invalid_parameters"
            assert len(wrong.error or "") < 500
        every = (await ts.call("agent__read_output", {"handle": handle, "jsonPath": "$..*"})).result
        assert every["truncated"]
        plain = await _store(ts, "lines", {"count": 500})
        assert "not JSON" in ((await ts.call("agent__read_output", {"handle": plain, "jsonPath": "$.a"})).error or "")


SLOW_PATH = "$..[?count(@..[?count(@..[?count(@..*) > 0]) > 0]) > 0]"


@tool
async def nested_lists(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value, *range(10)]
    return value


@pytest.mark.spec("3.33")
async def test_a_json_path_may_visit_a_large_document() -> None:
    document = json.dumps([{"id": number, "tags": ["a", "b"], "of": {"x": number}} for number in range(50_000)])
    for path, count in (("$..x", 10_001), ("$[?@.id >= 49_998].of.x".replace("_", ""), 2), ("$[-1].tags[*]", 2)):
        assert len(find_values(document, path, threading.Event())) == count, path


@pytest.mark.parametrize("path", [SLOW_PATH, "$..[?count(@..[?count(@..[?@ == @]) > 0]) > 0]"])
async def test_a_json_path_takes_a_limited_number_of_steps(path: str) -> None:
    async with Toolspace(tools=[nested_lists], settings=small()) as ts:
        handle = await _store(ts, "nested_lists", {"depth": 90})
        result = await ts.call("agent__read_output", {"handle": handle, "jsonPath": path})
        assert result.error_kind == "invalid_parameters"
        assert "takes more than 3,000,000 steps" in (result.error or "")
        short = (await ts.call("agent__read_output", {"handle": handle, "jsonPath": "$[0][0][3]"})).result
        assert short["values"] == [2]


async def test_a_json_path_has_a_maximum_length() -> None:
    async with Toolspace(tools=[rows], settings=small()) as ts:
        handle = await _store(ts, "rows", {"count": 300})
        result = await ts.call("agent__read_output", {"handle": handle, "jsonPath": "$" + ".a" * 1_000})
    assert result.error == "Parameter validation failed: jsonPath: at most 1000 characters, got 2001"


async def test_a_json_path_whose_caller_is_gone_stops() -> None:
    document = json.dumps(await nested_lists.function(90))
    is_abandoned = threading.Event()
    is_abandoned.set()
    with pytest.raises(ToolCanceledError):
        find_values(document, SLOW_PATH, is_abandoned)


@pytest.mark.spec("3.33")
async def test_results_of_read_output_are_bounded_and_never_stored() -> None:
    async with Toolspace(tools=[text], settings=small(500)) as ts:
        handle = await _store(ts, "text", {"size": 100_000})
        page = (await ts.call("agent__read_output", {"handle": handle})).result
    assert 500 < len(page["content"]) <= 16_500
    assert "tool_output" not in page


@pytest.mark.spec("4.6")
async def test_an_output_belongs_to_its_session_and_its_user() -> None:
    async with Toolspace(tools=[text], settings=small()) as ts:
        owner_context = ToolContext(session_id="one", user_id="ann")
        handle = await _store(ts, "text", {"size": 5_000}, context=owner_context)

        async def reads(context: ToolContext) -> bool:
            return (await ts.call("agent__read_output", {"handle": handle}, context=context)).ok

        assert await reads(owner_context)
        assert not await reads(ToolContext(session_id="one", user_id="bob"))
        assert not await reads(ToolContext(session_id="two", user_id="bob"))
        assert not await reads(ToolContext(session_id="two"))


@pytest.mark.spec("4.6")
async def test_an_expired_output_cannot_be_read(tmp_path: Path) -> None:
    now = 1_000.0
    outputs = DiskOutputs(tmp_path / "outputs", ttl=60, clock=lambda: now)
    async with Toolspace(tools=[text], settings=small(), outputs=outputs) as ts:
        handle = await _store(ts, "text", {"size": 5_000})
        now = 1_059.0
        assert (await ts.call("agent__read_output", {"handle": handle})).ok
        now = 1_061.0
        result = await ts.call("agent__read_output", {"handle": handle})
    assert "may have expired" in (result.error or "")


@pytest.mark.spec("4.6")
async def test_expired_outputs_are_deleted_when_a_toolspace_starts(tmp_path: Path) -> None:
    now = 1_000.0

    class Watched(DiskOutputs):
        swept = asyncio.Event()

        async def sweep(self) -> int:
            count = await super().sweep()
            self.swept.set()
            return count

    def outputs() -> Watched:
        return Watched(tmp_path / "outputs", ttl=60, clock=lambda: now)

    def files() -> list[Path]:
        return [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]

    async with Toolspace(tools=[text], settings=small(), outputs=outputs()) as ts:
        await ts.call("text", {"size": 5_000})
    assert files()
    now = 1_061.0
    Watched.swept.clear()
    async with Toolspace(outputs=outputs()):
        await asyncio.wait_for(Watched.swept.wait(), 20)
        assert files() == []


@pytest.mark.parametrize(
    "handle", ["", "x", "session-a/../../etc/passwd", "/etc/passwd", "session-a/\0", "session-" + "a" * 9_999]
)
async def test_a_forged_handle_cannot_be_read(handle: str) -> None:
    async with Toolspace(tools=[text], settings=small()) as ts:
        await ts.call("text", {"size": 5_000})
        result = await ts.call("agent__read_output", {"handle": handle})
    assert result.error_kind == "execution_error"


@pytest.mark.spec("4.6")
@pytest.mark.parametrize("store", ["disk", "memory"])
@pytest.mark.parametrize("kind", ["text", "values"])
async def test_a_large_stream_is_stored_while_it_runs(kind: str, store: str, tmp_path: Path) -> None:
    @tool
    async def stream() -> AsyncIterator[Any]:
        for n in range(1_000):
            yield f"line {n}\n" if kind == "text" else {"n": n}

    outputs: OutputStore = MemoryOutputs(ttl=60) if store == "memory" else DiskOutputs(tmp_path / "o", ttl=60)
    async with Toolspace(tools=[stream], settings=small(), outputs=outputs) as ts:
        result = await ts.call("stream")
        output = result.result["tool_output"]
        stored_output = await outputs.find(output["handle"], session=ts.orchestrator.session, owner=None)
        assert stored_output is not None
        stored_text = await outputs.text(stored_output, limit=10_000_000)
    if kind == "text":
        assert stored_text == "".join(f"line {n}\n" for n in range(1_000))
    else:
        assert json.loads(stored_text) == [{"n": n} for n in range(1_000)]
    assert output["bytes"] == len(stored_text)


@pytest.mark.spec("4.6")
async def test_a_stream_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    @tool
    async def stream() -> AsyncIterator[str]:
        for _ in range(100):
            yield "x" * 100
        raise ValueError("broke off")

    async with Toolspace(tools=[stream], settings=small(state_dir=tmp_path)) as ts:
        result = await ts.call("stream")
        assert result.error == "broke off"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_a_store_that_cannot_write_is_a_failed_result(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file where the folder should be")
    async with Toolspace(tools=[text], settings=small(state_dir=tmp_path)) as ts:
        result = await ts.call("text", {"size": 5_000})
    assert (result.ok, result.executed) == (False, True)
    assert "could not be stored" in (result.error or "")


@pytest.mark.spec("4.7")
async def test_results_use_the_runs_tokens_and_are_stored_if_they_do_not_fit() -> None:
    async with Toolspace(tools=[lines]) as ts:
        run = ts.run(context_window=3_000)
        first = await run.call("lines", {"count": 200})
        assert first.result.startswith("line 1\n")
        used = run.tokens_used
        assert 200 < used < 3_000
        second = await run.call("lines", {"count": 2_000})
        assert second.result["tool_output"]["reason"] == "token_budget"
        assert used < run.tokens_used <= 3_000
        assert not run.tool_budget_exceeded
        page = await run.call("agent__read_output", {"handle": second.result["tool_output"]["handle"], "limit": 2})
    assert page.result["content"] == "line 1\nline 2"


@pytest.mark.spec("4.7")
async def test_a_result_that_cannot_be_stored_fails_and_marks_the_run() -> None:
    async with Toolspace(tools=[lines]) as ts:
        run = ts.run(context_window=100)
        run.add_tokens(95)
        result = await run.call("lines", {"count": 2_000})
    assert (result.ok, result.error) == (False, "context window budget exceeded")
    assert result.text == "(tool failed: context window budget exceeded)"
    assert result.executed
    assert run.tool_budget_exceeded


@pytest.mark.spec("4.6")
async def test_a_handle_is_never_served_from_the_cache_to_someone_else() -> None:
    runs = 0

    @tool(cache=60, cache_scope="shared")
    async def big() -> str:
        nonlocal runs
        runs += 1
        return "y" * 5_000

    async with Toolspace(tools=[big], settings=small()) as ts:
        handles = [
            await _store(ts, "big", None, context=ToolContext(session_id=name, user_id=name)) for name in ("a", "b")
        ]
        read = await ts.call(
            "agent__read_output", {"handle": handles[1]}, context=ToolContext(session_id="b", user_id="b")
        )
    assert runs == 1
    assert handles[0] != handles[1]
    assert read.ok


@pytest.mark.spec("4.6")
async def test_an_error_that_is_too_large_is_cut_and_stays_an_error() -> None:
    @tool
    async def fail(size: int) -> None:
        raise ValueError("begin " + "x" * size + " end")

    async with Toolspace(tools=[fail], settings=small(1_000)) as ts:
        assert (await ts.call("fail", {"size": 10})).error == "begin xxxxxxxxxx end"
        result = await ts.call("fail", {"size": 1_000_000})
    assert (result.error_kind, result.executed, result.extras) == ("execution_error", True, {"exception": "ValueError"})
    assert len(result.text.encode()) <= 1_000
    assert (result.error or "").startswith("begin xxx")
    assert (result.error or "").endswith("xxx end")
    assert "characters left out" in (result.error or "")


@pytest.mark.spec("4.7")
async def test_an_error_that_does_not_fit_the_context_window_is_replaced() -> None:
    @tool
    async def fail() -> None:
        raise ValueError("many words of an error, " * 1_000)

    async with Toolspace(tools=[fail]) as ts:
        run = ts.run(context_window=100)
        result = await run.call("fail")
        assert (result.error_kind, result.error) == ("limit_exceeded", "context window budget exceeded")
        assert run.tool_budget_exceeded
        assert run.tokens_used < 100


@pytest.mark.spec("3.15")
async def test_images_next_to_a_large_text_are_kept() -> None:
    image = ImagePart(data="aGVsbG8=")

    @tool
    async def look() -> list[Any]:
        return [TextPart(text="x" * 5_000), image]

    async with Toolspace(tools=[look], settings=small(1_000)) as ts:
        result = await ts.call("look")
    assert result.result["tool_output"]["reason"] == "size_limit_exceeded"
    assert image in result.content
    assert "[image image/png, 5 bytes]" in result.text
    assert result.result["tool_output"]["handle"] in result.text


class Pausing(MemoryOutputs):
    """An output store that waits for permission to write."""

    def __init__(self) -> None:
        super().__init__(ttl=60)
        self.reached_event = asyncio.Event()
        self.go = asyncio.Event()

    async def create(self, *, session: str, owner: str | None, tool: str) -> OutputWriter:
        self.reached_event.set()
        await self.go.wait()
        return await super().create(session=session, owner=owner, tool=tool)


@pytest.mark.spec("4.7")
async def test_tokens_used_while_a_result_is_stored_are_counted_once() -> None:
    outputs = Pausing()
    async with Toolspace(tools=[text], outputs=outputs) as ts:
        run = ts.run(context_window=400)
        store_task = asyncio.create_task(run.call("text", {"size": 50_000}))
        await outputs.reached_event.wait()
        assert (await run.call("text", {"size": 300, "word": "word "})).ok
        outputs.go.set()
        await store_task
        assert run.tokens_used <= 400


async def test_a_session_without_outputs_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolspace.composition.maintenance.SWEEP_SECONDS", 0.01)
    async with Toolspace(tools=[text], settings=small(tool_output_ttl=0.01)) as ts:
        run = ts.run()
        await run.call("text", {"size": 5_000})
        assert run.session in ts.orchestrator.stored_sessions
        async with asyncio.timeout(20):
            while run.session in ts.orchestrator.stored_sessions:  # noqa: ASYNC110 - a timer deletes it
                await asyncio.sleep(0.01)
