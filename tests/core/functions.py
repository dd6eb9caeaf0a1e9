"""Helpers for tests of function tools: the schema of a function, and the result of its call."""

import enum
from collections.abc import Callable
from typing import Any

import jsonschema_rs

from toolspace import Tool, ToolResult, Toolspace, tool


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    input_schema = dict(tool(function).input_schema)
    jsonschema_rs.meta.validate(input_schema)
    return input_schema


def properties(function: Callable[..., Any]) -> dict[str, Any]:
    return schema(function)["properties"]


async def call(function: Any, arguments: Any = None) -> ToolResult:
    tested_tool = function if isinstance(function, Tool) else tool(function)
    return await Toolspace(tools=[tested_tool]).call(tested_tool.name, arguments)


async def value(function: Any, arguments: Any = None) -> Any:
    return (await call(function, arguments)).unwrap()
