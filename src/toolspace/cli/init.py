"""`toolspace init`: writes a commented configuration to start from, with the servers that editors have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import click

from toolspace.cli.editor_import import ImportedServer, ImportResult, import_servers
from toolspace.cli.editors import CLIENTS, ClientEnvironment
from toolspace.cli.options import Command, Options
from toolspace.cli.output import first_line
from toolspace.config.documentation import render_starter_file
from toolspace.config.files import CONFIG_NAMES
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import mask_secrets

# MERGED from serversection: Imported servers as a section of a new toolspace.yaml, with where each came from. Read…

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@+-]*")
_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*\}")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
_UNPRINTED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_HEAD = """\
# --- MCP servers, as your editors have them.
mcpServers:
"""


def server_section(found: Iterable[ImportedServer], home: Path) -> str:
    """The text of the section. It can be loaded as it is: a server that lacks a variable is off."""
    return _HEAD + "\n".join(line for server in found for line in _server(server, home))


def shown_path(path: Path, home: Path) -> str:
    """A path as people write it, on one line."""
    try:
        return first_line(f"~/{path.relative_to(home)}")
    except ValueError:
        return first_line(str(path))


def _server(server: ImportedServer, home: Path) -> Iterator[str]:
    yield f"  # From {server.client.title}: {shown_path(server.path, home)}"
    yield f"  {_scalar(server.name)}:"
    entry = dict(server.entry)
    off = entry.pop("enabled", True) is False
    for key, value in entry.items():
        if isinstance(value, dict):
            yield f"    {key}:"
            for name, inner in cast("Mapping[str, str]", value).items():
                yield f"      {_scalar(name)}: {_scalar(inner)}{_comment(server, inner)}"
        else:
            words = cast("list[str]", value) if isinstance(value, list) else [str(value)]
            written = f"[{', '.join(json_text(word) for word in words)}]" if isinstance(value, list) else _scalar(value)
            yield f"    {key}: {written}{''.join(dict.fromkeys(_comment(server, word) for word in words))}"
    if off:
        yield "    enabled: false"
    elif server.unset:
        yield f"    enabled: false  # Set {' and '.join(server.unset)}, then remove this line."
    yield ""


def _comment(server: ImportedServer, value: str) -> str:
    names = [name for name in server.secrets if f"${{{name}}}" in value]
    return f"  # Set {' and '.join(names)}: the value was not copied." if names else ""


def _scalar(value: Any) -> str:
    text = str(value)
    plain = _PLAIN.fullmatch(text) or _REFERENCE.fullmatch(text)
    return text if plain and text.casefold() not in _WORDS else json_text(text)


def json_text(text: str) -> str:
    """A text in double quotes, which YAML reads as JSON does, but for a few characters."""
    return _UNPRINTED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


_NAME = CONFIG_NAMES[0]
_NOTHING = ImportResult([], [])


@click.command("init", cls=Command)
@click.argument("path", type=click.Path(), default=".")
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
@click.option("--no-import", is_flag=True, help="Take no servers over from editors.")
@click.option(
    "--from",
    "clients",
    metavar="CLIENT",
    multiple=True,
    help=f"Only from this one: {', '.join(CLIENTS)}.",
)
@click.pass_obj
def command(options: Options, path: str, force: bool, no_import: bool, clients: tuple[str, ...]) -> int:
    """Write a commented toolspace.yaml to PATH: a folder (by default this one), or a file.

    The MCP servers that your editors have are taken over. Values that look like secrets are not copied: the file
    names a variable instead. Everything else changes nothing until you take a line of it in.
    """
    if no_import and clients:
        raise click.UsageError("--no-import and --from contradict each other; give one of them")
    _check(clients)
    target = Path(path)
    if target.is_dir():
        target /= _NAME
    if target.suffix not in (".yaml", ".yml"):
        raise click.UsageError(f"{target}: there is no such folder; make it first, or name a file that ends in .yaml")
    around = ClientEnvironment.current(target.absolute().parent)
    imported = _NOTHING if no_import else import_servers(around, clients or CLIENTS)
    text = render_starter_file()
    if imported.found:
        text += "\n" + server_section(imported.found, around.home)
    try:
        # "x" refuses in one step, so that a file that appears meanwhile is safe too.
        with target.open("w" if force else "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:
        raise click.UsageError(f"{target} is there already; --force replaces it") from None
    except OSError as error:
        raise click.UsageError(f"{target} cannot be written: {error.strerror or error}") from None
    if options.json:
        options.output.document({"path": str(target.absolute()), **_facts(imported)})
        return 0
    options.output.line(f"Wrote {target}.")
    for line in _told(imported, around.home):
        options.output.note(line)
    if clients and not imported.found:
        options.output.note(f"There are no servers to take over from {' or '.join(clients)}.")
    where = "" if target.absolute() == Path.cwd() / _NAME else f" --config {target}"
    for line in ("Now try:", f"  toolspace list{where}", f"  toolspace doctor{where}"):
        options.output.note(line)
    return 0


def _check(clients: tuple[str, ...]) -> None:
    for name in clients:
        if name not in CLIENTS:
            hint = did_you_mean(name, CLIENTS) or f"; they are {', '.join(CLIENTS)}"
            raise click.UsageError(f"--from {name}: there is no such client{hint}")


def _told(imported: ImportResult, home: Path) -> Iterator[str]:
    if imported.found:
        yield "Took over the MCP servers"
        width = max(len(first_line(server.name)) for server in imported.found)
        for server in imported.found:
            origin = f"{server.client.title}, {shown_path(server.path, home)}"
            yield f"  {first_line(server.name).ljust(width)}  {_target(server)}  ({origin})"
    secrets = {name: server for server in imported.found for name in server.secrets}
    if secrets:
        yield "Not copied, because they look like secrets; set these variables to what the editor has:"
        yield from (
            f"  {name}  ({first_line(server.name)}: {server.secrets[name]})" for name, server in secrets.items()
        )
    for server in imported.found:
        if server.unset and server.entry.get("enabled") is not False:
            unset, them = " and ".join(server.unset), "it" if len(server.unset) == 1 else "them"
            name = first_line(server.name)
            yield f"{name} is off for want of {unset}: set {them}, then remove the line that says enabled."
    for left in imported.left_out:
        name = f"{first_line(left.name)} ({left.client.title})" if left.name else left.client.title
        yield f"Left out {name}: {first_line(left.why)}"


def _target(server: ImportedServer) -> str:
    """What will be started or reached. Shown, because it may come from a project that someone else made."""
    words = [server.entry.get("url") or server.entry["command"], *server.entry.get("args", ())]
    return first_line(mask_secrets(" ".join(words)).replace("\n", " "))


def _facts(imported: ImportResult) -> dict[str, object]:
    if not imported.found and not imported.left_out:
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
            for server in imported.found
        ],
        "leftOut": [
            {"name": left.name, "from": left.client.key, "file": str(left.path), "why": left.why}
            for left in imported.left_out
        ],
    }
