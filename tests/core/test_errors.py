"""Error kinds, their exceptions and their messages."""

from __future__ import annotations

import asyncio
import pickle
from typing import get_args

import pytest

import toolspace
from toolspace import (
    Settings,
    ToolCanceledError,
    ToolError,
    ToolExecutionError,
    ToolLimitError,
    ToolNotFoundError,
    ToolPermissionError,
    ToolResult,
    Toolspace,
    ToolTimeoutError,
    ToolTransportError,
    ToolValidationError,
    tool,
)
from toolspace.errors import ERROR_CLASSES, NOT_EXECUTED, ErrorKind

CLASSES = {
    "unknown_tool": ToolNotFoundError,
    "not_permitted": ToolPermissionError,
    "invalid_parameters": ToolValidationError,
    "limit_exceeded": ToolLimitError,
    "canceled": ToolCanceledError,
    "timeout": ToolTimeoutError,
    "transport_error": ToolTransportError,
    "execution_error": ToolExecutionError,
    "internal_error": ToolExecutionError,
}


@pytest.mark.spec("1.7")
def test_these_are_all_the_kinds_and_each_has_its_exception() -> None:
    assert CLASSES == ERROR_CLASSES
    assert get_args(ErrorKind) == tuple(CLASSES)


@pytest.mark.spec("1.7")
def test_these_kinds_mean_that_nothing_happened() -> None:
    assert {"unknown_tool", "not_permitted", "invalid_parameters", "limit_exceeded", "canceled"} == NOT_EXECUTED


@pytest.mark.spec("1.7")
@pytest.mark.parametrize("kind", CLASSES)
def test_unwrapping_a_failure_raises_the_exception_of_its_kind(kind: ErrorKind) -> None:
    result = ToolResult(ok=False, error="why", error_kind=kind, tool="t", executed=kind not in NOT_EXECUTED)
    with pytest.raises(CLASSES[kind], match="why") as caught_error:
        result.unwrap()
    assert isinstance(caught_error.value, ToolError)
    assert caught_error.value.tool == "t"


@pytest.mark.spec("1.7")
@pytest.mark.parametrize("kind", [None, "made_up"])
def test_a_failure_without_a_known_kind_still_raises_a_tool_error(kind: ErrorKind | None) -> None:
    with pytest.raises(ToolExecutionError, match="unknown error"):
        ToolResult(ok=False, error_kind=kind).unwrap()


@pytest.mark.spec("1.7")
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolPermissionError("not you"), "Permission denied: not you"),
        (ToolPermissionError("Permission denied: not you"), "Permission denied: not you"),
        (ToolValidationError("a: b"), "Parameter validation failed: a: b"),
        (ToolValidationError("Parameter validation failed: a: b"), "Parameter validation failed: a: b"),
        (ToolExecutionError("boom"), "boom"),
    ],
)
def test_messages_carry_the_prefix_of_their_kind_once(error: ToolError, text: str) -> None:
    assert str(error) == text
    assert str(pickle.loads(pickle.dumps(error))) == text


@pytest.mark.spec("1.7")
@pytest.mark.parametrize("kind", CLASSES)
async def test_an_exception_of_a_tool_is_the_error_of_its_result(kind: ErrorKind) -> None:
    @tool
    async def fail() -> None:
        raise CLASSES[kind]("because")

    result = await Toolspace(tools=[fail]).call("fail")
    assert result.error_kind == CLASSES[kind].kind
    assert result.executed is (CLASSES[kind].kind not in NOT_EXECUTED)
    assert result.error is not None
    assert result.error.endswith("because")


@pytest.mark.spec("1.7")
async def test_an_unknown_name_fails_with_the_nearest_names() -> None:
    @tool
    async def read_file() -> None: ...

    result = await Toolspace(tools=[read_file]).call("raed_file")
    assert result.error == 'Tool "raed_file" not found; did you mean "read_file"?'
    assert (result.error_kind, result.executed) == ("unknown_tool", False)
    with pytest.raises(ToolNotFoundError):
        result.unwrap()


@pytest.mark.spec("1.7")
@pytest.mark.spec("1.8")
async def test_a_timeout_error_has_its_milliseconds_and_reads_timeout_to_the_model() -> None:
    @tool(timeout=0.02)
    async def wait() -> None:
        await asyncio.Event().wait()

    result = await Toolspace(tools=[wait], settings=Settings(tool_timeout=60)).call("wait")
    assert (result.error, result.error_kind, result.executed) == (
        "Tool execution timed out after 20ms",
        "timeout",
        True,
    )
    assert result.text == "(tool failed: timeout)"
    with pytest.raises(ToolTimeoutError, match="timed out after 20ms"):
        result.unwrap()


@pytest.mark.spec("1.6")
@pytest.mark.parametrize(
    ("exception", "text"),
    [
        (ValueError("bad value"), "bad value"),
        (KeyError("x"), "KeyError: 'x'"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (AssertionError(), "AssertionError"),
        (StopIteration("x"), "StopIteration"),
        (SystemExit(3), "SystemExit: 3"),
        (RecursionError("deep"), "deep"),
        (MemoryError(), "MemoryError"),
        (BaseExceptionGroup("several", [ValueError("a")]), "several"),
    ],
    ids=repr,
)
async def test_any_exception_of_a_tool_is_a_result(exception: BaseException, text: str) -> None:
    @tool
    async def on_loop() -> None:
        raise exception

    @tool
    def in_thread() -> None:
        raise exception

    ts = Toolspace(tools=[on_loop, in_thread])
    for name in ("on_loop", "in_thread"):
        result = await ts.call(name)
        assert (result.ok, result.error_kind, result.executed) == (False, "execution_error", True)
        assert text in str(result.error)
        assert result.text == f"(tool failed: {result.error})"


async def test_an_exception_whose_str_fails_is_a_result() -> None:
    class Unreadable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    @tool
    async def fail() -> None:
        raise Unreadable

    result = await Toolspace(tools=[fail]).call("fail")
    assert (result.ok, result.executed) == (False, True)
    assert result.text.startswith("(tool failed: ")


@pytest.mark.spec("18")
def test_every_error_class_is_a_public_name() -> None:
    for cls in {*CLASSES.values(), ToolError}:
        assert getattr(toolspace, cls.__name__) is cls
        assert issubclass(cls, toolspace.ToolspaceError)
