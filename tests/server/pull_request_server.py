"""A small MCP server of a code host, over HTTP, as a process. Prints its URL."""

from __future__ import annotations

import socket

import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("github-tools", instructions="Numbers of pull requests are unique.")


@server.tool()
def list_prs(repo: str) -> list[str]:
    """Lists open pull requests."""
    return [f"{repo}#7 Mend the fence"]


@server.tool()
def create_issue(repo: str, title: str) -> str:
    """Opens an issue."""
    return f"{repo}#8 {title}"


@server.tool()
def delete_repo(repo: str) -> str:
    """Deletes everything."""
    return f"{repo} is gone"


if __name__ == "__main__":
    with socket.socket() as listen_socket:
        listen_socket.bind(("127.0.0.1", 0))
        listen_socket.listen()
        print(f"http://127.0.0.1:{listen_socket.getsockname()[1]}/mcp", flush=True)
        app = server.streamable_http_app()
        uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="on")).run(sockets=[listen_socket])
