"""A worker whose one call ends when a line comes in."""

from __future__ import annotations

import sys

from toolspace import ToolWorker

worker = ToolWorker(sys.argv[1], secret_key=sys.argv[2])


@worker.tool
def move(to: str) -> str:
    print(f"given {to}", flush=True)
    return f"{to}: {sys.stdin.readline().strip()}"


worker.run_forever()
print("ended", flush=True)
