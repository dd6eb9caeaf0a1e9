"""Builds the handlers of tools that the configuration declares, by their execution type.

`toolspace.composition` uses it. This process executes the types `gateway`, `compute`, `internal`, `static` and `wait`;
calls of the types `external` and `space` become pending calls of the gateway. Prebuilt tools are not built here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.names import did_you_mean
from toolspace.core.times import parse_duration
from toolspace.core.tool import ExecutionType, Tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolDefinitionError, ToolExecutionError, ToolValidationError

if TYPE_CHECKING:
    from toolspace.providers.rest.client import HttpClient

_FIELD = re.compile(r"\{\{\s*([\w.-]+)\s*\}\}")
_EXECUTORS: Mapping[str, str] = {
    "external": "a worker",
    "space": "a person in a space",
    "agent": "an agent",
    "image": "an image model",
}
_DURATION_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "duration": {
            "type": ["number", "string"],
            "description": 'How long to wait: milliseconds, or text such as "30s", "5m" or "2h".',
        }
    },
    "required": ["duration"],
    "additionalProperties": False,
}
_ANY_INPUT_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}

ToolHandler = Callable[[dict[str, Any], ToolContext], Coroutine[Any, Any, Any]]


class ToolExecution(msgspec.Struct, frozen=True, kw_only=True):
    """The handler of a configured tool, and its input schema."""

    handler: ToolHandler
    input_schema: Mapping[str, Any]


def build_execution(
    name: str,
    kind: ExecutionType,
    execution: Mapping[str, Any],
    *,
    input_schema: Mapping[str, Any] | None,
    client: Callable[[], HttpClient],
) -> ToolExecution:
    """Builds the handler of a configured tool. Without `input_schema`, the schema follows from `execution`.

    Raises `ToolDefinitionError` that begins with the key of `execution` that is wrong.
    """
    if kind == "gateway":
        return _build_request(name, execution, input_schema, client)
    if kind == "compute":
        return _build_expression(execution, input_schema)
    if input_schema is None:
        input_schema = _DURATION_SCHEMA if kind == "wait" and "duration" not in execution else _ANY_INPUT_SCHEMA
    match kind:
        case "internal":
            handler = _return_arguments
        case "static":
            handler = partial(_return_output, execution.get("output"))
        case "wait":
            handler = partial(_wait, name, execution.get("duration"))
        case "external" | "space":
            handler = partial(_wait_for_result, name, kind)
        case _:
            handler = partial(_refuse, name, kind)
    return ToolExecution(handler=handler, input_schema=input_schema)


class OutputSchemaError(ToolDefinitionError):
    """The output schema of a tool cannot be used to check its results."""


def check_output_schema(tool: Tool) -> None:
    """Raises `OutputSchemaError` if results that others submit cannot be checked against the schema of a tool."""
    if tool.output_schema is None or tool.execution_type not in ("external", "space"):
        return
    # Imported here: only configurations with such a schema need it.
    from toolspace.core.argument_validation import compile_schema
    from toolspace.core.schema_size import MAX_SHOWN_SCHEMA_BYTES, SchemaTooLarge, measure_schema

    size = json_text.encoded_size(tool.output_schema)
    if size > MAX_SHOWN_SCHEMA_BYTES:
        raise OutputSchemaError(f"it has {size:,} bytes; the maximum is {MAX_SHOWN_SCHEMA_BYTES:,}")
    try:
        measure_schema(tool.output_schema)
        compile_schema(tool.output_schema, owner=f"the results of {tool.name!r}")
    except (SchemaTooLarge, ToolDefinitionError) as error:
        raise OutputSchemaError(str(error)) from None


def _build_request(
    name: str, execution: Mapping[str, Any], input_schema: Mapping[str, Any] | None, client: Callable[[], HttpClient]
) -> ToolExecution:
    from toolspace.providers.rest.provider import build_request_handler

    handler, request_schema = build_request_handler(name, execution, client())
    if input_schema is None:
        input_schema = request_schema if request_schema.get("properties") else _ANY_INPUT_SCHEMA
    return ToolExecution(handler=handler, input_schema=input_schema)


def _build_expression(execution: Mapping[str, Any], input_schema: Mapping[str, Any] | None) -> ToolExecution:
    # Imported here: only configurations with expressions need the parser.
    from toolspace.providers.expressions.compiler import Expression
    from toolspace.providers.expressions.runtime import ExpressionError

    try:
        expression = Expression(str(execution.get("expression")))
    except ExpressionError as error:
        raise ToolDefinitionError(f"expression: {error}") from None
    if input_schema is None:
        input_schema = {"type": "object", "properties": {name: {} for name in expression.names}}
    else:
        _check_names(expression.names, input_schema)

    async def handle(parameters: dict[str, Any], context: ToolContext) -> Any:
        try:
            return expression.evaluate(parameters)
        except ExpressionError as error:
            raise ToolExecutionError(f"the expression has no value for this input: {error}") from None

    return ToolExecution(handler=handle, input_schema=input_schema)


def _check_names(names: tuple[str, ...], schema: Mapping[str, Any]) -> None:
    """Raises for a name that the schema does not have, unless the schema allows other properties."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    if not properties or "patternProperties" in schema or schema.get("additionalProperties", False) is not False:
        return
    for name in names:
        if name not in properties:
            hint = did_you_mean(name, properties) or f"; it has {', '.join(properties)}"
            raise ToolDefinitionError(f'expression: the inputSchema has no "{name}"{hint}')


