"""Lets agents think: each that has something to do gets its turn, in one process at a time. How, a cycle knows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol

import msgspec

from toolspace.agents import cycle_transactions
from toolspace.agents.cycle import Cycle, Thinker
from toolspace.agents.cycle_transactions import Begun, Hold, LeaseLost, RunOver, Step
from toolspace.agents.loop import Outcome
from toolspace.agents.rate_limit import Pace
from toolspace.agents.ready_queue import WaitingLine
from toolspace.core import json_text
from toolspace.core.line_escaping import in_a_line
from toolspace.core.records import ENDED_RUN
from toolspace.core.secret_masking import redact
from toolspace.errors import ModelError, StorageError, ToolspaceError
from toolspace.orchestrator.call import outside
from toolspace.spaces import runs
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.spaces.pending_calls import CallDesk
from toolspace.storage.database import Program
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries import sessions, tasks
from toolspace.storage.queries.sessions import Session

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


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How often an agent may think."""

    max_agent_turns: int = 6
    cycles_per_minute: int = 60
    inbox_batch: int = 50
    hands_on: bool = False
    """Whether it may hand on what it is asked: the answers to that are not for it to answer."""


class Minds(Protocol):
    """Who can think, and what becomes of it."""

    def limits(self, session: Session) -> Limits | None:
        """None where nobody here knows the agent."""
        ...

    def thinking(self, session: Session) -> AbstractAsyncContextManager[Thinker]:
        """Raises `ModelError` or another `ToolspaceError` where it cannot think."""
        ...

    def after(self, session: Session, outcome: Outcome | None, cycle: Cycle | None) -> cycle_transactions.Write | None:
        """What else happens in the moment that a run ends. Without an outcome: it could not go on, or was canceled."""
        ...

    async def rest(self, session: Session, thinker: Thinker, hold: Hold) -> None:
        """Called between cycles, while the session is held."""
        ...


