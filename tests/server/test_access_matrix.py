"""The access matrix: every route with every kind of caller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.server.two_spaces import TwoSpaces, open_two_spaces
from toolspace.server.authorization import Access
from toolspace.server.routes import ROUTES
from toolspace.server.routing import Route

STRANGERS = (
    "expired token",
    "wrong signature",
    "public key without a token",
    "token without a public key",
    "revoked key",
    "nobody",
)
OTHERS = ("member of another space", "member of no space")


@dataclass(frozen=True)
class AccessRow:
    """A request to a route, and the status for each kind of caller; for other kinds the route's access decides."""

    path: str
    """With `{name}` for ids that `make` or the setup provides."""
    body: Any = None
    good: int = 200
    other_status: int | None = None
    """The status for members of other spaces; 403 unless the route lists their own resources."""
    member: int | None = None
    make: Callable[[TwoSpaces], Awaitable[Mapping[str, str]]] | None = None
    """Creates something that the request uses up, for each caller with access."""
    each: Mapping[str, int] = field(default_factory=dict[str, int])


async def _entity(setup: TwoSpaces) -> Mapping[str, str]:
    return {"made": (await setup.api.create("/api/entities", type="human", name="Made"))["id"]}


async def _space(setup: TwoSpaces) -> Mapping[str, str]:
    return {"made": (await setup.api.create("/api/spaces", name="Made", members=["eve"]))["id"]}


async def _run(setup: TwoSpaces) -> Mapping[str, str]:
    run = await setup.api.create("/api/runs", agentEntityId="robot", spaceId="spc_a")
    return {"made": run["id"]}


async def _call(setup: TwoSpaces) -> Mapping[str, str]:
    response = await setup.call("run_a", "confirm", {"question": "made"})
    return {"made": response["pendingToolCallId"]}


async def _key(setup: TwoSpaces) -> Mapping[str, str]:
    return {"made": (await setup.key("public"))[0]}


async def _failed_event(setup: TwoSpaces) -> Mapping[str, str]:
    event = (await setup.api.post("/api/agents/robot/inbox", {"data": 1})).data["eventId"]
    return {"made": event}


