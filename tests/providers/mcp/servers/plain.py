"""A small hand-written stdio server. An argument makes it misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any


def say(message: Any) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def raw(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    params = request.get("params") or {}
    match request["method"]:
        case "initialize":
            return {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "plain", "version": "1"},
            }
        case "tools/list":
            count = int(os.environ.get("TOOLS", "1"))
            schema = {"type": "object", "properties": {"text": {"type": "string", "description": "x" * 200}}}
            return {"tools": [{"name": f"echo{n or ''}", "inputSchema": schema} for n in range(count)]}
        case "tools/call":
            arguments = params["arguments"]
            match params["name"]:
                case "die":
                    print("Traceback: about to go", file=sys.stderr)
                    print("OSError: the disk is full, key=" + os.environ.get("SOME_TOKEN", ""), file=sys.stderr)
                    sys.stderr.flush()
                    os._exit(3)
                case "big":
                    return {"content": [{"type": "text", "text": "x" * arguments["size"]}]}
                case "environment":
                    return {"content": [{"type": "text", "text": json.dumps(dict(os.environ))}]}
            return {"content": [{"type": "text", "text": arguments.get("text", "")}]}
    return {}


def misbehave(mode: str) -> None:
    match mode:
        case "dies":
            print("\x1b[31mError: no such file: /nowhere\x1b[0m", file=sys.stderr)
            print("    at start (index.js:1)\n\nNode.js v22.1.0", file=sys.stderr)
            sys.exit(1)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(1000)
        case "garbage":
            raw(b'Starting up...\n\n\xff\xfe\x00 not text\n[]\n{}\n{"jsonrpc": 1}\n' + b"noise\n" * 5_000)
        case "stderr":
            sys.stderr.write("chatter " * 200_000)  # Without a line break, and larger than a pipe.
            sys.stderr.write("\n" * 1000 + "the last line\n")
            sys.stderr.flush()
        case "floods":
            line = json.dumps(
                {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 100}}
            )
            block = (line + "\n").encode() * 1000
            while True:
                raw(block)
        case "endless":
            while True:
                raw(b"x" * 65536)
        case "deaf":  # Neither the end of its input nor SIGTERM ends it.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "children" | "daemons":
            nap = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"]
            child = subprocess.Popen(nap)
            apart = subprocess.Popen(nap, start_new_session=True)
            pids = [child.pid, apart.pid]
            if mode == "daemons":
                start = "Popen(sys.argv[1:], start_new_session=True, stdout=DEVNULL, stderr=DEVNULL).pid"
                code = f"import sys; from subprocess import DEVNULL, Popen; print({start})"
                # Its parent ends at once, so it becomes an orphan.
                orphan = subprocess.run([sys.executable, "-c", code, *nap], capture_output=True, check=True, timeout=30)
                pids.append(int(orphan.stdout))
            raw(json.dumps({"jsonrpc": "2.0", "method": "notifications/pids", "params": {"pids": pids}}).encode())
            raw(b"\n")
        case "closes":
            os.close(1)
            time.sleep(1000)


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    misbehave(mode)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request and "method" in request:
            if mode == "malformed":
                say({"jsonrpc": "2.0", "id": request["id"], "result": "not an object"})
            elif mode == "latin":
                text = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": {"t": "caf\u00e9"}})
                raw(text.replace("\\u00e9", "\u00e9").encode("latin-1") + b"\n")
            elif mode == "surrogate":
                say({"jsonrpc": "2.0", "id": request["id"], "result": {"t": "half \ud83d"}})
            else:
                say({"jsonrpc": "2.0", "id": request["id"], "result": answer(request)})
    while mode == "deaf":
        time.sleep(1000)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
