"""Gets providers ready, side by side: one that fails is reported and retried, and hurts nobody else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import SEPARATOR, sanitise
from toolspace.core.times import format_milliseconds
from toolspace.errors import ProviderError
from toolspace.orchestrator.call import context_without_call

_log = logging.getLogger("toolspace.providers")
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
DEFAULT_WAIT_SECONDS = 30.0
"""How long a start waits for a provider. One that takes longer is reported, and goes on beside the others."""
STRAGGLER_SHARE = 0.16
"""Where nearly all are ready, each of the last ones adds so much to the time that the others took, and no more."""
_FEW = 5
"""One of so many may be such a straggler; with fewer providers each is waited for."""
_AT_ONCE_SECONDS = 0.05
_NOT_STARTED = "it was not started; use the toolspace with `async with`, which starts its providers"


class StartupWait(msgspec.Struct, frozen=True, kw_only=True):
    """How long a start waits for providers. Those that are not ready then go on beside it."""

    seconds: float | None = None
    """None: 30."""
    wait_for_stragglers: bool = False
    """Whether to wait for all alike, also for a few that take far longer than the rest."""


class ProviderStartup:
    """Starts providers and knows which of them are not ready, and why."""

    def __init__(self, on_ready: Callable[[ToolProvider], None], *, retry: tuple[float, ...] = RETRY_SECONDS) -> None:
        self.failures: dict[ToolProvider, str] = {}
        self._on_ready = on_ready
        self._retry = retry
        self._waiting: dict[ToolProvider, bool] = {}
        self._starting: dict[ToolProvider, asyncio.Task[None]] = {}
        """What starts each provider that is not ready."""
        self._first: dict[ToolProvider, tuple[float, asyncio.Future[None]]] = {}
        """Those that were not tried to the end even once: since when, and what is done when they were."""

    def add(self, provider: ToolProvider, *, required: bool) -> None:
        self._waiting[provider] = required

    def reasons(self) -> Mapping[ToolProvider, str]:
        """Why each provider that is not ready is not."""
        return {**dict.fromkeys(self._waiting, _NOT_STARTED), **self.failures}

    async def start(self, patience: StartupWait | None = None) -> None:
        """Warms up every provider that was added since the last time, and waits until each was tried once."""
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        tried = {provider: self._begin(provider) for provider in waiting}
        try:
            waited = await _wait(
                tried, [provider for provider, required in waiting.items() if required], patience or StartupWait()
            )
            for provider, first in tried.items():
                if not first.done():
                    self._report(
                        provider, f"it has not started within {format_milliseconds(waited)}ms, and is still at it"
                    )
            missing = [provider for provider, required in waiting.items() if required and provider in self.failures]
            if missing:
                reasons = "; ".join(f"{_name(provider)}: {self.failures[provider]}" for provider in missing)
                raise ProviderError(f"a required provider did not start: {reasons}")
        except BaseException:
            await self._stop(waiting)
            raise

    async def wait_for_first_start(self, name: object) -> bool:
        """Waits for the first start of the provider that a tool of this name would be of. Whether there was one."""
        wanted = sanitise(name) if self._first and isinstance(name, str) else ""
        # The longest first: the namespace `a` is not that of `a__b__tool` where there is `a__b`.
        for provider, (began, first) in sorted(self._first.items(), key=lambda one: -len(one[0].namespace)):
            if provider.namespace and wanted.startswith(sanitise(provider.namespace) + SEPARATOR):
                left = began + DEFAULT_WAIT_SECONDS - time.monotonic()
                await asyncio.wait((first,), timeout=max(left, 0))
                return True
        return False

    async def remove(self, provider: ToolProvider) -> None:
        self._waiting.pop(provider, None)
        await self._stop((provider,))
        self.failures.pop(provider, None)

    async def aclose(self) -> None:
        await self._stop(tuple(self._starting))

    def _begin(self, provider: ToolProvider) -> asyncio.Future[None]:
        """Starts a provider beside everything else. The answer is done when it was tried once."""
        loop = asyncio.get_running_loop()
        first: asyncio.Future[None] = loop.create_future()
        self._first[provider] = (time.monotonic(), first)
        first.add_done_callback(lambda _: self._first.pop(provider, None))
        self._starting[provider] = loop.create_task(self._bring_up(provider, first), context=context_without_call())
        return first

    async def _bring_up(self, provider: ToolProvider, first: asyncio.Future[None]) -> None:
        try:
            attempt = 0
            while not await self._try(provider):
                if not first.done():
                    first.set_result(None)
                await asyncio.sleep(self._retry[min(attempt, len(self._retry) - 1)])
                attempt += 1
            self._on_ready(provider)
        finally:
            if not first.done():
                first.set_result(None)
            if self._starting.get(provider) is asyncio.current_task():
                del self._starting[provider]

    async def _try(self, provider: ToolProvider) -> bool:
        try:
            await provider.warmup()
        except (Exception, asyncio.CancelledError) as error:
            # A connection that breaks may show as a cancellation that nobody asked for.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self._report(provider, str(error) or type(error).__name__)
            return False
        if self.failures.pop(provider, None) is not None:
            _log.info("provider %s is available again", _name(provider))
        return True

    def _report(self, provider: ToolProvider, reason: str) -> None:
        if self.failures.get(provider) != reason:
            _log.warning("provider %s is not available: %s", _name(provider), reason)
        self.failures[provider] = reason

    async def _stop(self, providers: Iterable[ToolProvider]) -> None:
        tasks = [task for provider in providers if (task := self._starting.pop(provider, None)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait(
    tried: Mapping[ToolProvider, asyncio.Future[None]], required: Sequence[ToolProvider], patience: StartupWait
) -> float:
    """Waits until each was tried, but for a few that take much longer than the rest. Says how many seconds at most."""
    began = time.monotonic()
    needed = {tried[provider] for provider in required}
    limit = most = DEFAULT_WAIT_SECONDS if patience.seconds is None else patience.seconds
    # Those that have nothing to start say nothing of how long a start takes.
    _, slow = await asyncio.wait(tried.values(), timeout=min(_AT_ONCE_SECONDS, limit))
    pending = slow
    while pending and (left := began + limit - time.monotonic()) > 0:
        done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        few = len(pending) <= len(slow) // _FEW and not pending & needed
        if done and few and not patience.wait_for_stragglers:
            limit = min(most, (time.monotonic() - began) * (1 + STRAGGLER_SHARE * len(pending)))
    return round(limit, 3)


def _name(provider: ToolProvider) -> str:
    return provider.namespace or provider.kind
