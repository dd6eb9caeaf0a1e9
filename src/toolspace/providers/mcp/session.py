"""One live connection to a server, in either era: negotiates, lists, calls, probes. Does not reconnect."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
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

from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult
from toolspace.providers.mcp.callbacks import ElicitationRequest, McpCallbacks, SamplingRequest
from toolspace.providers.mcp.conversion import ServerTool, UnusableTool, parse_result, parse_tool
from toolspace.providers.mcp.errors import HttpStatusError, classify_error, is_connection_lost

_MAX_PAGES = 1_000
_MAX_TOOLS = 50_000
_MAX_ROUNDS = 10
"""How often a server may answer a call with a question instead of a result."""
_GHOST_SECONDS = 600.0
"""How long a server may still ask for the sake of a call that nobody waits for any more."""
_asked_by: contextvars.ContextVar[ToolContext | None] = contextvars.ContextVar("toolspace_mcp_call", default=None)
_input_requests: TypeAdapter[types.InputRequest] = TypeAdapter(types.InputRequest)
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}


_Owner = tuple[object, ...]


class ServerToolList(msgspec.Struct, frozen=True):
    """What a server offers: its tools by name, and those that cannot be used, with the reason."""

    tools: Mapping[str, ServerTool]
    left_out: tuple[str, ...] = ()


class SessionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection needs of its surroundings."""

    name: str
    callbacks: McpCallbacks
    version: str
    """Ours, as servers see it."""
    on_change: Callable[[], None]
    """The server's list of tools is another one now."""


