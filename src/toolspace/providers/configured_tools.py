"""Tools that configuration declares: who executes them, and what this process can execute itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.names import did_you_mean
from toolspace.core.times import parse_duration
from toolspace.core.tool import ExecutionType
from toolspace.errors import ToolDefinitionError, ToolExecutionError, ToolValidationError

if TYPE_CHECKING:
    from toolspace.providers.rest.client import HttpClient

_FIELD = re.compile(r"\{\{\s*([\w.-]+)\s*\}\}")
_WHO: Mapping[str, str] = {
    "external": "a worker",
    "space": "a person in a space",
    "agent": "an agent",
    "image": "an image model",
}
_START = "start the gateway (toolspace serve) and call it there"
_DURATION: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "duration": {
            "type": ["number", "string"],
            "description": 'How long to wait: milliseconds, or a text such as "30s", "5m", "2h".',
        }
    },
    "required": ["duration"],
    "additionalProperties": False,
}
_ANYTHING: Mapping[str, Any] = {"type": "object", "properties": {}}

ToolHandler = Callable[[dict[str, Any], ToolContext], Coroutine[Any, Any, Any]]


class ToolExecution(msgspec.Struct, frozen=True, kw_only=True):
    """What runs a tool, and what it takes where its definition does not say."""

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
    """What runs a configured tool here, by who executes it. Prebuilt tools are not among them.

    Raises `ToolDefinitionError` that begins with the key of `execution` that is wrong.
    """
    if kind == "gateway":
        return _request(name, execution, input_schema, client)
    if kind == "compute":
        return _compute(execution, input_schema)
    if input_schema is None:
        input_schema = _DURATION if kind == "wait" and "duration" not in execution else _ANYTHING
    match kind:
        case "internal":
            handler = _internal
        case "static":
            handler = _static(execution.get("output"))
        case "wait":
            handler = _wait(name, execution.get("duration"))
        case "external" | "space":
            handler = _elsewhere(name, kind)
        case _:
            handler = _nobody(name, kind)
    return ToolExecution(handler=handler, input_schema=input_schema)


async def _internal(parameters: dict[str, Any], context: ToolContext) -> Any:
    return {"success": True, "args": parameters}


def _static(output: Any) -> ToolHandler:
    async def handle(parameters: dict[str, Any], context: ToolContext) -> Any:
        return fill_output(output, parameters)

    return handle


def _request(
    name: str,
    execution: Mapping[str, Any],
    input_schema: Mapping[str, Any] | None,
    client: Callable[[], HttpClient],
) -> ToolExecution:
    from toolspace.providers.rest.provider import build_request_handler, build_request_schema

    if input_schema is None:
        made = build_request_schema(name, execution)
        input_schema = made if made.get("properties") else _ANYTHING
    return ToolExecution(handler=build_request_handler(name, execution, client()), input_schema=input_schema)


def _compute(execution: Mapping[str, Any], input_schema: Mapping[str, Any] | None) -> ToolExecution:
    # Here: Python's parser for expressions is for those who have one.
    from toolspace.providers.expressions.compiler import Expression
    from toolspace.providers.expressions.values import ExpressionError

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
    """A name that the schema does not have is most likely misspelt, unless the schema takes others too."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    if not properties or "patternProperties" in schema or schema.get("additionalProperties", False) is not False:
        return
    for name in names:
        if name not in properties:
            near = did_you_mean(name, properties) or f"; it has {', '.join(properties)}"
            raise ToolDefinitionError(f'expression: the inputSchema has no "{name}"{near}')


def _wait(name: str, duration: Any) -> ToolHandler:
    async def handle(parameters: dict[str, Any], context: ToolContext) -> Any:
        wanted = parameters.get("duration") if duration is None else duration
        try:
            seconds = parse_duration(wanted)
        except ValueError as error:
            raise ToolValidationError(f'tool "{name}" cannot wait: {error}') from None
        if context.host is not None and context.handle is not None:
            return await context.host.wait_for_result(context.handle.tool, parameters, context)
        await asyncio.sleep(seconds)  # Nothing here survives a restart; a pause does not need to either.
        return {"waited": round(seconds * 1000)}

    return handle


def _elsewhere(name: str, kind: ExecutionType) -> ToolHandler:
    async def handle(parameters: dict[str, Any], context: ToolContext) -> Any:
        if context.host is None or context.handle is None:
            raise ToolExecutionError(f'tool "{name}" is executed by {_WHO[kind]}; {_START}', executed=False)
        # The tool as it is called: configuration may have made it visible, or not.
        return await context.host.wait_for_result(context.handle.tool, parameters, context)

    return handle


def _nobody(name: str, kind: ExecutionType) -> ToolHandler:
    async def handle(parameters: dict[str, Any], context: ToolContext) -> Any:
        raise ToolExecutionError(
            f'tool "{name}" is executed by {_WHO[kind]}, which this version cannot do', executed=False
        )

    return handle


def fill_output(template: Any, parameters: Mapping[str, Any]) -> Any:
    """A configured output with `{{name}}` filled from the input. A field alone keeps its type."""
    if isinstance(template, str):
        whole = _FIELD.fullmatch(template.strip())
        if whole is not None:
            return _look_up(parameters, whole[1])
        return _FIELD.sub(lambda match: _as_text(_look_up(parameters, match[1])), template)
    if isinstance(template, Mapping):
        return {key: fill_output(value, parameters) for key, value in template.items()}  # pyright: ignore
    if isinstance(template, list):
        return [fill_output(item, parameters) for item in template]  # pyright: ignore
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
    return value if isinstance(value, str) else json_text.encode(value)
