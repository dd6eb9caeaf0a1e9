"""What the measures call: one trivial tool, many generated ones, and a toolspace that holds them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from toolspace import EventType, Settings, ToolProvider, Toolspace

ARGUMENTS = '{"a":1,"b":2}'

_SOURCE = '''
async def {name}(query: str, limit: int = 10, tags: list[str] | None = None, exact: bool = False) -> str:
    """Search collection {number} for what fits a query.

    Args:
        query: What to look for.
        limit: How many to return at most.
        tags: Only what carries one of these.
        exact: Whether the words must match as they are.
    """
    return query
'''


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make_functions(count: int) -> list[Callable[..., Any]]:
    """Functions with hints, defaults and docstrings such as people write, each with code of its own."""
    functions: list[Callable[..., Any]] = []
    for number in range(count):
        name = f"search_{number:05d}"
        namespace: dict[str, Any] = {"__name__": __name__}
        exec(_SOURCE.format(name=name, number=number), namespace)
        functions.append(namespace[name])
    return functions


def create_toolspace(
    tools: Iterable[Any], *, providers: Iterable[ToolProvider] = (), events: bool = True, **settings: Any
) -> Toolspace:
    """A toolspace as a program makes it, with one subscriber each for a call's begin and end."""
    state_dir = Path(tempfile.gettempdir()) / "toolspace-bench"
    ts = Toolspace(tools, providers=providers, settings=Settings(state_dir=state_dir, **settings))
    if events:
        ts.bus.subscribe(ignore, EventType.TOOL_CALL_REQUESTED)
        ts.bus.subscribe(ignore, EventType.TOOL_CALL_COMPLETED, EventType.TOOL_CALL_FAILED)
    return ts


def ignore(event: object) -> None:
    """The cheapest subscriber."""
