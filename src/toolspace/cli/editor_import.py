"""Imports the MCP servers of editors as entries of our configuration. Writes nothing, and copies no secret.

`toolspace init` uses it. Secrets in an entry become references to environment variables. The detection prefers a
reference too many: that costs the user a moment, a secret in a shared file costs more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from toolspace.cli.editor_files import CLIENTS, ClientEnvironment, McpClient, config_file, is_toolspace, read_text
from toolspace.cli.output import first_line
from toolspace.config.file_formats import parse_document
from toolspace.config.provider_settings import TRANSPORT_ALIASES
from toolspace.core.names import sanitise
from toolspace.core.secret_masking import is_secret_name, mask_secrets
from toolspace.errors import ConfigError

_TYPES = {"stdio", "http", "sse", "websocket", *TRANSPORT_ALIASES}
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(:-[^{}$]*)?")
_OPENING = re.compile(r"(?<!\$)\$\{")
_INPUT = re.compile(r"input:(.+)")
_FOLDERS = ("workspaceFolder", "userHome")
"""References that both editors and our configuration replace."""
_MAX_NAME = 200
_UNESCAPED_REFERENCE = re.compile(r"(?<!\$)\$\{[^{}]*\}")
_SECRET_SUFFIX = re.compile(r"(?:^|[_-])(?:key|keys|pat|auth|jwt|dsn|token|tokens|sid|pw)$", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
_LONG_WORD = re.compile(r"[A-Za-z0-9_]{20,}")
_FLAG = re.compile(r"(--?[\w.-]+)(=)(.+)", re.DOTALL)
_PAIR = re.compile(r"([A-Za-z_][\w-]*)(=|:\s*)(.+)", re.DOTALL)
_SCHEME = re.compile(r"(Bearer|Basic|Token)(\s+)(\S.*)", re.IGNORECASE | re.DOTALL)
_PATH_PREFIXES = ("/", "~/", "./", "../")


class ImportedServer(NamedTuple):
    """A server of an editor, as an entry of our configuration."""

    name: str
    entry: Mapping[str, Any]
    client: McpClient
    path: Path
    """The settings file that it comes from."""
    secrets: Mapping[str, str]
    """Variable → where its value stood, for values that were not copied."""
    unset: tuple[str, ...]
    """The variables that it needs and that are not set now."""


class SkippedServer(NamedTuple):
    """A server that was not imported. Without a name: the whole file."""

    name: str
    client: McpClient
    path: Path
    reason: str


class ImportResult(NamedTuple):
    servers: list[ImportedServer]
    skipped: list[SkippedServer]


def import_servers(environment: ClientEnvironment, client_keys: Iterable[str] = CLIENTS) -> ImportResult:
    """Returns the servers of these clients, those of the project first. The first server of a name wins."""
    result = ImportResult([], [])
    extractor = _SecretExtractor(environment.environ)
    by_name: dict[str, ImportedServer] = {}
    for client, path, tables in _list_files([CLIENTS[key] for key in client_keys], environment):
        try:
            entries = _read_entries(path, tables, environment)
        except ConfigError as error:
            result.skipped.append(SkippedServer("", client, path, str(error)))
            continue
        for name, raw in entries:
            server = _import_entry(name, raw, client, path, extractor)
            if isinstance(server, str):
                result.skipped.append(SkippedServer(name, client, path, server))
                continue
            first = by_name.setdefault(sanitise(name).casefold(), server)
            if first is server:
                result.servers.append(server)
            elif first.entry != server.entry:
                reason = f"another server has that name, from {first.client.title}"
                result.skipped.append(SkippedServer(name, client, path, reason))
    return result


def short_path(path: Path, home: Path) -> str:
    """Returns the path on one line, with `~` for the home folder."""
    try:
        return first_line(f"~/{path.relative_to(home)}")
    except ValueError:
        return first_line(str(path))


# Reading the files


def _list_files(
    clients: Iterable[McpClient], environment: ClientEnvironment
) -> Iterator[tuple[McpClient, Path, list[tuple[str, ...]]]]:
    """Yields each settings file and the key paths of the tables of servers in it."""
    all_clients = list(clients)
    for scope in ("project", "user"):
        for client in all_clients:
            if scope not in client.scopes:
                continue
            tables: list[tuple[str, ...]] = [(client.table,)]
            if client.key == "claude-code" and scope == "user":
                # Its user file also has servers that belong to one project of that user.
                tables.insert(0, ("projects", str(environment.project), client.table))
            yield client, config_file(client, scope, environment), tables


def _read_entries(
    path: Path, tables: list[tuple[str, ...]], environment: ClientEnvironment
) -> list[tuple[str, object]]:
    text = read_text(path)
    if not text.strip():
        return []
    data = parse_document(text.encode(), short_path(path, environment.home)).data
    entries: list[tuple[str, object]] = []
    for keys in tables:
        table: object = data
        for key in keys:
            table = cast("dict[str, object]", table).get(key) if isinstance(table, dict) else None
        if isinstance(table, dict):
            entries += cast("dict[str, object]", table).items()
    return entries


def _import_entry(
    name: str, raw: object, client: McpClient, path: Path, extractor: _SecretExtractor
) -> ImportedServer | str:
    """Returns the server, or the reason why it is skipped."""
    if not isinstance(raw, dict):
        return "it is not a mapping"
    values = cast("dict[str, Any]", raw)
    entry = _convert_keys(_normalize_codex(values) if client.key == "codex" else _normalize_zed(values))
    if is_toolspace(entry.get("command"), entry.get("args")):
        return "it is Toolspace itself"
    if "command" not in entry and "url" not in entry:
        return "it has neither a command nor a url"
    if not name or len(name) > _MAX_NAME or not sanitise(name).strip("_"):
        return "its name cannot be used as a namespace"
    if not _is_path(entry.get("cwd", ".")):
        return "its cwd is not a path"
    variables: set[str] = set()
    entry = _translate_references(entry, client, variables)
    entry, secrets = extractor.extract(name, entry)
    unset = tuple(sorted(name for name in {*variables, *secrets} if name not in extractor.environ))
    return ImportedServer(name, entry, client, path, secrets, unset)


def _convert_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entry with the keys of our configuration, without keys and values that it does not have."""
    entry: dict[str, Any] = {}
    url = next((raw[key] for key in ("url", "serverUrl", "httpUrl") if raw.get(key)), None)
    kind = raw.get("type", raw.get("transport"))
    if isinstance(kind, str) and kind in _TYPES and TRANSPORT_ALIASES.get(kind, kind) not in ("stdio", "http"):
        entry["type"] = TRANSPORT_ALIASES.get(kind, kind)  # stdio and http follow from the other keys.
    if isinstance(command := raw.get("command"), str) and command.strip():
        entry["command"] = command
        entry |= {"args": args} if (args := _texts(raw.get("args"))) else {}
        entry |= {"env": env} if (env := _pairs(raw.get("env"))) else {}
        entry |= {"cwd": cwd} if isinstance(cwd := raw.get("cwd"), str) and cwd.strip() else {}
        entry.pop("type", None)
    elif isinstance(url, str) and url.strip():
        entry["url"] = url
        entry |= {"headers": headers} if (headers := _pairs(raw.get("headers"))) else {}
    for source, target in (("disabledTools", "toolsDenied"), ("toolsDenied",) * 2, ("toolsAllowed",) * 2):
        entry |= {target: names} if (names := _texts(raw.get(source))) else {}
    if raw.get("disabled") is True or raw.get("enabled") is False:
        entry["enabled"] = False
    return entry


