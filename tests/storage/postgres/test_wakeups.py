"""Wake-ups over LISTEN and NOTIFY: all other processes receive a hint, and every gap is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
import pytest

from tests.servers.postgres import LocalPostgresServer
from toolspace.errors import StorageUnavailable
from toolspace.storage.postgres.wakeups import PostgresWakeUps


class _Listener:
    """The hints that a process received."""

    def __init__(self, wakeups: PostgresWakeUps) -> None:
        self.wakeups = wakeups
        self.hints: list[str] = []
        self.calls = 0
        self.gaps = 0
        self._change = asyncio.Event()
        wakeups.listen(self.on_hints, self.on_gap)

    def on_hints(self, hints: Sequence[str]) -> None:
        self.hints += hints
        self.calls += 1
        self._change.set()

    def on_gap(self) -> None:
        self.gaps += 1
        self._change.set()

    async def until(self, *, hints: int = 0, gaps: int = 0, hint: str | None = None) -> None:
        async with asyncio.timeout(60):
            while len(set(self.hints)) < hints or self.gaps < gaps or (hint and hint not in self.hints):
                self._change.clear()
                await self._change.wait()


@asynccontextmanager
async def _listeners(url: str, count: int = 2, channel: str = "toolspace") -> AsyncIterator[list[_Listener]]:
    listeners = [_Listener(await PostgresWakeUps.open(url, channel)) for _ in range(count)]
    try:
        yield listeners
    finally:
        for listener in listeners:
            await listener.wakeups.aclose()


@pytest.mark.spec("6.4")
async def test_all_processes_but_the_sender_receive_a_hint(postgres_url: str) -> None:
    async with _listeners(postgres_url, 3) as (first, second, third):
        first.wakeups.send(["c call_1", "i agent é\0 \ud800", "e 12 space:1"])
        second.wakeups.send(["o tool"])
        await asyncio.gather(first.until(hints=1), second.until(hints=3), third.until(hints=4))
        assert first.hints == ["o tool"]
        assert second.hints == ["c call_1", "i agent é\0 ?", "e 12 space:1"]
        assert sorted(third.hints) == sorted(first.hints + second.hints)
        assert first.gaps == second.gaps == third.gaps == 0


async def test_channels_are_separate(postgres_url: str) -> None:
    async with (
        _listeners(postgres_url, 2, "a") as (first, second),
        _listeners(postgres_url, 2, "Other b") as (third, fourth),
    ):
        first.wakeups.send(["a"])
        third.wakeups.send(["b"])
        await asyncio.gather(second.until(hints=1), fourth.until(hints=1))
        assert (second.hints, fourth.hints) == (["a"], ["b"])


async def test_hints_of_a_burst_share_notifications_and_all_arrive(postgres_url: str) -> None:
    async with _listeners(postgres_url) as (first, second):
        for number in range(3000):
            first.wakeups.send([f"c call_{number:06}_{'x' * 40}", "always the same"])
        await second.until(hints=3001)
        assert len(set(second.hints)) == 3001
        assert second.calls < 300
        first.wakeups.send([])
        first.wakeups.send(["last"])
        await second.until(hints=3002)
        assert second.gaps == 0


async def test_too_long_or_too_many_hints_become_a_gap(postgres_url: str) -> None:
    async with _listeners(postgres_url) as (first, second):
        first.wakeups.send(["x" * 9000])
        await second.until(gaps=1)
        first.wakeups.send(map(str, range(50_000)))
        await second.until(gaps=2)
        first.wakeups.send(["after"])
        await second.until(hints=1)
        assert second.hints == ["after"]


async def test_unknown_payloads_on_the_channel_are_ignored(postgres_url: str) -> None:
    async with _listeners(postgres_url) as (first, second):
        other_connection = await asyncpg.connect(postgres_url)
        for payload in ("", "hello", "7", "[]", "{}", '"x"', "[null"):
            await other_connection.execute("SELECT pg_notify('toolspace', $1)", payload)
        await other_connection.close()
        first.wakeups.send(["a"])
        await second.until(hints=1)
        assert second.hints == ["a"]


async def test_listener_that_raises_receives_the_next_hint(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with _listeners(postgres_url) as (first, second):

        def fail(hints: Sequence[str]) -> None:
            second.on_hints(hints)
            raise RuntimeError("deaf")

        second.wakeups.listen(fail, second.on_gap)
        for number in range(2):
            first.wakeups.send([str(number)])
            await second.until(hints=number + 1)
        assert "deaf" in caplog.text


@pytest.mark.spec("15.3")
async def test_lost_connection_is_replaced_and_reported_as_a_gap(
    stoppable_postgres: LocalPostgresServer,
) -> None:
    async with _listeners(stoppable_postgres.url()) as (first, second):
        for turn, end in enumerate((stoppable_postgres.stop, stoppable_postgres.crash), 1):
            await asyncio.to_thread(end)
            first.wakeups.send([f"while away {turn}"])
            await asyncio.to_thread(stoppable_postgres.start)
            await asyncio.gather(first.until(gaps=turn), second.until(gaps=turn))
            # Earlier hints are in the gap or arrive later; hints from now on arrive.
            first.wakeups.send([f"back {turn}"])
            second.wakeups.send([f"here too {turn}"])
            await asyncio.gather(second.until(hint=f"back {turn}"), first.until(hint=f"here too {turn}"))


async def test_last_hints_are_sent_before_closing(postgres_url: str) -> None:
    async with _listeners(postgres_url) as (first, second):
        first.wakeups.send(["goodbye"])
        await first.wakeups.aclose()
        await second.until(hints=1)
        assert second.hints == ["goodbye"]


async def test_unreachable_server_is_an_error_at_the_start() -> None:
    with pytest.raises(StorageUnavailable, match=r"127\.0\.0\.1:1/db does not answer") as failure:
        await PostgresWakeUps.open("postgresql://me:s3cr3t@127.0.0.1:1/db")
    assert "s3cr3t" not in str(failure.value)
