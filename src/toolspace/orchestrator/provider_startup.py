"""Starts providers in parallel. One that fails is reported and retried, and does not affect the others.

The orchestrator uses it at its start, and to wait for the provider of a tool that is called during the start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from toolspace.core.extension_points import ToolProvider
from toolspace.core.names import SEPARATOR, sanitise
from toolspace.core.times import format_milliseconds
from toolspace.errors import ProviderError
from toolspace.orchestrator.call import cancel_all, context_without_call

_log = logging.getLogger("toolspace.providers")
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
DEFAULT_WAIT_SECONDS = 30.0
"""How long a start waits for a provider, from the beginning of that provider's own attempt. One that takes longer is
reported, and continues in the background."""
STRAGGLER_SHARE = 0.16
"""When most providers are ready, each of the last ones adds this share of the time that the others took."""
_PROVIDERS_PER_STRAGGLER = 5
"""One of so many slow providers may be a straggler. With fewer, the start waits for each."""
_INSTANT_SECONDS = 0.05
_CHECK_SECONDS = 0.1
"""How often to look whether a provider that waits for its turn has begun to start."""
_STILL_STARTING = "it is still starting"
_MAX_TIMER_SECONDS = 86_400.0
"""A timeout may be infinite, which the event loop does not accept."""
_NOT_STARTED = "it was not started; use `async with` on the toolspace, which starts its providers"


class StartupWait(msgspec.Struct, frozen=True, kw_only=True):
    """How long a start waits for providers. Those that are not ready then continue in the background."""

    seconds: float | None = None
    """None: 30. Counted for each provider from the beginning of its own attempt."""
    wait_for_stragglers: bool = False
    """Whether to wait for all providers, also for a few that take far longer than the rest."""
    only_required: bool = False
    """Whether to wait for required providers only. The others start in the background, and are not reported as late."""


class ProviderStartup:
    """Starts providers and knows which of them are not ready, and why."""

    def __init__(self, on_ready: Callable[[ToolProvider], None]) -> None:
        self.failures: dict[ToolProvider, str] = {}
        self._reported_providers: set[ToolProvider] = set()
        """Providers whose failure was logged as a warning. Later reasons are logged as information."""
        self._on_ready = on_ready
        self._not_started: dict[ToolProvider, bool] = {}
        """Providers that wait for `start`, and whether each is required."""
        self._patience: dict[ToolProvider, float] = {}
        """How long lists wait for a provider, if it has a setting of its own."""
        self._tasks: dict[ToolProvider, asyncio.Task[None]] = {}
        """The task that starts each provider that is not ready."""
        self._first_attempts: dict[ToolProvider, tuple[float, asyncio.Future[None]]] = {}
        """The first attempts that have not ended: when each began, and a future that is done at its end."""

    def add(self, provider: ToolProvider, *, required: bool, patience: float | None = None) -> None:
        """`patience`: how many seconds `wait_for_lists` waits for this provider; None: its default."""
        self._not_started[provider] = required
        if patience is not None:
            self._patience[provider] = patience

    def reasons(self) -> Mapping[ToolProvider, str]:
        """Returns why each provider that is not ready is not."""
        return {
            **dict.fromkeys(self._not_started, _NOT_STARTED),
            **dict.fromkeys(self._first_attempts, _STILL_STARTING),
            **self.failures,
        }

    async def start(self, wait: StartupWait | None = None) -> None:
        """Starts every provider that was added since the last start, and waits for the first attempt of each.

        Raises `ProviderError` if a required provider is not ready then.
        """
        providers, self._not_started = self._not_started, {}
        if not providers:
            return
        attempts = {provider: self._start(provider) for provider in providers}
        try:
            wait = wait or StartupWait()
            required = [provider for provider, is_required in providers.items() if is_required]
            if wait.only_required:
                attempts = {provider: attempts[provider] for provider in required}
            seconds = await _wait(attempts, required, wait) if attempts else 0.0
            for provider, attempt in attempts.items():
                if not attempt.done():
                    duration = format_milliseconds(seconds)
                    self._report(provider, f"it has not started within {duration}ms; {_STILL_STARTING}")
            failed = [provider for provider in required if provider in self.failures]
            if failed:
                reasons = "; ".join(f"{_name(provider)}: {self.failures[provider]}" for provider in failed)
                raise ProviderError(f"a required provider did not start: {reasons}")
        except BaseException:
            await self._stop(providers)
            raise

    async def wait_for_lists(self, patience: float) -> None:
        """Waits for the first attempts that are running; for each at most its patience since its start.

        A provider that has been starting for longer delays nobody. `patience`: for providers without their own.
        """
        while self._first_attempts and (deadlines := self._list_deadlines(patience)):
            remaining = max(deadlines.values()) - time.monotonic()
            await asyncio.wait(deadlines, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)

    def _list_deadlines(self, patience: float) -> dict[asyncio.Future[None], float]:
        now = time.monotonic()
        deadlines = {
            attempt: start_time + self._patience.get(provider, patience)
            for provider, (start_time, attempt) in self._first_attempts.items()
            if not attempt.done()
        }
        return {attempt: deadline for attempt, deadline in deadlines.items() if deadline > now}

    async def wait_for_first_start(self, name: object, get_timeout: Callable[[ToolProvider], float]) -> bool:
        """Waits for the first attempt of the provider that a tool of this name belongs to. False if none is pending.

        `get_timeout` returns how long a call of a tool of this provider may take.
        """
        full_name = sanitise(name) if self._first_attempts and isinstance(name, str) else ""
        # The longest namespace first: `a__b__tool` belongs to `a__b`, not to `a`.
        by_length = sorted(self._first_attempts.items(), key=lambda item: -len(item[0].namespace))
        for provider, (_, attempt) in by_length:
            if provider.namespace and full_name.startswith(sanitise(provider.namespace) + SEPARATOR):
                if provider not in self.failures:  # Else it was reported as late, and the call fails with that reason.
                    await asyncio.wait((attempt,), timeout=min(get_timeout(provider), _MAX_TIMER_SECONDS))
                return True
        return False

    async def remove(self, provider: ToolProvider) -> None:
        self._not_started.pop(provider, None)
        self._patience.pop(provider, None)
        await self._stop((provider,))
        self.failures.pop(provider, None)
        self._reported_providers.discard(provider)

    async def aclose(self) -> None:
        await self._stop(tuple(self._tasks))

    def _start(self, provider: ToolProvider) -> asyncio.Future[None]:
        """Starts a provider in the background. Returns a future that is done after the first attempt."""
        loop = asyncio.get_running_loop()
        attempt: asyncio.Future[None] = loop.create_future()
        self._first_attempts[provider] = (time.monotonic(), attempt)
        attempt.add_done_callback(lambda _: self._first_attempts.pop(provider, None))
        self._tasks[provider] = loop.create_task(
            self._retry_until_ready(provider, attempt), context=context_without_call()
        )
        return attempt

    async def _retry_until_ready(self, provider: ToolProvider, first_attempt: asyncio.Future[None]) -> None:
        try:
            attempt = 0
            while not await self._try(provider):
                if not first_attempt.done():
                    first_attempt.set_result(None)
                await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
                attempt += 1
            self._on_ready(provider)
        finally:
            if not first_attempt.done():
                first_attempt.set_result(None)
            if self._tasks.get(provider) is asyncio.current_task():
                del self._tasks[provider]

    async def _try(self, provider: ToolProvider) -> bool:
        try:
            await provider.warmup()
        except (Exception, asyncio.CancelledError) as error:
            # A connection that breaks may raise `CancelledError` though nobody cancelled this task.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self._report(provider, str(error) or type(error).__name__, is_repeated=provider in self._reported_providers)
            self._reported_providers.add(provider)
            return False
        self._reported_providers.discard(provider)
        if self.failures.pop(provider, None) is not None:
            _log.info("provider %s is available again", _name(provider))
        return True

    def _report(self, provider: ToolProvider, reason: str, *, is_repeated: bool = False) -> None:
        if self.failures.get(provider) != reason:
            level = logging.INFO if is_repeated else logging.WARNING
            _log.log(level, "provider %s is not available: %s", _name(provider), reason)
        self.failures[provider] = reason

    async def _stop(self, providers: Iterable[ToolProvider]) -> None:
        tasks = [task for provider in providers if (task := self._tasks.pop(provider, None)) is not None]
        await cancel_all(tasks)


async def _wait(
    attempts: Mapping[ToolProvider, asyncio.Future[None]], required: Sequence[ToolProvider], wait: StartupWait
) -> float:
    """Waits for all attempts, except for a few that take much longer than the rest. Returns the limit in seconds.

    A provider that waits for its turn is not late: the limit runs from the moment when its own attempt begins.
    """
    start_time = time.monotonic()
    providers = {attempt: provider for provider, attempt in attempts.items()}
    required_attempts = {attempts[provider] for provider in required}
    begin_times = dict.fromkeys(providers, start_time)
    limit = max_limit = DEFAULT_WAIT_SECONDS if wait.seconds is None else wait.seconds
    # Providers that have nothing to start say nothing about how long a start takes.
    _, slow = await asyncio.wait(providers, timeout=min(_INSTANT_SECONDS, limit))
    pending = slow
    while pending:
        now = time.monotonic()
        waiting_attempts = {attempt for attempt in pending if providers[attempt].is_waiting_to_start()}
        begin_times.update(dict.fromkeys(waiting_attempts, now))
        remaining = max(begin_times[attempt] for attempt in pending) + limit - now
        if remaining <= 0:
            break
        timeout = min(remaining, _CHECK_SECONDS) if waiting_attempts else remaining
        done_attempts, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        are_stragglers = len(pending) <= len(slow) // _PROVIDERS_PER_STRAGGLER and not pending & required_attempts
        if done_attempts and are_stragglers and not waiting_attempts and not wait.wait_for_stragglers:
            limit = min(max_limit, (time.monotonic() - start_time) * (1 + STRAGGLER_SHARE * len(pending)))
    return round(limit, 3)


def _name(provider: ToolProvider) -> str:
    return provider.namespace or provider.kind
