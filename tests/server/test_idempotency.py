"""Requests with an Idempotency-Key have one effect."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.gateway_api import ApiClient, ApiResponse

KEY = {"Idempotency-Key": "order-4711"}


@pytest.mark.spec("12.1")
async def test_a_repeated_request_gets_the_first_response_and_has_one_effect(each_database_api: ApiClient) -> None:
    body = {"type": "human", "name": "Ann"}
    replies: list[ApiResponse] = await asyncio.gather(
        *(each_database_api.post("/api/entities", body, headers=KEY) for _ in range(5)),
    )
    assert {(reply.status, reply.body) for reply in replies} == {(201, replies[0].body)}
    assert [reply.headers.get("idempotency-replayed") for reply in replies].count("true") == 4
    assert len((await each_database_api.get("/api/entities")).data["items"]) == 1
    # Also if the record was changed since.
    await each_database_api.patch(f"/api/entities/{replies[0].data['id']}", {"name": "Anna"})
    assert (await each_database_api.post("/api/entities", body, headers=KEY)).body == replies[0].body


async def test_a_key_with_another_body_is_refused(api: ApiClient) -> None:
    await api.post("/api/entities", {"type": "human", "name": "Ann"}, headers=KEY)
    reply = await api.post("/api/entities", {"type": "human", "name": "Bob"}, headers=KEY)
    assert reply.status == 422
    assert "new key" in reply.detail


async def test_a_key_belongs_to_one_caller_and_one_path(api: ApiClient) -> None:
    for name in ("ann", "bob"):
        await api.create("/api/entities", id=name, type="human", name=name)
    for space in ("den", "lair"):
        await api.create("/api/spaces", id=space, name=space, members=["ann", "bob"])
    body = {"content": "Hello"}
    errors: list[str] = []
    for name in ("ann", "bob"):
        member = await api.member(name)
        for space in ("den", "lair"):
            for _ in range(2):
                reply = await member.post(f"/api/spaces/{space}/messages", body, headers=KEY)
                assert reply.status == 201
                errors.append(reply.data["id"])
    assert len(set(errors)) == 4


async def test_a_refused_request_does_not_use_its_key(api: ApiClient) -> None:
    body = {"name": "Den", "members": ["ann"]}
    assert (await api.post("/api/spaces", body, headers=KEY)).status == 400
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    assert (await api.post("/api/spaces", body, headers=KEY)).status == 201


@pytest.mark.parametrize("key", ["", "x" * 201, "a b", "ü"])
async def test_an_invalid_idempotency_key_is_refused(api: ApiClient, key: str) -> None:
    reply = await api.post("/api/entities", {"type": "human", "name": "x"}, headers={"Idempotency-Key": key})
    assert reply.status == 400
    assert "Idempotency-Key" in reply.detail


async def test_repeated_runs_messages_and_inbox_events_are_created_once(api: ApiClient) -> None:
    await api.create("/api/entities", id="bot", type="agent", name="Bot")
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    await api.create("/api/spaces", id="den", name="Den", members=["ann", "bot"])
    for path, body in (
        ("/api/runs", {"agentEntityId": "bot"}),
        ("/api/spaces/den/messages", {"content": "Hello", "entityId": "ann"}),
        ("/api/agents/bot/inbox", {"data": 1}),
        ("/api/spaces", {"name": "Lair"}),
    ):
        first, second = [await api.post(path, body, headers=KEY) for _ in range(2)]
        assert (first.status, first.body) == (201, second.body), path
    assert len((await api.get("/api/runs")).data["items"]) == 1
    assert len((await api.get("/api/spaces/den/messages")).data["items"]) == 1
    assert len((await api.get("/api/agents/bot/inbox")).data["items"]) == 2
