"""What an agent does under one call id it does once, however often it is tried and whoever else tries too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace import ToolContext, ToolResult
from toolspace.agents.prebuilt.provider import ALL_ACTIONS, PrebuiltProvider
from toolspace.core.ids import now_ms
from toolspace.core.records import space_stream
from toolspace.spaces import messaging, plans
from toolspace.storage.database import Database
from toolspace.storage.queries import entities, goals_and_memories, idempotency, inbox
from toolspace.storage.queries import plans as plan_rows

pytestmark = [pytest.mark.spec("11.6")]


class Again:
    """Makes calls of a run under ids of one's own, as one does who takes over from a process that was killed."""

    def __init__(self, r: ServiceHarness, run_id: str) -> None:
        self.r = r
        self.run_id = run_id

    async def result(self, call_id: str, name: str, **args: Any) -> ToolResult:
        room, _ = await self.r.open_host(self.run_id)
        context = ToolContext(agent_entity_id=self.r.agent, space_id=room.space_id, host=room)
        return await self.r.ts.call(name, args, context=context, call_id=call_id)

    async def __call__(self, call_id: str, name: str, **args: Any) -> Any:
        return (await self.result(call_id, name, **args)).unwrap()

    async def twice_at_once(self, call_id: str, name: str, **args: Any) -> Any:
        """The answer that all of several got who did the same at one time."""
        first, *others = await asyncio.gather(*(self(call_id, name, **args) for _ in range(4)))
        for other in others:
            assert other == first
        return first


@pytest.fixture
async def r(database: Database) -> AsyncIterator[ServiceHarness]:
    async with service_harness(database) as made:
        made.ts.orchestrator.register(PrebuiltProvider())
        yield made


@pytest.fixture
async def act(r: ServiceHarness) -> Again:
    return Again(r, await r.open_run(in_space=True))


@pytest.mark.spec("9.1")
async def test_a_message_is_said_once(r: ServiceHarness, act: Again) -> None:
    await r.ledger.write(entities.create_entity, "bob", "agent", "Bob", {})
    await r.ledger.write(entities.add_member, r.space, "bob")
    said = await act.twice_at_once("call_1", "send_message", text="On it.")
    assert said == {"success": True, "messageId": messaging.message_id_for_call("call_1"), "status": "delivered"}
    assert await act("call_1", "send_message", text="On it.") == said
    assert [message.content for message in await r.messages()] == ["On it."]
    assert [event.event_id for event in await r.ledger.read(inbox.list_events, "bob")] == [
        f"space_message:{said['messageId']}"
    ]
    told = [event.type for event in await r.events(space_stream(r.space)) if event.type.startswith("message.")]
    assert told == ["message.started", "message.done"]
    (one,) = await r.messages()
    assert one.seq == 1  # No number was used up by those who came late.


@pytest.mark.spec("9.1")
async def test_a_message_that_was_said_is_said_also_for_one_who_has_left_since(r: ServiceHarness, act: Again) -> None:
    said = await act("call_1", "send_message", text="Bye.")
    left = await act("call_2", "leave_space")
    assert left == {"success": True, "spaceId": r.space}
    assert await act("call_1", "send_message", text="Bye.") == said
    await r.ledger.write(entities.remove_member, r.space, r.agent)
    assert await act("call_1", "send_message", text="Bye.") == said
    assert await act("call_2", "leave_space") == left
    assert len(await r.messages()) == 1


@pytest.mark.spec("9.1")
async def test_an_id_that_is_another_senders_is_refused(r: ServiceHarness, act: Again) -> None:
    taken = messaging.message_id_for_call("call_1")
    await r.ledger.commit(messaging.send_message, r.space, r.person, "Mine", message_id=taken)
    result = await act.result("call_1", "send_message", text="Mine!")
    assert "already" in (result.error or "")
    assert [message.content for message in await r.messages()] == ["Mine"]


@pytest.mark.spec("9.1")
async def test_a_run_moves_once_and_not_again_after_it_went_on(r: ServiceHarness, act: Again) -> None:
    await r.ledger.write(entities.create_space, "den", "Den", {})
    await r.ledger.write(entities.add_member, "den", r.agent)
    await act.twice_at_once("call_1", "enter_space", spaceId="den")
    assert await act("call_2", "leave_space") == {"success": True, "spaceId": "den"}
    entered = await act("call_1", "enter_space", spaceId="den")
    assert entered["spaceName"] == "Den"
    room, _ = await r.open_host(act.run_id)
    assert room.space_id is None
    told = [event.type for event in await r.events(space_stream("den"))]
    assert told == ["run.started", "run.done"]


@pytest.mark.spec("9.3")
async def test_goals_are_made_once(r: ServiceHarness, act: Again) -> None:
    made = await act.twice_at_once("call_1", "set_goals", goals=[{"description": "a"}, {"description": "b"}])
    assert made["totalGoals"] == 2
    assert len(await r.ledger.read(goals_and_memories.list_goals, r.agent)) == 2
    await act("call_2", "delete_goals", goalIds=[made["currentGoals"][0]["id"]])
    cleared = await act.twice_at_once("call_3", "set_goals", goals=[{"description": "c"}], clearExisting=True)
    assert await act("call_1", "set_goals", goals=[{"description": "a"}, {"description": "b"}]) == made
    assert [goal.id for goal in await r.ledger.read(goals_and_memories.list_goals, r.agent)] == [
        cleared["currentGoals"][0]["id"]
    ]


