"""Runs an agent to answer one request of a program or of another agent, in this process.

`Toolspace.run_agent` and the tools `agent__{name}` use it. Follows handoffs: the agent that gets the request answers
it. Stores nothing itself; on the gateway, a `RunRecorder` stores the run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from toolspace.agents.agent import Agent
from toolspace.agents.loop import AgentLoop, EndReason, RunOutcome, is_prebuilt_action
from toolspace.agents.registry import AgentRegistry, FinalRunStatus, RunRecorder
from toolspace.agents.run_state import AgentRun, Handoff, PreparedAgent, find_agent_run
from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import Allow, Decision, Deny, ToolProvider
from toolspace.core.model import NO_USAGE, ModelListener, ModelTurn, Turn, Usage, UserTurn
from toolspace.core.names import AGENT_NAMESPACE, agent_tool_name, did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool, ToolCategory
from toolspace.errors import (
    ErrorKind,
    ModelError,
    RefusedError,
    StorageError,
    ToolError,
    ToolExecutionError,
    ToolNotFoundError,
    ToolValidationError,
)
from toolspace.orchestrator.call import current_call
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.run import Run, Span

_log = logging.getLogger("toolspace.agents")
_INHERITED_FIELDS = (
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
"""Fields of the caller's context that also hold for the agent, unless they are the defaults of the caller's
toolspace."""
_CANCELLED = "the run was canceled"
_SUCCESSFUL_ENDS: frozenset[str] = frozenset(("answered", "reported", "skipped"))

AgentEndReason = EndReason | Literal["failed"]
"""Why the run of an agent ended: as a loop does, or because of an error."""


class AgentResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a request to an agent."""

    ok: bool
    text: str = ""
    """The answer: the content of the final report, else the model's last text."""
    report: Mapping[str, Any] | None = None
    """The final report; None if the agent gave none."""
    end: AgentEndReason = "answered"
    error: str | None = None
    """Why the answer is missing or incomplete."""
    error_kind: ErrorKind | None = None
    agent: str = ""
    """The agent that answered."""
    path: tuple[str, ...] = ()
    """The agents that had the request, in order: the last one answered, the others handed it off."""
    usage: Usage = NO_USAGE
    """Of all agents in the path, and of the agents that they called."""
    steps: int = 0
    turns: Sequence[Turn] = ()
    """The conversation of the agent that answered."""
    run_id: str = ""
    trace: Span | None = None
    """The operation tree: turns, calls, and the runs of called agents."""

    @property
    def value(self) -> Any:
        """The answer as data: the JSON content of the report, else the text."""
        if self.report is not None and "content_json" in self.report:
            return self.report["content_json"]
        return self.text


class AgentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an agent."""

    prompt: str
    caller: ToolContext
    parent: AgentRun | None = None
    """The run that waits for the answer; None: a program waits."""
    listener: ModelListener | None = None
    """Receives the model's output while the model writes it."""
    max_steps: int | None = None
    """None: the agent's own setting."""


async def run_agent(
    agents: AgentRegistry,
    name: str,
    prompt: str,
    *,
    context: ToolContext | None = None,
    listen: ModelListener | None = None,
    max_steps: int | None = None,
) -> AgentResult:
    """Runs an agent for a program. Errors are in the result; raises `ToolNotFoundError` if there is no such agent.

    Called in a tool that an agent has called, the new run is part of that agent's run.
    """
    call = current_call.get()
    caller = call.context if call is not None else ToolContext()
    request = AgentRequest(
        prompt=json_text.valid_text(prompt),
        caller=caller if context is None else context.with_defaults(caller),
        parent=find_agent_run(caller),
        listener=listen,
        max_steps=max_steps,
    )
    agents.get(name)
    try:
        if request.parent is not None:
            request.parent.check_depth(name)
    except ToolError as error:
        return _error_result(name, error)
    return await run_request(agents, name, request)


async def run_request(agents: AgentRegistry, name: str, request: AgentRequest) -> AgentResult:
    """Runs an agent, and the agents that it hands the request off to. Errors are in the result; raises
    `ToolNotFoundError` if there is no such agent."""
    agents.get(name)
    path: tuple[str, ...] = ()
    advice: list[str] = []
    usage, steps = NO_USAGE, 0
    while True:
        result, run = await _run_one(agents, name, request, path, advice)
        path = (*path, name)
        steps += result.steps
        handoff: Handoff | None = None
        if run is not None:
            usage += run.budget.usage
            handoff = run.handoff if result.end == "handed_off" else None
        if handoff is None:
            return msgspec.structs.replace(result, path=path, usage=usage, steps=steps)
        if handoff.message:
            advice.append(f"ADVICE from router: {handoff.message}")
        name = handoff.agent


