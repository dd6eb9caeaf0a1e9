"""Which tools a configured agent and its tasks are offered, as its model sees them in real requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.model_server import stream_reply, text_completion
from tests.server.scripted_agents import (
    ROOM,
    ScriptedModelServer,
    agent_config,
    list_input_texts,
    list_result_texts,
    offered_tools,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from toolspace import Toolspace
from toolspace.agents.agent import entity_id_for
from toolspace.builtin.catalog import builtin_tools
from toolspace.builtin.task_tools import agent_tools, session_tools, task_tools
from toolspace.core.tool_collections import BUILTIN_NAMES, TOOL_COLLECTIONS

TOOLS = [*builtin_tools, *task_tools, *session_tools, *agent_tools]
READ_ONLY = {tool.name for tool in TOOLS if tool.annotations.read_only}
FUNCTIONS = """
from toolspace import tool

@tool(visible=False)
def shred(path: str) -> str:
    \"\"\"Shreds a file.\"\"\"
    return "shredded"
"""


@pytest.mark.spec("19.3")
def test_the_built_in_tools_that_change_nothing_are_annotated_so() -> None:
    changing_tools = {
        *("set_env", "write_file", "delete_file", "move_file", "edit_file", "http_post", "http_request"),
        *("memory_write", "memory_patch", "memory_append", "spawn_task", "reply"),
    }
    assert changing_tools == BUILTIN_NAMES - READ_ONLY
    assert {tool.name for tool in TOOLS} == BUILTIN_NAMES


async def _offered_builtins(folder: Path, *, tools: Any = None, **config: Any) -> set[str]:
    """The built-in tools in the first request of the agent's model."""
    async with open_model_server() as model_server:
        agent = agent_config(model_server) if tools is None else agent_config(model_server, tools=tools)
        async with open_agent_gateway(folder, model_server, agents={"ada": agent}, **config) as setup:
            await setup.say("Hello")
            request = await model_server.wait_for_requests()
            names = offered_tools(request).keys()
            assert {"send_message", "enter_space", "set_goals"} <= names
            return set(names) & BUILTIN_NAMES


@pytest.mark.spec("19.3")
@pytest.mark.spec("10.7")
@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (None, READ_ONLY),
        ({"timeout": "5s"}, READ_ONLY),
        ({"builtins": True}, READ_ONLY),
        (["write_file"], READ_ONLY | {"write_file"}),
        (["memory_*", "spawn_task"], READ_ONLY | {"memory_write", "memory_patch", "memory_append", "spawn_task"}),
        (["mainAgentTools"], set(TOOL_COLLECTIONS["mainAgentTools"])),
        ("mainAgentTools", set(TOOL_COLLECTIONS["mainAgentTools"])),
        (["allTaskTools"], set(TOOL_COLLECTIONS["allTaskTools"])),
        (["reflectionTools", "sessionTools"], {*TOOL_COLLECTIONS["reflectionTools"], "session_archive_read"}),
        (["mainAgentTools", "write_file"], {*TOOL_COLLECTIONS["mainAgentTools"], "write_file"}),
        ({"toolsAllowed": ["mainAgentTools"]}, set(TOOL_COLLECTIONS["mainAgentTools"])),
        ({"toolsDenied": ["allTaskTools"]}, {"session_archive_read"}),
        ({"builtins": ["reflectionTools"]}, {*TOOL_COLLECTIONS["reflectionTools"], "task_list", "task_replay",
                                             "session_archive_read"}),
    ],
)  # fmt: skip
async def test_an_agent_is_offered_read_only_and_named_built_in_tools(
    tmp_path: Path, tools: Any, expected: set[str]
) -> None:
    assert await _offered_builtins(tmp_path, tools=tools) == expected


@pytest.mark.spec("19.3")
@pytest.mark.parametrize(
    ("own_tools", "expected"),
    [({}, READ_ONLY | {"write_file"}), ({"tools": ["edit_file"]}, READ_ONLY | {"edit_file"})],
)
async def test_names_in_the_main_file_hold_for_agents_that_name_none(
    tmp_path: Path, own_tools: Any, expected: set[str]
) -> None:
    async with open_model_server() as model_server:
        agents = {"ada": agent_config(model_server, **own_tools)}
        async with open_agent_gateway(tmp_path, model_server, agents=agents, tools=["write_file"]) as setup:
            await setup.say("Hello")
            offered_names = offered_tools(await model_server.wait_for_requests()).keys()
    assert offered_names & BUILTIN_NAMES == expected