@pytest.mark.spec("9.3")
@pytest.mark.spec("9.2")
@pytest.mark.spec("9.4")
async def test_what_was_deleted_is_deleted_once(r: ServiceHarness, act: Again) -> None:
    await act("call_0", "set_memories", memories=[{"key": "a", "value": 1}])
    goals = await act("call_1", "set_goals", goals=[{"description": "a"}])
    made = await act("call_2", "set_plans", plans=[{"name": "a", "instruction": "a", "runAfter": "1 hour"}])
    for call_id, name, what in (
        ("call_3", "delete_memories", {"keys": ["a"]}),
        ("call_4", "delete_goals", {"goalIds": [goals["currentGoals"][0]["id"]]}),
        ("call_5", "delete_plans", {"planIds": [made["plans"][0]["id"]]}),
    ):
        assert await act.twice_at_once(call_id, name, **what) == {"success": True, "deleted": 1}
    await act("call_6", "set_memories", memories=[{"key": "a", "value": 2}])
    assert await act("call_3", "delete_memories", keys=["a"]) == {"success": True, "deleted": 1}
    assert [memory.value for memory in await r.ledger.read(goals_and_memories.list_memories, r.agent)] == [2]


@pytest.mark.spec("9.2")
async def test_a_memory_that_was_changed_since_is_not_set_back(r: ServiceHarness, act: Again) -> None:
    await act.twice_at_once("call_1", "set_memories", memories=[{"key": "a", "value": 1}])
    await act("call_2", "set_memories", memories=[{"key": "a", "value": 2}])
    assert await act("call_1", "set_memories", memories=[{"key": "a", "value": 1}]) == {"success": True, "count": 1}
    assert [memory.value for memory in await r.ledger.read(goals_and_memories.list_memories, r.agent)] == [2]


@pytest.mark.spec("9.4")
async def test_plans_are_made_once_and_one_that_fired_does_not_fire_again(r: ServiceHarness, act: Again) -> None:
    wanted = [{"name": "Rest", "instruction": "Rest", "runAfter": "1 hour"}]
    made = await act.twice_at_once("call_1", "set_plans", plans=wanted)
    (plan,) = await r.ledger.read(plan_rows.list_plans, r.agent)
    assert plan.id == made["plans"][0]["id"]
    changed = [{**wanted[0], "id": plan.id, "runAfter": "2 hours"}]
    answer = await act("call_2", "set_plans", plans=changed)
    (plan,) = await r.ledger.read(plan_rows.list_plans, r.agent)
    assert await r.ledger.commit(plans.fire, plan)
    assert await act("call_2", "set_plans", plans=changed) == answer
    assert await act("call_1", "set_plans", plans=wanted) == made
    assert [one.status for one in await r.ledger.read(plan_rows.list_plans, r.agent)] == ["completed"]


@pytest.mark.spec("9.1")
async def test_the_same_events_are_taken_again_and_no_others(r: ServiceHarness, act: Again) -> None:
    for n in range(5):
        await r.ledger.commit(messaging.send_message, r.space, r.person, f"message {n}")
    taken = await act.twice_at_once("call_1", "peek_inbox", count=2)
    assert [event["data"]["content"] for event in taken["events"]] == ["message 0", "message 1"]
    assert taken["remaining"] == 3
    await act("call_2", "peek_inbox")
    assert await act("call_1", "peek_inbox", count=2) == taken
    assert await r.ledger.read(inbox.count_pending, r.agent) == 2


@pytest.mark.spec("9.5")
async def test_metadata_that_others_changed_since_is_left_alone(r: ServiceHarness, act: Again) -> None:
    changed = await act.twice_at_once("call_1", "update_space_metadata", metadata={"a": 1})
    await act("call_2", "update_space_metadata", metadata={"a": None, "b": 2})
    await act("call_3", "leave_space")
    assert await act("call_1", "update_space_metadata", metadata={"a": 1}) == changed
    context = await act("call_4", "get_space_context", spaceId=r.space)
    assert context["metadata"] == {"b": 2}


async def test_a_call_that_failed_leaves_no_receipt(r: ServiceHarness, act: Again) -> None:
    wrong = await act.result("call_1", "delete_goals", goalIds=["goal_none"])
    assert "not a goal" in (wrong.error or "")
    made = await act("call_1", "set_goals", goals=[{"description": "a"}])
    assert made["totalGoals"] == 1


async def test_another_agents_call_of_the_same_id_is_another_call(r: ServiceHarness, act: Again) -> None:
    await act("call_1", "set_memories", memories=[{"key": "a", "value": 1}])
    await r.ledger.write(entities.create_entity, "bob", "agent", "Bob", {})
    program = idempotency.run_once("bob", "call_1", goals_and_memories.set_memories("bob", [("a", 2)]))
    assert await r.ledger.write(lambda: program) == 1
    assert [memory.value for memory in await r.ledger.read(goals_and_memories.list_memories, "bob")] == [2]


async def test_receipts_are_forgotten_with_what_is_old_and_with_their_agent(r: ServiceHarness, act: Again) -> None:
    await act("call_1", "set_memories", memories=[{"key": "a", "value": 1}])
    assert await r.ledger.write(idempotency.delete_old_receipts, now_ms() - 60_000, 100) == 0
    assert await r.ledger.write(idempotency.delete_old_receipts, now_ms() + 1, 100) == 1
    await act("call_1", "set_memories", memories=[{"key": "a", "value": 3}])
    await r.ledger.write(entities.delete_entity, r.agent)
    assert await r.ledger.write(idempotency.delete_old_receipts, now_ms() + 1, 100) == 0


def test_every_action_says_whether_it_may_be_tried_again() -> None:
    careful = {name for name, action in ALL_ACTIONS.items() if not _may_repeat(action.annotations)}
    assert careful <= {"send_notification"}


def _may_repeat(annotations: Any) -> bool:
    return bool(annotations.read_only or annotations.idempotent)
