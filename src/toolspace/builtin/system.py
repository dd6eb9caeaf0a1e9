"""The system tools: current time, sleep, and environment variables within `allowedEnv`."""

from __future__ import annotations

import asyncio
import fnmatch
import math
import os
import zoneinfo
from collections.abc import Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any

from toolspace.core.names import did_you_mean
from toolspace.core.tool import Annotations, tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolPermissionError, ToolValidationError

HARMLESS_VARIABLES = ("HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_TIME", "SHELL", "TERM", "TZ", "USER")
"""The names that apply if `allowedEnv` is not set. Powerful ones among them can only be read."""

# Setting one of these decides which code runs, or whom it trusts, in every process that is started later.
_POWERFUL_VARIABLES = (
    "PATH", "HOME", "SHELL", "USER", "IFS", "ENV", "BASH_*", "PROMPT_COMMAND", "PAGER", "EDITOR", "VISUAL",
    "BROWSER", "LD_*", "DYLD_*", "GLIBC_*", "GCONV_PATH", "PYTHON*", "VIRTUAL_ENV", "NODE_*", "NPM_*", "PERL*",
    "RUBY*", "GEM_*", "JAVA_*", "_JAVA_OPTIONS", "JDK_*", "CLASSPATH", "GIT_*", "SSH_*", "PIP_*", "UV_*", "XDG_*",
    "TMPDIR", "TEMP", "TMP", "SSL_*", "*_CA_BUNDLE", "*_PROXY", "DOCKER_*", "AWS_*", "TOOLSPACE_*",
)  # fmt: skip
_MAX_SLEEP = 86_400.0


@tool(category="system", annotations=Annotations(read_only=True, open_world=False))
def current_time(timezone: str | None = None) -> dict[str, Any]:
    """Returns the current date and time.

    Args:
        timezone: An IANA name such as Europe/Berlin; without it, the machine's time zone.
    """
    zone, name = _local_zone() if timezone is None else _find_zone(timezone)
    now = datetime.now(zone)
    return {"timestamp": int(now.timestamp() * 1000), "iso": now.isoformat(timespec="milliseconds"), "timezone": name}


@tool(category="system", annotations=Annotations(read_only=True, idempotent=True, open_world=False))
async def sleep(duration: float) -> dict[str, Any]:
    """Waits for a number of seconds.

    Args:
        duration: The number of seconds.
    """
    if not math.isfinite(duration) or duration < 0:
        raise ToolValidationError(f"duration: expected 0 or more seconds, got {duration}")
    if duration > _MAX_SLEEP:
        raise ToolValidationError(f"duration: {duration:g} s is longer than a day; use a plan for that")
    await asyncio.sleep(duration)
    return {"slept": duration}


# Asynchronous, so that they run on the event loop: starting a thread takes longer, and threads must not change the
# environment at the same time.
@tool(category="system", annotations=Annotations(read_only=True, idempotent=True, open_world=False))
async def get_env(key: str, *, context: ToolContext) -> dict[str, Any]:
    """Reads an environment variable. The value is null if it is not set.

    Args:
        key: The name of the variable.
    """
    _check_allowed(key, context)
    value = os.environ.get(key)
    return {"value": None if value is None else _valid_text(value)}


@tool(category="system", annotations=Annotations(read_only=False, destructive=True, idempotent=True, open_world=False))
async def set_env(key: str, value: str, *, context: ToolContext) -> dict[str, Any]:
    """Sets an environment variable of this process and returns the previous value.

    Args:
        key: The name of the variable.
        value: The new value.
    """
    _check_allowed(key, context)
    if key not in (context.allowed_env or ()) and _matches_any(key.upper(), _POWERFUL_VARIABLES):
        raise ToolPermissionError(
            f"the environment variable {key!r} affects how other programs run; it can be set only if allowedEnv "
            "names it exactly"
        )
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ToolValidationError(
            "value: it contains a null character or half of a surrogate pair, which the environment cannot store"
        )
    previous = os.environ.get(key)
    os.environ[key] = value
    return {"previous": None if previous is None else _valid_text(previous)}


system_tools = (current_time, sleep, get_env, set_env)


def _check_allowed(key: str, context: ToolContext) -> None:
    if not key or "=" in key or "\0" in key or not key.isprintable():
        raise ToolValidationError(f"key: {key[:60]!r} cannot name an environment variable")
    allowed_names = HARMLESS_VARIABLES if context.allowed_env is None else context.allowed_env
    if not _matches_any(key, allowed_names):
        # The same message whether it is set or not: its existence may be a secret.
        names = ", ".join(allowed_names) or "none"
        raise ToolPermissionError(f"the environment variable {key[:60]!r} is not in allowedEnv ({names}); add it there")


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _valid_text(value: str) -> str:
    """A value of the environment as valid text, whatever bytes it has."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _find_zone(name: str) -> tuple[tzinfo, str]:
    if name.upper() in ("UTC", "Z"):
        return UTC, "UTC"  # Works without a time zone database.
    if zone := _load_zone(name):
        return zone, name
    names = zoneinfo.available_timezones()
    if not names:
        raise ToolValidationError(
            f'timezone: {name[:60]!r} is not available: this machine has no time zone database; install "tzdata"'
        )
    hint = did_you_mean(name[:60], sorted(names)) or "; use an IANA name such as Europe/Berlin or UTC"
    raise ToolValidationError(f"timezone: {name[:60]!r} is not a time zone{hint}")


def _local_zone() -> tuple[tzinfo | None, str]:
    """The machine's time zone with its IANA name, or with the system's abbreviation if that name is unknown."""
    link_target = os.path.realpath("/etc/localtime").partition("zoneinfo/")[2]
    for name in (os.environ.get("TZ", "").removeprefix(":"), link_target):
        if name and (zone := _load_zone(name)):
            return zone, name
    local = datetime.now().astimezone()
    return local.tzinfo, local.tzname() or "UTC"


def _load_zone(name: str) -> tzinfo | None:
    """None if it is unknown, not a name ("../x"), or a folder of the database ("America")."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return None
