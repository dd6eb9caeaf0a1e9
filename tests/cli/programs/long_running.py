"""A toolspace that runs until its input ends, as `toolspace mcp` does. Prints one line when it is ready."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from toolspace import Toolspace
from toolspace.server import control_socket


async def main(path: Path) -> None:
    async with Toolspace.open(path) as ts, control_socket.serve_control_socket(ts):
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            result = await ts.call(line.strip(), {})
            print(result.error or "done", flush=True)


asyncio.run(main(Path(sys.argv[1])))
