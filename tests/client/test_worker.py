"""Workers against a real gateway: each call is executed once, and its result is submitted."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.client.unreliable_proxy import open_unreliable_proxy
from tests.server.gateway_api import SECRET
from toolspace.client.client import CallResult, ToolspaceClient
from toolspace.client.errors import BadRequest, Unauthorized
from toolspace.client.worker import OfferedCall, ToolWorker
from toolspace.core.stored_records import CallRecord
from toolspace.errors import ToolspaceError
from toolspace.server.gateway import Gateway
from toolspace.server.uvicorn_server import bind_socket, serve_gateway, socket_url

PROGRAMS = Path(__file__).parent / "programs"


@asynccontextmanager
async def running_program(program: str, url: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAMS / program, url, SECRET, stdin=PIPE, stdout=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def read_line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def list_served_tools(client: ToolspaceClient) -> list[str]:
    return [tool for worker in (await client.request("GET", "/api/workers"))["items"] for tool in worker["tools"]]


async def wait_until_served(client: ToolspaceClient, tool: str = "move") -> None:
    """Asks until a worker serves a tool."""
    while tool not in await list_served_tools(client):
        pass


async def wait_for_result(client: ToolspaceClient, pending: CallResult) -> CallRecord:
    """Asks until a call has its result."""
    assert pending.pending_tool_call_id
    while (call := await client.calls.get(pending.pending_tool_call_id)).status != "resolved":
        pass
    return call


@pytest.mark.spec("6.7")
@pytest.mark.spec("13.1")
async def test_handlers_get_the_arguments_of_calls(client: ToolspaceClient, url: str) -> None:
    worker = ToolWorker(url, secret_key=SECRET)
    main = threading.current_thread()

    @worker.tool("move")
    def move(to: str, steps: int = 1) -> dict[str, object]:
        return {"to": to, "steps": steps, "in a thread": threading.current_thread() is not main}

    @worker.tool
    async def later(call: OfferedCall, **rest: object) -> object:
        return {"tool": call.tool_name, "id": call.call_id, "rest": rest}

    async with worker:
        inline = await client.tools.call("move", {"to": "left"})
        assert inline.result == {"to": "left", "steps": 1, "in a thread": True}
        call = await wait_for_result(client, await client.tools.call("later", {"a": 1}))
        assert call.result == {"tool": "later", "id": call.call_id, "rest": {"a": 1}}


@pytest.mark.spec("13.1")
async def test_an_exception_becomes_the_error_of_the_call(client: ToolspaceClient, url: str) -> None:
    worker = ToolWorker(url, secret_key=SECRET)

    @worker.tool
    async def move(to: str) -> None:
        raise ValueError(f"there is no {to}")

    async with worker:
        result = await client.tools.call("move", {"to": "up"})
        assert (result.ok, result.error) == (False, "there is no up")
        wrong = await client.tools.call("move", {"where": "up"})
        assert "where" in (wrong.error or "")


@pytest.mark.spec("6.7")
async def test_two_workers_share_the_calls_and_each_is_executed_once(client: ToolspaceClient, url: str) -> None:
    executed_calls: list[tuple[str, int]] = []

    def make(name: str) -> ToolWorker:
        worker = ToolWorker(url, secret_key=SECRET, concurrency=2)

        @worker.tool
        async def move(number: int) -> int:
            executed_calls.append((name, number))
            await asyncio.sleep(0)
            return number

        return worker

    async with make("a"), make("b"):
        results = await asyncio.gather(*(client.tools.call("move", {"number": number}) for number in range(60)))
    assert [result.result for result in results] == list(range(60))
    assert sorted(number for _, number in executed_calls) == list(range(60))
    assert min(Counter(name for name, _ in executed_calls).values()) >= 10


@pytest.mark.spec("6.7")
async def test_a_call_of_a_killed_worker_is_executed_once_by_another(client: ToolspaceClient, url: str) -> None:
    executed: list[str] = []
    other_worker = ToolWorker(url, secret_key=SECRET)

    @other_worker.tool
    async def move(to: str) -> str:
        executed.append(to)
        return f"{to} by another"

    async with running_program("hanging_worker.py", url) as process:
        await wait_until_served(client)
        call_task = asyncio.ensure_future(client.tools.call("move", {"to": "left"}))
        assert await read_line(process) == "given left"
        process.kill()
        async with other_worker:
            assert (await call_task).result == "left by another"
    assert executed == ["left"]


@pytest.mark.spec("13.1")
async def test_ctrl_c_finishes_running_calls_and_sends_their_results(client: ToolspaceClient, url: str) -> None:
    async with running_program("busy_worker.py", url) as process:
        await wait_until_served(client)
        call_task = asyncio.ensure_future(client.tools.call("move", {"to": "left"}))
        assert await read_line(process) == "given left"
        process.send_signal(signal.SIGINT)
        while await list_served_tools(client):
            pass
        refused_call = await client.tools.call("move", {"to": "right"})
        assert "no worker serves" in (refused_call.error or ""), "it takes no more"
        assert process.stdin is not None
        process.stdin.write(b"done\n")
        assert (await call_task).result == "left: done"
        assert await read_line(process) == "ended"
        assert await process.wait() == 0


@pytest.mark.spec("13.1")
async def test_a_worker_continues_after_a_restart_of_the_gateway(config: Path) -> None:
    server_socket = bind_socket("127.0.0.1", 0)
    url, port = socket_url(server_socket), server_socket.getsockname()[1]
    worker = ToolWorker(url, secret_key=SECRET)
    started, may_end = asyncio.Event(), asyncio.Event()
    executed: list[str] = []

    @worker.tool
    async def later(to: str) -> str:
        executed.append(to)
        started.set()
        await may_end.wait()
        return f"went {to}"

    async with asyncio.timeout(30), ToolspaceClient(url, secret_key=SECRET) as client:
        async with Gateway.open(config) as gateway, serve_gateway(gateway, server_socket):
            serve = asyncio.ensure_future(worker.run())
            await worker.ready.wait()
            first = await client.tools.call("later", {"to": "left"})
            await started.wait()
        may_end.set()  # Its result has to wait until there is someone to take it.
        async with Gateway.open(config) as gateway, serve_gateway(gateway, bind_socket("127.0.0.1", port)):
            assert (await wait_for_result(client, first)).result == "went left"
            await wait_for_result(client, await client.tools.call("later", {"to": "right"}))
            await worker.stop()
            await serve
    assert executed == ["left", "right"]


@pytest.mark.spec("6.7")
async def test_each_call_is_executed_once_over_lost_connections(client: ToolspaceClient, url: str) -> None:
    chance = random.Random(7)
    executed: list[int] = []
    async with open_unreliable_proxy(url, lambda: chance.randint(1_000, 5_000)) as proxy:
        worker = ToolWorker(proxy.url, secret_key=SECRET, concurrency=4)

        @worker.tool
        async def later(number: int) -> int:
            executed.append(number)
            return number

        async with worker:
            calls = [await client.tools.call("later", {"number": number}) for number in range(40)]
            assert [(await wait_for_result(client, call)).result for call in calls] == list(range(40))
        assert proxy.dropped_count > 2
    assert sorted(executed) == list(range(40))


async def test_a_cancelled_call_cancels_its_handler(client: ToolspaceClient, url: str) -> None:
    worker = ToolWorker(url, secret_key=SECRET)
    started, canceled = asyncio.Event(), asyncio.Event()

    @worker.tool
    async def later() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            canceled.set()
            raise

    async with worker:
        call = await client.tools.call("later")
        assert call.pending_tool_call_id
        await started.wait()
        await client.calls.cancel(call.pending_tool_call_id)
        await canceled.wait()


async def test_a_result_that_is_too_large_becomes_an_error(client: ToolspaceClient, url: str) -> None:
    worker = ToolWorker(url, secret_key=SECRET)

    @worker.tool
    async def move() -> str:
        return "x" * (5 * 1024 * 1024)

    async with worker:
        result = await client.tools.call("move")
    assert not result.ok
    assert "too large" in (result.error or "")


async def test_a_call_that_someone_else_answered_is_abandoned(client: ToolspaceClient, url: str) -> None:
    worker = ToolWorker(url, secret_key=SECRET)
    started, has_ended = asyncio.Event(), asyncio.Event()

    @worker.tool
    async def later() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    async with worker:
        call = await client.tools.call("later")
        assert call.pending_tool_call_id
        await started.wait()
        await client.tools.submit_call_result(call.pending_tool_call_id, "by hand")
        await has_ended.wait()


async def test_a_refused_worker_raises_the_reason(url: str) -> None:
    stranger = ToolWorker(url, secret_key="sk_wrong")
    stranger.tool("move")(lambda: None)
    with pytest.raises(Unauthorized):
        await stranger.run()
    wrong = ToolWorker(url, secret_key=SECRET)
    wrong.tool("hello")(lambda: None)
    with pytest.raises(BadRequest, match='"hello" is not for workers'):
        async with wrong:
            pass


async def test_a_second_worker_with_the_same_id_ends_the_first(url: str) -> None:
    first = ToolWorker(url, secret_key=SECRET, worker_id="wrk_same")
    first.tool("move")(lambda: None)
    second = ToolWorker(url, secret_key=SECRET, worker_id="wrk_same")
    second.tool("move")(lambda: None)
    run_task = asyncio.ensure_future(first.run())
    await first.ready.wait()
    async with second:
        with pytest.raises(ToolspaceError, match="another worker has connected"):
            await run_task


async def test_a_worker_of_an_unknown_tool_is_warned(
    client: ToolspaceClient, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = ToolWorker(url, secret_key=SECRET)
    worker.tool("fly")(lambda: None)
    async with worker:
        while 'unknown tools: "fly"' not in caplog.text:
            await wait_until_served(client, "fly")


async def test_wrong_use_of_the_worker_raises_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ToolWorker(url, secret_key=SECRET, concurrency=0)
    worker = ToolWorker(url, secret_key=SECRET)
    with pytest.raises(ValueError, match="has no tools"):
        await worker.run()
    worker.tool("move")(lambda: None)
    with pytest.raises(ValueError, match="handler already"):
        worker.tool("move")(lambda: None)
