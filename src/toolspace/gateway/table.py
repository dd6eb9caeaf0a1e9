"""Every route of the gateway. What is not in this table is not served, and not in the document."""

from __future__ import annotations

from typing import Final

from toolspace.gateway.routes import (
    agents,
    calling,
    calls,
    documents,
    entities,
    inbox,
    keys,
    messages,
    minds,
    operations,
    outputs,
    plans,
    runs,
    servers,
    spaces,
    streams,
    tasks,
    tools,
    workers,
)
from toolspace.gateway.routing import Route

ROUTES: Final[tuple[Route, ...]] = (
    *entities.ROUTES,
    *spaces.ROUTES,
    *messages.ROUTES,
    *agents.ROUTES,
    *inbox.ROUTES,
    *plans.ROUTES,
    *minds.ROUTES,
    *documents.ROUTES,
    *tasks.ROUTES,
    *runs.ROUTES,
    *calls.ROUTES,
    *calling.ROUTES,
    *tools.ROUTES,
    *workers.ROUTES,
    *servers.ROUTES,
    *outputs.ROUTES,
    *keys.ROUTES,
    *streams.ROUTES,
    *operations.ROUTES,
)
