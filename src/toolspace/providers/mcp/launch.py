"""What a stdio server is started with: the program, its folder, its environment. Starts nothing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from toolspace.core.secret_masking import is_secret_name
from toolspace.errors import ProviderError
from toolspace.providers.mcp.descendants import MARK, marked
from toolspace.providers.mcp.spec import ServerSpec

_INHERITED = """
    HOME LOGNAME PATH SHELL TERM USER
    LANG LANGUAGE TZ TMPDIR TMP TEMP DISPLAY WAYLAND_DISPLAY DBUS_SESSION_BUS_ADDRESS
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS
    NODE_PATH NODE_OPTIONS NVM_DIR NVM_BIN VOLTA_HOME PNPM_HOME BUN_INSTALL DENO_DIR
    DOCKER_HOST DOCKER_CONTEXT DOCKER_CONFIG PLAYWRIGHT_BROWSERS_PATH
    APPDATA COMSPEC HOMEDRIVE HOMEPATH LOCALAPPDATA PATHEXT PROCESSOR_ARCHITECTURE PROGRAMDATA PROGRAMFILES
    SYSTEMDRIVE SYSTEMROOT USERNAME USERPROFILE
"""
"""What programs need to find their files and the network. Everything else of ours, keys above all, stays here."""
_NAMES = frozenset(_INHERITED.split())
_PREFIXES = ("LC_", "XDG_", "npm_config_", "NPM_CONFIG_", "UV_", "PIP_", "FNM_")
_COMES_WITH = {
    "npx": "Node.js",
    "npm": "Node.js",
    "node": "Node.js",
    "uvx": "uv",
    "bunx": "Bun",
    "bun": "Bun",
    "deno": "Deno",
    "docker": "Docker",
}


class Launch(NamedTuple):
    program: str
    args: tuple[str, ...]
    cwd: str | None
    env: dict[str, str]


def launch(name: str, spec: ServerSpec, mark: str) -> Launch:
    """Raises ProviderError, with the way out, where it could not be started."""
    if not spec.command:
        raise ProviderError(f"server {name!r} has no command; give it one, or a url")
    env = {**inherited_environment(), **spec.env, MARK: marked(mark)}
    if any("\0" in text for text in (spec.command, *spec.args, *env, *env.values())):
        raise ProviderError(f"server {name!r} has a NUL character in its command, args or env; take it out")
    cwd = Path(spec.cwd).expanduser() if spec.cwd is not None else None
    if cwd is not None and not cwd.is_dir():
        raise ProviderError(f"the folder {str(cwd)!r} that server {name!r} is to run in (cwd) does not exist")
    return Launch(_program(name, spec.command, cwd, env), spec.args, str(cwd) if cwd is not None else None, env)


def inherited_environment() -> dict[str, str]:
    """What a server gets of our environment."""
    return {
        key: value
        for key, value in os.environ.items()
        if (key in _NAMES or (sys.platform == "win32" and key.upper() in _NAMES) or key.startswith(_PREFIXES))
        and not _holds_key(key)
        and not value.startswith("()")  # A shell function.
    }


def _holds_key(name: str) -> bool:
    return is_secret_name(name) or "_auth" in name.lower()  # npm_config_//host/:_auth


def _program(name: str, command: str, cwd: Path | None, env: dict[str, str]) -> str:
    command = os.path.expanduser(command)
    if os.path.dirname(command):
        path = (cwd or Path.cwd()) / command
        if not path.is_file():
            wrong = "is a folder; name the program in it" if path.is_dir() else "does not exist"
            raise ProviderError(f"the command {str(path)!r} of server {name!r} {wrong}")
        if not os.access(path, os.X_OK):
            raise ProviderError(
                f"the command {str(path)!r} of server {name!r} is not executable; make it so with chmod +x, or give "
                "the program that runs it as the command and the file in args"
            )
        return str(path)
    if (found := shutil.which(command, path=env.get("PATH", os.defpath))) is None:
        # A hint where the program has another name than what to install.
        hint = f"install {_COMES_WITH[command]}" if command in _COMES_WITH else "install it"
        raise ProviderError(
            f"the command {command!r} of server {name!r} is not on the PATH; {hint}, or give its full path "
            "as the command"
        )
    return found
