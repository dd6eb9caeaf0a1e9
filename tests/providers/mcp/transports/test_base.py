from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.message import SessionMessage

from toolspace.providers.mcp.transports.base import MessageDecoder, encode_message

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_skipped(data: bytes) -> None:
    assert isinstance(MessageDecoder("any")(data), SessionMessage | None)


@given(JSON, JSON, st.sampled_from(["result", "error", "method", "params", "x"]))
def test_any_json_is_a_message_or_skipped(key: object, value: object, field: str) -> None:
    for message in (value, {"jsonrpc": "2.0", "id": key, field: value}):
        decoded = MessageDecoder("any")(json.dumps(message).encode())
        if decoded is not None:
            assert encode_message(decoded)


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text()), max_size=3))
def test_message_survives_encoding_and_decoding(arguments: dict[str, object]) -> None:
    wire = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"arguments": arguments}}
    message = MessageDecoder("any")(json.dumps(wire).encode())
    assert message is not None
    assert json.loads(encode_message(message)) == wire
    assert b"\n" not in encode_message(message)


def test_deeply_nested_json_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    decode = MessageDecoder("deep")
    for _ in range(3):
        assert decode(b"[" * 200_000) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
