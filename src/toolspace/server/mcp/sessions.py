"""Tracks the sessions of the handshake era that `fast_path` may serve. The MCP SDK owns the sessions themselves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from toolspace.core.tool_context import ToolContext
from toolspace.server.mcp.elicitation import create_unsupported_client
from toolspace.server.mcp.tool_service import session_context, with_caller_client
from toolspace.server.rate_limit import SHARE
from toolspace.server.requests import Message, Send
from toolspace.server.tool_permissions import is_tool_key_user

MAX_SESSIONS = 10_000
MAX_SESSIONS_PER_CALLER = MAX_SESSIONS // SHARE
"""Applies to authenticated callers, so that one of them cannot use up all sessions."""
MAX_LIMITED_SESSIONS = MAX_SESSIONS - MAX_SESSIONS // SHARE
"""How many sessions all tool keys may have together; the others are for secret keys."""
_QUESTION_CAPABILITIES = frozenset(("elicitation", "sampling", "roots"))
_VERSIONS = frozenset(version.encode() for version in HANDSHAKE_PROTOCOL_VERSIONS)


class HandshakeSession:
    """One session: who opened it, and the calls that the fast path is running in it."""

    def __init__(self, id: bytes, owner: str | None, context: ToolContext | None, *, can_answer: bool) -> None:
        self.id = id
        self.headers = ((b"mcp-session-id", id),)
        """The headers of every response."""
        self.owner = owner
        self.can_answer = can_answer
        """Whether the client answers questions during a call, which only the SDK can send."""
        text_id = id.decode("latin-1")
        self.context = session_context(context, text_id)
        self.silent_context = with_caller_client(self.context, create_unsupported_client(text_id))
        """The context of tools that may ask questions, if the client cannot answer: every question is refused."""
        self.last_sdk_request_at = self.last_used_at = time.monotonic()
        self.open_requests = 0
        """Requests and streams of the session that are open now."""
        self.running_calls: dict[str, str] = {}
        """Call ids by request id. Request ids are compared as text: some clients cancel 1 as "1"."""

    def end_use(self) -> None:
        """A request or a stream of the session has ended."""
        self.open_requests -= 1
        self.last_used_at = time.monotonic()


class _InitializeParams(msgspec.Struct):
    capabilities: dict[str, msgspec.Raw] = {}


class _InitializeRequest(msgspec.Struct):
    method: Literal["initialize"]
    params: _InitializeParams = msgspec.field(default_factory=_InitializeParams)


def parse_initialize(body: bytes) -> frozenset[str] | None:
    """Returns the names of the client's capabilities; None if the body is not an `initialize` request."""
    try:
        return frozenset(msgspec.json.decode(body, type=_InitializeRequest).params.capabilities)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


