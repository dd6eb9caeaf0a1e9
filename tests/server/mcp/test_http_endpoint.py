"""The endpoint over HTTP: hosts, headers, sizes, sessions, callers, and hostile requests."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.mcp.conftest import META, VERSION, Serve, Served, make_tools
from toolspace import Allow, Deny, Settings, Tool, ToolContext, Toolspace
from toolspace.server import requests
from toolspace.server.authentication import require_bearer_token
from toolspace.server.host_and_cors import HostCheck
from toolspace.server.responses import Problem
from toolspace.storage.memory_outputs import MemoryOutputs

pytestmark = pytest.mark.spec("12.3")
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}


# Host and Origin


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:80", "localhost@x"]
)
async def test_foreign_host_is_refused(mcp_server: Served, host: str) -> None:
    for answer in (
        await mcp_server.request("tools/call", CALL, host=host),
        await mcp_server.request("ping", host=host),
    ):
        assert answer.status == 421
        assert "Host" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1.evil.example", "file://", "http://["]
)
async def test_foreign_origin_is_refused(mcp_server: Served, origin: str) -> None:
    assert (await mcp_server.request("tools/call", CALL, origin=origin)).status == 403


async def test_local_origin_is_allowed_and_gets_cors_headers(mcp_server: Served) -> None:
    answer = await mcp_server.request("tools/call", CALL, origin="http://localhost:6274")
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "http://localhost:6274"
    async with mcp_server.http.options(mcp_server.url, headers={"origin": "http://localhost:6274"}) as preflight:
        assert preflight.status == 204
        assert preflight.headers["access-control-expose-headers"] == "mcp-session-id"
        assert "content-length" not in preflight.headers


async def test_configured_hosts_and_origins_are_allowed(serve: Serve) -> None:
    mcp_server = await serve(allowed_hosts=["Tools.example"], allowed_origins=["https://app.example"])
    assert (await mcp_server.request("tools/call", CALL, host="tools.example:8443")).status == 200
    assert (await mcp_server.request("tools/call", CALL, origin="https://app.example")).status == 200
    assert (await mcp_server.request("tools/call", CALL, origin="https://other.example")).status == 403


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_only_loopback_hosts_are_allowed(host: bytes, origin: bytes) -> None:
    names = HostCheck()
    if names.check(host, origin) is None:
        bare = host.lower().rsplit(b":", 1)[0] if host.rsplit(b":", 1)[-1].isdigit() else host.lower()
        assert bare in (b"localhost", b"127.0.0.1", b"[::1]")


# Headers, sizes and formats


async def test_too_large_body_is_refused(mcp_server: Served) -> None:
    answer = await mcp_server.request("tools/call", {"name": "echo", "arguments": {"data": "x" * (4 * 1024 * 1024)}})
    assert answer.status == 413
    assert "connection" not in answer.headers  # The client can send the rest of the body and read the answer.

    async def chunks() -> Any:
        for _ in range(5):
            yield b"[" * 1024 * 1024

    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    async with mcp_server.http.post(mcp_server.url, data=chunks(), headers=headers) as response:
        assert response.status == 413


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"mcp-protocol-version": "2031-01-01"}, 400, -32020),
        ({"mcp-method": "tools/list"}, 400, -32020),
        ({"mcp-method": ""}, 400, -32020),
        ({"mcp-name": "other"}, 400, -32020),
        ({"mcp-name": ""}, 400, -32020),
        ({"content-type": "text/plain"}, 400, None),
        ({"accept": "text/html"}, 406, None),
        ({"accept": "application/json"}, 406, None),
    ],
    ids=["version", "method", "no method", "name", "no name", "content type", "accept", "accept json only"],
)
async def test_headers_must_match_the_body(
    mcp_server: Served, headers: dict[str, str], status: int, code: int | None
) -> None:
    answer = await mcp_server.request(
        "tools/call", CALL, **{name.replace("-", "_"): value for name, value in headers.items()}
    )
    assert answer.status == status
    if code is not None:
        assert answer.json["error"]["code"] == code


async def test_name_header_may_be_base64(mcp_server: Served) -> None:
    assert (await mcp_server.request("tools/call", CALL, mcp_name="=?base64?YWRk?=")).json["result"]["content"][0][
        "text"
    ] == "3"


async def test_unsupported_version_error_lists_supported_versions(mcp_server: Served) -> None:
    meta = {**META, "io.modelcontextprotocol/protocolVersion": "2031-01-01"}
    answer = await mcp_server.request("tools/call", {**CALL, "_meta": meta}, mcp_protocol_version="2031-01-01")
    assert answer.status == 400
    assert answer.json["error"]["data"] == {"supported": [VERSION], "requested": "2031-01-01"}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000],
    ids=["empty", "open", "no json", "batch", "null", "number", "text", "no utf-8", "deep list", "deep object"],
)
async def test_invalid_body_is_refused(mcp_server: Served, body: bytes) -> None:
    modern = {"mcp-protocol-version": VERSION, "mcp-method": "tools/call", "mcp-name": "add"}
    session = await mcp_server.open_session()
    for headers in (modern, session, {}):
        answer = await mcp_server.post(None, raw=body, headers=headers)
        assert answer.status == 400
        assert answer.json["error"]["code"] in (-32700, -32600, -32602)
        assert b"Traceback" not in answer.body


@pytest.mark.parametrize("id", [10**30, 1.5, True, None, {"a": 1}, [], -1, 0, "", "x" * 5000], ids=repr)
async def test_unusual_ids_are_echoed_or_refused(mcp_server: Served, id: Any) -> None:
    body = {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {**CALL, "_meta": META}}
    headers = {"mcp-protocol-version": VERSION, "mcp-method": "tools/call", "mcp-name": "add"}
    answer = await mcp_server.post(body, headers=headers)
    if answer.status == 200:
        assert answer.json["id"] == id
    else:
        assert answer.status == 400


@pytest.mark.parametrize("method", ["PUT", "PATCH", "HEAD"])
async def test_other_http_methods_are_refused(mcp_server: Served, method: str) -> None:
    async with mcp_server.http.request(method, mcp_server.url, headers={"mcp-protocol-version": VERSION}) as response:
        assert response.status == 405


async def test_other_paths_are_not_found(mcp_server: Served) -> None:
    async with mcp_server.http.get(mcp_server.url.replace("/mcp", "/elsewhere")) as response:
        assert response.status == 404


async def test_unknown_method_is_not_found(mcp_server: Served) -> None:
    answer = await mcp_server.request("tools/destroy")
    assert (answer.status, answer.json["error"]["code"]) == (404, -32601)


async def test_header_arguments_must_match_the_body(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    mcp_server = await serve(
        Toolspace([Tool("deploy", input_schema=schema, handler=lambda parameters, context: "done")])
    )
    call = {"name": "deploy", "arguments": {"region": "eu"}}
    assert (await mcp_server.request("tools/call", call, mcp_param_region="eu")).status == 200
    for wrong in ("us", ""):
        answer = await mcp_server.request("tools/call", call, mcp_param_region=wrong)
        assert (answer.status, answer.json["error"]["code"]) == (400, -32020)


# Sessions


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_unknown_session_is_not_found(mcp_server: Served, method: str) -> None:
    headers = {"mcp-session-id": "0" * 32, "accept": "application/json, text/event-stream"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
    async with mcp_server.http.request(method, mcp_server.url, json=body, headers=headers) as response:
        assert response.status == 404


async def test_deleted_session_is_gone(mcp_server: Served) -> None:
    session = await mcp_server.open_session()
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
    assert (await mcp_server.post(body, headers=session)).status == 200
    async with mcp_server.http.delete(mcp_server.url, headers=session) as response:
        assert response.status == 200
    assert (await mcp_server.post(body, headers=session)).status == 404


async def test_idle_session_is_gone(serve: Serve) -> None:
    mcp_server = await serve(idle_seconds=0.2)
    end_event = asyncio.Event()

    class Ended(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "idle timeout" in record.getMessage():
                end_event.set()

    log = logging.getLogger("mcp.server.streamable_http_manager")
    handler, level = Ended(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        session = await mcp_server.open_session()
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
        assert (await mcp_server.post(body, headers=session)).status == 200
        await end_event.wait()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert [(await mcp_server.post(body, headers=session)).status for _ in range(3)] == [404, 404, 404]


@pytest.mark.spec("4.5")
async def test_session_call_is_cancelled_by_another_request(mcp_server: Served) -> None:
    session = await mcp_server.open_session()
    body = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "waits"}}
    call = asyncio.create_task(mcp_server.post(body, headers=session))
    await mcp_server.signals.started.wait()
    word = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
    second_session = await mcp_server.open_session()
    assert (await mcp_server.post(word, headers=second_session)).status == 202  # Another session cannot cancel it.
    assert not mcp_server.signals.stopped.is_set()
    assert (await mcp_server.post(word, headers=session)).status == 202
    await mcp_server.signals.stopped.wait()
    assert (await call).json["error"]["message"] == "Request cancelled"


@pytest.mark.spec("4.5")
@pytest.mark.parametrize("era", ["stateless", "session"])
async def test_closed_connection_stops_the_call(mcp_server: Served, era: str) -> None:
    if era == "session":
        body = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "waits"}}
        call = asyncio.create_task(mcp_server.post(body, headers=await mcp_server.open_session()))
    else:
        call = asyncio.create_task(mcp_server.request("tools/call", {"name": "waits"}))
    await mcp_server.signals.started.wait()
    call.cancel()
    await mcp_server.signals.stopped.wait()
    await mcp_server.toolspace.orchestrator.wait_until_idle()


# Callers


def _by_key(scope: Any) -> ToolContext:
    key = dict(scope["headers"]).get(b"x-key", b"").decode()
    if not key:
        raise Problem(401, "a key is needed")
    return ToolContext(user_id=key)


async def test_unauthorized_caller_is_refused_and_others_reach_the_tool_context(serve: Serve) -> None:
    async def get_user(parameters: dict[str, Any], context: ToolContext) -> str | None:
        return context.user_id

    mcp_server = await serve(Toolspace([Tool("who", handler=get_user)]), authorize=_by_key)
    assert (await mcp_server.request("tools/call", {"name": "who"})).status == 401
    answer = await mcp_server.request("tools/call", {"name": "who"}, x_key="ann")
    assert answer.json["result"]["content"][0]["text"] == "ann"
    session = await mcp_server.open_session(**{"x-key": "ann"})
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "who"}}
    assert (await mcp_server.post(body, headers=session)).json["result"]["content"][0]["text"] == "ann"
    assert (await mcp_server.post(body, headers={**session, "x-key": "bob"})).status == 404
    assert (await mcp_server.post(body, headers={**session, "x-key": ""})).status == 401


@pytest.mark.spec("4.6")
async def test_stored_output_belongs_to_its_owner(serve: Serve) -> None:
    mcp_server = await serve(authorize=_by_key)
    answer = await mcp_server.request("tools/call", {"name": "big"}, x_key="ann")
    uri = answer.json["result"]["content"][-1]["uri"]
    assert (await mcp_server.request("resources/read", {"uri": uri}, x_key="ann")).status == 200
    refusal = await mcp_server.request("resources/read", {"uri": uri}, x_key="bob")
    missing = await mcp_server.request("resources/read", {"uri": uri[:-4] + "0000"}, x_key="bob")
    assert refusal.status == missing.status == 400
    assert refusal.json["error"]["message"].replace(uri, "") == missing.json["error"]["message"].replace(
        uri[:-4] + "0000", ""
    )
    assert (await mcp_server.request("resources/list", x_key="bob")).json["result"]["resources"] == []
    assert len((await mcp_server.request("resources/list", x_key="ann")).json["result"]["resources"]) == 1


async def test_each_caller_sees_the_tools_it_may_use(serve: Serve) -> None:
    class OnlyAnnAdds:
        rule = "only ann adds"

        def decide(self, tool: Tool, context: ToolContext) -> Allow | Deny:
            return Allow() if tool.name != "add" or context.user_id == "ann" else Deny("only ann adds")

    signals_tools = Toolspace(settings=Settings(policies=[OnlyAnnAdds()]))
    mcp_server = await serve(signals_tools, authorize=_by_key)
    for new_tool in make_tools(mcp_server.signals):
        signals_tools.add_tool(new_tool)
    for key, may in (("ann", True), ("bob", False)):
        tool_list = (await mcp_server.request("tools/list", x_key=key)).json["result"]["tools"]
        assert ("add" in [entry["name"] for entry in tool_list]) is may
        call = await mcp_server.request("tools/call", CALL, x_key=key)
        assert call.json["result"]["isError"] is not may
        typo = await mcp_server.request("tools/call", {"name": "ad"}, x_key=key)
        assert ('"add"' in typo.json["error"]["message"]) is may


async def test_bearer_token_is_required(serve: Serve) -> None:
    mcp_server = await serve(authorize=require_bearer_token("s3cret"))
    for wrong in ("", "Bearer", "Bearer s3cre", "Basic s3cret", "Bearer s3cret2"):
        answer = await mcp_server.request("tools/call", CALL, authorization=wrong)
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert b"s3cret" not in answer.body
    assert (await mcp_server.request("tools/call", CALL, authorization="Bearer s3cret")).status == 200


def test_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="every request would pass"):
        require_bearer_token("")


async def test_internal_error_is_not_shown(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def broken(plan: Any, next: Any) -> Any:
        async def run(call: Any) -> Any:
            raise RuntimeError("password=hunter2")

        return run

    mcp_server = await serve()
    mcp_server.toolspace.orchestrator.add_stage(broken)
    answer = await mcp_server.request("tools/call", CALL)
    assert answer.json["result"]["content"][0]["text"] == "(tool failed: internal error)"
    assert b"hunter2" not in answer.body


@pytest.mark.spec("4.5")
async def test_deleting_a_session_stops_its_calls(mcp_server: Served) -> None:
    session = await mcp_server.open_session()
    body = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "waits"}}
    call = asyncio.create_task(mcp_server.post(body, headers=session))
    await mcp_server.signals.started.wait()
    async with mcp_server.http.delete(mcp_server.url, headers=session) as response:
        assert response.status == 200
    await mcp_server.signals.stopped.wait()
    await call


async def test_two_host_headers_are_refused(mcp_server: Served) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": META}})
    host = mcp_server.url.split("/")[2]
    reader, writer = await asyncio.open_connection(*host.split(":"))
    head = (
        f"POST /mcp HTTP/1.1\r\nhost: evil.example\r\nhost: {host}\r\norigin: http://evil.example\r\n"
        f"origin: http://{host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write((head + body).encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()
    await writer.wait_closed()


async def test_two_session_headers_are_refused(mcp_server: Served) -> None:
    first, second = await mcp_server.open_session(), await mcp_server.open_session()
    host = mcp_server.url.split("/")[2]
    reader, writer = await asyncio.open_connection(*host.split(":"))
    ids = "".join(f"mcp-session-id: {session['mcp-session-id']}\r\n" for session in (first, second))
    writer.write(f"DELETE /mcp HTTP/1.1\r\nhost: {host}\r\n{ids}\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()
    await writer.wait_closed()


async def test_incomplete_body_runs_nothing(mcp_server: Served) -> None:
    """Even if the received part is a complete request."""
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "waits", "_meta": META}})
    host = mcp_server.url.split("/")[2]
    _, writer = await asyncio.open_connection(*host.split(":"))
    head = (
        f"POST /mcp HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        "accept: application/json, text/event-stream\r\n"
        f"mcp-protocol-version: {VERSION}\r\nmcp-method: tools/call\r\nmcp-name: waits\r\n"
    )
    writer.write(f"{head}content-length: {len(body) + 1}\r\n\r\n{body}".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    for _ in range(3):  # The closed connection is handled before these requests are answered.
        assert (await mcp_server.request("tools/call", CALL)).status == 200
    assert not mcp_server.signals.started.is_set()


async def test_slow_body_times_out(mcp_server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BODY_TIMEOUT_SECONDS", 0.05)
    host = mcp_server.url.split("/")[2]
    reader, writer = await asyncio.open_connection(*host.split(":"))
    writer.write(f"POST /mcp HTTP/1.1\r\nhost: {host}\r\ncontent-length: 9\r\n\r\n{{".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    await reader.read()  # The connection is closed, too.
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "start",
    [
        "POST /",
        "POST /mcp HTTP/1.1\r\nhost: localhost\r\nx: ",
        "POST /mcp HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;",
        "POST /mcp HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ",
    ],
    ids=["url", "header", "chunk", "trailer"],
)
async def test_endless_head_is_refused(mcp_server: Served, start: str) -> None:
    reader, writer = await asyncio.open_connection(*mcp_server.url.split("/")[2].split(":"))

    async def send() -> None:
        writer.write(start.encode())
        for _ in range(100_000):
            writer.write(b"a" * 1_000)
            await writer.drain()

    send_task = asyncio.create_task(send())
    try:
        with suppress(ConnectionError):
            assert (await reader.read(12)) in (b"HTTP/1.1 400", b"")
        with pytest.raises(ConnectionError):
            await send_task
    finally:
        writer.close()
    assert (await mcp_server.request("tools/call", CALL)).status == 200


@pytest.mark.parametrize("era", ["stateless", "session"])
async def test_internal_error_in_a_resource_is_not_shown(serve: Serve, era: str) -> None:
    class Broken(MemoryOutputs):
        async def find(self, handle: str, *, session: str, owner: str | None) -> Any:
            raise OSError("/secret/place is gone")

    mcp_server = await serve(Toolspace(outputs=Broken(ttl=60)))
    params = {"uri": "toolspace://outputs/session-x/0123456789abcdef"}
    if era == "session":
        body = {"jsonrpc": "2.0", "id": 1, "method": "resources/read", "params": params}
        answer = await mcp_server.post(body, headers=await mcp_server.open_session())
    else:
        answer = await mcp_server.request("resources/read", params)
    assert answer.json["error"] == {"code": -32603, "message": "Internal server error"}


async def test_tool_added_from_another_thread_is_listed(mcp_server: Served) -> None:
    await asyncio.to_thread(mcp_server.toolspace.add_tool, Tool("late", handler=lambda parameters, context: "here"))
    tool_list = (await mcp_server.request("tools/list")).json["result"]["tools"]
    assert "late" in [entry["name"] for entry in tool_list]
