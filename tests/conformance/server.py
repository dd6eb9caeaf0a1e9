"""The server under test: a toolspace with the suite's tools, on a free port of this machine. Prints its URL.

python -m tests.conformance.server
"""

from __future__ import annotations

import asyncio
import signal

from tests.conformance.tools import TOOLS, trigger_of
from toolspace import Toolspace
from toolspace.server.mcp.http_endpoint import McpEndpoint, serve_mcp


async def main() -> None:
    stop = asyncio.Event()
    for kind in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(kind, stop.set)
    toolspace = Toolspace(tools=TOOLS)
    toolspace.add_tool(trigger_of(toolspace))
    async with toolspace, McpEndpoint(toolspace) as endpoint, serve_mcp(endpoint) as url:
        print(url, flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
