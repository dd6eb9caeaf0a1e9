"""The sessions of the handshake era as the fast path has to know them. The library owns them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from toolspace.core.context import ToolContext
from toolspace.mcpserver.service import session_context
from toolspace.mcpserver.wire import Message, Send

_FORGET_SECONDS = 3600.0
_MOST = 10_000
_ANSWERING = frozenset(("elicitation", "sampling", "roots"))
_VERSIONS = frozenset(version.encode() for version in HANDSHAKE_PROTOCOL_VERSIONS)


class Session:
    """One session: who opened it, and the calls that its fast path is running."""

    __slots__ = ("answers", "context", "id", "owner", "running", "touched")

    def __init__(self, id: bytes, owner: str | None, context: ToolContext | None, *, answers: bool) -> None:
        self.id = id
        self.owner = owner
        self.answers = answers
        """Whether its client can be asked something during a call, which is the library's to do."""
        self.context = session_context(context, id.decode("latin-1"))
        self.touched = time.monotonic()
        self.running: dict[str, str] = {}
        """Request → call. Ids are compared as text: some clients send a number and cancel its digits."""


class _Introduction(msgspec.Struct):
    capabilities: dict[str, msgspec.Raw] = {}


class _Opening(msgspec.Struct):
    method: str
    params: msgspec.Raw = msgspec.Raw(b"{}")


class Sessions:
    """The sessions that were opened here and have not been closed."""

    def __init__(self, idle_seconds: float) -> None:
        self._known: dict[bytes, Session] = {}
        self._touch_seconds = idle_seconds / 6
        """How often a request takes the library's way: else it would take a busy session for an idle one."""

    def find(self, headers: Mapping[bytes, bytes], owner: str | None) -> Session | None:
        """The session of a request, where its caller opened it and it was seen by the library lately."""
        session = self._known.get(headers.get(b"mcp-session-id", b""))
        if session is None or session.owner != owner:
            return None
        if headers.get(b"mcp-protocol-version", b"2025-11-25") not in _VERSIONS:
            return None
        now = time.monotonic()
        if now - session.touched > self._touch_seconds:
            session.touched = now
            return None
        return session

    def forget(self, headers: Mapping[bytes, bytes], owner: str | None) -> Session | None:
        """The session that its caller ends, which is not known from now on."""
        session = self._known.get(headers.get(b"mcp-session-id", b""))
        return self._known.pop(session.id) if session is not None and session.owner == owner else None

    def until_lost(self, headers: Mapping[bytes, bytes], owner: str | None, send: Send) -> Send:
        """Where the library's answer says that a session is no more, forgets it too."""
        session = self._known.get(headers.get(b"mcp-session-id", b""))
        if session is None or session.owner != owner:
            return send

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 404:
                self._known.pop(session.id, None)
            await send(message)

        return noting

    def observe(self, body: bytes, owner: str | None, context: ToolContext | None, send: Send) -> Send:
        """Where a request opens a session, notes the one that the library's answer names."""
        try:
            opening = msgspec.json.decode(body, type=_Opening)
            if opening.method != "initialize":
                return send
            said = msgspec.json.decode(opening.params, type=_Introduction).capabilities
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return send
        return self._noting(owner, context, send, answers=not _ANSWERING.isdisjoint(said))

    def _noting(self, owner: str | None, context: ToolContext | None, send: Send, *, answers: bool) -> Send:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                headers: Any = message.get("headers", ())
                for name, value in headers:
                    if name == b"mcp-session-id":
                        self._add(Session(bytes(value), owner, context, answers=answers))
            await send(message)

        return noting

    def _add(self, session: Session) -> None:
        if len(self._known) >= _MOST:
            now = time.monotonic()
            self._known = {id: one for id, one in self._known.items() if now - one.touched < _FORGET_SECONDS}
        if len(self._known) < _MOST:  # Others take the library's way, which is only slower.
            self._known[session.id] = session
