"""Maps `TOOLSPACE_*` environment variables to the settings that they override. Reads no file.

A variable is `TOOLSPACE_` and the key in upper snake case; before the key comes the section, except for `defaults`:
`TOOLSPACE_TOOL_TIMEOUT`, `TOOLSPACE_TOOLS_ALLOWED_PATHS`, `TOOLSPACE_STORAGE_DIR`. Used by `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from toolspace.config.document import KeyPath
from toolspace.config.reader import Setting, snake_case
from toolspace.config.top_level import list_overridable_settings
from toolspace.core.names import nearest

PREFIX = "TOOLSPACE_"
RESERVED = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "CONFIG",
        "LOG",
        "LOG_FORMAT",
        "LOG_LEVEL",
        "QUIET",
        "VERBOSE",
        "TRACE",
        "URL",
        "KEY",
        "SECRET_KEY",
        "PUBLIC_KEY",
    )
)
"""Variables that other parts of Toolspace read, or are reserved for them."""


class EnvironmentOverrides(NamedTuple):
    """The settings that the environment overrides."""

    values: dict[KeyPath, tuple[str, Any]]
    """Key of a setting → the variable that overrides it, and its value as a file would have it."""
    warnings: list[str]


def list_variables() -> dict[str, tuple[KeyPath, Setting]]:
    """Every variable that overrides a setting."""
    return {_variable_name(key): (key, setting) for key, setting in list_overridable_settings()}


def read_overrides(environ: Mapping[str, str]) -> EnvironmentOverrides:
    """The settings that the environment overrides. An empty variable counts as not set."""
    variables = list_variables()
    values: dict[KeyPath, tuple[str, Any]] = {}
    warnings: list[str] = []
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or not environ[variable].strip():
            continue
        if variable in variables:
            key, setting = variables[variable]
            values[key] = (variable, _parse(environ[variable], setting))
        elif variable not in RESERVED and (suggestion := _find_similar(variable, variables)):
            warnings.append(f"{variable} (environment): is no setting; did you mean {suggestion}?")
    return EnvironmentOverrides(values, warnings)


def _variable_name(key: KeyPath) -> str:
    parts = key[1:] if key[0] == "defaults" else key
    return PREFIX + "_".join(snake_case(str(part)) for part in parts).upper()


def _parse(text: str, setting: Setting) -> Any:
    text = text.strip()
    value_type = setting.value_type
    if value_type.nullable and text.lower() in ("null", "none"):
        return None
    if value_type.separator is None or text.lower() in ("true", "false"):
        return text
    return [part.strip() for part in text.split(value_type.separator) if part.strip()]


def _find_similar(variable: str, variables: Mapping[str, object]) -> str | None:
    # Compared without the prefix, which makes all of them similar.
    by_suffix = {name.removeprefix(PREFIX): name for name in variables}
    matches = nearest(variable.removeprefix(PREFIX), by_suffix, 1)
    return by_suffix[matches[0]] if matches else None
