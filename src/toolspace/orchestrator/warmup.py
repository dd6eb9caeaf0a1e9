"""Gets providers ready, side by side: one that fails is reported and retried, and hurts nobody else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from toolspace.abc import ToolProvider
from toolspace.errors import ProviderError

_log = logging.getLogger("toolspace.providers")
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Warmup:
    """Starts providers and knows which of them are not ready, and why."""

    def __init__(self, on_ready: Callable[[ToolProvider], None], *, retry: tuple[float, ...] = RETRY_SECONDS) -> None:
        self.failures: dict[ToolProvider, str] = {}
        self._on_ready = on_ready
        self._retry = retry
        self._waiting: dict[ToolProvider, bool] = {}
        self._retries: dict[ToolProvider, asyncio.Task[None]] = {}

    def add(self, provider: ToolProvider, *, required: bool) -> None:
        self._waiting[provider] = required

    async def start(self) -> None:
        """Warms up every provider that was added since the last time."""
        waiting, self._waiting = self._waiting, {}
        await asyncio.gather(*(self._try(provider) for provider in waiting))
        missing = [provider for provider, required in waiting.items() if required and provider in self.failures]
        if missing:
            reasons = "; ".join(f"{_name(provider)}: {self.failures[provider]}" for provider in missing)
            raise ProviderError(f"a required provider did not start: {reasons}")
        for provider in waiting:
            if provider not in self.failures:
                self._on_ready(provider)
            else:
                self._retries[provider] = asyncio.create_task(self._keep_trying(provider))

    async def remove(self, provider: ToolProvider) -> None:
        self._waiting.pop(provider, None)
        self.failures.pop(provider, None)
        if (task := self._retries.pop(provider, None)) is not None:
            await _stop(task)

    async def aclose(self) -> None:
        retries, self._retries = self._retries, {}
        for task in retries.values():
            await _stop(task)

    async def _try(self, provider: ToolProvider) -> bool:
        try:
            await provider.warmup()
        except Exception as error:
            reason = str(error) or type(error).__name__
            if self.failures.get(provider) != reason:
                _log.warning("provider %s is not available: %s", _name(provider), reason)
            self.failures[provider] = reason
            return False
        self.failures.pop(provider, None)
        return True

    async def _keep_trying(self, provider: ToolProvider) -> None:
        attempt = 0
        while True:
            await asyncio.sleep(self._retry[min(attempt, len(self._retry) - 1)])
            attempt += 1
            if await self._try(provider):
                _log.info("provider %s is available again", _name(provider))
                self._on_ready(provider)
                return


def _name(provider: ToolProvider) -> str:
    return provider.namespace or provider.kind


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
