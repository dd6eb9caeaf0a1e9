"""Calls an MCP server over HTTP as fast as it answers, and looks at every answer. Much cheaper than what it loads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.connections import Connection, Target, body_of, header

VERSION = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


class AddCall:
    """One `tools/call` of the stateless era that adds two numbers, and which answers to it are right."""

    def __init__(self, target: Target, tool: str, number: int, headers: dict[str, str]) -> None:
        self.id = number + 1
        self.sum = str(3 * number)
        params = {"name": tool, "arguments": {"a": number, "b": 2 * number}, "_meta": META}
        self.request = target.post(
            _encode(self.id, "tools/call", params), {**headers_of("tools/call", tool), **headers}
        )
        self.answers: set[bytes] = set()
        """What was read and found right: the same bytes are right again."""

    def check(self, head: bytes, rest: bytes) -> None:
        if head.startswith(b"HTTP/1.1 200") and rest in self.answers:
            return
        body = body_of(head, rest)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the answer is {head[:40]!r}: {body[:500]!r}")
        if (header(head, b"content-type") or b"").startswith(b"text/event-stream"):
            body = b"".join(line[5:] for line in body.splitlines() if line.startswith(b"data:"))
        answer: dict[str, Any] = json.loads(body)
        result: dict[str, Any] = answer.get("result", {})
        texts = [part.get("text") for part in result.get("content", ())]
        if answer.get("id") != self.id or result.get("isError") or texts != [self.sum]:
            raise RuntimeError(f"call {self.id} should have given {self.sum}: {body[:500]!r}")
        self.answers.add(rest)


class Load:
    """So many callers at once, each on a connection of its own. `await load(count)` makes so many calls in all."""

    def __init__(self, target: Target, calls: Sequence[AddCall]) -> None:
        self.answer_count = 0
        self.faults: list[str] = []
        """What was wrong with answers."""
        self._target = target
        self._calls = calls
        self._idle: list[Connection] = []
        self._under_way: dict[Connection, AddCall] = {}
        self._unsent_count = self._unanswered_count = 0
        self._completion: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, url: str, tool: str, *, callers: int, headers: dict[str, str] | None = None) -> Load:
        target = Target.of(url)
        load = cls(target, [AddCall(target, tool, number, headers or {}) for number in range(16)])
        load._idle = [await load._connect() for _ in range(callers)]
        return load

    async def __call__(self, count: int) -> None:
        # Servers close connections that were silent for some seconds, while others had their turns.
        self._idle = [connection if connection.is_open else await self._connect() for connection in self._idle]
        self._unsent_count = self._unanswered_count = count
        self._completion = asyncio.get_running_loop().create_future()
        idle, self._idle = self._idle[:count], self._idle[count:]
        for connection in idle:
            self._next(connection)
        # A server that does not answer must end the measure, not stop it for ever.
        async with asyncio.timeout(60):
            await self._completion

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connect(self) -> Connection:
        connection = await Connection.open(self._target, self._on_answer)
        connection.on_loss = self._on_connection_lost
        return connection

    def _next(self, connection: Connection) -> None:
        self._unsent_count -= 1
        call = self._calls[self._unsent_count % len(self._calls)]
        self._under_way[connection] = call
        connection.complete_bodies = call.answers
        connection.send(call.request)

    def _on_answer(self, connection: Connection, head: bytes, rest: bytes) -> None:
        try:
            self._under_way.pop(connection).check(head, rest)
        except Exception as error:
            self.faults.append(f"{type(error).__name__}: {error}")
        self.answer_count += 1
        self._unanswered_count -= 1
        if self._unsent_count:
            self._next(connection)
            return
        self._idle.append(connection)
        if self._unanswered_count == 0 and self._completion is not None and not self._completion.done():
            self._completion.set_result(None)

    def _on_connection_lost(self, connection: Connection) -> None:
        if connection in self._under_way and self._completion is not None and not self._completion.done():
            self._completion.set_exception(ConnectionError("the server closed a connection instead of answering"))


def headers_of(method: str, tool: str | None = None) -> dict[str, str]:
    headers = {
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": VERSION,
        "mcp-method": method,
    }
    return headers if tool is None else {**headers, "mcp-name": tool}


def _encode(id: int, method: str, params: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}, separators=(",", ":")).encode()