async def _run_one(
    agents: AgentRegistry, name: str, request: AgentRequest, path: tuple[str, ...], advice: Sequence[str]
) -> tuple[AgentResult, AgentRun | None]:
    """Runs one agent of the path. Returns no run if it could not start."""
    try:
        async with agents.acquire(name) as prepared:
            if request.max_steps is not None:
                settings = msgspec.structs.replace(prepared.settings, max_steps=request.max_steps)
                prepared = msgspec.structs.replace(prepared, settings=settings)
            run = AgentRun(prepared.agent, request=request.prompt, parent=request.parent, previous_agents=path)
            run.turns.append(UserTurn("\n\n".join((request.prompt, *advice))))
            return await _run_prepared(agents, prepared, run, request), run
    except (ModelError, ToolError, RefusedError, StorageError) as error:
        return _error_result(name, error), None
    except Exception as error:  # From the agent's own toolspace: the caller gets it as a result and continues.
        _log.exception('agent "%s": the run could not start', name)
        return _error_result(name, error), None


async def _run_prepared(
    agents: AgentRegistry, prepared: PreparedAgent, run: AgentRun, request: AgentRequest
) -> AgentResult:
    context = _build_context(run, request.caller)
    if agents.run_recorders is not None:
        recorder = await agents.run_recorders.open(run, request.caller, context, prepared.tools)
    else:
        recorder = RunRecorder(context, listen=request.listener)
    context = recorder.context
    tool_run = prepared.open_tool_run(
        id=recorder.run_id,
        context=context,
        policy=_NO_INBOX,
        session=context.session_id,
        seconds=min(run.budget.remaining_seconds, request.caller.remaining_seconds),
    )
    tool_run.trace.attributes["agent"] = run.name
    system = request_system_prompt(prepared, run, context)
    loop = AgentLoop(prepared, run, tool_run, system=system, context=context, hooks=recorder)
    try:
        result = await _run_loop(loop, recorder)
    except BaseException:  # The caller was cancelled: the stored run must end all the same.
        tool_run.trace.end("canceled")
        agents.run_in_background(recorder.close("canceled", run.budget.usage, _CANCELLED))
        raise
    _end_trace(tool_run, run, result)
    error = None if result.ok else result.error
    await asyncio.shield(agents.run_in_background(recorder.close(_run_status(result), run.budget.usage, error)))
    return result


async def _run_loop(loop: AgentLoop, recorder: RunRecorder) -> AgentResult:
    run = loop.agent_run
    scope = asyncio.timeout(None)
    try:
        async with scope:
            recorder.stop_run = lambda: scope.reschedule(0)
            try:
                return _result(await loop.run(), loop)
            finally:
                recorder.stop_run = None
    except ModelError as error:
        result = _error_result(run.name, error)
        if (reason := run.budget.exhausted_reason()) is not None:
            result = msgspec.structs.replace(result, end="limit", error=reason, error_kind="limit_exceeded")
    except Exception as error:
        if scope.expired():
            result = AgentResult(ok=False, end="stopped", error=_CANCELLED, error_kind="canceled", agent=run.name)
        else:  # A model is code of others and may raise anything.
            _log.exception('agent "%s": the run failed', run.name)
            result = _error_result(run.name, error)
    text = next((turn.text for turn in reversed(run.turns) if isinstance(turn, ModelTurn) and turn.text), "")
    return msgspec.structs.replace(result, text=text, **_run_fields(loop))


def _result(outcome: RunOutcome, loop: AgentLoop) -> AgentResult:
    report = outcome.report
    ok, error, kind = outcome.end in _SUCCESSFUL_ENDS, outcome.reason, None
    if report is not None and report.get("status") == "failure":
        ok, error = False, outcome.answer or "it reported a failure"
    elif outcome.end == "stopped":
        error, kind = _CANCELLED, "canceled"
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
        agent=loop.agent_run.name,
        **_run_fields(loop),
    )


