"""Lets agents think: each that has something to do gets its turn, in one process at a time. How, a cycle knows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol

import msgspec

from toolspace.agents import cycle_transactions
from toolspace.agents.cycle import Cycle, PreparedAgent
from toolspace.agents.cycle_transactions import CycleStep, LeaseLost, RunEnded, SessionLease, StartedCycle
from toolspace.agents.loop import RunOutcome
from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.line_escaping import single_line
from toolspace.core.records import ENDED_RUN
from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ModelError, StorageError, ToolspaceError
from toolspace.orchestrator.call import context_without_call
from toolspace.spaces import runs
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.database import Program
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries import sessions, tasks
from toolspace.storage.queries.sessions import SessionRecord

# MERGED from rate_limit: How often agents begin to think: so many cycles in a minute, in whichever process. Lets n…

MINUTE_MS = 60_000


class CycleRateLimit:
    """Remembers when the cycles of sessions began, for as long as a minute."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._starts: dict[str, tuple[int, deque[int]]] = {}
        """With the token under which the session was held then: with the next one, nobody else thought in between."""

    async def seconds_until_allowed(self, session: SessionRecord, most: int) -> float:
        """How long a session that is held here has to wait for its next cycle; 0 where it need not."""
        token, starts = self._starts.get(session.id, (-1, deque[int]()))
        since = now_ms() - MINUTE_MS
        if session.token - token not in (0, 1):
            starts = deque(await self._ledger.read(sessions.list_cycle_starts, session, since=since, limit=most))
        while starts and starts[0] <= since:
            starts.popleft()
        self._starts[session.id] = (session.token, starts)
        # Where fewer are allowed than there were: as many as too many have to be old first.
        return (starts[len(starts) - most] - since) / 1000 if len(starts) >= most else 0.0

    def record_start(self, session_id: str) -> None:
        """A cycle begins."""
        self._starts[session_id][1].append(now_ms())

    def forget(self, session_id: str) -> None:
        self._starts.pop(session_id, None)


# MERGED from ready_queue: Which session is next: the most important first; among equals, who waits longest. Lets n…

LOWEST_PRIORITY = 9
"""How important something is of which nobody knows."""


class ReadyQueue:
    """Sessions that may have something to do, in the order in which that was heard."""

    def __init__(self) -> None:
        self._waiting: dict[str, int | None] = {}
        """With how important it is, the lowest first; None: that was not looked at yet."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def add(self, session_id: str, importance: int | None) -> None:
        """Puts one at the end. One that waits stays where it is, and may become more important."""
        known = self._waiting.get(session_id, LOWEST_PRIORITY)
        if importance is None:
            self._waiting[session_id] = 0 if known == 0 and session_id in self._waiting else None
        elif known is None or importance <= known:
            self._waiting[session_id] = importance

    def unknown(self) -> list[str]:
        """Those of which nobody knows how important they are."""
        return [session_id for session_id, importance in self._waiting.items() if importance is None]

    def rank(self, importance: Mapping[str, int], asked: Iterable[str]) -> None:
        """Says how important those are that were asked for; those that have nothing to do are least."""
        for session_id in asked:
            if self._waiting.get(session_id, LOWEST_PRIORITY) is None:
                self._waiting[session_id] = importance.get(session_id, LOWEST_PRIORITY)

    def take(self, among: Iterable[str] | None = None) -> str | None:
        """The next one, which waits no more; None where there is none."""
        found = min(self._waiting if among is None else among, key=self._importance, default=None)
        if found is not None:
            del self._waiting[found]
        return found

    def clear(self) -> None:
        self._waiting.clear()

    def _importance(self, session_id: str) -> int:
        known = self._waiting[session_id]
        return LOWEST_PRIORITY if known is None else known


_log = logging.getLogger("toolspace.agents")
_LOOK_SECONDS = 1.0
_BEAT_SECONDS = cycle_transactions.LEASE_MS / 3000
_BATCH = 500
_AFTER_TROUBLE_SECONDS = 1.0
_LONGEST_LOGGED = 2_000
_WORK = 2
"""How important tasks are: people and results come first."""
RETRY_DELAYS_MS = (1_000, 5_000, 30_000, 120_000)
"""After how long a task goes on that could not, because its model did not answer; then it has failed."""
_LONGEST_RETRY_MS = 600_000
_NOBODYS_SECONDS = 60.0
"""How long a run that was cut off waits for a process that knows its agent."""


class CycleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How often an agent may think."""

    max_agent_turns: int = 6
    cycles_per_minute: int = 60
    inbox_batch: int = 50
    is_router: bool = False
    """Whether it may hand on what it is asked: the answers to that are not for it to answer."""