@pytest.mark.spec("19.3")
async def test_a_tool_that_is_not_offered_cannot_be_called_nor_found(tmp_path: Path) -> None:
    """Nor in a batch. Functions stay as configured, and programs and keys call what they like."""
    (tmp_path / "tools.py").write_text(FUNCTIONS)
    write = {"path": str(tmp_path / "x.txt"), "content": "x"}
    async with open_model_server() as model_server:
        model_server.script(
            tool_calls_turn(
                ("write_file", write),
                ("agent__batch", {"calls": [{"id": "1", "tool": "write_file", "parameters": write}]}),
                ("shred", {"path": "x"}),
                ("agent__find_tools", {"query": "write a file", "limit": 20}),
            ),
        )
        async with open_agent_gateway(
            tmp_path,
            model_server,
            functions=["./tools.py"],
            defaults={"toolSearchThreshold": 0},
            tools={"allowedPaths": [str(tmp_path)]},
        ) as setup:
            await setup.say("Hello")
            await setup.wait_for_run_end()
            results = list_result_texts(model_server.list_requests()[1])
            reply = await setup.api.post("/api/tools/write_file/call", {"args": write})
    assert 'the agent "ada" is not offered "write_file"; add it to its tools to offer it' in results[0]
    assert "is not offered" in results[1]
    assert results[2] == "shredded"
    found_names = {tool["name"] for tool in json.loads(results[3])["tools"]}
    assert "read_file" in found_names
    assert not found_names & (BUILTIN_NAMES - READ_ONLY)
    assert (reply.status, reply.data["ok"]) == (200, True)


@pytest.mark.spec("10.7")
@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"tools": ["allTaskTool"]}, "tools[0]"),
        ({"tools": ["researchTools"]}, "tools[0]"),
        ({"tools": {"toolsAllowed": ["mainAgentTool"]}}, "tools.toolsAllowed"),
        ({"tools": {"toolsDenied": ["current_time", "AllTaskTools"]}}, "tools.toolsDenied[1]"),
        ({"tools": {"builtins": ["sesionTools"]}}, "tools.builtins"),
        ({"agents": {"ada": {"tools": ["mainAgentsTools"]}}}, "agents.ada.tools[0]"),
        ({"agents": {"ada": {"tasks": {"tools": ["workTools"]}}}}, "agents.ada.tasks.tools"),
        ({"policies": [{"tool": ["reflectionTool"], "decision": "deny"}]}, "policies[0].tool"),
        ({"quotas": [{"tool": "reflectionTool", "callsPerDay": 1}]}, "quotas[0].tool"),
        ({"hooks": [{"on": "after", "use": "mask_secrets", "tools": ["reflectionTool"]}]}, "hooks[0].tools"),
    ],
)
def test_an_unknown_collection_is_an_error_that_names_the_collections(tmp_path: Path, config: Any, place: str) -> None:
    file = tmp_path / "toolspace.json"
    file.write_text(json.dumps(config))
    with pytest.raises(Exception, match="there is no collection of tools") as error:
        Toolspace.open(file)
    assert place in str(error.value)
    assert "there are allTaskTools, mainAgentTools, reflectionTools, sessionTools" in str(error.value)


@pytest.mark.spec("10.7")
@pytest.mark.spec("8.1")
async def test_a_key_and_a_policy_may_name_a_collection(tmp_path: Path) -> None:
    policies = [{"tool": "reflectionTools", "decision": "deny"}]
    async with (
        open_model_server() as model_server,
        open_agent_gateway(tmp_path, model_server, policies=policies) as setup,
    ):
        key = await setup.api.create("/api/keys", kind="tools", name="k", toolsAllowed=["reflectionTools", "echo"])
        wrong = await setup.api.post("/api/keys", {"kind": "tools", "name": "w", "toolsAllowed": ["reflectionTool"]})
        holder = setup.api.with_headers(authorization=f"Bearer {key['key']}")
        names = {tool["name"] for tool in (await holder.get("/api/tools")).data["items"]}
        denied = await setup.api.post("/api/tools/memory_append/call", {"args": {"path": "a.md", "entry": "x"}})
        refused_call = await holder.post("/api/tools/current_time/call", {"args": {}})
    assert names <= set(TOOL_COLLECTIONS["reflectionTools"])
    assert wrong.status == 400
    assert "there is no collection of tools" in wrong.data["detail"]
    assert denied.data["errorKind"] == "not_permitted"
    assert refused_call.data["errorKind"] == "not_permitted"


@pytest.mark.spec("10.7")
@pytest.mark.spec("22.1")
@pytest.mark.spec("23.1")
async def test_a_hook_and_a_quota_may_name_a_collection(tmp_path: Path) -> None:
    (tmp_path / "guard.py").write_text("def refuse(call):\n    return {'deny': 'read only'}\n")
    path = tmp_path / "toolspace.yaml"
    path.write_text(
        "hooks: [{on: before, tools: [reflectionTools], use: './guard.py:refuse'}]\n"
        "quotas: [{tool: sessionTools, callsPerDay: 1}, {tools: [mainAgentTools, echo], callsPerDay: 1}]\n"
    )
    async with Toolspace.open(path) as ts:
        denied_call = await ts.call("memory_append", {"path": "facts/a.md", "entry": "x"})
        first_call = await ts.call("current_time", {})
        second_call = await ts.call("current_time", {})
        other_call = await ts.call("json_parse", {"text": "1"})
    assert denied_call.error == "Permission denied: read only"
    assert (first_call.ok, second_call.error_kind, other_call.ok) == (True, "limit_exceeded", True)


