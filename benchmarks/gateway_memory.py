"""Measure: the memory of a gateway for each call that waits, and for each reader that is idle."""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import tracemalloc
from pathlib import Path

import uvloop

from benchmarks.connections import Connection, Target
from benchmarks.gateway_process import Callers, StreamSubscriber, gateway_serving, member, secret, write_config
from benchmarks.harness import Report, run_python
from benchmarks.memory import resident
from benchmarks.processes import Server

loop_factory = uvloop.new_event_loop
CALLS = 5_000
_AT_ONCE = 100
REQUESTS = 2_000
READERS = 1_000


async def measure() -> Report:
    report = Report("Memory of a gateway for each call that waits, and for each reader of a space")
    resident_bytes = int(run_python("-m", "benchmarks.gateway_memory", "resident")) / CALLS
    traced_bytes = int(run_python("-m", "benchmarks.gateway_memory", "traced")) / CALLS
    report.figure(f"a call that waits, of {CALLS:,}", resident_bytes / 1024, "KiB", must=8.0)
    with gateway_serving() as server:
        report.figure(f"an idle reader, of {READERS:,} members", await _readers(server) / 1024, "KiB", must=64.0)
    with gateway_serving() as server:
        report.figure(f"a call that waits, of {REQUESTS:,} over HTTP", await _requests(server) / 1024, "KiB")
    report.figure("a call that waits: allocated by Python (tracemalloc)", traced_bytes / 1024, "KiB")
    report.notes.append("over HTTP the connection, the request and its task are in it; all are resident otherwise")
    return report


async def _readers(server: Server) -> float:
    callers = await Callers.open(server.url, 1)
    space = await callers.ask("/api/spaces", {"name": "Room"})
    path = f"/api/spaces/{space['id']}/stream"
    headers: list[dict[str, str]] = []
    for number in range(READERS + 10):
        entity = await callers.ask("/api/entities", {"type": "human", "name": f"Reader {number}"})
        await callers.ask(f"/api/spaces/{space['id']}/members", {"entityId": entity["id"]})
        headers.append(member(entity["id"]))
    # The first load what is loaded on first use.
    readers = [
        await StreamSubscriber.open(server.url, path, subscriber_headers, _ignore)
        for subscriber_headers in headers[:10]
    ]
    before = resident(pid=server.pid)
    readers += [
        await StreamSubscriber.open(server.url, path, subscriber_headers, _ignore)
        for subscriber_headers in headers[10:]
    ]
    await _wait_until_open(callers, "readers", READERS + 10)
    await asyncio.sleep(4)  # They are looked after, and asked for their rights, in the meantime.
    extra = resident(pid=server.pid) - before
    for reader in readers:
        reader.close()
    callers.close()
    return extra / READERS


async def _requests(server: Server) -> float:
    callers = await Callers.open(server.url, 1)
    agent = await callers.ask("/api/entities", {"type": "agent", "name": "Ada"})
    run = await callers.ask("/api/runs", {"agentEntityId": agent["id"]})
    worker = await StreamSubscriber.open(server.url, "/api/tools/stream?tools=lookup&concurrency=1", secret(), _ignore)
    request = callers.request(f"/api/runs/{run['id']}/calls", {"name": "lookup", "args": {"order": 17}})
    connections: list[Connection] = []

    async def wait(count: int) -> None:
        for _ in range(count):
            connection = await Connection.open(Target.of(server.url), _on_unexpected_answer)
            connection.send(request)
            connections.append(connection)
        await _wait_until_open(callers, "calls", len(connections))

    await wait(10)
    before = resident(pid=server.pid)
    await wait(REQUESTS)
    extra = resident(pid=server.pid) - before
    for connection in connections:
        connection.close()
    worker.close()
    callers.close()
    return extra / REQUESTS


async def _wait_until_open(callers: Callers, counter: str, count: int) -> None:
    async with asyncio.timeout(60):
        while (await callers.ask("/bench/open"))[counter] < count:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.05)


def _ignore(data: bytes) -> None: ...


def _on_unexpected_answer(_: Connection, head: bytes, rest: bytes) -> None:
    raise RuntimeError(f"a call should wait, and was answered: {head[:40]!r} {rest[:500]!r}")


async def main(mode: str) -> None:
    """Runs in a fresh interpreter: prints how many bytes the waiting calls added to the process."""
    from toolspace.core.tool_context import ToolContext
    from toolspace.server.gateway import Gateway
    from toolspace.spaces.call_context import GatewayCallHost

    with tempfile.TemporaryDirectory() as folder:
        async with (
            Gateway.open(write_config(Path(folder))) as gateway,
            gateway.workers.connect("worker", ["lookup"], 0),
        ):
            tasks: list[asyncio.Task[object]] = []

            async def wait(count: int) -> None:
                for number in range(count):
                    # They do not all begin in one moment: what that takes is soon free again.
                    if number % _AT_ONCE == 0:
                        await all_wait()
                    context = ToolContext(host=GatewayCallHost(gateway.pending_calls))
                    tasks.append(
                        asyncio.create_task(gateway.toolspace.call("lookup", {"order": number}, context=context))
                    )
                await all_wait()

            async def all_wait() -> None:
                while gateway.pending_calls.waiting_count < len(tasks):
                    if ended_task := next((task for task in tasks if task.done()), None):
                        raise RuntimeError(f"a call should wait, and gave {ended_task.result()!r}")
                    await asyncio.sleep(0.01)

            await wait(10)
            gc.collect()
            before = resident()
            if mode == "traced":
                tracemalloc.start()
            await wait(CALLS)
            gc.collect()
            print(tracemalloc.get_traced_memory()[0] if mode == "traced" else resident() - before)
            tracemalloc.stop()
            await gateway.drain(1.0)
            await asyncio.gather(*tasks)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
