"""Ends calls by time: timers of `wait` tools, and calls that expire. Their results and failures pass the hooks.

The sweeper owns it. Hooks run in tasks of their own, so that a slow one does not delay other calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from toolspace.core.result import ToolResult
from toolspace.core.stored_records import CallRecord
from toolspace.errors import StorageError
from toolspace.orchestrator.call import cancel_all, start_in_background
from toolspace.spaces import call_transactions
from toolspace.spaces.due_work import BATCH, LONGEST_SLEEP, complete_all, seconds_until
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.submission_hooks import SubmissionHooks, to_stored_result
from toolspace.storage.database import Program
from toolspace.storage.queries import calls
from toolspace.storage.queries import workers_and_presence as presence

_log = logging.getLogger("toolspace.sweeper")

_OVERDUE_MS: Final = 5_000
"""If a caller still waits so long after its timeout, the sweeper makes its call pending."""
_HOOK_SLEEP: Final = 0.05
"""The shortest pause in seconds while calls that are due wait for their hooks, here or in another process."""
_EXPIRED: Final = "nobody answered before the call expired"
EndProgram = Callable[[Effects, str, ToolResult], Program[CallRecord | None]]
"""Ends a call with an outcome. None if the call was not open any more."""


class DueCalls:
    """The calls of a database that end by time. Several processes may try to end the same one; one of them does."""

    def __init__(self, ledger: Ledger) -> None:
        self.hooks: SubmissionHooks | None = None
        self.on_end: Callable[[], None] = lambda: None
        """Called after a call whose hooks have run."""
        self._ledger = ledger
        self._transactions = ledger.urgent_access
        self._ids_with_hooks: set[str] = set()
        """The calls whose hooks run in this process."""
        self._hook_tasks: set[asyncio.Task[None]] = set()
        self._waits_for_hooks = False
        """Whether a call of the last round is due, and waits for its hooks."""

    async def end_all(self) -> float:
        """Ends timers and expired calls; lets nobody wait beyond its time-out. Returns the seconds to the next."""
        self._waits_for_hooks = False
        transactions = self._transactions
        due_calls = await transactions.read(calls.list_due, limit=BATCH)
        are_resolved = await complete_all(
            self._end(call, ToolResult(True, {"waited": transactions.now_ms() - call.created_at}), _resolve_timer)
            for call in due_calls
        )
        expired_calls = await transactions.read(calls.list_expired, limit=BATCH)
        are_expired = await complete_all(self._end(call, _expired_outcome(call), _expire) for call in expired_calls)
        overdue_ids = await transactions.read(
            calls.list_overdue, before=transactions.now_ms() - _OVERDUE_MS, limit=BATCH
        )
        are_pending = await complete_all(
            transactions.commit(call_transactions.make_pending, call_id) for call_id in overdue_ids
        )
        if not (are_resolved and are_expired and are_pending):
            return LONGEST_SLEEP
        seconds = seconds_until(transactions, await transactions.read(calls.find_next_due))
        return max(seconds, _HOOK_SLEEP) if self._waits_for_hooks else seconds

    async def aclose(self) -> None:
        """Stops the hooks that run. The next start, or another process, finds their calls again."""
        await cancel_all(self._hook_tasks)

    async def _end(self, call: CallRecord, outcome: ToolResult, program: EndProgram) -> None:
        """Ends a call at once, or after its hooks."""
        hooks = self.hooks
        if hooks is None or not hooks.has_hooks(call, is_error=not outcome.ok):
            await self._transactions.commit(program, call.call_id, outcome)
            return
        self._waits_for_hooks = True
        if call.call_id in self._ids_with_hooks or len(self._ids_with_hooks) >= BATCH:
            return
        if self._ledger.database.is_shared:
            _, node_id = await self._transactions.read(calls.find_origin, call.call_id)
            if node_id in await self._transactions.read(presence.list_heartbeats, except_node=self._ledger.node_id):
                return  # That process is alive, and runs the hooks: they see each result once.
        self._ids_with_hooks.add(call.call_id)
        start_in_background(self._hook_tasks, self._end_after_hooks(hooks, call, outcome, program))

    async def _end_after_hooks(
        self, hooks: SubmissionHooks, call: CallRecord, outcome: ToolResult, program: EndProgram
    ) -> None:
        try:
            new_outcome = await hooks.process_outcome(call, outcome)
            await complete_all([self._transactions.commit(program, call.call_id, new_outcome)])
        except StorageError as error:
            _log.warning("call %s: ending it failed; the next round tries again: %s", call.call_id, error)
        finally:
            self._ids_with_hooks.discard(call.call_id)
            self.on_end()


def _expired_outcome(call: CallRecord) -> ToolResult:
    is_approval = call.execution_type == call_transactions.APPROVAL
    return ToolResult(False, error=_EXPIRED, error_kind="not_permitted" if is_approval else "timeout")


def _resolve_timer(effects: Effects, call_id: str, outcome: ToolResult) -> Program[CallRecord | None]:
    return call_transactions.resolve_by_server(
        effects, call_id, to_stored_result(outcome), is_error=not outcome.ok, error_kind=outcome.error_kind
    )


def _expire(effects: Effects, call_id: str, outcome: ToolResult) -> Program[CallRecord | None]:
    return call_transactions.end_call(effects, call_id, "expired", _EXPIRED, outcome=outcome)
