"""Tool definitions in the formats that models and protocols take. Pure translation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from toolspace.core import json_text
from toolspace.core.tool import Tool

ToolFormat = Literal["openai", "openai-responses", "anthropic", "gemini", "mcp"]


def export_tools(tools: Iterable[Tool], format: ToolFormat = "openai") -> list[dict[str, Any]]:
    """The tools as one API takes them. For Gemini the list is what goes into `functionDeclarations`."""
    try:
        convert = _FORMATS[format]
    except KeyError:
        raise ValueError(f"unknown tool format {format!r}; it is one of {', '.join(_FORMATS)}") from None
    return [convert(tool) for tool in tools]


def definition_text(tool: Tool) -> str:
    """What a model is charged for when it is shown the tool."""
    return json_text.encode({"name": tool.name, "description": tool.description, "parameters": tool.input_schema})


def _openai(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _openai_responses(tool: Tool) -> dict[str, Any]:
    # The responses API turns `strict` on where it is not said, and strict refuses optional parameters.
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
    # `parameters` takes a subset of OpenAPI only; this field takes JSON Schema as it is.
    return {"name": tool.name, "description": tool.description, "parametersJsonSchema": tool.input_schema}


def _mcp(tool: Tool) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "inputSchema": _object_schema(tool.input_schema),
    }
    if tool.output_schema is not None:
        wire["outputSchema"] = tool.output_schema
    said = tool.annotations
    hints = {
        "readOnlyHint": said.read_only,
        "destructiveHint": said.destructive,
        "idempotentHint": said.idempotent,
        "openWorldHint": said.open_world,
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
