"""Puts a gateway on the network, and takes it off again in the right order. Builds no gateway and answers nothing.

Stopping: it is not ready any more; nobody new gets in; streams end, and whoever waits for someone else's answer is told
that it comes later; what runs gets its time, then it is stopped; the answers go out. Whoever opened the gateway closes
it after that, the database last.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from toolspace.server.mcp.http_server import Server, settings, url_of

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway

ANSWER_SECONDS = 3.0
"""How long the last answers may take to go out, once all that was running has ended."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than the clients that are common keep a connection: so it is they who close it, not we while they send."""


@asynccontextmanager
async def serving(gateway: Gateway, listening: socket.socket) -> AsyncGenerator[str]:
    """Serves a gateway on a socket while the block runs, and drains it afterwards; gives the URL.

    Raises `OSError` where the socket cannot be listened on.
    """
    server_settings = gateway.config.server
    server = Server(
        settings(
            gateway.app,
            stop_seconds=server_settings.stop_timeout + ANSWER_SECONDS,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            # Only what a proxy of ours says of where a request comes from is believed.
            proxy_headers=server_settings.public_url is not None,
        )
    )
    url = url_of(listening)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await server.ready(running)
        gateway.readiness.started = True
        yield url
    finally:
        gateway.readiness.stopping = True
        server.stop()
        try:
            if not running.done():
                await gateway.drain(server_settings.stop_timeout)
        finally:
            try:
                await running
            finally:
                listening.close()
