"""Publishes the text of a turn in the space of its answer while the model writes it.

`live_output.py` feeds it. The text is provisional: if the turn also has a call, the text was not the answer, and the
message is withdrawn. `plain_answers.py` completes the message in the commit that ends the run.
"""

from __future__ import annotations

from functools import partial

import msgspec

from toolspace.agents import plain_answers
from toolspace.agents.session_transactions import WriteProgram
from toolspace.core import json_text
from toolspace.spaces import messaging
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program

_WITHDRAWN = "it was not the answer: the agent went on with a call"


class AnswerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the text of a run's last turn will be sent."""

    run_id: str
    session_id: str
    agent_entity_id: str
    space_id: str


class LiveAnswer:
    """The text of one turn as a message that may still be withdrawn."""

    def __init__(self, place: AnswerPlace, message_id: str) -> None:
        self._place = place
        self._message_id = message_id
        self._text = ""
        """What is not published yet. White space at its end waits: the answer is sent without it."""
        self._length = 0
        """Characters that were published."""
        self._is_restarted = False
        self._is_started = False
        """Whether the message has been started. False again if the start could not be stored."""
        self._may_be_open = False
        """Whether subscribers may have received a part of it, and not its end."""
        self._is_withdrawn = False

    @property
    def has_output(self) -> bool:
        if self._is_withdrawn:
            return self._may_be_open
        return self._is_restarted or bool(self._text.rstrip())

    def add(self, text: str) -> None:
        if self._is_withdrawn:
            return
        self._text += json_text.storable_text(text)
        if not self._length:
            self._text = self._text.lstrip()
        self._text = self._text[: messaging.MAX_TEXT_LENGTH - self._length]

    def restart(self) -> None:
        """Makes the text so far void: the model writes its turn again."""
        self._text, self._length = "", 0
        self._is_restarted = self._may_be_open

    def withdraw(self) -> None:
        """Ends it, because the turn has a call: it was not the answer."""
        self._is_withdrawn = True

    def collect(self) -> WriteProgram:
        """The write that publishes the text since the last time, or that the text is withdrawn."""
        if self._is_withdrawn:
            self._may_be_open = False
            return partial(self._abandon, reason=_WITHDRAWN)
        piece = self._text.rstrip()
        self._text = self._text[len(piece) :]
        self._length += len(piece)
        is_first, is_restarted = not self._is_started, self._is_restarted
        self._is_started, self._may_be_open, self._is_restarted = True, True, False
        return partial(self._publish, piece=piece, is_first=is_first, is_restarted=is_restarted)

    def on_write_failed(self) -> None:
        """The last write was not committed, or it is unknown whether it was: the next one starts the message again."""
        self._is_started = False
        self._may_be_open = True

    def abort(self, reason: str) -> WriteProgram | None:
        """The write that ends it if its turn is not completed; None if nobody has received a part of it."""
        return partial(self._abandon, reason=reason) if self._may_be_open else None

    def _abandon(self, effects: Effects, *, reason: str) -> Program[None]:
        yield from messaging.abandon_message(effects, self._message_id, reason)

    def _publish(self, effects: Effects, *, piece: str, is_first: bool, is_restarted: bool) -> Program[None]:
        if is_first:
            place = self._place
            yield from plain_answers.start_answer(
                effects,
                place.run_id,
                place.agent_entity_id,
                place.space_id,
                self._message_id,
                session_id=place.session_id,
            )
        yield from messaging.append_to_message(effects, self._message_id, piece, restart=is_restarted)
