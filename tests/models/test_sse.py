"""Server-sent events from bytes that are split anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.models.sse import EventReader

STREAM = (
    '\ufeff: hello\r\n\r\nevent: x\r\ndata: {"a": "ä🎉"}\r\n\r\n'
    ":\ndata:one\ndata: two\n\nid: 7\rdata: three\r\rdata\n\ndata: \n\n"
)
DATA = ['{"a": "ä🎉"}'.encode(), b"one\ntwo", b"three", b""]


def read(stream: bytes, cuts: list[int]) -> list[bytes]:
    reader = EventReader()
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    found: list[bytes] = []
    for start, end in itertools.pairwise(places):
        found += reader.feed(stream[start:end])
    return found + reader.finish()


@given(st.lists(st.integers(0, 1000), max_size=40))
def test_events_are_the_same_wherever_the_stream_is_split(cuts: list[int]) -> None:
    assert read(STREAM.encode(), cuts) == DATA


def test_events_are_the_same_byte_by_byte() -> None:
    stream = STREAM.encode()
    assert read(stream, list(range(len(stream)))) == DATA


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_any_bytes_give_the_same_events_however_they_are_split(stream: bytes, cuts: list[int]) -> None:
    assert read(stream, cuts) == read(stream, [])


def test_the_last_event_needs_no_empty_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data: a\n\ndata: b") == [b"a"]
    assert reader.finish() == [b"b"]
    assert reader.finish() == []


@pytest.mark.parametrize(
    "chunks", [[b"data: " + b"x" * 200], [b"data: xx"] + [b"x" * 10] * 20, [b"data: " + b"x" * 20 + b"\n"] * 9]
)
def test_an_event_that_never_ends_is_refused(chunks: list[bytes]) -> None:
    reader = EventReader(limit=100)
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        [reader.feed(chunk) for chunk in chunks]


def test_the_limit_is_for_each_event() -> None:
    reader = EventReader(limit=100)
    for _ in range(50):
        assert reader.feed(b"data: " + b"x" * 50) == []
        assert reader.feed(b"\n\n") == [b"x" * 50]
