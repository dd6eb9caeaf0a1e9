"""The runs that this process makes calls in: their limits, budgets and traces, kept while they are open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from toolspace.core.records import ENDED_RUN, RunRecord
from toolspace.errors import RefusedError
from toolspace.orchestrator.run import Run
from toolspace.spaces import runs
from toolspace.spaces.ledger import Ledger
from toolspace.stores.sql import runs as run_rows

_MOST_KEPT = 10_000


class Cycles:
    """Runs by id. One that was not used for long may be forgotten, and begins anew with its limits when it is used."""

    def __init__(self, ledger: Ledger, make: Callable[..., Run]) -> None:
        self._ledger = ledger
        self._make = make
        self._runs: OrderedDict[str, _Kept] = OrderedDict()

    async def enter(self, run_id: str) -> tuple[RunRecord, Run]:
        """A run to make a call in. Raises where there is none, or it has ended."""
        record = await self._ledger.read(runs.the_run, run_id)
        if record.status in ENDED_RUN:
            message = f'the run "{run_id}" has ended: it is {record.status}'
            raise RefusedError("conflict", message, runStatus=record.status)
        kept = self._runs.get(run_id)
        if kept is None:
            kept = self._runs[run_id] = _Kept(self._make(id=run_id), self._forget_when_over(run_id))
            while len(self._runs) > _MOST_KEPT:
                self._drop(next(iter(self._runs)))
        self._runs.move_to_end(run_id)
        return record, kept.run

    def find(self, run_id: str) -> Run | None:
        """The run, if this process made calls in it lately."""
        kept = self._runs.get(run_id)
        return kept.run if kept is not None else None

    def ended(self, run_id: str) -> None:
        """A run was closed here."""
        self._drop(run_id)

    async def stop_if_canceled(self, run_id: str) -> None:
        """Stops the calls of a run that was canceled, here or elsewhere."""
        kept = self._runs.get(run_id)
        if kept is None:
            return
        record = await self._ledger.read(run_rows.one, run_id)
        if record is None or record.status == "canceled":
            kept.run.cancel()
            self._drop(run_id)

    def _forget_when_over(self, run_id: str) -> Callable[[], None]:
        import asyncio

        tasks: set[Any] = set()

        def look(_: Any) -> None:
            task = asyncio.get_running_loop().create_task(self.stop_if_canceled(run_id))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        return self._ledger.waiters.listen(f"run:{run_id}", look)

    def _drop(self, run_id: str) -> None:
        kept = self._runs.pop(run_id, None)
        if kept is not None:
            kept.forget()
            kept.run.close()


class _Kept:
    __slots__ = ("forget", "run")

    def __init__(self, run: Run, forget: Callable[[], None]) -> None:
        self.run = run
        self.forget = forget
