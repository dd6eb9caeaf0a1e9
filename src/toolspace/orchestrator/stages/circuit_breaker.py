"""The stage `circuit_breaker`: stops calling a provider whose calls keep failing, and tests now and then if it is back.

Transport errors and timeouts count; errors that the provider itself returned show that it works. It starts nothing by
itself: a call that arrives when the delay is over is the test.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec

from toolspace.core.extension_points import CircuitScope, ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.times import format_iso
from toolspace.core.tool import PENDING_EXECUTION_TYPES
from toolspace.orchestrator.call import Call

if TYPE_CHECKING:
    from toolspace.orchestrator.catalog import CatalogEntry
    from toolspace.orchestrator.pipeline import CallHandler, StageContext

_log = logging.getLogger("toolspace.providers")
_MAX_REASON = 300


def circuit_breaker(stage: StageContext, next: CallHandler, /) -> CallHandler:
    settings = stage.settings
    threshold, delay = settings.circuit_breaker_failures.value, settings.circuit_breaker_delay.value
    circuit = stage.services.circuits.get(stage.entry) if threshold else None
    if not threshold or circuit is None:
        return next
    provider, own_timeout = stage.entry.provider, stage.settings.timeout.value

    async def run(call: Call) -> ToolResult:
        if circuit.opened_at is not None:
            return await run_if_due(call)
        result = await next(call)
        if not result.ok or circuit.failures:
            observe(call, result)
        return result

    async def run_if_due(call: Call) -> ToolResult:
        refusal = circuit.refuse(call.base_context.principal, provider.last_connected_at())
        if refusal is not None:
            return call.fail("transport_error", refusal, executed=False)
        circuit.probe = call
        try:
            result = await next(call)
            observe(call, result)
        finally:
            if circuit.probe is call:
                circuit.probe = None
        return result

    def observe(call: Call, result: ToolResult) -> None:
        kind = result.error_kind
        if kind == "timeout":
            # A timeout that the deadline of the run shortened, or during a reconnect, says nothing about the provider.
            if call.provider_called and call.allowed_seconds >= own_timeout and not provider.is_reconnecting():
                circuit.add_failure(call, result.error or "", threshold, delay)
        elif kind == "transport_error":
            circuit.add_failure(call, result.error or "", threshold, delay)
        elif call.provider_called and kind != "canceled":
            circuit.add_success()

    return run


class CircuitStatus(msgspec.Struct, frozen=True):
    """The state of one circuit breaker."""

    is_open: bool
    failures: int
    """How many calls failed since the last one that did not. Calls that ran at the same time count once."""
    next_probe_at: float | None
    """When the next call is let through, in Unix seconds; None if all calls are."""


class Circuit:
    """The breaker of one provider, or of one tool that is a service of its own."""

    __slots__ = (
        "_clock",
        "_failure_principal",
        "_failure_reason",
        "_last_failure",
        "_name",
        "_next_probe",
        "failures",
        "opened_at",
        "probe",
    )

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.failures = 0
        """Consecutive calls that failed."""
        self.opened_at: float | None = None
        """When the breaker opened; None while calls are let through."""
        self.probe: Call | None = None
        """The call that tests whether the provider is back."""
        self._name = name
        self._next_probe = 0.0
        self._last_failure = 0.0
        """When the last failure was counted, in seconds of `time.perf_counter`, as the start of a call."""
        self._failure_principal = self._failure_reason = ""

    @property
    def status(self) -> CircuitStatus:
        if self.opened_at is None:
            return CircuitStatus(False, self.failures, None)
        return CircuitStatus(True, self.failures, time.time() + max(0.0, self._next_probe - self._clock()))

    def refuse(self, principal: str, last_connected_at: float) -> str | None:
        """Returns why a call is not let through an open breaker; None if it is the next probe."""
        has_reconnected = self.opened_at is not None and last_connected_at > self.opened_at
        if self.probe is None and (has_reconnected or self._clock() >= self._next_probe):
            return None
        # What a call of another principal got may contain its data.
        own_reason = f": {self._failure_reason}" if principal == self._failure_principal else ""
        if self.probe is not None:
            next_attempt = "a call tests right now whether it is back"
        else:
            next_probe_at = time.time() + self._next_probe - self._clock()
            next_attempt = f"the next call is let through at {format_iso(int(next_probe_at * 1000))}"
        failures = f"its last {self.failures} calls failed with transport errors or timeouts"
        return f'"{self._name}" is not called (circuit breaker): {failures}{own_reason}; {next_attempt}'

    def add_failure(self, call: Call, reason: str, threshold: int, delay: float) -> None:
        if call.monotonic_start < self._last_failure:
            return  # Calls that run at the same time fail together, for one reason.
        self._last_failure = time.perf_counter()
        self.failures += 1
        self._failure_principal, self._failure_reason = call.base_context.principal, reason[:_MAX_REASON]
        if self.failures >= threshold:
            if self.opened_at is None:
                message = "%s: %d calls in a row failed; further calls fail at once, and one in %g s is let through: %s"
                _log.warning(message, self._name, self.failures, delay, reason)
            self.opened_at = self._clock()
            self._next_probe = self.opened_at + delay

    def add_success(self) -> None:
        if self.opened_at is not None:
            _log.info("%s: a call reached it again; calls are let through", self._name)
        self.failures = 0
        self.opened_at = None


def find_circuit_scope(entry: CatalogEntry) -> CircuitScope:
    """Returns what shares the breaker of a tool: its provider, nobody else, or `none` if it has no breaker."""
    if entry.tool.execution_type in PENDING_EXECUTION_TYPES:
        return "none"
    return "tool" if entry.tool.execution_type == "gateway" else entry.provider.circuit_scope


class CircuitRegistry:
    """The circuit breakers of an orchestrator and its layers. A breaker keeps its state when settings change."""

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.monotonic
        """Monotonic seconds, the same as `ToolProvider.last_connected_at`. New breakers use it."""
        self._circuits: WeakKeyDictionary[ToolProvider, dict[str, Circuit]] = WeakKeyDictionary()

    def get(self, entry: CatalogEntry) -> Circuit | None:
        """Returns the breaker for the calls of a tool; None if the tool needs none."""
        scope = find_circuit_scope(entry)
        if scope == "none":
            return None
        name = entry.tool.name if scope == "tool" else entry.provider_name
        return self._circuits.setdefault(entry.provider, {}).setdefault(name, Circuit(name, self.clock))

    def statuses(self) -> Iterator[tuple[str, CircuitStatus]]:
        """Iterates over the breakers of all tools that were called: the name of the provider or tool, and its state."""
        for circuits in list(self._circuits.values()):
            for name, circuit in list(circuits.items()):
                yield name, circuit.status
