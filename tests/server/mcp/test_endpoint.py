"""The endpoint as HTTP sees it: names, headers, sizes, sessions, and requests that mean no good."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.mcp.conftest import META, VERSION, Answer, Serve, Served, make_tools
from toolspace import Allow, Deny, Settings, Tool, ToolContext, Toolspace
from toolspace.server import asgi
from toolspace.server.authentication import require_bearer_token
from toolspace.server.host_and_cors import HostCheck
from toolspace.server.problems import Problem
from toolspace.storage.outputs.memory import MemoryOutputs

pytestmark = pytest.mark.spec("12.3")
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}


# Names


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:80", "localhost@x"]
)
async def test_a_host_name_that_is_not_ours_is_refused(served: Served, host: str) -> None:
    for answer in (await served.ask("tools/call", CALL, host=host), await served.ask("ping", host=host)):
        assert answer.status == 421
        assert "Host" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1.evil.example", "file://", "http://["]
)
async def test_a_page_from_elsewhere_is_refused(served: Served, origin: str) -> None:
    assert (await served.ask("tools/call", CALL, origin=origin)).status == 403


async def test_pages_of_this_machine_are_let_in_and_may_read_the_answer(served: Served) -> None:
    answer = await served.ask("tools/call", CALL, origin="http://localhost:6274")
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "http://localhost:6274"
    async with served.http.options(served.url, headers={"origin": "http://localhost:6274"}) as preflight:
        assert preflight.status == 204


async def test_configured_names_are_let_in(serve: Serve) -> None:
    served = await serve(allowed_hosts=["Tools.example"], allowed_origins=["https://app.example"])
    assert (await served.ask("tools/call", CALL, host="tools.example:8443")).status == 200
    assert (await served.ask("tools/call", CALL, origin="https://app.example")).status == 200
    assert (await served.ask("tools/call", CALL, origin="https://other.example")).status == 403


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_no_name_but_ours_is_let_in(host: bytes, origin: bytes) -> None:
    names = HostCheck()
    if names.check(host, origin) is None:
        bare = host.lower().rsplit(b":", 1)[0] if host.rsplit(b":", 1)[-1].isdigit() else host.lower()
        assert bare in (b"localhost", b"127.0.0.1", b"[::1]")


# Headers, sizes and shapes


async def test_a_body_that_is_too_large_is_refused(served: Served) -> None:
    answer = await served.ask("tools/call", {"name": "echo", "arguments": {"data": "x" * (4 * 1024 * 1024)}})
    assert answer.status == 413

    async def chunks() -> Any:
        for _ in range(5):
            yield b"[" * 1024 * 1024

    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    async with served.http.post(served.url, data=chunks(), headers=headers) as response:
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
async def test_headers_have_to_agree_with_the_body(
    served: Served, headers: dict[str, str], status: int, code: int | None
) -> None:
    answer = await served.ask("tools/call", CALL, **{name.replace("-", "_"): value for name, value in headers.items()})
    assert answer.status == status
    if code is not None:
        assert answer.json["error"]["code"] == code


async def test_a_name_in_a_header_may_be_encoded(served: Served) -> None:
    assert (await served.ask("tools/call", CALL, mcp_name="=?base64?YWRk?=")).json["result"]["content"][0][
        "text"
    ] == "3"


async def test_an_unsupported_version_is_told_which_are(served: Served) -> None:
    meta = {**META, "io.modelcontextprotocol/protocolVersion": "2031-01-01"}
    answer = await served.ask("tools/call", {**CALL, "_meta": meta}, mcp_protocol_version="2031-01-01")
    assert answer.status == 400
    assert answer.json["error"]["data"] == {"supported": [VERSION], "requested": "2031-01-01"}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000],
    ids=["empty", "open", "no json", "batch", "null", "number", "text", "no utf-8", "deep list", "deep object"],
)
async def test_a_body_that_is_no_request_is_refused(served: Served, body: bytes) -> None:
    modern = {"mcp-protocol-version": VERSION, "mcp-method": "tools/call", "mcp-name": "add"}
    session = await served.open_session()
    for headers in (modern, session, {}):
        answer = await served.post(None, raw=body, headers=headers)
        assert answer.status == 400
        assert answer.json["error"]["code"] in (-32700, -32600, -32602)
        assert b"Traceback" not in answer.body


@pytest.mark.parametrize("id", [10**30, 1.5, True, None, {"a": 1}, [], -1, 0, "", "x" * 5000], ids=repr)
async def test_strange_ids_are_echoed_or_refused(served: Served, id: Any) -> None:
    body = {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {**CALL, "_meta": META}}
    headers = {"mcp-protocol-version": VERSION, "mcp-method": "tools/call", "mcp-name": "add"}
    answer = await served.post(body, headers=headers)
    if answer.status == 200:
        assert answer.json["id"] == id
    else:
        assert answer.status == 400


@pytest.mark.parametrize("method", ["PUT", "PATCH", "HEAD"])
async def test_other_methods_of_http_are_refused(served: Served, method: str) -> None:
    async with served.http.request(method, served.url, headers={"mcp-protocol-version": VERSION}) as response:
        assert response.status == 405


async def test_the_endpoint_is_at_its_path_alone(served: Served) -> None:
    async with served.http.get(served.url.replace("/mcp", "/elsewhere")) as response:
        assert response.status == 404


async def test_an_unknown_method_is_not_found(served: Served) -> None:
    answer = await served.ask("tools/destroy")
    assert (answer.status, answer.json["error"]["code"]) == (404, -32601)


# Both paths say the same


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["add", "echo", "weather", "fails", "picture", "nope", "agent__batch"]) | st.integers(),
        "arguments": st.dictionaries(st.sampled_from(["a", "b", "data", "city"]), ARGUMENTS, max_size=3) | ARGUMENTS,
        "cursor": st.text(max_size=10),
        "_meta": st.just(META)
        | st.just({**META, "progressToken": 7})
        | st.dictionaries(st.sampled_from(list(META)), ARGUMENTS),
    },
)


async def test_the_fast_path_answers_as_the_library_does(served: Served) -> None:
    examples: list[tuple[str, dict[str, Any], Any]] = []

    @settings(max_examples=120, deadline=None, database=None, derandomize=True)
    @given(st.sampled_from(["tools/call", "tools/list"]), PARAMS, st.sampled_from([1, "a", 2**70, None]))
    def collect(method: str, params: dict[str, Any], id: Any) -> None:
        examples.append((method, params, id))

    collect()
    for method, params, id in examples:
        fast, slow = await _ask_twice(served, method, {"_meta": META, **params}, id)
        assert (fast.status, fast.json) == (slow.status, slow.json), (method, params, id)


async def _ask_twice(served: Served, method: str, params: dict[str, Any], id: Any) -> tuple[Answer, Answer]:
    name = params.get("name")
    headers = {"mcp-protocol-version": VERSION, "mcp-method": method}
    if isinstance(name, str) and method == "tools/call":
        headers["mcp-name"] = name
    body = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
    fast = await served.post(body, headers=headers)
    # Two headers of one name, which mean nothing here: the library's way is taken.
    pairs = [*headers.items(), ("accept", "application/json, text/event-stream"), ("content-type", "application/json")]
    async with served.http.post(
        served.url, data=json.dumps(body).encode(), headers=[*pairs, ("x-a", "1"), ("x-a", "2")]
    ) as response:
        return fast, Answer(response.status, response.headers, await response.read())


async def test_the_fast_path_answers_in_a_session_as_the_library_does(served: Served) -> None:
    session = await served.open_session()
    calls: list[dict[str, Any]] = [
        CALL,
        {"name": "add", "arguments": {"a": "x"}},
        {"name": "weather", "arguments": {"city": "Ulm"}},
        {"name": "picture"},
        {"name": "fails", "arguments": {}},
        {"name": "echo", "arguments": {"data": [1, None]}},
    ]
    bodies = [{"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": params} for params in calls]
    bodies += [{"jsonrpc": "2.0", "id": "x", "method": "tools/list"}]
    bodies += [{"jsonrpc": "2.0", "id": "x", "method": "tools/list", "params": {"cursor": "?"}}]
    for body in bodies:
        fast = await served.post(body, headers=session)
        pairs = [*session.items(), ("accept", "*/*"), ("content-type", "application/json"), ("x-a", "1"), ("x-a", "2")]
        async with served.http.post(served.url, data=json.dumps(body).encode(), headers=pairs) as response:
            slow = Answer(response.status, response.headers, await response.read())
        assert fast.headers["content-type"] == "application/json"
        assert fast.headers["mcp-session-id"] == session["mcp-session-id"]
        assert (fast.status, fast.json) == (slow.status, slow.json)


async def test_arguments_that_headers_repeat_are_compared(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    served = await serve(Toolspace([Tool("deploy", input_schema=schema, handler=lambda parameters, context: "done")]))
    call = {"name": "deploy", "arguments": {"region": "eu"}}
    assert (await served.ask("tools/call", call, mcp_param_region="eu")).status == 200
    for wrong in ("us", ""):
        answer = await served.ask("tools/call", call, mcp_param_region=wrong)
        assert (answer.status, answer.json["error"]["code"]) == (400, -32020)


# Sessions


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_an_unknown_session_is_not_found(served: Served, method: str) -> None:
    headers = {"mcp-session-id": "0" * 32, "accept": "application/json, text/event-stream"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
    async with served.http.request(method, served.url, json=body, headers=headers) as response:
        assert response.status == 404


async def test_a_session_that_was_ended_is_gone(served: Served) -> None:
    session = await served.open_session()
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
    assert (await served.post(body, headers=session)).status == 200
    async with served.http.delete(served.url, headers=session) as response:
        assert response.status == 200
    assert (await served.post(body, headers=session)).status == 404


async def test_a_session_that_was_left_alone_is_gone_for_good(serve: Serve) -> None:
    served = await serve(idle_seconds=0.2)
    ended = asyncio.Event()

    class Ended(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "idle timeout" in record.getMessage():
                ended.set()

    log = logging.getLogger("mcp.server.streamable_http_manager")
    handler, level = Ended(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        session = await served.open_session()
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
        assert (await served.post(body, headers=session)).status == 200
        await ended.wait()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert [(await served.post(body, headers=session)).status for _ in range(3)] == [404, 404, 404]


@pytest.mark.spec("4.5")
async def test_a_call_of_a_session_is_cancelled_by_another_request(served: Served) -> None:
    session = await served.open_session()
    body = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "waits"}}
    call = asyncio.create_task(served.post(body, headers=session))
    await served.signals.started.wait()
    word = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
    other = await served.open_session()
    assert (await served.post(word, headers=other)).status == 202  # Nobody else's word counts.
    assert not served.signals.stopped.is_set()
    assert (await served.post(word, headers=session)).status == 202
    await served.signals.stopped.wait()
    assert (await call).json["error"]["message"] == "Request cancelled"


@pytest.mark.spec("4.5")
@pytest.mark.parametrize("era", ["stateless", "session"])
async def test_a_closed_connection_stops_the_call(served: Served, era: str) -> None:
    if era == "session":
        body = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "waits"}}
        call = asyncio.create_task(served.post(body, headers=await served.open_session()))
    else:
        call = asyncio.create_task(served.ask("tools/call", {"name": "waits"}))
    await served.signals.started.wait()
    call.cancel()
    await served.signals.stopped.wait()
    await served.toolspace.orchestrator.wait_until_idle()


# Callers


def _by_key(scope: Any) -> ToolContext:
    key = dict(scope["headers"]).get(b"x-key", b"").decode()
    if not key:
        raise Problem(401, "a key is needed")
    return ToolContext(user_id=key)


async def test_who_may_not_is_denied_and_others_are_known_to_the_tools(serve: Serve) -> None:
    async def who(parameters: dict[str, Any], context: ToolContext) -> str | None:
        return context.user_id

    served = await serve(Toolspace([Tool("who", handler=who)]), authorize=_by_key)
    assert (await served.ask("tools/call", {"name": "who"})).status == 401
    answer = await served.ask("tools/call", {"name": "who"}, x_key="ann")
    assert answer.json["result"]["content"][0]["text"] == "ann"
    session = await served.open_session(**{"x-key": "ann"})
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "who"}}
    assert (await served.post(body, headers=session)).json["result"]["content"][0]["text"] == "ann"
    assert (await served.post(body, headers={**session, "x-key": "bob"})).status == 404
    assert (await served.post(body, headers={**session, "x-key": ""})).status == 401


@pytest.mark.spec("4.6")
async def test_an_output_is_for_its_owner_only(serve: Serve) -> None:
    served = await serve(authorize=_by_key)
    answer = await served.ask("tools/call", {"name": "big"}, x_key="ann")
    uri = answer.json["result"]["content"][-1]["uri"]
    assert (await served.ask("resources/read", {"uri": uri}, x_key="ann")).status == 200
    theirs = await served.ask("resources/read", {"uri": uri}, x_key="bob")
    nobodys = await served.ask("resources/read", {"uri": uri[:-4] + "0000"}, x_key="bob")
    assert theirs.status == nobodys.status == 400
    assert theirs.json["error"]["message"].replace(uri, "") == nobodys.json["error"]["message"].replace(
        uri[:-4] + "0000", ""
    )
    assert (await served.ask("resources/list", x_key="bob")).json["result"]["resources"] == []
    assert len((await served.ask("resources/list", x_key="ann")).json["result"]["resources"]) == 1


async def test_each_caller_is_shown_the_tools_it_may_use(serve: Serve) -> None:
    class OnlyAnnAdds:
        rule = "only ann adds"

        def decide(self, tool: Tool, context: ToolContext) -> Allow | Deny:
            return Allow() if tool.name != "add" or context.user_id == "ann" else Deny("only ann adds")

    signals_tools = Toolspace(settings=Settings(policies=[OnlyAnnAdds()]))
    served = await serve(signals_tools, authorize=_by_key)
    for made in make_tools(served.signals):
        signals_tools.add_tool(made)
    for key, may in (("ann", True), ("bob", False)):
        listed = (await served.ask("tools/list", x_key=key)).json["result"]["tools"]
        assert ("add" in [one["name"] for one in listed]) is may
        call = await served.ask("tools/call", CALL, x_key=key)
        assert call.json["result"]["isError"] is not may
        typo = await served.ask("tools/call", {"name": "ad"}, x_key=key)
        assert ('"add"' in typo.json["error"]["message"]) is may


async def test_a_bearer_token_is_asked_for(serve: Serve) -> None:
    served = await serve(authorize=require_bearer_token("s3cret"))
    for wrong in ("", "Bearer", "Bearer s3cre", "Basic s3cret", "Bearer s3cret2"):
        answer = await served.ask("tools/call", CALL, authorization=wrong)
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert b"s3cret" not in answer.body
    assert (await served.ask("tools/call", CALL, authorization="Bearer s3cret")).status == 200


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="every request would pass"):
        require_bearer_token("")


async def test_a_fault_of_ours_is_not_told(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def broken(plan: Any, next: Any) -> Any:
        async def run(call: Any) -> Any:
            raise RuntimeError("password=hunter2")

        return run

    served = await serve()
    served.toolspace.orchestrator.add_stage(broken)
    answer = await served.ask("tools/call", CALL)
    assert answer.json["result"]["content"][0]["text"] == "(tool failed: internal error)"
    assert b"hunter2" not in answer.body


@pytest.mark.spec("4.5")
async def test_the_end_of_a_session_is_the_end_of_its_calls(served: Served) -> None:
    session = await served.open_session()
    body = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "waits"}}
    call = asyncio.create_task(served.post(body, headers=session))
    await served.signals.started.wait()
    async with served.http.delete(served.url, headers=session) as response:
        assert response.status == 200
    await served.signals.stopped.wait()
    await call


async def test_two_hosts_are_refused(served: Served) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": META}})
    host = served.url.split("/")[2]
    reader, writer = await asyncio.open_connection(*host.split(":"))
    head = (
        f"POST /mcp HTTP/1.1\r\nhost: evil.example\r\nhost: {host}\r\norigin: http://evil.example\r\n"
        f"origin: http://{host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write((head + body).encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()
    await writer.wait_closed()


async def test_two_sessions_at_once_are_refused(served: Served) -> None:
    ours, theirs = await served.open_session(), await served.open_session()
    host = served.url.split("/")[2]
    reader, writer = await asyncio.open_connection(*host.split(":"))
    ids = "".join(f"mcp-session-id: {one['mcp-session-id']}\r\n" for one in (ours, theirs))
    writer.write(f"DELETE /mcp HTTP/1.1\r\nhost: {host}\r\n{ids}\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()
    await writer.wait_closed()


async def test_a_part_of_a_body_runs_nothing(served: Served) -> None:
    """Also where the part is a whole request: nobody knows what else was to come, and nobody waits for it."""
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "waits", "_meta": META}})
    host = served.url.split("/")[2]
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
    for _ in range(3):  # The same way: what was closed before is read before these are answered.
        assert (await served.ask("tools/call", CALL)).status == 200
    assert not served.signals.started.is_set()


async def test_a_body_that_does_not_arrive_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "BODY_TIMEOUT_SECONDS", 0.05)
    host = served.url.split("/")[2]
    reader, writer = await asyncio.open_connection(*host.split(":"))
    writer.write(f"POST /mcp HTTP/1.1\r\nhost: {host}\r\ncontent-length: 9\r\n\r\n{{".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    await reader.read()  # And the connection is closed.
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
async def test_a_head_without_end_is_refused(served: Served, start: str) -> None:
    reader, writer = await asyncio.open_connection(*served.url.split("/")[2].split(":"))

    async def send() -> None:
        writer.write(start.encode())
        for _ in range(100_000):
            writer.write(b"a" * 1_000)
            await writer.drain()

    sending = asyncio.create_task(send())
    try:
        with suppress(ConnectionError):
            assert (await reader.read(12)) in (b"HTTP/1.1 400", b"")
        with pytest.raises(ConnectionError):
            await sending
    finally:
        writer.close()
    assert (await served.ask("tools/call", CALL)).status == 200


@pytest.mark.parametrize("era", ["stateless", "session"])
async def test_a_fault_in_reading_an_output_is_not_told(serve: Serve, era: str) -> None:
    class Broken(MemoryOutputs):
        async def find(self, handle: str, *, session: str, owner: str | None) -> Any:
            raise OSError("/secret/place is gone")

    served = await serve(Toolspace(outputs=Broken(ttl=60)))
    params = {"uri": "toolspace://outputs/session-x/0123456789abcdef"}
    if era == "session":
        body = {"jsonrpc": "2.0", "id": 1, "method": "resources/read", "params": params}
        answer = await served.post(body, headers=await served.open_session())
    else:
        answer = await served.ask("resources/read", params)
    assert answer.json["error"] == {"code": -32603, "message": "Internal server error"}


async def test_a_change_made_from_another_thread_is_told(served: Served) -> None:
    await asyncio.to_thread(served.toolspace.add_tool, Tool("late", handler=lambda parameters, context: "here"))
    listed = (await served.ask("tools/list")).json["result"]["tools"]
    assert "late" in [one["name"] for one in listed]