def _error_result(name: str, error: Exception) -> AgentResult:
    text = json_text.valid_text(str(error)) or type(error).__name__
    kind: ErrorKind = "execution_error"
    if isinstance(error, ModelError):
        kind = "transport_error" if error.is_transient else "execution_error"
    elif isinstance(error, ToolError):
        kind = error.kind
    return AgentResult(ok=False, end="failed", error=text, error_kind=kind, agent=name)


def _run_fields(loop: AgentLoop) -> dict[str, Any]:
    """The fields of a result that tell what the run did."""
    run, tool_run = loop.agent_run, loop.tool_run
    return {"steps": run.steps, "turns": tuple(run.turns), "run_id": tool_run.id, "trace": tool_run.trace}


def _build_context(run: AgentRun, caller: ToolContext) -> ToolContext:
    """The context of the agent's calls. What the caller has restricted for this call stays restricted."""
    call = current_call.get()
    defaults = cast("ToolOrchestrator", call.owner).context if call is not None else ToolContext()
    values = {field: getattr(caller, field) for field in _INHERITED_FIELDS}
    inherited = {
        field: value for field, value in values.items() if value is not None and value != getattr(defaults, field)
    }
    # The caller's session: the caller can read the outputs that the agent's tools store.
    return ToolContext(**inherited, session_id=caller.session_id, agent_id=run.name, agent=run)


def request_system_prompt(prepared: PreparedAgent, run: AgentRun, context: ToolContext) -> str:
    """The system prompt of a run that answers a request."""
    if run.parent is not None:
        recipient = (
            f'You were called by the agent "{run.parent.name}": your answer goes to it, not to a person. '
            "Answer with what it asked for and nothing else; say what you could not find out."
        )
    else:
        recipient = "What you say last, or your final report, is the answer."
    tool_instructions = prepared.tools.instructions(context=context)
    parts = (
        prepared.agent.system.strip(),
        f'You are the agent "{run.name}". {recipient}',
        f"TOOLS:\n{tool_instructions}" if tool_instructions else "",
    )
    return "\n\n".join(filter(None, parts))


def _end_trace(tool_run: Run, run: AgentRun, result: AgentResult) -> None:
    tool_run.trace.attributes["usage"] = msgspec.to_builtins(run.budget.usage)
    tool_run.trace.attributes["end"] = result.end
    status = _run_status(result)
    tool_run.trace.end("ok" if status == "completed" else status)


def _run_status(result: AgentResult) -> FinalRunStatus:
    if result.ok or result.end == "handed_off":
        return "completed"
    return "canceled" if result.error_kind == "canceled" else "failed"


class _NoInboxPolicy:
    """Denies the inbox tools: the inbox belongs to the agent's own cycles."""

    rule = "an agent that answers another has no inbox"

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        if is_prebuilt_action(tool, "peek_inbox", "skip"):
            return Deny(f'"{tool.name}" is for an agent\'s own cycles; this run answers a request')
        return Allow()


_NO_INBOX = _NoInboxPolicy()


# MERGED from subagents: Provides the tools with which one agent reaches another: `agent__{name}` and `router__handoff-

AGENT_INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "prompt": {
            "type": "string",
            "minLength": 1,
            "description": "What it should do, with everything that it needs to know: it sees nothing else.",
        },
        "reason": {"type": "string", "description": "Why you ask it, in a sentence."},
    },
    "required": ["prompt"],
}
HANDOFF_TOOL = "handoff-to"
_HANDOFF_INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "agent": {"type": "string", "description": "The agent that is to answer."},
        "message": {"type": "string", "description": "Advice for it. It sees what you were asked, as you do."},
    },
    "required": ["agent"],
    "additionalProperties": False,
}


class AgentProvider(ToolProvider):
    """Provides every agent of a registry as a tool."""

    kind = "agent"
    namespace = AGENT_NAMESPACE

    def __init__(self, agents: AgentRegistry) -> None:
        super().__init__()
        self._agents = agents
        self._tools: dict[str, Tool] = {}
        self._names: dict[str, str] = {}
        """The names of the agents by the names of their tools."""
        self._refresh()
        agents.on_change(self._refresh)

    def _refresh(self) -> None:
        self._tools = {agent.name: _build_tool(agent) for agent in self._agents}
        self._names = {agent_tool_name(name): name for name in self._tools}
        self.notify_changed()

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """An agent is offered the agents that it may call; every other caller all of them."""
        run = find_agent_run(context)
        return run is None or self._names.get(tool.name) in run.agent.subagents

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if (run := find_agent_run(context)) is not None:
            run.check_call(name)
        return await call_agent(self._agents, name, parameters, context)


