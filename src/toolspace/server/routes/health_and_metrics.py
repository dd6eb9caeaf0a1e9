"""The routes for whoever operates a gateway: does it live, can it work, how is it doing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from toolspace.errors import StorageError
from toolspace.server.authorization import Access
from toolspace.server.metrics import CONTENT_TYPE, render_metrics
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import Response
from toolspace.server.routing import Route
from toolspace.storage.queries import statistics

_RETRY = ((b"retry-after", b"1"),)
_COUNT_SECONDS = 5.0
"""How long the database may take to count."""


class Health(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Ready(msgspec.Struct, frozen=True):
    status: Literal["ready"] = "ready"


async def get_health(_: Request) -> Health:
    return Health()


async def get_ready(request: Request) -> Ready:
    if reasons := await request.gateway.readiness.reasons():
        raise Problem(503, f"not ready: {'; '.join(reasons)}", headers=_RETRY, reasons=reasons)
    return Ready()


async def get_metrics(request: Request) -> Response:
    gateway = request.gateway
    counts: statistics.OpenWorkCounts | None
    try:
        async with asyncio.timeout(_COUNT_SECONDS):
            counts = await gateway.ledger.read(statistics.count_open_work)
    except (StorageError, TimeoutError):
        counts = None  # The rest is worth knowing then, too.
    text = render_metrics(gateway.metrics, gateway.toolspace, gateway.count_live(), counts)
    return Response(text, media_type=CONTENT_TYPE)


ROUTES = [
    Route(
        method="GET",
        path="/health",
        handler=get_health,
        access=Access.OPEN,
        tag="operations",
        summary="Whether the process lives",
        response=Health,
    ),
    Route(
        method="GET",
        path="/ready",
        handler=get_ready,
        access=Access.OPEN,
        tag="operations",
        summary="Whether it can take requests",
        description="503 with `reasons` while it starts, while it stops, and while the database does not answer.",
        response=Ready,
        error_statuses=(503,),
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=get_metrics,
        access=Access.SECRET,
        tag="operations",
        summary="Figures, as Prometheus reads them",
        media_type="text/plain",
    ),
]


# MERGED from health: Whether this process can take requests: its database answers and keeps what it is given, and …

_log = logging.getLogger("toolspace.server")
_SECONDS = 2.0
"""How long the database may take. Whoever asks wants to know soon."""
_FRESH_SECONDS = 0.5
"""How long an answer holds. Anyone may ask, as often as they like: the database hears of it this often at most."""

STOPPING = "it is stopping"
STARTING = "it is starting"
NO_DATABASE = "the database does not answer"
NO_WRITES = "the database takes nothing in"


class Readiness:
    """What stands against sending requests here."""

    def __init__(
        self,
        look: Callable[[], Awaitable[object]],
        write: Callable[[], Awaitable[object]],
        *,
        seconds: float = _SECONDS,
    ) -> None:
        self.started = False
        self.stopping = False
        self._tries = ((look, NO_DATABASE), (write, NO_WRITES))
        """Asks the database for anything, and has it keep something: a full disk can be read. They raise where it
        cannot be done."""
        self._seconds = seconds
        self._looking: asyncio.Task[str | None] | None = None
        self._looked_at = -1e9

    async def reasons(self) -> list[str]:
        """Why not; nothing where it is ready."""
        found = [STOPPING] if self.stopping else [] if self.started else [STARTING]
        if not self.stopping and (fault := await self._fault()) is not None:
            found.append(fault)
        return found

    async def aclose(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _fault(self) -> str | None:
        now = time.monotonic()
        looking = self._looking
        if looking is None or (looking.done() and now - self._looked_at > _FRESH_SECONDS):
            self._looked_at = now
            looking = self._looking = asyncio.create_task(self._look_once())
        # Shielded: one who stops waiting must not take the answer away from the others.
        return await asyncio.shield(looking)

    async def _look_once(self) -> str | None:
        for attempt, fault in self._tries:
            try:
                async with asyncio.timeout(self._seconds):
                    await attempt()
            except Exception as error:  # Whatever it is: it could not be done.
                _log.warning("%s: %s", fault, error or "it took too long")
                return fault
        return None
