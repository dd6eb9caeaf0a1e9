"""The calls of one orchestrator that have waited for something: finds them to cancel them, and waits for their end."""

from __future__ import annotations

import asyncio

from toolspace.orchestrator.call import Call, call_chain


class ActiveCalls:
    """Has every running call of an orchestrator from its first wait on. A call that never waits is never in it."""

    def __init__(self) -> None:
        self._calls: dict[Call, None] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def ids(self) -> list[str]:
        return [call.id for call in self._calls]

    def add(self, call: Call) -> None:
        self._calls[call] = None
        if call.run is not None:
            call.run.track(call)

    def remove(self, call: Call) -> None:
        call.is_over = True
        call.withdraw_cancellation()
        del self._calls[call]
        if call.run is not None:
            call.run.untrack(call)
        for waiter in tuple(self._waiters):
            waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    def find(self, owner: object, call_id: str | None) -> list[Call]:
        """Returns the call of this owner and its child calls; without an id, all of its calls.

        The calls that the current code is part of are found too, though they may not have waited yet.
        """
        return [
            call
            for call in {**self._calls, **dict.fromkeys(call_chain())}
            if call.owner is owner and (call_id is None or any(parent.id == call_id for parent in call_chain(call)))
        ]

    async def wait_until_idle(self) -> None:
        """Waits until the calls that are active now have ended; not for those that the current code is part of."""
        own_calls = set(call_chain())
        pending = {call for call in self._calls if call not in own_calls and not _is_dead(call)}
        while pending & self._calls.keys():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


def _is_dead(call: Call) -> bool:
    """Whether the loop of a call was closed, so that the call never ends."""
    return call.task is not None and call.task.get_loop().is_closed()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
