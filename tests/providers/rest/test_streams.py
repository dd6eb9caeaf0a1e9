"""Streamed responses: each value is a partial result, all together are the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.http_servers import http_server
from tests.providers.rest.rest_tools import rest_spec, rest_toolspace
from toolspace.core.events import CallPartial, EventType
from toolspace.providers.rest.response import read_events, read_json_lines, read_json_sequence
from toolspace.testing import EventRecorder

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


def stream_response(content_type: str, *pieces: bytes) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return answer


@pytest.mark.spec("3.21")
@pytest.mark.parametrize(
    ("content_type", "pieces", "values"),
    [
        (NDJSON, [b'{"a":', b"1}\n\n[2]\n", b'"x"'], [{"a": 1}, [2], "x"]),
        ("application/jsonl", [b"1\nnot json\n"], [1, "not json"]),
        ("application/json-seq", [b'\x1e{"a":1}\n\x1e', b"2\n"], [{"a": 1}, 2]),
        (SSE, [b'data: {"a":1}\r', b"\n\r\nevent: tick\ndata: 5\n\n"], [{"a": 1}, {"event": "tick", "data": "5"}]),
        (SSE + "; charset=utf-8", [b": hello\ndata:[1,\ndata:2]\nid: 7\n\ndata: [DONE]\n\ndata: no\n\n"], [[1, 2]]),
    ],
    ids=["ndjson", "jsonl", "json-seq", "events", "model-api"],
)
async def test_a_stream_gives_partial_results_and_a_list(
    content_type: str, pieces: list[bytes], values: list[Any]
) -> None:
    async with (
        http_server(stream_response(content_type, *pieces)) as server,
        rest_toolspace(rest_spec(server.url())) as toolspace,
    ):
        recorder = EventRecorder(toolspace)
        result = await toolspace.call("rest__t", {})
    assert result.ok, result.error
    assert result.result == values
    assert result.extras["status"] == 200
    partials = recorder.of_type(EventType.TOOL_CALL_PARTIAL)
    assert [event.value for event in partials if isinstance(event, CallPartial)] == values


@pytest.mark.spec("3.21")
async def test_a_stream_of_texts_is_their_joined_text() -> None:
    answer = stream_response(SSE, b"data: Hel\n\n", b"data: lo 5\n\n")
    async with http_server(answer) as server, rest_toolspace(rest_spec(server.url())) as toolspace:
        assert (await toolspace.call("rest__t", {})).result == "Hello 5"


@pytest.mark.spec("3.21")
async def test_partial_results_arrive_before_the_end() -> None:
    reception = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": NDJSON})
        await response.prepare(request)
        await response.write(b"1\n")
        await reception.wait()
        await response.write(b"2\n")
        return response

    async with http_server(answer) as server, rest_toolspace(rest_spec(server.url())) as toolspace:
        recorder = EventRecorder(toolspace)
        call_task = asyncio.create_task(toolspace.call("rest__t", {}))
        await recorder.wait_for(lambda event: event.type is EventType.TOOL_CALL_PARTIAL)
        assert not call_task.done()
        reception.set()
        assert (await call_task).result == [1, 2]


@pytest.mark.spec("3.21")
async def test_a_failed_status_is_not_streamed() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text="data: x\n\n", content_type=SSE)

    async with http_server(answer) as server, rest_toolspace(rest_spec(server.url())) as toolspace:
        assert (await toolspace.call("rest__t", {})).error == "HTTP 500 Internal Server Error: data: x"


@pytest.mark.spec("3.21")
async def test_an_endless_record_is_refused() -> None:
    answer = stream_response(NDJSON, *[b"x" * (1 << 20)] * 20)
    async with http_server(answer) as server, rest_toolspace(rest_spec(server.url())) as toolspace:
        result = await toolspace.call("rest__t", {})
    assert result.error == "one record of the streamed response is longer than 16 MiB"
    assert result.executed


@pytest.mark.spec("4.6")
async def test_a_large_stream_is_stored_on_disk() -> None:
    line = json.dumps({"text": "x" * 1_000}).encode() + b"\n"
    chunk = line * 1_000
    async with (
        http_server(stream_response(NDJSON, *[chunk] * 80)) as server,
        rest_toolspace(rest_spec(server.url())) as toolspace,
    ):
        result = await toolspace.call("rest__t", {})
        model_result = await toolspace.run().call("rest__t", {})
    assert model_result.result["tool_output"]["bytes"] == result.result["tool_output"]["bytes"]
    stored_output = result.result["tool_output"]
    assert stored_output["reason"] == "size_limit_exceeded"
    assert stored_output["bytes"] > 80_000_000
    assert result.extras["status"] == 200


async def read(reader: Any, data: bytes, cuts: list[int]) -> list[Any]:
    async def pieces() -> AsyncIterator[bytes]:
        last = 0
        for cut in sorted(cut % (len(data) + 1) for cut in cuts):
            yield data[last:cut]
            last = cut
        yield data[last:]

    return [value async for value in reader(pieces())]


CUTS = st.lists(st.integers(0, 1_000), max_size=6)
VALUES = st.lists(
    st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers(-9, 9), max_size=2), max_size=5
)


@given(values=VALUES, cuts=CUTS, end=st.sampled_from(["\n", "\r\n", "\r"]))
def test_chunk_boundaries_do_not_matter(values: list[Any], cuts: list[int], end: str) -> None:
    async def check() -> None:
        texts = [json.dumps(value) for value in values]
        assert await read(read_json_lines, "".join(f"{text}\n" for text in texts).encode(), cuts) == values
        assert await read(read_json_sequence, "".join(f"\x1e{text}\n" for text in texts).encode(), cuts) == values
        data = "".join(f"event: message{end}data: {text}{end}{end}" for text in texts).encode()
        assert await read(read_events, data, cuts) == values

    asyncio.run(check())


@given(data=st.binary(max_size=200), cuts=CUTS)
def test_no_bytes_break_the_readers(data: bytes, cuts: list[int]) -> None:
    async def check() -> None:
        for reader in (read_json_lines, read_json_sequence, read_events):
            whole_result = await read(reader, data, [])
            assert await read(reader, data, cuts) == whole_result

    asyncio.run(check())
