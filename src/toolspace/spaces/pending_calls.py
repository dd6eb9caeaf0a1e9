"""Calls that someone else answers: a worker, a person, the clock. Waits for the answer as long as the caller may, and
sees to it that what comes later, or never arrives, reaches the agent another way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.defaults import TOOL_TIMEOUT_SECONDS
from toolspace.core.ids import new_id, now_ms
from toolspace.core.records import OPEN_CALL, CallRecord, ExecutionTarget
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.core.times import format_milliseconds, parse_duration
from toolspace.core.tool import Tool
from toolspace.errors import (
    ErrorKind,
    RefusedError,
    StorageError,
    ToolCanceledError,
    ToolExecutionError,
    ToolTimeoutError,
    ToolValidationError,
)
from toolspace.orchestrator.call import call_chain
from toolspace.spaces import call_transactions
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.services import AgentServices
from toolspace.storage.queries import calls as rows
from toolspace.storage.queries.calls import NewCall
from toolspace.storage.streams.waiters import DeadlineTimer

if TYPE_CHECKING:
    from toolspace.spaces.call_host import GatewayCallHost

_log = logging.getLogger("toolspace.calls")
EXECUTION_TARGETS: Mapping[str, ExecutionTarget] = {"external": "external", "space": "client"}
"""Who executes a tool of a type; all others are executed here."""
_TIMED_OUT, _STOPPING, _PARKED = object(), object(), object()
_ENDLESS_SECONDS = 365 * 86_400.0
_LOOK_AGAIN_SECONDS = 1.0
"""When to look at a call again that could not be looked at."""
DEFAULT_TTL_SECONDS = 7 * 24 * 3600.0


class PendingCalls:
    """Hands calls out and takes answers in. One for each process."""

    def __init__(self, ledger: Ledger, *, ttl: float = DEFAULT_TTL_SECONDS) -> None:
        self.ledger = ledger
        self.ttl = ttl
        """How long a call may wait for its answer, where the tool does not say; seconds."""
        self.services = AgentServices()
        self.on_timer_started: Callable[[], None] = _nothing
        """Told that a call was begun that answers itself."""
        self._waiting: dict[str, _Waiting] = {}
        self._deadlines = DeadlineTimer()
        self._attending: set[_Waiting] = set()
        """Those who ask again for a call that was begun before."""
        self._idle = asyncio.Event()
        """Set while nobody waits here, once it is stopping."""
        self._background: set[asyncio.Task[Any]] = set()
        self._to_confirm: list[str] = []
        self._confirming: asyncio.Task[Any] | None = None
        self._stopping = False

    @property
    def waiting_count(self) -> int:
        """How many callers wait here."""
        return len(self._waiting)

    def execute(
        self, room: GatewayCallHost, tool: Tool, parameters: Mapping[str, Any], context: ToolContext
    ) -> Coroutine[Any, Any, ToolResult]:
        """Offers one call, and gives its answer, or says that it is pending or timed out."""
        if json_text.is_too_deep(parameters):
            raise ToolValidationError(
                f"the arguments have more than {json_text.MAX_STORED_DEPTH} levels; leave some out"
            )
        seconds = context.handle.allowed_seconds if context.handle is not None else TOOL_TIMEOUT_SECONDS
        later = tool.is_async or tool.pauses_run or self._stopping
        now = now_ms()
        ttl = tool.expires_after if tool.expires_after is not None else self.ttl
        new = NewCall(
            call_id=context.call_id or new_id("call"),
            run_id=room.run_id,
            agent_entity_id=room.agent_entity_id,
            space_id=room.space_id,
            tool_name=tool.name,
            args=parameters,
            execution_type=tool.execution_type,
            execution_target=EXECUTION_TARGETS.get(tool.execution_type, "server"),
            visible=tool.visible,
            is_async=tool.is_async,
            exposure="full" if tool.visible else "none",
            status="pending" if later else "waiting",
            node_id=self.ledger.node_id,
            created_at=now,
            expires_at=now + round(ttl * 1000),
            wait_until=None if later else now + round(seconds * 1000),
            due_at=_due(tool, parameters, now),
            pauses_run=tool.pauses_run,
        )
        needs_worker = tool.execution_type == "external" and not tool.is_async and not tool.pauses_run
        return self._hand_out(room, new, seconds, needs_worker=needs_worker, context=context)

    async def ask_members(
        self, room: GatewayCallHost, name: str, args: Mapping[str, Any], context: ToolContext, *, timeout: float
    ) -> Any:
        """Asks the people in a room, as a visible call of its own, and gives what they answered."""
        if room.space_id is None:
            raise ToolExecutionError("nobody can be asked: the call is in no space")
        timeout = min(timeout, self.ttl)
        now = now_ms()
        new = NewCall(
            call_id=new_id("call"),
            run_id=room.run_id,
            agent_entity_id=room.agent_entity_id,
            space_id=room.space_id,
            tool_name=name,
            args=args,
            execution_type="space",
            execution_target="client",
            visible=True,
            exposure="full",
            status="waiting",
            node_id=self.ledger.node_id,
            expires_at=now + round(timeout * 1000),  # Nobody wants the answer once the question's call is over.
            wait_until=now + round(timeout * 1000),
        )
        result = await self._hand_out(room, new, timeout, needs_worker=False, context=context, late=False)
        if result.ok:
            return result.result
        if result.error_kind == "timeout":
            raise ToolTimeoutError(result.error or "nobody answered in time")
        raise ToolExecutionError(result.error or "nobody answered")

    async def _hand_out(
        self,
        room: GatewayCallHost,
        new: NewCall,
        seconds: float,
        *,
        needs_worker: bool,
        context: ToolContext,
        late: bool = True,
    ) -> ToolResult:
        call_id = new.call_id
        waiting = await self._begin(room, new, needs_worker=needs_worker, context=context, late=late)
        del new  # Thousands may wait: what is in the row need not be kept here, too.
        if waiting is None:
            return _pending(call_id)
        self._waiting[call_id] = waiting
        if self._stopping:
            waiting.stop(_STOPPING)
        if seconds < _ENDLESS_SECONDS:
            self._deadlines.add(waiting, seconds)
        try:
            call = await waiting.outcome()
        except asyncio.CancelledError:
            # Whoever waited is gone. Was the call itself canceled? Else the answer goes to the inbox.
            self._own(self._give_up(call_id, canceled=_is_canceled(context), late=late))
            raise
        finally:
            self._waiting.pop(call_id, None)
            waiting.close()
            self._deadlines.note_closed()
            self._note_idle()
        if isinstance(call, CallRecord):
            room.deliver_inline(call_id)
            return result_of(call)
        # Parked by others, because they took this process for dead: as if it were stopping.
        later = call is _STOPPING or call is _PARKED
        try:
            return await self._stop_waiting(room, call_id, seconds, stopping=later, late=late)
        except (asyncio.CancelledError, StorageError):
            # The answer may have come just before: then it was this caller's, and now it is nobody's.
            self._own(self._give_up(call_id, canceled=_is_canceled(context), late=late))
            raise

    async def _begin(
        self, room: GatewayCallHost, new: NewCall, *, needs_worker: bool, context: ToolContext, late: bool
    ) -> _Waiting | None:
        """Writes a call down. Gives whoever waits for it; None where nobody does."""
        waiting = _Waiting(self.ledger, new.call_id) if new.status == "waiting" else None
        beginning = self._own(self.ledger.commit(call_transactions.start, new, needs_worker=needs_worker))
        beginning.add_done_callback(_heed)
        try:
            begun = await asyncio.shield(beginning)
        except BaseException as error:
            if waiting is not None:
                waiting.close()
                if not isinstance(error, RefusedError):
                    self._own(self._abandon(new.call_id, beginning, canceled=_is_canceled(context), late=late))
            raise
        room.note_opened(new.call_id)
        if not begun.is_new:
            room.duplicate_call_id = new.call_id
            if waiting is not None:
                waiting.close()
            raise RefusedError("conflict", f'there is a call "{new.call_id}" already; give each call an id of its own')
        if new.due_at is not None:
            self.on_timer_started()
        return waiting

    async def _stop_waiting(
        self, room: GatewayCallHost, call_id: str, seconds: float, *, stopping: bool, late: bool
    ) -> ToolResult:
        """The time is over. Where the answer came in the same moment, it is taken all the same."""
        if not late:
            end = self.ledger.commit(
                call_transactions.end_call, call_id, "canceled", "nobody answered in time", notify_agent=False
            )
            ended = await self._finish(end)
            if ended is None and (call := await self.ledger.read(rows.find, call_id)) is not None:
                room.deliver_inline(call_id)
                return result_of(call)
            return ToolResult(
                False, error=f"nobody answered within {format_milliseconds(seconds)}ms", error_kind="timeout"
            )
        try:
            call, mine = await self._finish(self.ledger.commit(call_transactions.make_pending, call_id))
        except StorageError as error:
            _log.warning("call %s is parked when the database is back: %s", call_id, error)
            self._own(self._give_up(call_id, canceled=False))
        else:
            if mine:
                room.deliver_inline(call_id)
                return result_of(call)
        if stopping:
            return _pending(call_id)
        return ToolResult(
            ok=False,
            error=f"Tool timed out after {format_milliseconds(round(seconds, 3))}ms",
            error_kind="timeout",
            executed=True,
            extras={"status": "pending", PENDING_CALL_KEY: call_id},
        )

    async def wait_for_result(self, call_id: str, seconds: float) -> CallRecord:
        """Waits for a call that was begun before, by whomever. As it is then; open, if the time was too short."""
        waiting = _Waiting(self.ledger, call_id)
        self._deadlines.add(waiting, seconds)
        self._attending.add(waiting)
        try:
            waiting.look()
            if self._stopping:
                waiting.stop(_STOPPING)
            await waiting.outcome()
        finally:
            self._attending.discard(waiting)
            waiting.close()
            self._deadlines.note_closed()
        call = await self.ledger.read(rows.find, call_id)
        if call is None:
            raise RefusedError("not_found", f'there is no call "{call_id}"')
        return call

    async def cancel(self, call_id: str, reason: str = "the call was canceled") -> CallRecord:
        """Ends an open call, wherever it is waited for, and stops one that runs, wherever it runs."""
        return await self.ledger.commit(call_transactions.cancel, call_id, reason)

    async def submit(self, submission: Submission) -> CallRecord:
        """Takes a result in that someone brings, once."""
        known = self.ledger.open_calls.get(submission.call_id)
        if known is not None and (resolved := call_transactions.resolve_from_memory(known, submission)) is not None:
            del self.ledger.open_calls[submission.call_id]  # Whatever comes next for it looks at the row.
            effects, call = resolved
            if await self.ledger.commit_deferred(effects):
                return call
        return await self.ledger.commit(call_transactions.submit, submission)

    # Delivery

    def mark_delivered(self, call_ids: Sequence[str]) -> None:
        """The answers are in the callers' hands. Written down soon; nobody waits for it."""
        if call_ids:
            self._to_confirm += call_ids
            if self._confirming is None:
                self._confirming = self._own(self._confirm())

    def mark_undelivered(self, call_ids: Sequence[str]) -> None:
        """The callers went away before the answers reached them: those go to the inbox."""
        for call_id in call_ids:
            self._own(self._insist(call_transactions.redirect_to_inbox, call_id))

    async def _confirm(self) -> None:
        try:
            while self._to_confirm:
                confirmed, self._to_confirm = self._to_confirm, []
                try:
                    await self.ledger.write(rows.mark_delivered, confirmed)
                except StorageError as error:
                    _log.warning("that answers arrived could not be written down: %s", error)
                    if self._stopping:
                        return
                    # Else they would come to the inbox too, should this process be killed one day.
                    self._to_confirm += confirmed
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        finally:
            self._confirming = None

    # The end

    async def drain(self) -> None:
        """Parks what waits: its callers are told that it is pending. New calls are pending from the start."""
        self._stopping = True
        for waiting in (*self._waiting.values(), *self._attending):
            waiting.stop(_STOPPING)
        self._note_idle()
        await self._idle.wait()

    def _note_idle(self) -> None:
        if self._stopping and not self._waiting:
            self._idle.set()

    async def aclose(self) -> None:
        """Waits for what is being written; calls may still be answered after that."""
        self._stopping = True
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    async def _give_up(self, call_id: str, *, canceled: bool, late: bool = True) -> None:
        """Nobody waits for a call any more. `late`: an answer is wanted all the same, unless the call was canceled."""
        if canceled or not late:
            await self._insist(
                call_transactions.end_call, call_id, "canceled", "the call was canceled", notify_agent=False
            )
        else:
            await self._insist(call_transactions.make_pending, call_id)
        # Where the answer was on its way to who went away.
        if late:
            await self._insist(call_transactions.redirect_to_inbox, call_id)
        else:
            self.mark_delivered((call_id,))

    async def _abandon(
        self, call_id: str, beginning: asyncio.Task[call_transactions.StartedCall], *, canceled: bool, late: bool
    ) -> None:
        """Nobody waits for a call that may have been written down as waited for."""
        try:
            begun = await beginning
        except RefusedError:
            return
        except StorageError:  # Who knows.
            await self._give_up(call_id, canceled=canceled, late=late)
        else:
            if begun.is_new:
                await self._give_up(call_id, canceled=canceled, late=late)

    async def _insist(self, program: Any, *args: Any, **kwargs: Any) -> None:
        """Gets a write done, also if the database is away for a while."""
        delay = 0.1
        while True:
            try:
                await self.ledger.commit(program, *args, **kwargs)
                return
            except RefusedError:
                return
            except StorageError as error:
                if self._stopping:
                    _log.warning("left for the next start: %s", error)
                    return
                await asyncio.sleep(delay)
                delay = min(delay * 2, 5.0)

    async def _finish(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Waits for a write that must not be cut off by a caller who goes away."""
        writing = self._own(work)
        writing.add_done_callback(_heed)
        return await asyncio.shield(writing)

    def _own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Waiting:
    """One caller who waits for one call."""

    __slots__ = ("_key", "_ledger", "_why", "call_id", "closed", "future")

    def __init__(self, ledger: Ledger, call_id: str) -> None:
        self._ledger = ledger
        self._key = f"call:{call_id}"
        self.call_id = call_id
        # Registered before the row is there: an answer cannot come in between.
        self.future = ledger.waiters.register(self._key)
        self.closed = False
        self._why: object = None
        """Why to stop waiting. Kept: whoever waits may have been woken for something else just now."""

    def expire(self) -> None:
        """The time is up."""
        self.stop(_TIMED_OUT)

    def stop(self, why: object) -> None:
        self._why = self._why or why
        if not self.future.done():
            self.future.set_result(why)

    def look(self) -> None:
        """Looks at the row now: it may have ended before anyone waited."""
        if not self.future.done():
            self.future.set_result(None)

    async def outcome(self) -> CallRecord | object:
        """The call once it has ended for its caller, or why waiting ended before."""
        while True:
            value = await self.future
            if isinstance(value, CallRecord):
                return value if value.status not in OPEN_CALL else _PARKED
            if value is not None:
                return value
            # Something happened elsewhere. Registered again before looking: nothing may fall in between.
            self._ledger.waiters.unregister(self._key, self.future)
            self.future = self._ledger.waiters.register(self._key)
            try:
                found = await self._ledger.read(rows.find_for_caller, self.call_id)
            except StorageError as error:
                _log.warning("call %s: %s", self.call_id, error)
                asyncio.get_running_loop().call_later(_LOOK_AGAIN_SECONDS, self.look)
            else:
                if found is None:
                    return _TIMED_OUT
                call, is_inboxs = found
                if is_inboxs:
                    return _PARKED
                if call.status not in ("waiting", "running"):
                    return call
            if self._why is not None:
                return self._why

    def close(self) -> None:
        self.closed = True
        self._ledger.waiters.unregister(self._key, self.future)


def result_of(call: CallRecord) -> ToolResult:
    """What a caller gets of a call that has ended."""
    if not call.is_error:
        return ToolResult(True, call.result)
    text = call.result if isinstance(call.result, str) else None
    if call.status == "canceled":
        raise ToolCanceledError(text or "the call was canceled", executed=True)
    kind: ErrorKind = "timeout" if call.status == "expired" else "execution_error"
    extras: dict[str, Any] = {} if text is not None else {"result": call.result}
    return ToolResult(False, error=text or json_text.describe(call.result, 500), error_kind=kind, extras=extras)


def _is_canceled(context: ToolContext) -> bool:
    """Whether a call was canceled, or one that it is part of; not just whoever waited for it."""
    return context.canceled or any(call.cancel_requested for call in call_chain())


def _heed(task: asyncio.Task[Any]) -> None:
    """A fault is for whoever waits; where they went away, for nobody."""
    if not task.cancelled():
        task.exception()


def _nothing() -> None: ...


def _pending(call_id: str) -> ToolResult:
    answer = {"status": "pending", PENDING_CALL_KEY: call_id}
    return ToolResult(True, answer, extras={PENDING_CALL_KEY: call_id})


def _due(tool: Tool, parameters: Mapping[str, Any], now: int) -> int | None:
    if tool.execution_type != "wait":
        return None
    wanted = (tool.execution or {}).get("duration", parameters.get("duration"))
    if wanted is None:
        raise ToolExecutionError(f'tool "{tool.name}" waits for a duration, and none is given')
    try:
        return now + round(parse_duration(wanted) * 1000)
    except ValueError as error:
        raise ToolExecutionError(f'tool "{tool.name}" cannot wait: {error}') from None
