"""Connects to a server over a WebSocket: one message per text frame, subprotocol `mcp`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from mcp.shared.message import SessionMessage
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.oauth.http import tls_context
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.transports.base import (
    MessageDecoder,
    MessageReader,
    MessageWriter,
    OpenTransport,
    encode_message,
    wait_until_done,
)

_OPEN_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_PING_SECONDS = 20.0


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc  # Redirects are not followed: the headers are meant for this server only.


@asynccontextmanager
async def open_websocket(
    name: str, url: str, spec: ServerSpec, *, max_message_bytes: int
) -> AsyncGenerator[OpenTransport]:
    tls = await asyncio.to_thread(tls_context) if url.startswith("wss:") else None
    try:
        socket = await _Connect(
            url,
            ssl=tls,
            subprotocols=[Subprotocol("mcp")],
            additional_headers=dict(spec.headers),
            max_size=max_message_bytes,
            open_timeout=_OPEN_SECONDS,
            close_timeout=_CLOSE_SECONDS,
            ping_interval=_PING_SECONDS,
            ping_timeout=_PING_SECONDS,
        )
    except TimeoutError:
        raise ProviderError(f"the server opened no websocket within {_OPEN_SECONDS:g} s") from None
    except InvalidStatus as error:
        raise ProviderError(f"the server answered with HTTP {error.response.status_code}, not a websocket") from None
    except (OSError, InvalidHandshake, InvalidURI, ValueError, ImportError) as error:
        raise ProviderError(f"cannot open the websocket: {mask_secrets(str(error)) or type(error).__name__}") from None
    transport = OpenTransport("websocket")
    transport.streams = _FrameReader(name, socket, transport), _FrameWriter(socket)
    try:
        yield transport
    finally:
        await wait_until_done(asyncio.create_task(socket.close()))


class _FrameReader(MessageReader):
    def __init__(self, name: str, socket: ClientConnection, transport: OpenTransport) -> None:
        self._decode = MessageDecoder(name)
        self._socket = socket
        self._transport = transport

    async def receive(self) -> SessionMessage:
        while True:
            try:
                data = await self._socket.recv(decode=False)
            except ConnectionClosed as error:
                self._transport.mark_lost(_describe_close(error))
                raise anyio.EndOfStream from None
            if (message := self._decode(data)) is not None:
                return message


class _FrameWriter(MessageWriter):
    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def send(self, item: SessionMessage, /) -> None:
        try:
            await self._socket.send(encode_message(item), text=True)
        except ConnectionClosed:
            raise anyio.BrokenResourceError from None


def _describe_close(error: ConnectionClosed) -> str:
    if error.sent is not None and error.sent.code == 1009:
        return "the server sent a larger message than is allowed"
    if error.sent is not None and error.sent.code == 1011:
        return "the server no longer answers pings"
    code = error.rcvd.code if error.rcvd is not None else 1006
    reason = mask_secrets(error.rcvd.reason) if error.rcvd is not None else ""
    return f"the server closed the websocket with code {code}" + (f": {reason}" if reason else "")
