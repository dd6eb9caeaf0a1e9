"""A session with a server, in either protocol era: negotiates, lists and calls tools, probes. Does not reconnect.

Answers the server's own requests (elicitation, sampling, roots) through `McpCallbacks`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import mcp_types as types
import msgspec
from mcp.client.session import ClientRequestContext, ClientSession, IncomingMessage
from mcp.client.subscriptions import listen
from mcp.shared.dispatcher import CallOptions, Dispatcher
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    encode_header_value,
    mcp_param_headers,
)
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    UNSUPPORTED_PROTOCOL_VERSION,
)
from mcp_types.version import LATEST_MODERN_VERSION, MODERN_PROTOCOL_VERSIONS
from pydantic import TypeAdapter, ValidationError

from toolspace.core.result import ToolResult
from toolspace.core.tool_context import ToolContext
from toolspace.providers.mcp.conversion import ServerTool, UnusableTool, parse_result, parse_tool
from toolspace.providers.mcp.server_spec import ElicitationRequest, McpCallbacks, SamplingRequest
from toolspace.providers.mcp.transports.base import HttpStatusError, classify_error, is_connection_lost

_MAX_PAGES = 1_000
MAX_TOOLS = 50_000
_MAX_INPUT_ROUNDS = 10
"""How often a server may answer a call with questions instead of a result."""
_ABANDONED_SECONDS = 600.0
"""How long a server may still ask questions for an abandoned call."""
_current_call: contextvars.ContextVar[ToolContext | None] = contextvars.ContextVar("toolspace_mcp_call", default=None)
_input_request: TypeAdapter[types.InputRequest] = TypeAdapter(types.InputRequest)
_LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}
_CallOwner = tuple[object, ...]


class ServerToolList(msgspec.Struct, frozen=True):
    """The tools of a server by name, and the names of unusable ones with the reason."""

    tools: Mapping[str, ServerTool]
    left_out: tuple[str, ...] = ()
    entries: tuple[Mapping[str, Any], ...] = ()
    """The usable tools as the server sent them."""


class SessionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The server's name, and what a session needs from its connection."""

    name: str
    callbacks: McpCallbacks
    version: str
    """Toolspace's version, as it is reported to servers."""
    on_tools_changed: Callable[[], None]


class _ClientSession(ClientSession):
    """The SDK's session, which announces only what is sent: no notifications about changed roots."""

    def _build_capabilities(self, version: str) -> types.ClientCapabilities:
        capabilities = super()._build_capabilities(version)
        if capabilities.roots is not None:
            capabilities.roots = types.RootsCapability()
        return capabilities


