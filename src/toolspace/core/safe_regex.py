"""Searches with regular expressions from untrusted callers. A slow pattern ends with an error, not with the process.

The syntax is that of Python's `re`. The `regex` library searches, because it has a time limit and releases the GIL. But
it expands `(a{1000}){1000}` in memory without a limit, and recursive patterns overflow its stack. So patterns are
checked first.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol, cast

from toolspace.errors import ToolExecutionError, ToolValidationError

_MAX_LENGTH = 1000
_MAX_SIZE = 5000
_MAX_DEPTH = 40
_TIMEOUT_SECONDS = 1.0
_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
# Lookarounds, possessive repeats and anchors may match differently in a line and in the whole text.
_DEPENDS_ON_LINES = re.compile(r"\(\?(?![:P]|i\))|[*+?}]\+|\\[AZ]")
_PROPERTY = re.compile(r"\\[pP]\{[\w^ =:.-]{1,60}\}")


class MatchSpan(Protocol):
    """A match."""

    def start(self) -> int: ...
    def end(self) -> int: ...


class PatternTooSlow(ToolExecutionError):
    """The pattern takes too long on one line."""


class SafePattern:
    """A compiled pattern. A search that takes longer than a second raises `PatternTooSlow`."""

    def __init__(self, pattern: str, *, ignore_case: bool = False) -> None:
        if not pattern:
            raise ToolValidationError("pattern: it is empty")
        if len(pattern) > _MAX_LENGTH:
            raise ToolValidationError(f"pattern: it has {len(pattern)} characters; at most {_MAX_LENGTH} are allowed")
        self._display = pattern if len(pattern) <= 60 else f"{pattern[:60]}…"
        self._pattern = self._compile(pattern, ignore_case)
        self._multiline = None if _DEPENDS_ON_LINES.search(pattern) else self._compile(pattern, ignore_case, lines=True)

    def may_match(self, text: str) -> bool:
        """Whether some line of the text may match. Cheaper than searching line by line."""
        if self._multiline is None:
            return True
        try:
            return self._multiline.search(text, timeout=_TIMEOUT_SECONDS) is not None
        except (TimeoutError, MemoryError):
            # A pattern that matches line ends can be slow on a whole file; it is not tried again.
            self._multiline = None
            return True

    def search(self, text: str) -> MatchSpan | None:
        try:
            return self._pattern.search(text, timeout=_TIMEOUT_SECONDS)
        except TimeoutError:
            raise PatternTooSlow(
                f"the pattern {self._display!r} takes longer than {_TIMEOUT_SECONDS:g} s on one line; "
                "use a simpler one, without repeats inside repeats such as (a+)+"
            ) from None
        except MemoryError:
            raise PatternTooSlow(f"the pattern {self._display!r} needs too much memory; use a simpler one") from None

    def _compile(self, pattern: str, ignore_case: bool, *, lines: bool = False) -> Any:
        import regex  # Imported here: listing the built-in tools imports this module, and `regex` is slow to import.

        try:
            parts = _Scanner(pattern).scan()
            if re.compile(parts.syntax).flags & re.VERBOSE:
                raise ToolValidationError("pattern: the flag x is not supported; write the pattern without comments")
            if parts.size > _MAX_SIZE or parts.depth > _MAX_DEPTH:
                raise ToolValidationError(
                    f"pattern: {self._display!r} is too large: its repeats and groups multiply; use smaller numbers"
                )
            flags = (regex.IGNORECASE if ignore_case else 0) | (regex.MULTILINE if lines else 0)
            return cast("Any", regex.compile(parts.plain, flags, cache_pattern=False))
        except (re.error, regex.error) as error:
            syntax_error = cast("re.error", error)  # Both classes have the same attributes.
            place = "" if syntax_error.pos is None else f" at position {syntax_error.pos}"
            raise ToolValidationError(
                f"pattern: {self._display!r} is not a regular expression: {syntax_error.msg}{place}; "
                "put a \\ before characters that are meant literally"
            ) from None
        except (RecursionError, OverflowError, MemoryError):
            raise ToolValidationError(f"pattern: {self._display!r} is too complex; use a simpler one") from None


class _Parts(NamedTuple):
    syntax: str
    """The pattern with sets and properties replaced, for `re` to find errors at their positions."""
    plain: str
    """The pattern with everything escaped that is syntax only in `regex`."""
    size: int
    """How many steps it has with every repeat expanded."""
    depth: int


class _Scanner:
    """Reads a pattern once, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._syntax: list[str] = []
        self._plain: list[str] = []
        self._sizes = [0]
        self._last = 0
        self._max_depth = 0

    def scan(self) -> _Parts:
        at = 0
        while at < len(self._pattern):
            at = self._step(at)
        return _Parts("".join(self._syntax), "".join(self._plain), sum(self._sizes), self._max_depth)

    def _step(self, at: int) -> int:
        pattern, character = self._pattern, self._pattern[at]
        if character == "\\":
            if match := _PROPERTY.match(pattern, at):
                return self._add_item(_blank(match[0]), match[0], match.end())
            return self._add_item(pattern[at : at + 2], pattern[at : at + 2], at + 2)
        if character == "[":
            return self._read_set(at)
        if character == "{":
            return self._read_repeat(at)
        if character == "(":
            if pattern.startswith("(?#", at):
                end = pattern.find(")", at) + 1 or len(pattern)
                return self._add(pattern[at:end], pattern[at:end], end)
            self._sizes.append(1)
            self._max_depth = max(self._max_depth, len(self._sizes))
        elif character == ")" and len(self._sizes) > 1:
            self._last = self._sizes.pop()
            self._sizes[-1] += self._last
        else:
            return self._add_item(character, character, at + 1)
        return self._add(character, character, at + 1)

    def _read_repeat(self, at: int) -> int:
        match = _REPEAT.match(self._pattern, at)
        if match is None or match[0] in ("{}", "{,}"):
            return self._add_item("\\{", "\\{", at + 1)  # `{e<=2}` and the like would allow errors in the match.
        # `regex` expands the minimum of a repeat.
        more = self._last * max(int(match[1] or 0) - 1, 0)
        self._sizes[-1] += more
        self._last += more
        return self._add(match[0], match[0], match.end())

    def _read_set(self, at: int) -> int:
        pattern = self._pattern
        end = at + 2 if pattern.startswith("[^", at) else at + 1
        out = [pattern[at:end]]
        if pattern.startswith("]", end):
            out.append("\\]")
            end += 1
        while end < len(pattern) and pattern[end] != "]":
            character = pattern[end]
            class_end = pattern.find(":]", end) + 2 if pattern.startswith("[:", end) else 0
            if character == "\\":
                out.append(pattern[end : end + 2])
                end += 2
            elif class_end > 1:
                out.append(pattern[end:class_end])
                end = class_end
            else:
                # `[[`, `--`, `&&`, `||` and `~~` are set operations in other versions of the syntax.
                is_special = character == "[" or (character in "-&|~" and pattern[end - 1] == character)
                out.append(f"\\{character}" if is_special else character)
                end += 1
        if end >= len(pattern):
            return self._add_item(pattern[at:], pattern[at:], len(pattern))
        return self._add_item(_blank(pattern[at : end + 1]), "".join(out) + "]", end + 1)

    def _add_item(self, syntax: str, plain: str, end: int) -> int:
        self._sizes[-1] += 1
        self._last = 1
        return self._add(syntax, plain, end)

    def _add(self, syntax: str, plain: str, end: int) -> int:
        self._syntax.append(syntax)
        self._plain.append(plain)
        return end


def _blank(text: str) -> str:
    """Returns a set of the same length, so that positions stay right."""
    return f"[{'a' * (len(text) - 2)}]"
