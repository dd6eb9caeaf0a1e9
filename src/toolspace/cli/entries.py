"""One server's entry in an editor's settings: added, brought up to date, or taken out. Everything else there stays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from toolspace.cli import jsonedit, tomledit
from toolspace.cli.editors import is_toolspace
from toolspace.cli.rewriting import read_text, rewrite
from toolspace.config.document import Document, dotted, shown
from toolspace.config.parse import display_name, parse_document
from toolspace.errors import ConfigError

Outcome = Literal["added", "updated", "unchanged", "removed", "missing"]
Entry = Mapping[str, str | list[str]]


class Edit(NamedTuple):
    """What was done to a file, or would be."""

    outcome: Outcome
    before: str
    after: str


class EntryFile:
    """The place of one entry: a file, the table of servers in it, and a name in that."""

    def __init__(self, path: Path, table: str, name: str) -> None:
        self.path = path
        self.keys = (table, name)
        self.name = name
        self._outcome: Outcome = "unchanged"

    def add(self, entry: Entry, *, dry_run: bool = False) -> Edit:
        """Raises `ConfigError` where the file cannot be read, or the name is another server's."""

        def change(text: str) -> str:
            return self._added(text, entry)

        return self._edit(change, dry_run=dry_run)

    def remove(self, *, dry_run: bool = False) -> Edit:
        return self._edit(self._removed, dry_run=dry_run)

    def _edit(self, change: Callable[[str], str], *, dry_run: bool) -> Edit:
        if dry_run:
            before = read_text(self.path)
            after = change(before)
        else:
            before, after = rewrite(self.path, change)
        return Edit(self._outcome, before, after)

    def _added(self, text: str, entry: Entry) -> str:
        document, there = self._find(text)
        if there is None:
            self._outcome = "added"
            changes = {self.keys: dict(entry)}
        else:
            if not is_toolspace(there.get("command"), there.get("args")):
                place, name = document.place(self.keys), self.keys[1]
                raise ConfigError(f"{place}: another server is called {name} already; choose a name with --name")
            # Only what is not right: someone may have added variables, or permissions.
            changes = {(*self.keys, key): value for key, value in entry.items() if there.get(key) != value}
            self._outcome = "updated" if changes else "unchanged"
        expected = copy.deepcopy(document.data)
        after = text
        for keys, value in changes.items():
            _put(expected, keys, value)
            after = jsonedit.set_value(after, keys, value) if not self._is_toml else after
        if self._is_toml and changes:
            after = tomledit.set_table(text, self.keys, entry if there is None else _last(changes))
        return self._checked(after, expected)

    def _removed(self, text: str) -> str:
        document, there = self._find(text)
        self._outcome = "missing" if there is None else "removed"
        if there is None:
            return text
        if not is_toolspace(there.get("command"), there.get("args")):
            raise ConfigError(
                f"{document.place(self.keys)}: {self.keys[1]} is another server, not Toolspace; it was left"
            )
        expected = copy.deepcopy(document.data)
        del expected[self.keys[0]][self.keys[1]]
        if self._is_toml:
            after = tomledit.remove_table(text, self.keys)
            if not expected[self.keys[0]] and self.keys[0] not in self._parsed(after).data:
                del expected[self.keys[0]]  # A table of tables goes with the last of them.
        else:
            after = jsonedit.remove_value(text, self.keys)
        return self._checked(after, expected)

    @property
    def _is_toml(self) -> bool:
        return self.path.suffix == ".toml"

    def _parsed(self, text: str) -> Document:
        return parse_document(text.encode(), display_name(self.path))

    def _find(self, text: str) -> tuple[Document, dict[str, Any] | None]:
        """The document, and the entry where it is there."""
        document = self._parsed(text)
        found = document.data
        for end, key in enumerate(self.keys, 1):
            if key not in found:
                return document, None
            inner = found[key]
            if not isinstance(inner, dict):
                place, where = document.place(self.keys[:end]), dotted(self.keys[:end])
                raise ConfigError(f"{place}: {where}: expected a mapping, got {shown(inner)}; mend it first")
            found = cast("dict[str, Any]", inner)
        return document, found

    def _checked(self, after: str, expected: object) -> str:
        """The new text, if it says what was meant and nothing else is different."""
        try:
            right = self._parsed(after).data == expected
        except ConfigError:
            right = False
        if not right:
            raise ConfigError(
                f"{display_name(self.path)}: {dotted(self.keys)} is written in a way that cannot be changed safely; "
                "nothing was changed, do it by hand"
            )
        return after


def _put(data: dict[str, Any], keys: tuple[str, ...], value: object) -> None:
    for key in keys[:-1]:
        data = data.setdefault(key, {})
    data[keys[-1]] = value


def _last(changes: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    return {keys[-1]: value for keys, value in changes.items()}
