"""Statistics of calls per tool, of all callers and of one principal: counts, failures and durations.

In bounded memory: the principals whose last call is longest ago are counted together.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Literal

import msgspec

from toolspace.core.tool import Tool
from toolspace.core.tool_context import LOCAL_PRINCIPAL

_GROWTH = 1.04
_MIN_MS, _MAX_MS = 1e-4, 1e10
"""Shorter durations are one bucket, and so are longer ones."""
_LOWEST_POWER = math.ceil(math.log(_MIN_MS, _GROWTH))
_FOLD_COUNT = 128
_MAX_PRINCIPAL_TOOLS = 5_000
"""For how many pairs of principal and tool there are statistics."""


class CallStats:
    """Statistics of one tool. Durations are counted in buckets 4 % apart, so a percentile is right within 2 %."""

    __slots__ = ("_buckets", "_folded_count", "_recent", "_total_ms", "failures", "failures_by_kind")

    def __init__(self) -> None:
        self.failures = 0
        self.failures_by_kind: Counter[str] = Counter()
        """The failures that have a kind, by kind."""
        self._recent: list[float] = []
        """Durations that are not in buckets yet. Adding them by the hundred is cheaper for every call."""
        self._folded_count = 0
        self._total_ms = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, duration_ms: float, ok: bool, kind: str | None = None) -> None:
        recent = self._recent
        recent.append(duration_ms)
        if not ok:
            self.failures += 1
            if kind is not None:
                self.failures_by_kind[kind] += 1
        if len(recent) >= _FOLD_COUNT:
            self._fold()

    @property
    def count(self) -> int:
        return self._folded_count + len(self._recent)

    @property
    def total_ms(self) -> float:
        self._fold()
        return self._total_ms

    @property
    def average_ms(self) -> float:
        self._fold()
        return self._total_ms / self._folded_count if self._folded_count else 0.0

    def cumulative_counts(self, bounds_ms: Sequence[float]) -> list[int]:
        """Returns how many calls took no longer than each bound, within 4 % of the bound. The bounds must ascend."""
        self._fold()
        counts: list[int] = []
        buckets = sorted(self._buckets)
        total = at = 0
        for bound in bounds_ms:
            while at < len(buckets) and _middle_ms(buckets[at]) <= bound:
                total += self._buckets[buckets[at]]
                at += 1
            counts.append(total)
        return counts

    def merge(self, added_stats: CallStats, *, sign: Literal[1, -1] = 1) -> None:
        """Adds the calls of other statistics, or takes them out again."""
        self._fold()
        added_stats._fold()
        self.failures += sign * added_stats.failures
        self._folded_count += sign * added_stats._folded_count
        self._total_ms += sign * added_stats._total_ms
        for kind, count in added_stats.failures_by_kind.items():
            self.failures_by_kind[kind] += sign * count
        for bucket, count in added_stats._buckets.items():
            self._buckets[bucket] += sign * count

    def _fold(self) -> None:
        recent, self._recent = self._recent, []  # Swapped, not cleared: another thread may be adding.
        if not recent:
            return
        total = sum(recent)
        if not (min(recent) >= 0.0 and total < math.inf):
            # A clock that was set back, or a caller's mistake, counts as zero.
            recent = [duration if 0.0 <= duration < math.inf else 0.0 for duration in recent]
            total = sum(recent)
        self._folded_count += len(recent)
        self._total_ms += total
        self._buckets.update(map(_bucket_finder(), recent))

    def percentile(self, share: float) -> float:
        """Returns the duration in milliseconds that `share` (0 to 1) of the calls did not exceed."""
        self._fold()
        required = share * self._folded_count
        total = 0
        for bucket in sorted(self._buckets):
            total += self._buckets[bucket]
            if total >= required:
                return max(0.0, _middle_ms(bucket))
        return 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "failures": self.failures,
            "avgDuration": round(self.average_ms, 3),
            "p50": round(self.percentile(0.5), 3),
            "p95": round(self.percentile(0.95), 3),
        }


class ToolStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Registered tools by category, and statistics of their calls by tool."""

    total: int
    """How many tools are registered."""
    by_category: dict[str, int]
    """How many tools each category has."""
    calls: int
    """How many calls were made."""
    failures: int
    """How many calls failed."""
    call_stats: dict[str, dict[str, Any]]
    """By tool: the number of calls and failures, and the durations in milliseconds."""

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


