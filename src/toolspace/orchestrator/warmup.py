"""Gets providers ready, side by side: one that fails is reported and retried, and hurts nobody else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from toolspace.abc import ToolProvider
from toolspace.core.duration import milliseconds
from toolspace.errors import ProviderError
from toolspace.orchestrator.call import outside

_log = logging.getLogger("toolspace.providers")
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
PATIENCE_SECONDS = 30.0
"""How long a start waits for a provider. One that takes longer is reported, and goes on beside the others."""


class Warmup:
    """Starts providers and knows which of them are not ready, and why."""

    def __init__(self, on_ready: Callable[[ToolProvider], None], *, retry: tuple[float, ...] = RETRY_SECONDS) -> None:
        self.failures: dict[ToolProvider, str] = {}
        self._on_ready = on_ready
        self._retry = retry
        self._waiting: dict[ToolProvider, bool] = {}
        self._starting: dict[ToolProvider, asyncio.Task[None]] = {}
        """What starts each provider that is not ready."""

    def add(self, provider: ToolProvider, *, required: bool) -> None:
        self._waiting[provider] = required

    async def start(self) -> None:
        """Warms up every provider that was added since the last time, and waits until each was tried once."""
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        tried = {provider: self._begin(provider) for provider in waiting}
        try:
            await asyncio.wait(tried.values(), timeout=PATIENCE_SECONDS)
            for provider, first in tried.items():
                if not first.done():
                    self._report(
                        provider, f"it has not started within {milliseconds(PATIENCE_SECONDS)}ms, and is still at it"
                    )
            missing = [provider for provider, required in waiting.items() if required and provider in self.failures]
            if missing:
                reasons = "; ".join(f"{_name(provider)}: {self.failures[provider]}" for provider in missing)
                raise ProviderError(f"a required provider did not start: {reasons}")
        except BaseException:
            await self._stop(waiting)
            raise

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
        self._starting[provider] = loop.create_task(self._bring_up(provider, first), context=outside())
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


def _name(provider: ToolProvider) -> str:
    return provider.namespace or provider.kind
