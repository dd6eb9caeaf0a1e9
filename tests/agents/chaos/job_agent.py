"""The model and the tools of an agent that does each job once, whatever happens to its process.

The model decides from the conversation alone, so any process can continue the work of another. A job is a message such
as `job 7 plain`; the agent answers it in the space of the message. A plain job has an effect outside; the others create
a plan, pause their run for a result, call a tool whose result comes to the inbox, or wait for a result.
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
    Turn,
    Usage,
    UserTurn,
)
from toolspace.core.tool import Annotations
from toolspace.core.tool_context import ToolContext
from toolspace.models.scripted import call
from toolspace.providers.configured_tools import build_execution

KINDS = ("plain", "plan", "ask", "confirm", "fetch")
_PIECE = 8
Pause = Callable[[], Awaitable[None]]


class Job:
    """The state of one job, according to the conversation."""

    def __init__(self, number: str, kind: str, space_id: str) -> None:
        self.number = number
        self.kind = kind
        self.space_id = space_id
        self.finished_parts: set[str] = set()
        self.is_uncertain = False
        """Whether an interrupted call may have had its effect."""

    def next_calls(self) -> list[ModelCall]:
        """The calls to make now; none if the job is done or waits."""
        n = self.number
        answer = call("send_message", {"text": f"{'planned' if self.kind == 'planned' else 'answer to'} {n}"})
        if "said" in self.finished_parts:
            return []
        if self.kind == "planned":
            return [answer]
        if self.kind == "plain" and "effect" not in self.finished_parts:
            if self.is_uncertain:
                return [call("check", {"n": n})]
            return [call("effect", {"n": n}), call("look", {"n": n})]
        if self.kind == "plan" and "set_plans" not in self.finished_parts:
            plan = {"name": f"plan {n}", "instruction": f"planned {n} {self.space_id}", "runAfter": "1 second"}
            return [call("set_plans", {"plans": [plan]})]
        for kind, tool_name in (("ask", "askBoss"), ("confirm", "confirmAction"), ("fetch", "fetchData")):
            if self.kind == kind and "answered" not in self.finished_parts:
                return [] if tool_name in self.finished_parts else [call(tool_name, {"n": n})]
        return [answer]

    def update(self, call: ModelCall, result: ModelToolResult) -> None:
        """Updates the state with the result of a call."""
        if call.name == "effect":
            self.is_uncertain = result.is_error
            self.finished_parts |= set() if result.is_error else {"effect"}
        elif call.name == "check":
            self.is_uncertain = result.is_error
            self.finished_parts |= {"effect"} if result.text == "true" else set()
        elif call.name == "send_message" and not result.is_error:
            self.finished_parts.add("said")
        elif not result.is_error:
            self.finished_parts.add(call.name)
            if '"boss"' in result.text:
                self.finished_parts.add("answered")


def decide(turns: Sequence[Turn]) -> ModelTurn:
    """The next turn of the model."""
    jobs: dict[str, Job] = {}
    entered_space: str | None = None
    calls: Sequence[ModelCall] = ()
    for turn in turns:
        if isinstance(turn, UserTurn):
            if turn.text.startswith(("INBOX:", "CONTINUE:")):
                entered_space = None
                _add_jobs(turn.text, jobs)
        elif isinstance(turn, ModelTurn):
            calls = turn.calls
        elif isinstance(turn, ResultsTurn):
            for model_call, result in zip(calls, turn.results, strict=True):
                if model_call.name == "enter_space" and not result.is_error:
                    entered_space = json.loads(model_call.arguments)["spaceId"]
                job = jobs.get(_job_key(model_call))
                if job is not None:
                    job.update(model_call, result)
    for job in jobs.values():
        if next_calls := job.next_calls():
            enter = call("enter_space", {"spaceId": job.space_id, "limit": 1})
            return ModelTurn(calls=_with_ids(next_calls if entered_space == job.space_id else [enter, *next_calls]))
    return ModelTurn(text="Done.")


def _add_jobs(text: str, jobs: dict[str, Job]) -> None:
    for line in inbox_text.parse(text):
        words = line.message_text.split()
        if line.type == "space_message" and words[:1] == ["job"]:
            jobs.setdefault(words[1], Job(words[1], words[2], line.space_id or ""))
        elif line.type == "plan":
            jobs.setdefault(f"planned {words[1]}", Job(words[1], "planned", words[2]))
        elif line.type == "tool_result":
            jobs[json.loads(line.rest.partition("): ")[2])["boss"]].finished_parts.add("answered")


def _job_key(model_call: ModelCall) -> str:
    """The key of the job that a call belongs to."""
    arguments: Any = json.loads(model_call.arguments)
    if model_call.name == "send_message":
        return arguments["text"].removeprefix("answer to ")
    if model_call.name == "set_plans":
        return arguments["plans"][0]["instruction"].split()[1]
    return arguments.get("n", "")


def _with_ids(calls: Sequence[ModelCall]) -> tuple[ModelCall, ...]:
    return tuple(ModelCall(f"c{at}", model_call.name, model_call.arguments) for at, model_call in enumerate(calls))


class JobModel(Model):
    """Responds with `decide`. Awaits `pause` before each response and between the parts that it streams."""

    name = "test:jobs"

    def __init__(self, pause: Pause) -> None:
        self._pause = pause

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        await self._pause()
        turn = decide(request.turns)
        for index, model_call in enumerate(turn.calls):
            if listen is not None:
                listen(CallStarted(index, model_call.id, model_call.name))
            for start in range(0, len(model_call.arguments), _PIECE):
                if listen is not None:
                    listen(CallDelta(index, model_call.arguments[start : start + _PIECE]))
                if model_call.name == "send_message" or start == 0:
                    await asyncio.sleep(0)
                    await self._pause()
        return ModelTurn(text=turn.text, calls=turn.calls, usage=Usage(requests=1, input_tokens=10), model=self.name)


def job_tools(effects_file: Path, pause: Pause) -> list[Tool]:
    """The tools of the agent. `effects_file` gets a line for each effect: the id of the call, and the job."""

    @tool
    async def effect(n: str, context: ToolContext) -> bool:
        """Appends a line to the effects file."""
        await pause()
        line = f"{context.call_id} {n}\n".encode()
        descriptor = os.open(effects_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        await pause()
        return True

    @tool(annotations=Annotations(read_only=True))
    async def look(n: str) -> str:
        """Reads something."""
        await pause()
        return f"looked at {n}"

    @tool(annotations=Annotations(read_only=True))
    async def check(n: str) -> bool:
        """Whether the effects file has a line of the job."""
        return n in read_effects(effects_file).values()

    return [
        effect,
        look,
        check,
        external_tool("askBoss", "external", pauses_run=True),
        external_tool("confirmAction", "space", is_async=True),
        external_tool("fetchData", "space", timeout=30.0),
    ]


def external_tool(name: str, kind: Literal["external", "space"], **settings: Any) -> Tool:
    """A tool whose results are submitted from outside."""
    execution = build_execution(name, kind, {}, input_schema=None, client=_no_client)
    return Tool(name, "", execution.input_schema, execution_type=kind, handler=execution.handler, **settings)


def _no_client() -> Any:
    raise AssertionError("it makes no HTTP requests")


def read_effects(effects_file: Path) -> dict[str, str]:
    """The effects: jobs by call id. Raises if one call had its effect twice."""
    effects: dict[str, str] = {}
    for line in effects_file.read_text().splitlines() if effects_file.exists() else ():
        call_id, job = line.split()
        assert call_id not in effects, f"the call {call_id} had its effect twice"
        effects[call_id] = job
    return effects
