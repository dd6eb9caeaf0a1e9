"""Full-text search over documents: splits texts into words and passages, and scores them with BM25. Stores nothing.

The document store and the tool search use it. `bm25_score` is the only scorer.
"""

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
"""About how long a passage is."""
PASSAGE_OVERLAP: Final = 150
"""Characters that a passage repeats from the one before, so that some passage has each sentence whole."""
MAX_WORD: Final = 64
_K1, _B = 1.2, 0.75
_MAX_DISTANCE: Final = 8
"""Up to how many words apart two words count as near."""

_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u1100-\u11ff\u3040-\u30ff\u31f0-\u31ff\uac00-\ud7af"  # Hangul, kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
"""Scripts with few or no spaces between words: pairs of letters serve as words."""
_WORD_RUN: Final = re.compile(rf"([{_UNSPACED}]+)|([^\W_{_UNSPACED}]+)")
_PASSAGE_ENDS: Final = (
    re.compile(r"\n\s*\n"),
    re.compile(r"\n"),
    re.compile(r"[.!?\u2026]\s|[\u3002\uff01\uff1f]"),
    re.compile(r"\s"),
)
"""Where a passage may end, the best place first."""


class Passage(msgspec.Struct, frozen=True):
    """A part of a document: its first character's position, and its text."""

    start: int
    text: str


class IndexedDocument(msgspec.Struct, frozen=True):
    """A document, ready to be searched."""

    passages: list[Passage]
    postings: dict[str, list[int]]
    """For each word, three numbers per passage that has it: the passage, the word's count, the passage's word count."""
    words: int
    """The word count of all passages."""


def index_document(title: str, text: str) -> IndexedDocument:
    """Indexes a document. Its title counts as part of every passage. Takes a while for a long document."""
    title_words = split_words(title)
    passages = [Passage(start, text[start:end]) for start, end in split_passages(text)]
    postings: dict[str, list[int]] = {}
    total = 0
    for number, passage in enumerate(passages):
        passage_words = split_words(passage.text)
        if not passage_words and number:
            continue  # Only spaces: nothing to search for.
        passage_words += title_words
        total += len(passage_words)
        for word, count in Counter(passage_words).items():
            postings.setdefault(word, []).extend((number, count, len(passage_words)))
    return IndexedDocument(passages, postings, total)


def join_passages(passages: Iterable[Passage]) -> str:
    """Returns the text that the passages were split from."""
    pieces: list[str] = []
    length = 0
    for passage in passages:
        pieces.append(passage.text[length - passage.start :])
        length = passage.start + len(passage.text)
    return "".join(pieces)


def split_words(text: str) -> list[str]:
    """Returns the words of a text in order, case-folded; for unspaced scripts, each letter and each pair of letters."""
    return list(_words(text, single_letters=True))


def query_words(text: str) -> list[str]:
    """Returns the words to search for, each once, in the order of the query."""
    return list(dict.fromkeys(_words(text, single_letters=False)))


def split_passages(text: str) -> list[tuple[int, int]]:
    """Returns the start and the end of each passage of a text. Passages overlap."""
    spans: list[tuple[int, int]] = []
    start, length = 0, len(text)
    while True:
        end = length if length - start <= PASSAGE_CHARACTERS + PASSAGE_OVERLAP else _passage_end(text, start)
        spans.append((start, end))
        if end >= length:
            return spans
        start = _word_start(text, max(end - PASSAGE_OVERLAP, start + 1), end)


def word_weight(count: int, total: int) -> float:
    """Returns the weight of a word (its inverse document frequency): `count` of `total` texts have it."""
    return math.log(1 + (total - count + 0.5) / (count + 0.5))


def bm25_score(count: int, length: int, mean_length: float, weight: float) -> float:
    """Returns how well a text of `length` words matches a word that it has `count` times."""
    return weight * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * length / mean_length))


def bm25_scores(postings: Sequence[int], weight: float, mean_length: float) -> Iterator[tuple[int, float]]:
    """Yields the numbers and the scores of the passages that have a word, from the word's postings."""
    for at in range(0, len(postings), 3):
        number, count, length = postings[at : at + 3]
        yield number, bm25_score(count, length, mean_length, weight)


def proximity_score(phrase: Sequence[str], text: str, weights: Mapping[str, float]) -> float:
    """Returns what to add to the score of a passage in which neighbours of the query are near each other."""
    if len(phrase) < 2:
        return 0.0
    positions: dict[str, list[int]] = {word: [] for word in phrase}
    for position, word in enumerate(split_words(text)):
        if word in positions:
            positions[word].append(position)
    score = 0.0
    for first, second in pairwise(phrase):
        distances = [b - a for a in positions[first] for b in positions[second] if 0 < b - a <= _MAX_DISTANCE]
        if distances:
            score += (weights[first] + weights[second]) / 2 / min(distances)
    return score


def _words(text: str, *, single_letters: bool) -> Iterator[str]:
    for run in _WORD_RUN.finditer(unicodedata.normalize("NFKC", text).casefold()):
        unspaced_letters = run[1]
        if unspaced_letters is None:
            yield _singular(run[2][:MAX_WORD])
            continue
        for index, letter in enumerate(unspaced_letters):
            if single_letters or len(unspaced_letters) == 1:
                yield letter
            if index + 1 < len(unspaced_letters):
                yield unspaced_letters[index : index + 2]


def _singular(word: str) -> str:
    """Returns `invoice` for `invoices` and `policy` for `policies`; keeps `address` and `status`."""
    if len(word) < 4 or not word.endswith("s") or not word.isascii() or word[-2] in "su0123456789":
        return word
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    return word[:-2] if word.endswith(("sses", "shes", "ches", "xes")) else word[:-1]


def _passage_end(text: str, start: int) -> int:
    """Returns the best end for the passage that begins at `start`."""
    earliest, latest = start + PASSAGE_CHARACTERS * 3 // 5, start + PASSAGE_CHARACTERS
    for pattern in _PASSAGE_ENDS:
        end = max((match.end() for match in pattern.finditer(text, earliest, latest)), default=0)
        if end:
            return end
    return latest


def _word_start(text: str, start: int, end: int) -> int:
    """Returns the first beginning of a word from `start` on; `start` itself if no space comes before `end`."""
    space = _PASSAGE_ENDS[-1].search(text, start, end)
    return space.end() if space is not None and space.end() < end else start
