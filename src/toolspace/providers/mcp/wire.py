"""What all transports share: a message to bytes and back, and the shape of the two streams. Connects nothing."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self, cast

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError

from toolspace.core.secret_masking import redact

MAX_MESSAGE = 64 * 1024 * 1024
"""Bytes of one message. What is larger is no answer to a question, but an attack or an accident."""
_SHOWN = 200


class _Stream(ABC):
    @abstractmethod
    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.aclose()


class Source(_Stream):
    """What a peer says, as the SDK reads it. `anyio.EndOfStream` when nothing more will come."""

    @abstractmethod
    async def receive(self) -> SessionMessage | Exception: ...

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class Sink(_Stream):
    """What a peer is told, as the SDK writes it. `anyio.BrokenResourceError` when it is gone."""

    @abstractmethod
    async def send(self, item: SessionMessage, /) -> None: ...


def encode(message: SessionMessage) -> bytes:
    return message.message.model_dump_json(by_alias=True, exclude_unset=True).encode()


class Decoder:
    """Reads the messages of one peer. What is no message is skipped, and told of once."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(f"toolspace.mcp.{name}")
        self._told = False

    def __call__(self, data: bytes) -> SessionMessage | None:
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(data, by_name=False))
        except ValidationError:
            return self._mend(data)

    def _mend(self, data: bytes) -> SessionMessage | None:
        """A message that is nearly one: in another encoding, with half a character, or an answer without form."""
        if not data or data.isspace():
            return None
        value: object = None
        try:
            value = json.loads(data.decode("utf-8", "replace"))
            text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
        except (ValueError, RecursionError):  # Of which the validation's error is one.
            pass
        if isinstance(value, dict):
            answer = cast("dict[str, Any]", value)
            key = answer.get("id")
            if "method" not in answer and isinstance(key, int | str) and not isinstance(key, bool):
                # Somebody waits for it: better an error now than a time-out.
                problem = ErrorData(code=PARSE_ERROR, message="the server's answer is not a JSON-RPC message")
                return SessionMessage(JSONRPCError(jsonrpc="2.0", id=key, error=problem))
        if not self._told:
            self._told = True
            shown = redact(data[: 4 * _SHOWN].decode("utf-8", "replace"))[:_SHOWN]
            self._log.warning("the server wrote what is not a message (said only once): %r", shown)
        return None
