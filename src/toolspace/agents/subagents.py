"""Runs an agent to answer one request, of a program or of another agent: a sub-agent is called as `agent__{name}`.

`program_runs.py` and the tools of `AgentProvider` use it. A call of `agent__{name}` is a run of that agent below
the calling run. Follows handoffs: the agent that gets the request answers it. Stores nothing itself; on the gateway, a
`RunRecorder` stores the run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, cast

import msgspec
from typing_extensions import TypeVar

from toolspace.agents.agent import Agent, memory_dir_of
from toolspace.agents.agent_run import AgentRun, PreparedAgent, find_agent_run
from toolspace.agents.loop import AgentLoop, EndReason, RunOutcome, is_prebuilt_action
from toolspace.agents.loop_hooks import LoopObserver
from toolspace.agents.registry import AgentRegistry, FinalRunStatus, RunRecorder
from toolspace.agents.structured_output import OutputCheck
from toolspace.core import json_text
from toolspace.core.extension_points import Allow, Decision, Deny, ToolProvider
from toolspace.core.language_model import NO_USAGE, ModelTurn, Turn, Usage, UserTurn
from toolspace.core.names import AGENT_NAMESPACE, agent_tool_name
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool, ToolCategory
from toolspace.core.tool_context import ToolContext
from toolspace.errors import (
    ERROR_CLASSES,
    ErrorKind,
    ModelError,
    RefusedError,
    StorageError,
    ToolError,
    ToolExecutionError,
)
from toolspace.orchestrator.call import current_call
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.run import Span

_log = logging.getLogger("toolspace.agents")
T = TypeVar("T", default=str)
_INHERITED_FIELDS = (
    "task_id",
    "user_id",
    "allowed_paths",
    "protected_paths",
    "private_paths",
    "writable_code",
    "allowed_env",
    "allowed_hosts",
    "session_dir",
    "web_search",
    "tasks",
    "caller_client",
)
"""Fields of the caller's context that also hold for the agent, unless they are the defaults of the caller's
toolspace."""
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
_CANCELLED = "the run was canceled"
_SUCCESSFUL_ENDS: frozenset[str] = frozenset(("answered", "reported", "skipped"))

AgentEndReason = EndReason | Literal["failed"]
"""Why the run of an agent ended: as a loop does, or because of an error."""


class AgentResult(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The result of a request to an agent. `T` is the type of its output: text, unless the program asked for another.

    `unwrap()` returns the output, or raises the error.
    """

    ok: bool
    output: T | None = None
    """The answer as the type that the program asked for; else the text. None if `ok` is false."""
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
    turns: tuple[Turn, ...] = ()
    """The conversation of the agent that answered, with the turns before this request. `history` takes it."""
    run_id: str = ""
    trace: Span | None = None
    """The operation tree: turns, calls, and the runs of called agents."""

    @property
    def value(self) -> Any:
        """The answer as data: the JSON content of the report, else the text."""
        if self.report is not None and "content_json" in self.report:
            return self.report["content_json"]
        return self.text

    def unwrap(self) -> T:
        """Returns the output. Raises the exception of its error kind if the agent did not answer."""
        if self.ok:
            return cast("T", self.output)
        error = ERROR_CLASSES.get(self.error_kind or "execution_error", ToolExecutionError)
        raise error(f'the agent "{self.agent}" did not finish: {self.error}')


class OpenConversation(msgspec.Struct, eq=False):
    """The conversation of a session that a run continues. No other run may continue it meanwhile."""

    session: str
    owner: str
    is_open: bool = True
    turns: list[Turn] = []
    """Of the run that has it, up to now."""


class AgentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an agent."""

    prompt: str
    caller: ToolContext
    parent: AgentRun | None = None
    """The run that waits for the answer; None: a program waits."""
    history: Sequence[Turn] = ()
    """The conversation before the prompt."""
    conversation: OpenConversation | None = None
    observer: LoopObserver | None = None
    output: OutputCheck | None = None
    """The type that the answer must have; None: text."""
    max_steps: int | None = None
    """None: the agent's own setting."""