def _is_path(text: str) -> bool:
    """Whether our configuration accepts the path: `~user` must be a user that exists."""
    try:
        return "\0" not in text and bool(Path(text).expanduser())
    except RuntimeError:
        return False


def _texts(value: object) -> list[str]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [str(item) for item in items if isinstance(item, str | int | float)]


def _pairs(value: object) -> dict[str, str]:
    items = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    return {
        key: str(inner).lower() if isinstance(inner, bool) else str(inner)
        for key, inner in items.items()
        if key and isinstance(inner, str | int | float)
    }


def _normalize_zed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Older versions of Zed have the whole command line under `command`."""
    command = raw.get("command")
    if not isinstance(command, dict):
        return dict(raw)
    inner = cast("dict[str, Any]", command)
    return {**raw, **inner, "command": inner.get("path")}


def _normalize_codex(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Codex has keys that name variables, where other clients have references in the values."""
    entry = {**raw, "toolsAllowed": raw.get("enabled_tools"), "toolsDenied": raw.get("disabled_tools")}
    env = {name: f"${{env:{name}}}" for name in _texts(raw.get("env_vars"))}
    headers = {key: f"${{env:{name}}}" for key, name in _pairs(raw.get("env_http_headers")).items()}
    if isinstance(token := raw.get("bearer_token_env_var"), str):
        headers["Authorization"] = f"Bearer ${{env:{token}}}"
    # Values of the file are plain text in Codex, so they are escaped; the references that are added here are not.
    for target, source, references in (("env", "env", env), ("headers", "http_headers", headers)):
        texts = {key: _escape(value) for key, value in _pairs(raw.get(source)).items()}
        entry[target] = {**texts, **references}
    return entry


# References to variables


def _escape(text: str) -> str:
    """Returns the text so that our configuration finds no reference in it."""
    return _OPENING.sub("$${", text)


