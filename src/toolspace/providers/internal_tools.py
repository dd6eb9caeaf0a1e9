"""The internal tools of an agent: `agent__final_report`, `task_status`, `batch`, `find_tools` and `read_output`.

The toolspace creates the provider. `read_output` reads stored outputs; the output store decides which of them a session
and a user may read.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, cast

from toolspace.core import json_text
from toolspace.core.argument_validation import compile_schema, find_issues
from toolspace.core.extension_points import Deny, OutputStore, StoredOutput, ToolProvider
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.core.safe_regex import SafePattern
from toolspace.core.tool import Annotations, FunctionTool, Tool, ToolCategory, tool
from toolspace.core.tool_collections import BUILTIN_NAMES
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolExecutionError, ToolNotFoundError, ToolValidationError
from toolspace.providers.functions import run_tool
from toolspace.providers.json_path import MAX_VALUES, find_values

ReportStatus = Literal["success", "failure", "partial"]
ReportFormat = Literal["markdown", "markdown+mermaid", "json", "tty", "pipe", "slack-block-kit", "sub-agent"]
TaskState = Literal["starting", "in-progress", "completed"]
ToolSearch = Callable[[str, int], list[tuple[Tool, float]]]
"""Returns the best matches for a query with their scores, at most as many as the limit."""

_JSON_FORMATS = frozenset(("json", "slack-block-kit"))
_MAX_SLACK_BLOCKS = 50
_MAX_BATCH_CALLS = 256
_MAX_FOUND_TOOLS = 25
_READS = Annotations(read_only=True, idempotent=True)
_MAX_RESULT_CHARACTERS = 16_000
"""About four thousand tokens."""
_WRAP_WIDTH = 2_000
"""Longer lines are split into pieces of this length, so that a very long line can be read at all."""
_MAX_ENTRIES = 200
"""Lines, matches or values, unless the caller sets a limit."""
_MAX_JSON_BYTES = 64 * 1024 * 1024


class InternalProvider(ToolProvider):
    """The provider of the `agent` namespace. Offers its tools in runs only, unless `always_offered`."""

    kind = "agent"
    circuit_scope = "none"
    namespace = "agent"

    def __init__(
        self, *, search: ToolSearch, outputs: OutputStore | None, has_stored_output: Callable[[str], bool]
    ) -> None:
        """`has_stored_output` says whether a session has a stored output that can be read."""
        super().__init__()
        agent = ToolCategory.AGENT
        tools = [
            tool(name="final_report", category=agent)(_final_report),
            tool(name="task_status", category=agent, annotations=_READS)(_task_status),
            # No timeout: each call of the batch has its own.
            tool(name="batch", category=agent, timeout=math.inf, input_schema=_BATCH_SCHEMA)(_batch),
            tool(name="find_tools", category=agent, annotations=_READS)(_build_find_tools(search)),
        ]
        if outputs is not None:
            tools.append(_build_read_output_tool(outputs))
        self._tools: dict[str, Tool] = {item.name: item for item in tools}
        for item in tools:
            item.visible = False  # Internal tools are never shown in a space.
        self._has_stored_output = has_stored_output
        self.always_offered = False
        """Whether to offer the tools outside runs too, because the caller may be an agent."""

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """`read_output` is offered once the session has a stored output; the others in runs, or always."""
        if tool.name == "agent__read_output":
            return context.session_id is not None and self._has_stored_output(context.session_id)
        return self.always_offered or context.run_id is not None

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name not in self._tools:
            raise ToolNotFoundError(f'Tool "agent__{name}" not found')
        return await run_tool(self._tools[name], parameters, context)


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
        metadata: Further data to store with the answer.
    """
    run = context.run
    if run is not None and run.report_format not in (None, format):
        raise ToolValidationError(f'format: this run asks for "{run.report_format}", got "{format}"')
    check_report = run.check_report if run is not None and status != "failure" else None
    if check_report is not None and format != "json":
        raise ToolValidationError(f'format: this run asks for "json", got "{format}"')
    report: dict[str, Any] = {"status": status, "format": format}
    if format in _JSON_FORMATS:
        report["content_json"] = _parse_content(content, content_json, format)
        if format == "json" and run is not None and run.report_schema is not None:
            _check_schema(report["content_json"], run.report_schema)
        if check_report is not None:
            check_report(report["content_json"])
        if format == "slack-block-kit":
            _check_slack_blocks(report["content_json"])
    else:
        if not content:
            raise ToolValidationError(f'content: required, but missing: the format "{format}" is text')
        report["content"] = content
    if metadata is not None:
        report["metadata"] = metadata
    if run is not None:
        run.final_report = report
    return {"accepted": True, **report}


def _parse_content(content: str | None, content_json: Any, format: str) -> Any:
    if content_json is not None:
        return content_json
    if not content:
        raise ToolValidationError(f'content_json: required, but missing: the format is "{format}"')
    try:
        return json_text.decode(content)  # Models often write JSON as text.
    except ValueError as error:
        raise ToolValidationError(f"content: not JSON ({error}); give the answer as content_json") from None


