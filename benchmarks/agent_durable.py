"""Measure: one tool round of an agent's run with every step of it durable on SQLite, against others' in memory."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path

import uvloop

from benchmarks import agent_rounds
from benchmarks.agent_gateway import agent_gateway, send_event, set_model, wait_until_idle, write_config
from benchmarks.agent_rounds import LONG, OPENAI_AGENTS, PYDANTIC_AI, SHORT, Runner
from benchmarks.harness import Report
from benchmarks.workloads import add
from toolspace import tool
from toolspace.models.scripted import ScriptedModel, call
from toolspace.server.gateway import Gateway

loop_factory = uvloop.new_event_loop
OURS = "an agent of a gateway, on SQLite"
_AGENTS = 1_000
"""One for each run: none has a past that it would have to read first."""


async def measure() -> Report:
    title = f"One tool round of an agent's run, every step durable: ({LONG} rounds minus {SHORT}) / {LONG - SHORT}"
    report = Report(title)
    with tempfile.TemporaryDirectory(prefix="toolspace-bench-") as folder:
        names = [f"agent{number}" for number in range(_AGENTS)]
        async with agent_gateway(write_config(Path(folder), names)) as gateway:
            runners: dict[str, Runner] = {OURS: _toolspace_runner(gateway)}
            for name, make in {
                PYDANTIC_AI: agent_rounds.pydantic_ai,
                OPENAI_AGENTS: agent_rounds.openai_agents,
            }.items():
                try:
                    run = await make()
                    await run(SHORT)
                except Exception as error:
                    report.notes.append(f"{name} is left out: {type(error).__name__}: {error}")
                else:
                    runners[name] = run
            timings = await agent_rounds.race_rounds(runners, rounds=30)
    for peer in (PYDANTIC_AI, OPENAI_AGENTS):
        if peer in runners:
            ratio = agent_rounds.round_ratio(timings, OURS, peer)
            report.ratio(f"against {peer}, in memory", ratio, must=1.0, aim=0.5)
    for name in runners:
        report.figure(f"{name}, a round", agent_rounds.per_round(timings, name) * 1e6, "µs")
    report.notes.append("two commits to disk in each of our rounds: the step with its call, and the result")
    return report


def _toolspace_runner(gateway: Gateway) -> Runner:
    gateway.toolspace.add_tool(tool(visible=False)(add))
    # Other arguments in each round: a run refuses calls that a model keeps repeating.
    scripts = {rounds: [call("add", {"a": n, "b": 2}) for n in range(rounds)] + ["done"] for rounds in (SHORT, LONG)}
    numbers = count()

    async def run(rounds: int) -> None:
        name = f"agent{next(numbers) % _AGENTS}"
        model = ScriptedModel(scripts[rounds], record=False)
        set_model(gateway, name, model)
        await send_event(gateway, [name])
        await wait_until_idle(gateway)
        assert model.remaining_steps == 0, model.remaining_steps

    return run
