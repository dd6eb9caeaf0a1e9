"""Runs the background tasks of a toolspace: watches its configuration, closes removed providers, and deletes expired
stored outputs.

Used by `toolspace.toolspace`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolspace.config.find_and_watch import watch_files
from toolspace.core.extension_points import OutputStore, ResultCache, ToolProvider
from toolspace.errors import ToolspaceError
from toolspace.orchestrator.call import context_without_call
from toolspace.orchestrator.orchestrator import ToolOrchestrator

SWEEP_SECONDS = 3600.0

_log = logging.getLogger("toolspace")


class MaintenanceTasks:
    """Owns tasks, and waits for them in `aclose`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._uncancellable_tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], *, is_cancellable: bool = True) -> None:
        """Starts a task. `aclose` cancels it, unless it is not cancellable: then `aclose` waits for its end."""
        tasks = self._tasks if is_cancellable else self._uncancellable_tasks
        # Without the context of a call: a tool may request a reload, which is not part of its call.
        task = asyncio.get_running_loop().create_task(work, context=context_without_call())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    @property
    def has_uncancellable(self) -> bool:
        return bool(self._uncancellable_tasks)

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def aclose(self) -> None:
        """Cancels the cancellable tasks and waits for all."""
        self.cancel()
        await asyncio.gather(*self._tasks, *self._uncancellable_tasks, return_exceptions=True)


class ConfigWatcher:
    """Reloads a toolspace whenever a file of its configuration changes, and on SIGHUP."""

    def __init__(
        self,
        background: MaintenanceTasks,
        reload: Callable[[], Awaitable[None]],
        finish_reload: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """`finish_reload` is the part of a reload that may take long."""
        self._background = background
        self._reload = reload
        self._finish_reload = finish_reload
        self._handles_sighup = False

    def start(self, files: Callable[[], Iterable[Path]], interval: float) -> None:
        # `watch_files` reads the files now, not when the task starts: no change between the two is missed.
        changes = watch_files(files, interval=interval)

        async def reload_on_change() -> None:
            async for _ in changes:
                await self._run()

        self._background.start(reload_on_change())
        # Some platforms have no SIGHUP, and only the main thread can handle it.
        with suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: self._background.start(self._run()))
            self._handles_sighup = True

    def stop(self) -> None:
        """Removes the signal handler. The owner of the background tasks ends the rest."""
        if self._handles_sighup:
            self._handles_sighup = False
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    async def _run(self) -> None:
        try:
            await self._reload()
            _log.info("the configuration was reloaded")
            # In another task: a provider that hangs must not block later changes.
            self._background.start(self._finish_reload())
        except ToolspaceError as error:
            _log.warning("the changed configuration is invalid, the old one stays in force: %s", error)
        except Exception:  # The next change may repair it, and must still be noticed.
            _log.exception("the changed configuration could not be applied")


async def sweep_outputs(outputs: OutputStore, stored_sessions: set[str]) -> None:
    """Deletes expired outputs every hour. Removes sessions that have no outputs left from `stored_sessions`."""
    while True:
        sessions_before = frozenset(stored_sessions)
        try:
            await outputs.sweep()
            sessions = await outputs.sessions()
        except OSError as error:
            _log.warning("expired stored outputs could not be deleted: %s", error)
        else:
            stored_sessions.difference_update(sessions_before.difference(sessions))
        await asyncio.sleep(SWEEP_SECONDS)


async def close_when_idle(orchestrator: ToolOrchestrator, provider: ToolProvider) -> None:
    """Closes a removed provider after the running calls have ended."""
    # All calls, not only its own: a tool may call others, and closing is not urgent.
    await orchestrator.wait_until_idle()
    try:
        await orchestrator.unregister(provider)
    except Exception:
        _log.exception("provider %s did not close", provider.namespace or provider.kind)


async def load_stored_sessions(outputs: OutputStore, stored_sessions: set[str]) -> None:
    """Adds the sessions that have stored outputs from earlier processes."""
    try:
        stored_sessions.update(await outputs.sessions())
    except OSError as error:
        _log.warning("stored outputs cannot be read: %s", error)


async def clear_cache(cache: ResultCache) -> None:
    """Clears the cache. A broken one is only logged: it must not stop new providers from starting."""
    try:
        await cache.clear()
    except Exception as error:
        _log.warning("the cache could not be cleared: %r", error)
