"""What a stage is: a function that wraps the way of a call, or leaves it as it is."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.catalog import Entry
from toolspace.orchestrator.services import Services
from toolspace.orchestrator.settings import Effective

Handler = Callable[[Call], Coroutine[Any, Any, ToolResult]]


Instant = Callable[[Call], ToolResult | None]


class Plan(NamedTuple):
    """What a stage is compiled from: one tool, what holds for it, and whether its calls belong to runs."""

    entry: Entry
    settings: Effective
    services: Services
    in_run: bool


async def ended(result: ToolResult) -> ToolResult:
    """The way of a call that a stage ended before it went further."""
    return result


class Stage(Protocol):
    """Returns a handler around `next`, or `next` itself where this tool does not need the stage.

    One that only looks before the call goes on is a plain function that returns `next(call)`: a call that waits does
    not keep its frame.
    """

    def __call__(self, plan: Plan, next: Handler, /) -> Handler: ...
