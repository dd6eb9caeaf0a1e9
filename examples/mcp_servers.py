"""Uses the tools of an MCP server beside a Python function. The server is Toolspace itself, with its built-in tools."""

import asyncio
import sys

from toolspace import McpProvider, ServerSpec, Toolspace, tool


@tool
async def double(n: int) -> int:
    """Doubles a number."""
    return 2 * n


async def main() -> None:
    box = McpProvider("box", ServerSpec(command=sys.executable, args=("-m", "toolspace", "mcp")))
    async with Toolspace(tools=[double], providers=[box]) as ts:
        print((await ts.call("double", {"n": 21})).result)

        encoded = await ts.call("box__base64_encode", {"text": "tools"})
        print(encoded.ok, encoded.text)

        # Validated before anything is sent; the text tells the model what to correct.
        print((await ts.call("box__base64_encode", {})).text)

        (server,) = ts.list_servers()
        print(server.state, server.era, server.transport, server.tools > 20)


asyncio.run(main())
