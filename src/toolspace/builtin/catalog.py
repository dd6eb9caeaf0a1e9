"""All built-in tools, and the named collections that agents get."""

from __future__ import annotations

from toolspace.builtin.data import data_tools
from toolspace.builtin.files import file_tools
from toolspace.builtin.memory import memory_tools
from toolspace.builtin.network import network_tools
from toolspace.builtin.system import system_tools
from toolspace.builtin.task_tools import agent_tools, session_tools, task_tools
from toolspace.core.tool import FunctionTool

builtin_tools: tuple[FunctionTool, ...] = (*system_tools, *file_tools, *network_tools, *data_tools, *memory_tools)
"""The tools that work without an agent. Agents get the task tools too."""

_tools_by_name = {tool.name: tool for tool in (*builtin_tools, *task_tools, *session_tools, *agent_tools)}
for _tool in _tools_by_name.values():
    _tool.visible = False  # Built-in tools are never shown in a space.


def _select(names: str) -> tuple[FunctionTool, ...]:
    return tuple(_tools_by_name[name] for name in names.split())


all_task_tools: tuple[FunctionTool, ...] = (*builtin_tools, *task_tools)
"""For a background task: everything except talking to people and starting more tasks."""

main_agent_tools: tuple[FunctionTool, ...] = _select(
    "current_time memory_list memory_read task_list task_replay session_archive_read spawn_task reply"
)
"""For the agent that people talk to: it looks things up and starts tasks for the work."""

reflection_tools: tuple[FunctionTool, ...] = _select("memory_read memory_write memory_patch memory_append")
"""For reflecting on a finished task. The prompt already contains the memory index."""

tool_collections: dict[str, tuple[FunctionTool, ...]] = {
    "allTaskTools": all_task_tools,
    "mainAgentTools": main_agent_tools,
    "reflectionTools": reflection_tools,
    "sessionTools": session_tools,
}
"""The collections by the names that the configuration uses."""
