"""Routes for results that were too large for a model: the whole text, for an operator."""

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
"""What one answer holds. Handed over as a whole, so that a reader who stops reading holds no open file."""


class OutputQuery(QueryParameters, frozen=True, kw_only=True):
    max_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES, description="The first bytes; more are left out.")] = MAX_BYTES


async def get_output(request: Request) -> Response:
    query = request.query(OutputQuery)
    handle = f"{request.params['session']}/{request.params['outputId']}"
    outputs = request.gateway.toolspace.outputs
    output = await outputs.inspect(handle)
    if output is None:
        raise Problem(404, f'there is no stored output "{handle[:200]}"; it may have expired')
    text = await outputs.text(output, limit=query.max_bytes)
    headers = (
        (b"x-output-tool", output.tool.encode("ascii", "replace")),
        (b"x-output-bytes", b"%d" % output.bytes),
        (b"x-output-lines", b"%d" % output.lines),
    )
    # Always text: a tool's result must not become a page or a script of this server.
    return Response(text, media_type="text/plain; charset=utf-8", headers=headers)


ROUTES = [
    Route(
        method="GET",
        path="/api/outputs/{session}/{outputId}",
        handler=get_output,
        access=Access.SECRET,
        tag="outputs",
        summary="A result that was stored because it was too large",
        description="The handle in the result, `session-…/…`, is the path. `x-output-bytes` is the size of the whole.",
        query=OutputQuery,
        media_type="text/plain",
    ),
]
