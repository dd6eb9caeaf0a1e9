"""`MemoryCache`: results in memory, least recently used dropped first. For one process and one event loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from toolspace.core.extension_points import CachedResult, ResultCache

_OVERHEAD = 400
"""Bytes that an entry takes besides its text, about."""


class MemoryCache(ResultCache):
    """Caches results until they expire, or until newer ones need the space.

    A result larger than an eighth of `max_bytes` is not cached: it would displace too many others.
    """

    def __init__(
        self,
        max_entries: int = 10_000,
        max_bytes: int = 64 * 1024 * 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_entries < 1 or max_bytes < 1:
            raise ValueError(
                f"a cache of {max_entries} entries and {max_bytes} bytes holds nothing; both must be 1 or more"
            )
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, CachedResult, int]] = OrderedDict()
        self._bytes = 0

    async def get(self, key: str) -> CachedResult | None:
        return self.peek(key)

    def peek(self, key: str) -> CachedResult | None:
        entries = self._entries
        entry = entries.get(key)
        if entry is None:
            return None
        expires_at, value, _ = entry
        if expires_at <= self._clock():
            self._remove(key)
            return None
        entries.move_to_end(key)
        return value

    async def set(self, key: str, value: CachedResult, ttl: float) -> None:
        entries = self._entries
        if key in entries:
            self._remove(key)
        size = len(key) + len(value.text) + len(value.parts) + _OVERHEAD
        if ttl <= 0 or size > self._max_bytes // 8:
            return
        entries[key] = (self._clock() + ttl, value, size)
        self._bytes += size
        while len(entries) > self._max_entries or self._bytes > self._max_bytes:
            self._bytes -= entries.popitem(last=False)[1][2]

    async def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0

    def _remove(self, key: str) -> None:
        self._bytes -= self._entries.pop(key)[2]
