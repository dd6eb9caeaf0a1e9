"""Functions that answer an MCP server's requests during a call: elicitation, sampling and roots.

A program passes them as `McpCallbacks`. A server is told that it may send a request only if there is a callback for
it. Plain data and functions: does not import the MCP SDK.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toolspace.core.context import ToolContext
from toolspace.core.elicitation import ElicitationResult
from toolspace.errors import ToolError


class ElicitationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A server's question to the user."""

    server: str
    message: str
    schema: Mapping[str, Any] | None = None
    """The JSON Schema of the answer: an object of flat fields. None if the user is to open `url` instead."""
    url: str | None = None


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A server's request for a model's response. `params` are the request's parameters as on the wire."""

    server: str
    params: Mapping[str, Any]


ElicitationCallback = Callable[[ElicitationRequest, ToolContext | None], Awaitable[ElicitationResult]]
"""Asks the user. The context is that of the call during which the server asks; None if that call is not certain."""
SamplingCallback = Callable[[SamplingRequest, ToolContext | None], Awaitable[Mapping[str, Any]]]
"""Asks a model. Returns `{role, content, model, stopReason?}` as on the wire."""
RootsCallback = Callable[[], Sequence[Path]]
"""Returns the folders that a server should work in."""


class McpCallbacks(msgspec.Struct, frozen=True, kw_only=True):
    """The callbacks for all MCP servers of a toolspace."""

    elicit: ElicitationCallback | None = None
    sample: SamplingCallback | None = None
    roots: RootsCallback | None = None


NO_CALLBACKS = McpCallbacks()


async def _elicit_from_caller(request: ElicitationRequest, context: ToolContext | None) -> ElicitationResult:
    if context is None or context.caller_client is None:
        return ElicitationResult(action="decline")
    try:
        return await context.caller_client.elicit(request.message, schema=request.schema, url=request.url)
    except ToolError:  # The caller cannot be asked. The server need not wait or ask again.
        return ElicitationResult(action="decline")


async def _sample_from_caller(request: SamplingRequest, context: ToolContext | None) -> Mapping[str, Any]:
    if context is None or context.caller_client is None:
        raise ToolError("no model to ask: the caller is not certain, or does not support sampling")
    return await context.caller_client.sample(request.params)


FORWARD_TO_CALLER = McpCallbacks(elicit=_elicit_from_caller, sample=_sample_from_caller)
"""Forwards a server's requests to whoever made the call. For a toolspace that serves other clients.

Roots are not forwarded: a server would keep the folders of one caller for all others.
"""
