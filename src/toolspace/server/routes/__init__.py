"""The routes of the HTTP API, one module per resource. `ROUTES` lists all of them; other paths are not served.

A handler reads the request, checks that the caller may see the resource, and calls queries or services. It has no SQL.
"""

from __future__ import annotations

from typing import Final

from toolspace.server.routes import (
    agents,
    calls,
    documents,
    entities,
    goals_and_memories,
    health_and_metrics,
    inbox,
    keys,
    messages,
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
from toolspace.server.routing import Route

ROUTES: Final[tuple[Route, ...]] = (
    *entities.ROUTES,
    *spaces.ROUTES,
    *messages.ROUTES,
    *agents.ROUTES,
    *inbox.ROUTES,
    *plans.ROUTES,
    *goals_and_memories.ROUTES,
    *documents.ROUTES,
    *tasks.ROUTES,
    *runs.ROUTES,
    *calls.ROUTES,
    *tools.ROUTES,
    *workers.ROUTES,
    *servers.ROUTES,
    *outputs.ROUTES,
    *keys.ROUTES,
    *streams.ROUTES,
    *health_and_metrics.ROUTES,
)
