"""Outputs in memory: the contract; and the limits of bytes, of both stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.cache_contract import Clock
from tests.storage.output_contract import TTL, LocalOutputsContract, store
from toolspace.core.extension_points import OutputStore
from toolspace.errors import ToolLimitError
from toolspace.storage.disk_outputs import DiskOutputs
from toolspace.storage.memory_outputs import MemoryOutputs
from toolspace.storage.output_quota import OutputLimits

LIMITS = OutputLimits(per_session=1000, per_principal=1500, total=3000)


class OutputQuotaContract:
    """The limits of a store that was created with `LIMITS`."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.mark.spec("4.6")
    @pytest.mark.spec("21.1")
    async def test_a_session_a_principal_and_all_have_limits(self, outputs: OutputStore, clock: Clock) -> None:
        kept_outputs = [
            await store(outputs, "a" * 900, session="s1", owner="ann"),
            await store(outputs, "b" * 600, session="s2", owner="ann"),
            await store(outputs, "c" * 900, session="s3", owner="bob"),
            await store(outputs, "d" * 500, session="s4", owner="carla"),
        ]
        for session, owner, size, reason in (
            ("s1", "ann", 101, "perSession"),
            ("s5", "ann", 1, "perPrincipal"),
            ("s6", "dave", 101, "total"),
        ):
            with pytest.raises(ToolLimitError, match=reason):
                await store(outputs, "x" * size, session=session, owner=owner)
        await store(outputs, "e" * 100, session="s6", owner="dave")
        for output in kept_outputs:  # Nobody's output was deleted for another.
            assert await outputs.find(output.handle, session=output.session, owner=output.owner) == output
        clock.now += TTL + 1
        await store(outputs, "f" * 900, session="s1", owner="ann")

    async def test_an_output_that_is_discarded_does_not_count(self, outputs: OutputStore) -> None:
        for _ in range(3):
            writer = await outputs.create(session="s1", owner="ann", tool="fetch")
            await writer.write("x" * 900)
            await writer.discard()
        await store(outputs, "a" * 1000, session="s1", owner="ann")


class TestMemoryOutputs(LocalOutputsContract):
    @pytest.fixture
    async def outputs(self, clock: Clock):
        outputs = MemoryOutputs(ttl=TTL, clock=clock)
        yield outputs
        await outputs.aclose()


@pytest.mark.spec("4.6")
async def test_an_output_beyond_the_limit_is_refused_and_others_stay() -> None:
    outputs = MemoryOutputs(max_bytes=1000)
    first = await store(outputs, "a" * 400)
    writer = await outputs.create(session="s1", owner=None, tool="fetch")
    await writer.write("x" * 500)
    with pytest.raises(ToolLimitError, match="the limit is 1000"):
        await writer.write("x" * 101)
    assert await outputs.text(first, limit=3) == "aaa"
    second = await store(outputs, "b" * 600)  # The bytes of the refused output are free again.
    assert await outputs.text(second, limit=3) == "bbb"


class TestMemoryQuota(OutputQuotaContract):
    @pytest.fixture
    async def outputs(self, clock: Clock):
        return MemoryOutputs(ttl=TTL, clock=clock, limits=LIMITS)


class TestDiskQuota(OutputQuotaContract):
    @pytest.fixture
    async def outputs(self, clock: Clock, tmp_path: Path):
        outputs = DiskOutputs(tmp_path / "outputs", ttl=TTL, clock=clock, limits=LIMITS)
        yield outputs
        await outputs.aclose()


@pytest.mark.spec("4.6")
async def test_outputs_of_other_processes_count_too(tmp_path: Path) -> None:
    clock = Clock()
    first, second = (DiskOutputs(tmp_path / "outputs", ttl=3600, clock=clock, limits=LIMITS) for _ in range(2))
    await store(first, "a" * 600, session="s1", owner="ann")
    with pytest.raises(ToolLimitError, match="perSession"):
        await store(second, "b" * 500, session="s1", owner="ann")
    await store(first, "c" * 390, session="s1", owner="ann")
    clock.now += 61  # The second one counts again after a minute.
    with pytest.raises(ToolLimitError, match="perSession"):
        await store(second, "d" * 20, session="s1", owner="ann")
    for outputs in (first, second):
        await outputs.aclose()
