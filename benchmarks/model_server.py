"""A model's API that says the same answer to everyone: what a streamed request costs beside it is the client's own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

WORDS = 200
TEXT = "".join(f"word{number} " for number in range(WORDS))


def _chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    chunk = {
        "id": "chatcmpl-BmRk3vTxYz0123456789",
        "object": "chat.completion.chunk",
        "created": 1_760_000_000,
        "model": "gpt-4.1-2025-04-14",
        "service_tier": "default",
        "system_fingerprint": "fp_799e4ca3f1",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
        "usage": None,
        **more,
    }
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


_USAGE = {"prompt_tokens": 1000, "completion_tokens": WORDS, "total_tokens": 1000 + WORDS}
EVENTS = [
    _chunk({"role": "assistant", "content": "", "refusal": None}),
    *(_chunk({"content": f"word{number} "}) for number in range(WORDS)),
    _chunk({}, "stop"),
    _chunk({}, choices=[], usage=_USAGE),
    b"data: [DONE]\n\n",
]
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class ModelServerProtocol(asyncio.Protocol):
    """Writes each event on its own, as a model does; or, at `/whole`, all of them at once."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._buffer = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        if b"/whole" in head.partition(b"\r\n")[0]:
            self._transport.write(_HEAD + b"".join(map(_http_chunk, EVENTS)) + b"0\r\n\r\n")
        else:
            task = asyncio.ensure_future(self._stream())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _stream(self) -> None:
        self._transport.write(_HEAD)
        for event in EVENTS:
            self._transport.write(_http_chunk(event))
            await asyncio.sleep(0)
        self._transport.write(b"0\r\n\r\n")


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(ModelServerProtocol, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()
