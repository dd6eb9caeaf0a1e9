"""`toolspace install CLIENT`: adds this toolspace to the MCP servers of an editor or agent, or removes it."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from toolspace.cli.editor_edit import EditorEntry, FileEdit
from toolspace.cli.editors import CLIENTS, INSTALLABLE, ClientEnvironment, McpClient, Scope, config_file
from toolspace.cli.local_toolspace import config_path
from toolspace.cli.options import Command, Options
from toolspace.config.file_formats import display_name
from toolspace.core.names import did_you_mean, is_local_name
from toolspace.core.secret_masking import MASK, is_secret_name, mask_secrets
from toolspace.errors import ConfigError

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
