"""One cycle of one session: a run of the loop, each step of it kept before it has an effect.

A cycle that was cut off goes on where its last step was kept: calls that ended are not made again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from toolspace.agents import cycle_transactions
from toolspace.agents.cycle_transactions import CycleStep, LeaseLost, SessionLease, StartedCycle
from toolspace.agents.failure_review import ModelReviewer, RuleReviewer
from toolspace.agents.handoff import handoff_path
from toolspace.agents.history import RestoredConversation, restore, shorten
from toolspace.agents.live_output import LiveOutput
from toolspace.agents.loop import AgentLoop, LoopHooks, LoopSettings, PlannedCall, RunOutcome, is_prebuilt_action
from toolspace.agents.prompt_builder import build_system_prompt, load_prompt_context
from toolspace.agents.run_budget import AgentRun, Handoff, RunLimits
from toolspace.core import json_text
from toolspace.core.context import TaskHost, ToolContext
from toolspace.core.ids import new_id
from toolspace.core.interfaces import Allow, Decision, Deny
from toolspace.core.model import Model, ModelListener, ModelTurn, ResultsTurn, Turn, Usage, UserTurn
from toolspace.core.records import OPEN_CALL, CallRecord
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ErrorKind, ModelError
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.spaces import call_transactions, messaging, runs
from toolspace.spaces.call_host import GatewayCallHost
from toolspace.spaces.call_recorder import build_new_call
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.queries import sessions
from toolspace.storage.queries.calls import NewCall

_log = logging.getLogger("toolspace.agents")
now = time.monotonic
_FINAL_REPORT = "agent__final_report"
_HANDOFF = "router__handoff-to"
_SHORTENED_AT_MOST = 12


class PreparedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent, ready to think."""

    name: str
    entity_id: str
    system: str
    model: Model
    tools: ToolOrchestrator
    settings: LoopSettings = LoopSettings()
    limits: RunLimits = RunLimits()
    subagents: tuple[str, ...] = ()
    destinations: tuple[str, ...] = ()
    session_dir: Path | None = None
    task_service: TaskHost | None = None
    tool_filter: Callable[[Tool], bool] | None = None
    """Which of the tools it is given; None: all."""
    task_prompt: str | None = None
    """What it is told in place of who it is and what it has in mind, where it does a piece of work and nothing else:
    then its agent's inbox is not its concern either."""
    task_id: str = ""


class _ToolFilterPolicy:
    """Lets a run use some of the tools alone, however it got to know of others."""

    rule = "tools for this kind of work"

    def __init__(self, offered: Callable[[Tool], bool]) -> None:
        self._offered = offered

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        return Allow() if self._offered(tool) else Deny(f'"{tool.name}" is not for this kind of work')


