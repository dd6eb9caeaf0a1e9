"""Ranks tools by what they do: BM25 over names, descriptions and parameters."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from toolspace.core.tool import Tool

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_]+")
_STOP = frozenset(
    re.split(r"\s", "a an the of to in on for and or with by from as is are be it this that at into if not")
)
_K1, _B = 1.2, 0.75
_NAME_WEIGHT = 4


class ToolIndex:
    """A ranking over a fixed list of tools."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = list(tools)
        self._documents = [Counter(_words_of(tool)) for tool in self._tools]
        self._lengths = [document.total() for document in self._documents]
        self._mean = sum(self._lengths) / len(self._lengths) if self._lengths else 1.0
        spread = Counter(word for document in self._documents for word in document)
        total = len(self._tools)
        self._weights = {word: math.log(1 + (total - n + 0.5) / (n + 0.5)) for word, n in spread.items()}

    def search(self, query: str, limit: int = 10) -> list[tuple[Tool, float]]:
        """The tools that fit the query, best first, with their scores."""
        words = [word for word in _words(query) if word in self._weights] or self._guesses(query)
        scored = [(self._score(index, words), index) for index in range(len(self._tools))]
        best = sorted((pair for pair in scored if pair[0] > 0), key=lambda pair: (-pair[0], pair[1]))
        return [(self._tools[index], score) for score, index in best[:limit]]

    def _score(self, index: int, words: list[str]) -> float:
        document = self._documents[index]
        stretch = _K1 * (1 - _B + _B * self._lengths[index] / self._mean)
        score = 0.0
        for word in words:
            count = document.get(word, 0)
            if count:
                score += self._weights[word] * count * (_K1 + 1) / (count + stretch)
        return score

    def _guesses(self, query: str) -> list[str]:
        """Words that begin like one of the query's, where none is known as it is."""
        starts = [word[:4] for word in _words(query) if len(word) >= 3]
        return [word for word in self._weights if any(word.startswith(start) for start in starts)]


def _words_of(tool: Tool) -> Iterator[str]:
    name = list(_words(tool.name))
    yield from name * _NAME_WEIGHT
    yield from _words(tool.description)
    yield from (word for tag in tool.tags for word in _words(tag))
    properties = cast("Mapping[str, Any]", tool.input_schema.get("properties") or {})
    for parameter, schema in properties.items():
        yield from _words(parameter)
        if isinstance(schema, Mapping):
            yield from _words(str(cast("Mapping[str, Any]", schema).get("description") or ""))


def _words(text: str) -> Iterator[str]:
    for word in _WORD.findall(text):
        folded = word.casefold()
        if folded not in _STOP:
            yield _stem(folded)


def _stem(word: str) -> str:
    """Enough to bring `files` and `file`, `searching` and `search` together."""
    for ending in ("ing", "ies", "es", "ed", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            stem = word[: -len(ending)]
            return stem + "y" if ending == "ies" else stem.removesuffix("e")
    return word.removesuffix("e") if len(word) > 3 else word
