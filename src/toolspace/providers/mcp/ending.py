"""Waits for what must be finished, also when whoever waits is cancelled. Starts nothing."""

from __future__ import annotations

import asyncio

import anyio


async def to_the_end(task: asyncio.Task[None]) -> None:
    """Returns or raises when the task has ended; a cancellation is raised then too, and not before.

    The task must end by itself within a bounded time.
    """
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # Else a cancelled scope would interrupt every single wait.
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    if not task.cancelled():
        task.result()
