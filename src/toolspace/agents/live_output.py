"""Publishes a model's turn while the model writes it: its calls with their arguments, and the text of its messages.

Cycles and stored runs give a `LiveOutput` to the model as its listener. The step that stores the turn publishes the
rest, so subscribers receive every part once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec

from toolspace.agents.live_answer import AnswerPlace, LiveAnswer
from toolspace.agents.loop import changes_space, is_prebuilt_action
from toolspace.agents.session_transactions import WriteProgram
from toolspace.core.ids import new_id
from toolspace.core.json_text import StreamedTextField
from toolspace.core.language_model import CallDelta, CallStarted, ModelStreamPart, ResponseRestarted, TextDelta
from toolspace.core.stored_records import NewEvent, run_stream
from toolspace.core.tool import Tool
from toolspace.errors import RefusedError, ToolspaceError
from toolspace.spaces import announced_calls, messaging
from toolspace.spaces.announced_calls import AnnouncedCall, build_announcement
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.spaces.call_recorder import visibility_of
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
        has_before_hooks: Callable[[str], bool],
        check_lease: Callable[[], Program[None]] | None = None,
        answer_place: AnswerPlace | None = None,
    ) -> None:
        """`check_lease` raises if another process has the session now: then nothing is published.

        `answer_place`: where the text of the turn is sent if it is the answer of the run; None if it is private.
        A message that before-hooks may still change or deny is not published while the model writes it.
        """
        self._call_host = call_host
        self._find_tool = find_tool
        self._has_before_hooks = has_before_hooks
        self._check_lease = check_lease
        self._calls: list[_StreamedCall] = []
        self._replaced_calls: list[_StreamedCall] = []
        """Calls of which a part was published, and in whose place a restarted response has another tool."""
        self._text: list[str] = []
        self._text_id = new_id("msg")
        self._has_text = False
        """Whether subscribers of the run have received a part of the text."""
        self._is_text_restarted = False
        self._answer = LiveAnswer(answer_place, self._text_id) if answer_place is not None else None
        self._received_length = 0
        self._timer: asyncio.TimerHandle | None = None
        self._publication: asyncio.Task[None] | None = None
        self._is_finished = False
        self._is_complete = False
        """Whether the turn is complete: the step that stores it also ends the calls that it does not have."""
        self._changes_space = False
        """Whether the turn has a call that changes the space: later calls of the turn do not belong to this space."""

    def __call__(self, part: ModelStreamPart) -> None:
        if isinstance(part, CallDelta):
            self._received_length += len(part.text)
            if self._received_length <= _MAX_STREAMED and 0 <= part.index < len(self._calls):
                self._calls[part.index].add(part.text)
        elif isinstance(part, CallStarted):
            if self._answer is not None:
                self._answer.withdraw()
            while len(self._calls) <= part.index < _MAX_STREAMED_CALLS:
                self._calls.append(self._start_call(part.name))
            if part.index < len(self._calls) and self._calls[part.index].name != part.name:
                self._replace_call(part)
        elif isinstance(part, TextDelta):
            self._received_length += len(part.text)
            if self._received_length <= _MAX_STREAMED:
                self._text.append(part.text)
                if self._answer is not None:
                    self._answer.add(part.text)
        elif isinstance(part, ResponseRestarted):
            self._restart()
        else:
            return
        self._schedule()

    @property
    def text_id(self) -> str | None:
        """The id under which the text of this turn was published; None if there was none."""
        return self._text_id if self._has_text else None

    def call_id(self, index: int) -> str:
        """The id of a call of this turn."""
        return self._calls[index].call_id if index < len(self._calls) else new_id("call")

    async def finish(self, call_ids: Collection[str]) -> WriteProgram | None:
        """Ends the streaming of a complete turn with these calls. Returns the writes that publish the rest of it."""
        await self._stop_publishing()
        self._is_complete = True
        reason = "the model did not make this call"
        if call_ids and self._answer is not None:
            self._answer.withdraw()
        dropped_calls = [call for call in self._list_started() if call.call_id not in call_ids]
        writes: list[WriteProgram] = [partial(call.abandon, reason=reason) for call in dropped_calls]
        self._calls = [call for call in self._calls if call.call_id in call_ids]
        writes += self._collect()
        for call in self._calls:
            if call.is_started and not call.is_message:
                self._call_host.announced_calls[call.call_id] = call.announcement.streams
        return partial(_publish, writes=writes) if writes else None

    async def abort(self) -> None:
        """Ends the streaming of a turn that will not be completed. Its messages and calls end with an error."""
        await self._stop_publishing()
        reason = "its writer was interrupted"
        open_calls = self._list_started()
        messages: list[WriteProgram] = [partial(call.abandon, reason=reason) for call in open_calls if call.is_message]
        if self._answer is not None and (write := self._answer.abort(reason)) is not None:
            messages.append(write)
        calls = [partial(call.abandon, reason=reason) for call in open_calls if not call.is_message]
        try:
            if messages:
                await self._call_host.ledger.commit(_publish, messages)
            if calls and not self._is_complete:
                await self._call_host.ledger.commit(_publish, calls, self._check_lease)
        except ToolspaceError as error:
            _log.warning("run %s: parts of its live output stay open: %s", self._call_host.run_id, error)

    async def _stop_publishing(self) -> None:
        self._is_finished = True
        if self._timer is not None:
            self._timer.cancel()
        while self._publication is not None:
            await asyncio.shield(self._publication)

    def _start_call(self, name: str) -> _StreamedCall:
        tool = self._find_tool(name)
        # After a change of the space it is unknown who may see a visible call: its first events are those of its start.
        is_quiet = self._changes_space and tool is not None and visibility_of(tool) != "none"
        space_id = self._call_host.space_id if not self._changes_space else None
        if tool is not None and changes_space(tool):
            self._changes_space = True
        is_message = tool is not None and is_prebuilt_action(tool, "send_message") and space_id is not None
        is_message = is_message and not self._has_before_hooks(name)
        announcement = build_announcement(name, tool, self._call_host, space_id)
        return _StreamedCall(announcement=announcement, is_message=is_message, is_quiet=is_quiet)

    def _replace_call(self, part: CallStarted) -> None:
        call, self._calls[part.index] = self._calls[part.index], self._start_call(part.name)
        if call.is_started:
            self._replaced_calls.append(call)

    def _list_started(self) -> list[_StreamedCall]:
        return [call for call in (*self._replaced_calls, *self._calls) if call.is_started]

    def _restart(self) -> None:
        # The calls keep their ids; subscribers are told to discard what they have received of them.
        for call in self._calls:
            call.restart()
        self._text.clear()
        self._is_text_restarted = self._has_text
        if self._answer is not None:
            self._answer.restart()
        self._received_length = 0

    def _schedule(self) -> None:
        if self._timer is None and self._publication is None and not self._is_finished:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._timer = None
        new_calls = [call for call in self._calls if not call.is_started]
        has_answer = self._has_answer_output
        if writes := self._collect():
            publication = self._publish_now(writes, new_calls, has_answer=has_answer)
            self._publication = asyncio.get_running_loop().create_task(publication)

    @property
    def _has_answer_output(self) -> bool:
        return self._answer is not None and self._answer.has_output

    async def _publish_now(
        self, writes: Sequence[WriteProgram], new_calls: Sequence[_StreamedCall], *, has_answer: bool
    ) -> None:
        try:
            await self._call_host.ledger.commit(_publish, writes, self._check_lease)
        except ToolspaceError as error:
            _log.warning("run %s: a part of the live output was not published: %s", self._call_host.run_id, error)
            for call in new_calls:
                call.is_started = False  # The next part starts it.
            if has_answer and self._answer is not None:
                self._answer.on_write_failed()
        finally:
            self._publication = None
        if self._text or self._has_answer_output or any(call.has_output for call in self._calls):
            self._schedule()

    def _collect(self) -> list[WriteProgram]:
        """The output since the last time, as programs that can be tried again."""
        writes: list[WriteProgram] = []
        if self._text and self._call_host.run_id is not None:
            text = "".join(self._text)
            self._text.clear()
            publish = partial(_publish_text, call_host=self._call_host, message_id=self._text_id, text=text)
            writes.append(partial(publish, is_first=not self._has_text, is_restarted=self._is_text_restarted))
            self._has_text, self._is_text_restarted = True, False
        if self._answer is not None and self._answer.has_output:
            writes.append(self._answer.collect())
        writes.extend(call.collect() for call in self._calls if call.has_output)
        return writes


class _StreamedCall(msgspec.Struct, eq=False, kw_only=True):
    """A call that the model is writing."""

    announcement: AnnouncedCall
    is_message: bool
    is_quiet: bool
    """Whether nothing of it is published before it starts."""
    is_started: bool = False
    """Whether subscribers have received a part of it."""
    is_restarted: bool = False
    pending_parts: list[str] = []
    text_field: StreamedTextField = msgspec.field(default_factory=partial(StreamedTextField, "text"))

    @property
    def call_id(self) -> str:
        return self.announcement.call_id

    @property
    def name(self) -> str:
        return self.announcement.tool_name

    @property
    def message_id(self) -> str:
        return messaging.message_id_for_call(self.call_id)

    @property
    def has_output(self) -> bool:
        """Whether there is something to publish. A call is announced before the first part of its arguments."""
        return bool(self.pending_parts) or not (self.is_started or self.is_message or self.is_quiet)

    def add(self, piece: str) -> None:
        text = self.text_field.feed(piece) if self.is_message else piece
        if text and not self.is_quiet:
            self.pending_parts.append(text)

    def restart(self) -> None:
        self.pending_parts.clear()
        self.text_field = StreamedTextField("text")
        self.is_restarted = self.is_started

    def collect(self) -> WriteProgram:
        piece, is_first, is_restarted = "".join(self.pending_parts), not self.is_started, self.is_restarted
        self.pending_parts.clear()
        self.is_started, self.is_restarted = True, False
        publish = self._extend_message if self.is_message else self._publish_arguments
        return partial(publish, piece=piece, is_first=is_first, is_restarted=is_restarted)

    def abandon(self, effects: Effects, *, reason: str) -> Program[None]:
        """Ends it for subscribers: it will not be made."""
        if self.is_message:
            yield from messaging.abandon_message(effects, self.message_id, reason)
        else:
            announced_calls.abandon(effects, self.announcement, reason)

    def _extend_message(self, effects: Effects, *, piece: str, is_first: bool, is_restarted: bool) -> Program[None]:
        call = self.announcement
        assert call.space_id is not None
        assert call.agent_entity_id is not None
        if is_first:
            try:
                yield from messaging.start_message(
                    effects, call.space_id, call.agent_entity_id, self.message_id, call.run_id
                )
            except RefusedError:
                return  # The space is gone, or the agent is not a member any more: the call will report it.
        yield from messaging.append_to_message(effects, self.message_id, piece, restart=is_restarted)

    def _publish_arguments(self, effects: Effects, *, piece: str, is_first: bool, is_restarted: bool) -> Program[None]:
        if is_first:
            announced_calls.announce(effects, self.announcement)
        if piece:
            announced_calls.stream_input(effects, self.announcement, piece, restart=is_restarted)
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
    effects: Effects,
    *,
    call_host: GatewayCallHost,
    message_id: str,
    text: str,
    is_first: bool,
    is_restarted: bool,
) -> Program[None]:
    """Publishes the model's own text on the run's stream, for holders of the secret key."""
    assert call_host.run_id is not None
    stream = run_stream(call_host.run_id)
    if is_first:
        ids = {"messageId": message_id, "spaceId": None, "senderId": call_host.agent_entity_id, "seq": 0}
        effects.emit(stream, NewEvent("message.started", {**ids, "runId": call_host.run_id}, "none"))
    delta: dict[str, Any] = {"messageId": message_id, "delta": text}
    if is_restarted:
        delta["restart"] = True
    effects.emit(stream, NewEvent("message.delta", delta, "none"))
    return
    yield  # Makes this a program, though it runs no statement.
