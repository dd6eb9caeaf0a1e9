"""The names of the built-in tools, the named collections of them, and selections of tools by name.

Configuration, keys and agents use it. `builtin.catalog` has the tools themselves.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping

import msgspec

from toolspace.core.names import nearest

_TASK_TOOLS = """
    current_time sleep get_env set_env
    read_file write_file list_files delete_file move_file get_file_info edit_file grep_files
    http_get http_post http_request web_search
    json_parse json_stringify base64_encode base64_decode
    memory_list memory_read memory_write memory_patch memory_append
    task_list task_replay
"""
_MAIN_AGENT_TOOLS = "current_time memory_list memory_read task_list task_replay session_archive_read spawn_task reply"

TOOL_COLLECTIONS: Mapping[str, tuple[str, ...]] = {
    "allTaskTools": tuple(_TASK_TOOLS.split()),
    "mainAgentTools": tuple(_MAIN_AGENT_TOOLS.split()),
    "reflectionTools": ("memory_read", "memory_write", "memory_patch", "memory_append"),
    "sessionTools": ("session_archive_read",),
}
"""The names of the tools in each collection. A collection may be named wherever configuration lists tools."""
BUILTIN_NAMES = frozenset(name for names in TOOL_COLLECTIONS.values() for name in names)
_COLLECTION_FORM = re.compile(r"[a-z][a-z0-9]*(?:[A-Z][A-Za-z0-9]*)?Tools")


def expand_collections(names: Iterable[str]) -> tuple[str, ...]:
    """Replaces each collection by its tools. Other names and patterns stay."""
    return tuple(dict.fromkeys(tool for name in names for tool in TOOL_COLLECTIONS.get(name, (name,))))


def unknown_collection_problem(name: str, *, is_strict: bool) -> str | None:
    """Returns why a name that looks like a collection is none; None for collections and for names of tools.

    `is_strict`: every name of this form. Otherwise only the misspelt name of a collection, as a tool of the user may
    have a name of this form, too.
    """
    if name in TOOL_COLLECTIONS or name in BUILTIN_NAMES:
        return None
    is_misspelt = name.isalnum() and any(
        _is_similar(name, collection) for collection in nearest(name, TOOL_COLLECTIONS)
    )
    if not is_misspelt and not (is_strict and _COLLECTION_FORM.fullmatch(name)):
        return None
    return f'there is no collection of tools "{name}"; there are {", ".join(TOOL_COLLECTIONS)}'


def _is_similar(name: str, collection: str) -> bool:
    import difflib  # Imported here: only a mistyped name needs it.

    return difflib.SequenceMatcher(None, name.casefold(), collection.casefold()).ratio() >= 0.85


class ToolSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that a list of names, patterns and collections selects."""

    patterns: tuple[str, ...] = ()
    """Names and patterns."""
    collection_tools: frozenset[str] = frozenset()
    """The tools of all collections in the list."""

    @classmethod
    def from_names(cls, names: Iterable[str]) -> ToolSelection:
        names = tuple(names)
        return cls(
            patterns=tuple(name for name in names if name not in TOOL_COLLECTIONS),
            collection_tools=frozenset(expand_collections(name for name in names if name in TOOL_COLLECTIONS)),
        )

    def has_builtin(self, name: str) -> bool:
        """Whether a built-in tool is in the list."""
        return name in self.collection_tools or any(
            fnmatch.fnmatchcase(name, pattern.casefold()) for pattern in self.patterns
        )

    def __bool__(self) -> bool:
        return bool(self.patterns or self.collection_tools)
