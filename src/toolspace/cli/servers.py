"""`toolspace servers`: how each MCP server is; restarts one, logs in to one.

Where a toolspace of the same configuration runs, its servers are meant; else they are started for a look.
"""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
import webbrowser
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import click
import msgspec

from toolspace.cli.local_toolspace import config_environment, config_path, inspected_toolspace
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, escape_control_characters, first_line, show_status
from toolspace.cli.runner import run
from toolspace.composition.providers import build_server_spec, login_dir
from toolspace.config.load import Config, load_config
from toolspace.config.provider_settings import McpServerSettings
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import register_secrets
from toolspace.providers.mcp.oauth.authorization import login, logout
from toolspace.providers.mcp.oauth.token_store import TokenStore
from toolspace.server import control_socket
from toolspace.server.control_socket import ServerReport

# MERGED from servertable: MCP servers as a table for people: one a line, and beneath it what went wrong.

_COLOURS = {"ready": "green", "idle": "cyan", "failed": "red", "stopped": "red", "disabled": "bright_black"}
_HEAD = ("NAME", "STATE", "PROTOCOL", "TRANSPORT", "PROCESS", "TOOLS", "TOKENS", "RESTARTS")
_RIGHT = ("PROCESS", "TOOLS", "TOKENS", "RESTARTS")
_GAP = "  "
_INDENT = "    "
_WIDTH = 100
"""Of what stands beneath a server, where there is no terminal to say."""


class ServerGroup(NamedTuple):
    """The servers of one toolspace."""

    pid: int | None
    """None: it was started for this look only."""
    servers: Sequence[ServerReport]
    error: str
    """Why it could not answer, or do what it was asked to."""


def print_servers(
    output: CommandOutput, groups: Sequence[ServerGroup], off: Sequence[McpServerSettings], *, verbose: bool
) -> None:
    shown = [group for group in groups if group.servers or group.error]
    if not shown and off:
        shown = [ServerGroup(None, (), "")]
    for number, group in enumerate(shown):
        if group.pid is not None:
            output.line(f"{'' if number == 0 else chr(10)}{output.style(f'toolspace, process {group.pid}', bold=True)}")
        last = number == len(shown) - 1
        _print_group(output, group, off if last else (), verbose=verbose)


