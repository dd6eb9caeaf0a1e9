"""Measure: many agents in one process: what they cost while they are idle, and how fast they are when all are asked."""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.agent_gateway import agent_gateway, send_event, set_model, wait_until_idle, write_config
from benchmarks.harness import Report, round_count, run_python
from benchmarks.memory import resident
from toolspace.agents.agent import entity_id_for
from toolspace.models.scripted import ScriptedModel
from toolspace.storage.queries import inbox

loop_factory = uvloop.new_event_loop
IDLE = 1_000
BUSY, MESSAGES = 100, 10_000
_WATCHED_SECONDS = 15


async def measure() -> Report:
    report = Report(f"{IDLE:,} idle agents in one process; {BUSY} agents and {MESSAGES:,} inbox messages")
    few, many = (_child("idle", str(number)) for number in (1, IDLE))
    report.figure(f"memory of {IDLE:,} idle agents", (many[0] - few[0]) / 1e6, "MB", must=50.0)
    report.figure(f"processor time of {IDLE:,} idle agents, of one core", many[1] * 100, "%", must=1.0)
    seconds, cycles, lost_messages = _child("busy")
    report.figure("cycles a second, one message a cycle", cycles / seconds, "/s")
    report.figure("messages a second", (MESSAGES - lost_messages) / seconds, "/s")
    report.figure("messages that were not processed", lost_messages, "", must=0.0)
    report.notes.append("with a memory of a process with one agent subtracted; on SQLite, scripted models")
    return report


def _child(*arguments: str) -> list[float]:
    return [float(figure) for figure in run_python("-m", "benchmarks.agent_many", *arguments).split()]


async def _idle(count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="toolspace-bench-") as folder:
        async with agent_gateway(write_config(Path(folder), [f"agent{number}" for number in range(count)])):
            await asyncio.sleep(2)
            gc.collect()
            memory, started_at, used = resident(), time.perf_counter(), time.process_time()
            await asyncio.sleep(round_count(_WATCHED_SECONDS))
            print(memory, (time.process_time() - used) / (time.perf_counter() - started_at))


async def _busy() -> None:
    """Each message is a cycle of its own: the batch is one, and each cycle has one turn of the model."""
    names = [f"agent{number}" for number in range(BUSY)]
    cycles = 0

    def answer(_: object) -> str:
        nonlocal cycles
        cycles += 1
        return "seen"

    with tempfile.TemporaryDirectory(prefix="toolspace-bench-") as folder:
        path = write_config(Path(folder), names)
        text = path.read_text().replace('"cyclesPerMinute"', '"inboxBatch": 1, "cyclesPerMinute"')
        path.write_text(text.replace('"loop"', '"consciousness": {"maxTokens": 2000, "minRecentCycles": 2}, "loop"'))
        async with agent_gateway(path) as gateway:
            for name in names:
                set_model(gateway, name, ScriptedModel(answer, record=False))
            started_at = time.perf_counter()
            for _ in range(MESSAGES // BUSY):
                await send_event(gateway, names, {"text": "a message"})
            while await _count_pending(gateway, names):  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(0.05)
            await wait_until_idle(gateway)
            seconds = time.perf_counter() - started_at
            print(seconds, cycles, await _count_pending(gateway, names))


async def _count_pending(gateway: object, names: list[str]) -> int:
    count = 0
    for name in names:
        count += await gateway.ledger.read(inbox.count_pending, entity_id_for(name))  # type: ignore[attr-defined]
    return count


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_idle(int(sys.argv[2])) if sys.argv[1] == "idle" else _busy())
