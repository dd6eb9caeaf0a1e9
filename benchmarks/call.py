"""Measure: one validated, timed, accounted call from JSON text, with events on."""

from __future__ import annotations

from pydantic import TypeAdapter

from benchmarks import hand_written_call
from benchmarks.harness import Contestant, Report, Timings, race, repeat
from benchmarks.peers import LANGCHAIN, PEERS, PYDANTIC_AI
from benchmarks.workloads import ARGUMENTS, add, create_toolspace, ignore

OURS = "Toolspace.call"
ORCHESTRATOR = "ToolOrchestrator.execute"
SILENT = "Toolspace.call, no subscribers"
BY_HAND = "the stages written by hand in a row"
DEFERRED = "the stages by hand, tokens counted on reading"
BARE = "await the function"
VALIDATED = "validate_json, await the function"


async def measure() -> Report:
    report = Report("One call from JSON text: validated, timed, accounted, two events")
    contestants = [*ours_and_by_hand(), *_lean()]
    for name, make in PEERS.items():
        try:
            call = await make()
            await call()
        except Exception as error:
            report.notes.append(f"{name} is left out: {type(error).__name__}: {error}")
        else:
            contestants.append(Contestant(name, repeat(call)))
    timings = await race(contestants, rounds=60)
    _judge(report, timings)
    report.times(timings, [contestant.name for contestant in contestants])
    return report


def ours_and_by_hand() -> list[Contestant]:
    ts, silent = create_toolspace([add]), create_toolspace([add], events=False)
    prepare_by_hand()
    return [
        Contestant(OURS, repeat(ts.call, "add", ARGUMENTS)),
        Contestant(BY_HAND, repeat(hand_written_call.call, "add", ARGUMENTS)),
        Contestant(DEFERRED, repeat(hand_written_call.call, "add", ARGUMENTS, True)),
        Contestant(ORCHESTRATOR, repeat(ts.orchestrator.execute, "add", ARGUMENTS)),
        Contestant(SILENT, repeat(silent.call, "add", ARGUMENTS)),
    ]


def prepare_by_hand() -> None:
    hand_written_call.register(add, hand_written_call.AddArguments)
    hand_written_call.on_requested[:] = [ignore]
    hand_written_call.on_ended[:] = [ignore]


def _lean() -> list[Contestant]:
    """What is not comparable, and shows where the floor below the floor is."""
    validate = TypeAdapter(hand_written_call.AddArguments).validator.validate_json

    async def call_validated(text: str) -> int:
        return await add(**validate(text))

    return [Contestant(BARE, repeat(add, 1, 2)), Contestant(VALIDATED, repeat(call_validated, ARGUMENTS))]


def _judge(report: Report, timings: Timings) -> None:
    if PYDANTIC_AI in timings:
        report.ratio("against pydantic-ai ToolManager.handle_call", timings.ratio(OURS, PYDANTIC_AI), must=0.5)
    if LANGCHAIN in timings:
        report.ratio("against LangChain ainvoke", timings.ratio(OURS, LANGCHAIN), must=0.05)
    report.ratio("against the stages written by hand in a row", timings.ratio(OURS, BY_HAND), aim=1.3)
    report.ratio("against the same, tokens counted on reading", timings.ratio(OURS, DEFERRED))
    report.notes.append(
        "Toolspace counts the tokens of a short result when someone reads the record; the stages by hand count them "
        "at once, as the target says, and in the line below it on reading too, which is like for like"
    )
