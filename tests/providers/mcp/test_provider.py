"""The MCP client against a real process that misbehaves on demand: results, failures, losses, changes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from tests.providers.mcp.conftest import Seen, space, until
from toolspace.core.events import EventType
from toolspace.core.result import AudioPart, ImagePart, JsonPart, ResourcePart
from toolspace.errors import ProviderError
from toolspace.orchestrator.settings import ProviderRules, ToolRules
from toolspace.providers.mcp import connection
from toolspace.providers.mcp.provider import McpProvider

Make = Callable[..., McpProvider]


@pytest.mark.spec("3.14")
async def test_a_list_of_several_pages_is_offered_whole(scripted: Make) -> None:
    async with space(scripted()) as ts:
        names = {tool.name for tool in ts.list_tools()}
    assert {"s__echo", "s__die", "s__structured", "s__deaf"} <= names


@pytest.mark.spec("3.17")
async def test_a_tool_that_needs_tasks_is_not_offered(scripted: Make) -> None:
    provider = scripted()
    async with space(provider) as ts:
        assert ts.find_tool("s__needs_task") is None
        assert provider.status().left_out == ("needs_task: needs MCP tasks, which are not supported yet",)


@pytest.mark.spec("3.15")
async def test_instructions_are_offered_to_the_system_prompt(scripted: Make) -> None:
    async with space(scripted()) as ts:
        assert "Handle with care." in ts.orchestrator.instructions()


@pytest.mark.spec("3.15")
async def test_arguments_are_coerced_where_the_schema_is_plain_and_refused_before_they_are_sent(
    scripted: Make, seen: Seen
) -> None:
    async with space(scripted()) as ts:
        assert (await ts.call("s__echo", {"text": "ab", "times": "2"})).result == "abab"
        refused = await ts.call("s__echo", {"text": "ab", "times": "many"})
    assert refused.error_kind == "invalid_parameters"
    assert seen.calls == ["echo"]


@pytest.mark.spec("3.15")
async def test_an_error_of_the_tool_is_a_failure_and_never_cached(scripted: Make, seen: Seen) -> None:
    async with space(scripted(), rules=ProviderRules(rules=ToolRules(cache=60))) as ts:
        for _ in range(2):
            result = await ts.call("s__fail")
            assert (result.ok, result.error_kind, result.error) == (False, "execution_error", "it is broken")
        for _ in range(2):
            assert (await ts.call("s__echo", {"text": "a"})).result == "a"
    assert seen.calls == ["fail", "fail", "echo"]


@pytest.mark.spec("3.15")
async def test_every_part_of_an_answer_is_kept_with_a_line_for_text_models(scripted: Make) -> None:
    async with space(scripted()) as ts:
        result = await ts.call("s__parts")
    _, image, audio, resource, link, unknown = result.content
    assert isinstance(image, ImagePart)
    assert isinstance(audio, AudioPart)
    assert isinstance(resource, ResourcePart)
    assert isinstance(link, ResourcePart)
    assert isinstance(unknown, JsonPart)
    lines = result.text.splitlines()
    assert lines[:2] == ["a picture:", "[image image/png, 2 bytes]"]
    assert "inside" in lines
    assert "[resource file:///b.txt]" in lines


@pytest.mark.spec("3.15")
async def test_structured_content_is_the_result(scripted: Make) -> None:
    async with space(scripted()) as ts:
        assert (await ts.call("s__structured")).result == {"n": 5}


@pytest.mark.spec("3.14")
async def test_progress_becomes_events(scripted: Make) -> None:
    heard: list[tuple[float, float | None, str | None]] = []
    async with space(scripted()) as ts:
        ts.bus.subscribe(
            lambda event: heard.append((event.progress, event.total, event.message)), EventType.TOOL_CALL_PROGRESS
        )
        assert (await ts.call("s__progress")).ok
        await until(lambda: len(heard) == 3)
    assert heard == [(0, 3, "step 0"), (1, 3, "step 1"), (2, 3, "step 2")]


@pytest.mark.spec("3.14")
async def test_a_changed_list_reaches_models_without_a_restart(scripted: Make, seen: Seen) -> None:
    async with space(scripted()) as ts:
        with ts.bus.open_queue(EventType.TOOLS_CHANGED) as changes:
            assert (await ts.call("s__grow")).ok
            await asyncio.wait_for(changes.get(), 20)
        assert ts.find_tool("s__grown") is not None
    assert len(seen.starts) == 1


@pytest.mark.spec("3.14")
@pytest.mark.spec("4.5")
async def test_canceling_a_call_cancels_it_on_the_server(scripted: Make, seen: Seen) -> None:
    async with space(scripted()) as ts:
        call = asyncio.ensure_future(ts.call("s__wait", call_id="mine"))
        await seen.until("waiting")
        assert ts.cancel("mine")
        assert (await call).error_kind == "canceled"
        await seen.until("cancelled")
        assert (await ts.call("s__echo", {"text": "still here"})).ok
    assert len(seen.starts) == 1


@pytest.mark.spec("3.13")
@pytest.mark.spec("3.14")
@pytest.mark.spec("4.4")
async def test_a_call_that_times_out_is_canceled_and_a_live_server_stays(scripted: Make, seen: Seen) -> None:
    async with space(scripted(), rules=ProviderRules(overrides={"wait": ToolRules(timeout=0.5)})) as ts:
        assert (await ts.call("s__wait")).error_kind == "timeout"
        await seen.until("cancelled")
        assert (await ts.call("s__echo", {"text": "still here"})).ok
    assert len(seen.starts) == 1


@pytest.mark.spec("3.13")
async def test_a_server_that_fails_the_probe_after_a_time_out_is_restarted(
    scripted: Make, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PROBE_SECONDS", 0.2)
    provider = scripted()
    async with space(provider, rules=ProviderRules(overrides={"deaf": ToolRules(timeout=0.5)})) as ts:
        assert (await ts.call("s__deaf")).error_kind == "timeout"
        await until(lambda: len(seen.starts) == 2)
        await until(lambda: provider.status().state == "ready")
        assert (await ts.call("s__echo", {"text": "back"})).result == "back"
    assert "did not answer a probe" in (provider.status().last_error or "")
    assert seen.calls.count("deaf") == 1


@pytest.mark.spec("3.13")
async def test_a_server_killed_between_calls_is_started_again(scripted: Make, seen: Seen) -> None:
    provider = scripted()
    async with space(provider) as ts:
        assert (await ts.call("s__echo", {"text": "a"})).ok
        os.kill(seen.starts[0], signal.SIGKILL)
        await until(lambda: provider.status().restarts == 1)
        assert (await ts.call("s__echo", {"text": "b"})).result == "b"
    assert len(seen.starts) == 2


@pytest.mark.spec("3.13")
async def test_a_call_that_was_sent_is_not_sent_twice(scripted: Make, seen: Seen) -> None:
    async with space(scripted()) as ts:
        result = await ts.call("s__die")
        assert (result.error_kind, result.executed) == ("transport_error", True)
        assert "may have run" in (result.error or "")
        assert (await ts.call("s__echo", {"text": "back"})).result == "back"
    assert seen.calls == ["die", "echo"]


@pytest.mark.spec("3.13")
@pytest.mark.parametrize("kind", ["safe", "idempotent"])
async def test_a_call_that_may_run_twice_is_sent_again(scripted: Make, seen: Seen, kind: str) -> None:
    async with space(scripted()) as ts:
        assert (await ts.call(f"s__die_once_{kind}")).result == "alive again"
    assert seen.calls == [f"die_once_{kind}"] * 2


@pytest.mark.spec("3.13")
async def test_the_pauses_between_attempts_grow_to_a_minute_and_stay_there(
    scripted: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert connection.RECONNECT_SECONDS == (0, 1, 2, 5, 10, 30, 60)
    monkeypatch.setattr(connection, "RECONNECT_SECONDS", tuple(one / 1000 for one in connection.RECONNECT_SECONDS))

    def pauses() -> list[str]:
        return [line.rpartition("retrying in ")[2] for line in caplog.messages if "retrying in" in line]

    with caplog.at_level("INFO", "toolspace.mcp"):
        async with space(scripted("die-at-start")):
            await until(lambda: len(pauses()) > 8)
    assert pauses()[:9] == [f"{one / 1000:g} s" for one in (0, 1, 2, 5, 10, 30, 60, 60, 60)]


@pytest.mark.spec("3.12")
async def test_an_unused_server_is_stopped_and_the_next_call_starts_it(scripted: Make, seen: Seen) -> None:
    provider = scripted(idle_timeout=0.2)
    async with space(provider) as ts:
        await until(lambda: provider.status().state == "idle")
        await until(lambda: not _alive(seen.starts[0]))
        assert ts.find_tool("s__echo") is not None
        assert (await ts.call("s__echo", {"text": "again"})).result == "again"
    assert len(seen.starts) == 2


@pytest.mark.spec("3.12")
async def test_a_call_that_runs_keeps_its_server_from_being_idle(scripted: Make, seen: Seen) -> None:
    provider = scripted(idle_timeout=0.1)
    async with space(provider, rules=ProviderRules(rules=ToolRules(timeout=1))) as ts:
        assert (await ts.call("s__wait")).error_kind == "timeout"
    assert len(seen.starts) == 1


@pytest.mark.parametrize("word", ["garbage", "flood"])
async def test_noise_costs_neither_the_call_nor_the_connection(scripted: Make, seen: Seen, word: str) -> None:
    async with space(scripted()) as ts:
        assert (await ts.call(f"s__{word}")).result == f"after the {word}"
        assert (await ts.call("s__echo", {"text": "a"})).ok
    assert len(seen.starts) == 1


@pytest.mark.spec("4.6")
async def test_an_answer_of_5_mb_is_stored(scripted: Make) -> None:
    async with space(scripted()) as ts:
        result = await ts.call("s__big", {"bytes": 5_000_000})
    assert result.result["tool_output"]["bytes"] == 5_000_000


@pytest.mark.spec("3.12")
async def test_a_server_that_hangs_does_not_delay_the_others(
    scripted: Make, seen: Seen, tmp_path: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [scripted(name=f"good{index}") for index in range(5)]
    hanging = scripted("hang", name="hanging")
    async with space(*good, hanging) as ts:
        assert {f"good{index}__echo" for index in range(5)} <= {tool.name for tool in ts.list_tools()}
        assert hanging.status().state == "starting"
        assert "still starting" in ts.orchestrator.unavailable_providers()["hanging"]
        assert (await ts.call("good0__echo", {"text": "a"})).ok


@pytest.mark.spec("3.2")
async def test_a_server_that_does_not_start_says_why_and_is_tried_again(scripted: Make, seen: Seen) -> None:
    provider = scripted("die-at-start")
    async with space(provider) as ts:
        result = await ts.call("s__echo", {"text": "a"})
        assert (result.error_kind, result.executed) == ("transport_error", False)
        assert "cannot find the database" in (result.error or "")
        await until(lambda: len(seen.starts) > 1)
    assert provider.status().state == "stopped"


@pytest.mark.spec("3.2")
async def test_a_toolspace_does_not_start_without_a_required_server(scripted: Make) -> None:
    with pytest.raises(ProviderError, match="cannot find the database"):
        async with space(scripted("die-at-start"), rules=ProviderRules(required=True)):
            pass


@pytest.mark.spec("3.10")
@pytest.mark.parametrize("word", ["refuse-discover", "plain"])
async def test_a_server_of_the_older_era_is_greeted_in_its_way(scripted: Make, word: str) -> None:
    provider = scripted(word)
    async with space(provider) as ts:
        status = provider.status()
        assert (status.era, status.protocol_version) == ("handshake", "2025-11-25")
        assert status.server == "scripted 3"
        assert (await ts.call("s__echo", {"text": "a"})).ok


async def test_restarting_by_hand_gives_a_new_process(scripted: Make, seen: Seen) -> None:
    provider = scripted()
    async with space(provider) as ts:
        before = provider.status().pid
        status = await ts.restart_server("s")
        assert status.state == "ready"
        assert status.pid != before
        assert status.restarts == 1
        assert (await ts.call("s__echo", {"text": "a"})).ok
    assert len(seen.starts) == 2


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
