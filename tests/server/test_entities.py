"""Entities and agents over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.gateway_api import ApiClient


@pytest.mark.spec("7.1")
@pytest.mark.spec("12.1")
async def test_an_entity_is_created_read_updated_and_deleted(each_database_api: ApiClient) -> None:
    api = each_database_api
    reply = await api.post("/api/entities", {"type": "human", "name": "Ann", "metadata": {"π": [1, None, 2.5]}})
    assert reply.status == 201
    ann = reply.data
    assert ann["id"].startswith("ent_")
    assert (ann["type"], ann["name"], ann["metadata"]) == ("human", "Ann", {"π": [1, None, 2.5]})
    path = f"/api/entities/{ann['id']}"
    assert (await api.get(path)).data == ann
    changed_entity = (await api.patch(path, {"name": "Anna"})).data
    assert (changed_entity["name"], changed_entity["metadata"]) == ("Anna", ann["metadata"])
    assert (await api.patch(path, {"metadata": {}})).data["metadata"] == {}
    assert (await api.patch(path, {})).data["name"] == "Anna"
    assert (await api.delete(path)).status == 204
    for method, body in (("GET", None), ("PATCH", {"name": "x"}), ("DELETE", None)):
        reply = await api.request(method, path, body)
        assert reply.status == 404
        assert ann["id"] in reply.detail


async def test_a_chosen_entity_id_is_unique(each_database_api: ApiClient) -> None:
    body = {"id": "bot-7", "type": "agent", "name": "Bot"}
    replies = await asyncio.gather(*(each_database_api.post("/api/entities", body) for _ in range(5)))
    assert sorted(reply.status for reply in replies) == [201, 409, 409, 409, 409]
    assert "bot-7" in next(reply for reply in replies if reply.status == 409).detail


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"type": "robot", "name": "x"}, "$.type"),
        ({"type": "human", "name": "a\0b"}, "$.name"),
        ({"type": "human", "name": "a\nb"}, "$.name"),
        ({"type": "human", "name": "x" * 201}, "$.name"),
        ({"type": "human", "name": "x", "id": "../etc"}, "$.id"),
        ({"type": "human", "name": "x", "id": ".."}, "$.id"),
        ({"type": "human", "name": "x", "id": "x" * 101}, "$.id"),
        ({"type": "human", "name": "x", "metadata": []}, "$.metadata"),
        ({"type": "human", "name": "x", "metadata": {"a": "x" * 70_000}}, "$"),
        ({"type": "human", "name": "x", "createdAt": 1}, "$.createdAt"),
    ],
)
async def test_an_invalid_entity_is_refused_with_the_reason(api: ApiClient, body: object, path: str) -> None:
    reply = await api.post("/api/entities", body)
    assert (reply.status, reply.data["path"]) == (400, path)


async def test_metadata_is_returned_unchanged(each_database_api: ApiClient) -> None:
    odd = b'{"type":"human","name":"x","metadata":{"nul":"a\\u0000b","big":123456789012345678901234567890,"f":0.1}}'
    creation = await each_database_api.post("/api/entities", raw=odd)
    assert creation.status == 201
    second_response = await each_database_api.get(f"/api/entities/{creation.data['id']}")
    assert second_response.body == creation.body
    assert b'"big":123456789012345678901234567890' in second_response.body
    assert b'"nul":"a\\u0000b"' in second_response.body


@pytest.mark.spec("12.1")
async def test_each_entity_is_on_exactly_one_page(each_database_api: ApiClient) -> None:
    for number in range(7):
        kind = "agent" if number % 2 else "human"
        await each_database_api.create("/api/entities", id=f"e{number}", type=kind, name=f"E{number}")
    ids: list[str] = []
    cursor = ""
    while True:
        reply = await each_database_api.get(f"/api/entities?limit=3{cursor}")
        ids += [entity["id"] for entity in reply.data["items"]]
        if reply.data["next"] is None:
            break
        cursor = f"&cursor={reply.data['next']}"
    assert ids == [f"e{number}" for number in range(7)]
    agents = (await each_database_api.get("/api/entities?type=agent")).data
    assert [agent["id"] for agent in agents["items"]] == ["e1", "e3", "e5"]
    assert [agent["id"] for agent in (await each_database_api.get("/api/agents")).data["items"]] == ["e1", "e3", "e5"]


@pytest.mark.parametrize("limit", ["0", "501", "-1", "1.5", "x", "9" * 30])
async def test_the_page_size_is_limited(api: ApiClient, limit: str) -> None:
    assert (await api.get(f"/api/entities?limit={limit}")).status == 400


async def test_a_person_is_not_found_as_an_agent(api: ApiClient) -> None:
    ann = await api.create("/api/entities", type="human", name="Ann")
    assert (await api.get(f"/api/agents/{ann['id']}")).status == 404


@pytest.mark.spec("8.1")
async def test_an_entity_sees_itself_and_entities_in_its_spaces_without_their_metadata(api: ApiClient) -> None:
    for name, kind in (("ann", "human"), ("bob", "human"), ("bot", "agent"), ("spy", "agent")):
        await api.create("/api/entities", id=name, type=kind, name=name, metadata={"note": f"about {name}"})
    await api.create("/api/spaces", name="ours", members=["ann", "bot"])
    await api.create("/api/spaces", name="theirs", members=["bob", "spy"])
    ann = await api.member("ann")
    assert (await ann.get("/api/entities/ann")).data["metadata"] == {"note": "about ann"}
    entity = await ann.get("/api/entities/bot")
    assert (entity.status, entity.data["metadata"]) == (200, {})
    assert (await ann.get("/api/agents/bot")).data["metadata"] == {}
    agents = (await ann.get("/api/agents")).data["items"]
    assert [(agent["id"], agent["metadata"]) for agent in agents] == [("bot", {})]
    assert (await ann.get("/api/entities/bob")).status == 403
    assert (await ann.get("/api/agents/spy")).status == 403
    assert (await ann.get("/api/entities/nobody")).status == 404
    assert (await ann.get("/api/entities")).status == 403
    assert (await ann.patch("/api/entities/ann", {"name": "x"})).status == 403


@pytest.mark.spec("8.1")
async def test_the_token_of_a_deleted_entity_is_invalid(api: ApiClient) -> None:
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    ann = await api.member("ann")
    assert (await ann.get("/api/spaces")).status == 200
    await api.delete("/api/entities/ann")
    assert (await ann.get("/api/spaces")).status == 401


@pytest.mark.parametrize("name", ["id", "name"])
async def test_ids_and_names_must_not_end_with_a_line_break(api: ApiClient, name: str) -> None:
    reply = await api.post("/api/entities", {"id": "bot-7", "type": "agent", "name": "Bot", name: "bot-8\n"})
    assert reply.status == 400
    assert reply.data["path"] == f"$.{name}"
