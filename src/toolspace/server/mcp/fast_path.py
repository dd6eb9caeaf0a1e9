"""Answers frequent requests without the MCP SDK: one decode, one call, one encode. `http_endpoint` asks it first.

Benchmarks `serve` and `gateway_mcp` pay for it: their musts fail without it. It answers a request only if it is certain
to answer it as the SDK would, and leaves all others to the SDK. `tests/server/mcp/test_fast_path.py` compares the two
paths on random requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgspec
from mcp.shared.inbound import ERROR_CODE_HTTP_STATUS, InboundLadderRejection, classify_inbound_request
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    INTERNAL_ERROR,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    ClientCapabilities,
    methods,
)
from mcp_types.version import LATEST_MODERN_VERSION

from toolspace.core import json_text
from toolspace.core.tool_context import ToolContext
from toolspace.core.trace_context import TRACE_KEYS, TraceContext, parse_trace_context, read_trace_headers
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
from toolspace.server.mcp.progress import ProgressQueue
from toolspace.server.mcp.results_and_resources import build_call_result
from toolspace.server.mcp.sessions import HandshakeSession
from toolspace.server.mcp.tool_service import (
    InvalidCursor,
    McpService,
    OfferedTool,
    ReadError,
    UnknownToolError,
    read_resource,
    with_trace,
)
from toolspace.server.requests import Receive, Send

Headers = Mapping[bytes, bytes]
T = TypeVar("T")
_log = logging.getLogger("toolspace.mcp")
_VERSION = LATEST_MODERN_VERSION.encode()
_MISSING = msgspec.Raw(b"")
_MAX_CACHED = 512
_MAX_CACHED_BYTES = 4096
_CANCELLED = -32800
"""The code that the SDK uses in the handshake era; MCP defines none."""


class _Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str | None = None
    arguments: msgspec.Raw = _MISSING
    cursor: str | None = None
    uri: str | None = None
    meta: msgspec.Raw = msgspec.field(name="_meta", default=_MISSING)

    @property
    def is_list(self) -> bool:
        return self.name is None and self.arguments is _MISSING and self.uri is None


class _Request(msgspec.Struct, frozen=True):
    jsonrpc: Literal["2.0"]
    method: str
    id: int | str | None = None
    params: _Params = _Params()


class _CancelParams(msgspec.Struct, frozen=True, rename="camel"):
    request_id: int | str


class _Cancellation(msgspec.Struct, frozen=True):
    jsonrpc: Literal["2.0"]
    method: Literal["notifications/cancelled"]
    params: _CancelParams
    id: None = None


_request_decoder = msgspec.json.Decoder(_Request)
_cancellation_decoder = msgspec.json.Decoder(_Cancellation)


class _Envelope(NamedTuple):
    """The `_meta` of a stateless request."""

    progress_token: RequestId | None = None
    abilities: ClientAbilities = NO_ABILITIES


class _EraFormat(NamedTuple):
    """The format of responses in one protocol era."""

    is_modern: bool
    result_end: bytes = b"}"
    """The end of every result."""
    meta: Mapping[str, Any] | None = None
    """The `_meta` of every result, as part of `result_end`."""
    plain_result_end: bytes = b"}"
    """The end of a result that has this `_meta` in its own."""
    input_required_end: bytes = b"}"
    """The end of every result that asks for input."""
    list_fields: bytes = b""
    """Additional fields of every list."""
    invalid_params_status: int = 200
    missing_capability_status: int = 200


_HANDSHAKE_FORMAT = _EraFormat(is_modern=False)
_NO_ENVELOPE = _Envelope()


class FastPath:
    """Decides which requests to answer, and answers them. `server_info` is what the SDK adds to stateless results."""

    def __init__(self, service: McpService, suspended_calls: SuspendedCalls, server_info: Mapping[str, Any]) -> None:
        self._service = service
        self._suspended_calls = suspended_calls
        meta_fields = {"io.modelcontextprotocol/serverInfo": server_info}
        meta = json_text.encode_bytes(meta_fields)
        self._stateless_format = _EraFormat(
            is_modern=True,
            meta=meta_fields,
            plain_result_end=b',"resultType":"complete"}',
            result_end=b',"resultType":"complete","_meta":%b}' % meta,
            input_required_end=b',"_meta":%b}' % meta,
            list_fields=b',"ttlMs":0,"cacheScope":"private"',
            invalid_params_status=ERROR_CODE_HTTP_STATUS[INVALID_PARAMS],
            missing_capability_status=ERROR_CODE_HTTP_STATUS[MISSING_REQUIRED_CLIENT_CAPABILITY],
        )

    async def answer_stateless(
        self, headers: Headers, body: bytes, context: ToolContext | None, receive: Receive, send: Send
    ) -> bool:
        """Answers a request of the stateless era. Returns False if the SDK has to. No header may be duplicated."""
        method = headers.get(b"mcp-method")
        if headers.get(b"mcp-protocol-version") != _VERSION or method not in (b"tools/call", b"tools/list"):
            return False
        if not _is_type_accepted(headers.get(b"accept", b""), headers.get(b"content-type", b"")):
            return False
        request = _decode(_request_decoder, body)
        if request is None or request.id is None or request.method.encode() != method:
            return False
        params, meta = request.params, bytes(request.params.meta)
        trace_context = read_trace_headers(headers)
        if b'"traceparent"' in meta or b'"baggage"' in meta:
            # Without the trace, the rest is the same in every request, and cached.
            meta, meta_trace = _split_trace(meta)
            trace_context = meta_trace or trace_context
        envelope = _parse_cached_envelope(meta) if len(meta) < _MAX_CACHED_BYTES else _parse_envelope(meta)
        if envelope is None:
            return False
        if method == b"tools/list":
            if not params.is_list or envelope.progress_token is not None:
                return False
            await self._list_tools(send, self._stateless_format, request.id, params.cursor, context)
            return True
        tool = self._match_tool(params)
        if tool is None or tool.has_header_arguments or headers.get(b"mcp-name") != tool.name.encode():
            return False
        call = _FastCall(
            self._service,
            self._stateless_format,
            request.id,
            tool,
            bytes(params.arguments) or None,
            with_trace(context, trace_context),
            envelope=envelope,
            suspended_calls=self._suspended_calls if tool.may_ask else None,
        )
        await call.run(receive, send)
        return True

    async def answer_in_session(
        self, session: HandshakeSession, headers: Headers, body: bytes, receive: Receive, send: Send
    ) -> bool:
        """Answers a request of the handshake era. Returns False if the SDK has to. No header may be duplicated."""
        if not _is_type_accepted(headers.get(b"accept", b""), headers.get(b"content-type", b"")):
            return False
        request = _decode(_request_decoder, body)
        if request is None:
            return bool(session.running_calls) and await self._cancel_call(session, body, send)
        params = request.params
        if request.id is None or not _is_simple_meta(bytes(params.meta)):
            return False
        if request.method == "tools/list" and params.is_list:
            await self._list_tools(send, _HANDSHAKE_FORMAT, request.id, params.cursor, session.context, session.headers)
            return True
        if request.method == "resources/read" and params.uri is not None and params.name is None:
            await self._read_resource(send, request.id, params, session)
            return True
        tool = self._match_tool(params) if request.method == "tools/call" else None
        if tool is None or (tool.may_ask and session.can_answer):
            return False
        context = session.silent_context if tool.may_ask else session.context
        trace_context, meta = read_trace_headers(headers), bytes(params.meta)
        if b'"traceparent"' in meta or b'"baggage"' in meta:
            trace_context = _split_trace(meta)[1] or trace_context
        context = with_trace(context, trace_context)
        arguments = bytes(params.arguments) or None
        call = _FastCall(self._service, _HANDSHAKE_FORMAT, request.id, tool, arguments, context, session=session)
        await call.run(receive, send)
        return True

    async def _cancel_call(self, session: HandshakeSession, body: bytes, send: Send) -> bool:
        """Handles a client's cancellation of a call that the fast path is running."""
        cancellation = _decode(_cancellation_decoder, body)
        call_id = session.running_calls.pop(str(cancellation.params.request_id), None) if cancellation else None
        if call_id is None:
            return False
        self._service.cancel(call_id)
        await json_rpc.send_json(send, 202, b"", session.headers)
        return True

    async def _list_tools(
        self,
        send: Send,
        era: _EraFormat,
        request_id: RequestId,
        cursor: str | None,
        context: ToolContext | None,
        headers: json_rpc.Headers = (),
    ) -> None:
        await self._service.wait_for_lists()
        try:
            page = self._service.list_page(cursor, context, modern=era.is_modern)
        except InvalidCursor as error:
            body = json_rpc.encode_error(request_id, INVALID_PARAMS, str(error))
            await json_rpc.send_json(send, era.invalid_params_status, body, headers)
            return
        next_cursor = b"" if page.next_cursor is None else b',"nextCursor":%b' % msgspec.json.encode(page.next_cursor)
        result = b'{"tools":[%b]%b%b%b' % (b",".join(page.definitions), next_cursor, era.list_fields, era.result_end)
        await json_rpc.send_json(send, 200, json_rpc.encode_result(request_id, result), headers)

    async def _read_resource(
        self, send: Send, request_id: RequestId, params: _Params, session: HandshakeSession
    ) -> None:
        """Reads a resource in a session. As JSON, because clients limit the size of server-sent events."""
        meta: dict[str, Any] = json_text.decode(bytes(params.meta)) if params.meta is not _MISSING else {}
        try:
            result = await read_resource(self._service, params.uri or "", meta, session.context)
            body = json_rpc.encode_result(request_id, json_text.encode_bytes(result))
        except ReadError as error:
            body = json_rpc.encode_error(request_id, error.code, str(error), {"uri": (params.uri or "")[:200]})
        except Exception:  # The client gets no details.
            _log.exception("resources/read failed")
            body = json_rpc.encode_error(request_id, INTERNAL_ERROR, "Internal server error")
        await json_rpc.send_json(send, 200, body, session.headers)

    def _match_tool(self, params: _Params) -> OfferedTool | None:
        """Returns the tool with exactly the name of a call, if the arguments are an object."""
        has_other_arguments = params.arguments is not _MISSING and not bytes(params.arguments).startswith(b"{")
        if params.name is None or params.cursor is not None or params.uri is not None or has_other_arguments:
            return None
        return self._service.find_tool(params.name)


