"""A server of the MCP SDK over HTTP in the handshake era that forgets its sessions.

`python forgetful.py PORT LOG [EVERY [MESSAGE]]`: LOG is a file that it writes one line to for every opened session and
every effect. After EVERY effects it forgets all sessions and answers their requests with HTTP 404 and MESSAGE, a
JSON-RPC error; without MESSAGE with a page that is not JSON. A restart forgets the sessions, too.
"""

import json
import sys
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer

PORT, LOG, *FORGETTING = sys.argv[1:]
EVERY = int(FORGETTING[0]) if FORGETTING else 0
ERROR = json.loads(FORGETTING[1]) if len(FORGETTING) > 1 else None
server = MCPServer("forgetful")
session_ids: set[bytes] = set()
forgotten_ids: set[bytes] = set()
effects: list[int] = []


def note(line: str) -> None:
    with open(LOG, "a", encoding="utf-8") as file:
        file.write(line + "\n")


@server.tool()
async def order(number: int) -> str:
    note(f"order {number}")
    effects.append(number)
    if EVERY and len(effects) % EVERY == 0:
        forgotten_ids.update(session_ids)
    return f"ordered {number}"


library = server.streamable_http_app()


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        await library(scope, receive, send)
        return
    headers = dict(scope["headers"])
    if headers.get(b"mcp-method") == b"server/discover":
        await answer(send, 400, {"code": -32601, "message": "Method not found"})
    elif headers.get(b"mcp-session-id") in forgotten_ids:
        await answer(send, 404, ERROR)
    else:

        async def watch(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                session_id = dict(message["headers"]).get(b"mcp-session-id")
                if session_id is not None and session_id not in session_ids:
                    session_ids.add(session_id)
                    note("session")
            await send(message)

        await library(scope, receive, watch)


async def answer(send: Any, status: int, error: Any) -> None:
    body = b"<h1>Not Found</h1>"
    if error is not None:
        body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    content_type = b"text/html" if error is None else b"application/json"
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


uvicorn.run(app, port=int(PORT), log_level="error")  # pyright: ignore[reportArgumentType]