SAID = {"content": "hello"}
RESULT = {"result": None}
ROWS: dict[str, AccessRow] = {
    "GET /api/entities": AccessRow("/api/entities"),
    "POST /api/entities": AccessRow("/api/entities", {"type": "human", "name": "New"}, good=201),
    "GET /api/entities/{entityId}": AccessRow("/api/entities/robot"),
    "PATCH /api/entities/{entityId}": AccessRow("/api/entities/ann", {"name": "Ann"}),
    "DELETE /api/entities/{entityId}": AccessRow("/api/entities/{made}", good=204, make=_entity),
    "POST /api/entities/{entityId}/token": AccessRow("/api/entities/ann/token", {"expiresIn": 1}, good=201),
    "GET /api/spaces": AccessRow("/api/spaces", other_status=200),
    "POST /api/spaces": AccessRow("/api/spaces", {"name": "New"}, good=201),
    "GET /api/spaces/{spaceId}": AccessRow("/api/spaces/spc_a"),
    "PATCH /api/spaces/{spaceId}": AccessRow("/api/spaces/spc_a", {"name": "MARK-IN-A space"}),
    "DELETE /api/spaces/{spaceId}": AccessRow("/api/spaces/{made}", good=204, make=_space),
    "GET /api/spaces/{spaceId}/members": AccessRow("/api/spaces/spc_a/members"),
    "POST /api/spaces/{spaceId}/members": AccessRow("/api/spaces/spc_a/members", {"entityId": "ann"}),
    "PUT /api/spaces/{spaceId}/members/{entityId}": AccessRow("/api/spaces/spc_a/members/ann"),
    "DELETE /api/spaces/{spaceId}/members/{entityId}": AccessRow(
        "/api/spaces/{made}/members/eve", good=204, make=_space
    ),
    "GET /api/spaces/{spaceId}/messages": AccessRow("/api/spaces/spc_a/messages"),
    "POST /api/spaces/{spaceId}/messages": AccessRow(
        "/api/spaces/spc_a/messages", {**SAID, "entityId": "ann"}, good=201
    ),
    "GET /api/spaces/{spaceId}/messages/{messageId}": AccessRow("/api/spaces/spc_a/messages/{message}"),
    "GET /api/spaces/{spaceId}/stream": AccessRow("/api/spaces/spc_a/stream"),
    "POST /api/spaces/{spaceId}/tool-results": AccessRow(
        "/api/spaces/spc_a/tool-results", {"runId": "run_a", "toolCallId": "{made}", **RESULT}, make=_call
    ),
    "GET /api/agents": AccessRow("/api/agents", other_status=200),
    "GET /api/agents/{agentId}": AccessRow("/api/agents/robot"),
    "GET /api/agents/{agentId}/runs": AccessRow("/api/agents/robot/runs"),
    "GET /api/agents/{agentId}/inbox": AccessRow("/api/agents/robot/inbox"),
    "POST /api/agents/{agentId}/inbox": AccessRow("/api/agents/robot/inbox", {"data": 1}, good=201),
    "POST /api/agents/{agentId}/inbox/claim": AccessRow("/api/agents/robot/inbox/claim"),
    "POST /api/agents/{agentId}/inbox/done": AccessRow("/api/agents/robot/inbox/done", {"eventIds": ["evt_0"]}),
    "POST /api/agents/{agentId}/inbox/return": AccessRow("/api/agents/robot/inbox/return", {"eventIds": ["evt_0"]}),
    "POST /api/agents/{agentId}/inbox/{eventId}/retry": AccessRow(
        "/api/agents/robot/inbox/{made}/retry", good=409, make=_failed_event
    ),
    "GET /api/agents/{agentId}/goals": AccessRow("/api/agents/robot/goals"),
    "PUT /api/agents/{agentId}/goals": AccessRow("/api/agents/robot/goals", {"goals": []}),
    "DELETE /api/agents/{agentId}/goals": AccessRow("/api/agents/robot/goals"),
    "DELETE /api/agents/{agentId}/goals/{goalId}": AccessRow("/api/agents/robot/goals/none", good=404),
    "GET /api/agents/{agentId}/memories": AccessRow("/api/agents/robot/memories"),
    "PUT /api/agents/{agentId}/memories": AccessRow("/api/agents/robot/memories", {"memories": []}),
    "DELETE /api/agents/{agentId}/memories": AccessRow("/api/agents/robot/memories"),
    "DELETE /api/agents/{agentId}/memories/{key}": AccessRow("/api/agents/robot/memories/none", good=404),
    "GET /api/agents/{agentId}/plans": AccessRow("/api/agents/robot/plans"),
    "PUT /api/agents/{agentId}/plans": AccessRow(
        "/api/agents/robot/plans", {"plans": [{"name": "rest", "instruction": "rest", "runAfter": "2 days"}]}
    ),
    "DELETE /api/agents/{agentId}/plans/{planId}": AccessRow("/api/agents/robot/plans/none", good=404),
    "GET /api/agents/{agentId}/documents": AccessRow("/api/agents/robot/documents"),
    "POST /api/agents/{agentId}/documents": AccessRow(
        "/api/agents/robot/documents", {"title": "FAQ", "text": "Who asks?"}, good=201
    ),
    "GET /api/agents/{agentId}/documents/{documentId}": AccessRow("/api/agents/robot/documents/none", good=404),
    "PUT /api/agents/{agentId}/documents/{documentId}": AccessRow(
        "/api/agents/robot/documents/faq", {"title": "FAQ", "text": "Who asks?"}
    ),
    "DELETE /api/agents/{agentId}/documents/{documentId}": AccessRow("/api/agents/robot/documents/none", good=404),
    "GET /api/agents/{agentId}/tasks": AccessRow("/api/agents/robot/tasks"),
    "GET /api/agents/{agentId}/tasks/{taskId}": AccessRow("/api/agents/robot/tasks/none", good=404),
    "POST /api/agents/{agentId}/tasks/{taskId}/cancel": AccessRow("/api/agents/robot/tasks/none/cancel", good=404),
    "GET /api/agents/{agentId}/history": AccessRow("/api/agents/robot/history"),
    "GET /api/runs": AccessRow("/api/runs"),
    "POST /api/runs": AccessRow("/api/runs", {"agentEntityId": "robot"}, good=201),
    "GET /api/runs/{runId}": AccessRow("/api/runs/run_a"),
    "GET /api/runs/{runId}/calls": AccessRow("/api/runs/run_a/calls"),
    "POST /api/runs/{runId}/calls": AccessRow("/api/runs/run_a/calls", {"name": "lookup", "args": {}}),
    "GET /api/runs/{runId}/events": AccessRow("/api/runs/run_a/events"),
    "POST /api/runs/{runId}/cancel": AccessRow("/api/runs/{made}/cancel", make=_run),
    "POST /api/runs/{runId}/close": AccessRow("/api/runs/{made}/close", make=_run),
    "POST /api/runs/{runId}/tool-results": AccessRow(
        "/api/runs/run_a/tool-results", {"callId": "{made}", **RESULT}, make=_call
    ),
    "GET /api/calls": AccessRow("/api/calls", other_status=200),
    "GET /api/calls/{callId}": AccessRow("/api/calls/{confirm}"),
    "POST /api/calls/ack": AccessRow("/api/calls/ack", {"callIds": ["none"]}),
    "POST /api/calls/{callId}/ack": AccessRow("/api/calls/none/ack", good=404),
    "POST /api/calls/{callId}/cancel": AccessRow("/api/calls/{made}/cancel", make=_call),
    "POST /api/calls/{callId}/result": AccessRow("/api/calls/{made}/result", RESULT, make=_call),
    "GET /api/approvals": AccessRow("/api/approvals"),
    "POST /api/approvals/{approvalId}": AccessRow("/api/approvals/none", {"decision": "deny"}, good=404),
    "GET /api/approval-rules": AccessRow("/api/approval-rules"),
    "DELETE /api/approval-rules/{ruleId}": AccessRow("/api/approval-rules/none", good=404),
    "GET /api/tools": AccessRow("/api/tools"),
    "GET /api/tools/{name}": AccessRow("/api/tools/lookup"),
    "POST /api/tools/{name}/call": AccessRow("/api/tools/lookup/call", {"args": {}}),
    "GET /api/tools/stats": AccessRow("/api/tools/stats"),
    "GET /api/tools/stream": AccessRow("/api/tools/stream?tools=move"),
    "GET /api/workers": AccessRow("/api/workers"),
    "POST /api/workers/{workerId}/leave": AccessRow("/api/workers/wrk_0/leave", good=404),
    "GET /api/servers": AccessRow("/api/servers"),
    "GET /api/servers/{name}": AccessRow("/api/servers/none", good=404),
    "POST /api/servers/{name}/restart": AccessRow("/api/servers/none/restart", good=404),
    "GET /api/outputs/{session}/{outputId}": AccessRow("/api/outputs/{output}"),
    "GET /api/me": AccessRow("/api/me"),
    "GET /api/keys": AccessRow("/api/keys"),
    "POST /api/keys": AccessRow("/api/keys", {"kind": "public"}, good=201),
    "DELETE /api/keys/{keyId}": AccessRow("/api/keys/{made}", good=204, make=_key),
    "GET /api/events": AccessRow("/api/events"),
    "GET /health": AccessRow("/health"),
    "GET /ready": AccessRow("/ready"),
    "GET /metrics": AccessRow("/metrics"),
    "GET /openapi.json": AccessRow("/openapi.json"),
}