class Dispatcher:
    """The agents of one process. `async with` lets them think."""

    def __init__(
        self, desk: CallDesk, minds: Minds, *, max_active: int = 32, retry_delays: Sequence[int] = RETRY_DELAYS_MS
    ) -> None:
        self._desk = desk
        self._ledger: Ledger = desk.ledger
        self._minds = minds
        self._max_active = max_active
        self._most_work = max(1, max_active // 2)
        self._retry_delays = retry_delays
        self._waiting = WaitingLine()
        self._ranking = False
        """Whether it is being looked at how important they are who wait."""
        self._active: dict[str, _Active] = {}
        self._again: set[str] = set()
        """Sessions for which more came while they were being seen to."""
        self._pace = Pace(self._ledger)
        self._resting: dict[str, asyncio.TimerHandle] = {}
        """Agents that have had all their cycles of this minute."""
        self._strangers: dict[str, tuple[float, float]] = {}
        """Sessions of agents that nobody here knows: since when they wait, and when they were last seen to."""
        self.cycles: Counter[str] = Counter()
        """How cycles ended here, those of tasks too: as their loops did, `failed` or `canceled`."""
        self._listening: dict[str, Callable[[], None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._last_words: set[asyncio.Task[Any]] = set()
        """What has to be written down before the process ends."""
        self._stopping = False

    async def __aenter__(self) -> Dispatcher:
        if not self._ledger.database.shared:
            await self._ledger.write(sessions.free_all, self._ledger.node_id)
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
    def active(self) -> int:
        """How many think now."""
        return len(self._active)

    def attend(self, session_id: str, agent_entity_id: str) -> None:
        """Has an agent think when its inbox gets something."""
        if session_id not in self._listening:
            key = f"inbox:{agent_entity_id}"
            self._listening[session_id] = self._ledger.waiters.listen(key, lambda _: self.wake(session_id))

    def ignore(self, session_id: str) -> None:
        """An agent is not there any more."""
        self._pace.forget(session_id)
        if (timer := self._resting.pop(session_id, None)) is not None:
            timer.cancel()
        forget = self._listening.pop(session_id, None)
        if forget is not None:
            forget()

    def wake(self, session_id: str, importance: int | None = None) -> None:
        """Something may be there for a session to do; how important that is, it is looked at where it matters."""
        if self._stopping or session_id in self._resting:
            return
        if session_id in self._active:
            self._again.add(session_id)
        else:
            self._waiting.add(session_id, importance)
            self._give_turns()

    def stop_run(self, run_id: str) -> None:
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
            active.task = asyncio.get_running_loop().create_task(self._see_to(session_id, active), context=outside())
            active.task.add_done_callback(lambda _, session_id=session_id: self._ended(session_id))

    def _next(self) -> str | None:
        """Half of the places are never for tasks: however many there are, people are answered."""
        if sum(map(tasks.is_work, self._active)) < self._most_work:
            return self._waiting.take()
        return self._waiting.take([one for one in self._waiting if not tasks.is_work(one)])

    async def _rank(self) -> None:
        """More wait than may think now: looks at how important they are."""
        asked = self._waiting.unknown()[:_BATCH]
        try:
            self._waiting.rank(await self._ledger.read(sessions.importance, asked), asked)
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

    async def _see_to(self, session_id: str, active: _Active) -> None:
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
        session = await self._ledger.commit(cycle_transactions.take, session_id, self._ledger.node_id)
        if session is None:
            return
        hold = active.hold = Hold(session_id, session.agent_entity_id, session.token)
        limits = self._minds.limits(session)
        try:
            if limits is None:
                await self._see_to_stranger(session, hold)
                active.hold = None
                # Quietly: told of it, this process would come at once to take it again.
                await self._ledger.write(sessions.release, hold.session_id, hold.token)
                return
            begun: Begun | None = None
            if session.run_id is not None:
                begun = await self._open(session, hold)
            while not active.stopping:
                if begun is None:
                    limits = self._minds.limits(session)  # Anew: what is configured may have changed meanwhile.
                    if limits is None or session.kind != "agent" or await self._must_rest(session, limits):
                        return
                    found = await self._ledger.commit(
                        cycle_transactions.begin_cycle,
                        hold,
                        batch=limits.inbox_batch,
                        max_agent_turns=limits.max_agent_turns,
                        hands_on=limits.hands_on,
                    )
                    if found is None:
                        active.hold = None  # Let go of already.
                        return
                    if found is False:
                        continue
                    begun = found
                    self._pace.note(session_id)
                goes_on = await self._run(session, hold, begun, active)
                begun = await self._open(session, hold) if goes_on else None
                if begun is None and self._waiting:
                    self._again.add(session_id)  # Others wait: this one goes behind them.
                    return
        finally:
            if active.hold is not None:
                await asyncio.shield(self._see_through(self._let_go(active.hold)))

    async def _open(self, session: Session, hold: Hold) -> Begun | None:
        """The run that is under way; None where it is over."""
        return await self._ledger.commit(cycle_transactions.open_cycle, hold, self._minds.after(session, None, None))

    async def _run(self, session: Session, hold: Hold, begun: Begun, active: _Active) -> bool:
        """Lets one think until its run ends, or waits; says whether it goes on at once."""
        active.run_id = begun.run.id
        run_id = begun.run.id

        def look(_: Any) -> None:
            self._own(self._look_at(run_id))

        forget = self._ledger.waiters.listen(f"run:{run_id}", look)
        cycle: Cycle | None = None
        try:
            async with self._minds.thinking(session) as thinker:
                cycle = active.cycle = Cycle(self._desk, thinker, hold, begun)
                if active.stopping:
                    return False
                outcome = await cycle.think()
                active.run_id = None  # From here on it ends by itself.
                forget()
                goes_on = await self._end(session, hold, cycle, outcome)
                if outcome.end not in ("stopped", "paused"):
                    await self._minds.rest(session, thinker, hold)
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
        except RunOver:
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

    async def _end(self, session: Session, hold: Hold, cycle: Cycle, outcome: Outcome) -> bool:
        """Says whether the run goes on at once."""
        self.cycles[outcome.end] += 1
        step = cycle.step()
        if outcome.end == "stopped":
            if step.turns:
                await self._ledger.commit(cycle_transactions.record, hold, step)
            return False
        if outcome.end == "paused":
            return not await self._ledger.commit(cycle_transactions.pause_cycle, hold, step)
        failed = outcome.end in ("max_steps", "limit", "gave_up")
        also = self._minds.after(session, outcome, cycle)
        await self._ledger.commit(_end_with, hold, step, also, "failed" if failed else "completed", outcome.reason)
        return False

    async def _put_off(
        self, session: Session, hold: Hold, begun: Begun, cycle: Cycle | None, error: Exception, active: _Active
    ) -> bool:
        """A run whose model does not answer now goes on later, where it is. Where an agent's has done nothing yet, what
        it was told comes again by itself."""
        step = _unkept(begun, cycle)
        if not (isinstance(error, ModelError) and error.passing) or (session.kind == "agent" and not step.number):
            return False
        wanted = min(round((error.retry_after or 0) * 1000), _LONGEST_RETRY_MS)
        delay = await self._ledger.commit(cycle_transactions.put_off, hold, step, self._retry_delays, at_least=wanted)
        if delay is None:
            return False
        _log.warning("%s goes on in %d ms: %s", session.id, delay, error)
        active.hold = None  # Let go of already.
        self._later(session.id, delay / 1000)
        return True

    async def _fail(self, session: Session, hold: Hold, begun: Begun, cycle: Cycle | None, error: str) -> None:
        self.cycles["failed"] += 1
        step = _unkept(begun, cycle)
        error = str(redact(json_text.kept_text(error)))  # Nobody knows what a library puts into its errors.
        if session.kind != "agent":
            _log.warning("%s failed: %s", session.id, in_a_line(error, _LONGEST_LOGGED))
            await self._ledger.commit(_end_with, hold, step, self._minds.after(session, None, cycle), "failed", error)
            return
        _log.warning("a cycle of the agent %s failed: %s", hold.agent_entity_id, in_a_line(error, _LONGEST_LOGGED))
        await self._ledger.commit(cycle_transactions.end_cycle, hold, step, status="failed", error=error, retried=True)

    async def _give_up(self, session: Session, hold: Hold, run_id: str) -> bool:
        """Forgets a run that is over. Whether it is."""
        self.cycles["canceled"] += 1
        also = self._minds.after(session, None, None)
        with suppress(LeaseLost):
            return await self._ledger.commit(_abandon_with, hold, run_id, also, "the run was canceled")
        return True

    async def _let_go(self, hold: Hold) -> None:
        with suppress(StorageError):
            await self._ledger.commit(cycle_transactions.release, hold)

    async def _see_to_stranger(self, session: Session, hold: Hold) -> None:
        """A run that was cut off, of an agent that nobody here knows: in the end it has failed."""
        now = time.monotonic()
        since, seen = self._strangers.get(session.id, (now, now))
        since = since if now - seen < _NOBODYS_SECONDS / 4 else now  # Others had it meanwhile.
        self._strangers[session.id] = (since, now)
        if session.run_id is None or now - since < _NOBODYS_SECONDS:
            return
        del self._strangers[session.id]
        reason = "no process knows this agent any more"
        also = self._minds.after(session, None, None)
        await self._ledger.commit(_end_strange, hold, session.run_id, also, reason)

    async def _look_at(self, run_id: str) -> None:
        """Something happened to a run: where it has ended elsewhere, nobody thinks in it any more."""
        with suppress(StorageError):
            record = await self._ledger.read(run_rows.one, run_id)
            if record is None or record.status in ENDED_RUN:
                self.stop_run(run_id)

    async def _must_rest(self, session: Session, limits: Limits) -> bool:
        """Whether an agent has had all its cycles of this minute; then it is woken when the next is allowed."""
        seconds = await self._pace.seconds_to_rest(session, limits.cycles_per_minute)
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
        for session_id in await self._ledger.read(sessions.cut_off, limit=_BATCH):
            self.wake(session_id, _WORK if tasks.is_work(session_id) else 0)
        for session_id, importance in await self._ledger.read(sessions.awaited, limit=_BATCH):
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
                kept = await self._ledger.write(sessions.hold_all, tokens, lease_ms=cycle_transactions.LEASE_MS)
            except StorageError as error:
                _log.warning("sessions could not be held: %s", error)
                continue
            for session_id, active in held.items():
                if session_id in kept:
                    if active.cycle is not None:
                        active.cycle.held_at = asked_at
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
        task = asyncio.get_running_loop().create_task(work, context=outside())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Active:
    """A session that is being seen to."""

    __slots__ = ("cycle", "hold", "lost", "run_id", "stopping", "task")

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.hold: Hold | None = None
        self.run_id: str | None = None
        self.cycle: Cycle | None = None
        self.stopping = False
        self.lost = False

    def stop(self) -> None:
        """At the next step."""
        self.stopping = True
        if self.cycle is not None:
            self.cycle.stopping = True
            if self.cycle.is_asking:
                self.cut_off()  # Nothing of the answer was kept: it is asked for again.

    def cut_off(self) -> None:
        """Now, wherever it is: another process goes on with it."""
        if self.cycle is not None:
            self.cycle.leave()
        self.task.cancel()


def _unkept(begun: Begun, cycle: Cycle | None) -> Step:
    """What a run has said that was not kept yet, if it came to that."""
    return cycle.step() if cycle is not None else Step(run_id=begun.run.id, cycle=begun.cycle, turns=())


def _end_with(
    effects: Effects, hold: Hold, step: Step, also: cycle_transactions.Write | None, status: Any, error: str | None
) -> Program[None]:
    yield from cycle_transactions.end_cycle(effects, hold, step, status=status, error=error)
    if also is not None:
        yield from also(effects)


def _abandon_with(
    effects: Effects, hold: Hold, run_id: str, also: cycle_transactions.Write | None, reason: str
) -> Program[bool]:
    over = yield from cycle_transactions.abandon(effects, hold, run_id, reason)
    if over and also is not None:
        yield from also(effects)
    return over


def _end_strange(
    effects: Effects, hold: Hold, run_id: str, also: cycle_transactions.Write | None, reason: str
) -> Program[None]:
    run = yield from run_rows.one(run_id)
    if run is not None and run.status not in ENDED_RUN:
        yield from runs.cancel_run(effects, run_id)
    yield from cycle_transactions.clear_up(effects, run_id)
    yield from _abandon_with(effects, hold, run_id, also, reason)
