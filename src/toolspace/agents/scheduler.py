"""Decides which session runs next, and keeps the leases of the sessions that run in this process.

A session becomes ready when its agent's inbox gets an event, when a task starts, or when its process has died. The
host starts the scheduler; `cycle_runner.py` runs the cycles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from toolspace.agents import session_transactions
from toolspace.agents.cycle_runner import CycleRunner
from toolspace.agents.durable_loop import DurableLoop
from toolspace.agents.session_transactions import LeaseLost, SessionLease
from toolspace.core.defaults import MAX_ACTIVE_AGENTS
from toolspace.core.ids import agent_of_session, session_id_for
from toolspace.errors import StorageError
from toolspace.orchestrator.call import cancel_all, context_without_call, start_in_background
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.repeated_work import RepeatedWork
from toolspace.storage.queries import sessions, tasks
from toolspace.storage.queries.sessions import SessionRecord

_log = logging.getLogger("toolspace.agents")
MINUTE_MS = 60_000
LOWEST_PRIORITY = 9
_TASK_PRIORITY = 2
"""Of background sessions: people and results come first."""
_POLL_SECONDS = 1.0
_MAX_REMEMBERED_STARTS = 10_000
"""Sessions whose latest cycles are remembered: there may be one for each person."""
_BATCH = 500
_RETRY_SECONDS = 1.0
_MISSING_AGENT_SECONDS = 60.0
"""How long an interrupted run waits for a process that has its agent."""


class Scheduler:
    """Runs the sessions of one process while it is open (`async with`)."""

    def __init__(self, ledger: Ledger, runner: CycleRunner, *, max_active: int = MAX_ACTIVE_AGENTS) -> None:
        self._ledger = ledger
        self._runner = runner
        self._max_active = max_active
        self._max_background = max(1, max_active // 2)
        self._queue = ReadyQueue()
        self._is_ranking = False
        self._active: dict[str, ActiveSession] = {}
        self._ready_again: set[str] = set()
        """Active sessions that became ready once more."""
        self._rate_limit = CycleRateLimit(ledger)
        self._rate_limited: dict[str, asyncio.TimerHandle] = {}
        """Sessions that must wait until their next cycle is allowed."""
        self._missing_agents: dict[str, tuple[float, float]] = {}
        """Sessions whose agent this process does not have: since when, and when they were last acquired."""
        self._inbox_listeners: dict[str, Callable[[], None]] = {}
        """By agent."""
        self._background: set[asyncio.Task[Any]] = set()
        self._repeated_work = RepeatedWork()
        self._is_stopping = False

    async def __aenter__(self) -> Scheduler:
        if not self._ledger.database.is_shared:
            await self._ledger.write(sessions.release_all_leases, self._ledger.node_id)
        self._stop_listening = self._ledger.waiters.listen("sessions", lambda _: self._on_sessions_changed())
        self._repeated_work.start("waking sessions", self._poll)
        self._repeated_work.start("renewing leases", self._renew_leases)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain(0.0)
        self._stop_listening()
        for stop_listening in self._inbox_listeners.values():
            stop_listening()
        for timer in self._rate_limited.values():
            timer.cancel()
        await self._runner.aclose()
        await self._repeated_work.aclose()
        await cancel_all(self._background)

    @property
    def active_count(self) -> int:
        """How many sessions run now."""
        return len(self._active)

    @property
    def cycle_counts(self) -> Counter[str]:
        """How many cycles ended in this process, by reason."""
        return self._runner.cycle_counts

    def watch(self, agent_entity_id: str) -> None:
        """Runs the sessions of an agent whenever they get an event."""
        if agent_entity_id not in self._inbox_listeners:
            key = f"inbox:{agent_entity_id}"

            def wake(scope_key: str | None) -> None:
                self.wake(session_id_for(agent_entity_id, scope_key or ""))

            self._inbox_listeners[agent_entity_id] = self._ledger.waiters.listen(key, wake)

    def unwatch(self, agent_entity_id: str) -> None:
        """Ends `watch`: the agent was removed."""
        self._rate_limit.forget(agent_entity_id)
        for session_id in [id for id in self._rate_limited if agent_of_session(id) == agent_entity_id]:
            self._rate_limited.pop(session_id).cancel()
        stop_listening = self._inbox_listeners.pop(agent_entity_id, None)
        if stop_listening is not None:
            stop_listening()

    def wake(self, session_id: str, priority: int | None = None) -> None:
        """Makes a session ready to run. Without a priority, it is read from the inbox if it matters."""
        if self._is_stopping or session_id in self._rate_limited:
            return
        if session_id in self._active:
            self._ready_again.add(session_id)
        else:
            self._queue.add(session_id, priority)
            self._start_sessions()

    async def drain(self, timeout: float) -> None:
        """Stops all sessions before their next step; after `timeout` seconds, in the middle of a step."""
        self._is_stopping = True
        self._queue.clear()
        for active in self._active.values():
            active.stop()
        if self._active:
            await asyncio.wait([active.task for active in self._active.values()], timeout=timeout)
        for active in self._active.values():
            active.interrupt()
        await asyncio.gather(*(active.task for active in self._active.values()), return_exceptions=True)

    # Which session is next

    def _start_sessions(self, *, has_ranked: bool = False) -> None:
        if self._is_ranking:
            return
        free = self._max_active - len(self._active)
        if not has_ranked and len(self._queue) > free > 0 and self._queue.list_unranked():
            self._is_ranking = True
            start_in_background(self._background, self._rank())
            return
        while len(self._active) < self._max_active and not self._is_stopping:
            session_id = self._pop_next()
            if session_id is None:
                break
            active = self._active[session_id] = ActiveSession()
            # Not in the context of the call that woke it, if there is one.
            active.task = asyncio.get_running_loop().create_task(
                self._run_session(session_id, active), context=context_without_call()
            )
            active.task.add_done_callback(lambda _, session_id=session_id: self._on_session_done(session_id))

    def _pop_next(self) -> str | None:
        """The next session that may run now.

        Background sessions get at most half of the places, so that people are answered however many there are. An agent
        with several sessions runs at most `limits.maxParallelSessions` of them.
        """
        background_count = sum(map(tasks.is_background_session, self._active))
        full_agents = self._list_full_agents()
        if background_count < self._max_background and not full_agents:
            return self._queue.pop_next()

        def may_run(session_id: str) -> bool:
            if tasks.is_background_session(session_id):
                return background_count < self._max_background
            return agent_of_session(session_id) not in full_agents

        return self._queue.pop_next([id for id in self._queue if may_run(id)])

    def _list_full_agents(self) -> set[str]:
        """The agents that run as many sessions as they may."""
        counts = Counter(agent_of_session(id) for id in self._active if not tasks.is_background_session(id))
        return {id for id, count in counts.items() if count >= self._max_parallel_sessions(id)}

    def _max_parallel_sessions(self, agent_entity_id: str) -> int:
        agent = self._runner.find_agent(agent_entity_id)
        return agent.cycle_limits.max_parallel_sessions if agent is not None else self._max_active

    async def _rank(self) -> None:
        """Reads the priorities of the ready sessions: there are more than may run now."""
        session_ids = self._queue.list_unranked()[:_BATCH]
        try:
            self._queue.rank(session_ids, await self._ledger.read(sessions.get_inbox_priorities, session_ids))
        except StorageError as error:
            _log.warning("priorities could not be read; sessions run in the order of their events: %s", error)
        finally:
            self._is_ranking = False
        self._start_sessions(has_ranked=True)

    def _on_session_done(self, session_id: str) -> None:
        self._active.pop(session_id, None)
        if session_id in self._ready_again:
            self._ready_again.discard(session_id)
            self.wake(session_id)
        self._start_sessions()

    # Running a session

    async def _run_session(self, session_id: str, active: ActiveSession) -> None:
        try:
            await self._run_cycles(session_id, active)
        except LeaseLost as error:
            _log.info("%s", error)
        except StorageError as error:
            _log.warning("session %s: storage failed, retrying in %g s: %s", session_id, _RETRY_SECONDS, error)
            self._wake_later(session_id, _RETRY_SECONDS)
        except Exception:
            _log.exception("session %s: cycle failed, retrying in %g s", session_id, _RETRY_SECONDS * 5)
            self._wake_later(session_id, _RETRY_SECONDS * 5)

    async def _run_cycles(self, session_id: str, active: ActiveSession) -> None:
        """Runs the cycles of a session until it has nothing to do, or until other sessions wait."""
        runner = self._runner
        session = await self._acquire(session_id)
        if session is None:
            return
        lease = active.lease = SessionLease(
            session_id, session.agent_entity_id, session.token, session.kind, session.scope_key
        )
        try:
            agent = runner.find_agent(lease.agent_entity_id)
            if agent is None:
                await self._wait_for_agent(session, lease)
                active.lease = None
                # Without a notification: this process would acquire it again at once.
                await self._ledger.write(sessions.release_lease, session_id, lease.token)
                return
            started = await runner.reopen(lease) if session.run_id is not None else None
            while not active.is_stopping:
                if started is None:
                    if agent is None or session.kind != "agent":
                        return
                    limits = agent.cycle_limits
                    if await self._is_rate_limited(session, limits.cycles_per_minute):
                        return
                    result = await self._ledger.commit(
                        session_transactions.begin,
                        lease,
                        batch=limits.inbox_batch,
                        max_agent_turns=limits.max_agent_turns,
                        is_router=bool(agent.destinations),
                        enters_space=agent.enters_space,
                    )
                    if result is None:
                        active.lease = None  # `begin` has released it.
                        return
                    if result is False:
                        continue
                    started = result
                    self._rate_limit.record_start(session_id)
                seconds = await runner.run(active, started)
                if seconds:
                    self._wake_later(session_id, seconds)
                    return
                started = await runner.reopen(lease) if seconds is not None else None
                agent = runner.find_agent(lease.agent_entity_id)  # Again: configuration may have changed meanwhile.
                if started is None and self._queue:
                    self._ready_again.add(session_id)  # Other sessions wait: this one goes behind them.
                    return
        finally:
            if active.lease is not None:
                await asyncio.shield(runner.finish_write(self._release(active.lease)))

    async def _acquire(self, session_id: str) -> SessionRecord | None:
        """Acquires the lease of a session. Returns None if another process has it."""
        node_id, lease_ms = self._ledger.node_id, session_transactions.LEASE_MS
        write = self._ledger.write(sessions.acquire_lease, session_id, node_id, lease_ms=lease_ms)
        commit = self._runner.finish_write(write)
        try:
            return await asyncio.shield(commit)
        except asyncio.CancelledError:
            # The commit happens all the same: a lease that nobody uses would block the session until it expires.
            self._runner.finish_write(self._release_acquired(commit))
            raise

    async def _release_acquired(self, commit: asyncio.Task[SessionRecord | None]) -> None:
        with contextlib.suppress(StorageError):
            session = await commit
            if session is not None:
                await self._release(SessionLease(session.id, session.agent_entity_id, session.token))

    async def _release(self, lease: SessionLease) -> None:
        with contextlib.suppress(StorageError):
            await self._ledger.commit(session_transactions.release, lease)

    async def _wait_for_agent(self, session: SessionRecord, lease: SessionLease) -> None:
        """Ends an interrupted run if no process has had its agent for a minute."""
        now = time.monotonic()
        since, last_acquired = self._missing_agents.get(session.id, (now, now))
        if now - last_acquired >= _MISSING_AGENT_SECONDS / 4:
            since = now  # Another process had the session in between.
        self._missing_agents[session.id] = (since, now)
        if session.run_id is None or now - since < _MISSING_AGENT_SECONDS:
            return
        del self._missing_agents[session.id]
        await self._runner.end_without_agent(lease, session.run_id)

    async def _is_rate_limited(self, session: SessionRecord, per_minute: int) -> bool:
        """Whether a session has had all its cycles of this minute. If so, it is woken when the next one is allowed."""
        seconds = await self._rate_limit.seconds_until_allowed(session, per_minute)
        if seconds <= 0:
            return False

        def wake() -> None:
            del self._rate_limited[session.id]
            self.wake(session.id)

        self._rate_limited[session.id] = asyncio.get_running_loop().call_later(seconds, wake)
        return True

    def _wake_later(self, session_id: str, seconds: float) -> None:
        if not self._is_stopping:
            asyncio.get_running_loop().call_later(max(seconds, 0.01), self.wake, session_id)

    # Polling and leases

    def _on_sessions_changed(self) -> None:
        if not self._is_stopping:
            start_in_background(self._background, self._find_ready_sessions())

    async def _poll(self) -> float:
        await self._find_ready_sessions()
        return _POLL_SECONDS

    async def _find_ready_sessions(self) -> None:
        """Wakes interrupted sessions, and sessions with inbox events that this process was not notified of."""
        if self._is_stopping:
            return
        try:
            for session_id in await self._ledger.read(sessions.list_interrupted, limit=_BATCH):
                self.wake(session_id, _TASK_PRIORITY if tasks.is_background_session(session_id) else 0)
            for session_id, priority in await self._ledger.read(sessions.list_with_waiting_inbox, limit=_BATCH):
                if agent_of_session(session_id) in self._inbox_listeners:
                    self.wake(session_id, priority)
        except StorageError as error:
            _log.warning("ready sessions could not be read, retrying in %g s: %s", _POLL_SECONDS, error)
        except Exception:
            _log.exception("ready sessions could not be read, retrying in %g s", _POLL_SECONDS)

    async def _renew_leases(self) -> float:
        """Renews the leases of all active sessions, so that slow models and tools do not lose them."""
        seconds_until_next = session_transactions.LEASE_MS / 3000
        leases = [(active, active.lease) for active in self._active.values() if active.lease is not None]
        if not leases:
            return seconds_until_next
        started_at = time.monotonic()
        tokens = [(lease.session_id, lease.token) for _, lease in leases]
        renewed_ids = await self._ledger.urgent_access.write(
            sessions.renew_leases, tokens, lease_ms=session_transactions.LEASE_MS
        )
        for active, lease in leases:
            if lease.session_id in renewed_ids:
                if active.loop is not None:
                    active.loop.lease_confirmed_at = started_at
            elif active.lease is not None:
                _log.warning("session %s: lease lost to another process; stopping this cycle", lease.session_id)
                active.is_lost, active.lease = True, None
                active.interrupt()
        return seconds_until_next


class ActiveSession:
    """A session that this process runs now."""

    task: asyncio.Task[None]
    lease: SessionLease | None = None
    """None: not acquired yet, or already released."""
    run_id: str | None = None
    """The run under way; None if cancelling it must not interrupt the session."""
    loop: DurableLoop | None = None
    is_stopping = False
    is_lost = False
    """Whether another process has the lease now."""

    def stop(self) -> None:
        """Stops before the next step."""
        self.is_stopping = True
        if self.loop is not None:
            self.loop.should_stop = True
            if self.loop.agent_run.is_waiting_for_model:
                self.interrupt()  # Nothing of the response is stored: the next process asks the model again.

    def interrupt(self) -> None:
        """Stops now, in the middle of a step. Another process continues the run."""
        if self.loop is not None:
            self.loop.detach()
        self.task.cancel()


class ReadyQueue(dict[str, int | None]):
    """Ready sessions, by priority (the lowest number first) and then in the order in which they became ready.

    The priority of a session is None until it is read.
    """

    def add(self, session_id: str, priority: int | None) -> None:
        """Adds a session at the end. One that is in the queue keeps its place, and may get a higher priority."""
        current = self.get(session_id, LOWEST_PRIORITY)
        if priority is None:
            self[session_id] = 0 if current == 0 else None
        elif current is None or priority <= current:
            self[session_id] = priority

    def list_unranked(self) -> list[str]:
        """The sessions whose priority was not read yet."""
        return [session_id for session_id, priority in self.items() if priority is None]

    def rank(self, session_ids: Iterable[str], priorities: Mapping[str, int]) -> None:
        """Sets the priorities of unranked sessions. A session that is not in `priorities` has nothing to do."""
        for session_id in session_ids:
            if self.get(session_id, LOWEST_PRIORITY) is None:
                self[session_id] = priorities.get(session_id, LOWEST_PRIORITY)

    def pop_next(self, candidates: Iterable[str] | None = None) -> str | None:
        """Removes and returns the next session, of all or of these. None if there is none."""

        def rank(session_id: str) -> int:
            priority = self[session_id]
            return LOWEST_PRIORITY if priority is None else priority

        session_id = min(self if candidates is None else candidates, key=rank, default=None)
        if session_id is not None:
            del self[session_id]
        return session_id


class CycleRateLimit:
    """Limits the cycles of a session per minute (`limits.cyclesPerMinute`), over all processes."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._starts: dict[str, tuple[int, deque[int]]] = {}
        """The starts of the last minute, with the lease token at that time: if the session has that token or the next
        one, no other process has started a cycle in between."""

    async def seconds_until_allowed(self, session: SessionRecord, per_minute: int) -> float:
        """How long a leased session must wait for its next cycle; 0 if it need not."""
        token, starts = self._starts.get(session.id, (-1, deque[int]()))
        since = self._ledger.now_ms() - MINUTE_MS
        if session.token - token not in (0, 1):
            starts = deque(await self._ledger.read(sessions.list_cycle_starts, session, since=since, limit=per_minute))
        while starts and starts[0] <= since:
            starts.popleft()
        self._starts[session.id] = (session.token, starts)
        if len(self._starts) > _MAX_REMEMBERED_STARTS:
            # A session without a start in the last minute is read from the database when it runs again.
            self._starts = {id: entry for id, entry in self._starts.items() if entry[1] and entry[1][-1] > since}
            self._starts[session.id] = (session.token, starts)
        # If the limit was lowered, all starts beyond it must be older than a minute first.
        return (starts[len(starts) - per_minute] - since) / 1000 if len(starts) >= per_minute else 0.0

    def record_start(self, session_id: str) -> None:
        self._starts[session_id][1].append(self._ledger.now_ms())

    def forget(self, agent_entity_id: str) -> None:
        """Forgets the sessions of an agent."""
        for session_id in [id for id in self._starts if agent_of_session(id) == agent_entity_id]:
            del self._starts[session_id]