class McpSession:
    """A negotiated connection. Calls may come from any task; opening and closing are one task's."""

    def __init__(self, peer: SessionOptions, dispatcher: Dispatcher[Any]) -> None:
        self._peer = peer
        self._dispatcher = dispatcher
        self._calls: dict[object, ToolContext] = {}
        self._ghosts: dict[_Owner, float] = {}
        """Whose calls were given up, and when."""
        callbacks = peer.callbacks
        self.client = ClientSession(
            dispatcher=dispatcher,
            client_info=types.Implementation(name="toolspace", version=peer.version),
            elicitation_callback=self._elicit if callbacks.elicit is not None else None,
            sampling_callback=self._sample if callbacks.sample is not None else None,
            list_roots_callback=self._roots if callbacks.roots is not None else None,
            logging_callback=self._log,
            message_handler=self._hear,
        )
        self._meta: dict[str, Any] = {}
        self._headers: dict[str, str] = {}

    # Getting to know each other

    async def negotiate(self, *, handshake: bool = False) -> None:
        """Finds the era that both speak. `handshake`: without asking, for servers that break at the question."""
        if handshake or not await self._discover():
            try:
                await self.client.initialize()
            except MCPError as error:
                # One that took long to start may have got the question after we gave up on its answer.
                if handshake or is_connection_lost(error) or not await self._discover():
                    raise
        version = self.client.protocol_version or ""
        self._headers = {MCP_PROTOCOL_VERSION_HEADER: version}
        if self.is_stateless:
            self._meta = {
                PROTOCOL_VERSION_META_KEY: version,
                CLIENT_INFO_META_KEY: {"name": "toolspace", "version": self._peer.version},
                CLIENT_CAPABILITIES_META_KEY: _capabilities(self._peer.callbacks),
            }

    async def discover(self) -> bool:
        """Whether the server speaks the stateless era; if so, the connection is ready."""
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
                found = types.DiscoverResult.model_validate(await self.client.send_discover(version))
                if not set(found.supported_versions) & set(MODERN_PROTOCOL_VERSIONS):
                    return False
                self.client.adopt(found)
                return True
            except ValidationError:
                return False
            except MCPError as raised:
                error = classify_error(raised)
                data: object = error.data
                supported = cast("Mapping[str, Any]", data).get("supported") if isinstance(data, dict) else None
                if error.code != UNSUPPORTED_PROTOCOL_VERSION or not isinstance(supported, list):
                    if _is_answer(error):
                        return False
                    raise error from None
                mutual = [one for one in MODERN_PROTOCOL_VERSIONS if one in supported]
                if not mutual:
                    return False
                version = mutual[-1]
        return False

    @property
    def is_stateless(self) -> bool:
        return self.client.discover_result is not None

    @property
    def protocol_version(self) -> str:
        return self.client.protocol_version or ""

    @property
    def server_label(self) -> str | None:
        info = self.client.server_info
        return f"{info.name} {info.version}".strip() if info is not None else None

    @property
    def instructions(self) -> str:
        return self.client.instructions or ""

    @property
    def announces_changes(self) -> bool:
        capabilities = self.client.server_capabilities
        return capabilities is not None and capabilities.tools is not None and bool(capabilities.tools.list_changed)

    # Tools

    async def list_tools(self) -> ServerToolList:
        """All pages. One entry that cannot be read does not cost the others."""
        capabilities = self.client.server_capabilities
        if capabilities is not None and capabilities.tools is None and not self.is_stateless:
            return ServerToolList({})  # It offers prompts or resources only, and may not know the question.
        tools: dict[str, ServerTool] = {}
        left_out: list[str] = []
        cursor: str | None = None
        seen: set[str] = set()
        for _ in range(_MAX_PAGES):
            page = await self._request("tools/list", {"cursor": cursor} if cursor is not None else {})
            entries = page.get("tools")
            for entry in cast("list[object]", entries) if isinstance(entries, list) else ():
                if len(tools) + len(left_out) < _MAX_TOOLS:
                    self._take(entry, tools, left_out)
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or cursor in seen or len(tools) + len(left_out) >= _MAX_TOOLS:
                break
            seen.add(cursor)
        return ServerToolList(tools, tuple(left_out))

    def _take(self, entry: object, tools: dict[str, ServerTool], left_out: list[str]) -> None:
        try:
            found = parse_tool(entry, stateless=self.is_stateless)
        except UnusableTool as why:
            name = cast("dict[str, Any]", entry).get("name") if isinstance(entry, dict) else None
            left_out.append(f"{name if isinstance(name, str) else '?'}: {why}"[:300])
            return
        if found.tool.name in tools:
            left_out.append(f"{found.tool.name}: listed twice; the first one counts")
        else:
            tools[found.tool.name] = found

    async def call_tool(self, tool: ServerTool, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """One call, with the questions that the server may have in between."""
        key = object()
        self._calls[key] = context
        token = _asked_by.set(context)
        try:
            params: dict[str, Any] = {"name": tool.tool.name, "arguments": arguments}
            headers = mcp_param_headers(tool.headers, arguments) if tool.headers else {}
            answer = await self._request("tools/call", params, headers=headers, context=context)
            for _ in range(_MAX_ROUNDS):
                if answer.get("resultType") != "input_required":
                    return parse_result(answer)
                more = await self._answer_questions(answer, context)
                answer = await self._request("tools/call", {**params, **more}, headers=headers, context=context)
            return ToolResult(
                False, error=f"the server asked more than {_MAX_ROUNDS} times", error_kind="execution_error"
            )
        except (asyncio.CancelledError, GeneratorExit):
            self._ghosts[_owner(context)] = time.monotonic()
            raise
        finally:
            del self._calls[key]
            with suppress(ValueError):  # Collected with its event loop: this is another context.
                _asked_by.reset(token)

    async def probe(self) -> None:
        """Asks the server for a sign of life. Raises where there is none."""
        await self._request("server/discover" if self.is_stateless else "ping", {})

    async def listen_for_changes(self) -> None:
        """Hears of changes of the list in the stateless era, until the server ends it. Others are told anyway."""
        async with listen(self.client, tools_list_changed=True) as events:
            self._peer.on_change()  # What changed before we listened.
            async for _ in events:
                self._peer.on_change()

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
            if method == "tools/call":
                options["headers"][MCP_NAME_HEADER] = encode_header_value(params["name"])
        if context is None:
            # Of no cost to a server that goes on with it; to tell one that reads nothing would take seconds.
            options["cancel_on_abandon"] = False
        elif context.has_progress_listener:

            async def report(progress: float, total: float | None, message: str | None) -> None:
                context.report_progress(progress, total, message)

            options["on_progress"] = report
        try:
            return await self._dispatcher.send_raw_request(method, params, options)
        except MCPError as error:
            raise classify_error(error) from None

    # What the server asks of us

    async def _answer_questions(self, answer: Mapping[str, Any], context: ToolContext) -> dict[str, Any]:
        """The stateless era's way: the result is a list of questions, the call is sent again with the answers."""
        more: dict[str, Any] = {}
        if isinstance(state := answer.get("requestState"), str):
            more["requestState"] = state
        asked = answer.get("inputRequests")
        if not isinstance(asked, dict) or not asked:
            await asyncio.sleep(0.1)  # It only wants to be asked again.
            return more
        answers: dict[str, Any] = {}
        for key, wire in cast("dict[str, Any]", asked).items():
            try:
                request = _input_requests.validate_python(wire, by_name=False)
            except ValidationError:
                raise MCPError(types.INTERNAL_ERROR, "the server asks what cannot be understood") from None
            response = await self.client.dispatch_input_request(
                ClientRequestContext(session=self.client, request_id=key), request
            )
            if isinstance(response, types.ErrorData):
                raise MCPError.from_error_data(response)
            answers[key] = response.model_dump(by_alias=True, mode="json", exclude_none=True)
        return {**more, "inputResponses": answers}

    def _context(self) -> ToolContext | None:
        """The call during which the server asks.

        Certain where the question comes as an answer to it, or on the way of its answer. Over other transports of
        the older era the server does not say: only where there is no doubt.
        """
        if (certain := _asked_by.get()) is not None:
            return certain
        now = time.monotonic()
        self._ghosts = {owner: since for owner, since in self._ghosts.items() if now - since < _GHOST_SECONDS}
        calls = list(self._calls.values())
        owners = {_owner(call) for call in calls}
        return calls[-1] if len(owners) == 1 and self._ghosts.keys() <= owners else None

    async def _elicit(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        elicit = self._peer.callbacks.elicit
        assert elicit is not None
        url = isinstance(params, types.ElicitRequestURLParams)
        question = ElicitationRequest(
            server=self._peer.name,
            message=params.message,
            schema=None if url else cast("Mapping[str, Any]", params.requested_schema),
            url=params.url if url else None,
        )
        try:
            answer = await elicit(question, self._context())
            content = cast("Any", dict(answer.content)) if answer.content is not None else None
            return types.ElicitResult(action=answer.action, content=content if answer.action == "accept" else None)
        except Exception as error:
            _logger(self._peer.name).warning("a question could not be asked: %r", error)
            return types.ElicitResult(action="cancel")

    async def _sample(
        self, context: ClientRequestContext, params: types.CreateMessageRequestParams
    ) -> types.CreateMessageResult | types.CreateMessageResultWithTools | types.ErrorData:
        sample = self._peer.callbacks.sample
        assert sample is not None
        wire = params.model_dump(by_alias=True, mode="json", exclude_none=True)
        try:
            answer = await sample(SamplingRequest(server=self._peer.name, params=wire), self._context())
            return types.CreateMessageResult.model_validate(answer, by_name=False)
        except Exception as error:
            _logger(self._peer.name).warning("a model could not be asked: %r", error)
            return types.ErrorData(code=types.INTERNAL_ERROR, message="the model could not be asked")

    async def _roots(self, context: ClientRequestContext) -> types.ListRootsResult | types.ErrorData:
        roots = self._peer.callbacks.roots
        assert roots is not None
        return types.ListRootsResult(
            roots=[types.Root(uri=cast("Any", path.absolute().as_uri()), name=path.name or None) for path in roots()]
        )

    async def _hear(self, message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._peer.on_change()
        elif isinstance(message, Exception):
            _logger(self._peer.name).debug("a message could not be read: %s", message)

    async def _log(self, params: types.LoggingMessageNotificationParams) -> None:
        level = _LEVELS.get(params.level, logging.ERROR)
        # A server's own words: never louder than a warning here, and no longer than a line.
        _logger(self._peer.name).log(min(level, logging.WARNING), "%s", str(params.data)[:2_000])


@asynccontextmanager
async def open_session(peer: SessionOptions, dispatcher: Dispatcher[Any]) -> AsyncGenerator[McpSession]:
    """A session over a channel, not negotiated yet."""
    session = McpSession(peer, dispatcher)
    async with session.client:
        yield session


def _owner(call: ToolContext) -> _Owner:
    return call.user_id, call.space_id, call.session_id, call.run_id, call.caller_client


def _is_answer(error: MCPError) -> bool:
    """Whether a server that knows nothing of discovery said so, or did not say anything; else it is gone."""
    return not is_connection_lost(error) and not (
        isinstance(error, HttpStatusError) and error.status in (401, 403, 407)
    )


def _capabilities(callbacks: McpCallbacks) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if callbacks.elicit is not None:
        found["elicitation"] = {"form": {}, "url": {}}
    if callbacks.sample is not None:
        found["sampling"] = {}
    if callbacks.roots is not None:
        found["roots"] = {"listChanged": True}
    return found


def _logger(name: str) -> logging.Logger:
    return logging.getLogger(f"toolspace.mcp.{name}")