class Cycle(LoopHooks):
    """One run of an agent, or of one of its tasks."""

    def __init__(
        self,
        desk: PendingCalls,
        prepared: PreparedAgent,
        lease: SessionLease,
        started: StartedCycle,
        *,
        about: str = "",
    ) -> None:
        self._desk = desk
        self._ledger: Ledger = desk.ledger
        self._prepared = prepared
        self._lease = lease
        self.agent_entity_id = lease.agent_entity_id
        self._cycle = started.cycle
        self.run_id = started.run.id
        self._run = started.run
        self._is_new = bool(started.events)
        self._about = about
        self._room = GatewayCallHost(
            desk,
            run_id=started.run.id,
            agent_entity_id=lease.agent_entity_id,
            space_id=started.run.space_id,
            confirms_delivery=False,
        )
        self.agent_run = AgentRun(
            prepared.name,
            limits=prepared.limits,
            subagents=prepared.subagents,
            destinations=prepared.destinations,
        )
        if started.run.usage:
            self.agent_run.usage = msgspec.convert(started.run.usage, Usage)
        self._steps = started.run.steps
        self._planned: Sequence[PlannedCall] = ()
        self._loop: AgentLoop | None = None
        self._writer: LiveOutput | None = None
        self._news = True
        self._preview: UserTurn | None = None
        self.lease_confirmed_at = now()
        """When this process last knew that the session is its own."""

    async def run(self) -> RunOutcome:
        """Runs the cycle to its end. Raises `ModelError`, `LeaseLost`, `RunOver`, `StorageError`."""
        if not self._is_new:
            # What was being said when it was cut off is said anew, or not at all.
            await self._ledger.commit(messaging.abandon_messages_of_run, self.run_id)
        recalled = await self._recall()
        forget = self._ledger.waiters.listen(f"inbox:{self._lease.agent_entity_id}", self._hear)
        try:
            loop = self._loop = await self._make_loop(recalled.turns)
            unfinished = None
            if recalled.unfinished is not None:
                unfinished = (recalled.unfinished, recalled.call_ids)
                loop.turns.append(recalled.unfinished)
                self._planned = loop.plan_calls(recalled.unfinished, recalled.call_ids)
                await self._see_to_calls(loop, recalled.unfinished, recalled.call_ids)
            return await self._turn(loop, unfinished)
        finally:
            forget()
            if self._writer is not None:
                await self._writer.abort()

    @property
    def prepared(self) -> PreparedAgent:
        return self._prepared

    def detach(self) -> None:
        """Another process goes on with it: what is cut off now is left as it is."""
        self._room.run_moves_on = True

    @property
    def is_waiting_for_model(self) -> bool:
        """Whether the model is being asked now."""
        return self._loop is not None and self._loop.is_waiting_for_model

    def unsaved_step(self) -> CycleStep:
        """What the loop has said that was not kept yet."""
        turns = list(self._loop.unsaved_turns) if self._loop is not None else []
        return CycleStep(
            run_id=self.run_id,
            cycle=self._cycle,
            turns=[self._awaiting(turn) for turn in turns],
            number=self._loop.steps if self._loop is not None else self._steps,
            usage=self.agent_run.usage,
        )

    # What the loop asks of its keeper

    async def preview_inbox(self) -> UserTurn | None:
        if self._news and self._prepared.task_prompt is None:
            self._news = False
            self._preview = await self._ledger.read(cycle_transactions.inbox_preview, self._lease.agent_entity_id)
        return self._preview

    def new_listener(self) -> ModelListener | None:
        self._writer = LiveOutput(
            self._room, self._prepared.tools.find, guard=partial(cycle_transactions.renew, self._lease)
        )
        return self._writer

    def get_call_id(self, index: int) -> str:
        return self._writer.call_id(index) if self._writer is not None else new_id("call")

    async def save_step(self, turns: Sequence[Turn], planned: Sequence[PlannedCall], step: int) -> None:
        writer = self._writer
        self._planned = planned
        self._news = self._news or any(
            one.tool is not None and is_prebuilt_action(one.tool, "peek_inbox") for one in planned
        )
        kept = CycleStep(
            run_id=self.run_id,
            cycle=self._cycle,
            turns=turns,
            planned_calls=planned,
            number=step,
            usage=self.agent_run.usage,
            new_calls=self._written_ahead(planned),
            write_stream=await writer.finish() if writer is not None else None,
        )
        asked_at = now()
        self._room.stored_calls.update(await self._ledger.commit(cycle_transactions.save_step, self._lease, kept))
        self.lease_confirmed_at, self._writer = asked_at, None

    async def before_call(self) -> None:
        asked_at = now()
        if asked_at - self.lease_confirmed_at > cycle_transactions.LEASE_MS / 1000:
            # It was away for that long, and others may have taken it for dead: what it does now, they do too.
            await self._ledger.write(cycle_transactions.renew, self._lease)
            self.lease_confirmed_at = asked_at

    def after_call(self, call: PlannedCall) -> None:
        if self._room.duplicate_call_id == call.call_id:
            # The process that was taken for dead made it, after it was looked at what that had left: so look again.
            raise LeaseLost(f'the call "{call.call_id}" was made by another process')

    # The parts of a cycle

    async def _recall(self) -> RestoredConversation:
        session = await self._ledger.read(sessions.find, self._lease.session_id)
        rows = await self._ledger.read(sessions.list_turns, self._lease.session_id)
        first = next((row.stored.turn for row in rows if row.run_id == self.run_id), None)
        self.agent_run.previous_agents = await self._ledger.read(handoff_path, self._run)
        self.agent_run.request = self._about or (first.text if isinstance(first, UserTurn) else "")
        return restore(rows, run_id=self.run_id, summary=session.summary if session is not None else None)

    async def _make_loop(self, turns: list[Turn]) -> AgentLoop:
        thinker = self._prepared
        context = ToolContext(
            agent_id=thinker.name,
            agent_entity_id=self._lease.agent_entity_id,
            run_id=self.run_id,
            task_id=thinker.task_id,
            session_dir=thinker.session_dir,
            tasks=thinker.task_service,
            host=self._room,
            agent=self.agent_run,
        )
        seconds = self.agent_run.remaining_seconds
        run = thinker.tools.run(
            id=self.run_id,
            context=context,
            session=f"session-{self._lease.session_id}",  # What one cycle stored, the next can read.
            policy=_ToolFilterPolicy(thinker.tool_filter) if thinker.tool_filter is not None else None,
            deadline=None if seconds == float("inf") else seconds,
            **({} if thinker.settings.max_tool_calls_per_turn is None
               else {"max_tool_calls_per_turn": thinker.settings.max_tool_calls_per_turn}),
        )  # fmt: skip
        return AgentLoop(
            thinker.model,
            thinker.tools,
            run,
            agent_run=self.agent_run,
            system=thinker.task_prompt if thinker.task_prompt is not None else await self._system(context),
            turns=turns,
            context=context,
            settings=thinker.settings,
            reviewer=(
                ModelReviewer(thinker.model, thinker.settings.model_settings)
                if thinker.settings.review == "model"
                else RuleReviewer()
            ),
            hooks=self,
            steps=self._steps,
        )

    async def _system(self, context: ToolContext) -> str:
        thinker = self._prepared
        return build_system_prompt(
            thinker.name,
            thinker.system,
            await self._ledger.read(load_prompt_context, self._lease.agent_entity_id),
            tools=thinker.tools.instructions(context=context),
            entity_id=self._lease.agent_entity_id,
        )

    async def _turn(self, loop: AgentLoop, unfinished: tuple[ModelTurn, Sequence[str]] | None) -> RunOutcome:
        shortened = 0
        while True:
            try:
                return await loop.run(unfinished)
            except ModelError as error:
                shortened += 1
                if error.kind != "too_long" or shortened > _SHORTENED_AT_MOST or not shorten(loop.turns, keep=2):
                    raise
                _log.info(
                    "%s: the conversation was too long for %s, and is shortened", loop.agent_run.name, loop.model.name
                )
                unfinished = None  # Its calls are made: what failed is the request after them.

    async def _see_to_calls(self, loop: AgentLoop, turn: ModelTurn, call_ids: Sequence[str]) -> None:
        """Finds out what became of the calls of a turn that was cut off."""
        found = await self._ledger.commit(cycle_transactions.adopt_calls, self._lease, call_ids, self._ledger.node_id)
        for call_id, call in zip(call_ids, turn.calls, strict=True):
            if call_id not in found:
                continue  # It was not begun: it is made now.
            record, is_inboxs = found[call_id]
            tool = self._prepared.tools.find(call.name)
            if record.status == "running" and tool is not None and is_repeatable(tool):
                self._room.stored_calls[call_id] = call_transactions.StartedCall(record, is_new=True)
                continue
            if record.status == "running":
                record = await self._ledger.commit(runs.interrupt_call, call_id) or record
            loop.known_results[call_id] = result_from_record(record, is_inboxs=is_inboxs)
            self._restore(loop, record)

    def _restore(self, loop: AgentLoop, call: CallRecord) -> None:
        """What a call that ended had decided for its run."""
        if call.is_error or call.status in OPEN_CALL:
            return
        result, args = cast("Mapping[str, Any]", call.result), cast("Mapping[str, Any]", call.args)
        if call.tool_name == _FINAL_REPORT:
            loop.tool_run.final_report = {key: value for key, value in result.items() if key != "accepted"}
        elif call.tool_name == _HANDOFF:
            self.agent_run.handoff = Handoff(str(args.get("agent")), args.get("message"))

    def _written_ahead(self, planned: Sequence[PlannedCall]) -> list[NewCall]:
        """The calls that can be written down with the step: all that run here, up to one that changes the space."""
        found: list[NewCall] = []
        for one in planned:
            if one.tool is None:
                continue
            new = build_new_call(one.tool, one.call.arguments or "{}", one.call_id, self._room, self._ledger.node_id)
            if new is not None:
                found.append(new)
            if is_prebuilt_action(one.tool, "enter_space") or is_prebuilt_action(one.tool, "leave_space"):
                break
        return found

    def _awaiting(self, turn: Turn) -> Turn:
        """Marks the answers that are not there yet, where the run waits for them."""
        if not isinstance(turn, ResultsTurn) or len(turn.results) != len(self._planned):
            return turn
        answers = tuple(
            msgspec.structs.replace(answer, text=f"{cycle_transactions.AWAITING_RESULT} {answer.text}")
            if one.tool is not None and one.tool.pauses_run and not answer.is_error
            else answer
            for one, answer in zip(self._planned, turn.results, strict=True)
        )
        return ResultsTurn(answers)

    def _hear(self, _: Any) -> None:
        self._news = True


def is_repeatable(tool: Tool) -> bool:
    """Whether a call of it that was cut off may be made again: the second time changes nothing more."""
    return bool(tool.annotations.read_only or tool.annotations.idempotent)


def result_from_record(call: CallRecord, *, is_inboxs: bool) -> ToolResult:
    """The result of a call that was made before, as its caller gets it."""
    if is_inboxs or call.status in OPEN_CALL:
        pending = {"status": "pending", PENDING_CALL_KEY: call.call_id}
        return ToolResult(
            True, pending, extras={PENDING_CALL_KEY: call.call_id}, tool=call.tool_name, call_id=call.call_id
        )
    if not call.is_error:
        return ToolResult(True, call.result, tool=call.tool_name, call_id=call.call_id)
    text = call.result if isinstance(call.result, str) else json_text.describe(call.result, 500)
    kinds: Mapping[str, ErrorKind] = {"canceled": "canceled", "expired": "timeout"}
    kind: ErrorKind = kinds.get(call.status, "execution_error")
    return ToolResult(False, error=text, error_kind=kind, tool=call.tool_name, call_id=call.call_id)
