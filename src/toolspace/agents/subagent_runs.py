"""Keeps the runs of agents that other agents call on the gateway: each is a run of its own, streamed as it goes.

Their conversations are not kept: a run that is cut off is over, and whoever asked is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from toolspace.agents.live_output import LiveOutput
from toolspace.agents.loop import PlannedCall
from toolspace.agents.registry import FinalRunStatus, RunRecorder
from toolspace.agents.run_budget import AgentRun
from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.ids import derived_id, new_id
from toolspace.core.model import ModelListener, Turn, Usage
from toolspace.core.records import ENDED_RUN, RunRecord
from toolspace.errors import RefusedError, StorageError
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.spaces import runs
from toolspace.spaces.call_host import GatewayCallHost
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.database import Program
from toolspace.storage.queries import entities
from toolspace.storage.queries import runs as run_rows

_log = logging.getLogger("toolspace.agents")
_LONGEST_ERROR = 10_000
_ATTEMPTS = 6
_FIRST_DELAY = 0.2
"""Seconds until the end of a run is written again, where the database did not answer; then twice as many."""


class StoredRunRecorders:
    """Houses runs in the ledger. Give it to `Crew.housing`."""

    def __init__(self, desk: PendingCalls) -> None:
        self._desk = desk

    async def open(
        self, agent_run: AgentRun, caller: ToolContext, context: ToolContext, tools: ToolOrchestrator
    ) -> RunRecorder:
        around = caller.host if isinstance(caller.host, GatewayCallHost) else None
        leg, call_id = len(agent_run.previous_agents), caller.call_id
        run = await self._desk.ledger.commit(
            _open,
            agent_run.name,
            # By its call: whoever finds that cut off finds the run.
            run_id=runs.subagent_run_id(call_id, leg) if call_id else new_id("run"),
            space_id=around.space_id if around is not None else None,
            trigger={
                "type": "agent",
                "parentRunId": around.run_id if around is not None else None,
                "callId": call_id or None,
                "agent": agent_run.parent.name if agent_run.parent is not None else None,
            },
        )
        return _StoredRunRecorder(self._desk, run, agent_run, context, tools.find)


class _StoredRunRecorder(RunRecorder):
    """Where one run lives: its steps are counted, what its model writes is streamed."""

    def __init__(
        self, desk: PendingCalls, run: RunRecord, frame: AgentRun, context: ToolContext, find: Callable[[str], Any]
    ) -> None:
        self._room = GatewayCallHost(
            desk, run_id=run.id, agent_entity_id=run.agent_entity_id, space_id=run.space_id, confirms_delivery=False
        )
        context.run_id, context.agent_entity_id, context.host = run.id, run.agent_entity_id, self._room
        super().__init__(context, run_id=run.id)
        self._id = run.id
        self._ledger: Ledger = desk.ledger
        self._frame = frame
        self._find = find
        self._writer: LiveOutput | None = None
        self._looking: set[asyncio.Task[None]] = set()
        self._forget = self._ledger.waiters.listen(f"run:{run.id}", self._look)

    def new_listener(self) -> ModelListener:
        self._writer = LiveOutput(self._room, self._find)
        return self._writer

    def get_call_id(self, index: int) -> str:
        return self._writer.call_id(index) if self._writer is not None else new_id("call")

    async def save_step(self, turns: Sequence[Turn], planned: Sequence[PlannedCall], step: int) -> None:
        writer, self._writer = self._writer, None
        shown = await writer.finish() if writer is not None else None
        usage = json_text.encode_for_storage(msgspec.to_builtins(self._frame.usage))
        if not await self._ledger.commit(_step, self._id, step, usage, shown):
            self._stop()

    async def close(self, status: FinalRunStatus, usage: Usage, error: str | None) -> None:
        self._forget()
        if self._writer is not None:
            await self._writer.abort()
        # What a database keeps as text has no NUL, and an operator needs no more than this of a reason.
        error = json_text.valid_text(error).replace("\0", "�")[:_LONGEST_ERROR] if error is not None else None
        delay = _FIRST_DELAY
        for _ in range(_ATTEMPTS):
            try:
                await self._ledger.commit(_close, self._id, status, msgspec.to_builtins(usage), error)
            except RefusedError:
                return  # Someone else ended it.
            except StorageError as problem:
                _log.warning("run %s ended, which is not written down yet: %s", self._id, problem)
                await asyncio.sleep(delay)
                delay *= 2
            else:
                return

    def _look(self, _: Any) -> None:
        """Something happened to the run: where someone else ended it, nobody works in it any more."""
        task = asyncio.get_running_loop().create_task(self._look_up())
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _look_up(self) -> None:
        try:
            run = await self._ledger.read(run_rows.find, self._id)
        except StorageError:
            return  # The next step finds out.
        if run is None or run.status in ENDED_RUN:
            self._stop()

    def _stop(self) -> None:
        self.stopping = True
        if self.stop_run is not None:
            self.stop_run()


def _open(
    effects: Effects, name: str, *, run_id: str, space_id: str | None, trigger: Mapping[str, Any]
) -> Program[RunRecord]:
    entity_id = derived_id("ent", "agent", name)
    yield from entities.create_entity(entity_id, "agent", name, {})  # If it is not there yet.
    if space_id is not None and not (yield from entities.is_member(space_id, entity_id)):
        space_id = None
    return (yield from runs.open_run(effects, entity_id, run_id=run_id, space_id=space_id, trigger=trigger))


def _step(
    effects: Effects, run_id: str, number: int, usage: str, shown: Callable[[Effects], Program[None]] | None
) -> Program[bool]:
    if not (yield from run_rows.record_step(run_id, number, usage)):
        return False
    if shown is not None:
        yield from shown(effects)
    return True


def _close(
    effects: Effects, run_id: str, status: FinalRunStatus, usage: Mapping[str, Any], error: str | None
) -> Program[RunRecord]:
    if status == "canceled":
        return (yield from runs.cancel_run(effects, run_id))
    return (yield from runs.close_run(effects, run_id, status, usage=usage, error=error))
