"""The seed agents, unchanged, in a real gateway: each cycle follows their traces.

Models are asked on a server of the test's own, which `OPENAI_BASE_URL` names. Only what an agent calls on other hosts
is given another address.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.http_servers import http_server
from tests.models.model_server import anthropic_message, stream_reply, text_block, tool_use_block
from tests.server.gateway_api import JWT_SECRET, PUBLIC, SECRET, ApiClient, open_api
from tests.server.scripted_agents import (
    PERSON,
    ROOM,
    AgentGateway,
    list_input_texts,
    list_result_texts,
    message_turns,
    offered_tools,
    open_model_server,
    tool_calls_turn,
)
from tests.server.test_workers import connect_worker
from toolspace.agents.agent import entity_id_for
from toolspace.server.gateway import Gateway

SEEDS = Path(__file__).parents[1] / "config" / "agents"
ENTER = ("enter_space", {"spaceId": ROOM})


class Scene:
    """A seed agent and a person in a space."""

    def __init__(self, setup: AgentGateway, name: str, model: str) -> None:
        self.setup = setup
        self.api: ApiClient = setup.api
        self.name = name
        self.model = model

    def script(self, *turns: Any) -> None:
        self.setup.model_server.script(*turns, model=self.model)

    def questions(self) -> list[Any]:
        return self.setup.model_server.list_requests(self.model)

    async def cycle(self, number: int = 1) -> Any:
        """Waits for the end of a cycle; returns its run."""
        return await self.setup.wait_for_run_end(number, self.name)

    async def submit(self, call: Any, result: Any) -> Any:
        body = {"callId": call["callId"], "result": result}
        return await self.api.post(f"/api/runs/{call['runId']}/tool-results", body)

    async def read_messages(self) -> list[Any]:
        """Returns the visible calls in the space."""
        return [entry for entry in await self.setup.list_messages() if entry["kind"] == "tool"]


@asynccontextmanager
async def scene(path: Path, state: Path, name: str, model: str = "gpt-4o") -> AsyncIterator[Scene]:
    """A gateway with this configuration file."""
    async with open_model_server() as model_server:
        environ = {
            "OPENAI_API_KEY": "sk-1",
            "OPENAI_BASE_URL": model_server.base_url,
            "ANTHROPIC_API_KEY": "sk-2",
            "ANTHROPIC_BASE_URL": model_server.url,
            "TOOLSPACE_STORAGE_DIR": str(state),
            "TOOLSPACE_SERVER_SECRET_KEY": SECRET,
            "TOOLSPACE_SERVER_PUBLIC_KEY": PUBLIC,
            "TOOLSPACE_SERVER_JWT_SECRET": JWT_SECRET,
        }
        async with Gateway.open(path, environ=environ) as gateway, open_api(gateway) as api:
            setup = AgentGateway(gateway, api, model_server, _keep_nothing)
            await setup.create_room()
            await api.create(f"/api/spaces/{ROOM}/members", entityId=entity_id_for(name))
            yield Scene(setup, name, model)


def _keep_nothing(**_: Any) -> Path:
    raise AssertionError("seeds stay as they are")


@asynccontextmanager
async def travel_agent_scene(state: Path, path: Path = SEEDS / "space_tools.json") -> AsyncIterator[Scene]:
    async with scene(path, state, "travel-agent") as play:
        yield play


def copy_seed(folder: Path, seed: str, urls: Mapping[str, str] | None = None, **more: Any) -> Path:
    """A copy of a seed with other hosts or numbers."""
    text = (SEEDS / seed).read_text()
    for old, new in (urls or {}).items():
        assert old in text
        text = text.replace(old, new)
    data = json.loads(text)
    for tool in data.get("tools", ()):
        tool.update(more.get(tool["name"], {}))
    path = folder / seed
    path.write_text(json.dumps(data))
    return path


# Goals


@pytest.mark.spec("9.3")
@pytest.mark.spec("9.6")
async def test_goal_aware_assistant_stores_goals_and_gets_them_in_its_prompt(tmp_path: Path) -> None:
    async with scene(SEEDS / "goal_aware_assistant.json", tmp_path, "goal-aware-assistant") as play:
        play.script(
            tool_calls_turn(("setGoals", {"goals": [{"description": "Learn Dutch", "priority": 2}]})),
            tool_calls_turn(("getGoals", {})),
            *message_turns("I will remind you."),
        )
        await play.setup.say("I want to learn Dutch.")
        run = await play.cycle()
        first, second, third, *_ = play.questions()
        assert (first["model"], first["temperature"]) == ("gpt-4o", 0.7)
        assert first.get("max_completion_tokens", first.get("max_tokens")) == 1500
        assert "setGoals" in list_input_texts(first)[0]
        assert {"setGoals", "getGoals", "set_goals"} <= offered_tools(first).keys()
        goals = json.loads(list_result_texts(second)[0])
        assert (goals["success"], goals["totalGoals"]) == (True, 1)
        assert [goal["description"] for goal in json.loads(list_result_texts(third)[1])["goals"]] == ["Learn Dutch"]
        assert await play.setup.list_agent_messages(play.name) == ["I will remind you."]

        play.script("I know.")
        await play.setup.say("Hello again.")
        await play.cycle(2)
        prompt = list_input_texts(play.questions()[-1])[0]
        assert "GOALS:\n" in prompt
        assert "Learn Dutch" in prompt.partition("GOALS:")[2]
        await _members_see_only_the_tool_name(play, run)


async def _members_see_only_the_tool_name(play: Scene, run: Any) -> None:
    path = f"/api/runs/{run['id']}/events?from=start&until=run.done&format=ui-message-stream"
    husam = await play.api.member(PERSON)
    for reader, sees in ((play.api, True), (husam, False)):
        stream_bytes = (await reader.get(path)).body
        assert b"setGoals" in stream_bytes
        assert (b"Learn Dutch" in stream_bytes) == sees


# Confirmations


@pytest.mark.spec("6.3")
@pytest.mark.spec("11.2")
@pytest.mark.parametrize("file", ["space_tools.json", "toolspace.yaml"])
async def test_one_cycle_asks_a_question_and_a_later_cycle_gets_the_answer(file: str, tmp_path: Path) -> None:
    async with travel_agent_scene(tmp_path, SEEDS / file) as play:
        question_call = ("confirmAction", {"question": "Confirm booking?"})
        play.script(tool_calls_turn(ENTER, question_call), "Asked Husam to confirm. Moving on to other tasks.")
        await play.setup.say("Book a hotel in Tokyo")
        cycle15 = await play.cycle()
        assert (cycle15["status"], cycle15["steps"]) == ("completed", 2)
        call = (await play.setup.list_calls(cycle15))[1]
        pending = {"status": "pending", "pendingToolCallId": call["callId"]}
        assert json.loads(list_result_texts(play.questions()[1])[1]) == pending
        (question,) = await play.read_messages()
        assert (question["status"], question["content"]["input"]) == ("requires_action", question_call[1])

        play.script(*message_turns("Husam confirmed! Booking now..."))
        husam = await play.api.member(PERSON)
        body = {"runId": call["runId"], "toolCallId": call["callId"], "result": {"confirmed": True}}
        assert (await husam.post(f"/api/spaces/{ROOM}/tool-results", body)).status == 200
        cycle16 = await play.cycle(2)
        assert (
            f'in "Room" ({ROOM})] Husam (human): "Book a hotel in Tokyo"' in list_input_texts(play.questions()[0])[-1]
        )
        inbox = list_input_texts(play.questions()[2])[-1]
        assert f'confirmAction (callId: {call["callId"]}): {{"confirmed":true}}' in inbox
        assert "Asked Husam to confirm." in json.dumps(play.questions()[2]["messages"])  # Its history has the question.
        assert await play.setup.list_agent_messages(play.name) == [
            "Asked Husam to confirm. Moving on to other tasks.",
            "Husam confirmed! Booking now...",
        ]
        assert [entry["status"] for entry in await play.read_messages()] == ["complete"]

        await husam.post(f"/api/spaces/{ROOM}/tool-results", body)
        await play.setup.say("Thank you")
        last = await play.cycle(3)
        assert last["trigger"]["type"] == "space_message"
        assert cycle16["id"] != cycle15["id"]
        assert len(await play.setup.list_runs(play.name)) == 3


@pytest.mark.spec("6.6")
async def test_a_question_needs_a_space(tmp_path: Path) -> None:
    async with travel_agent_scene(tmp_path) as play:
        play.script(tool_calls_turn(("confirmAction", {"question": "Sure?"})))
        await play.setup.say("Book it")
        await play.cycle()
        error = 'Tool "confirmAction" is visible but you are not in a space. Call enter_space first.'
        assert error in list_result_texts(play.questions()[1])[0]
        assert await play.read_messages() == []


# Workers and people


@pytest.mark.spec("6.2")
@pytest.mark.spec("6.7")
@pytest.mark.parametrize("file", ["space_tools.json", "toolspace.yaml"])
async def test_a_worker_result_in_time_is_used_in_the_same_cycle(file: str, tmp_path: Path) -> None:
    result = {"source": "pm-api", "results": ["a", "b", "c"]}
    async with (
        travel_agent_scene(tmp_path, SEEDS / file) as play,
        connect_worker(play.api, "fetchExternalData") as line,
    ):
        play.script(
            tool_calls_turn(("fetchExternalData", {"query": "active projects"})),
            *message_turns("Found 3 active projects"),
        )
        await play.setup.say("Look up active projects")
        offer = await line.expect("call.offered")
        assert offer["args"] == {"query": "active projects"}
        assert (await play.submit(offer, result)).status == 200
        await play.cycle()
        assert json.loads(list_result_texts(play.questions()[1])[0]) == result
        assert await play.setup.list_agent_messages(play.name) == ["Found 3 active projects"]
        assert await play.read_messages() == []
        assert len(await play.setup.list_runs(play.name)) == 1


@pytest.mark.spec("6.3")
async def test_a_late_worker_result_goes_to_the_inbox(tmp_path: Path) -> None:
    path = copy_seed(tmp_path, "space_tools.json", fetchExternalData={"timeout": 50})
    async with travel_agent_scene(tmp_path, path) as play, connect_worker(play.api, "fetchExternalData") as line:
        play.script(tool_calls_turn(("fetchExternalData", {"query": "all"})), "I will see it when it comes.")
        await play.setup.say("Look up all projects")
        offer = await line.expect("call.offered")
        run = await play.cycle()
        assert list_result_texts(play.questions()[1]) == ["(tool failed: timeout)"]
        assert [call["status"] for call in await play.setup.list_calls(run)] == ["pending"]
        play.script(*message_turns("Here they are."))
        assert (await play.submit(offer, ["a"])).status == 200
        await play.cycle(2)
        assert f'fetchExternalData (callId: {offer["callId"]}): ["a"]' in list_input_texts(play.questions()[2])[-1]
        assert await play.setup.list_agent_messages(play.name) == ["I will see it when it comes.", "Here they are."]


@pytest.mark.spec("6.8")
async def test_a_run_waits_for_an_approval_and_continues_with_it(tmp_path: Path) -> None:
    async with travel_agent_scene(tmp_path) as play:
        play.script(tool_calls_turn(ENTER, ("getUserApproval", {"amount": 900})))
        await play.setup.say("Spend it")
        run = await _waits(play)
        (question,) = await play.read_messages()
        assert question["status"] == "requires_action"
        play.script(*message_turns("Spent."))
        call = (await play.setup.list_calls(run))[1]
        assert (await play.submit(call, {"approved": True})).status == 200
        end_run = await play.cycle()
        assert (end_run["id"], end_run["status"]) == (run["id"], "completed")
        assert json.loads(list_result_texts(play.questions()[1])[1]) == {"approved": True}
        assert await play.setup.list_agent_messages(play.name) == ["Spent."]


async def _waits(play: Scene) -> Any:
    async with asyncio.timeout(20):
        await play.setup.model_server.wait_for_requests(model=play.model)
        while (run := (await play.setup.list_runs(play.name))[0])["status"] != "waiting_tool":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return run


@pytest.mark.spec("6.1")
async def test_a_chart_is_shown_in_the_space(tmp_path: Path) -> None:
    chart = {"title": "Sales", "values": [1, 2, 3]}
    async with travel_agent_scene(tmp_path) as play:
        play.script(tool_calls_turn(ENTER, ("displayChart", chart)))
        await play.setup.say("Show me the sales")
        await play.cycle()
        assert json.loads(list_result_texts(play.questions()[1])[1]) == {"success": True, "args": chart}
        (call,) = await play.read_messages()
        assert (call["content"]["toolName"], call["content"]["input"], call["status"]) == (
            "displayChart",
            chart,
            "complete",
        )


# Tools on other hosts


async def _answer_request(request: web.Request) -> web.Response:
    body = {"temperature": 21} if request.method == "GET" else {"order": await request.json(), "status": "sent"}
    return web.json_response(body)


@pytest.mark.spec("6.1")
async def test_support_agent_looks_things_up_over_http(tmp_path: Path) -> None:
    async with http_server(_answer_request) as shop:
        urls = {"https://api.weather.com": shop.url(""), "https://shop.example.com": shop.url("")}
        path = copy_seed(tmp_path, "support_http_tools.json", urls)
        async with scene(path, tmp_path, "support-agent") as play:
            play.script(tool_calls_turn(ENTER, ("fetchWeather", {"city": "Ghent"}), ("lookUpOrder", {"id": "4711"})))
            await play.setup.say("Where is my parcel, and will it be dry?")
            await play.cycle()
            _, weather, order = map(json.loads, list_result_texts(play.questions()[1]))
            assert (weather, order) == ({"temperature": 21}, {"order": {"id": "4711"}, "status": "sent"})
            targets = sorted((request.method, request.target) for request in shop.requests)
            assert targets == [("GET", "/current?city=Ghent"), ("POST", "/orders")]
            assert [entry["content"]["toolName"] for entry in await play.read_messages()] == [
                "fetchWeather",
                "lookUpOrder",
            ]


@pytest.mark.spec("3.1")
async def test_github_helper_uses_only_its_allowed_tools_of_a_server(tmp_path: Path) -> None:
    async with _mcp_server() as url:
        path = copy_seed(tmp_path, "github_tools.json", {"https://mcp.github.com": url})
        async with scene(path, tmp_path, "github-helper", "claude-sonnet-4-5") as play:
            turns = [
                anthropic_message(
                    tool_use_block("t1", "github_tools__list_prs", '{"repo": "garden"}'), stop="tool_use"
                ),
                anthropic_message(text_block("There is one.")),
            ]
            play.script(*map(stream_reply, turns))
            await play.setup.say("Is there anything to review?")
            run = await play.cycle()
            assert run["status"] == "completed", run["error"]
            first, second = play.questions()
            tool_names = {tool["name"] for tool in first["tools"] if tool["name"].startswith("github_tools__")}
            assert tool_names == {"github_tools__list_prs", "github_tools__create_issue"}
            assert "garden#7 Mend the fence" in json.dumps(second["messages"])
            assert "Numbers of pull requests are unique." in json.dumps(first["system"])
            assert await play.read_messages() == []


@asynccontextmanager
async def _mcp_server() -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("pull_request_server.py")), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


def test_every_seed_agent_has_a_test() -> None:
    seed_names = {"goal_aware_assistant.json", "space_tools.json", "support_http_tools.json", "github_tools.json"}
    assert {file.name for file in SEEDS.iterdir()} == {*seed_names, "toolspace.yaml"}
