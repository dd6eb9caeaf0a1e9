"""Ranks tools by a description of what to do: BM25 over names, descriptions and parameters.

The orchestrator uses it for `search` and for the tool `agent__find_tools`. The scorer is that of `core.text_search`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from toolspace.core.text_search import bm25_score, word_weight
from toolspace.core.tool import Tool

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_]+")
_STOP_WORDS = frozenset(
    re.split(r"\s", "a an the of to in on for and or with by from as is are be it this that at into if not")
)
_NAME_WEIGHT = 4


class ToolIndex:
    """A search index over a fixed list of tools."""

    def __init__(self, tools: Iterable[Tool]) -> None:
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
            bm25_score(count, length, self._mean_length, self._weights[word])
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
        folded = word.casefold()
        if folded not in _STOP_WORDS:
            yield _stem(folded)


def _stem(word: str) -> str:
    """Returns one stem for `files` and `file`, and for `searching` and `search`. More is not needed here."""
    for ending in ("ing", "ies", "es", "ed", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            stem = word[: -len(ending)]
            return stem + "y" if ending == "ies" else stem.removesuffix("e")
    return word.removesuffix("e") if len(word) > 3 else word
