"""An open way to one MCP server: its streams, and whether the peer is still there. Opens and closes nothing."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from toolspace.providers.mcp.spec import Transport

if TYPE_CHECKING:  # A private module of the SDK: for its names only.
    from mcp.client._transport import TransportStreams


class Link:
    """What `open_transport` gives. It is the SDK's `Transport` too: entering it gives the streams and owns nothing."""

    streams: TransportStreams
    """What to read and what to write: `SessionMessage`s. The first one ends when the peer is gone."""

    def __init__(self, transport: Transport) -> None:
        self.transport: Transport = transport
        """What is really in use: `http` becomes `sse` during the first exchange with a server that knows no better."""
        self.pid: int | None = None
        """The process of a stdio server, which leads a process group of its own."""
        self.lost = asyncio.Event()
        """Set when the peer is gone, whether anyone waits for an answer or not."""
        self.reason: str | None = None
        """Why it is gone: `the server ended with exit code 1: no such file`."""

    def lose(self, reason: str) -> None:
        if not self.lost.is_set():  # The first reason is the cause, what follows are its effects.
            self.reason = reason
            self.lost.set()

    async def __aenter__(self) -> TransportStreams:
        return self.streams

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """Nothing: who opened the link, closes it."""
