"""Opens the toolspace of the current configuration, for commands that work without a gateway.

Finds the configuration, sets up the logs, starts the providers and closes everything again.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING

import click

from toolspace.cli.config_file import config_environment, config_path
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Options
from toolspace.cli.output import first_line, show_status
from toolspace.core.approvals import ApprovalCallback
from toolspace.core.names import SEPARATOR, did_you_mean
from toolspace.errors import ConfigError, ProviderError
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.effective_settings import EffectiveSettings
from toolspace.orchestrator.provider_startup import StartupWait
from toolspace.providers.mcp.server_spec import NO_CALLBACKS, McpCallbacks
from toolspace.toolspace import Toolspace

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_log = logging.getLogger("toolspace.cli")
_WAIT_FOR_ALL = StartupWait(seconds=65, wait_for_stragglers=True)
"""A command prints once: a server that is ready a little later would be missing from its output. Each provider gets a
little more than the time that an MCP server may take to start, so that it is ready or has failed."""
ONLY_REQUIRED = StartupWait(only_required=True)
"""For processes that serve: the others start in the background, and clients are notified of their tools."""
_SHOWN_NAMES = 3


@asynccontextmanager
async def started_toolspace(
    options: Options,
    *,
    show_warnings: bool = True,
    startup_wait: StartupWait = _WAIT_FOR_ALL,
    single_tool: str | None = None,
    callbacks: McpCallbacks = NO_CALLBACKS,
    on_approval: ApprovalCallback | None = None,
) -> AsyncGenerator[Toolspace]:
    """Yields the toolspace with its providers started; with `single_tool` only those that this tool needs.

    `callbacks` handle the requests of MCP servers, `on_approval` decides calls that need approval. Raises
    `ConfigError`, and `ProviderError` if a required provider does not start.
    """
    output = options.output
    set_up_logs(options, os.environ)
    ts = create_toolspace(options, single_tool=single_tool, callbacks=callbacks, on_approval=on_approval)
    ts.startup_wait = startup_wait
    for warning in ts.warnings:
        if show_warnings:
            output.warning(warning)
        else:
            _log.info("%s", warning)
    async with show_status(output, "starting", lambda: _describe_progress(ts)):
        await _start(ts)
    try:
        yield ts
    finally:
        await ts.aclose()


@asynccontextmanager
async def starting_toolspace(
    options: Options, *, callbacks: McpCallbacks, on_approval: ApprovalCallback | None = None
) -> AsyncGenerator[tuple[Toolspace, asyncio.Task[None]]]:
    """Yields a toolspace at once, and the task that starts it. Raises `ConfigError`.

    The task ends when the required providers are ready. It raises `ProviderError` if one does not start.
    """
    set_up_logs(options, os.environ)
    ts = create_toolspace(options, callbacks=callbacks, on_approval=on_approval)
    ts.startup_wait = ONLY_REQUIRED
    for warning in ts.warnings:
        _log.info("%s", warning)
    start = asyncio.create_task(_start(ts))
    try:
        yield ts, start
    finally:
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await ts.aclose()


async def _start(ts: Toolspace) -> None:
    try:
        await ts.__aenter__()
    except OSError as error:
        raise ConfigError(
            f"storage.dir: the state directory cannot be used: {error}; set it to a folder that you may write"
        ) from error


def _describe_progress(ts: Toolspace) -> str:
    """Returns how many MCP servers are ready or have failed, and which of the others are starting."""
    servers = ts.list_servers()
    starting_names = [server.name for server in servers if server.state in ("stopped", "starting")]
    if not starting_names:
        return ""
    more = f" and {len(starting_names) - _SHOWN_NAMES} more" if len(starting_names) > _SHOWN_NAMES else ""
    names = ", ".join(starting_names[:_SHOWN_NAMES])
    return f"{len(servers) - len(starting_names)} of {len(servers)} servers; waiting for {names}{more}"


@asynccontextmanager
async def inspected_toolspace(options: Options) -> AsyncGenerator[Toolspace]:
    """Yields the toolspace after every provider has started or failed, also a required one. Raises `ConfigError`."""
    if not options.verbose:
        # The command reports what does not start, so the log need not.
        for name in ("toolspace.providers", "toolspace.mcp"):
            logging.getLogger(name).addFilter(lambda record: record.levelno > logging.WARNING)
    ts = create_toolspace(options)
    try:
        async with show_status(options.output, "starting", lambda: _describe_progress(ts)):
            with suppress(ProviderError):
                await ts.orchestrator.warmup(wait=_WAIT_FOR_ALL)
        yield ts
    finally:
        await ts.aclose()


def create_toolspace(
    options: Options,
    *,
    single_tool: str | None = None,
    callbacks: McpCallbacks = NO_CALLBACKS,
    on_approval: ApprovalCallback | None = None,
) -> Toolspace:
    """Returns the toolspace, not started. Raises `ConfigError`."""
    return Toolspace.open(
        config_path(options),
        environ=config_environment(options),
        session=session_id(),
        callbacks=callbacks,
        single_tool=single_tool,
        on_approval=on_approval,
    )


def session_id() -> str:
    """Returns one id for all commands of a user, so that a later command can read a stored output."""
    return f"session-cli-{os.getuid() if hasattr(os, 'getuid') else getpass.getuser()}"


def find_tool(ts: Toolspace, name: str) -> tuple[CatalogEntry, EffectiveSettings] | None:
    """Returns the tool of a name, or of a name without its namespace if only one tool fits; else None."""
    match = ts.orchestrator.explain(name)
    if match is None:
        candidates = [tool.name for tool in ts.list_tools() if tool.name.endswith(SEPARATOR + name)]
        match = ts.orchestrator.explain(candidates[0]) if len(candidates) == 1 else None
    return match


def not_found_message(ts: Toolspace, name: str) -> str:
    """Returns why there is no tool of a name, with the nearest names."""
    for namespace, reason in ts.orchestrator.unavailable_providers().items():
        if name.startswith(namespace + SEPARATOR):
            return f'provider "{namespace}" is not available: {reason}'
    return f'Tool "{name}" not found{did_you_mean(name, (tool.name for tool in ts.list_tools()))}'


def complete_tool_name(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the tools whose names begin with the text. Starts no provider, never fails and never prints."""
    from click.shell_completion import CompletionItem

    with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
        try:
            tools = create_toolspace(context.ensure_object(Options)).list_tools()
        except (Exception, SystemExit):
            return []
    return [
        CompletionItem(tool.name, help=first_line(tool.description))
        for tool in tools
        if tool.name.startswith(incomplete)
    ]