class McpSession:
    """A session with a server. Any task may call tools; one task opens and closes it."""

    def __init__(self, options: SessionOptions, dispatcher: Dispatcher[Any]) -> None:
        self._options = options
        self._dispatcher = dispatcher
        self._log = logging.getLogger(f"toolspace.mcp.{options.name}")
        self._calls: dict[object, ToolContext] = {}
        self._abandoned_calls: dict[_CallOwner, float] = {}
        """Owners of cancelled calls, with the time of cancellation."""
        callbacks = options.callbacks
        self.client = _ClientSession(
            dispatcher=dispatcher,
            client_info=types.Implementation(name="toolspace", version=options.version),
            elicitation_callback=self._elicit if callbacks.elicit is not None else None,
            sampling_callback=self._sample if callbacks.sample is not None else None,
            list_roots_callback=self._list_roots if callbacks.roots is not None else None,
            logging_callback=self._log_server_message,
            message_handler=self._handle_message,
        )
        self.users = 0
        """How many calls use the session, as its connection counts them."""
        self.unused_event = asyncio.Event()
        """Set when the number of users becomes 0."""
        self._meta: dict[str, Any] = {}
        self._headers: dict[str, str] = {}

    async def wait_until_unused(self) -> None:
        while self.users:
            self.unused_event.clear()
            await self.unused_event.wait()

    # Negotiation

    async def negotiate(self, *, handshake: bool = False) -> None:
        """Agrees on a protocol version. `handshake`: without discovery, for servers that fail on that request."""
        if handshake or not await self._discover():
            try:
                await self.client.initialize()
            except MCPError as error:
                # A server that started slowly may have received the discovery only after its timeout.
                if handshake or is_connection_lost(error) or not await self._discover():
                    raise
        version = self.client.protocol_version or ""
        self._headers = {MCP_PROTOCOL_VERSION_HEADER: version}
        if self.is_stateless:
            self._meta = {
                PROTOCOL_VERSION_META_KEY: version,
                CLIENT_INFO_META_KEY: {"name": "toolspace", "version": self._options.version},
                CLIENT_CAPABILITIES_META_KEY: _client_capabilities(self._options.callbacks),
            }

    async def discover(self) -> bool:
        """Returns whether the server supports the stateless era; if so, the session is ready."""
        if not await self._discover():
            return False
        await self.negotiate()
        return True

    async def _discover(self) -> bool:
        if self.client.discover_result is not None:
            return True
        version = LATEST_MODERN_VERSION
        for _ in range(2):
            try:
                result = types.DiscoverResult.model_validate(await self.client.send_discover(version))
                if not set(result.supported_versions) & set(MODERN_PROTOCOL_VERSIONS):
                    return False
                self.client.adopt(result)
                return True
            except ValidationError:
                return False
            except MCPError as mcp_error:
                error = classify_error(mcp_error)
                data: object = error.data
                supported = cast("Mapping[str, Any]", data).get("supported") if isinstance(data, dict) else None
                if error.code != UNSUPPORTED_PROTOCOL_VERSION or not isinstance(supported, list):
                    if _is_refusal(error):
                        return False
                    raise error from None
                common_versions = [version for version in MODERN_PROTOCOL_VERSIONS if version in supported]
                if not common_versions:
                    return False
                version = common_versions[-1]
        return False

    @property
    def is_stateless(self) -> bool:
        return self.client.discover_result is not None

    @property
    def server_label(self) -> str | None:
        """The name and version that the server reports."""
        info = self.client.server_info
        return f"{info.name} {info.version}".strip() if info is not None else None

    @property
    def announces_changes(self) -> bool:
        capabilities = self.client.server_capabilities
        return capabilities is not None and capabilities.tools is not None and bool(capabilities.tools.list_changed)

    # Tools

    async def list_tools(self) -> ServerToolList:
        """Lists the tools of all pages. An entry that cannot be read does not affect the others."""
        capabilities = self.client.server_capabilities
        if capabilities is not None and capabilities.tools is None and not self.is_stateless:
            return ServerToolList({})  # The server offers only prompts or resources, and may not know `tools/list`.
        tools: dict[str, ServerTool] = {}
        left_out: list[str] = []
        usable_entries: list[Mapping[str, Any]] = []
        cursor: str | None = None
        cursors: set[str] = set()
        for _ in range(_MAX_PAGES):
            page = await self._request("tools/list", {"cursor": cursor} if cursor is not None else {})
            entries = page.get("tools")
            for entry in cast("list[object]", entries) if isinstance(entries, list) else ():
                if len(tools) + len(left_out) < MAX_TOOLS:
                    usable_entries += self._add_tool(entry, tools, left_out)
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or cursor in cursors or len(tools) + len(left_out) >= MAX_TOOLS:
                break
            cursors.add(cursor)
        return ServerToolList(tools, tuple(left_out), tuple(usable_entries))

    def _add_tool(
        self, entry: object, tools: dict[str, ServerTool], left_out: list[str]
    ) -> Sequence[Mapping[str, Any]]:
        """Adds the tool of an entry. Returns the entry, or nothing if the tool cannot be used."""
        try:
            server_tool = parse_tool(entry, stateless=self.is_stateless)
        except UnusableTool as reason:
            name = cast("dict[str, Any]", entry).get("name") if isinstance(entry, dict) else None
            left_out.append(f"{name if isinstance(name, str) else '?'}: {reason}"[:300])
            return ()
        name = server_tool.tool.name
        if name in tools:
            left_out.append(f"{name}: listed twice; the first one counts")
            return ()
        tools[name] = server_tool
        return (cast("Mapping[str, Any]", entry),)

    async def call_tool(self, tool: ServerTool, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Calls a tool, and answers the questions that the server asks meanwhile."""
        key = object()
        self._calls[key] = context
        token = _current_call.set(context)
        try:
            params: dict[str, Any] = {"name": tool.tool.name, "arguments": arguments}
            headers = mcp_param_headers(tool.headers, arguments) if tool.headers else {}
            result = await self._request("tools/call", params, headers=headers, context=context)
            for _ in range(_MAX_INPUT_ROUNDS):
                if result.get("resultType") != "input_required":
                    return parse_result(result)
                answers = await self._answer_input_requests(result)
                result = await self._request("tools/call", {**params, **answers}, headers=headers, context=context)
            message = f"the server asked more than {_MAX_INPUT_ROUNDS} times"
            return ToolResult(False, error=message, error_kind="execution_error")
        except (asyncio.CancelledError, GeneratorExit):
            self._abandoned_calls[_call_owner(context)] = time.monotonic()
            raise
        finally:
            del self._calls[key]
            with suppress(ValueError):  # The coroutine may be closed in another context, by garbage collection.
                _current_call.reset(token)

    async def read_resource(self, uri: str, context: ToolContext) -> dict[str, Any]:
        """Returns the result of `resources/read` as the server sent it. Asks no questions."""
        return await self._request("resources/read", {"uri": uri}, context=context)

    async def probe(self) -> None:
        """Sends a request without effect. Raises if the server does not answer."""
        await self._request("server/discover" if self.is_stateless else "ping", {})

    async def listen_for_changes(self) -> None:
        """Listens for list changes until the server ends the stream. Needed in the stateless era only."""
        async with listen(self.client, tools_list_changed=True) as events:
            self._options.on_tools_changed()  # The list may have changed before the stream was open.
            async for _ in events:
                self._options.on_tools_changed()

    async def _request(
        self,
        method: str,
        params: dict[str, Any],
        *,
        headers: Mapping[str, str] = {},
        context: ToolContext | None = None,
    ) -> dict[str, Any]:
        options: CallOptions = {"headers": {**self._headers, **headers}}
        if self.is_stateless:
            params = {**params, "_meta": self._meta}
            options["headers"][MCP_METHOD_HEADER] = method
            if (name := params.get("name") or params.get("uri")) is not None:
                options["headers"][MCP_NAME_HEADER] = encode_header_value(name)
        if context is not None and context.trace is not None:
            trace_fields = context.trace.to_fields()
            params = {**params, "_meta": {**params.get("_meta", {}), **trace_fields}}
            options["headers"] = {**options["headers"], **trace_fields}
        if context is None:
            # No cancel notification: the server may finish, and sending it to one that does not read takes seconds.
            options["cancel_on_abandon"] = False
        elif context.has_progress_listener:

            async def report(progress: float, total: float | None, message: str | None) -> None:
                context.report_progress(progress, total, message)

            options["on_progress"] = report
        try:
            return await self._dispatcher.send_raw_request(method, params, options)
        except MCPError as error:
            raise classify_error(error) from None

    # Requests of the server

    async def _answer_input_requests(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters to add when the call is sent again: the answers to the questions in its result."""
        params: dict[str, Any] = {}
        if isinstance(state := result.get("requestState"), str):
            params["requestState"] = state
        input_requests = result.get("inputRequests")
        if not isinstance(input_requests, dict) or not input_requests:
            await asyncio.sleep(0.1)  # The server only wants the call to be sent again.
            return params
        responses: dict[str, Any] = {}
        for key, wire in cast("dict[str, Any]", input_requests).items():
            try:
                request = _input_request.validate_python(wire, by_name=False)
            except ValidationError:
                raise MCPError(types.INTERNAL_ERROR, "the server's question cannot be understood") from None
            response = await self.client.dispatch_input_request(
                ClientRequestContext(session=self.client, request_id=key), request
            )
            if isinstance(response, types.ErrorData):
                raise MCPError.from_error_data(response)
            responses[key] = response.model_dump(by_alias=True, mode="json", exclude_none=True)
        return {**params, "inputResponses": responses}

    def _find_call(self) -> ToolContext | None:
        """Returns the context of the call during which the server asks, or None if it is not certain.

        It is certain if the question is part of the call's response or of its stream. Over the other transports of
        the handshake era a server does not say; then it is certain only if one owner has calls.
        """
        if (context := _current_call.get()) is not None:
            return context
        oldest = time.monotonic() - _ABANDONED_SECONDS
        self._abandoned_calls = {owner: at for owner, at in self._abandoned_calls.items() if at > oldest}
        calls = list(self._calls.values())
        owners = {_call_owner(call) for call in calls}
        return calls[-1] if len(owners) == 1 and self._abandoned_calls.keys() <= owners else None

    async def _elicit(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        elicit = self._options.callbacks.elicit
        assert elicit is not None
        is_url = isinstance(params, types.ElicitRequestURLParams)
        request = ElicitationRequest(
            server=self._options.name,
            message=params.message,
            schema=None if is_url else cast("Mapping[str, Any]", params.requested_schema),
            url=params.url if is_url else None,
        )
        try:
            result = await elicit(request, self._find_call())
            content = cast("Any", dict(result.content)) if result.content is not None else None
            return types.ElicitResult(action=result.action, content=content if result.action == "accept" else None)
        except Exception as error:
            self._log.warning("the elicitation callback failed: %r", error)
            return types.ElicitResult(action="cancel")

    async def _sample(
        self, context: ClientRequestContext, params: types.CreateMessageRequestParams
    ) -> types.CreateMessageResult | types.CreateMessageResultWithTools | types.ErrorData:
        sample = self._options.callbacks.sample
        assert sample is not None
        wire = params.model_dump(by_alias=True, mode="json", exclude_none=True)
        try:
            response = await sample(SamplingRequest(server=self._options.name, params=wire), self._find_call())
            return types.CreateMessageResult.model_validate(response, by_name=False)
        except Exception as error:
            self._log.warning("the sampling callback failed: %r", error)
            return types.ErrorData(code=types.INTERNAL_ERROR, message="the model could not be asked")

    async def _list_roots(self, context: ClientRequestContext) -> types.ListRootsResult | types.ErrorData:
        roots = self._options.callbacks.roots
        assert roots is not None
        return types.ListRootsResult(
            roots=[types.Root(uri=cast("Any", path.absolute().as_uri()), name=path.name or None) for path in roots()]
        )

    async def _handle_message(self, message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._options.on_tools_changed()
        elif isinstance(message, Exception):
            self._log.debug("a message could not be read: %s", message)

    async def _log_server_message(self, params: types.LoggingMessageNotificationParams) -> None:
        level = _LOG_LEVELS.get(params.level, logging.ERROR)
        # The text is the server's: at most a warning here, and of bounded length.
        self._log.log(min(level, logging.WARNING), "%s", str(params.data)[:2_000])


@asynccontextmanager
async def open_session(options: SessionOptions, dispatcher: Dispatcher[Any]) -> AsyncGenerator[McpSession]:
    """Opens a session that is not negotiated yet."""
    session = McpSession(options, dispatcher)
    async with session.client:
        yield session


def _call_owner(context: ToolContext) -> _CallOwner:
    return context.user_id, context.space_id, context.session_id, context.run_id, context.caller_client


def _is_refusal(error: MCPError) -> bool:
    """Whether the server refused discovery or did not answer it; otherwise it is gone or needs a login."""
    return not is_connection_lost(error) and not (
        isinstance(error, HttpStatusError) and error.status in (401, 403, 407)
    )


def _client_capabilities(callbacks: McpCallbacks) -> dict[str, Any]:
    capabilities: dict[str, Any] = {}
    if callbacks.elicit is not None:
        capabilities["elicitation"] = {"form": {}, "url": {}}
    if callbacks.sample is not None:
        capabilities["sampling"] = {}
    if callbacks.roots is not None:
        capabilities["roots"] = {}
    return capabilities
