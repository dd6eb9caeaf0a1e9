"""Documents of agents over HTTP, and through the client."""

from __future__ import annotations

import pytest

from tests.server.gateway_api import SECRET, ApiClient
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import Conflict, NotFound

pytestmark = [pytest.mark.spec("9.5"), pytest.mark.spec("12.1")]


async def agent(api: ApiClient, name: str = "Ada") -> str:
    new_agent = await api.create("/api/entities", type="agent", name=name)
    return f"/api/agents/{new_agent['id']}/documents"


async def test_documents_of_an_agent_are_stored_and_found(each_database_api: ApiClient) -> None:
    path = await agent(each_database_api)
    body = {"title": "FAQ", "text": "Tea is in the kitchen.", "source": "https://example.com/faq", "metadata": {"v": 1}}
    creation = await each_database_api.post(path, body)
    assert creation.status == 201
    document = creation.data
    assert (document["title"], document["size"], document["passages"], document["origin"]) == ("FAQ", 22, 1, "api")
    assert "text" not in document
    full_document = (await each_database_api.get(f"{path}/{document['id']}")).data
    assert full_document == {**document, "text": body["text"]}
    change = await each_database_api.put(f"{path}/{document['id']}", {"title": "FAQ", "text": "Coffee is in the hall."})
    assert (change.data["source"], change.data["metadata"]) == (None, {})
    run = await each_database_api.create("/api/runs", agentEntityId=path.split("/")[3])
    matches = await each_database_api.post(
        f"/api/runs/{run['id']}/calls", {"name": "search_knowledge", "args": {"query": "coffee"}}
    )
    assert matches.data["result"]["results"][0]["text"] == "Coffee is in the hall."
    assert (await each_database_api.delete(f"{path}/{document['id']}")).status == 204
    assert (await each_database_api.delete(f"{path}/{document['id']}")).status == 404
    assert (await each_database_api.get(f"{path}/{document['id']}")).status == 404
    matches = await each_database_api.post(
        f"/api/runs/{run['id']}/calls", {"name": "search_knowledge", "args": {"query": "coffee"}}
    )
    assert matches.data["result"] == {"results": [], "total": 0}


async def test_documents_are_listed_in_pages(api: ApiClient) -> None:
    path = await agent(api)
    for n in range(5):
        assert (await api.put(f"{path}/doc_{n}", {"title": f"{n}", "text": "x"})).status == 200
    first = (await api.get(f"{path}?limit=3")).data
    rest = (await api.get(f"{path}?limit=3&cursor={first['next']}")).data
    assert [document["id"] for document in (*first["items"], *rest["items"])] == [f"doc_{n}" for n in range(5)]
    assert rest["next"] is None


async def test_an_invalid_document_is_refused_with_the_reason(api: ApiClient) -> None:
    path = await agent(api)
    for body, reason in (
        ({"title": "T", "text": "é" * 510_000}, "so split it"),
        ({"title": "T", "text": "x" * 1_000_001}, "text"),
        ({"title": "T", "text": "a\0b"}, "NUL"),
        ({"title": "a\nb", "text": "x"}, "title"),
        ({"title": "", "text": "x"}, "title"),
        ({"title": "T", "text": ""}, "text"),
        ({"title": "T", "text": "x", "metadata": {"big": "x" * 70_000}}, "metadata"),
        ({"title": "T", "text": "x", "more": 1}, "more"),
        ({"title": "T", "text": "x", "id": "../x"}, "id"),
    ):
        reply = await api.post(path, body)
        assert reply.status == 400, (body.keys(), reply.status)
        assert reason in reply.detail + str(reply.data.get("path")), reply.data
    for wrong, status in (("%00", 404), ("..%2fx", 404), ("x" * 101, 400), (".x", 400)):
        assert (await api.put(f"{path}/{wrong}", {"title": "T", "text": "x"})).status == status, wrong
        assert (await api.get(f"{path}/{wrong}")).status == 404, wrong
    assert (await api.get(path)).data["items"] == []


async def test_a_document_id_is_unique_and_a_repeated_request_returns_the_first(api: ApiClient) -> None:
    path = await agent(api)
    body = {"title": "T", "text": "x", "id": "mine"}
    first = await api.post(path, body, headers={"Idempotency-Key": "k1"})
    second_response = await api.post(path, body, headers={"Idempotency-Key": "k1"})
    assert (first.status, second_response.status, second_response.data) == (201, 201, first.data)
    duplicate = await api.post(path, body)
    assert (duplicate.status, "PUT replaces it" in duplicate.detail) == (409, True)


async def test_documents_of_another_agent_are_not_found(api: ApiClient) -> None:
    ada, bob = await agent(api), await agent(api, "Bob")
    await api.put(f"{ada}/plan", {"title": "Plan", "text": "hers"})
    assert (await api.get(f"{bob}/plan")).status == 404
    assert (await api.delete(f"{bob}/plan")).status == 404
    await api.put(f"{bob}/plan", {"title": "Plan", "text": "his"})
    assert (await api.get(f"{ada}/plan")).data["text"] == "hers"


@pytest.mark.spec("13.1")
async def test_the_client_has_a_method_for_each_document_route(api: ApiClient) -> None:
    bot = (await api.create("/api/entities", type="agent", name="Bot"))["id"]
    async with ToolspaceClient(api.url, secret_key=SECRET) as client:
        new_document = await client.agents.add_document(
            bot, "FAQ", "Tea.", source="faq.md", metadata={"v": 1}, id="faq"
        )
        assert (new_document.id, new_document.source, new_document.metadata, new_document.size) == (
            "faq",
            "faq.md",
            {"v": 1},
            4,
        )
        with pytest.raises(Conflict):
            await client.agents.add_document(bot, "FAQ", "Tea.", id="faq")
        assert (await client.agents.put_document(bot, "faq", "FAQ", "Coffee.")).size == 7
        assert (await client.agents.get_document(bot, "faq")).text == "Coffee."
        assert [document.id for document in (await client.agents.list_documents(bot)).items] == ["faq"]
        await client.agents.delete_document(bot, "faq")
        with pytest.raises(NotFound):
            await client.agents.get_document(bot, "faq")