@dataclass(slots=True)
class _FastCall:
    """One `tools/call`."""

    service: McpService
    era: _EraFormat
    request_id: RequestId
    tool: OfferedTool
    arguments: bytes | None
    context: ToolContext | None
    envelope: _Envelope = _NO_ENVELOPE
    session: HandshakeSession | None = None
    suspended_calls: SuspendedCalls | None = None
    """Runs the call if it may ask its client."""
    call_id: str = ""
    progress: ProgressQueue | None = None

    async def run(self, receive: Receive, send: Send) -> None:
        self.call_id = self.service.create_call_id()
        exchange = HttpExchange(
            receive,
            send,
            on_disconnect=partial(self.service.cancel, self.call_id),
            headers=self.session.headers if self.session is not None else (),
            drain_messages=self._drain_progress,
        )
        try:
            if self.envelope.progress_token is not None:
                self.progress = ProgressQueue(exchange.wake)
                with self.service.progress.follow(self.call_id, self.progress):
                    status, body = await self._respond()
            elif self.session is not None:
                status, body = await self._respond_in_session(self.session)
            else:
                status, body = await self._respond()
            await exchange.finish(status, body)
        finally:
            await exchange.close()

    async def _respond_in_session(self, session: HandshakeSession) -> tuple[int, bytes]:
        """Registers the call in the session, where another request can cancel it."""
        key = str(self.request_id)
        session.running_calls[key] = self.call_id
        try:
            status, body = await self._respond()
            if key not in session.running_calls:
                return 200, json_rpc.encode_error(self.request_id, _CANCELLED, "Request cancelled")
            return status, body
        finally:
            if session.running_calls.get(key) == self.call_id:
                del session.running_calls[key]

    async def _respond(self) -> tuple[int, bytes]:
        era, tool, request_id = self.era, self.tool, self.request_id
        try:
            if self.suspended_calls is None:
                outcome = await self.service.call(tool.name, self.arguments, context=self.context, call_id=self.call_id)
            else:
                identity = CallIdentity(self.context, tool.name, self.arguments)
                outcome = await self.suspended_calls.start(identity, self.call_id, self.envelope.abilities)
        except UnknownToolError as error:
            return era.invalid_params_status, json_rpc.encode_error(request_id, INVALID_PARAMS, str(error))
        except MissingClientCapability as error:
            code = MISSING_REQUIRED_CLIENT_CAPABILITY
            return era.missing_capability_status, json_rpc.encode_error(request_id, code, str(error), error.data)
        if isinstance(outcome, InputRequired):
            fields, end = outcome.wire, era.input_required_end
        else:
            fields = build_call_result(outcome, modern=era.is_modern, has_output_schema=tool.has_output_schema)
            end = era.result_end
            if era.meta is not None and "_meta" in fields:
                fields["_meta"], end = {**era.meta, **fields["_meta"]}, era.plain_result_end
        return 200, json_rpc.encode_result(request_id, json_text.encode_bytes(fields)[:-1] + end)

    def _drain_progress(self) -> list[bytes]:
        """Returns the progress notifications that are waiting, as JSON."""
        messages: list[bytes] = []
        for report in self.progress.drain() if self.progress is not None else ():
            fields = {name: value for name, value in report._asdict().items() if value is not None}
            params = {"progressToken": self.envelope.progress_token, **fields}
            messages.append(json_rpc.encode_notification("notifications/progress", params))
        return messages


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T | None:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _split_trace(meta: bytes) -> tuple[bytes, TraceContext | None]:
    """Returns the `_meta` of a request without the keys of a trace, and the trace."""
    try:
        fields = json_text.decode(meta)
    except ValueError:
        return meta, None
    if not isinstance(fields, dict):
        return meta, None
    values = cast("dict[str, Any]", fields)
    other_fields = {key: value for key, value in values.items() if key not in TRACE_KEYS}
    return json_text.encode_bytes(other_fields), parse_trace_context(values)


def _is_simple_meta(text: bytes) -> bool:
    """Whether the `_meta` of a handshake request asks for nothing, above all not for progress."""
    return not text or (text.startswith(b"{") and b"progressToken" not in text and b"\\u" not in text)


@lru_cache(maxsize=64)
def _is_type_accepted(accept: bytes, content_type: bytes) -> bool:
    """Whether the request is JSON and accepts both kinds of response. Cached, as clients repeat these headers."""
    types = {part.partition(b";")[0].strip() for part in accept.lower().split(b",")}
    accepts_json = types & {b"*/*", b"application/*", b"application/json"}
    accepts_events = types & {b"*/*", b"text/*", b"text/event-stream"}
    is_json = content_type.lower().partition(b";")[0].strip() == b"application/json"
    return bool(accepts_json and accepts_events) and is_json


def _parse_envelope(text: bytes) -> _Envelope | None:
    """Returns None if the envelope is invalid."""
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
    return _Envelope(token, ClientAbilities.from_capabilities(capabilities))


_parse_cached_envelope = lru_cache(maxsize=_MAX_CACHED)(_parse_envelope)
"""Clients send the same envelope with every request."""