class SessionHost(Protocol):
    """Who can think, and what becomes of it."""

    def find_limits(self, session: SessionRecord) -> CycleLimits | None:
        """None where nobody here knows the agent."""
        ...

    def prepare(self, session: SessionRecord) -> AbstractAsyncContextManager[PreparedAgent]:
        """Raises `ModelError` or another `ToolspaceError` where it cannot think."""
        ...

    def completion(
        self, session: SessionRecord, outcome: RunOutcome | None, cycle: Cycle | None
    ) -> cycle_transactions.WriteProgram | None:
        """What else happens in the moment that a run ends. Without an outcome: it could not go on, or was canceled."""
        ...

    async def compact(self, session: SessionRecord, thinker: PreparedAgent, hold: SessionLease) -> None:
        """Called between cycles, while the session is held."""
        ...


class Scheduler:
    """The agents of one process. `async with` lets them think."""

    def __init__(
        self,
        desk: PendingCalls,
        minds: SessionHost,
        *,
        max_active: int = 32,
        retry_delays: Sequence[int] = RETRY_DELAYS_MS,
    ) -> None:
        self._desk = desk
        self._ledger: Ledger = desk.ledger
        self._minds = minds
        self._max_active = max_active
        self._most_work = max(1, max_active // 2)
        self._retry_delays = retry_delays
        self._waiting = ReadyQueue()
        self._ranking = False
        """Whether it is being looked at how important they are who wait."""
        self._active: dict[str, _Active] = {}
        self._again: set[str] = set()
        """Sessions for which more came while they were being seen to."""
        self._pace = CycleRateLimit(self._ledger)
        self._resting: dict[str, asyncio.TimerHandle] = {}
        """Agents that have had all their cycles of this minute."""
        self._strangers: dict[str, tuple[float, float]] = {}
        """Sessions of agents that nobody here knows: since when they wait, and when they were last seen to."""
        self.cycle_counts: Counter[str] = Counter()
        """How cycles ended here, those of tasks too: as their loops did, `failed` or `canceled`."""
        self._listening: dict[str, Callable[[], None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._last_words: set[asyncio.Task[Any]] = set()
        """What has to be written down before the process ends."""
        self._stopping = False

    async def __aenter__(self) -> Scheduler:
        if not self._ledger.database.is_shared:
            await self._ledger.write(sessions.release_all_leases, self._ledger.node_id)
        self._forget = self._ledger.waiters.listen("sessions", lambda _: self._look_now())
        self._own(self._look_again())
        self._own(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain(0.0)
        self._forget()
        for forget in self._listening.values():
            forget()
        for timer in self._resting.values():
            timer.cancel()
        await asyncio.gather(*self._last_words, return_exceptions=True)
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    @property
    def active_count(self) -> int:
        """How many think now."""
        return len(self._active)

    def watch(self, session_id: str, agent_entity_id: str) -> None:
        """Has an agent think when its inbox gets something."""
        if session_id not in self._listening:
            key = f"inbox:{agent_entity_id}"
            self._listening[session_id] = self._ledger.waiters.listen(key, lambda _: self.wake(session_id))

    def unwatch(self, session_id: str) -> None:
        """An agent is not there any more."""
        self._pace.forget(session_id)
        if (timer := self._resting.pop(session_id, None)) is not None:
            timer.cancel()
        forget = self._listening.pop(session_id, None)
        if forget is not None:
            forget()

    def wake(self, session_id: str, priority: int | None = None) -> None:
        """Something may be there for a session to do; how important that is, it is looked at where it matters."""
        if self._stopping or session_id in self._resting:
            return
        if session_id in self._active:
            self._again.add(session_id)
        else:
            self._waiting.add(session_id, priority)
            self._give_turns()

    def cancel_run(self, run_id: str) -> None:
        """A run was ended by someone else: whoever thinks in it stops."""
        for active in self._active.values():
            if active.run_id == run_id:
                active.task.cancel()

    async def drain(self, timeout: float) -> None:
        """Lets each stop where the next process can go on; after `timeout` seconds, where it is."""
        self._stopping = True
        self._waiting.clear()
        for active in self._active.values():
            active.stop()
        if self._active:
            await asyncio.wait([active.task for active in self._active.values()], timeout=timeout)
        for active in self._active.values():
            active.cut_off()
        await asyncio.gather(*(active.task for active in self._active.values()), return_exceptions=True)

    # Whose turn it is

    def _give_turns(self, *, ranked: bool = False) -> None:
        if self._ranking:
            return
        if not ranked and len(self._waiting) > self._max_active - len(self._active) > 0 and self._waiting.unknown():
            self._ranking = True
            self._own(self._rank())
            return
        while len(self._active) < self._max_active and not self._stopping:
            session_id = self._next()
            if session_id is None:
                break
            active = self._active[session_id] = _Active()
            # Outside the call in which it was woken, perhaps: it is no part of that.
            active.task = asyncio.get_running_loop().create_task(
                self._run_session(session_id, active), context=context_without_call()
            )
            active.task.add_done_callback(lambda _, session_id=session_id: self._ended(session_id))

    def _next(self) -> str | None:
        """Half of the places are never for tasks: however many there are, people are answered."""
        if sum(map(tasks.is_background_session, self._active)) < self._most_work:
            return self._waiting.take()
        return self._waiting.take([one for one in self._waiting if not tasks.is_background_session(one)])

    async def _rank(self) -> None:
        """More wait than may think now: looks at how important they are."""
        asked = self._waiting.unknown()[:_BATCH]
        try:
            self._waiting.rank(await self._ledger.read(sessions.get_inbox_priorities, asked), asked)
        except StorageError as error:
            _log.warning("agents get their turns as they come: %s", error)
        finally:
            self._ranking = False
        self._give_turns(ranked=True)

    def _ended(self, session_id: str) -> None:
        self._active.pop(session_id, None)
        if session_id in self._again:
            self._again.discard(session_id)
            self.wake(session_id)
        self._give_turns()

    async def _run_session(self, session_id: str, active: _Active) -> None:
        try:
            await self._think(session_id, active)
        except LeaseLost as lost:
            _log.info("%s", lost)
        except StorageError as error:
            _log.warning("session %s has to wait: %s", session_id, error)
            self._later(session_id, _AFTER_TROUBLE_SECONDS)
        except Exception:
            _log.exception("session %s could not be seen to", session_id)
            self._later(session_id, _AFTER_TROUBLE_SECONDS * 5)

    async def _think(self, session_id: str, active: _Active) -> None:
        session = await self._ledger.commit(cycle_transactions.acquire, session_id, self._ledger.node_id)
        if session is None:
            return
        hold = active.hold = SessionLease(session_id, session.agent_entity_id, session.token)
        limits = self._minds.find_limits(session)
        try:
            if limits is None:
                await self._see_to_stranger(session, hold)
                active.hold = None
                # Quietly: told of it, this process would come at once to take it again.
                await self._ledger.write(sessions.release_lease, hold.session_id, hold.token)
                return
            begun: StartedCycle | None = None
            if session.run_id is not None:
                begun = await self._open(session, hold)
            while not active.stopping:
                if begun is None:
                    limits = self._minds.find_limits(session)  # Anew: what is configured may have changed meanwhile.
                    if limits is None or session.kind != "agent" or await self._must_rest(session, limits):
                        return
                    found = await self._ledger.commit(
                        cycle_transactions.begin,
                        hold,
                        batch=limits.inbox_batch,
                        max_agent_turns=limits.max_agent_turns,
                        is_router=limits.is_router,
                    )
                    if found is None:
                        active.hold = None  # Let go of already.
                        return
                    if found is False:
                        continue
                    begun = found
                    self._pace.record_start(session_id)
                goes_on = await self._run(session, hold, begun, active)
                begun = await self._open(session, hold) if goes_on else None
                if begun is None and self._waiting:
                    self._again.add(session_id)  # Others wait: this one goes behind them.
                    return
        finally:
            if active.hold is not None:
                await asyncio.shield(self._see_through(self._let_go(active.hold)))

    async def _open(self, session: SessionRecord, hold: SessionLease) -> StartedCycle | None:
        """The run that is under way; None where it is over."""
        return await self._ledger.commit(cycle_transactions.reopen, hold, self._minds.completion(session, None, None))

    async def _run(self, session: SessionRecord, hold: SessionLease, begun: StartedCycle, active: _Active) -> bool:
        """Lets one think until its run ends, or waits; says whether it goes on at once."""
        active.run_id = begun.run.id
        run_id = begun.run.id

        def look(_: Any) -> None:
            self._own(self._look_at(run_id))

        forget = self._ledger.waiters.listen(f"run:{run_id}", look)
        cycle: Cycle | None = None
        try:
            async with self._minds.prepare(session) as thinker:
                cycle = active.cycle = Cycle(self._desk, thinker, hold, begun)
                if active.stopping:
                    return False
                outcome = await cycle.run()
                active.run_id = None  # From here on it ends by itself.
                forget()
                goes_on = await self._end(session, hold, cycle, outcome)
                if outcome.end not in ("stopped", "paused"):
                    await self._minds.compact(session, thinker, hold)
                return goes_on
        except asyncio.CancelledError:
            if active.lost or self._stopping:
                raise  # Another goes on with it.
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                # Nobody canceled it: whatever it waited for ended like that.
                await self._fail(session, hold, begun, cycle, "what the run waited for was canceled")
                return False
            task.uncancel()  # It was meant for the run: the session lives on.
            return not await asyncio.shield(self._see_through(self._give_up(session, hold, begun.run.id)))
        except RunEnded:
            return not await self._give_up(session, hold, begun.run.id)
        except (LeaseLost, StorageError):
            raise
        except (ModelError, ToolspaceError) as error:
            if not await self._put_off(session, hold, begun, cycle, error, active):
                await self._fail(session, hold, begun, cycle, str(error))
        except Exception as error:
            _log.exception("a cycle of %s failed", session.id)
            await self._fail(session, hold, begun, cycle, f"internal error: {error!r}")
        finally:
            active.run_id, active.cycle = None, None
            forget()
        return False

    async def _end(self, session: SessionRecord, hold: SessionLease, cycle: Cycle, outcome: RunOutcome) -> bool:
        """Says whether the run goes on at once."""
        self.cycle_counts[outcome.end] += 1
        step = cycle.unsaved_step()
        if outcome.end == "stopped":
            if step.turns:
                await self._ledger.commit(cycle_transactions.save_step, hold, step)
            return False
        if outcome.end == "paused":
            return not await self._ledger.commit(cycle_transactions.pause, hold, step)
        failed = outcome.end in ("max_steps", "limit", "gave_up")
        also = self._minds.completion(session, outcome, cycle)
        await self._ledger.commit(_end_with, hold, step, also, "failed" if failed else "completed", outcome.reason)
        return False

    async def _put_off(
        self,
        session: SessionRecord,
        hold: SessionLease,
        begun: StartedCycle,
        cycle: Cycle | None,
        error: Exception,
        active: _Active,
    ) -> bool:
        """A run whose model does not answer now goes on later, where it is. Where an agent's has done nothing yet, what
        it was told comes again by itself."""
        step = _unkept(begun, cycle)
        if not (isinstance(error, ModelError) and error.is_transient) or (session.kind == "agent" and not step.number):
            return False
        wanted = min(round((error.retry_after or 0) * 1000), _LONGEST_RETRY_MS)
        delay = await self._ledger.commit(cycle_transactions.postpone, hold, step, self._retry_delays, at_least=wanted)
        if delay is None:
            return False
        _log.warning("%s goes on in %d ms: %s", session.id, delay, error)
        active.hold = None  # Let go of already.
        self._later(session.id, delay / 1000)
        return True

    async def _fail(
        self, session: SessionRecord, hold: SessionLease, begun: StartedCycle, cycle: Cycle | None, error: str
    ) -> None:
        self.cycle_counts["failed"] += 1
        step = _unkept(begun, cycle)
        error = str(mask_secrets(json_text.storable_text(error)))  # Nobody knows what a library puts into its errors.
        if session.kind != "agent":
            _log.warning("%s failed: %s", session.id, single_line(error, _LONGEST_LOGGED))
            await self._ledger.commit(
                _end_with, hold, step, self._minds.completion(session, None, cycle), "failed", error
            )
            return
        _log.warning("a cycle of the agent %s failed: %s", hold.agent_entity_id, single_line(error, _LONGEST_LOGGED))
        await self._ledger.commit(cycle_transactions.end, hold, step, status="failed", error=error, retried=True)

    async def _give_up(self, session: SessionRecord, hold: SessionLease, run_id: str) -> bool:
        """Forgets a run that is over. Whether it is."""
        self.cycle_counts["canceled"] += 1
        also = self._minds.completion(session, None, None)
        with suppress(LeaseLost):
            return await self._ledger.commit(_abandon_with, hold, run_id, also, "the run was canceled")
        return True

    async def _let_go(self, hold: SessionLease) -> None:
        with suppress(StorageError):
            await self._ledger.commit(cycle_transactions.release, hold)

    async def _see_to_stranger(self, session: SessionRecord, hold: SessionLease) -> None:
        """A run that was cut off, of an agent that nobody here knows: in the end it has failed."""
        now = time.monotonic()
        since, seen = self._strangers.get(session.id, (now, now))
        since = since if now - seen < _NOBODYS_SECONDS / 4 else now  # Others had it meanwhile.
        self._strangers[session.id] = (since, now)
        if session.run_id is None or now - since < _NOBODYS_SECONDS:
            return
        del self._strangers[session.id]
        reason = "no process knows this agent any more"
        also = self._minds.completion(session, None, None)
        await self._ledger.commit(_end_strange, hold, session.run_id, also, reason)

    async def _look_at(self, run_id: str) -> None:
        """Something happened to a run: where it has ended elsewhere, nobody thinks in it any more."""
        with suppress(StorageError):
            record = await self._ledger.read(run_rows.find, run_id)
            if record is None or record.status in ENDED_RUN:
                self.cancel_run(run_id)

    async def _must_rest(self, session: SessionRecord, limits: CycleLimits) -> bool:
        """Whether an agent has had all its cycles of this minute; then it is woken when the next is allowed."""
        seconds = await self._pace.seconds_until_allowed(session, limits.cycles_per_minute)
        if seconds <= 0:
            return False

        def go_on() -> None:
            del self._resting[session.id]
            self.wake(session.id)

        self._resting[session.id] = asyncio.get_running_loop().call_later(seconds, go_on)
        return True

    def _later(self, session_id: str, seconds: float) -> None:
        if not self._stopping:
            asyncio.get_running_loop().call_later(max(seconds, 0.01), self.wake, session_id)

    # What nobody told

    def _look_now(self) -> None:
        if not self._stopping:
            self._own(self._look_carefully())

    async def _look_again(self) -> None:
        while True:
            await self._look_carefully()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look_carefully(self) -> None:
        try:
            await self._look()
        except StorageError as error:
            _log.warning("agents have to wait: %s", error)
        except Exception:
            _log.exception("agents could not be looked after")

    async def _look(self) -> None:
        """Finds what was cut off, and what waits though nobody was told."""
        if self._stopping:
            return
        for session_id in await self._ledger.read(sessions.list_interrupted, limit=_BATCH):
            self.wake(session_id, _WORK if tasks.is_background_session(session_id) else 0)
        for session_id, importance in await self._ledger.read(sessions.list_with_waiting_inbox, limit=_BATCH):
            if session_id in self._listening:
                self.wake(session_id, importance)

    async def _beat(self) -> None:
        """Goes on holding what is held here, also while a model or a tool takes long."""
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            held = {active.hold.session_id: active for active in self._active.values() if active.hold is not None}
            tokens = [(one.hold.session_id, one.hold.token) for one in held.values() if one.hold is not None]
            if not tokens:
                continue
            asked_at = time.monotonic()
            try:
                kept = await self._ledger.write(sessions.renew_leases, tokens, lease_ms=cycle_transactions.LEASE_MS)
            except StorageError as error:
                _log.warning("sessions could not be held: %s", error)
                continue
            for session_id, active in held.items():
                if session_id in kept:
                    if active.cycle is not None:
                        active.cycle.lease_confirmed_at = asked_at
                elif active.hold is not None:
                    _log.warning("session %s was taken over by another process", session_id)
                    active.lost, active.hold = True, None
                    active.cut_off()

    def _see_through(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Does something to its end, also if whoever wants it done is canceled, or the process is to end."""
        task = asyncio.get_running_loop().create_task(work)
        self._last_words.add(task)
        task.add_done_callback(self._last_words.discard)
        return task

    def _own(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, context=context_without_call())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Active:
    """A session that is being seen to."""

    __slots__ = ("cycle", "hold", "lost", "run_id", "stopping", "task")

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.hold: SessionLease | None = None
        self.run_id: str | None = None
        self.cycle: Cycle | None = None
        self.stopping = False
        self.lost = False

    def stop(self) -> None:
        """At the next step."""
        self.stopping = True
        if self.cycle is not None:
            self.cycle.should_stop = True
            if self.cycle.is_waiting_for_model:
                self.cut_off()  # Nothing of the answer was kept: it is asked for again.

    def cut_off(self) -> None:
        """Now, wherever it is: another process goes on with it."""
        if self.cycle is not None:
            self.cycle.detach()
        self.task.cancel()


def _unkept(begun: StartedCycle, cycle: Cycle | None) -> CycleStep:
    """What a run has said that was not kept yet, if it came to that."""
    return cycle.unsaved_step() if cycle is not None else CycleStep(run_id=begun.run.id, cycle=begun.cycle, turns=())


def _end_with(
    effects: Effects,
    hold: SessionLease,
    step: CycleStep,
    also: cycle_transactions.WriteProgram | None,
    status: Any,
    error: str | None,
) -> Program[None]:
    yield from cycle_transactions.end(effects, hold, step, status=status, error=error)
    if also is not None:
        yield from also(effects)


def _abandon_with(
    effects: Effects, hold: SessionLease, run_id: str, also: cycle_transactions.WriteProgram | None, reason: str
) -> Program[bool]:
    over = yield from cycle_transactions.abandon(effects, hold, run_id, reason)
    if over and also is not None:
        yield from also(effects)
    return over


def _end_strange(
    effects: Effects, hold: SessionLease, run_id: str, also: cycle_transactions.WriteProgram | None, reason: str
) -> Program[None]:
    run = yield from run_rows.find(run_id)
    if run is not None and run.status not in ENDED_RUN:
        yield from runs.cancel_run(effects, run_id)
    yield from cycle_transactions.close_left_open(effects, run_id)
    yield from _abandon_with(effects, hold, run_id, also, reason)
