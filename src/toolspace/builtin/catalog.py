"""All built-in tools, and the collections of them that different agents are given."""

from __future__ import annotations

from toolspace.builtin.data import data_tools
from toolspace.builtin.files import file_tools
from toolspace.builtin.memory import memory_tools
from toolspace.builtin.network import network_tools
from toolspace.builtin.system import system_tools
from toolspace.builtin.tasks import agent_tools, session_tools, task_tools
from toolspace.core.function_tool import FunctionTool

builtin_tools: tuple[FunctionTool, ...] = (*system_tools, *file_tools, *network_tools, *data_tools, *memory_tools)
"""What works anywhere; the task tools are added where an agent runs."""

_everything = {made.name: made for made in (*builtin_tools, *task_tools, *session_tools, *agent_tools)}
for _made in _everything.values():
    _made.visible = False  # Built-ins are never shown in a space.


def _named(names: str) -> tuple[FunctionTool, ...]:
    return tuple(_everything[name] for name in names.split())


all_task_tools: tuple[FunctionTool, ...] = (*builtin_tools, *task_tools)
"""For a task: everything but speaking to people and starting more tasks."""

main_agent_tools: tuple[FunctionTool, ...] = _named(
    "current_time memory_list memory_read task_list task_replay session_archive_read spawn_task reply"
)
"""For the agent that people talk to: it looks things up, and leaves the work to tasks."""

reflection_tools: tuple[FunctionTool, ...] = _named("memory_read memory_write memory_patch memory_append")
"""For looking back on a task: the memory index is in the prompt already."""

tool_collections: dict[str, tuple[FunctionTool, ...]] = {
    "allTaskTools": all_task_tools,
    "mainAgentTools": main_agent_tools,
    "reflectionTools": reflection_tools,
    "sessionTools": session_tools,
}
"""By the names that configuration uses."""
