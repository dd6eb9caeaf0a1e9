"""The routes of the HTTP API, one module per resource. `ROUTES` lists all of them; other paths are not served.

A handler reads the request, checks that the caller may see the resource, and calls queries or services. It has no SQL.
"""

from __future__ import annotations

from typing import Final

from toolspace.server.routes import (
    agents,
    calls,
    documents,
    entities_and_spaces,
    health_and_metrics,
    inbox,
    keys,
    messages,
    runs,
    streams,
    tasks,
    tools_and_servers,
    workers,
)
from toolspace.server.routing import Route

ROUTES: Final[tuple[Route, ...]] = (
    *entities_and_spaces.ENTITY_ROUTES,
    *entities_and_spaces.ROUTES,
    *messages.ROUTES,
    *agents.ROUTES,
    *inbox.ROUTES,
    *agents.PLAN_ROUTES,
    *agents.GOAL_AND_MEMORY_ROUTES,
    *documents.ROUTES,
    *tasks.ROUTES,
    *runs.ROUTES,
    *calls.ROUTES,
    *tools_and_servers.ROUTES,
    *workers.ROUTES,
    *tools_and_servers.SERVER_ROUTES,
    *calls.OUTPUT_ROUTES,
    *keys.ROUTES,
    *streams.ROUTES,
    *health_and_metrics.ROUTES,
)
