"""How often agents begin to think: so many cycles in a minute, in whichever process. Lets nobody think itself."""

from __future__ import annotations

from collections import deque

from toolspace.core.ids import now_ms
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import sessions
from toolspace.storage.queries.sessions import Session

MINUTE_MS = 60_000


class Pace:
    """Remembers when the cycles of sessions began, for as long as a minute."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._starts: dict[str, tuple[int, deque[int]]] = {}
        """With the token under which the session was held then: with the next one, nobody else thought in between."""

    async def seconds_to_rest(self, session: Session, most: int) -> float:
        """How long a session that is held here has to wait for its next cycle; 0 where it need not."""
        token, starts = self._starts.get(session.id, (-1, deque[int]()))
        since = now_ms() - MINUTE_MS
        if session.token - token not in (0, 1):
            starts = deque(await self._ledger.read(sessions.starts, session, since=since, limit=most))
        while starts and starts[0] <= since:
            starts.popleft()
        self._starts[session.id] = (session.token, starts)
        # Where fewer are allowed than there were: as many as too many have to be old first.
        return (starts[len(starts) - most] - since) / 1000 if len(starts) >= most else 0.0

    def note(self, session_id: str) -> None:
        """A cycle begins."""
        self._starts[session_id][1].append(now_ms())

    def forget(self, session_id: str) -> None:
        self._starts.pop(session_id, None)
