"""HTTP/1.1 over keep-alive connections, with as little between the bytes as Python allows. Knows nothing of MCP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import NamedTuple, cast
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
"""Looked for in every answer, and often twice: what loads a server shares the machine with it."""


class Target(NamedTuple):
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> Target:
        parts = urlsplit(url)
        return cls(parts.hostname or "", parts.port or 80, parts.path or "/")

    def post(self, body: bytes, headers: dict[str, str]) -> bytes:
        """A whole request, ready to be written."""
        lines = [f"POST {self.path} HTTP/1.1", f"host: {self.host}:{self.port}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join((*lines, "", "")).encode() + body


class Connection(asyncio.Protocol):
    """Carries one request at a time. `on_answer` gets the head and what follows it, still in chunks if sent so."""

    def __init__(self, on_answer: Callable[[Connection, bytes, bytes], None]) -> None:
        self.on_answer = on_answer
        self.on_loss: Callable[[Connection], None] = lambda _: None
        self.is_open = False
        self.complete_bodies: frozenset[bytes] | set[bytes] = frozenset()
        """Answers that were found complete before: comparing is cheaper than reading the length again."""
        self._pieces = b""
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, target: Target, on_answer: Callable[[Connection, bytes, bytes], None]) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(on_answer), target.host, target.port)
        return connection

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._transport.write(request)

    def close(self) -> None:
        self.on_loss = lambda _: None
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.is_open = True
        self._transport = cast("asyncio.Transport", transport)  # That of uvloop is one in all but its class.

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self.on_loss(self)

    def data_received(self, data: bytes) -> None:
        if self._pieces:
            data = self._pieces + data
        head, end, rest = data.partition(b"\r\n\r\n")
        if end and (rest in self.complete_bodies or is_whole(head, rest)):
            self._pieces = b""
            self.on_answer(self, head, rest)
        else:
            self._pieces = data


def is_whole(head: bytes, rest: bytes) -> bool:
    length = _LENGTH.search(head)
    return rest.endswith(b"0\r\n\r\n") if length is None else len(rest) >= int(length[1])


def body_of(head: bytes, rest: bytes) -> bytes:
    """The body, put together from its chunks."""
    if header(head, b"transfer-encoding") != b"chunked":
        return rest
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
        if length == 0:
            break
    return body


def header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return None
