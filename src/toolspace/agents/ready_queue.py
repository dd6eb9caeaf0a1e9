"""Which session is next: the most important first; among equals, who waits longest. Lets nobody think itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

LEAST = 9
"""How important something is of which nobody knows."""


class WaitingLine:
    """Sessions that may have something to do, in the order in which that was heard."""

    def __init__(self) -> None:
        self._waiting: dict[str, int | None] = {}
        """With how important it is, the lowest first; None: that was not looked at yet."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def add(self, session_id: str, importance: int | None) -> None:
        """Puts one at the end. One that waits stays where it is, and may become more important."""
        known = self._waiting.get(session_id, LEAST)
        if importance is None:
            self._waiting[session_id] = 0 if known == 0 and session_id in self._waiting else None
        elif known is None or importance <= known:
            self._waiting[session_id] = importance

    def unknown(self) -> list[str]:
        """Those of which nobody knows how important they are."""
        return [session_id for session_id, importance in self._waiting.items() if importance is None]

    def rank(self, importance: Mapping[str, int], asked: Iterable[str]) -> None:
        """Says how important those are that were asked for; those that have nothing to do are least."""
        for session_id in asked:
            if self._waiting.get(session_id, LEAST) is None:
                self._waiting[session_id] = importance.get(session_id, LEAST)

    def take(self, among: Iterable[str] | None = None) -> str | None:
        """The next one, which waits no more; None where there is none."""
        found = min(self._waiting if among is None else among, key=self._importance, default=None)
        if found is not None:
            del self._waiting[found]
        return found

    def clear(self) -> None:
        self._waiting.clear()

    def _importance(self, session_id: str) -> int:
        known = self._waiting[session_id]
        return LEAST if known is None else known
