"""The fast path answers every request as the MCP SDK does: random tools, arguments, ids, envelopes and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.mcp.conftest import META, VERSION, RawResponse, Served
from toolspace import Annotations, ImagePart, ResourcePart, TextPart, Tool, ToolContext, ToolError, Toolspace
from toolspace.server.mcp.http_endpoint import McpEndpoint

pytestmark = pytest.mark.spec("12.3")
ABLE = {**META, "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}, "sampling": {}}}
FORM = {"type": "object", "properties": {"name": {"type": "string"}}}
DUPLICATE_HEADER = ((b"x-duplicate", b"1"), (b"x-duplicate", b"2"))
"""Makes the endpoint leave a request to the SDK."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-zA-Z][a-zA-Z0-9_]{0,12}", fullmatch=True)
PROPERTY_TYPES = st.sampled_from(["string", "integer", "number", "boolean", "array", "object"])
BEHAVIOURS = ("result", "raise", "tool error", "parts", "progress", "partial", "ask", "slow")


class ToolPlan(NamedTuple):
    name: str
    behaviour: str
    value: Any
    properties: dict[str, str]
    has_output_schema: bool
    is_read_only: bool


class RequestPlan(NamedTuple):
    method: str
    request_id: Any
    tool: int | str
    """The index of a tool, or a name."""
    arguments: Any
    cursor: Any
    meta: Any
    changed_header: tuple[bytes, bytes] | None
    extra: dict[str, Any]


class HttpAnswer(NamedTuple):
    status: int
    messages: list[Any]


TOOLS = st.lists(
    st.builds(
        ToolPlan,
        NAMES,
        st.sampled_from(BEHAVIOURS),
        JSON,
        st.dictionaries(NAMES, PROPERTY_TYPES, max_size=3),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda plan: plan.name,
)
META_VALUES = (
    st.sampled_from([META, META, META, ABLE])
    | st.builds(lambda token: {**META, "progressToken": token}, st.integers() | st.text(max_size=5) | JSON)
    | st.dictionaries(st.sampled_from(list(META)), JSON)
)
HEADERS = st.sampled_from(
    [
        None,
        None,
        None,
        (b"accept", b"*/*"),
        (b"accept", b"application/json"),
        (b"content-type", b"text/plain"),
        (b"mcp-method", b"tools/list"),
        (b"mcp-name", b"other"),
        (b"mcp-protocol-version", b"2025-06-18"),
    ]
)
REQUESTS = st.lists(
    st.builds(
        RequestPlan,
        st.sampled_from(["tools/call", "tools/call", "tools/call", "tools/list"]),
        st.integers(-(2**70), 2**70) | st.text(max_size=10) | st.sampled_from([None, 1.5, True]),
        st.integers(0, 3) | NAMES,
        st.dictionaries(NAMES, JSON, max_size=3) | st.dictionaries(NAMES, JSON, max_size=3) | JSON,
        st.none() | st.none() | st.text(max_size=10),
        META_VALUES,
        HEADERS,
        st.just({}) | st.just({}) | st.dictionaries(st.sampled_from(["task", "x"]), JSON, max_size=1),
    ),
    min_size=1,
    max_size=5,
)


def build_tool(plan: ToolPlan) -> Tool:
    async def run(parameters: dict[str, Any], context: ToolContext) -> Any:
        match plan.behaviour:
            case "raise":
                raise ValueError(str(plan.value))
            case "tool error":
                raise ToolError(str(plan.value))
            case "parts":
                return [
                    TextPart(text=str(plan.value)),
                    ImagePart(data="aGVsbG8="),
                    ResourcePart(uri="file:///a", text="a"),
                ]
            case "progress":
                for number in range(3):
                    context.report_progress(number + 1, 3, f"step {number}")
                return parameters
            case "ask":
                return (await context.elicit("Who?", FORM, key="who")).action
            case "slow":
                await asyncio.sleep(0.03)  # Longer than the time after which the fast path watches for a disconnect.
                return plan.value
            case _:
                return plan.value

    async def stream(parameters: dict[str, Any], context: ToolContext) -> AsyncIterator[str]:
        for word in ("a", "b"):
            yield word

    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in plan.properties.items()}}
    return Tool(
        plan.name,
        "A generated tool.",
        schema,
        output_schema={} if plan.has_output_schema else None,
        annotations=Annotations(read_only=plan.is_read_only),
        handler=stream if plan.behaviour == "partial" else run,
    )


def build_request(plan: RequestPlan, tools: list[ToolPlan]) -> tuple[dict[bytes, bytes], bytes]:
    name = tools[plan.tool % len(tools)].name if isinstance(plan.tool, int) else plan.tool
    params: dict[str, Any] = {"_meta": plan.meta, **plan.extra}
    if plan.method == "tools/call":
        params |= {"name": name, "arguments": plan.arguments}
    if plan.cursor is not None:
        params["cursor"] = plan.cursor
    headers = {
        b"host": b"localhost",
        b"accept": b"application/json, text/event-stream",
        b"content-type": b"application/json",
        b"mcp-protocol-version": VERSION.encode(),
        b"mcp-method": plan.method.encode(),
    }
    if plan.method == "tools/call":
        headers[b"mcp-name"] = name.encode()
    if plan.changed_header is not None:
        headers[plan.changed_header[0]] = plan.changed_header[1]
    body = {"jsonrpc": "2.0", "id": plan.request_id, "method": plan.method, "params": params}
    return headers, json.dumps(body).encode()


