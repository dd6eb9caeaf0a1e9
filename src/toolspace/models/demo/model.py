"""A model that is none: rules which drive the real tools, for the first minute without a key. Asks no network.

Like every model it keeps nothing between requests. Each time it runs the scripts of its rules again from where a cycle
began, sends them the answers that the dialogue has, and asks for the first call that has none yet.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Final

from toolspace.core import inbox_text, json_text
from toolspace.core.inbox_text import InboxLine
from toolspace.core.model import (
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
from toolspace.models.demo.rules import (
    CallOutcome,
    DemoRequest,
    DemoScript,
    WantedCall,
    continue_deletion,
    parse_reminder,
    run_first_match,
    send_message,
)

NAME: Final = "demo:rules"
FOLDER_LINE: Final = "Your folder: "
"""How the instructions of an agent tell where its files are: in a line that begins so."""
_KNOWN: Final = frozenset(("space_message", "tool_result", "plan", "service", "task"))
_SAID: Final = re.compile(r'.* \((human|agent|service)\)(?: \[replies to [^\]]*\])?: ("(?:[^"\\]|\\.)*")')
"""The last that looks so: a name may hold anything, but within what was said no quote begins a text."""
_CALL_ID: Final = re.compile(r"^\S+ \(callId: (\S+)\): (.*)$", re.DOTALL)
_FAILED: Final = re.compile(r"^(?:failed|expired|canceled|resolved|completed): ")
_PIECES: Final = re.compile(r"\S*\s*")
_PAUSE_SECONDS: Final = 0.02
_LONGEST_SECONDS: Final = 1.5
"""For all pauses of one message: a long one must not take long."""

_Exchange = tuple[ModelCall, ModelToolResult]


class DemoModel(Model):
    """Answers questions about the time, files, charts, memories and reminders; says honestly what it is."""

    name = NAME

    def __init__(self, *, pause: float = _PAUSE_SECONDS) -> None:
        """`pause`: seconds between the words of what it says, so that one sees it being written."""
        self._pause = pause

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        want = _next(request)
        if want is None:
            if listen is not None:
                listen(TextDelta("Done."))
            return ModelTurn(text="Done.", usage=Usage(requests=1), model=NAME)
        done = sum(len(turn.calls) for turn in request.turns if isinstance(turn, ModelTurn))
        call = ModelCall(f"demo_{done}", want.name, json_text.encode(want.arguments))
        if listen is not None:
            await self._write(call, listen)
        return ModelTurn(calls=(call,), finish="tools", usage=Usage(requests=1), model=NAME)

    async def _write(self, call: ModelCall, listen: ModelListener) -> None:
        listen(CallStarted(0, call.id, call.name))
        if call.name != "send_message":
            listen(CallDelta(0, call.arguments))
            return
        pieces = [piece for piece in _PIECES.findall(call.arguments) if piece]
        pause = min(self._pause, _LONGEST_SECONDS / len(pieces))
        for piece in pieces:
            listen(CallDelta(0, piece))
            await asyncio.sleep(pause)


def _next(request: ModelRequest) -> WantedCall | None:
    """The first call that is wanted and was not made yet; None at the end of the cycle."""
    turns = request.turns
    start, lines = _cycle(turns)
    made = _exchanges(turns[start:])
    offered = {tool.name for tool in request.tools}
    script = _script(lines, request)
    try:
        want = next(script)
        while True:
            if made and made[0][0].name == want.name:
                _, said = made.pop(0)
                heard = CallOutcome(said.text, said.is_error)
            elif want.name not in offered:
                heard = CallOutcome(f'there is no tool "{want.name}" here', failed=True)
            elif made:
                return None  # Not what this script asked for: someone else began the cycle.
            else:
                return want
            want = script.send(heard)
    except StopIteration:
        return None


def _cycle(turns: Sequence[Turn]) -> tuple[int, list[InboxLine]]:
    """Where the present cycle begins, and the events that began it."""
    for index in range(len(turns) - 1, -1, -1):
        turn = turns[index]
        if isinstance(turn, UserTurn) and (lines := _events(turn)):
            return index, lines
    return len(turns), []


def _events(turn: UserTurn) -> list[InboxLine]:
    return [line for line in inbox_text.parse(turn.text) if line.type in _KNOWN]


def _exchanges(turns: Sequence[Turn]) -> list[_Exchange]:
    """The calls that were made and answered, in their order."""
    found: list[_Exchange] = []
    calls: dict[str, ModelCall] = {}
    for turn in turns:
        if isinstance(turn, ModelTurn):
            calls = {call.id: call for call in turn.calls}
        elif isinstance(turn, ResultsTurn):
            found.extend((calls[one.id], one) for one in turn.results if one.id in calls)
    return found


def _script(lines: Sequence[InboxLine], request: ModelRequest) -> DemoScript[None]:
    """All that is to be done about these events, one after the other."""
    folder = _folder(request.system)
    entered: str | None = None
    acted = False
    for line in lines:
        plan = _plan(line, request, folder)
        if plan is None:
            continue
        space_id, script = plan
        acted = True
        if entered != space_id:
            heard = yield WantedCall("enter_space", {"spaceId": space_id})
            if heard.failed:
                script.close()
                continue
            entered = space_id
        yield from script
    if not acted:
        yield WantedCall("skip", {"reason": "nothing of this is for the demo"})


def _plan(line: InboxLine, request: ModelRequest, folder: str | None) -> tuple[str, DemoScript[None]] | None:
    """Where to be for an event, and what to do there; None where the demo leaves it alone."""
    if line.type == "space_message" and line.space_id is not None:
        said = _said_by_person(line)  # Of agents it takes no orders: two demos would thank each other for ever.
        return (line.space_id, run_first_match(DemoRequest(said, line.space_id, folder))) if said is not None else None
    if line.type == "plan":
        reminder = parse_reminder(line.message_text)
        return (reminder[0], _remind(reminder[1])) if reminder is not None else None
    if line.type == "tool_result":
        return _decision(line, request.turns)
    return None


def _said_by_person(line: InboxLine) -> str | None:
    """What a person said; None where it was none."""
    match = _SAID.fullmatch(line.rest)
    return _plain(match[2]) if match is not None and match[1] == "human" else None


def _remind(what: str) -> Generator[WantedCall, CallOutcome, None]:
    yield from send_message(f"A reminder: {what}")


def _decision(line: InboxLine, turns: Sequence[Turn]) -> tuple[str, DemoScript[None]] | None:
    """People have answered what the demo asked in an earlier cycle."""
    match = _CALL_ID.match(line.rest)
    if match is None:
        return None
    space_id = line.space_id
    for call, said in _exchanges(turns):
        if call.name == "enter_space" and line.space_id is None:
            space_id = str(_arguments(call).get("spaceId"))
        if call.name == "confirmAction" and CallOutcome(said.text).data.get("pendingToolCallId") == match[1]:
            failed = _FAILED.match(match[2])
            text = match[2][failed.end() :] if failed is not None else match[2]
            heard = CallOutcome(_plain(text) if failed is not None else text, failed is not None)
            return (space_id, continue_deletion(_arguments(call), heard)) if space_id is not None else None
    return None


def _arguments(call: ModelCall) -> dict[str, object]:
    return json_text.decode(call.arguments)


def _plain(text: str) -> str:
    try:
        value = json_text.decode(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _folder(system: str) -> str | None:
    """The folder that the instructions name."""
    return next((line.removeprefix(FOLDER_LINE).strip() for line in _lines(system)), None)


def _lines(system: str) -> Iterator[str]:
    return (line for line in system.splitlines() if line.startswith(FOLDER_LINE))
