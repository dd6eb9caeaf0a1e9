"""Keeps one MCP server reachable: starts it, notices its loss, reconnects, and stops it when it is idle.

One task owns the connection from opening to close, because the MCP SDK requires that. Calls come from any task and
borrow the session. Used by `provider`; knows nothing of results.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from typing import Any, Literal

import msgspec
from mcp.shared.exceptions import MCPError

from toolspace.core.secret_masking import mask_secrets
from toolspace.core.times import format_milliseconds
from toolspace.errors import ProviderError
from toolspace.providers.mcp.conversion import limit_instructions
from toolspace.providers.mcp.open_connection import ConnectionLostDuringDiscovery, ConnectionOptions, connect
from toolspace.providers.mcp.server_spec import ServerSpec, ServerState, ServerStatus
from toolspace.providers.mcp.session import McpSession, ServerToolList, SessionOptions
from toolspace.providers.mcp.transports.base import (
    OpenTransport,
    ServerUnreachable,
    UnknownSession,
    describe_error,
    is_connection_lost,
    is_temporary,
    may_be_unknown_session,
    unwrap_group,
)

_log = logging.getLogger("toolspace.mcp")
RECONNECT_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
CONNECT_SECONDS = 60.0
"""The time from start to tool list. The first start of a server that has to be downloaded is slow."""
PROBE_SECONDS = 5.0
_HEALTHY_SECONDS = 30.0
"""After a connection has held this long, the next reconnect starts without delay again."""
_RETRY_SECONDS = 1.0
"""A call starts the next attempt itself, unless the last one started less than this ago."""
_LISTEN_AGAIN_SECONDS = (0.1, 1.0, 5.0, 30.0)
_REFRESH_SECONDS = 0.05
"""The minimum time between two refreshes of the tools: a server may send change notifications without end."""

EndReason = Literal["lost", "idle", "restart", "stop"]


class ServerConnection:
    """The connection to one server. `start` and `aclose` it once; meanwhile it reconnects by itself."""

    def __init__(
        self, name: str, spec: ServerSpec, on_tools_listed: Callable[[ServerToolList], None], options: ConnectionOptions
    ) -> None:
        self.name = name
        self.spec = spec
        self.instructions = ""
        """The server's instructions, limited, or an empty text."""
        self.connected_at = 0.0
        """When the last attempt succeeded, in seconds of `time.monotonic`."""
        self._on_tools_listed = on_tools_listed
        self._options = options
        self._session_options = SessionOptions(
            name=name, callbacks=options.callbacks, version=options.version, on_tools_changed=self.refresh_tools
        )
        self._status = ServerStatus(name=name, state="stopped", transport=spec.kind)
        self._owner: asyncio.Task[None] | None = None
        self._previous_owners: set[asyncio.Task[None]] = set()
        """Owners of sessions that the server no longer knows. Each ends when the last call of its session has."""
        self._session: McpSession | None = None
        self._attempt_done: asyncio.Future[None] | None = None
        """Done when the current or next attempt has succeeded or failed."""
        self._wake = asyncio.Event()
        self._end_event = asyncio.Event()
        self._end_reason: EndReason = "lost"
        self._is_closing = False
        self._is_attempting = False
        self._is_waiting_for_slot = False
        self._handshake = False
        """Whether the server broke at the request for its era, and gets the handshake at once."""
        self._failures = 0
        """Consecutive attempts that failed or did not hold."""
        self._last_attempt = 0.0
        self._calls_in_flight = 0
        self._last_used = 0.0
        self._tools_changed = asyncio.Event()
        self._probe_task: asyncio.Task[None] | None = None

    # For the provider

    @property
    def status(self) -> ServerStatus:
        return msgspec.structs.replace(self._status, calls_in_flight=self._calls_in_flight)

    @property
    def is_first_reconnect(self) -> bool:
        """Whether the first attempt since the loss of the session is under way."""
        return self._session is None and self._failures <= 1 and self._is_attempting

    @property
    def is_stateless(self) -> bool:
        """Whether the current or last session is of the stateless era."""
        return self._status.era == "stateless"

    @property
    def is_waiting_for_slot(self) -> bool:
        """Whether the current attempt waits until other servers have started."""
        return self._is_waiting_for_slot

    async def start(self) -> None:
        """Returns when the server is ready. Raises ServerUnreachable if the current or next attempt fails."""
        self._ensure_owner()
        if self._status.state != "idle":
            await self._wait_for_attempt()

    def _ensure_owner(self) -> None:
        """Creates the owner task: the first time, and if its event loop ended without a close."""
        if self._is_closing:
            return
        loop = asyncio.get_running_loop()
        if self._owner is not None:
            owner_loop = self._owner.get_loop()
            if owner_loop is loop and not self._owner.done():
                return
            if owner_loop is not loop and not owner_loop.is_closed():
                raise ServerUnreachable("the server is in use in another event loop", was_sent=False)
        self._wake, self._end_event, self._tools_changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._session = self._attempt_done = self._probe_task = None
        self._create_owner()

    def _create_owner(self, delay: float = 0.0) -> None:
        # In a new context: the task outlives the call that needed the server first.
        self._owner = asyncio.get_running_loop().create_task(
            self._run(delay), name=f"mcp {self.name}", context=contextvars.Context()
        )

    @asynccontextmanager
    async def borrow_session(self) -> AsyncGenerator[McpSession]:
        """Yields the session for one call. Starts the server if it is idle."""
        self._calls_in_flight += 1
        try:
            session = self._session or await self._reconnect()
            session.users += 1
            try:
                yield session
            finally:
                session.users -= 1
                if not session.users:
                    session.unused_event.set()
        finally:
            self._calls_in_flight -= 1
            self._last_used = time.monotonic()

    async def _reconnect(self) -> McpSession:
        is_recent = time.monotonic() - self._last_attempt < _RETRY_SECONDS
        if self._failures and not self._is_attempting and is_recent:
            raise ServerUnreachable(f"{self._status.last_error}; Toolspace retries automatically", was_sent=False)
        self._ensure_owner()
        self._wake.set()
        return await self._wait_for_attempt()

    async def _wait_for_attempt(self) -> McpSession:
        if self._is_closing or self._owner is None:
            raise ServerUnreachable("the server is closed", was_sent=False)
        if self._session is None:
            if self._attempt_done is None or self._attempt_done.done():
                self._attempt_done = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._attempt_done, self._owner), return_when=asyncio.FIRST_COMPLETED)
        if (session := self._session) is None:
            raise ServerUnreachable(self._status.last_error or "the server did not start", was_sent=False)
        return session

    def report_lost(self, session: McpSession, reason: str) -> None:
        """Ends the session, because a call or a probe noticed that the connection is gone."""
        if session is self._session:
            self._set_error(reason)
            self._end_session("lost")
            self._set_state("reconnecting")

    def report_unknown_session(self, session: McpSession) -> None:
        """Opens a new session, because the server does not know this one. Its other calls may still end in order.

        A call that waits for the new session opens it at once. Without one it is opened later each time, for a server
        that forgets every session.
        """
        if session is not self._session or self._owner is None:
            return
        self._set_error("the server does not know the session any more")
        self._end_session("lost")
        self._set_state("reconnecting")
        is_healthy = time.monotonic() - self.connected_at > _HEALTHY_SECONDS
        delay = 0.0 if is_healthy else RECONNECT_SECONDS[min(self._failures, len(RECONNECT_SECONDS) - 1)]
        self._failures = 0 if is_healthy else self._failures + 1
        _log.info("MCP server %s: %s; opening a new one", self.name, self._status.last_error)
        self._previous_owners.add(self._owner)
        self._owner.add_done_callback(self._previous_owners.discard)
        self._end_event, self._is_attempting = asyncio.Event(), True
        self._create_owner(delay)

    def start_probe(self, session: McpSession) -> None:
        """Checks in the background whether the server still answers; if not, reconnects."""
        if session is self._session and self._probe_task is None:
            self._probe_task = asyncio.get_running_loop().create_task(self._probe(session))

    async def check_alive(self, session: McpSession) -> bool:
        """Probes the server, and returns whether the session still holds."""
        self.start_probe(session)
        if self._probe_task is not None:
            await asyncio.wait((self._probe_task,))
        return session is self._session

    def refresh_tools(self) -> None:
        """Lists the tools again, in the background."""
        self._tools_changed.set()

    async def restart(self) -> None:
        """Stops the server and starts it again. Returns when it is ready."""
        if self._session is not None:
            self._end_session("restart")
            self._set_state("starting")
        elif self._is_attempting and self._owner is not None and not self._is_closing:
            self._owner.cancel()  # A restart does not wait for an attempt that hangs.
            await asyncio.wait((self._owner,))
        self._failures = 0
        self._ensure_owner()
        self._wake.set()
        await self._wait_for_attempt()

    async def aclose(self) -> None:
        self._is_closing = True
        was_open = self._session is not None
        self._end_session("stop")
        if self._probe_task is not None:
            self._probe_task.cancel()
            await asyncio.gather(self._probe_task, return_exceptions=True)
        # An owner whose event loop has ended has nothing to close, and cannot be awaited in this loop.
        for owner in self._previous_owners:
            owner.cancel()
        await asyncio.gather(*self._previous_owners, return_exceptions=True)
        if self._owner is not None and not self._owner.done():
            if not was_open:
                self._owner.cancel()  # It is starting, or waiting to start: nothing to close in order.
            await asyncio.gather(self._owner, return_exceptions=True)
        self._finish_attempt()
        self._set_state("stopped")

    # The owner task

    async def _run(self, delay: float) -> None:
        """Opens the session again and again, the first time after a delay, until another task owns the connection."""
        owner = asyncio.current_task()
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._wake.wait()
        while not self._is_closing:
            self._is_attempting = True
            self._last_attempt = time.monotonic()
            self._end_event.clear()
            self._wake.clear()
            self._end_reason = "lost"
            ready_at: float | None = None
            try:
                async with AsyncExitStack() as stack:
                    session, transport = await self._connect(stack)
                    ready_at = time.monotonic()
                    await self._hold(session, transport)
                    if owner is not self._owner:
                        await session.wait_until_unused()
            except (Exception, asyncio.CancelledError) as error:
                # A broken connection may raise CancelledError although nobody cancelled this task.
                if owner is not None and owner.cancelling():
                    raise
                if isinstance(unwrap_group(error), ConnectionLostDuringDiscovery):
                    self._handshake = True
                    continue
                if owner is self._owner and not self._end_event.is_set():
                    self._set_error(describe_error(error))
            finally:
                if owner is self._owner:
                    self._session = None
                    self._is_attempting = self._is_waiting_for_slot = False
            if owner is not self._owner:
                return
            if ready_at is None:
                self._handshake = False  # Discovery was not the reason.
                self._wake.clear()  # Calls that waited for this attempt do not start the next one.
                self._finish_attempt()
            elif time.monotonic() - ready_at > _HEALTHY_SECONDS or self._end_reason != "lost":
                self._failures = 0
            await self._wait_for_next_attempt(was_ready=ready_at is not None)

    async def _wait_for_next_attempt(self, *, was_ready: bool) -> None:
        """Waits until the next attempt is due, or a call needs the server."""
        if self._is_closing or self._end_reason == "restart":
            return
        if self._end_reason == "idle":
            self._set_state("idle")
            if not self._calls_in_flight:
                await self._wake.wait()
            return
        delay = RECONNECT_SECONDS[min(self._failures, len(RECONNECT_SECONDS) - 1)]
        self._failures += 1
        was_ever_ready = was_ready or self._status.state == "reconnecting"
        self._set_state("reconnecting" if was_ever_ready else "failed")
        log = _log.warning if was_ready else _log.info  # A failed start is reported by whoever waits for it.
        log("MCP server %s: %s; retrying in %g s", self.name, self._status.last_error, delay)
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                # Bounds the attempts that calls start, for a server that ends at once every time.
                await asyncio.sleep(self._last_attempt + _RETRY_SECONDS - time.monotonic())
                await self._wake.wait()

    async def _connect(self, stack: AsyncExitStack) -> tuple[McpSession, OpenTransport | None]:
        """Opens a session, lists the tools and publishes both."""
        is_restart = self._status.since is not None and self._status.protocol_version is not None
        if self._status.state not in ("reconnecting", "failed"):  # These stay: they say that it is a retry.
            self._set_state("starting")
        limiter = self._options.startup_limiter
        self._is_waiting_for_slot = limiter is not None
        async with limiter.slot() if limiter is not None else nullcontext():
            self._is_waiting_for_slot = False
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    session, transport, tool_list = await connect(
                        stack, self.spec, self._options, self._session_options, handshake=self._handshake
                    )
            except TimeoutError:
                reason = f"the server was not ready within {format_milliseconds(CONNECT_SECONDS)}ms"
                raise ServerUnreachable(reason, was_sent=False) from None
        self._set_state(
            "ready",
            transport="http" if transport is None else transport.transport,
            pid=None if transport is None else transport.pid,
            era="stateless" if session.is_stateless else "handshake",
            protocol_version=session.client.protocol_version or "",
            server=session.server_label,
            restarts=self._status.restarts + is_restart,
        )
        self.instructions = limit_instructions(session.client.instructions or "")
        self._publish_tools(tool_list)
        self._session = session
        self._last_used = self.connected_at = time.monotonic()
        self._wake.clear()
        self._finish_attempt()
        return session, transport

    async def _hold(self, session: McpSession, transport: OpenTransport | None) -> None:
        """Watches the tool list, the transport and the idle time until the session ends."""
        watchers: list[Coroutine[Any, Any, None]] = [self._follow_tool_changes(session)]
        if session.is_stateless and session.announces_changes:
            watchers.append(self._listen_for_changes(session))
        if transport is not None:
            watchers += (self._watch_transport(session, transport), self._watch_for_doubt(session, transport))
        if self.spec.idle_timeout is not None:
            watchers.append(self._watch_idle(self.spec.idle_timeout))
        tasks = [asyncio.get_running_loop().create_task(watcher) for watcher in watchers]
        try:
            await self._end_event.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_transport(self, session: McpSession, transport: OpenTransport) -> None:
        await transport.lost_event.wait()
        self.report_lost(session, transport.loss_reason or "the connection was lost")

    async def _watch_for_doubt(self, session: McpSession, transport: OpenTransport) -> None:
        while True:
            await transport.doubt_event.wait()
            transport.doubt_event.clear()
            self.start_probe(session)

    async def _watch_idle(self, seconds: float) -> None:
        while True:
            remaining = self._last_used + seconds - time.monotonic()
            if self._calls_in_flight == 0 and remaining <= 0:
                self._end_session("idle")
                return
            await asyncio.sleep(remaining if remaining > 0 else seconds)

    async def _follow_tool_changes(self, session: McpSession) -> None:
        while True:
            await self._tools_changed.wait()
            self._tools_changed.clear()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    self._publish_tools(await session.list_tools())
            except UnknownSession:
                self.report_unknown_session(session)  # The tools are listed when the new session opens.
            except (MCPError, ProviderError, TimeoutError) as error:
                _log.warning(
                    "MCP server %s: its tools changed, but listing them failed: %s", self.name, describe_error(error)
                )
            await asyncio.sleep(_REFRESH_SECONDS)

    async def _listen_for_changes(self, session: McpSession) -> None:
        """Listens for list changes of a stateless server, and listens again when the server ends the stream."""
        failures = 0
        while True:
            started_at = time.monotonic()
            try:
                await session.listen_for_changes()
            except Exception as error:  # The SDK raises many kinds for a broken stream. Calls work without it.
                _log.debug("MCP server %s: no change notifications: %s", self.name, describe_error(error))
            failures = 0 if time.monotonic() - started_at > _HEALTHY_SECONDS else failures + 1
            await asyncio.sleep(_LISTEN_AGAIN_SECONDS[min(failures, len(_LISTEN_AGAIN_SECONDS) - 1)])

    async def _probe(self, session: McpSession) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await session.probe()
        except TimeoutError:
            self.report_lost(session, f"the server did not answer a probe within {PROBE_SECONDS:g} s")
        except ProviderError:
            pass  # A login is needed: the server itself answered that.
        except MCPError as error:
            # Any answer shows that the server lives, even that it has no `ping`. Over HTTP another server may have
            # taken its place, which does not know the session or even the era.
            may_be_other_server = session.is_stateless or may_be_unknown_session(error)
            if is_connection_lost(error):
                self.report_lost(session, f"the server did not answer a probe: {describe_error(error)}")
            elif isinstance(error, UnknownSession):
                self.report_unknown_session(session)
            elif self.spec.uses_http and may_be_other_server and not is_temporary(error):
                self.report_lost(session, f"the server refused a probe: {describe_error(error)}")
        finally:
            self._probe_task = None

    # State

    def _end_session(self, reason: EndReason) -> None:
        """Ends the open session. New calls wait for the next one."""
        self._end_reason = reason
        self._session = None
        self._end_event.set()

    def _finish_attempt(self) -> None:
        if self._attempt_done is not None and not self._attempt_done.done():
            self._attempt_done.set_result(None)

    def _publish_tools(self, tool_list: ServerToolList) -> None:
        self._set_state(self._status.state, tools=len(tool_list.tools), left_out=tool_list.left_out)
        self._on_tools_listed(tool_list)

    def _set_error(self, reason: str) -> None:
        self._status = msgspec.structs.replace(
            self._status, last_error=str(mask_secrets(reason))[:1_000], last_error_at=time.time()
        )

    def _set_state(self, state: ServerState, **fields: Any) -> None:
        """Changes the state and other fields of the status. Only a ready server has a process."""
        if state != self._status.state:
            fields = {"pid": None, "since": time.time(), **fields}
        self._status = msgspec.structs.replace(self._status, state=state, **fields)
