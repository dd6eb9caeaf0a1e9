"""An MCP server of two tools, over stdio, as people write them with the SDK."""

from __future__ import annotations

import os

from mcp.server.mcpserver import MCPServer

app = MCPServer("small", version="1.5")


@app.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@app.tool()
def end() -> str:
    """Ends the server in the middle of the call."""
    os._exit(3)


if __name__ == "__main__":
    app.run("stdio")
