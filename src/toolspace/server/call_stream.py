"""Streams one tool call: its progress and partial output as events, then its result. The tool routes use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from toolspace.core.events import CallPartial, CallProgress, Event, EventType
from toolspace.core.ids import new_id
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.server.asgi import Receive, Scope, Send, find_transport, wait_for_disconnect
from toolspace.server.sse import encode_event
from toolspace.spaces.call_host import GatewayCallHost
from toolspace.toolspace import Toolspace

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_MAX_UNSENT_EVENTS = 1_000
"""Further events of a slow client are dropped; the result never is."""
_MAX_UNSENT_BYTES = 1024 * 1024
_HEARTBEAT_SECONDS = 15.0
STALL_SECONDS = 20.0
"""How long one write may take before the client is disconnected."""


class CallStream:
    """A streaming response that makes a call. If the client disconnects, the call is canceled."""

    def __init__(
        self,
        toolspace: Toolspace,
        start_call: Callable[[str], Coroutine[Any, Any, ToolResult]],
        host: GatewayCallHost,
        call_id: str | None = None,
    ) -> None:
        self._toolspace = toolspace
        self._start_call = start_call
        self._host = host
        self._call_id = call_id or new_id("call")
        self._frames: list[bytes] = []
        self._unsent_bytes = 0
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unsubscribe = self._toolspace.bus.subscribe(
            self._on_event, EventType.TOOL_CALL_PROGRESS, EventType.TOOL_CALL_PARTIAL
        )
        call = asyncio.create_task(self._start_call(self._call_id))
        call.add_done_callback(lambda _: self._changed.set())
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        disconnect.add_done_callback(lambda _: self._changed.set())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            while not call.done() and not disconnect.done():
                try:
                    async with asyncio.timeout(_HEARTBEAT_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    self._frames.append(b": still there\n\n")
                self._changed.clear()
                await self._write(send)
            if call.done() and not disconnect.done():  # A client that disconnected does not get the result.
                await self._send_result(call.result(), send)
        except TimeoutError:
            if (transport := find_transport(receive)) is not None:
                transport.abort()
        finally:
            unsubscribe()
            disconnect.cancel()
            call.cancel()
            await asyncio.gather(call, disconnect, return_exceptions=True)
            if self._host.inline_call_ids:
                self._host.pending_calls.mark_undelivered(self._host.inline_call_ids)

    async def _send_result(self, result: ToolResult, send: Send) -> None:
        data = result.to_dict()
        if (pending_id := result.extras.get(PENDING_CALL_KEY)) is not None:
            data |= {"status": "pending", PENDING_CALL_KEY: pending_id}
        self._frames.append(encode_event("result", data))
        await self._write(send)
        await send({"type": "http.response.body", "body": b""})
        call_ids, self._host.inline_call_ids = self._host.inline_call_ids, []
        self._host.pending_calls.mark_delivered(call_ids)

    async def _write(self, send: Send) -> None:
        if self._frames:
            frames, self._frames, self._unsent_bytes = self._frames, [], 0
            async with asyncio.timeout(STALL_SECONDS):
                await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})

    def _on_event(self, event: Event) -> None:
        if len(self._frames) >= _MAX_UNSENT_EVENTS or self._unsent_bytes >= _MAX_UNSENT_BYTES:
            return
        if isinstance(event, CallProgress) and event.call_id == self._call_id:
            type = "tool.progress"
            data = {"progress": event.progress, "total": event.total, "message": event.message}
        elif isinstance(event, CallPartial) and event.call_id == self._call_id:
            type = "tool.streaming"
            data = {"output": event.value, "preliminary": True}
        else:
            return
        frame = encode_event(type, {"toolCallId": event.call_id, "toolName": event.tool_name, **data})
        self._frames.append(frame)
        self._unsent_bytes += len(frame)
        self._changed.set()