def _check_schema(value: Any, schema: Mapping[str, Any]) -> None:
    validator = compile_schema(schema, owner="the final report")
    if not validator.is_valid(value):
        issues = find_issues(validator, value, schema)
        texts = (str(issue._replace(path=f"content_json.{issue.path}".rstrip("."))) for issue in issues)
        raise ToolValidationError("; ".join(texts))


def _check_slack_blocks(value: Any) -> None:
    """Raises for content that Slack rejects. Accepts `{blocks: […]}`, a list of blocks, or a list of messages."""
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    messages: list[Any] = items if items and _find_blocks(items[0]) is not None else [value]
    for index, message in enumerate(messages):
        path = f"content_json[{index}]" if len(messages) > 1 else "content_json"
        blocks = cast("list[Any] | None", message if isinstance(message, list) else _find_blocks(message))
        if not isinstance(blocks, list) or not blocks:
            raise ToolValidationError(f"{path}: expected a list of blocks, or an object with blocks")
        if len(blocks) > _MAX_SLACK_BLOCKS:
            raise ToolValidationError(f"{path}: Slack takes at most {_MAX_SLACK_BLOCKS} blocks, got {len(blocks)}")
        for position, block in enumerate(blocks):
            if not isinstance(block, dict) or not isinstance(cast("dict[str, Any]", block).get("type"), str):
                raise ToolValidationError(f"{path}.blocks[{position}]: expected a block with a type")


def _find_blocks(message: Any) -> Any:
    return cast("dict[str, Any]", message).get("blocks") if isinstance(message, dict) else None


_BATCH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "calls": {
            "type": "array",
            "description": "The calls, each with an id of your choice, the tool's name and its parameters.",
            "minItems": 1,
            "maxItems": _MAX_BATCH_CALLS,
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
_current_batch_run: contextvars.ContextVar[str | None] = contextvars.ContextVar("toolspace_batch", default=None)
"""The run whose batch is being executed. A sub-agent has a run of its own, so it may use a batch."""


async def _batch(calls: list[dict[str, Any]], *, context: ToolContext) -> dict[str, Any]:
    """Runs several tool calls in parallel and returns their results in order. If one fails, the others still run."""
    run_id = context.run_id or ""
    if _current_batch_run.get() == run_id:
        raise ToolValidationError("calls: a batch inside a batch is not allowed; put all calls into one batch")
    ids = [call["id"] for call in calls]
    if len(set(ids)) < len(ids):
        duplicate = next(call_id for call_id in ids if ids.count(call_id) > 1)
        raise ToolValidationError(f'calls: the id "{duplicate}" is used twice; each call needs its own id')
    token = _current_batch_run.set(run_id)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(context.call(call["tool"], call.get("parameters"))) for call in calls]
    finally:
        _current_batch_run.reset(token)
    return {"results": [_batch_entry(call, task.result()) for call, task in zip(calls, tasks, strict=True)]}


