"""Finds the MCP servers that editors have, in the shape of our configuration. Writes nothing, and copies no secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from toolspace.cli.concealing import Concealer
from toolspace.cli.editors import CLIENTS, Client, Surroundings, config_file, is_toolspace
from toolspace.cli.rewriting import read_text
from toolspace.config.parse import parse_document
from toolspace.config.shapes import TRANSPORT_ALIASES
from toolspace.core.names import sanitise
from toolspace.errors import ConfigError

_TYPES = {"stdio", "http", "sse", "websocket", *TRANSPORT_ALIASES}
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(:-[^{}$]*)?")
_OPENING = re.compile(r"(?<!\$)\$\{")
_INPUT = re.compile(r"input:(.+)")
_FOLDERS = ("workspaceFolder", "userHome")
"""What an editor fills in, and our configuration too."""
_LONGEST_NAME = 200


class Found(NamedTuple):
    """One server of an editor, as it will stand in our configuration."""

    name: str
    entry: Mapping[str, Any]
    client: Client
    path: Path
    secrets: Mapping[str, str]
    """Variable → what it stands for, where a value was not copied."""
    unset: tuple[str, ...]
    """The variables that it needs and that are not set now."""


class LeftOut(NamedTuple):
    name: str
    client: Client
    path: Path
    why: str


class Import(NamedTuple):
    found: list[Found]
    left_out: list[LeftOut]


def import_servers(around: Surroundings, keys: Iterable[str] = CLIENTS) -> Import:
    """The servers of these clients, those of the project first. Of two with one name the first is taken."""
    result = Import([], [])
    concealer = Concealer(around.environ)
    taken: dict[str, Found] = {}
    for client, path, tables in _files([CLIENTS[key] for key in keys], around):
        try:
            servers = _servers(path, tables, around)
        except ConfigError as error:
            result.left_out.append(LeftOut("", client, path, str(error)))
            continue
        for name, raw in servers:
            found = _read(name, raw, client, path, concealer)
            if isinstance(found, str):
                result.left_out.append(LeftOut(name, client, path, found))
                continue
            first = taken.setdefault(sanitise(name).casefold(), found)
            if first is found:
                result.found.append(found)
            elif first.entry != found.entry:
                why = f"another server has that name, from {first.client.title}"
                result.left_out.append(LeftOut(name, client, path, why))
    return result


def _files(clients: Iterable[Client], around: Surroundings) -> Iterator[tuple[Client, Path, list[tuple[str, ...]]]]:
    """The files to look into, and where in each the servers stand."""
    chosen = list(clients)
    for scope in ("project", "user"):
        for client in chosen:
            if scope not in client.scopes:
                continue
            tables: list[tuple[str, ...]] = [(client.table,)]
            if client.key == "claude-code" and scope == "user":
                # It keeps the servers that are a user's own in one project beside those of all projects.
                tables.insert(0, ("projects", str(around.folder), client.table))
            yield client, config_file(client, scope, around), tables


def _servers(path: Path, tables: list[tuple[str, ...]], around: Surroundings) -> list[tuple[str, object]]:
    text = read_text(path)
    if not text.strip():
        return []
    data = parse_document(text.encode(), _shown(path, around.home)).data
    found: list[tuple[str, object]] = []
    for keys in tables:
        table: object = data
        for key in keys:
            table = cast("dict[str, object]", table).get(key) if isinstance(table, dict) else None
        if isinstance(table, dict):
            found += cast("dict[str, object]", table).items()
    return found


def _shown(path: Path, home: Path) -> str:
    try:
        return f"~/{path.relative_to(home)}"
    except ValueError:
        return str(path)


def _read(name: str, raw: object, client: Client, path: Path, concealer: Concealer) -> Found | str:
    """The server, or why it is left out."""
    if not isinstance(raw, dict):
        return "it is no mapping"
    entry = _known(_codex(cast("dict[str, Any]", raw)) if client.key == "codex" else _zed(cast("dict[str, Any]", raw)))
    if is_toolspace(entry.get("command"), entry.get("args")):
        return "it is Toolspace itself"
    if "command" not in entry and "url" not in entry:
        return "it has neither a command nor a url"
    if not name or len(name) > _LONGEST_NAME or not sanitise(name).strip("_"):
        return "its name cannot name a namespace"
    if not _is_path(entry.get("cwd", ".")):
        return "its cwd is no path"
    needed: set[str] = set()
    entry = _translated(entry, client, needed)
    entry, secrets = concealer.conceal(name, entry)
    unset = tuple(sorted(one for one in {*needed, *secrets} if one not in concealer.environ))
    return Found(name, entry, client, path, secrets, unset)


def _known(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that mean something here, with values that they can have."""
    entry: dict[str, Any] = {}
    url = next((raw[key] for key in ("url", "serverUrl", "httpUrl") if raw.get(key)), None)
    kind = raw.get("type", raw.get("transport"))
    if isinstance(kind, str) and kind in _TYPES and TRANSPORT_ALIASES.get(kind, kind) not in ("stdio", "http"):
        entry["type"] = TRANSPORT_ALIASES.get(kind, kind)  # The others are plain from what follows.
    if isinstance(command := raw.get("command"), str) and command.strip():
        entry["command"] = command
        entry |= {"args": args} if (args := _texts(raw.get("args"))) else {}
        entry |= {"env": env} if (env := _pairs(raw.get("env"))) else {}
        entry |= {"cwd": cwd} if isinstance(cwd := raw.get("cwd"), str) and cwd.strip() else {}
        entry.pop("type", None)
    elif isinstance(url, str) and url.strip():
        entry["url"] = url
        entry |= {"headers": headers} if (headers := _pairs(raw.get("headers"))) else {}
    for theirs, ours in (("disabledTools", "toolsDenied"), ("toolsDenied", "toolsDenied"), ("toolsAllowed",) * 2):
        entry |= {ours: names} if (names := _texts(raw.get(theirs))) else {}
    if raw.get("disabled") is True or raw.get("enabled") is False:
        entry["enabled"] = False
    return entry