# A main agent and its tasks


def _role(request: Any) -> str:
    system = list_input_texts(request)[0]
    if "You work on a task for the agent" in system:
        return "task"
    return "reflection" if "You keep the long-term memory" in system else "main"


class RoleModelServer(ScriptedModelServer):
    """Has one script for the agent, one for its tasks and one for reflections."""

    def __init__(self, **scripts: list[bytes]) -> None:
        super().__init__()
        self._turns_by_role = scripts

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turns = self._turns_by_role.get(_role(self.requests[-1].json))
        await stream_reply(turns.pop(0) if turns else text_completion("Done."))(reader, writer)

    def list_tools(self, role: str) -> set[str]:
        """The tools in the first request of a role."""
        return set(offered_tools(next(item for item in self.list_requests() if _role(item) == role)))


@pytest.mark.spec("11.5")
@pytest.mark.spec("10.7")
@pytest.mark.spec("19.3")
async def test_a_main_agent_delegates_to_tasks_that_have_all_task_tools(tmp_path: Path) -> None:
    """It looks things up, spawns a task, and replies when the task has ended; the task does the work."""
    (tmp_path / "tools.py").write_text(FUNCTIONS)
    report = {"status": "success", "format": "markdown", "content": "2962 m"}
    model_server = RoleModelServer(
        main=[
            tool_calls_turn(("spawn_task", {"description": "look it up", "input": "How high is the Zugspitze?"})),
            text_completion("I wait."),
            tool_calls_turn(("reply", {"text": "It is 2962 m high.", "channelId": ROOM})),
        ],
        task=[
            tool_calls_turn(("write_file", {"path": str(tmp_path / "note.txt"), "content": "2962 m"})),
            tool_calls_turn(("agent__final_report", report)),
        ],
    )
    async with model_server.serve():
        agent = agent_config(model_server, tools=["mainAgentTools"], tasks={"tools": ["allTaskTools"]})
        async with open_agent_gateway(
            tmp_path,
            model_server,
            agents={"ada": agent},
            functions=["./tools.py"],
            tools={"allowedPaths": [str(tmp_path)]},
        ) as setup:
            await setup.say("How high is the Zugspitze?")
            await setup.wait_for_event(f"/api/spaces/{ROOM}/stream", "message.done")
            while not await setup.list_agent_messages():  # noqa: ASYNC110 - it comes after two more runs
                await asyncio.sleep(0.01)
            messages = await setup.list_agent_messages()
            tasks = (await setup.api.get(f"/api/agents/{entity_id_for('ada')}/tasks")).data["items"]
    assert messages == ["It is 2962 m high."]
    assert (tmp_path / "note.txt").read_text() == "2962 m"
    assert [(task["status"], task["result"]) for task in tasks] == [("completed", "2962 m")]
    assert model_server.list_tools("main") & BUILTIN_NAMES == set(TOOL_COLLECTIONS["mainAgentTools"])
    assert model_server.list_tools("task") & BUILTIN_NAMES == set(TOOL_COLLECTIONS["allTaskTools"])
    assert model_server.list_tools("task") >= {"shred", "agent__final_report"}
    assert not model_server.list_tools("task") & {"send_message", "spawn_task", "reply"}


@pytest.mark.spec("11.5")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tools": ["spawn_task", "write_file"]}, (READ_ONLY - {"session_archive_read"}) | {"write_file", "shred"}),
        ({"tools": ["spawn_task"], "tasks": {"tools": ["current_time"]}}, {"current_time"}),
        ({"tools": ["spawn_task"], "tasks": {"tools": ["sessionTools", "shr*"]}}, {"session_archive_read", "shred"}),
        ({"tools": ["spawn_task"], "tasks": {"tools": []}}, {"shred"}),
    ],
)
async def test_tasks_get_the_tools_of_their_setting_or_of_their_agent(
    tmp_path: Path, settings: Any, expected: set[str]
) -> None:
    (tmp_path / "tools.py").write_text(FUNCTIONS)
    spawn = tool_calls_turn(("spawn_task", {"description": "d", "input": "i"}))
    model_server = RoleModelServer(main=[spawn])
    async with model_server.serve():
        agents = {"ada": agent_config(model_server, **settings)}
        async with open_agent_gateway(tmp_path, model_server, agents=agents, functions=["./tools.py"]) as setup:
            await setup.push_event("begin")
            while not any(_role(request) == "task" for request in model_server.list_requests()):
                await model_server.wait_for_requests(len(model_server.requests) + 1)
    assert model_server.list_tools("task") & (BUILTIN_NAMES | {"shred"}) == expected
