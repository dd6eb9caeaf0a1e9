"""Stores the runs of agents that other agents or programs call on the gateway: status, steps, usage and live output.

Their conversations are not stored: an interrupted run is over, and its caller gets an error. The gateway gives
`open_stored_recorder` to the agent registry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from toolspace.agents.agent import entity_id_for, memory_dir_of
from toolspace.agents.agent_run import AgentRun
from toolspace.agents.live_output import LiveOutput
from toolspace.agents.loop_hooks import PlannedCall
from toolspace.agents.registry import FinalRunStatus, RunRecorder
from toolspace.agents.session_transactions import WriteProgram
from toolspace.core import json_text
from toolspace.core.ids import new_id, scope_key_of
from toolspace.core.language_model import ModelListener, Turn, Usage
from toolspace.core.stored_records import ENDED_RUN, RunRecord
from toolspace.core.tool_context import ToolContext
from toolspace.errors import RefusedError, StorageError
from toolspace.orchestrator.call import start_in_background
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.stages.hooks import has_before_hooks
from toolspace.spaces import runs, session_scope
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.spaces.ledger import Effects
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, sessions
from toolspace.storage.queries import runs as run_rows

_log = logging.getLogger("toolspace.agents")
_MAX_ERROR = 10_000
MAX_CLOSE_ATTEMPTS = 6
_FIRST_DELAY = 0.2
"""Seconds before the first retry if the end of a run cannot be stored. The delay doubles after each attempt."""


async def open_stored_recorder(
    pending_calls: PendingCalls, agent_run: AgentRun, caller: ToolContext, context: ToolContext, tools: ToolOrchestrator
) -> RunRecorder:
    """Stores the start of a run, and returns its recorder. With `pending_calls` bound, it is an `OpenRunRecorder`."""
    caller_host = caller.host if isinstance(caller.host, GatewayCallHost) else None
    call_id = caller.call_id
    record = await pending_calls.ledger.commit(
        _open,
        agent_run.name,
        # The id is derived from the call, so that a process that finds the call interrupted also finds the run.
        run_id=runs.subagent_run_id(call_id, len(agent_run.previous_agents)) if call_id else new_id("run"),
        space_id=caller_host.space_id if caller_host is not None else None,
        trigger={
            "type": "agent",
            "parentRunId": caller_host.run_id if caller_host is not None else None,
            "callId": call_id or None,
            "agent": agent_run.parent.name if agent_run.parent is not None else None,
        },
        principal=caller.principal,
        caller_scope_key=scope_key_of(caller_host.session_id or "") if caller_host is not None else "",
    )
    return _StoredRunRecorder(pending_calls, record, agent_run, context, tools)


class _StoredRunRecorder(RunRecorder):
    """Stores the steps and the end of one run, and publishes its live output."""

    def __init__(
        self,
        pending_calls: PendingCalls,
        record: RunRecord,
        agent_run: AgentRun,
        context: ToolContext,
        tools: ToolOrchestrator,
    ) -> None:
        self._call_host = GatewayCallHost(
            pending_calls,
            run_id=record.id,
            agent_entity_id=record.agent_entity_id,
            space_id=record.space_id,
            session_id=record.session_id,
            confirms_delivery=False,
            approval_mode="wait",
        )
        context.run_id, context.agent_entity_id, context.host = record.id, record.agent_entity_id, self._call_host
        if scope_key := scope_key_of(record.session_id or ""):
            context.memory_dir = memory_dir_of(agent_run.agent, tools.context.memory_dir, scope_key)
        super().__init__(run_id=record.id)
        self._run_id = record.id
        self._ledger = pending_calls.ledger
        self._agent_run = agent_run
        self._tools = tools
        self._output: LiveOutput | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self._stop_listening = self._ledger.waiters.listen(f"run:{record.id}", self._on_run_event)

    def new_listener(self) -> ModelListener:
        has_hooks = partial(has_before_hooks, self._tools)
        self._output = LiveOutput(self._call_host, self._tools.find, has_before_hooks=has_hooks)
        return self._output

    def get_call_id(self, index: int) -> str:
        return self._output.call_id(index) if self._output is not None else new_id("call")

    async def save_step(self, turns: Sequence[Turn], calls: Sequence[PlannedCall], step: int) -> None:
        output, self._output = self._output, None
        write_stream = await output.finish({plan.call_id for plan in calls}) if output is not None else None
        usage = json_text.encode_for_storage(msgspec.to_builtins(self._agent_run.budget.usage))
        if not await self._ledger.commit(_record_step, self._run_id, step, usage, write_stream):
            self._stop()

    async def close(self, status: FinalRunStatus, usage: Usage, error: str | None) -> None:
        self._stop_listening()
        if self._output is not None:
            await self._output.abort()
        # Models and providers may send any characters.
        error = json_text.storable_text(error)[:_MAX_ERROR] if error is not None else None
        for attempt in range(MAX_CLOSE_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_FIRST_DELAY * 2 ** (attempt - 1))
            try:
                await self._ledger.commit(_close, self._run_id, status, msgspec.to_builtins(usage), error)
                return
            except RefusedError:
                return  # Someone else has ended the run.
            except StorageError as problem:
                _log.warning("run %s: its end could not be stored: %s", self._run_id, problem)
        _log.error("run %s: its end is not stored after %d attempts", self._run_id, MAX_CLOSE_ATTEMPTS)

    def _on_run_event(self, _: Any) -> None:
        start_in_background(self._checks, self._stop_if_ended())

    async def _stop_if_ended(self) -> None:
        """Stops the loop if the run was ended from outside."""
        try:
            record = await self._ledger.read(run_rows.find, self._run_id)
        except StorageError:
            return  # `save_step` notices it at the next step.
        if record is None or record.status in ENDED_RUN:
            self._stop()

    def _stop(self) -> None:
        self.should_stop = True
        if self.stop_run is not None:
            self.stop_run()


def _open(
    effects: Effects,
    name: str,
    *,
    run_id: str,
    space_id: str | None,
    trigger: Mapping[str, Any],
    principal: str,
    caller_scope_key: str,
) -> Program[RunRecord]:
    entity_id = entity_id_for(name)
    yield from entities_and_spaces.create_entity(entity_id, "agent", name, {})  # Does nothing if it exists.
    if space_id is not None and not (yield from entities_and_spaces.is_member(space_id, entity_id)):
        space_id = None
    # What it stores for a space or a person must not reach others, even if the agent has only one session of its own.
    scope = (yield from sessions.find_scope(entity_id)).scope
    session_id = yield from session_scope.open_session(
        entity_id, scope, space_id=space_id, person_id=principal, default_key=caller_scope_key
    )
    return (
        yield from runs.open_run(
            effects,
            entity_id,
            run_id=run_id,
            space_id=space_id,
            trigger=trigger,
            principal=principal,
            session_id=session_id,
        )
    )


def _record_step(
    effects: Effects, run_id: str, step: int, usage: str, write_stream: WriteProgram | None
) -> Program[bool]:
    if not (yield from run_rows.record_step(run_id, step, usage)):
        return False
    if write_stream is not None:
        yield from write_stream(effects)
    return True


def _close(
    effects: Effects, run_id: str, status: FinalRunStatus, usage: Mapping[str, Any], error: str | None
) -> Program[RunRecord]:
    if status == "canceled":
        return (yield from runs.cancel_run(effects, run_id))
    return (yield from runs.close_run(effects, run_id, status, usage=usage, error=error))
