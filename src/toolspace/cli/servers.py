"""`toolspace servers`: lists MCP servers and their status, restarts one, logs in to one.

If a toolspace of the same configuration runs, the command shows the servers of that process. Otherwise it starts them
for the check and stops them again.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import sys
import textwrap
import time
import webbrowser
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import click
import msgspec

from toolspace.cli.config_file import read_config
from toolspace.cli.local_toolspace import inspected_toolspace
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import (
    CommandOutput,
    align_columns,
    escape_control_characters,
    first_line,
    join_columns,
    show_status,
)
from toolspace.composition.mcp_servers import build_server_spec, login_dir
from toolspace.config.configuration import Config
from toolspace.config.provider_settings import McpServerSettings
from toolspace.config.secret_references import load_secrets, resolve_secrets
from toolspace.core.names import did_you_mean
from toolspace.server.control_socket import ControlRequest, ServerReport, ask_processes, report_servers

_ACTIONS = ("restart", "login", "logout")
_HEALTHY_STATES = ("ready", "idle")
_COLOURS = {"ready": "green", "idle": "cyan", "failed": "red", "stopped": "red", "disabled": "bright_black"}
_HEADER = ("NAME", "STATE", "PROTOCOL", "TRANSPORT", "PROCESS", "TOOLS", "TOKENS", "RESTARTS")
_RIGHT_ALIGNED = [_HEADER.index(title) for title in ("PROCESS", "TOOLS", "TOKENS", "RESTARTS")]
_PROGRAM_FIXES = {
    "npx": "install Node.js 20 or newer, which includes npx",
    "npm": "install Node.js 20 or newer, which includes npm",
    "node": "install Node.js 20 or newer",
    "uvx": "install uv, which includes uvx",
    "uv": "install uv",
    "bunx": "install Bun, which includes bunx",
    "docker": "install Docker, and start it",
    "python": "write python3, or the whole path of a Python",
}
_SCRIPT = re.compile(r".+\.(?:py|js|mjs|cjs|ts|sh|rb|jar)")
_REMOTE_FIXES: tuple[tuple[str, str], ...] = (
    (r"\b401\b|login|log in|authori[sz]ation", "toolspace servers login {name}, or set its headers"),
    (r"\b403\b|forbidden", "its credentials lack a permission: correct its headers or auth"),
    (r"\b404\b|\b405\b|is its url right", "correct the path in its url"),
    (r"not known|getaddrinfo|name resolution|nodename", "correct the host in its url: {origin}"),
    (r"certificate|ssl", "correct its certificate, or name its authority with SSL_CERT_FILE"),
    (r"refused|connect|unreachable", "is it running at {origin}? Start it, or correct its url"),
)
"""A pattern for the error of a server at a URL → how to fix it."""
_INDENT = "    "
_DEFAULT_WIDTH = 100
"""Of the notes below a server, if standard output is not a terminal."""


class ServerGroup(NamedTuple):
    """The servers of one toolspace process."""

    pid: int | None
    """None: the toolspace was started by this command."""
    servers: Sequence[ServerReport]
    error: str
    """Why the process did not respond, or did not do what was requested."""


@click.command("servers", cls=Command)
@click.argument("action", required=False, metavar="[restart|login|logout]")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--no-browser", is_flag=True, help="With login: print the URL of the login page, and open no browser.")
@click.pass_obj
async def command(options: Options, action: str | None, name: str | None, no_browser: bool) -> int:
    """List MCP servers and their status: state, protocol, transport, process, tools, token cost, restarts.

    If a toolspace of the same configuration runs (toolspace mcp, toolspace serve), these are its servers; otherwise
    they are started for the check. restart NAME restarts a server there. login NAME and logout NAME are for servers
    that need OAuth. --verbose shows which tools are skipped, and why.
    """
    set_up_logs(options, os.environ)
    config = read_config(options)
    if action is None:
        return await _show(options, config)
    if action not in _ACTIONS:
        raise click.UsageError(f"there is no action servers {action}{did_you_mean(action, _ACTIONS)}")
    server = _get_server(config, action, name)
    if action == "restart":
        return await _restart(options, config, server)
    if action == "login":
        return await _log_in(options, config, server, use_browser=not no_browser)
    return await _log_out(options, config, server)


def _get_server(config: Config, action: str, name: str | None) -> McpServerSettings:
    if name is None:
        raise click.UsageError(f"the name is missing: toolspace servers {action} NAME")
    if name not in config.mcp_servers:
        names = ", ".join(config.mcp_servers)
        hint = did_you_mean(name, config.mcp_servers)
        hint = hint or (f"; the servers are {names}" if names else "; the configuration has none")
        raise click.UsageError(f'there is no MCP server "{name}"{hint}')
    server = config.mcp_servers[name]
    if action == "restart" and not server.enabled:
        raise click.UsageError(f"{name} is disabled: {config.source('mcpServers', name, 'enabled')}")
    if action == "restart" and server.transport is None:
        raise click.UsageError(f'{name} has neither "command" nor "url": {config.source("mcpServers", name)}')
    return server


# Status and restart


async def _show(options: Options, config: Config) -> int:
    groups = await _load_groups(options, config)
    disabled = [server for server in config.mcp_servers.values() if not _can_start(server)]
    if options.json:
        options.output.document([*_documents(config, groups), *map(_disabled_document, disabled)])
    elif not config.mcp_servers and not any(group.servers for group in groups):
        options.output.note("there are no MCP servers in the configuration")
    else:
        _print_groups(options.output, groups, disabled, verbose=options.verbose)
    failed_servers = [server for group in groups for server in group.servers if server.state == "failed"]
    for server in failed_servers:
        options.output.error(f"{server.name} has failed: {server.last_error}")
    return 1 if failed_servers or any(_lacks_required(config, group) for group in groups) else 0


async def _load_groups(options: Options, config: Config) -> list[ServerGroup]:
    """Returns the servers of every toolspace that runs; otherwise of one that is started for this."""
    responses = await ask_processes(config.state_dir, config.path, ControlRequest("status"))
    if responses:
        return [ServerGroup(response.pid, response.servers, response.error) for response in responses]
    if not any(map(_can_start, config.mcp_servers.values())):
        return []
    async with inspected_toolspace(options) as ts:
        return [ServerGroup(None, report_servers(ts), "")]


async def _restart(options: Options, config: Config, server: McpServerSettings) -> int:
    name = server.name
    async with show_status(options.output, f"restarting {name}"):
        responses = await ask_processes(config.state_dir, config.path, ControlRequest("restart", name))
    groups = [ServerGroup(response.pid, _only(response.servers, name), response.error) for response in responses]
    if not responses:
        options.output.note(f"no toolspace of this configuration runs: starting {name} here, to test it")
        async with inspected_toolspace(options) as ts:
            groups = [ServerGroup(None, _only(report_servers(ts), name), "")]
    if options.json:
        options.output.document(_documents(config, groups))
    else:
        _print_groups(options.output, groups, (), verbose=options.verbose)
    is_healthy = all(
        not group.error and group.servers and group.servers[0].state in _HEALTHY_STATES for group in groups
    )
    return 0 if is_healthy else 1


def _only(servers: Sequence[ServerReport], name: str) -> tuple[ServerReport, ...]:
    return tuple(server for server in servers if server.name == name)


def _can_start(server: McpServerSettings) -> bool:
    return server.enabled and server.transport is not None


def _lacks_required(config: Config, group: ServerGroup) -> bool:
    """Whether a required server is not ready."""
    states = {server.name: server.state for server in group.servers}
    required_names = [server.name for server in config.mcp_servers.values() if server.required and _can_start(server)]
    return bool(group.error) or any(states.get(name) not in _HEALTHY_STATES for name in required_names)


def _documents(config: Config, groups: Sequence[ServerGroup]) -> list[dict[str, Any]]:
    documents: list[dict[str, Any]] = []
    for group in groups:
        for server in group.servers:
            settings = config.mcp_servers.get(server.name)
            document = cast("dict[str, Any]", msgspec.to_builtins(server))
            is_required = settings is not None and settings.required
            documents.append({**document, "required": is_required, "toolspace": group.pid})
        if group.error:
            documents.append({"toolspace": group.pid, "error": group.error})
    return documents


def _disabled_document(server: McpServerSettings) -> dict[str, Any]:
    state = _disabled_state(server)
    return {"name": server.name, "state": state, "transport": server.transport, "required": server.required}


def _disabled_state(server: McpServerSettings) -> str:
    return "disabled" if not server.enabled else "cannot start"


# Table


def _print_groups(
    output: CommandOutput, groups: Sequence[ServerGroup], disabled: Sequence[McpServerSettings], *, verbose: bool
) -> None:
    """Prints a table for each process. The servers that are disabled stand in the last one."""
    visible_groups = [group for group in groups if group.servers or group.error]
    if not visible_groups and disabled:
        visible_groups = [ServerGroup(None, (), "")]
    for number, group in enumerate(visible_groups):
        if group.pid is not None:
            output.line(f"{'' if number == 0 else chr(10)}{output.style(f'toolspace, process {group.pid}', bold=True)}")
        _print_table(output, group.servers, disabled if number == len(visible_groups) - 1 else (), verbose=verbose)
        if group.error:
            output.error(group.error)


def _print_table(
    output: CommandOutput, servers: Sequence[ServerReport], disabled: Sequence[McpServerSettings], *, verbose: bool
) -> None:
    if not servers and not disabled:
        return
    rows = [_HEADER, *map(_cells, servers), *map(_disabled_cells, disabled)]
    header, *lines = align_columns(rows, right=_RIGHT_ALIGNED)
    output.line(output.style(join_columns(header), dim=True))
    for cells, server in zip_longest(lines, servers):
        name, state, *rest = cells
        colour = _COLOURS.get(state.rstrip(), "yellow")
        output.line(join_columns([output.style(name, bold=True), output.style(state, fg=colour), *rest]))
        for title, text in _notes(server, verbose=verbose) if server is not None else ():
            for line in _wrap(output, f"{title}: {text}"):
                output.line(line)


def _cells(server: ServerReport) -> tuple[str, ...]:
    version = server.protocol_version or "-"
    return (
        first_line(server.name),
        server.state,
        f"{version} {server.era}" if server.era is not None else version,
        server.transport,
        str(server.pid) if server.pid is not None else "-",
        str(server.tools),
        f"{server.tokens:,}",
        str(server.restarts),
    )


def _disabled_cells(server: McpServerSettings) -> tuple[str, ...]:
    return first_line(server.name), _disabled_state(server), "-", server.transport or "-", "-", "-", "-", "-"


def _notes(server: ServerReport, *, verbose: bool) -> Iterator[tuple[str, str]]:
    if server.last_error:
        age = f", {_format_age(server.last_error_at)}" if server.last_error_at is not None else ""
        yield f"last error{age}", server.last_error
    if server.circuit == "open" and server.next_probe_at is not None:
        seconds = max(0, math.ceil(server.next_probe_at - time.time()))
        yield "circuit breaker", f"calls fail at once; the next one is let through in {seconds} s"
    if verbose and server.server:
        yield "server", server.server
    if verbose:
        for skipped in server.left_out:
            yield "left out", skipped
    elif server.left_out:
        count = len(server.left_out)
        yield "left out", f"{count} tool{'s' if count > 1 else ''}; --verbose says why"


def _format_age(moment: float) -> str:
    seconds = max(0, int(time.time() - moment))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def _wrap(output: CommandOutput, text: str) -> list[str]:
    width = max(40, output.columns or _DEFAULT_WIDTH)
    text = escape_control_characters(" ".join(text.split()))
    return textwrap.wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT)


# Advice


def suggest_fix(config: Config, server: McpServerSettings, reason: str) -> str:
    """Returns how to fix a server that does not start."""
    place = config.source("mcpServers", server.name)
    if server.transport == "stdio":
        if fix := _missing_file_fix(server):
            return fix
        if re.search(r"is not executable|cannot be started: .*permission denied", reason, re.IGNORECASE):
            return f"chmod +x {server.command}, or set the program that runs it"
        return f"start {server.command} by hand with its args to see more, or correct {place}"
    for pattern, fix in _REMOTE_FIXES:
        if re.search(pattern, reason, re.IGNORECASE):
            return fix.format(name=server.name, origin=_origin(server.url))
    return f"correct {place}, or set its enabled: false"


def _missing_file_fix(server: McpServerSettings) -> str:
    """Returns how to fix a command line with a file that does not exist; empty if all exist."""
    command = server.command or ""
    if server.cwd is not None and not server.cwd.is_dir():
        return f"create the folder {server.cwd}, or correct its cwd"
    if shutil.which(command, path=server.env.get("PATH")) is None:
        if "/" not in command and "\\" not in command:
            return _PROGRAM_FIXES.get(command, f"install {command}, or write its whole path as command")
        if Path(command).exists():
            return f"chmod +x {command}"
        return f"there is no program {command}: correct its command"
    folder = server.cwd or Path.cwd()
    missing = next((arg for arg in server.args if _SCRIPT.fullmatch(arg) and not (folder / arg).exists()), None)
    return f"there is no file {missing}: correct its args, or set its cwd" if missing is not None else ""


def _origin(url: str | None) -> str:
    """Returns the scheme, host and port of a URL, without parts that may be secret."""
    parts = urlsplit(url or "")
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"


# OAuth login


async def _log_in(options: Options, config: Config, server: McpServerSettings, *, use_browser: bool) -> int:
    """Logs in, and restarts the server in the toolspaces that run, so that they use the new login."""
    from toolspace.providers.mcp.oauth.authorization import login
    from toolspace.providers.mcp.oauth.token_store import TokenStore

    output = options.output

    async def show_page(name: str, url: str) -> None:
        output.err(f"Log in to {first_line(name)} on this page:\n  {first_line(url)}")
        if use_browser and await asyncio.to_thread(_open_browser, url):
            output.note("The page should be open in your browser. Waiting…")

    await load_secrets(server)
    await login(
        server.name, build_server_spec(resolve_secrets(server), config), TokenStore(login_dir(config)), show_page
    )
    await ask_processes(config.state_dir, config.path, ControlRequest("restart", server.name))
    _report_login(output, server, "loggedIn", True, f"Logged in to {server.name}.")
    return 0


async def _log_out(options: Options, config: Config, server: McpServerSettings) -> int:
    from toolspace.providers.mcp.oauth.authorization import logout
    from toolspace.providers.mcp.oauth.token_store import TokenStore

    await load_secrets(server)
    was_logged_in = await logout(
        server.name, build_server_spec(resolve_secrets(server), config), TokenStore(login_dir(config))
    )
    if was_logged_in:
        await ask_processes(config.state_dir, config.path, ControlRequest("restart", server.name))
    text = f"Logged out of {server.name}." if was_logged_in else f"There was no login to {server.name}."
    _report_login(options.output, server, "loggedOut", was_logged_in, text)
    return 0


def _report_login(output: CommandOutput, server: McpServerSettings, key: str, value: bool, text: str) -> None:
    if output.json:
        output.document({"name": server.name, key: value})
    else:
        output.line(text)


def _open_browser(url: str) -> bool:
    """Returns whether a browser was started. Never a text browser, which would take over the terminal."""
    has_desktop = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not has_desktop and not os.environ.get("BROWSER"):
        return False
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
