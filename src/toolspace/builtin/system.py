"""The system tools: the time, waiting, and the environment variables that a call may see."""

from __future__ import annotations

import asyncio
import fnmatch
import math
import os
import zoneinfo
from collections.abc import Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.function_tool import tool
from toolspace.core.names import did_you_mean
from toolspace.core.tool import Annotations
from toolspace.errors import ToolPermissionError, ToolValidationError

HARMLESS = ("HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_TIME", "SHELL", "TERM", "TZ", "USER")
"""What may be read where `allowedEnv` is not set."""

# Whoever sets one of these decides what code runs, or whom it trusts, in every process started from now on.
_POWERFUL = (
    *(
        "PATH",
        "HOME",
        "SHELL",
        "USER",
        "IFS",
        "ENV",
        "BASH_*",
        "PROMPT_COMMAND",
        "PAGER",
        "EDITOR",
        "VISUAL",
        "BROWSER",
    ),
    *(
        "LD_*",
        "DYLD_*",
        "GLIBC_*",
        "GCONV_PATH",
        "PYTHON*",
        "VIRTUAL_ENV",
        "NODE_*",
        "NPM_*",
        "PERL*",
        "RUBY*",
        "GEM_*",
    ),
    *(
        "JAVA_*",
        "_JAVA_OPTIONS",
        "JDK_*",
        "CLASSPATH",
        "GIT_*",
        "SSH_*",
        "PIP_*",
        "UV_*",
        "XDG_*",
        "TMPDIR",
        "TEMP",
        "TMP",
    ),
    *("SSL_*", "*_CA_BUNDLE", "*_PROXY", "DOCKER_*", "AWS_*", "TOOLSPACE_*"),
)
_LONGEST_SLEEP = 86_400.0


@tool(category="system", annotations=Annotations(read_only=True, open_world=False))
def current_time(timezone: str | None = None) -> dict[str, Any]:
    """Tells the current date and time.

    Args:
        timezone: IANA name such as Europe/Berlin; the machine's own when left out.
    """
    zone, name = _local_zone() if timezone is None else _named_zone(timezone)
    now = datetime.now(zone)
    return {
        "timestamp": int(now.timestamp() * 1000),
        "iso": now.isoformat(timespec="milliseconds"),
        "timezone": name,
    }


@tool(category="system", annotations=Annotations(read_only=True, idempotent=True, open_world=False))
async def sleep(duration: float) -> dict[str, Any]:
    """Waits for some seconds.

    Args:
        duration: Seconds.
    """
    if not math.isfinite(duration) or duration < 0:
        raise ToolValidationError(f"duration: expected a number of seconds from 0 up, got {duration}")
    if duration > _LONGEST_SLEEP:
        raise ToolValidationError(f"duration: {duration:g} s is longer than a day; use a plan for that")
    await asyncio.sleep(duration)
    return {"slept": duration}


# Both on the loop: they are quicker than the way to a thread, and the environment is not safe to change from several.
@tool(category="system", annotations=Annotations(read_only=True, idempotent=True, open_world=False))
async def get_env(key: str, *, context: ToolContext) -> dict[str, Any]:
    """Reads an environment variable; null if it is not set.

    Args:
        key: Its name.
    """
    _check_allowed(key, context)
    value = os.environ.get(key)
    return {"value": None if value is None else _text(value)}


@tool(
    category="system",
    annotations=Annotations(read_only=False, destructive=True, idempotent=True, open_world=False),
)
async def set_env(key: str, value: str, *, context: ToolContext) -> dict[str, Any]:
    """Sets an environment variable of this process, and tells the previous value.

    Args:
        key: Its name.
        value: The new value.
    """
    _check_allowed(key, context)
    if key not in (context.allowed_env or ()) and _is_one_of(key.upper(), _POWERFUL):
        raise ToolPermissionError(
            f"the environment variable {key!r} decides how other programs run; it is set only where allowedEnv "
            "names it exactly"
        )
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ToolValidationError("value: it holds a null or half a character, which the environment cannot carry")
    previous = os.environ.get(key)
    os.environ[key] = value
    return {"previous": None if previous is None else _text(previous)}


system_tools = (current_time, sleep, get_env, set_env)


def _check_allowed(key: str, context: ToolContext) -> None:
    if not key or "=" in key or "\0" in key or not key.isprintable():
        raise ToolValidationError(f"key: {key[:60]!r} cannot name an environment variable")
    allowed = HARMLESS if context.allowed_env is None else context.allowed_env
    if not _is_one_of(key, allowed):
        # The same words whether it is set or not: its very presence may be a secret.
        names = ", ".join(allowed) or "none"
        raise ToolPermissionError(f"the environment variable {key[:60]!r} is not in allowedEnv ({names}); add it there")


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _text(value: str) -> str:
    """A value of the environment as text that JSON can carry, whatever bytes it is made of."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _named_zone(name: str) -> tuple[tzinfo, str]:
    if name.upper() in ("UTC", "Z"):
        return UTC, "UTC"  # Known even where no time zone database is installed.
    try:
        return zoneinfo.ZoneInfo(name), name
    except (KeyError, ValueError, OSError):
        pass  # Unknown, no name at all ("../x"), or a folder of the database ("America").
    known = zoneinfo.available_timezones()
    if not known:
        raise ToolValidationError(
            f'timezone: {name[:60]!r} cannot be looked up: this machine has no time zone database; install "tzdata"'
        )
    hint = did_you_mean(name[:60], sorted(known)) or "; use an IANA name such as Europe/Berlin or UTC"
    raise ToolValidationError(f"timezone: {name[:60]!r} is not a time zone{hint}")


def _local_zone() -> tuple[tzinfo | None, str]:
    """The machine's zone under its IANA name if that can be told, else under the system's own abbreviation."""
    for name in (
        os.environ.get("TZ", "").removeprefix(":"),
        os.path.realpath("/etc/localtime").partition("zoneinfo/")[2],
    ):
        if name:
            try:
                return zoneinfo.ZoneInfo(name), name
            except (KeyError, ValueError, OSError):
                continue
    local = datetime.now().astimezone()
    return local.tzinfo, local.tzname() or "UTC"
