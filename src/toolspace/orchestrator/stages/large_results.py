"""The stages `budget` and `cap`: store a result that is too large for a model, and return a handle with a preview.

`cap` limits the bytes of one result: more for a program than for a model. `budget` limits what all results of a run
add to its context window. A call collects streams with `StreamCollector`, which stores them while they run.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from toolspace.core import json_text
from toolspace.core.defaults import TOOL_RESPONSE_MAX_BYTES
from toolspace.core.extension_points import OutputStore, OutputWriter, StoredOutput
from toolspace.core.result import JsonPart, TextPart, ToolResult
from toolspace.errors import ToolError, ToolLimitError, ToolspaceError

if TYPE_CHECKING:
    from toolspace.orchestrator.call import Call
    from toolspace.orchestrator.pipeline import CallHandler, StageContext
    from toolspace.orchestrator.run import Run

StoreReason = Literal["size_limit_exceeded", "token_budget"]

_log = logging.getLogger("toolspace.outputs")
_HEAD_CHARACTERS, _TAIL_CHARACTERS = 1_500, 500
_WRITE_CHARACTERS = 256 * 1024
"""How much is written to the store at a time."""
EXCEEDED = "context window budget exceeded"
_SHORT_FAILURE = 200
"""Characters up to which a failure is returned unchanged: its replacement would be no shorter."""


def budget(stage: StageContext, next: CallHandler, /) -> CallHandler:
    if not stage.in_run:
        return next
    count, outputs = stage.services.count_tokens, stage.services.outputs
    has_small_results = stage.entry.tool.has_small_results

    async def run(call: Call) -> ToolResult:
        result = await next(call)
        run = call.run
        if run is None or run.context_window is None:
            return result
        tokens = count(result.text)
        if tokens > run.remaining_tokens and (result.ok or len(result.text) > _SHORT_FAILURE):
            result = await shrink(call, result, run)
            tokens = count(result.text)
            if not result.ok:
                run.tool_budget_exceeded = True
        run.add_tokens(tokens)
        return result

    async def shrink(call: Call, result: ToolResult, run: Run) -> ToolResult:
        if outputs is not None and result.ok and not call.is_stored and not has_small_results:
            # A token is at most four bytes of text, so a preview of half that size fits.
            max_bytes = int(run.remaining_tokens) * 2
            handle = await store_result(call, result, outputs, reason="token_budget", limit=max_bytes)
            # Checked again: other calls may have used tokens in the meantime.
            if handle.ok and count(handle.text) <= run.remaining_tokens:
                return handle
        return call.fail("limit_exceeded", EXCEEDED, executed=result.executed)

    return run


def exceeds_budget(result: ToolResult) -> bool:
    """Whether a call failed because its result did not fit into the context window of its run."""
    return result.error_kind == "limit_exceeded" and result.error == EXCEEDED


def cap(stage: StageContext, next: CallHandler, /) -> CallHandler:
    if stage.entry.tool.has_small_results:
        return next
    for_model, for_program = spill_settings(stage)
    safe_length = min(for_model.limit, for_program.limit) // 4  # No character is longer than four bytes.

    async def run(call: Call) -> ToolResult:
        result = await next(call)
        text = result.encoded
        if text is None:
            text = result.text
        if len(text) <= safe_length or call.is_stored:
            return result
        outputs, limit, setting, _ = for_program if call.is_for_program else for_model
        if (size := len(text.encode("utf-8", "replace"))) <= limit:
            return result
        if not result.ok:
            result.error, result.encoded = preview(result.error or "", limit), None
            return result
        if outputs is None:
            return call.fail(
                "limit_exceeded",
                f"the result has {size} bytes, more than {setting} ({limit}), "
                "and no output store is configured to keep it",
                executed=True,
            )
        return await store_result(call, result, outputs, reason="size_limit_exceeded", limit=limit)

    return run


class SpillSettings(NamedTuple):
    """Where a stream is stored, and from how many bytes on."""

    outputs: OutputStore | None
    limit: int
    setting: str = "toolResponseMaxBytes"
    """The setting that has the limit."""
    refusal: ToolError | None = None
    """Raised instead of storing a stream, if not even the beginning of it may be returned."""


NO_SPILL = SpillSettings(None, TOOL_RESPONSE_MAX_BYTES)


def spill_settings(stage: StageContext) -> tuple[SpillSettings, SpillSettings]:
    """The settings for calls of models and other remote callers, and for calls of programs."""
    outputs, max_inline_bytes = stage.services.outputs, stage.services.defaults.max_inline_bytes.value
    return (
        SpillSettings(outputs, stage.settings.max_bytes.value),
        SpillSettings(outputs, max_inline_bytes, "maxInlineBytes"),
    )


async def store_result(
    call: Call, result: ToolResult, outputs: OutputStore, *, reason: StoreReason, limit: int
) -> ToolResult:
    """Stores a result and returns its handle. Returns a failed result if the store fails."""
    text = result.text
    call.prepare_to_wait()
    try:
        writer = await outputs.create(session=call.session, owner=call.base_context.user_id, tool=call.entry.tool.name)
        try:
            await _write_chunks(writer, text)
            output = await writer.commit(is_json=not isinstance(result.result, str) and not result.parts)
        except BaseException:
            await writer.discard()
            raise
    except (OSError, ToolspaceError) as error:
        _log.warning("call %s: cannot store the output of %s: %s", call.id, call.entry.tool.name, error)
        message = f"the result is too large for the model and could not be stored: {error}"
        return call.fail("limit_exceeded", message, executed=True)
    handle = _handle_result(call, output, reason, preview(text, limit), result.extras)
    handle.structured_content = (
        result.result if result.structured_content is msgspec.UNSET else result.structured_content
    )
    # Images and audio did not make the text too large, and cannot be read back from a stored text.
    if media := [part for part in result.parts if not isinstance(part, TextPart | JsonPart)]:
        handle.parts = (JsonPart(value=handle.result), *media)
    return handle


class StreamCollector:
    """Collects what a streaming tool yields: in memory while it is small, then in the output store."""

    def __init__(self, call: Call, spill: SpillSettings, *, is_json: bool = False) -> None:
        """`is_json`: the texts that are added are the pieces of one JSON text."""
        self._call = call
        self._outputs, self._limit, self._setting, self._refusal = spill
        self._is_json = is_json
        self._values: list[Any] = []
        self._size = 0
        self._is_all_text = True
        self._writer: OutputWriter | None = None
        self._head = ""
        self._tail = ""
        self._length = 0

    async def add(self, value: object) -> None:
        if self._writer is None:
            self._values.append(value)
            if not isinstance(value, str):
                self._is_all_text = False
                self._size += len(json_text.encode_bytes(value)) + 1
            else:
                self._size += len(value.encode("utf-8", "replace"))
            if self._size > self._limit:
                if self._refusal is not None:
                    raise type(self._refusal)(str(self._refusal), executed=True)
                if self._outputs is None:
                    raise ToolLimitError(
                        f"the result has more bytes than {self._setting} ({self._limit}), "
                        "and no output store is configured to keep it",
                        executed=True,
                    )
                await self._start_storing(self._outputs)
        elif self._is_all_text:
            await self._write(value if isinstance(value, str) else json_text.encode(value))
        else:
            await self._write("," + json_text.encode(value))

    async def finish(self) -> Any:
        """Returns the joined text, the list of values, or the handle of the stored output."""
        if self._writer is None:
            return "".join(self._values) if self._is_all_text else self._values
        if not self._is_all_text:
            await self._write("]")
        output = await self._writer.commit(is_json=self._is_json or not self._is_all_text)
        self._writer = None
        preview = _preview(self._head, self._tail, self._length, self._limit)
        return _handle_result(self._call, output, "size_limit_exceeded", preview, {})

    async def discard(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.discard()

    async def _start_storing(self, outputs: OutputStore) -> None:
        call = self._call
        owner, tool = call.base_context.user_id, call.entry.tool.name
        self._writer = await outputs.create(session=call.session, owner=owner, tool=tool)
        values, self._values = self._values, []
        if self._is_all_text:
            await self._write("".join(values))
        else:
            await self._write("[" + ",".join(map(json_text.encode, values)))

    async def _write(self, text: str) -> None:
        assert self._writer is not None
        if len(self._head) < _HEAD_CHARACTERS:
            self._head += text[: _HEAD_CHARACTERS - len(self._head)]
        self._tail = (self._tail + text[-_TAIL_CHARACTERS:])[-_TAIL_CHARACTERS:]
        self._length += len(text)
        await _write_chunks(self._writer, text)


async def _write_chunks(writer: OutputWriter, text: str) -> None:
    for start in range(0, len(text), _WRITE_CHARACTERS):
        await writer.write(text[start : start + _WRITE_CHARACTERS])


def _handle_result(
    call: Call, output: StoredOutput, reason: StoreReason, preview: str, extras: dict[str, Any]
) -> ToolResult:
    call.is_stored = True
    call.owner.stored_sessions.add(call.session)
    description = {
        "handle": output.handle,
        "reason": reason,
        "bytes": output.bytes,
        "lines": output.lines,
        "tokens": output.tokens,
        "preview": preview,
    }
    result = call.complete({"tool_output": description})
    expires_at = round(output.expires_at * 1000)
    result.extras = {**extras, "stored": True, "handle": output.handle, "expiresAt": expires_at}
    return result


def preview(text: str, limit: int) -> str:
    """Returns the head and the tail of a text that is longer than `limit` bytes."""
    return _preview(text[:_HEAD_CHARACTERS], text[-_TAIL_CHARACTERS:], len(text), limit)


def _preview(head: str, tail: str, length: int, limit: int) -> str:
    """Returns head and tail, short enough that the handle itself stays below the limit."""
    max_length = max(0, min(_HEAD_CHARACTERS + _TAIL_CHARACTERS, limit // 4 - 60))
    head_length = max_length * 3 // 4
    tail_length = max_length - head_length
    omitted_length = length - head_length - tail_length
    if omitted_length <= 0 or not max_length:
        return head[:max_length]
    return f"{head[:head_length]}\n[… {omitted_length} characters left out …]\n{tail[len(tail) - tail_length :]}"
