"""What a server may ask of us while it works: a question to the user, a model's answer, the folders in use.

Small functions that a program gives; without one, the server is not told that it could ask.
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
    """A server's question to the user (elicitation)."""

    server: str
    message: str
    schema: Mapping[str, Any] | None = None
    """What to answer: an object of flat fields. None where a page is to be opened instead."""
    url: str | None = None


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A server's wish for a model's answer. `params` is the request as it is on the wire."""

    server: str
    params: Mapping[str, Any]


ElicitationCallback = Callable[[ElicitationRequest, ToolContext | None], Awaitable[ElicitationResult]]
"""Asks the user. The context is that of the call during which the server asks, where that is certain."""
SamplingCallback = Callable[[SamplingRequest, ToolContext | None], Awaitable[Mapping[str, Any]]]
"""Asks a model: gives `{role, content, model, stopReason?}` as on the wire."""
RootsCallback = Callable[[], Sequence[Path]]
"""The folders that a server should work in."""


class McpCallbacks(msgspec.Struct, frozen=True, kw_only=True):
    elicit: ElicitationCallback | None = None
    sample: SamplingCallback | None = None
    roots: RootsCallback | None = None


NO_CALLBACKS = McpCallbacks()


async def _ask_the_caller(question: ElicitationRequest, context: ToolContext | None) -> ElicitationResult:
    if context is None or context.caller_client is None:
        return ElicitationResult(action="decline")
    try:
        return await context.caller_client.elicit(question.message, schema=question.schema, url=question.url)
    except ToolError:  # It cannot be asked this. The server need not wait, nor ask again.
        return ElicitationResult(action="decline")


async def _ask_the_callers_model(sampling: SamplingRequest, context: ToolContext | None) -> Mapping[str, Any]:
    if context is None or context.caller_client is None:
        raise ToolError("nobody can be asked: it is not certain whose model is meant, or it takes no questions")
    return await context.caller_client.sample(sampling.params)


FORWARD_TO_CALLER = McpCallbacks(elicit=_ask_the_caller, sample=_ask_the_callers_model)
"""Leads a server's questions to whoever made the call: for a toolspace that serves others.

Not for folders: a server keeps those of one caller for all the others.
"""
