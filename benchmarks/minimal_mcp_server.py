"""An MCP server on standard input and output that starts in no time: run as a script, it imports nothing but json."""

import json
import sys

TOOL = {"name": "add", "description": "Add two numbers.", "inputSchema": {"type": "object"}}


def answer(method: str, params: dict) -> dict | None:
    if method == "initialize":
        info = {"name": "tiny", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        arguments = params["arguments"]
        return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = answer(message["method"], message.get("params", {}))
        error = {"code": -32601, "message": "Method not found"}
        outcome = {"result": result} if result is not None else {"error": error}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}), flush=True)
