"""Binds a toolspace to the MCP SDK's server, which answers everything that `fast_path` does not.

`http_endpoint` runs it over HTTP, `stdio` over pipes. `ChangeNotifier` tells connected clients about list changes.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from functools import partial
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
from toolspace.core import json_text
from toolspace.core.result import ToolResult
from toolspace.core.tool_context import ToolContext
from toolspace.core.trace_context import TraceContext, parse_trace_context, read_trace_headers
from toolspace.server.mcp.elicitation import (
    STDIO_CLIENT,
    CallIdentity,
    ClientAbilities,
    InputRequired,
    InvalidRequestState,
    McpCallerClient,
    MissingClientCapability,
    SendInSession,
    SuspendedCalls,
)
from toolspace.server.mcp.progress import ProgressQueue
from toolspace.server.mcp.results_and_resources import RESOURCE_TEMPLATE, build_call_result
from toolspace.server.mcp.tool_service import (
    InvalidCursor,
    McpService,
    ReadError,
    UnknownToolError,
    read_resource,
    session_context,
    with_caller_client,
    with_trace,
)

CALLER_SCOPE_KEY = "toolspace.caller"
"""The key of the caller's context in the ASGI scope."""
_NOTIFY_SECONDS = 5.0
_ERA_FIELDS = frozenset(("resultType", "ttlMs", "cacheScope"))
"""Fields of results that only some protocol versions have."""
_original_results: ContextVar[list[dict[str, Any]]] = ContextVar("toolspace_mcp_results")
"""The result of the handler of the current request."""
_NOTIFICATION_METHODS: dict[type[Any], str] = {
    ToolsListChanged: "notifications/tools/list_changed",
    ResourcesListChanged: "notifications/resources/list_changed",
}
_Context = ServerRequestContext[Any, Any]
ResultT = TypeVar("ResultT")
_log = logging.getLogger("toolspace.mcp")


class ChangeNotifier:
    """Notifies clients of list changes: sessions of the handshake era directly, stateless clients on their streams."""

    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self.listen = ListenHandler(self._bus)
        self._sessions: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._tasks: dict[object, asyncio.Task[None]] = {}

    def add_session(self, context: _Context) -> None:
        """Adds a session of the handshake era, for as long as the SDK keeps it.

        The SDK offers no public way to its connection; `tests/providers/mcp/test_sdk_version.py` pins its version.
        """
        self._sessions.add(context.session._connection)  # pyright: ignore[reportPrivateUsage]

    def notify_tools_changed(self) -> None:
        self._publish(ToolsListChanged())

    def notify_resources_changed(self) -> None:
        self._publish(ResourcesListChanged())

    async def aclose(self) -> None:
        self.listen.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _publish(self, event: ServerEvent) -> None:
        self._start(type(event), lambda: self._bus.publish(event))
        for session in list(self._sessions):
            self._start((id(session), type(event)), lambda session=session: _notify(session, event))

    def _start(self, key: object, work: Callable[[], Any]) -> None:
        # At most one task per client and kind: a client that does not read must not accumulate tasks.
        if key not in self._tasks:
            task = asyncio.get_running_loop().create_task(work())
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))


async def _notify(session: Connection, event: ServerEvent) -> None:
    try:
        async with asyncio.timeout(_NOTIFY_SECONDS):
            await session.notify(_NOTIFICATION_METHODS[type(event)], None)
    except TimeoutError:
        pass  # The client does not read. It gets the current list when it asks.


