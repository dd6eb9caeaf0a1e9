"""A worker that says what it was given and never answers."""

from __future__ import annotations

import asyncio
import sys

from toolspace import ToolWorker

worker = ToolWorker(sys.argv[1], secret_key=sys.argv[2])


@worker.tool("move")
async def move(to: str) -> None:
    print(f"given {to}", flush=True)
    await asyncio.Event().wait()


worker.run_forever()
