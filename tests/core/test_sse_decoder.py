"""Server-sent events are decoded the same, wherever the chunks of a stream are split."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.core.sse_decoder import SseDecoder, SseEvent, SseSizeError

LINE_ENDS = st.just(["\r"]) | st.lists(st.sampled_from(("\n", "\r\n")), min_size=1, max_size=3)
"""CR is not mixed with LF: a line that ends with CR before an empty line that ends with LF has one end, CRLF."""
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=12)


class Block(NamedTuple):
    """One event as a server writes it."""

    data: list[str]
    event: str
    id: str | None


BLOCKS = st.builds(Block, st.lists(VALUES, max_size=3), VALUES, st.none() | VALUES)


def encode(blocks: list[Block], ends: list[str]) -> bytes:
    """Writes blocks as a stream, with the line ends in turn."""
    lines: list[str] = []
    for block in blocks:
        lines += [":keep-alive", "unknown: field"]
        if block.event:
            lines.append(f"event: {block.event}")
        if block.id is not None:
            lines.append(f"id: {block.id}")
        lines += [f"data: {line}" for line in block.data]
        lines.append("")
    return "".join(line + ends[index % len(ends)] for index, line in enumerate(lines)).encode()


def expected_events(blocks: list[Block]) -> list[SseEvent]:
    events: list[SseEvent] = []
    for block in blocks:
        if block.data:
            events.append(SseEvent("\n".join(block.data).encode(), block.event or "message", block.id))
        elif block.id is not None:
            events.append(SseEvent(None, block.event or "message", block.id))
    return events


def split(data: bytes, places: list[int]) -> list[bytes]:
    cuts = sorted(place % (len(data) + 1) for place in places)
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@given(
    blocks=st.lists(BLOCKS, max_size=5),
    ends=LINE_ENDS,
    bom=st.booleans(),
    places=st.lists(st.integers(min_value=0), max_size=8),
)
def test_events_are_the_same_wherever_the_stream_is_split(
    blocks: list[Block], ends: list[str], bom: bool, places: list[int]
) -> None:
    data = (b"\xef\xbb\xbf" if bom else b"") + encode(blocks, ends)
    decoder = SseDecoder()
    events = [event for chunk in split(data, places) for event in decoder.feed(chunk)]
    assert events == expected_events(blocks)
    assert decoder.finish() == []


@given(st.binary(max_size=200), st.lists(st.integers(min_value=0), max_size=8))
def test_any_bytes_give_the_same_events_in_any_chunks(data: bytes, places: list[int]) -> None:
    unsplit, parts, single_bytes = SseDecoder(), SseDecoder(), SseDecoder()
    events = [*unsplit.feed(data), *unsplit.finish()]
    assert [event for chunk in split(data, places) for event in parts.feed(chunk)] + parts.finish() == events
    assert [
        event for index in range(len(data)) for event in single_bytes.feed(data[index : index + 1])
    ] + single_bytes.finish() == events
    assert unsplit.retry == parts.retry == single_bytes.retry


def test_fields_without_a_colon_or_a_space_are_read() -> None:
    assert SseDecoder().feed(b"data\ndata:b\ndata: c\nevent:x\n\n") == [SseEvent(b"\nb\nc", "x")]


def test_only_one_space_is_removed_from_a_value() -> None:
    assert SseDecoder().feed(b"data:  two\n\n") == [SseEvent(b" two")]


def test_an_empty_data_line_is_an_event_with_empty_data() -> None:
    assert SseDecoder().feed(b"data:\n\n") == [SseEvent(b"")]


def test_an_event_name_does_not_outlive_its_block() -> None:
    assert SseDecoder().feed(b"event: a\n\ndata: 1\n\n") == [SseEvent(b"1")]


def test_an_id_with_a_nul_is_ignored() -> None:
    assert SseDecoder().feed(b"id: a\0b\ndata: 1\n\n") == [SseEvent(b"1")]


def test_a_byte_order_mark_is_removed_at_the_start_only() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"\xef") == []
    assert decoder.feed(b"\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\n") == [SseEvent(b"1")]


@pytest.mark.parametrize(
    ("value", "seconds"), [("1500", 1.5), ("0", 0.0), ("-5", None), ("1e3", None), ("9" * 9, None)]
)
def test_retry_is_a_number_of_milliseconds(value: str, seconds: float | None) -> None:
    decoder = SseDecoder()
    assert decoder.feed(f"retry: {value}\n\n".encode()) == []
    assert decoder.retry == seconds


def test_finish_returns_the_event_that_lacks_its_empty_line() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\ndata: 2") == []
    assert decoder.finish() == [SseEvent(b"1\n2")]
    assert decoder.finish() == []


@pytest.mark.parametrize("data", [b"x" * 101, b"data: " + b"x" * 101 + b"\n", b"data: x\n" * 101])
def test_an_event_that_is_too_large_is_an_error(data: bytes) -> None:
    decoder = SseDecoder(max_event_bytes=100)
    chunks = [data[index : index + 1] for index in range(len(data))]
    with pytest.raises(SseSizeError, match="more than 100 bytes"):
        list(map(decoder.feed, chunks))


@pytest.mark.parametrize("line", [b"data:\n", b"data\n", b"data: x\n"])
def test_an_event_has_a_limited_number_of_data_lines(line: bytes) -> None:
    decoder = SseDecoder()
    for _ in range(2):
        assert decoder.feed(line * 100_000) == []
        assert len(decoder.feed(b"\n")) == 1
    with pytest.raises(SseSizeError, match="more than 100,000 data lines"):
        decoder.feed(line * 100_001)


def test_the_size_limit_is_for_one_event_not_for_the_stream() -> None:
    decoder = SseDecoder(max_event_bytes=100)
    for _ in range(50):
        assert decoder.feed(b"data: " + b"x" * 90 + b"\n\n") == [SseEvent(b"x" * 90)]
        assert decoder.feed(b": " + b"x" * 90 + b"\n") == []