def _is_path(text: str) -> bool:
    """Whether a configuration takes it: of a user that exists where it says `~user`."""
    try:
        return "\0" not in text and bool(Path(text).expanduser())
    except RuntimeError:
        return False


def _texts(value: object) -> list[str]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [str(item) for item in items if isinstance(item, str | int | float)]


def _pairs(value: object) -> dict[str, str]:
    items = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    return {key: _word(inner) for key, inner in items.items() if key and isinstance(inner, str | int | float)}


def _word(value: object) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _zed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Zed once kept the whole command line under `command`."""
    command = raw.get("command")
    if not isinstance(command, dict):
        return dict(raw)
    inner = cast("dict[str, Any]", command)
    return {**raw, **inner, "command": inner.get("path")}


def _codex(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Codex names variables where others refer to them."""
    entry = {**raw, "toolsAllowed": raw.get("enabled_tools"), "toolsDenied": raw.get("disabled_tools")}
    env = {name: f"${{env:{name}}}" for name in _texts(raw.get("env_vars"))}
    headers = {key: f"${{env:{name}}}" for key, name in _pairs(raw.get("env_http_headers")).items()}
    if isinstance(token := raw.get("bearer_token_env_var"), str):
        headers["Authorization"] = f"Bearer ${{env:{token}}}"
    # What stands in the file as text is text there; what we made of it is not. Marked so until it is translated.
    entry["env"] = {**_literal(_pairs(raw.get("env"))), **env}
    entry["headers"] = {**_literal(_pairs(raw.get("http_headers"))), **headers}
    return entry


def _literal(pairs: Mapping[str, str]) -> dict[str, str]:
    return {key: _escaped(value) for key, value in pairs.items()}


def _translated(entry: Mapping[str, Any], client: Client, needed: set[str]) -> dict[str, Any]:
    """The entry with variables as we write them; adds those that have to be set to `needed`."""

    def translate(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            if not client.fills_variables and not (client.key == "codex" and key in ("env", "headers")):
                return _escaped(value)
            return _rewritten(value, needed)
        if isinstance(value, list):
            return [translate(item, key) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            return {name: translate(inner, key or name) for name, inner in cast("dict[str, Any]", value).items()}
        return value

    return {key: translate(value, key) for key, value in entry.items()}


def _rewritten(text: str, needed: set[str]) -> str:
    """References as we write them: `${env:X}` → `${X}`; what means nothing here stays as text."""
    parts: list[str] = []
    at = 0
    for match in _REFERENCE.finditer(text):
        before = text[at : match.start()]
        escaped = before.endswith("$")
        parts.append(_escaped(before))
        parts.append(match[0] if escaped else _reference(match[1], needed))
        at = match.end()
    parts.append(_escaped(text[at:]))
    return "".join(parts)


def _escaped(text: str) -> str:
    """Text that is only text."""
    return _OPENING.sub("$${", text)


def _reference(inside: str, needed: set[str]) -> str:
    if inside in _FOLDERS:
        return f"${{{inside}}}"
    if (asked := _INPUT.fullmatch(inside)) is not None:
        name = re.sub(r"[^A-Za-z0-9_]", "_", f"input_{asked[1]}").upper()
    elif (variable := _VARIABLE.fullmatch(inside)) is not None:
        if variable[2] is not None:
            return f"${{{variable[1]}{variable[2]}}}"
        name = variable[1]
    else:
        return f"$${{{inside}}}"
    needed.add(name)
    return f"${{{name}}}"
