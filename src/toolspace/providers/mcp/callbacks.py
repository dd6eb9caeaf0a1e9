"""What a server may ask of us while it works: a question to the user, a model's answer, the folders in use.

Small functions that a program gives; without one, the server is not told that it could ask.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from toolspace.core.context import ToolContext


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A server's question to the user (elicitation)."""

    server: str
    message: str
    schema: Mapping[str, Any] | None = None
    """What to answer: an object of flat fields. None where a page is to be opened instead."""
    url: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, Any] | None = None


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
