"""Outputs in memory: the contract, and the limit of bytes."""

from __future__ import annotations

import pytest

from tests.storage.cache_contract import Clock
from tests.storage.output_contract import TTL, LocalOutputsContract, store
from toolspace.errors import ToolspaceError
from toolspace.storage.memory_outputs import MemoryOutputs


class TestMemoryOutputs(LocalOutputsContract):
    @pytest.fixture
    async def outputs(self, clock: Clock):
        outputs = MemoryOutputs(ttl=TTL, clock=clock)
        yield outputs
        await outputs.aclose()


@pytest.mark.spec("4.6")
async def test_oldest_outputs_are_dropped_when_memory_is_full() -> None:
    outputs = MemoryOutputs(max_bytes=1000)
    first = await store(outputs, "a" * 400)
    second = await store(outputs, "b" * 400)
    third = await store(outputs, "c" * 400)
    assert await outputs.find(first.handle, session="s1", owner=None) is None
    assert await outputs.find(second.handle, session="s1", owner=None) == second
    assert await outputs.text(third, limit=3) == "ccc"


async def test_output_larger_than_the_limit_is_refused_and_others_stay() -> None:
    outputs = MemoryOutputs(max_bytes=1000)
    small = await store(outputs, "a")
    writer = await outputs.create(session="s1", owner=None, tool="fetch")
    await writer.write("x" * 900)
    with pytest.raises(ToolspaceError, match="'fetch' is larger than the 1000 bytes"):
        await writer.write("x" * 101)
    assert await outputs.text(small, limit=10) == "a"
