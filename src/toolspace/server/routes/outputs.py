"""Routes of stored outputs: results that were too large for a model, as whole texts, for operators."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from toolspace.server.api_types import QueryParameters
from toolspace.server.authorization import Access
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import Response
from toolspace.server.routing import Route

MAX_BYTES = 16 * 1024 * 1024
"""Limit of one response. The text is read at once, so that a slow client keeps no file open."""


class OutputQuery(QueryParameters, frozen=True, kw_only=True):
    max_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)] = MAX_BYTES
    """Maximum number of bytes; the rest is cut off."""


async def get_output(request: Request) -> Response:
    query = request.query(OutputQuery)
    handle = f"{request.params['session']}/{request.params['outputId']}"
    outputs = request.gateway.toolspace.outputs
    output = await outputs.inspect(handle)
    if output is None:
        raise Problem(404, f'Stored output "{handle[:200]}" not found; it may have expired')
    text = await outputs.text(output, limit=query.max_bytes)
    headers = (
        (b"x-output-tool", output.tool.encode("ascii", "replace")),
        (b"x-output-bytes", b"%d" % output.bytes),
        (b"x-output-lines", b"%d" % output.lines),
    )
    # Always text/plain: a browser must not run a tool's result as a page or script of this server.
    return Response(text, media_type="text/plain; charset=utf-8", headers=headers)


ROUTES = [
    Route(
        method="GET",
        path="/api/outputs/{session}/{outputId}",
        handler=get_output,
        access=Access.SECRET,
        tag="outputs",
        summary="Get a stored output",
        description="The path is the handle in the tool's result. `x-output-bytes` is the size of the whole output.",
        parameter_descriptions={"session": "The part of the handle before the slash."},
        query=OutputQuery,
        media_type="text/plain",
    ),
]
