"""Results that callers get over HTTP: acknowledged ones never come again, others may come again after a crash."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from tests.server.chaos.process_kills import KEY, KillableGateway
from tests.server.gateway_api import SECRET, ApiClient, open_api, write_config
from tests.server.scripted_agents import open_single_agent_gateway, text_completion, tool_calls_turn
from toolspace import ToolspaceClient, ToolWorker
from toolspace.core import inbox_text
from toolspace.core.stored_records import InboxEvent
from toolspace.server.gateway import Gateway
from toolspace.storage.database import find_database_file
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.sqlite.database import SqliteDatabase

pytestmark = pytest.mark.spec("6.4")

TOOLS = [{"name": "race", "executionType": "external", "visible": False, "inputSchema": {"type": "object"}}]


class LostConfirmations:
    """Makes the database of a gateway drop the confirmation that a response was sent.

    So every kill comes right after the response, before that is stored. Acknowledgements are stored.
    """

    def __init__(self, folder: Path, url: str | None) -> None:
        self._url = url
        self._file = find_database_file(None, folder / "state")
        self._file.parent.mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]

    async def begin(self) -> None:
        if self._url is not None:
            await (await PostgresDatabase.open(self._url)).aclose()
            await self._run(
                "CREATE FUNCTION drop_confirmation() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                "IF NEW.delivery = 'inline' AND NEW.delivered_at IS NOT NULL THEN RETURN NULL; END IF; RETURN NEW; "
                "END $$;"
                "CREATE TRIGGER lost BEFORE UPDATE ON calls FOR EACH ROW EXECUTE FUNCTION drop_confirmation()"
            )
            return
        assert self._file is not None
        await (await SqliteDatabase.open(self._file)).aclose()
        await self._run(
            "CREATE TRIGGER lost BEFORE UPDATE ON calls WHEN NEW.delivery = 'inline' AND NEW.delivered_at IS NOT NULL "
            "BEGIN SELECT RAISE(IGNORE); END"
        )

    async def _run(self, script: str) -> None:
        if self._url is None:
            with closing(sqlite3.connect(self._file or "")) as connection:
                connection.executescript(script)
            return
        connection = await asyncpg.connect(self._url)
        await connection.execute(script)
        await connection.close()


class KilledGateway:
    """A gateway process with an external tool and a worker, and its API."""

    def __init__(self, process: KillableGateway, api: ApiClient) -> None:
        self.process = process
        self.api = api
        self.agent = self.run = ""

    async def start(self) -> None:
        self.process.start()
        await self.process.ready(self.api.session)

    async def restart_after_kill(self) -> None:
        self.process.kill()
        await self.start()

    async def create_run(self) -> None:
        self.agent = (await self.api.create("/api/entities", type="agent", name="Robot"))["id"]
        self.run = (await self.api.create("/api/runs", agentEntityId=self.agent))["id"]

    async def list_inbox(self) -> list[Any]:
        return (await self.api.get(f"/api/agents/{self.agent}/inbox")).data["items"]

    async def wait_for_results(self, count: int) -> list[Any]:
        """Waits until the inbox has so many results: on PostgreSQL, the dead process is noticed after a while."""
        async with asyncio.timeout(60):
            while len(events := await self.list_inbox()) < count:  # noqa: ASYNC110 - only claims are told of
                await asyncio.sleep(0.05)
            return events


@pytest.fixture(params=["sqlite", "postgres"])
async def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KilledGateway]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else None
    await LostConfirmations(tmp_path, url).begin()
    process = KillableGateway(tmp_path, url=url)
    try:
        async with aiohttp.ClientSession() as session:
            killed_gateway = KilledGateway(process, ApiClient(process.url, session, {"x-secret-key": KEY}))
            await killed_gateway.start()
            await killed_gateway.create_run()
            yield killed_gateway
    finally:
        process.end()


@asynccontextmanager
async def doubling_worker(url: str, key: str) -> AsyncIterator[None]:
    worker = ToolWorker(url, secret_key=key)

    @worker.tool("race")
    async def double(n: int) -> int:
        return 2 * n

    async with worker:
        yield


async def test_a_result_without_acknowledgement_may_come_again_after_a_kill_and_says_so(gateway: KilledGateway) -> None:
    call = {"name": "race", "args": {"n": 4}, "callId": "call_1"}
    async with doubling_worker(gateway.process.url, KEY):
        response = await gateway.api.post(f"/api/runs/{gateway.run}/calls", call)
    assert (response.data["result"], response.data["acknowledge"]) == (8, ["call_1"])
    await gateway.restart_after_kill()

    [event] = await gateway.wait_for_results(1)
    assert (event["eventId"], event["status"]) == ("tool_result:call_1", "pending")
    assert (event["data"]["mayBeKnown"], event["data"]["result"]) == (True, 8)

    for _ in range(2):  # A repetition has no further effect.
        response = await gateway.api.post("/api/calls/call_1/ack")
        assert (response.status, response.data) == (200, {"acknowledged": ["call_1"], "refused": []})
    claim = await gateway.api.post(f"/api/agents/{gateway.agent}/inbox/claim", {"count": 10})
    assert claim.data["items"] == []
    await gateway.restart_after_kill()
    assert [event["status"] for event in await gateway.list_inbox()] == ["processed"]
    # Its caller may ask for the result again.
    assert (await gateway.api.post(f"/api/runs/{gateway.run}/calls", call)).data["result"] == 8


async def test_a_result_that_the_client_acknowledged_does_not_come_again_after_a_kill(gateway: KilledGateway) -> None:
    async with ToolspaceClient(gateway.process.url, secret_key=KEY) as client:
        async with doubling_worker(gateway.process.url, KEY):
            result = await client.runs.call(gateway.run, "race", {"n": 4}, call_id="call_known")
            assert await client.agents.list_inbox(gateway.agent) == []  # Sends the acknowledgement first.
            unknown = {"name": "race", "args": {"n": 5}, "callId": "call_unknown"}
            await gateway.api.post(f"/api/runs/{gateway.run}/calls", unknown)
        await gateway.restart_after_kill()
        [event] = await gateway.wait_for_results(1)
    assert (result.unwrap(), event["data"]["callId"]) == (8, "call_unknown")


async def test_an_acknowledgement_after_the_kill_removes_the_event(gateway: KilledGateway) -> None:
    async with ToolspaceClient(gateway.process.url, secret_key=KEY) as client:
        async with doubling_worker(gateway.process.url, KEY):
            unknown = {"name": "race", "args": {"n": 5}, "callId": "call_unknown"}
            await gateway.api.post(f"/api/runs/{gateway.run}/calls", unknown)
            await client.runs.call(gateway.run, "race", {"n": 4}, call_id="call_known")
            gateway.process.kill()  # The acknowledgement waits for the next gateway.
            await gateway.start()
        await gateway.wait_for_results(1)
        claim = await client.agents.claim(gateway.agent, count=10)
        assert [event.event_id for event in claim.items] == ["tool_result:call_unknown"]


async def test_the_client_acknowledges_many_results_with_few_requests(tmp_path: Path) -> None:
    async with (
        Gateway.open(write_config(tmp_path, tools=TOOLS)) as gateway,
        open_api(gateway) as api,
        ToolspaceClient(api.url, secret_key=SECRET) as client,
    ):
        agent = await client.entities.create("agent", "Robot")
        run = await client.runs.open(agent.id)
        async with doubling_worker(api.url, SECRET):
            results = await asyncio.gather(*(client.runs.call(run.id, "race", {"n": n}) for n in range(100)))
        await client.agents.list_inbox(agent.id)
        metrics = (await api.get("/metrics")).body.decode()
    assert [result.unwrap() for result in results] == [2 * n for n in range(100)]
    [count] = re.findall(r'toolspace_http_requests_total\{.*"/api/calls/ack".* (\d+)', metrics)
    assert int(count) < 50


async def test_only_ended_calls_of_the_caller_can_be_acknowledged(tmp_path: Path) -> None:
    async with Gateway.open(write_config(tmp_path, tools=TOOLS)) as gateway, open_api(gateway) as api:
        agent = (await api.create("/api/entities", type="agent", name="Robot"))["id"]
        keys = [await api.create("/api/keys", kind="tools", agentEntityId=agent) for _ in range(2)]
        owner, stranger = (api.with_headers(x_secret_key=key["key"]) for key in keys)
        async with doubling_worker(api.url, SECRET):
            response = (await owner.post("/api/tools/race/call", {"args": {"n": 1}})).data
        [call_id] = response["acknowledge"]
        assert (await stranger.post(f"/api/calls/{call_id}/ack")).status == 403
        assert (await owner.post(f"/api/calls/{call_id}/ack")).status == 200
        assert (await api.post(f"/api/calls/{call_id}/ack")).status == 200
        assert (await api.post("/api/calls/call_none/ack")).status == 404
        run = (await api.create("/api/runs", agentEntityId=agent))["id"]
        waiting_call = asyncio.ensure_future(
            api.post(f"/api/runs/{run}/calls", {"name": "race", "args": {}, "callId": "call_open"})
        )
        while (await api.get("/api/calls/call_open")).status == 404:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
        assert (await api.post("/api/calls/call_open/ack")).status == 409
        batch = (await owner.post("/api/calls/ack", {"callIds": ["call_none", call_id, "call_open"]})).data
        assert batch["acknowledged"] == [call_id]
        assert {refusal["callId"] for refusal in batch["refused"]} == {"call_none", "call_open"}
        await api.post("/api/calls/call_open/cancel")
        await waiting_call


async def test_a_result_of_an_agent_of_the_gateway_cannot_be_acknowledged_by_others(tmp_path: Path) -> None:
    async with open_single_agent_gateway(tmp_path, tools=[{**TOOLS[0], "isAsync": True}]) as agents:
        agents.model_server.script(tool_calls_turn(("race", {})), text_completion("Later."))
        await agents.say("Double it.")
        run = await agents.wait_for_run_end()
        [call] = [call for call in await agents.list_calls(run) if call["toolName"] == "race"]
        await agents.api.post(f"/api/calls/{call['callId']}/result", {"result": 8})
        response = await agents.api.post(f"/api/calls/{call['callId']}/ack")
        assert response.status == 403
        assert "agent of the gateway" in response.detail
        await agents.wait_for_run_end(2)  # It got the result.


def test_a_model_reads_that_it_may_have_received_a_result_before() -> None:
    data = {"toolName": "pay", "callId": "call_1", "result": 8, "mayBeKnown": True}
    event = InboxEvent("tool_result:call_1", "ent_1", "tool_result", 1, data, 1, "pending", 0)
    assert "(callId: call_1; you may have received it before): 8" in inbox_text.render(event)
