"""Runs the loop of a cycle, with each step stored before it has an effect.

`cycle_runner.py` starts it and stores its end. A run that was interrupted continues from its last stored step and does
not repeat calls that have ended: docs/internals/agents.md lists the cases.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from toolspace.agents import session_transactions
from toolspace.agents.agent_run import AgentRun, Handoff, PreparedAgent
from toolspace.agents.history import RestoredConversation, restore, result_from_record
from toolspace.agents.live_answer import AnswerPlace
from toolspace.agents.live_output import LiveOutput
from toolspace.agents.loop import AgentLoop, RunOutcome, changes_space, is_prebuilt_action
from toolspace.agents.loop_hooks import LoopHooks, PlannedCall
from toolspace.agents.model_quotas import ModelQuotas
from toolspace.agents.paused_runs import mark_awaited_results
from toolspace.agents.plain_answers import answer_space_of
from toolspace.agents.prompt_builder import build_system_prompt, load_prompt_context, render_active_space
from toolspace.agents.session_transactions import CycleStep, LeaseLost, SessionLease, StartedCycle
from toolspace.agents.structured_output import FINAL_REPORT
from toolspace.core.ids import new_id
from toolspace.core.language_model import ModelCall, ModelListener, ModelTurn, Turn, Usage, UserTurn
from toolspace.core.result import PAUSES_RUN_KEY
from toolspace.core.stored_records import OPEN_CALL, CallRecord
from toolspace.core.tool import NO_ANNOTATIONS
from toolspace.core.tool_context import ToolContext
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.stages.hooks import has_before_hooks
from toolspace.spaces import announced_calls, call_transactions, messaging, runs
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.spaces.call_recorder import build_new_call
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries.calls import NewCall

now = time.monotonic
_HANDOFF = "router__handoff-to"


class DurableLoop(LoopHooks):
    """The loop of one run of an agent, or of one of its background tasks."""

    def __init__(
        self, pending_calls: PendingCalls, prepared_agent: PreparedAgent, lease: SessionLease, started: StartedCycle
    ) -> None:
        self._ledger: Ledger = pending_calls.ledger
        self.prepared_agent = prepared_agent
        self.lease = lease
        self.started = started
        self.run_id = started.run.id
        self.agent_run = AgentRun(prepared_agent.agent, steps=started.run.steps)
        if started.run.usage:
            self.agent_run.budget.usage = msgspec.convert(started.run.usage, Usage)
        self.lease_confirmed_at = now()
        """When this process last knew that it has the lease."""
        self._call_host = GatewayCallHost(
            pending_calls,
            run_id=started.run.id,
            agent_entity_id=lease.agent_entity_id,
            space_id=started.run.space_id,
            session_id=lease.owner_id,
            confirms_delivery=False,
            approval_mode="pause",
        )
        self._earlier_calls: Sequence[ModelCall] = ()
        """The calls of this run's turns that have results, from the processes before this one."""
        self._planned_calls: Sequence[PlannedCall] = ()
        """The calls of the model's last turn."""
        self._tool_run: Run | None = None
        self.quotas: ModelQuotas | None = None
        """Counts what the run's models use; None before the loop starts."""
        self._output: LiveOutput | None = None
        self.last_text_id: str | None = None
        """The id under which the text of the model's last turn was published; None if it had no text."""
        self._has_new_events = True
        self._preview: UserTurn | None = None

    async def run(self) -> RunOutcome:
        """Runs the cycle to its end. Raises `ModelError`, `LeaseLost`, `RunEnded`, `StorageError`."""
        if not self.started.events:
            # A message that was being written when the cycle was interrupted is written again, or not at all.
            await self._ledger.commit(messaging.abandon_messages_of_run, self.run_id)
        conversation = await self._load_conversation()
        stop_listening = self._ledger.waiters.listen(f"inbox:{self.lease.agent_entity_id}", self._on_inbox_event)
        try:
            loop = await self._create_loop()
            self.quotas = loop.quotas
            loop.count_earlier_calls(self._earlier_calls)
            unfinished_turn = None
            if (turn := conversation.unfinished_turn) is not None:
                self.agent_run.turns.append(turn)
                self._planned_calls = loop.plan_calls(turn, conversation.call_ids)
                await self._adopt_calls(loop)
                loop.count_earlier_calls(
                    [plan.call for plan in self._planned_calls if plan.call_id in loop.known_results]
                )
                unfinished_turn = (turn, self._planned_calls)
            if not self.started.events:
                planned_ids = {plan.call_id for plan in self._planned_calls}
                self._call_host.announced_calls |= await self._ledger.commit(
                    announced_calls.end_interrupted, self.run_id, planned_ids
                )
            return await loop.run_within_context(unfinished_turn)
        finally:
            stop_listening()
            if self._output is not None:
                await self._output.abort()

    def detach(self) -> None:
        """Leaves the run to another process: calls that are cancelled from now on stay open for it."""
        self._call_host.run_moves_on = True

    def unsaved_step(self) -> CycleStep:
        """The turns that are not stored yet."""
        return CycleStep(
            run_id=self.run_id,
            cycle=self.started.cycle,
            turns=[
                mark_awaited_results(turn, self._planned_calls, self._call_host.paused_call_ids)
                for turn in self.agent_run.unsaved_turns
            ],
            number=self.agent_run.steps,
            usage=self.agent_run.budget.usage,
        )

    # The hooks of the loop

    async def preview_inbox(self) -> UserTurn | None:
        if self._has_new_events and self.prepared_agent.task is None:
            self._has_new_events = False
            self._preview = await self._ledger.read(session_transactions.inbox_preview, self.lease.session_id)
        return self._preview

    def new_listener(self) -> ModelListener | None:
        check_lease = partial(session_transactions.renew, self.lease)
        tools = self.prepared_agent.tools
        self._output = LiveOutput(
            self._call_host,
            tools.find,
            has_before_hooks=partial(has_before_hooks, tools),
            check_lease=check_lease,
            answer_place=self._find_answer_place(),
        )
        return self._output

    def get_call_id(self, index: int) -> str:
        return self._output.call_id(index) if self._output is not None else new_id("call")

    async def save_step(self, turns: Sequence[Turn], calls: Sequence[PlannedCall], step: int) -> None:
        output = self._output
        self._planned_calls = calls
        # First: the new calls continue what it has published of them.
        write_stream = await output.finish({plan.call_id for plan in calls}) if output is not None else None
        if any(plan.tool is not None and is_prebuilt_action(plan.tool, "peek_inbox") for plan in calls):
            self._has_new_events = True
        new_step = CycleStep(
            run_id=self.run_id,
            cycle=self.started.cycle,
            turns=turns,
            planned_calls=calls,
            number=step,
            usage=self.agent_run.budget.usage,
            new_calls=self._build_new_calls(calls),
            write_stream=write_stream,
        )
        started_at = now()
        stored_calls = await self._ledger.commit(session_transactions.save_step, self.lease, new_step)
        self._call_host.stored_calls.update(stored_calls)
        self.last_text_id = output.text_id if output is not None else None
        self.lease_confirmed_at, self._output = started_at, None

    async def before_call(self) -> None:
        started_at = now()
        if started_at - self.lease_confirmed_at > session_transactions.LEASE_MS / 1000:
            # The lease has expired, so another process may execute this call, too: check before doing it.
            await self._ledger.write(session_transactions.renew, self.lease)
            self.lease_confirmed_at = started_at

    def after_call(self, call: PlannedCall) -> None:
        if self._call_host.duplicate_call_id == call.call_id:
            # The process that had the lease before has executed it after this one had read the state of its calls.
            raise LeaseLost(f'the call "{call.call_id}" was executed by another process')

    def _find_answer_place(self) -> AnswerPlace | None:
        """Where the text of the next turn is published while the model writes it; None: it stays private until its end.

        It stays private if hooks watch over `send_message`, and if the model must still be reminded of its report.
        """
        lease, settings = self.lease, self.prepared_agent.settings
        space_id = answer_space_of(self.started.run) if lease.kind == "agent" else None
        if space_id is None or settings.plain_text == "private":
            return None
        if has_before_hooks(self.prepared_agent.tools, "send_message"):
            return None
        if self._tool_run is not None and self._tool_run.final_report_reminder is not None:
            return None
        return AnswerPlace(
            run_id=self.run_id,
            session_id=lease.session_id,
            agent_entity_id=lease.agent_entity_id,
            space_id=space_id,
        )

    # The parts of a cycle

    async def _load_conversation(self) -> RestoredConversation:
        run = self.agent_run
        summary, rows, path = await self._ledger.read(
            session_transactions.load_conversation, self.lease, self.started.run
        )
        first_turn = next((row.stored_turn.turn for row in rows if row.run_id == self.run_id), None)
        run.previous_agents = path
        run.request = first_turn.text if isinstance(first_turn, UserTurn) else ""
        conversation = restore(rows, run_id=self.run_id, summary=summary)
        run.turns = conversation.turns
        own_turns = [row.stored_turn.turn for row in rows if row.run_id == self.run_id]
        self._earlier_calls = [
            call
            for turn in own_turns
            if isinstance(turn, ModelTurn) and turn is not conversation.unfinished_turn
            for call in turn.calls
        ]
        return conversation

    async def _create_loop(self) -> AgentLoop:
        prepared_agent, task = self.prepared_agent, self.prepared_agent.task
        context = ToolContext(
            user_id=self._principal,
            agent_id=prepared_agent.agent.name,
            agent_entity_id=self.lease.agent_entity_id,
            run_id=self.run_id,
            task_id=task.task_id if task is not None else "",
            memory_dir=prepared_agent.memory_dir,
            session_dir=prepared_agent.session_dir.parent if prepared_agent.session_dir is not None else None,
            tasks=prepared_agent.task_service,
            host=self._call_host,
            agent=self.agent_run,
        )
        tool_run = prepared_agent.open_tool_run(
            id=self.run_id,
            context=context,
            policy=task.policy if task is not None else None,
            session=f"session-{self.lease.session_id}",  # The next cycle can read the outputs that this one stores.
            seconds=self.agent_run.budget.remaining_seconds,
        )
        self._tool_run = tool_run
        tool_run.tool_budget_exceeded = self.started.run.tool_budget_exceeded
        if task is not None:
            system = task.prompt
        else:
            await prepared_agent.tools.wait_for_lists()
            system = build_system_prompt(
                prepared_agent.agent,
                await self._ledger.read(load_prompt_context, self.lease.session_id),
                tool_instructions=prepared_agent.tools.instructions(context=context),
                entity_id=self.lease.agent_entity_id,
                settings=prepared_agent.settings,
            )
            if prepared_agent.agent.enters_space and (space_id := self._call_host.space_id) is not None:
                system += "\n\n" + await self._ledger.read(render_active_space, self.lease.session_id, space_id)
        return AgentLoop(prepared_agent, self.agent_run, tool_run, system=system, context=context, hooks=self)

    async def _adopt_calls(self, loop: AgentLoop) -> None:
        """Finds out which calls of the interrupted turn have ended, and which must be executed."""
        adopted_calls = await self._ledger.commit(
            session_transactions.adopt_calls,
            self.lease,
            [plan.call_id for plan in self._planned_calls],
            self._ledger.node_id,
        )
        self._call_host.paused_call_ids.extend(await self._ledger.read(call_rows.list_pausing, self.run_id))
        for plan in self._planned_calls:
            if plan.call_id not in adopted_calls:
                continue  # It was not started: the loop executes it.
            record, goes_to_inbox = adopted_calls[plan.call_id]
            if record.status == "running":
                annotations = plan.tool.annotations if plan.tool is not None else NO_ANNOTATIONS
                if annotations.read_only or annotations.idempotent:  # Executed again, it has no other effect.
                    self._call_host.stored_calls[plan.call_id] = call_transactions.StartedCall(record, is_new=True)
                    continue
                record = await self._ledger.commit(runs.interrupt_call, plan.call_id) or record
            result = result_from_record(record, goes_to_inbox=goes_to_inbox)
            if plan.call_id in self._call_host.paused_call_ids:
                result.extras = {**result.extras, PAUSES_RUN_KEY: True}
            loop.known_results[plan.call_id] = result
            self._restore_decision(loop, record)

    def _restore_decision(self, loop: AgentLoop, call: CallRecord) -> None:
        """Restores the final report or the handoff that a call has set before the interruption."""
        if call.is_error or call.status in OPEN_CALL:
            return
        result, args = cast("Mapping[str, Any]", call.result), cast("Mapping[str, Any]", call.args)
        if call.tool_name == FINAL_REPORT:
            loop.tool_run.final_report = {key: value for key, value in result.items() if key != "accepted"}
        elif call.tool_name == _HANDOFF:
            self.agent_run.handoff = Handoff(str(args.get("agent")), args.get("message"))

    @property
    def _principal(self) -> str:
        """For whom the run works; the agent itself if the run has nobody else."""
        return self.started.run.principal or self.lease.agent_entity_id

    def _build_new_calls(self, calls: Sequence[PlannedCall]) -> list[NewCall]:
        """The calls to store with the step: those that run in this process, up to one that changes the space."""
        new_calls: list[NewCall] = []
        for plan in calls:
            if plan.tool is None:
                continue
            arguments = plan.call.arguments or "{}"
            new_call = build_new_call(plan.tool, arguments, plan.call_id, self._call_host, principal=self._principal)
            if new_call is not None:
                new_calls.append(new_call)
            if changes_space(plan.tool):
                break
        return new_calls

    def _on_inbox_event(self, scope_key: str | None) -> None:
        if scope_key is None or scope_key == self.lease.scope_key:  # None: of the main session, or unknown.
            self._has_new_events = True
