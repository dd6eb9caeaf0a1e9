"""Decides which tools an agent and its background tasks are offered, as policies of their runs.

Of the built-in tools an agent gets those that only read, and those that its `tools` names. All other tools are as
configured. Calls of programs, the command line and MCP clients have no such policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from toolspace.agents.agent import Agent
from toolspace.core.extension_points import Allow, Decision, Deny, Policy
from toolspace.core.names import AGENT_NAMESPACE, SEPARATOR
from toolspace.core.tool import Tool
from toolspace.core.tool_collections import TOOL_COLLECTIONS, ToolSelection
from toolspace.core.tool_context import ToolContext
from toolspace.orchestrator.orchestrator import ToolOrchestrator

_BUILTIN_KINDS = ("builtin", "task")
"""The kinds of the providers of built-in tools."""
_MAIN_AGENT_ONLY = frozenset(("spawn_task", "reply", "router__handoff-to"))
_SESSION_TOOLS = frozenset(TOOL_COLLECTIONS["sessionTools"])
_REFLECTION_TOOLS = frozenset(TOOL_COLLECTIONS["reflectionTools"])
_ALLOW = Allow()


class CombinedPolicy(NamedTuple):
    """Allows what all of its policies allow."""

    policies: tuple[Policy, ...]
    rule: str = "the policies of the run"

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        for policy in self.policies:
            decision = policy.decide(tool, context)
            if not isinstance(decision, Allow):
                return decision
        return _ALLOW


class AgentToolPolicy(NamedTuple):
    """Denies an agent the built-in tools that it is not offered."""

    agent: Agent
    tools: ToolOrchestrator
    rule: str = "the built-in tools of the agent"

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        if is_offered_to_agent(self.agent, tool) or not _is_builtin(self.tools, tool):
            return _ALLOW
        return Deny(f'the agent "{self.agent.name}" is not offered "{tool.name}"; add it to its tools to offer it')


class TaskToolPolicy(NamedTuple):
    """Denies a task or a reflection the tools that are not for it, even if it knows their names."""

    is_allowed: Callable[[Tool], bool]
    rule: str = "tools for this kind of work"

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        return _ALLOW if self.is_allowed(tool) else Deny(f'"{tool.name}" is not for this kind of work')


def is_offered_to_agent(agent: Agent, tool: Tool) -> bool:
    """Whether an agent is offered a built-in tool: it only reads, or `tools` names it.

    If `tools` names collections, the agent gets their tools, and not all of those that only read.
    """
    selection = agent.named_tools
    is_default = bool(tool.annotations.read_only) and not selection.collection_tools
    return is_default or selection.has_builtin(tool.name)


def build_task_policy(agent: Agent, tools: ToolOrchestrator, *, is_in_space: bool) -> TaskToolPolicy:
    """The policy of a background task: the tools of `tasks.tools`, without it those of the agent.

    Never those that address people or start more tasks. `is_in_space`: visible calls can be shown in a space.
    """
    selection = ToolSelection.from_names(agent.task_tools) if agent.task_tools is not None else None

    def is_allowed(tool: Tool) -> bool:
        if tool.execution_type == "prebuilt" or tool.name in _MAIN_AGENT_ONLY:
            return False
        if not is_in_space and (tool.visible or tool.execution_type == "space"):
            return False
        if _is_builtin(tools, tool):
            if selection is not None:
                return selection.has_builtin(tool.name)
            return tool.name not in _SESSION_TOOLS and is_offered_to_agent(agent, tool)
        # Collections are about built-in tools only: alone, they leave the others as they are.
        if selection is None or not selection.patterns or tool.name.startswith(AGENT_NAMESPACE + SEPARATOR):
            return True
        return any(map(tools.get_spellings(tool.name).match, selection.patterns))

    return TaskToolPolicy(is_allowed)


def is_reflection_tool(tool: Tool) -> bool:
    """Whether a reflection may use a tool."""
    return tool.name in _REFLECTION_TOOLS


def _is_builtin(tools: ToolOrchestrator, tool: Tool) -> bool:
    return tools.find_provider_kind(tool.name) in _BUILTIN_KINDS
