"""The provider of the `agent` namespace. Each of its tools is a module; this one decides when they are shown."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.function_tool import FunctionTool, tool
from toolspace.core.interfaces import OutputStore, ToolProvider
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.core.tool import Annotations, Tool, ToolCategory
from toolspace.core.validation import compile_schema, find_issues
from toolspace.errors import ToolNotFoundError, ToolValidationError
from toolspace.providers.read_output import read_output_tool
from toolspace.providers.registry import run_tool

# MERGED from final_report: `agent__final_report`: ends the run with an answer, in one of the known formats.

ReportStatus = Literal["success", "failure", "partial"]
ReportFormat = Literal["markdown", "markdown+mermaid", "json", "tty", "pipe", "slack-block-kit", "sub-agent"]
REPORT_FORMATS: tuple[str, ...] = get_args(ReportFormat)
_JSON_FORMATS = frozenset(("json", "slack-block-kit"))
_SLACK_MAX_BLOCKS = 50


def final_report_tool() -> FunctionTool:
    return tool(name="final_report", category=ToolCategory.AGENT)(_final_report)


async def _final_report(
    status: ReportStatus,
    format: ReportFormat,
    content: str | None = None,
    content_json: Any = None,
    metadata: dict[str, Any] | None = None,
    *,
    context: ToolContext,
) -> dict[str, Any]:
    """Delivers the final answer and ends the run. Call it once, when the task is done or cannot be done.

    Args:
        status: Whether the task succeeded, failed, or was done in part.
        format: The format of the answer.
        content: The answer, for text formats.
        content_json: The answer, for the formats json and slack-block-kit.
        metadata: Anything else worth keeping with the answer.
    """
    run = context.run
    if run is not None and run.report_format not in (None, format):
        raise ToolValidationError(f'format: this run asks for "{run.report_format}", got "{format}"')
    report: dict[str, Any] = {"status": status, "format": format}
    if format in _JSON_FORMATS:
        report["content_json"] = _json_content(content, content_json, format)
        if format == "json" and run is not None and run.report_schema is not None:
            _check(report["content_json"], run.report_schema)
        if format == "slack-block-kit":
            _check_blocks(report["content_json"])
    else:
        if not content:
            raise ToolValidationError(f'content: required, but missing: the format "{format}" is text')
        report["content"] = content
    if metadata is not None:
        report["metadata"] = metadata
    if run is not None:
        run.final_report = report
    return {"accepted": True, **report}


def _json_content(content: str | None, content_json: Any, format: str) -> Any:
    if content_json is not None:
        return content_json
    if not content:
        raise ToolValidationError(f'content_json: required, but missing: the format is "{format}"')
    try:
        return json_text.decode(content)  # Models like to write JSON as text.
    except ValueError as error:
        raise ToolValidationError(f"content: not JSON ({error}); give the answer as content_json") from None


def _check(value: Any, schema: Mapping[str, Any]) -> None:
    check = compile_schema(schema, owner="the final report")
    if not check.is_valid(value):
        issues = (issue._replace(path=f"content_json.{issue.path}".rstrip(".")) for issue in find_issues(check, value))
        raise ToolValidationError("; ".join(map(str, issues)))


def _check_blocks(value: Any) -> None:
    """What Slack would refuse: `{blocks: […]}`, a list of blocks, or a list of such messages."""
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    messages: list[Any] = items if items and _blocks_of(items[0]) is not None else [value]
    for index, message in enumerate(messages):
        place = f"content_json[{index}]" if len(messages) > 1 else "content_json"
        blocks = cast("list[Any] | None", message if isinstance(message, list) else _blocks_of(message))
        if not isinstance(blocks, list) or not blocks:
            raise ToolValidationError(f"{place}: expected a list of blocks, or an object with blocks")
        if len(blocks) > _SLACK_MAX_BLOCKS:
            raise ToolValidationError(f"{place}: Slack takes at most {_SLACK_MAX_BLOCKS} blocks, got {len(blocks)}")
        for position, block in enumerate(blocks):
            if not isinstance(block, dict) or not isinstance(cast("dict[str, Any]", block).get("type"), str):
                raise ToolValidationError(f"{place}.blocks[{position}]: expected a block with a type")


def _blocks_of(message: Any) -> Any:
    return cast("dict[str, Any]", message).get("blocks") if isinstance(message, dict) else None


# MERGED from batch: `agent__batch`: several calls side by side, each under the same rules as a single one.

_MOST_CALLS = 256
_inside: contextvars.ContextVar[str | None] = contextvars.ContextVar("toolspace_batch", default=None)
"""The run whose batch the code around is part of. A sub-agent has a run of its own, and may batch."""


_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "calls": {
            "type": "array",
            "description": "The calls, each with an id of your choice, the tool's name and its parameters.",
            "minItems": 1,
            "maxItems": _MOST_CALLS,
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": ["string", "integer"]},
                    "tool": {"type": "string"},
                    "parameters": {"type": ["object", "string", "null"]},
                },
                "required": ["id", "tool"],
            },
        }
    },
    "required": ["calls"],
    "additionalProperties": False,
}


def batch_tool() -> FunctionTool:
    # Each call has its own time; the batch ends when the last one does.
    return tool(name="batch", category=ToolCategory.AGENT, timeout=math.inf, input_schema=_SCHEMA)(_batch)


async def _batch(calls: list[dict[str, Any]], *, context: ToolContext) -> dict[str, Any]:
    """Runs several tool calls in parallel and returns their results in order. One failure fails only itself."""
    here = context.run_id or ""
    if _inside.get() == here:
        raise ToolValidationError("calls: a batch inside a batch is refused; put all calls into one batch")
    ids = [call["id"] for call in calls]
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise ToolValidationError(f'calls: the id "{twice}" is used twice; results are told apart by id')
    token = _inside.set(here)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(context.call(call["tool"], call.get("parameters"))) for call in calls]
    finally:
        _inside.reset(token)
    return {"results": [_entry(call, task.result()) for call, task in zip(calls, tasks, strict=True)]}


def _entry(call: dict[str, Any], result: ToolResult) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": call["id"], "tool": call["tool"], "ok": result.ok}
    if result.ok:
        return {**entry, "output": result.result}
    entry |= {"error": result.error, "errorKind": result.error_kind, "executed": result.executed}
    if (pending := result.extras.get(PENDING_CALL_KEY)) is not None:
        entry[PENDING_CALL_KEY] = pending  # It is answered later: under which id.
    return entry


# MERGED from task_status: `agent__task_status`: the agent says how far it is. An event for people, a nudge for a m…

TaskState = Literal["starting", "in-progress", "completed"]


def task_status_tool() -> FunctionTool:
    settings = Annotations(read_only=True, idempotent=True)
    return tool(name="task_status", category=ToolCategory.AGENT, annotations=settings)(_task_status)


async def _task_status(
    status: TaskState,
    done: str = "",
    pending: str = "",
    now: str = "",
    ready_for_final_report: bool = False,
    need_to_run_more_tools: bool = False,
    *,
    context: ToolContext,
) -> dict[str, Any]:
    """Reports progress on the task, for the people who watch.

    Args:
        status: Where the task stands.
        done: What has been completed.
        pending: What remains.
        now: The step being taken now.
        ready_for_final_report: Whether the final report could be given now.
        need_to_run_more_tools: Whether more tools have to run first.
    """
    report: dict[str, Any] = {
        "status": status,
        "done": done,
        "pending": pending,
        "now": now,
        "ready_for_final_report": ready_for_final_report,
        "need_to_run_more_tools": need_to_run_more_tools,
    }
    run = context.run
    if run is not None:
        run.task_status = report
    if context.handle is not None:
        context.handle.report_status(report)
    nudge = run.final_report_reminder if run is not None else None
    return {"received": True, "next": nudge} if nudge else {"received": True}


# MERGED from find_tools: `agent__find_tools`: ranks tools by what they do, and makes the found ones known to the run.

ToolSearch = Callable[[str, int], list[tuple[Tool, float]]]
_MOST = 25


def find_tools_tool(search: ToolSearch) -> FunctionTool:
    async def find_tools(query: str, limit: int = 5, *, context: ToolContext) -> dict[str, Any]:
        """Finds tools by what they do. The ones it returns can be called from then on.

        Args:
            query: What you want to do, in a few words.
            limit: How many tools to return at most.
        """
        if not query.strip():
            raise ToolValidationError("query: expected a few words on what to do")
        found = [one for one, _ in search(query, min(max(limit, 1), _MOST) + 1) if one.name != "agent__find_tools"]
        found = found[: min(max(limit, 1), _MOST)]
        if context.run is not None:
            context.run.discovered_tools.update(dict.fromkeys(one.name for one in found))
        return {
            "tools": [
                {"name": one.name, "description": one.description, "parameters": one.input_schema} for one in found
            ]
        }

    settings = Annotations(read_only=True, idempotent=True)
    return tool(name="find_tools", category=ToolCategory.AGENT, annotations=settings)(find_tools)


class InternalProvider(ToolProvider):
    """`agent__final_report`, `agent__task_status`, `agent__batch`, `agent__read_output`, `agent__find_tools`."""

    kind = "agent"
    namespace = "agent"

    def __init__(
        self,
        *,
        search: ToolSearch,
        outputs: OutputStore | None,
        has_stored_output: Callable[[str], bool],
    ) -> None:
        super().__init__()
        self._tools: dict[str, Tool] = {
            made.name: made for made in (final_report_tool(), task_status_tool(), batch_tool(), find_tools_tool(search))
        }
        if outputs is not None:
            self._tools["read_output"] = read_output_tool(outputs)
        for made in self._tools.values():
            made.visible = False  # An agent's own doings are never shown in a space.
        self._has_stored = has_stored_output
        self.always_offered = False
        """Whether to show the tools outside runs too, because whoever looks may be an agent."""

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """Reading back only once something is stored; the rest in runs, and wherever agents are expected."""
        if tool.name == "agent__read_output":
            return context.session_id is not None and self._has_stored(context.session_id)
        return self.always_offered or context.run_id is not None

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name not in self._tools:
            raise ToolNotFoundError(f'Tool "agent__{name}" not found')
        return await run_tool(self._tools[name], parameters, context)
