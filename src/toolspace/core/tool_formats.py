"""Converts tool definitions to the formats of model APIs and MCP. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from toolspace.core import json_text
from toolspace.core.tool import Tool

ToolFormat = Literal["openai", "openai-responses", "anthropic", "gemini", "mcp"]


def export_tools(tools: Iterable[Tool], format: ToolFormat = "openai") -> list[dict[str, Any]]:
    """Returns the tools in the format of an API. For Gemini, the list is the value of `functionDeclarations`."""
    try:
        convert = _FORMATS[format]
    except KeyError:
        raise ValueError(f"unknown tool format {format!r}; it is one of {', '.join(_FORMATS)}") from None
    return [convert(tool) for tool in tools]


def definition_text(tool: Tool) -> str:
    """Returns the text that a model is charged for if it sees the tool."""
    return json_text.encode({"name": tool.name, "description": tool.description, "parameters": tool.input_schema})


def _openai(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _openai_responses(tool: Tool) -> dict[str, Any]:
    # The Responses API defaults to `strict`, which does not allow optional parameters.
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": False,
    }


def _anthropic(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}


def _gemini(tool: Tool) -> dict[str, Any]:
    # `parameters` accepts only a subset of OpenAPI; this field accepts JSON Schema.
    return {"name": tool.name, "description": tool.description, "parametersJsonSchema": tool.input_schema}


def _mcp(tool: Tool) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "inputSchema": _object_schema(tool.input_schema),
    }
    if tool.output_schema is not None:
        wire["outputSchema"] = tool.output_schema
    annotations = tool.annotations
    hints = {
        "readOnlyHint": annotations.read_only,
        "destructiveHint": annotations.destructive,
        "idempotentHint": annotations.idempotent,
        "openWorldHint": annotations.open_world,
    }
    hints = {name: hint for name, hint in hints.items() if hint is not None}
    if hints:
        wire["annotations"] = hints
    return wire


def _object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema if "type" in schema else {"type": "object", **schema}


_FORMATS: dict[str, Callable[[Tool], dict[str, Any]]] = {
    "openai": _openai,
    "openai-responses": _openai_responses,
    "anthropic": _anthropic,
    "gemini": _gemini,
    "mcp": _mcp,
}
