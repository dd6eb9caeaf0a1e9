"""Measure: a call that the cache answers."""

from __future__ import annotations

import itertools

from benchmarks import hand_written_call
from benchmarks.call import prepare_by_hand
from benchmarks.harness import Contestant, Report, race, repeat
from benchmarks.workloads import ARGUMENTS, add, create_toolspace
from toolspace import tool

HIT = "Toolspace.call, answered by the cache, text seen before"
RESPELT = "Toolspace.call, answered by the cache, text not seen before"
CALL = "Toolspace.call, run"
BARE = "LRU lookup by hand"
RECORDED = "LRU lookup by hand, recorded and announced"
RUN_BY_HAND = "the stages by hand, run"
SPELLINGS = 5_000


async def measure() -> Report:
    cached = create_toolspace([tool(cache=3600.0)(add)])
    plain = create_toolspace([add])
    prepare_by_hand()
    hand_written_call.remember("add", ARGUMENTS, 3)
    await cached.call("add", ARGUMENTS)
    texts = _spellings()
    for text in (ARGUMENTS, texts[0]):
        second_result = await cached.call("add", text)
        if (
            second_result.executed
            or second_result.result != 3
            or (await hand_written_call.cached_call("add", text)) is None
        ):
            raise RuntimeError("the cache did not answer; there is nothing to measure")
    endless = itertools.cycle(texts)

    async def respelt(count: int) -> None:
        for text in itertools.islice(endless, count):
            await cached.call("add", text)

    contestants = [
        Contestant(HIT, repeat(cached.call, "add", ARGUMENTS)),
        Contestant(RECORDED, repeat(hand_written_call.cached_call, "add", ARGUMENTS)),
        Contestant(RESPELT, respelt),
        Contestant(CALL, repeat(plain.call, "add", ARGUMENTS)),
        Contestant(BARE, repeat(hand_written_call.look_up, "add", ARGUMENTS)),
        Contestant(RUN_BY_HAND, repeat(hand_written_call.call, "add", ARGUMENTS)),
    ]
    timings = await race(contestants, rounds=80)
    report = Report("A cache hit: the same call, answered from memory")
    report.ratio("against the call that runs", timings.ratio(HIT, CALL), must=0.6)
    report.ratio("against an LRU lookup by hand, recorded and announced", timings.ratio(HIT, RECORDED), aim=1.5)
    report.ratio("against an LRU lookup by hand, bare", timings.ratio(HIT, BARE))
    report.ratio(
        "the same arguments in another text each time: against the call that runs", timings.ratio(RESPELT, CALL)
    )
    report.ratio("by hand: the hit against the call that runs", timings.ratio(RECORDED, RUN_BY_HAND))
    report.times(timings, [contestant.name for contestant in contestants])
    report.notes += [
        "a hit is a call too, so it is recorded and announced: the aim is judged against the lookup that does so",
        "a text that came before is known by itself; the lookup by hand validates every time, as for a new text",
        "the tool that runs only adds two numbers, so there is little that a hit could save, by hand too",
    ]
    return report


def _spellings() -> list[str]:
    """Equal arguments in so many texts that none is still cached when it is used again."""
    return [f'{{"a":{" " * (number % 70)}1,"b":{" " * (number // 70)}2}}' for number in range(SPELLINGS)]
