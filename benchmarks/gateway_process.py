"""Starts a gateway in its own process, and clients for it over plain connections with little overhead."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from benchmarks.connections import Connection, Target, body_of
from benchmarks.processes import FUNCTIONS, Server, start_server

SECRET, PUBLIC, SIGNING = "sk_bench_0123456789abcdef", "pk_bench_0123456789abcdef", "0123456789abcdef" * 4
_CONFIG = f"""\
functions: ./tools.py
server:
  secretKey: {SECRET}
  publicKey: {PUBLIC}
  jwtSecret: {SIGNING}
  maxConcurrentRequests: 20000
  stopTimeout: 1s
tools:
  - {{name: lookup, description: Looks up., executionType: external, visible: false, timeout: 600000,
      inputSchema: {{type: object}}}}
  - {{name: later, description: Answers later., executionType: external, isAsync: true, visible: false,
      inputSchema: {{type: object}}}}
"""


@contextmanager
def gateway_serving() -> Generator[Server]:
    """A gateway on SQLite, durable, with nothing in it."""
    with tempfile.TemporaryDirectory() as folder, start_server("gateway", str(write_config(Path(folder)))) as server:
        yield server


def write_config(folder: Path) -> Path:
    (folder / "tools.py").write_text(FUNCTIONS)
    (folder / "toolspace.yaml").write_text(f"{_CONFIG}storage: {{dir: {folder}/state}}\n")
    return folder / "toolspace.yaml"


def secret() -> dict[str, str]:
    """Headers of someone with the secret key."""
    return {"x-secret-key": SECRET}


def member(entity_id: str) -> dict[str, str]:
    """Headers of an entity, with a token that was signed by hand."""
    parts = ({"alg": "HS256", "typ": "JWT"}, {"sub": entity_id, "exp": int(time.time()) + 3600})
    text = b".".join(_base64(json.dumps(part).encode()) for part in parts)
    token = text + b"." + _base64(hmac.digest(SIGNING.encode(), text, hashlib.sha256))
    return {"x-public-key": PUBLIC, "authorization": f"Bearer {token.decode()}"}


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


class Callers:
    """Several concurrent callers, each with its own connection and the secret key."""

    def __init__(self, url: str, connections: list[Connection]) -> None:
        self._target = Target.of(url)
        self._connections = connections

    @classmethod
    async def open(cls, url: str, count: int) -> Callers:
        target = Target.of(url)
        return cls(url, [await Connection.open(target, _on_unexpected_answer) for _ in range(count)])

    def request(self, path: str, body: Any = None) -> bytes:
        """A POST, ready to be written."""
        text = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        return self._target._replace(path=path).post(text, {**secret(), "content-type": "application/json"})

    async def ask(self, path: str, body: Any = None) -> Any:
        """The answer to one request."""
        (answer,) = await self.send([self.request(path, body)])
        return json.loads(answer)

    async def send(self, requests: Sequence[bytes]) -> list[bytes]:
        """The answers to requests, in their order. Each caller sends its next one as soon as it has an answer."""
        answers: list[bytes] = [b""] * len(requests)
        completion: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        unsent_numbers, unanswered_count = iter(range(len(requests))), len(requests)
        request_numbers: dict[Connection, int] = {}

        def send_next(connection: Connection) -> None:
            number = next(unsent_numbers, None)
            if number is not None:
                request_numbers[connection] = number
                connection.send(requests[number])

        def on_answer(connection: Connection, head: bytes, rest: bytes) -> None:
            nonlocal unanswered_count
            if not head.startswith(b"HTTP/1.1 20"):
                _fail(completion, f"the answer is {head[:40]!r}: {body_of(head, rest)[:500]!r}")
            answers[request_numbers.pop(connection)] = rest
            unanswered_count -= 1
            if not unanswered_count and not completion.done():
                completion.set_result(None)
            send_next(connection)

        def on_connection_lost(_: Connection) -> None:
            _fail(completion, "the server closed a connection instead of answering")

        for connection in self._connections:
            connection.on_answer, connection.on_loss = on_answer, on_connection_lost
            send_next(connection)
        async with asyncio.timeout(120):  # A server that does not answer must end the measure.
            await completion
        return answers

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def _on_unexpected_answer(_: Connection, head: bytes, rest: bytes) -> None:
    raise RuntimeError(f"nobody asked for {head!r} {rest!r}")


def _fail(completion: asyncio.Future[Any], why: str) -> None:
    if not completion.done():
        completion.set_exception(RuntimeError(why))


class StreamSubscriber(asyncio.Protocol):
    """Subscribes to a stream. `on_data` gets all received bytes, including the response headers."""

    def __init__(self, request: bytes, on_data: Callable[[bytes], None]) -> None:
        self._request = request
        self._on_data = on_data
        self._headers_received = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls, url: str, path: str, headers: dict[str, str], on_data: Callable[[bytes], None]
    ) -> StreamSubscriber:
        target = Target.of(url)
        lines = [f"GET {path} HTTP/1.1", f"host: {target.host}:{target.port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join((*lines, "", "")).encode()
        loop = asyncio.get_running_loop()
        _, reader = await loop.create_connection(lambda: cls(request, on_data), target.host, target.port)
        await reader._headers_received
        return reader

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._headers_received.done():
            if data.startswith(b"HTTP/1.1 200"):
                self._headers_received.set_result(None)
            else:
                _fail(self._headers_received, f"the answer is {data[:500]!r}")
        self._on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        _fail(self._headers_received, "the server closed the connection")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
