"""Stage: asks the provider. Functions are called directly: on the loop, in a thread, or as a stream."""

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
_SPEAKS_FOR_ITSELF = (ValueError, RuntimeError, OSError)
"""Built-in exceptions whose text is a sentence. Of the others (`KeyError: 'x'`) the name is half the message."""


def invoke(plan: StageContext, next: CallHandler, /) -> CallHandler:
    tool = plan.entry.tool
    if isinstance(tool, FunctionTool):
        if tool.style == "async" and tool.signature.context_parameter is None and not tool.signature.positional_only:
            return _direct(tool.function)
        return _guarded(plan, _function(plan, tool))
    if tool.handler is not None:
        return _guarded(plan, _raw_handler(plan, tool.handler))
    return _guarded(plan, _provider(plan))


_NOT_FAILURES = (asyncio.CancelledError, KeyboardInterrupt)
"""What ends a call from outside. Everything else that a tool raises is its failure, however it is derived.

A coroutine that is closed may return a result all the same: `bounded`, which closes it, wants none.
"""

Body = Callable[[Call], Awaitable[Any]]


def _guarded(plan: StageContext, body: Body) -> CallHandler:
    """What the body returns or raises, as a result."""
    spool = SpillSettings(plan.services.outputs, plan.settings.max_bytes.value)

    async def run(call: Call) -> ToolResult:
        call.spill = spool
        try:
            value = await body(call)
        except _NOT_FAILURES:
            raise
        except BaseException as error:
            return _failure(call, error)
        return call.succeed(value)

    return run


def _direct(function: Callable[..., Awaitable[Any]]) -> CallHandler:
    """The same for the commonest tool, an async function without context: one call less on the hottest path."""

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
    _log.debug("%s raised", call.entry.tool.name, exc_info=error)
    result = call.fail("execution_error", explain(error))
    result.extras["exception"] = type(error).__name__
    return result


def explain(error: BaseException) -> str:
    """What to tell of an exception that a tool raised."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return name  # It cannot even say what it is.
    if not text:
        return name
    own = type(error).__module__ != "builtins"
    plain = type(error) is Exception or isinstance(error, _SPEAKS_FOR_ITSELF)
    return text if own or plain else f"{name}: {text}"


def _function(plan: StageContext, tool: FunctionTool) -> Body:
    function = tool.function
    signature = tool.signature

    def bind(call: Call) -> tuple[list[Any], dict[str, Any]]:
        values = dict(call.values)
        if signature.context_parameter is not None:
            values[signature.context_parameter] = call.context
        return [values.pop(name) for name in signature.positional_only if name in values], values

    if tool.style == "stream":
        return _stream(lambda call: _apply(function, *bind(call)))
    if tool.style == "sync":
        return _thread(plan, lambda call: functools.partial(_apply, function, *bind(call)))
    return lambda call: _apply(function, *bind(call))


def _apply(function: Callable[..., Any], positional: list[Any], named: dict[str, Any]) -> Any:
    return function(*positional, **named)


def _raw_handler(plan: StageContext, handler: Callable[..., Any]) -> Body:
    style = execution_style(handler, plan.entry.tool.name)
    if style == "stream":
        return _stream(lambda call: handler(call.values, call.context))
    if style == "sync":
        return _thread(plan, lambda call: functools.partial(handler, call.values, call.context))
    return lambda call: handler(call.values, call.context)


def _provider(plan: StageContext) -> Body:
    execute, name = plan.entry.provider.execute, plan.entry.local_name
    return lambda call: execute(name, call.values, call.context)


def _thread(plan: StageContext, prepare: Callable[[Call], Callable[[], Any]]) -> Body:
    threads = plan.services.threads

    async def run(call: Call) -> Any:
        try:
            value = await threads.run(prepare(call))
        except asyncio.CancelledError:
            call.is_over = True  # The thread cannot be stopped; it can see that it should.
            raise
        return await value if inspect.isawaitable(value) else value

    return run


def _stream(start: Callable[[Call], Any]) -> Body:
    return lambda call: call.collect(start(call))
