"""The editors and agents that use MCP servers, the files where each keeps them, and how such a file is replaced.

`toolspace install` changes an entry of these files; `toolspace init` imports servers from them with `editor_import`. A
file is replaced as a whole or not at all: its mode and owner stay, a symbolic link stays a link, and a change by
another program is never lost.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Literal, NamedTuple, cast

from toolspace.config.file_formats import display_name
from toolspace.errors import ConfigError

MAX_BYTES = 50_000_000
"""Of a settings file. Some editors keep their history in it."""
_ATTEMPTS = 5
Scope = Literal["project", "user"]


class ClientEnvironment(NamedTuple):
    """Everything that decides where the files of an MCP client are."""

    project: Path
    """The project folder."""
    home: Path
    environ: Mapping[str, str]
    platform: str
    """As in `sys.platform`."""

    @classmethod
    def current(cls, project: Path) -> ClientEnvironment:
        return cls(project.absolute(), Path.home(), os.environ, sys.platform)

    @property
    def settings_folder(self) -> Path:
        """Where desktop programs keep their settings on this platform."""
        if self.platform == "darwin":
            return self.home / "Library" / "Application Support"
        if self.platform == "win32":
            return Path(self.environ.get("APPDATA") or self.home / "AppData" / "Roaming")
        # The XDG standard says to ignore a relative path.
        config_home = self.environ.get("XDG_CONFIG_HOME", "")
        return Path(config_home) if os.path.isabs(config_home) else self.home / ".config"

    def folder_from(self, variable: str, default: Path) -> Path:
        """Returns the folder that a variable of the client names, else the default."""
        value = self.environ.get(variable)
        return Path(value).expanduser() if value else default


class McpClient(NamedTuple):
    """A program that uses MCP servers."""

    key: str
    """Its name on the command line: `claude-code`."""
    title: str
    table: str
    """The key of its servers in its settings file."""
    scopes: tuple[Scope, ...]
    """The scopes that it has; `install` uses the first by default."""
    has_entry_type: bool = False
    """Whether an entry has `type: stdio`."""
    fills_variables: bool = False
    """Whether it replaces `${VAR}` and `${env:VAR}` in values. In other clients that is plain text."""
    next_step: str = ""
    """What the user does after an entry was added."""
    is_installable: bool = True
    """Whether `toolspace install` supports it. Its servers can be imported in any case."""


CLIENTS = {
    client.key: client
    for client in (
        McpClient(
            "claude-code",
            "Claude Code",
            "mcpServers",
            ("project", "user"),
            has_entry_type=True,
            fills_variables=True,
            next_step="Restart Claude Code, and approve the server if it asks.",
        ),
        McpClient(
            "claude-desktop",
            "Claude Desktop",
            "mcpServers",
            ("user",),
            next_step="Quit Claude Desktop and start it again.",
        ),
        McpClient(
            "cursor",
            "Cursor",
            "mcpServers",
            ("project", "user"),
            fills_variables=True,
            next_step="Cursor finds it by itself; enable it under Settings → MCP.",
        ),
        McpClient(
            "vscode",
            "VS Code",
            "servers",
            ("project", "user"),
            has_entry_type=True,
            fills_variables=True,
            next_step="Run MCP: List Servers in VS Code, and start it.",
        ),
        McpClient("codex", "Codex", "mcp_servers", ("user", "project"), next_step="Restart Codex."),
        McpClient("windsurf", "Windsurf", "mcpServers", ("user",), fills_variables=True, is_installable=False),
        McpClient("zed", "Zed", "context_servers", ("project", "user"), is_installable=False),
    )
}

INSTALLABLE = tuple(key for key, client in CLIENTS.items() if client.is_installable)


def config_file(client: McpClient, scope: Scope, environment: ClientEnvironment) -> Path:
    """Returns the file in which a client keeps the servers of a scope."""
    project, home = environment.project, environment.home
    match client.key, scope:
        case "claude-code", "project":
            return project / ".mcp.json"
        case "claude-code", _:
            return environment.folder_from("CLAUDE_CONFIG_DIR", home) / ".claude.json"
        case "claude-desktop", _:
            return environment.settings_folder / "Claude" / "claude_desktop_config.json"
        case "cursor", _:
            return (project if scope == "project" else home) / ".cursor" / "mcp.json"
        case "vscode", "project":
            return project / ".vscode" / "mcp.json"
        case "vscode", _:
            return environment.settings_folder / "Code" / "User" / "mcp.json"
        case "codex", "project":
            return project / ".codex" / "config.toml"
        case "codex", _:
            return environment.folder_from("CODEX_HOME", home / ".codex") / "config.toml"
        case "windsurf", _:
            return home / ".codeium" / "windsurf" / "mcp_config.json"
        case "zed", "project":
            return project / ".zed" / "settings.json"
        case _:
            # Zed uses ~/.config on a Mac too.
            zed = environment._replace(platform="linux") if environment.platform == "darwin" else environment
            return zed.settings_folder / ("Zed" if environment.platform == "win32" else "zed") / "settings.json"


def is_toolspace(command: object, args: object) -> bool:
    """Whether an entry starts Toolspace itself: `toolspace mcp`, `python -m toolspace mcp`, `uvx toolspace mcp`, …"""
    words = [command, *cast("list[object]", args if isinstance(args, list) else [])]
    texts = [word for word in words if isinstance(word, str)]
    # With both kinds of slashes: the file may come from another system.
    names = [PurePath(text.replace("\\", "/")).name.casefold().removesuffix(".exe") for text in texts]
    return "toolspace" in names and "mcp" in texts


# The files


def read_text(path: Path) -> str:
    """Returns the text of a settings file; empty if there is none. Raises `ConfigError`."""
    return _read(_resolve_link(path), display_name(path))[0]


def rewrite_file(path: Path, change: Callable[[str], str]) -> tuple[str, str]:
    """Replaces the text of a file by the result of `change`, and returns the text before and after.

    The new text is on the disk before it replaces the old file. If another program writes the file in between, the
    change is applied to the new text. Raises `ConfigError`.
    """
    name = display_name(path)
    target = _resolve_link(path)
    for _ in range(_ATTEMPTS):
        text, status = _read(target, name)
        new_text = change(text)
        if new_text == text or _replace(target, name, new_text.encode(), status):
            return text, new_text
    raise ConfigError(f"{name}: another program keeps changing it; close that program and try again")


def _resolve_link(path: Path) -> Path:
    """Returns the file that a symbolic link leads to. Raises `ConfigError` if the link is broken or not trusted."""
    name = display_name(path)
    try:
        link = path.lstat()
    except FileNotFoundError:
        return path
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if not stat.S_ISLNK(link.st_mode):
        return path
    try:
        target = path.resolve(strict=True)
        owner = target.stat().st_uid
    except (OSError, RuntimeError):
        raise ConfigError(
            f"{name}: is a link to {os.readlink(path)}, which does not exist; create that file, or remove the link"
        ) from None
    if hasattr(os, "geteuid") and link.st_uid not in (os.geteuid(), owner):
        raise ConfigError(f"{name}: is a link of another user, to a file that is not theirs; remove it")
    return target


def _read(target: Path, name: str) -> tuple[str, os.stat_result | None]:
    try:
        # Non-blocking: opening a named pipe would wait for a writer.
        descriptor = os.open(target, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return "", None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{name}: is not a regular file")
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES:,} bytes; add the server by hand")
    try:
        return content.decode(), status
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text ({error.reason}); nothing was changed") from None


def _replace(target: Path, name: str, content: bytes, status: os.stat_result | None) -> bool:
    """Returns False, and changes nothing, if the file was written since `status` was read."""
    if status is not None and hasattr(os, "geteuid") and status.st_uid != os.geteuid() != 0:
        raise ConfigError(f"{name}: belongs to another user; nothing was changed")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                stream.flush()
                _copy_owner_and_mode(descriptor, status)
                os.fsync(descriptor)
            if not _is_unchanged(target, status):
                os.unlink(temporary)
                return False
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"{name}: cannot be written: {error.strerror or error}; nothing was changed") from None
    return True


def _copy_owner_and_mode(descriptor: int, status: os.stat_result | None) -> None:
    if not hasattr(os, "fchmod"):
        return
    if status is None:
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(descriptor, 0o666 & ~mask)  # As any new file of the user.
        return
    if os.geteuid() == 0:
        os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))


def _is_unchanged(target: Path, status: os.stat_result | None) -> bool:
    try:
        current = target.stat()
    except FileNotFoundError:
        return status is None
    return status is not None and (current.st_ino, current.st_mtime_ns, current.st_size) == (
        status.st_ino,
        status.st_mtime_ns,
        status.st_size,
    )
