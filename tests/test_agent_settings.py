"""5.3: every setting of agents has an effect. One check a setting; a setting without one fails here.

Agents are read from a file and live in a real gateway; their models are a server of the test's own. What is set for a
model is in `test_model_settings`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
from toolspace.agents.host import entity_id_for
from toolspace.config.documentation import list_all_rows
from toolspace.server.demo import DEMO_AGENT_ID

FAILING = tool_calls_turn(("read_file", {"path": "/nowhere/at/all"}))
LOOKING = tool_calls_turn(("get_goals", {}))
NOTIFYING = tool_calls_turn(("send_notification", {"title": "Done", "body": "It is done."}))


class World:
    """Opens gateways with agents of some settings, all in one folder and with one server of models."""

    def __init__(self, folder: Path, brain: ScriptedModelServer) -> None:
        self.folder = folder
        self.brain = brain
        self._count = 0

    def agent(self, *, model: str = "m", **settings: Any) -> dict[str, Any]:
        return agent_config(self.brain, model={"name": model, "temperature": 0.5}, **settings)

    def file(self, head: Mapping[str, str], *, model: str = "m", **settings: Any) -> dict[str, Any]:
        """The same as a file of its own says it."""
        described = self.agent(model=model, agent=head, **settings)
        del described["system"]
        return described

    @asynccontextmanager
    async def ada(
        self, *script: Any, config: Mapping[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[AgentGateway]:
        """A gateway with one agent, which was told something."""
        async with self.house({"ada": self.agent(**settings)}, **(config or {})) as house:
            self.brain.script(*script)
            await house.say("Hi")
            yield house

    @asynccontextmanager
    async def house(self, agents: Any, **config: Any) -> AsyncIterator[AgentGateway]:
        """A gateway with these agents, and nothing kept from another."""
        self.brain.asked.clear()
        self._count += 1
        storage = {"dir": str(self.folder / f"kept-{self._count}")}
        async with open_agent_gateway(self.folder, self.brain, agents=agents, storage=storage, **config) as house:
            yield house


Check = Callable[[World], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def shows(*settings: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(settings, check))
        return check

    return keep


def of_agent(*settings: str) -> Callable[[Check], Check]:
    return shows(*(f"agents.<name>.{setting}" for setting in settings))


# Who it is


@of_agent("agent", "agent.name", "agent.description", "agent.system", "agents")
async def _(world: World) -> None:
    head = {"name": "ada", "description": "Knows the stars.", "system": "You look at stars."}
    (world.folder / "file.yaml").write_text(yaml.safe_dump(world.file(head, model="of-ada")))
    world.brain.script(
        tool_calls_turn(("agent__ada", {"prompt": "Which one?", "reason": "it knows"})), *message_turns("Vega")
    )
    world.brain.script("Vega.", model="of-ada")
    async with world.house([{**world.agent(agents=["ada"]), "name": "boss"}, "./file.yaml"]) as house:
        names = [one["name"] for one in (await house.api.get("/api/agents")).data["items"]]
        assert {"ada", "boss"} <= set(names)
        await house.say("Which star is that?")
        await house.wait_for_run_end(agent="boss")
        asked = world.brain.list_requests()[0]
        assert "Knows the stars." in offered_tools(asked)["agent__ada"]["description"]
        assert "agent__boss" not in offered_tools(world.brain.list_requests("of-ada")[0])
        assert list_input_texts(world.brain.list_requests("of-ada")[0])[0].startswith("You look at stars.")
        assert await house.list_agent_messages("boss") == ["Vega"]


@of_agent("spaces")
async def _(world: World) -> None:
    async with world.house({"ada": world.agent(spaces=["Room", "Garden"])}) as house:
        spaces = {one["name"]: one["id"] for one in (await house.api.get("/api/spaces")).data["items"]}
        assert spaces.keys() == {"Room", "Garden"}
        for space_id in spaces.values():
            members = (await house.api.get(f"/api/spaces/{space_id}/members")).data["items"]
            assert entity_id_for("ada") in [one["entityId"] for one in members]


@of_agent("knowledge")
async def _(world: World) -> None:
    (world.folder / "handbook").mkdir(exist_ok=True)
    (world.folder / "handbook" / "returns.md").write_text("# Returns\n\nParcels come back to the depot in Ghent.\n")
    async with world.house({"ada": world.agent(knowledge=["./handbook"])}) as house:
        await house.wait_for_documents()
        world.brain.script(tool_calls_turn(("search_knowledge", {"query": "where do parcels come back to"})))
        await house.say("Where to?")
        await house.wait_for_run_end()
        assert "depot in Ghent" in list_result_texts(world.brain.list_requests()[1])[0]


# How it thinks


@of_agent("loop", "loop.maxSteps")
async def _(world: World) -> None:
    async with world.ada(LOOKING, LOOKING, LOOKING, loop={"maxSteps": 2}) as house:
        run = await house.wait_for_run_end()
        assert (run["status"], run["steps"], len(world.brain.asked)) == ("failed", 2, 2)
        assert "loop.maxSteps" in run["error"]


@of_agent("loop.toolChoice")
async def _(world: World) -> None:
    for choice, sent in (("auto", (None, "auto")), ("required", ("required",)), ("none", ("none",))):
        async with world.ada(loop={"toolChoice": choice}) as house:
            await house.wait_for_run_end()
            assert world.brain.list_requests()[0].get("tool_choice") in sent
    async with world.ada(LOOKING, loop={"toolChoice": "get_goals"}) as house:
        await house.wait_for_run_end()
        first, second = world.brain.list_requests()
        assert first["tool_choice"] == {"type": "function", "function": {"name": "get_goals"}}
        assert second.get("tool_choice") in (None, "auto")  # Called first; then it is free to stop.


@of_agent("loop.maxToolCallsPerTurn")
async def _(world: World) -> None:
    many = tool_calls_turn(*[("get_goals", {})] * 3)
    async with world.ada(many, loop={"maxToolCallsPerTurn": 2}) as house:
        await house.wait_for_run_end()
        assert ["maxToolCallsPerTurn" in one for one in list_result_texts(world.brain.list_requests()[1])] == [
            False,
            False,
            True,
        ]


@of_agent("loop.review")
async def _(world: World) -> None:
    async with world.ada(FAILING, loop={"review": "rules"}) as house:
        await house.wait_for_run_end()
        assert len(world.brain.asked) == 2
    judged = json.dumps({"verdict": "complete", "assessment": "there is no such file"})
    async with world.ada(FAILING, judged, loop={"review": "model"}) as house:
        run = await house.wait_for_run_end()
        assert "there is no such file" in run["error"]
        judge = world.brain.list_requests()[1]
        assert "Judge it" in list_input_texts(judge)[0]
        assert judge["temperature"] == 0.5  # As the agent's model is asked for anything.


@of_agent("consciousness", "consciousness.maxTokens", "consciousness.minRecentCycles")
async def _(world: World) -> None:
    for recent, condensed in ((1, True), (2, False)):
        settings = {"maxTokens": 1, "minRecentCycles": recent}
        async with world.ada("One.", consciousness=settings) as house:
            await house.wait_for_run_end()
            world.brain.script("Two.", *(["He said hi."] if condensed else []), "Three.")
            for count, text in ((2, "How are you?"), (3, "Bye")):
                await house.say(text)
                await house.wait_for_run_end(count)
            last = "\n".join(list_input_texts(world.brain.list_requests()[3 if condensed else 2]))
            assert ("He said hi." in last, 'Husam (human): "Hi"' in last) == (condensed, not condensed)
            assert "How are you?" in last
            assert {one["temperature"] for one in world.brain.list_requests()} == {0.5}


@of_agent("limits", "limits.maxTokens", "limits.maxCost")
async def _(world: World) -> None:
    for name, most, model in (("maxTokens", 1000, "m"), ("maxCost", 0.001, "gpt-4.1")):
        async with world.house({"ada": world.agent(model=model, limits={name: most})}) as house:
            world.brain.script(LOOKING, LOOKING, model=model)
            await house.say("Hi")
            run = await house.wait_for_run_end()
            assert (run["status"], len(world.brain.asked)) == ("failed", 1)
            assert f"limits.{name}" in run["error"]


@of_agent("limits.timeout")
async def _(world: World) -> None:
    async with world.ada(world.brain.silence, limits={"timeout": "50ms"}) as house:
        assert "limits.timeout" in (await house.wait_for_run_end())["error"]
    async with world.ada(tool_calls_turn(("sleep", {"duration": 60})), limits={"timeout": "200ms"}) as house:
        assert "limits.timeout" in (await house.wait_for_run_end())["error"]
        assert len(world.brain.asked) == 1


@of_agent("limits.maxDepth")
async def _(world: World) -> None:
    asking = tool_calls_turn(("agent__bob", {"prompt": "Help", "reason": "it can"}))
    for most, refused in ((1, True), (2, False)):
        agents = {"ada": world.agent(agents=["bob"], limits={"maxDepth": most}), "bob": world.agent(model="of-bob")}
        async with world.house(agents) as house:
            world.brain.script(asking)
            await house.push_event("go")
            await house.wait_for_run_end()
            assert ("limits.maxDepth" in list_result_texts(world.brain.list_requests()[1])[0]) == refused


@of_agent("limits.maxAgentTurns")
async def _(world: World) -> None:
    for most, runs in ((0, 1), (1, 2)):
        async with world.house({"ada": world.agent(limits={"maxAgentTurns": most})}) as house:
            await house.api.create("/api/entities", type="agent", name="Bot", id="ent_bot")
            await house.api.create(f"/api/spaces/{ROOM}/members", entityId="ent_bot")
            await house.say("I am a bot.", sender="ent_bot")
            if most:
                await house.wait_for_run_end()
            await house.say("I am a person.")
            await house.wait_for_run_end(runs)
            assert len(await house.list_runs()) == runs
            assert "I am a bot." in "\n".join(
                list_input_texts(world.brain.list_requests()[-1])
            )  # Read, if not answered.


@of_agent("limits.cyclesPerMinute")
async def _(world: World) -> None:
    agents = {"ada": world.agent(limits={"cyclesPerMinute": 1}), "bob": world.agent(model="of-bob", spaces=[])}
    async with world.house(agents) as house:
        for count in (1, 2):
            await house.push_event("one")
            if count == 1:
                await house.wait_for_run_end()
            await house.push_event("one", agent="bob")
            await house.wait_for_run_end(count, agent="bob")
        assert len(await house.list_runs()) == 1
        inbox = (await house.api.get(f"/api/agents/{entity_id_for('ada')}/inbox")).data["items"]
        assert sorted(one["status"] for one in inbox) == ["pending", "processed"]


@of_agent("limits.inboxBatch")
async def _(world: World) -> None:
    gate = HeldTurn()
    async with world.ada(gate, limits={"inboxBatch": 2}) as house:
        await world.brain.wait_for_requests()
        for number in range(3):
            await house.push_event({"number": number})
        gate.open()
        await house.wait_for_run_end(3)
        assert [len(run["trigger"]["events"]) for run in await house.list_runs()] == [1, 2, 1]


@of_agent("router")
async def _(world: World) -> None:
    agents = {"ada": world.agent(router={"destinations": ["bob"]}), "bob": world.agent(model="of-bob", spaces=[])}
    async with world.house(agents) as house:
        await hands_over(world, house)


@shows("router.destinations")
async def _(world: World) -> None:
    own = world.file({"name": "ada", "system": "You know whom to ask."}, router={"destinations": ["bob"]})
    async with world.house({"bob": world.agent(model="of-bob", spaces=[])}, **own) as house:
        await hands_over(world, house)


async def hands_over(world: World, house: AgentGateway) -> None:
    world.brain.script(tool_calls_turn(("router__handoff-to", {"agent": "bob", "message": "You know ships."})))
    world.brain.script(*message_turns("It sails at noon."), model="of-bob")
    await house.say("When does it sail?")
    await house.wait_for_run_end(agent="bob")
    first = "\n".join(list_input_texts(world.brain.list_requests("of-bob")[0]))
    assert "You know ships." in first
    assert "When does it sail?" in first
    assert "router__handoff-to" not in offered_tools(world.brain.list_requests("of-bob")[0])
    assert await house.list_agent_messages("bob") == ["It sails at noon."]


# How it reaches people


async def accept(_: web.Request) -> web.Response:
    return web.Response(status=204)


async def notified(world: World, house: AgentGateway) -> str:
    """Has the agent notify someone; what came of it."""
    world.brain.script(NOTIFYING)
    before = len(world.brain.list_requests())
    await house.push_event("go")
    await world.brain.wait_for_requests(before + 2)
    return list_result_texts(world.brain.list_requests()[-1])[-1]


@of_agent("notifications")
@shows("notifications.webhook", "notifications.webhook.url", "notifications.webhook.headers")
async def _(world: World) -> None:
    async with http_server(accept) as shared, http_server(accept) as own:
        main = {"webhook": {"url": shared.url("/all"), "headers": {"X-Team": "blue"}}}
        async with world.house({"ada": world.agent()}, notifications=main) as house:
            await notified(world, house)
            assert received(shared) == ("/all", "blue", "Done")
        mine = {"webhook": own.url("/ada")}
        async with world.house({"ada": world.agent(notifications=mine)}, notifications=main) as house:
            await notified(world, house)
            assert received(own) == ("/ada", None, "Done")
            assert len(shared.requests) == 1


def received(server: HttpTestServer) -> tuple[str, str | None, str]:
    (seen,) = server.requests
    return seen.path, seen.headers.get("x-team"), json.loads(seen.body)["title"]


@shows(
    "notifications.smtp",
    "notifications.smtp.host",
    "notifications.smtp.port",
    "notifications.smtp.from",
    "notifications.smtp.to",
    "notifications.smtp.username",
    "notifications.smtp.password",
)
async def _(world: World) -> None:
    async with mail_server() as post:
        login = {"username": "robot", "password": "hunter2"}
        async with world.house({"ada": world.agent()}, notifications={"smtp": mailing(post.port, **login)}) as house:
            assert json.loads(await notified(world, house))["recipients"] == ["ann@example.com"]
        (mail,) = post.mails
        assert (mail.sender, mail.recipients) == ("robot@example.com", ["ann@example.com"])
        assert post.logins == [("robot", "hunter2")]


@shows("notifications.smtp.allowedRecipients")
async def _(world: World) -> None:
    sending = [("send_notification", {"title": "a", "body": "b", "to": f"eve@{host}.com"}) for host in ("x", "y")]
    async with mail_server() as post:
        smtp = mailing(post.port, allowedRecipients=["*@x.com"])
        async with world.ada(tool_calls_turn(*sending), config={"notifications": {"smtp": smtp}}) as house:
            await house.wait_for_run_end()
            assert ["allowedRecipients" in one for one in list_result_texts(world.brain.list_requests()[1])] == [
                False,
                True,
            ]


@shows("notifications.smtp.tls")
async def _(world: World) -> None:
    async with mail_server() as post:
        for tls, sent in (("none", True), ("starttls", False)):
            smtp = mailing(post.port, tls=tls)
            async with world.house({"ada": world.agent()}, notifications={"smtp": smtp}) as house:
                assert ("nobody was notified" not in await notified(world, house)) == sent


def mailing(port: int, **more: Any) -> dict[str, Any]:
    ways = {"host": "127.0.0.1", "port": port, "tls": "none", "from": "robot@example.com", "to": ["ann@example.com"]}
    return {**ways, **more}


# How it finds what it knows


@shows("embeddings.model", "embeddings.baseUrl", "embeddings.apiKey", "embeddings.headers")
async def _(world: World) -> None:
    """Words alone put the short document first; the server says that the long one is what was meant."""

    async def embed(request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        vectors = [[0.0, 1.0] if text.startswith("Lunch") else [1.0, 0.0] for text in texts]
        data = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        return web.json_response({"data": data})

    (world.folder / "library").mkdir(exist_ok=True)
    (world.folder / "library" / "a.txt").write_text("Lunch at noon.")
    (world.folder / "library" / "b.txt").write_text("The ship to the islands in the far north sails at noon each day.")
    asking = tool_calls_turn(("search_knowledge", {"query": "noon", "limit": 1}))
    async with http_server(embed) as server:
        said = {"model": "small", "baseUrl": server.url("/v1"), "apiKey": "sk-numbers", "headers": {"X-Team": "blue"}}
        for main, first in (({}, "Lunch"), ({"embeddings": said}, "The ship")):
            async with world.house({"ada": world.agent(knowledge=["./library"])}, **main) as house:
                await house.wait_for_documents(2)
                world.brain.script(asking)
                await house.push_event("When does it sail?")
                await house.wait_for_run_end()
                (found,) = json.loads(list_result_texts(world.brain.list_requests()[1])[0])["results"]
                assert found["text"].startswith(first)
        (seen,) = server.requests
        assert (seen.path, json.loads(seen.body)["model"]) == ("/v1/embeddings", "small")
        assert (seen.headers["authorization"], seen.headers["x-team"]) == ("Bearer sk-numbers", "blue")


# What all of them share


@shows("server.maxActiveAgents")
async def _(world: World) -> None:
    for most, beside in ((1, False), (2, True)):
        gate = HeldTurn()
        world.brain.script(gate)
        agents = {"ada": world.agent(), "bob": world.agent(model="of-bob"), "eve": world.agent(model="of-bob")}
        async with world.house(agents, server={"maxActiveAgents": most}) as house:
            await house.push_event("go")
            await world.brain.wait_for_requests()
            await house.push_event("go", agent="bob")
            if beside:
                await world.brain.wait_for_requests(model="of-bob")
            assert len(world.brain.list_requests("of-bob")) == int(beside)
            gate.open()
            await world.brain.wait_for_requests(model="of-bob")


@shows("demo")
async def _(world: World) -> None:
    for demo, there in ((False, []), (True, [DEMO_AGENT_ID])):
        async with world.house({}, demo=demo) as house:
            assert [one["id"] for one in (await house.api.get("/api/agents")).data["items"]] == there


OF_AGENTS = ("agents.", "router.", "notifications.", "embeddings.", "demo", "server.maxActiveAgents")
SETTINGS = [
    row.path
    for row in list_all_rows()
    if row.path.startswith(OF_AGENTS) and not row.path.startswith("agents.<name>.model")
]


@pytest.mark.spec("5.3")
@pytest.mark.parametrize("setting", SETTINGS)
async def test_every_documented_setting_of_agents_has_an_effect(setting: str, tmp_path: Path) -> None:
    assert setting in CHECKS, f"{setting} is documented, and no check shows what it does"
    async with open_model_server() as brain:
        await CHECKS[setting](World(tmp_path, brain))