def expected(route: Route, row: AccessRow, caller: str) -> int:
    """The expected status: 401 for unknown callers, 403 without access."""
    if caller in row.each:
        return row.each[caller]
    if route.access is Access.OPEN or caller == "secret":
        return row.good
    if caller in STRANGERS:
        return 401
    if route.access is Access.ANY:
        return row.good
    if caller == "tool key":
        return row.good if route.access is Access.TOOLS else 403
    if route.access is not Access.MEMBER:
        return 403
    if caller in OTHERS:
        return row.other_status or 403
    return row.member or row.good


def fill_in(value: Any, ids: Mapping[str, str]) -> Any:
    """Replaces the names in the path or body of a row by ids."""
    if isinstance(value, str) and "{" in value:
        return value.format_map(ids)
    if isinstance(value, dict):
        return {key: fill_in(item, ids) for key, item in value.items()}
    return value


async def status_of(
    setup: TwoSpaces, caller: str, method: str, path: str, body: Any, *, stream: bool
) -> tuple[int, bytes]:
    if not stream:
        reply = await setup.ask(caller, method, path, body)
        return reply.status, reply.body
    async with setup.api.session.request(method, setup.api.url + path, headers=setup.callers[caller]) as response:
        return response.status, b"" if response.status == 200 else await response.read()


