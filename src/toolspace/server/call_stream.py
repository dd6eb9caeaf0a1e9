"""One call as a stream of its own: what the tool says on its way, and at the end its result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from toolspace.core import json_text
from toolspace.core.events import CallPartial, CallProgress, Event, EventType
from toolspace.core.ids import new_id
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.server.asgi import Receive, Scope, Send
from toolspace.server.sse import find_transport
from toolspace.spaces.call_host import GatewayCallHost
from toolspace.toolspace import Toolspace

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_MOST_WAITING = 1_000
"""Events that a slow reader may leave unread; later ones are left out, the result never."""
_MOST_WAITING_BYTES = 1024 * 1024
_HEARTBEAT_SECONDS = 15.0
STALL_SECONDS = 20.0
"""How long one write may be stuck before the reader counts as gone."""


class CallStream:
    """Makes a call when it is asked to write itself. Whoever goes away stops the call."""

    def __init__(
        self,
        toolspace: Toolspace,
        make: Callable[[str], Coroutine[Any, Any, ToolResult]],
        room: GatewayCallHost,
        call_id: str | None = None,
    ) -> None:
        self._toolspace = toolspace
        self._make = make
        self._room = room
        self._call_id = call_id or new_id("call")
        self._frames: list[bytes] = []
        self._waiting = 0
        """Bytes of them."""
        self._news = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        forget = self._toolspace.bus.subscribe(self._heard, EventType.TOOL_CALL_PROGRESS, EventType.TOOL_CALL_PARTIAL)
        calling = asyncio.create_task(self._make(self._call_id))
        calling.add_done_callback(lambda _: self._news.set())
        leaving = asyncio.create_task(_left(receive))
        leaving.add_done_callback(lambda _: self._news.set())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            while not calling.done() and not leaving.done():
                try:
                    async with asyncio.timeout(_HEARTBEAT_SECONDS):
                        await self._news.wait()
                except TimeoutError:
                    self._frames.append(b": still there\n\n")
                self._news.clear()
                await self._write(send)
            if calling.done() and not leaving.done():  # Whoever left gets nothing of it, whatever is sent.
                await self._end(calling.result(), send)
        except TimeoutError:
            abort_connection(receive)
        finally:
            forget()
            leaving.cancel()
            calling.cancel()
            await asyncio.gather(calling, leaving, return_exceptions=True)
            if self._room.inline_call_ids:
                self._room.pending_calls.mark_undelivered(self._room.inline_call_ids)

    async def _end(self, result: ToolResult, send: Send) -> None:
        data = result.to_dict()
        if (pending := result.extras.get(PENDING_CALL_KEY)) is not None:
            data |= {"status": "pending", PENDING_CALL_KEY: pending}
        self._frames.append(_frame("result", data))
        await self._write(send)
        await send({"type": "http.response.body", "body": b""})
        delivered, self._room.inline_call_ids = self._room.inline_call_ids, []
        self._room.pending_calls.mark_delivered(delivered)

    async def _write(self, send: Send) -> None:
        if self._frames:
            frames, self._frames, self._waiting = self._frames, [], 0
            async with asyncio.timeout(STALL_SECONDS):
                await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})

    def _heard(self, event: Event) -> None:
        if len(self._frames) >= _MOST_WAITING or self._waiting >= _MOST_WAITING_BYTES:
            return
        if isinstance(event, CallProgress) and event.call_id == self._call_id:
            data = {"progress": event.progress, "total": event.total, "message": event.message}
            self._frames.append(_frame("tool.progress", self._ids(event) | data))
        elif isinstance(event, CallPartial) and event.call_id == self._call_id:
            data = {"output": event.value, "preliminary": True}
            self._frames.append(_frame("tool.streaming", self._ids(event) | data))
        else:
            return
        self._waiting += len(self._frames[-1])
        self._news.set()

    def _ids(self, event: CallProgress | CallPartial) -> dict[str, Any]:
        return {"toolCallId": event.call_id, "toolName": event.tool_name}


def _frame(type: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (type.encode(), json_text.encode_bytes(data))


def abort_connection(receive: Receive) -> None:
    """Ends the connection of one who does not read."""
    if (transport := find_transport(receive)) is not None:
        transport.abort()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
