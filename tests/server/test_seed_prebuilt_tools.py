"""The examples of the design of the prebuilt tools, called literally by an agent in a real gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted_agents import (
    PERSON,
    ROOM,
    AgentGateway,
    HeldTurn,
    list_input_texts,
    list_result_texts,
    open_single_agent_gateway,
    tool_calls_turn,
)
from toolspace.agents.agent import entity_id_for

ISO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z")
ENTER = ("enter_space", {"spaceId": ROOM, "limit": 50})
GOALS = [
    {"id": "goal-1", "description": "Complete Q4 report by Feb 28", "status": "active"},
    {"id": "goal-2", "description": "Review Designer's mockup", "status": "completed"},
]
MEMORIES = [
    {"key": "project_alpha_deadline", "value": "Q4 report due Feb 28"},
    {"key": "designer_prefers_png", "value": "Designer always requests PNG exports"},
]


async def run_calls(setup: AgentGateway, number: int, *calls: tuple[str, Any]) -> Sequence[Any]:
    """Lets the agent make these calls, one in each step of its run; returns their results."""
    setup.model_server.script(*(tool_calls_turn(call) for call in calls), "Done.")
    await setup.say("Go on.")
    await setup.wait_for_run_end(number)
    texts = list_result_texts(setup.model_server.list_requests()[-1])
    return [json.loads(text) for text in texts[-len(calls) :]]


@pytest.mark.spec("9.3")
async def test_the_examples_of_goals_work(tmp_path: Path) -> None:
    async with open_single_agent_gateway(tmp_path) as setup:
        (result,) = await run_calls(setup, 1, ("set_goals", {"goals": GOALS}))
        assert (result["success"], result["totalGoals"]) == (True, 2)
        assert [(change["action"], change["id"]) for change in result["goalsModified"]] == [
            ("created", "goal-1"),
            ("created", "goal-2"),
        ]
        assert [{key: goal[key] for key in GOALS[0]} for goal in result["currentGoals"]] == GOALS
        second_result, goals, deletion = await run_calls(
            setup,
            2,
            ("set_goals", {"goals": GOALS}),
            ("get_goals", {}),
            ("delete_goals", {"goalIds": ["goal-1", "goal-2"]}),
        )
        prompt = list_input_texts(setup.model_server.list_requests()[-1])[0]
        assert "GOALS:\n- [goal-1] Complete Q4 report by Feb 28" in prompt
        assert [change["action"] for change in second_result["goalsModified"]] == ["updated", "updated"]
        assert goals["totalGoals"] == 2
        assert deletion == {"success": True, "deleted": 2}
        assert (await setup.api.get(f"/api/agents/{entity_id_for('ada')}/goals")).data["items"] == []


@pytest.mark.spec("9.2")
async def test_the_examples_of_memories_work(tmp_path: Path) -> None:
    async with open_single_agent_gateway(tmp_path) as setup:
        keys = [memory["key"] for memory in MEMORIES]
        storage_result, memory_page, deletion = await run_calls(
            setup,
            1,
            ("set_memories", {"memories": MEMORIES}),
            ("get_memories", {"keys": keys}),
            ("delete_memories", {"keys": keys}),
        )
        assert storage_result == {"success": True, "count": 2}
        assert sorted(memory_page["memories"], key=lambda memory: keys.index(memory["key"])) == MEMORIES
        assert deletion == {"success": True, "deleted": 2}


@pytest.mark.spec("9.4")
async def test_the_examples_of_plans_work(tmp_path: Path) -> None:
    async with open_single_agent_gateway(tmp_path) as setup:
        plans = [
            {"name": "Daily Report", "cron": "0 9 * * *", "instruction": "Generate and post the daily metrics summary"},
            {"name": "Follow Up", "runAfter": "2 hours", "instruction": "Check if Husam responded"},
            # The example's time, in a year that is not over.
            {"name": "Pre-launch checklist", "scheduledAt": "2190-03-01T08:00:00Z", "instruction": "Run the checks"},
        ]
        result, plan_page = await run_calls(
            setup, 1, ("set_plans", {"plans": plans}), ("get_plans", {"status": "active"})
        )
        assert [plan["name"] for plan in result["plans"]] == [plan["name"] for plan in plans]
        assert all(ISO_TIME.fullmatch(plan["nextRunAt"]) for plan in plan_page["plans"])
        plan_ids = [plan["id"] for plan in result["plans"]]
        (deletion,) = await run_calls(setup, 2, ("delete_plans", {"planIds": plan_ids[:2]}))
        assert deletion == {"success": True, "deleted": 2}


@pytest.mark.spec("9.1")
async def test_the_examples_of_spaces_work(tmp_path: Path) -> None:
    async with open_single_agent_gateway(tmp_path) as setup:
        entry, receipt, page = await run_calls(
            setup, 1, ENTER, ("send_message", {"text": "On it."}), ("read_messages", {"limit": 50})
        )
        assert (entry["success"], entry["spaceId"], entry["spaceName"], entry["totalMessages"]) == (
            True,
            ROOM,
            "Room",
            1,
        )
        (message,) = entry["history"]
        assert (message["senderName"], message["senderType"], message["content"]) == ("Husam", "human", "Go on.")
        assert receipt == {"success": True, "messageId": receipt["messageId"], "status": "delivered"}
        assert page["total"] == 2
        assert page["messages"][1]["id"] == receipt["messageId"]
        assert all(ISO_TIME.fullmatch(item["timestamp"]) for item in (message, *page["messages"]))


@pytest.mark.spec("9.1")
async def test_the_example_of_peek_inbox_works(tmp_path: Path) -> None:
    async with open_single_agent_gateway(tmp_path) as setup:
        correction = "Actually cancel that, I changed my mind about the Tokyo trip"
        first_turn = HeldTurn(tool_calls_turn(("peek_inbox", {"count": 1, "filter": "space_message"})))
        setup.model_server.script(first_turn, "Done.")
        await setup.say("Book a trip to Tokyo.")
        await setup.model_server.wait_for_requests()
        await setup.say(correction)
        first_turn.open()
        await setup.wait_for_run_end()
        result = json.loads(list_result_texts(setup.model_server.list_requests()[-1])[-1])
        (event,) = result["events"]
        assert (event["type"], result["remaining"]) == ("space_message", 0)
        assert ISO_TIME.fullmatch(event["timestamp"])
        expected_data = {
            "spaceId": ROOM,
            "spaceName": "Room",
            "senderId": PERSON,
            "senderName": "Husam",
            "senderType": "human",
            "content": correction,
        }
        assert {key: event["data"][key] for key in expected_data} == expected_data
