"""Results that are too large for a model: stored as they are, and given back as a handle with a preview."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from toolspace.core import json_text
from toolspace.core.interfaces import OutputStore, OutputWriter, StoredOutput
from toolspace.core.result import JsonPart, TextPart, ToolResult
from toolspace.errors import ToolLimitError, ToolspaceError

if TYPE_CHECKING:
    from toolspace.orchestrator.call import Call

Reason = Literal["size_limit_exceeded", "token_budget"]

_log = logging.getLogger("toolspace.outputs")
_HEAD, _TAIL = 1_500, 500
_PIECE = 256 * 1024


class SpillSettings(NamedTuple):
    """Where what is too large for memory goes, and from how many bytes on."""

    outputs: OutputStore | None
    limit: int


NO_SPILL = SpillSettings(None, 100_000)


async def store_result(
    call: Call, result: ToolResult, outputs: OutputStore, *, reason: Reason, limit: int
) -> ToolResult:
    """The handle of a result, once it is stored. A store that fails is a failed result, not a lost one unsaid."""
    text = result.text
    call.prepare_to_wait()
    try:
        writer = await outputs.create(session=call.session, owner=call.base_context.user_id, tool=call.entry.tool.name)
        try:
            for start in range(0, len(text), _PIECE):
                await writer.write(text[start : start + _PIECE])
            output = await writer.commit(is_json=not isinstance(result.result, str) and not result.parts)
        except BaseException:
            await writer.discard()
            raise
    except (OSError, ToolspaceError) as error:
        _log.warning("an output of %s could not be stored: %s", call.entry.tool.name, error)
        message = f"the result is too large for the model and could not be stored: {error}"
        return call.fail("limit_exceeded", message, executed=True)
    handle = _handed_over(call, output, reason, preview(text, limit), result.extras)
    # What is no text was not what made it too large, and cannot be read back from a text.
    if kept := [part for part in result.parts if not isinstance(part, TextPart | JsonPart)]:
        handle.parts = (JsonPart(value=handle.result), *kept)
    return handle


class StreamCollector:
    """Gathers what a streaming tool yields: in memory while it is small, on disk from there on."""

    def __init__(self, call: Call, spool: SpillSettings, *, is_json: bool = False) -> None:
        """`is_json`: the texts that are added are the pieces of one JSON text."""
        self._call = call
        self._outputs, self._limit = spool
        self._is_json = is_json
        self._values: list[Any] = []
        self._size = 0
        self._all_text = True
        self._writer: OutputWriter | None = None
        self._head = ""
        self._tail = ""
        self._length = 0

    async def add(self, value: object) -> None:
        if self._writer is None:
            self._values.append(value)
            if not isinstance(value, str):
                self._all_text = False
                self._size += len(json_text.encode_bytes(value)) + 1
            else:
                self._size += len(value.encode("utf-8", "replace"))
            if self._size > self._limit:
                if self._outputs is None:
                    raise ToolLimitError(
                        f"the result has more bytes than toolResponseMaxBytes ({self._limit}), "
                        "and no output store is configured to keep it",
                        executed=True,
                    )
                await self._spill(self._outputs)
        elif self._all_text:
            await self._write(value if isinstance(value, str) else json_text.encode(value))
        else:
            await self._write("," + json_text.encode(value))

    async def finish(self) -> Any:
        """The joined text, the list of values, or the handle of what was stored."""
        if self._writer is None:
            return "".join(self._values) if self._all_text else self._values
        if not self._all_text:
            await self._write("]")
        output = await self._writer.commit(is_json=self._is_json or not self._all_text)
        self._writer = None
        preview = _preview(self._head, self._tail, self._length, self._limit)
        return _handed_over(self._call, output, "size_limit_exceeded", preview, {})

    async def discard(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.discard()

    async def _spill(self, outputs: OutputStore) -> None:
        call = self._call
        self._writer = await outputs.create(
            session=call.session, owner=call.base_context.user_id, tool=call.entry.tool.name
        )
        values, self._values = self._values, []
        if self._all_text:
            await self._write("".join(values))
        else:
            await self._write("[" + ",".join(map(json_text.encode, values)))

    async def _write(self, piece: str) -> None:
        assert self._writer is not None
        if len(self._head) < _HEAD:
            self._head += piece[: _HEAD - len(self._head)]
        self._tail = (self._tail + piece[-_TAIL:])[-_TAIL:]
        self._length += len(piece)
        for start in range(0, len(piece), _PIECE):
            await self._writer.write(piece[start : start + _PIECE])


def _handed_over(call: Call, output: StoredOutput, reason: Reason, preview: str, extras: dict[str, Any]) -> ToolResult:
    call.is_stored = True
    call.owner.stored_sessions.add(call.session)
    result = call.succeed(
        {
            "tool_output": {
                "handle": output.handle,
                "reason": reason,
                "bytes": output.bytes,
                "lines": output.lines,
                "tokens": output.tokens,
                "preview": preview,
            }
        }
    )
    result.extras = {
        **extras,
        "stored": True,
        "handle": output.handle,
        "expiresAt": round(output.expires_at * 1000),
    }
    return result


def preview(text: str, limit: int) -> str:
    """Head and tail of a text that is longer than `limit` bytes."""
    return _preview(text[:_HEAD], text[-_TAIL:], len(text), limit)


def _preview(head: str, tail: str, length: int, limit: int) -> str:
    """Head and tail, short enough that the handle itself stays below the limit."""
    room = max(0, min(_HEAD + _TAIL, limit // 4 - 60))
    head_room = room * 3 // 4
    tail_room = room - head_room
    left_out = length - head_room - tail_room
    if left_out <= 0 or not room:
        return head[:room]
    return f"{head[:head_room]}\n[… {left_out} characters left out …]\n{tail[len(tail) - tail_room :]}"
