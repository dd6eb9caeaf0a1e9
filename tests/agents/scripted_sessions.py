"""A model for an agent, its background tasks and their reflections: each has its own script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.agents.agent_harness import AgentHarness
from toolspace.core.language_model import ModelRequest, Usage
from toolspace.core.stored_records import TaskRecord
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel
from toolspace.storage.database import Program
from toolspace.storage.queries import tasks

ONE_REQUEST = Usage(requests=1)


def kind_of(request: ModelRequest) -> str:
    """The kind of session that makes a request: `main`, `task` or `reflection`."""
    if request.system.startswith("You work on a task"):
        return "task"
    return "reflection" if request.system.startswith("You keep the long-term memory") else "main"


class ScriptedSessions:
    """Scripts by kind of session. After its script, a session says that it is done."""

    def __init__(
        self,
        *,
        main: Sequence[Any] = (),
        task: Sequence[Any] = (),
        reflection: Sequence[Any] = (),
        usage: Usage = ONE_REQUEST,
    ) -> None:
        self._scripts = {"main": list(main), "task": list(task), "reflection": list(reflection)}
        self.model = ScriptedModel(self._respond, usage=usage)

    def requests_of(self, kind: str) -> list[ModelRequest]:
        """The requests of one kind of session, in order."""
        return [request for request in self.model.requests if kind_of(request) == kind]

    def _respond(self, request: ModelRequest) -> Any:
        script = self._scripts[kind_of(request)]
        step = script.pop(0) if script else "Done."
        if isinstance(step, ModelError):
            raise step
        return step(request) if callable(step) else step


async def list_tasks(harness: AgentHarness, agent: str | None = None) -> list[TaskRecord]:
    """The tasks of an agent, oldest first."""
    return (await harness.ledger.read(tasks.list_tasks, agent or harness.agent))[::-1]


async def wait_until_done(harness: AgentHarness) -> list[TaskRecord]:
    """Waits until no session has anything to do but wait for results. Returns the tasks, oldest first."""
    while True:
        is_busy = harness.host.scheduler.active_count or await harness.ledger.read(_has_open_run)
        if not is_busy and not any(event.status in ("pending", "processing") for event in await harness.inbox()):
            return await list_tasks(harness)
        await asyncio.sleep(0.005)


def _has_open_run() -> Program[bool]:
    rows = yield "SELECT 1 FROM sessions WHERE run_id IS NOT NULL LIMIT 1", ()
    return bool(rows)
