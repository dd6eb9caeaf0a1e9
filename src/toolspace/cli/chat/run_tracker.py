"""Follows the runs of the agent in a chat: finds them, subscribes to their events, cancels them, knows when all ended.

The inbox of the agent shows whether an event still waits, and the list of runs shows which ones are open. Both are
polled only while something is expected; the end of a known run comes with its own stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, cast

from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import ApiError, Conflict, GatewayUnreachable, NotFound
from toolspace.client.events import StreamEvent
from toolspace.core.ids import derived_id
from toolspace.core.inbox_text import HANDOFF_PREFIX
from toolspace.core.stored_records import ENDED_RUN, Entity, Space

_FIRST_POLL_SECONDS: Final = 0.05
_MAX_POLL_SECONDS: Final = 1.0
_SILENCE_SECONDS: Final = 10.0
_CANCEL_SECONDS: Final = 10.0
_MAX_RUNS: Final = 20
_MAX_EVENTS: Final = 500
_HANDOFF_TOOL: Final = "router__handoff-to"

OnRunEvent = Callable[[str, StreamEvent], None]


class ChatContext(NamedTuple):
    """The gateway, the participants and the space of a chat."""

    client: ToolspaceClient
    person: Entity
    agent: Entity
    space: Space
    names: dict[str, str]
    """Entity id → name of every member of the space. Later members are added."""


class RunTracker:
    """The runs of the agent that belong to this chat."""

    def __init__(self, context: ChatContext, *, on_event: OnRunEvent, on_silence: Callable[[], None]) -> None:
        """`on_event` gets every event of a run with its id; `on_silence` is called if no run starts for long."""
        self.has_failed = False
        """Whether the last run that ended has failed."""
        self._context = context
        self._client = context.client
        self._on_event = on_event
        self._on_silence = on_silence
        self._expected: dict[str, str] = {}
        """Inbox event that no run has handled yet → the agent whose inbox has it, which changes with a handoff."""
        self._expected_since = 0
        """When the first of them was created: older runs have nothing to do with them."""
        self._runs: dict[str, asyncio.Task[None]] = {}
        """Open run → the task that reads its events."""
        self._ended_runs: set[str] = set()
        self._answering_runs: set[str] = set()
        """Runs in this space, or for messages of it, that have not handed the request off."""
        self._wake_up = asyncio.Event()
        self._state_changes = asyncio.Condition()
        self._is_busy = False

    def expect_event(self, event_id: str, created_at: int) -> None:
        """Waits for the run that handles an inbox event. `created_at` is a time of the gateway."""
        if not self._expected:
            self._expected_since = created_at
        self._expected[event_id] = self._context.agent.id
        self.has_failed = False
        self.wake()

    @property
    def is_busy(self) -> bool:
        """Whether a run is open or expected."""
        return self._is_busy

    def answers_here(self, run_id: str) -> bool:
        """Whether a person in this space waits for the answer of a run."""
        return run_id in self._answering_runs

    def add_run(self, run_id: str) -> None:
        """Follows a run until it ends."""
        if run_id not in self._runs and run_id not in self._ended_runs:
            self._runs[run_id] = asyncio.ensure_future(self._follow(run_id))
            self.wake()

    def wake(self) -> None:
        """Polls at once: there may be something new."""
        self._is_busy = True
        self._wake_up.set()

    async def wait_until_idle(self, *, unless: Callable[[], bool] = lambda: False) -> None:
        """Returns when no run is open or expected, or when `unless` is true."""
        async with self._state_changes:
            await self._state_changes.wait_for(lambda: not self._is_busy or unless())

    async def wait_until_busy(self) -> None:
        async with self._state_changes:
            await self._state_changes.wait_for(lambda: self._is_busy)

    async def cancel(self) -> bool:
        """Cancels the open runs. Returns False if there was none."""
        has_cancelled = False
        with suppress(ApiError, GatewayUnreachable, TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                await self._poll()
                for run_id in [*self._runs]:
                    with suppress(Conflict, NotFound):  # It has just ended.
                        await self._client.runs.cancel(run_id)
                        has_cancelled = True
        return has_cancelled

    async def run(self) -> None:
        """Polls while something is expected. Runs until it is cancelled."""
        while True:
            await self._wake_up.wait()
            delay, waiting_time = _FIRST_POLL_SECONDS, 0.0
            while True:
                self._wake_up.clear()
                await self._notify()
                if not await self._poll():
                    break
                if waiting_time < _SILENCE_SECONDS <= waiting_time + delay and not self._runs:
                    self._on_silence()
                waiting_time += delay
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._wake_up.wait()
                delay = min(delay * 2, _MAX_POLL_SECONDS)
            if not self._wake_up.is_set():
                self._is_busy = False
                await self._notify()

    async def aclose(self) -> None:
        tasks = [*self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _notify(self) -> None:
        async with self._state_changes:
            self._state_changes.notify_all()

    async def _poll(self) -> bool:
        """Returns whether a run is open or expected."""
        expected = {**self._expected}  # Copied: events that are added meanwhile are for the next poll.
        for agent_id in {self._context.agent.id, *expected.values()}:
            event_ids = {event_id for event_id, owner_id in expected.items() if owner_id == agent_id}
            await self._poll_agent(agent_id, event_ids)
        return bool(self._expected or self._runs)

    async def _poll_agent(self, agent_id: str, event_ids: set[str]) -> None:
        # The inbox before the runs: an event that has left the inbox is in a run by then, or handled.
        waiting_ids: set[str] = set()
        for status in ("pending", "processing") if event_ids else ():
            events = await self._client.agents.list_inbox(agent_id, status=status, limit=_MAX_EVENTS)
            waiting_ids.update(event.event_id for event in events)
        for event_id in event_ids - waiting_ids:
            self._expected.pop(event_id, None)
        for run in (await self._client.agents.list_runs(agent_id, limit=_MAX_RUNS)).items:
            is_open = run.status not in ENDED_RUN
            # Ended runs too: one that handled an event may have failed at once.
            is_expected = bool(event_ids) and (is_open or run.created_at >= self._expected_since)
            if is_expected or (is_open and run.space_id == self._context.space.id):
                trigger: object = run.trigger
                data = cast("dict[str, Any]", trigger) if isinstance(trigger, dict) else {}
                if self._context.space.id in (run.space_id, data.get("answerSpaceId")):
                    self._answering_runs.add(run.id)
                self.add_run(run.id)

    async def _follow(self, run_id: str) -> None:
        """Reads the events of a run until it ends."""
        events = self._client.runs.subscribe(run_id, from_start=True)
        try:
            receiver: str | None = None
            async for event in events:
                if event.type == "tool.done" and event.data.get("toolName") == _HANDOFF_TOOL:
                    output: Any = event.data.get("output") or {}
                    receiver = str(output.get("handedTo"))
                    self._answering_runs.discard(run_id)
                if event.type == "run.done":
                    if receiver is not None and event.data.get("status") == "completed":
                        # After a handoff the answer comes from the receiving agent.
                        self._expected[f"{HANDOFF_PREFIX}{run_id}"] = derived_id("ent", "agent", receiver)
                    self.has_failed = event.data.get("status") == "failed"
                    if self.has_failed:
                        self._expected.clear()  # The gateway may retry, but much later.
                self._on_event(run_id, event)
                if event.type == "run.done":
                    break
        except ApiError:
            pass  # The run was removed.
        finally:
            events.close()
            self._ended_runs.add(run_id)
            self._runs.pop(run_id, None)
            self._wake_up.set()
