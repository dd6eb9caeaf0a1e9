"""Routes of MCP servers: their status, and restarts."""

from __future__ import annotations

from toolspace.core.names import did_you_mean
from toolspace.errors import ProviderError
from toolspace.providers.mcp.status import ServerStatus
from toolspace.server.api_types import ResultPage
from toolspace.server.authorization import Access
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.routing import Route


async def list_servers(request: Request) -> ResultPage[ServerStatus]:
    return ResultPage(items=request.gateway.toolspace.list_servers(), next=None)


async def get_server(request: Request) -> ServerStatus:
    return _get_status(request)


async def restart_server(request: Request) -> ServerStatus:
    name = _get_status(request).name
    try:
        return await request.gateway.toolspace.restart_server(name)
    except ProviderError as error:
        raise Problem(502, f'MCP server "{name}" did not start: {error}') from error


def _get_status(request: Request) -> ServerStatus:
    name = request.params["name"]
    servers = {status.name: status for status in request.gateway.toolspace.list_servers()}
    if name not in servers:
        raise Problem(404, f'MCP server "{name[:200]}" not found{did_you_mean(name, servers)}')
    return servers[name]


_PARAMETERS = {"name": "The name of the MCP server."}

ROUTES = [
    Route(
        method="GET",
        path="/api/servers",
        handler=list_servers,
        access=Access.SECRET,
        tag="servers",
        summary="List MCP servers and their status",
        response=ResultPage[ServerStatus],
    ),
    Route(
        method="GET",
        path="/api/servers/{name}",
        parameter_descriptions=_PARAMETERS,
        handler=get_server,
        access=Access.SECRET,
        tag="servers",
        summary="Get the status of an MCP server",
        response=ServerStatus,
    ),
    Route(
        method="POST",
        path="/api/servers/{name}/restart",
        parameter_descriptions=_PARAMETERS,
        handler=restart_server,
        access=Access.SECRET,
        tag="servers",
        summary="Restart an MCP server",
        response=ServerStatus,
        error_statuses=(502,),
    ),
]
