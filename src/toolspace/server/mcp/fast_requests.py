"""Requests that the fast path took, and how they are answered: a page of tools, a call. Decides nothing."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec
from mcp_types import MISSING_REQUIRED_CLIENT_CAPABILITY

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult
from toolspace.server.mcp import json_rpc
from toolspace.server.mcp.elicitation import Abilities
from toolspace.server.mcp.http_exchange import Exchange
from toolspace.server.mcp.json_rpc import INVALID_PARAMS, Receive, RequestId, Send
from toolspace.server.mcp.progress import Report, Reports
from toolspace.server.mcp.results import encoded_answer
from toolspace.server.mcp.service import Service, UnknownTool
from toolspace.server.mcp.sessions import Session
from toolspace.server.mcp.suspended_calls import Asked, MissingCapability, Parking, Subject
from toolspace.server.mcp.tool_definitions import WrongCursor

_CANCELLED = -32800
"""What the library answers in the handshake era: MCP names no code for it."""


class Job(Protocol):
    """A request that was taken, ready to be answered."""

    async def run(self, receive: Receive, send: Send) -> None: ...


class Manner(NamedTuple):
    """How one era wants its answers."""

    modern: bool
    tail: bytes
    """What every result ends with."""
    asked_tail: bytes = b"}"
    """What every answer that asks something ends with."""
    listed: bytes = b""
    """What every list ends with, before that."""
    invalid_status: int = 200
    missing_status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()


class ToolCall(NamedTuple):
    """One `tools/call`, checked."""

    id: RequestId
    name: str
    arguments: bytes | None
    output_schema: bool
    may_ask: bool
    token: RequestId | None
    abilities: Abilities


class ListTools:
    def __init__(
        self, service: Service, manner: Manner, id: RequestId, cursor: str | None, context: ToolContext | None
    ) -> None:
        self._service = service
        self._manner = manner
        self._id = id
        self._cursor = cursor
        self._context = context

    async def run(self, receive: Receive, send: Send) -> None:
        manner = self._manner
        try:
            page = self._service.page(self._cursor, self._context, modern=manner.modern)
        except WrongCursor as error:
            body = json_rpc.error_body(self._id, INVALID_PARAMS, str(error))
            await json_rpc.respond(send, manner.invalid_status, body, manner.headers)
            return
        tools = b",".join([one.encoded for one in page.definitions])
        following = b"" if page.next_cursor is None else b',"nextCursor":%b' % msgspec.json.encode(page.next_cursor)
        result = b'{"tools":[%b]%b%b%b' % (tools, following, manner.listed, manner.tail)
        await json_rpc.respond(send, 200, json_rpc.result_body(self._id, result), manner.headers)


class CallTool:
    def __init__(
        self,
        service: Service,
        manner: Manner,
        call: ToolCall,
        context: ToolContext | None,
        *,
        session: Session | None = None,
        parking: Parking | None = None,
    ) -> None:
        self._service = service
        self._manner = manner
        self._call = call
        self._context = context
        self._session = session
        self._parking = parking
        self._call_id = service.new_call_id()
        self._reports: Reports | None = None

    async def run(self, receive: Receive, send: Send) -> None:
        exchange = Exchange(receive, send, on_gone=self._cancel, headers=self._manner.headers, messages=self._messages)
        exchange.begin()
        try:
            if self._call.token is not None:
                self._reports = Reports(exchange.wake)
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

    async def _answer_in(self, session: Session) -> tuple[int, bytes]:
        """In a session a call can be cancelled by another request."""
        key = str(self._call.id)
        session.running[key] = self._call_id
        try:
            status, body = await self._answer()
            if key not in session.running:
                return 200, json_rpc.error_body(self._call.id, _CANCELLED, "Request cancelled")
            return status, body
        finally:
            if session.running.get(key) == self._call_id:
                del session.running[key]

    async def _answer(self) -> tuple[int, bytes]:
        call, manner = self._call, self._manner
        try:
            outcome = await self._outcome()
        except UnknownTool as error:
            return manner.invalid_status, json_rpc.error_body(call.id, INVALID_PARAMS, str(error))
        except MissingCapability as error:
            code = MISSING_REQUIRED_CLIENT_CAPABILITY
            return manner.missing_status, json_rpc.error_body(call.id, code, str(error), error.data)
        if isinstance(outcome, Asked):
            return 200, json_rpc.result_body(call.id, json_text.encode_bytes(outcome.wire)[:-1] + manner.asked_tail)
        answer = encoded_answer(outcome, modern=manner.modern, output_schema=call.output_schema)
        return 200, json_rpc.result_body(call.id, answer + manner.tail)

    async def _outcome(self) -> ToolResult | Asked:
        call = self._call
        if self._parking is None or not call.may_ask:
            return await self._service.call(call.name, call.arguments, context=self._context, call_id=self._call_id)
        subject = Subject(self._context, call.name, call.arguments)
        return await self._parking.begin(subject, self._call_id, call.abilities)

    def _cancel(self) -> None:
        self._service.cancel(self._call_id)

    def _messages(self) -> list[bytes]:
        reports = self._reports.take() if self._reports is not None else []
        return [
            json_rpc.notification("notifications/progress", _params(self._call.token, report)) for report in reports
        ]


class CancelCall:
    """A client's word that it does not want an answer any more. Nothing is said to it."""

    def __init__(self, service: Service, session: Session, request: str) -> None:
        self._service = service
        self._session = session
        self._request = request

    async def run(self, receive: Receive, send: Send) -> None:
        if (call_id := self._session.running.pop(self._request, None)) is not None:
            self._service.cancel(call_id)
        headers = [(b"content-type", b"application/json"), (b"mcp-session-id", self._session.id)]
        await send({"type": "http.response.start", "status": 202, "headers": [*headers, (b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def _params(token: RequestId | None, report: Report) -> dict[str, Any]:
    params: dict[str, Any] = {"progressToken": token, "progress": report.progress}
    if report.total is not None:
        params["total"] = report.total
    if report.message is not None:
        params["message"] = report.message
    return params
