"""Acknowledges the results of calls, many in one request. Used by `client`; knows only the route for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from toolspace.client.errors import ApiError, GatewayUnreachable, TooManyRequests, Unavailable, UnexpectedResponse
from toolspace.client.transport import Transport

_log = logging.getLogger("toolspace.client")
_DELAY_SECONDS: Final = 0.05
"""How long the first acknowledgement waits for others."""
_RETRY_SECONDS: Final = 5.0
_AT_ONCE: Final = 200
_MAX_WAITING: Final = 10_000
"""If the gateway does not answer for long, the oldest acknowledgements are dropped: their results may come again."""


class Acknowledgements:
    """The calls whose results this client has, and which the gateway does not know of yet."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._waiting_ids: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        """Held while a request is on its way."""

    def add(self, call_ids: Iterable[str]) -> None:
        """Acknowledges calls soon, together with those that follow."""
        self._waiting_ids.update(dict.fromkeys(call_ids))
        while len(self._waiting_ids) > _MAX_WAITING:
            del self._waiting_ids[next(iter(self._waiting_ids))]
        if self._task is None and self._waiting_ids:
            self._task = asyncio.get_running_loop().create_task(self._send_later())

    async def flush(self) -> None:
        """Sends what waits. Called before an inbox is read, so that it has no result that this client has already."""
        if self._waiting_ids or self._lock.locked():
            await self._send_waiting()

    async def aclose(self) -> None:
        """Sends what waits; if the gateway does not answer, those results may come to the inbox again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()

    async def _send_later(self) -> None:
        try:
            delay = _DELAY_SECONDS
            while self._waiting_ids:
                await asyncio.sleep(delay)
                await self._send_waiting()
                delay = _RETRY_SECONDS  # What still waits could not be sent.
        finally:
            self._task = None

    async def _send_waiting(self) -> None:
        async with self._lock:
            while self._waiting_ids:
                call_ids = list(self._waiting_ids)[:_AT_ONCE]
                try:
                    await self._transport.request(
                        "POST", "/api/calls/ack", body={"callIds": call_ids}, is_repeatable=True
                    )
                except (GatewayUnreachable, Unavailable, TooManyRequests) as error:
                    _log.warning("%d results are not acknowledged yet, retrying: %s", len(self._waiting_ids), error)
                    return
                except (ApiError, UnexpectedResponse) as error:
                    _log.warning("%d results cannot be acknowledged: %s", len(call_ids), error)
                for call_id in call_ids:
                    self._waiting_ids.pop(call_id, None)
