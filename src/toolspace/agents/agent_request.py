"""An agent answers a request, here and in memory: for programs, and for agents that call it. Keeps nothing.

Follows hand-offs: whoever the request is handed to answers it in the place of the one that was asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from toolspace.agents.loop import AgentLoop, EndReason, RunOutcome, is_prebuilt_action
from toolspace.agents.registry import AgentRegistry, AgentResources, FinalRunStatus, RunRecorder
from toolspace.agents.run_budget import AgentRun, find_agent_run
from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import Allow, Decision, Deny
from toolspace.core.model import NO_USAGE, ModelListener, ModelTurn, Turn, Usage, UserTurn
from toolspace.core.tool import Tool
from toolspace.errors import ErrorKind, ModelError, RefusedError, StorageError, ToolError
from toolspace.orchestrator.call import current_call
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.trace import Span

_log = logging.getLogger("toolspace.agents")
_INHERITED = (
    "task_id",
    "user_id",
    "allowed_paths",
    "protected_paths",
    "allowed_env",
    "allowed_hosts",
    "memory_dir",
    "session_dir",
    "web_search",
    "tasks",
    "caller_client",
)
"""What holds for an agent as it does for whoever asks it, unless that is only how its toolspace has it."""
_CANCELED = "the run was canceled"
_DONE: frozenset[str] = frozenset(("answered", "reported", "skipped"))

AgentEndReason = EndReason | Literal["failed"]
"""How it ended: as a loop does, or because its model did not answer."""


class AgentResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a request to an agent."""

    ok: bool
    text: str = ""
    """The answer: the content of the final report, else what the model said last."""
    report: Mapping[str, Any] | None = None
    """The final report, where it gave one."""
    end: AgentEndReason = "answered"
    error: str | None = None
    """Why there is no answer, or not a whole one."""
    error_kind: ErrorKind | None = None
    agent: str = ""
    """Who answered."""
    path: tuple[str, ...] = ()
    """Who had the request, in order: the last one answered, the others handed it on."""
    usage: Usage = NO_USAGE
    """Of all of them, and of the agents that they called."""
    steps: int = 0
    turns: Sequence[Turn] = ()
    """What the one that answered was told and has said."""
    run_id: str = ""
    trace: Span | None = None
    """What it did, as a tree: turns, calls, and the runs of agents that it called."""

    @property
    def value(self) -> Any:
        """The answer as data: what a report in JSON has, else the text."""
        if self.report is not None and "content_json" in self.report:
            return self.report["content_json"]
        return self.text


class AgentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an agent, and who asks."""

    prompt: str
    caller: ToolContext
    parent: AgentRun | None = None
    """The agent that waits for the answer."""
    listener: ModelListener | None = None
    """Hears the model write."""
    max_steps: int | None = None
    """None: as the agent's own ways say."""


async def run_request(crew: AgentRegistry, name: str, errand: AgentRequest) -> AgentResult:
    """Has an agent answer. What goes wrong is in the result; raises only where there is no such agent."""
    crew.get(name)
    path: tuple[str, ...] = ()
    advice: list[str] = []
    usage, steps = NO_USAGE, 0
    while True:
        leg = await _answer(crew, name, errand, path, advice)
        path = (*path, name)
        usage, steps = usage + leg.usage, steps + leg.steps
        handoff = leg.handoff
        if handoff is None:
            return msgspec.structs.replace(leg.result, path=path, usage=usage, steps=steps)
        if handoff.message:
            advice.append(f"ADVICE from router: {handoff.message}")
        name = handoff.agent


async def run_agent(
    agents: AgentRegistry,
    name: str,
    prompt: str,
    *,
    context: ToolContext | None = None,
    listen: ModelListener | None = None,
    max_steps: int | None = None,
) -> AgentResult:
    """For programs: as `ask`. In a tool that an agent called, the answer is a part of that agent's run."""
    call = current_call.get()
    caller = call.context if call is not None else ToolContext()
    errand = AgentRequest(
        prompt=json_text.valid_text(prompt),
        caller=caller if context is None else context.with_defaults(caller),
        parent=find_agent_run(caller),
        listener=listen,
        max_steps=max_steps,
    )
    agents.get(name)
    try:
        if errand.parent is not None:
            errand.parent.check_depth(name)
    except ToolError as error:
        return _failed(name, error)
    return await run_request(agents, name, errand)


