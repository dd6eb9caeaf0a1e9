"""A model for an agent, its tasks and what looks back on them: each says its own script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.agents.agent_harness import Village
from toolspace.core.model import ModelRequest
from toolspace.core.records import TaskRecord
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel
from toolspace.storage.database import Program
from toolspace.storage.queries import tasks


def kind_of(request: ModelRequest) -> str:
    """Who asks."""
    if request.system.startswith("You work on a task"):
        return "task"
    return "reflection" if request.system.startswith("You keep the long-term memory") else "main"


class Workers:
    """Scripts by who asks. What has no script says that it is done."""

    def __init__(self, *, main: Sequence[Any] = (), task: Sequence[Any] = (), reflection: Sequence[Any] = ()) -> None:
        self._left = {"main": list(main), "task": list(task), "reflection": list(reflection)}
        self.model = ScriptedModel(self._say)

    def asked(self, kind: str) -> list[ModelRequest]:
        """What one of them was asked, in order."""
        return [request for request in self.model.requests if kind_of(request) == kind]

    def _say(self, request: ModelRequest) -> Any:
        left = self._left[kind_of(request)]
        step = left.pop(0) if left else "Done."
        if isinstance(step, ModelError):
            raise step
        return step(request) if callable(step) else step


async def the_tasks(town: Village, agent: str | None = None) -> list[TaskRecord]:
    """Oldest first."""
    return (await town.ledger.read(tasks.list_tasks, agent or town.agent))[::-1]


async def at_rest(town: Village) -> list[TaskRecord]:
    """Waits until nobody has anything to do any more, but for what waits for others; gives the tasks, oldest first."""
    while True:
        thinking = town.residents.scheduler.active_count or await town.ledger.read(_under_way)
        if not thinking and not any(event.status in ("pending", "processing") for event in await town.inbox()):
            return await the_tasks(town)
        await asyncio.sleep(0.005)


def _under_way() -> Program[bool]:
    rows = yield "SELECT 1 FROM sessions WHERE run_id IS NOT NULL LIMIT 1", ()
    return bool(rows)
