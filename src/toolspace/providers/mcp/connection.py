"""Keeps one MCP server within reach: starts it, notices that it is gone, starts it again, stops it when unused.

One task owns the connection from its opening to its close, as the MCP library demands; calls come from any task and
only borrow it. Knows nothing of results.
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
from toolspace.providers.mcp.connect import ConnectionAttempt, ConnectionLostDuringDiscovery, ConnectionOptions
from toolspace.providers.mcp.errors import (
    ServerUnreachable,
    describe_error,
    is_connection_lost,
    is_temporary,
    may_be_unknown_session,
    unwrap_group,
)
from toolspace.providers.mcp.session import McpSession, ServerToolList
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.status import ServerState, ServerStatus
from toolspace.providers.mcp.transports.factory import OpenTransport

_log = logging.getLogger("toolspace.mcp")
RECONNECT_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
CONNECT_SECONDS = 60.0
"""How long a server has from its start to its list. The first start of one that is still to be downloaded is slow."""
PROBE_SECONDS = 5.0
_HEALTHY_SECONDS = 30.0
"""How long a connection must have held for the next loss to be met at once again."""
_EAGER_SECONDS = 1.0
"""A call does not wait for the next attempt, but makes it, unless the last one was just now."""
_RELISTEN_SECONDS = (0.1, 1.0, 5.0, 30.0)
_REFRESH_SECONDS = 0.05
"""The least time between two refreshes of a list: a server may say without end that it changed."""

EndReason = Literal["lost", "idle", "restart", "stop"]


class ServerConnection:
    """One server. `start` it, `aclose` it once; in between it heals by itself."""

    def __init__(
        self, name: str, spec: ServerSpec, on_listing: Callable[[ServerToolList], None], hooks: ConnectionOptions
    ) -> None:
        self.name = name
        self.spec = spec
        self.instructions = ""
        self._on_listing = on_listing
        self._hooks = hooks
        self._status = ServerStatus(name=name, state="stopped", transport=spec.kind)
        self._owner: asyncio.Task[None] | None = None
        self._session: McpSession | None = None
        self._outcome: asyncio.Future[None] | None = None
        """Done when the attempt under way, or the next, has come to its end, one way or the other."""
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._end: EndReason = "lost"
        self._closing = False
        self._attempting = False
        self._handshake = False
        """Whether the server broke at the question for its era, and is greeted in the old way."""
        self._failures = 0
        """Attempts in a row that failed, or did not hold."""
        self._last_try = 0.0
        self._leases = 0
        self._last_used = 0.0
        self._changed = asyncio.Event()
        self._probing: asyncio.Task[None] | None = None

    # For the provider

    @property
    def status(self) -> ServerStatus:
        return msgspec.structs.replace(self._status, calls_in_flight=self._leases)

    async def start(self) -> None:
        """Returns once the server is ready; raises the reason where the attempt under way, or the next, fails."""
        self._own()
        if self._status.state != "idle":
            await self._outcome_of_attempt()

    def _own(self) -> None:
        """Makes sure that there is an owner: the first time, and where its event loop ended without a close."""
        if self._closing:
            return
        loop = asyncio.get_running_loop()
        if self._owner is not None:
            other = self._owner.get_loop()
            if other is loop and not self._owner.done():
                return
            if other is not loop and not other.is_closed():
                raise ServerUnreachable("it is in use in another event loop", sent=False)
        self._wake, self._ended, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._session = self._outcome = self._probing = None
        # In a context of its own: it outlives whoever needed the server first.
        self._owner = loop.create_task(self._run(), name=f"mcp {self.name}", context=contextvars.Context())

    @asynccontextmanager
    async def borrow_session(self) -> AsyncGenerator[McpSession]:
        """The session, for one call; starts the server where it was stopped for want of calls."""
        self._leases += 1
        try:
            yield self._session or await self._revived()
        finally:
            self._leases -= 1
            self._last_used = time.monotonic()

    async def _revived(self) -> McpSession:
        tried_just_now = time.monotonic() - self._last_try < _EAGER_SECONDS
        if self._failures and not self._attempting and tried_just_now:
            raise ServerUnreachable(f"{self._status.last_error}; it is tried again by itself", sent=False)
        self._own()
        self._wake.set()
        return await self._outcome_of_attempt()

    async def _outcome_of_attempt(self) -> McpSession:
        if self._closing or self._owner is None:
            raise ServerUnreachable("it is closed", sent=False)
        if self._session is None:
            if self._outcome is None or self._outcome.done():
                self._outcome = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._outcome, self._owner), return_when=asyncio.FIRST_COMPLETED)
        if (session := self._session) is None:
            raise ServerUnreachable(self._status.last_error or "it did not start", sent=False)
        return session

    def report_lost(self, session: McpSession, reason: str) -> None:
        """A call found out that the connection is gone."""
        if session is self._session:
            self._note(reason)
            self._finish("lost")
            self._set("reconnecting", pid=None)

    def start_probe(self, session: McpSession) -> None:
        """A call did not get its answer in time: asks the server whether it lives, and restarts it if not."""
        if session is self._session and self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe(session))

    async def check_alive(self, session: McpSession) -> bool:
        """Whether the server still holds the connection, asked where a call gives reason to doubt it."""
        self.start_probe(session)
        if self._probing is not None:
            await asyncio.wait((self._probing,))
        return session is self._session

    def refresh_tools(self) -> None:
        """The list may be another one now."""
        self._changed.set()

    async def restart(self) -> None:
        """Stops the server and starts it again; returns when it is ready."""
        if self._session is not None:
            self._finish("restart")
            self._set("starting", pid=None)
        elif self._attempting and self._owner is not None and not self._closing:
            self._owner.cancel()  # Whoever asks for a restart does not want to wait for a start that hangs.
            await asyncio.wait((self._owner,))
        self._failures = 0
        self._own()
        self._wake.set()
        await self._outcome_of_attempt()

    async def aclose(self) -> None:
        self._closing = True
        was_open = self._session is not None
        self._finish("stop")
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        # One that ended with its own event loop has nothing to close, and cannot be waited for in this one.
        if self._owner is not None and not self._owner.done():
            if not was_open:
                self._owner.cancel()  # It starts, or waits to: there is nothing to end in order.
            await asyncio.gather(self._owner, return_exceptions=True)
        self._settle()
        self._set("stopped", pid=None)

    # The owner

    async def _run(self) -> None:
        while not self._closing:
            self._attempting = True
            self._last_try = time.monotonic()
            self._ended.clear()
            self._wake.clear()
            self._end = "lost"
            ready_at: float | None = None
            try:
                async with AsyncExitStack() as stack:
                    session, link = await self._ready(stack)
                    ready_at = time.monotonic()
                    await self._hold(session, link)
            except (Exception, asyncio.CancelledError) as error:
                # A broken connection may show as a cancellation that nobody asked for.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                if isinstance(unwrap_group(error), ConnectionLostDuringDiscovery):
                    self._handshake = True
                    continue
                if not self._ended.is_set():
                    self._note(describe_error(error))
            finally:
                self._session = None
                self._attempting = False
            if ready_at is None:
                self._handshake = False  # It was not that.
                self._wake.clear()  # Who waited for this attempt does not cause the next.
                self._settle()
            elif time.monotonic() - ready_at > _HEALTHY_SECONDS or self._end != "lost":
                self._failures = 0
            await self._pause(was_ready=ready_at is not None)

    async def _pause(self, *, was_ready: bool) -> None:
        """Waits for the next attempt: until its time has come, or someone needs the server now."""
        if self._closing or self._end == "restart":
            return
        if self._end == "idle":
            self._set("idle", pid=None)
            if not self._leases:
                await self._wake.wait()
            return
        delay = RECONNECT_SECONDS[min(self._failures, len(RECONNECT_SECONDS) - 1)]
        self._failures += 1
        ever_ready = was_ready or self._status.state == "reconnecting"
        self._set("reconnecting" if ever_ready else "failed", pid=None)
        log = _log.warning if was_ready else _log.info  # A start that fails is reported by who waits for it.
        log("MCP server %s: %s; trying again in %s", self.name, self._status.last_error, f"{delay:g} s")
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                # However many call: a server that dies at once is not started without end.
                await asyncio.sleep(self._last_try + _EAGER_SECONDS - time.monotonic())
                await self._wake.wait()

    async def _ready(self, stack: AsyncExitStack) -> tuple[McpSession, OpenTransport | None]:
        """The server, opened and announced."""
        again = self._status.since is not None and self._status.protocol_version is not None
        if self._status.state not in ("reconnecting", "failed"):  # Each says that it is tried again.
            self._set("starting")
        gate = self._hooks.startup_limiter
        async with gate.slot() if gate is not None else nullcontext():
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    opening = ConnectionAttempt(
                        self.name, self.spec, self._hooks, self.refresh_tools, handshake=self._handshake
                    )
                    session, link, listing = await opening.open(stack)
            except TimeoutError:
                reason = f"it was not ready within {format_milliseconds(CONNECT_SECONDS)}ms"
                raise ServerUnreachable(reason, sent=False) from None
        self._set(
            "ready",
            transport=link.transport if link is not None else "http",
            pid=link.pid if link is not None else None,
            era="stateless" if session.is_stateless else "handshake",
            protocol_version=session.protocol_version,
            server=session.server_label,
            restarts=self._status.restarts + again,
        )
        self.instructions = session.instructions
        self._announce(listing)
        self._session = session
        self._last_used = time.monotonic()
        self._wake.clear()
        self._settle()
        return session, link

    async def _hold(self, session: McpSession, link: OpenTransport | None) -> None:
        """Until the connection is to end: follows the list, the process, and how long nobody called."""
        work: list[Coroutine[Any, Any, None]] = [self._follow_list(session)]
        if session.is_stateless and session.announces_changes:
            work.append(self._listen(session))
        if link is not None:
            work.append(self._watch_link(session, link))
        if self.spec.idle_timeout is not None:
            work.append(self._watch_idle(self.spec.idle_timeout))
        tasks = [asyncio.get_running_loop().create_task(one) for one in work]
        try:
            await self._ended.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_link(self, session: McpSession, link: OpenTransport) -> None:
        await link.lost_event.wait()
        self.report_lost(session, link.loss_reason or "the connection was lost")

    async def _watch_idle(self, seconds: float) -> None:
        while True:
            left = self._last_used + seconds - time.monotonic()
            if self._leases == 0 and left <= 0:
                self._finish("idle")
                return
            await asyncio.sleep(left if left > 0 else seconds)

    async def _follow_list(self, session: McpSession) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    self._announce(await session.list_tools())
            except (MCPError, ProviderError, TimeoutError) as error:
                _log.warning(
                    "MCP server %s changed its tools, and does not list them: %s", self.name, describe_error(error)
                )
            await asyncio.sleep(_REFRESH_SECONDS)

    async def _listen(self, session: McpSession) -> None:
        """Hears of changes in the stateless era; listens again whenever the server hangs up."""
        tries = 0
        while True:
            began = time.monotonic()
            try:
                await session.listen_for_changes()
            except Exception as error:  # Whatever the library makes of a broken stream: calls go on without it.
                _log.debug("MCP server %s does not tell of changes: %s", self.name, describe_error(error))
            tries = 0 if time.monotonic() - began > _HEALTHY_SECONDS else tries + 1
            await asyncio.sleep(_RELISTEN_SECONDS[min(tries, len(_RELISTEN_SECONDS) - 1)])

    async def _probe(self, session: McpSession) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await session.probe()
        except TimeoutError as error:
            self.report_lost(session, f"it did not answer a probe: {describe_error(error)}")
        except ProviderError:
            pass  # Nobody is logged in, which the server itself has said.
        except MCPError as error:
            # Any answer is a sign of life, also that it has no `ping`. Over HTTP it may be another server's by now,
            # which does not know the session, or not even the era.
            stranger = session.is_stateless or may_be_unknown_session(error)
            if is_connection_lost(error) or (self.spec.kind == "http" and stranger and not is_temporary(error)):
                self.report_lost(session, f"it did not answer a probe: {describe_error(error)}")
        finally:
            self._probing = None

    # State

    def _finish(self, end: EndReason) -> None:
        """Ends the connection that is open now. At once for new calls, which wait for the next one."""
        self._end = end
        self._session = None
        self._ended.set()

    def _settle(self) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(None)

    def _announce(self, listing: ServerToolList) -> None:
        self._set(self._status.state, tools=len(listing.tools), left_out=listing.left_out)
        self._on_listing(listing)

    def _note(self, reason: str) -> None:
        self._status = msgspec.structs.replace(
            self._status, last_error=str(mask_secrets(reason))[:1_000], last_error_at=time.time()
        )

    def _set(self, state: ServerState, **fields: Any) -> None:
        if state != self._status.state:
            fields["since"] = time.time()
        self._status = msgspec.structs.replace(self._status, state=state, **fields)
