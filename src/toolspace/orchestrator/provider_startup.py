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
"""How long a start waits for a provider. One that takes longer is reported, and continues in the background."""
STRAGGLER_SHARE = 0.16
"""When most providers are ready, each of the last ones adds this share of the time that the others took."""
_PROVIDERS_PER_STRAGGLER = 5
"""One of so many slow providers may be a straggler. With fewer, the start waits for each."""
_INSTANT_SECONDS = 0.05
_NOT_STARTED = "it was not started; use `async with` on the toolspace, which starts its providers"


class StartupWait(msgspec.Struct, frozen=True, kw_only=True):
    """How long a start waits for providers. Those that are not ready then continue in the background."""

    seconds: float | None = None
    """None: 30."""
    wait_for_stragglers: bool = False
    """Whether to wait for all providers, also for a few that take far longer than the rest."""


class ProviderStartup:
    """Starts providers and knows which of them are not ready, and why."""

    def __init__(self, on_ready: Callable[[ToolProvider], None]) -> None:
        self.failures: dict[ToolProvider, str] = {}
        self._reported_providers: set[ToolProvider] = set()
        """Providers whose failure was logged as a warning. Later reasons are logged as information."""
        self._on_ready = on_ready
        self._not_started: dict[ToolProvider, bool] = {}
        """Providers that wait for `start`, and whether each is required."""
        self._tasks: dict[ToolProvider, asyncio.Task[None]] = {}
        """The task that starts each provider that is not ready."""
        self._first_attempts: dict[ToolProvider, tuple[float, asyncio.Future[None]]] = {}
        """The first attempts that have not ended: when each began, and a future that is done at its end."""

    def add(self, provider: ToolProvider, *, required: bool) -> None:
        self._not_started[provider] = required

    def reasons(self) -> Mapping[ToolProvider, str]:
        """Returns why each provider that is not ready is not."""
        return {**dict.fromkeys(self._not_started, _NOT_STARTED), **self.failures}

    async def start(self, wait: StartupWait | None = None) -> None:
        """Starts every provider that was added since the last start, and waits for the first attempt of each.

        Raises `ProviderError` if a required provider is not ready then.
        """
        providers, self._not_started = self._not_started, {}
        if not providers:
            return
        attempts = {provider: self._start(provider) for provider in providers}
        try:
            required = [provider for provider, is_required in providers.items() if is_required]
            seconds = await _wait(attempts, required, wait or StartupWait())
            for provider, attempt in attempts.items():
                if not attempt.done():
                    duration = format_milliseconds(seconds)
                    self._report(provider, f"it has not started within {duration}ms; it is still starting")
            failed = [provider for provider in required if provider in self.failures]
            if failed:
                reasons = "; ".join(f"{_name(provider)}: {self.failures[provider]}" for provider in failed)
                raise ProviderError(f"a required provider did not start: {reasons}")
        except BaseException:
            await self._stop(providers)
            raise

    async def wait_for_first_start(self, name: object) -> bool:
        """Waits for the first attempt of the provider that a tool of this name belongs to. False if none is pending."""
        full_name = sanitise(name) if self._first_attempts and isinstance(name, str) else ""
        # The longest namespace first: `a__b__tool` belongs to `a__b`, not to `a`.
        by_length = sorted(self._first_attempts.items(), key=lambda item: -len(item[0].namespace))
        for provider, (start_time, attempt) in by_length:
            if provider.namespace and full_name.startswith(sanitise(provider.namespace) + SEPARATOR):
                remaining = start_time + DEFAULT_WAIT_SECONDS - time.monotonic()
                await asyncio.wait((attempt,), timeout=max(remaining, 0))
                return True
        return False

    async def remove(self, provider: ToolProvider) -> None:
        self._not_started.pop(provider, None)
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
    """Waits for all attempts, except for a few that take much longer than the rest. Returns the limit in seconds."""
    start_time = time.monotonic()
    required_attempts = {attempts[provider] for provider in required}
    limit = max_limit = DEFAULT_WAIT_SECONDS if wait.seconds is None else wait.seconds
    # Providers that have nothing to start say nothing about how long a start takes.
    _, slow = await asyncio.wait(attempts.values(), timeout=min(_INSTANT_SECONDS, limit))
    pending = slow
    while pending and (remaining := start_time + limit - time.monotonic()) > 0:
        done_attempts, pending = await asyncio.wait(pending, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        are_stragglers = len(pending) <= len(slow) // _PROVIDERS_PER_STRAGGLER and not pending & required_attempts
        if done_attempts and are_stragglers and not wait.wait_for_stragglers:
            limit = min(max_limit, (time.monotonic() - start_time) * (1 + STRAGGLER_SHARE * len(pending)))
    return round(limit, 3)


def _name(provider: ToolProvider) -> str:
    return provider.namespace or provider.kind
