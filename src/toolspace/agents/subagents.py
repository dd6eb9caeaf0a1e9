"""The provider of agents as tools, `agent__{name}`: a call of one is a run of that agent, below the run that asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from toolspace.agents.agent import Agent
from toolspace.agents.agent_request import AgentRequest, AgentResult, run_request
from toolspace.agents.registry import AgentRegistry
from toolspace.agents.run_budget import AgentRun, Handoff, find_agent_run
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


class AgentProvider(ToolProvider):
    """Every agent of a crew as a tool."""

    kind = "agent"
    namespace = AGENT_NAMESPACE

    def __init__(self, crew: AgentRegistry) -> None:
        super().__init__()
        self._crew = crew
        self._tools: dict[str, Tool] = {}
        self._names: dict[str, str] = {}
        self._refresh()
        crew.on_change(self._refresh)

    def _refresh(self) -> None:
        self._tools = {agent.name: _tool(agent) for agent in self._crew}
        self._names = {agent_tool_name(name): name for name in self._tools}
        self.notify_changed()

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """To an agent those that it may call; to anyone else all."""
        frame = find_agent_run(context)
        return frame is None or frame.subagents is None or self._names.get(tool.name) in frame.subagents

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if (frame := find_agent_run(context)) is not None:
            frame.check_call(name)
        return await call_agent(self._crew, name, parameters, context)


async def call_agent(
    agents: AgentRegistry, name: str, parameters: Mapping[str, Any], context: ToolContext, *, task: str = ""
) -> ToolResult:
    """Has an agent answer a call, as a run below it. `task`: what to ask where the arguments say no prompt."""
    parent = find_agent_run(context)
    if parent is not None:
        parent.check_depth(name)
    agents.get(name)
    errand = AgentRequest(prompt=_request(parameters, task), caller=context, parent=parent)
    return _as_tool_result(await run_request(agents, name, errand))


def _tool(agent: Agent) -> Tool:
    return Tool(
        agent.name,
        agent.description or f'Asks the agent "{agent.name}".',
        AGENT_INPUT,
        category=ToolCategory.AGENT,
        execution_type="agent",
        visible=False,  # What an agent does by itself is its own; it tells in a space what comes of it.
        timeout=math.inf,  # Its own limits hold, and those of whoever waits for it.
    )


def _request(parameters: Mapping[str, Any], task: str) -> str:
    """The call as the agent reads it: the prompt, and what else was given."""
    others = {key: value for key, value in parameters.items() if key not in ("prompt", "reason")}
    prompt, reason = parameters.get("prompt"), parameters.get("reason")
    parts = [
        prompt if isinstance(prompt, str) else task,
        f"REASON: {reason}" if reason else "",
        f"INPUT: {json_text.encode(others)}" if others else "",
    ]
    return json_text.valid_text("\n\n".join(filter(None, parts)))


def _as_tool_result(answer: AgentResult) -> ToolResult:
    extras: dict[str, Any] = {
        "agent": answer.agent,
        "path": list(answer.path),
        "steps": answer.steps,
        "usage": msgspec.to_builtins(answer.usage),
        "end": answer.end,
        "runId": answer.run_id,
    }
    if answer.ok:
        return ToolResult(ok=True, result=answer.value, extras=extras)
    error = f'the agent "{answer.agent}" did not finish: {answer.error}'
    if answer.text and answer.text != answer.error:
        error += f"\nWhat it said last: {answer.text}"
    return ToolResult(ok=False, error=error, error_kind=answer.error_kind or "execution_error", extras=extras)


# MERGED from router: `router__handoff-to`: hands what an agent was asked to another one, which answers in its place.

HANDOFF_TOOL = "handoff-to"
_INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "agent": {"type": "string", "description": "The agent that is to answer."},
        "message": {"type": "string", "description": "Advice for it. It sees what you were asked, as you do."},
    },
    "required": ["agent"],
    "additionalProperties": False,
}


class RouterProvider(ToolProvider):
    """One tool, for agents that have destinations."""

    kind = "router"
    namespace = "router"
    exact_names = True

    def __init__(self) -> None:
        super().__init__()
        self._tools = [
            Tool(
                HANDOFF_TOOL,
                "Hands the request that you were given to another agent, which answers in your place. Ends your run.",
                _INPUT,
                category=ToolCategory.AGENT,
                visible=False,
            )
        ]

    def list_tools(self) -> Sequence[Tool]:
        return self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        frame = find_agent_run(context)
        return frame is not None and bool(frame.destinations)

    def get_instructions(self) -> str:
        return ""

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name != HANDOFF_TOOL:
            raise ToolNotFoundError(f'Tool "router__{name}" not found')
        frame = find_agent_run(context)
        if frame is None or not frame.destinations:
            raise ToolExecutionError(
                "only an agent that has destinations can hand a request on (router.destinations)", executed=False
            )
        agent, message = parameters["agent"], parameters.get("message")
        check_handoff(frame, agent)
        frame.handoff = Handoff(agent, message or None)
        return ToolResult(ok=True, result={"handedTo": agent})


def check_handoff(frame: AgentRun, agent: str) -> None:
    """Raises where an agent may not hand its request to another one now."""
    if agent not in frame.destinations:
        near = did_you_mean(agent, frame.destinations)
        raise ToolValidationError(
            f'agent: "{agent}" is not a destination of "{frame.name}"{near or ""}; '
            f"it may hand over to {', '.join(frame.destinations)}"
        )
    if agent in (*frame.previous_agents, frame.name):
        line = " → ".join((*frame.previous_agents, frame.name, agent))
        raise ToolValidationError(f"agent: a cycle: {line}; answer it yourself, or hand it to another agent")
    frame.check_recursion(agent)
    if frame.handoff is not None:
        raise ToolExecutionError(f'the request was handed to "{frame.handoff.agent}" already', executed=False)
