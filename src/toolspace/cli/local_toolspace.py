"""Opens the toolspace of the current configuration, for commands that work without a gateway.

Finds the configuration, sets up the logs, starts the providers and closes everything again.
"""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolspace.cli.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, set_up_logs
from toolspace.cli.options import Options
from toolspace.cli.output import first_line, show_status
from toolspace.config.configuration import Config
from toolspace.config.find_and_watch import find_config
from toolspace.config.load import load_config
from toolspace.core.approvals import ApprovalCallback
from toolspace.core.names import SEPARATOR, did_you_mean
from toolspace.core.secret_masking import register_secrets
from toolspace.errors import ConfigError, ProviderError
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.effective_settings import EffectiveSettings
from toolspace.orchestrator.provider_startup import StartupWait
from toolspace.providers.mcp.server_spec import NO_CALLBACKS, McpCallbacks
from toolspace.toolspace import Toolspace

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

CONFIG_VARIABLE = "TOOLSPACE_CONFIG"
_log = logging.getLogger("toolspace.cli")
_WAIT_FOR_ALL = StartupWait(wait_for_stragglers=True)
"""A command prints once: a server that is ready a little later would be missing from its output."""
_WAIT_FOR_CHECK = StartupWait(seconds=60, wait_for_stragglers=True)
"""As long as a server may take to start."""


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
    async with show_status(output, "starting"):
        try:
            await ts.__aenter__()
        except OSError as error:
            raise ConfigError(
                f"storage.dir: the state directory cannot be used: {error}; set it to a folder that you may write"
            ) from error
    try:
        yield ts
    finally:
        await ts.aclose()


@asynccontextmanager
async def inspected_toolspace(options: Options) -> AsyncGenerator[Toolspace]:
    """Yields the toolspace after every provider has started or failed, also a required one. Raises `ConfigError`."""
    if not options.verbose:
        # The command reports what does not start, so the log need not.
        for name in ("toolspace.providers", "toolspace.mcp"):
            logging.getLogger(name).addFilter(lambda record: record.levelno > logging.WARNING)
    ts = create_toolspace(options)
    try:
        with suppress(ProviderError):
            await ts.orchestrator.warmup(wait=_WAIT_FOR_CHECK)
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


def read_config(options: Options) -> Config:
    """Returns the configuration, and registers its secrets for masking. Raises `ConfigError`."""
    config = load_config(config_path(options), environ=config_environment(options))
    register_secrets(config.secret_values)
    return config


def config_path(options: Options) -> Path | None:
    """Returns the file of `--config` or `TOOLSPACE_CONFIG`, else the nearest one upwards; None: built-in tools only."""
    if path := options.config or os.environ.get(CONFIG_VARIABLE):
        return Path(path)
    try:
        return find_config(Path.cwd())
    except OSError as error:
        raise ConfigError(f"the current folder cannot be read: {error.strerror}") from error


def config_environment(options: Options) -> dict[str, str]:
    """Returns the environment variables for the configuration, without those that only the command line uses."""
    own_variables = (CONFIG_VARIABLE, LEVEL_VARIABLE, FORMAT_VARIABLE)
    environ = {name: value for name, value in os.environ.items() if name not in own_variables}
    if options.trace_mcp:
        environ["TOOLSPACE_TRACE_MCP"] = "true"
    return environ


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
