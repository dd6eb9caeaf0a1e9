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


def short_hash(text: str) -> str:
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


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The known names that a mistyped one probably means, best first."""
    if len(name) > _LONGEST_TYPO:
        return []  # Comparing takes time that grows with the length, and the name came from anywhere.
    import difflib  # Only a name that was mistyped pays for it.

    by_fold: dict[str, str] = {}
    for candidate in candidates:
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


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean "a" or "b"?`, or nothing."""
    close = [f'"{one}"' for one in nearest(name, candidates)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _shorten(name: str, *, origin: str) -> str:
    return name if len(name) <= MAX_NAME else _with_hash(name, origin)


def _with_hash(name: str, origin: str) -> str:
    """Head, hash, tail: what a name starts and ends with tells people more than its middle."""
    room = MAX_NAME - 8 - 2 * len("_")
    if len(name) <= room:
        return f"{name}_{short_hash(origin)}"
    head = room // 2 + room % 2
    return f"{name[:head]}_{short_hash(origin)}_{name[len(name) - (room - head) :]}"


# MERGED from agent_names: What an agent may be called: its name becomes that of a tool, `agent__researcher`.

AGENT_NAMESPACE = "agent"
"""Of the tools that call agents."""
MAX_AGENT_NAME = MAX_NAME - len(AGENT_NAMESPACE + SEPARATOR)
RESERVED_AGENT_NAMES = frozenset(("final_report", "task_status", "batch", "read_output", "find_tools"))
"""Tools of the same namespace that every agent has."""

_NAME = re.compile(r"\w(?:[\w .-]*[\w.-])?")
_PLAIN = re.compile(r"[A-Za-z0-9]")


def agent_tool_name(name: str) -> str:
    """The full name of the tool that calls an agent."""
    return f"{AGENT_NAMESPACE}{SEPARATOR}{sanitise(name)}"


def agent_name_problem(name: str) -> str | None:
    """Why no agent can be called so, to be read behind the name; None where one can."""
    tool = sanitise(name)
    if len(name) > MAX_AGENT_NAME or not _NAME.fullmatch(name) or not _PLAIN.search(tool):
        return f"cannot name an agent; use 1 to {MAX_AGENT_NAME} letters, digits, spaces, and _ - ."
    if tool.casefold() in RESERVED_AGENT_NAMES:
        return f"cannot name an agent, as every agent has a tool {agent_tool_name(tool.casefold())}; take another name"
    return None
