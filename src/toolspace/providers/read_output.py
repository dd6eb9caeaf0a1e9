"""`agent__read_output`: reads a stored output back, by lines, by pattern or by JSONPath. Its answers are small."""

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

_ROOM = 16_000
"""Characters of an answer: about four thousand tokens."""
_WRAP = 2_000
"""A longer line is read in pieces of this size, so that one endless line can be read at all."""
_DEFAULT_LINES = 200
_MOST_MATCHES = 200
_MOST_VALUES = 10_000
_MOST_JSON_BYTES = 64 * 1024 * 1024


def read_output_tool(outputs: OutputStore) -> FunctionTool:
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
            limit: How many lines, matches or values to return at most.
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
            # One message for all reasons: a handle must not tell whether someone else's output exists.
            raise ToolExecutionError(f'no stored output "{handle}" can be read here; it may have expired')
        if jsonPath is not None:
            return await _by_path(outputs, output, jsonPath, offset or 1, limit or _MOST_MATCHES)
        if pattern is not None:
            return await _by_pattern(outputs, output, pattern, offset or 1, limit or _MOST_MATCHES)
        return await _by_lines(outputs, output, offset or 1, limit or _DEFAULT_LINES)

    settings = Annotations(read_only=True, idempotent=True)
    made = tool(name="read_output", category=ToolCategory.AGENT, annotations=settings)(read_output)
    made.has_small_results = True
    return made


async def _by_lines(outputs: OutputStore, output: StoredOutput, offset: int, limit: int) -> dict[str, Any]:
    lines: list[str] = []
    room = _ROOM
    more = False
    number = 0
    async with aclosing(_wrapped(outputs, output)) as batches:
        async for batch in batches:
            for line in batch[max(0, offset - 1 - number) :]:
                if len(lines) >= limit or (lines and len(line) + 1 > room):
                    more = True
                    break
                lines.append(line)
                room -= len(line) + 1
            number += len(batch)
            if more:
                break
    answer: dict[str, Any] = {
        "handle": output.handle,
        "offset": offset,
        "lines": len(lines),
        "totalLines": output.lines,
        "content": "\n".join(lines),
    }
    if more:
        answer["nextOffset"] = offset + len(lines)
    return answer


async def _by_pattern(
    outputs: OutputStore, output: StoredOutput, pattern: str, offset: int, limit: int
) -> dict[str, Any]:
    compiled = SafePattern(pattern)
    matches: list[dict[str, Any]] = []
    room = _ROOM
    more = False
    number = 0
    async with aclosing(_wrapped(outputs, output)) as batches:
        async for batch in batches:
            # In a thread: a slow pattern may take its second, but not from everyone else on the loop.
            found = await asyncio.to_thread(_matching, compiled, batch, number, offset)
            number += len(batch)
            for match in found:
                if len(matches) >= limit or (matches and len(match["text"]) > room):
                    more = True
                    break
                matches.append(match)
                room -= len(match["text"])
            if more:
                break
    answer: dict[str, Any] = {"handle": output.handle, "totalLines": output.lines, "matches": matches}
    if more:
        answer["nextOffset"] = matches[-1]["line"] + 1
    return answer


async def _by_path(outputs: OutputStore, output: StoredOutput, path: str, offset: int, limit: int) -> dict[str, Any]:
    if output.bytes > _MOST_JSON_BYTES:
        raise ToolExecutionError(f"the output has {output.bytes} bytes, too many for jsonPath; use pattern or offset")
    text = await outputs.text(output, limit=_MOST_JSON_BYTES)
    values = await asyncio.to_thread(_query, text, path)
    more = len(values) > _MOST_VALUES
    shown: list[Any] = []
    room = _ROOM
    values_left = values[offset - 1 : _MOST_VALUES]
    for value in values_left[:limit]:
        size = len(json_text.encode(value))
        if size > room:
            if not shown:
                shown.append(json_text.describe(value, room))
            break
        shown.append(value)
        room -= size
    answer: dict[str, Any] = {
        "handle": output.handle,
        "found": f"more than {_MOST_VALUES}" if more else len(values),
        "values": shown,
    }
    if len(shown) < len(values_left):
        answer["truncated"] = True
        answer["nextOffset"] = offset + len(shown)
    return answer


def _query(text: str, path: str) -> list[Any]:
    import jsonpath  # 80 ms that only a query pays.

    try:
        document = json_text.decode(text)
    except ValueError as error:
        raise ToolExecutionError(f"the output is not JSON ({error}); use pattern or offset") from None
    environment = jsonpath.JSONPathEnvironment(strict=True)
    for name in ("match", "search"):
        # Regular expressions of a stranger, without a time limit; `pattern` has one.
        environment.function_extensions.pop(name, None)
    try:
        found = environment.finditer(path, document)
        return [match.obj for match in itertools.islice(found, _MOST_VALUES + 1)]
    except Exception as error:  # Its own, and what strange paths make it stumble over.
        # Not `str(error)`: the library draws the path into it, and fails at that where the path is empty.
        reason = str(error.args[0] if error.args else type(error).__name__).partition("\n")[0]
        raise ToolValidationError(f"jsonPath: {json_text.describe(path)}: {reason}") from None


def _matching(pattern: SafePattern, lines: list[str], before: int, offset: int) -> list[dict[str, Any]]:
    return [
        {"line": number, "text": line}
        for number, line in enumerate(lines, before + 1)
        if number >= offset and pattern.search(line) is not None
    ]


async def _wrapped(outputs: OutputStore, output: StoredOutput) -> AsyncGenerator[list[str], None]:
    """The lines in batches, long ones in pieces."""
    async for batch in outputs.lines(output):
        yield [line[start : start + _WRAP] for line in batch for start in range(0, max(len(line), 1), _WRAP)]
