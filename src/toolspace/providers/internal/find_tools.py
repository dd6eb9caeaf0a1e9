"""`agent__find_tools`: ranks tools by what they do, and makes the found ones known to the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.function import FunctionTool, tool
from toolspace.core.tool import Annotations, Tool, ToolCategory
from toolspace.errors import ToolValidationError

Search = Callable[[str, int], list[tuple[Tool, float]]]
_MOST = 25


def find_tools_tool(search: Search) -> FunctionTool:
    async def find_tools(query: str, limit: int = 5, *, context: ToolContext) -> dict[str, Any]:
        """Finds tools by what they do. The ones it returns can be called from then on.

        Args:
            query: What you want to do, in a few words.
            limit: How many tools to return at most.
        """
        if not query.strip():
            raise ToolValidationError("query: expected a few words on what to do")
        found = [one for one, _ in search(query, min(max(limit, 1), _MOST) + 1) if one.name != "agent__find_tools"]
        found = found[: min(max(limit, 1), _MOST)]
        if context.run is not None:
            context.run.discovered.update(dict.fromkeys(one.name for one in found))
        return {
            "tools": [
                {"name": one.name, "description": one.description, "parameters": one.input_schema} for one in found
            ]
        }

    settings = Annotations(read_only=True, idempotent=True)
    return tool(name="find_tools", category=ToolCategory.AGENT, annotations=settings)(find_tools)
