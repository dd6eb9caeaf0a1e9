"""`toolspace servers`: how each MCP server is; restarts one, logs in to one.

Where a toolspace of the same configuration runs, its servers are meant; else they are started for a look.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import click
import msgspec

from toolspace.cli.interrupts import run
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.servertable import Group, print_servers
from toolspace.cli.session import config_path, environment
from toolspace.cli.starting import started
from toolspace.cli.status import waiting
from toolspace.config.load import Config, load_config
from toolspace.config.model import McpServer
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import remember_secrets
from toolspace.server import control

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
    config = load_config(config_path(options), environ=environment(options))
    remember_secrets(config.secret_values)
    if action is None:
        return run(lambda _: _show(options, config))
    if action not in _ACTIONS:
        raise click.UsageError(f"there is no servers {action}{did_you_mean(action, _ACTIONS)}")
    server = _server(config, action, name)
    if action == "restart":
        return run(lambda _: _restart(options, config, server))
    from toolspace.cli.logins import log_in, log_out  # Here: with what they need for HTTP.

    if action == "login":
        return run(lambda _: log_in(options, config, server, browser=not no_browser))
    return run(lambda _: log_out(options, config, server))


def _server(config: Config, action: str, name: str | None) -> McpServer:
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


async def _groups(options: Options, config: Config) -> list[Group]:
    """The servers of every toolspace that runs; else of one that is started for this."""
    answers = await control.ask(config.state_dir, config.path, control.Request("status"))
    if answers:
        return [Group(answer.pid, answer.servers, answer.error) for answer in answers]
    if not any(map(_can_start, config.mcp_servers.values())):
        return []
    async with waiting(options.output, "starting"), started(options) as ts:
        return [Group(None, control.report(ts), "")]


async def _restart(options: Options, config: Config, server: McpServer) -> int:
    name = server.name
    async with waiting(options.output, f"restarting {name}"):
        answers = await control.ask(config.state_dir, config.path, control.Request("restart", name))
    groups = [Group(answer.pid, _only(answer.servers, name), answer.error) for answer in answers]
    if not answers:
        options.output.note(f"no toolspace of this configuration runs: {name} is started here, to try it")
        async with waiting(options.output, f"starting {name}"), started(options) as ts:
            groups = [Group(None, _only(control.report(ts), name), "")]
    if options.json:
        options.output.document(_facts(config, groups))
    else:
        print_servers(options.output, groups, (), verbose=options.verbose)
    fine = all(not group.error and group.servers and group.servers[0].state in _FINE for group in groups)
    return 0 if fine else 1


def _only(servers: Sequence[control.ServerReport], name: str) -> tuple[control.ServerReport, ...]:
    return tuple(server for server in servers if server.name == name)


def _can_start(server: McpServer) -> bool:
    return server.enabled and server.transport is not None


def _missing(config: Config, group: Group) -> bool:
    """Whether one that is required is not there."""
    states = {server.name: server.state for server in group.servers}
    needed = [server.name for server in config.mcp_servers.values() if server.required and _can_start(server)]
    return bool(group.error) or any(states.get(name) not in _FINE for name in needed)


def _facts(config: Config, groups: Sequence[Group]) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = []
    for group in groups:
        for server in group.servers:
            known = config.mcp_servers.get(server.name)
            said = cast("dict[str, Any]", msgspec.to_builtins(server))
            facts.append({**said, "required": known is not None and known.required, "toolspace": group.pid})
        if group.error:
            facts.append({"toolspace": group.pid, "error": group.error})
    return facts


def _off(server: McpServer) -> dict[str, Any]:
    state = "disabled" if not server.enabled else "cannot start"
    return {"name": server.name, "state": state, "transport": server.transport, "required": server.required}
