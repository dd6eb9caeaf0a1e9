"""Shows what a model writes while it writes it: the arguments of its calls, and what it says in a space."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from toolspace.agents.loop import is_prebuilt_action
from toolspace.core.ids import new_id
from toolspace.core.json_text import StreamedTextField
from toolspace.core.model import CallDelta, CallStarted, ModelStreamPart, ResponseRestarted, TextDelta
from toolspace.core.records import NewEvent, Visibility, run_stream, space_stream
from toolspace.core.tool import Tool
from toolspace.errors import RefusedError, StorageError, ToolspaceError
from toolspace.spaces import messaging
from toolspace.spaces.call_host import GatewayCallHost
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program

_log = logging.getLogger("toolspace.agents")
_FLUSH_SECONDS = 0.05
_MOST_SHOWN = 1024 * 1024
"""Characters of one turn that are shown early; calls and messages show whole when the model is done."""
_MOST_CALLS = 1_000
"""Calls of one turn that are shown early."""

WriteProgram = Callable[[Effects], Program[None]]


class LiveOutput:
    """Hears one turn of a model. What is not shown when the turn ends goes with whatever keeps it."""

    def __init__(
        self,
        room: GatewayCallHost,
        find: Callable[[str], Tool | None],
        *,
        guard: Callable[[], Program[None]] | None = None,
    ) -> None:
        """`guard` raises where nothing is to be shown any more, because another process goes on with it."""
        self._room = room
        self._find = find
        self._guard = guard
        self._calls: list[_StreamedCall] = []
        self._text: list[str] = []
        self._text_id: str | None = None
        self._heard = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._moves = False
        """Whether the agent is about to be in another space: what it says after that is not said here."""

    def __call__(self, part: ModelStreamPart) -> None:
        if isinstance(part, CallDelta):
            self._heard += len(part.text)
            if self._heard <= _MOST_SHOWN and 0 <= part.index < len(self._calls):
                self._calls[part.index].take(part.text)
        elif isinstance(part, CallStarted):
            while len(self._calls) <= part.index < _MOST_CALLS:
                self._calls.append(self._begin(part.name))
        elif isinstance(part, TextDelta):
            self._heard += len(part.text)
            if self._heard <= _MOST_SHOWN:
                self._text.append(part.text)
        elif isinstance(part, ResponseRestarted):
            self._restart()
        else:
            return
        if self._timer is None and self._writing is None:
            self._set_timer()

    def call_id(self, index: int) -> str:
        """The id of a call of this turn."""
        return self._calls[index].call_id if index < len(self._calls) else new_id("call")

    async def finish(self) -> WriteProgram | None:
        """The turn is complete: what readers have not seen of it, for whoever keeps it to write."""
        await self._rest()
        shown = self._collect()
        return (lambda effects: _show(effects, shown)) if shown else None

    async def abort(self) -> None:
        """The turn will not be completed: ends what was begun in the open."""
        await self._rest()
        begun = [call.message_id for call in self._calls if call.is_message and call.begun]
        if begun:
            try:
                await self._room.ledger.commit(_abandon, begun)
            except StorageError as error:
                _log.warning("a message that was being written is left open for now: %s", error)

    async def _rest(self) -> None:
        """Shows nothing more by itself; what is being shown comes first."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(0, _nothing)  # None is set again.
        while self._writing is not None:
            await asyncio.shield(self._writing)

    def _begin(self, name: str) -> _StreamedCall:
        tool = self._find(name)
        space_id = self._room.space_id if not self._moves else None
        if tool is not None and (is_prebuilt_action(tool, "enter_space") or is_prebuilt_action(tool, "leave_space")):
            self._moves = True
        says = tool is not None and is_prebuilt_action(tool, "send_message") and space_id is not None
        return _StreamedCall(name, tool, room=self._room, space_id=space_id, is_message=says)

    def _restart(self) -> None:
        # The calls keep their ids: what was shown of them is void, which readers are told.
        for call in self._calls:
            call.restart()
        self._text.clear()
        self._heard = 0

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if shown := self._collect():
            self._writing = asyncio.get_running_loop().create_task(self._write(shown))

    async def _write(self, shown: Sequence[WriteProgram]) -> None:
        try:
            await self._room.ledger.commit(_show, shown, self._guard)
        except ToolspaceError as error:
            _log.warning("what a model writes is not shown while it does: %s", error)
        finally:
            self._writing = None
        if self._timer is None and (self._text or any(call.has_more for call in self._calls)):
            self._set_timer()

    def _collect(self) -> list[WriteProgram]:
        """What has come since the last time, as programs that may be tried more than once."""
        shown: list[WriteProgram] = []
        if self._text and self._room.run_id is not None:
            text = "".join(self._text)
            self._text.clear()
            first, self._text_id = self._text_id is None, self._text_id or new_id("msg")
            shown.append(partial(_show_text, room=self._room, message_id=self._text_id, text=text, first=first))
        shown.extend(call.collect() for call in self._calls if call.has_more)
        return shown


