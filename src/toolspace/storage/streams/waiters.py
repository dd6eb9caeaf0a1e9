"""Who waits for what, by key: `call:ID`, `inbox:AGENT`, `offers:TOOL`. Wakes them; stores nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

Listener = Callable[[Any], None]


class Waiters:
    """Futures and listeners by key. Everything happens on the event loop.

    A wake-up carries what happened where that is known here, and None where another process did it: then whoever
    waits looks for itself.
    """

    def __init__(self) -> None:
        self._futures: dict[str, list[asyncio.Future[Any]]] = {}
        self._listeners: dict[str, list[Listener]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._futures.values()))

    def expect(self, key: str) -> asyncio.Future[Any]:
        """A future for the next wake-up of a key. Register it before you look, so that nothing falls in between.

        Whoever stops waiting cancels it, or gives it back with `forget`.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._futures.setdefault(key, []).append(future)
        return future

    def forget(self, key: str, future: asyncio.Future[Any]) -> None:
        """Nobody waits for this future any more."""
        waiting = self._futures.get(key)
        if waiting is not None and future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._futures[key]

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Calls a function at every wake-up of a key. The answer takes the request back."""
        self._listeners.setdefault(key, []).append(listener)

        def forget() -> None:
            listeners = self._listeners.get(key)
            if listeners is not None and listener in listeners:
                listeners.remove(listener)
                if not listeners:
                    del self._listeners[key]

        return forget

    def wake(self, key: str, value: Any = None) -> None:
        """Something happened."""
        for future in self._futures.pop(key, ()):
            if not future.done():
                future.set_result(value)
        if (listeners := self._listeners.get(key)) is not None:
            for listener in tuple(listeners):
                listener(value)

    def wake_all(self) -> None:
        """Anything may have happened: everybody looks for themselves."""
        for key in (*self._futures, *self._listeners):
            self.wake(key)

    def waits(self, key: str) -> bool:
        return key in self._futures or key in self._listeners
