"""Provides the tools with which one agent reaches another: `agent__{name}` and `router__handoff-to`.

A call of `agent__{name}` is a run of that agent below the calling run. A handoff ends the calling agent's run, and the
other agent answers the request. Stores nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from toolspace.agents.agent import Agent
from toolspace.agents.agent_run import AgentRun, Handoff, find_agent_run
from toolspace.agents.registry import AgentRegistry
from toolspace.agents.request_runner import AgentRequest, AgentResult, run_request
from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import AGENT_NAMESPACE, agent_tool_name, did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool, ToolCategory
from toolspace.errors import ToolExecutionError, ToolNotFoundError, ToolValidationError

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
