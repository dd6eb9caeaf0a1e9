"""`toolspace install CLIENT`: adds this toolspace to the MCP servers of an editor or agent, or takes it out again."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from toolspace.cli.editor_files import EditorEntry, FileEdit
from toolspace.cli.editors import CLIENTS, INSTALLABLE, ClientEnvironment, McpClient, Scope, config_file
from toolspace.cli.local_toolspace import config_path
from toolspace.cli.options import Command, Options
from toolspace.config.parsing import display_name
from toolspace.core.names import did_you_mean, is_local_name
from toolspace.core.secret_masking import MASK, is_secret_name, mask_secrets
from toolspace.errors import ConfigError

_PAIR = re.compile(r"""(["']?)([\w.-]+)\1(\s*[:=]\s*)("(?:[^"\\]|\\.)*"|'[^']*')""")
_SAID = {
    "added": "Added {}",
    "updated": "Updated {}",
    "unchanged": "{} is already there",
    "removed": "Removed {}",
    "missing": "{} is not there",
}


@click.command("install", cls=Command)
@click.argument("client", metavar="CLIENT")
@click.option("--scope", type=click.Choice(["project", "user"]), help="For this project, or for all of yours.")
@click.option("--name", default="toolspace", show_default=True, help="What to call the server there.")
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@click.option("--uninstall", "--remove", "uninstall", is_flag=True, help="Take it out again.")
@click.pass_obj
def command(options: Options, client: str, scope: Scope | None, name: str, dry_run: bool, uninstall: bool) -> int:
    """Add this toolspace to the MCP servers of CLIENT: claude-code, claude-desktop, cursor, vscode or codex.

    Everything else in the client's file stays as it is.
    """
    chosen = _client(client)
    scope = _scope(chosen, scope)
    if not is_local_name(name):
        raise click.UsageError(f"--name {name!r}: a server's name has 1 to 64 of the characters A-Z a-z 0-9 _ -")
    config = config_path(options)
    path = config_file(chosen, scope, ClientEnvironment.current(_project(options, config)))
    place = EditorEntry(path, chosen.table, name)
    if uninstall:
        edit = place.remove(dry_run=dry_run)
    else:
        edit = place.add(_entry(chosen, config), dry_run=dry_run)
    _report(options, chosen, place, edit, dry_run=dry_run)
    return 0


def _client(name: str) -> McpClient:
    key = name.casefold().replace("_", "-").replace(" ", "-")
    if key not in INSTALLABLE:
        hint = did_you_mean(key, INSTALLABLE) or f"; they are {', '.join(INSTALLABLE)}"
        raise click.UsageError(f"there is no client {name!r}{hint}")
    return CLIENTS[key]


def _scope(client: McpClient, asked: Scope | None) -> Scope:
    if asked is not None and asked not in client.scopes:
        raise click.UsageError(f"{client.key} has no {asked} scope; leave --scope out")
    return asked or client.scopes[0]


def _project(options: Options, config: Path | None) -> Path:
    """The project that is meant: where its configuration was found, unless one was named."""
    found = config is not None and not options.config and not os.environ.get("TOOLSPACE_CONFIG")
    return config.absolute().parent if found and config is not None else Path.cwd()


def _entry(client: McpClient, config: Path | None) -> dict[str, str | list[str]]:
    if config is None:
        # Not the built-ins alone: their files would be those of whatever folder the client starts in.
        raise ConfigError("there is no toolspace.yaml here; write one with toolspace init, or name one with --config")
    if not config.is_file():
        raise ConfigError(f"{display_name(config)}: there is no such file")
    program, *words = _program()
    entry: dict[str, str | list[str]] = {"type": "stdio"} if client.typed else {}
    return entry | {"command": program, "args": [*words, "--config", str(config.absolute()), "mcp"]}


def _program() -> list[str]:
    """How to start this very installation, whatever folder and PATH the client has."""
    started = Path(sys.argv[0])
    beside = Path(sys.executable).parent / f"toolspace{'.exe' if os.name == 'nt' else ''}"
    for candidate in (started, beside):
        if candidate.stem == "toolspace" and candidate.suffix in ("", ".exe") and os.access(candidate, os.X_OK):
            found = shutil.which(candidate) or str(candidate)
            return [os.path.abspath(found)]
    return [sys.executable, "-m", "toolspace"]


def _report(options: Options, client: McpClient, place: EditorEntry, edit: FileEdit, *, dry_run: bool) -> None:
    output, shown, name = options.output, display_name(place.path), place.name
    diff = "\n".join(_diff(edit, shown)) if dry_run else ""
    if options.json:
        facts = {"client": client.key, "path": str(place.path), "name": name, "outcome": edit.outcome}
        output.document({**facts, "diff": diff} if dry_run else facts)
        return
    if dry_run and diff:
        output.text(diff)
        output.note("Nothing was changed: leave --dry-run out to do it.")
        return
    output.line(f"{_SAID[edit.outcome].format(name)}: {shown}")
    if edit.outcome in ("added", "updated") and client.afterwards:
        output.note(f"Now {client.afterwards}.")


def _diff(edit: FileEdit, name: str) -> Iterator[str]:
    """The change as people know it. What is shown around it may hold a secret, which nobody asked for."""
    lines = difflib.unified_diff(edit.before.splitlines(), edit.after.splitlines(), name, name, n=3, lineterm="")
    yield from (mask_secrets(_PAIR.sub(_hidden, line)) for line in lines)


def _hidden(match: re.Match[str]) -> str:
    return f'{match[1]}{match[2]}{match[1]}{match[3]}"{MASK}"' if is_secret_name(match[2]) else match[0]
