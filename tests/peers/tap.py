"""Records the messages that a stdio server receives. Changes none of them.

As a program (`python tap.py SOCKET COMMAND ARGS…`) it runs the server and copies each line of its input to the Unix
socket SOCKET. `Tap` is the other end, in the test.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 60


class Tap:
    """The messages that were sent to the server so far, over all its starts."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._more = asyncio.Condition()

    def of(self, method: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message.get("method") == method]

    async def saw(self, method: str, times: int = 1) -> dict[str, Any]:
        """Waits until a method was sent that often. Returns the last of these messages."""
        async with asyncio.timeout(PATIENCE_S), self._more:
            await self._more.wait_for(lambda: len(self.of(method)) >= times)
        return self.of(method)[times - 1]

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            async with self._more:
                self.messages.append(json.loads(line))
                self._more.notify_all()
        writer.close()


@asynccontextmanager
async def tap(socket_path: Path) -> AsyncIterator[Tap]:
    tap = Tap()
    server = await asyncio.start_unix_server(tap._take, socket_path, limit=2**24)
    async with server:
        yield tap


def main(socket_path: str, command: list[str]) -> int:
    wire = socket.socket(socket.AF_UNIX)
    wire.connect(socket_path)
    server = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert server.stdin is not None
    for line in sys.stdin.buffer:
        wire.sendall(line)
        server.stdin.write(line)
        server.stdin.flush()
    server.stdin.close()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