def routes_of(setup: TwoSpaces) -> list[Route]:
    app: Any = setup.gateway.app
    while not hasattr(app, "routes"):
        app = app.app
    return list(app.routes)


def test_every_route_has_a_row_in_the_matrix() -> None:
    names = {route.name for route in ROUTES} | {"GET /openapi.json"}
    assert names - ROWS.keys() == set(), "say in ROWS who may use these"
    assert ROWS.keys() - names == set(), "these are no routes any more"


@pytest.mark.spec("8.1")
@pytest.mark.spec("12.1")
async def test_every_route_responds_to_every_kind_of_caller_as_the_matrix_says(tmp_path: Path) -> None:
    wrong: list[str] = []
    async with open_two_spaces(tmp_path, rateLimit=None) as setup:
        fixed = {
            "confirm": setup.calls["confirm spc_a"],
            "message": setup.messages["spc_a"],
            "output": setup.calls["output"],
        }
        assert {route.name for route in routes_of(setup)} == ROWS.keys()
        for route in routes_of(setup):
            row = ROWS[route.name]
            for caller in setup.callers:
                status_expected = expected(route, row, caller)
                ids = {"made": "none", **fixed, **(await row.make(setup) if row.make is not None else {})}
                path, body = fill_in(row.path, ids), fill_in(row.body, ids)
                status, answer = await status_of(setup, caller, route.method, path, body, stream=route.is_stream)
                if status != status_expected:
                    wrong.append(f"{route.name} for {caller}: {status}, not {status_expected}: {answer[:200]!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.spec("8.1")
async def test_a_missing_resource_is_404_for_callers_with_access(tmp_path: Path) -> None:
    """Also for an id that no database can store."""
    wrong: list[str] = []
    async with open_two_spaces(tmp_path, rateLimit=None) as setup:
        for route in routes_of(setup):
            if not route.parameters:
                continue
            row = ROWS[route.name]
            body = fill_in(row.body, {"made": "call_none"})
            for unknown_id in ("none_such", "%00", "..%2f..", "x" * 300):
                path = route.path
                for name in route.parameters:
                    path = path.replace(f"{{{name}}}", unknown_id)
                for caller in ("secret", "member"):
                    if caller == "member" and route.access is not Access.MEMBER:
                        continue
                    reply = await setup.ask(caller, route.method, path, body)
                    if reply.status != 404:
                        wrong.append(
                            f"{route.name} ({unknown_id[:9]}) for {caller}: {reply.status}: {reply.body[:200]!r}"
                        )
    assert not wrong, "\n".join(wrong)


@pytest.mark.spec("8.1")
async def test_an_entity_sees_itself_and_posts_only_as_itself(tmp_path: Path) -> None:
    async with open_two_spaces(tmp_path) as setup:
        for caller, entity in (("member", "ann"), ("member of no space", "eve")):
            assert (await setup.ask(caller, "GET", f"/api/entities/{entity}")).status == 200
            assert (await setup.ask(caller, "GET", "/api/me")).data["entity"]["id"] == entity
        response = await setup.ask("member", "POST", "/api/spaces/spc_a/messages", {"content": "I"})
        assert response.data["senderId"] == "ann"
        for sender in ("robot", "bob"):
            body = {"content": "not I", "entityId": sender}
            assert (await setup.ask("member", "POST", "/api/spaces/spc_a/messages", body)).status == 403


@pytest.mark.spec("8.1")
async def test_only_a_member_can_submit_a_result_and_only_for_the_right_call(tmp_path: Path) -> None:
    async with open_two_spaces(tmp_path) as setup:
        a, b = setup.calls["confirm spc_a"], setup.calls["confirm spc_b"]
        result = {"result": "mine"}
        tries: list[tuple[str, str, Any]] = [
            ("member", "/api/runs/run_b/tool-results", {"callId": b, **result}),
            ("member", "/api/runs/run_a/tool-results", {"callId": b, **result}),
            ("member", "/api/spaces/spc_a/tool-results", {"runId": "run_a", "toolCallId": b, **result}),
            ("member", "/api/spaces/spc_a/tool-results", {"runId": "run_b", "toolCallId": b, **result}),
            ("member", "/api/spaces/spc_b/tool-results", {"runId": "run_b", "toolCallId": b, **result}),
            ("member", f"/api/calls/{b}/result", result),
            ("member", f"/api/calls/{setup.calls['quiet']}/result", result),
            ("member", f"/api/calls/{setup.calls['peek']}/result", result),
            ("member of another space", f"/api/calls/{a}/result", result),
            ("member of no space", "/api/spaces/spc_a/tool-results", {"runId": "run_a", "toolCallId": a, **result}),
        ]
        for caller, path, body in tries:
            reply = await setup.ask(caller, "POST", path, body)
            assert reply.status == 403, (caller, path, reply)
            assert b"MARK" not in reply.body
        assert (await setup.api.get(f"/api/calls/{a}")).data["status"] == "pending"
        assert (await setup.api.get(f"/api/calls/{b}")).data["status"] == "pending"
        good = {"runId": "run_a", "toolCallId": a, "result": "yes"}
        assert (await setup.ask("member", "POST", "/api/spaces/spc_a/tool-results", good)).status == 200


@pytest.mark.spec("12.3")
async def test_a_tool_key_is_restricted_to_its_tools_over_http(tmp_path: Path) -> None:
    async with open_two_spaces(tmp_path) as setup:
        tools = (await setup.ask("tool key", "GET", "/api/tools")).data["items"]
        assert {tool["name"] for tool in tools} == {"lookup", "large"}
        matches = await setup.ask("tool key", "GET", "/api/tools?search=show+peek+move")
        assert {tool["name"] for tool in matches.data["items"]} <= {"lookup", "large"}
        assert (await setup.ask("tool key", "GET", "/api/tools/show")).status == 403
        response = await setup.ask("tool key", "POST", "/api/tools/peek/call", {"args": {}})
        assert b"MARK" not in response.body
        assert response.status in (200, 403)


@pytest.mark.spec("12.3")
async def test_a_tool_key_cannot_read_the_call_of_another_key_by_its_id(tmp_path: Path) -> None:
    async with open_two_spaces(tmp_path) as setup:
        setup.callers["another tool key"] = {"x-secret-key": (await setup.key("tools"))[1]}
        body = {"args": {}, "callId": "call_of_another"}
        call = (await setup.api.post("/api/tools/move/call", body)).data
        assert call["pendingToolCallId"] == "call_of_another"
        for caller in ("tool key", "another tool key"):
            stolen = await setup.ask(caller, "POST", "/api/tools/move/call", body)
            assert b"call_of_another" not in stolen.body, stolen
        assert (await setup.api.post("/api/calls/call_of_another/result", {"result": "theirs"})).status == 200
        # The key finds its own call again.
        own_body = {"args": {}, "callId": "own"}
        first = (await setup.ask("another tool key", "POST", "/api/tools/move/call", own_body)).data[
            "pendingToolCallId"
        ]
        second_call_id = (await setup.ask("another tool key", "POST", "/api/tools/move/call", own_body)).data[
            "pendingToolCallId"
        ]
        assert first == second_call_id != "own"


async def test_a_closed_stream_no_longer_counts_against_the_limit(tmp_path: Path) -> None:
    async with open_two_spaces(tmp_path, maxStreamsPerCaller=2) as setup:
        url, headers = f"{setup.api.url}/api/spaces/spc_a/stream", setup.callers["member"]
        first_response = await setup.api.session.get(url, headers=headers)
        two = await setup.api.session.get(url, headers=headers)
        assert (first_response.status, two.status) == (200, 200)
        third = await setup.api.session.get(url, headers=headers)
        assert third.status == 429
        assert int(third.headers["retry-after"]) >= 1
        third.close()
        first_response.close()
        async with asyncio.timeout(10):
            while (second_reply := await setup.api.session.get(url, headers=headers)).status != 200:
                second_reply.close()  # The server notices the disconnect soon.
        for response in (two, second_reply):
            response.close()
