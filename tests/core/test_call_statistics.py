"""Statistics in bounded memory, compared with exact ones."""

from __future__ import annotations

import math
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolspace import ToolContext, ToolRegistry, Toolspace, tool
from toolspace.core import call_statistics
from toolspace.core.call_statistics import CallStats, StatsCollector

quick = settings(max_examples=150, deadline=None)


def exact(durations: list[float], share: float) -> float:
    """The smallest duration that `share` of all do not exceed."""
    return sorted(durations)[max(0, math.ceil(share * len(durations)) - 1)]


def stats_of(durations: list[float]) -> CallStats:
    stats = CallStats()
    for duration in durations:
        stats.add(duration, ok=True)
    return stats


@pytest.mark.spec("4.8")
@quick
@given(st.lists(st.floats(0.01, 1e7), min_size=1, max_size=60))
def test_percentiles_are_within_three_percent(durations: list[float]) -> None:
    stats = stats_of(durations)
    for share in (0.5, 0.95):
        assert stats.percentile(share) == pytest.approx(exact(durations, share), rel=0.03)


@pytest.mark.spec("4.8")
@pytest.mark.parametrize("seed", range(5))
def test_percentiles_of_many_random_durations_are_within_three_percent(seed: int) -> None:
    generator = random.Random(seed)
    durations = [generator.lognormvariate(generator.uniform(-1, 3), 1.5) + 0.01 for _ in range(20_000)]
    stats = stats_of(durations)
    for share in (0.01, 0.25, 0.5, 0.75, 0.95, 0.999, 1.0):
        assert stats.percentile(share) == pytest.approx(exact(durations, share), rel=0.03)


@pytest.mark.parametrize("duration", [0.01, 0.5, 0.95, 0.97, 0.99, 1.0, 1.01, 1.03, 1.05, 2.0, 1000.0, 86_400_000.0])
def test_a_single_duration_is_every_percentile_of_itself(duration: float) -> None:
    stats = stats_of([duration])
    for share in (0.0, 0.5, 0.95, 1.0):
        assert stats.percentile(share) == pytest.approx(duration, rel=0.03)


def test_a_duration_of_zero_is_counted_near_zero() -> None:
    assert stats_of([0.0]).percentile(0.5) == pytest.approx(0, abs=1e-5)
    assert CallStats().percentile(0.5) == 0.0
    assert CallStats().average_ms == 0.0


@pytest.mark.parametrize("odd", [-1.0, -1e300, math.nan, math.inf, -math.inf])
def test_an_impossible_duration_still_counts_as_a_call(odd: float) -> None:
    stats = stats_of([5.0, odd])
    assert stats.count == 2
    assert stats.average_ms == 2.5
    assert math.isfinite(stats.percentile(1.0))


def test_memory_does_not_grow_with_the_calls() -> None:
    def size_after(calls: int) -> int:
        stats = stats_of([1.0 + number % 7 for number in range(calls)])
        return len(pickle.dumps({name: getattr(stats, name) for name in CallStats.__slots__}))

    assert size_after(100_000) < 2 * size_after(1_000)


@pytest.mark.spec("4.8")
def test_the_wire_form_has_exactly_these_numbers() -> None:
    stats = CallStats()
    for number in range(1, 101):
        stats.add(float(number), ok=number % 10 != 0)
    wire = stats.to_dict()
    assert list(wire) == ["count", "failures", "avgDuration", "p50", "p95"]
    assert (wire["count"], wire["failures"], wire["avgDuration"]) == (100, 10, 50.5)
    assert wire["p50"] == pytest.approx(50, rel=0.03)
    assert wire["p95"] == pytest.approx(95, rel=0.03)


@pytest.mark.spec("4.8")
async def test_totals_are_by_category_and_calls_by_tool() -> None:
    @tool(category="data")
    async def good() -> int:
        return 1

    @tool
    async def bad() -> int:
        raise ValueError("no")

    ts = Toolspace(tools=[good, bad])
    for _ in range(3):
        await ts.call("good")
    await ts.call("bad")
    await ts.call("no_such_tool")
    stats = ts.get_stats().to_dict()
    assert stats["byCategory"]["data"] == 1
    assert stats["byCategory"]["custom"] >= 1
    assert stats["total"] == sum(stats["byCategory"].values())
    assert (stats["callStats"]["good"]["count"], stats["callStats"]["good"]["failures"]) == (3, 0)
    assert (stats["callStats"]["bad"]["count"], stats["callStats"]["bad"]["failures"]) == (1, 1)
    assert "no_such_tool" not in stats["callStats"]


@pytest.mark.spec("18")
def test_calls_that_ran_elsewhere_can_be_counted() -> None:
    registry = ToolRegistry([tool(len)])
    registry.update_call_stats("len", 12.0, True)
    registry.update_call_stats("len", -3.0, False)
    stats = registry.get_stats().call_stats["len"]
    assert (stats["count"], stats["failures"]) == (2, 1)


def test_statistics_are_kept_per_tool() -> None:
    book = StatsCollector()
    book.add("a", 1.0, True)
    book.add("b", 9.0, False)
    pages = book.summary([]).call_stats
    assert {name: (page["count"], page["failures"]) for name, page in pages.items()} == {"a": (1, 0), "b": (1, 1)}


@pytest.mark.spec("21.1")
async def test_statistics_can_be_filtered_by_principal() -> None:
    @tool
    async def work(fail: bool = False) -> str:
        if fail:
            raise ValueError("no")
        return "done"

    async with Toolspace(tools=[work]) as ts:
        for user, calls, failures in (("ann", 3, 1), ("bob", 150, 0), (None, 2, 2)):
            for number in range(calls):
                await ts.call("work", {"fail": number < failures}, context=ToolContext(user_id=user))
        all_stats = ts.get_stats()
        by_principal = {name: ts.get_stats(principal=name) for name in ("ann", "bob", "local", "nobody")}
    assert (all_stats.calls, all_stats.failures) == (155, 3)
    counts = {name: (stats.calls, stats.failures) for name, stats in by_principal.items()}
    assert counts == {"ann": (3, 1), "bob": (150, 0), "local": (2, 2), "nobody": (0, 0)}
    assert by_principal["local"].call_stats["work"]["p95"] > 0
    assert by_principal["nobody"].call_stats == {}
    assert by_principal["ann"].total == all_stats.total


def test_statistics_of_many_principals_use_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_statistics, "_MAX_PRINCIPAL_TOOLS", 10)
    stats = StatsCollector()
    for number in range(100):
        for user in (f"user{number}", None):
            stats.add("work", 1.0, True)
            if user is not None:
                stats.add_for_principal(user, "work", 1.0, True, None)
    assert len(stats._principals) == 10
    assert stats.of_principal("user99").summary(()).calls == 1
    assert stats.of_principal("user0").summary(()).calls == 0
    local = stats.of_principal("local").summary(())
    assert (local.calls, local.call_stats["work"]["count"]) == (100, 100)