def _translate_references(entry: Mapping[str, Any], client: McpClient, variables: set[str]) -> dict[str, Any]:
    """Returns the entry with references as our configuration writes them; adds the variables without a default."""

    def translate(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            if not client.fills_variables and not (client.key == "codex" and key in ("env", "headers")):
                return _escape(value)
            return _translate_text(value, variables)
        if isinstance(value, list):
            return [translate(item, key) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            return {name: translate(inner, key or name) for name, inner in cast("dict[str, Any]", value).items()}
        return value

    return {key: translate(value, key) for key, value in entry.items()}


def _translate_text(text: str, variables: set[str]) -> str:
    """Turns `${env:X}` into `${X}`. References that our configuration does not know stay as plain text."""
    parts: list[str] = []
    position = 0
    for match in _REFERENCE.finditer(text):
        before = text[position : match.start()]
        is_escaped = before.endswith("$")
        parts.append(_escape(before))
        parts.append(match[0] if is_escaped else _translate_reference(match[1], variables))
        position = match.end()
    parts.append(_escape(text[position:]))
    return "".join(parts)


def _translate_reference(reference: str, variables: set[str]) -> str:
    if reference in _FOLDERS:
        return f"${{{reference}}}"
    if (prompt := _INPUT.fullmatch(reference)) is not None:
        name = re.sub(r"[^A-Za-z0-9_]", "_", f"input_{prompt[1]}").upper()
    elif (variable := _VARIABLE.fullmatch(reference)) is not None:
        if variable[2] is not None:
            return f"${{{variable[1]}{variable[2]}}}"
        name = variable[1]
    else:
        return f"$${{{reference}}}"
    variables.add(name)
    return f"${{{name}}}"


# Secrets


class _SecretExtractor:
    """Replaces secrets in entries by references to variables. Two different secrets never get the same variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._values: dict[str, str] = {}
        self._server = ""
        self._places: dict[str, str] = {}

    def extract(self, server: str, entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the entry without secrets, and for each new variable where its value stood."""
        self._server, self._places = server, {}
        result = dict(entry)
        for section in ("env", "headers"):
            if section in result:
                result[section] = {
                    key: self._replace_pair(section, key, value) for key, value in result[section].items()
                }
        if "args" in result:
            result["args"] = self._replace_args(result["args"])
        for key in ("url", "command"):
            if key in result:
                result[key] = self._replace("", result[key], key, key)
        return result, self._places

    def _replace_pair(self, section: str, key: str, value: str) -> str:
        place = f"{section} {key}"
        if section == "headers" and (scheme := _SCHEME.fullmatch(value)) is not None:
            # Only the credentials are replaced, not the scheme in front of them.
            variable = "token" if key.casefold() == "authorization" else key
            return f"{scheme[1]}{scheme[2]}{self._replace(key, scheme[3], variable, place)}"
        return self._replace(key, value, key, place)

    def _replace_args(self, args: list[str]) -> list[str]:
        result: list[str] = []
        flag = ""
        for arg in args:
            new_arg, place = arg, f"args {flag}" if flag else "an argument"
            if (match := _FLAG.fullmatch(arg) or _PAIR.fullmatch(arg)) is not None:
                name, value, place = match[1].lstrip("-"), match[3], "an argument"
                if ":" in match[2]:
                    value = self._replace_pair("headers", name, value)
                else:
                    value = self._replace(name, value, name, f"args {name}")
                new_arg = f"{match[1]}{match[2]}{value}"
            # If no part is a secret, the whole may be: a URL matches as `https:` and the rest.
            result.append(new_arg if new_arg != arg else self._replace(flag, arg, flag or "arg", place))
            flag = arg.lstrip("-") if re.fullmatch(r"--?[A-Za-z][\w.-]*", arg) else ""
        return result

    def _replace(self, name: str, value: str, variable: str, place: str) -> str:
        """Returns a reference to a variable if the value looks secret, else the value."""
        if not looks_secret(name, value):
            return value
        # In the file `${` is escaped as `$${`; the variable has the plain value.
        variable = self._assign_variable(variable, value.replace("$${", "${"))
        self._places[variable] = place
        return f"${{{variable}}}"

    def _assign_variable(self, name: str, value: str) -> str:
        """Returns a variable for a value: the name itself, unless that variable has another value already."""
        plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
        prefixed_name = re.sub(r"[^A-Za-z0-9_]", "_", f"{self._server}_{name}".upper())
        candidates = [plain] if re.fullmatch(r"[A-Z_][A-Z0-9_]*", plain) else []
        candidates += [prefixed_name, *(f"{prefixed_name}_{number}" for number in range(2, 1000))]
        for candidate in candidates:
            if candidate[0].isdigit():
                candidate = f"_{candidate}"
            if self._values.get(candidate, self.environ.get(candidate, value)) == value:
                self._values[candidate] = value
                return candidate
        raise AssertionError("a thousand secrets of one name")


def looks_secret(name: str, value: str) -> bool:
    """Whether a value under a name should not be written into a new file."""
    rest = _UNESCAPED_REFERENCE.sub("", value)
    if not rest.strip():
        return False
    # A value with references has its secrets in the variables already.
    if rest != value and mask_secrets(rest) == rest:
        return False
    if value.startswith(_PATH_PREFIXES) and Path(value).expanduser().exists():
        return False
    if is_secret_name(name) or _SECRET_SUFFIX.search(name):
        return True
    if mask_secrets(value) != value or _UUID.search(value) is not None:
        return True
    return any(map(_looks_random, _LONG_WORD.findall(value)))


def _looks_random(word: str) -> bool:
    """Whether a long word has both letters and digits, as generated keys do."""
    return sum(character.isdigit() for character in word) >= 3 and sum(character.isalpha() for character in word) >= 3
