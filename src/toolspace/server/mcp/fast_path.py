"""Answers frequent requests without the MCP SDK: one decode, one call, one encode. `endpoint` asks it first.

Benchmarks `serve` and `gateway_mcp` pay for it: their musts fail without it. It accepts a request only if it is certain
to answer it as the SDK would, and leaves all others to the SDK. `tests/server/mcp/test_fast_path.py` compares the two
paths on random requests.
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
from toolspace.server.mcp import json_rpc
from toolspace.server.mcp.elicitation import (
    NO_ABILITIES,
    CallIdentity,
    ClientAbilities,
    InputRequired,
    MissingClientCapability,
    SuspendedCalls,
)
from toolspace.server.mcp.json_rpc import INVALID_PARAMS, HttpExchange, RequestId
from toolspace.server.mcp.progress import ProgressQueue, ProgressReport
from toolspace.server.mcp.results_and_resources import encode_call_result
from toolspace.server.mcp.sessions import HandshakeSession
from toolspace.server.mcp.tools import InvalidCursor, McpService, UnknownToolError
from toolspace.server.requests import Receive, Send

Headers = Mapping[bytes, bytes]
_VERSION = LATEST_MODERN_VERSION.encode()
_MISSING = msgspec.Raw(b"")
_MAX_CACHED = 512
_MAX_CACHED_BYTES = 4096
_CANCELLED = -32800
"""The code that the SDK uses in the handshake era; MCP defines none."""


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    arguments: msgspec.Raw = _MISSING
    cursor: str | None = None
    meta: msgspec.Raw = msgspec.field(name="_meta", default=_MISSING)


class _Request(msgspec.Struct):
    jsonrpc: str
    method: str
    id: int | str | None = None
    params: msgspec.Raw = _MISSING


class _CancelParams(msgspec.Struct, rename="camel"):
    request_id: int | str


class _Envelope(NamedTuple):
    """The `_meta` of a stateless request."""

    progress_token: RequestId | None
    abilities: ClientAbilities


class EraFormat(NamedTuple):
    """The format of responses in one protocol era."""

    is_modern: bool
    result_end: bytes
    """The end of every result."""
    input_required_end: bytes = b"}"
    """The end of every result that asks for input."""
    list_fields: bytes = b""
    """Additional fields of every list."""
    invalid_params_status: int = 200
    missing_capability_status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()


class FastToolCall(NamedTuple):
    """A validated `tools/call`."""

    id: RequestId
    name: str
    arguments: bytes | None
    has_output_schema: bool
    may_ask: bool
    progress_token: RequestId | None
    abilities: ClientAbilities


class FastRequest(Protocol):
    """A request that the fast path answers."""

    async def run(self, receive: Receive, send: Send) -> None: ...


class FastPath:
    """Decides which requests to answer. `server_info` is what the SDK adds to every stateless result."""

    def __init__(self, service: McpService, suspended_calls: SuspendedCalls, server_info: Mapping[str, Any]) -> None:
        self._service = service
        self._suspended_calls = suspended_calls
        meta = json_text.encode_bytes({"io.modelcontextprotocol/serverInfo": server_info})
        self._stateless_format = EraFormat(
            is_modern=True,
            result_end=b',"resultType":"complete","_meta":%b}' % meta,
            input_required_end=b',"_meta":%b}' % meta,
            list_fields=b',"ttlMs":0,"cacheScope":"private"',
            invalid_params_status=ERROR_CODE_HTTP_STATUS[INVALID_PARAMS],
            missing_capability_status=ERROR_CODE_HTTP_STATUS[MISSING_REQUIRED_CLIENT_CAPABILITY],
        )
        self._envelopes: dict[bytes, _Envelope] = {}
        self._accepted_types: dict[tuple[bytes, bytes], bool] = {}

    # The stateless era

    def match_stateless(self, headers: Headers, body: bytes, context: ToolContext | None) -> FastRequest | None:
        """Returns None if the SDK has to answer. No header may be duplicated."""
        if headers.get(b"mcp-protocol-version") != _VERSION:
            return None
        method = headers.get(b"mcp-method")
        if method not in (b"tools/call", b"tools/list") or not self._has_accepted_types(headers):
            return None
        request = _decode_request(body)
        if request is None or request.id is None or request.method.encode() != method:
            return None
        params = _decode_params(request.params)
        if params is None or (envelope := self._parse_envelope(params.meta)) is None:
            return None
        if method == b"tools/call":
            if params.name is None or headers.get(b"mcp-name") != params.name.encode():
                return None
            call = self._match_call(request.id, params, envelope)
            if call is None:
                return None
            return FastCallTool(
                self._service, self._stateless_format, call, context, suspended_calls=self._suspended_calls
            )
        if params.name is not None or params.arguments is not _MISSING or envelope.progress_token is not None:
            return None
        return FastListTools(self._service, self._stateless_format, request.id, params.cursor, context)

    def _parse_envelope(self, meta: msgspec.Raw) -> _Envelope | None:
        """Returns None if the envelope is invalid."""
        text = bytes(meta)
        if (cached := self._envelopes.get(text)) is not None:
            return cached
        try:
            fields = json_text.decode(text)
            classification = classify_inbound_request({"method": "tools/call", "params": {"_meta": fields}})
            if isinstance(classification, InboundLadderRejection):
                return None
            methods.validate_client_request("tools/call", LATEST_MODERN_VERSION, {"name": "", "_meta": fields})
            capabilities = ClientCapabilities.model_validate(fields[CLIENT_CAPABILITIES_META_KEY], by_name=False)
        except (ValueError, KeyError):
            return None
        token = fields.get("progressToken")
        if token is not None and (isinstance(token, bool) or not isinstance(token, int | str)):
            return None
        envelope = _Envelope(token, ClientAbilities.from_capabilities(capabilities))
        if token is None and len(text) < _MAX_CACHED_BYTES:
            # Cached, because clients send the same envelope with every request.
            if len(self._envelopes) >= _MAX_CACHED:
                self._envelopes.clear()
            self._envelopes[text] = envelope
        return envelope

    # The handshake era

    def match_in_session(self, session: HandshakeSession, headers: Headers, body: bytes) -> FastRequest | None:
        """Returns None if the SDK has to answer."""
        if not self._has_accepted_types(headers) or (request := _decode_request(body)) is None:
            return None
        if request.method == "notifications/cancelled" and request.id is None:
            return self._match_cancellation(session, request)
        if request.id is None or request.method not in ("tools/call", "tools/list"):
            return None
        params = _decode_params(request.params) if request.params is not _MISSING else _Params()
        if params is None or not _is_simple_meta(params.meta):
            return None
        era_format = EraFormat(is_modern=False, result_end=b"}", headers=((b"mcp-session-id", session.id),))
        if request.method == "tools/call":
            call = self._match_call(request.id, params)
            if call is None or (call.may_ask and session.can_answer):
                return None
            context = session.silent_context if call.may_ask else session.context
            return FastCallTool(self._service, era_format, call, context, session=session)
        if params.name is not None or params.arguments is not _MISSING:
            return None
        return FastListTools(self._service, era_format, request.id, params.cursor, session.context)

    def _match_cancellation(self, session: HandshakeSession, request: _Request) -> FastRequest | None:
        try:
            request_id = str(msgspec.json.decode(request.params, type=_CancelParams).request_id)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return FastCancelCall(self._service, session, request_id) if request_id in session.running_calls else None

    # Both eras

    def _match_call(
        self, request_id: RequestId, params: _Params, envelope: _Envelope | None = None
    ) -> FastToolCall | None:
        """Returns the call if a tool has exactly this name and the arguments are an object."""
        tool = self._service.find_tool(params.name) if params.name is not None and params.cursor is None else None
        if tool is None or (
            envelope is not None and self._service.get_definition(tool, modern=True).has_header_arguments
        ):
            return None
        arguments = bytes(params.arguments)
        if arguments and not arguments.startswith(b"{"):
            return None
        has_output_schema, may_ask = tool.output_schema is not None, self._service.may_ask(tool)
        token, abilities = envelope if envelope is not None else (None, NO_ABILITIES)
        return FastToolCall(request_id, tool.name, arguments or None, has_output_schema, may_ask, token, abilities)

    def _has_accepted_types(self, headers: Headers) -> bool:
        """Whether the request is JSON and accepts both kinds of response. Cached, as clients repeat these headers."""
        key = (headers.get(b"accept", b""), headers.get(b"content-type", b""))
        is_accepted = self._accepted_types.get(key)
        if is_accepted is None:
            accept, content_type = key[0].lower(), key[1].lower()
            types = {part.partition(b";")[0].strip() for part in accept.split(b",")}
            accepts_json = types & {b"*/*", b"application/*", b"application/json"}
            accepts_events = types & {b"*/*", b"text/*", b"text/event-stream"}
            is_json = content_type.partition(b";")[0].strip() == b"application/json"
            is_accepted = bool(accepts_json and accepts_events) and is_json
            if len(accept) + len(content_type) < _MAX_CACHED_BYTES:
                if len(self._accepted_types) >= _MAX_CACHED:
                    self._accepted_types.clear()
                self._accepted_types[key] = is_accepted
        return is_accepted


class FastListTools:
    """Answers `tools/list`."""

    def __init__(
        self,
        service: McpService,
        era_format: EraFormat,
        request_id: RequestId,
        cursor: str | None,
        context: ToolContext | None,
    ) -> None:
        self._service = service
        self._format = era_format
        self._id = request_id
        self._cursor = cursor
        self._context = context

    async def run(self, receive: Receive, send: Send) -> None:
        era_format = self._format
        try:
            page = self._service.list_page(self._cursor, self._context, modern=era_format.is_modern)
        except InvalidCursor as error:
            body = json_rpc.encode_error(self._id, INVALID_PARAMS, str(error))
            await json_rpc.send_json(send, era_format.invalid_params_status, body, era_format.headers)
            return
        tools = b",".join([definition.encoded for definition in page.definitions])
        next_cursor = b"" if page.next_cursor is None else b',"nextCursor":%b' % msgspec.json.encode(page.next_cursor)
        result = b'{"tools":[%b]%b%b%b' % (tools, next_cursor, era_format.list_fields, era_format.result_end)
        await json_rpc.send_json(send, 200, json_rpc.encode_result(self._id, result), era_format.headers)


class FastCallTool:
    """Answers `tools/call`."""

    def __init__(
        self,
        service: McpService,
        era_format: EraFormat,
        call: FastToolCall,
        context: ToolContext | None,
        *,
        session: HandshakeSession | None = None,
        suspended_calls: SuspendedCalls | None = None,
    ) -> None:
        self._service = service
        self._format = era_format
        self._call = call
        self._context = context
        self._session = session
        self._suspended_calls = suspended_calls
        self._call_id = service.create_call_id()
        self._progress: ProgressQueue | None = None

    async def run(self, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(
            receive,
            send,
            on_disconnect=self._cancel,
            headers=self._format.headers,
            drain_messages=self._drain_progress,
        )
        exchange.start()
        try:
            if self._call.progress_token is not None:
                self._progress = ProgressQueue(exchange.wake)
                with self._service.progress.follow(self._call_id, self._progress):
                    status, body = await self._respond()
            elif self._session is not None:
                status, body = await self._respond_in_session(self._session)
            else:
                status, body = await self._respond()
        except BaseException:
            await exchange.abandon()
            raise
        await exchange.finish(status, body)

    async def _respond_in_session(self, session: HandshakeSession) -> tuple[int, bytes]:
        """Registers the call in the session, where another request can cancel it."""
        key = str(self._call.id)
        session.running_calls[key] = self._call_id
        try:
            status, body = await self._respond()
            if key not in session.running_calls:
                return 200, json_rpc.encode_error(self._call.id, _CANCELLED, "Request cancelled")
            return status, body
        finally:
            if session.running_calls.get(key) == self._call_id:
                del session.running_calls[key]

    async def _respond(self) -> tuple[int, bytes]:
        call, era_format = self._call, self._format
        try:
            outcome = await self._run_call()
        except UnknownToolError as error:
            return era_format.invalid_params_status, json_rpc.encode_error(call.id, INVALID_PARAMS, str(error))
        except MissingClientCapability as error:
            code = MISSING_REQUIRED_CLIENT_CAPABILITY
            return era_format.missing_capability_status, json_rpc.encode_error(call.id, code, str(error), error.data)
        if isinstance(outcome, InputRequired):
            result = json_text.encode_bytes(outcome.wire)[:-1] + era_format.input_required_end
        else:
            result = encode_call_result(outcome, modern=era_format.is_modern, has_output_schema=call.has_output_schema)
            result += era_format.result_end
        return 200, json_rpc.encode_result(call.id, result)

    async def _run_call(self) -> ToolResult | InputRequired:
        call = self._call
        if self._suspended_calls is None or not call.may_ask:
            return await self._service.call(call.name, call.arguments, context=self._context, call_id=self._call_id)
        identity = CallIdentity(self._context, call.name, call.arguments)
        return await self._suspended_calls.start(identity, self._call_id, call.abilities)

    def _cancel(self) -> None:
        self._service.cancel(self._call_id)

    def _drain_progress(self) -> list[bytes]:
        reports = self._progress.drain() if self._progress is not None else []
        return [
            json_rpc.encode_notification("notifications/progress", _progress_params(self._call.progress_token, report))
            for report in reports
        ]


class FastCancelCall:
    """Handles a client's cancellation of a running call."""

    def __init__(self, service: McpService, session: HandshakeSession, request_id: str) -> None:
        self._service = service
        self._session = session
        self._request_id = request_id

    async def run(self, receive: Receive, send: Send) -> None:
        if (call_id := self._session.running_calls.pop(self._request_id, None)) is not None:
            self._service.cancel(call_id)
        headers = [(b"content-type", b"application/json"), (b"mcp-session-id", self._session.id)]
        await send({"type": "http.response.start", "status": 202, "headers": [*headers, (b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


_request_decoder = msgspec.json.Decoder(_Request)
_params_decoder = msgspec.json.Decoder(_Params)


def _decode_request(body: bytes) -> _Request | None:
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


def _is_simple_meta(meta: msgspec.Raw) -> bool:
    """Whether the `_meta` of a handshake request asks for nothing, above all not for progress."""
    text = bytes(meta)
    if not text:
        return True
    return text.startswith(b"{") and b"progressToken" not in text and b"\\u" not in text


def _progress_params(token: RequestId | None, report: ProgressReport) -> dict[str, Any]:
    params: dict[str, Any] = {"progressToken": token, "progress": report.progress}
    if report.total is not None:
        params["total"] = report.total
    if report.message is not None:
        params["message"] = report.message
    return params
