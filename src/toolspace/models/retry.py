"""Repeats model requests that failed for a temporary reason: a busy provider or a lost connection.

Used by `registry`, which wraps models with it, and by `images`. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from toolspace.core.defaults import MODEL_RETRIES
from toolspace.core.model import Model, ModelListener, ModelRequest, ModelStreamPart, ModelTurn, ResponseRestarted
from toolspace.errors import ModelError

MAX_TOTAL_SECONDS = 900.0
"""After this time no new attempt starts."""
MAX_WAIT_SECONDS = 60.0
"""The longest wait between two attempts. If the provider asks for more, the request fails at once."""
_FIRST_WAIT_SECONDS = 0.5

_log = logging.getLogger("toolspace.models")


class RetryingModel(Model):
    """Repeats requests to a model with growing delays, as long as the failures are temporary."""

    def __init__(
        self,
        model: Model,
        *,
        retries: int = MODEL_RETRIES,
        max_seconds: float = MAX_TOTAL_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.model = model
        self.name = model.name
        self.context_window = model.context_window
        self._retries = retries
        self._max_seconds = max_seconds
        self._sleep = sleep

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        start = time.monotonic()
        attempt = 0
        listener = _RestartableListener(listen) if listen is not None else None
        while True:
            attempt += 1
            try:
                return await self.model.respond(request, listener)
            except ModelError as error:
                delay = retry_delay(error, attempt)
                remaining = self._max_seconds - (time.monotonic() - start)
                if not error.is_transient or attempt > self._retries or delay > min(MAX_WAIT_SECONDS, remaining):
                    if attempt > 1:
                        error.add_note(f"asked {attempt} times")
                    raise
                _log.warning("%s; retrying in %.1f s", error, delay)
            if listener is not None:
                listener.restart()
            await self._sleep(delay)

    async def aclose(self) -> None:
        await self.model.aclose()


class _RestartableListener:
    """Tells the listener to discard a partial response before it is requested again."""

    __slots__ = ("_has_parts", "_listen")

    def __init__(self, listen: ModelListener) -> None:
        self._listen = listen
        self._has_parts = False

    def __call__(self, part: ModelStreamPart) -> None:
        self._has_parts = True
        self._listen(part)

    def restart(self) -> None:
        if self._has_parts:
            self._has_parts = False
            self._listen(ResponseRestarted())


def retry_delay(error: ModelError, attempt: int) -> float:
    """The delay that the provider asks for; else one that grows with each attempt and has random jitter."""
    backoff = min(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1), MAX_WAIT_SECONDS) * random.uniform(0.5, 1.0)
    if error.retry_after is None:
        return backoff
    # A little longer than asked for: clients that got the same delay must not return all at once.
    return error.retry_after + random.uniform(0.0, min(0.25, error.retry_after / 10))
