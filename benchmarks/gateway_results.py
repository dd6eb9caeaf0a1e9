"""Measure: submitted results. How long until the waiting caller has one, and how many per second."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from time import perf_counter

import uvloop

from benchmarks.gateway_process import Callers, StreamSubscriber, gateway_serving, secret
from benchmarks.harness import Report, Timings, round_count
from benchmarks.processes import Server

loop_factory = uvloop.new_event_loop
CALLERS = 32
NOTHING = "an empty POST"
INLINE = "a result, until the caller who waits has it"
RESULTS = "results of calls that are pending"


async def measure() -> Report:
    report = Report("Results of calls that others execute, kept by SQLite, on the disk before they are answered")
    with gateway_serving() as server:
        one_by_one = await _one_by_one(server)
        at_once, work = await _at_once(server)
    latency = one_by_one.ratio_of_rounds(INLINE, NOTHING)
    report.ratio("a result until its caller has it, against an empty POST", latency, must=3.0, aim=2.0)
    rate = at_once.ratio(NOTHING, RESULTS)
    report.ratio(
        f"results per second, {CALLERS} callers, against empty POSTs", rate, must=0.4, aim=0.6, more_is_better=True
    )
    report.times(one_by_one, (NOTHING, INLINE))
    for name in (NOTHING, RESULTS):
        report.figure(f"{name}, {CALLERS} at once", 1 / at_once.best(name), "/s")
        report.figure("      work in the server's process for each", work[name] * 1e6, "µs")
    return report


async def _one_by_one(server: Server) -> Timings:
    """One request at a time. The call is already waiting when the clock starts; each figure is a median."""
    caller, submitter = await Callers.open(server.url, 1), await Callers.open(server.url, 1)
    run_id = await _open_run(submitter)
    offers = _Offers()
    worker = await StreamSubscriber.open(server.url, "/api/tools/stream?tools=lookup", secret(), offers.on_data)
    empty_request = submitter.request("/bench/nothing")
    times: dict[str, list[float]] = {NOTHING: [], INLINE: []}
    numbers = itertools.count()
    try:
        for turn in range(round_count(15) + 1):
            took: dict[str, list[float]] = {NOTHING: [], INLINE: []}
            for _ in range(40):
                started_at = perf_counter()
                await submitter.send([empty_request])
                took[NOTHING].append(perf_counter() - started_at)

                call_id = f"call_{next(numbers)}"
                body = {"name": "lookup", "args": {"order": 17}, "callId": call_id}
                pending_response = asyncio.ensure_future(
                    caller.send([caller.request(f"/api/runs/{run_id}/calls", body)])
                )
                await offers.of(call_id)
                result = submitter.request(f"/api/runs/{run_id}/tool-results", {"callId": call_id, "result": 4711})
                started_at = perf_counter()
                submission = asyncio.ensure_future(submitter.send([result]))
                (answer,) = await pending_response
                took[INLINE].append(perf_counter() - started_at)
                if json.loads(answer)["result"] != 4711:
                    raise RuntimeError(f"this is not the result that was submission: {answer!r}")
                await submission
            if turn:  # The first one is for warming up.
                for name, each in took.items():
                    times[name].append(statistics.median(each))
    finally:
        worker.close()
        caller.close()
        submitter.close()
    return Timings(times)


async def _at_once(server: Server) -> tuple[Timings, dict[str, float]]:
    """The pending calls are created before the clock starts, the same number for each round."""
    count = 40 * CALLERS
    callers = await Callers.open(server.url, CALLERS)
    run_ids = [await _open_run(callers) for _ in range(CALLERS)]
    times: dict[str, list[float]] = {NOTHING: [], RESULTS: []}
    work: dict[str, list[float]] = {NOTHING: [], RESULTS: []}
    try:
        for turn in range(round_count(15) + 1):
            responses = await callers.send(
                [
                    callers.request(f"/api/runs/{run_id}/calls", {"name": "later", "args": {"order": number}})
                    for number, run_id in zip(range(count), itertools.cycle(run_ids))
                ]
            )
            results = [
                callers.request(
                    f"/api/runs/{run_id}/tool-results", {"callId": json.loads(call)["callId"], "result": {"total": 17}}
                )
                for call, run_id in zip(responses, itertools.cycle(run_ids))
            ]
            batches = {RESULTS: results, NOTHING: [callers.request("/bench/nothing")] * (2 * count)}
            for name in (RESULTS, NOTHING) if turn % 2 else (NOTHING, RESULTS):
                requests = batches[name]
                cpu_before, started_at = server.cpu(), perf_counter()
                await callers.send(requests)
                if turn:
                    times[name].append((perf_counter() - started_at) / len(requests))
                    work[name].append((server.cpu() - cpu_before) / len(requests))
    finally:
        callers.close()
    return Timings(times), {name: statistics.median(each) for name, each in work.items()}


async def _open_run(callers: Callers) -> str:
    agent = await callers.ask("/api/entities", {"type": "agent", "name": "Ada"})
    run = await callers.ask("/api/runs", {"agentEntityId": agent["id"]})
    return run["id"]


class _Offers:
    """The calls that the gateway offers to a worker."""

    def __init__(self) -> None:
        self._text = b""
        self._offer_arrived: asyncio.Future[None] | None = None
        self._name = b""

    def on_data(self, data: bytes) -> None:
        self._text += data
        self._look()

    async def of(self, call_id: str) -> None:
        """Waits until a call is offered."""
        self._name = f'"{call_id}"'.encode()
        self._offer_arrived = asyncio.get_running_loop().create_future()
        self._look()
        async with asyncio.timeout(60):
            await self._offer_arrived

    def _look(self) -> None:
        if self._offer_arrived is not None and not self._offer_arrived.done() and self._name in self._text:
            self._text = b""
            self._offer_arrived.set_result(None)
