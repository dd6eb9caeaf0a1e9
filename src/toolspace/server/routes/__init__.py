"""The routes of the HTTP API, one module per resource. `ROUTES` lists all of them; other paths are not served.

A handler reads the request, checks that the caller may see the resource, and calls queries or services. It has no SQL.
"""

from __future__ import annotations

from typing import Final

from toolspace.server.routes import (
    agents,
    approvals,
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
    *entities_and_spaces.entity_routes,
    *entities_and_spaces.space_routes,
    *messages.routes,
    *agents.routes,
    *inbox.routes,
    *documents.routes,
    *tasks.routes,
    *runs.routes,
    *calls.routes,
    *approvals.routes,
    *tools_and_servers.tool_routes,
    *workers.routes,
    *tools_and_servers.server_routes,
    *calls.output_routes,
    *keys.routes,
    *streams.routes,
    *health_and_metrics.routes,
)
