"""Runs one cycle of a leased session, and stores how it ended: completed, paused, postponed, failed or cancelled.

The scheduler decides which session runs and holds its lease; `durable_loop.py` runs the model and the tools. Background
tasks and reflections are sessions, too: they differ in their preparation and in what is written when they end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from toolspace.agents import background_tasks, compaction, handoff, session_transactions
from toolspace.agents.agent import Agent, entity_id_for, memory_dir_of, session_folder
from toolspace.agents.agent_run import PreparedAgent
from toolspace.agents.durable_loop import DurableLoop
from toolspace.agents.loop import RunOutcome
from toolspace.agents.plain_answers import (
    answer_space_of,
    apply_hooks,
    deliver_answer,
    may_send_text,
    plain_answer,
)
from toolspace.agents.registry import AgentRegistry
from toolspace.agents.session_transactions import (
    CycleStep,
    LeaseLost,
    RunEnded,
    SessionLease,
    StartedCycle,
    WriteProgram,
)
from toolspace.config.agent_settings import ConsciousnessSettings
from toolspace.core import json_text
from toolspace.core.ids import new_id
from toolspace.core.json_text import single_line
from toolspace.core.names import sanitise
from toolspace.core.secret_masking import mask_secrets
from toolspace.core.stored_records import ENDED_RUN
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ModelError, StorageError, ToolspaceError
from toolspace.orchestrator.call import cancel_all, start_in_background
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.queries import runs as run_rows

if TYPE_CHECKING:
    from toolspace.agents.scheduler import ActiveSession

_log = logging.getLogger("toolspace.agents")
RETRY_DELAYS_MS = (1_000, 5_000, 30_000, 120_000)
"""Delays before a run whose model did not answer continues. When all are used up, the run fails."""
_MAX_RETRY_MS = 600_000
_MAX_LOGGED = 2_000


class CycleRunner:
    """Runs the cycles of all sessions of one process."""

    def __init__(
        self,
        pending_calls: PendingCalls,
        agents: AgentRegistry,
        agent_names: Mapping[str, str],
        *,
        session_dir: Path,
        retry_delays: Sequence[int] = RETRY_DELAYS_MS,
    ) -> None:
        """`agent_names`: the names of this process's agents by entity id. `session_dir`: where archives are, unless an
        agent's configuration names another directory."""
        self._pending_calls = pending_calls
        self._ledger = pending_calls.ledger
        self._agents = agents
        self._agent_names = agent_names
        self._session_dir = session_dir
        self._retry_delays = retry_delays
        self.cycle_counts: Counter[str] = Counter()
        """The number of ended cycles by reason: `RunOutcome.end`, `failed` or `canceled`."""
        self._checks: set[asyncio.Task[Any]] = set()
        self._final_writes: set[asyncio.Task[Any]] = set()

    async def aclose(self) -> None:
        """Waits for the writes that must not be lost."""
        await asyncio.gather(*self._final_writes, return_exceptions=True)
        await cancel_all(self._checks)

    def find_agent(self, agent_entity_id: str) -> Agent | None:
        """The agent of an entity; None if this process does not have it."""
        name = self._agent_names.get(agent_entity_id)
        return self._agents.find(name) if name is not None else None

    async def reopen(self, lease: SessionLease) -> StartedCycle | None:
        """Returns the cycle that is under way in the session; None if its run has ended."""
        return await self._ledger.commit(session_transactions.reopen, lease, self._completion(lease))

    async def run(self, active: ActiveSession, started: StartedCycle) -> float | None:
        """Runs a cycle until it ends, pauses or is postponed. Raises `LeaseLost` and `StorageError`.

        Returns None if the session is free for its next cycle. Otherwise returns the seconds after which the same run
        continues: 0 is at once; for a longer time, the lease has been released.
        """
        assert active.lease is not None
        lease, run_id = active.lease, started.run.id
        active.run_id = run_id
        stop_listening = self._ledger.waiters.listen(f"run:{run_id}", lambda _: self._check_run(active, run_id))
        loop: DurableLoop | None = None
        try:
            async with self._prepare(lease, started.run.principal) as prepared_agent:
                loop = active.loop = DurableLoop(self._pending_calls, prepared_agent, lease, started)
                if active.is_stopping:
                    return None
                outcome = await loop.run()
                active.run_id = None  # From here on, a cancelled run must not interrupt the writes of its end.
                stop_listening()
                continues = await self._end(loop, outcome)
                if outcome.end not in ("stopped", "paused"):
                    await self._compact(loop)
                return 0.0 if continues else None
        except asyncio.CancelledError:
            if active.is_lost or active.is_stopping:
                raise  # Another process continues the run.
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                # Something that the run waited for was cancelled, not this task.
                error = "internal error: something that the run waited for was canceled"
                await self._fail(lease, started, loop, error, is_internal_error=True)
                return None
            task.uncancel()  # The run was cancelled, not the session.
            has_ended = await asyncio.shield(self.finish_write(self._abandon(lease, run_id)))
            return None if has_ended else 0.0
        except RunEnded:
            return None if await self._abandon(lease, run_id) else 0.0
        except (LeaseLost, StorageError):
            raise
        except ToolspaceError as error:
            delay = await self._postpone(lease, started, loop, error)
            if delay is None:
                await self._fail(lease, started, loop, str(error))
            else:
                active.lease = None  # Postponing has released it.
            return delay
        except Exception as error:
            _log.exception("session %s: a cycle failed", lease.session_id)
            await self._fail(lease, started, loop, f"internal error: {error!r}", is_internal_error=True)
            return None
        finally:
            active.run_id, active.loop = None, None
            stop_listening()

    async def end_without_agent(self, lease: SessionLease, run_id: str) -> None:
        """Ends an interrupted run whose agent no process has any more."""
        reason = "no process has this agent any more"
        await self._ledger.commit(
            session_transactions.end_without_agent, lease, run_id, reason, self._completion(lease)
        )

    # Before a cycle

    @contextlib.asynccontextmanager
    async def _prepare(self, lease: SessionLease, principal: str | None) -> AsyncGenerator[PreparedAgent]:
        """Prepares the agent of a session. Raises `ModelError` or another `ToolspaceError` if it cannot run."""
        entity_id = lease.agent_entity_id
        async with self._agents.acquire(self._agent_names[entity_id]) as prepared_agent:
            agent = prepared_agent.agent
            own_dir = agent.spec.config.tools.session_dir if agent.spec is not None and agent.spec.config else None
            session_dir = own_dir or self._session_dir
            if lease.scope_key:
                session_dir /= session_folder(lease.scope_key)
            prepared_agent = msgspec.structs.replace(
                prepared_agent,
                session_dir=session_dir / sanitise(agent.name),
                memory_dir=memory_dir_of(agent, prepared_agent.tools.context.memory_dir, lease.scope_key),
                task_service=background_tasks.TaskService(self._ledger, lease.owner_id, is_task=lease.kind != "agent"),
            )
            context = ToolContext(user_id=principal, agent_id=agent.name, agent_entity_id=entity_id)
            settings = prepared_agent.settings
            if settings.plain_text == "deliver" and not may_send_text(prepared_agent.tools, context):
                settings = msgspec.structs.replace(settings, plain_text="private")
                prepared_agent = msgspec.structs.replace(prepared_agent, settings=settings)
            if lease.kind == "task":
                prepared_agent = await background_tasks.prepare_task(self._ledger, prepared_agent, lease)
            elif lease.kind == "reflection":
                prepared_agent = await background_tasks.prepare_reflection(prepared_agent, lease, principal)
            yield prepared_agent

    # After a cycle

    def _completion(
        self, lease: SessionLease, outcome: RunOutcome | None = None, loop: DurableLoop | None = None
    ) -> WriteProgram | None:
        """The writes that are committed together with the end of a run. No outcome: the run failed or was cancelled."""
        if lease.kind == "reflection":
            return background_tasks.reflection_completion(lease.session_id, outcome)
        if lease.kind == "task":
            reflects = loop is not None and background_tasks.can_reflect(loop.prepared_agent.tools)
            return background_tasks.task_completion(lease.session_id, outcome, reflects=reflects)
        if outcome is None or outcome.handoff is None or loop is None:
            return None
        return handoff.build_handoff(
            loop.agent_run,
            outcome.handoff,
            run_id=loop.run_id,
            agent_id=lease.agent_entity_id,
            destination_id=entity_id_for(outcome.handoff.agent),
        )

    async def _delivery(self, loop: DurableLoop, outcome: RunOutcome) -> WriteProgram | None:
        """The writes that deliver the text of the last turn, if it may be the answer to a person, or the notice."""
        text, message_id = plain_answer(outcome), loop.last_text_id
        if loop.prepared_agent.settings.plain_text == "private":
            text = None
        if outcome.notice is not None:
            text, message_id = outcome.notice, None
        if loop.lease.kind != "agent" or text is None:
            return None
        run = loop.started.run
        if outcome.notice is None and answer_space_of(run) is not None:
            text = await apply_hooks(loop.prepared_agent.tools, run, message_id or new_id("msg"), text)
            if text is None:
                return None
        entity_id = loop.lease.agent_entity_id
        return lambda effects: deliver_answer(effects, loop.run_id, entity_id, text, message_id=message_id)

    async def _end(self, loop: DurableLoop, outcome: RunOutcome) -> bool:
        """Stores the end of a cycle. Returns whether its run continues at once."""
        self.cycle_counts[outcome.end] += 1
        step = loop.unsaved_step()
        if outcome.end == "stopped":
            if step.turns:
                await self._ledger.commit(session_transactions.save_step, loop.lease, step)
            return False
        if outcome.end == "paused":
            return not await self._ledger.commit(session_transactions.pause, loop.lease, step)
        await self._ledger.commit(
            session_transactions.end,
            loop.lease,
            step,
            status="failed" if outcome.end in ("max_steps", "limit", "gave_up") else "completed",
            error=outcome.reason,
            before=await self._delivery(loop, outcome),
            also=self._completion(loop.lease, outcome, loop),
        )
        return False

    async def _compact(self, loop: DurableLoop) -> None:
        """Compacts the conversation of an agent. Those of tasks stay as they are, for `task_replay`."""
        prepared_agent = loop.prepared_agent
        agent = self._agents.find(prepared_agent.agent.name)
        if loop.lease.kind != "agent" or agent is None or prepared_agent.session_dir is None:
            return
        await compaction.compact(
            self._ledger,
            loop.lease,
            prepared_agent.model,
            agent.spec.consciousness if agent.spec is not None else ConsciousnessSettings(),
            archive_dir=prepared_agent.session_dir,
            settings=prepared_agent.settings.model_settings,
            run_id=loop.run_id,
            quotas=loop.quotas,
        )

    async def _postpone(
        self, lease: SessionLease, started: StartedCycle, loop: DurableLoop | None, error: ToolspaceError
    ) -> float | None:
        """Postpones a run whose model did not answer. Returns the seconds until it continues, or None if it has failed.

        A run of an agent that has not completed a step fails instead: its events return to the inbox for another run.
        """
        step = _unsaved_step(started, loop)
        if not isinstance(error, ModelError) or not error.is_transient:
            return None
        if lease.kind == "agent" and not step.number:
            return None
        at_least = min(round((error.retry_after or 0) * 1000), _MAX_RETRY_MS)
        delay = await self._ledger.commit(
            session_transactions.postpone, lease, step, self._retry_delays, at_least=at_least
        )
        if delay is None:
            return None
        _log.warning("session %s: its run continues in %d ms: %s", lease.session_id, delay, error)
        return max(delay, 1) / 1000

    async def _fail(
        self,
        lease: SessionLease,
        started: StartedCycle,
        loop: DurableLoop | None,
        error: str,
        *,
        is_internal_error: bool = False,
    ) -> None:
        self.cycle_counts["failed"] += 1
        error = str(mask_secrets(json_text.storable_text(error)))  # Errors of libraries may contain secrets.
        _log.warning(
            "session %s: its run %s failed: %s", lease.session_id, started.run.id, single_line(error, _MAX_LOGGED)
        )

        async def end(step: CycleStep) -> None:
            await self._ledger.commit(
                session_transactions.end,
                lease,
                step,
                status="failed",
                error=error,
                retries_events=lease.kind == "agent",
                is_internal_error=is_internal_error,
                also=self._completion(lease, None, loop),
            )

        try:
            await end(_unsaved_step(started, loop))
        except (LeaseLost, StorageError):
            raise
        except Exception:
            # Otherwise the scheduler would continue this run, which fails in the same way, forever.
            _log.exception("run %s: its last turns cannot be stored; ending it without them", started.run.id)
            await end(_unsaved_step(started, None))

    async def _abandon(self, lease: SessionLease, run_id: str) -> bool:
        """Cleans up if the run was ended from outside. Returns False, and changes nothing, if it has not ended."""
        self.cycle_counts["canceled"] += 1
        with contextlib.suppress(LeaseLost):
            return await self._ledger.commit(
                session_transactions.abandon, lease, run_id, "the run was canceled", self._completion(lease)
            )
        return True

    # Background work

    def _check_run(self, active: ActiveSession, run_id: str) -> None:
        start_in_background(self._checks, self._interrupt_if_ended(active, run_id))

    async def _interrupt_if_ended(self, active: ActiveSession, run_id: str) -> None:
        """Interrupts the session if its run was ended from outside."""
        with contextlib.suppress(StorageError):
            record = await self._ledger.read(run_rows.find, run_id)
            if (record is None or record.status in ENDED_RUN) and active.run_id == run_id:
                active.task.cancel()

    def finish_write(self, write: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs a write to its end, even if its caller is cancelled or the process is stopping."""
        return start_in_background(self._final_writes, write)


def _unsaved_step(started: StartedCycle, loop: DurableLoop | None) -> CycleStep:
    """The turns of a run that are not stored yet."""
    return loop.unsaved_step() if loop is not None else CycleStep(run_id=started.run.id, cycle=started.cycle, turns=())
