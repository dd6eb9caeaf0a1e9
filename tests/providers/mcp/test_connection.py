"""Connections to servers that are lost, cancelled, restarted and closed during calls."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.providers.mcp.conftest import SERVERS, ServerLog, open_toolspace, until
from tests.providers.mcp.transports.test_stateless_http import web_service
from toolspace import Settings, Toolspace
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ProviderError
from toolspace.orchestrator.effective_settings import ProviderRules, ToolRules
from toolspace.orchestrator.provider_startup import StartupWait
from toolspace.providers.mcp import connection
from toolspace.providers.mcp.open_connection import ConnectionOptions
from toolspace.providers.mcp.provider import McpProvider
from toolspace.providers.mcp.server_spec import ElicitationRequest, ElicitationResult, McpCallbacks, ServerSpec
from toolspace.server.metrics import format_prometheus, list_server_metrics

CreateProvider = Callable[..., McpProvider]


@pytest.mark.spec("3.13")
async def test_calls_do_not_start_a_failing_server_without_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An HTTP server that no longer listens, so an attempt fails at once."""
    async with web_service() as service:
        provider = McpProvider("w", ServerSpec(url=service.url))
        await provider.warmup()
    loop, context = asyncio.get_running_loop(), ToolContext()
    start_time = loop.time()

    async def keep_calling() -> None:
        while loop.time() < start_time + 2.5:
            result = await provider.execute("t", {}, context)
            assert (result.error_kind, result.executed) == ("transport_error", False)
            await asyncio.sleep(0.001)

    with caplog.at_level("INFO", "toolspace.mcp"):
        await asyncio.gather(*(keep_calling() for _ in range(5)))
    await provider.aclose()
    attempts = [record for record in caplog.records if "retrying in" in record.getMessage()]
    assert 2 <= len(attempts) <= 5


@pytest.mark.spec("3.13")
async def test_server_that_dies_when_ready_is_not_started_without_pause(
    create_scripted: CreateProvider, server_log: ServerLog
) -> None:
    provider = create_scripted()
    async with open_toolspace(provider) as ts:
        start_time = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < start_time + 3:
            await ts.call("s__die")
    assert len(server_log.starts) <= 6


@pytest.mark.spec("3.13")
async def test_reason_of_a_death_during_listing_is_reported(create_scripted: CreateProvider) -> None:
    async with open_toolspace(create_scripted("die-at-list")) as ts:
        assert "the disk is full" in ts.orchestrator.unavailable_providers()["s"]


def test_unclosed_provider_works_in_the_next_event_loop(create_scripted: CreateProvider, server_log: ServerLog) -> None:
    provider = create_scripted()

    async def use() -> Any:
        await asyncio.wait_for(provider.warmup(), 20)
        result = await asyncio.wait_for(provider.execute("echo", {"text": "a"}, ToolContext()), 20)
        return result.result

    assert asyncio.run(use()) == "a"
    assert asyncio.run(use()) == "a"
    for pid in server_log.starts:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_call_in_the_next_event_loop_starts_the_server_again(create_scripted: CreateProvider) -> None:
    provider = create_scripted()

    async def call() -> Any:
        return await asyncio.wait_for(provider.execute("echo", {"text": "a"}, ToolContext()), 20)

    asyncio.run(provider.warmup())
    assert asyncio.run(call()).result == "a"
    asyncio.run(provider.aclose())
    assert asyncio.run(call()).error == "the server is closed"
    assert provider.status().state == "stopped"


async def test_server_in_use_by_another_event_loop_is_refused(create_scripted: CreateProvider) -> None:
    provider = create_scripted()
    async with open_toolspace(provider):
        call = asyncio.to_thread(lambda: asyncio.run(provider.warmup()))
        with pytest.raises(ProviderError, match="in use in another event loop"):
            await call


