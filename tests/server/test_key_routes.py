"""Keys and tokens over HTTP."""

from __future__ import annotations

import pytest

from tests.server.gateway_api import PUBLIC, ApiClient, ApiResponse


async def create_key(api: ApiClient, **body: object) -> ApiResponse:
    return await api.post("/api/keys", body)


@pytest.mark.spec("8.3")
async def test_a_key_is_returned_once_and_later_only_its_hint(api: ApiClient) -> None:
    reply = await create_key(api, kind="secret", name="backend")
    assert reply.status == 201
    key = reply.data["key"]
    assert (await api.with_headers(x_secret_key=key).get("/api/me")).data == {
        "kind": "secret",
        "keyId": reply.data["id"],
        "entity": None,
        "expiresAt": None,
        "toolsAllowed": None,
        "toolsDenied": [],
        "agentEntityId": None,
    }
    response = await api.get("/api/keys")
    (listed_key,) = response.data["items"]
    assert listed_key["hint"] == f"sk_…{key[-4:]}"
    assert "key" not in listed_key
    assert key.encode() not in response.body


async def test_a_revoked_key_is_listed_as_revoked_and_is_invalid(api: ApiClient) -> None:
    await create_key(api, kind="secret", name="kept")
    reply = await create_key(api, kind="secret", name="revoked")
    own_api = api.with_headers(authorization=f"Bearer {reply.data['key']}")
    assert (await own_api.get("/api/spaces")).status == 200
    assert (await own_api.delete(f"/api/keys/{reply.data['id']}")).status == 204
    assert (await own_api.get("/api/spaces")).status == 401
    assert (await api.delete(f"/api/keys/{reply.data['id']}")).status == 204  # Revoked twice.
    items = (await api.get("/api/keys")).data["items"]
    assert [key["revokedAt"] is not None for key in items] == [False, True]
    assert (await api.delete("/api/keys/key_none")).status == 404


async def test_keys_are_listed_in_pages(api: ApiClient) -> None:
    for number in range(5):
        await create_key(api, kind="public", name=f"key {number}")
    names, cursor = [], ""
    while True:
        page = (await api.get(f"/api/keys?limit=2{cursor}")).data
        names += [key["name"] for key in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert sorted(names) == [f"key {number}" for number in range(5)]


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "master"},
        {"kind": "secret", "toolsAllowed": ["*"]},
        {"kind": "public", "agentEntityId": "robot"},
        {"kind": "tools", "agentEntityId": "nobody"},
        {"kind": "tools", "agentEntityId": "ann"},
        {"kind": "tools", "toolsAllowed": [""]},
        {"kind": "tools", "toolsAllowed": ["a\0b"]},
        {"kind": "tools", "toolsDenied": ["x" * 300]},
        {"kind": "tools", "toolsAllowed": "*"},
        {"kind": "secret", "name": "a\nb"},
        {"kind": "secret", "name": ""},
    ],
)
async def test_an_invalid_key_is_refused(api: ApiClient, body: dict[str, object]) -> None:
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    reply = await api.post("/api/keys", body)
    assert reply.status == 400, reply
    assert reply.detail


@pytest.mark.spec("8.1")
async def test_a_token_identifies_its_entity_until_it_expires(api: ApiClient) -> None:
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    reply = await api.post("/api/entities/ann/token", {"expiresIn": 60})
    assert reply.status == 201
    own_api = api.with_headers(x_public_key=PUBLIC, authorization=f"Bearer {reply.data['token']}")
    me = (await own_api.get("/api/me")).data
    assert (me["kind"], me["entity"]["id"]) == ("public", "ann")
    assert me["expiresAt"] == reply.data["expiresAt"] + 30_000  # The leeway of the clocks.
    assert (await api.post("/api/entities/nobody/token")).status == 404
    for seconds in (0, -1, 10**12, 1.5, "60"):
        assert (await api.post("/api/entities/ann/token", {"expiresIn": seconds})).status == 400
    assert (await api.delete("/api/entities/ann")).status == 204
    assert (await own_api.get("/api/me")).status == 401
