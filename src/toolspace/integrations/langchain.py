"""A toolspace as LangChain tools. Every call goes through the toolspace; LangChain only carries it there."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, TypeVar, cast

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, ToolException
from pydantic import PrivateAttr

from toolspace.core.context import ToolContext
from toolspace.core.result import ImagePart, ToolResult
from toolspace.core.tool import Tool
from toolspace.integrations.protocols import LOOP_TOOLS, RunLike, ToolspaceLike

# MERGED from event_loops: Lets plain code wait for a coroutine, on the event loop that the coroutine's objects bel…

T = TypeVar("T")
_PATIENCE = 10.0


class LoopRunner:
    """The loop it was made in; where there was none, one of its own in a thread of its own.

    A toolspace holds queues and connections that work on one loop only, so a plain call must go to that loop and
    never to a new one. Waiting for a loop that waits for the waiter would never end: that is an error instead.
    """

    def __init__(self, *, patience: float = _PATIENCE) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._patience = patience
        self._lock = threading.Lock()
        with suppress(RuntimeError):  # A plain program has none: its loop is made when it is needed.
            self._loop = asyncio.get_running_loop()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """What the work gives, awaited on the loop. Interrupting the wait cancels it."""
        loop = self._target()
        taken = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_announced(work, taken), loop)
        try:
            if not taken.wait(self._patience):
                raise RuntimeError(
                    f"the event loop of this toolspace did not take the call within {self._patience:g} s; it is "
                    "probably blocked by the code that waits for the call: use ainvoke"
                )
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _target(self) -> asyncio.AbstractEventLoop:
        if _running_here() is not None:
            raise RuntimeError("a plain call inside an event loop would block it; use ainvoke")
        with self._lock:
            if self._loop is None:
                self._loop = _start_thread(self)
        if not self._loop.is_running():
            raise RuntimeError("the event loop that these tools were made in has ended; make them again")
        return self._loop


async def _announced(work: Callable[[], Awaitable[T]], taken: threading.Event) -> T:
    taken.set()
    return await work()


def _running_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _start_thread(owner: LoopRunner) -> asyncio.AbstractEventLoop:
    """A loop in a thread, which end when the owner is no longer used."""
    started: Future[asyncio.AbstractEventLoop] = Future()
    thread = threading.Thread(target=_serve, args=(started,), name="toolspace-loop", daemon=True)
    thread.start()
    loop = started.result()
    weakref.finalize(owner, _stop, loop, thread)
    return loop


def _serve(started: Future[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.call_soon(started.set_result, loop)
        loop.run_forever()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join(_PATIENCE)


def to_langchain_tools(
    toolspace: ToolspaceLike, *, context: ToolContext | None = None, run: RunLike | None = None
) -> list[BaseTool]:
    """The tools as they are now. `context` says who calls; with `run` the calls belong to that run.

    With a run the list is what its model should see, which a tool search changes: ask again before each turn.
    """
    home = LoopRunner()
    if run is not None:
        shown = toolspace.orchestrator.tools_for_model(run, context=context)
    else:
        # All of them, and so no search: its finds are for a run to remember.
        hidden = LOOP_TOOLS | {"agent__find_tools"}
        tools = toolspace.orchestrator.list_tools(context=context)
        shown = [tool for tool in tools if tool.name not in hidden]
    return [ToolspaceTool.of(tool, run or toolspace, context, home) for tool in shown]


class ToolFailure(ToolException):
    """A call that failed, on its way through LangChain's error handling. `result` tells the rest."""

    def __init__(self, result: ToolResult) -> None:
        super().__init__(result.text)
        self.result = result


class ToolspaceTool(BaseTool):
    """One tool. The content of its message is what a model reads, the artifact the whole `ToolResult`."""

    handle_tool_error: Any = True
    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    _caller: ToolspaceLike | RunLike = PrivateAttr()
    _context: ToolContext | None = PrivateAttr(default=None)
    _home: LoopRunner = PrivateAttr()

    @classmethod
    def of(
        cls, tool: Tool, caller: ToolspaceLike | RunLike, context: ToolContext | None, home: LoopRunner
    ) -> ToolspaceTool:
        made = cls(
            name=tool.name,
            description=tool.description,
            args_schema=dict(tool.input_schema),
            tags=list(tool.tags) or None,
            metadata={"category": str(tool.category)},
        )
        made._caller, made._context, made._home = caller, context, home
        return made

    @property
    def args(self) -> dict[str, Any]:
        """The parameters by name; a raw schema may have none."""
        return cast("dict[str, Any]", self.args_schema).get("properties", {})

    def _to_args_and_kwargs(
        self, tool_input: str | dict[str, Any], tool_call_id: str | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # As one value: spread as keywords, a parameter called `config` or `run_manager` would be overwritten.
        return (tool_input, tool_call_id), {}

    def _run(self, arguments: dict[str, Any] | str, call_id: str | None) -> Any:
        return self._outcome(self._home.run(lambda: self._call(arguments, call_id)), call_id)

    async def _arun(self, arguments: dict[str, Any] | str, call_id: str | None) -> Any:
        return self._outcome(await self._call(arguments, call_id), call_id)

    async def _call(self, arguments: dict[str, Any] | str, call_id: str | None) -> ToolResult:
        return await self._caller.call(self.name, arguments, context=self._context, call_id=call_id)

    def _outcome(self, result: ToolResult, call_id: str | None) -> tuple[Any, ToolResult]:
        if result.ok:
            return _content(result), result
        if call_id is None or self.handle_tool_error is not True:
            raise ToolFailure(result)
        # Made here: LangChain's own message for a handled error has no artifact, and so no kind of failure.
        message = ToolMessage(result.text, tool_call_id=call_id, name=self.name, status="error", artifact=result)
        return message, result


def _content(result: ToolResult) -> str | Sequence[dict[str, Any]]:
    """What the model reads: text, with images in their places."""
    if not any(isinstance(part, ImagePart) for part in result.parts):
        return result.text
    return [
        {"type": "image", "base64": part.data, "mime_type": part.mime_type}
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.placeholder}
        for part in result.parts
    ]
