"""An MCP server that becomes ready when a file exists. Imports nothing but the standard library.

`gated.py GATE TOOL…` offers tools that return their own name. GATE is the file; `-` for a server that is ready at once.
A TOOL `name:text` has this text as its description, and `name!` is read-only.
"""

import json
import sys
import time
from pathlib import Path

INSTRUCTIONS = "Ask before you delete."


def describe(word: str) -> dict:
    name, _, description = word.partition(":")
    tool = {"name": name.rstrip("!"), "description": description, "inputSchema": {"type": "object"}}
    return {**tool, "annotations": {"readOnlyHint": True}} if name.endswith("!") else tool


def answer(method: str, params: dict, tools: list[dict]) -> dict | None:
    if method == "initialize":
        info = {"name": "gated", "version": "1"}
        capabilities = {"tools": {}}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": capabilities,
            "serverInfo": info,
            "instructions": INSTRUCTIONS,
        }
    if method == "tools/list":
        return {"tools": tools}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": params["name"]}]}
    return None


if __name__ == "__main__":
    gate, tools = sys.argv[1], [describe(word) for word in sys.argv[2:]]
    while gate != "-" and not Path(gate).exists():
        time.sleep(0.02)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            result = answer(message["method"], message.get("params", {}), tools)
            error = {"code": -32601, "message": "Method not found"}
            outcome = {"result": result} if result is not None else {"error": error}
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}), flush=True)
