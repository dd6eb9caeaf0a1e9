"""A toolspace as a Pydantic AI toolset: `Agent(toolsets=[ToolspaceToolset(toolspace)])`.

Every call goes through the toolspace. Pydantic AI's own validation is bypassed: the toolspace validates the arguments.
"""

from __future__ import annotations

import base64
import binascii
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import msgspec
from pydantic_ai import RunContext
from pydantic_ai.exceptions import ModelRetry, ToolFailed
from pydantic_ai.messages import BinaryContent, ToolReturn
from pydantic_ai.tools import AgentDepsT, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
from pydantic_core import SchemaValidator, core_schema

from toolspace.core.result import AudioPart, Content, ImagePart, ResourcePart, ToolResult
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.integrations import LOOP_TOOLS

if TYPE_CHECKING:
    from toolspace.orchestrator.run import Run
    from toolspace.toolspace import Toolspace


class ToolspaceToolset(AbstractToolset[AgentDepsT]):
    """The tools of a toolspace, for `Agent(toolsets=[…])`.

    Each agent run is a run of the toolspace, and each of its steps a turn: limits, token budget and trace work per run.
    With `run` the calls belong to an existing run, which the caller closes. `context` applies to every call.
    """

    def __init__(
        self,
        toolspace: Toolspace,
        *,
        run: Run | None = None,
        context: ToolContext | None = None,
        max_retries: int | None = None,
        id: str | None = None,
    ) -> None:
        self._toolspace = toolspace
        self._run = run
        self._context = context
        self._max_retries = max_retries
        self._id = id
        self._owns_run = False
        self._step: int | None = None

    @property
    def id(self) -> str | None:
        return self._id

    async def for_run(self, ctx: RunContext[AgentDepsT]) -> Self:
        """Returns a copy of this toolset that belongs to one agent run."""
        toolset = copy.copy(self)
        if self._run is None:
            # One session per conversation, so that a later run can read the stored outputs of an earlier one.
            session = f"session-{ctx.conversation_id}" if ctx.conversation_id else None
            toolset._run = self._toolspace.run(context=self._context, session=session)
            toolset._owns_run = True
        else:
            # The first agent run uses the first turn of an existing run; a later agent run starts the next turn.
            self._step = 0
        return toolset

    async def for_run_step(self, ctx: RunContext[AgentDepsT]) -> Self:
        if self._step is not None and ctx.run_step > self._step and self._run is not None:
            self._run.next_turn()
        self._step = ctx.run_step
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._owns_run and self._run is not None:
            self._run.close()

    async def get_instructions(self, ctx: RunContext[AgentDepsT]) -> str | None:
        await self._toolspace.orchestrator.wait_for_lists()
        return self._toolspace.orchestrator.instructions() or None

    async def get_tools(self, ctx: RunContext[AgentDepsT]) -> dict[str, ToolsetTool[AgentDepsT]]:
        retries = self._max_retries if self._max_retries is not None else ctx.max_retries
        hidden_names = LOOP_TOOLS if self._run is None or self._owns_run else ()
        await self._toolspace.orchestrator.wait_for_lists()
        tools = self._toolspace.orchestrator.tools_for_model(self._run, context=self._context)
        return {
            tool.name: ToolsetTool(
                toolset=self, tool_def=_definition(tool), max_retries=retries, args_validator=_accept_all
            )
            for tool in tools
            if tool.name not in hidden_names
        }

    async def call_tool(
        self,
        name: str,
        tool_args: dict[str, Any],
        ctx: RunContext[AgentDepsT],
        tool: ToolsetTool[AgentDepsT],
    ) -> Any:
        arguments = tool_args.text if isinstance(tool_args, _InvalidArguments) else tool_args
        execute = self._run.call if self._run is not None else self._toolspace.orchestrator.execute
        result = await execute(name, arguments, context=self._context, call_id=ctx.tool_call_id)
        if not result.ok:
            raise _failure(result, last_attempt=ctx.last_attempt)
        return ToolReturn(_content(result), metadata=_metadata(result))


def _definition(tool: Tool) -> ToolDefinition:
    return ToolDefinition(
        name=tool.name,
        description=tool.description or None,
        parameters_json_schema=dict(tool.model_schema.schema),
        return_schema=dict(tool.output_schema) if tool.output_schema is not None else None,
        metadata={
            "category": str(tool.category),
            "annotations": msgspec.to_builtins(tool.annotations),
            "tags": list(tool.tags),
        },
    )


def _failure(result: ToolResult, *, last_attempt: bool) -> Exception:
    """Returns the exception that shows the failure to the model. Neither kind ends the agent run."""
    if result.error_kind == "invalid_parameters" and not last_attempt:
        return ModelRetry(result.error or result.text)
    # After the last attempt a ModelRetry would end the run, so the model gets a failed result instead.
    return ToolFailed(result.text)


def _metadata(result: ToolResult) -> dict[str, Any]:
    """Returns the result without its value, which is in the message already."""
    metadata = result.to_dict()
    del metadata["result"], metadata["content"]
    return metadata


def _content(result: ToolResult) -> str | Sequence[str | BinaryContent]:
    """Returns what the model reads: text, with images and audio between the texts if models accept them."""
    items = [_binary(part) or part.placeholder for part in result.parts]
    return items if any(isinstance(item, BinaryContent) for item in items) else result.text


def _binary(part: Content) -> BinaryContent | None:
    if isinstance(part, ImagePart | AudioPart):
        data, media_type = part.data, part.mime_type
    elif isinstance(part, ResourcePart) and part.blob is not None and part.mime_type is not None:
        data, media_type = part.blob, part.mime_type
    else:
        return None
    try:
        binary = BinaryContent(base64.b64decode(data, validate=True), media_type=media_type)
        _ = binary.format  # Raises for a type that no model accepts: it would fail the request to the model.
    except (binascii.Error, ValueError):
        return None
    return binary


class _InvalidArguments(dict[str, Any]):
    """Arguments that are not a JSON object. The toolspace gets their text and reports what is wrong."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class _AcceptAll:
    """A validator that accepts all arguments: the toolspace validates, converts and logs them."""

    def __init__(self) -> None:
        self._validator = SchemaValidator(core_schema.any_schema())

    def validate_json(
        self,
        input: str | bytes | bytearray,
        *,
        allow_partial: bool | Literal["off", "on", "trailing-strings"] = False,
        **_: Any,
    ) -> Any:
        try:
            value = self._validator.validate_json(input, allow_partial=allow_partial)
        except (ValueError, TypeError):  # Not JSON, or not valid text (lone surrogates).
            value = None
        if isinstance(value, dict):
            return cast("dict[str, Any]", value)
        return _InvalidArguments(input if isinstance(input, str) else input.decode("utf-8", "replace"))

    def validate_python(self, input: Any, **_: Any) -> Any:
        return input


_accept_all = _AcceptAll()
