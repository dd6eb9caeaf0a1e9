"""An HTTP server for model tests, with control over every byte, and the stream formats of the model providers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any


class ModelApiRequest:
    """One request that the server received."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ModelTestServer:
    """Answers each request with the next reply, and repeats the last one."""

    def __init__(self) -> None:
        self.requests: list[ModelApiRequest] = []
        self.replies: list[Reply] = []
        self.connections = 0
        self.request_arrived = asyncio.Event()
        """Set when a request arrives."""
        self.client_closed = asyncio.Event()
        """Set when a client closes the connection before its response."""
        self.url = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    def reply(self, *replies: Reply) -> None:
        self.replies = list(replies)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[ModelTestServer]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return False
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b""
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append(ModelApiRequest(method, path, headers, body))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.request_arrived.set()
        await reply(reader, writer)
        return not writer.is_closing()

    async def never_answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads the request and never answers it."""
        await reader.read()  # The client sends nothing while it waits: this ends when it hangs up.
        self.client_closed.set()
        writer.close()


def stream_reply(body: bytes, *, split: int = 0, kind: str = "text/event-stream", end: bool = True) -> Reply:
    """A response in chunks of `split` bytes. Without `end` the connection is closed in the middle."""

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        pieces = [body[at : at + split] for at in range(0, len(body), split)] if split else [body]
        for piece in filter(None, pieces):
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            if split:
                await asyncio.sleep(0)
        if not end:
            writer.close()
            return
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return write


def error_reply(code: int, body: object = b"", **headers: str) -> Reply:
    """A response with another status, and a body in the provider's form."""

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        lines = {"content-type": kind, "content-length": str(len(data)), **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        writer.write(f"HTTP/1.1 {code} Whatever\r\n{head}\r\n".encode() + data)
        await writer.drain()

    return write


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Closes the connection without a response."""
    writer.close()


def events(*data: object, is_named: bool = False) -> bytes:
    """Server-sent events; `is_named` as Anthropic and the responses API send them."""
    lines: list[str] = []
    for event in data:
        text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        if is_named and isinstance(event, dict):
            lines.append(f"event: {event['type']}\n")
        lines.append(f"data: {text}\n\n")
    return "".join(lines).encode()


# OpenAI, chat completions


def chat_chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-123",
        "object": "chat.completion.chunk",
        "created": 1_760_000_000,
        "model": "gpt-4.1-2025-04-14",
        "system_fingerprint": "fp_1",
        "choices": [{"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": finish}],
        **more,
    }


def tool_call_delta(
    index: int, *, id: str | None = None, name: str | None = None, arguments: str = ""
) -> dict[str, Any]:
    call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if id is not None:
        call |= {"id": id, "type": "function"}
        call["function"] = {"name": name, "arguments": arguments}
    return {"tool_calls": [call]}


USED = {
    "prompt_tokens": 1000,
    "completion_tokens": 50,
    "total_tokens": 1050,
    "prompt_tokens_details": {"cached_tokens": 400, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 10},
}


def chat_completion(*deltas: dict[str, Any], finish: str = "stop") -> bytes:
    """A complete chat completion as OpenAI streams it."""
    return events(
        chat_chunk({"role": "assistant", "content": "", "refusal": None}),
        *(chat_chunk(delta) for delta in deltas),
        chat_chunk({}, finish),
        {**chat_chunk(), "choices": [], "usage": USED},
        "[DONE]",
    )


def text_completion(*words: str) -> bytes:
    return chat_completion(*({"content": word} for word in words))


# OpenAI, responses


def openai_response(
    *items: tuple[dict[str, Any], list[dict[str, Any]]], status: str = "completed", **more: Any
) -> bytes:
    """A complete response. Each item is given in its final form, with its deltas."""
    started_response = {"id": "resp_1", "object": "response", "status": "in_progress", "output": [], "error": None}
    stream_events: list[dict[str, Any]] = [
        {"type": "response.created", "response": started_response},
        {"type": "response.in_progress", "response": started_response},
    ]
    for place, (item, deltas) in enumerate(items):
        started_item = {**item, "status": "in_progress"}
        if "arguments" in started_item:
            started_item["arguments"] = ""
        stream_events.append({"type": "response.output_item.added", "output_index": place, "item": started_item})
        stream_events.extend({"output_index": place, "item_id": item["id"], **delta} for delta in deltas)
        stream_events.append({"type": "response.output_item.done", "output_index": place, "item": item})
    usage = {
        "input_tokens": 1000,
        "input_tokens_details": {"cached_tokens": 400},
        "output_tokens": 50,
        "output_tokens_details": {"reasoning_tokens": 10},
        "total_tokens": 1050,
    }
    output = [item for item, _ in items]
    stream_events.append(
        {
            "type": f"response.{status}",
            "response": {**started_response, "status": status, "output": output, "usage": usage, **more},
        }
    )
    return events(*({**event, "sequence_number": number} for number, event in enumerate(stream_events)), is_named=True)


# Anthropic


def anthropic_message(*blocks: tuple[dict[str, Any], list[dict[str, Any]]], stop: str = "end_turn") -> bytes:
    """A complete message. Each block is given in its initial form, with its deltas."""
    started_message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5-20250929",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 100,
            "cache_creation_input_tokens": 300,
            "cache_read_input_tokens": 600,
            "output_tokens": 1,
        },
    }
    stream_events: list[dict[str, Any]] = [{"type": "message_start", "message": started_message}, {"type": "ping"}]
    for place, (block, deltas) in enumerate(blocks):
        stream_events.append({"type": "content_block_start", "index": place, "content_block": block})
        stream_events.extend({"type": "content_block_delta", "index": place, "delta": delta} for delta in deltas)
        stream_events.append({"type": "content_block_stop", "index": place})
    stream_events.append(
        {
            "type": "message_delta",
            "delta": {"stop_reason": stop, "stop_sequence": None},
            "usage": {"output_tokens": 50},
        }
    )
    stream_events.append({"type": "message_stop"})
    return events(*stream_events, is_named=True)


def text_block(*words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return {"type": "text", "text": ""}, [{"type": "text_delta", "text": word} for word in words]


def tool_use_block(id: str, name: str, *pieces: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    started_block = {"type": "tool_use", "id": id, "name": name, "input": {}}
    return started_block, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]


def thinking_block(*words: str, signature: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    deltas: list[dict[str, Any]] = [{"type": "thinking_delta", "thinking": word} for word in words]
    return {"type": "thinking", "thinking": "", "signature": ""}, [
        *deltas,
        {"type": "signature_delta", "signature": signature},
    ]


# Google


def google_chunks(*parts: dict[str, Any], finish: str | None = "STOP", one_each: bool = True) -> bytes:
    """A complete response: a chunk for each part, the last one with the finish reason."""
    chunks: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        candidate: dict[str, Any] = {"content": {"parts": [part], "role": "model"}, "index": 0}
        if finish is not None and number == len(parts) - 1:
            candidate["finishReason"] = finish
        chunks.append(
            {
                "candidates": [candidate],
                "usageMetadata": {
                    "promptTokenCount": 1000,
                    "candidatesTokenCount": 40,
                    "thoughtsTokenCount": 10,
                    "cachedContentTokenCount": 400,
                    "totalTokenCount": 1050,
                },
                "modelVersion": "gemini-2.5-flash",
                "responseId": "r1",
            }
        )
    # Google ends its lines with CR and LF.
    return events(*chunks).replace(b"\n", b"\r\n")
