"""Masks secrets in results that come after the call, and runs the hooks for them, before they are stored and delivered.

Workers and people submit such results; timers, expiry and denied approvals make others. `PendingCalls`, the sweeper and
the approvals use it; the gateway creates it. The stages of the orchestrator handle all other results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.hooks import HookCall
from toolspace.core.result import ToolResult
from toolspace.core.result_masking import mask_reference_secrets_in_data
from toolspace.core.stored_records import CallRecord
from toolspace.core.tool import Tool
from toolspace.core.tool_context import LOCAL_PRINCIPAL
from toolspace.errors import RefusedError
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.effective_settings import ToolSpellings
from toolspace.orchestrator.pipeline import CallServices
from toolspace.orchestrator.stages.hooks import ToolHooks
from toolspace.spaces import call_transactions
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import calls

FindEntry = Callable[[str, str | None], CatalogEntry | None]
"""Returns the tool of a name that the agent with this entity id calls; None if there is none any more."""


class SubmissionHooks:
    """The hooks of one gateway, for results that come after the call."""

    def __init__(self, services: CallServices, ledger: Ledger, find_entry: FindEntry) -> None:
        self._services = services
        self._ledger = ledger
        self._find_entry = find_entry

    async def process(self, submission: Submission) -> Submission:
        """Returns the submission with the result that the hooks decide. Raises `RefusedError` as `submit` does."""
        if self._services.masks_secrets:
            submission = _mask(submission)
        if not self._services.hooks.hooks:
            return submission
        call = await self._ledger.read(call_transactions.find_open_call, submission)
        if call is None:
            return submission  # It has its result: nothing new is stored.
        outcome = _to_outcome(submission)
        new_outcome = await self.process_outcome(call, outcome)
        return submission if new_outcome is outcome else _replace_outcome(submission, new_outcome)

    def has_hooks(self, call: CallRecord, *, is_error: bool) -> bool:
        """Whether hooks see the result or the failure of a call."""
        if not self._services.hooks.hooks:
            return False
        hooks, _ = self._select(call)
        return bool(hooks.error if is_error else hooks.after)

    async def process_outcome(self, call: CallRecord, outcome: ToolResult) -> ToolResult:
        """Returns what the hooks make of the outcome of a call: the same object if they change nothing."""
        hooks, entry = self._select(call)
        if not (hooks.after if outcome.ok else hooks.error):
            return outcome
        principal, _ = await self._ledger.read(calls.find_origin, call.call_id)
        hook_call = HookCall(
            on="after",
            tool=entry.tool if entry is not None else Tool(call.tool_name),
            arguments=json_text.parse_arguments(call.args),
            principal=principal or LOCAL_PRINCIPAL,
            call_id=call.call_id,
            run_id=call.run_id,
            agent_entity_id=call.agent_entity_id,
            space_id=call.space_id,
        )
        return await self._services.hooks.process_outcome(hooks, hook_call, outcome)

    def _select(self, call: CallRecord) -> tuple[ToolHooks, CatalogEntry | None]:
        entry = self._find_entry(call.tool_name, call.agent_entity_id)
        # A tool that was removed meanwhile still has its name.
        spellings = entry.spellings if entry is not None else ToolSpellings((call.tool_name,), (call.tool_name,))
        return self._services.hooks.select(spellings), entry


def to_stored_result(outcome: ToolResult) -> Any:
    """Returns the result or the error as the row of a call has it."""
    return json_text.to_json_data(outcome.result) if outcome.ok else outcome.extras.get("result", outcome.error)


def _mask(submission: Submission) -> Submission:
    try:
        result = mask_reference_secrets_in_data(submission.result)
    except ValueError as error:
        raise RefusedError("unprocessable", f"{error}, so its secrets cannot be masked") from None
    return submission if result is submission.result else msgspec.structs.replace(submission, result=result)


def _to_outcome(submission: Submission) -> ToolResult:
    result = submission.result
    if not submission.is_error:
        return ToolResult(True, result)
    text = result if isinstance(result, str) else json_text.encode(result)
    extras = {} if isinstance(result, str) else {"result": result}
    return ToolResult(False, error=text, error_kind="execution_error", extras=extras)


def _replace_outcome(submission: Submission, outcome: ToolResult) -> Submission:
    error_kind = None if outcome.ok or outcome.error_kind == "execution_error" else outcome.error_kind
    return msgspec.structs.replace(
        submission,
        result=to_stored_result(outcome),
        is_error=not outcome.ok,
        error_kind=error_kind,
        is_checked=True,
    )
