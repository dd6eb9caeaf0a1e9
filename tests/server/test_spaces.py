"""Spaces, members and messages over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from toolspace.core.stored_records import CallRecord
from toolspace.server.gateway import Gateway
from toolspace.spaces import call_transactions
from toolspace.storage.queries.calls import NewCall


async def people(api: ApiClient) -> None:
    """Creates Ann, Bob and two agents; all but Bob are in one space."""
    for name, kind in (("ann", "human"), ("bob", "human"), ("bot", "agent"), ("aid", "agent")):
        await api.create("/api/entities", id=name, type=kind, name=name.title())
    await api.create("/api/spaces", id="den", name="The den", members=["ann", "bot", "aid"])


async def say(api: ApiClient, content: str, sender: str = "ann", **more: Any) -> Any:
    return await api.create("/api/spaces/den/messages", entityId=sender, content=content, **more)


async def show_tool_call(gateway: Gateway) -> CallRecord:
    """Creates a visible pending call in the den."""
    run = NewCall(
        call_id="call-1",
        run_id=None,
        agent_entity_id="bot",
        space_id="den",
        tool_name="confirmAction",
        args={"what": "launch"},
        execution_type="space",
        execution_target="client",
        visible=True,
        visibility="full",
        status="pending",
        node_id=gateway.ledger.node_id,
    )
    return (await gateway.ledger.commit(call_transactions.start, run)).call


@pytest.mark.spec("7.1")
@pytest.mark.spec("12.1")
async def test_a_space_is_created_read_updated_and_deleted(each_database_api: ApiClient) -> None:
    api = each_database_api
    space = await api.create("/api/spaces", name="Support", metadata={"team": 3})
    path = f"/api/spaces/{space['id']}"
    assert (await api.get(path)).data == space
    assert (await api.patch(path, {"name": "Help"})).data == {**space, "name": "Help"}
    assert [listed_space["name"] for listed_space in (await api.get("/api/spaces")).data["items"]] == ["Help"]
    assert (await api.delete(path)).status == 204
    assert (await api.get(path)).status == 404
    assert (await api.get(f"{path}/members")).status == 404
    assert (await api.get(f"{path}/messages")).status == 404


@pytest.mark.spec("7.1")
async def test_members_are_added_and_removed(each_database_api: ApiClient) -> None:
    api = each_database_api
    await people(api)
    new_member = await api.put("/api/spaces/den/members/bob")
    assert (new_member.status, new_member.data["entityId"], new_member.data["type"]) == (200, "bob", "human")
    assert (await api.post("/api/spaces/den/members", {"entityId": "bob"})).data == new_member.data
    members = (await api.get("/api/spaces/den/members")).data["items"]
    assert {member["entityId"] for member in members} == {"ann", "bot", "aid", "bob"}
    assert (await api.delete("/api/spaces/den/members/bob")).status == 204
    assert (await api.delete("/api/spaces/den/members/bob")).status == 404
    assert "nobody" in (await api.put("/api/spaces/den/members/nobody")).detail
    assert (await api.put("/api/spaces/nowhere/members/ann")).status == 404
    await api.delete("/api/entities/aid")
    members = (await api.get("/api/spaces/den/members")).data["items"]
    assert {member["entityId"] for member in members} == {"ann", "bot"}


async def test_a_space_with_an_unknown_member_is_not_created(each_database_api: ApiClient) -> None:
    reply = await each_database_api.post("/api/spaces", {"id": "den", "name": "x", "members": ["ghost"]})
    assert reply.status == 400
    assert "ghost" in reply.detail
    assert (await each_database_api.get("/api/spaces/den")).status == 404


@pytest.mark.spec("7.1")
@pytest.mark.spec("7.2")
async def test_a_message_is_numbered_and_reaches_every_other_agent(each_database_api: ApiClient) -> None:
    api = each_database_api
    await people(api)
    first = await say(api, "Hello", metadata={"mood": "good"})
    assert (first["seq"], first["senderId"], first["status"], first["kind"]) == (1, "ann", "complete", "message")
    await say(api, "Hi Ann", sender="bot")
    bots = (await api.get("/api/agents/bot/inbox")).data["items"]
    assert [event["data"]["content"] for event in bots] == ["Hello"]
    aids = (await api.get("/api/agents/aid/inbox")).data["items"]
    # Messages of people come before messages of agents.
    assert [(event["type"], event["data"]["senderId"]) for event in aids] == [
        ("space_message", "ann"),
        ("space_message", "bot"),
    ]
    assert (await api.get(f"/api/spaces/den/messages/{first['id']}")).data == first


@pytest.mark.spec("7.1")
async def test_concurrent_messages_have_unique_numbers(each_database_api: ApiClient) -> None:
    await people(each_database_api)
    messages = await asyncio.gather(*(say(each_database_api, f"m{number}") for number in range(20)))
    assert sorted(message["seq"] for message in messages) == list(range(1, 21))


async def test_messages_are_listed_backwards_and_forwards(each_database_api: ApiClient) -> None:
    api = each_database_api
    await people(api)
    for number in range(1, 8):
        await say(api, f"m{number}")

    async def numbers(query: str) -> tuple[list[int], str | None]:
        data = (await api.get(f"/api/spaces/den/messages?{query}")).data
        return [message["seq"] for message in data["items"]], data["next"]

    page, older = await numbers("limit=3")
    assert page == [5, 6, 7]
    page, oldest = await numbers(f"limit=3&cursor={older}")
    assert page == [2, 3, 4]
    assert await numbers(f"limit=3&cursor={oldest}") == ([1], None)
    page, newer = await numbers("limit=3&after=2")
    assert page == [3, 4, 5]
    assert await numbers(f"limit=3&cursor={newer}") == ([6, 7], None)
    assert await numbers("before=3") == ([1, 2], None)
    for wrong in ("cursor=5", "after=1&before=3", "after=-1", f"cursor={older}&after=1", f"before={2**70}"):
        assert (await api.get(f"/api/spaces/den/messages?{wrong}")).status == 400, wrong


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"content": "x"}, "entityId is required"),
        ({"content": "", "entityId": "ann"}, "length >= 1"),
        ({"content": "a\0b", "entityId": "ann"}, "NUL"),
        ({"content": "x" * 100_001, "entityId": "ann"}, "length <= 100000"),
        ({"content": {"a": 1}, "entityId": "ann"}, "expected `str`"),
        ({"content": "x", "entityId": "ann", "metadata": {"replyTo": 7}}, "id of a message"),
        ({"content": "x", "entityId": "ann", "replyTo": "m1", "metadata": {"replyTo": "m2"}}, "are different"),
    ],
)
async def test_an_invalid_message_is_refused_with_the_reason(api: ApiClient, body: object, words: str) -> None:
    await people(api)
    reply = await api.post("/api/spaces/den/messages", body)
    assert reply.status == 400
    assert words in reply.detail


async def test_only_members_post_messages(api: ApiClient) -> None:
    await people(api)
    assert (await api.post("/api/spaces/den/messages", {"content": "x", "entityId": "bob"})).status == 403
    assert (await api.post("/api/spaces/den/messages", {"content": "x", "entityId": "ghost"})).status == 404
    assert (await api.post("/api/spaces/lost/messages", {"content": "x", "entityId": "ann"})).status == 404


async def test_a_message_id_is_unique(each_database_api: ApiClient) -> None:
    await people(each_database_api)
    body = {"id": "m1", "content": "x", "entityId": "ann"}
    replies = await asyncio.gather(*(each_database_api.post("/api/spaces/den/messages", body) for _ in range(4)))
    assert sorted(reply.status for reply in replies) == [201, 409, 409, 409]
    messages = (await each_database_api.get("/api/spaces/den/messages")).data["items"]
    assert [message["seq"] for message in messages] == [1]


@pytest.mark.spec("7.2")
async def test_a_visible_call_is_a_message_without_replies(gateway: Gateway, api: ApiClient) -> None:
    await people(api)
    message = await say(api, "Hello")
    answer = await say(api, "And you?", replyTo=message["id"])
    assert answer["metadata"] == {"replyTo": message["id"]}
    assert (await say(api, "Again", metadata={"replyTo": message["id"]}))["metadata"] == {"replyTo": message["id"]}
    call = await show_tool_call(gateway)
    call_message = (await api.get(f"/api/spaces/den/messages/{call.message_id}")).data
    assert (call_message["kind"], call_message["status"]) == ("tool", "requires_action")
    for more in ({"replyTo": call.message_id}, {"metadata": {"replyTo": call.message_id}}):
        reply = await api.post("/api/spaces/den/messages", {"content": "x", "entityId": "ann", **more})
        assert reply.status == 400
        assert "cannot be replied to" in reply.detail
    assert (
        await api.post("/api/spaces/den/messages", {"content": "x", "entityId": "ann", "replyTo": "m0"})
    ).status == 404


@pytest.mark.spec("8.1")
async def test_a_member_reads_and_posts_only_in_its_own_spaces(api: ApiClient) -> None:
    await people(api)
    await api.create("/api/spaces", id="lair", name="The lair", members=["bob"])
    ann, bob = await api.member("ann"), await api.member("bob")
    assert [space["id"] for space in (await ann.get("/api/spaces")).data["items"]] == ["den"]
    response = await ann.post("/api/spaces/den/messages", {"content": "It is me"})
    assert (response.status, response.data["senderId"]) == (201, "ann")
    assert (await ann.post("/api/spaces/den/messages", {"content": "x", "entityId": "bot"})).status == 403
    assert (await ann.get("/api/spaces/den/messages")).status == 200
    for path in ("", "/members", "/messages", f"/messages/{response.data['id']}"):
        assert (await bob.get(f"/api/spaces/den{path}")).status == 403, path
        assert (await bob.get(f"/api/spaces/lost{path}")).status == 404, path
    assert (await bob.post("/api/spaces/den/messages", {"content": "x"})).status == 403
    # A message of another space is not found through the member's space.
    assert (await bob.get(f"/api/spaces/lair/messages/{response.data['id']}")).status == 404
    for method, path in (("POST", "/api/spaces"), ("PATCH", "/api/spaces/den"), ("DELETE", "/api/spaces/den")):
        assert (await ann.request(method, path, {})).status == 403


@pytest.mark.spec("8.1")
async def test_a_removed_member_loses_access_at_once(api: ApiClient) -> None:
    await people(api)
    ann = await api.member("ann")
    assert (await ann.get("/api/spaces/den")).status == 200
    await api.delete("/api/spaces/den/members/ann")
    assert (await ann.get("/api/spaces/den")).status == 403
    assert (await ann.post("/api/spaces/den/messages", {"content": "x"})).status == 403


@pytest.mark.spec("8.3")
async def test_a_page_of_large_messages_is_limited_in_bytes(api: ApiClient) -> None:
    await people(api)
    ann = await api.member("ann")
    for _ in range(20):
        await ann.create("/api/spaces/den/messages", content="€" * 100_000, metadata={"x": "x" * 60_000})
    for first in ("?limit=500", "?limit=500&after=0"):
        numbers: list[int] = []
        query: str | None = first
        while query is not None:
            reply = await ann.get(f"/api/spaces/den/messages{query}")
            assert len(reply.body) < 8_000_000
            seqs = [message["seq"] for message in reply.data["items"]]
            assert seqs == sorted(seqs)
            numbers = [*numbers, *seqs] if "after" in first else [*seqs, *numbers]
            query = f"?limit=500&cursor={reply.data['next']}" if reply.data["next"] else None
        assert numbers == list(range(1, 21))


@pytest.mark.spec("8.1")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_space_with_the_id_of_a_deleted_one_is_empty(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    tools = [{"name": "confirm", "executionType": "space", "isAsync": True}]
    more = {"storage": {"url": request.getfixturevalue("postgres_url")}} if kind == "postgres" else {}
    config = write_config(tmp_path, tools=tools, **more)
    async with Gateway.open(config) as gateway, open_api(gateway) as api:
        await people(api)
        await api.create("/api/runs", id="run_1", agentEntityId="bot", spaceId="den")
        response = await api.post("/api/runs/run_1/calls", {"name": "confirm", "args": {"question": "a secret"}})
        call = response.data["pendingToolCallId"]
        await api.create("/api/spaces/den/messages", entityId="bot", content="a secret")
        path = "/api/spaces/den/stream?from=start"
        async with api.session.get(api.url + path, headers=api.headers) as operator:
            assert operator.status == 200
            assert (await api.delete("/api/spaces/den")).status == 204
            assert b"a secret" in await operator.read()  # The stream ends.
        await api.create("/api/spaces", id="den", name="Another", members=["bob", "bot"])
        bob = await api.member("bob")
        await bob.create("/api/spaces/den/messages", content="the first word here")
        async with bob.session.get(f"{api.url}{path}&until=message.done", headers=bob.headers) as stream:
            data = await stream.read()
        assert b"the first word here" in data
        assert b"a secret" not in data
        assert (await bob.get("/api/calls")).data["items"] == []
        assert (await bob.get("/api/runs/run_1/events")).status == 403
        assert (await api.post("/api/runs/run_1/calls", {"name": "enter_space", "args": {"spaceId": "den"}})).data["ok"]
        for path in (f"/api/calls/{call}", "/api/calls", "/api/runs/run_1/calls"):
            assert b"a secret" not in (await bob.get(path)).body
        async with bob.session.get(
            f"{api.url}/api/runs/run_1/events?from=start&until=run.done", headers=bob.headers
        ) as stream:
            await api.create("/api/runs/run_1/close")
            assert b"a secret" not in await stream.read()