def _batch_entry(call: dict[str, Any], result: ToolResult) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": call["id"], "tool": call["tool"], "ok": result.ok}
    if result.ok:
        return {**entry, "output": result.result}
    entry |= {"error": result.error, "errorKind": result.error_kind, "executed": result.executed}
    if (pending_call := result.extras.get(PENDING_CALL_KEY)) is not None:
        entry[PENDING_CALL_KEY] = pending_call
    return entry


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
    """Reports the progress of the task to the people who follow it.

    Args:
        status: The state of the task.
        done: What has been completed.
        pending: What remains.
        now: The current step.
        ready_for_final_report: Whether you can give the final report now.
        need_to_run_more_tools: Whether you must run more tools first.
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
    reminder = run.final_report_reminder if run is not None else None
    return {"received": True, "next": reminder} if reminder else {"received": True}


def _build_find_tools(search: ToolSearch) -> Callable[..., Any]:
    async def find_tools(query: str, limit: int = 5, *, context: ToolContext) -> dict[str, Any]:
        """Finds tools by what they do. You can call the returned tools from then on.

        Args:
            query: What you want to do, in a few words.
            limit: The maximum number of tools to return.
        """
        if not query.strip():
            raise ToolValidationError("query: expected a few words on what to do")
        count = min(max(limit, 1), _MAX_FOUND_TOOLS)
        policy = context.run.policy if context.run is not None else None
        # More than needed, because the search may return this tool and tools that the run may not use.
        matches = [
            match
            for match, _ in search(query, count + 1 + len(BUILTIN_NAMES))
            if match.name != "agent__find_tools"
            and (policy is None or not isinstance(policy.decide(match, context), Deny))
        ][:count]
        if context.run is not None:
            context.run.discovered_tools.update(dict.fromkeys(match.name for match in matches))
        return {
            "tools": [
                {"name": match.name, "description": match.description, "parameters": match.model_schema.schema}
                for match in matches
            ]
        }

    return find_tools


def _build_read_output_tool(outputs: OutputStore) -> FunctionTool:
    """The tool that reads from this store."""

    async def read_output(
        handle: str,
        offset: int | None = None,
        limit: int | None = None,
        pattern: str | None = None,
        jsonPath: str | None = None,
        *,
        context: ToolContext,
    ) -> dict[str, Any]:
        """Reads a stored tool output: some of its lines, the lines that match a pattern, or a part of its JSON.

        Args:
            handle: The handle from tool_output.
            offset: The first line (or value of jsonPath) to return, counted from 1.
            limit: The maximum number of lines, matches or values to return.
            pattern: A regular expression; only lines that match are returned, with their numbers.
            jsonPath: A JSONPath such as $.items[0].name, for outputs that are JSON.
        """
        if offset is not None and offset < 1:
            raise ToolValidationError(f"offset: lines are counted from 1, got {offset}")
        if limit is not None and limit < 1:
            raise ToolValidationError(f"limit: expected at least 1, got {limit}")
        if pattern is not None and jsonPath is not None:
            raise ToolValidationError("give pattern or jsonPath, not both")
        output = await outputs.find(handle, session=context.session_id or "", owner=context.user_id)
        if output is None:
            # The same message for every reason: it must not reveal that another user's output exists.
            raise ToolExecutionError(f'no stored output "{handle}" can be read here; it may have expired')
        if jsonPath is not None:
            return await _read_path(outputs, output, jsonPath, offset or 1, limit or _MAX_ENTRIES)
        return await _read_lines(outputs, output, pattern, offset or 1, limit or _MAX_ENTRIES)

    read_tool = tool(name="read_output", category=ToolCategory.AGENT, annotations=_READS)(read_output)
    read_tool.has_small_results = True
    return read_tool


async def _read_lines(
    outputs: OutputStore, output: StoredOutput, pattern: str | None, offset: int, limit: int
) -> dict[str, Any]:
    """The lines from `offset` on, or those of them that match a pattern."""
    matcher, line_break = (SafePattern(pattern), 0) if pattern is not None else (None, 1)
    entries: list[tuple[int, str]] = []
    room = _MAX_RESULT_CHARACTERS
    has_more = False
    lines_before = 0
    async with aclosing(_wrapped_lines(outputs, output)) as batches:
        async for batch in batches:
            first = max(0, offset - 1 - lines_before)
            candidates = list(enumerate(batch[first:], lines_before + first + 1))
            lines_before += len(batch)
            if matcher is not None:
                # In a thread: a slow pattern may take a second, which must not block the event loop.
                candidates = await asyncio.to_thread(_find_matches, matcher, candidates)
            for number, line in candidates:
                if len(entries) >= limit or (entries and len(line) + line_break > room):
                    has_more = True
                    break
                entries.append((number, line))
                room -= len(line) + line_break
            if has_more:
                break
    result: dict[str, Any] = {"handle": output.handle}
    if matcher is None:
        content = "\n".join(line for _, line in entries)
        result |= {"offset": offset, "lines": len(entries), "totalLines": output.lines, "content": content}
    else:
        matches = [{"line": number, "text": line} for number, line in entries]
        result |= {"totalLines": output.lines, "matches": matches}
    if has_more:
        result["nextOffset"] = entries[-1][0] + 1
    return result


def _find_matches(pattern: SafePattern, lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(number, line) for number, line in lines if pattern.search(line) is not None]


async def _wrapped_lines(outputs: OutputStore, output: StoredOutput) -> AsyncGenerator[list[str], None]:
    """The lines in batches. Long lines are split."""
    async for batch in outputs.lines(output):
        yield [
            line[start : start + _WRAP_WIDTH] for line in batch for start in range(0, max(len(line), 1), _WRAP_WIDTH)
        ]


async def _read_path(outputs: OutputStore, output: StoredOutput, path: str, offset: int, limit: int) -> dict[str, Any]:
    if output.bytes > _MAX_JSON_BYTES:
        raise ToolExecutionError(f"the output has {output.bytes} bytes, too many for jsonPath; use pattern or offset")
    text = await outputs.text(output, limit=_MAX_JSON_BYTES)
    is_abandoned = threading.Event()
    try:
        values = await asyncio.to_thread(find_values, text, path, is_abandoned)
    finally:
        is_abandoned.set()  # A thread cannot be cancelled: it stops itself.
    returned_values: list[Any] = []
    room = _MAX_RESULT_CHARACTERS
    candidates = values[offset - 1 : MAX_VALUES]
    for value in candidates[:limit]:
        size = len(json_text.encode(value))
        if size > room:
            if not returned_values:
                returned_values.append(json_text.describe(value, room))
            break
        returned_values.append(value)
        room -= size
    result: dict[str, Any] = {
        "handle": output.handle,
        "found": f"more than {MAX_VALUES}" if len(values) > MAX_VALUES else len(values),
        "values": returned_values,
    }
    if len(returned_values) < len(candidates):
        result["truncated"] = True
        result["nextOffset"] = offset + len(returned_values)
    return result