def _print_group(output: CommandOutput, group: ServerGroup, off: Sequence[McpServerSettings], *, verbose: bool) -> None:
    rows = [_HEAD, *map(_cells, group.servers), *map(_disabled_cells, off)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    notes = [[], *(list(_notes(server, verbose=verbose)) for server in group.servers), *([] for _ in off)]
    for index, (row, beneath) in enumerate(zip(rows, notes, strict=True)):
        if len(rows) == 1:
            break
        output.line(_line(output, row, widths, head=index == 0))
        for title, text in beneath:
            for line in _wrapped(output, f"{title}: {text}"):
                output.line(line)
    if group.error:
        output.error(group.error)


def _line(output: CommandOutput, row: Sequence[str], widths: Sequence[int], *, head: bool) -> str:
    cells = [
        cell.rjust(width) if title in _RIGHT else cell.ljust(width)
        for title, cell, width in zip(_HEAD, row, widths, strict=True)
    ]
    if head:
        return output.style(_GAP.join(cells).rstrip(), dim=True)
    cells[0] = output.style(cells[0], bold=True)
    cells[1] = output.style(cells[1], fg=_COLOURS.get(row[1], "yellow"))
    return _GAP.join(cells).rstrip()


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
    state = "disabled" if not server.enabled else "cannot start"
    return first_line(server.name), state, "-", server.transport or "-", "-", "-", "-", "-"


def _notes(server: ServerReport, *, verbose: bool) -> Iterator[tuple[str, str]]:
    if server.last_error:
        when = f", {_ago(server.last_error_at)}" if server.last_error_at is not None else ""
        yield f"last error{when}", server.last_error
    if verbose and server.server:
        yield "server", server.server
    if verbose:
        for left in server.left_out:
            yield "left out", left
    elif server.left_out:
        count = len(server.left_out)
        yield "left out", f"{count} tool{'s' if count > 1 else ''}; --verbose says why"


def _ago(moment: float) -> str:
    seconds = max(0, int(time.time() - moment))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def _wrapped(output: CommandOutput, text: str) -> list[str]:
    width = max(40, output.columns or _WIDTH)
    return textwrap.wrap(
        escape_control_characters(" ".join(text.split())), width, initial_indent=_INDENT, subsequent_indent=_INDENT
    )


# MERGED from logins: `toolspace servers login NAME` and `logout NAME`: OAuth at a server, with a person at the bro…


async def log_in(options: Options, config: Config, server: McpServerSettings, *, browser: bool) -> int:
    """Logs in, and has the toolspaces that run take the new login at once."""
    output = options.output

    async def interact(name: str, url: str) -> None:
        output.err(f"Log in to {first_line(name)} on this page:\n  {first_line(url)}")
        if browser and await asyncio.to_thread(_open_page, url):
            output.note("It should be open in your browser. Waiting…")

    await login(server.name, build_server_spec(server), _store(config), interact)
    await control_socket.ask_processes(
        config.state_dir, config.path, control_socket.ControlRequest("restart", server.name)
    )
    _say(output, server, "loggedIn", True, f"Logged in to {server.name}.")
    return 0


async def log_out(options: Options, config: Config, server: McpServerSettings) -> int:
    removed = await logout(server.name, build_server_spec(server), _store(config))
    if removed:
        await control_socket.ask_processes(
            config.state_dir, config.path, control_socket.ControlRequest("restart", server.name)
        )
    said = f"Logged out of {server.name}." if removed else f"There was no login to {server.name}."
    _say(options.output, server, "loggedOut", removed, said)
    return 0


def _say(output: CommandOutput, server: McpServerSettings, key: str, value: bool, text: str) -> None:
    if output.json:
        output.document({"name": server.name, key: value})
    else:
        output.line(text)


def _store(config: Config) -> TokenStore:
    return TokenStore(login_dir(config))


def _open_page(url: str) -> bool:
    """Whether a browser was started. Only one with windows: one in the terminal would take it from us."""
    windows = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not windows and not os.environ.get("BROWSER"):
        return False
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False


_ACTIONS = ("restart", "login", "logout")
_FINE = ("ready", "idle")


@click.command("servers", cls=Command)
@click.argument("action", required=False, metavar="[restart|login|logout]")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--no-browser", is_flag=True, help="With login: only print the address of the page to log in.")
@click.pass_obj
def command(options: Options, action: str | None, name: str | None, no_browser: bool) -> int:
    """Show the MCP servers: state, protocol, transport, process, tools and what their definitions cost, restarts.

    Where a toolspace of the same configuration runs (toolspace mcp), these are its servers; else they are started
    for a look. With restart NAME a server is started anew there; login NAME and logout NAME are for servers that want
    OAuth. --verbose shows which tools are left out, and why.
    """
    set_up_logs(options, os.environ)
    config = load_config(config_path(options), environ=config_environment(options))
    register_secrets(config.secret_values)
    if action is None:
        return run(lambda _: _show(options, config))
    if action not in _ACTIONS:
        raise click.UsageError(f"there is no servers {action}{did_you_mean(action, _ACTIONS)}")
    server = _server(config, action, name)
    if action == "restart":
        return run(lambda _: _restart(options, config, server))
    # Here: with what they need for HTTP.

    if action == "login":
        return run(lambda _: log_in(options, config, server, browser=not no_browser))
    return run(lambda _: log_out(options, config, server))


def _server(config: Config, action: str, name: str | None) -> McpServerSettings:
    if name is None:
        raise click.UsageError(f"which one? toolspace servers {action} NAME")
    if name not in config.mcp_servers:
        known = did_you_mean(name, config.mcp_servers) or _none(config)
        raise click.UsageError(f'there is no MCP server "{name}"{known}')
    server = config.mcp_servers[name]
    if action == "restart" and not server.enabled:
        raise click.UsageError(f"{name} is disabled: {config.source('mcpServers', name, 'enabled')}")
    if action == "restart" and server.transport is None:
        raise click.UsageError(f'{name} has neither "command" nor "url": {config.source("mcpServers", name)}')
    return server


def _none(config: Config) -> str:
    names = ", ".join(config.mcp_servers)
    return f"; they are {names}" if names else "; the configuration names none"


async def _show(options: Options, config: Config) -> int:
    groups = await _groups(options, config)
    off = [server for server in config.mcp_servers.values() if not _can_start(server)]
    if options.json:
        options.output.document([*_facts(config, groups), *map(_off, off)])
    elif not config.mcp_servers and not any(group.servers for group in groups):
        options.output.note("there are no MCP servers in the configuration")
    else:
        print_servers(options.output, groups, off, verbose=options.verbose)
    return 1 if any(_missing(config, group) for group in groups) else 0


async def _groups(options: Options, config: Config) -> list[ServerGroup]:
    """The servers of every toolspace that runs; else of one that is started for this."""
    answers = await control_socket.ask_processes(config.state_dir, config.path, control_socket.ControlRequest("status"))
    if answers:
        return [ServerGroup(answer.pid, answer.servers, answer.error) for answer in answers]
    if not any(map(_can_start, config.mcp_servers.values())):
        return []
    async with show_status(options.output, "starting"), inspected_toolspace(options) as ts:
        return [ServerGroup(None, control_socket.report_servers(ts), "")]


async def _restart(options: Options, config: Config, server: McpServerSettings) -> int:
    name = server.name
    async with show_status(options.output, f"restarting {name}"):
        answers = await control_socket.ask_processes(
            config.state_dir, config.path, control_socket.ControlRequest("restart", name)
        )
    groups = [ServerGroup(answer.pid, _only(answer.servers, name), answer.error) for answer in answers]
    if not answers:
        options.output.note(f"no toolspace of this configuration runs: {name} is started here, to try it")
        async with show_status(options.output, f"starting {name}"), inspected_toolspace(options) as ts:
            groups = [ServerGroup(None, _only(control_socket.report_servers(ts), name), "")]
    if options.json:
        options.output.document(_facts(config, groups))
    else:
        print_servers(options.output, groups, (), verbose=options.verbose)
    fine = all(not group.error and group.servers and group.servers[0].state in _FINE for group in groups)
    return 0 if fine else 1


def _only(servers: Sequence[control_socket.ServerReport], name: str) -> tuple[control_socket.ServerReport, ...]:
    return tuple(server for server in servers if server.name == name)


def _can_start(server: McpServerSettings) -> bool:
    return server.enabled and server.transport is not None


def _missing(config: Config, group: ServerGroup) -> bool:
    """Whether one that is required is not there."""
    states = {server.name: server.state for server in group.servers}
    needed = [server.name for server in config.mcp_servers.values() if server.required and _can_start(server)]
    return bool(group.error) or any(states.get(name) not in _FINE for name in needed)


def _facts(config: Config, groups: Sequence[ServerGroup]) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = []
    for group in groups:
        for server in group.servers:
            known = config.mcp_servers.get(server.name)
            said = cast("dict[str, Any]", msgspec.to_builtins(server))
            facts.append({**said, "required": known is not None and known.required, "toolspace": group.pid})
        if group.error:
            facts.append({"toolspace": group.pid, "error": group.error})
    return facts


def _off(server: McpServerSettings) -> dict[str, Any]:
    state = "disabled" if not server.enabled else "cannot start"
    return {"name": server.name, "state": state, "transport": server.transport, "required": server.required}
