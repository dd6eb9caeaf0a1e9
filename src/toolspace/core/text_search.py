"""Text as a search sees it: its words, the passages that are found, and how well one fits (BM25). Keeps nothing."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec

PASSAGE_CHARACTERS: Final = 1_000
"""Characters of a passage, about."""
PASSAGE_OVERLAP: Final = 150
"""What a passage repeats of the one before, so that no sentence is torn apart in all of them."""
MAX_WORD: Final = 64
_K1, _B = 1.2, 0.75
_NEAR: Final = 8
"""How many words apart is still near."""

_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u1100-\u11ff\u3040-\u30ff\u31f0-\u31ff\uac00-\ud7af"  # Hangul, kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
"""Scripts that are written without spaces between words, or nearly so: there pairs of letters do for words."""
_RUN: Final = re.compile(rf"([{_UNSPACED}]+)|([^\W_{_UNSPACED}]+)")
_BREAKS: Final = (
    re.compile(r"\n\s*\n"),
    re.compile(r"\n"),
    re.compile(r"[.!?\u2026]\s|[\u3002\uff01\uff1f]"),
    re.compile(r"\s"),
)
"""Where a passage may end, the best first."""


class Passage(msgspec.Struct, frozen=True):
    """A part of a document: at which of its characters it begins, and what it says."""

    start: int
    text: str


class IndexedDocument(msgspec.Struct, frozen=True):
    """A document, ready to be found."""

    passages: list[Passage]
    postings: dict[str, list[int]]
    """Of each word: the number of a passage, how often it is in there, how many words that has; and the next."""
    words: int
    """Of all passages together."""


def index_document(title: str, text: str) -> IndexedDocument:
    """Takes a document apart. Its title counts for every passage. Takes a while for a long one."""
    headline = split_words(title)
    passages = [Passage(start, text[start:end]) for start, end in split_passages(text)]
    postings: dict[str, list[int]] = {}
    total = 0
    for number, passage in enumerate(passages):
        found = split_words(passage.text)
        if not found and number:
            continue  # Only spaces, which nobody looks for.
        found += headline
        total += len(found)
        for word, count in Counter(found).items():
            postings.setdefault(word, []).extend((number, count, len(found)))
    return IndexedDocument(passages, postings, total)


def join_passages(passages: Iterable[Passage]) -> str:
    """The text that passages were cut from."""
    pieces: list[str] = []
    length = 0
    for passage in passages:
        pieces.append(passage.text[length - passage.start :])
        length = passage.start + len(passage.text)
    return "".join(pieces)


def split_words(text: str) -> list[str]:
    """The words of a text in their order, folded; of unspaced scripts each letter and each pair of letters."""
    return list(_words(text, letters=True))


def query_words(text: str) -> list[str]:
    """The words to look for, each once, in the order of the query."""
    return list(dict.fromkeys(_words(text, letters=False)))


def split_passages(text: str) -> list[tuple[int, int]]:
    """The passages of a text: where each begins and ends. Each begins before the last one has ended."""
    parts: list[tuple[int, int]] = []
    start, length = 0, len(text)
    while True:
        end = length if length - start <= PASSAGE_CHARACTERS + PASSAGE_OVERLAP else _break(text, start)
        parts.append((start, end))
        if end >= length:
            return parts
        start = _word_start(text, max(end - PASSAGE_OVERLAP, start + 1), end)


def word_weight(having: int, total: int) -> float:
    """What a word counts that so many of all passages have."""
    return math.log(1 + (total - having + 0.5) / (having + 0.5))


def bm25_scores(postings: Sequence[int], weight: float, mean: float) -> Iterator[tuple[int, float]]:
    """How well passages fit one word: their numbers and scores. `mean`: how many words a passage has on average."""
    for at in range(0, len(postings), 3):
        number, count, length = postings[at : at + 3]
        yield number, weight * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * length / mean))


def proximity_score(phrase: Sequence[str], text: str, weights: Mapping[str, float]) -> float:
    """What words that follow each other in a query add where they are near each other in a passage."""
    if len(phrase) < 2:
        return 0.0
    places: dict[str, list[int]] = {word: [] for word in phrase}
    for at, word in enumerate(split_words(text)):
        if word in places:
            places[word].append(at)
    added = 0.0
    for one, other in pairwise(phrase):
        apart = min((b - a for a in places[one] for b in places[other] if 0 < b - a <= _NEAR), default=0)
        if apart:
            added += (weights[one] + weights[other]) / 2 / apart
    return added


def _words(text: str, *, letters: bool) -> Iterator[str]:
    for run in _RUN.finditer(unicodedata.normalize("NFKC", text).casefold()):
        unspaced = run[1]
        if unspaced is None:
            yield _singular(run[2][:MAX_WORD])
            continue
        for place, letter in enumerate(unspaced):
            if letters or len(unspaced) == 1:
                yield letter
            if place + 1 < len(unspaced):
                yield unspaced[place : place + 2]


def _singular(word: str) -> str:
    """Brings `invoices` and `invoice`, `policies` and `policy` together; leaves `address` and `status` alone."""
    if len(word) < 4 or not word.endswith("s") or not word.isascii() or word[-2] in "su0123456789":
        return word
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    return word[:-2] if word.endswith(("sses", "shes", "ches", "xes")) else word[:-1]


def _break(text: str, start: int) -> int:
    """Where the passage that begins at `start` ends best."""
    earliest, latest = start + PASSAGE_CHARACTERS * 3 // 5, start + PASSAGE_CHARACTERS
    for pattern in _BREAKS:
        end = max((found.end() for found in pattern.finditer(text, earliest, latest)), default=0)
        if end:
            return end
    return latest


def _word_start(text: str, start: int, end: int) -> int:
    """The first beginning of a word from `start` on; `start` itself where there is no space before `end`."""
    space = _BREAKS[-1].search(text, start, end)
    return space.end() if space is not None and space.end() < end else start
