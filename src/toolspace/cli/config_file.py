"""Finds and reads the configuration that a command uses. Imports nothing heavy: `toolspace mcp` needs it first."""

from __future__ import annotations

import os
from pathlib import Path

from toolspace.cli.options import Options
from toolspace.config.configuration import Config
from toolspace.config.find_and_watch import find_config
from toolspace.config.load import load_config
from toolspace.core.secret_masking import register_secrets
from toolspace.errors import ConfigError

CONFIG_VARIABLE = "TOOLSPACE_CONFIG"
LOG_LEVEL_VARIABLE = "TOOLSPACE_LOG"
LOG_FORMAT_VARIABLE = "TOOLSPACE_LOG_FORMAT"


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
    own_variables = (CONFIG_VARIABLE, LOG_LEVEL_VARIABLE, LOG_FORMAT_VARIABLE)
    environ = {name: value for name, value in os.environ.items() if name not in own_variables}
    if options.trace_mcp:
        environ["TOOLSPACE_TRACE_MCP"] = "true"
    return environ
