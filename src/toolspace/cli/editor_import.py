"""Finds the MCP servers that editors have, in the shape of our configuration. Writes nothing, and copies no secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from toolspace.cli.editor_files import read_text
from toolspace.cli.editors import CLIENTS, ClientEnvironment, McpClient, config_file, is_toolspace
from toolspace.config.parsing import parse_document
from toolspace.config.provider_settings import TRANSPORT_ALIASES
from toolspace.core.names import sanitise
from toolspace.core.secret_masking import is_secret_name, mask_secrets
from toolspace.errors import ConfigError

# MERGED from concealing: Puts references to variables in the place of what looks like a secret in a server's entry…

_MORE_NAMES = re.compile(r"(?:^|[_-])(?:key|keys|pat|auth|jwt|dsn|token|tokens|sid|pw)$", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
_PIECE = re.compile(r"[A-Za-z0-9_]{20,}")
_OPEN_REFERENCE = re.compile(r"(?<!\$)\$\{[^{}]*\}")
_FLAG = re.compile(r"(--?[\w.-]+)(=)(.+)", re.DOTALL)
_PAIR = re.compile(r"([A-Za-z_][\w-]*)(=|:\s*)(.+)", re.DOTALL)
_SCHEME = re.compile(r"(Bearer|Basic|Token)(\s+)(\S.*)", re.IGNORECASE | re.DOTALL)
_PATHS = ("/", "~/", "./", "../")


class SecretExtractor:
    """Knows the variables that were given to secrets so far, so that no two secrets share one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._taken: dict[str, str] = {}

    def extract(self, server: str, entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """The entry without secrets; and the variables that stand for them, with what each was."""
        one = _Entry(self, server)
        result = dict(entry)
        for section in ("env", "headers"):
            if section in result:
                result[section] = {key: one.pair(section, key, value) for key, value in result[section].items()}
        if "args" in result:
            result["args"] = one.args(result["args"])
        for key in ("url", "command"):
            if key in result and looks_secret("", result[key]):
                result[key] = one.reference(key, result[key], key)
        return result, one.secrets

    def variable(self, server: str, name: str, value: str) -> str:
        """A variable for a value: the plain name, unless that means something else already."""
        plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
        prefixed = re.sub(r"[^A-Za-z0-9_]", "_", f"{server}_{name}".upper())
        candidates = [plain] if re.fullmatch(r"[A-Z_][A-Z0-9_]*", plain) else []
        candidates += [prefixed, *(f"{prefixed}_{number}" for number in range(2, 1000))]
        for candidate in candidates:
            if candidate[0].isdigit():
                candidate = f"_{candidate}"
            known = self._taken.get(candidate, self.environ.get(candidate, value))
            if known == value:
                self._taken[candidate] = value
                return candidate
        raise AssertionError("a thousand secrets of one name")


class _Entry:
    """The secrets of one server."""

    def __init__(self, concealer: SecretExtractor, server: str) -> None:
        self.secrets: dict[str, str] = {}
        self._concealer = concealer
        self._server = server

    def reference(self, name: str, value: str, what: str) -> str:
        # In the file `${` is written `$${`; the variable holds what is meant.
        variable = self._concealer.variable(self._server, name, value.replace("$${", "${"))
        self.secrets[variable] = what
        return f"${{{variable}}}"

    def pair(self, section: str, key: str, value: str) -> str:
        what = f"{section} {key}"
        if section == "headers" and (scheme := _SCHEME.fullmatch(value)) is not None:
            # Of an authorization only what comes after its scheme.
            hidden = self._value(key, scheme[3], "token" if key.casefold() == "authorization" else key, what)
            return f"{scheme[1]}{scheme[2]}{hidden}"
        return self._value(key, value, key, what)

    def args(self, args: list[str]) -> list[str]:
        result: list[str] = []
        flag = ""
        for arg in args:
            if (match := _FLAG.fullmatch(arg) or _PAIR.fullmatch(arg)) is not None:
                name = match[1].lstrip("-")
                value = self.pair("headers", name, match[3]) if ":" in match[2] else self._named_arg(name, match[3])
                # A part that is no secret may still be one together with the rest: a URL is `https:` and more.
                hidden = f"{match[1]}{match[2]}{value}"
                result.append(hidden if hidden != arg else self._value(flag, arg, flag or "arg", "an argument"))
            else:
                result.append(self._value(flag, arg, flag or "arg", f"args {flag}" if flag else "an argument"))
            flag = arg.lstrip("-") if re.fullmatch(r"--?[A-Za-z][\w.-]*", arg) else ""
        return result

    def _named_arg(self, name: str, value: str) -> str:
        return self._value(name, value, name, f"args {name}")

    def _value(self, name: str, value: str, variable: str, what: str) -> str:
        return self.reference(variable, value, what) if looks_secret(name, value) else value


def looks_secret(name: str, value: str) -> bool:
    """Whether a value under a name should not be written into a new file."""
    bare = _OPEN_REFERENCE.sub("", value)
    if not bare.strip():
        return False
    # References that are there already are no secrets, and neither is what stands around them, mostly.
    if bare != value and mask_secrets(bare) == bare:
        return False
    if value.startswith(_PATHS) and Path(value).expanduser().exists():
        return False
    if is_secret_name(name) or _MORE_NAMES.search(name):
        return True
    return mask_secrets(value) != value or _UUID.search(value) is not None or any(map(_random, _PIECE.findall(value)))


def _random(piece: str) -> bool:
    """Whether a long word is more likely made by a machine than by a person: letters and digits in a mix."""
    return sum(one.isdigit() for one in piece) >= 3 and sum(one.isalpha() for one in piece) >= 3


_TYPES = {"stdio", "http", "sse", "websocket", *TRANSPORT_ALIASES}
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(:-[^{}$]*)?")
_OPENING = re.compile(r"(?<!\$)\$\{")
_INPUT = re.compile(r"input:(.+)")
_FOLDERS = ("workspaceFolder", "userHome")
"""What an editor fills in, and our configuration too."""
_LONGEST_NAME = 200


class ImportedServer(NamedTuple):
    """One server of an editor, as it will stand in our configuration."""

    name: str
    entry: Mapping[str, Any]
    client: McpClient
    path: Path
    secrets: Mapping[str, str]
    """Variable → what it stands for, where a value was not copied."""
    unset: tuple[str, ...]
    """The variables that it needs and that are not set now."""


class SkippedServer(NamedTuple):
    name: str
    client: McpClient
    path: Path
    why: str


class ImportResult(NamedTuple):
    found: list[ImportedServer]
    left_out: list[SkippedServer]


def import_servers(around: ClientEnvironment, keys: Iterable[str] = CLIENTS) -> ImportResult:
    """The servers of these clients, those of the project first. Of two with one name the first is taken."""
    result = ImportResult([], [])
    concealer = SecretExtractor(around.environ)
    taken: dict[str, ImportedServer] = {}
    for client, path, tables in _files([CLIENTS[key] for key in keys], around):
        try:
            servers = _servers(path, tables, around)
        except ConfigError as error:
            result.left_out.append(SkippedServer("", client, path, str(error)))
            continue
        for name, raw in servers:
            found = _read(name, raw, client, path, concealer)
            if isinstance(found, str):
                result.left_out.append(SkippedServer(name, client, path, found))
                continue
            first = taken.setdefault(sanitise(name).casefold(), found)
            if first is found:
                result.found.append(found)
            elif first.entry != found.entry:
                why = f"another server has that name, from {first.client.title}"
                result.left_out.append(SkippedServer(name, client, path, why))
    return result


def _files(
    clients: Iterable[McpClient], around: ClientEnvironment
) -> Iterator[tuple[McpClient, Path, list[tuple[str, ...]]]]:
    """The files to look into, and where in each the servers stand."""
    chosen = list(clients)
    for scope in ("project", "user"):
        for client in chosen:
            if scope not in client.scopes:
                continue
            tables: list[tuple[str, ...]] = [(client.table,)]
            if client.key == "claude-code" and scope == "user":
                # It keeps the servers that are a user's own in one project beside those of all projects.
                tables.insert(0, ("projects", str(around.project), client.table))
            yield client, config_file(client, scope, around), tables


def _servers(path: Path, tables: list[tuple[str, ...]], around: ClientEnvironment) -> list[tuple[str, object]]:
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


def _read(name: str, raw: object, client: McpClient, path: Path, concealer: SecretExtractor) -> ImportedServer | str:
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
    entry, secrets = concealer.extract(name, entry)
    unset = tuple(sorted(one for one in {*needed, *secrets} if one not in concealer.environ))
    return ImportedServer(name, entry, client, path, secrets, unset)


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


def _translated(entry: Mapping[str, Any], client: McpClient, needed: set[str]) -> dict[str, Any]:
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
