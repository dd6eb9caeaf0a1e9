"""One server's entry in an editor's settings: added, brought up to date, or taken out. Everything else there stays."""

from __future__ import annotations

import copy
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from toolspace.cli import json_edit, tomledit
from toolspace.cli.editors import is_toolspace
from toolspace.config.document import ConfigDocument, format_key_path, format_value
from toolspace.config.parsing import display_name, parse_document
from toolspace.errors import ConfigError

# MERGED from rewriting: Replaces a settings file of another program as a whole, or not at all. Knows nothing of wh…

MAX_BYTES = 50_000_000
"""Some clients keep their whole history beside their servers."""
_ATTEMPTS = 5


def read_text(path: Path) -> str:
    """The text of a settings file; empty where there is none. Raises `ConfigError`."""
    return _read(_target(path), display_name(path))[0]


def rewrite_file(path: Path, change: Callable[[str], str]) -> tuple[str, str]:
    """Replaces the text of a file by what `change` makes of it; gives the text before and after.

    Its mode stays, and a link to it stays a link. The new text is on the disk before it takes the old one's place.
    """
    name = display_name(path)
    target = _target(path)
    for _ in range(_ATTEMPTS):
        text, before = _read(target, name)
        changed = change(text)
        if changed == text:
            return text, changed
        if _replace(target, name, changed.encode(), before):
            return text, changed
    raise ConfigError(f"{name}: changes all the time; close the program that writes it, and try again")


def _target(path: Path) -> Path:
    """The file itself, where the path is a link: the dotfiles of many people are."""
    name = display_name(path)
    try:
        link = path.lstat()
    except FileNotFoundError:
        return path
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if not stat.S_ISLNK(link.st_mode):
        return path
    try:
        target = path.resolve(strict=True)
        owner = target.stat().st_uid
    except (OSError, RuntimeError):
        where = f"is a link to {os.readlink(path)}, which is not there"
        raise ConfigError(f"{name}: {where}; make that file, or remove the link") from None
    if hasattr(os, "geteuid") and link.st_uid not in (os.geteuid(), owner):
        raise ConfigError(f"{name}: is a link that another user made, to a file that is not theirs; remove it")
    return target


def _read(target: Path, name: str) -> tuple[str, os.stat_result | None]:
    try:
        # Not blocking: a pipe would keep us waiting.
        file = os.open(target, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return "", None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    with os.fdopen(file, "rb") as stream:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{name}: is no regular file")
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES:,} bytes; add the server by hand")
    try:
        return content.decode(), status
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text ({error.reason}); nothing was changed") from None


def _replace(target: Path, name: str, content: bytes, before: os.stat_result | None) -> bool:
    """Whether it could be replaced: not where another program has written it since it was read."""
    if before is not None and hasattr(os, "geteuid") and before.st_uid != os.geteuid() != 0:
        raise ConfigError(f"{name}: belongs to another user; nothing was changed")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file, made = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(content)
                stream.flush()
                _keep_owner_and_mode(file, before)
                os.fsync(file)
            if not _unchanged(target, before):
                os.unlink(made)
                return False
            os.replace(made, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(made)
            raise
    except OSError as error:
        raise ConfigError(f"{name}: cannot be written: {error.strerror or error}; nothing was changed") from None
    return True


def _keep_owner_and_mode(file: int, before: os.stat_result | None) -> None:
    if not hasattr(os, "fchmod"):
        return
    if before is None:
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(file, 0o666 & ~mask)  # As any new file of the user's.
        return
    if os.geteuid() == 0:
        os.fchown(file, before.st_uid, before.st_gid)
    os.fchmod(file, stat.S_IMODE(before.st_mode))


def _unchanged(target: Path, before: os.stat_result | None) -> bool:
    try:
        now = target.stat()
    except FileNotFoundError:
        return before is None
    return before is not None and (now.st_ino, now.st_mtime_ns, now.st_size) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_size,
    )


Outcome = Literal["added", "updated", "unchanged", "removed", "missing"]
Entry = Mapping[str, str | list[str]]


class FileEdit(NamedTuple):
    """What was done to a file, or would be."""

    outcome: Outcome
    before: str
    after: str


class EditorEntry:
    """The place of one entry: a file, the table of servers in it, and a name in that."""

    def __init__(self, path: Path, table: str, name: str) -> None:
        self.path = path
        self.keys = (table, name)
        self.name = name
        self._outcome: Outcome = "unchanged"

    def add(self, entry: Entry, *, dry_run: bool = False) -> FileEdit:
        """Raises `ConfigError` where the file cannot be read, or the name is another server's."""

        def change(text: str) -> str:
            return self._added(text, entry)

        return self._edit(change, dry_run=dry_run)

    def remove(self, *, dry_run: bool = False) -> FileEdit:
        return self._edit(self._removed, dry_run=dry_run)

    def _edit(self, change: Callable[[str], str], *, dry_run: bool) -> FileEdit:
        if dry_run:
            before = read_text(self.path)
            after = change(before)
        else:
            before, after = rewrite_file(self.path, change)
        return FileEdit(self._outcome, before, after)

    def _added(self, text: str, entry: Entry) -> str:
        document, there = self._find(text)
        if there is None:
            self._outcome = "added"
            changes = {self.keys: dict(entry)}
        else:
            if not is_toolspace(there.get("command"), there.get("args")):
                place, name = document.format_location(self.keys), self.keys[1]
                raise ConfigError(f"{place}: another server is called {name} already; choose a name with --name")
            # Only what is not right: someone may have added variables, or permissions.
            changes = {(*self.keys, key): value for key, value in entry.items() if there.get(key) != value}
            self._outcome = "updated" if changes else "unchanged"
        expected = copy.deepcopy(document.data)
        after = text
        for keys, value in changes.items():
            _put(expected, keys, value)
            after = json_edit.set_value(after, keys, value) if not self._is_toml else after
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
                f"{document.format_location(self.keys)}: {self.keys[1]} is another server, not Toolspace; it was left"
            )
        expected = copy.deepcopy(document.data)
        del expected[self.keys[0]][self.keys[1]]
        if self._is_toml:
            after = tomledit.remove_table(text, self.keys)
            if not expected[self.keys[0]] and self.keys[0] not in self._parsed(after).data:
                del expected[self.keys[0]]  # A table of tables goes with the last of them.
        else:
            after = json_edit.remove_value(text, self.keys)
        return self._checked(after, expected)

    @property
    def _is_toml(self) -> bool:
        return self.path.suffix == ".toml"

    def _parsed(self, text: str) -> ConfigDocument:
        return parse_document(text.encode(), display_name(self.path))

    def _find(self, text: str) -> tuple[ConfigDocument, dict[str, Any] | None]:
        """The document, and the entry where it is there."""
        document = self._parsed(text)
        found = document.data
        for end, key in enumerate(self.keys, 1):
            if key not in found:
                return document, None
            inner = found[key]
            if not isinstance(inner, dict):
                place, where = document.format_location(self.keys[:end]), format_key_path(self.keys[:end])
                raise ConfigError(f"{place}: {where}: expected a mapping, got {format_value(inner)}; mend it first")
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
                f"{display_name(self.path)}: {format_key_path(self.keys)} cannot be changed safely; "
                "nothing was changed, do it by hand"
            )
        return after


def _put(data: dict[str, Any], keys: tuple[str, ...], value: object) -> None:
    for key in keys[:-1]:
        data = data.setdefault(key, {})
    data[keys[-1]] = value


def _last(changes: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    return {keys[-1]: value for keys, value in changes.items()}
