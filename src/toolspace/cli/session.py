"""Opens the toolspace that a command works with: finds its configuration, sets its logs up, closes it again."""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from toolspace.cli.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, set_up_logs
from toolspace.cli.options import Options
from toolspace.cli.status import waiting
from toolspace.config.locate import find_config
from toolspace.core.names import SEPARATOR, did_you_mean
from toolspace.errors import ConfigError
from toolspace.orchestrator.catalog import Entry
from toolspace.orchestrator.settings import Effective
from toolspace.orchestrator.warmup import Patience
from toolspace.providers.mcp.callbacks import NO_CALLBACKS, Callbacks
from toolspace.toolspace import Toolspace

CONFIG_VARIABLE = "TOOLSPACE_CONFIG"
_log = logging.getLogger("toolspace.cli")
_ALL = Patience(stragglers=True)
"""A command looks once: a server that is ready a little later would be missing from what it shows."""


@asynccontextmanager
async def opened(
    options: Options,
    *,
    show_warnings: bool = True,
    patience: Patience = _ALL,
    only_for: str | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> AsyncGenerator[Toolspace]:
    """The toolspace of the configuration that holds here, ready to be used; `only_for` one tool, if it is named.

    `callbacks` answer what servers ask.
    """
    output = options.output
    set_up_logs(options, os.environ)
    ts = open_toolspace(options, only_for=only_for, callbacks=callbacks)
    ts.patience = patience
    for warning in ts.warnings:
        if show_warnings:
            output.warning(warning)
        else:
            _log.info("%s", warning)
    async with waiting(output, "starting"):
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


def open_toolspace(options: Options, *, only_for: str | None = None, callbacks: Callbacks = NO_CALLBACKS) -> Toolspace:
    """The toolspace, not started yet. Raises `ConfigError`."""
    return Toolspace.open(
        config_path(options),
        environ=environment(options),
        session=session_id(),
        callbacks=callbacks,
        only_for=only_for,
    )


def config_path(options: Options) -> Path | None:
    """The file that was named, else the nearest one upwards, else None: built-ins only."""
    if named := options.config or os.environ.get(CONFIG_VARIABLE):
        return Path(named)
    try:
        return find_config(Path.cwd())
    except OSError as error:
        raise ConfigError(f"the folder that this runs in cannot be read: {error.strerror}") from error


def environment(options: Options) -> dict[str, str]:
    """The variables that configuration may see: without those that are about this command alone."""
    own = (CONFIG_VARIABLE, LEVEL_VARIABLE, FORMAT_VARIABLE)
    environ = {name: value for name, value in os.environ.items() if name not in own}
    if options.trace_mcp:
        environ["TOOLSPACE_TRACE_MCP"] = "true"
    return environ


def session_id() -> str:
    """One session for all commands of a user: a stored output can be read by a later command."""
    return f"session-cli-{os.getuid() if hasattr(os, 'getuid') else getpass.getuser()}"


def find_tool(ts: Toolspace, name: str) -> tuple[Entry, Effective] | None:
    """What a name means, without knowing the arguments: also a bare name that only one namespace offers."""
    found = ts.orchestrator.explain(name)
    if found is None:
        fitting = [tool.name for tool in ts.list_tools() if tool.name.endswith(SEPARATOR + name)]
        found = ts.orchestrator.explain(fitting[0]) if len(fitting) == 1 else None
    return found


def not_found(ts: Toolspace, name: str) -> str:
    """Why a name means no tool, and what it might mean."""
    for namespace, reason in ts.orchestrator.unavailable().items():
        if name.startswith(namespace + SEPARATOR):
            return f'provider "{namespace}" is not available: {reason}'
    return f'Tool "{name}" not found{did_you_mean(name, (tool.name for tool in ts.list_tools()))}'
