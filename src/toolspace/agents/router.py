"""`router__handoff-to`: hands what an agent was asked to another one, which answers in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolspace.agents.run_budget import Frame, Handoff, frame_of
from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool, ToolCategory
from toolspace.errors import ToolExecutionError, ToolNotFoundError, ToolValidationError

HANDOFF = "handoff-to"
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
                HANDOFF,
                "Hands the request that you were given to another agent, which answers in your place. Ends your run.",
                _INPUT,
                category=ToolCategory.AGENT,
                visible=False,
            )
        ]

    def list_tools(self) -> Sequence[Tool]:
        return self._tools

    def offers(self, tool: Tool, context: ToolContext) -> bool:
        frame = frame_of(context)
        return frame is not None and bool(frame.destinations)

    def get_instructions(self) -> str:
        return ""

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name != HANDOFF:
            raise ToolNotFoundError(f'Tool "router__{name}" not found')
        frame = frame_of(context)
        if frame is None or not frame.destinations:
            raise ToolExecutionError(
                "only an agent that has destinations can hand a request on (router.destinations)", executed=False
            )
        agent, message = parameters["agent"], parameters.get("message")
        check_handoff(frame, agent)
        frame.handoff = Handoff(agent, message or None)
        return ToolResult(ok=True, result={"handedTo": agent})


def check_handoff(frame: Frame, agent: str) -> None:
    """Raises where an agent may not hand its request to another one now."""
    if agent not in frame.destinations:
        near = did_you_mean(agent, frame.destinations)
        raise ToolValidationError(
            f'agent: "{agent}" is not a destination of "{frame.name}"{near or ""}; '
            f"it may hand over to {', '.join(frame.destinations)}"
        )
    if agent in (*frame.before, frame.name):
        line = " → ".join((*frame.before, frame.name, agent))
        raise ToolValidationError(f"agent: a cycle: {line}; answer it yourself, or hand it to another agent")
    frame.check_recursion(agent)
    if frame.handoff is not None:
        raise ToolExecutionError(f'the request was handed to "{frame.handoff.agent}" already', executed=False)
