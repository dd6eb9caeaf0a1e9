"""Opens the toolspace that a command works with: finds its configuration, sets its logs up, closes it again."""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from toolspace.cli.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, set_up_logs
from toolspace.cli.options import Options
from toolspace.cli.output import show_status
from toolspace.config.files import find_config
from toolspace.core.names import SEPARATOR, did_you_mean
from toolspace.errors import ConfigError, ProviderError
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.provider_startup import StartupWait
from toolspace.orchestrator.settings import EffectiveSettings
from toolspace.providers.mcp.callbacks import NO_CALLBACKS, McpCallbacks
from toolspace.toolspace import Toolspace

CONFIG_VARIABLE = "TOOLSPACE_CONFIG"
_log = logging.getLogger("toolspace.cli")
_ALL = StartupWait(wait_for_stragglers=True)
"""A command looks once: a server that is ready a little later would be missing from what it shows."""


@asynccontextmanager
async def started_toolspace(
    options: Options,
    *,
    show_warnings: bool = True,
    patience: StartupWait = _ALL,
    only_for: str | None = None,
    callbacks: McpCallbacks = NO_CALLBACKS,
) -> AsyncGenerator[Toolspace]:
    """The toolspace of the configuration that holds here, ready to be used; `only_for` one tool, if it is named.

    `callbacks` answer what servers ask.
    """
    output = options.output
    set_up_logs(options, os.environ)
    ts = create_toolspace(options, only_for=only_for, callbacks=callbacks)
    ts.startup_wait = patience
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
                f"storage.dir: the state cannot be kept there: {error}; set it to a folder that you may write"
            ) from error
    try:
        yield ts
    finally:
        await ts.aclose()


def create_toolspace(
    options: Options, *, only_for: str | None = None, callbacks: McpCallbacks = NO_CALLBACKS
) -> Toolspace:
    """The toolspace, not started yet. Raises `ConfigError`."""
    return Toolspace.open(
        config_path(options),
        environ=config_environment(options),
        session=session_id(),
        callbacks=callbacks,
        single_tool=only_for,
    )


def config_path(options: Options) -> Path | None:
    """The file that was named, else the nearest one upwards, else None: built-ins only."""
    if named := options.config or os.environ.get(CONFIG_VARIABLE):
        return Path(named)
    try:
        return find_config(Path.cwd())
    except OSError as error:
        raise ConfigError(f"the folder that this runs in cannot be read: {error.strerror}") from error


def config_environment(options: Options) -> dict[str, str]:
    """The variables that configuration may see: without those that are about this command alone."""
    own = (CONFIG_VARIABLE, LEVEL_VARIABLE, FORMAT_VARIABLE)
    environ = {name: value for name, value in os.environ.items() if name not in own}
    if options.trace_mcp:
        environ["TOOLSPACE_TRACE_MCP"] = "true"
    return environ


def session_id() -> str:
    """One session for all commands of a user: a stored output can be read by a later command."""
    return f"session-cli-{os.getuid() if hasattr(os, 'getuid') else getpass.getuser()}"


def find_tool(ts: Toolspace, name: str) -> tuple[CatalogEntry, EffectiveSettings] | None:
    """What a name means, without knowing the arguments: also a bare name that only one namespace offers."""
    found = ts.orchestrator.explain(name)
    if found is None:
        fitting = [tool.name for tool in ts.list_tools() if tool.name.endswith(SEPARATOR + name)]
        found = ts.orchestrator.explain(fitting[0]) if len(fitting) == 1 else None
    return found


def not_found_message(ts: Toolspace, name: str) -> str:
    """Why a name means no tool, and what it might mean."""
    for namespace, reason in ts.orchestrator.unavailable_providers().items():
        if name.startswith(namespace + SEPARATOR):
            return f'provider "{namespace}" is not available: {reason}'
    return f'Tool "{name}" not found{did_you_mean(name, (tool.name for tool in ts.list_tools()))}'


# MERGED from starting: Starts everything that the configuration names, only to look at it: what fails is to be see…

_LOOK = StartupWait(seconds=60, wait_for_stragglers=True)
"""As long as a server has for its start."""


@asynccontextmanager
async def inspected_toolspace(options: Options) -> AsyncGenerator[Toolspace]:
    """The toolspace with its providers started, or known not to. Raises `ConfigError` where it cannot even be made."""
    if not options.verbose:
        # What does not start is told by whoever looks; once is enough.
        for name in ("toolspace.providers", "toolspace.mcp"):
            logging.getLogger(name).addFilter(lambda record: record.levelno > logging.WARNING)
    ts = create_toolspace(options)
    try:
        with suppress(ProviderError):  # One that is required: that, too, is to be looked at.
            await ts.orchestrator.warmup(wait=_LOOK)
        yield ts
    finally:
        await ts.aclose()
