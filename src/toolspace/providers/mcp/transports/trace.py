"""Logs every message to and from a server (`traceMCP`), with secrets masked. Changes no message."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextvars import Context
from typing import Any

from mcp.shared.message import SessionMessage

from toolspace.core.secret_masking import mask_secrets
from toolspace.providers.mcp.transports.base import MessageReader, MessageStreams, MessageWriter

_MAX_CHARACTERS = 4_000
_log = logging.getLogger("toolspace.mcp")

TraceFunction = Callable[[str, bytes], None]
"""Called with a direction (`→` to the server, `←` from it) and the JSON of a message."""


def create_tracer(server_name: str) -> TraceFunction:
    """Returns a function that logs encoded messages."""

    def trace(direction: str, data: bytes) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            try:
                _log_message(server_name, direction, json.loads(data))
            except (ValueError, RecursionError):
                _log_message(server_name, direction, data[: 2 * _MAX_CHARACTERS].decode("utf-8", "replace"))

    return trace


def trace_streams(server_name: str, streams: MessageStreams) -> MessageStreams:
    """Wraps streams so that every message is logged."""
    reader, writer = streams
    return _TracedReader(server_name, reader), _TracedWriter(server_name, writer)


class _TracedReader(MessageReader):
    def __init__(self, server_name: str, inner: MessageReader) -> None:
        self._server_name = server_name
        self._inner = inner

    @property
    def last_context(self) -> Context | None:
        """The SDK handles a message in the context of its sender, if the reader knows it."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        item = await self._inner.receive()
        _log_item(self._server_name, "←", item)
        return item

    async def aclose(self) -> None:
        await self._inner.aclose()


class _TracedWriter(MessageWriter):
    def __init__(self, server_name: str, inner: MessageWriter) -> None:
        self._server_name = server_name
        self._inner = inner

    async def send(self, item: SessionMessage, /) -> None:
        _log_item(self._server_name, "→", item)
        await self._inner.send(item)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _log_item(server_name: str, direction: str, item: SessionMessage | Exception) -> None:
    if not _log.isEnabledFor(logging.DEBUG):
        return
    if isinstance(item, Exception):
        _log_message(server_name, direction, str(item))
    else:
        _log_message(server_name, direction, item.message.model_dump(mode="json", by_alias=True, exclude_unset=True))


def _log_message(server_name: str, direction: str, message: Any) -> None:
    # Masked before it is cut, because a part of a secret must not be logged either.
    text = json.dumps(mask_secrets(message), ensure_ascii=False, separators=(",", ":"))
    suffix = f"… ({len(text):,} characters)" if len(text) > _MAX_CHARACTERS else ""
    _log.debug("%s %s %s%s", server_name, direction, text[:_MAX_CHARACTERS], suffix)