async def run_request(agents: AgentRegistry, name: str, request: AgentRequest) -> AgentResult[Any]:
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
        if run is not None:
            usage += run.budget.usage
        if run is None or run.handoff is None or result.end != "handed_off":
            return msgspec.structs.replace(result, path=path, usage=usage, steps=steps)
        if run.handoff.message:
            advice.append(f"ADVICE from router: {run.handoff.message}")
        name = run.handoff.agent


class AgentProvider(ToolProvider):
    """Provides every agent of a registry as a tool."""

    kind = "agent"
    circuit_scope = "none"
    namespace = AGENT_NAMESPACE

    def __init__(self, agents: AgentRegistry) -> None:
        super().__init__()
        self._agents = agents
        self._tools: dict[str, Tool] = {}
        self._refresh()
        agents.on_change(self._refresh)

    def _refresh(self) -> None:
        self._tools = {agent.name: _build_tool(agent) for agent in self._agents}
        self.notify_changed()

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """An agent is offered the agents that it may call; every other caller all of them."""
        run = find_agent_run(context)
        return run is None or tool.name in map(agent_tool_name, run.agent.subagents)

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
    request = AgentRequest(prompt=_build_prompt(parameters, task), caller=context, parent=parent)
    return _to_tool_result(await run_request(agents, name, request))


async def _run_one(
    agents: AgentRegistry, name: str, request: AgentRequest, path: tuple[str, ...], advice: Sequence[str]
) -> tuple[AgentResult[Any], AgentRun | None]:
    """Runs one agent of the path. Returns no run if it could not start."""
    try:
        async with agents.acquire(name) as prepared_agent:
            if request.max_steps is not None:
                settings = msgspec.structs.replace(prepared_agent.settings, max_steps=request.max_steps)
                prepared_agent = msgspec.structs.replace(prepared_agent, settings=settings)
            run = AgentRun(prepared_agent.agent, request=request.prompt, parent=request.parent, previous_agents=path)
            run.turns.extend(request.history)
            if request.conversation is not None:
                run.conversation, request.conversation.turns = request.conversation, run.turns
            run.turns.append(UserTurn("\n\n".join((request.prompt, *advice))))
            return await _run_prepared(agents, prepared_agent, run, request), run
    except Exception as error:  # The agent's own toolspace may raise anything: the caller gets it as a result.
        if not isinstance(error, ModelError | ToolError | RefusedError | StorageError):
            _log.exception('agent "%s": the run could not start', name)
        return error_result(name, error), None


async def _run_prepared(
    agents: AgentRegistry, prepared_agent: PreparedAgent, run: AgentRun, request: AgentRequest
) -> AgentResult[Any]:
    context = _build_context(run, request.caller, prepared_agent.tools)
    if agents.open_run_recorder is not None:
        recorder = await agents.open_run_recorder(run, request.caller, context, prepared_agent.tools)
    else:
        recorder = RunRecorder()
    tool_run = prepared_agent.open_tool_run(
        id=recorder.run_id,
        context=context,
        policy=_NO_INBOX,
        session=context.session_id,
        seconds=min(run.budget.remaining_seconds, request.caller.remaining_seconds),
    )
    tool_run.trace.attributes["agent"] = run.name
    await prepared_agent.tools.wait_for_lists()
    system = request_system_prompt(prepared_agent, run, context)
    if request.output is not None:
        tool_run.check_report = request.output.check
        system = f"{system}\n\n{request.output.instructions}"
    if request.observer is not None:
        request.observer.on_agent_started(run.name)
    loop = AgentLoop(
        prepared_agent,
        run,
        tool_run,
        system=system,
        context=context,
        hooks=recorder,
        observer=request.observer,
        output=request.output,
    )
    try:
        result = await _run_loop(loop, recorder, request.output)
    except BaseException:  # The caller was cancelled: the stored run must end all the same.
        tool_run.trace.end("canceled")
        agents.run_in_background(recorder.close("canceled", run.budget.usage, _CANCELLED))
        raise
    status = _run_status(result)
    tool_run.trace.attributes.update(usage=msgspec.to_builtins(run.budget.usage), end=result.end)
    tool_run.trace.end("ok" if status == "completed" else status)
    error = None if result.ok else result.error
    await asyncio.shield(agents.run_in_background(recorder.close(status, run.budget.usage, error)))
    return result


