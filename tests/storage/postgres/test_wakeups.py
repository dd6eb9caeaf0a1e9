"""Wake-ups over LISTEN and NOTIFY: what one process says all others hear, and a gap is never silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
import pytest

from tests.servers.postgres import LocalPostgresServer
from toolspace.errors import StorageUnavailable
from toolspace.storage.postgres.wakeups import PostgresWakeUps


class _Ear:
    """What a process was told."""

    def __init__(self, wakeups: PostgresWakeUps) -> None:
        self.wakeups = wakeups
        self.hints: list[str] = []
        self.calls = 0
        self.gaps = 0
        self._news = asyncio.Event()
        wakeups.listen(self._hear, self._miss)

    def _hear(self, hints: Sequence[str]) -> None:
        self.hints += hints
        self.calls += 1
        self._news.set()

    def _miss(self) -> None:
        self.gaps += 1
        self._news.set()

    async def until(self, *, hints: int = 0, gaps: int = 0, hint: str | None = None) -> None:
        async with asyncio.timeout(60):
            while len(set(self.hints)) < hints or self.gaps < gaps or (hint and hint not in self.hints):
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def _ears(url: str, count: int = 2, channel: str = "toolspace") -> AsyncIterator[list[_Ear]]:
    ears = [_Ear(await PostgresWakeUps.open(url, channel)) for _ in range(count)]
    try:
        yield ears
    finally:
        for ear in ears:
            await ear.wakeups.aclose()


@pytest.mark.spec("6.4")
async def test_all_others_hear_a_hint_and_its_sender_does_not(postgres_url: str) -> None:
    async with _ears(postgres_url, 3) as (one, two, three):
        one.wakeups.send(["c call_1", "i agent é\0 \ud800", "e 12 space:1"])
        two.wakeups.send(["o tool"])
        await asyncio.gather(one.until(hints=1), two.until(hints=3), three.until(hints=4))
        assert one.hints == ["o tool"]
        assert two.hints == ["c call_1", "i agent é\0 ?", "e 12 space:1"]
        assert sorted(three.hints) == sorted(one.hints + two.hints)
        assert one.gaps == two.gaps == three.gaps == 0


async def test_channels_do_not_hear_each_other(postgres_url: str) -> None:
    async with _ears(postgres_url, 2, "a") as (one, two), _ears(postgres_url, 2, "Other b") as (three, four):
        one.wakeups.send(["a"])
        three.wakeups.send(["b"])
        await asyncio.gather(two.until(hints=1), four.until(hints=1))
        assert (two.hints, four.hints) == (["a"], ["b"])


async def test_hints_of_a_burst_travel_together_and_each_arrives(postgres_url: str) -> None:
    async with _ears(postgres_url) as (one, two):
        for number in range(3000):
            one.wakeups.send([f"c call_{number:06}_{'x' * 40}", "always the same"])
        await two.until(hints=3001)
        assert len(set(two.hints)) == 3001
        assert two.calls < 300
        one.wakeups.send([])
        one.wakeups.send(["last"])
        await two.until(hints=3002)
        assert two.gaps == 0


async def test_what_is_too_long_or_too_much_to_tell_is_told_as_a_gap(postgres_url: str) -> None:
    async with _ears(postgres_url) as (one, two):
        one.wakeups.send(["x" * 9000])
        await two.until(gaps=1)
        one.wakeups.send(map(str, range(50_000)))
        await two.until(gaps=2)
        one.wakeups.send(["after"])
        await two.until(hints=1)
        assert two.hints == ["after"]


async def test_whatever_else_is_said_on_the_channel_does_no_harm(postgres_url: str) -> None:
    async with _ears(postgres_url) as (one, two):
        other = await asyncpg.connect(postgres_url)
        for payload in ("", "hello", "7", "[]", "{}", '"x"', "[null"):
            await other.execute("SELECT pg_notify('toolspace', $1)", payload)
        await other.close()
        one.wakeups.send(["a"])
        await two.until(hints=1)
        assert two.hints == ["a"]


async def test_a_listener_that_fails_hears_the_next_one(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with _ears(postgres_url) as (one, two):

        def fail(hints: Sequence[str]) -> None:
            two._hear(hints)
            raise RuntimeError("deaf")

        two.wakeups.listen(fail, two._miss)
        for number in range(2):
            one.wakeups.send([str(number)])
            await two.until(hints=number + 1)
        assert "deaf" in caplog.text


@pytest.mark.spec("15.3")
async def test_a_lost_connection_is_made_again_and_everyone_knows_of_the_gap(
    stoppable_postgres: LocalPostgresServer,
) -> None:
    async with _ears(stoppable_postgres.url()) as (one, two):
        for turn, end in enumerate((stoppable_postgres.stop, stoppable_postgres.crash), 1):
            await asyncio.to_thread(end)
            one.wakeups.send([f"while away {turn}"])
            await asyncio.to_thread(stoppable_postgres.start)
            await asyncio.gather(one.until(gaps=turn), two.until(gaps=turn))
            # What was said meanwhile is in the gap or comes later; what is said now arrives.
            one.wakeups.send([f"back {turn}"])
            two.wakeups.send([f"here too {turn}"])
            await asyncio.gather(two.until(hint=f"back {turn}"), one.until(hint=f"here too {turn}"))


async def test_what_was_said_last_is_heard_though_its_sender_ends(postgres_url: str) -> None:
    async with _ears(postgres_url) as (one, two):
        one.wakeups.send(["goodbye"])
        await one.wakeups.aclose()
        await two.until(hints=1)
        assert two.hints == ["goodbye"]


async def test_a_server_that_is_not_there_is_named_at_the_start() -> None:
    with pytest.raises(StorageUnavailable, match=r"127\.0\.0\.1:1/db does not answer") as caught:
        await PostgresWakeUps.open("postgresql://me:s3cr3t@127.0.0.1:1/db")
    assert "s3cr3t" not in str(caught.value)
