"""Pending calls: someone else submits their result (a worker, a person, a timer).

`PendingCalls` stores such a call, waits for the result as long as the caller may, and makes sure that a result which
comes later, or does not reach the caller, goes to the agent's inbox. Used by `call_context` and `server/`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from toolspace.core import json_text
from toolspace.core.defaults import TOOL_TIMEOUT_SECONDS
from toolspace.core.ids import new_id
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.core.stored_records import OPEN_CALL, CallRecord
from toolspace.core.times import format_milliseconds
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import (
    RefusedError,
    StorageError,
    ToolExecutionError,
    ToolTimeoutError,
    ToolValidationError,
)
from toolspace.orchestrator.call import call_chain
from toolspace.spaces import call_transactions
from toolspace.spaces.call_context import AgentServices, GatewayCallHost, result_of, timer_seconds
from toolspace.spaces.call_transactions import StartedCall, Submission, redirect_to_inbox
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.open_call_limit import OpenCallLimit
from toolspace.spaces.submission_hooks import SubmissionHooks
from toolspace.storage.database import Program
from toolspace.storage.queries import call_delivery, calls
from toolspace.storage.queries.calls import NewCall
from toolspace.storage.queries.workers_and_presence import is_any_served
from toolspace.storage.streams.waiters import DeadlineTimer

if TYPE_CHECKING:
    from toolspace.spaces.approvals import GatewayApprovals

_log = logging.getLogger("toolspace.calls")
StartProgram = Callable[[Effects, NewCall], Program[StartedCall]]
"""Stores a call before anything is done for it."""

DEFAULT_TTL_SECONDS: Final = 7 * 24 * 3600.0
_TIMED_OUT, _STOPPING, _MADE_PENDING = object(), object(), object()
"""Why a caller stopped waiting without a result."""
_NO_TIMEOUT_SECONDS: Final = 365 * 86_400.0
"""Longer timeouts get no timer."""
_RETRY_SECONDS: Final = 1.0
"""The pause before a call is read again after the database did not answer."""


class PendingCalls:
    """Opens pending calls, waits for their results, and takes submissions. One for each process."""

    def __init__(
        self, ledger: Ledger, *, ttl: float = DEFAULT_TTL_SECONDS, max_per_principal: int | None = None
    ) -> None:
        self.ledger = ledger
        self._open_call_limit = OpenCallLimit(ledger, max_per_principal)
        self.ttl = ttl
        """Seconds until a call expires, unless its tool says otherwise."""
        self.services = AgentServices()
        self.approvals: GatewayApprovals | None = None
        """Asks for approval of calls. None: nobody can be asked."""
        self.hooks: SubmissionHooks | None = None
        self.on_timer_started: Callable[[], object] = lambda: None
        """Called when a call of a `wait` tool was opened."""
        self._waiters: dict[str, _Waiter] = {}
        self._deadlines = DeadlineTimer()
        self._other_waiters: set[_Waiter] = set()
        """Those of `wait_for_result`."""
        self._idle = asyncio.Event()
        """Set while nobody waits, once it is stopping."""
        self._background: set[asyncio.Task[Any]] = set()
        self._unconfirmed_ids: list[str] = []
        self._confirmation_task: asyncio.Task[Any] | None = None
        self._is_stopping = False

    @property
    def waiting_count(self) -> int:
        """How many callers wait in this process."""
        return len(self._waiters)

    def execute(
        self, host: GatewayCallHost, tool: Tool, parameters: Mapping[str, Any], context: ToolContext
    ) -> Coroutine[Any, Any, ToolResult]:
        """Opens a call and waits for its result. The result may also say that the call is pending or timed out."""
        if json_text.is_too_deep(parameters):
            raise ToolValidationError(
                f"the arguments have more than {json_text.MAX_STORED_DEPTH} levels; leave some out"
            )
        seconds = context.handle.allowed_seconds if context.handle is not None else TOOL_TIMEOUT_SECONDS
        is_pending = tool.is_async or tool.pauses_run or self._is_stopping
        now = self.ledger.now_ms()
        timer = timer_seconds(tool, parameters)
        ttl = tool.expires_after if tool.expires_after is not None else self.ttl
        new = host.new_call(
            tool,
            context.call_id or new_id("call"),
            parameters,
            visibility="full" if tool.visible else "none",
            status="pending" if is_pending else "waiting",
            created_at=now,
            expires_at=now + round(ttl * 1000),
            wait_until=None if is_pending else now + round(seconds * 1000),
            due_at=None if timer is None else now + round(timer * 1000),
            pauses_run=tool.pauses_run,
            principal=context.user_id,
        )
        needs_worker = tool.execution_type == "external" and tool.when_unserved == "fail" and not is_pending
        start = partial(call_transactions.start, needs_worker=needs_worker)
        return self._open_and_wait(_Caller(host, context), new, seconds, start=start)

    async def ask_members(
        self, host: GatewayCallHost, name: str, args: Mapping[str, Any], context: ToolContext, *, timeout: float
    ) -> Any:
        """Asks the members of the host's space with a visible call of its own, and returns their answer."""
        if host.space_id is None:
            raise ToolExecutionError("nobody can be asked: the call is in no space")
        timeout = min(timeout, self.ttl)
        now = self.ledger.now_ms()
        new = NewCall(
            call_id=new_id("call"),
            run_id=host.run_id,
            agent_entity_id=host.agent_entity_id,
            space_id=host.space_id,
            session_id=host.session_id,
            tool_name=name,
            args=args,
            execution_type="space",
            execution_target="client",
            visible=True,
            visibility="full",
            status="waiting",
            node_id=self.ledger.node_id,
            expires_at=now + round(timeout * 1000),  # A late answer is of no use to the call that asked.
            wait_until=now + round(timeout * 1000),
        )
        caller = _Caller(host, context, accepts_late_result=False)
        result = await self._open_and_wait(caller, new, timeout)
        if result.ok:
            return result.result
        if result.error_kind == "timeout":
            raise ToolTimeoutError(result.error or f"nobody answered within {format_milliseconds(timeout)}ms")
        raise ToolExecutionError(result.error or "nobody answered")

    async def open_approval(
        self, host: GatewayCallHost, new: NewCall, context: ToolContext, seconds: float, *, start: StartProgram
    ) -> ToolResult:
        """Stores a call that needs approval with `start`, and waits for its result if its status is `waiting`."""
        return await self._open_and_wait(_Caller(host, context, is_approval=True), new, seconds, start=start)

    async def _open_and_wait(
        self, caller: _Caller, new: NewCall, seconds: float, *, start: StartProgram = call_transactions.start
    ) -> ToolResult:
        call_id = new.call_id
        open_call = partial(self._open, caller, new, start)
        waiter = await self._open_call_limit.open(caller.context.limited_principal, open_call)
        del new, start, open_call  # Thousands may wait: what is in the row need not be in memory, too.
        if waiter is None:
            return _pending_result(call_id)
        self._waiters[call_id] = waiter
        if self._is_stopping:
            waiter.stop(_STOPPING)
        if seconds < _NO_TIMEOUT_SECONDS:
            self._deadlines.add(waiter, seconds)
        try:
            outcome = await waiter.wait()
        except asyncio.CancelledError:
            self._give_up_later(caller, call_id)
            raise
        finally:
            self._waiters.pop(call_id, None)
            waiter.close()
            self._deadlines.note_closed()
            self._check_idle()
        if isinstance(outcome, CallRecord):
            return caller.deliver(outcome)
        # Other processes make a call pending if they declare this one dead. For its caller, this one is stopping.
        is_stopping = outcome is _STOPPING or outcome is _MADE_PENDING
        try:
            return await self._stop_waiting(caller, call_id, seconds, is_stopping=is_stopping)
        except (asyncio.CancelledError, StorageError):
            # The result may have come just before, for this caller.
            self._give_up_later(caller, call_id)
            raise

    async def _open(self, caller: _Caller, new: NewCall, start: StartProgram) -> _Waiter | None:
        """Stores a call. Returns the waiter for its result; None if the call is pending."""
        waiter = _Waiter(self.ledger, new.call_id) if new.status == "waiting" else None
        start_task = self._run_in_background(self.ledger.commit(start, new))
        start_task.add_done_callback(_retrieve_error)
        try:
            started = await asyncio.shield(start_task)
        except BaseException as error:
            if waiter is not None:
                waiter.close()
                if not isinstance(error, RefusedError):
                    self._give_up_later(caller, new.call_id, start_task)
            raise
        caller.host.note_opened(new.call_id)
        if not started.is_new:
            caller.host.duplicate_call_id = new.call_id
            if waiter is not None:
                waiter.close()
            raise RefusedError("conflict", f'there is a call "{new.call_id}" already; give each call an id of its own')
        if new.due_at is not None:
            self.on_timer_started()
        return waiter

    async def _stop_waiting(self, caller: _Caller, call_id: str, seconds: float, *, is_stopping: bool) -> ToolResult:
        """The time is over. A result that came in the same moment is still the caller's."""
        if not caller.accepts_late_result:
            reason = f"nobody answered within {format_milliseconds(seconds)}ms"
            ended_call = await self._finish(
                self.ledger.commit(call_transactions.end_call, call_id, "canceled", reason, notify_agent=False)
            )
            if ended_call is None and (call := await self.ledger.read(calls.find, call_id)) is not None:
                return caller.deliver(call)
            return ToolResult(False, error=reason, error_kind="timeout")
        reason = f"Tool timed out after {format_milliseconds(round(seconds, 3))}ms"
        try:
            call, has_result = await self._finish(self.ledger.commit(call_transactions.make_pending, call_id))
            if not has_result and not is_stopping and not await self._is_served(call):
                reason += "; no worker serves it"
        except StorageError as error:
            _log.warning("call %s: timed out, but the database does not answer; retrying: %s", call_id, error)
            self._run_in_background(self._give_up(call_id, is_cancelled=False, accepts_late_result=True))
        else:
            if has_result:
                return caller.deliver(call)
        if is_stopping or caller.is_approval:
            return _pending_result(call_id)
        return ToolResult(
            ok=False,
            error=reason,
            error_kind="timeout",
            executed=True,
            extras={"status": "pending", PENDING_CALL_KEY: call_id},
        )

    async def _is_served(self, call: CallRecord) -> bool:
        if call.execution_type != "external":
            return True
        return await self.ledger.read(is_any_served, call_transactions.list_submitter_topics(call))

    async def wait_for_result(self, call_id: str, seconds: float) -> CallRecord:
        """Waits for the end of a call, whoever opened it. Returns the call, still open if the time was too short."""
        waiter = _Waiter(self.ledger, call_id)
        self._deadlines.add(waiter, seconds)
        self._other_waiters.add(waiter)
        try:
            waiter.read_row()
            if self._is_stopping:
                waiter.stop(_STOPPING)
            await waiter.wait()
        finally:
            self._other_waiters.discard(waiter)
            waiter.close()
            self._deadlines.note_closed()
        call = await self.ledger.read(calls.find, call_id)
        if call is None:
            raise RefusedError("not_found", f'there is no call "{call_id}"')
        return call

    async def cancel(self, call_id: str, reason: str = "the call was canceled") -> CallRecord:
        """Cancels an open call, and stops a running one, in whatever process."""
        return await self.ledger.commit(call_transactions.cancel, call_id, reason)

    async def submit(self, submission: Submission) -> CallRecord:
        """Resolves a call with a submitted result, once. What is stored is what the hooks return."""
        if self.hooks is not None:
            submission = await self.hooks.process(submission)
        open_call = self.ledger.open_calls.get(submission.call_id)
        if open_call is not None:
            resolution = call_transactions.resolve_from_memory(open_call, submission, now=self.ledger.now_ms())
            if resolution is not None:
                del self.ledger.open_calls[submission.call_id]  # The next submission reads the row.
                effects, call = resolution
                if await self.ledger.commit_deferred(effects):
                    return call
        return await self.ledger.commit(call_transactions.submit, submission)

    # Delivery

    def mark_delivered(self, call_ids: Sequence[str]) -> None:
        """The callers have the results. Stored soon; nobody waits for it."""
        if call_ids:
            self._unconfirmed_ids += call_ids
            if self._confirmation_task is None:
                self._confirmation_task = self._run_in_background(self._confirm_deliveries())

    def mark_undelivered(self, call_ids: Sequence[str], *, may_be_known: bool = False) -> None:
        """The callers were gone before they got the results, or all of them: those go to the inbox."""
        for call_id in call_ids:
            work = self._commit_with_retries(redirect_to_inbox, call_id, may_be_known=may_be_known)
            self._run_in_background(work)

    async def _confirm_deliveries(self) -> None:
        try:
            while self._unconfirmed_ids:
                call_ids, self._unconfirmed_ids = self._unconfirmed_ids, []
                try:
                    await self.ledger.write(call_delivery.mark_delivered, call_ids)
                except StorageError as error:
                    _log.warning("delivery of %d results could not be stored: %s", len(call_ids), error)
                    if self._is_stopping:
                        return
                    # Otherwise these results would also go to the inbox, if this process were killed later.
                    self._unconfirmed_ids += call_ids
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._confirmation_task = None

    # Stopping

    async def drain(self) -> None:
        """Makes the waiting calls pending, and tells their callers so. New calls are pending from the start."""
        self._is_stopping = True
        for waiter in (*self._waiters.values(), *self._other_waiters):
            waiter.stop(_STOPPING)
        self._check_idle()
        await self._idle.wait()

    def _check_idle(self) -> None:
        if self._is_stopping and not self._waiters:
            self._idle.set()

    async def aclose(self) -> None:
        """Waits for writes in progress. Results may still be submitted after that."""
        self._is_stopping = True
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    # Callers that stop waiting

    def _give_up_later(
        self, caller: _Caller, call_id: str, start_task: asyncio.Task[StartedCall] | None = None
    ) -> None:
        """Nobody waits for a call any more. Its result goes to the inbox, unless the call itself was cancelled.

        `start_task`: the caller was gone before it was known whether the call is stored.
        """
        work = self._give_up(call_id, caller.is_cancelled(), caller.accepts_late_result, start_task)
        self._run_in_background(work)

    async def _give_up(
        self,
        call_id: str,
        is_cancelled: bool,
        accepts_late_result: bool,
        start_task: asyncio.Task[StartedCall] | None = None,
    ) -> None:
        if start_task is not None:
            try:
                if not (await start_task).is_new:
                    return
            except RefusedError:
                return
            except StorageError:
                pass  # It may be stored.
        if is_cancelled or not accepts_late_result:
            await self._commit_with_retries(
                call_transactions.end_call, call_id, "canceled", "the call was canceled", notify_agent=False
            )
        else:
            await self._commit_with_retries(call_transactions.make_pending, call_id)
        # The result may have come before that, for the caller that is gone.
        if accepts_late_result:
            await self._commit_with_retries(redirect_to_inbox, call_id)
        else:
            self.mark_delivered((call_id,))

    async def _commit_with_retries(self, program: Any, *args: Any, **kwargs: Any) -> None:
        """Commits a program, even if the database does not answer for a while."""
        delay = 0.1
        while True:
            try:
                await self.ledger.commit(program, *args, **kwargs)
                return
            except RefusedError:
                return
            except StorageError as error:
                if self._is_stopping:
                    _log.warning("stopping with a call that is not up to date; the next start corrects it: %s", error)
                    return
                await asyncio.sleep(delay)
                delay = min(delay * 2, 5.0)

    async def _finish(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a write to its end, even if the caller is cancelled."""
        task = self._run_in_background(work)
        task.add_done_callback(_retrieve_error)
        return await asyncio.shield(task)

    def _run_in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Caller(NamedTuple):
    """Who waits for a pending call."""

    host: GatewayCallHost
    context: ToolContext
    accepts_late_result: bool = True
    """Whether a result that comes after the timeout goes to the inbox."""
    is_approval: bool = False
    """Whether the call waits for approval: after the timeout it is pending, which is no failure."""

    def deliver(self, call: CallRecord) -> ToolResult:
        """The result of a call that has ended, which goes back with the response."""
        self.host.deliver_inline(call.call_id)
        handle = self.context.handle
        if call.status in ("resolved", "expired") and handle is not None and handle.id == call.call_id:
            handle.has_final_result = True  # The hooks have seen it before it was stored.
        return result_of(call)

    def is_cancelled(self) -> bool:
        """Whether the call, or a call around it, was cancelled; not only the task that waited for it."""
        return self.context.canceled or any(call.cancel_requested for call in call_chain())


class _Waiter:
    """One caller that waits for one call."""

    __slots__ = ("_key", "_ledger", "_stop_reason", "call_id", "closed", "future")

    def __init__(self, ledger: Ledger, call_id: str) -> None:
        self._ledger = ledger
        self._key = f"call:{call_id}"
        self.call_id = call_id
        # Registered before the row exists, so that no result is missed.
        self.future = ledger.waiters.register(self._key)
        self.closed = False
        self._stop_reason: object = None
        """Stored, because the waiter may have been woken for another reason just before."""

    def expire(self) -> None:
        self.stop(_TIMED_OUT)

    def stop(self, reason: object) -> None:
        self._stop_reason = self._stop_reason or reason
        if not self.future.done():
            self.future.set_result(reason)

    def read_row(self) -> None:
        """Reads the row now: the call may have ended before anyone waited."""
        if not self.future.done():
            self.future.set_result(None)

    async def wait(self) -> CallRecord | object:
        """The call, once it has ended for its caller; or the reason to stop waiting."""
        while True:
            value = await self.future
            if isinstance(value, CallRecord):
                return value if value.status not in OPEN_CALL else _MADE_PENDING
            if value is not None:
                return value
            # Another process changed the call. Registered again before the read, so that no result is missed.
            self._ledger.waiters.unregister(self._key, self.future)
            self.future = self._ledger.waiters.register(self._key)
            try:
                row = await self._ledger.read(calls.find_for_caller, self.call_id)
            except StorageError as error:
                _log.warning("call %s: reading it failed, retrying in %s s: %s", self.call_id, _RETRY_SECONDS, error)
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, self.read_row)
            else:
                if row is None:
                    return _TIMED_OUT
                call, goes_to_inbox = row
                if goes_to_inbox:
                    return _MADE_PENDING
                if call.status not in ("waiting", "running"):
                    return call
            if self._stop_reason is not None:
                return self._stop_reason

    def close(self) -> None:
        self.closed = True
        self._ledger.waiters.unregister(self._key, self.future)


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Marks the error as retrieved, in case its caller was cancelled."""
    if not task.cancelled():
        task.exception()


def _pending_result(call_id: str) -> ToolResult:
    return ToolResult(True, {"status": "pending", PENDING_CALL_KEY: call_id}, extras={PENDING_CALL_KEY: call_id})