async def post(endpoint: McpEndpoint, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[HttpAnswer, Any]:
    """Sends one POST to the ASGI application. Returns its answer and the response headers."""
    request_queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    request_queue.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent_messages: list[Any] = []

    async def send(message: Any) -> None:
        sent_messages.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/mcp",
        "raw_path": b"/mcp",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
        "headers": [*headers, (b"content-length", b"%d" % len(body))],
    }
    await endpoint(scope, request_queue.get, send)
    response_headers = dict(sent_messages[0]["headers"])
    content = b"".join(message.get("body", b"") for message in sent_messages[1:]).decode()
    if response_headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        messages = [json.loads(line[6:]) for line in content.split("\r\n") if line.startswith("data: {")]
    elif content and response_headers.get(b"content-type") == b"application/json":
        messages = [json.loads(content)]
    else:
        messages = [content]
    return HttpAnswer(sent_messages[0]["status"], [_normalize(message) for message in messages]), response_headers


def _normalize(message: Any) -> Any:
    """Hides the random request state."""
    result = message.get("result", {}) if isinstance(message, dict) else {}
    if "requestState" in result:
        result["requestState"] = "…"
    return message


async def compare(endpoint: McpEndpoint, headers: dict[bytes, bytes], body: bytes) -> None:
    pairs = list(headers.items())
    fast, _ = await post(endpoint, pairs, body)
    by_sdk, _ = await post(endpoint, [*pairs, *DUPLICATE_HEADER], body)
    assert fast == by_sdk, (headers, body)


@settings(deadline=None, max_examples=50)
@given(TOOLS, REQUESTS)
def test_stateless_requests_are_answered_as_by_the_sdk(tools: list[ToolPlan], requests: list[RequestPlan]) -> None:
    async def run() -> None:
        async with Toolspace([build_tool(plan) for plan in tools]) as ts, McpEndpoint(ts) as endpoint:
            for plan in requests:
                await compare(endpoint, *build_request(plan, tools))

    asyncio.run(run())


@settings(deadline=None, max_examples=50)
@given(TOOLS, REQUESTS)
def test_session_requests_are_answered_as_by_the_sdk(tools: list[ToolPlan], requests: list[RequestPlan]) -> None:
    async def run() -> None:
        async with Toolspace([build_tool(plan) for plan in tools]) as ts, McpEndpoint(ts) as endpoint:
            headers = await open_session(endpoint)
            for plan in requests:
                stateless_headers, body = build_request(plan, tools)
                types = {name: stateless_headers[name] for name in (b"accept", b"content-type")}
                await compare(endpoint, {**headers, **types}, body)

    asyncio.run(run())


async def test_null_result_of_a_tool_with_an_output_schema_is_structured_content() -> None:
    plan = ToolPlan("nothing", "result", None, {}, True, True)
    request = RequestPlan("tools/call", 1, 0, {}, None, META, None, {})
    async with Toolspace([build_tool(plan)]) as ts, McpEndpoint(ts) as endpoint:
        headers, body = build_request(request, [plan])
        await compare(endpoint, headers, body)
        answer, _ = await post(endpoint, list(headers.items()), body)
    assert answer.messages[0]["result"]["structuredContent"] is None


async def open_session(endpoint: McpEndpoint) -> dict[bytes, bytes]:
    """Opens a session of the handshake era. Returns the headers of its requests."""
    headers = {
        b"host": b"localhost",
        b"accept": b"application/json, text/event-stream",
        b"content-type": b"application/json",
    }
    info = {"name": "test", "version": "1"}
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
    body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    _, response_headers = await post(endpoint, list(headers.items()), json.dumps(body).encode())
    headers |= {b"mcp-session-id": response_headers[b"mcp-session-id"], b"mcp-protocol-version": b"2025-11-25"}
    ready = json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode()
    await post(endpoint, list(headers.items()), ready)
    return headers


async def test_session_requests_are_answered_as_json_with_the_session_header(mcp_server: Served) -> None:
    session = await mcp_server.open_session()
    calls: list[dict[str, Any]] = [
        {"name": "add", "arguments": {"a": 1, "b": 2}},
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
        fast = await mcp_server.post(body, headers=session)
        pairs = [*session.items(), ("accept", "*/*"), ("content-type", "application/json"), ("x-a", "1"), ("x-a", "2")]
        async with mcp_server.http.post(mcp_server.url, data=json.dumps(body).encode(), headers=pairs) as response:
            by_sdk = RawResponse(response.status, response.headers, await response.read())
        assert fast.headers["content-type"] == "application/json"
        assert fast.headers["mcp-session-id"] == session["mcp-session-id"]
        assert (fast.status, fast.json) == (by_sdk.status, by_sdk.json)
