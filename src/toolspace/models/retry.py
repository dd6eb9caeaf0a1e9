"""Asks a model again where its provider was busy, or the connection was lost. Knows nothing of HTTP."""

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
"""Seconds after which no new attempt begins."""
_FIRST_WAIT = 0.5
MAX_WAIT_SECONDS = 60.0
"""Seconds that a provider can ask to wait between two attempts; one that wants more is believed, and given up."""

_log = logging.getLogger("toolspace.models")


class RetryingModel(Model):
    """A model that is asked again, with growing pauses, as long as that may help."""

    def __init__(
        self,
        model: Model,
        *,
        retries: int = MODEL_RETRIES,
        within: float = MAX_TOTAL_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.model = model
        self.name = model.name
        self.context_window = model.context_window
        self._retries = retries
        self._within = within
        self._sleep = sleep

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        start = time.monotonic()
        attempt = 0
        heard = _Heard(listen) if listen is not None else None
        while True:
            attempt += 1
            try:
                return await self.model.respond(request, heard)
            except ModelError as error:
                wait = retry_delay(error, attempt)
                left = self._within - (time.monotonic() - start)
                if not error.is_transient or attempt > self._retries or wait > min(MAX_WAIT_SECONDS, left):
                    if attempt > 1:
                        error.add_note(f"asked {attempt} times")
                    raise
                _log.warning("%s; asking again in %.1f s", error, wait)
            if heard is not None:
                heard.restart()
            await self._sleep(wait)

    async def aclose(self) -> None:
        await self.model.aclose()


class _Heard:
    """A listener that knows whether it has heard anything that must be forgotten."""

    __slots__ = ("_any", "_listen")

    def __init__(self, listen: ModelListener) -> None:
        self._listen = listen
        self._any = False

    def __call__(self, part: ModelStreamPart) -> None:
        self._any = True
        self._listen(part)

    def restart(self) -> None:
        if self._any:
            self._any = False
            self._listen(ResponseRestarted())


def retry_delay(error: ModelError, attempt: int) -> float:
    """What the provider asks for; else longer each time, and not the same for everyone."""
    grown = min(_FIRST_WAIT * 2 ** (attempt - 1), MAX_WAIT_SECONDS) * random.uniform(0.5, 1.0)
    if error.retry_after is None:
        return grown
    # A little more than asked, so that all who were told the same do not come back at once.
    return error.retry_after + random.uniform(0.0, min(0.25, error.retry_after / 10))
