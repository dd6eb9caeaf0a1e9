"""Routes for operators: `/health`, `/ready` and `/metrics`. `Readiness` decides whether the process is ready."""

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
from toolspace.server.requests import Request
from toolspace.server.responses import Problem, Response
from toolspace.server.routing import RouteTable
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import runs

_log = logging.getLogger("toolspace.server")

STOPPING = "the gateway is stopping"
STARTING = "the gateway is starting"
DATABASE_DOWN = "the database does not respond"
DATABASE_READ_ONLY = "the database cannot be written"
DATABASE_DAMAGED = "the database is damaged; toolspace doctor says more"
_CHECK_SECONDS = 2.0
"""How long the database may take to respond to a check."""
_CACHE_SECONDS = 0.5
"""How long a check is cached: anyone may ask, as often as they like."""
_COUNT_SECONDS = 5.0
"""How long the database may take to count open work."""
_COUNT_EVERY_SECONDS = 2.0
"""How old the counts of open work may be."""

routes = RouteTable("operations")


class Readiness:
    """Whether this process can serve requests: it is started, and its database is whole, can be read and written.

    `read` and `write` try the database and raise if it fails; a full disk can still be read. `is_damaged` says whether
    damage was found.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[object]],
        write: Callable[[], Awaitable[object]],
        *,
        is_damaged: Callable[[], bool] = lambda: False,
        timeout: float = _CHECK_SECONDS,
    ) -> None:
        self.is_started = False
        self.is_stopping = False
        self._checks = ((read, DATABASE_DOWN), (write, DATABASE_READ_ONLY))
        self._is_damaged = is_damaged
        self._timeout = timeout
        self._check_task: asyncio.Task[str | None] | None = None
        self._checked_at = -1e9

    async def list_reasons(self) -> list[str]:
        """Returns why the process is not ready; nothing if it is ready."""
        reasons = [STOPPING] if self.is_stopping else [] if self.is_started else [STARTING]
        if not self.is_stopping and (reason := await self._check_database()) is not None:
            reasons.append(reason)
        if self._is_damaged():
            reasons.append(DATABASE_DAMAGED)
        return reasons

    async def aclose(self) -> None:
        if self._check_task is not None:
            self._check_task.cancel()
            await asyncio.gather(self._check_task, return_exceptions=True)

    async def _check_database(self) -> str | None:
        now = time.monotonic()
        task = self._check_task
        if task is None or (task.done() and now - self._checked_at > _CACHE_SECONDS):
            self._checked_at = now
            task = self._check_task = asyncio.create_task(self._run_checks())
        # Shielded: several requests share the check, and one that is cancelled must not cancel it for the others.
        return await asyncio.shield(task)

    async def _run_checks(self) -> str | None:
        for check, reason in self._checks:
            try:
                async with asyncio.timeout(self._timeout):
                    await check()
            except Exception as error:  # Any failure makes the process not ready.
                cause = f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else error
                _log.warning("not ready: %s: %s", reason, cause)
                return reason
        return None


class OpenWorkCounter:
    """Counts the open work in the database, at most every two seconds, however many ask for metrics."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._task: asyncio.Task[runs.OpenWorkCounts | None] | None = None
        self._started_at = -1e9

    async def count(self) -> runs.OpenWorkCounts | None:
        """None if the database does not respond: the other metrics are useful without it."""
        now = time.monotonic()
        task = self._task
        if task is None or (task.done() and (now - self._started_at > _COUNT_EVERY_SECONDS or task.result() is None)):
            self._started_at = now
            task = self._task = asyncio.create_task(self._count())
        # Shielded: several requests share the counts, and one that is cancelled must not cancel them for the others.
        return await asyncio.shield(task)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _count(self) -> runs.OpenWorkCounts | None:
        try:
            async with asyncio.timeout(_COUNT_SECONDS):
                return await self._ledger.read(runs.count_open_work)
        except (StorageError, TimeoutError):
            return None


class Health(msgspec.Struct, frozen=True):
    """The process is alive."""

    status: Literal["ok"] = "ok"
    """Always `ok`."""


class Ready(msgspec.Struct, frozen=True):
    """The process can serve requests."""

    status: Literal["ready"] = "ready"
    """Always `ready`."""


@routes.add("GET", "/health", "Check that the process is alive", access=Access.OPEN)
async def get_health(_: Request) -> Health:
    return Health()


@routes.add(
    "GET",
    "/ready",
    "Check that the process can serve requests",
    access=Access.OPEN,
    description="503 with `reasons` while it starts or stops, and while the database is unavailable.",
    error_statuses=(503,),
)
async def get_ready(request: Request) -> Ready:
    if reasons := await request.gateway.readiness.list_reasons():
        raise Problem(503, f"Not ready: {'; '.join(reasons)}", headers=((b"retry-after", b"1"),), reasons=reasons)
    return Ready()


@routes.add("GET", "/metrics", "Get metrics in the Prometheus format", media_type="text/plain")
async def get_metrics(request: Request) -> Response:
    gateway = request.gateway
    counts = await gateway.open_work.count()
    text = render_metrics(gateway, counts)
    return Response(text, media_type=CONTENT_TYPE)
