"""Logs every message on the wire (`traceMCP`), both ways, without secrets. Changes none of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

from mcp.shared.message import SessionMessage

from toolspace.core.secret_masking import mask_secrets
from toolspace.providers.mcp.transports.base import MessageReader, MessageWriter

if TYPE_CHECKING:  # Private modules of the SDK: for their names only.
    from mcp.client._transport import ReadStream, TransportStreams, WriteStream

_SHOWN = 4_000
_log = logging.getLogger("toolspace.mcp")

TraceFunction = Callable[[str, bytes], None]
"""Is told of a message: `→` to the server or `←` from it, and its JSON."""


def create_tracer(name: str) -> TraceFunction:
    """For those who have the bytes."""

    def trace(direction: str, data: bytes) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            try:
                _show(name, direction, json.loads(data))
            except (ValueError, RecursionError):
                _show(name, direction, data[: 2 * _SHOWN].decode("utf-8", "replace"))

    return trace


def trace_streams(name: str, streams: TransportStreams) -> TransportStreams:
    """The same streams, with all that goes through them logged."""
    read, write = streams
    return _TracedSource(name, read), _TracedSink(name, write)


class _TracedSource(MessageReader):
    def __init__(self, name: str, inner: ReadStream[SessionMessage | Exception]) -> None:
        self._name = name
        self._inner = inner

    @property
    def last_context(self) -> Context | None:
        """The SDK runs what a message causes in the context of its sender, where that is known."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        item = await self._inner.receive()
        _show_item(self._name, "←", item)
        return item

    async def aclose(self) -> None:
        await self._inner.aclose()


class _TracedSink(MessageWriter):
    def __init__(self, name: str, inner: WriteStream[SessionMessage]) -> None:
        self._name = name
        self._inner = inner

    async def send(self, item: SessionMessage, /) -> None:
        _show_item(self._name, "→", item)
        await self._inner.send(item)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _show_item(name: str, direction: str, item: SessionMessage | Exception) -> None:
    if not _log.isEnabledFor(logging.DEBUG):
        return
    if isinstance(item, Exception):
        _show(name, direction, str(item))
    else:
        _show(name, direction, item.message.model_dump(mode="json", by_alias=True, exclude_unset=True))


def _show(name: str, direction: str, message: Any) -> None:
    # Redacted before it is cut: half a secret is one too.
    text = json.dumps(mask_secrets(message), ensure_ascii=False, separators=(",", ":"))
    more = f"… ({len(text):,} characters)" if len(text) > _SHOWN else ""
    _log.debug("%s %s %s%s", name, direction, text[:_SHOWN], more)
