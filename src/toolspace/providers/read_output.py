"""`agent__read_output`: reads a stored output by lines, by pattern or by JSONPath. Its results are small.

`internal_tools` offers it. The output store decides which outputs a session and a user may read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.function_tool import FunctionTool, tool
from toolspace.core.interfaces import OutputStore, StoredOutput
from toolspace.core.safe_regex import SafePattern
from toolspace.core.tool import Annotations, ToolCategory
from toolspace.errors import ToolExecutionError, ToolValidationError

_MAX_RESULT_CHARACTERS = 16_000
"""About four thousand tokens."""
_WRAP_WIDTH = 2_000
"""Longer lines are split into pieces of this length, so that a very long line can be read at all."""
_DEFAULT_LINES = 200
_MAX_MATCHES = 200
_MAX_VALUES = 10_000
_MAX_JSON_BYTES = 64 * 1024 * 1024


def build_read_output_tool(outputs: OutputStore) -> FunctionTool:
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
            return await _read_path(outputs, output, jsonPath, offset or 1, limit or _MAX_MATCHES)
        if pattern is not None:
            return await _read_matches(outputs, output, pattern, offset or 1, limit or _MAX_MATCHES)
        return await _read_lines(outputs, output, offset or 1, limit or _DEFAULT_LINES)

    annotations = Annotations(read_only=True, idempotent=True)
    read_tool = tool(name="read_output", category=ToolCategory.AGENT, annotations=annotations)(read_output)
    read_tool.has_small_results = True
    return read_tool


async def _read_lines(outputs: OutputStore, output: StoredOutput, offset: int, limit: int) -> dict[str, Any]:
    lines: list[str] = []
    room = _MAX_RESULT_CHARACTERS
    has_more = False
    lines_before = 0
    async with aclosing(_wrapped_lines(outputs, output)) as batches:
        async for batch in batches:
            for line in batch[max(0, offset - 1 - lines_before) :]:
                if len(lines) >= limit or (lines and len(line) + 1 > room):
                    has_more = True
                    break
                lines.append(line)
                room -= len(line) + 1
            lines_before += len(batch)
            if has_more:
                break
    result: dict[str, Any] = {
        "handle": output.handle,
        "offset": offset,
        "lines": len(lines),
        "totalLines": output.lines,
        "content": "\n".join(lines),
    }
    if has_more:
        result["nextOffset"] = offset + len(lines)
    return result


async def _read_matches(
    outputs: OutputStore, output: StoredOutput, pattern: str, offset: int, limit: int
) -> dict[str, Any]:
    compiled_pattern = SafePattern(pattern)
    matches: list[dict[str, Any]] = []
    room = _MAX_RESULT_CHARACTERS
    has_more = False
    lines_before = 0
    async with aclosing(_wrapped_lines(outputs, output)) as batches:
        async for batch in batches:
            # In a thread: a slow pattern may take a second, which must not block the event loop.
            batch_matches = await asyncio.to_thread(_find_matches, compiled_pattern, batch, lines_before, offset)
            lines_before += len(batch)
            for match in batch_matches:
                if len(matches) >= limit or (matches and len(match["text"]) > room):
                    has_more = True
                    break
                matches.append(match)
                room -= len(match["text"])
            if has_more:
                break
    result: dict[str, Any] = {"handle": output.handle, "totalLines": output.lines, "matches": matches}
    if has_more:
        result["nextOffset"] = matches[-1]["line"] + 1
    return result


async def _read_path(outputs: OutputStore, output: StoredOutput, path: str, offset: int, limit: int) -> dict[str, Any]:
    if output.bytes > _MAX_JSON_BYTES:
        raise ToolExecutionError(f"the output has {output.bytes} bytes, too many for jsonPath; use pattern or offset")
    text = await outputs.text(output, limit=_MAX_JSON_BYTES)
    values = await asyncio.to_thread(_find_values, text, path)
    returned_values: list[Any] = []
    room = _MAX_RESULT_CHARACTERS
    candidates = values[offset - 1 : _MAX_VALUES]
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
        "found": f"more than {_MAX_VALUES}" if len(values) > _MAX_VALUES else len(values),
        "values": returned_values,
    }
    if len(returned_values) < len(candidates):
        result["truncated"] = True
        result["nextOffset"] = offset + len(returned_values)
    return result


def _find_values(text: str, path: str) -> list[Any]:
    import jsonpath  # Imported here: it takes 80 ms.

    try:
        document = json_text.decode(text)
    except ValueError as error:
        raise ToolExecutionError(f"the output is not JSON ({error}); use pattern or offset") from None
    environment = jsonpath.JSONPathEnvironment(strict=True)
    for name in ("match", "search"):
        # They run regular expressions of the caller without a time limit.
        environment.function_extensions.pop(name, None)
    try:
        matches = environment.finditer(path, document)
        return [match.obj for match in itertools.islice(matches, _MAX_VALUES + 1)]
    except Exception as error:  # The library raises its own errors, and others for unusual paths.
        # Not `str(error)`: the library puts the path into it, which fails if the path is empty.
        reason = str(error.args[0] if error.args else type(error).__name__).partition("\n")[0]
        raise ToolValidationError(f"jsonPath: {json_text.describe(path)}: {reason}") from None


def _find_matches(pattern: SafePattern, lines: list[str], lines_before: int, offset: int) -> list[dict[str, Any]]:
    return [
        {"line": number, "text": line}
        for number, line in enumerate(lines, lines_before + 1)
        if number >= offset and pattern.search(line) is not None
    ]


async def _wrapped_lines(outputs: OutputStore, output: StoredOutput) -> AsyncGenerator[list[str], None]:
    """The lines in batches. Long lines are split."""
    async for batch in outputs.lines(output):
        yield [
            line[start : start + _WRAP_WIDTH] for line in batch for start in range(0, max(len(line), 1), _WRAP_WIDTH)
        ]