async def _return_arguments(parameters: dict[str, Any], context: ToolContext) -> Any:
    return {"success": True, "args": parameters}


async def _return_output(output: Any, parameters: dict[str, Any], context: ToolContext) -> Any:
    return fill_output(output, parameters)


async def _wait(name: str, duration: Any, parameters: dict[str, Any], context: ToolContext) -> Any:
    try:
        seconds = parse_duration(parameters.get("duration") if duration is None else duration)
    except ValueError as error:
        raise ToolValidationError(f'tool "{name}" cannot wait: {error}') from None
    if context.host is not None and context.handle is not None:
        return await context.host.wait_for_result(context.handle.tool, parameters, context)
    await asyncio.sleep(seconds)  # Without a gateway nothing survives a restart, so a plain sleep is enough.
    return {"waited": round(seconds * 1000)}


async def _wait_for_result(name: str, kind: ExecutionType, parameters: dict[str, Any], context: ToolContext) -> Any:
    """Waits for a result that someone else submits."""
    if context.host is None or context.handle is None:
        raise ToolExecutionError(
            f'tool "{name}" is executed by {_EXECUTORS[kind]}; start the gateway (toolspace serve) and call it there',
            executed=False,
        )
    # The tool of the call: the configuration may have changed its visibility.
    return await context.host.wait_for_result(context.handle.tool, parameters, context)


async def _refuse(name: str, kind: ExecutionType, parameters: dict[str, Any], context: ToolContext) -> Any:
    raise ToolExecutionError(
        f'tool "{name}" is executed by {_EXECUTORS[kind]}, which this version does not support', executed=False
    )


def fill_output(template: Any, parameters: Mapping[str, Any]) -> Any:
    """Fills `{{name}}` in a configured output from the arguments. A text that is one field keeps its type."""
    if isinstance(template, str):
        if (match := _FIELD.fullmatch(template.strip())) is not None:
            return _find_argument(parameters, match[1])
        return _FIELD.sub(lambda match: _to_text(_find_argument(parameters, match[1])), template)
    if isinstance(template, Mapping):
        members = cast("Mapping[str, Any]", template)
        return {key: fill_output(value, parameters) for key, value in members.items()}
    if isinstance(template, list):
        return [fill_output(item, parameters) for item in cast("list[Any]", template)]
    return template


def _find_argument(parameters: Mapping[str, Any], path: str) -> Any:
    value: Any = parameters
    for step in path.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return None
        value = cast("Mapping[str, Any]", value)[step]
    return value


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json_text.encode(value)
