"""The short way for the requests that matter for speed: one decode, one call, one encode, no session machinery.

It takes a request only where it is certain to answer as the library would; all others it leaves alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

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
from toolspace.core.result import ToolResult
from toolspace.server.asgi import Receive, Send
from toolspace.server.mcp import json_rpc
from toolspace.server.mcp.elicitation import NO_ABILITIES, ClientAbilities
from toolspace.server.mcp.json_rpc import INVALID_PARAMS, HttpExchange, RequestId
from toolspace.server.mcp.progress import ProgressQueue, ProgressReport
from toolspace.server.mcp.results import encode_call_result
from toolspace.server.mcp.service import McpService, UnknownToolError
from toolspace.server.mcp.sessions import HandshakeSession
from toolspace.server.mcp.suspended_calls import CallIdentity, InputRequired, MissingClientCapability, SuspendedCalls
from toolspace.server.mcp.tool_definitions import InvalidCursor

# MERGED from fast_requests: Requests that the fast path took, and how they are answered: a page of tools, a call. …

_CANCELLED = -32800
"""What the library answers in the handshake era: MCP names no code for it."""


class FastRequest(Protocol):
    """A request that was taken, ready to be answered."""

    async def run(self, receive: Receive, send: Send) -> None: ...


class EraFormat(NamedTuple):
    """How one era wants its answers."""

    is_modern: bool
    tail: bytes
    """What every result ends with."""
    asked_tail: bytes = b"}"
    """What every answer that asks something ends with."""
    listed: bytes = b""
    """What every list ends with, before that."""
    invalid_status: int = 200
    missing_status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()


class FastToolCall(NamedTuple):
    """One `tools/call`, checked."""

    id: RequestId
    name: str
    arguments: bytes | None
    output_schema: bool
    may_ask: bool
    token: RequestId | None
    abilities: ClientAbilities


class FastListTools:
    def __init__(
        self, service: McpService, manner: EraFormat, id: RequestId, cursor: str | None, context: ToolContext | None
    ) -> None:
        self._service = service
        self._manner = manner
        self._id = id
        self._cursor = cursor
        self._context = context

    async def run(self, receive: Receive, send: Send) -> None:
        manner = self._manner
        try:
            page = self._service.list_page(self._cursor, self._context, modern=manner.is_modern)
        except InvalidCursor as error:
            body = json_rpc.encode_error(self._id, INVALID_PARAMS, str(error))
            await json_rpc.send_json(send, manner.invalid_status, body, manner.headers)
            return
        tools = b",".join([one.encoded for one in page.definitions])
        following = b"" if page.next_cursor is None else b',"nextCursor":%b' % msgspec.json.encode(page.next_cursor)
        result = b'{"tools":[%b]%b%b%b' % (tools, following, manner.listed, manner.tail)
        await json_rpc.send_json(send, 200, json_rpc.encode_result(self._id, result), manner.headers)


class FastCallTool:
    def __init__(
        self,
        service: McpService,
        manner: EraFormat,
        call: FastToolCall,
        context: ToolContext | None,
        *,
        session: HandshakeSession | None = None,
        parking: SuspendedCalls | None = None,
    ) -> None:
        self._service = service
        self._manner = manner
        self._call = call
        self._context = context
        self._session = session
        self._parking = parking
        self._call_id = service.create_call_id()
        self._reports: ProgressQueue | None = None

    async def run(self, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(
            receive, send, on_disconnect=self._cancel, headers=self._manner.headers, messages=self._messages
        )
        exchange.start()
        try:
            if self._call.token is not None:
                self._reports = ProgressQueue(exchange.wake)
                with self._service.progress.follow(self._call_id, self._reports):
                    status, body = await self._answer()
            elif self._session is not None:
                status, body = await self._answer_in(self._session)
            else:
                status, body = await self._answer()
        except BaseException:
            await exchange.abandon()
            raise
        await exchange.finish(status, body)

    async def _answer_in(self, session: HandshakeSession) -> tuple[int, bytes]:
        """In a session a call can be cancelled by another request."""
        key = str(self._call.id)
        session.running_calls[key] = self._call_id
        try:
            status, body = await self._answer()
            if key not in session.running_calls:
                return 200, json_rpc.encode_error(self._call.id, _CANCELLED, "Request cancelled")
            return status, body
        finally:
            if session.running_calls.get(key) == self._call_id:
                del session.running_calls[key]

    async def _answer(self) -> tuple[int, bytes]:
        call, manner = self._call, self._manner
        try:
            outcome = await self._outcome()
        except UnknownToolError as error:
            return manner.invalid_status, json_rpc.encode_error(call.id, INVALID_PARAMS, str(error))
        except MissingClientCapability as error:
            code = MISSING_REQUIRED_CLIENT_CAPABILITY
            return manner.missing_status, json_rpc.encode_error(call.id, code, str(error), error.data)
        if isinstance(outcome, InputRequired):
            return 200, json_rpc.encode_result(call.id, json_text.encode_bytes(outcome.wire)[:-1] + manner.asked_tail)
        answer = encode_call_result(outcome, modern=manner.is_modern, output_schema=call.output_schema)
        return 200, json_rpc.encode_result(call.id, answer + manner.tail)

    async def _outcome(self) -> ToolResult | InputRequired:
        call = self._call
        if self._parking is None or not call.may_ask:
            return await self._service.call(call.name, call.arguments, context=self._context, call_id=self._call_id)
        subject = CallIdentity(self._context, call.name, call.arguments)
        return await self._parking.start(subject, self._call_id, call.abilities)

    def _cancel(self) -> None:
        self._service.cancel(self._call_id)

    def _messages(self) -> list[bytes]:
        reports = self._reports.drain() if self._reports is not None else []
        return [
            json_rpc.encode_notification("notifications/progress", _params(self._call.token, report))
            for report in reports
        ]


class FastCancelCall:
    """A client's word that it does not want an answer any more. Nothing is said to it."""

    def __init__(self, service: McpService, session: HandshakeSession, request: str) -> None:
        self._service = service
        self._session = session
        self._request = request

    async def run(self, receive: Receive, send: Send) -> None:
        if (call_id := self._session.running_calls.pop(self._request, None)) is not None:
            self._service.cancel(call_id)
        headers = [(b"content-type", b"application/json"), (b"mcp-session-id", self._session.id)]
        await send({"type": "http.response.start", "status": 202, "headers": [*headers, (b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def _params(token: RequestId | None, report: ProgressReport) -> dict[str, Any]:
    params: dict[str, Any] = {"progressToken": token, "progress": report.progress}
    if report.total is not None:
        params["total"] = report.total
    if report.message is not None:
        params["message"] = report.message
    return params


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
    abilities: ClientAbilities


class FastPath:
    """Decides which requests it takes. `stamp` is what the library puts into every answer of the stateless era."""

    def __init__(self, service: McpService, parking: SuspendedCalls, stamp: Mapping[str, Any]) -> None:
        self._service = service
        self._parking = parking
        meta = json_text.encode_bytes({"io.modelcontextprotocol/serverInfo": stamp})
        self._manner = EraFormat(
            is_modern=True,
            tail=b',"resultType":"complete","_meta":%b}' % meta,
            asked_tail=b',"_meta":%b}' % meta,
            listed=b',"ttlMs":0,"cacheScope":"private"',
            invalid_status=ERROR_CODE_HTTP_STATUS[INVALID_PARAMS],
            missing_status=ERROR_CODE_HTTP_STATUS[MISSING_REQUIRED_CLIENT_CAPABILITY],
        )
        self._envelopes: dict[bytes, _Envelope] = {}
        self._kinds: dict[tuple[bytes, bytes], bool] = {}

    # The stateless era

    def match_stateless(self, headers: Headers, body: bytes, context: ToolContext | None) -> FastRequest | None:
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
            return FastCallTool(self._service, self._manner, call, context, parking=self._parking)
        if params.name is not None or params.arguments is not _NOTHING or envelope.token is not None:
            return None
        return FastListTools(self._service, self._manner, request.id, params.cursor, context)

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
        envelope = _Envelope(token, ClientAbilities.from_capabilities(capabilities))
        if token is None and len(text) < _LONGEST_REMEMBERED:
            # Clients send the same envelope with every request.
            if len(self._envelopes) >= _MOST_REMEMBERED:
                self._envelopes.clear()
            self._envelopes[text] = envelope
        return envelope

    # The handshake era

    def match_in_session(self, session: HandshakeSession, headers: Headers, body: bytes) -> FastRequest | None:
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
        manner = EraFormat(is_modern=False, tail=b"}", headers=((b"mcp-session-id", session.id),))
        if request.method == "tools/call":
            call = self._call(request.id, params)
            if call is None or (call.may_ask and session.can_answer):
                return None
            return FastCallTool(self._service, manner, call, session.context, session=session)
        if params.name is not None or params.arguments is not _NOTHING:
            return None
        return FastListTools(self._service, manner, request.id, params.cursor, session.context)

    def _cancellation(self, session: HandshakeSession, request: _Request) -> FastRequest | None:
        try:
            wanted = str(msgspec.json.decode(request.params, type=_Cancelled).request_id)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return FastCancelCall(self._service, session, wanted) if wanted in session.running_calls else None

    # Both

    def _call(self, id: RequestId, params: _Params, envelope: _Envelope | None = None) -> FastToolCall | None:
        """The call, where its tool is known by that very name and its arguments are an object."""
        tool = self._service.find_tool(params.name) if params.name is not None and params.cursor is None else None
        if tool is None or (
            envelope is not None and self._service.get_definition(tool, modern=True).has_header_arguments
        ):
            return None
        arguments = bytes(params.arguments)
        if arguments and not arguments.startswith(b"{"):
            return None
        has_schema, may_ask = tool.output_schema is not None, self._service.may_ask(tool)
        token, abilities = envelope if envelope is not None else (None, NO_ABILITIES)
        return FastToolCall(id, tool.name, arguments or None, has_schema, may_ask, token, abilities)

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
