"""The short way for the requests that matter for speed: one decode, one call, one encode, no session machinery.

It takes a request only where it is certain to answer as the library would; all others it leaves alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS, InboundLadderRejection, classify_inbound_request
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    ClientCapabilities,
    methods,
)
from mcp_types.version import LATEST_MODERN_VERSION

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.server.mcp.elicitation import NO_ABILITIES, Abilities
from toolspace.server.mcp.fast_requests import CallTool, CancelCall, Job, ListTools, Manner, ToolCall
from toolspace.server.mcp.json_rpc import INVALID_PARAMS, RequestId
from toolspace.server.mcp.service import Service
from toolspace.server.mcp.sessions import Session
from toolspace.server.mcp.suspended_calls import Parking

Headers = Mapping[bytes, bytes]
_VERSION = LATEST_MODERN_VERSION.encode()
_NOTHING = msgspec.Raw(b"")
_MOST_REMEMBERED = 512
_LONGEST_REMEMBERED = 4096


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    arguments: msgspec.Raw = _NOTHING
    cursor: str | None = None
    meta: msgspec.Raw = msgspec.field(name="_meta", default=_NOTHING)


class _Request(msgspec.Struct):
    jsonrpc: str
    method: str
    id: int | str | None = None
    params: msgspec.Raw = _NOTHING


class _Cancelled(msgspec.Struct, rename="camel"):
    request_id: int | str


class _Envelope(NamedTuple):
    """What a request of the stateless era says besides its question."""

    token: RequestId | None
    abilities: Abilities


class FastPath:
    """Decides which requests it takes. `stamp` is what the library puts into every answer of the stateless era."""

    def __init__(self, service: Service, parking: Parking, stamp: Mapping[str, Any]) -> None:
        self._service = service
        self._parking = parking
        meta = json_text.encode_bytes({"io.modelcontextprotocol/serverInfo": stamp})
        self._manner = Manner(
            modern=True,
            tail=b',"resultType":"complete","_meta":%b}' % meta,
            asked_tail=b',"_meta":%b}' % meta,
            listed=b',"ttlMs":0,"cacheScope":"private"',
            invalid_status=ERROR_CODE_HTTP_STATUS[INVALID_PARAMS],
            missing_status=ERROR_CODE_HTTP_STATUS[MISSING_REQUIRED_CLIENT_CAPABILITY],
        )
        self._envelopes: dict[bytes, _Envelope] = {}
        self._kinds: dict[tuple[bytes, bytes], bool] = {}

    # The stateless era

    def take(self, headers: Headers, body: bytes, context: ToolContext | None) -> Job | None:
        """The job of a stateless request, or None where the library is to answer. `headers` has each name once."""
        if headers.get(b"mcp-protocol-version") != _VERSION:
            return None
        method = headers.get(b"mcp-method")
        if method not in (b"tools/call", b"tools/list") or not self._speaks(headers):
            return None
        request = _decode(body)
        if request is None or request.id is None or request.method.encode() != method:
            return None
        params = _decode_params(request.params)
        if params is None or (envelope := self._envelope(params.meta)) is None:
            return None
        if method == b"tools/call":
            if params.name is None or headers.get(b"mcp-name") != params.name.encode():
                return None
            call = self._call(request.id, params, envelope)
            if call is None:
                return None
            return CallTool(self._service, self._manner, call, context, parking=self._parking)
        if params.name is not None or params.arguments is not _NOTHING or envelope.token is not None:
            return None
        return ListTools(self._service, self._manner, request.id, params.cursor, context)

    def _envelope(self, meta: msgspec.Raw) -> _Envelope | None:
        """What the envelope of a request says; None where it is wrong."""
        text = bytes(meta)
        if (known := self._envelopes.get(text)) is not None:
            return known
        try:
            said = json_text.decode(text)
            verdict = classify_inbound_request({"method": "tools/call", "params": {"_meta": said}})
            if isinstance(verdict, InboundLadderRejection):
                return None
            methods.validate_client_request("tools/call", LATEST_MODERN_VERSION, {"name": "", "_meta": said})
            capabilities = ClientCapabilities.model_validate(said[CLIENT_CAPABILITIES_META_KEY], by_name=False)
        except (ValueError, KeyError):
            return None
        token = said.get("progressToken")
        if token is not None and (isinstance(token, bool) or not isinstance(token, int | str)):
            return None
        envelope = _Envelope(token, Abilities.of(capabilities))
        if token is None and len(text) < _LONGEST_REMEMBERED:
            # Clients send the same envelope with every request.
            if len(self._envelopes) >= _MOST_REMEMBERED:
                self._envelopes.clear()
            self._envelopes[text] = envelope
        return envelope

    # The handshake era

    def take_in(self, session: Session, headers: Headers, body: bytes) -> Job | None:
        """The job of a request in a session, or None where the library is to answer."""
        if not self._speaks(headers) or (request := _decode(body)) is None:
            return None
        if request.method == "notifications/cancelled" and request.id is None:
            return self._cancellation(session, request)
        if request.id is None or request.method not in ("tools/call", "tools/list"):
            return None
        params = _decode_params(request.params) if request.params is not _NOTHING else _Params()
        if params is None or not _is_plain(params.meta):
            return None
        manner = Manner(modern=False, tail=b"}", headers=((b"mcp-session-id", session.id),))
        if request.method == "tools/call":
            call = self._call(request.id, params)
            if call is None or (call.may_ask and session.answers):
                return None
            return CallTool(self._service, manner, call, session.context, session=session)
        if params.name is not None or params.arguments is not _NOTHING:
            return None
        return ListTools(self._service, manner, request.id, params.cursor, session.context)

    def _cancellation(self, session: Session, request: _Request) -> Job | None:
        try:
            wanted = str(msgspec.json.decode(request.params, type=_Cancelled).request_id)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return CancelCall(self._service, session, wanted) if wanted in session.running else None

    # Both

    def _call(self, id: RequestId, params: _Params, envelope: _Envelope | None = None) -> ToolCall | None:
        """The call, where its tool is known by that very name and its arguments are an object."""
        tool = self._service.known(params.name) if params.name is not None and params.cursor is None else None
        if tool is None or (envelope is not None and self._service.definition(tool, modern=True).mirrored):
            return None
        arguments = bytes(params.arguments)
        if arguments and not arguments.startswith(b"{"):
            return None
        has_schema, may_ask = tool.output_schema is not None, self._service.may_ask(tool)
        token, abilities = envelope if envelope is not None else (None, NO_ABILITIES)
        return ToolCall(id, tool.name, arguments or None, has_schema, may_ask, token, abilities)

    def _speaks(self, headers: Headers) -> bool:
        """Whether it sends JSON and takes both kinds of answer. Remembered: a client says the same every time."""
        key = (headers.get(b"accept", b""), headers.get(b"content-type", b""))
        known = self._kinds.get(key)
        if known is None:
            accept, content = key[0].lower(), key[1].lower()
            kinds = {kind.partition(b";")[0].strip() for kind in accept.split(b",")}
            json = kinds & {b"*/*", b"application/*", b"application/json"}
            events = kinds & {b"*/*", b"text/*", b"text/event-stream"}
            known = bool(json and events) and content.partition(b";")[0].strip() == b"application/json"
            if len(accept) + len(content) < _LONGEST_REMEMBERED:
                if len(self._kinds) >= _MOST_REMEMBERED:
                    self._kinds.clear()
                self._kinds[key] = known
        return known


_request_decoder = msgspec.json.Decoder(_Request)
_params_decoder = msgspec.json.Decoder(_Params)


def _decode(body: bytes) -> _Request | None:
    try:
        request = _request_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return request if request.jsonrpc == "2.0" else None


def _decode_params(params: msgspec.Raw) -> _Params | None:
    try:
        return _params_decoder.decode(params)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _is_plain(meta: msgspec.Raw) -> bool:
    """Whether a request of the handshake era asks for nothing but its answer."""
    text = bytes(meta)
    if not text:
        return True
    return text.startswith(b"{") and b"progressToken" not in text and b"\\u" not in text
