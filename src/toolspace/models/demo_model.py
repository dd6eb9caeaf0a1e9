"""The demo model. It runs the scripts of `demo_rules` instead of a language model.

Like every model it keeps no state between requests. For each request it runs the scripts again from the start of the
cycle, feeds them the results in the conversation, and returns the first call that has no result yet.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final

from toolspace.core import inbox_text, json_text
from toolspace.core.inbox_text import InboxLine
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    Model,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
    TextDelta,
    Turn,
    Usage,
    UserTurn,
)
from toolspace.models.demo_rules import (
    CallOutcome,
    DemoReply,
    DemoRequest,
    DemoScript,
    WantedCall,
    continue_deletion,
    find_reply,
    parse_reminder,
    send_reply,
)

NAME: Final = "demo:rules"
FOLDER_LINE: Final = "Your folder: "
"""The beginning of the line in an agent's instructions that names the folder of its files."""
_EVENT_TYPES: Final = frozenset(("space_message", "tool_result", "plan", "service", "task"))
_MESSAGE: Final = re.compile(r'.* \((human|agent|service)\)(?: \[replies to [^\]]*\])?: ("(?:[^"\\]|\\.)*")')
"""The sender's type and the text of a message. Greedy: a name may contain anything, but the text has no bare quote."""
_RESOLVED_CALL: Final = re.compile(r"^\S+ \(callId: (\S+)\): (.*)$", re.DOTALL)
_FAILURE: Final = re.compile(r"^(?:failed|expired|canceled|resolved|completed): ")
_WORDS: Final = re.compile(r"\S*\s*")
_PAUSE_SECONDS: Final = 0.02
_MAX_MESSAGE_SECONDS: Final = 1.5
"""The limit for all pauses of one message: a long message must not take long."""

_Exchange = tuple[ModelCall, ModelToolResult]


class DemoModel(Model):
    """Answers questions about the time, files, charts, memories and reminders. Says that it is a demo."""

    name = NAME

    def __init__(self, *, pause: float = _PAUSE_SECONDS) -> None:
        """`pause`: seconds between the words of a message, so that people see it being written."""
        self._pause = pause

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        wanted_call = _find_next_call(request)
        if wanted_call is None:
            if listen is not None:
                listen(TextDelta("Done."))
            return ModelTurn(text="Done.", usage=Usage(requests=1), model=NAME)
        call_count = sum(len(turn.calls) for turn in request.turns if isinstance(turn, ModelTurn))
        call = ModelCall(f"demo_{call_count}", wanted_call.name, json_text.encode(wanted_call.arguments))
        if listen is not None:
            await self._stream(call, listen)
        return ModelTurn(calls=(call,), finish="tools", usage=Usage(requests=1), model=NAME)

    async def _stream(self, call: ModelCall, listen: ModelListener) -> None:
        listen(CallStarted(0, call.id, call.name))
        if call.name != "send_message":
            listen(CallDelta(0, call.arguments))
            return
        words = [word for word in _WORDS.findall(call.arguments) if word]
        pause = min(self._pause, _MAX_MESSAGE_SECONDS / len(words))
        for word in words:
            listen(CallDelta(0, word))
            await asyncio.sleep(pause)


def _find_next_call(request: ModelRequest) -> WantedCall | None:
    """The first call of the script that has no result yet; None at the end of the cycle."""
    turns = request.turns
    start, events = _find_cycle(turns)
    exchanges = _list_exchanges(turns[start:])
    tool_names = {tool.name for tool in request.tools}
    script = _run_events(events, request)
    try:
        call = next(script)
        while True:
            if exchanges and exchanges[0][0].name == call.name:
                _, result = exchanges.pop(0)
                outcome = CallOutcome(result.text, result.is_error)
            elif call.name not in tool_names:
                outcome = CallOutcome(f'there is no tool "{call.name}" here', failed=True)
            elif exchanges:
                return None  # Another model started this cycle with other calls.
            else:
                return call
            call = script.send(outcome)
    except StopIteration:
        return None


def _find_cycle(turns: Sequence[Turn]) -> tuple[int, list[InboxLine]]:
    """The index of the turn that started the current cycle, and its events."""
    for index in range(len(turns) - 1, -1, -1):
        turn = turns[index]
        if isinstance(turn, UserTurn):
            events = [line for line in inbox_text.parse(turn.text) if line.type in _EVENT_TYPES]
            if events:
                return index, events
    return len(turns), []


def _list_exchanges(turns: Sequence[Turn]) -> list[_Exchange]:
    """The calls that have results, in their order."""
    exchanges: list[_Exchange] = []
    calls: dict[str, ModelCall] = {}
    for turn in turns:
        if isinstance(turn, ModelTurn):
            calls = {call.id: call for call in turn.calls}
        elif isinstance(turn, ResultsTurn):
            exchanges.extend((calls[result.id], result) for result in turn.results if result.id in calls)
    return exchanges


def _run_events(events: Sequence[InboxLine], request: ModelRequest) -> DemoScript[None]:
    """Handles the events one after the other."""
    folder = _find_folder(request.system)
    current_space: str | None = None
    has_acted = False
    for event in events:
        action = _choose_action(event, request, folder)
        if action is None:
            continue
        space_id, reply = action
        has_acted = True
        if current_space != space_id:
            outcome = yield WantedCall("enter_space", {"spaceId": space_id})
            if outcome.failed:
                continue
            current_space = space_id
        yield from send_reply(reply)
    if not has_acted:
        yield WantedCall("skip", {"reason": "nothing of this is for the demo"})


def _choose_action(event: InboxLine, request: ModelRequest, folder: str | None) -> tuple[str, DemoReply] | None:
    """The space to enter for an event and the reply to send there; None if the demo ignores the event."""
    if event.type == "space_message" and event.space_id is not None:
        # It ignores messages of agents: two demos would thank each other for ever.
        match = _MESSAGE.fullmatch(event.rest)
        if match is None or match[1] != "human":
            return None
        return event.space_id, find_reply(DemoRequest(_decode_text(match[2]), event.space_id, folder))
    if event.type == "plan":
        reminder = parse_reminder(event.message_text)
        return (reminder[0], f"A reminder: {reminder[1]}") if reminder is not None else None
    if event.type == "tool_result":
        return _continue_after_confirmation(event, request.turns)
    return None


def _continue_after_confirmation(event: InboxLine, turns: Sequence[Turn]) -> tuple[str, DemoReply] | None:
    """Continues a deletion after people answered the confirmation of an earlier cycle."""
    match = _RESOLVED_CALL.match(event.rest)
    if match is None:
        return None
    call_id, text = match[1], match[2]
    space_id = event.space_id
    for call, result in _list_exchanges(turns):
        if call.name not in ("enter_space", "confirmAction"):
            continue
        arguments: dict[str, object] = json_text.decode(call.arguments)
        if call.name == "enter_space" and event.space_id is None:
            space_id = str(arguments.get("spaceId"))
        if call.name == "confirmAction" and CallOutcome(result.text).data.get("pendingToolCallId") == call_id:
            failure = _FAILURE.match(text)
            outcome = CallOutcome(text if failure is None else _decode_text(text[failure.end() :]), failure is not None)
            return (space_id, continue_deletion(arguments, outcome)) if space_id is not None else None
    return None


def _decode_text(text: str) -> str:
    try:
        value = json_text.decode(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _find_folder(system: str) -> str | None:
    """The folder that the instructions name."""
    lines = (line for line in system.splitlines() if line.startswith(FOLDER_LINE))
    return next((line.removeprefix(FOLDER_LINE).strip() for line in lines), None)
