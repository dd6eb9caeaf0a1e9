"""What an agent does about what was said: finds its runs, follows them, cancels them, and knows when it is done.

An inbox says whether something is still to be looked at, and the list of runs what is under way. Both are asked only
while there is something to wait for; once a run is known, its own stream tells when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from toolspace.cli.chat.setup import ChatContext
from toolspace.client.errors import ApiError, Conflict, GatewayUnreachable, NotFound
from toolspace.client.events import StreamEvent
from toolspace.core.ids import derived_id
from toolspace.core.inbox_text import HANDOFF_PREFIX
from toolspace.core.records import ENDED_RUN

_FIRST_LOOK: Final = 0.05
_MOST_PAUSE: Final = 1.0
_SILENCE_SECONDS: Final = 10.0
_RUNS: Final = 20
_EVENTS: Final = 500
_HANDOFF: Final = "router__handoff-to"

Hear = Callable[[str, StreamEvent], None]


class RunTracker:
    """The runs of one agent that this conversation is about."""

    def __init__(self, room: ChatContext, *, hear: Hear, on_silence: Callable[[], None]) -> None:
        """`hear` gets every event of them, with the run; `on_silence` is called where no run begins for long."""
        self.failed = False
        """Whether the last run that ended has failed."""
        self._room = room
        self._client = room.client
        self._hear = hear
        self._on_silence = on_silence
        self._expected: dict[str, str] = {}
        """Events that nobody has looked after yet, and whose inbox they are in: the agent's, or that of another one
        which it has handed them on to."""
        self._since = 0
        """When the first of them came: a run that is older is not about them."""
        self._runs: dict[str, asyncio.Task[None]] = {}
        """Those that are open, and what follows them."""
        self._over: set[str] = set()
        self._stirred = asyncio.Event()
        self._changed = asyncio.Condition()
        self._busy = False

    def expect_event(self, event_id: str, at: int) -> None:
        """Something was said or answered at a time of the gateway: the agent finds it in its inbox under this id."""
        if not self._expected:
            self._since = at
        self._expected[event_id] = self._room.agent.id
        self.failed = False
        self.wake()

    @property
    def is_busy(self) -> bool:
        """Whether there is something to wait for."""
        return self._busy

    def add_run(self, run_id: str) -> None:
        """A run was seen."""
        if run_id not in self._runs and run_id not in self._over:
            self._runs[run_id] = asyncio.ensure_future(self._follow(run_id))
            self.wake()

    def wake(self) -> None:
        """There may be something to look at."""
        self._busy = True
        self._stirred.set()

    async def wait_until_idle(self, *, unless: Callable[[], bool] = lambda: False) -> None:
        """Waits until the agent has done all that there was; or until something else holds."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._busy or unless())

    async def wait_until_busy(self) -> None:
        """Waits until there is something again."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._busy)

    async def cancel(self) -> bool:
        """Cancels what the agent does now; whether there was anything."""
        found = False
        with suppress(ApiError, GatewayUnreachable):
            await self._look()
            for run_id in [*self._runs]:
                with suppress(Conflict, NotFound):  # It has just ended.
                    await self._client.runs.cancel(run_id)
                    found = True
        return found

    async def run(self) -> None:
        """Looks after all that is waited for, as long as it is let."""
        while True:
            await self._stirred.wait()
            pause, waited = _FIRST_LOOK, 0.0
            while True:
                self._stirred.clear()
                await self._tell()
                if not await self._look():
                    break
                if waited < _SILENCE_SECONDS <= waited + pause and not self._runs:
                    self._on_silence()
                waited += pause
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._stirred.wait()
                pause = min(pause * 2, _MOST_PAUSE)
            if not self._stirred.is_set():
                self._busy = False
                await self._tell()

    async def aclose(self) -> None:
        following = [*self._runs.values()]
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _look(self) -> bool:
        """Whether there is something to wait for. The inbox first: what it has no more is in a run already, or over."""
        expected = {**self._expected}  # What is said while this looks is for the next time.
        for agent in {self._room.agent.id, *expected.values()}:
            await self._look_at(agent, {event_id for event_id, whose in expected.items() if whose == agent})
        return bool(self._expected or self._runs)

    async def _look_at(self, agent: str, expected: set[str]) -> None:
        waiting: set[str] = set()
        for status in ("pending", "processing") if expected else ():
            found = await self._client.agents.list_inbox(agent, status=status, limit=_EVENTS)
            waiting.update(one.event_id for one in found)
        for event_id in expected - waiting:
            self._expected.pop(event_id, None)
        for one in (await self._client.agents.list_runs(agent, limit=_RUNS)).items:
            # One that is over already is looked at too: it may have failed at once.
            is_about_it = bool(expected) and (one.status not in ENDED_RUN or one.created_at >= self._since)
            if is_about_it or (one.status not in ENDED_RUN and one.space_id == self._room.space.id):
                self.add_run(one.id)

    async def _follow(self, run_id: str) -> None:
        """Hears of a run until it ends."""
        events = self._client.runs.subscribe(run_id, from_start=True)
        try:
            handed_to: str | None = None
            async for event in events:
                if event.type == "tool.done" and event.data.get("toolName") == _HANDOFF:
                    output: Any = event.data.get("output") or {}
                    handed_to = str(output.get("handedTo"))
                if event.type == "run.done":
                    if handed_to is not None and event.data.get("status") == "completed":
                        # Its answer is the answer.
                        self._expected[f"{HANDOFF_PREFIX}{run_id}"] = derived_id("ent", "agent", handed_to)
                    self.failed = event.data.get("status") == "failed"
                    if self.failed:
                        self._expected.clear()  # It may be tried again, much later.
                self._hear(run_id, event)
                if event.type == "run.done":
                    break
        except ApiError:
            pass  # It was removed.
        finally:
            events.close()
            self._over.add(run_id)
            self._runs.pop(run_id, None)
            self._stirred.set()
