"""Which `TOOLSPACE_*` variables override which settings. Reads no file.

The rule: `TOOLSPACE_` and the key in upper snake case; before it the section, except for `defaults`:
`TOOLSPACE_TOOL_TIMEOUT`, `TOOLSPACE_TOOLS_ALLOWED_PATHS`, `TOOLSPACE_STORAGE_DIR`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from toolspace.config.document import KeyPath
from toolspace.config.reader import Setting, snake_case
from toolspace.config.tool_settings import single_settings
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
"""Variables that other parts of Toolspace read, and those kept for them."""


class EnvironmentOverrides(NamedTuple):
    values: dict[KeyPath, tuple[str, Any]]
    """Setting → the variable that overrides it, and its value as a file would have it."""
    warnings: list[str]


def list_variables() -> dict[str, tuple[KeyPath, Setting]]:
    """Every variable that overrides a setting."""
    return {_variable(path): (path, setting) for path, setting in single_settings()}


def read_overrides(environ: Mapping[str, str]) -> EnvironmentOverrides:
    """The settings that the environment overrides. An empty variable counts as not set."""
    known = list_variables()
    values: dict[KeyPath, tuple[str, Any]] = {}
    warnings: list[str] = []
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or not environ[variable].strip():
            continue
        if variable in known:
            path, setting = known[variable]
            values[path] = (variable, _value(environ[variable], setting))
        elif variable not in RESERVED and (meant := _similar(variable, known)):
            warnings.append(f"{variable} (environment): is no setting; did you mean {meant}?")
    return EnvironmentOverrides(values, warnings)


def _variable(path: KeyPath) -> str:
    keys = path[1:] if path[0] == "defaults" else path
    return PREFIX + "_".join(snake_case(str(key)) for key in keys).upper()


def _value(text: str, setting: Setting) -> Any:
    text = text.strip()
    if setting.kind.nullable and text.lower() in ("null", "none"):
        return None
    if setting.kind.separator is None or text.lower() in ("true", "false"):
        return text
    return [part.strip() for part in text.split(setting.kind.separator) if part.strip()]


def _similar(variable: str, known: Mapping[str, object]) -> str | None:
    # Without the prefix, which makes everything look alike.
    short = {name.removeprefix(PREFIX): name for name in known}
    close = nearest(variable.removeprefix(PREFIX), short, 1)
    return short[close[0]] if close else None
