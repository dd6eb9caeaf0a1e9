"""The MCP library's server with handlers bound to a toolspace: everything that the fast path does not take."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import anyio
import mcp_types as types
from mcp.server.connection import Connection
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    ResourcesListChanged,
    ServerEvent,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from toolspace import __version__
from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult
from toolspace.server.mcp.elicitation import STDIO_CLIENT, ClientAbilities, ClientQuestions, SendQuestionInSession
from toolspace.server.mcp.progress import ProgressQueue, WakeSignal
from toolspace.server.mcp.results import RESOURCE_TEMPLATE, ResourceNotFound, build_call_result
from toolspace.server.mcp.service import McpService, UnknownToolError, session_context, with_questions
from toolspace.server.mcp.suspended_calls import (
    CallIdentity,
    InputRequired,
    InvalidRequestState,
    MissingClientCapability,
    SuspendedCalls,
)
from toolspace.server.mcp.tool_definitions import InvalidCursor

# MERGED from list_changes: Tells connected clients that a list changed: on their session, or on the stream that th…

_PATIENCE_SECONDS = 5.0
_METHODS: dict[type[Any], str] = {
    ToolsListChanged: "notifications/tools/list_changed",
    ResourcesListChanged: "notifications/resources/list_changed",
}


class ChangeNotifier:
    """Both eras: sessions of the handshake era are told by themselves, later clients listen."""

    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self.listen = ListenHandler(self._bus)
        self._sessions: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._tasks: dict[object, asyncio.Task[None]] = {}

    def add_session(self, context: ServerRequestContext[Any, Any]) -> None:
        """A session of the handshake era is ready. Kept as long as the library keeps it."""
        self._sessions.add(context.session._connection)  # pyright: ignore[reportPrivateUsage] - there is no other way

    def notify_tools_changed(self) -> None:
        self._tell(ToolsListChanged())

    def notify_resources_changed(self) -> None:
        self._tell(ResourcesListChanged())

    async def aclose(self) -> None:
        self.listen.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _tell(self, event: ServerEvent) -> None:
        self._start(type(event), lambda: self._bus.publish(event))
        for session in list(self._sessions):
            self._start((id(session), type(event)), lambda session=session: _notify(session, event))

    def _start(self, key: object, work: Callable[[], Any]) -> None:
        # One at a time for each: a client that does not read must not gather tasks.
        if key not in self._tasks:
            task = asyncio.get_running_loop().create_task(work())
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))


async def _notify(session: Connection, event: ServerEvent) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await session.notify(_METHODS[type(event)], None)
    except TimeoutError:
        pass  # It does not read. It will see the list when it asks.


CALLER_SCOPE_KEY = "toolspace.caller"
"""Where the ASGI scope says who calls."""
RESOURCE_NOT_FOUND = -32002
"""Of the handshake era; the later one says that the parameters are wrong."""
_Context = ServerRequestContext[Any, Any]
ResultT = TypeVar("ResultT")
_log = logging.getLogger("toolspace.mcp")


class ToolspaceMcpServer(Server[Any]):
    """One toolspace as the library serves it, to any number of connections."""

    def __init__(self, service: McpService, changes: ChangeNotifier, parking: SuspendedCalls) -> None:
        self._service = service
        self._changes = changes
        self._parking = parking
        super().__init__(
            "toolspace",
            version=__version__,
            title="Toolspace",
            instructions=service.instructions(),
            get_tool_input_schema=service.find_argument_schema,
            on_subscriptions_listen=changes.listen,
        )
        self.middleware += (_conceal, self._instruct)
        # Added, not given above: the library warns of logging, which clients of the handshake era still ask for, and
        # its own result types would be made and taken apart again.
        paginated = types.PaginatedRequestParams
        self.add_request_handler("tools/list", paginated, self._list_tools)
        self.add_request_handler("tools/call", types.CallToolRequestParams, self._call_tool)
        self.add_request_handler("resources/list", paginated, self._list_resources)
        self.add_request_handler("resources/templates/list", paginated, self._list_templates)
        self.add_request_handler("resources/read", types.ReadResourceRequestParams, self._read_resource)
        self.add_request_handler("logging/setLevel", types.SetLevelRequestParams, _accept_level)
        self.add_notification_handler("notifications/initialized", types.NotificationParams, self._joined)

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        options = notification_options or NotificationOptions(tools_changed=True, resources_changed=True)
        return super().create_initialization_options(options, experimental_capabilities, extensions)

    def refresh(self) -> None:
        """The tools changed, and with them what is to be said about them."""
        self.instructions = self._service.instructions()

    async def _instruct(self, ctx: _Context, call_next: CallNext) -> HandlerResult:
        """Tells each caller of the tools that it may use, and of no others."""
        result = await call_next(ctx)
        caller = _caller(ctx) if ctx.method in ("initialize", "server/discover") else None
        if caller is None or not isinstance(result, dict) or "instructions" not in result:
            return result
        own = self._service.instructions(caller)
        return {**result, "instructions": own} if own else {k: v for k, v in result.items() if k != "instructions"}

    async def _joined(self, context: _Context, _: types.NotificationParams | None) -> None:
        self._changes.add_session(context)

    async def _list_tools(self, context: _Context, params: types.PaginatedRequestParams) -> dict[str, Any]:
        modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
        try:
            page = self._service.list_page(params.cursor, _caller(context), modern=modern)
        except InvalidCursor as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        return _listed("tools", [one.wire for one in page.definitions], page.next_cursor)

    async def _call_tool(self, context: _Context, params: types.CallToolRequestParams) -> dict[str, Any]:
        modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
        subject = CallIdentity(_caller(context), params.name, params.arguments)
        try:
            outcome = await (self._round(context, subject) if modern else self._converse(context, subject))
        except (UnknownToolError, InvalidRequestState) as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        except MissingClientCapability as error:
            raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, str(error), error.data) from None
        if isinstance(outcome, InputRequired):
            return outcome.wire
        tool = self._service.find_tool(outcome.tool)
        made = build_call_result(
            outcome, modern=modern, output_schema=tool is not None and tool.output_schema is not None
        )
        return {**made, "resultType": "complete"} if modern else made

    async def _converse(self, context: _Context, subject: CallIdentity) -> ToolResult:
        """A call of the handshake era: what it asks goes to the client's session at once."""
        service, call_id = self._service, self._service.create_call_id()
        questions = _questions(context)
        caller = with_questions(subject.context, questions)
        call = service.call(subject.name, subject.arguments, context=caller, call_id=call_id)
        try:
            return await self._run(context, call_id, call)
        finally:
            questions.close()

    async def _round(self, context: _Context, subject: CallIdentity) -> ToolResult | InputRequired:
        """A call of the stateless era, or the next round of one that asked."""
        given: Mapping[str, Any] = context.params or {}
        answers: Mapping[str, Any] = given.get("inputResponses") or {}  # As they came: each question reads its own.
        if (state := given.get("requestState")) is not None:
            call_id = self._parking.get_call_id(state, subject)
            return await self._run(context, call_id, self._parking.resume(state, subject, answers))
        call_id = self._service.create_call_id()
        abilities = ClientAbilities.from_capabilities(context.session.client_capabilities)
        return await self._run(context, call_id, self._parking.start(subject, call_id, abilities, answers))

    async def _run(self, context: _Context, call_id: str, call: Awaitable[ResultT]) -> ResultT:
        """Waits for a call, and sends its progress meanwhile to a client that wants it."""
        service = self._service
        token = context.meta.get("progress_token") if context.meta is not None else None
        flow = WakeSignal()
        reports = ProgressQueue(flow.wake)

        async def send(token: str | int) -> None:
            over = False
            while not over:
                over = flow.is_over  # Looked at first: what is said while we send is sent too.
                for report in reports.drain():
                    await context.session.send_progress_notification(
                        token, *report, related_request_id=str(context.request_id)
                    )
                if not over:
                    await flow.wait()

        with ExitStack() as following:
            sender = None
            if token is not None:
                following.enter_context(service.progress.follow(call_id, reports))
                sender = asyncio.create_task(send(token))
            try:
                return await _to_its_end(call, lambda: service.cancel(call_id))
            finally:
                flow.end()
                if sender is not None:
                    await _to_its_end(sender, sender.cancel)

    async def _list_resources(self, context: _Context, _: types.PaginatedRequestParams) -> dict[str, Any]:
        return _listed("resources", await self._service.outputs.list_resources(_caller(context)))

    async def _list_templates(self, context: _Context, _: types.PaginatedRequestParams) -> dict[str, Any]:
        return _listed("resourceTemplates", [RESOURCE_TEMPLATE])

    async def _read_resource(self, context: _Context, params: types.ReadResourceRequestParams) -> dict[str, Any]:
        modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
        try:
            return _listed("contents", [await self._service.outputs.read_resource(str(params.uri), _caller(context))])
        except ResourceNotFound as error:
            code = types.INVALID_PARAMS if modern else RESOURCE_NOT_FOUND
            raise MCPError(code, str(error), {"uri": str(params.uri)[:200]}) from None


