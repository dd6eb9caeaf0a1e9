"""Tools that configuration declares: who executes them, and what this process can execute itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from toolspace.core import jsontext
from toolspace.core.context import ToolContext
from toolspace.core.tool import ExecutionType
from toolspace.errors import ToolExecutionError

_FIELD = re.compile(r"\{\{\s*([\w.-]+)\s*\}\}")


def handler_of(name: str, kind: ExecutionType, execution: Mapping[str, Any]) -> Callable[..., Any]:
    """What runs a configured tool here, by who executes it."""

    async def internal(parameters: dict[str, Any], context: ToolContext) -> Any:
        return {"success": True, "args": parameters}

    async def static(parameters: dict[str, Any], context: ToolContext) -> Any:
        return fill(execution.get("output"), parameters)

    async def elsewhere(parameters: dict[str, Any], context: ToolContext) -> Any:
        raise ToolExecutionError(f'tool "{name}" has executionType "{kind}", which nobody here can execute')

    match kind:
        case "internal":
            return internal
        case "static":
            return static
        case _:
            return elsewhere


def fill(template: Any, parameters: Mapping[str, Any]) -> Any:
    """A configured output with `{{name}}` filled from the input. A field alone keeps its type."""
    if isinstance(template, str):
        whole = _FIELD.fullmatch(template.strip())
        if whole is not None:
            return _look_up(parameters, whole[1])
        return _FIELD.sub(lambda match: _as_text(_look_up(parameters, match[1])), template)
    if isinstance(template, Mapping):
        return {key: fill(value, parameters) for key, value in template.items()}  # pyright: ignore
    if isinstance(template, list):
        return [fill(item, parameters) for item in template]  # pyright: ignore
    return template


def _look_up(parameters: Mapping[str, Any], path: str) -> Any:
    value: Any = parameters
    for step in path.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return None
        value = value[step]  # pyright: ignore
    return value  # pyright: ignore


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else jsontext.encode(value)
