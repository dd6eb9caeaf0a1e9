"""A hand-written stdio server of the stateless era that answers discovery late.

It answers the question for its era only when the next request is there already, and then refuses the handshake: as a
server does that was still being downloaded when it was asked.
"""

import json
import sys

DISCOVERED = {
    "supportedVersions": ["2026-07-28"],
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "late", "version": "1"},
    "resultType": "complete",
    "ttlMs": 0,
    "cacheScope": "public",
}
TOOLS = [{"name": "hello", "inputSchema": {"type": "object"}}]


def send(request: dict, **answer: object) -> None:
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)


def answer(request: dict) -> None:
    method = request["method"]
    if method == "server/discover":
        send(request, result=DISCOVERED)
    elif method == "tools/list":
        send(request, result={"tools": TOOLS, "resultType": "complete", "ttlMs": 0, "cacheScope": "public"})
    elif method == "tools/call":
        send(request, result={"content": [{"type": "text", "text": "hello"}], "resultType": "complete"})
    else:
        send(request, error={"code": -32600, "message": "the initialize handshake is not accepted"})


first = json.loads(sys.stdin.readline())
second = json.loads(sys.stdin.readline())
answer(first)
answer(second)
for line in sys.stdin:
    if "id" in (request := json.loads(line)):
        answer(request)
