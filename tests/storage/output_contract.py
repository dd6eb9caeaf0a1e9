"""The public contract of output stores, and properties that hold for any text and any handle."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolspace.core.extension_points import OutputStore
from toolspace.testing import OutputsContract as PublicContract
from toolspace.testing.storage_contracts import TTL, all_lines, store

__all__ = ["TTL", "LocalOutputsContract", "all_lines", "store"]

# All examples of a property share one store: every output has its own handle.
# The properties are inherited by the suite of each store, so more than one class runs them.
one_store = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


@pytest.mark.spec("4.6")
class LocalOutputsContract(PublicContract):
    @one_store
    @given(pieces=st.lists(st.text(st.characters(), max_size=40), max_size=6))
    async def test_any_text_is_stored_with_lone_surrogates_as_escapes(
        self, outputs: OutputStore, pieces: list[str]
    ) -> None:
        stored_text = "".join(pieces).encode("utf-8", "backslashreplace").decode()
        output = await store(outputs, *pieces)
        assert await outputs.text(output, limit=1 << 16) == stored_text
        lines = stored_text.split("\n")
        assert await all_lines(outputs, output) == (lines if lines[-1] else lines[:-1])
        assert (output.bytes, output.lines) == (len(stored_text.encode()), len(lines) - (not lines[-1]))

    @pytest.mark.spec("3.33")
    @one_store
    @given(
        handle=st.one_of(
            st.text(max_size=60),
            st.from_regex(r"session-[\w./-]{0,20}/[\w./-]{0,20}"),
            st.sampled_from(["../x", "session-s1/../../etc/passwd", "session-s1/", "/", "\x00", "session-s1\n/0"]),
        )
    )
    async def test_invented_handle_is_not_found(self, outputs: OutputStore, handle: str) -> None:
        assert await outputs.find(handle, session="s1", owner=None) is None
