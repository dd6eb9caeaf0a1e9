"""Inboxes over HTTP: claim, acknowledge, release, wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from toolspace.server.gateway import Gateway
from toolspace.storage.queries import inbox

PATH = "/api/agents/bot/inbox"


async def agent(api: ApiClient) -> None:
    await api.create("/api/entities", id="bot", type="agent", name="Bot")


async def push(api: ApiClient, event_id: str, data: Any = None) -> Any:
    return await api.create(PATH, eventId=event_id, data=data)


async def states(api: ApiClient) -> dict[str, str]:
    return {event["eventId"]: event["status"] for event in (await api.get(PATH)).data["items"]}


@pytest.mark.spec("7.3")
@pytest.mark.spec("12.1")
async def test_an_event_is_pushed_once_claimed_and_acknowledged(each_database_api: ApiClient) -> None:
    api = each_database_api
    await agent(api)
    assert await push(api, "order-1", {"order": 1}) == {"eventId": "order-1", "fresh": True}
    assert await push(api, "order-1", {"order": 1}) == {"eventId": "order-1", "fresh": False}
    events = (await api.get(f"{PATH}?status=pending")).data["items"]
    assert [(event["eventId"], event["type"], event["data"]) for event in events] == [
        ("order-1", "service", {"order": 1})
    ]
    claim = await api.create(f"{PATH}/claim", count=5, leaseSeconds=30)
    assert [event["eventId"] for event in claim["items"]] == ["order-1"]
    assert claim["leaseUntil"] > claim["items"][0]["timestamp"]
    assert (await api.create(f"{PATH}/claim"))["items"] == []
    response = await api.create(f"{PATH}/done", claim="another", eventIds=["order-1", "order-9"])
    assert response == {"done": [], "notHeld": ["order-1", "order-9"]}
    assert await api.create(f"{PATH}/done", claim=claim["claim"], eventIds=["order-1"]) == {
        "done": ["order-1"],
        "notHeld": [],
    }
    assert await states(api) == {"order-1": "processed"}
    assert (await api.get(f"{PATH}?status=pending")).data == {"items": [], "next": None}


@pytest.mark.spec("7.3")
async def test_events_are_claimed_once_and_in_order(each_database_api: ApiClient) -> None:
    await agent(each_database_api)
    for number in range(10):
        await push(each_database_api, f"e{number}")
    claims = await asyncio.gather(*(each_database_api.create(f"{PATH}/claim", count=3) for _ in range(6)))
    ids = [event["eventId"] for claim in claims for event in claim["items"]]
    assert sorted(ids) == [f"e{number}" for number in range(10)]
    for claim in claims:
        event_ids = [event["eventId"] for event in claim["items"]]
        assert event_ids == sorted(event_ids)


@pytest.mark.spec("7.3")
async def test_a_released_event_is_retried_until_it_fails(gateway: Gateway, api: ApiClient) -> None:
    await agent(api)
    await push(api, "e1")
    for attempt in range(1, inbox.MAX_ATTEMPTS + 1):
        claim = await api.create(f"{PATH}/claim", wait=60)
        assert claim["items"][0]["attempts"] == attempt
        back = await api.create(f"{PATH}/return", claim=claim["claim"], eventIds=["e1", "e2"], error="no luck")
        assert back["notHeld"] == ["e2"]
        assert back["items"][0]["status"] == ("pending" if attempt < inbox.MAX_ATTEMPTS else "failed")
        # The test does not wait for the retry delay.
        await gateway.ledger.write(_hurry)
    failed = (await api.get(f"{PATH}?status=failed")).data["items"]
    assert [(event["eventId"], event["error"]) for event in failed] == [("e1", "no luck")]
    second_response = await api.post(f"{PATH}/e1/retry")
    assert (second_response.status, second_response.data["status"], second_response.data["attempts"]) == (
        200,
        "pending",
        0,
    )
    assert (await api.post(f"{PATH}/e1/retry")).status == 409
    assert (await api.post(f"{PATH}/e2/retry")).status == 404


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 (it has no event to wait for)
            await asyncio.sleep(0.005)


def _hurry() -> Any:
    yield "UPDATE inbox SET available_at = 0 WHERE status = 'pending'", ()


@pytest.mark.spec("7.3")
async def test_a_waiting_request_gets_an_event_when_it_arrives(each_database_api: ApiClient) -> None:
    await agent(each_database_api)
    claim_task = asyncio.create_task(each_database_api.create(f"{PATH}/claim", wait=60))
    list_task = asyncio.create_task(each_database_api.get(f"{PATH}?wait=60"))
    await asyncio.sleep(0)
    await push(each_database_api, "news")
    claim, inbox_page = await asyncio.wait_for(asyncio.gather(claim_task, list_task), 30)
    assert [event["eventId"] for event in claim["items"]] == ["news"]
    assert [event["eventId"] for event in inbox_page.data["items"]] == ["news"]


async def test_a_wait_without_events_ends_in_time(api: ApiClient) -> None:
    await agent(api)
    assert (await api.get(f"{PATH}?wait=0.05")).data == {"items": [], "next": None}
    assert (await api.create(f"{PATH}/claim", wait=0.05))["items"] == []


async def test_a_disconnected_client_claims_nothing(gateway: Gateway, api: ApiClient) -> None:
    await agent(api)
    claim_task = asyncio.create_task(api.create(f"{PATH}/claim", wait=60))
    await _until(lambda: gateway.ledger.waiters.is_waited_for("inbox:bot"))
    claim_task.cancel()
    await _until(lambda: not gateway.ledger.waiters.is_waited_for("inbox:bot"))
    await push(api, "e1")
    assert await states(api) == {"e1": "pending"}


async def test_waiting_requests_end_when_the_gateway_stops(tmp_path: Path) -> None:
    async with Gateway.open(write_config(tmp_path)) as gateway, open_api(gateway) as api:
        await agent(api)
        claim_task = asyncio.create_task(api.create(f"{PATH}/claim", wait=60))
        await _until(lambda: gateway.ledger.waiters.is_waited_for("inbox:bot"))
        gateway.readiness.is_stopping = True
        await asyncio.wait_for(gateway.drain(5), 30)
        assert (await asyncio.wait_for(claim_task, 30))["items"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("", {}),
        ("", {"data": 1, "eventId": "a b"}),
        ("", {"data": "x" * 300_000}),
        ("", {"data": 1, "type": "plan"}),
        ("/claim", {"count": 0}),
        ("/claim", {"leaseSeconds": 1e9}),
        ("/claim", {"types": ["gossip"]}),
        ("/claim", {"wait": 61}),
        ("/done", {}),
        ("/done", {"eventIds": []}),
        ("/done", {"eventIds": ["x"] * 101}),
        ("/return", {"eventIds": ["x"], "error": "a\0"}),
    ],
)
async def test_an_invalid_inbox_event_is_refused(api: ApiClient, path: str, body: object) -> None:
    await agent(api)
    assert (await api.post(PATH + path, body)).status == 400


async def test_only_agents_have_an_inbox(api: ApiClient) -> None:
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    for entity in ("ann", "nobody"):
        assert (await api.get(f"/api/agents/{entity}/inbox")).status == 404
        assert (await api.post(f"/api/agents/{entity}/inbox", {"data": 1})).status == 404


async def test_events_are_claimed_by_type(api: ApiClient) -> None:
    await agent(api)
    await push(api, "e1")
    assert (await api.create(f"{PATH}/claim", types=["tool_result"]))["items"] == []
    assert len((await api.create(f"{PATH}/claim", types=["service"]))["items"]) == 1
