"""Searches with regular expressions that a stranger wrote. A slow one ends with an error, not with the process.

The syntax is that of Python's `re`. The work is done by the `regex` library, because it can stop at a time limit and
lets other threads run meanwhile. Left alone it goes further than that: it writes `(a{1000}){1000}` out in memory until
there is none left, and recursive patterns overrun its stack. So what it gets is checked first.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol, cast

from toolspace.errors import ToolExecutionError, ToolValidationError

_LONGEST = 1000
_LARGEST = 5000
_DEEPEST = 40
_SECONDS = 1.0
_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
# What looks around a match, or holds on to what it took, may differ between a line and the text around it.
_SEES_LINES = re.compile(r"\(\?(?![:P]|i\))|[*+?}]\+|\\[AZ]")
_PROPERTY = re.compile(r"\\[pP]\{[\w^ =:.-]{1,60}\}")


class MatchSpan(Protocol):
    """What a search finds."""

    def start(self) -> int: ...
    def end(self) -> int: ...


class PatternTooSlow(ToolExecutionError):
    """The pattern needs too long for one line."""


class SafePattern:
    """A compiled pattern that gives up on a text after a second."""

    def __init__(self, pattern: str, *, ignore_case: bool = False) -> None:
        if not pattern:
            raise ToolValidationError("pattern: it is empty")
        if len(pattern) > _LONGEST:
            raise ToolValidationError(f"pattern: it has {len(pattern)} characters; at most {_LONGEST} are allowed")
        self._shown = pattern if len(pattern) <= 60 else f"{pattern[:60]}…"
        self._compiled = self._compile(pattern, ignore_case)
        self._whole = None if _SEES_LINES.search(pattern) else self._compile(pattern, ignore_case, lines=True)

    def may_match(self, text: str) -> bool:
        """Whether some line of the text may match. Cheap, where searching line by line is not."""
        if self._whole is None:
            return True
        try:
            return self._whole.search(text, timeout=_SECONDS) is not None
        except (TimeoutError, MemoryError):
            self._whole = None  # What runs over line ends can be slow on a whole file; it is not tried again.
            return True

    def search(self, text: str) -> MatchSpan | None:
        try:
            return self._compiled.search(text, timeout=_SECONDS)
        except TimeoutError:
            raise PatternTooSlow(
                f"the pattern {self._shown!r} takes longer than {_SECONDS:g} s on one line; "
                "use a simpler one, without repeats inside repeats such as (a+)+"
            ) from None
        except MemoryError:
            raise PatternTooSlow(f"the pattern {self._shown!r} needs too much memory; use a simpler one") from None

    def _compile(self, pattern: str, ignore_case: bool, *, lines: bool = False) -> Any:
        import regex  # Here: this module is imported to list the tools, and regex takes longer than all of them.

        try:
            parts = _Scan(pattern).result()
            if re.compile(parts.syntax).flags & re.VERBOSE:
                raise ToolValidationError("pattern: the flag x is not supported; write the pattern without comments")
            if parts.size > _LARGEST or parts.depth > _DEEPEST:
                raise ToolValidationError(
                    f"pattern: {self._shown!r} is too large: its repeats and groups multiply; use smaller numbers"
                )
            flags = (regex.IGNORECASE if ignore_case else 0) | (regex.MULTILINE if lines else 0)
            return cast("Any", regex.compile(parts.plain, flags, cache_pattern=False))
        except (re.error, regex.error) as error:
            fault = cast("re.error", error)  # Both have the same shape.
            where = "" if fault.pos is None else f" at position {fault.pos}"
            raise ToolValidationError(
                f"pattern: {self._shown!r} is not a regular expression: {fault.msg}{where}; "
                "put a \\ before characters that are meant literally"
            ) from None
        except (RecursionError, OverflowError, MemoryError):
            raise ToolValidationError(f"pattern: {self._shown!r} is too complex; use a simpler one") from None


class _Parts(NamedTuple):
    syntax: str
    """The pattern with sets and properties blotted out, in which Python's `re` finds every fault at its place."""
    plain: str
    """The pattern with everything escaped that only `regex` takes for syntax."""
    size: int
    """How many steps it has with every repeat written out."""
    depth: int


class _Scan:
    """Reads a pattern once, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._syntax: list[str] = []
        self._plain: list[str] = []
        self._sizes = [0]
        self._last = 0
        self._deepest = 0

    def result(self) -> _Parts:
        at = 0
        while at < len(self._pattern):
            at = self._step(at)
        return _Parts("".join(self._syntax), "".join(self._plain), sum(self._sizes), self._deepest)

    def _step(self, at: int) -> int:
        pattern, here = self._pattern, self._pattern[at]
        if here == "\\":
            if found := _PROPERTY.match(pattern, at):
                return self._item(_blot(found[0]), found[0], found.end())
            return self._item(pattern[at : at + 2], pattern[at : at + 2], at + 2)
        if here == "[":
            return self._set(at)
        if here == "{":
            return self._repeat(at)
        if here == "(":
            if pattern.startswith("(?#", at):
                end = pattern.find(")", at) + 1 or len(pattern)
                return self._take(pattern[at:end], pattern[at:end], end)
            self._sizes.append(1)
            self._deepest = max(self._deepest, len(self._sizes))
        elif here == ")" and len(self._sizes) > 1:
            self._last = self._sizes.pop()
            self._sizes[-1] += self._last
        else:
            return self._item(here, here, at + 1)
        return self._take(here, here, at + 1)

    def _repeat(self, at: int) -> int:
        found = _REPEAT.match(self._pattern, at)
        if found is None or found[0] in ("{}", "{,}"):
            return self._item("\\{", "\\{", at + 1)  # `{e<=2}` and the like would allow errors in the match.
        # Only the smallest number of a repeat is written out.
        more = self._last * max(int(found[1] or 0) - 1, 0)
        self._sizes[-1] += more
        self._last += more
        return self._take(found[0], found[0], found.end())

    def _set(self, at: int) -> int:
        pattern = self._pattern
        end = at + 2 if pattern.startswith("[^", at) else at + 1
        out = [pattern[at:end]]
        if pattern.startswith("]", end):
            out.append("\\]")
            end += 1
        while end < len(pattern) and pattern[end] != "]":
            here = pattern[end]
            named = pattern.find(":]", end) + 2 if pattern.startswith("[:", end) else 0
            if here == "\\":
                out.append(pattern[end : end + 2])
                end += 2
            elif named > 1:
                out.append(pattern[end:named])
                end = named
            else:
                # `[[`, `--`, `&&`, `||` and `~~` stand for sets of sets in other versions of the syntax.
                special = here == "[" or (here in "-&|~" and pattern[end - 1] == here)
                out.append(f"\\{here}" if special else here)
                end += 1
        if end >= len(pattern):
            return self._item(pattern[at:], pattern[at:], len(pattern))
        return self._item(_blot(pattern[at : end + 1]), "".join(out) + "]", end + 1)

    def _item(self, syntax: str, plain: str, end: int) -> int:
        self._sizes[-1] += 1
        self._last = 1
        return self._take(syntax, plain, end)

    def _take(self, syntax: str, plain: str, end: int) -> int:
        self._syntax.append(syntax)
        self._plain.append(plain)
        return end


def _blot(text: str) -> str:
    """A set of the same length, so that positions stay right."""
    return f"[{'a' * (len(text) - 2)}]"
