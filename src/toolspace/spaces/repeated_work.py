"""Runs the background work of a process again and again, each kind in a task of its own, so that none delays another.

The sweeper and the scheduler of agents own one each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from toolspace.errors import StorageError
from toolspace.orchestrator.call import context_without_call

_log = logging.getLogger("toolspace.sweeper")

TASK_PREFIX: Final = "toolspace-background: "
"""The names of the tasks start with this."""
_RETRY_SECONDS: Final = 1.0


class RepeatedWork:
    """Owns tasks that repeat work until `aclose`, which waits for them. An error is logged, and the work continues."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, name: str, work: Callable[[], Awaitable[float]], *, retry_seconds: float = _RETRY_SECONDS
    ) -> Callable[[], None]:
        """Starts a task that runs `work` at once, and again after the seconds that it returns, or that follow an error.

        Returns a function that starts the next round at once. `name` is shown in the log: "firing plans".
        """
        awake = asyncio.Event()
        repetition = _repeat(name, work, awake, retry_seconds)
        # Without the context of a call, if a call starts it.
        task = asyncio.get_running_loop().create_task(
            repetition, name=TASK_PREFIX + name, context=context_without_call()
        )
        self._tasks.add(task)
        return awake.set

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()


async def _repeat(name: str, work: Callable[[], Awaitable[float]], awake: asyncio.Event, retry_seconds: float) -> None:
    while True:
        awake.clear()
        seconds = retry_seconds
        try:
            seconds = await work()
        except StorageError as error:
            _log.warning("background work failed: %s. Retrying in %g s: %s", name, retry_seconds, error)
        except Exception:
            _log.exception("background work failed: %s. Retrying in %g s", name, retry_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await awake.wait()
