"""Retries after 429 and 503."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.http_servers import http_server
from tests.providers.rest.rest_tools import call, rest_spec, rest_toolspace
from toolspace.core.events import CallProgress, EventType
from toolspace.providers.rest.redirects_and_retries import retry_delay
from toolspace.testing import EventRecorder


def busy(times: int, status: int = 429, retry_after: str | None = "0") -> Any:
    """Responds with `status` a number of times, then with `{}`."""
    remaining = [times]

    async def answer(request: web.Request) -> web.StreamResponse:
        if remaining[0] > 0:
            remaining[0] -= 1
            return web.Response(status=status, headers={"Retry-After": retry_after} if retry_after else {})
        return web.json_response({})

    return answer


@pytest.mark.spec("3.21")
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
async def test_an_idempotent_request_is_retried(method: str, status: int) -> None:
    async with http_server(busy(2, status)) as server:
        result = await call(rest_spec(server.url("/?a=1"), method=method), {"b": 1})
    assert result.ok, result.error
    assert result.extras["attempts"] == 3
    first, second, third = server.requests
    assert (first.target, first.body) == (second.target, second.body) == (third.target, third.body)


@pytest.mark.spec("3.21")
@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_non_idempotent_request_is_not_retried(method: str) -> None:
    async with http_server(busy(1)) as server:
        result = await call(rest_spec(server.url(), method=method))
    assert result.error == "HTTP 429 Too Many Requests"
    assert result.extras["headers"]["retry-after"] == "0"
    assert len(server.requests) == 1


@pytest.mark.spec("3.21")
@pytest.mark.parametrize("status", [400, 500, 502, 504])
async def test_other_statuses_are_not_retried(status: int) -> None:
    async with http_server(busy(1, status)) as server:
        assert not (await call(rest_spec(server.url()))).ok
    assert len(server.requests) == 1


@pytest.mark.spec("3.21")
async def test_there_are_at_most_three_attempts() -> None:
    async with http_server(busy(9)) as server:
        result = await call(rest_spec(server.url()))
    assert result.error_kind == "execution_error"
    assert result.extras["status"] == 429
    assert result.extras["attempts"] == 3
    assert len(server.requests) == 3


@pytest.mark.spec("3.21")
async def test_a_retry_is_reported_as_progress() -> None:
    async with http_server(busy(1, 503)) as server, rest_toolspace(rest_spec(server.url())) as toolspace:
        recorder = EventRecorder(toolspace)
        await toolspace.call("rest__t", {})
    (event,) = recorder.of_type(EventType.TOOL_CALL_PROGRESS)
    assert isinstance(event, CallProgress)
    assert event.message == "HTTP 503; trying again in 0.0 s"


@pytest.mark.spec("3.21")
async def test_a_past_retry_after_date_means_now() -> None:
    async with http_server(busy(1, retry_after=formatdate(time.time() - 60, usegmt=True))) as server:
        assert (await call(rest_spec(server.url()))).extras["attempts"] == 2


@pytest.mark.spec("3.21")
@pytest.mark.parametrize(
    "after", ["3600", formatdate(time.time() + 86_400, usegmt=True), "9" * 400], ids=["hour", "day", "long"]
)
async def test_a_long_retry_after_is_not_waited_for(after: str) -> None:
    async with http_server(busy(1, retry_after=after)) as server:
        result = await call(rest_spec(server.url()))
    assert result.error == "HTTP 429 Too Many Requests"
    assert len(server.requests) == 1


@pytest.mark.spec("3.21")
async def test_a_retry_beyond_the_deadline_is_not_waited_for() -> None:
    async with http_server(busy(1, retry_after="20")) as server:
        result = await call(rest_spec(server.url(), timeout=10))
    assert result.error == "HTTP 429 Too Many Requests"


@given(text=st.text(max_size=40) | st.from_regex(r"[0-9]{0,400}", fullmatch=True), attempt=st.integers(1, 3))
def test_any_retry_after_header_gives_a_delay(text: str, attempt: int) -> None:
    assert retry_delay(text, attempt) >= 0
    assert 0.25 <= retry_delay(None, attempt) <= 2
