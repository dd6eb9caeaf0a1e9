"""Tool definitions in the formats of model APIs and of MCP.

`Toolspace.to_llm_tools`, the model adapters and the MCP server use it. Each format stays within the rules of its API;
`explain_export` says what a definition does not say for that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec

from toolspace.core import json_text
from toolspace.core.model_schemas import ModelSchema
from toolspace.core.tool import Tool

ToolFormat = Literal["openai", "openai-responses", "anthropic", "gemini", "mcp"]
OPENAI_FORMATS = ("openai", "openai-responses")


def export_tools(tools: Iterable[Tool], format: ToolFormat = "openai", *, strict: bool = False) -> list[dict[str, Any]]:
    """Returns the tools in the format of an API. For Gemini, the list is the value of `functionDeclarations`.

    `strict` is for OpenAI's formats: a tool whose schema can be expressed in strict mode gets `"strict": True`.
    """
    _check_format(format, strict=strict)
    return [_definition(tool, format, strict=strict) for tool in tools]


def explain_export(
    tools: Iterable[Tool], format: ToolFormat = "openai", *, strict: bool = False
) -> dict[str, list[str]]:
    """Returns what differs between a tool's schema and its definition in a format, by the names of the tools.

    These are other names of properties, constraints that only the description has or that are left out, and why a tool
    is not strict. Tools without such changes are not in the result.
    """
    _check_format(format, strict=strict)
    changes = {tool.name: list(_schema_for(tool, format, strict=strict)[0].changes) for tool in tools}
    return {name: texts for name, texts in changes.items() if texts}


def definition_text(tool: Tool) -> str:
    """Returns the text that a model is charged for if it sees the tool."""
    return json_text.encode(_declaration(tool, "parameters", tool.model_schema))


def _check_format(format: str, *, strict: bool) -> None:
    if format not in _FORMATS and format != "mcp":
        raise ValueError(f"unknown tool format {format!r}; it is one of {', '.join(_FORMATS)}, mcp")
    if strict and format not in OPENAI_FORMATS:
        raise ValueError(f"strict is for the formats {' and '.join(OPENAI_FORMATS)}, not for {format!r}")


def _definition(tool: Tool, format: ToolFormat, *, strict: bool) -> dict[str, Any]:
    if format == "mcp":
        return _mcp_definition(tool)
    schema, is_strict = _schema_for(tool, format, strict=strict)
    return _FORMATS[format](tool, schema, is_strict)


def _schema_for(tool: Tool, format: ToolFormat, *, strict: bool) -> tuple[ModelSchema, bool]:
    """Returns the schema of a tool in a format, and whether it is strict."""
    if format == "mcp":
        return ModelSchema(tool.input_schema), False
    schema = tool.model_schema
    if format == "gemini":
        from toolspace.core.gemini_schemas import build_gemini_schema

        narrow_schema = build_gemini_schema(schema.schema)
    elif strict:
        from toolspace.core.strict_schemas import NotStrict, build_strict_schema

        try:
            narrow_schema = build_strict_schema(schema.schema)
        except NotStrict as reason:
            return ModelSchema(schema.schema, (*schema.changes, f"not strict: {reason}")), False
    else:
        return schema, False
    return ModelSchema(narrow_schema.schema, (*schema.changes, *narrow_schema.changes)), strict


def _declaration(tool: Tool, schema_key: str, schema: ModelSchema) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, schema_key: schema.schema}


def _openai_chat(tool: Tool, schema: ModelSchema, is_strict: bool) -> dict[str, Any]:
    function = _declaration(tool, "parameters", schema)
    return {"type": "function", "function": {**function, "strict": True} if is_strict else function}


def _openai_responses(tool: Tool, schema: ModelSchema, is_strict: bool) -> dict[str, Any]:
    # The Responses API takes a missing `strict` for true.
    return {"type": "function", **_declaration(tool, "parameters", schema), "strict": is_strict}


_FORMATS: dict[str, Callable[[Tool, ModelSchema, bool], dict[str, Any]]] = {
    "openai": _openai_chat,
    "openai-responses": _openai_responses,
    "anthropic": lambda tool, schema, _: _declaration(tool, "input_schema", schema),
    # `parameters` accepts only a subset of OpenAPI; this field accepts JSON Schema.
    "gemini": lambda tool, schema, _: _declaration(tool, "parametersJsonSchema", schema),
}


def _mcp_definition(tool: Tool) -> dict[str, Any]:
    """MCP passes the schema on as it is, with the tool's own names; and further fields as its server sent them."""
    wire = {**tool.mcp_fields, **_declaration(tool, "inputSchema", ModelSchema(tool.input_schema))}
    if "type" not in tool.input_schema:
        wire["inputSchema"] = {"type": "object", **tool.input_schema}
    if tool.output_schema is not None:
        wire["outputSchema"] = tool.output_schema
    if hints := msgspec.to_builtins(tool.annotations):
        annotations: Mapping[str, Any] = tool.mcp_fields.get("annotations") or {}
        wire["annotations"] = {**annotations, **{f"{name}Hint": hint for name, hint in hints.items()}}
    return wire
