"""Every documented setting of agents has an effect.

The agents come from a configuration file and run in a real gateway, with a model server of the test. The settings of
models are in `test_model_settings`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests.http_servers import HttpTestServer, http_server
from tests.server.scripted_agents import (
    ROOM,
    AgentGateway,
    HeldTurn,
    ScriptedModelServer,
    agent_config,
    list_input_texts,
    list_result_texts,
    message_turns,
    offered_tools,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from tests.servers.smtp import mail_server
from tests.setting_coverage import SettingCoverage
from toolspace.agents.agent import entity_id_for
from toolspace.server.demo_setup import DEMO_AGENT_ID

pytestmark = pytest.mark.spec("5.3")

FAILING = tool_calls_turn(("read_file", {"path": "/nowhere/at/all"}))
LOOKING = tool_calls_turn(("get_goals", {}))
NOTIFYING = tool_calls_turn(("send_notification", {"title": "Done", "body": "It is done."}))


class AgentSetup:
    """Opens gateways with configured agents, in one folder and with one model server."""

    def __init__(self, folder: Path, model_server: ScriptedModelServer) -> None:
        self.folder = folder
        self.model_server = model_server
        self._count = 0

    def agent(self, *, model: str = "m", **settings: Any) -> dict[str, Any]:
        return agent_config(self.model_server, model={"name": model, "temperature": 0.5}, **settings)

    def file(self, head: Mapping[str, str], *, model: str = "m", **settings: Any) -> dict[str, Any]:
        """The settings of an agent in a file of its own."""
        definition = self.agent(model=model, agent=head, **settings)
        del definition["system"]
        return definition

    @asynccontextmanager
    async def open_ada(
        self, *script: Any, config: Mapping[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[AgentGateway]:
        """A gateway with one agent, which got a message."""
        async with self.open_gateway({"ada": self.agent(**settings)}, **(config or {})) as gateway:
            self.model_server.script(*script)
            await gateway.say("Hi")
            yield gateway

    @asynccontextmanager
    async def open_gateway(self, agents: Any, **config: Any) -> AsyncIterator[AgentGateway]:
        """A gateway with these agents and an empty state directory."""
        self.model_server.requests.clear()
        self._count += 1
        storage = {"dir": str(self.folder / f"kept-{self._count}")}
        async with open_agent_gateway(
            self.folder, self.model_server, agents=agents, storage=storage, **config
        ) as gateway:
            yield gateway


coverage = SettingCoverage()
agent_coverage = SettingCoverage("agents.<name>.")


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[AgentSetup]:
    async with open_model_server() as model_server:
        yield AgentSetup(tmp_path, model_server)


# Identity


@agent_coverage.covers("agent", "agent.name", "agent.description", "agent.system", "agents")
async def test_an_agent_has_a_name_a_description_instructions_and_sub_agents(setup: AgentSetup) -> None:
    head = {"name": "ada", "description": "Knows the stars.", "system": "You look at stars."}
    (setup.folder / "file.yaml").write_text(yaml.safe_dump(setup.file(head, model="of-ada")))
    setup.model_server.script(
        tool_calls_turn(("agent__ada", {"prompt": "Which one?", "reason": "it knows"})), *message_turns("Vega")
    )
    setup.model_server.script("Vega.", model="of-ada")
    async with setup.open_gateway([{**setup.agent(agents=["ada"]), "name": "boss"}, "./file.yaml"]) as gateway:
        names = [item["name"] for item in (await gateway.api.get("/api/agents")).data["items"]]
        assert {"ada", "boss"} <= set(names)
        await gateway.say("Which star is that?")
        await gateway.wait_for_run_end(agent="boss")
        request = setup.model_server.list_requests()[0]
        assert "Knows the stars." in offered_tools(request)["agent__ada"]["description"]
        assert "agent__boss" not in offered_tools(setup.model_server.list_requests("of-ada")[0])
        assert list_input_texts(setup.model_server.list_requests("of-ada")[0])[0].startswith("You look at stars.")
        assert await gateway.list_agent_messages("boss") == ["Vega"]


@agent_coverage.covers("tasks", "tasks.tools")
async def test_the_tasks_of_an_agent_have_tools_of_their_own(setup: AgentSetup) -> None:
    spawn_turn = tool_calls_turn(("spawn_task", {"description": "d", "input": "i"}))
    for tasks, has_write_file in (({}, False), ({"tools": ["write_file"]}, True)):
        async with setup.open_ada(spawn_turn, tools=["spawn_task"], tasks=tasks) as gateway:
            await gateway.wait_for_run_end(2)
            requests = setup.model_server.list_requests()
            (request,) = (item for item in requests if "You work on a task" in list_input_texts(item)[0])
            assert ("write_file" in offered_tools(request)) == has_write_file


@agent_coverage.covers("spaces")
async def test_an_agent_is_a_member_of_its_spaces(setup: AgentSetup) -> None:
    async with setup.open_gateway({"ada": setup.agent(spaces=["Room", "Garden"])}) as gateway:
        spaces = {item["name"]: item["id"] for item in (await gateway.api.get("/api/spaces")).data["items"]}
        assert spaces.keys() == {"Room", "Garden"}
        for space_id in spaces.values():
            members = (await gateway.api.get(f"/api/spaces/{space_id}/members")).data["items"]
            assert entity_id_for("ada") in [item["entityId"] for item in members]


@agent_coverage.covers("session", "memories", "memories.shared")
async def test_an_agent_has_a_session_for_each_person_and_may_share_memories(setup: AgentSetup) -> None:
    remember = tool_calls_turn(("set_memories", {"memories": [{"key": "hours", "value": "9 to 5", "shared": True}]}))
    for settings, is_shared in (
        ({"session": "agent"}, True),
        ({"session": "user"}, False),
        ({"session": "user", "memories": {"shared": True}}, True),
    ):
        async with setup.open_ada(remember, "Stored.", "Hello.", **settings) as gateway:
            await gateway.wait_for_run_end()
            await gateway.api.create("/api/entities", id="ent_carla", type="human", name="Carla")
            await gateway.api.create(f"/api/spaces/{ROOM}/members", entityId="ent_carla")
            await gateway.say("Hello", sender="ent_carla")
            await gateway.wait_for_run_end(2)
            texts = list_input_texts(setup.model_server.list_requests()[-1])
            assert ("9 to 5" in texts[0]) == is_shared
            assert ("Hi" in "".join(texts[1:])) == (settings["session"] == "agent")


@agent_coverage.covers("limits.maxParallelSessions")
async def test_an_agent_runs_a_limited_number_of_sessions_at_once(setup: AgentSetup) -> None:
    for most in (1, 2):
        gate = HeldTurn()
        limits = {"maxParallelSessions": most}
        async with setup.open_ada(gate, "Hello.", session="user", limits=limits) as gateway:
            await setup.model_server.wait_for_requests()
            await gateway.api.create("/api/entities", id="ent_carla", type="human", name="Carla")
            await gateway.api.create(f"/api/spaces/{ROOM}/members", entityId="ent_carla")
            await gateway.say("Hello", sender="ent_carla")
            if most == 2:  # The first request is still held.
                while [run["status"] for run in await gateway.list_runs()] != ["running", "completed"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            gate.open()
            await gateway.wait_for_run_end(2)
            assert len(setup.model_server.list_requests()) == 2


@agent_coverage.covers("knowledge")
async def test_an_agent_searches_its_knowledge(setup: AgentSetup) -> None:
    (setup.folder / "handbook").mkdir(exist_ok=True)
    (setup.folder / "handbook" / "returns.md").write_text("# Returns\n\nParcels come back to the depot in Ghent.\n")
    async with setup.open_gateway({"ada": setup.agent(knowledge=["./handbook"])}) as gateway:
        await gateway.wait_for_documents()
        setup.model_server.script(tool_calls_turn(("search_knowledge", {"query": "where do parcels come back to"})))
        await gateway.say("Where to?")
        await gateway.wait_for_run_end()
        assert "depot in Ghent" in list_result_texts(setup.model_server.list_requests()[1])[0]


# Loop, history and limits


@agent_coverage.covers("loop", "loop.maxSteps")
async def test_a_cycle_has_a_limit_of_steps(setup: AgentSetup) -> None:
    async with setup.open_ada(LOOKING, LOOKING, LOOKING, loop={"maxSteps": 2}) as gateway:
        run = await gateway.wait_for_run_end()
        assert (run["status"], run["steps"], len(setup.model_server.requests)) == ("failed", 2, 2)
        assert "loop.maxSteps" in run["error"]


@agent_coverage.covers("loop.plainText")
async def test_plain_text_is_delivered_or_private(setup: AgentSetup) -> None:
    for plain_text, expected_messages in (("deliver", ["Hello!"]), ("private", [])):
        async with setup.open_ada("Hello!", loop={"plainText": plain_text}) as gateway:
            await gateway.wait_for_run_end()
            assert await gateway.list_agent_messages() == expected_messages
            assert len(setup.model_server.requests) == 1


@agent_coverage.covers("autoEnter")
async def test_a_cycle_begins_in_the_space_of_its_messages_or_outside(setup: AgentSetup) -> None:
    for enters_space, expected_messages in ((True, ["Hello!"]), (False, [])):
        turn = tool_calls_turn(("send_message", {"text": "Hello!"}))
        async with setup.open_ada(turn, autoEnter=enters_space) as gateway:
            run = await gateway.wait_for_run_end()
            assert await gateway.list_agent_messages() == expected_messages
            assert (run["spaceId"] is not None) == enters_space


@agent_coverage.covers("loop.toolChoice")
async def test_the_tool_choice_is_sent_to_the_model(setup: AgentSetup) -> None:
    for choice, expected_choices in (("auto", (None, "auto")), ("required", ("required",)), ("none", ("none",))):
        async with setup.open_ada(loop={"toolChoice": choice}) as gateway:
            await gateway.wait_for_run_end()
            assert setup.model_server.list_requests()[0].get("tool_choice") in expected_choices
    async with setup.open_ada(LOOKING, loop={"toolChoice": "get_goals"}) as gateway:
        await gateway.wait_for_run_end()
        first, second = setup.model_server.list_requests()
        assert first["tool_choice"] == {"type": "function", "function": {"name": "get_goals"}}
        assert second.get("tool_choice") in (None, "auto")  # Called first; then it is free to stop.


@agent_coverage.covers("loop.maxToolCallsPerTurn")
async def test_a_turn_has_a_limit_of_calls(setup: AgentSetup) -> None:
    many = tool_calls_turn(*[("get_goals", {})] * 3)
    async with setup.open_ada(many, loop={"maxToolCallsPerTurn": 2}) as gateway:
        await gateway.wait_for_run_end()
        assert ["maxToolCallsPerTurn" in item for item in list_result_texts(setup.model_server.list_requests()[1])] == [
            False,
            False,
            True,
        ]


@agent_coverage.covers("loop.review")
async def test_rules_or_the_model_review_a_failed_tool(setup: AgentSetup) -> None:
    async with setup.open_ada(FAILING, loop={"review": "rules"}) as gateway:
        await gateway.wait_for_run_end()
        assert len(setup.model_server.requests) == 2
    verdict = json.dumps({"verdict": "complete", "assessment": "there is no such file"})
    async with setup.open_ada(FAILING, verdict, loop={"review": "model"}) as gateway:
        run = await gateway.wait_for_run_end()
        assert "there is no such file" in run["error"]
        judge = setup.model_server.list_requests()[1]
        assert "Judge it" in list_input_texts(judge)[0]
        assert judge["temperature"] == 0.5  # As the agent's model is asked for anything.


@agent_coverage.covers("consciousness", "consciousness.maxTokens", "consciousness.minRecentCycles")
async def test_older_cycles_are_summarized(setup: AgentSetup) -> None:
    for recent, is_condensed in ((1, True), (2, False)):
        settings = {"maxTokens": 1, "minRecentCycles": recent}
        async with setup.open_ada("One.", consciousness=settings) as gateway:
            await gateway.wait_for_run_end()
            setup.model_server.script("Two.", *(["He said hi."] if is_condensed else []), "Three.")
            for count, text in ((2, "How are you?"), (3, "Bye")):
                await gateway.say(text)
                await gateway.wait_for_run_end(count)
            last = "\n".join(list_input_texts(setup.model_server.list_requests()[3 if is_condensed else 2]))
            assert ("He said hi." in last, 'Husam (human): "Hi"' in last) == (is_condensed, not is_condensed)
            assert "How are you?" in last
            assert {item["temperature"] for item in setup.model_server.list_requests()} == {0.5}


@agent_coverage.covers("limits", "limits.maxTokens", "limits.maxCost")
async def test_a_run_has_a_budget_of_tokens_and_cost(setup: AgentSetup) -> None:
    for name, most, model in (("maxTokens", 1000, "m"), ("maxCost", 0.001, "gpt-4.1")):
        async with setup.open_gateway({"ada": setup.agent(model=model, limits={name: most})}) as gateway:
            setup.model_server.script(LOOKING, LOOKING, model=model)
            await gateway.say("Hi")
            run = await gateway.wait_for_run_end()
            assert (run["status"], len(setup.model_server.requests)) == ("failed", 1)
            assert f"limits.{name}" in run["error"]


@agent_coverage.covers("limits.maxRepeatedCalls")
async def test_a_model_may_repeat_a_call_only_so_often(setup: AgentSetup) -> None:
    many = tool_calls_turn(*[("current_time", {})] * 3)
    for limit, refused_count in ((2, 1), (None, 0)):
        async with setup.open_ada(many, limits={"maxRepeatedCalls": limit}) as gateway:
            await gateway.wait_for_run_end()
            results = list_result_texts(setup.model_server.list_requests()[1])
            assert ["maxRepeatedCalls" in text for text in results].count(True) == refused_count


@agent_coverage.covers("limits.timeout")
async def test_a_run_has_a_time_limit(setup: AgentSetup) -> None:
    async with setup.open_ada(setup.model_server.never_answer, limits={"timeout": "50ms"}) as gateway:
        assert "limits.timeout" in (await gateway.wait_for_run_end())["error"]
    async with setup.open_ada(tool_calls_turn(("sleep", {"duration": 60})), limits={"timeout": "200ms"}) as gateway:
        assert "limits.timeout" in (await gateway.wait_for_run_end())["error"]
        assert len(setup.model_server.requests) == 1


@agent_coverage.covers("limits.maxDepth")
async def test_sub_agents_have_a_depth_limit(setup: AgentSetup) -> None:
    search_turn = tool_calls_turn(("agent__bob", {"prompt": "Help", "reason": "it can"}))
    for most, is_refused in ((1, True), (2, False)):
        agents = {"ada": setup.agent(agents=["bob"], limits={"maxDepth": most}), "bob": setup.agent(model="of-bob")}
        async with setup.open_gateway(agents) as gateway:
            setup.model_server.script(search_turn)
            await gateway.push_event("go")
            await gateway.wait_for_run_end()
            assert ("limits.maxDepth" in list_result_texts(setup.model_server.list_requests()[1])[0]) == is_refused


@agent_coverage.covers("limits.maxAgentTurns")
async def test_agents_have_a_limit_of_turns_among_themselves(setup: AgentSetup) -> None:
    for most, runs in ((0, 1), (1, 2)):
        async with setup.open_gateway({"ada": setup.agent(limits={"maxAgentTurns": most})}) as gateway:
            await gateway.api.create("/api/entities", type="agent", name="Bot", id="ent_bot")
            await gateway.api.create(f"/api/spaces/{ROOM}/members", entityId="ent_bot")
            await gateway.say("I am a bot.", sender="ent_bot")
            if most:
                await gateway.wait_for_run_end()
            await gateway.say("I am a person.")
            await gateway.wait_for_run_end(runs)
            assert len(await gateway.list_runs()) == runs
            assert "I am a bot." in "\n".join(
                list_input_texts(setup.model_server.list_requests()[-1])
            )  # Read, if not answered.


@agent_coverage.covers("limits.cyclesPerMinute")
async def test_an_agent_has_a_rate_limit_of_cycles(setup: AgentSetup) -> None:
    agents = {"ada": setup.agent(limits={"cyclesPerMinute": 1}), "bob": setup.agent(model="of-bob", spaces=[])}
    async with setup.open_gateway(agents) as gateway:
        for count in (1, 2):
            await gateway.push_event("one")
            if count == 1:
                await gateway.wait_for_run_end()
            await gateway.push_event("one", agent="bob")
            await gateway.wait_for_run_end(count, agent="bob")
        assert len(await gateway.list_runs()) == 1
        inbox = (await gateway.api.get(f"/api/agents/{entity_id_for('ada')}/inbox")).data["items"]
        assert sorted(item["status"] for item in inbox) == ["pending", "processed"]


@agent_coverage.covers("limits.inboxBatch")
async def test_a_cycle_claims_a_limited_batch_of_inbox_events(setup: AgentSetup) -> None:
    gate = HeldTurn()
    async with setup.open_ada(gate, limits={"inboxBatch": 2}) as gateway:
        await setup.model_server.wait_for_requests()
        for number in range(3):
            await gateway.push_event({"number": number})
        gate.open()
        await gateway.wait_for_run_end(3)
        assert [len(run["trigger"]["events"]) for run in await gateway.list_runs()] == [1, 2, 1]


@agent_coverage.covers("router")
async def test_an_agent_hands_off_to_its_destinations(setup: AgentSetup) -> None:
    agents = {"ada": setup.agent(router={"destinations": ["bob"]}), "bob": setup.agent(model="of-bob", spaces=[])}
    async with setup.open_gateway(agents) as gateway:
        await hands_over(setup, gateway)


@coverage.covers("router.destinations")
async def test_the_main_agent_hands_off_to_its_destinations(setup: AgentSetup) -> None:
    own_file = setup.file({"name": "ada", "system": "You know whom to ask."}, router={"destinations": ["bob"]})
    async with setup.open_gateway({"bob": setup.agent(model="of-bob", spaces=[])}, **own_file) as gateway:
        await hands_over(setup, gateway)


async def hands_over(setup: AgentSetup, gateway: AgentGateway) -> None:
    setup.model_server.script(tool_calls_turn(("router__handoff-to", {"agent": "bob", "message": "You know ships."})))
    setup.model_server.script(*message_turns("It sails at noon."), model="of-bob")
    await gateway.say("When does it sail?")
    await gateway.wait_for_run_end(agent="bob")
    first = "\n".join(list_input_texts(setup.model_server.list_requests("of-bob")[0]))
    assert "You know ships." in first
    assert "When does it sail?" in first
    assert "router__handoff-to" not in offered_tools(setup.model_server.list_requests("of-bob")[0])
    assert await gateway.list_agent_messages("bob") == ["It sails at noon."]


# How it reaches people


async def accept(_: web.Request) -> web.Response:
    return web.Response(status=204)


async def send_one_notification(setup: AgentSetup, gateway: AgentGateway) -> str:
    """Lets the agent send a notification, and returns the result."""
    setup.model_server.script(NOTIFYING)
    before = len(setup.model_server.list_requests())
    await gateway.push_event("go")
    await setup.model_server.wait_for_requests(before + 2)
    return list_result_texts(setup.model_server.list_requests()[-1])[-1]


@agent_coverage.covers("notifications")
@coverage.covers("notifications.webhook", "notifications.webhook.url", "notifications.webhook.headers")
async def test_notifications_are_posted_to_the_webhook(setup: AgentSetup) -> None:
    async with http_server(accept) as shared, http_server(accept) as own_hook:
        main = {"webhook": {"url": shared.url("/all"), "headers": {"X-Team": "blue"}}}
        async with setup.open_gateway({"ada": setup.agent()}, notifications=main) as gateway:
            await send_one_notification(setup, gateway)
            assert read_notification(shared) == ("/all", "blue", "Done")
        own_webhook = {"webhook": own_hook.url("/ada")}
        async with setup.open_gateway({"ada": setup.agent(notifications=own_webhook)}, notifications=main) as gateway:
            await send_one_notification(setup, gateway)
            assert read_notification(own_hook) == ("/ada", None, "Done")
            assert len(shared.requests) == 1


def read_notification(server: HttpTestServer) -> tuple[str, str | None, str]:
    (request,) = server.requests
    return request.path, request.headers.get("x-team"), json.loads(request.body)["title"]


@coverage.covers(
    "notifications.smtp",
    "notifications.smtp.host",
    "notifications.smtp.port",
    "notifications.smtp.from",
    "notifications.smtp.to",
    "notifications.smtp.username",
    "notifications.smtp.password",
)
async def test_notifications_are_mailed(setup: AgentSetup) -> None:
    async with mail_server() as post:
        login = {"username": "robot", "password": "hunter2"}
        async with setup.open_gateway(
            {"ada": setup.agent()}, notifications={"smtp": mail_settings(post.port, **login)}
        ) as gateway:
            assert json.loads(await send_one_notification(setup, gateway))["recipients"] == ["ann@example.com"]
        (mail,) = post.mails
        assert (mail.sender, mail.recipients) == ("robot@example.com", ["ann@example.com"])
        assert post.logins == [("robot", "hunter2")]


@coverage.covers("notifications.smtp.allowedRecipients")
async def test_agents_choose_allowed_recipients_only(setup: AgentSetup) -> None:
    calls = [("send_notification", {"title": "a", "body": "b", "to": f"eve@{host}.com"}) for host in ("x", "y")]
    async with mail_server() as post:
        smtp = mail_settings(post.port, allowedRecipients=["*@x.com"])
        async with setup.open_ada(tool_calls_turn(*calls), config={"notifications": {"smtp": smtp}}) as gateway:
            await gateway.wait_for_run_end()
            assert [
                "allowedRecipients" in item for item in list_result_texts(setup.model_server.list_requests()[1])
            ] == [
                False,
                True,
            ]


@coverage.covers("notifications.smtp.tls")
async def test_the_mail_connection_is_encrypted_as_configured(setup: AgentSetup) -> None:
    async with mail_server() as post:
        for tls, is_sent in (("none", True), ("starttls", False)):
            smtp = mail_settings(post.port, tls=tls)
            async with setup.open_gateway({"ada": setup.agent()}, notifications={"smtp": smtp}) as gateway:
                assert ("nobody was notified" not in await send_one_notification(setup, gateway)) == is_sent


def mail_settings(port: int, **more: Any) -> dict[str, Any]:
    ways = {"host": "127.0.0.1", "port": port, "tls": "none", "from": "robot@example.com", "to": ["ann@example.com"]}
    return {**ways, **more}


# How it finds what it knows


@coverage.covers("embeddings.model", "embeddings.baseUrl", "embeddings.apiKey", "embeddings.headers")
async def test_knowledge_is_ordered_by_embeddings(setup: AgentSetup) -> None:
    """By words the short document comes first; by embeddings the long one."""

    async def embed(request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        vectors = [[0.0, 1.0] if text.startswith("Lunch") else [1.0, 0.0] for text in texts]
        data = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        return web.json_response({"data": data})

    (setup.folder / "library").mkdir(exist_ok=True)
    (setup.folder / "library" / "a.txt").write_text("Lunch at noon.")
    (setup.folder / "library" / "b.txt").write_text("The ship to the islands in the far north sails at noon each day.")
    search_turn = tool_calls_turn(("search_knowledge", {"query": "noon", "limit": 1}))
    async with http_server(embed) as server:
        embedding_settings = {
            "model": "small",
            "baseUrl": server.url("/v1"),
            "apiKey": "sk-numbers",
            "headers": {"X-Team": "blue"},
        }
        for main, first in (({}, "Lunch"), ({"embeddings": embedding_settings}, "The ship")):
            async with setup.open_gateway({"ada": setup.agent(knowledge=["./library"])}, **main) as gateway:
                await gateway.wait_for_documents(2)
                setup.model_server.script(search_turn)
                await gateway.push_event("When does it sail?")
                await gateway.wait_for_run_end()
                (document,) = json.loads(list_result_texts(setup.model_server.list_requests()[1])[0])["results"]
                assert document["text"].startswith(first)
        (request,) = server.requests
        assert (request.path, json.loads(request.body)["model"]) == ("/v1/embeddings", "small")
        assert (request.headers["authorization"], request.headers["x-team"]) == ("Bearer sk-numbers", "blue")


# What all of them share


@coverage.covers("server.maxActiveAgents")
async def test_a_gateway_has_a_limit_of_active_agents(setup: AgentSetup) -> None:
    for most, runs_both in ((1, False), (2, True)):
        gate = HeldTurn()
        setup.model_server.script(gate)
        agents = {"ada": setup.agent(), "bob": setup.agent(model="of-bob"), "eve": setup.agent(model="of-bob")}
        async with setup.open_gateway(agents, server={"maxActiveAgents": most}) as gateway:
            await gateway.push_event("go")
            await setup.model_server.wait_for_requests()
            await gateway.push_event("go", agent="bob")
            if runs_both:
                await setup.model_server.wait_for_requests(model="of-bob")
            assert len(setup.model_server.list_requests("of-bob")) == int(runs_both)
            gate.open()
            await setup.model_server.wait_for_requests(model="of-bob")


@coverage.covers("demo")
async def test_the_demo_agent_is_created_or_not(setup: AgentSetup) -> None:
    for demo, expected_agents in ((False, []), (True, [DEMO_AGENT_ID])):
        async with setup.open_gateway({}, demo=demo) as gateway:
            assert [item["id"] for item in (await gateway.api.get("/api/agents")).data["items"]] == expected_agents


def test_every_documented_setting_of_agents_has_a_test() -> None:
    prefixes = ("router.", "notifications.", "embeddings.", "demo", "server.maxActiveAgents")
    assert coverage.list_missing(*prefixes) == []
    assert agent_coverage.list_missing("agents.", other_modules=("agents.<name>.model",)) == []
