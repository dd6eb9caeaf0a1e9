"""`toolspace init`: writes a commented configuration to start from, with the servers that editors have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from toolspace.cli.editors import CLIENTS, Surroundings
from toolspace.cli.importing import Found, Import, import_servers
from toolspace.cli.options import Command, Options
from toolspace.cli.output import one_line
from toolspace.cli.serversection import server_section, shown_path
from toolspace.config.locate import CONFIG_NAMES
from toolspace.config.starter import starter_config
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import redact

_NAME = CONFIG_NAMES[0]
_NOTHING = Import([], [])


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
    around = Surroundings.here(target.absolute().parent)
    imported = _NOTHING if no_import else import_servers(around, clients or CLIENTS)
    text = starter_config()
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


def _told(imported: Import, home: Path) -> Iterator[str]:
    if imported.found:
        yield "Took over the MCP servers"
        width = max(len(one_line(server.name)) for server in imported.found)
        for server in imported.found:
            origin = f"{server.client.title}, {shown_path(server.path, home)}"
            yield f"  {one_line(server.name).ljust(width)}  {_target(server)}  ({origin})"
    secrets = {name: server for server in imported.found for name in server.secrets}
    if secrets:
        yield "Not copied, because they look like secrets; set these variables to what the editor has:"
        yield from (f"  {name}  ({one_line(server.name)}: {server.secrets[name]})" for name, server in secrets.items())
    for server in imported.found:
        if server.unset and server.entry.get("enabled") is not False:
            unset, them = " and ".join(server.unset), "it" if len(server.unset) == 1 else "them"
            name = one_line(server.name)
            yield f"{name} is off for want of {unset}: set {them}, then remove the line that says enabled."
    for left in imported.left_out:
        name = f"{one_line(left.name)} ({left.client.title})" if left.name else left.client.title
        yield f"Left out {name}: {one_line(left.why)}"


def _target(server: Found) -> str:
    """What will be started or reached. Shown, because it may come from a project that someone else made."""
    words = [server.entry.get("url") or server.entry["command"], *server.entry.get("args", ())]
    return one_line(redact(" ".join(words)).replace("\n", " "))


def _facts(imported: Import) -> dict[str, object]:
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
