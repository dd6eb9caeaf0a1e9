"""The prebuilt actions, in real runs on both databases."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace import ToolContext, ToolResult, Toolspace
from toolspace.agents.prebuilt.provider import ALL_ACTIONS, PrebuiltProvider
from toolspace.core.stored_records import run_stream, space_stream
from toolspace.spaces import messaging
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces, inbox

ISO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z")


@pytest.fixture
async def harness(database: Database) -> AsyncIterator[ServiceHarness]:
    async with service_harness(database) as open_harness:
        open_harness.ts.orchestrator.register(PrebuiltProvider())
        yield open_harness


class RunningAgent:
    """An agent in a run."""

    def __init__(self, harness: ServiceHarness, run_id: str) -> None:
        self.harness = harness
        self.run_id = run_id

    async def result(self, name: str, **args: Any) -> ToolResult:
        return await self.harness.call(self.run_id, name, args)

    async def __call__(self, name: str, **args: Any) -> Any:
        return (await self.result(name, **args)).unwrap()

    async def failure(self, name: str, **args: Any) -> tuple[str | None, str]:
        result = await self.result(name, **args)
        return result.error_kind, result.error or ""


@pytest.fixture
async def act(harness: ServiceHarness) -> RunningAgent:
    return RunningAgent(harness, await harness.open_run())


async def send(harness: ServiceHarness, text: str, sender: str | None = None) -> Any:
    return await harness.ledger.commit(messaging.send_message, harness.space, sender or harness.person, text)


async def create_other_space(harness: ServiceHarness) -> str:
    """Creates a space of which the agent is not a member."""
    await harness.ledger.write(entities_and_spaces.create_space, "spc_other", "Secret room", {"plan": "hidden"})
    await harness.ledger.write(entities_and_spaces.add_member, "spc_other", harness.person)
    return "spc_other"


@pytest.mark.spec("9.1")
@pytest.mark.spec("12.2")
async def test_enter_space_returns_the_history_and_sets_the_active_space(
    harness: ServiceHarness, act: RunningAgent
) -> None:
    for n in range(4):
        await send(harness, f"message {n}")
    entry = await act("enter_space", spaceId=harness.space, limit=3)
    assert {key: entry[key] for key in ("success", "spaceId", "spaceName", "totalMessages")} == {
        "success": True,
        "spaceId": harness.space,
        "spaceName": "Room",
        "totalMessages": 4,
    }
    assert [message["content"] for message in entry["history"]] == ["message 1", "message 2", "message 3"]
    first = entry["history"][0]
    assert (first["senderName"], first["senderType"], first["senderId"]) == ("Husam", "human", harness.person)
    assert ISO_TIME.fullmatch(first["timestamp"])
    record, _ = await harness.open_runs.enter(act.run_id)
    assert record.space_id == harness.space
    assert await act("leave_space") == {"success": True, "spaceId": harness.space}
    record, _ = await harness.open_runs.enter(act.run_id)
    assert record.space_id is None


@pytest.mark.spec("7.5")
async def test_entering_and_leaving_publishes_run_events_in_the_space(
    harness: ServiceHarness, act: RunningAgent
) -> None:
    await act("enter_space", spaceId=harness.space)
    await act("enter_space", spaceId=harness.space)  # It is there already.
    await act("leave_space")
    await act("leave_space")
    events = [event for event in await harness.events(space_stream(harness.space)) if event.type.startswith("run.")]
    assert [event.type for event in events] == ["run.started", "run.done"]
    assert events[0].data == {"runId": act.run_id, "agentEntityId": harness.agent, "spaceId": harness.space}
    assert events[1].data == {**events[0].data, "status": "running"}
    run_event_types = [
        event.type for event in await harness.events(run_stream(act.run_id)) if event.type.startswith("run.")
    ]
    assert run_event_types == ["run.started"]


@pytest.mark.spec("9.1")
async def test_only_members_can_enter_and_read_a_space(harness: ServiceHarness, act: RunningAgent) -> None:
    other_space = await create_other_space(harness)
    for name in ("enter_space", "read_messages", "get_space_context"):
        kind, error = await act.failure(name, spaceId=other_space)
        assert kind in ("not_permitted", "execution_error"), name
        assert "not a member" in error, name
        assert "hidden" not in error, name
        _, error = await act.failure(name, spaceId="spc_nowhere")
        assert error == 'there is no space "spc_nowhere"', name
    _, error = await act.failure("update_space_metadata", spaceId=other_space, metadata={"plan": "mine"})
    assert "not a member" in error
    record, _ = await harness.open_runs.enter(act.run_id)
    assert record.space_id is None


@pytest.mark.spec("9.1")
@pytest.mark.spec("7.2")
async def test_send_message_stores_streams_and_delivers_the_message(harness: ServiceHarness, act: RunningAgent) -> None:
    await harness.ledger.write(entities_and_spaces.create_entity, "bob", "agent", "Bob", {})
    await harness.ledger.write(entities_and_spaces.add_member, harness.space, "bob")
    await act("enter_space", spaceId=harness.space)
    receipt = await act("send_message", text="On it.")
    assert receipt == {"success": True, "messageId": receipt["messageId"], "status": "delivered"}
    (message,) = await harness.messages()
    assert (message.id, message.content, message.sender_id, message.run_id) == (
        receipt["messageId"],
        "On it.",
        harness.agent,
        act.run_id,
    )
    events = [event for event in await harness.events(space_stream(harness.space)) if event.type.startswith("message.")]
    assert events[0].type == "message.started"
    assert events[-1].type == "message.done"
    assert events[-1].data["message"]["content"] == "On it."
    assert await harness.inbox() == []
    (event,) = await harness.ledger.read(inbox.list_events, "bob")
    assert (event.type, event.data["content"], event.data["senderName"]) == ("space_message", "On it.", "Ada")


@pytest.mark.spec("9.1")
async def test_send_message_needs_an_active_space_and_a_text(harness: ServiceHarness, act: RunningAgent) -> None:
    assert await act.failure("send_message", text="hi") == (
        "execution_error",
        "you are not in a space; call enter_space first",
    )
    await act("enter_space", spaceId=harness.space)
    for text in ("", "a\0b", "x" * 100_001):
        kind, _ = await act.failure("send_message", text=text)
        assert kind == "invalid_parameters"
    await harness.ledger.write(entities_and_spaces.remove_member, harness.space, harness.agent)
    kind, error = await act.failure("send_message", text="hi")
    assert kind == "not_permitted"
    assert "is not a member" in error
    assert await harness.messages() == []


@pytest.mark.spec("9.1")
async def test_read_messages_pages_through_the_messages(harness: ServiceHarness, act: RunningAgent) -> None:
    for n in range(5):
        await send(harness, str(n))
    page = await act("read_messages", spaceId=harness.space, limit=2.0, offset=1)
    assert ([message["content"] for message in page["messages"]], page["total"]) == (["2", "3"], 5)
    kind, _ = await act.failure("read_messages", spaceId=harness.space, limit=10**30)
    assert kind == "invalid_parameters"
    assert (await act.failure("read_messages"))[1] == "you are not in a space; call enter_space first"


@pytest.mark.spec("9.1")
@pytest.mark.spec("7.3")
async def test_peek_inbox_removes_events_from_the_inbox(harness: ServiceHarness, act: RunningAgent) -> None:
    await harness.ledger.write(inbox.add, harness.agent, "evt_1", "service", {"n": 1}, priority=inbox.PLAN_OR_SERVICE)
    await send(harness, "urgent")
    await send(harness, "more")
    peek_result = await act("peek_inbox")
    assert ([event["data"]["content"] for event in peek_result["events"]], peek_result["remaining"]) == (["urgent"], 2)
    (message_event,) = peek_result["events"]
    assert (message_event["data"]["spaceId"], message_event["data"]["spaceName"]) == (harness.space, "Room")
    assert ISO_TIME.fullmatch(message_event["timestamp"])
    peek_result = await act("peek_inbox", count=5, filter="service")
    assert peek_result["events"] == [
        {"eventId": "evt_1", "type": "service", "timestamp": peek_result["events"][0]["timestamp"], "data": {"n": 1}}
    ]
    assert peek_result["remaining"] == 1
    assert [event.status for event in await harness.inbox()].count("processed") == 2
    assert await harness.ledger.write(inbox.add, harness.agent, "evt_1", "service", {}, priority=1) is False
    kind, _ = await act.failure("peek_inbox", filter="nonsense")
    assert kind == "invalid_parameters"
    assert await act("skip", reason="nothing to do") == {"success": True, "skipped": True, "reason": "nothing to do"}


@pytest.mark.spec("9.2")
async def test_memories_persist_over_runs(harness: ServiceHarness, act: RunningAgent) -> None:
    facts = [{"key": "deadline", "value": "Friday"}, {"key": "team", "value": ["Ann"]}]
    assert await act("set_memories", memories=facts) == {"success": True, "count": 2}
    later = RunningAgent(harness, await harness.open_run())
    assert await later("get_memories") == {"memories": facts}
    assert await later("get_memories", keys=["team"]) == {"memories": facts[1:]}
    assert await later("delete_memories", keys=["team", "nothing"]) == {"success": True, "deleted": 1}
    assert await act("get_memories") == {"memories": facts[:1]}
    kind, error = await act.failure("set_memories", memories=[{"key": "big", "value": "x" * 20_000}])
    assert kind == "invalid_parameters"
    assert '"big" is too large' in error


@pytest.mark.spec("9.3")
async def test_goals_are_created_updated_and_deleted(harness: ServiceHarness, act: RunningAgent) -> None:
    result = await act("set_goals", goals=[{"description": "later"}, {"description": "now", "priority": 5}])
    assert (result["success"], result["totalGoals"]) == (True, 2)
    assert [goal["description"] for goal in result["currentGoals"]] == ["now", "later"]
    assert [change["action"] for change in result["goalsModified"]] == ["created", "created"]
    now = result["currentGoals"][0]
    assert now == {
        "id": now["id"],
        "description": "now",
        "status": "active",
        "priority": 5,
        "isLongTerm": False,
        "isCompleted": False,
        "metadata": {},
    }
    change = await act(
        "set_goals", goals=[{"id": now["id"], "description": "now", "isCompleted": True}], clearExisting=True
    )
    assert change["goalsModified"] == [{"action": "updated", "id": now["id"], "description": "now"}]
    assert await act("get_goals") == {
        "goals": [{**now, "status": "completed", "isCompleted": True}],
        "totalGoals": 1,
    }
    _, error = await act.failure("delete_goals", goalIds=[now["id"], "goal_other"])
    assert error == '"goal_other" is not a goal of this agent; get_goals shows their ids'
    assert await act("delete_goals", goalIds=[now["id"]]) == {"success": True, "deleted": 1}


@pytest.mark.spec("9.3")
async def test_goals_have_ids_of_the_agents_choice_and_metadata(harness: ServiceHarness, act: RunningAgent) -> None:
    goal = {"id": "goal-1", "description": "Write", "metadata": {"ticket": 7, "tags": ["a\0"]}}
    result = await act("set_goals", goals=[goal])
    assert result["goalsModified"] == [{"action": "created", "id": "goal-1", "description": "Write"}]
    assert result["currentGoals"][0]["metadata"] == goal["metadata"]
    result = await act("set_goals", goals=[{"id": "goal-1", "description": "Write it"}])
    assert result["goalsModified"] == [{"action": "updated", "id": "goal-1", "description": "Write it"}]
    assert (await act("get_goals"))["goals"][0]["metadata"] == goal["metadata"]
    result = await act("set_goals", goals=[{"id": "goal-1", "description": "Write it", "metadata": {"ticket": 8}}])
    assert result["currentGoals"][0]["metadata"] == {"ticket": 8}
    kind, error = await act.failure("set_goals", goals=[{"description": "b", "metadata": {"big": "x" * 5_000}}])
    assert kind == "invalid_parameters"
    assert 'the metadata of the goal "b" has 5010 bytes of JSON; at most 4096 are accepted' in error


@pytest.mark.spec("9.4")
async def test_plans_are_created_updated_listed_and_deleted(harness: ServiceHarness, act: RunningAgent) -> None:
    plans = [
        {"name": "Rest", "instruction": "Rest", "runAfter": "2 hours"},
        {"name": "Fly", "instruction": "Fly", "scheduledAt": "2190-01-02T08:00:00", "timezone": "Europe/Berlin"},
        {"name": "Wake", "instruction": "Wake up", "cron": "0 9 * * *"},
    ]
    result = await act("set_plans", plans=plans)
    rest, fly, wake = result["plans"]
    assert result["success"] is True
    assert (rest["runAfter"], fly["scheduledAt"], wake["cron"]) == ("2 hours", "2190-01-02T07:00:00Z", "0 9 * * *")
    change = {"id": wake["id"], "name": "Wake", "instruction": "Stay", "runAfter": "3 days"}
    assert (await act("set_plans", plans=[change]))["plans"][0]["instruction"] == "Stay"
    assert [plan["id"] for plan in (await act("get_plans"))["plans"]] == [rest["id"], wake["id"], fly["id"]]
    assert await act("delete_plans", planIds=[rest["id"], fly["id"], "plan_nobody"]) == {"success": True, "deleted": 2}
    assert [plan["name"] for plan in (await act("get_plans", status="active"))["plans"]] == ["Wake"]


@pytest.mark.spec("9.5")
async def test_the_context_and_metadata_of_a_space_are_read_and_updated(
    harness: ServiceHarness, act: RunningAgent
) -> None:
    await act("enter_space", spaceId=harness.space)
    assert await act("update_space_metadata", metadata={"a": 1, "b": 2}) == {
        "success": True,
        "spaceId": harness.space,
        "metadata": {"a": 1, "b": 2},
    }
    change = await act("update_space_metadata", metadata={"b": None, "c": [3]})
    assert change["metadata"] == {"a": 1, "c": [3]}
    context = await act("get_space_context")
    assert (context["spaceId"], context["spaceName"], context["metadata"]) == (
        harness.space,
        "Room",
        {"a": 1, "c": [3]},
    )
    assert {(member["name"], member["type"]) for member in context["members"]} == {("Ada", "agent"), ("Husam", "human")}
    kind, error = await act.failure("update_space_metadata", metadata={"big": "x" * 70_000})
    assert kind == "invalid_parameters"
    assert "at most 65536" in error


@pytest.mark.spec("8.2")
@pytest.mark.spec("9.1")
async def test_members_see_only_the_name_of_a_prebuilt_call(harness: ServiceHarness, act: RunningAgent) -> None:
    await act("enter_space", spaceId=harness.space)
    await act("set_memories", memories=[{"key": "secret", "value": "hush"}])
    for stream in (run_stream(act.run_id), space_stream(harness.space)):
        events = [event for event in await harness.events(stream) if event.data.get("toolName") == "set_memories"]
        assert {event.visibility for event in events} == {"name"}, stream
    assert await harness.messages() == []


async def test_prebuilt_tools_are_offered_to_agents_only(harness: ServiceHarness) -> None:
    names = {tool.name for tool in harness.ts.list_tools(context=ToolContext(agent_entity_id=harness.agent))}
    assert names >= set(ALL_ACTIONS)
    assert not set(ALL_ACTIONS) & {tool.name for tool in harness.ts.list_tools()}
    result = await harness.ts.call("get_goals", {})
    assert '"get_goals" is for agents, in their runs' in (result.error or "")
    assert (result.error_kind, result.executed) == ("execution_error", False)


@pytest.mark.spec("6.2")
async def test_prebuilt_tools_are_not_visible_and_have_a_category(harness: ServiceHarness) -> None:
    for tool in PrebuiltProvider().list_tools():
        assert (tool.visible, tool.execution_type) == (False, "prebuilt"), tool.name
        assert tool.category in ("space", "memory", "agent"), tool.name
        assert tool.description.endswith("."), tool.name


async def test_a_tool_of_a_program_with_a_prebuilt_name_is_a_conflict() -> None:
    from toolspace import ToolNameConflict, tool

    @tool
    async def send_message(text: str) -> None: ...

    ts = Toolspace([send_message])
    with pytest.raises(ToolNameConflict):
        ts.orchestrator.register(PrebuiltProvider())
