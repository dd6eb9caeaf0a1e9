"""The runs that this process makes calls in: their limits, budgets and traces, kept while they are open."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from toolspace.core.records import ENDED_RUN, RunRecord
from toolspace.errors import RefusedError, StorageError
from toolspace.orchestrator.run import Run
from toolspace.spaces import runs
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import runs as run_rows

_MOST_KEPT = 10_000
_LOOK_AGAIN_SECONDS = 1.0


class Cycles:
    """Runs by id. One that was not used for long may be forgotten, and begins anew with its limits when it is used."""

    def __init__(self, ledger: Ledger, make: Callable[..., Run]) -> None:
        self._ledger = ledger
        self._make = make
        self._runs: OrderedDict[str, _Kept] = OrderedDict()
        self._looking: set[asyncio.Task[None]] = set()

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

    async def aclose(self) -> None:
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)

    def _forget_when_over(self, run_id: str) -> Callable[[], None]:
        def look(_: Any) -> None:
            task = asyncio.get_running_loop().create_task(self._look(run_id))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

        return self._ledger.waiters.listen(f"run:{run_id}", look)

    async def _look(self, run_id: str) -> None:
        """Something happened to a run, here or elsewhere: where it was canceled, its calls stop."""
        while (kept := self._runs.get(run_id)) is not None:
            try:
                record = await self._ledger.read(run_rows.one, run_id)
            except StorageError:
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                continue
            if record is None or record.status == "canceled":
                kept.run.cancel()
            if record is None or record.status in ENDED_RUN:
                self._drop(run_id)
            return

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