async def _to_its_end(work: Awaitable[ResultT], stop: Callable[[], Any]) -> ResultT:
    """Awaits work; where we are cancelled meanwhile, stops it and still waits until it has ended.

    The library cancels again and again until we are gone, which would cut short what a tool does to clean up.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            stop()
            with anyio.CancelScope(shield=True):
                await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # Looked at: nobody else will.
        raise


async def _conceal(ctx: _Context, call_next: CallNext) -> HandlerResult:
    """Tells clients of a fault of ours only that there was one: the library would give them its text."""
    try:
        return await call_next(ctx)
    except (MCPError, ValidationError):
        raise
    except Exception:
        _log.exception("%s could not be answered", ctx.method)
        raise MCPError(types.INTERNAL_ERROR, "Internal server error") from None


async def _accept_level(_: _Context, __: types.SetLevelRequestParams) -> dict[str, Any]:
    return {}  # No logs are sent to clients: there is nothing to turn up or down.


def _caller(context: _Context) -> ToolContext | None:
    """Who calls: nobody in particular over stdio; over HTTP whom the endpoint found, in the session if there is one."""
    request = context.request
    if request is None:
        return None
    return session_context(request.scope.get(CALLER_SCOPE_KEY), request.headers.get("mcp-session-id"))


def _questions(context: _Context) -> ClientQuestions:
    """For the handshake era, where a session is a client's for as long as it lasts."""
    session, request = context.session, context.request
    client = STDIO_CLIENT if request is None else request.headers.get("mcp-session-id")
    ask = SendQuestionInSession(session, context.request_id)
    return ClientQuestions(ClientAbilities.from_capabilities(session.client_capabilities), ask, client=client)


def _listed(key: str, items: list[Any], next_cursor: str | None = None) -> dict[str, Any]:
    # What may be kept is not said: lists differ by caller and change at any time.
    result = {key: items, "ttlMs": 0, "cacheScope": "private", "resultType": "complete"}
    return result if next_cursor is None else {**result, "nextCursor": next_cursor}
