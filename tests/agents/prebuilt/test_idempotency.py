"""A prebuilt call has its effect once, however often it is repeated under its id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace import ToolContext, ToolResult
from toolspace.agents.prebuilt.provider import ALL_ACTIONS, PrebuiltProvider
from toolspace.core.stored_records import space_stream
from toolspace.spaces import messaging, plans
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces, goals_and_memories, idempotency, inbox
from toolspace.storage.queries import plans as plan_rows

pytestmark = [pytest.mark.spec("11.6")]


class RepeatedCalls:
    """Makes calls of a run under given ids, as a process does that takes over from a killed one."""

    def __init__(self, harness: ServiceHarness, run_id: str) -> None:
        self.harness = harness
        self.run_id = run_id

    async def result(self, call_id: str, name: str, **args: Any) -> ToolResult:
        room, _ = await self.harness.open_host(self.run_id)
        context = ToolContext(agent_entity_id=self.harness.agent, space_id=room.space_id, host=room)
        return await self.harness.ts.call(name, args, context=context, call_id=call_id)

    async def __call__(self, call_id: str, name: str, **args: Any) -> Any:
        return (await self.result(call_id, name, **args)).unwrap()

    async def call_in_parallel(self, call_id: str, name: str, **args: Any) -> Any:
        """The answer that all of several got who did the same at one time."""
        first, *repeated_results = await asyncio.gather(*(self(call_id, name, **args) for _ in range(4)))
        for result in repeated_results:
            assert result == first
        return first


@pytest.fixture
async def harness(database: Database) -> AsyncIterator[ServiceHarness]:
    async with service_harness(database) as open_harness:
        open_harness.ts.orchestrator.register(PrebuiltProvider())
        yield open_harness


@pytest.fixture
async def act(harness: ServiceHarness) -> RepeatedCalls:
    return RepeatedCalls(harness, await harness.open_run(in_space=True))


@pytest.mark.spec("9.1")
async def test_a_repeated_send_message_sends_once(harness: ServiceHarness, act: RepeatedCalls) -> None:
    await harness.ledger.write(entities_and_spaces.create_entity, "bob", "agent", "Bob", {})
    await harness.ledger.write(entities_and_spaces.add_member, harness.space, "bob")
    result = await act.call_in_parallel("call_1", "send_message", text="On it.")
    assert result == {"success": True, "messageId": messaging.message_id_for_call("call_1"), "status": "delivered"}
    assert await act("call_1", "send_message", text="On it.") == result
    assert [message.content for message in await harness.messages()] == ["On it."]
    assert [event.event_id for event in await harness.ledger.read(inbox.list_events, "bob")] == [
        f"space_message:{result['messageId']}"
    ]
    types = [
        event.type for event in await harness.events(space_stream(harness.space)) if event.type.startswith("message.")
    ]
    assert types == ["message.started", "message.done"]
    (message,) = await harness.messages()
    assert message.seq == 1  # No number was used up by those who came late.


@pytest.mark.spec("9.1")
async def test_a_repeated_send_message_returns_its_result_after_leaving_the_space(
    harness: ServiceHarness, act: RepeatedCalls
) -> None:
    message_result = await act("call_1", "send_message", text="Bye.")
    leave_result = await act("call_2", "leave_space")
    assert leave_result == {"success": True, "spaceId": harness.space}
    assert await act("call_1", "send_message", text="Bye.") == message_result
    await harness.ledger.write(entities_and_spaces.remove_member, harness.space, harness.agent)
    assert await act("call_1", "send_message", text="Bye.") == message_result
    assert await act("call_2", "leave_space") == leave_result
    assert len(await harness.messages()) == 1


@pytest.mark.spec("9.1")
async def test_a_message_id_of_another_sender_is_rejected(harness: ServiceHarness, act: RepeatedCalls) -> None:
    message_id = messaging.message_id_for_call("call_1")
    await harness.ledger.commit(messaging.send_message, harness.space, harness.person, "Mine", message_id=message_id)
    result = await act.result("call_1", "send_message", text="Mine!")
    assert "already" in (result.error or "")
    assert [message.content for message in await harness.messages()] == ["Mine"]


@pytest.mark.spec("9.1")
async def test_a_repeated_enter_space_does_not_move_the_run_back(harness: ServiceHarness, act: RepeatedCalls) -> None:
    await harness.ledger.write(entities_and_spaces.create_space, "den", "Den", {})
    await harness.ledger.write(entities_and_spaces.add_member, "den", harness.agent)
    await act.call_in_parallel("call_1", "enter_space", spaceId="den")
    assert await act("call_2", "leave_space") == {"success": True, "spaceId": "den"}
    entry = await act("call_1", "enter_space", spaceId="den")
    assert entry["spaceName"] == "Den"
    room, _ = await harness.open_host(act.run_id)
    assert room.space_id is None
    types = [event.type for event in await harness.events(space_stream("den"))]
    assert types == ["run.started", "run.done"]


@pytest.mark.spec("9.3")
async def test_a_repeated_set_goals_creates_goals_once(harness: ServiceHarness, act: RepeatedCalls) -> None:
    result = await act.call_in_parallel("call_1", "set_goals", goals=[{"description": "a"}, {"description": "b"}])
    assert result["totalGoals"] == 2
    assert len(await harness.ledger.read(goals_and_memories.list_goals, harness.agent)) == 2
    await act("call_2", "delete_goals", goalIds=[result["currentGoals"][0]["id"]])
    clear_result = await act.call_in_parallel("call_3", "set_goals", goals=[{"description": "c"}], clearExisting=True)
    assert await act("call_1", "set_goals", goals=[{"description": "a"}, {"description": "b"}]) == result
    assert [goal.id for goal in await harness.ledger.read(goals_and_memories.list_goals, harness.agent)] == [
        clear_result["currentGoals"][0]["id"]
    ]


@pytest.mark.spec("9.3")
@pytest.mark.spec("9.2")
@pytest.mark.spec("9.4")
async def test_a_repeated_delete_returns_the_same_count(harness: ServiceHarness, act: RepeatedCalls) -> None:
    await act("call_0", "set_memories", memories=[{"key": "a", "value": 1}])
    goals = await act("call_1", "set_goals", goals=[{"description": "a"}])
    result = await act("call_2", "set_plans", plans=[{"name": "a", "instruction": "a", "runAfter": "1 hour"}])
    for call_id, name, arguments in (
        ("call_3", "delete_memories", {"keys": ["a"]}),
        ("call_4", "delete_goals", {"goalIds": [goals["currentGoals"][0]["id"]]}),
        ("call_5", "delete_plans", {"planIds": [result["plans"][0]["id"]]}),
    ):
        assert await act.call_in_parallel(call_id, name, **arguments) == {"success": True, "deleted": 1}
    await act("call_6", "set_memories", memories=[{"key": "a", "value": 2}])
    assert await act("call_3", "delete_memories", keys=["a"]) == {"success": True, "deleted": 1}
    assert [memory.value for memory in await harness.ledger.read(goals_and_memories.list_memories, harness.agent)] == [
        2
    ]


@pytest.mark.spec("9.2")
async def test_a_repeated_set_memories_does_not_overwrite_newer_values(
    harness: ServiceHarness, act: RepeatedCalls
) -> None:
    await act.call_in_parallel("call_1", "set_memories", memories=[{"key": "a", "value": 1}])
    await act("call_2", "set_memories", memories=[{"key": "a", "value": 2}])
    assert await act("call_1", "set_memories", memories=[{"key": "a", "value": 1}]) == {"success": True, "count": 1}
    assert [memory.value for memory in await harness.ledger.read(goals_and_memories.list_memories, harness.agent)] == [
        2
    ]


@pytest.mark.spec("9.4")
async def test_a_repeated_set_plans_creates_plans_once_and_restarts_none(
    harness: ServiceHarness, act: RepeatedCalls
) -> None:
    new_plans = [{"name": "Rest", "instruction": "Rest", "runAfter": "1 hour"}]
    result = await act.call_in_parallel("call_1", "set_plans", plans=new_plans)
    (plan,) = await harness.ledger.read(plan_rows.list_plans, harness.agent)
    assert plan.id == result["plans"][0]["id"]
    change = [{**new_plans[0], "id": plan.id, "runAfter": "2 hours"}]
    answer = await act("call_2", "set_plans", plans=change)
    (plan,) = await harness.ledger.read(plan_rows.list_plans, harness.agent)
    assert await harness.ledger.commit(plans.fire, plan)
    assert await act("call_2", "set_plans", plans=change) == answer
    assert await act("call_1", "set_plans", plans=new_plans) == result
    assert [plan.status for plan in await harness.ledger.read(plan_rows.list_plans, harness.agent)] == ["completed"]


@pytest.mark.spec("9.1")
async def test_a_repeated_peek_inbox_returns_the_same_events(harness: ServiceHarness, act: RepeatedCalls) -> None:
    for n in range(5):
        await harness.ledger.commit(messaging.send_message, harness.space, harness.person, f"message {n}")
    result = await act.call_in_parallel("call_1", "peek_inbox", count=2)
    assert [event["data"]["content"] for event in result["events"]] == ["message 0", "message 1"]
    assert result["remaining"] == 3
    await act("call_2", "peek_inbox")
    assert await act("call_1", "peek_inbox", count=2) == result
    assert await harness.ledger.read(inbox.count_pending, harness.agent) == 2


@pytest.mark.spec("9.5")
async def test_a_repeated_metadata_update_does_not_undo_newer_changes(
    harness: ServiceHarness, act: RepeatedCalls
) -> None:
    change = await act.call_in_parallel("call_1", "update_space_metadata", metadata={"a": 1})
    await act("call_2", "update_space_metadata", metadata={"a": None, "b": 2})
    await act("call_3", "leave_space")
    assert await act("call_1", "update_space_metadata", metadata={"a": 1}) == change
    context = await act("call_4", "get_space_context", spaceId=harness.space)
    assert context["metadata"] == {"b": 2}


async def test_a_failed_call_can_be_repeated(harness: ServiceHarness, act: RepeatedCalls) -> None:
    wrong = await act.result("call_1", "delete_goals", goalIds=["goal_none"])
    assert "not a goal" in (wrong.error or "")
    result = await act("call_1", "set_goals", goals=[{"description": "a"}])
    assert result["totalGoals"] == 1


async def test_call_ids_of_different_agents_are_independent(harness: ServiceHarness, act: RepeatedCalls) -> None:
    await act("call_1", "set_memories", memories=[{"key": "a", "value": 1}])
    await harness.ledger.write(entities_and_spaces.create_entity, "bob", "agent", "Bob", {})
    program = idempotency.run_once("bob", "call_1", goals_and_memories.set_memories("bob", [("a", 2)]))
    assert await harness.ledger.write(lambda: program) == 1
    assert [memory.value for memory in await harness.ledger.read(goals_and_memories.list_memories, "bob")] == [2]


async def test_stored_call_results_are_deleted_with_age_and_with_their_agent(
    harness: ServiceHarness, act: RepeatedCalls
) -> None:
    await act("call_1", "set_memories", memories=[{"key": "a", "value": 1}])
    assert await harness.ledger.write(idempotency.delete_old_receipts, harness.ledger.now_ms() - 60_000, 100) == 0
    assert await harness.ledger.write(idempotency.delete_old_receipts, harness.ledger.now_ms() + 1, 100) == 1
    await act("call_1", "set_memories", memories=[{"key": "a", "value": 3}])
    await harness.ledger.write(entities_and_spaces.delete_entity, harness.agent)
    assert await harness.ledger.write(idempotency.delete_old_receipts, harness.ledger.now_ms() + 1, 100) == 0


def test_every_action_declares_whether_it_is_idempotent() -> None:
    careful = {name for name, action in ALL_ACTIONS.items() if not _may_repeat(action.annotations)}
    assert careful <= {"send_notification"}


def _may_repeat(annotations: Any) -> bool:
    return bool(annotations.read_only or annotations.idempotent)
