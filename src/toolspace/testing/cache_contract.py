"""What every `ResultCache` does. Subclass `CacheContract`, give it a `cache`, and pytest runs the rest."""

from __future__ import annotations

import asyncio

import pytest

from toolspace.core.interfaces import CachedResult, ResultCache
from toolspace.testing.clock import FakeClock


class CacheContract:
    """Yours gives the fixture `cache`: a new cache that runs by the fixture `clock`."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def cache(self, clock: FakeClock) -> ResultCache:
        """A new, empty cache that runs by the clock, to be closed afterwards."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `cache` of its own")

    @pytest.mark.asyncio
    async def test_what_was_kept_is_found_again(self, cache: ResultCache) -> None:
        await cache.set("a", CachedResult(text=b'{"n":1}', parts=b"[1]"), 60)
        assert await cache.get("a") == CachedResult(text=b'{"n":1}', parts=b"[1]")

    @pytest.mark.asyncio
    async def test_an_unknown_key_is_none(self, cache: ResultCache) -> None:
        assert await cache.get("nothing") is None

    @pytest.mark.asyncio
    async def test_results_without_parts_and_empty_results_are_kept(self, cache: ResultCache) -> None:
        await cache.set("null", CachedResult(text=b"null"), 60)
        await cache.set("empty", CachedResult(text=b""), 60)
        assert await cache.get("null") == CachedResult(text=b"null")
        assert await cache.get("empty") == CachedResult(text=b"")

    @pytest.mark.asyncio
    async def test_a_newer_result_replaces_the_older(self, cache: ResultCache) -> None:
        await cache.set("a", CachedResult(text=b"1"), 60)
        await cache.set("a", CachedResult(text=b"2"), 60)
        assert await cache.get("a") == CachedResult(text=b"2")

    @pytest.mark.asyncio
    async def test_a_result_is_gone_when_its_time_is_over(self, cache: ResultCache, clock: FakeClock) -> None:
        await cache.set("short", CachedResult(text=b"1"), 10)
        await cache.set("long", CachedResult(text=b"2"), 100)
        clock.now += 9.5
        assert await cache.get("short") is not None
        clock.now += 1
        assert await cache.get("short") is None
        assert await cache.get("long") == CachedResult(text=b"2")

    @pytest.mark.asyncio
    async def test_keeping_a_result_for_no_time_forgets_the_key(self, cache: ResultCache) -> None:
        await cache.set("a", CachedResult(text=b"1"), 60)
        await cache.set("a", CachedResult(text=b"2"), 0)
        assert await cache.get("a") is None

    @pytest.mark.asyncio
    async def test_a_result_kept_again_lives_by_its_new_time(self, cache: ResultCache, clock: FakeClock) -> None:
        await cache.set("a", CachedResult(text=b"1"), 10)
        clock.now += 8
        await cache.set("a", CachedResult(text=b"2"), 10)
        clock.now += 8
        assert await cache.get("a") == CachedResult(text=b"2")

    @pytest.mark.asyncio
    async def test_clear_forgets_everything(self, cache: ResultCache) -> None:
        for number in range(5):
            await cache.set(str(number), CachedResult(text=b"x"), 60)
        await cache.clear()
        assert [await cache.get(str(number)) for number in range(5)] == [None] * 5
        await cache.set("after", CachedResult(text=b"x"), 60)
        assert await cache.get("after") is not None

    @pytest.mark.asyncio
    async def test_keys_are_any_text(self, cache: ResultCache) -> None:
        keys = ["", "a" * 100_000, "日本語", "\ud800", "a\x00b", "a\x00c", "'; DROP TABLE results; --"]
        for number, key in enumerate(keys):
            await cache.set(key, CachedResult(text=str(number).encode()), 60)
        assert [await cache.get(key) for key in keys] == [
            CachedResult(text=str(number).encode()) for number in range(len(keys))
        ]

    @pytest.mark.asyncio
    async def test_many_callers_at_once_each_get_their_own(self, cache: ResultCache) -> None:
        async def one(number: int) -> CachedResult | None:
            await cache.set(f"k{number}", CachedResult(text=str(number).encode()), 60)
            return await cache.get(f"k{number}")

        found = await asyncio.gather(*(one(number) for number in range(100)))
        assert found == [CachedResult(text=str(number).encode()) for number in range(100)]
