"""How tools are named: sanitising, joining, shortening, and finding the nearest name."""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Iterable, Mapping

MAX_NAME = 64
SEPARATOR = "__"

_LONGEST_TYPO = 256
_COMPARED = 300
_INVALID = re.compile(r"[^A-Za-z0-9_]")
_LOCAL = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_local_name(name: str) -> bool:
    """Whether models and protocols accept it as the bare name of a local tool."""
    return _LOCAL.fullmatch(name) is not None


def sanitise(text: str) -> str:
    """Every character outside `[A-Za-z0-9_]` becomes `_`; case is kept."""
    return _INVALID.sub("_", text)


def digest(text: str) -> str:
    """Eight characters that stand for the whole text, the same everywhere and always."""
    import hashlib  # Few names are so long, or collide.

    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def qualify(namespace: str, tool: str) -> str:
    """The full name of a provider's tool, before collisions are looked at."""
    return _shorten(f"{sanitise(namespace)}{SEPARATOR}{sanitise(tool)}", origin=f"{namespace}{SEPARATOR}{tool}")


def qualify_all(namespace: str, tools: Iterable[str]) -> Mapping[str, str]:
    """Original name → full name, for all tools of one provider.

    Names that collide after sanitising all get the hash, so none of them depends on the order of the list. Where
    one is made to look like the hashed name of another, both are hashed again.
    """
    names = {original: qualify(namespace, original) for original in dict.fromkeys(tools)}
    again = ""
    while len(set(names.values())) < len(names):
        owners: dict[str, list[str]] = {}
        for original, name in names.items():
            owners.setdefault(name, []).append(original)
        for sharing in owners.values():
            if len(sharing) > 1:
                for original in sharing:
                    plain = f"{sanitise(namespace)}{SEPARATOR}{sanitise(original)}"
                    names[original] = _with_hash(plain, f"{namespace}{SEPARATOR}{original}{again}")
        again += "\0"
    return names


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that a mistyped one probably means, best first."""
    if len(name) > _LONGEST_TYPO:
        return []  # Comparing takes time that grows with the length, and the name came from anywhere.
    import difflib  # Only a name that was mistyped pays for it.

    by_fold: dict[str, str] = {}
    for candidate in known:
        by_fold.setdefault(candidate.casefold(), candidate)
    wanted = name.casefold()
    close = difflib.get_close_matches(wanted, _likely(wanted, by_fold), n=count, cutoff=0.6)
    if len(close) < count:
        # A part of the name is as good a hint as its spelling: `search_code` for `github__search_code`.
        close += [fold for fold in by_fold if len(wanted) > 2 and wanted in fold and fold not in close]
    return [by_fold[fold] for fold in close[:count]]


def _likely(wanted: str, known: Collection[str]) -> Collection[str]:
    """Those that share most pairs of letters: comparing all of ten thousand names would hold everyone else up."""
    if len(known) <= _COMPARED:
        return known
    pairs = {wanted[at : at + 2] for at in range(len(wanted) - 1)}
    return heapq.nlargest(_COMPARED, known, key=lambda one: sum(pair in one for pair in pairs))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean "a" or "b"?`, or nothing."""
    close = [f'"{one}"' for one in nearest(name, known)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _shorten(name: str, *, origin: str) -> str:
    return name if len(name) <= MAX_NAME else _with_hash(name, origin)


def _with_hash(name: str, origin: str) -> str:
    """Head, hash, tail: what a name starts and ends with tells people more than its middle."""
    room = MAX_NAME - 8 - 2 * len("_")
    if len(name) <= room:
        return f"{name}_{digest(origin)}"
    head = room // 2 + room % 2
    return f"{name[:head]}_{digest(origin)}_{name[len(name) - (room - head) :]}"
