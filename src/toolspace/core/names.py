"""Names of tools and agents: sanitising, joining, shortening, and finding the nearest name.

An agent's name becomes the name of the tool that calls it: `agent__researcher`.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Iterable, Mapping

MAX_NAME = 64
SEPARATOR = "__"
AGENT_NAMESPACE = "agent"
"""The namespace of the tools that call agents."""
MAX_AGENT_NAME = MAX_NAME - len(AGENT_NAMESPACE + SEPARATOR)
RESERVED_AGENT_NAMES = frozenset(("final_report", "task_status", "batch", "read_output", "find_tools"))
"""Tools in the same namespace that every agent has."""

_MAX_TYPO = 256
_MAX_COMPARED = 300
_INVALID = re.compile(r"[^A-Za-z0-9_]")
_LOCAL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_AGENT = re.compile(r"\w(?:[\w .-]*[\w.-])?")
_LETTER_OR_DIGIT = re.compile(r"[A-Za-z0-9]")


def is_local_name(name: str) -> bool:
    """Whether models and protocols accept it as the bare name of a local tool."""
    return _LOCAL.fullmatch(name) is not None


def sanitise(text: str) -> str:
    """Replaces every character outside `[A-Za-z0-9_]` by `_`. Keeps the case."""
    return _INVALID.sub("_", text)


def short_hash(text: str) -> str:
    """Returns eight characters that identify a text, on every machine."""
    import hashlib  # Imported here: few names are so long, or collide.

    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def qualify(namespace: str, tool: str) -> str:
    """Returns the full name of a provider's tool, before collisions are resolved."""
    name = f"{sanitise(namespace)}{SEPARATOR}{sanitise(tool)}"
    return name if len(name) <= MAX_NAME else _with_hash(name, f"{namespace}{SEPARATOR}{tool}")


def qualify_all(namespace: str, tools: Iterable[str]) -> Mapping[str, str]:
    """Returns original name → full name, for all tools of one provider.

    Names that collide after sanitising all get a hash, so that none depends on the order of the list. If a name equals
    the hashed name of another one, both are hashed again.
    """
    names = {original: qualify(namespace, original) for original in dict.fromkeys(tools)}
    salt = ""
    while len(set(names.values())) < len(names):
        originals_by_name: dict[str, list[str]] = {}
        for original, name in names.items():
            originals_by_name.setdefault(name, []).append(original)
        for originals in originals_by_name.values():
            if len(originals) > 1:
                for original in originals:
                    plain = f"{sanitise(namespace)}{SEPARATOR}{sanitise(original)}"
                    names[original] = _with_hash(plain, f"{namespace}{SEPARATOR}{original}{salt}")
        salt += "\0"
    return names


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Returns the candidates that a mistyped name probably means, best first."""
    if len(name) > _MAX_TYPO:
        return []  # Comparing takes time that grows with the length, and the name is untrusted.
    import difflib  # Imported here: only a mistyped name needs it.

    by_fold: dict[str, str] = {}
    for candidate in candidates:
        by_fold.setdefault(candidate.casefold(), candidate)
    folded_name = name.casefold()
    close = difflib.get_close_matches(folded_name, _likely(folded_name, by_fold), n=count, cutoff=0.6)
    if len(close) < count:
        # A part of the name is as good a hint as its spelling: `search_code` for `github__search_code`.
        close += [fold for fold in by_fold if len(folded_name) > 2 and folded_name in fold and fold not in close]
    return [by_fold[fold] for fold in close[:count]]


def _likely(name: str, candidates: Collection[str]) -> Collection[str]:
    """Returns the candidates that share most pairs of letters. Comparing ten thousand names would block the loop."""
    if len(candidates) <= _MAX_COMPARED:
        return candidates
    pairs = {name[at : at + 2] for at in range(len(name) - 1)}
    return heapq.nlargest(_MAX_COMPARED, candidates, key=lambda candidate: sum(pair in candidate for pair in pairs))


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Returns `; did you mean "a" or "b"?`, or an empty text."""
    close = [f'"{candidate}"' for candidate in nearest(name, candidates)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _with_hash(name: str, origin: str) -> str:
    """Returns head, hash and tail: the start and the end of a name tell people more than its middle."""
    max_length = MAX_NAME - 8 - 2 * len("_")
    if len(name) <= max_length:
        return f"{name}_{short_hash(origin)}"
    head = max_length // 2 + max_length % 2
    return f"{name[:head]}_{short_hash(origin)}_{name[len(name) - (max_length - head) :]}"


def agent_tool_name(name: str) -> str:
    """Returns the full name of the tool that calls an agent."""
    return f"{AGENT_NAMESPACE}{SEPARATOR}{sanitise(name)}"


def agent_name_problem(name: str) -> str | None:
    """Returns why no agent can have this name, as the end of a sentence that begins with the name; else None."""
    tool = sanitise(name)
    if len(name) > MAX_AGENT_NAME or not _AGENT.fullmatch(name) or not _LETTER_OR_DIGIT.search(tool):
        return f"cannot name an agent; use 1 to {MAX_AGENT_NAME} letters, digits, spaces, and _ - ."
    if tool.casefold() in RESERVED_AGENT_NAMES:
        return f"cannot name an agent, as every agent has a tool {agent_tool_name(tool.casefold())}; take another name"
    return None
