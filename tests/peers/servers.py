"""Third-party MCP servers, as an editor's configuration names them. Starts none.

path = editor_file(tmp_path, everything=everything(), time=clock())
async with Toolspace.open(path) as ts: …
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.peers.install import npm_program, python_program

Entry = dict[str, Any]


def editor_file(folder: Path, /, **servers: Entry) -> Path:
    """Writes a `.mcp.json`, as Claude Code and others use it."""
    file = folder / ".mcp.json"
    file.write_text(json.dumps({"mcpServers": servers}, indent=2))
    return file


def everything_server(*args: str) -> Entry:
    return _npm("@modelcontextprotocol/server-everything", *args)


def filesystem(*folders: Path) -> Entry:
    return _npm("@modelcontextprotocol/server-filesystem", *map(str, folders))


def memory(file: Path) -> Entry:
    return {**_npm("@modelcontextprotocol/server-memory"), "env": {"MEMORY_FILE_PATH": str(file)}}


def thinking_server() -> Entry:
    return _npm("@modelcontextprotocol/server-sequential-thinking")


def clock(zone: str = "Europe/Berlin") -> Entry:
    return _python("mcp-server-time", "--local-timezone", zone)


def git(repository: Path) -> Entry:
    return _python("mcp-server-git", "--repository", str(repository))


def sqlite(file: Path) -> Entry:
    return _python("mcp-server-sqlite", "--db-path", str(file))


def with_tap(entry: Entry, door: Path) -> Entry:
    """Returns the same server with a `Tap` on its input: see tests/peers/tap.py."""
    tap = Path(__file__).with_name("tap.py")
    return {**entry, "command": sys.executable, "args": [str(tap), str(door), entry["command"], *entry["args"]]}


def _npm(package: str, *args: str) -> Entry:
    command, script = npm_program(package)
    return {"command": command, "args": [script, *args]}


def _python(package: str, *args: str) -> Entry:
    return {"command": str(python_program(package)), "args": list(args)}
