"""The editors and agents that speak MCP, and the files in which each keeps its servers. Reads and writes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Literal, NamedTuple, cast

Scope = Literal["project", "user"]


class ClientEnvironment(NamedTuple):
    """What says where a client's files are."""

    project: Path
    """Of the project."""
    home: Path
    environ: Mapping[str, str]
    platform: str
    """As `sys.platform` has it."""

    @classmethod
    def current(cls, folder: Path) -> ClientEnvironment:
        return cls(folder.absolute(), Path.home(), os.environ, sys.platform)

    @property
    def settings_folder(self) -> Path:
        """Where desktop programs keep their settings."""
        if self.platform == "darwin":
            return self.home / "Library" / "Application Support"
        if self.platform == "win32":
            return Path(self.environ.get("APPDATA") or self.home / "AppData" / "Roaming")
        # A relative one is to be ignored, says the standard.
        given = self.environ.get("XDG_CONFIG_HOME", "")
        return Path(given) if os.path.isabs(given) else self.home / ".config"

    def folder_from(self, variable: str, default: Path) -> Path:
        """A folder that the client lets a variable move."""
        return Path(given).expanduser() if (given := self.environ.get(variable)) else default


class McpClient(NamedTuple):
    """One program that has MCP servers."""

    key: str
    """What people write: `claude-code`."""
    title: str
    table: str
    """The key under which its servers stand."""
    scopes: tuple[Scope, ...]
    """Where it looks; the first is where to install."""
    typed: bool = False
    """Whether an entry says `type: stdio`."""
    fills_variables: bool = False
    """Whether `${VAR}` or `${env:VAR}` in a value means a variable; elsewhere it is only text."""
    afterwards: str = ""
    """What makes it see a new server."""
    installs: bool = True
    """Whether `toolspace install` knows how to add to it; its servers are imported in any case."""


CLIENTS = {
    client.key: client
    for client in (
        McpClient(
            "claude-code",
            "Claude Code",
            "mcpServers",
            ("project", "user"),
            typed=True,
            fills_variables=True,
            afterwards="start Claude Code again, and approve the server where it asks",
        ),
        McpClient(
            "claude-desktop",
            "Claude Desktop",
            "mcpServers",
            ("user",),
            afterwards="quit Claude Desktop and start it again",
        ),
        McpClient(
            "cursor",
            "Cursor",
            "mcpServers",
            ("project", "user"),
            fills_variables=True,
            afterwards="Cursor sees it by itself; turn it on under Settings → MCP",
        ),
        McpClient(
            "vscode",
            "VS Code",
            "servers",
            ("project", "user"),
            typed=True,
            fills_variables=True,
            afterwards="run MCP: List Servers in VS Code, and start it",
        ),
        McpClient("codex", "Codex", "mcp_servers", ("user", "project"), afterwards="start Codex again"),
        McpClient("windsurf", "Windsurf", "mcpServers", ("user",), fills_variables=True, installs=False),
        McpClient("zed", "Zed", "context_servers", ("project", "user"), installs=False),
    )
}

INSTALLABLE = tuple(key for key, client in CLIENTS.items() if client.installs)


def config_file(client: McpClient, scope: Scope, around: ClientEnvironment) -> Path:
    """The file in which a client keeps the servers of a scope."""
    folder, home = around.project, around.home
    match client.key, scope:
        case "claude-code", "project":
            return folder / ".mcp.json"
        case "claude-code", _:
            return around.folder_from("CLAUDE_CONFIG_DIR", home) / ".claude.json"
        case "claude-desktop", _:
            return around.settings_folder / "Claude" / "claude_desktop_config.json"
        case "cursor", _:
            return (folder if scope == "project" else home) / ".cursor" / "mcp.json"
        case "vscode", "project":
            return folder / ".vscode" / "mcp.json"
        case "vscode", _:
            return around.settings_folder / "Code" / "User" / "mcp.json"
        case "codex", "project":
            return folder / ".codex" / "config.toml"
        case "codex", _:
            return around.folder_from("CODEX_HOME", home / ".codex") / "config.toml"
        case "windsurf", _:
            return home / ".codeium" / "windsurf" / "mcp_config.json"
        case "zed", "project":
            return folder / ".zed" / "settings.json"
        case _:
            # Zed is no desktop program in this: it uses ~/.config on a Mac too.
            linux = around._replace(platform="linux") if around.platform == "darwin" else around
            return linux.settings_folder / ("Zed" if around.platform == "win32" else "zed") / "settings.json"


def is_toolspace(command: object, args: object) -> bool:
    """Whether a server's entry starts Toolspace itself: `toolspace mcp`, `python -m toolspace mcp`, by `uvx`, …"""
    words = [command, *cast("list[object]", args if isinstance(args, list) else [])]
    texts = [word for word in words if isinstance(word, str)]
    # Both spellings of a path: the file may have been written on another system.
    names = [PurePath(text.replace("\\", "/")).name.casefold().removesuffix(".exe") for text in texts]
    return "toolspace" in names and "mcp" in texts
