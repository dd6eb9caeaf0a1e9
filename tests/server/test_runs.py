"""Runs and their calls over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from toolspace.core.stored_records import CallRecord, Visibility
from toolspace.core.tool_context import ToolContext
from toolspace.server.gateway import Gateway
from toolspace.spaces import call_transactions
from toolspace.storage.queries.calls import NewCall


async def people(api: ApiClient) -> None:
    for name, kind in (("ann", "human"), ("bob", "human"), ("bot", "agent"), ("aid", "agent")):
        await api.create("/api/entities", id=name, type=kind, name=name.title())
    await api.create("/api/spaces", id="den", name="The den", members=["ann", "bot"])
    await api.create("/api/spaces", id="lair", name="The lair", members=["bob", "aid"])


async def open_run(gateway: Gateway, call_id: str, run_id: str, exposure: Visibility, **more: Any) -> CallRecord:
    new = NewCall(
        call_id=call_id,
        run_id=run_id,
        agent_entity_id="bot",
        space_id="den",
        tool_name=f"tool-{call_id}",
        args={"secret": f"args of {call_id}"},
        execution_type="space",
        execution_target="client",
        visible=exposure == "full",
        visibility=exposure,
        status=more.pop("status", "pending"),
        node_id=gateway.ledger.node_id,
        **more,
    )
    return (await gateway.ledger.commit(call_transactions.start, new)).call


@pytest.mark.spec("7.1")
@pytest.mark.spec("12.2")
async def test_a_run_is_opened_listed_and_closed(each_database_api: ApiClient) -> None:
    api = each_database_api
    await people(api)
    run = await api.create("/api/runs", agentEntityId="bot", spaceId="den", trigger={"message": "m1"})
    assert run["id"].startswith("run_")
    assert (run["status"], run["spaceId"], run["trigger"]) == ("running", "den", {"message": "m1"})
    assert (await api.get(f"/api/runs/{run['id']}")).data == run
    second = await api.create("/api/runs", agentEntityId="bot")
    run_page = (await api.get("/api/runs?agentEntityId=bot&limit=1")).data
    assert [listed_run["id"] for listed_run in run_page["items"]] == [second["id"]]
    older = (await api.get(f"/api/runs?limit=1&cursor={run_page['next']}")).data
    assert ([listed_run["id"] for listed_run in older["items"]], older["next"]) == ([run["id"]], None)
    assert len((await api.get("/api/agents/bot/runs")).data["items"]) == 2
    closed = await api.create(f"/api/runs/{run['id']}/close", usage={"tokens": 12}, status="failed", error="no luck")
    assert (closed["status"], closed["usage"], closed["error"]) == ("failed", {"tokens": 12}, "no luck")
    assert closed["completedAt"] is not None
    assert (await api.create(f"/api/runs/{run['id']}/close", status="failed"))["status"] == "failed"
    assert (await api.post(f"/api/runs/{run['id']}/close")).status == 409
    assert (await api.post(f"/api/runs/{run['id']}/cancel")).status == 409
    assert [listed_run["id"] for listed_run in (await api.get("/api/runs?status=running")).data["items"]] == [
        second["id"]
    ]


@pytest.mark.spec("21.1")
@pytest.mark.spec("12.2")
async def test_a_run_of_a_program_works_for_its_key(tmp_path: Path) -> None:
    async def whoami(context: ToolContext) -> str:
        """Says for whom the call is made."""
        return context.principal

    async with Gateway.open(write_config(tmp_path)) as gateway, open_api(gateway) as api:
        gateway.toolspace.add_tool(whoami)
        await people(api)
        run = await api.create("/api/runs", agentEntityId="bot", spaceId="den")
        assert run["principal"].startswith("key/")
        result = await api.create(f"/api/runs/{run['id']}/calls", name="whoami", args={})
        assert result["result"] == run["principal"]
        member = await api.member("ann")
        assert "principal" not in (await member.get(f"/api/runs/{run['id']}")).data
        plan = {"name": "Look", "instruction": "Look.", "runAfter": "1 hour"}
        plans = (await api.put("/api/agents/bot/plans", {"plans": [plan]})).data["items"]
        assert plans[0]["principal"] == run["principal"]


async def test_an_invalid_run_is_refused(api: ApiClient) -> None:
    await people(api)
    for body, status in (
        ({"agentEntityId": "ann"}, 400),
        ({"agentEntityId": "ghost"}, 404),
        ({"agentEntityId": "bot", "spaceId": "lair"}, 403),
        ({"agentEntityId": "bot", "spaceId": "lost"}, 404),
        ({"agentEntityId": "bot", "trigger": "x" * 300_000}, 400),
        ({}, 400),
    ):
        assert (await api.post("/api/runs", body)).status == status, body
    for path in ("", "/calls"):
        assert (await api.get(f"/api/runs/lost{path}")).status == 404
    for path in ("/close", "/cancel"):
        assert (await api.post(f"/api/runs/lost{path}")).status == 404


async def test_canceling_a_run_cancels_its_pending_calls(gateway: Gateway, api: ApiClient) -> None:
    await people(api)
    run = await api.create("/api/runs", agentEntityId="bot", spaceId="den")
    await open_run(gateway, "c1", run["id"], "full")
    assert (await api.create(f"/api/runs/{run['id']}/cancel"))["status"] == "canceled"
    assert (await api.get("/api/calls/c1")).data["status"] == "canceled"
    assert (await api.create(f"/api/runs/{run['id']}/cancel"))["status"] == "canceled"


@pytest.mark.spec("7.1")
async def test_a_run_counts_the_turns_of_its_model(api: ApiClient) -> None:
    await people(api)
    run = await api.create("/api/runs", agentEntityId="bot")
    for turn in (1, 2, 2, 1_000_000, 3):
        await api.create(f"/api/runs/{run['id']}/calls", name="get_goals", turn=turn)
    assert (await api.get(f"/api/runs/{run['id']}")).data["steps"] == 1_000_000


@pytest.mark.spec("7.1")
@pytest.mark.spec("8.1")
@pytest.mark.spec("8.2")
async def test_members_see_a_redacted_run_and_its_visible_calls(gateway: Gateway, api: ApiClient) -> None:
    await people(api)
    run = await api.create("/api/runs", agentEntityId="bot", spaceId="den", trigger={"why": "a-private-reason"})
    path = f"/api/runs/{run['id']}"
    for call_id, exposure in (("shown", "full"), ("named", "name"), ("hidden", "none")):
        await open_run(gateway, call_id, run["id"], exposure)
    ann, bob = await api.member("ann"), await api.member("bob")
    response = await ann.get(path)
    assert (response.status, response.data["status"]) == (200, "running")
    assert b"private" not in response.body
    assert "trigger" not in response.data
    calls = await ann.get(f"{path}/calls")
    assert [call["toolName"] for call in calls.data["items"]] == ["tool-shown", "tool-named"]
    assert calls.data["items"][1] == {"toolCallId": "named", "toolName": "tool-named"}
    assert b"args of named" not in calls.body
    every = (await api.get(f"{path}/calls?limit=2")).data
    assert [(call["callId"], call["seq"]) for call in every["items"]] == [("shown", 1), ("named", 2)]
    rest = (await api.get(f"{path}/calls?limit=2&cursor={every['next']}")).data
    assert ([call["callId"] for call in rest["items"]], rest["next"]) == (["hidden"], None)
    for other_path in (path, f"{path}/calls", "/api/calls/shown"):
        assert (await bob.get(other_path)).status == 403, other_path
    assert (await ann.get("/api/runs")).status == 403
    assert (await ann.post(f"{path}/close")).status == 403
    assert (await ann.get("/api/agents/bot/runs")).status == 403


@pytest.mark.spec("12.1")
async def test_calls_are_filtered_by_their_fields(gateway: Gateway, api: ApiClient) -> None:
    await people(api)
    run = await api.create("/api/runs", agentEntityId="bot", spaceId="den")
    for call_id, exposure in (("shown", "full"), ("named", "name"), ("hidden", "none")):
        await open_run(gateway, call_id, run["id"], exposure)
    await gateway.ledger.commit(call_transactions.end_call, "hidden", "canceled", "no more")

    async def list_names(client: ApiClient, query: str = "") -> list[str]:
        return [call["callId"] for call in (await client.get(f"/api/calls{query}")).data["items"]]

    assert set(await list_names(api)) == {"shown", "named", "hidden"}
    assert set(await list_names(api, "?status=pending,waiting")) == {"shown", "named"}
    assert await list_names(api, "?status=canceled") == ["hidden"]
    assert await list_names(api, "?toolName=tool-named&spaceId=den&agentEntityId=bot") == ["named"]
    pages: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        data = (await api.get(f"/api/calls?limit=1&cursor={cursor}" if cursor else "/api/calls?limit=1")).data
        pages += [call["callId"] for call in data["items"]]
        cursor = data["next"]
    assert sorted(pages) == ["hidden", "named", "shown"]
    single_call = (await api.get("/api/calls/shown")).data
    assert (single_call["toolCallId"], single_call["startedAt"], single_call["completedAt"]) == (
        "shown",
        single_call["createdAt"],
        None,
    )
    assert "sleeping" in (await api.get("/api/calls?status=sleeping")).detail
    assert await list_names(await api.member("ann")) == ["shown"]
    assert await list_names(await api.member("bob")) == []
    assert (await (await api.member("ann")).get("/api/calls/named")).status == 403
    assert (await api.get("/api/calls/lost")).status == 404


@pytest.mark.spec("7.4")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_values_with_the_maximum_depth_stay_readable(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """Output of a model or a tool must not make a space unreadable."""
    tools = [
        {"name": "echo", "executionType": "internal", "visible": True},
        {"name": "move", "executionType": "external", "isAsync": True},
    ]
    more = {"storage": {"url": request.getfixturevalue("postgres_url")}} if kind == "postgres" else {}
    async with Gateway.open(write_config(tmp_path, tools=tools, **more)) as gateway, open_api(gateway) as api:
        await people(api)
        await api.create("/api/runs", id="run_1", agentEntityId="bot", spaceId="den")
        for depth in range(960, 975):
            args = f'{{"deep": {"[" * depth}{"]" * depth}}}'
            reply = await api.post("/api/runs/run_1/calls", {"name": "echo", "args": args})
            assert reply.status == 200
        error = (await api.post("/api/runs/run_1/calls", {"name": "move", "args": args.replace("[[", "[")})).data
        assert error["errorKind"] == "invalid_parameters"
        ann = await api.member("ann")
        for path in ("/api/spaces/den/messages", "/api/calls", "/api/runs/run_1/calls"):
            assert (await ann.get(path)).status == 200
        await api.create("/api/runs/run_1/close")
        for path in ("/api/spaces/den/stream", "/api/runs/run_1/events"):
            url = f"{api.url}{path}?from=start&until=run.done"
            async with ann.session.get(url, headers=ann.headers) as stream:
                assert b"run.done" in await stream.read()
