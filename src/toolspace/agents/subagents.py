"""The provider of agents as tools, `agent__{name}`: a call of one is a run of that agent, below the run that asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from toolspace.agents.definition import Agent
from toolspace.agents.in_process import AgentResult, Errand, ask
from toolspace.agents.registry import Crew
from toolspace.agents.run_budget import frame_of
from toolspace.core import json_text
from toolspace.core.agent_names import NAMESPACE, tool_of
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool, ToolCategory

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
    namespace = NAMESPACE

    def __init__(self, crew: Crew) -> None:
        super().__init__()
        self._crew = crew
        self._tools: dict[str, Tool] = {}
        self._names: dict[str, str] = {}
        self._refresh()
        crew.on_change(self._refresh)

    def _refresh(self) -> None:
        self._tools = {agent.name: _tool(agent) for agent in self._crew}
        self._names = {tool_of(name): name for name in self._tools}
        self.changed()

    def list_tools(self) -> Sequence[Tool]:
        return list(self._tools.values())

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def offers(self, tool: Tool, context: ToolContext) -> bool:
        """To an agent those that it may call; to anyone else all."""
        frame = frame_of(context)
        return frame is None or frame.helpers is None or self._names.get(tool.name) in frame.helpers

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if (frame := frame_of(context)) is not None:
            frame.check_call(name)
        return await call_agent(self._crew, name, parameters, context)


async def call_agent(
    crew: Crew, name: str, parameters: Mapping[str, Any], context: ToolContext, *, task: str = ""
) -> ToolResult:
    """Has an agent answer a call, as a run below it. `task`: what to ask where the arguments say no prompt."""
    parent = frame_of(context)
    if parent is not None:
        parent.check_line(name)
    crew.find(name)
    errand = Errand(request=_request(parameters, task), caller=context, parent=parent)
    return _as_tool_result(await ask(crew, name, errand))


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
