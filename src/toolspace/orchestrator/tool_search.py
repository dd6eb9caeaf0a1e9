"""Decides which tools a caller or a model sees, and searches tools by a description of what to do.

A model sees a search tool instead of all tools if their definitions would cost too many tokens. The search ranks by
BM25 (`core.text_search`) over names, descriptions and parameters. The orchestrator uses it. An extension (provider,
policy, token counter) that raises never hides the tools of the others.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from toolspace.core.extension_points import Deny, Policy, TokenCounter, ToolProvider
from toolspace.core.token_count import estimate_tokens
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext

if TYPE_CHECKING:
    from toolspace.orchestrator.catalog import CatalogEntry

_log = logging.getLogger("toolspace.orchestrator")

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_]+")
_STOP_WORDS = frozenset(
    re.split(r"\s", "a an the of to in on for and or with by from as is are be it this that at into if not")
)
_NAME_WEIGHT = 4


class TokenCosts:
    """How many tokens the definition of each tool costs a model, counted once per tool."""

    def __init__(self, count: TokenCounter) -> None:
        self._count = count
        self._costs: dict[Tool, int] = {}

    def get(self, tool: Tool) -> int:
        cost = self._costs.get(tool)
        if cost is None:
            from toolspace.core.tool_export import definition_text  # Imported here: programs may never export tools.

            cost = self._costs[tool] = self._count(definition_text(tool))
        return cost

    def total(self, tools: Iterable[Tool]) -> int:
        return sum(map(self.get, tools))

    def retain(self, tools: Iterable[Tool]) -> None:
        """Drops the costs of all other tools, so that a long-lived process does not keep every tool it ever had."""
        self._costs = {tool: self._costs[tool] for tool in tools if tool in self._costs}


def visible_tools(
    tools: Sequence[Tool],
    costs: TokenCosts,
    *,
    threshold: int | None,
    search_tool: Tool | None,
    discovered_names: Collection[str] = (),
) -> list[Tool]:
    """Returns the tools to show a model: all, if their definitions cost no more than `threshold` tokens.

    Else the search tool, the tools that every agent has, and the tools that a search has discovered.
    """
    if threshold is None or search_tool is None or costs.total(tools) <= threshold:
        return [tool for tool in tools if tool is not search_tool]
    selection = [tool for tool in tools if _is_agent_tool(tool) or tool.name in discovered_names]
    return [search_tool, *(tool for tool in selection if tool is not search_tool)]


def _is_agent_tool(tool: Tool) -> bool:
    """Whether an agent always needs the tool, whatever its task is: to report, to reply, to call other agents."""
    return tool.execution_type == "prebuilt" or tool.name.startswith(("agent__", "router__"))


def is_offered(entry: CatalogEntry, caller: ToolContext) -> bool:
    """Whether the provider shows a tool to this caller. A provider that raises does not."""
    try:
        return entry.provider.is_offered(entry.tool, caller)
    except Exception:
        _log.exception("provider %s: is_offered failed for %s; not listing it", entry.provider_name, entry.tool.name)
        return False


def is_permitted(tool: Tool, caller: ToolContext, policies: Sequence[Policy]) -> bool:
    """Whether to show a tool: not if a policy denies it. Shown if a policy raises: calls are checked again."""
    try:
        return not any(isinstance(policy.decide(tool, caller), Deny) for policy in policies)
    except Exception:
        return True


def get_instructions(provider: ToolProvider) -> str:
    """Returns the provider's instructions for models; none if it raises."""
    try:
        return provider.get_instructions().strip()
    except Exception:
        _log.exception("provider %s: get_instructions failed", provider.namespace or provider.kind)
        return ""


async def close_provider(provider: ToolProvider) -> None:
    """Closes a provider. Logs what it raises."""
    try:
        await provider.aclose()
    except (Exception, asyncio.CancelledError):
        # A connection that breaks may raise `CancelledError` though nobody cancelled this task.
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        _log.exception("provider %s: aclose failed", provider.namespace or provider.kind)


def safe_token_counter(count: TokenCounter) -> TokenCounter:
    """Returns a counter that estimates when `count` raises: every result is counted, and no call may fail for it."""
    if count is estimate_tokens:
        return count

    def count_safely(text: str, /) -> int:
        try:
            return count(text)
        except Exception:
            _log.exception("the token counter failed; estimating")
            return estimate_tokens(text)

    return count_safely


class ToolIndex:
    """A search index over a fixed list of tools."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        from toolspace.core.text_search import bm25_score, word_weight  # Imported here: many programs never search.

        self._bm25_score = bm25_score
        self._tools = list(tools)
        self._documents = [Counter(_tool_words(tool)) for tool in self._tools]
        self._lengths = [document.total() for document in self._documents]
        self._mean_length = sum(self._lengths) / len(self._lengths) if self._lengths else 1.0
        tool_counts = Counter(word for document in self._documents for word in document)
        total = len(self._tools)
        self._weights = {word: word_weight(count, total) for word, count in tool_counts.items()}

    def search(self, query: str, limit: int = 10) -> list[tuple[Tool, float]]:
        """Returns the tools that match the query, best first, with their scores."""
        words = [word for word in _split_words(query) if word in self._weights] or self._words_with_prefix(query)
        scores = [(self._score(index, words), index) for index in range(len(self._tools))]
        best = sorted((pair for pair in scores if pair[0] > 0), key=lambda pair: (-pair[0], pair[1]))
        return [(self._tools[index], score) for score, index in best[:limit]]

    def _score(self, index: int, words: list[str]) -> float:
        document, length = self._documents[index], self._lengths[index]
        return sum(
            self._bm25_score(count, length, self._mean_length, self._weights[word])
            for word in words
            if (count := document.get(word, 0))
        )

    def _words_with_prefix(self, query: str) -> list[str]:
        """Returns the indexed words that begin like a word of the query, for a query of unknown words."""
        prefixes = [word[:4] for word in _split_words(query) if len(word) >= 3]
        return [word for word in self._weights if any(word.startswith(prefix) for prefix in prefixes)]


def _tool_words(tool: Tool) -> Iterator[str]:
    yield from list(_split_words(tool.name)) * _NAME_WEIGHT
    yield from _split_words(tool.description)
    yield from (word for tag in tool.tags for word in _split_words(tag))
    properties = cast("Mapping[str, Any]", tool.input_schema.get("properties") or {})
    for parameter, schema in properties.items():
        yield from _split_words(parameter)
        if isinstance(schema, Mapping):
            yield from _split_words(str(cast("Mapping[str, Any]", schema).get("description") or ""))


def _split_words(text: str) -> Iterator[str]:
    for word in _WORD.findall(text):
        folded_word = word.casefold()
        if folded_word not in _STOP_WORDS:
            yield _stem(folded_word)


def _stem(word: str) -> str:
    """Returns one stem for `files` and `file`, and for `searching` and `search`. More is not needed here."""
    for ending in ("ing", "ies", "es", "ed", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            stem = word[: -len(ending)]
            return stem + "y" if ending == "ies" else stem.removesuffix("e")
    return word.removesuffix("e") if len(word) > 3 else word
