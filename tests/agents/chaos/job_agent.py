"""A clerk who does each job once, whatever happens meanwhile. Decides from the dialogue alone, so that any process can
go on where another was cut off.

A job is a message, `job 7 plain`, and is answered in the space that it came from. Plain ones have an effect outside;
the others make a plan, pause their run for a result, ask for one that comes by inbox, or wait for one.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from toolspace import Tool, tool
from toolspace.core import inbox_text
from toolspace.core.context import ToolContext
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
    Turn,
    Usage,
    UserTurn,
)
from toolspace.core.tool import Annotations
from toolspace.models.scripted import call
from toolspace.providers.configured_tools import build_execution

KINDS = ("plain", "plan", "ask", "confirm", "fetch")
_PIECE = 8
Pause = Callable[[], Awaitable[None]]


class Job:
    """What is known of one job, by what was said so far."""

    def __init__(self, number: str, kind: str, space_id: str) -> None:
        self.number = number
        self.kind = kind
        self.space_id = space_id
        self.done: set[str] = set()
        self.doubtful = False
        """An effect may have happened or not: nobody knows."""

    def next(self) -> list[ModelCall]:
        """What to do for it now; nothing where it is done, or waits."""
        n = self.number
        answer = call("send_message", {"text": f"{'planned' if self.kind == 'planned' else 'answer to'} {n}"})
        if "said" in self.done:
            return []
        if self.kind == "planned":
            return [answer]
        if self.kind == "plain" and "effect" not in self.done:
            if self.doubtful:
                return [call("check", {"n": n})]
            return [call("effect", {"n": n}), call("look", {"n": n})]
        if self.kind == "plan" and "set_plans" not in self.done:
            plan = {"name": f"plan {n}", "instruction": f"planned {n} {self.space_id}", "runAfter": "1 second"}
            return [call("set_plans", {"plans": [plan]})]
        for asked, tool_name in (("ask", "askBoss"), ("confirm", "confirmAction"), ("fetch", "fetchData")):
            if self.kind == asked and "answered" not in self.done:
                return [] if tool_name in self.done else [call(tool_name, {"n": n})]
        return [answer]

    def note(self, made: ModelCall, answer: ModelToolResult) -> None:
        """Takes the answer to a call of it into account."""
        if made.name == "effect":
            self.doubtful = answer.is_error
            self.done |= set() if answer.is_error else {"effect"}
        elif made.name == "check":
            self.doubtful = answer.is_error
            self.done |= {"effect"} if answer.text == "true" else set()
        elif made.name == "send_message" and not answer.is_error:
            self.done.add("said")
        elif not answer.is_error:
            self.done.add(made.name)
            if '"boss"' in answer.text:
                self.done.add("answered")


def decide(turns: Sequence[Turn]) -> ModelTurn:
    """The next turn, by all that was said."""
    jobs: dict[str, Job] = {}
    entered: str | None = None
    asked: Sequence[ModelCall] = ()
    for turn in turns:
        if isinstance(turn, UserTurn):
            if turn.text.startswith(("INBOX:", "CONTINUE:")):
                entered = None
                _take_in(turn.text, jobs)
        elif isinstance(turn, ModelTurn):
            asked = turn.calls
        elif isinstance(turn, ResultsTurn):
            for made, answer in zip(asked, turn.results, strict=True):
                if made.name == "enter_space" and not answer.is_error:
                    entered = json.loads(made.arguments)["spaceId"]
                job = jobs.get(_job_of(made))
                if job is not None:
                    job.note(made, answer)
    for job in jobs.values():
        if calls := job.next():
            enter = call("enter_space", {"spaceId": job.space_id, "limit": 1})
            return ModelTurn(calls=_with_ids(calls if entered == job.space_id else [enter, *calls]))
    return ModelTurn(text="Done.")


def _take_in(text: str, jobs: dict[str, Job]) -> None:
    for line in inbox_text.parse(text):
        words = line.message_text.split()
        if line.type == "space_message" and words[:1] == ["job"]:
            jobs.setdefault(words[1], Job(words[1], words[2], line.space_id or ""))
        elif line.type == "plan":
            jobs.setdefault(f"planned {words[1]}", Job(words[1], "planned", words[2]))
        elif line.type == "tool_result":
            jobs[json.loads(line.rest.partition("): ")[2])["boss"]].done.add("answered")


def _job_of(made: ModelCall) -> str:
    """The key of the job that a call belongs to."""
    said: Any = json.loads(made.arguments)
    if made.name == "send_message":
        return said["text"].removeprefix("answer to ")
    if made.name == "set_plans":
        return said["plans"][0]["instruction"].split()[1]
    return said.get("n", "")


def _with_ids(calls: Sequence[ModelCall]) -> tuple[ModelCall, ...]:
    return tuple(ModelCall(f"c{at}", one.name, one.arguments) for at, one in enumerate(calls))


class Clerk(Model):
    """Thinks as `decide` does, at its own pace: `pause` is awaited before it begins, and between its words."""

    name = "clerk:steady"

    def __init__(self, pause: Pause) -> None:
        self._pause = pause

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        await self._pause()
        turn = decide(request.turns)
        for index, one in enumerate(turn.calls):
            if listen is not None:
                listen(CallStarted(index, one.id, one.name))
            for start in range(0, len(one.arguments), _PIECE):
                if listen is not None:
                    listen(CallDelta(index, one.arguments[start : start + _PIECE]))
                if one.name == "send_message":
                    await asyncio.sleep(0)
                    await self._pause()
        return ModelTurn(text=turn.text, calls=turn.calls, usage=Usage(requests=1, input_tokens=10), model=self.name)


def clerks_tools(book: Path, pause: Pause) -> list[Tool]:
    """What the clerk works with. `book` gets a line for each effect: the id of the call, and the job."""

    @tool
    async def effect(n: str, context: ToolContext) -> bool:
        """Writes into the book: once more each time."""
        await pause()
        line = f"{context.call_id} {n}\n".encode()
        file = os.open(book, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)
        await pause()
        return True

    @tool(annotations=Annotations(read_only=True))
    async def look(n: str) -> str:
        """Reads something."""
        await pause()
        return f"looked at {n}"

    @tool(annotations=Annotations(read_only=True))
    async def check(n: str) -> bool:
        """Whether the book has a line of the job."""
        return n in effects_in(book).values()

    return [
        effect,
        look,
        check,
        elsewhere("askBoss", "external", pauses_run=True),
        elsewhere("confirmAction", "space", is_async=True),
        elsewhere("fetchData", "space", timeout=30.0),
    ]


def elsewhere(name: str, kind: Literal["external", "space"], **settings: Any) -> Tool:
    """A tool that someone else answers."""
    made = build_execution(name, kind, {}, input_schema=None, client=_no_client)
    return Tool(name, "", made.input_schema, execution_type=kind, handler=made.handler, **settings)


def _no_client() -> Any:
    raise AssertionError("it asks nobody over HTTP")


def effects_in(book: Path) -> dict[str, str]:
    """The lines of the book: jobs by the ids of calls. Raises where one call wrote twice."""
    found: dict[str, str] = {}
    for line in book.read_text().splitlines() if book.exists() else ():
        call_id, job = line.split()
        assert call_id not in found, f"the call {call_id} had its effect twice"
        found[call_id] = job
    return found
