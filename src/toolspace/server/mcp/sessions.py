"""The sessions of the handshake era as the fast path has to know them. The library owns them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from toolspace.core.context import ToolContext
from toolspace.server.asgi import Message, Send
from toolspace.server.mcp.service import session_context

MAX_SESSIONS = 10_000
"""Sessions that may be open at once."""
MAX_SESSIONS_PER_CALLER = MAX_SESSIONS // 10
"""Those of one caller, where callers are known: none of them takes the room of all others."""
_ANSWERING = frozenset(("elicitation", "sampling", "roots"))
_VERSIONS = frozenset(version.encode() for version in HANDSHAKE_PROTOCOL_VERSIONS)


class HandshakeSession:
    """One session: who opened it, and the calls that its fast path is running."""

    __slots__ = ("can_answer", "context", "id", "last_sdk_request_at", "owner", "running_calls")

    def __init__(self, id: bytes, owner: str | None, context: ToolContext | None, *, answers: bool) -> None:
        self.id = id
        self.owner = owner
        self.can_answer = answers
        """Whether its client can be asked something during a call, which is the library's to do."""
        self.context = session_context(context, id.decode("latin-1"))
        self.last_sdk_request_at = time.monotonic()
        self.running_calls: dict[str, str] = {}
        """Request → call. Ids are compared as text: some clients send a number and cancel its digits."""


class SessionOpening(NamedTuple):
    """A request that opens a session."""

    can_answer: bool
    """Whether the client can be asked something during a call."""


class _Introduction(msgspec.Struct):
    capabilities: dict[str, msgspec.Raw] = {}


class _Request(msgspec.Struct):
    method: str
    params: msgspec.Raw = msgspec.Raw(b"{}")


def parse_session_opening(body: bytes) -> SessionOpening | None:
    """What a body says, where it opens a session."""
    try:
        request = msgspec.json.decode(body, type=_Request)
        if request.method != "initialize":
            return None
        said = msgspec.json.decode(request.params, type=_Introduction).capabilities
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return SessionOpening(can_answer=not _ANSWERING.isdisjoint(said))


class HandshakeSessions:
    """The sessions that were opened here and have not been closed."""

    def __init__(self, idle_seconds: float) -> None:
        self._known: dict[bytes, HandshakeSession] = {}
        self._owned: Counter[str | None] = Counter()
        self._touch_seconds = idle_seconds / 6
        """How often a request takes the library's way: else it would take a busy session for an idle one."""
        self._idle_seconds = idle_seconds + self._touch_seconds
        """When the library has ended a session that nobody used."""

    def has_too_many(self, owner: str | None) -> bool:
        """Whether a caller has as many open as one may have. It is nobody's fault where callers are not known."""
        if owner is None or self._owned[owner] < MAX_SESSIONS_PER_CALLER:
            return False
        self._forget_idle()
        return self._owned[owner] >= MAX_SESSIONS_PER_CALLER

    def find(self, headers: Mapping[bytes, bytes], owner: str | None) -> HandshakeSession | None:
        """The session of a request, where its caller opened it and it was seen by the library lately."""
        session = self._known.get(headers.get(b"mcp-session-id", b""))
        if session is None or session.owner != owner:
            return None
        if headers.get(b"mcp-protocol-version", b"2025-11-25") not in _VERSIONS:
            return None
        now = time.monotonic()
        if now - session.last_sdk_request_at > self._touch_seconds:
            session.last_sdk_request_at = now
            return None
        return session

    def remove(self, headers: Mapping[bytes, bytes], owner: str | None) -> HandshakeSession | None:
        """The session that its caller ends, which is not known from now on."""
        session = self._known.get(headers.get(b"mcp-session-id", b""))
        if session is None or session.owner != owner:
            return None
        self._remove(session.id)
        return session

    def watch_for_loss(self, headers: Mapping[bytes, bytes], owner: str | None, send: Send) -> Send:
        """Where the library's answer says that a session is no more, forgets it too."""
        session = self._known.get(headers.get(b"mcp-session-id", b""))
        if session is None or session.owner != owner:
            return send

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 404:
                self._remove(session.id)
            await send(message)

        return noting

    def watch_opening(
        self, opening: SessionOpening, owner: str | None, context: ToolContext | None, send: Send
    ) -> Send:
        """Notes the session that the library's answer to its opening names."""

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                headers: Any = message.get("headers", ())
                for name, value in headers:
                    if name == b"mcp-session-id":
                        self._add(HandshakeSession(bytes(value), owner, context, answers=opening.can_answer))
            await send(message)

        return noting

    def _add(self, session: HandshakeSession) -> None:
        if len(self._known) >= MAX_SESSIONS:
            self._forget_idle()
        if len(self._known) < MAX_SESSIONS:  # Others take the library's way, which is only slower.
            self._known[session.id] = session
            self._owned[session.owner] += 1

    def _remove(self, id: bytes) -> None:
        session = self._known.pop(id, None)
        if session is None:
            return
        self._owned[session.owner] -= 1
        if not self._owned[session.owner]:
            del self._owned[session.owner]

    def _forget_idle(self) -> None:
        before = time.monotonic() - self._idle_seconds
        for session in [one for one in self._known.values() if one.last_sdk_request_at < before]:
            self._remove(session.id)
