"""Publishes a model's turn while the model writes it: the arguments of its calls, and the text of its messages.

Cycles and stored runs give a `LiveOutput` to the model as its listener. The step that stores the turn publishes the
rest, so subscribers receive every part once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from toolspace.agents.loop import changes_space, is_prebuilt_action
from toolspace.agents.session_transactions import WriteProgram
from toolspace.core.ids import new_id
from toolspace.core.json_text import StreamedTextField
from toolspace.core.language_model import CallDelta, CallStarted, ModelStreamPart, ResponseRestarted, TextDelta
from toolspace.core.stored_records import NewEvent, Visibility, run_stream, space_stream
from toolspace.core.tool import Tool
from toolspace.errors import RefusedError, StorageError, ToolspaceError
from toolspace.spaces import messaging
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program

_log = logging.getLogger("toolspace.agents")
FLUSH_SECONDS = 0.05
_MAX_STREAMED = 1024 * 1024
"""Characters of one turn that are streamed; calls and messages are complete when the turn is stored."""
_MAX_STREAMED_CALLS = 1_000


class LiveOutput:
    """The listener of one turn of a model."""

    def __init__(
        self,
        call_host: GatewayCallHost,
        find_tool: Callable[[str], Tool | None],
        *,
        check_lease: Callable[[], Program[None]] | None = None,
    ) -> None:
        """`check_lease` raises if another process has the session now: then nothing is published."""
        self._call_host = call_host
        self._find_tool = find_tool
        self._check_lease = check_lease
        self._calls: list[_StreamedCall] = []
        self._text: list[str] = []
        self._text_id: str | None = None
        self._received_length = 0
        self._timer: asyncio.TimerHandle | None = None
        self._publication: asyncio.Task[None] | None = None
        self._is_finished = False
        self._changes_space = False
        """Whether the turn has a call that changes the space: later calls of the turn do not belong to this space."""

    def __call__(self, part: ModelStreamPart) -> None:
        if isinstance(part, CallDelta):
            self._received_length += len(part.text)
            if self._received_length <= _MAX_STREAMED and 0 <= part.index < len(self._calls):
                self._calls[part.index].add(part.text)
        elif isinstance(part, CallStarted):
            while len(self._calls) <= part.index < _MAX_STREAMED_CALLS:
                self._calls.append(self._start_call(part.name))
        elif isinstance(part, TextDelta):
            self._received_length += len(part.text)
            if self._received_length <= _MAX_STREAMED:
                self._text.append(part.text)
        elif isinstance(part, ResponseRestarted):
            self._restart()
        else:
            return
        self._schedule()

    def call_id(self, index: int) -> str:
        """The id of a call of this turn."""
        return self._calls[index].call_id if index < len(self._calls) else new_id("call")

    async def finish(self) -> WriteProgram | None:
        """Ends the streaming of a complete turn. Returns the writes that publish the rest of it."""
        await self._stop_publishing()
        writes = self._collect()
        return partial(_publish, writes=writes) if writes else None

    async def abort(self) -> None:
        """Ends the streaming of a turn that will not be completed. Its messages end with an error."""
        await self._stop_publishing()
        message_ids = [call.message_id for call in self._calls if call.is_message and call.is_started]
        try:
            if message_ids:
                await self._call_host.ledger.commit(_abandon_messages, message_ids)
        except StorageError as error:
            _log.warning("messages %s stay open until the session continues: %s", message_ids, error)

    async def _stop_publishing(self) -> None:
        self._is_finished = True
        if self._timer is not None:
            self._timer.cancel()
        while self._publication is not None:
            await asyncio.shield(self._publication)

    def _start_call(self, name: str) -> _StreamedCall:
        tool = self._find_tool(name)
        space_id = self._call_host.space_id if not self._changes_space else None
        if tool is not None and changes_space(tool):
            self._changes_space = True
        is_message = tool is not None and is_prebuilt_action(tool, "send_message") and space_id is not None
        return _StreamedCall(name=name, tool=tool, call_host=self._call_host, space_id=space_id, is_message=is_message)

    def _restart(self) -> None:
        # The calls keep their ids; subscribers are told to discard what they have received of them.
        for call in self._calls:
            call.restart()
        self._text.clear()
        self._received_length = 0

    def _schedule(self) -> None:
        if self._timer is None and self._publication is None and not self._is_finished:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if writes := self._collect():
            self._publication = asyncio.get_running_loop().create_task(self._publish_now(writes))

    async def _publish_now(self, writes: Sequence[WriteProgram]) -> None:
        try:
            await self._call_host.ledger.commit(_publish, writes, self._check_lease)
        except ToolspaceError as error:
            _log.warning("run %s: a part of the live output was not published: %s", self._call_host.run_id, error)
        finally:
            self._publication = None
        if self._text or any(call.pending_parts for call in self._calls):
            self._schedule()

    def _collect(self) -> list[WriteProgram]:
        """The output since the last time, as programs that can be tried again."""
        writes: list[WriteProgram] = []
        if self._text and self._call_host.run_id is not None:
            text = "".join(self._text)
            self._text.clear()
            is_first, message_id = self._text_id is None, self._text_id or new_id("msg")
            self._text_id = message_id
            publish = partial(_publish_text, call_host=self._call_host, message_id=message_id)
            writes.append(partial(publish, text=text, is_first=is_first))
        writes.extend(call.collect() for call in self._calls if call.pending_parts)
        return writes


class _StreamedCall(msgspec.Struct, eq=False, kw_only=True):
    """A call that the model is writing."""

    name: str
    tool: Tool | None
    call_host: GatewayCallHost
    space_id: str | None
    is_message: bool
    call_id: str = msgspec.field(default_factory=partial(new_id, "call"))
    is_started: bool = False
    """Whether subscribers have received a part of it."""
    is_restarted: bool = False
    pending_parts: list[str] = []
    text_field: StreamedTextField = msgspec.field(default_factory=partial(StreamedTextField, "text"))

    @property
    def message_id(self) -> str:
        return messaging.message_id_for_call(self.call_id)

    def add(self, piece: str) -> None:
        text = self.text_field.feed(piece) if self.is_message else piece
        if text:
            self.pending_parts.append(text)

    def restart(self) -> None:
        self.pending_parts.clear()
        self.text_field = StreamedTextField("text")
        self.is_restarted = self.is_started

    def collect(self) -> WriteProgram:
        piece, is_first, is_restarted = "".join(self.pending_parts), not self.is_started, self.is_restarted
        self.pending_parts.clear()
        self.is_started, self.is_restarted = True, False
        if self.is_message:
            return partial(self._extend_message, piece=piece, is_first=is_first, is_restarted=is_restarted)
        return partial(self._publish_arguments, piece=piece, is_restarted=is_restarted)

    def _extend_message(self, effects: Effects, *, piece: str, is_first: bool, is_restarted: bool) -> Program[None]:
        host = self.call_host
        assert self.space_id is not None
        assert host.agent_entity_id is not None
        if is_first:
            try:
                yield from messaging.start_message(
                    effects, self.space_id, host.agent_entity_id, self.message_id, host.run_id
                )
            except RefusedError:
                return  # The space is gone, or the agent is not a member any more: the call will report it.
        yield from messaging.append_to_message(effects, self.message_id, piece, restart=is_restarted)

    def _publish_arguments(self, effects: Effects, *, piece: str, is_restarted: bool) -> Program[None]:
        tool, host = self.tool, self.call_host
        is_prebuilt = tool is not None and tool.execution_type == "prebuilt"
        is_visible = tool is not None and tool.visible and not is_prebuilt
        visibility: Visibility = "full" if is_visible else "name" if is_prebuilt else "none"
        data: dict[str, Any] = {"toolCallId": self.call_id, "toolName": self.name, "inputDelta": piece}
        if is_restarted:
            data["restart"] = True
        event = NewEvent("tool.streaming", data, visibility)
        if host.run_id is not None:
            effects.emit(run_stream(host.run_id), event)
        if self.space_id is not None and visibility != "none":
            effects.emit(space_stream(self.space_id), event)
        return
        yield  # Makes this a program, though it runs no statement.


def _publish(
    effects: Effects, writes: Sequence[WriteProgram], check_lease: Callable[[], Program[None]] | None = None
) -> Program[None]:
    if check_lease is not None:
        yield from check_lease()
    for write in writes:
        yield from write(effects)


def _publish_text(
    effects: Effects, *, call_host: GatewayCallHost, message_id: str, text: str, is_first: bool
) -> Program[None]:
    """Publishes the model's own text on the run's stream, for holders of the secret key."""
    assert call_host.run_id is not None
    stream = run_stream(call_host.run_id)
    if is_first:
        ids = {"messageId": message_id, "spaceId": None, "senderId": call_host.agent_entity_id, "seq": 0}
        effects.emit(stream, NewEvent("message.started", {**ids, "runId": call_host.run_id}, "none"))
    effects.emit(stream, NewEvent("message.delta", {"messageId": message_id, "delta": text}, "none"))
    return
    yield  # Makes this a program, though it runs no statement.


def _abandon_messages(effects: Effects, message_ids: Sequence[str]) -> Program[None]:
    for message_id in message_ids:
        yield from messaging.abandon_message(effects, message_id, "its writer was interrupted")
