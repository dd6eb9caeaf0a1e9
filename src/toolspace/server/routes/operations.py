"""The routes for whoever operates a gateway: does it live, can it work, how is it doing."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from toolspace.errors import StorageError
from toolspace.server.callers import Access
from toolspace.server.metrics import render
from toolspace.server.problems import Problem
from toolspace.server.prometheus import CONTENT_TYPE
from toolspace.server.requests import Request
from toolspace.server.responses import Answer
from toolspace.server.routing import Route
from toolspace.storage.queries import statistics

_RETRY = ((b"retry-after", b"1"),)
_SECONDS = 5.0
"""How long the database may take to count."""


class Health(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Ready(msgspec.Struct, frozen=True):
    status: Literal["ready"] = "ready"


async def health(_: Request) -> Health:
    return Health()


async def ready(request: Request) -> Ready:
    if reasons := await request.gateway.readiness.reasons():
        raise Problem(503, f"not ready: {'; '.join(reasons)}", headers=_RETRY, reasons=reasons)
    return Ready()


async def metrics(request: Request) -> Answer:
    gateway = request.gateway
    counts: statistics.Figures | None
    try:
        async with asyncio.timeout(_SECONDS):
            counts = await gateway.ledger.read(statistics.count)
    except (StorageError, TimeoutError):
        counts = None  # The rest is worth knowing then, too.
    text = render(gateway.metrics, gateway.toolspace, gateway.live(), counts)
    return Answer(text, media_type=CONTENT_TYPE)


ROUTES = [
    Route(
        method="GET",
        path="/health",
        handler=health,
        access=Access.OPEN,
        tag="operations",
        summary="Whether the process lives",
        answer=Health,
    ),
    Route(
        method="GET",
        path="/ready",
        handler=ready,
        access=Access.OPEN,
        tag="operations",
        summary="Whether it can take requests",
        description="503 with `reasons` while it starts, while it stops, and while the database does not answer.",
        answer=Ready,
        problems=(503,),
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=metrics,
        access=Access.SECRET,
        tag="operations",
        summary="Figures, as Prometheus reads them",
        media_type="text/plain",
    ),
]
