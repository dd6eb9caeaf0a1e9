"""A toolspace as LangChain tools: `to_langchain_tools(toolspace)`.

Every call goes through the toolspace. LangChain's own validation is bypassed: the toolspace validates the arguments.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, ToolException
from pydantic import PrivateAttr

from toolspace.core.result import ImagePart, ToolResult
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.integrations import LOOP_TOOLS

if TYPE_CHECKING:
    from toolspace.orchestrator.run import Run
    from toolspace.toolspace import Toolspace

T = TypeVar("T")
ExecuteTool = Callable[..., Awaitable[ToolResult]]
"""Runs a call of a model: the method of a run, or of the orchestrator."""
_START_SECONDS = 10.0


def to_langchain_tools(
    toolspace: Toolspace, *, context: ToolContext | None = None, run: Run | None = None
) -> list[BaseTool]:
    """Returns the current tools of a toolspace. `context` is the caller; with `run` the calls belong to that run.

    With a run the list has the tools that its model should see. A tool search changes it, so call this again before
    each turn.
    """
    loop_runner = LoopRunner()
    if run is not None:
        tools = toolspace.orchestrator.tools_for_model(run, context=context)
    else:
        # All tools, so no search tool: its matches would be stored in a run.
        hidden_names = LOOP_TOOLS | {"agent__find_tools"}
        all_tools = toolspace.orchestrator.list_tools(context=context)
        tools = [tool for tool in all_tools if tool.name not in hidden_names]
    execute = run.call if run is not None else toolspace.orchestrator.execute
    return [ToolspaceTool.create(tool, execute, context, loop_runner) for tool in tools]


class ToolFailure(ToolException):
    """A failed call, raised for LangChain's error handling. `result` is the whole `ToolResult`."""

    def __init__(self, result: ToolResult) -> None:
        super().__init__(result.text)
        self.result = result


class ToolspaceTool(BaseTool):
    """One tool. The content of its message is what a model reads; the artifact is the whole `ToolResult`."""

    handle_tool_error: Any = True
    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    _execute: ExecuteTool = PrivateAttr()
    _context: ToolContext | None = PrivateAttr(default=None)
    _loop_runner: LoopRunner = PrivateAttr()

    @classmethod
    def create(
        cls, tool: Tool, execute: ExecuteTool, context: ToolContext | None, loop_runner: LoopRunner
    ) -> ToolspaceTool:
        langchain_tool = cls(
            name=tool.name,
            description=tool.description,
            args_schema=dict(tool.model_schema.schema),
            tags=list(tool.tags) or None,
            metadata={"category": str(tool.category)},
        )
        langchain_tool._execute, langchain_tool._context = execute, context
        langchain_tool._loop_runner = loop_runner
        return langchain_tool

    @property
    def args(self) -> dict[str, Any]:
        """The parameters by name; a raw schema may have none."""
        return cast("dict[str, Any]", self.args_schema).get("properties", {})

    def _to_args_and_kwargs(
        self, tool_input: str | dict[str, Any], tool_call_id: str | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # As one positional value: as keywords, parameters called `config` or `run_manager` would be overwritten.
        return (tool_input, tool_call_id), {}

    def _run(self, arguments: dict[str, Any] | str, call_id: str | None) -> Any:
        return self._outcome(self._loop_runner.run(lambda: self._call(arguments, call_id)), call_id)

    async def _arun(self, arguments: dict[str, Any] | str, call_id: str | None) -> Any:
        return self._outcome(await self._call(arguments, call_id), call_id)

    async def _call(self, arguments: dict[str, Any] | str, call_id: str | None) -> ToolResult:
        return await self._execute(self.name, arguments, context=self._context, call_id=call_id)

    def _outcome(self, result: ToolResult, call_id: str | None) -> tuple[Any, ToolResult]:
        if result.ok:
            return _content(result), result
        if call_id is None or self.handle_tool_error is not True:
            raise ToolFailure(result)
        # Built here: LangChain's own message for a handled error has no artifact, so the error kind would be lost.
        message = ToolMessage(result.text, tool_call_id=call_id, name=self.name, status="error", artifact=result)
        return message, result


def _content(result: ToolResult) -> str | Sequence[dict[str, Any]]:
    """Returns what the model reads: text, with images between the texts."""
    if not any(isinstance(part, ImagePart) for part in result.parts):
        return result.text
    return [
        {"type": "image", "base64": part.data, "mime_type": part.mime_type}
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.placeholder}
        for part in result.parts
    ]


# Calls from synchronous code


class LoopRunner:
    """Runs coroutines for synchronous code, on the event loop that it was created in.

    A toolspace has queues and connections that belong to one loop, so a synchronous call must run on that loop and
    never on a new one. Without a loop at its creation it starts one in a thread of its own. Where waiting would be a
    deadlock, `run` raises instead.
    """

    def __init__(self, *, start_seconds: float = _START_SECONDS) -> None:
        """`start_seconds`: how long the loop may take to begin with a call."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_seconds = start_seconds
        self._lock = threading.Lock()
        with suppress(RuntimeError):  # Not inside a loop: one is started when it is needed.
            self._loop = asyncio.get_running_loop()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of the work. Interrupting the wait cancels the work."""
        loop = self._get_loop()
        started = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_run_started(work, started), loop)
        try:
            if not started.wait(self._start_seconds):
                raise RuntimeError(
                    f"the event loop of this toolspace did not start the call within {self._start_seconds:g} s; it is "
                    "probably blocked by the code that waits for the call: use ainvoke"
                )
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        if _is_in_loop():
            raise RuntimeError("a synchronous call inside an event loop would block it; use ainvoke")
        with self._lock:
            if self._loop is None:
                self._loop = _start_loop_thread(self)
        if not self._loop.is_running():
            raise RuntimeError("the event loop in which these tools were created has ended; create them again")
        return self._loop


async def _run_started(work: Callable[[], Awaitable[T]], started: threading.Event) -> T:
    started.set()
    return await work()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _start_loop_thread(owner: LoopRunner) -> asyncio.AbstractEventLoop:
    """Returns a loop that runs in a new thread, until the owner is garbage collected."""
    started: Future[asyncio.AbstractEventLoop] = Future()
    thread = threading.Thread(target=_run_loop, args=(started,), name="toolspace-loop", daemon=True)
    thread.start()
    loop = started.result()
    weakref.finalize(owner, _stop_loop, loop, thread)
    return loop


def _run_loop(started: Future[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.call_soon(started.set_result, loop)
        loop.run_forever()


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join(_START_SECONDS)
