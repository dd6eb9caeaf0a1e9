"""Approvals over the HTTP API: a call that is asked for runs once, after somebody else has approved it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from tests.server.gateway_process import open_process_api, start_gateway_process
from tests.server.scripted_agents import (
    PERSON,
    ROOM,
    AgentGateway,
    agent_config,
    list_result_texts,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from toolspace.agents.agent import entity_id_for
from toolspace.server.gateway import Gateway

pytestmark = pytest.mark.spec("20.3")
TOOLS = """
from collections.abc import AsyncIterator
from pathlib import Path
from toolspace import tool, ToolContext

LOG = Path(__file__).parent / "effects.txt"

@tool(visible=False)
def pay(amount: int, to: str = "shop") -> dict:
    with LOG.open("a") as file:
        file.write(f"{amount}\\n")
    return {"paid": amount}

@tool(visible=False)
def look() -> str:
    return "seen"

@tool(visible=False)
async def ship(parcels: int, context: ToolContext) -> AsyncIterator[str]:
    for number in range(1, parcels + 1):
        context.report_progress(number, parcels, f"parcel {number}")
        yield f"shipped {number} "
    LOG.write_text(f"{context.run_id} {context.session_id}")
"""
ASK = [{"tool": "pay", "decision": "ask", "reason": "money"}]


async def poll(read: Callable[[], Awaitable[Any]], is_done: Callable[[Any], bool]) -> Any:
    """Reads until it is done; returns what was read last."""
    async with asyncio.timeout(60):
        while not is_done(value := await read()):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
    return value


class Shop:
    """A gateway whose tool `pay` needs approval, with an operator that makes calls and another that approves."""

    def __init__(self, folder: Path, api: ApiClient, approver: ApiClient, gateway: Gateway) -> None:
        self.folder = folder
        self.api = api
        self.approver = approver
        self.gateway = gateway

    @property
    def payments(self) -> list[int]:
        return read_payments(self.folder)

    async def pay(self, amount: Any = 5, **options: Any) -> Any:
        return await self.api.post("/api/tools/pay/call", {"args": {"amount": amount}}, **options)

    async def ask(self, amount: Any = 5) -> str:
        """Makes a call; returns the id of its approval."""
        reply = await self.pay(amount)
        assert reply.status == 202, reply
        assert reply.data["status"] == "pending"
        return reply.data["pendingToolCallId"]

    async def decide(self, approval_id: str, decision: str = "approve", **more: Any) -> Any:
        return await self.approver.post(f"/api/approvals/{approval_id}", {"decision": decision, **more})

    async def wait_for_call(self, call_id: str) -> Any:
        """Waits for the end of a call."""

        async def read() -> Any:
            return (await self.api.get(f"/api/calls/{call_id}")).data

        return await poll(read, lambda call: call["status"] not in ("waiting", "pending"))

    async def list_approvals(self, client: ApiClient | None = None, **query: str) -> list[Any]:
        text = "&".join(f"{key}={value}" for key, value in query.items())
        return (await (client or self.approver).get(f"/api/approvals?{text}")).data["items"]


def read_payments(folder: Path) -> list[int]:
    file = folder / "effects.txt"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def shop_config(folder: Path, **config: Any) -> dict[str, Any]:
    (folder / "tools.py").write_text(TOOLS)
    return {"functions": ["./tools.py"], "storage": {"dir": str(folder / "state")}, "policies": ASK, **config}


@asynccontextmanager
async def open_shop(folder: Path, **config: Any) -> AsyncGenerator[Shop]:
    path = write_config(folder, **shop_config(folder, **config))
    async with Gateway.open(path, environ={}) as gateway, open_api(gateway) as api:
        key = await api.create("/api/keys", kind="secret", name="approver")
        yield Shop(folder, api, api.with_headers(x_secret_key=key["key"]), gateway)


@pytest.fixture(params=["sqlite", "postgres"])
async def shop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Shop]:
    storage = {"dir": str(tmp_path / "state")}
    if request.param == "postgres":
        storage["url"] = request.getfixturevalue("postgres_url")
    async with open_shop(tmp_path, storage=storage) as open_shop_gateway:
        yield open_shop_gateway


async def test_an_approved_call_is_executed_once_with_its_exact_arguments(shop: Shop) -> None:
    call_id = await shop.ask("5")
    [approval] = await shop.list_approvals()
    assert (approval["id"], approval["toolName"], approval["args"]) == (call_id, "pay", {"amount": 5})
    assert (approval["reason"], approval["approvers"], approval["status"]) == ("money", ["operators"], "requested")
    assert approval["expiresAt"] > approval["createdAt"]
    assert shop.payments == []
    call = (await shop.api.get(f"/api/calls/{call_id}")).data
    assert (call["status"], call["executionType"]) == ("pending", "approval")

    reply = await shop.decide(call_id, reason="fine")
    assert (reply.status, reply.data["status"], reply.data["decisionReason"]) == (200, "approved", "fine")
    call = await shop.wait_for_call(call_id)
    assert (call["status"], call["result"], call["isError"]) == ("resolved", {"paid": 5}, False)
    assert shop.payments == [5]
    assert await shop.list_approvals() == []


async def test_a_denied_call_never_runs_and_its_caller_reads_the_reason(shop: Shop) -> None:
    call_id = await shop.ask()
    assert (await shop.decide(call_id, "deny", reason="not today")).data["status"] == "denied"
    call = await shop.wait_for_call(call_id)
    assert (call["isError"], call["errorKind"], call["result"]) == (
        True,
        "not_permitted",
        "Permission denied: not today",
    )
    assert shop.payments == []


async def test_an_approval_is_used_once(shop: Shop) -> None:
    call_id = await shop.ask()
    replies = await asyncio.gather(*(shop.decide(call_id) for _ in range(4)), shop.decide(call_id, "deny"))
    assert sorted(reply.status for reply in replies).count(200) == 1
    await shop.wait_for_call(call_id)
    assert (await shop.decide(call_id)).status == 409
    assert len(shop.payments) <= 1
    assert (await shop.decide("call_unknown")).status == 404


async def test_a_changed_argument_is_another_call(shop: Shop) -> None:
    first = await shop.ask(5)
    await shop.decide(first)
    await shop.wait_for_call(first)
    second = await shop.ask(6)
    assert second != first
    reply = await shop.api.post("/api/tools/pay/call", {"args": {"amount": 5}})
    assert reply.status == 202
    assert shop.payments == [5]


async def test_an_expired_approval_is_refused(tmp_path: Path) -> None:
    async with open_shop(tmp_path, policies=[{**ASK[0], "expiresAfter": "1ms"}]) as shop:
        call_id = await shop.ask()
        call = await shop.wait_for_call(call_id)
        assert (call["status"], call["errorKind"]) == ("expired", "not_permitted")
        assert (await shop.decide(call_id)).status == 410
        [approval] = await shop.list_approvals(status="expired")
        assert approval["id"] == call_id
    assert shop.payments == []


@pytest.mark.spec("20.4")
async def test_who_made_a_call_does_not_approve_it(shop: Shop) -> None:
    call_id = await shop.ask()
    reply = await shop.api.post(f"/api/approvals/{call_id}", {"decision": "approve"})
    assert (reply.status, shop.payments) == (403, [])
    assert "made the call" in reply.detail
    tool_key = await shop.api.create("/api/keys", kind="tools", name="robot")
    robot = shop.api.with_headers(x_secret_key=tool_key["key"])
    call_id = (await robot.post("/api/tools/pay/call", {"args": {"amount": 7}})).data["pendingToolCallId"]
    assert (await robot.post(f"/api/approvals/{call_id}", {"decision": "approve"})).status == 403
    assert await shop.list_approvals(robot) == []
    assert (await shop.decide(call_id)).status == 200
    await shop.wait_for_call(call_id)
    assert shop.payments == [7]


@pytest.mark.spec("20.4")
async def test_the_caller_approves_where_the_rule_says_so(tmp_path: Path) -> None:
    async with open_shop(tmp_path, policies=[{**ASK[0], "approvers": "caller"}]) as shop:
        call_id = await shop.ask()
        assert (await shop.decide(call_id)).status == 403
        assert (await shop.api.post(f"/api/approvals/{call_id}", {"decision": "approve"})).status == 200
        await shop.wait_for_call(call_id)
    assert shop.payments == [5]


@pytest.mark.spec("20.4")
async def test_members_and_named_entities_approve_where_the_rule_says_so(tmp_path: Path) -> None:
    policies = [
        {"tool": "pay", "expression": "arguments.amount < 10", "decision": "ask", "approvers": ["members"]},
        {"tool": "pay", "decision": "ask", "approvers": ["ann"]},
    ]
    async with open_shop(tmp_path, policies=policies) as shop:
        for name in ("ann", "bob", "eve"):
            await shop.api.create("/api/entities", id=name, type="human", name=name)
        agent = await shop.api.create("/api/entities", type="agent", name="Ada")
        space = await shop.api.create("/api/spaces", name="Till")
        for name in ("bob", agent["id"]):
            await shop.api.create(f"/api/spaces/{space['id']}/members", entityId=name)
        run = await shop.api.create("/api/runs", agentEntityId=agent["id"], spaceId=space["id"])
        ann, bob, eve = [await shop.api.member(name) for name in ("ann", "bob", "eve")]
        ids = []
        for amount in (5, 50):
            reply = await shop.api.post(f"/api/runs/{run['id']}/calls", {"name": "pay", "args": {"amount": amount}})
            assert reply.status == 202
            ids.append(reply.data["pendingToolCallId"])
        small, large = ids
        visible_ids = [[item["id"] for item in await shop.list_approvals(client)] for client in (ann, bob, eve)]
        assert visible_ids == [[large], [small], []]
        for client, call_id in ((ann, small), (bob, large), (eve, small), (eve, large)):
            assert (await client.post(f"/api/approvals/{call_id}", {"decision": "approve"})).status == 403
        assert (await shop.decide(small)).status == 403
        for client, call_id in ((bob, small), (ann, large)):
            assert (await client.post(f"/api/approvals/{call_id}", {"decision": "approve"})).status == 200
            await shop.wait_for_call(call_id)
    assert shop.payments == [5, 50]


@pytest.mark.parametrize("scope", ["run", "session", "always"])
@pytest.mark.parametrize("decision", ["approve", "deny"])
async def test_a_decision_is_remembered_for_the_same_tool_and_principal(shop: Shop, scope: str, decision: str) -> None:
    agent = await shop.api.create("/api/entities", type="agent", name="Ada")
    runs = [await shop.api.create("/api/runs", agentEntityId=agent["id"]) for _ in range(2)]

    async def pay(run: Any, amount: int) -> Any:
        return await shop.api.post(f"/api/runs/{run['id']}/calls", {"name": "pay", "args": {"amount": amount}})

    call_id = (await pay(runs[0], 1)).data["pendingToolCallId"]
    reply = await shop.decide(call_id, decision, remember=scope, reason="as before")
    assert (reply.status, reply.data["remember"]) == (200, scope)
    await shop.wait_for_call(call_id)
    next_reply = await pay(runs[0], 2)
    assert next_reply.status == 200
    if decision == "approve":
        assert next_reply.data["result"] == {"paid": 2}
    else:
        assert (next_reply.data["errorKind"], next_reply.data["error"]) == (
            "not_permitted",
            "Permission denied: as before",
        )
    assert (await pay(runs[1], 3)).status == (200 if scope == "always" else 202)
    other_principal = await shop.approver.post("/api/tools/pay/call", {"args": {"amount": 4}})
    assert other_principal.status == 202
    [rule] = (await shop.api.get("/api/approval-rules")).data["items"]
    assert (rule["toolName"], rule["principal"]) == ("pay", "key/key_configured")
    assert (await shop.api.delete(f"/api/approval-rules/{rule['id']}")).status == 204
    assert (await pay(runs[0], 5)).status == 202
    assert (await shop.api.delete(f"/api/approval-rules/{rule['id']}")).status == 404


async def test_a_caller_may_wait_for_the_decision(shop: Shop) -> None:
    waiting_call = asyncio.create_task(shop.pay(8, headers={"prefer": "wait=30"}))
    [approval] = await poll(shop.list_approvals, bool)
    await shop.decide(approval["id"])
    reply = await waiting_call
    assert (reply.status, reply.data["result"]) == (200, {"paid": 8})


async def test_a_result_cannot_be_submitted_instead(shop: Shop) -> None:
    call_id = await shop.ask()
    for client in (shop.api, shop.approver):
        reply = await client.post(f"/api/calls/{call_id}/result", {"result": {"paid": 5}})
        assert reply.status == 403
    assert (await shop.api.post(f"/api/calls/{call_id}/result", {"result": {"confirmed": False}})).status == 403
    reply = await shop.approver.post(f"/api/calls/{call_id}/result", {"result": {"confirmed": False, "reason": "no"}})
    assert (reply.status, reply.data["errorKind"]) == (200, "not_permitted")
    assert (await shop.list_approvals(status="denied"))[0]["decisionReason"] == "no"
    assert shop.payments == []


async def test_a_changed_policy_or_tool_voids_the_approval(tmp_path: Path) -> None:
    async with open_shop(tmp_path) as shop:
        policy_call, tool_call = await shop.ask(1), await shop.ask(2)
        write_config(tmp_path, **shop_config(tmp_path, policies=[{**ASK[0], "approvers": ["operators", "ann"]}]))
        await shop.gateway.toolspace.reload()
        await shop.decide(policy_call)
        call = await shop.wait_for_call(policy_call)
        assert (call["errorKind"], shop.payments) == ("not_permitted", [])
        write_config(tmp_path, **shop_config(tmp_path))
        (tmp_path / "tools.py").write_text(TOOLS.replace('to: str = "shop"', 'to: str = "elsewhere"'))
        await shop.gateway.toolspace.reload()
        await shop.decide(tool_call)
        call = await shop.wait_for_call(tool_call)
        assert (call["errorKind"], shop.payments) == ("not_permitted", [])


async def test_a_call_that_is_cancelled_is_not_approved_any_more(shop: Shop) -> None:
    call_id = await shop.ask()
    assert (await shop.api.post(f"/api/calls/{call_id}/cancel")).status == 200
    assert (await shop.decide(call_id)).status == 409
    assert await shop.list_approvals() == []
    assert [item["status"] for item in await shop.list_approvals(status="all")] == ["canceled"]
    assert shop.payments == []


async def test_a_call_for_a_worker_is_offered_after_its_approval(shop: Shop) -> None:
    definition = {"name": "saw", "executionType": "external", "inputSchema": {"type": "object"}, "isAsync": True}
    policies = [{"tool": "saw", "decision": "ask"}]
    write_config(shop.folder, **shop_config(shop.folder, tools=[definition], policies=policies))
    await shop.gateway.toolspace.reload()
    reply = await shop.api.post("/api/tools/saw/call", {"args": {"length": 3}})
    call_id = reply.data["pendingToolCallId"]
    stream = await shop.api.session.get(
        f"{shop.api.url}/api/tools/stream?tools=saw", headers={**shop.api.headers, "accept": "text/event-stream"}
    )
    async with stream:
        assert (await shop.decide(call_id)).status == 200
        async for line in stream.content:
            if call_id.encode() in line:
                break
    reply = await shop.api.post(f"/api/calls/{call_id}/result", {"result": "sawn"})
    assert (reply.status, reply.data["status"]) == (200, "resolved")


# Agents


@asynccontextmanager
async def open_agents(folder: Path, *, agents: Any = None, **config: Any) -> AsyncGenerator[AgentGateway]:
    async with open_model_server() as model_server:
        settings = shop_config(folder, **config)
        agents = agents(model_server) if agents is not None else None
        async with open_agent_gateway(folder, model_server, agents=agents, **settings) as setup:
            yield setup


async def wait_for_approvals(setup: AgentGateway, count: int) -> list[Any]:
    async def read() -> Any:
        return (await setup.api.get("/api/approvals")).data["items"]

    items = await poll(read, lambda items: len(items) >= count)
    return sorted(items, key=lambda item: item["args"].get("amount", 0))


async def decide(setup: AgentGateway, approval: Any, decision: str, **more: Any) -> None:
    reply = await setup.api.post(f"/api/approvals/{approval['id']}", {"decision": decision, **more})
    assert reply.status == 200, reply


async def test_of_three_parallel_calls_one_is_denied_and_never_runs(tmp_path: Path) -> None:
    async with open_agents(tmp_path) as setup:
        calls = (("pay", {"amount": 1}), ("pay", {"amount": 2}), ("look", {}))
        setup.model_server.script(tool_calls_turn(*calls), "Done.")
        await setup.say("Pay both.")
        first, second = await wait_for_approvals(setup, 2)
        run = (await setup.list_runs())[0]
        events = await setup.wait_for_event(f"/api/runs/{run['id']}/events", "approval.requested")
        assert events[-1]["toolName"] == "pay"
        await poll(setup.list_runs, lambda runs: runs[0]["status"] == "waiting_tool")
        # Other calls of the turn go on.
        await poll(
            lambda: setup.list_calls(run),
            lambda calls: any(call["toolName"] == "look" and call["status"] == "completed" for call in calls),
        )
        await decide(setup, first, "deny", reason="too early")
        await decide(setup, second, "approve")
        run = await setup.wait_for_run_end()
        assert run["status"] == "completed"
        request = setup.model_server.list_requests()[1]
        assert list_result_texts(request) == [
            "(tool failed: Permission denied: too early)",
            '{"paid":2}',
            "seen",
        ]
        events = await setup.wait_for_event(f"/api/runs/{run['id']}/events", "run.done")
        decisions = [event["decision"] for event in events if "decidedBy" in event]
        assert decisions == ["denied", "approved"]
    assert read_payments(tmp_path) == [2]


@pytest.mark.spec("20.4")
async def test_the_person_for_whom_an_agent_works_may_approve_as_a_member(tmp_path: Path) -> None:
    policies = [{**ASK[0], "approvers": ["members"]}]
    async with open_agents(tmp_path, policies=policies) as setup:
        enter = tool_calls_turn(("enter_space", {"spaceId": ROOM}))
        setup.model_server.script(enter, tool_calls_turn(("pay", {"amount": 3})), "Done.")
        await setup.say("Pay.")
        [approval] = await wait_for_approvals(setup, 1)
        assert (approval["principal"], approval["agentEntityId"]) == (PERSON, entity_id_for("ada"))
        person = await setup.api.member(PERSON)
        space_events = await setup.wait_for_event(f"/api/spaces/{ROOM}/stream", "approval.requested")
        assert space_events[-1]["input"] == {"amount": 3}
        reply = await person.post(
            f"/api/spaces/{ROOM}/tool-results",
            {"runId": approval["runId"], "toolCallId": approval["id"], "result": {"confirmed": True}},
        )
        assert reply.status == 200
        await setup.wait_for_run_end()
    assert read_payments(tmp_path) == [3]


async def test_batches_subagents_and_tasks_ask_too(tmp_path: Path) -> None:
    def agents(model_server: Any) -> Any:
        return {
            "ada": agent_config(model_server, agents=["bob"], tools={"builtins": True}),
            "bob": agent_config(model_server, model={"name": "of-bob"}, spaces=[]),
        }

    async with open_agents(tmp_path, agents=agents) as setup:
        batch = {"calls": [{"id": "1", "tool": "pay", "parameters": {"amount": 1}}]}
        setup.model_server.script(
            tool_calls_turn(("agent__batch", batch), ("agent__bob", {"prompt": "Pay.", "reason": "why"})),
            tool_calls_turn(("spawn_task", {"description": "pay", "input": "Pay."})),
            tool_calls_turn(("pay", {"amount": 3})),
        )
        setup.model_server.script(tool_calls_turn(("pay", {"amount": 2})), "I paid.", model="of-bob")
        await setup.say("Pay in every way.")
        first, second = await wait_for_approvals(setup, 2)
        await decide(setup, first, "approve")
        await decide(setup, second, "deny", reason="no more")
        [third] = await wait_for_approvals(setup, 1)
        assert third["args"] == {"amount": 3}
        await decide(setup, third, "approve")

        async def list_texts() -> list[str]:
            return [text for request in setup.model_server.list_requests() for text in list_result_texts(request)]

        texts = await poll(list_texts, lambda texts: '{"paid":3}' in texts)
        assert any('"paid":1' in text for text in texts)
        assert "no more" in list_result_texts(setup.model_server.list_requests("of-bob")[1])[0]
    assert sorted(read_payments(tmp_path)) == [1, 3]


async def test_a_run_continues_after_a_restart(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        settings = shop_config(tmp_path, storage={"dir": str(tmp_path / "state")})
        model_server.script(tool_calls_turn(("pay", {"amount": 4})), "Done.")
        async with open_agent_gateway(tmp_path, model_server, **settings) as setup:
            await setup.say("Pay.")
            [approval] = await wait_for_approvals(setup, 1)
            await poll(setup.list_runs, lambda runs: runs[0]["status"] == "waiting_tool")
        agents = {"ada": agent_config(model_server)}
        path = write_config(tmp_path, **{**settings, "agents": agents})
        async with Gateway.open(path, environ={}) as gateway, open_api(gateway) as api:
            next_setup = AgentGateway(gateway, api, model_server, write_config)
            [listed_approval] = await wait_for_approvals(next_setup, 1)
            assert listed_approval["id"] == approval["id"]
            await decide(next_setup, listed_approval, "approve")
            run = await next_setup.wait_for_run_end()
            assert run["status"] == "completed"
        assert list_result_texts(model_server.list_requests()[1]) == ['{"paid":4}']
    assert read_payments(tmp_path) == [4]


async def test_a_cancelled_run_takes_its_questions_with_it(tmp_path: Path) -> None:
    async with open_agents(tmp_path) as setup:
        setup.model_server.script(tool_calls_turn(("pay", {"amount": 4})))
        await setup.say("Pay.")
        [approval] = await wait_for_approvals(setup, 1)
        assert (await setup.api.post(f"/api/runs/{approval['runId']}/cancel")).status == 200
        assert (await setup.api.get("/api/approvals")).data["items"] == []
        reply = await setup.api.post(f"/api/approvals/{approval['id']}", {"decision": "approve"})
        assert reply.status == 409
    assert read_payments(tmp_path) == []


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_call_whose_process_is_killed_after_the_approval_is_not_repeated(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    storage = {"dir": str(tmp_path / "state")}
    if kind == "postgres":
        storage["url"] = request.getfixturevalue("postgres_url")
    config = shop_config(tmp_path, storage=storage)
    hanging_tool = TOOLS.replace("    return {", "    import time; time.sleep(600)\n    return {")
    (tmp_path / "tools.py").write_text(hanging_tool)
    path = write_config(tmp_path, **config)
    async with start_gateway_process(tmp_path, path) as process, open_process_api(process) as api:
        key = await api.create("/api/keys", kind="secret", name="approver")
        reply = await api.post("/api/tools/pay/call", {"args": {"amount": 5}})
        executing_id = reply.data["pendingToolCallId"]
        reply = await api.post("/api/tools/pay/call", {"args": {"amount": 6}})
        waiting_id = reply.data["pendingToolCallId"]
        approver = api.with_headers(x_secret_key=key["key"])
        assert (await approver.post(f"/api/approvals/{executing_id}", {"decision": "approve"})).status == 200
        await poll(lambda: asyncio.to_thread(read_payments, tmp_path), bool)
        await process.kill()
    (tmp_path / "tools.py").write_text(TOOLS)
    async with start_gateway_process(tmp_path, path) as process, open_process_api(process) as api:
        approver = api.with_headers(x_secret_key=key["key"])

        async def read(call_id: str) -> Any:
            return (await api.get(f"/api/calls/{call_id}")).data

        call = await poll(lambda: read(executing_id), lambda call: call["status"] == "resolved")
        assert (call["isError"], call["errorKind"]) == (True, "internal_error")
        assert "interrupted" in call["result"]
        assert (await approver.post(f"/api/approvals/{executing_id}", {"decision": "approve"})).status == 409
        assert read_payments(tmp_path) == [5]
        assert (await approver.post(f"/api/approvals/{waiting_id}", {"decision": "approve"})).status == 200
        call = await poll(lambda: read(waiting_id), lambda call: call["status"] == "resolved")
        assert call["result"] == {"paid": 6}
    assert read_payments(tmp_path) == [5, 6]


async def test_an_approved_call_belongs_to_the_session_that_made_it(tmp_path: Path) -> None:
    def agents(model_server: Any) -> Any:
        return {"ada": agent_config(model_server, session="user")}

    policies = [{"tool": "set_memories", "decision": "ask"}]
    async with open_agents(tmp_path, agents=agents, policies=policies) as setup:
        setup.model_server.script(
            tool_calls_turn(("set_memories", {"memories": [{"key": "name", "value": "Husam"}]})), "Done."
        )
        await setup.say("Remember me.")
        [approval] = await wait_for_approvals(setup, 1)
        await decide(setup, approval, "approve")
        await setup.wait_for_run_end()
        ada = entity_id_for("ada")
        memories = (await setup.api.get(f"/api/agents/{ada}/memories")).data["items"]
        assert [memory["sessionId"] for memory in memories] == [f"{ada}/user:{PERSON}"]


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_call_that_is_approved_late_reports_its_progress_on_the_stream_of_its_run(
    tmp_path: Path, is_restarted: bool
) -> None:
    """Its run has paused; with a restart, another process executes it."""
    async with open_model_server() as model_server:
        settings = shop_config(tmp_path, policies=[{"tool": "ship", "decision": "ask"}])
        agents = {"ada": agent_config(model_server)}
        model_server.script(tool_calls_turn(("ship", {"parcels": 2})), "Done.")
        async with open_agent_gateway(tmp_path, model_server, agents=agents, **settings) as setup:
            await setup.say("Ship them.")
            [approval] = await wait_for_approvals(setup, 1)
            if not is_restarted:
                await _approve_and_check_progress(setup, approval, tmp_path)
        if is_restarted:
            path = write_config(tmp_path, **{**settings, "agents": agents})
            async with Gateway.open(path, environ={}) as gateway, open_api(gateway) as api:
                next_setup = AgentGateway(gateway, api, model_server, write_config)
                await _approve_and_check_progress(next_setup, approval, tmp_path)


async def _approve_and_check_progress(setup: Any, approval: Any, folder: Path) -> None:
    await decide(setup, approval, "approve")
    run = await setup.wait_for_run_end()
    body = (await setup.api.get(f"/api/runs/{run['id']}/events?from=start&until=run.done")).body.decode()
    events = [
        (frame.partition("event: ")[2].partition("\n")[0], msgspec.json.decode(frame.partition("data: ")[2]))
        for frame in body.split("\n\n")
        if "\ndata: " in frame
    ]
    own_events = [(type, data) for type, data in events if data.get("toolCallId") == approval["id"]]
    position = [type for type, _ in own_events].index("approval.decided")
    later_types = [type for type, _ in own_events[position + 1 :]]
    assert later_types[-1] == "tool.done"
    assert {"tool.progress", "tool.streaming"} == set(later_types[:-1])
    outputs = [data["output"] for type, data in own_events if "preliminary" in data]
    assert "".join(outputs) == "shipped 1 shipped 2 "
    assert (folder / "effects.txt").read_text() == f"{run['id']} session-{entity_id_for('ada')}"
    assert "shipped 1 shipped 2 " in list_result_texts(setup.model_server.list_requests()[1])[0]


async def test_streams_of_other_formats_have_the_approval(tmp_path: Path) -> None:
    async with open_agents(tmp_path) as setup:
        setup.model_server.script(tool_calls_turn(("pay", {"amount": 1}), ("pay", {"amount": 2})), "Done.")
        await setup.say("Pay both.")
        first, second = await wait_for_approvals(setup, 2)
        await decide(setup, first, "deny")
        await decide(setup, second, "approve")
        run = await setup.wait_for_run_end()
        path = f"/api/runs/{run['id']}/events?from=start&until=run.done"
        body = (await setup.api.get(f"{path}&format=ui-message-stream")).body
        frames = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
        parts = [msgspec.json.decode(frame) for frame in frames]
        types_by_call: dict[str, list[str]] = {first["id"]: [], second["id"]: []}
        for part in parts:
            call_id = part.get("toolCallId") or part.get("approvalId")
            if call_id in types_by_call and "input" not in part["type"]:
                types_by_call[call_id].append(part["type"])
        assert types_by_call[first["id"]] == [
            "tool-approval-request",
            "tool-approval-response",
            "tool-output-denied",
        ]
        assert types_by_call[second["id"]] == [
            "tool-approval-request",
            "tool-approval-response",
            "tool-output-available",
        ]
        ag_ui = (await setup.api.get(f"{path}&format=ag-ui")).body
        assert b'"name":"approval.requested"' in ag_ui
