"""`toolspace servers login NAME` and `logout NAME`: OAuth at a server, with a person at the browser."""

from __future__ import annotations

import asyncio
import os
import sys
import webbrowser

from toolspace.cli.options import Options
from toolspace.cli.output import Output, one_line
from toolspace.composition.providers import server_spec, tokens_dir
from toolspace.config.load import Config
from toolspace.config.model import McpServer
from toolspace.providers.mcp.oauth import login, logout
from toolspace.providers.mcp.tokens import TokenStore
from toolspace.server import control


async def log_in(options: Options, config: Config, server: McpServer, *, browser: bool) -> int:
    """Logs in, and has the toolspaces that run take the new login at once."""
    output = options.output

    async def interact(name: str, url: str) -> None:
        output.err(f"Log in to {one_line(name)} on this page:\n  {one_line(url)}")
        if browser and await asyncio.to_thread(_open_page, url):
            output.note("It should be open in your browser. Waiting…")

    await login(server.name, server_spec(server), _store(config), interact)
    await control.ask(config.state_dir, config.path, control.Request("restart", server.name))
    _say(output, server, "loggedIn", True, f"Logged in to {server.name}.")
    return 0


async def log_out(options: Options, config: Config, server: McpServer) -> int:
    removed = await logout(server.name, server_spec(server), _store(config))
    if removed:
        await control.ask(config.state_dir, config.path, control.Request("restart", server.name))
    said = f"Logged out of {server.name}." if removed else f"There was no login to {server.name}."
    _say(options.output, server, "loggedOut", removed, said)
    return 0


def _say(output: Output, server: McpServer, key: str, value: bool, text: str) -> None:
    if output.json:
        output.document({"name": server.name, key: value})
    else:
        output.line(text)


def _store(config: Config) -> TokenStore:
    return TokenStore(tokens_dir(config))


def _open_page(url: str) -> bool:
    """Whether a browser was started. Only one with windows: one in the terminal would take it from us."""
    windows = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not windows and not os.environ.get("BROWSER"):
        return False
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
