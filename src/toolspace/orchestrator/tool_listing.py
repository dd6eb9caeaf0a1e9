"""What a model is shown: all tools, or a search tool and what it found, once the definitions cost too much."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence

from toolspace.core.context import ToolContext
from toolspace.core.export import definition_text
from toolspace.core.interfaces import Deny, Policy, TokenCounter, ToolProvider
from toolspace.core.tokens import estimate_tokens
from toolspace.core.tool import Tool
from toolspace.orchestrator.catalog import CatalogEntry


class TokenCosts:
    """What each definition costs a model, counted once per tool."""

    def __init__(self, count: TokenCounter) -> None:
        self._count = count
        self._known: dict[Tool, int] = {}

    def get(self, tool: Tool) -> int:
        cost = self._known.get(tool)
        if cost is None:
            cost = self._known[tool] = self._count(definition_text(tool))
        return cost

    def total(self, tools: Iterable[Tool]) -> int:
        return sum(map(self.get, tools))

    def retain(self, tools: Iterable[Tool]) -> None:
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


# MERGED from guards: Asks code that is not ours (providers, policies, counters) so that its faults stay its own.

_log = logging.getLogger("toolspace.orchestrator")


def safe_token_counter(count: TokenCounter) -> TokenCounter:
    """A counter that always has an answer: every call is counted, and none may fail because of it."""
    if count is estimate_tokens:
        return count

    def counted(text: str, /) -> int:
        try:
            return count(text)
        except Exception:
            _log.exception("tokens could not be counted; they are estimated")
            return estimate_tokens(text)

    return counted


def is_offered(entry: CatalogEntry, caller: ToolContext) -> bool:
    try:
        return entry.provider.is_offered(entry.tool, caller)
    except Exception:  # Its own code: one that fails must not take the list of all others away.
        _log.exception("provider %s cannot say whether it offers %s", entry.provider_name, entry.tool.name)
        return False


def is_permitted(tool: Tool, caller: ToolContext, policies: Sequence[Policy]) -> bool:
    """Whether to show a tool: not where a policy would refuse it. One that cannot say decides when it is called."""
    try:
        return not any(isinstance(policy.decide(tool, caller), Deny) for policy in policies)
    except Exception:
        return True


def get_instructions(provider: ToolProvider) -> str:
    try:
        return provider.get_instructions().strip()
    except Exception:
        _log.exception("provider %s cannot give its instructions", provider.namespace or provider.kind)
        return ""


async def close_provider(provider: ToolProvider) -> None:
    try:
        await provider.aclose()
    except (Exception, asyncio.CancelledError):
        # A connection that breaks may show as a cancellation that nobody asked for.
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        _log.exception("provider %s did not close", provider.namespace or provider.kind)