class StatsCollector:
    """Collects statistics of all tools."""

    __slots__ = ("_other_principals", "_pair_count", "_principals", "_tools")

    def __init__(self) -> None:
        self._tools: defaultdict[str, CallStats] = defaultdict(CallStats)
        self._principals: OrderedDict[str, StatsCollector] = OrderedDict()
        """Statistics of each principal but `local`, the one with the latest call last."""
        self._pair_count = 0
        self._other_principals: StatsCollector | None = None
        """The calls of principals whose statistics were dropped."""

    def add(self, tool: str, duration_ms: float, ok: bool) -> None:
        self.for_tool(tool).add(duration_ms, ok)

    def for_tool(self, tool: str) -> CallStats:
        """Returns the statistics of one tool."""
        return self._tools[tool]

    def add_for_principal(self, principal: str, tool: str, duration_ms: float, ok: bool, kind: str | None) -> None:
        """Adds a call that is in the statistics of its tool already. Not for `local`, which is all other calls."""
        if principal == LOCAL_PRINCIPAL:
            return
        collector = self._principals.get(principal)
        if collector is None:
            collector = self._principals[principal] = StatsCollector()
        self._principals.move_to_end(principal)
        self._pair_count += tool not in collector._tools
        collector.for_tool(tool).add(duration_ms, ok, kind)
        while self._pair_count > _MAX_PRINCIPAL_TOOLS and len(self._principals) > 1:
            _, dropped_collector = self._principals.popitem(last=False)
            self._pair_count -= len(dropped_collector._tools)
            if self._other_principals is None:
                self._other_principals = StatsCollector()
            self._other_principals._merge(dropped_collector)

    def of_principal(self, principal: str) -> StatsCollector:
        """Returns the statistics of one principal. They are empty if it made no call, or none for a long time."""
        if principal != LOCAL_PRINCIPAL:
            return self._principals.get(principal) or StatsCollector()
        local_calls = StatsCollector()
        local_calls._merge(self)
        for collector in (*self._principals.values(), *filter(None, (self._other_principals,))):
            local_calls._merge(collector, sign=-1)
        return local_calls

    def _merge(self, collector: StatsCollector, *, sign: Literal[1, -1] = 1) -> None:
        for tool, stats in tuple(collector._tools.items()):
            self.for_tool(tool).merge(stats, sign=sign)

    def items(self) -> Iterator[tuple[str, CallStats]]:
        """Iterates over the tools that were called, with their statistics."""
        return ((name, stats) for name, stats in tuple(self._tools.items()) if stats.count)

    def summary(self, tools: Iterable[Tool]) -> ToolStats:
        categories = Counter(str(tool.category) for tool in tools)
        return ToolStats(
            total=categories.total(),
            by_category=dict(categories),
            calls=sum(stats.count for stats in self._tools.values()),
            failures=sum(stats.failures for stats in self._tools.values()),
            call_stats={name: stats.to_dict() for name, stats in self._tools.items() if stats.count},
        )


@cache
def _bucket_finder() -> Callable[[float], int]:
    """Returns a function from duration to bucket. It searches a table: a logarithm for every call would cost more."""
    highest = math.ceil(math.log(_MAX_MS, _GROWTH))
    return partial(bisect_right, [_GROWTH**power - _MIN_MS for power in range(_LOWEST_POWER, highest)])


def _middle_ms(bucket: int) -> float:
    return _GROWTH ** (_LOWEST_POWER + bucket - 0.5) - _MIN_MS
