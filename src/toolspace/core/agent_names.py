"""What an agent may be called: its name becomes that of a tool, `agent__researcher`."""

from __future__ import annotations

import re

from toolspace.core.names import MAX_NAME, SEPARATOR, sanitise

NAMESPACE = "agent"
"""Of the tools that call agents."""
LONGEST_NAME = MAX_NAME - len(NAMESPACE + SEPARATOR)
RESERVED_NAMES = frozenset(("final_report", "task_status", "batch", "read_output", "find_tools"))
"""Tools of the same namespace that every agent has."""

_NAME = re.compile(r"\w(?:[\w .-]*[\w.-])?")
_PLAIN = re.compile(r"[A-Za-z0-9]")


def tool_of(name: str) -> str:
    """The full name of the tool that calls an agent."""
    return f"{NAMESPACE}{SEPARATOR}{sanitise(name)}"


def name_fault(name: str) -> str | None:
    """Why no agent can be called so, to be read behind the name; None where one can."""
    tool = sanitise(name)
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name) or not _PLAIN.search(tool):
        return f"cannot name an agent; use 1 to {LONGEST_NAME} letters, digits, spaces, and _ - ."
    if tool.casefold() in RESERVED_NAMES:
        return f"cannot name an agent, as every agent has a tool {tool_of(tool.casefold())}; take another name"
    return None