@pytest.mark.spec("3.13")
async def test_server_that_stops_reading_is_restarted(
    create_scripted: CreateProvider, server_log: ServerLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PROBE_SECONDS", 0.2)
    provider = create_scripted("stop-reading")
    async with open_toolspace(provider, rules=ProviderRules(rules=ToolRules(timeout=0.5))) as ts:
        assert (await ts.call("s__echo", {"text": "x" * 1_000_000})).error_kind == "timeout"
        await until(lambda: len(server_log.starts) == 2)


async def test_several_calls_may_share_a_context(create_scripted: CreateProvider) -> None:
    provider, context = create_scripted(), ToolContext()
    async with open_toolspace(provider):
        results = await asyncio.gather(*(provider.execute("echo", {"text": "a"}, context) for _ in range(5)))
    assert [result.result for result in results] == ["a"] * 5


@pytest.mark.parametrize(
    ("code", "text"),
    [(-32000, "the quota is used up"), (-32600, "no browser session"), (-32022, "version?"), (-32603, "oh")],
    ids=["any-error", "session", "version", "internal"],
)
async def test_tool_error_does_not_restart_the_server(
    create_scripted: CreateProvider, server_log: ServerLog, code: int, text: str
) -> None:
    async with open_toolspace(create_scripted()) as ts:
        result = await ts.call("s__refuse", {"code": code, "text": text})
        assert (result.error_kind, result.error, result.extras["code"]) == ("execution_error", text, code)
        assert (await ts.call("s__echo", {"text": "a"})).ok
    assert len(server_log.starts) == 1


def contexts_alive() -> int:
    gc.collect()
    return sum(isinstance(item, ToolContext) for item in gc.get_objects())


async def test_cancellation_at_any_moment_leaks_nothing(create_scripted: CreateProvider, server_log: ServerLog) -> None:
    provider = create_scripted()
    dice = random.Random(7)
    async with open_toolspace(provider) as ts:
        await ts.call("s__echo", {"text": "a"})
        contexts_before = contexts_alive()
        for turn in range(300):
            call = asyncio.ensure_future(ts.call("s__echo", {"text": "a"}))
            for _ in range(dice.randrange(14)):
                await asyncio.sleep(0)
            if turn % 3 == 0:
                await asyncio.sleep(dice.random() / 500)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        assert provider.status().calls_in_flight == 0
        assert (await ts.call("s__echo", {"text": "still here"})).result == "still here"
        del call
        # A few stay referenced by timers that copied the context of a call.
        assert contexts_alive() < contexts_before + 10
    assert len(server_log.starts) == 1


async def test_cancellation_while_the_server_dies_leaks_nothing(
    create_scripted: CreateProvider, server_log: ServerLog
) -> None:
    provider = create_scripted()
    dice = random.Random(8)
    async with open_toolspace(provider) as ts:
        for turn in range(40):
            calls = [asyncio.ensure_future(ts.call("s__echo", {"text": "a"})) for _ in range(4)]
            if (pid := provider.status().pid) is not None and turn % 13 == 0:
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(dice.random() / 50)
            for call in calls[:2]:
                call.cancel()
            async with asyncio.timeout(20):
                await asyncio.gather(*calls, return_exceptions=True)
        assert provider.status().calls_in_flight == 0
        await until(lambda: provider.status().state == "ready")
        assert (await ts.call("s__echo", {"text": "still here"})).result == "still here"


@pytest.mark.spec("3.13")
async def test_call_right_after_a_kill_succeeds_or_may_have_run(
    create_scripted: CreateProvider, server_log: ServerLog
) -> None:
    provider = create_scripted()
    async with open_toolspace(provider) as ts:
        for _ in range(3):
            await until(lambda: provider.status().state == "ready")
            os.kill(provider.status().pid or 0, signal.SIGKILL)
            result = await ts.call("s__structured")
            assert result.ok or (result.error_kind == "transport_error" and result.executed), result


async def test_all_calls_end_when_their_server_dies(create_scripted: CreateProvider, server_log: ServerLog) -> None:
    provider = create_scripted()
    async with open_toolspace(provider) as ts:
        calls = [asyncio.ensure_future(ts.call("s__wait")) for _ in range(100)]
        await until(lambda: server_log.lines.count("waiting") == 100)
        os.kill(server_log.starts[0], signal.SIGKILL)
        async with asyncio.timeout(20):
            results = await asyncio.gather(*calls)
        assert {result.error_kind for result in results} == {"transport_error"}
        assert (await ts.call("s__echo", {"text": "back"})).result == "back"
    assert server_log.calls.count("wait") == 100
    assert len(server_log.starts) == 2


@pytest.mark.parametrize("moment", ["call", "start", "reconnect"])
async def test_close_is_immediate_and_leaves_no_process(
    create_scripted: CreateProvider, server_log: ServerLog, moment: str
) -> None:
    provider = create_scripted("hang" if moment == "start" else "plain")
    ts = Toolspace()
    ts.orchestrator.register(provider)
    start_task = asyncio.ensure_future(ts.__aenter__())
    if moment == "start":
        await until(lambda: server_log.starts)
    else:
        await start_task
    calls: list[asyncio.Future[Any]] = []
    if moment == "call":
        calls = [asyncio.ensure_future(ts.call("s__wait")) for _ in range(3)]
        await until(lambda: server_log.lines.count("waiting") == 3)
    if moment == "reconnect":
        os.kill(server_log.starts[0], signal.SIGKILL)
        await until(lambda: provider.status().state == "reconnecting")
    async with asyncio.timeout(10):
        await ts.aclose()
    await asyncio.gather(start_task, return_exceptions=True)
    assert [call.result().error_kind for call in calls] == ["canceled"] * len(calls)
    assert provider.status().state == "stopped"
    await until(lambda: not any(_alive(pid) for pid in server_log.starts))


async def test_restart_ends_running_calls(create_scripted: CreateProvider, server_log: ServerLog) -> None:
    provider = create_scripted()
    async with open_toolspace(provider) as ts:
        calls = [asyncio.ensure_future(ts.call("s__wait")) for _ in range(3)]
        await until(lambda: server_log.lines.count("waiting") == 3)
        async with asyncio.timeout(20):
            await ts.restart_server("s")
            results = await asyncio.gather(*calls)
        assert {result.error_kind for result in results} == {"transport_error"}
        assert (await ts.call("s__echo", {"text": "a"})).ok
        assert provider.status().calls_in_flight == 0


async def test_hanging_start_can_be_restarted(create_scripted: CreateProvider, server_log: ServerLog) -> None:
    provider = create_scripted("hang-once")
    ts = Toolspace(providers=[provider])
    ts.startup_wait = StartupWait(seconds=0.1)
    async with ts:
        await until(lambda: server_log.starts)
        async with asyncio.timeout(20):
            assert (await ts.restart_server("s")).state == "ready"
        assert (await ts.call("s__echo", {"text": "a"})).ok
    assert len(server_log.starts) == 2


@pytest.mark.spec("3.12")
async def test_calls_racing_an_idle_stop_are_all_answered(
    create_scripted: CreateProvider, server_log: ServerLog
) -> None:
    provider = create_scripted(idle_timeout=0.05)
    async with open_toolspace(provider) as ts:
        for turn in range(12):
            await asyncio.sleep(0.04 + turn * 0.002)
            assert (await ts.call("s__echo", {"text": "a"})).result == "a"


@pytest.mark.spec("3.14")
async def test_endless_change_notifications_do_not_cause_endless_listing(
    create_scripted: CreateProvider, server_log: ServerLog
) -> None:
    async with open_toolspace(create_scripted("changing")) as ts:
        before = server_log.lines.count("listed")
        await asyncio.sleep(1)
        assert (await ts.call("s__echo", {"text": "a"})).ok
        assert server_log.lines.count("listed") - before < 100


@pytest.mark.spec("3.14")
async def test_endless_tool_list_is_cut(create_scripted: CreateProvider) -> None:
    async with open_toolspace(create_scripted("endless-list")) as ts:
        assert (await ts.call("s__echo", {"text": "a"})).ok


@pytest.mark.spec("3.10")
@pytest.mark.parametrize("word", ["garbage-discover", "silent-discover"])
async def test_server_that_breaks_at_discovery_gets_the_handshake(
    create_scripted: CreateProvider, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp.client.session.DISCOVER_TIMEOUT_SECONDS", 0.3)
    provider = create_scripted(word)
    async with open_toolspace(provider) as ts:
        assert provider.status().era == "handshake"
        assert (await ts.call("s__echo", {"text": "a"})).ok


class Asked:
    def __init__(self) -> None:
        self.questions: list[tuple[str, str | None]] = []

    async def __call__(self, question: ElicitationRequest, context: ToolContext | None) -> ElicitationResult:
        self.questions.append((question.message, context.user_id if context is not None else None))
        return ElicitationResult(action="accept", content={})


@pytest.mark.spec("3.16")
async def test_ambiguous_question_is_asked_without_a_context(
    create_scripted: CreateProvider, server_log: ServerLog
) -> None:
    elicit = Asked()
    provider = create_scripted(options=ConnectionOptions(callbacks=McpCallbacks(elicit=elicit)))
    async with open_toolspace(provider) as ts:
        await ts.call("s__ask", {"text": "alone"}, context=ToolContext(user_id="ann"))
        wait_call = asyncio.ensure_future(ts.call("s__wait", context=ToolContext(user_id="bob"), call_id="b"))
        await server_log.until("waiting")
        await ts.call("s__ask", {"text": "two"}, context=ToolContext(user_id="ann"))
        ts.cancel("b")
        await wait_call
        # Bob's call is over, but the server may not know that yet and still ask for it.
        await ts.call("s__ask", {"text": "late"}, context=ToolContext(user_id="ann"))
    assert elicit.questions == [("alone", "ann"), ("two", None), ("late", None)]


def config(folder: Path, server_log: ServerLog, *words: str, **more: Any) -> Path:
    entry = {"command": sys.executable, "args": [str(SERVERS / "scripted.py"), str(server_log.path), *words], **more}
    file = folder / "toolspace.json"
    file.write_text(json.dumps({"mcpServers": {"s": entry}}))
    return file


@pytest.mark.spec("5.4")
async def test_reload_with_changed_rules_keeps_the_process(tmp_path: Path, server_log: ServerLog) -> None:
    file = config(tmp_path, server_log, requestTimeoutMs=20_000)
    async with Toolspace.open(file, environ={}) as ts:
        config(tmp_path, server_log, requestTimeoutMs=300, toolsDenied=["fail"])
        await ts.reload()
        assert (await ts.call("s__wait")).error_kind == "timeout"
        assert (await ts.call("s__fail")).error_kind != "execution_error"
    assert len(server_log.starts) == 1


async def test_reload_replaces_a_changed_server_and_its_calls_finish(tmp_path: Path, server_log: ServerLog) -> None:
    file = config(tmp_path, server_log)
    async with Toolspace.open(file, environ={}) as ts:
        call = asyncio.ensure_future(ts.call("s__wait", call_id="old"))
        await server_log.until("waiting")
        config(tmp_path, server_log, "changed")
        await ts.reload()
        assert (await ts.call("s__echo", {"text": "new"})).result == "new"
        assert not call.done()
        assert _alive(server_log.starts[0])
        ts.cancel("old")
        assert (await call).error_kind == "canceled"
        await until(lambda: not _alive(server_log.starts[0]))
        file.write_text(json.dumps({"mcpServers": {}}))
        await ts.reload()
        assert ts.find_tool("s__echo") is None
        await until(lambda: not _alive(server_log.starts[1]))
        assert ts.list_servers() == []
    assert len(server_log.starts) == 2


async def test_unopened_toolspace_explains_how_to_start_servers(tmp_path: Path, server_log: ServerLog) -> None:
    ts = Toolspace.open(config(tmp_path, server_log), environ={})
    result = await ts.call("s__echo", {"text": "a"})
    assert not result.ok
    assert "async with" in (result.error or "")
    await ts.aclose()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.spec("22.4")
async def test_the_circuit_breaker_of_a_server_that_was_killed_closes_when_it_is_back(
    create_scripted: CreateProvider, server_log: ServerLog
) -> None:
    provider = create_scripted()
    async with open_toolspace(
        provider, settings=Settings(circuit_breaker_failures=2, circuit_breaker_delay=3600)
    ) as ts:
        [status] = ts.list_servers()
        assert (status.circuit, status.next_probe_at) == ("closed", None)
        results = [await ts.call("s__die") for _ in range(2)]
        assert {result.error_kind for result in results} == {"transport_error"}
        await until(lambda: provider.status().state == "ready")
        assert (await ts.call("s__echo", {"text": "back"})).result == "back"
        assert ts.list_servers()[0].circuit == "closed"


@pytest.mark.spec("22.4")
async def test_the_status_of_a_server_and_the_metrics_show_an_open_circuit_breaker() -> None:
    async with web_service() as service:
        provider = McpProvider("w", ServerSpec(url=service.url))
        await provider.warmup()
    async with open_toolspace(provider, settings=Settings(circuit_breaker_failures=2)) as ts:
        for _ in range(3):
            result = await ts.call("w__t")
        assert (result.error_kind, result.executed) == ("transport_error", False)
        assert "circuit breaker" in (result.error or "")
        [status] = ts.list_servers()
        assert status.circuit == "open"
        assert status.next_probe_at is not None
        metrics = format_prometheus(list_server_metrics(ts)).decode()
        assert 'toolspace_circuit_breakers_open{provider="w"} 1' in metrics