class _StreamedCall:
    """A call that is being written."""

    __slots__ = (
        "_member",
        "_name",
        "_pending",
        "_restarted",
        "_room",
        "_space_id",
        "_tool",
        "begun",
        "call_id",
        "is_message",
    )

    def __init__(
        self, name: str, tool: Tool | None, *, room: GatewayCallHost, space_id: str | None, is_message: bool
    ) -> None:
        self.call_id = new_id("call")
        self.is_message = is_message
        self.begun = False
        """Whether readers know of it."""
        self._room = room
        self._space_id = space_id
        self._pending: list[str] = []
        self._name = name
        self._tool = tool
        self._member = StreamedTextField("text")
        self._restarted = False

    @property
    def message_id(self) -> str:
        return messaging.message_id_for_call(self.call_id)

    @property
    def has_more(self) -> bool:
        return bool(self._pending)

    def take(self, piece: str) -> None:
        text = self._member.feed(piece) if self.is_message else piece
        if text:
            self._pending.append(text)

    def restart(self) -> None:
        self._pending.clear()
        self._member = StreamedTextField("text")
        self._restarted = self.begun

    def collect(self) -> WriteProgram:
        piece, first, restarted = "".join(self._pending), not self.begun, self._restarted
        self._pending.clear()
        self.begun, self._restarted = True, False
        if self.is_message:
            return partial(self._say, piece=piece, first=first, restarted=restarted)
        return partial(self._show_arguments, piece=piece, restarted=restarted)

    def _say(self, effects: Effects, *, piece: str, first: bool, restarted: bool) -> Program[None]:
        room = self._room
        assert self._space_id is not None
        assert room.agent_entity_id is not None
        if first:
            try:
                yield from messaging.start_message(
                    effects, self._space_id, room.agent_entity_id, self.message_id, room.run_id
                )
            except RefusedError:
                return  # The space is gone, or the agent from it: the call will say so.
        yield from messaging.append_to_message(effects, self.message_id, piece, restart=restarted)

    def _show_arguments(self, effects: Effects, *, piece: str, restarted: bool) -> Program[None]:
        tool, room = self._tool, self._room
        prebuilt = tool is not None and tool.execution_type == "prebuilt"
        visible = tool is not None and tool.visible and not prebuilt
        exposure: Visibility = "full" if visible else "name" if prebuilt else "none"
        data: dict[str, Any] = {"toolCallId": self.call_id, "toolName": self._name, "inputDelta": piece}
        if restarted:
            data["restart"] = True
        event = NewEvent("tool.streaming", data, exposure)
        if room.run_id is not None:
            effects.emit(run_stream(room.run_id), event)
        if self._space_id is not None and exposure != "none":
            effects.emit(space_stream(self._space_id), event)
        return
        yield  # A program, though it asks for nothing itself.


def _show(
    effects: Effects, shown: Sequence[WriteProgram], guard: Callable[[], Program[None]] | None = None
) -> Program[None]:
    if guard is not None:
        yield from guard()
    for write in shown:
        yield from write(effects)


def _show_text(effects: Effects, *, room: GatewayCallHost, message_id: str, text: str, first: bool) -> Program[None]:
    """What the model says to itself, for whoever may read a run's every word."""
    assert room.run_id is not None
    stream = run_stream(room.run_id)
    if first:
        ids = {"messageId": message_id, "spaceId": None, "senderId": room.agent_entity_id, "seq": 0}
        effects.emit(stream, NewEvent("message.started", {**ids, "runId": room.run_id}, "none"))
    effects.emit(stream, NewEvent("message.delta", {"messageId": message_id, "delta": text}, "none"))
    return
    yield  # A program, though it asks for nothing itself.


def _abandon(effects: Effects, message_ids: Sequence[str]) -> Program[None]:
    for message_id in message_ids:
        yield from messaging.abandon_message(effects, message_id, "its writer was interrupted")


def _nothing() -> None: ...
