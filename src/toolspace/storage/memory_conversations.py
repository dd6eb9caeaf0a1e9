"""`MemoryConversations`, and the locks that it shares with `DiskConversations`. For one process. Touches no file."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from toolspace.core.extension_points import ConversationStore
from toolspace.core.language_model import Turn

ConversationKey = tuple[str, str]
"""Owner and session."""


class ConversationLocks:
    """A lock for each session that is in use. Whoever waits gets it in the order of arrival."""

    def __init__(self) -> None:
        self._locks: dict[ConversationKey, tuple[asyncio.Lock, int]] = {}
        """Each with the number of those who have it or wait for it."""

    @asynccontextmanager
    async def lock(self, key: ConversationKey) -> AsyncGenerator[None]:
        lock, users = self._locks.get(key) or (asyncio.Lock(), 0)
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._locks[key][1] - 1
            if users:
                self._locks[key] = (lock, users)
            else:
                del self._locks[key]


class MemoryConversations(ConversationStore):
    """Keeps conversations as long as it exists. Beyond `max_sessions` it drops the least recently used one."""

    def __init__(self, *, max_sessions: int = 10_000) -> None:
        self._max_sessions = max_sessions
        self._locks = ConversationLocks()
        self._conversations: OrderedDict[ConversationKey, tuple[Turn, ...]] = OrderedDict()

    def lock(self, session: str, *, owner: str) -> AbstractAsyncContextManager[None]:
        return self._locks.lock((owner, session))

    async def load(self, session: str, *, owner: str) -> tuple[Turn, ...]:
        return self._conversations.get((owner, session), ())

    async def save(self, session: str, turns: Sequence[Turn], *, owner: str) -> None:
        self._conversations[owner, session] = tuple(turns)
        self._conversations.move_to_end((owner, session))
        while len(self._conversations) > self._max_sessions:
            self._conversations.popitem(last=False)

    async def delete(self, session: str, *, owner: str) -> bool:
        return self._conversations.pop((owner, session), None) is not None
