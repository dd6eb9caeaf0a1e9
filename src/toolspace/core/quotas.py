"""Quotas: how many calls, tokens and dollars a caller, an agent or a tool may use in a minute, an hour or a day.

The configuration declares them, the stage `quota` and the agents' loop charge them, and a `QuotaStore` counts. Windows
are fixed: they begin with each minute, hour and day of UTC.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.times import format_iso
from toolspace.core.tool_context import ToolContext

QuotaSubject = Literal["all", "principal", "key", "agent", "tool"]
"""What has a counter of its own."""
NANODOLLARS: Final = 1_000_000_000
"""Counters hold integers: costs are counted in billionths of a dollar."""
KEY_PREFIXES: Final = ("key/", "tools/")
"""What the principal of a caller with a secret key or a tool key starts with."""
_MINUTE_MS: Final = 60_000
_CALL_WINDOWS: Final = {"minute": _MINUTE_MS, "hour": 60 * _MINUTE_MS, "day": 1_440 * _MINUTE_MS}


class QuotaCharge(msgspec.Struct, frozen=True, kw_only=True):
    """An amount to add to one counter."""

    key: str
    """The counter: a digest of what is counted, and for whom."""
    window_start: int
    """Unix milliseconds, as `reset_at`."""
    reset_at: int
    limit: int
    amount: int = 1
    name: str = ""
    """The quota, for messages: `the quota of 60 calls per minute for "ent_ann" (quotas[0])`."""

    @property
    def refusal(self) -> str:
        return f"{self.name} is used up; it resets at {format_iso(self.reset_at)}"


class QuotaStore(ABC):
    """Counts charges. Several processes may share one."""

    def now_ms(self) -> int:
        """The time that decides in which window a call is counted: that of the process, unless a store has its own."""
        return now_ms()

    @abstractmethod
    async def take(self, charges: Sequence[QuotaCharge]) -> QuotaCharge | None:
        """Adds all charges, if none exceeds its limit. Otherwise adds none, and returns one that does."""

    @abstractmethod
    async def add(self, charges: Sequence[QuotaCharge]) -> None:
        """Adds all charges, whatever the limits are: they have been used already."""

    @abstractmethod
    async def find_exhausted(self, charges: Sequence[QuotaCharge]) -> QuotaCharge | None:
        """Returns a charge whose counter has reached its limit; None if there is none. Adds nothing."""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """One quota. What is given has to match a call; every limit that is given holds."""

    per: QuotaSubject = "all"
    """`all`: all calls that match have one counter."""
    tools: Sequence[str] | None = None
    agents: Sequence[str] | None = None
    principals: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    calls_per_minute: int | None = None
    calls_per_hour: int | None = None
    calls_per_day: int | None = None
    tokens_per_day: int | None = None
    """Of models: what the runs of agents use."""
    cost_per_day: float | None = None
    """US dollars, of models."""
    place: str = "quotas"
    """Its place in the configuration, for messages to callers: `quotas[0]`."""
    source: str = ""
    """Its line in the configuration."""

    @property
    def limits_calls(self) -> bool:
        return any(limit is not None for _, limit in self._call_limits())

    @property
    def limits_models(self) -> bool:
        return self.tokens_per_day is not None or self.cost_per_day is not None

    @property
    def text(self) -> str:
        """All limits: `60 calls per minute, 1000 calls per day for each principal`."""
        limits = [f"{limit} calls per {window}" for window, limit in self._call_limits() if limit is not None]
        if self.tokens_per_day is not None:
            limits.append(f"{self.tokens_per_day} tokens per day")
        if self.cost_per_day is not None:
            limits.append(f"${self.cost_per_day:g} per day")
        return ", ".join(limits) + (f" for each {self.per}" if self.per != "all" else "")

    def charge_call(self, context: ToolContext, tool_name: str, *, now: int) -> Iterator[QuotaCharge]:
        """Yields the charges of one call; none if the quota does not hold for it. `now`: the time of the store."""
        subject = self._find_subject(context, tool_name)
        if subject is not None:
            for window, limit in self._call_limits():
                if limit is not None:
                    yield self._charge("calls", window, subject, limit, 1, f"{limit} calls per {window}", now)

    def charge_model(
        self, context: ToolContext, *, now: int, tokens: int = 0, cost: float = 0
    ) -> Iterator[QuotaCharge]:
        """Yields the charges of what a model used; none if the quota does not hold for it."""
        subject = self._find_subject(context, None) if self.limits_models else None
        if subject is None:
            return
        if (limit := self.tokens_per_day) is not None:
            yield self._charge("tokens", "day", subject, limit, tokens, f"{limit} tokens per day", now)
        if (dollars := self.cost_per_day) is not None:
            amount, nanodollars = round(cost * NANODOLLARS), round(dollars * NANODOLLARS)
            yield self._charge("cost", "day", subject, nanodollars, amount, f"${dollars:g} per day", now)

    def _call_limits(self) -> tuple[tuple[str, int | None], ...]:
        return (("minute", self.calls_per_minute), ("hour", self.calls_per_hour), ("day", self.calls_per_day))

    def _find_subject(self, context: ToolContext, tool_name: str | None) -> str | None:
        """Returns whose counter is charged; None if the quota does not hold for this caller."""
        principal = context.principal
        agent_name = context.agent.name if context.agent is not None else context.agent_id
        key_id = next((principal.removeprefix(prefix) for prefix in KEY_PREFIXES if principal.startswith(prefix)), None)
        if not (
            _matches(self.principals, (principal,))
            and _matches(self.agents, (agent_name, context.agent_entity_id))
            and _matches(self.keys, (key_id, principal if key_id is not None else None))
        ):
            return None
        subjects = {"all": "", "principal": principal, "agent": agent_name, "tool": tool_name}
        return (principal if key_id is not None else None) if self.per == "key" else subjects[self.per]

    def _charge(
        self, metric: str, window: str, subject: str, limit: int, amount: int, text: str, now: int
    ) -> QuotaCharge:
        from hashlib import blake2b  # Imported here: programs that only call tools do not need it.

        # Without the limit: a counter keeps its value when the limit is changed.
        identity = (metric, window, self.per, self.tools, self.agents, self.principals, self.keys, subject)
        length = _CALL_WINDOWS[window]
        start = now // length * length
        owner = f' for "{subject}"' if subject else ""
        return QuotaCharge(
            key=blake2b(json_text.encode_canonical(identity), digest_size=16).hexdigest(),
            window_start=start,
            reset_at=start + length,
            limit=limit,
            amount=amount,
            name=f"the quota of {text}{owner} ({self.place})",
        )


class MemoryQuotas(QuotaStore):
    """Counts in memory, for a toolspace without a database: a restart forgets, and other processes do not share."""

    def __init__(self, *, clock: Callable[[], int] = now_ms) -> None:
        """`clock` returns Unix milliseconds."""
        self._clock = clock
        self._amounts: dict[tuple[str, int], int] = {}
        self._reset_times: dict[tuple[str, int], int] = {}
        self._next_sweep = 0

    def now_ms(self) -> int:
        return self._clock()

    async def take(self, charges: Sequence[QuotaCharge]) -> QuotaCharge | None:
        self._sweep()
        for charge in charges:
            if self._get(charge) + charge.amount > charge.limit:
                return charge
        await self.add(charges)
        return None

    async def add(self, charges: Sequence[QuotaCharge]) -> None:
        for charge in charges:
            counter = (charge.key, charge.window_start)
            self._amounts[counter] = self._amounts.get(counter, 0) + charge.amount
            self._reset_times[counter] = charge.reset_at

    async def find_exhausted(self, charges: Sequence[QuotaCharge]) -> QuotaCharge | None:
        return next((charge for charge in charges if self._get(charge) >= charge.limit), None)

    def _get(self, charge: QuotaCharge) -> int:
        return self._amounts.get((charge.key, charge.window_start), 0)

    def _sweep(self) -> None:
        """Forgets the counters of windows that have ended."""
        now = self._clock()
        if now >= self._next_sweep:
            self._next_sweep = now + _MINUTE_MS
            for counter in [counter for counter, reset_at in self._reset_times.items() if reset_at <= now]:
                del self._amounts[counter], self._reset_times[counter]


def unique_charges(charges: Iterable[QuotaCharge]) -> list[QuotaCharge]:
    """Returns one charge for each counter, the one with the lowest limit, in an order that all processes share."""
    by_counter: dict[str, QuotaCharge] = {}
    for charge in charges:
        previous_charge = by_counter.get(charge.key)
        if previous_charge is None or charge.limit < previous_charge.limit:
            by_counter[charge.key] = charge
    return [by_counter[key] for key in sorted(by_counter)]  # Counters are locked in this order: no deadlock.


def _matches(patterns: Sequence[str] | None, names: Iterable[str | None]) -> bool:
    return patterns is None or any(
        fnmatch.fnmatchcase(name.casefold(), pattern.casefold()) for name in names if name for pattern in patterns
    )
