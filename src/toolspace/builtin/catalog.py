"""All built-in tools, and the named collections that agents get."""

from __future__ import annotations

from toolspace.builtin.data import data_tools
from toolspace.builtin.files import file_tools
from toolspace.builtin.memory import memory_tools
from toolspace.builtin.network import network_tools
from toolspace.builtin.system import system_tools
from toolspace.builtin.task_tools import agent_tools, session_tools, task_tools
from toolspace.core.tool import FunctionTool
from toolspace.core.tool_collections import TOOL_COLLECTIONS

builtin_tools: tuple[FunctionTool, ...] = (*system_tools, *file_tools, *network_tools, *data_tools, *memory_tools)
"""The tools that work without an agent. Agents get the task tools too."""

_tools_by_name = {tool.name: tool for tool in (*builtin_tools, *task_tools, *session_tools, *agent_tools)}
for _tool in _tools_by_name.values():
    _tool.visible = False  # Built-in tools are never shown in a space.


tool_collections: dict[str, tuple[FunctionTool, ...]] = {
    collection: tuple(_tools_by_name[name] for name in names) for collection, names in TOOL_COLLECTIONS.items()
}
"""The collections by the names that the configuration uses."""

all_task_tools = tool_collections["allTaskTools"]
"""For a background task: everything except talking to people and starting more tasks."""

main_agent_tools = tool_collections["mainAgentTools"]
"""For the agent that people talk to: it looks things up and starts tasks for the work."""

reflection_tools = tool_collections["reflectionTools"]
"""For reflecting on a finished task. The prompt already contains the memory index."""
