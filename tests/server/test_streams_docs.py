"""docs/streams.md has every event type, parameter and time."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec

from toolspace.core.stored_records import StreamFormat
from toolspace.server.sse_encoding import DIALECTS
from toolspace.server.sse_responses import HEARTBEAT_SECONDS, STALL_SECONDS, StreamQuery

PAGE = (Path(__file__).parents[2] / "docs" / "streams.md").read_text()
EVENTS = (
    "tool.started", "tool.streaming", "tool.ready", "tool.progress", "tool.done", "tool.error",
    "message.started", "message.delta", "message.done", "run.started", "run.done", "stream.reset",
)  # fmt: skip


def test_every_event_type_is_documented() -> None:
    for type in EVENTS:
        assert f"| `{type}` |" in PAGE


def test_every_parameter_and_format_is_documented() -> None:
    for field in msgspec.structs.fields(StreamQuery):
        assert f"| `{field.encode_name}` |" in PAGE
    assert tuple(DIALECTS) == get_args(StreamFormat)
    for name in DIALECTS:
        assert f"`{name}`" in PAGE


def test_documented_times_are_those_of_the_code() -> None:
    assert f"every {HEARTBEAT_SECONDS:.0f} seconds" in PAGE
    assert f"stuck for {STALL_SECONDS:.0f} seconds" in PAGE
