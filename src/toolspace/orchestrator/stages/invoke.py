"""The stage `invoke`: runs the tool. Python functions are called directly: on the loop, in a thread, or as a stream."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from toolspace.core.function_tool import FunctionTool
from toolspace.core.result import ToolResult
from toolspace.core.signature import execution_style
from toolspace.errors import ToolError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.large_results import SpillSettings
from toolspace.orchestrator.stage import CallHandler, StageContext

_log = logging.getLogger("toolspace.calls")
_SELF_EXPLANATORY = (ValueError, RuntimeError, OSError)
"""Built-in exceptions whose text is a sentence. For others (`KeyError: 'x'`) the class name is half the message."""
_NOT_FAILURES = (asyncio.CancelledError, KeyboardInterrupt)
"""These end a call from outside. Everything else that a tool raises is a failure of the tool.

`GeneratorExit` is a failure too: a coroutine that `deadline` closes may return a result, which is dropped.
"""

_Body = Callable[[Call], Awaitable[Any]]
"""Runs the tool and returns the value that it returned."""


def invoke(stage: StageContext, next: CallHandler, /) -> CallHandler:
    tool = stage.entry.tool
    if isinstance(tool, FunctionTool):
        signature = tool.signature
        if tool.style == "async" and signature.context_parameter is None and not signature.positional_only:
            return _simple_handler(tool.function)
        return _handler(stage, _function_body(stage, tool))
    if tool.handler is not None:
        return _handler(stage, _raw_handler_body(stage, tool.handler))
    return _handler(stage, _provider_body(stage))


def _handler(stage: StageContext, body: _Body) -> CallHandler:
    """Turns what the body returns or raises into a result."""
    spill = SpillSettings(stage.services.outputs, stage.settings.max_bytes.value)

    async def run(call: Call) -> ToolResult:
        call.spill = spill
        try:
            value = await body(call)
        except _NOT_FAILURES:
            raise
        except BaseException as error:
            return _failure(call, error)
        return call.succeed(value)

    return run


def _simple_handler(function: Callable[..., Awaitable[Any]]) -> CallHandler:
    """The same for the most common tool, an async function without context. Saves a call: the benchmark `call`."""

    async def run(call: Call) -> ToolResult:
        try:
            value = await function(**call.values)
        except _NOT_FAILURES:
            raise
        except BaseException as error:
            return _failure(call, error)
        return call.succeed(value)

    return run


def _failure(call: Call, error: BaseException) -> ToolResult:
    if isinstance(error, ToolError):
        return call.fail(error.kind, str(error), executed=error.executed)
    _log.debug("call %s: %s raised", call.id, call.entry.tool.name, exc_info=error)
    result = call.fail("execution_error", explain(error))
    result.extras["exception"] = type(error).__name__
    return result


def explain(error: BaseException) -> str:
    """Returns the message for an exception that a tool raised."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return name  # Its own `__str__` fails.
    if not text:
        return name
    is_custom = type(error).__module__ != "builtins"
    is_sentence = type(error) is Exception or isinstance(error, _SELF_EXPLANATORY)
    return text if is_custom or is_sentence else f"{name}: {text}"


def _function_body(stage: StageContext, tool: FunctionTool) -> _Body:
    function = tool.function
    signature = tool.signature

    def bind(call: Call) -> tuple[list[Any], dict[str, Any]]:
        values = dict(call.values)
        if signature.context_parameter is not None:
            values[signature.context_parameter] = call.context
        return [values.pop(name) for name in signature.positional_only if name in values], values

    if tool.style == "stream":
        return _stream_body(lambda call: _apply(function, *bind(call)))
    if tool.style == "sync":
        return _thread_body(stage, lambda call: functools.partial(_apply, function, *bind(call)))
    return lambda call: _apply(function, *bind(call))


def _apply(function: Callable[..., Any], positional: list[Any], named: dict[str, Any]) -> Any:
    return function(*positional, **named)


def _raw_handler_body(stage: StageContext, handler: Callable[..., Any]) -> _Body:
    style = execution_style(handler, stage.entry.tool.name)
    if style == "stream":
        return _stream_body(lambda call: handler(call.values, call.context))
    if style == "sync":
        return _thread_body(stage, lambda call: functools.partial(handler, call.values, call.context))
    return lambda call: handler(call.values, call.context)


def _provider_body(stage: StageContext) -> _Body:
    execute, name = stage.entry.provider.execute, stage.entry.local_name
    return lambda call: execute(name, call.values, call.context)


def _thread_body(stage: StageContext, prepare: Callable[[Call], Callable[[], Any]]) -> _Body:
    threads = stage.services.threads

    async def run(call: Call) -> Any:
        try:
            value = await threads.run(prepare(call))
        except asyncio.CancelledError:
            call.is_over = True  # The thread cannot be stopped, but its context says that it should.
            raise
        return await value if inspect.isawaitable(value) else value

    return run


def _stream_body(start: Callable[[Call], Any]) -> _Body:
    return lambda call: call.collect(start(call))
