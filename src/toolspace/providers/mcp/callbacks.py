"""What a server may ask of us while it works: a question to the user, a model's answer, the folders in use.

Small functions that a program gives; without one, the server is not told that it could ask.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toolspace.core.context import ToolContext
from toolspace.core.questions import Answer
from toolspace.errors import ToolError


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A server's question to the user (elicitation)."""

    server: str
    message: str
    schema: Mapping[str, Any] | None = None
    """What to answer: an object of flat fields. None where a page is to be opened instead."""
    url: str | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """A server's wish for a model's answer. `params` is the request as it is on the wire."""

    server: str
    params: Mapping[str, Any]


Elicit = Callable[[Question, ToolContext | None], Awaitable[Answer]]
"""Asks the user. The context is that of the call during which the server asks, where that is certain."""
Sample = Callable[[Sampling, ToolContext | None], Awaitable[Mapping[str, Any]]]
"""Asks a model: gives `{role, content, model, stopReason?}` as on the wire."""
Roots = Callable[[], Sequence[Path]]
"""The folders that a server should work in."""


class Callbacks(msgspec.Struct, frozen=True, kw_only=True):
    elicit: Elicit | None = None
    sample: Sample | None = None
    roots: Roots | None = None


NO_CALLBACKS = Callbacks()


async def _ask_the_caller(question: Question, context: ToolContext | None) -> Answer:
    if context is None or context.questions is None:
        return Answer(action="decline")
    try:
        return await context.questions.elicit(question.message, schema=question.schema, url=question.url)
    except ToolError:  # It cannot be asked this. The server need not wait, nor ask again.
        return Answer(action="decline")


async def _ask_the_callers_model(sampling: Sampling, context: ToolContext | None) -> Mapping[str, Any]:
    if context is None or context.questions is None:
        raise ToolError("nobody can be asked: it is not certain whose model is meant, or it takes no questions")
    return await context.questions.sample(sampling.params)


ASK_THE_CALLER = Callbacks(elicit=_ask_the_caller, sample=_ask_the_callers_model)
"""Leads a server's questions to whoever made the call: for a toolspace that serves others.

Not for folders: a server keeps those of one caller for all the others.
"""