class ToolspaceMcpServer(Server[Any]):
    """The SDK's server for one toolspace and any number of connections."""

    def __init__(self, service: McpService, suspended_calls: SuspendedCalls) -> None:
        self.changes = ChangeNotifier()
        self._service = service
        self._suspended_calls = suspended_calls
        service.on_tools_changed = self._notify_tools_changed
        service.on_outputs_changed = self.changes.notify_resources_changed
        super().__init__(
            "toolspace",
            version=__version__,
            title="Toolspace",
            instructions=service.instructions(),
            get_tool_input_schema=service.find_argument_schema,
            on_subscriptions_listen=self.changes.listen,
        )
        self.middleware += (_hide_internal_errors, _restore_result, self._replace_instructions)
        # Added here and not as arguments above: the SDK would warn about logging, which clients of the handshake era
        # still ask for, and would convert every result to its own types and back.
        self.add_request_handler("tools/list", types.PaginatedRequestParams, self._list_tools)
        self.add_request_handler("tools/call", types.CallToolRequestParams, self._call_tool)
        self.add_request_handler("resources/list", types.PaginatedRequestParams, self._list_resources)
        self.add_request_handler("resources/templates/list", types.PaginatedRequestParams, _list_templates)
        self.add_request_handler("resources/read", types.ReadResourceRequestParams, self._read_resource)
        self.add_request_handler("logging/setLevel", types.SetLevelRequestParams, _ignore_log_level)
        self.add_notification_handler("notifications/initialized", types.NotificationParams, self._add_session)

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        options = notification_options or NotificationOptions(tools_changed=True, resources_changed=True)
        return super().create_initialization_options(options, experimental_capabilities, extensions)

    def _notify_tools_changed(self) -> None:
        self.instructions = self._service.instructions()
        self.changes.notify_tools_changed()

    async def _replace_instructions(self, ctx: _Context, call_next: CallNext) -> HandlerResult:
        """Sends each caller the instructions of the tools that it may use, and of no others."""
        result = await call_next(ctx)
        caller = _get_caller(ctx) if ctx.method in ("initialize", "server/discover") else None
        if caller is None or not isinstance(result, dict) or "instructions" not in result:
            return result
        instructions = self._service.instructions(caller)
        if instructions:
            return {**result, "instructions": instructions}
        return {key: value for key, value in result.items() if key != "instructions"}

    async def _add_session(self, context: _Context, _: types.NotificationParams | None) -> None:
        self.changes.add_session(context)

    async def _list_tools(self, context: _Context, params: types.PaginatedRequestParams) -> dict[str, Any]:
        await self._service.wait_for_lists()
        try:
            page = self._service.list_page(params.cursor, _get_caller(context), modern=_is_modern(context))
        except InvalidCursor as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        return _keep_result(
            _build_list("tools", [json_text.decode(text) for text in page.definitions], page.next_cursor)
        )

    async def _call_tool(self, context: _Context, params: types.CallToolRequestParams) -> dict[str, Any]:
        modern = _is_modern(context)
        caller = with_trace(_get_caller(context), _get_trace(context))
        identity = CallIdentity(caller, params.name, params.arguments)
        run = self._call_stateless if modern else self._call_in_session
        try:
            outcome = await run(context, identity)
        except (UnknownToolError, InvalidRequestState) as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        except MissingClientCapability as error:
            raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, str(error), error.data) from None
        if isinstance(outcome, InputRequired):
            return outcome.wire
        tool = self._service.find_tool(outcome.tool)
        has_output_schema = tool is not None and tool.has_output_schema
        result: dict[str, Any] = json_text.to_json_data(
            build_call_result(outcome, modern=modern, has_output_schema=has_output_schema)
        )
        if modern:
            result["resultType"] = "complete"
        return _keep_result(result)

    async def _call_in_session(self, context: _Context, identity: CallIdentity) -> ToolResult:
        """Runs a call of the handshake era. Its questions go to the client's session at once."""
        call_id = self._service.create_call_id()
        client = _create_caller_client(context)
        call_context = with_caller_client(identity.context, client)
        call = self._service.call(identity.name, identity.arguments, context=call_context, call_id=call_id)
        try:
            return await self._run(context, call_id, call)
        finally:
            client.close()

    async def _call_stateless(self, context: _Context, identity: CallIdentity) -> ToolResult | InputRequired:
        """Runs a call of the stateless era, or continues one that has asked."""
        params: Mapping[str, Any] = context.params or {}
        answers: Mapping[str, Any] = params.get("inputResponses") or {}  # Each question validates its own answer.
        if (state := params.get("requestState")) is not None:
            call_id = self._suspended_calls.get_call_id(state, identity)
            return await self._run(context, call_id, self._suspended_calls.resume(state, identity, answers))
        call_id = self._service.create_call_id()
        abilities = ClientAbilities.from_capabilities(context.session.client_capabilities)
        return await self._run(context, call_id, self._suspended_calls.start(identity, call_id, abilities, answers))

    async def _run(self, context: _Context, call_id: str, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Waits for a call, and sends its progress to a client that asks for it."""
        cancel = partial(self._service.cancel, call_id)
        token = context.meta.get("progress_token") if context.meta is not None else None
        task = asyncio.create_task(call)
        if token is None:
            return await _wait_until_done(task, cancel)
        wake_event = asyncio.Event()
        queue = ProgressQueue(wake_event.set)

        async def send_progress() -> None:
            is_over = False
            while not is_over:
                is_over = task.done()  # Read first, so that reports that arrive during a send are sent, too.
                for report in queue.drain():
                    await context.session.send_progress_notification(
                        token, *report, related_request_id=str(context.request_id)
                    )
                if not is_over:
                    await wake_event.wait()
                    wake_event.clear()

        with self._service.progress.follow(call_id, queue):
            task.add_done_callback(lambda _: wake_event.set())
            sender = asyncio.create_task(send_progress())
            try:
                return await _wait_until_done(task, cancel)
            finally:
                await _wait_until_done(sender, sender.cancel)

    async def _list_resources(self, context: _Context, _: types.PaginatedRequestParams) -> dict[str, Any]:
        return _build_list("resources", await self._service.outputs.list_resources(_get_caller(context)))

    async def _read_resource(self, context: _Context, params: types.ReadResourceRequestParams) -> dict[str, Any]:
        meta: Mapping[str, Any] = (context.params or {}).get("_meta") or {}
        try:
            caller = with_trace(_get_caller(context), _get_trace(context))
            result = await read_resource(self._service, str(params.uri), meta, caller)
        except ReadError as error:
            code = types.INVALID_PARAMS if error.is_missing and _is_modern(context) else error.code
            raise MCPError(code, str(error), {"uri": str(params.uri)[:200]}) from None
        return _keep_result({**_build_list("contents", result["contents"]), **result})


async def _wait_until_done(task: asyncio.Task[ResultT], stop: Callable[[], object]) -> ResultT:
    """Awaits a task. If this one is cancelled, stops the other and still waits until it has ended.

    The SDK cancels repeatedly until the task has ended, which would interrupt a tool's cleanup.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            stop()
            with anyio.CancelScope(shield=True):
                await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # Marked as retrieved: nothing else reads it.
        raise


async def _hide_internal_errors(ctx: _Context, call_next: CallNext) -> HandlerResult:
    """Logs an unexpected error and sends the client no details; the SDK would send its text."""
    try:
        return await call_next(ctx)
    except (MCPError, ValidationError):
        raise
    except Exception:
        _log.exception("%s failed", ctx.method)
        raise MCPError(types.INTERNAL_ERROR, "Internal server error") from None


async def _restore_result(ctx: _Context, call_next: CallNext) -> HandlerResult:
    """Replaces the SDK's result by the handler's own. The SDK would leave out fields that it does not know, and nulls.

    Fields that the SDK adds stay.
    """
    originals: list[dict[str, Any]] = []
    token = _original_results.set(originals)
    try:
        result = await call_next(ctx)
    finally:
        _original_results.reset(token)
    if not originals or not isinstance(result, dict):
        return result
    (original,) = originals
    fields = {**result, **{key: value for key, value in original.items() if key not in _ERA_FIELDS}}
    meta: dict[str, Any] = {**(result.get("_meta") or {}), **original.get("_meta", {})}
    return {**fields, "_meta": meta} if meta else fields


def _keep_result(result: dict[str, Any]) -> dict[str, Any]:
    """Returns a small result for the SDK to check, in place of one that `_restore_result` returns to the client."""
    _original_results.get().append(result)
    lists: dict[str, list[Any]] = {key: [] for key in ("content", "contents", "tools") if key in result}
    other_keys = result.keys() - {*lists, "structuredContent", "_meta"}
    return {**lists, **{key: result[key] for key in other_keys}}


async def _list_templates(_: _Context, __: types.PaginatedRequestParams) -> dict[str, Any]:
    return _build_list("resourceTemplates", [RESOURCE_TEMPLATE])


async def _ignore_log_level(_: _Context, __: types.SetLevelRequestParams) -> dict[str, Any]:
    return {}  # No logs are sent to clients.


def _is_modern(context: _Context) -> bool:
    """Whether a request belongs to the stateless era."""
    return context.protocol_version in MODERN_PROTOCOL_VERSIONS


def _get_caller(context: _Context) -> ToolContext | None:
    """Returns the caller's context in its MCP session. None over stdio, and for an anonymous caller over HTTP."""
    request = context.request
    if request is None:
        return None
    return session_context(request.scope.get(CALLER_SCOPE_KEY), request.headers.get("mcp-session-id"))


def _get_trace(context: _Context) -> TraceContext | None:
    """Returns the trace of a request: from its `_meta`, else from its headers."""
    meta: Mapping[str, Any] | None = (context.params or {}).get("_meta")
    trace_context = parse_trace_context(meta) if meta else None
    if trace_context is None and context.request is not None:
        trace_context = read_trace_headers(dict(context.request.scope["headers"]))
    return trace_context


def _create_caller_client(context: _Context) -> McpCallerClient:
    """For the handshake era, where a session belongs to one client."""
    session, request = context.session, context.request
    client = STDIO_CLIENT if request is None else request.headers.get("mcp-session-id")
    abilities = ClientAbilities.from_capabilities(session.client_capabilities)
    return McpCallerClient(abilities, SendInSession(session, context.request_id), client=client)


def _build_list(key: str, items: list[Any], next_cursor: str | None = None) -> dict[str, Any]:
    # Not cacheable: lists differ by caller and change at any time.
    result = {key: items, "ttlMs": 0, "cacheScope": "private", "resultType": "complete"}
    return result if next_cursor is None else {**result, "nextCursor": next_cursor}
