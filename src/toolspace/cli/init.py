"""`toolspace init`: writes a commented configuration, with the MCP servers that the editors of the user have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import click

from toolspace.cli.editor_files import CLIENTS, ClientEnvironment
from toolspace.cli.editor_import import ImportedServer, ImportResult, import_servers, short_path
from toolspace.cli.options import Command, Options
from toolspace.cli.output import first_line
from toolspace.config.documentation import render_starter_file
from toolspace.config.find_and_watch import CONFIG_NAMES, PROJECT_STATE_FOLDER
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import mask_secrets

_FILE_NAME = CONFIG_NAMES[0]
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@+-]*")
_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*\}")
_YAML_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_SECTION_HEADER = """\
# --- MCP servers, imported from your editors.
mcpServers:
"""


@click.command("init", cls=Command)
@click.argument("path", type=click.Path(), default=".")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--no-import", is_flag=True, help="Import no servers from editors.")
@click.option(
    "--from",
    "clients",
    metavar="CLIENT",
    multiple=True,
    help=f"Import from this client only: {', '.join(CLIENTS)}. Repeatable.",
)
@click.pass_obj
def command(options: Options, path: str, force: bool, no_import: bool, clients: tuple[str, ...]) -> int:
    """Write a commented toolspace.yaml to PATH: a folder (default: the current one) or a file.

    The MCP servers of your editors are imported. Values that look like secrets are not copied: the file refers to an
    environment variable instead. All other settings are commented out.
    """
    if no_import and clients:
        raise click.UsageError("--no-import and --from contradict each other; give one of them")
    _check_clients(clients)
    target = Path(path)
    if target.is_dir():
        target /= _FILE_NAME
    if target.suffix not in (".yaml", ".yml"):
        raise click.UsageError(f"{target}: there is no such folder; create it, or name a file that ends in .yaml")
    environment = ClientEnvironment.current(target.absolute().parent)
    import_result = ImportResult([], []) if no_import else import_servers(environment, clients or CLIENTS)
    text = render_starter_file()
    if import_result.servers:
        text += "\n" + format_servers(import_result.servers, environment.home)
    _write(target, text, force=force)
    _create_state_folder(target.absolute().parent / PROJECT_STATE_FOLDER)
    if options.json:
        options.output.document({"path": str(target.absolute()), **_import_document(import_result)})
        return 0
    options.output.line(f"Wrote {target}.")
    for line in _import_lines(import_result, environment.home):
        options.output.note(line)
    if clients and not import_result.servers:
        options.output.note(f"No servers to import from {' or '.join(clients)}.")
    config_option = "" if target.absolute() == Path.cwd() / _FILE_NAME else f" --config {target}"
    for line in ("Now try:", f"  toolspace list{config_option}", f"  toolspace doctor{config_option}"):
        options.output.note(line)
    return 0


def _check_clients(clients: tuple[str, ...]) -> None:
    for name in clients:
        if name not in CLIENTS:
            hint = did_you_mean(name, CLIENTS) or f"; the clients are {', '.join(CLIENTS)}"
            raise click.UsageError(f"--from {name}: there is no such client{hint}")


def _write(target: Path, text: str, *, force: bool) -> None:
    try:
        # Mode "x" checks and creates in one step, so a file that appears meanwhile is not overwritten.
        with target.open("w" if force else "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:
        raise click.UsageError(f"{target} exists already; --force replaces it") from None
    except OSError as error:
        raise click.UsageError(f"{target} cannot be written: {error.strerror or error}") from None


def _create_state_folder(folder: Path) -> None:
    """Creates the state directory of the project, with a file that makes git ignore it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / ".gitignore").open("x", encoding="utf-8") as file:
            file.write("# The state of Toolspace: nothing in this folder belongs into version control.\n*\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise click.UsageError(f"{folder} cannot be created: {error.strerror or error}") from None


# Report


def _import_lines(import_result: ImportResult, home: Path) -> Iterator[str]:
    if import_result.servers:
        yield "Imported MCP servers:"
        width = max(len(first_line(server.name)) for server in import_result.servers)
        for server in import_result.servers:
            origin = f"{server.client.title}, {short_path(server.path, home)}"
            yield f"  {first_line(server.name).ljust(width)}  {_target(server)}  ({origin})"
    secrets = {name: server for server in import_result.servers for name in server.secrets}
    if secrets:
        yield "Not copied, because they look like secrets; set these variables to the values of the editor:"
        yield from (
            f"  {name}  ({first_line(server.name)}: {server.secrets[name]})" for name, server in secrets.items()
        )
    for server in import_result.servers:
        if server.unset and server.entry.get("enabled") is not False:
            variables = " and ".join(server.unset)
            yield f"{first_line(server.name)} is disabled: set {variables}, then remove its line enabled: false."
    for skipped in import_result.skipped:
        name = f"{first_line(skipped.name)} ({skipped.client.title})" if skipped.name else skipped.client.title
        yield f"Skipped {name}: {first_line(skipped.reason)}"


def _target(server: ImportedServer) -> str:
    """Returns what the entry starts or connects to. Shown, because the file may come from somebody else's project."""
    words = [server.entry.get("url") or server.entry["command"], *server.entry.get("args", ())]
    return first_line(mask_secrets(" ".join(words)).replace("\n", " "))


def _import_document(import_result: ImportResult) -> dict[str, object]:
    if not import_result.servers and not import_result.skipped:
        return {}
    return {
        "servers": [
            {
                "name": server.name,
                "from": server.client.key,
                "file": str(server.path),
                "variables": list(server.secrets),
                "unset": list(server.unset),
            }
            for server in import_result.servers
        ],
        "leftOut": [
            {"name": skipped.name, "from": skipped.client.key, "file": str(skipped.path), "why": skipped.reason}
            for skipped in import_result.skipped
        ],
    }


# The section of the configuration


def format_servers(servers: Iterable[ImportedServer], home: Path) -> str:
    """Returns the section `mcpServers` as YAML. A server with unset variables is disabled, so the file loads."""
    return _SECTION_HEADER + "\n".join(line for server in servers for line in _format_server(server, home))


def _format_server(server: ImportedServer, home: Path) -> Iterator[str]:
    yield f"  # From {server.client.title}: {short_path(server.path, home)}"
    yield f"  {_scalar(server.name)}:"
    entry = dict(server.entry)
    is_disabled = entry.pop("enabled", True) is False
    for key, value in entry.items():
        if isinstance(value, dict):
            yield f"    {key}:"
            for name, inner in cast("Mapping[str, str]", value).items():
                yield f"      {_scalar(name)}: {_scalar(inner)}{_comment(server, inner)}"
        else:
            words = cast("list[str]", value) if isinstance(value, list) else [str(value)]
            text = f"[{', '.join(_quote(word) for word in words)}]" if isinstance(value, list) else _scalar(value)
            yield f"    {key}: {text}{''.join(dict.fromkeys(_comment(server, word) for word in words))}"
    if is_disabled:
        yield "    enabled: false"
    elif server.unset:
        yield f"    enabled: false  # Set {' and '.join(server.unset)}, then remove this line."
    yield ""


def _comment(server: ImportedServer, value: str) -> str:
    names = [name for name in server.secrets if f"${{{name}}}" in value]
    return f"  # Set {' and '.join(names)}: the value was not copied." if names else ""


def _scalar(value: Any) -> str:
    text = str(value)
    is_plain = _PLAIN.fullmatch(text) or _REFERENCE.fullmatch(text)
    return text if is_plain and text.casefold() not in _YAML_WORDS else _quote(text)


def _quote(text: str) -> str:
    """Returns the text in double quotes. YAML reads JSON strings, except for a few characters that are escaped here."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))