class _OnAnErrand:
    """What an agent may not do in a run that answers another: its inbox is for the cycles of its own."""

    rule = "an agent that answers another has no inbox"

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        if is_prebuilt_action(tool, "peek_inbox") or is_prebuilt_action(tool, "skip"):
            return Deny(f'"{tool.name}" is for an agent\'s own cycles; this run answers a request')
        return Allow()


_ON_AN_ERRAND = _OnAnErrand()


class _Leg(msgspec.Struct, frozen=True):
    """One agent's part of an errand."""

    result: AgentResult
    frame: AgentRun | None = None

    @property
    def handoff(self) -> Any:
        return self.frame.handoff if self.frame is not None and self.result.end == "handed_off" else None

    @property
    def usage(self) -> Usage:
        return self.frame.usage if self.frame is not None else NO_USAGE

    @property
    def steps(self) -> int:
        return self.result.steps


async def _answer(
    crew: AgentRegistry, name: str, errand: AgentRequest, before: tuple[str, ...], advice: Sequence[str]
) -> _Leg:
    try:
        async with crew.acquire(name) as member:
            frame = member.new_run(errand.prompt, parent=errand.parent, before=before)
            return _Leg(await _work(crew, member, frame, errand, advice), frame)
    except (ModelError, ToolError, RefusedError, StorageError) as error:
        return _Leg(_failed(name, error))
    except Exception as error:  # Of the toolspace that is its own: whoever asked is to hear of it, and go on.
        _log.exception('the agent "%s" could not begin', name)
        return _Leg(_failed(name, error))


async def _work(
    crew: AgentRegistry, member: AgentResources, frame: AgentRun, errand: AgentRequest, advice: Sequence[str]
) -> AgentResult:
    context = _context_of(frame, errand.caller)
    if crew.run_recorders is not None:
        home = await crew.run_recorders.open(frame, errand.caller, context, member.tools)
    else:
        home = RunRecorder(context, listen=errand.listener)
    context = home.context
    run = _run_of(member, frame, home, errand.caller)
    loop = AgentLoop(
        member.model,
        member.tools,
        run,
        agent_run=frame,
        system=request_system_prompt(member, frame, context),
        turns=[UserTurn("\n\n".join((errand.prompt, *advice)))],
        context=context,
        settings=_ways(member, errand),
        reviewer=member.new_reviewer(),
        hooks=home,
    )
    try:
        result = await _think(loop, frame, home)
    except BaseException:  # Whoever waits was canceled. What is kept of the run has to end all the same.
        run.trace.end("canceled")
        crew.run_in_background(home.close("canceled", frame.usage, _CANCELED))
        raise
    _end_trace(run, frame, result)
    await asyncio.shield(
        crew.run_in_background(home.close(_status(result), frame.usage, None if result.ok else result.error))
    )
    return result


async def _think(loop: AgentLoop, frame: AgentRun, home: RunRecorder) -> AgentResult:
    scope = asyncio.timeout(None)
    try:
        async with scope:
            home.stop_run = lambda: scope.reschedule(0)
            try:
                return _result(await loop.run(), loop, frame)
            finally:
                home.stop_run = None
    except ModelError as error:
        failed = _failed(frame.name, error)
        if (reason := frame.exhausted_reason()) is not None:
            failed = msgspec.structs.replace(failed, end="limit", error=reason, error_kind="limit_exceeded")
    except Exception as error:
        if scope.expired():
            failed = AgentResult(ok=False, end="stopped", error=_CANCELED, error_kind="canceled", agent=frame.name)
        else:  # A model is another's code.
            _log.exception('the agent "%s" broke off', frame.name)
            failed = _failed(frame.name, error)
    said = next((turn.text for turn in reversed(loop.turns) if isinstance(turn, ModelTurn) and turn.text), "")
    return msgspec.structs.replace(failed, text=said, **_books(loop))