class HandshakeSessions:
    """The open sessions of one endpoint."""

    def __init__(self, idle_seconds: float) -> None:
        self._sessions: dict[bytes, HandshakeSession] = {}
        self._count_by_owner: Counter[str | None] = Counter()
        self._limited_count = 0
        """Sessions of tool keys."""
        self._sdk_interval = idle_seconds / 6
        """The seconds after which a request goes to the SDK, which otherwise would end a session as idle."""
        self._idle_seconds = idle_seconds + self._sdk_interval
        """The time after which the SDK has certainly ended an unused session."""

    def needs_room(self, owner: str | None, context: ToolContext | None) -> bool:
        """Whether a caller can open a session only after another one of its own has ended."""
        return self.has_too_many(owner) or not self.has_room_for(context)

    def remove_least_recently_used(self, owner: str | None) -> HandshakeSession | None:
        """Removes and returns the session of a caller that it has not used for the longest time.

        Returns None if all its sessions are in use: they have an open request or stream.
        """
        unused_sessions = [
            session for session in self._sessions.values() if session.owner == owner and not session.open_requests
        ]
        session = min(unused_sessions, key=lambda session: session.last_used_at, default=None)
        if session is not None:
            self._remove(session.id)
        return session

    def begin_use(self, headers: Mapping[bytes, bytes], owner: str | None) -> HandshakeSession | None:
        """Returns the session of a request that begins, which calls its `end_use` at the end. None if it is unknown."""
        session = self._find_owned(headers, owner)
        if session is not None:
            session.open_requests += 1
        return session

    def has_too_many(self, owner: str | None) -> bool:
        """Whether an authenticated caller has as many sessions open as it may have."""
        if owner is None or self._count_by_owner[owner] < MAX_SESSIONS_PER_CALLER:
            return False
        self._remove_idle()
        return self._count_by_owner[owner] >= MAX_SESSIONS_PER_CALLER

    def has_room_for(self, context: ToolContext | None) -> bool:
        """Whether a caller may open one more session: tool keys leave some to secret keys."""
        if not _has_tool_key(context) or self._limited_count < MAX_LIMITED_SESSIONS:
            return True
        self._remove_idle()
        return self._limited_count < MAX_LIMITED_SESSIONS

    def find(self, headers: Mapping[bytes, bytes], owner: str | None) -> HandshakeSession | None:
        """Returns the session if the fast path may serve it. If None, the SDK serves it, which keeps it from idling."""
        session = self._find_owned(headers, owner)
        if session is None or headers.get(b"mcp-protocol-version", b"2025-11-25") not in _VERSIONS:
            return None
        now = time.monotonic()
        if now - session.last_sdk_request_at > self._sdk_interval:
            session.last_sdk_request_at = now
            return None
        return session

    def remove(self, headers: Mapping[bytes, bytes], owner: str | None) -> HandshakeSession | None:
        """Removes and returns the session that its caller ends."""
        session = self._find_owned(headers, owner)
        if session is not None:
            self._remove(session.id)
        return session

    def watch_for_loss(self, headers: Mapping[bytes, bytes], owner: str | None, send: Send) -> Send:
        """Wraps `send` to remove the session if the SDK answers that it does not exist."""
        session = self._find_owned(headers, owner)
        if session is None:
            return send

        async def watching_send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 404:
                self._remove(session.id)
            await send(message)

        return watching_send

    def watch_opening(
        self, capabilities: frozenset[str], owner: str | None, context: ToolContext | None, send: Send
    ) -> Send:
        """Wraps `send` to add the session that the SDK opens."""

        async def watching_send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                can_answer = not _QUESTION_CAPABILITIES.isdisjoint(capabilities)
                for name, value in message.get("headers", ()):
                    if name == b"mcp-session-id":
                        self.add(HandshakeSession(bytes(value), owner, context, can_answer=can_answer))
            await send(message)

        return watching_send

    def _find_owned(self, headers: Mapping[bytes, bytes], owner: str | None) -> HandshakeSession | None:
        session = self._sessions.get(headers.get(b"mcp-session-id", b""))
        return session if session is not None and session.owner == owner else None

    def add(self, session: HandshakeSession) -> None:
        if len(self._sessions) >= MAX_SESSIONS:
            self._remove_idle()
        if len(self._sessions) < MAX_SESSIONS:  # Otherwise the SDK serves the session, which is only slower.
            self._sessions[session.id] = session
            self._count_by_owner[session.owner] += 1
            self._limited_count += _has_tool_key(session.context)

    def _remove(self, id: bytes) -> None:
        session = self._sessions.pop(id, None)
        if session is None:
            return
        self._limited_count -= _has_tool_key(session.context)
        self._count_by_owner[session.owner] -= 1
        if not self._count_by_owner[session.owner]:
            del self._count_by_owner[session.owner]

    def _remove_idle(self) -> None:
        oldest = time.monotonic() - self._idle_seconds
        for session in [session for session in self._sessions.values() if session.last_sdk_request_at < oldest]:
            self._remove(session.id)


def _has_tool_key(context: ToolContext | None) -> bool:
    return context is not None and is_tool_key_user(context.user_id)
