"""What a model is shown: all tools, or a search tool and what it found, once the definitions cost too much."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from toolspace.core.export import definition_text
from toolspace.core.interfaces import TokenCounter
from toolspace.core.tool import Tool


class TokenCosts:
    """What each definition costs a model, counted once per tool."""

    def __init__(self, count: TokenCounter) -> None:
        self._count = count
        self._known: dict[Tool, int] = {}

    def of(self, tool: Tool) -> int:
        cost = self._known.get(tool)
        if cost is None:
            cost = self._known[tool] = self._count(definition_text(tool))
        return cost

    def total(self, tools: Iterable[Tool]) -> int:
        return sum(map(self.of, tools))

    def keep(self, tools: Iterable[Tool]) -> None:
        """Forgets all others: lists change, and a long-lived process must not hold every tool it ever saw."""
        self._known = {tool: self._known[tool] for tool in tools if tool in self._known}


def visible_tools(
    tools: Sequence[Tool],
    costs: TokenCosts,
    *,
    threshold: int | None,
    search_tool: Tool | None,
    discovered: Collection[str] = (),
) -> list[Tool]:
    """All tools while they are cheap; beyond the threshold the agent's own, the search tool and its finds."""
    if threshold is None or search_tool is None or costs.total(tools) <= threshold:
        return [tool for tool in tools if tool is not search_tool]
    rest = [tool for tool in tools if _is_own(tool) or tool.name in discovered]
    return [search_tool, *(tool for tool in rest if tool is not search_tool)]


def _is_own(tool: Tool) -> bool:
    """Whether an agent needs it whatever it does: it has to find what it works with, not how it speaks."""
    return tool.execution_type == "prebuilt" or tool.name.startswith(("agent__", "router__"))
