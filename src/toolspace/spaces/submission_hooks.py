"""Runs the hooks for results that someone submits after the call, before they are stored and delivered.

`PendingCalls` uses it; the gateway creates it. The stages of the orchestrator run the hooks of all other results.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from toolspace.core import json_text
from toolspace.core.hooks import HookCall
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.core.tool_context import LOCAL_PRINCIPAL
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.effective_settings import ToolSpellings
from toolspace.orchestrator.stages.hooks import HookRegistry
from toolspace.spaces import call_transactions
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import calls

FindEntry = Callable[[str, str | None], CatalogEntry | None]
"""Returns the tool of a name that the agent with this entity id calls; None if there is none any more."""


class SubmissionHooks:
    """The hooks of one gateway, for submitted results."""

    def __init__(self, registry: HookRegistry, ledger: Ledger, find_entry: FindEntry) -> None:
        self._registry = registry
        self._ledger = ledger
        self._find_entry = find_entry

    async def process(self, submission: Submission) -> Submission:
        """Returns the submission with the result that the hooks decide. Raises `RefusedError` as `submit` does."""
        if not self._registry.hooks:
            return submission
        call = await self._ledger.read(call_transactions.find_open_call, submission)
        if call is None:
            return submission  # It has its result: nothing new is stored.
        entry = self._find_entry(call.tool_name, call.agent_entity_id)
        # A tool that was removed meanwhile still has its name.
        spellings = entry.spellings if entry is not None else ToolSpellings((call.tool_name,), (call.tool_name,))
        hooks = self._registry.select(spellings)
        if not (hooks.error if submission.is_error else hooks.after):
            return submission
        hook_call = HookCall(
            on="after",
            tool=entry.tool if entry is not None else Tool(call.tool_name),
            arguments=json_text.parse_arguments(call.args),
            principal=await self._ledger.read(calls.find_principal, call.call_id) or LOCAL_PRINCIPAL,
            call_id=call.call_id,
            run_id=call.run_id,
            agent_entity_id=call.agent_entity_id,
            space_id=call.space_id,
        )
        outcome = _to_outcome(submission)
        new_outcome = await self._registry.process_outcome(hooks, hook_call, outcome)
        return submission if new_outcome is outcome else _replace_outcome(submission, new_outcome)


def _to_outcome(submission: Submission) -> ToolResult:
    result = submission.result
    if not submission.is_error:
        return ToolResult(True, result)
    text = result if isinstance(result, str) else json_text.encode(result)
    extras = {} if isinstance(result, str) else {"result": result}
    return ToolResult(False, error=text, error_kind="execution_error", extras=extras)


def _replace_outcome(submission: Submission, outcome: ToolResult) -> Submission:
    if outcome.ok:
        result, error_kind = json_text.to_json_data(outcome.result), None
    else:
        result = outcome.extras.get("result", outcome.error)
        error_kind = outcome.error_kind if outcome.error_kind != "execution_error" else None
    return msgspec.structs.replace(
        submission, result=result, is_error=not outcome.ok, error_kind=error_kind, is_checked=True
    )
