"""The cache in memory: the contract, and its limits."""

from __future__ import annotations

import pytest

from tests.storage.cache_contract import Clock, LocalCacheContract
from toolspace.core.extension_points import CachedResult
from toolspace.storage.memory_cache import MemoryCache

RESULT = CachedResult(text=b"1")


class TestMemoryCache(LocalCacheContract):
    @pytest.fixture
    async def cache(self, clock: Clock):
        cache = MemoryCache(clock=clock)
        yield cache
        await cache.aclose()


@pytest.mark.spec("4.2")
async def test_least_recently_used_result_goes_first() -> None:
    cache = MemoryCache(max_entries=3)
    for key in "abc":
        await cache.set(key, RESULT, 60)
    await cache.get("a")
    await cache.set("d", RESULT, 60)
    assert [key for key in "abcd" if await cache.get(key)] == ["a", "c", "d"]


@pytest.mark.spec("4.2")
async def test_bytes_are_bounded_whatever_the_number_of_entries() -> None:
    cache = MemoryCache(max_bytes=100_000)
    for number in range(50):
        await cache.set(str(number), CachedResult(text=b"x" * 10_000), 60)
    cached = [number for number in range(50) if await cache.get(str(number))]
    assert cached == list(range(41, 50))


async def test_too_large_result_displaces_no_other() -> None:
    cache = MemoryCache(max_bytes=80_000)
    await cache.set("small", RESULT, 60)
    await cache.set("huge", CachedResult(text=b"x" * 10_001), 60)
    assert await cache.get("huge") is None
    assert await cache.get("small") == RESULT


async def test_space_of_expired_replaced_and_cleared_results_is_reused() -> None:
    clock = Clock()
    cache = MemoryCache(max_bytes=100_000, clock=clock)
    big = CachedResult(text=b"x" * 10_000)
    for _ in range(100):
        await cache.set("same", big, 60)
    await cache.set("expiring", big, 1)
    clock.now += 2
    assert await cache.get("expiring") is None
    for number in range(8):
        await cache.set(str(number), big, 60)
    assert await cache.get("same") == big
    await cache.clear()
    for number in range(9):
        await cache.set(str(number), big, 60)
    assert await cache.get("0") == big


def test_cache_without_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        MemoryCache(max_entries=0)
