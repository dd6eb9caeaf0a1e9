"""`toolspace install CLIENT`: adds this toolspace to the MCP servers of an editor or agent, or removes it.

Everything else in the settings file of the client stays as it is. A JSON text keeps every other character: comments,
order, indentation. Of a TOML text only tables with a header of their own (`[servers.name]`) are changed. A text that
writes the table in another way is refused. `editor_files` knows the files, and replaces them.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import click
import tomlkit
from tomlkit.container import Container
from tomlkit.items import Comment, Table, Whitespace

from toolspace.cli.config_file import config_path
from toolspace.cli.editor_files import (
    CLIENTS,
    INSTALLABLE,
    ClientEnvironment,
    McpClient,
    Scope,
    config_file,
    is_toolspace,
    read_text,
    rewrite_file,
)
from toolspace.cli.options import Command, Options
from toolspace.config.file_formats import (
    ConfigDocument,
    JsonMember,
    JsonObject,
    display_name,
    format_key_path,
    format_value,
    parse_document,
    parse_json,
)
from toolspace.core.names import did_you_mean, is_local_name
from toolspace.core.secret_masking import MASK, is_secret_name, mask_secrets
from toolspace.errors import ConfigError

Outcome = Literal["added", "updated", "unchanged", "removed", "missing"]
Entry = Mapping[str, str | list[str]]
_INDENT = re.compile(r"^([ \t]+)\S", re.MULTILINE)
_REST_OF_LINE = re.compile(r"[ \t]*\r?\n")
_BLANK_LINES_AT_END = re.compile(r"(\r?\n)(?:\r?\n)+\Z")
_PAIR = re.compile(r"""(["']?)([\w.-]+)\1(\s*[:=]\s*)("(?:[^"\\]|\\.)*"|'[^']*')""")
_OUTCOME_TEXTS = {
    "added": "Added {}",
    "updated": "Updated {}",
    "unchanged": "{} is already there",
    "removed": "Removed {}",
    "missing": "{} is not there",
}


@click.command("install", cls=Command)
@click.argument("client", metavar="CLIENT")
@click.option("--scope", type=click.Choice(["project", "user"]), help="Install for this project, or for the user.")
@click.option("--name", default="toolspace", show_default=True, help="Name of the server in the client.")
@click.option("--dry-run", is_flag=True, help="Show the change, and do not make it.")
@click.option("--uninstall", "--remove", "uninstall", is_flag=True, help="Remove the server again.")
@click.pass_obj
def command(options: Options, client: str, scope: Scope | None, name: str, dry_run: bool, uninstall: bool) -> int:
    """Add this toolspace to the MCP servers of CLIENT: claude-code, claude-desktop, cursor, vscode or codex.

    Everything else in the settings file of the client stays as it is.
    """
    mcp_client = _find_client(client)
    scope = _choose_scope(mcp_client, scope)
    if not is_local_name(name):
        raise click.UsageError(f"--name {name!r}: a server name has 1 to 64 of the characters A-Z a-z 0-9 _ -")
    config = config_path(options)
    path = config_file(mcp_client, scope, ClientEnvironment.current(_project_folder(options, config)))
    entry = EditorEntry(path, mcp_client.table, name)
    if uninstall:
        edit = entry.remove(dry_run=dry_run)
    else:
        edit = entry.add(_entry_values(mcp_client, config), dry_run=dry_run)
    _report(options, mcp_client, entry, edit, dry_run=dry_run)
    return 0


def _find_client(name: str) -> McpClient:
    key = name.casefold().replace("_", "-").replace(" ", "-")
    if key not in INSTALLABLE:
        hint = did_you_mean(key, INSTALLABLE) or f"; the clients are {', '.join(INSTALLABLE)}"
        raise click.UsageError(f"there is no client {name!r}{hint}")
    return CLIENTS[key]


def _choose_scope(client: McpClient, scope: Scope | None) -> Scope:
    if scope is not None and scope not in client.scopes:
        raise click.UsageError(f"{client.key} has no {scope} scope; leave --scope out")
    return scope or client.scopes[0]


def _project_folder(options: Options, config: Path | None) -> Path:
    """Returns the folder of the configuration that was found; the current folder if one was named."""
    is_named = options.config or os.environ.get("TOOLSPACE_CONFIG")
    return Path.cwd() if config is None or is_named else config.absolute().parent


def _entry_values(client: McpClient, config: Path | None) -> dict[str, str | list[str]]:
    if config is None:
        # Built-in tools alone would work on the files of whatever folder the client starts in.
        raise ConfigError("there is no toolspace.yaml here; write one with toolspace init, or name one with --config")
    if not config.is_file():
        raise ConfigError(f"{display_name(config)}: there is no such file")
    program, *words = _program()
    entry: dict[str, str | list[str]] = {"type": "stdio"} if client.has_entry_type else {}
    return entry | {"command": program, "args": [*words, "--config", str(config.absolute()), "mcp"]}


def _program() -> list[str]:
    """Returns how to start this installation, independent of the folder and PATH of the client."""
    script = Path(sys.argv[0])
    beside_python = Path(sys.executable).parent / f"toolspace{'.exe' if os.name == 'nt' else ''}"
    for candidate in (script, beside_python):
        if candidate.stem == "toolspace" and candidate.suffix in ("", ".exe") and os.access(candidate, os.X_OK):
            return [os.path.abspath(shutil.which(candidate) or str(candidate))]
    return [sys.executable, "-m", "toolspace"]


def _report(options: Options, client: McpClient, entry: EditorEntry, edit: FileEdit, *, dry_run: bool) -> None:
    output, path, name = options.output, display_name(entry.path), entry.name
    diff = "\n".join(_diff(edit, path)) if dry_run else ""
    if options.json:
        document = {"client": client.key, "path": str(entry.path), "name": name, "outcome": edit.outcome}
        output.document({**document, "diff": diff} if dry_run else document)
        return
    if dry_run and diff:
        output.text(diff)
        output.note("Nothing was changed. Run it without --dry-run to make the change.")
        return
    output.line(f"{_OUTCOME_TEXTS[edit.outcome].format(name)}: {path}")
    if edit.outcome in ("added", "updated") and client.next_step:
        output.note(client.next_step)


def _diff(edit: FileEdit, name: str) -> Iterator[str]:
    """Yields a unified diff with secrets hidden: the lines around the change may have some."""
    lines = difflib.unified_diff(edit.before.splitlines(), edit.after.splitlines(), name, name, n=3, lineterm="")
    yield from (mask_secrets(_PAIR.sub(_hide_secret, line)) for line in lines)


def _hide_secret(match: re.Match[str]) -> str:
    return f'{match[1]}{match[2]}{match[1]}{match[3]}"{MASK}"' if is_secret_name(match[2]) else match[0]


# The entry in the settings file


class FileEdit(NamedTuple):
    """A change of a file that was made, or with `dry_run` would be."""

    outcome: Outcome
    before: str
    after: str


class EditorEntry:
    """One server entry: a settings file, its table of servers, and the name of the server."""

    def __init__(self, path: Path, table: str, name: str) -> None:
        self.path = path
        self.keys = (table, name)
        self.name = name
        self._outcome: Outcome = "unchanged"

    def add(self, entry: Entry, *, dry_run: bool = False) -> FileEdit:
        """Adds or updates the entry. Raises `ConfigError` if the file is unreadable or the name is another server's."""
        return self._edit(lambda text: self._with_entry(text, entry), dry_run=dry_run)

    def remove(self, *, dry_run: bool = False) -> FileEdit:
        """Removes the entry. Raises `ConfigError` like `add`."""
        return self._edit(self._without_entry, dry_run=dry_run)

    def _edit(self, change: Callable[[str], str], *, dry_run: bool) -> FileEdit:
        if dry_run:
            before = read_text(self.path)
            after = change(before)
        else:
            before, after = rewrite_file(self.path, change)
        return FileEdit(self._outcome, before, after)

    def _with_entry(self, text: str, entry: Entry) -> str:
        document, current = self._find(text)
        if current is None:
            self._outcome, values = "added", entry
        else:
            if not is_toolspace(current.get("command"), current.get("args")):
                place = document.format_location(self.keys)
                raise ConfigError(f"{place}: another server is called {self.name} already; choose a name with --name")
            # Only what differs: the user may have added variables or permissions to the entry.
            values = {key: value for key, value in entry.items() if current.get(key) != value}
            self._outcome = "updated" if values else "unchanged"
        table, name = self.keys
        expected = copy.deepcopy(document.data)
        expected.setdefault(table, {}).setdefault(name, {}).update(values)
        after = text
        if self._is_toml:
            after = set_table(text, self.keys, values) if values else text
        elif current is None:
            after = set_value(text, self.keys, dict(entry))
        else:
            for key, value in values.items():
                after = set_value(after, (*self.keys, key), value)
        return self._check_result(after, expected)

    def _without_entry(self, text: str) -> str:
        document, current = self._find(text)
        self._outcome = "missing" if current is None else "removed"
        if current is None:
            return text
        if not is_toolspace(current.get("command"), current.get("args")):
            raise ConfigError(
                f"{document.format_location(self.keys)}: {self.name} is another server, not Toolspace; not removed"
            )
        table, name = self.keys
        expected = copy.deepcopy(document.data)
        del expected[table][name]
        if self._is_toml:
            after = remove_table(text, self.keys)
            if not expected[table] and table not in self._parse(after).data:
                del expected[table]  # In TOML the outer table disappears with its last inner table.
        else:
            after = remove_value(text, self.keys)
        return self._check_result(after, expected)

    @property
    def _is_toml(self) -> bool:
        return self.path.suffix == ".toml"

    def _parse(self, text: str) -> ConfigDocument:
        return parse_document(text.encode(), display_name(self.path))

    def _find(self, text: str) -> tuple[ConfigDocument, dict[str, Any] | None]:
        """Returns the parsed file, and the entry or None."""
        document = self._parse(text)
        mapping = document.data
        for depth, key in enumerate(self.keys, 1):
            if key not in mapping:
                return document, None
            inner = mapping[key]
            if not isinstance(inner, dict):
                keys = self.keys[:depth]
                place = f"{document.format_location(keys)}: {format_key_path(keys)}"
                raise ConfigError(f"{place}: expected a mapping, got {format_value(inner)}; fix it first")
            mapping = cast("dict[str, Any]", inner)
        return document, mapping

    def _check_result(self, after: str, expected: object) -> str:
        """Returns the new text. Raises `ConfigError` if it does not have the expected data, and nothing else."""
        with suppress(ConfigError):
            if self._parse(after).data == expected:
                return after
        raise ConfigError(
            f"{display_name(self.path)}: {format_key_path(self.keys)} is written in a way that cannot be changed "
            "safely; nothing was changed, edit it by hand"
        )


# JSON


def set_value(text: str, path: tuple[str, ...], value: Any) -> str:
    """Returns the text with a value at a key path. Missing objects on the path are created.

    Raises `TextSyntaxError` if the text is not JSON, and `TypeError` if a value on the path is not an object.
    """
    bom, text = _split_bom(text)
    if parse_json(text).data is None:  # The text is empty, or has only comments.
        text = (text.rstrip() + "\n" if text.strip() else "") + "{}\n"
    objects = parse_json(text).objects
    for depth, key in enumerate(path):
        parent = objects.get(path[:depth])
        if parent is None:
            raise TypeError(f"{'.'.join(path[:depth])} is not an object")
        member = parent.find(key)
        rest = path[depth + 1 :]
        if member is None:
            for inner in reversed(rest):
                value = {inner: value}
            text = _add(text, parent, key, value)
            break
        if not rest:
            value_text = _format(text, value, _indentation(text, member.start), inline=not _is_multiline(text, parent))
            text = text[: member.value] + value_text + text[member.end :]
    return bom + text


def remove_value(text: str, path: tuple[str, ...]) -> str:
    """Returns the text without the value at a key path; unchanged if there is none."""
    bom, text = _split_bom(text)
    parent = parse_json(text).objects.get(path[:-1])
    member = parent.find(path[-1]) if parent is not None else None
    return bom + (text if parent is None or member is None else _remove(text, parent, member))


def _split_bom(text: str) -> tuple[str, str]:
    return ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)


def _add(text: str, parent: JsonObject, key: str, value: Any) -> str:
    inline = "\n" not in text.strip() if not parent.members else not _is_multiline(text, parent)
    inline = inline and text.strip() != "{}"
    newline = "\r\n" if "\r\n" in text else "\n"
    outer = _indentation(text, parent.start)
    margin = (
        _indentation(text, parent.members[0].start) if parent.members and not inline else outer + _indent_unit(text)
    )
    member = f"{json.dumps(key, ensure_ascii=False)}: {_format(text, value, margin, inline=inline)}"
    if not parent.members:
        # An empty object has only spaces and comments; they stay in front of the new member.
        content = text[parent.start + 1 : parent.end].rstrip()
        body = member if inline and not content else f"{content}{newline}{margin}{member}{newline}{outer}"
        return text[: parent.start + 1] + body + text[parent.end :]
    last = parent.members[-1]
    after = last.end if last.comma is None else last.comma + 1
    tail = text[after : parent.end].rstrip()
    glue = " " if inline and "//" not in tail else f"{newline}{margin}"
    close = text[after + len(tail) : parent.end]
    if "//" in tail and "\n" not in close:
        close = newline + outer
    comma = "," if last.comma is not None and not inline else ""  # Keep the style of trailing commas.
    separator = "" if last.comma is not None else ","
    return text[:after] + separator + tail + glue + member + comma + close + text[parent.end :]


def _remove(text: str, parent: JsonObject, member: JsonMember) -> str:
    start, end = member.start, member.end if member.comma is None else member.comma + 1
    line_start = text.rfind("\n", 0, start) + 1
    if not text[line_start:start].strip():
        start = line_start
        # Remove its whole lines, but keep what follows on its last line.
        rest = _REST_OF_LINE.match(text, end)
        end = rest.end() if rest is not None else end
    elif member.comma is not None:
        end += len(text[end:]) - len(text[end:].lstrip(" \t"))
    index = parent.members.index(member)
    if member.comma is None and index > 0:
        # The last member is removed, so the comma of the member before it goes too.
        comma = parent.members[index - 1].comma
        assert comma is not None
        return text[:comma] + text[comma + 1 : start].rstrip(" \t") + text[end:]
    return text[:start] + text[end:]


def _format(text: str, value: Any, margin: str, *, inline: bool) -> str:
    if inline:
        return json.dumps(value, ensure_ascii=False)
    newline = "\r\n" if "\r\n" in text else "\n"
    return newline.join(_format_lines(value, margin, _indent_unit(text)))


def _format_lines(value: Any, margin: str, unit: str) -> Iterator[str]:
    """Yields the lines of indented JSON, with lists on one line."""
    if not isinstance(value, dict) or not value:
        yield json.dumps(value, ensure_ascii=False)
        return
    lines = ["{"]
    items = list(cast("dict[str, Any]", value).items())
    for index, (key, inner) in enumerate(items):
        head, *rest = _format_lines(inner, margin + unit, unit)
        member_lines = [f"{margin}{unit}{json.dumps(key, ensure_ascii=False)}: {head}", *rest]
        member_lines[-1] += "," if index < len(items) - 1 else ""
        lines += member_lines
    yield from (*lines, margin + "}")


def _indentation(text: str, position: int) -> str:
    """Returns the indentation of the line of a position."""
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _indent_unit(text: str) -> str:
    """Returns one level of indentation of this text."""
    match = _INDENT.search(text)
    return match[1] if match is not None else "  "


def _is_multiline(text: str, parent: JsonObject) -> bool:
    """Whether the members are on lines of their own."""
    return bool(parent.members) and "\n" in text[parent.start : parent.members[0].start]


# TOML


def set_table(text: str, path: tuple[str, str], values: Mapping[str, str | list[str]]) -> str:
    """Returns the text with these values in a table. A missing table is added at the end; its other keys stay."""
    newline = "\r\n" if "\r\n" in text else "\n"
    document = tomlkit.parse(text)
    tables = [table for table, _, _ in _find_tables(document, path)]
    if not tables:
        outer, name = path
        section = tomlkit.dumps({outer: {name: dict(values)}}).replace("\n", newline)
        before = text if not text or text.endswith("\n") else text + newline
        return before + (newline if before.strip() else "") + section
    for key, value in values.items():
        tables[0][key] = item = tomlkit.item(value)
        item.trivia.trail = newline
    return tomlkit.dumps(document)


def remove_table(text: str, path: tuple[str, str]) -> str:
    """Returns the text without a table and the tables inside it."""
    document = tomlkit.parse(text)
    tables = list(_find_tables(document, path))
    for table, container, index in tables:
        container.body[index] = (None, Whitespace(_trailing_comments(table)))
    after = tomlkit.dumps(document)
    return _BLANK_LINES_AT_END.sub(r"\1", after) if tables else after


def _find_tables(document: Container, path: tuple[str, str]) -> Iterator[tuple[Table, Container, int]]:
    """Yields each part of a table, with its container and index: a table can be written in several places."""
    outer, name = path
    for key, section in document.body:
        if key is not None and key.key == outer and isinstance(section, Table):
            for index, (inner_key, item) in enumerate(section.value.body):
                if inner_key is not None and inner_key.key == name and isinstance(item, Table):
                    yield item, section.value, index


def _trailing_comments(table: Table) -> str:
    """Returns the blank lines and comments at the end of a table, or of the last table inside it."""
    comments: list[str] = []
    for key, item in reversed(table.value.body):
        if isinstance(item, Table):
            comments.append(_trailing_comments(item))
            break
        if key is not None or not isinstance(item, Comment | Whitespace):
            break
        comments.append(item.as_string())
    return "".join(reversed(comments))
