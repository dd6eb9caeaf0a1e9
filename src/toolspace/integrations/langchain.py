"""A toolspace as LangChain tools. Every call goes through the toolspace; LangChain only carries it there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, ToolException
from pydantic import PrivateAttr

from toolspace.core.context import ToolContext
from toolspace.core.result import ImagePart, ToolResult
from toolspace.core.tool import Tool
from toolspace.integrations.event_loops import HomeLoop
from toolspace.integrations.protocols import LOOP_TOOLS, RunDoor, ToolspaceDoor


def to_langchain_tools(
    toolspace: ToolspaceDoor, *, context: ToolContext | None = None, run: RunDoor | None = None
) -> list[BaseTool]:
    """The tools as they are now. `context` says who calls; with `run` the calls belong to that run.

    With a run the list is what its model should see, which a tool search changes: ask again before each turn.
    """
    home = HomeLoop()
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
    _caller: ToolspaceDoor | RunDoor = PrivateAttr()
    _context: ToolContext | None = PrivateAttr(default=None)
    _home: HomeLoop = PrivateAttr()

    @classmethod
    def of(
        cls, tool: Tool, caller: ToolspaceDoor | RunDoor, context: ToolContext | None, home: HomeLoop
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
        return self._outcome(self._home.wait_for(lambda: self._call(arguments, call_id)), call_id)

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