async def _run_loop(loop: AgentLoop, recorder: RunRecorder, output: OutputCheck | None) -> AgentResult[Any]:
    run, tool_run = loop.agent_run, loop.tool_run
    scope = asyncio.timeout(None)
    try:
        async with scope:
            recorder.stop_run = lambda: scope.reschedule(0)
            try:
                result = _result(await loop.run_within_context(), run.name, output)
            finally:
                recorder.stop_run = None
    except Exception as error:
        result = error_result(run.name, error, run.turns)
        if isinstance(error, ModelError):
            if (reason := run.budget.exhausted_reason()) is not None:
                result = msgspec.structs.replace(result, end="limit", error=reason, error_kind="limit_exceeded")
        elif scope.expired():
            result = msgspec.structs.replace(result, end="stopped", error=_CANCELLED, error_kind="canceled")
        else:  # A model is code of others and may raise anything.
            _log.exception('agent "%s": the run failed', run.name)
    return msgspec.structs.replace(
        result, steps=run.steps, turns=tuple(run.turns), run_id=tool_run.id, trace=tool_run.trace
    )


def _result(outcome: RunOutcome, name: str, output: OutputCheck | None) -> AgentResult[Any]:
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
    answer = outcome.answer if output is None else output.value
    return AgentResult(
        ok=ok,
        output=answer if ok else None,
        text=outcome.answer,
        report=report,
        end=outcome.end,
        error=error,
        error_kind=cast("ErrorKind | None", kind),
        agent=name,
    )


def error_result(name: str, error: Exception, turns: Sequence[Turn] = ()) -> AgentResult[Any]:
    """The result of a run that an error has ended."""
    message = json_text.valid_text(str(error)) or type(error).__name__
    kind: ErrorKind = "execution_error"
    if isinstance(error, ModelError):
        kind = "transport_error" if error.is_transient else "execution_error"
    elif isinstance(error, ToolError):
        kind = error.kind
    text = next((turn.text for turn in reversed(turns) if isinstance(turn, ModelTurn) and turn.text), "")
    return AgentResult(ok=False, text=text, end="failed", error=message, error_kind=kind, agent=name)


def _build_context(run: AgentRun, caller: ToolContext, tools: ToolOrchestrator) -> ToolContext:
    """The context of the agent's calls. What the caller has restricted for this call stays restricted."""
    call = current_call.get()
    defaults = call.owner.context if call is not None else ToolContext()
    inherited_values = {
        field: value
        for field in _INHERITED_FIELDS
        if (value := getattr(caller, field)) is not None and value != getattr(defaults, field)
    }
    shared_dir = tools.context.memory_dir
    if run.parent is None and caller.memory_dir is not None:  # A program may have chosen another directory.
        shared_dir = caller.memory_dir
    return ToolContext(
        **inherited_values,
        memory_dir=memory_dir_of(run.agent, shared_dir),
        session_id=caller.session_id,  # The caller can read the outputs that the agent's tools store.
        agent_id=run.name,
        agent=run,
    )


def request_system_prompt(prepared_agent: PreparedAgent, run: AgentRun, context: ToolContext) -> str:
    """The system prompt of a run that answers a request."""
    if run.parent is not None:
        recipient = (
            f'You were called by the agent "{run.parent.name}": your answer goes to it, not to a person. '
            "Answer with what it asked for and nothing else; say what you could not find out."
        )
    else:
        recipient = "What you say last, or your final report, is the answer."
    tool_instructions = prepared_agent.tools.instructions(context=context)
    parts = (
        prepared_agent.agent.system.strip(),
        f'You are the agent "{run.name}". {recipient}',
        f"TOOLS:\n{tool_instructions}" if tool_instructions else "",
    )
    return "\n\n".join(filter(None, parts))


def _run_status(result: AgentResult[Any]) -> FinalRunStatus:
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


def _to_tool_result(result: AgentResult[Any]) -> ToolResult:
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