def _result(outcome: RunOutcome, loop: AgentLoop, frame: AgentRun) -> AgentResult:
    report = outcome.report
    ok, error, kind = outcome.end in _DONE, outcome.reason, None
    if report is not None and report.get("status") == "failure":
        ok, error = False, outcome.answer or "it reported a failure"
    elif outcome.end == "stopped":
        error, kind = _CANCELED, "canceled"
    elif outcome.end == "paused":
        error = "it waits for the result of a call, which comes later"
    if not ok and kind is None:
        kind = "limit_exceeded" if outcome.end in ("max_steps", "limit") else "execution_error"
    return AgentResult(
        ok=ok,
        text=outcome.answer,
        report=report,
        end=outcome.end,
        error=error,
        error_kind=cast("ErrorKind | None", kind),
        agent=frame.name,
        **_books(loop),
    )


def _books(loop: AgentLoop) -> dict[str, Any]:
    return {"steps": loop.steps, "turns": tuple(loop.turns), "run_id": loop.tool_run.id, "trace": loop.tool_run.trace}


def _failed(name: str, error: Exception) -> AgentResult:
    text = json_text.valid_text(str(error)) or type(error).__name__
    kind: ErrorKind = "execution_error"
    if isinstance(error, ModelError):
        kind = "transport_error" if error.is_transient else "execution_error"
    elif isinstance(error, ToolError):
        kind = error.kind
    return AgentResult(ok=False, end="failed", error=text, error_kind=kind, agent=name)


def _context_of(frame: AgentRun, caller: ToolContext) -> ToolContext:
    """The context of an agent's calls. What the caller narrowed for this call stays narrow."""
    call = current_call.get()
    usual = cast("ToolOrchestrator", call.owner).context if call is not None else ToolContext()
    given = {field: getattr(caller, field) for field in _INHERITED}
    own = {field: value for field, value in given.items() if value is not None and value != getattr(usual, field)}
    # The same session: what its tools store away can be read by whoever gets its answer.
    return ToolContext(**own, session_id=caller.session_id, agent_id=frame.name, agent=frame)


def _run_of(member: AgentResources, frame: AgentRun, home: RunRecorder, caller: ToolContext) -> Run:
    seconds = min(frame.remaining_seconds, caller.remaining_seconds)
    run = member.tools.run(
        id=home.run_id,
        context=home.context,
        policy=_ON_AN_ERRAND,
        session=home.context.session_id,
        deadline=None if seconds == float("inf") else seconds,
        **member.run_options(),
    )
    run.trace.attributes["agent"] = frame.name
    return run


def _ways(member: AgentResources, errand: AgentRequest) -> Any:
    ways = member.agent.settings
    return ways if errand.max_steps is None else msgspec.structs.replace(ways, max_steps=errand.max_steps)


def request_system_prompt(member: AgentResources, frame: AgentRun, context: ToolContext) -> str:
    """What the model is told before the conversation."""
    if frame.parent is not None:
        reader = (
            f'You were called by the agent "{frame.parent.name}": your answer goes to it, not to a person. '
            "Answer with what it asked for and nothing else; say what you could not find out."
        )
    else:
        reader = "What you say last, or your final report, is the answer."
    tools = member.tools.instructions(context=context)
    parts = (
        member.agent.system.strip(),
        f'You are the agent "{frame.name}". {reader}',
        f"TOOLS:\n{tools}" if tools else "",
    )
    return "\n\n".join(filter(None, parts))


def _end_trace(run: Run, frame: AgentRun, result: AgentResult) -> None:
    run.trace.attributes["usage"] = msgspec.to_builtins(frame.usage)
    run.trace.attributes["end"] = result.end
    run.trace.end("ok" if result.ok or result.end == "handed_off" else _status(result))


def _status(result: AgentResult) -> FinalRunStatus:
    if result.ok or result.end == "handed_off":
        return "completed"
    return "canceled" if result.error_kind == "canceled" else "failed"
