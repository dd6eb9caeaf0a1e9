"""The editors and agents that use MCP servers, and the files where each keeps them. Reads and writes no file.

`toolspace install` adds an entry to these files; `toolspace init` imports servers from them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Literal, NamedTuple, cast

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
