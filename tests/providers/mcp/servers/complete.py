"""A hand-written stdio server of both eras whose tools, results and resources use every field that MCP knows.

`python complete.py [NAME]`: NAME is part of what `resources/read` returns.
"""

import json
import sys
from typing import Any

NAME = sys.argv[1] if len(sys.argv) > 1 else "complete"
ICONS = [{"src": "data:image/png;base64,aGVsbG8=", "mimeType": "image/png", "sizes": ["48x48"]}]
ANNOTATIONS = {"audience": ["user", "assistant"], "priority": 0.7, "lastModified": "2026-01-12T15:00:58Z"}
SCHEMA = {"type": "object", "properties": {"kind": {"type": "string"}}}
OUTPUT_SCHEMA = {
    "type": "object",
    "title": "Degrees",
    "properties": {"degrees": {"type": "number"}, "city": {"$ref": "#/properties/name"}, "name": {"type": "string"}},
    "required": ["degrees"],
}
TOOLS = [
    {
        "name": "show",
        "title": "Show everything",
        "description": "Returns a result of a kind.",
        "inputSchema": SCHEMA,
        "icons": ICONS,
        "annotations": {
            "title": "Show",
            "readOnlyHint": True,
            "destructiveHint": False,
            "idempotentHint": True,
            "openWorldHint": False,
        },
        "execution": {"taskSupport": "optional"},
        "_meta": {"example.com/ui": {"resourceUri": "ui://show"}},
        "x-vendor": {"tier": 1},
    },
    {"name": "measure", "inputSchema": SCHEMA, "outputSchema": OUTPUT_SCHEMA, "annotations": {"title": "Measure"}},
    {"name": "odd", "description": "d", "inputSchema": SCHEMA, "title": 5, "icons": "none", "_meta": [1]},
]
LINK = {
    "type": "resource_link",
    "uri": "file:///report.txt",
    "name": "report",
    "title": "The report",
    "description": "Of the year",
    "mimeType": "text/plain",
    "size": 17,
    "icons": ICONS,
    "annotations": ANNOTATIONS,
    "_meta": {"k": 1},
}
CONTENTS = {
    "uri": "file:///report.txt",
    "mimeType": "text/plain",
    "text": f"the report of {NAME}",
    "_meta": {"page": 1},
}
EMBEDDED = {"uri": "mem://a", "mimeType": "text/plain", "text": "inside", "_meta": {"k": 2}}
RESULTS: dict[str, dict[str, Any]] = {
    "parts": {
        "content": [
            {"type": "text", "text": "one", "annotations": ANNOTATIONS, "_meta": {"k": 0}},
            {"type": "text", "text": "two"},
            {
                "type": "image",
                "data": "aGVsbG8=",
                "mimeType": "image/webp",
                "annotations": ANNOTATIONS,
                "_meta": {"k": 3},
            },
            {"type": "audio", "data": "aGVsbG8=", "mimeType": "audio/ogg", "annotations": {"priority": 1}},
            LINK,
            {"type": "resource", "resource": EMBEDDED, "annotations": ANNOTATIONS, "_meta": {"k": 4}},
            {"type": "resource", "resource": {"uri": "mem://b", "blob": "aGVsbG8="}},
        ],
        "_meta": {"example.com/cost": 3, "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        "isError": False,
    },
    "texts": {"content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "isError": False},
    "text": {"content": [{"type": "text", "text": "only"}], "isError": False, "_meta": {"k": 5}},
    "empty": {"content": [], "isError": False},
    "empty-text": {"content": [{"type": "text", "text": ""}], "isError": False},
    "structured": {
        "content": [{"type": "text", "text": "warm", "annotations": {"audience": ["user"]}}],
        "structuredContent": {"degrees": 21.5, "name": "Ulm"},
        "isError": False,
    },
    "only-structured": {"content": [], "structuredContent": {"degrees": 0, "rows": [None, {}]}, "isError": False},
    "failure": {
        "content": [{"type": "text", "text": "broken", "_meta": {"k": 6}}, LINK],
        "structuredContent": {"degrees": -1},
        "_meta": {"k": 7},
        "isError": True,
    },
}
ABILITIES = {"tools": {}, "resources": {}}
INFO = {"name": "complete", "version": "1"}
LISTED = {"ttlMs": 0, "cacheScope": "private"}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    match method:
        case "initialize":
            return {"protocolVersion": params["protocolVersion"], "capabilities": ABILITIES, "serverInfo": INFO}
        case "server/discover":
            return {"supportedVersions": ["2026-07-28"], "capabilities": ABILITIES, "serverInfo": INFO, **LISTED}
        case "tools/list":
            return {"tools": TOOLS, **LISTED}
        case "tools/call" if params["arguments"]["kind"] == "meta":  # What it received.
            return {"content": [{"type": "text", "text": json.dumps(params.get("_meta", {}))}], "isError": False}
        case "tools/call":
            return RESULTS[params["arguments"]["kind"]]
        case "resources/read" if params["uri"] == LINK["uri"]:
            return {"contents": [CONTENTS], "_meta": {"k": 8}, **LISTED}
        case "ping":
            return {}
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = answer(request["method"], request.get("params") or {})
        response: dict[str, Any] = {"error": {"code": -32002, "message": "no such resource"}}
        if result is not None:
            response = {"result": {**result, "resultType": "complete"}}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **response}), flush=True)
