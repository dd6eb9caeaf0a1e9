"""A clock that stands still until a test moves it."""

from __future__ import annotations


class FakeClock:
    """Give it as `clock=` to whatever takes one: `MemoryCache(clock=clock)`."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