async def call_agent(
    agents: AgentRegistry, name: str, parameters: Mapping[str, Any], context: ToolContext, *, task: str = ""
) -> ToolResult:
    """Runs an agent for a call, below the calling run. `task` is the prompt if the arguments have none."""
    parent = find_agent_run(context)
    if parent is not None:
        parent.check_depth(name)
    agents.get(name)
    request = AgentRequest(prompt=_build_prompt(parameters, task), caller=context, parent=parent)
    return _to_tool_result(await run_request(agents, name, request))


def _build_tool(agent: Agent) -> Tool:
    return Tool(
        agent.name,
        agent.description or f'Asks the agent "{agent.name}".',
        AGENT_INPUT,
        category=ToolCategory.AGENT,
        execution_type="agent",
        visible=False,  # Members of a space do not see which agents an agent calls.
        timeout=math.inf,  # The agent's own limits apply, and those of the calling runs.
    )


def _build_prompt(parameters: Mapping[str, Any], task: str) -> str:
    """The prompt of a call: its `prompt`, `reason` and other arguments as one text."""
    other_arguments = {key: value for key, value in parameters.items() if key not in ("prompt", "reason")}
    prompt, reason = parameters.get("prompt"), parameters.get("reason")
    parts = [
        prompt if isinstance(prompt, str) else task,
        f"REASON: {reason}" if reason else "",
        f"INPUT: {json_text.encode(other_arguments)}" if other_arguments else "",
    ]
    return json_text.valid_text("\n\n".join(filter(None, parts)))


def _to_tool_result(result: AgentResult) -> ToolResult:
    extras: dict[str, Any] = {
        "agent": result.agent,
        "path": list(result.path),
        "steps": result.steps,
        "usage": msgspec.to_builtins(result.usage),
        "end": result.end,
        "runId": result.run_id,
    }
    if result.ok:
        return ToolResult(ok=True, result=result.value, extras=extras)
    error = f'the agent "{result.agent}" did not finish: {result.error}'
    if result.text and result.text != result.error:
        error += f"\nWhat it said last: {result.text}"
    return ToolResult(ok=False, error=error, error_kind=result.error_kind or "execution_error", extras=extras)


class RouterProvider(ToolProvider):
    """Provides `router__handoff-to` to agents that have destinations."""

    kind = "router"
    namespace = "router"
    exact_names = True

    def __init__(self) -> None:
        super().__init__()
        self._tools = [
            Tool(
                HANDOFF_TOOL,
                "Hands the request that you were given to another agent, which answers in your place. Ends your run.",
                _HANDOFF_INPUT,
                category=ToolCategory.AGENT,
                visible=False,
            )
        ]

    def list_tools(self) -> Sequence[Tool]:
        return self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        run = find_agent_run(context)
        return run is not None and bool(run.agent.destinations)

    def get_instructions(self) -> str:
        return ""

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name != HANDOFF_TOOL:
            raise ToolNotFoundError(f'Tool "router__{name}" not found')
        run = find_agent_run(context)
        if run is None or not run.agent.destinations:
            raise ToolExecutionError(
                "only an agent that has destinations can hand a request off (router.destinations)", executed=False
            )
        destination, message = parameters["agent"], parameters.get("message")
        _check_handoff(run, destination)
        run.handoff = Handoff(destination, message or None)
        return ToolResult(ok=True, result={"handedTo": destination})


def _check_handoff(run: AgentRun, destination: str) -> None:
    """Raises `ToolError` if a run may not hand its request off to that agent."""
    destinations = run.agent.destinations
    if destination not in destinations:
        hint = did_you_mean(destination, destinations)
        raise ToolValidationError(
            f'agent: "{destination}" is not a destination of "{run.name}"{hint or ""}; '
            f"it may hand over to {', '.join(destinations)}"
        )
    path = (*run.previous_agents, run.name)
    if destination in path:
        raise ToolValidationError(
            f"agent: a cycle: {' → '.join((*path, destination))}; answer it yourself, or hand it to another agent"
        )
    run.check_recursion(destination)
    if run.handoff is not None:
        raise ToolExecutionError(f'the request was handed to "{run.handoff.agent}" already', executed=False)
