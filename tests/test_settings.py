"""Every documented setting has an effect: settings of calls, local tools, queues and providers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.setting_coverage import SettingCoverage
from toolspace import ProviderError, ToolContext, Toolspace

pytestmark = pytest.mark.spec("5.3")

TOOLS = """
import asyncio
from toolspace import tool, ToolContext

inside = most = runs = 0

@tool
async def slow() -> None:
    await asyncio.sleep(60)

@tool
async def big(size: int) -> str:
    return "line\\n" * (size // 5)

@tool
async def busy(n: int = 0) -> int:
    global inside, most
    inside += 1
    most = max(most, inside)
    await asyncio.sleep(0.005)
    inside -= 1
    return most

@tool
async def counted(key: str = "") -> int:
    global runs
    runs += 1
    return runs
"""

coverage = SettingCoverage()


OpenToolspace = Callable[..., Toolspace]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


@pytest.fixture
def open_toolspace(folder: Path) -> OpenToolspace:

    def open_with(**config: Any) -> Toolspace:
        path = folder / "toolspace.yaml"
        path.write_text(yaml.safe_dump({"functions": "./tools.py", "storage": {"dir": "./state"}, **config}))
        return Toolspace.open(path, environ={"HOME": str(folder), "PATH": os.environ["PATH"]})

    return open_with


@coverage.covers("defaults.toolTimeout", "tools.timeout")
async def test_calls_time_out_after_the_configured_time(open_toolspace: OpenToolspace, folder: Path) -> None:
    for config in ({"defaults": {"toolTimeout": 20}}, {"tools": {"timeout": "20ms"}}):
        async with open_toolspace(**config) as ts:
            assert (await ts.call("slow")).error == "Tool execution timed out after 20ms"


@coverage.covers("defaults.toolResponseMaxBytes")
async def test_larger_results_are_stored(open_toolspace: OpenToolspace, folder: Path) -> None:
    async with open_toolspace(defaults={"toolResponseMaxBytes": 1000}) as ts:
        assert "tool_output" in (await ts.run().call("big", {"size": 2000})).result


@coverage.covers("defaults.maxInlineBytes")
async def test_larger_results_are_stored_for_programs_too(open_toolspace: OpenToolspace, folder: Path) -> None:
    async with open_toolspace(defaults={"toolResponseMaxBytes": 500, "maxInlineBytes": 1000}) as ts:
        assert "tool_output" not in (await ts.call("big", {"size": 900})).result
        assert "tool_output" in (await ts.call("big", {"size": 2000})).result


@coverage.covers("defaults.toolOutputTtl", "storage.dir")
async def test_stored_results_expire_and_lie_in_the_state_directory(
    open_toolspace: OpenToolspace, folder: Path
) -> None:
    async with open_toolspace(defaults={"toolResponseMaxBytes": 1000, "toolOutputTtl": "1h"}) as ts:
        result = await ts.run().call("big", {"size": 2000})
        assert abs(result.extras["expiresAt"] - result.completed_at - 3_600_000) < 60_000
        assert list((folder / "state" / "outputs").rglob("*"))


@coverage.covers("defaults.maxToolCallsPerTurn")
async def test_a_turn_has_a_limit_of_calls(open_toolspace: OpenToolspace, folder: Path) -> None:
    async with open_toolspace(defaults={"maxToolCallsPerTurn": 1}) as ts:
        run = ts.run()
        assert [(await run.call("counted")).ok for _ in range(2)] == [True, False]


@coverage.covers("defaults.maxConcurrentTools", "tools.maxConcurrent")
async def test_a_run_has_a_limit_of_concurrent_calls(open_toolspace: OpenToolspace, folder: Path) -> None:
    for config in ({"defaults": {"maxConcurrentTools": 2}}, {"tools": {"maxConcurrent": 2}}):
        async with open_toolspace(**config) as ts:
            run = ts.run()
            results = await asyncio.gather(*(run.call("busy", {"n": n}) for n in range(6)))
            assert max(result.result for result in results) == 2
    # Without the setting, agents have a limit of their own; null says that they have none.
    limits = [
        open_toolspace(**config).orchestrator.defaults.max_concurrent_tools
        for config in ({}, {"defaults": {"maxConcurrentTools": None}})
    ]
    assert [(limit.value, limit.source == "default") for limit in limits] == [(None, True), (None, False)]


@coverage.covers("defaults.contextWindow")
async def test_results_beyond_the_context_window_are_stored(open_toolspace: OpenToolspace, folder: Path) -> None:
    async with open_toolspace(defaults={"contextWindow": 1000}) as ts:
        result = await ts.run().call("big", {"size": 50_000})
        assert result.result["tool_output"]["reason"] == "token_budget"


@coverage.covers("defaults.circuitBreakerFailures", "defaults.circuitBreakerDelay")
async def test_a_service_that_fails_is_not_called_for_a_while(open_toolspace: OpenToolspace) -> None:
    services = {"w": {"url": "http://127.0.0.1:9/"}, "other": {"url": "http://127.0.0.1:9/"}}
    for failures, delay, refused_count in ((2, "1h", 2), (None, "1h", 0), (3, "1m", 1)):
        defaults = {"circuitBreakerFailures": failures, "circuitBreakerDelay": delay}
        async with open_toolspace(restTools=services, defaults=defaults) as ts:
            errors = [(await ts.call("rest__w")).error or "" for _ in range(4)]
            assert ["circuit breaker" in error for error in errors].count(True) == refused_count
            assert "circuit breaker" not in ((await ts.call("rest__other")).error or "")  # A service of its own.
            statuses = dict(ts.orchestrator.circuits.statuses())
            if refused_count:
                assert ((statuses["rest__w"].next_probe_at or 0) > time.time() + 60) == (delay == "1h")


@pytest.mark.spec("22.4")
@coverage.covers(
    "tools.overrides.<name>.circuitBreakerFailures",
    "tools.overrides.<name>.circuitBreakerDelay",
)
async def test_a_tool_may_have_no_circuit_breaker_or_another_one(open_toolspace: OpenToolspace) -> None:
    services = {"w": {"url": "http://127.0.0.1:9/"}, "other": {"url": "http://127.0.0.1:9/"}}
    overrides = {
        "rest__w": {"circuitBreakerFailures": 0},
        "rest__other": {"circuitBreakerFailures": 1, "circuitBreakerDelay": "1h"},
    }
    async with open_toolspace(restTools=services, tools={"overrides": overrides}) as ts:
        errors = [(await ts.call("rest__w")).error or "" for _ in range(7)]
        assert not any("circuit breaker" in error for error in errors)
        errors = [(await ts.call("rest__other")).error or "" for _ in range(2)]
        assert ["circuit breaker" in error for error in errors] == [False, True]
        status = dict(ts.orchestrator.circuits.statuses())["rest__other"]
        assert (status.next_probe_at or 0) > time.time() + 1800


@coverage.covers("defaults.toolSearchThreshold")
async def test_many_definitions_are_replaced_by_a_search_tool(open_toolspace: OpenToolspace, folder: Path) -> None:
    def list_model_tools(ts: Toolspace) -> list[str]:
        return [tool["name"] for tool in ts.to_llm_tools("anthropic")]

    assert "counted" in list_model_tools(open_toolspace())
    names_with_search = list_model_tools(open_toolspace(defaults={"toolSearchThreshold": 10}))
    assert "agent__find_tools" in names_with_search
    assert "counted" not in names_with_search


@coverage.covers("queues.<name>.concurrent", "tools.overrides.<name>.queue")
async def test_a_queue_limits_concurrent_calls(open_toolspace: OpenToolspace, folder: Path) -> None:
    config = {"queues": {"q": {"concurrent": 3}}, "tools": {"overrides": {"busy": {"queue": "q"}}}}
    async with open_toolspace(**config) as ts:
        results = await asyncio.gather(*(ts.call("busy", {"n": n}) for n in range(9)))
        assert max(result.result for result in results) == 3


@coverage.covers("tools.overrides.<name>.priority")
async def test_a_tool_of_higher_priority_leaves_its_queue_first(open_toolspace: OpenToolspace, folder: Path) -> None:
    overrides = {"busy": {"queue": "q"}, "counted": {"queue": "q", "priority": 1}}
    async with open_toolspace(queues={"q": {"concurrent": 1}}, tools={"overrides": overrides}) as ts:
        completed_names: list[str] = []

        async def call(name: str) -> None:
            await ts.call(name)
            completed_names.append(name)

        await asyncio.gather(*map(call, ("busy", "busy", "counted")))
        assert completed_names == ["busy", "counted", "busy"]


@coverage.covers("queues.<name>.rate", "queues.<name>.waitTimeout")
async def test_a_queue_limits_the_rate_and_the_wait_of_calls(open_toolspace: OpenToolspace, folder: Path) -> None:
    queue = {"concurrent": 5, "rate": "2/hour", "waitTimeout": 20}
    async with open_toolspace(queues={"q": queue}, tools={"overrides": {"counted": {"queue": "q"}}}) as ts:
        assert [(await ts.call("counted")).error_kind for _ in range(3)] == [None, None, "limit_exceeded"]


@coverage.covers("queues.<name>.maxWaiting")
async def test_a_queue_limits_how_many_calls_wait(open_toolspace: OpenToolspace, folder: Path) -> None:
    queue = {"concurrent": 1, "maxWaiting": 1}
    async with open_toolspace(queues={"q": queue}, tools={"overrides": {"busy": {"queue": "q"}}}) as ts:
        results = await asyncio.gather(*(ts.call("busy") for _ in range(4)))
        assert [result.error_kind for result in results].count("limit_exceeded") == 2


@coverage.covers("tools.allowedPaths")
async def test_file_tools_use_allowed_paths_only(open_toolspace: OpenToolspace, folder: Path) -> None:
    (folder / "in").mkdir()
    (folder / "in" / "a.txt").write_text("a")
    (folder / "b.txt").write_text("b")
    async with open_toolspace(tools={"allowedPaths": ["./in"]}) as ts:
        assert (await ts.call("read_file", {"path": str(folder / "in" / "a.txt")})).ok
        assert (await ts.call("read_file", {"path": str(folder / "b.txt")})).error_kind == "not_permitted"


@coverage.covers("tools.allowWritingCode")
async def test_file_tools_write_the_code_that_a_pattern_allows(open_toolspace: OpenToolspace, folder: Path) -> None:
    (folder / "loaded_code.py").write_text(
        "from toolspace import tool\n\n@tool\ndef hello() -> str:\n    return 'hi'\n"
    )
    written_file = {"path": str(folder / "beside.py"), "content": "x = 1"}
    for patterns, is_allowed in (([], False), (["./other*"], False), (["./*.py"], True)):
        tools = {"allowedPaths": ["."], "allowWritingCode": patterns}
        async with open_toolspace(functions="./loaded_code.py", tools=tools) as ts:
            assert (await ts.call("write_file", written_file)).ok is is_allowed
            configuration = await ts.call("write_file", {"path": str(folder / "toolspace.yaml"), "content": ""})
            assert configuration.error_kind == "not_permitted"


@coverage.covers("tools.allowedEnv")
async def test_environment_tools_use_allowed_variables_only(open_toolspace: OpenToolspace, folder: Path) -> None:
    os.environ["TOOLSPACE_TEST_NAME"] = "ann"
    try:
        async with open_toolspace() as ts:
            assert (await ts.call("get_env", {"key": "TOOLSPACE_TEST_NAME"})).error_kind == "not_permitted"
        async with open_toolspace(tools={"allowedEnv": ["TOOLSPACE_TEST_NAME"]}) as ts:
            assert (await ts.call("get_env", {"key": "TOOLSPACE_TEST_NAME"})).result == {"value": "ann"}
        async with open_toolspace(tools={"allowedEnv": []}) as ts:
            assert (await ts.call("get_env", {"key": "LANG"})).error_kind == "not_permitted"
    finally:
        del os.environ["TOOLSPACE_TEST_NAME"]


@coverage.covers("tools.memoryDir")
async def test_memory_tools_write_to_the_memory_directory(open_toolspace: OpenToolspace, folder: Path) -> None:
    async with open_toolspace(tools={"memoryDir": "./notes"}) as ts:
        assert (await ts.call("memory_write", {"path": "facts/a.md", "content": "x"})).ok
    assert (folder / "notes" / "facts" / "a.md").read_text() == "x"


@coverage.covers("tools.memoryScope")
@pytest.mark.spec("21.1")
async def test_each_key_has_a_memory_directory_unless_they_are_shared(folder: Path) -> None:
    from tests.server.gateway_api import open_api, write_config
    from toolspace.server.gateway import Gateway

    (folder / "gateway").mkdir()
    for scope, expected in (("principal", ([], ["mine.md"])), ("shared", (["mine.md"], ["mine.md"]))):
        tools = {"memoryDir": f"./{scope}", "memoryScope": scope}
        async with Gateway.open(write_config(folder / "gateway", tools=tools)) as gateway, open_api(gateway) as api:
            keys = [await api.create("/api/keys", kind="tools", name=name) for name in ("one", "two")]
            first, second = (api.with_headers(authorization=f"Bearer {key['key']}") for key in keys)
            note = {"path": "mine.md", "content": "> Summary: a secret"}
            assert (await first.post("/api/tools/memory_write/call", {"args": note})).data["ok"]
            lists = [(await key.post("/api/tools/memory_list/call", {})).data["result"] for key in (second, first)]
            assert tuple([file["path"] for file in files] for files in lists) == expected
            # The file tools do not reach them either.
            file = f"./gateway/{scope}-keys/{keys[0]['id']}/mine.md"
            reply = await second.post("/api/tools/read_file/call", {"args": {"path": file}})
            assert reply.data["ok"] is False


@coverage.covers("tools.sessionDir")
async def test_archived_sessions_are_read_from_the_session_directory(
    open_toolspace: OpenToolspace, folder: Path
) -> None:
    from toolspace.builtin.task_tools import session_tools

    (folder / "sessions" / "ada").mkdir(parents=True)
    (folder / "sessions" / "ada" / "old.md").write_text("what was said")
    async with open_toolspace(tools={"sessionDir": "./sessions"}) as ts:
        ts.add_tool(session_tools[0])
        run = ts.run(context=ToolContext(agent_id="ada"))
        assert (await run.call("session_archive_read", {"file": "old.md"})).result == "what was said"
        assert (await run.call("session_archive_read", {"file": "../../tools.py"})).error_kind == "not_permitted"


@coverage.covers("tools.builtins")
async def test_built_in_tools_are_selected(open_toolspace: OpenToolspace, folder: Path) -> None:
    assert open_toolspace().find_tool("json_parse") is not None
    assert open_toolspace(tools={"builtins": False}).find_tool("json_parse") is None
    some = open_toolspace(tools={"builtins": ["json_*"]})
    assert some.find_tool("json_parse") is not None
    assert some.find_tool("read_file") is None


@coverage.covers("tools.toolsAllowed", "tools.toolsDenied")
async def test_local_tools_are_allowed_and_denied(open_toolspace: OpenToolspace, folder: Path) -> None:
    ts = open_toolspace(tools={"toolsAllowed": ["json_*", "counted"], "toolsDenied": ["*_stringify"]})
    local = [tool.name for tool in ts.list_tools() if not tool.name.startswith("agent__")]
    assert local == ["json_parse", "counted"]
    assert (await ts.call("slow")).error_kind == "not_permitted"


@coverage.covers("tools.aliases")
async def test_an_alias_calls_its_tool(open_toolspace: OpenToolspace, folder: Path) -> None:
    async with open_toolspace(tools={"aliases": {"tally": "counted"}}) as ts:
        assert (await ts.call("tally")).tool == "counted"


@coverage.covers("tools.overrides", "tools.overrides.<name>.timeout")
async def test_an_override_sets_the_timeout(open_toolspace: OpenToolspace, folder: Path) -> None:
    async with open_toolspace(tools={"overrides": {"sl*": {"timeout": 15}}}) as ts:
        assert (await ts.call("slow")).error == "Tool execution timed out after 15ms"


@coverage.covers("tools.overrides.<name>.cache", "tools.overrides.<name>.cacheScope")
@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({"cacheScope": "shared"}, [1, 1, 1]),
        ({"cacheScope": "principal"}, [1, 2, 1]),
        ({"cachePerUser": False}, [1, 1, 1]),
        ({"cachePerUser": True}, [1, 2, 1]),
        ({}, [1, 2, 1]),
    ],
    ids=str,
)
async def test_an_override_sets_the_cache_for_all_or_each_principal(
    open_toolspace: OpenToolspace, folder: Path, scope: dict[str, Any], expected: list[int]
) -> None:
    async with open_toolspace(tools={"overrides": {"counted": {"cache": "1m", **scope}}}) as ts:
        users = [ToolContext(user_id=user) for user in ("ann", "bob", "ann")]
        assert [(await ts.call("counted", context=user)).result for user in users] == expected


@coverage.covers("tools.overrides.<name>.maxBytes")
async def test_an_override_sets_the_size_limit(open_toolspace: OpenToolspace, folder: Path) -> None:
    async with open_toolspace(tools={"overrides": {"big": {"maxBytes": 500}}}) as ts:
        assert "tool_output" in (await ts.run().call("big", {"size": 1000})).result


@coverage.covers("tools.overrides.<name>.enabled", "tools.overrides.<name>.visible")
async def test_an_override_disables_or_hides_a_tool(open_toolspace: OpenToolspace, folder: Path) -> None:
    ts = open_toolspace(tools={"overrides": {"slow": {"enabled": False}, "counted": {"visible": False}}})
    assert "slow" not in [tool.name for tool in ts.list_tools()]
    assert (await ts.call("slow")).error_kind == "not_permitted"
    tool = ts.find_tool("counted")
    assert tool is not None
    assert tool.visible is False


DEFINITION = {
    "name": "greet",
    "description": "Greets.",
    "executionType": "static",
    "inputSchema": {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]},
    "outputSchema": {"type": "string"},
    "category": "data",
    "visible": True,
    "isAsync": True,
    "timeout": "7s",
    "execution": {"output": "Hello {{who}}"},
    "queue": "q",
    "cache": "1m",
    "annotations": {"readOnly": True},
    "tags": ["polite"],
    "version": "2",
}


@coverage.covers(
    "tools.definitions",
    *(f"tools.definitions.<name>.{key}" for key in DEFINITION if key != "name"),
    "tools.definitions.<name>.cacheScope",
    "tools.definitions.<name>.priority",
    "tools.definitions.<name>.approval",
    "tools.definitions.<name>.enabled",
)
async def test_a_definition_becomes_a_tool_with_all_its_settings(open_toolspace: OpenToolspace, folder: Path) -> None:
    queues = {"q": {"concurrent": 1}}
    async with open_toolspace(queues=queues, tools=[{**DEFINITION, "cacheScope": "shared", "priority": 5}]) as ts:
        definition = ts.find_tool("greet")
        assert definition is not None
        wire = definition.to_dict()
        for key in ("description", "inputSchema", "outputSchema", "category", "visible", "isAsync", "version", "tags"):
            assert wire[key] == DEFINITION[key], key
        assert (wire["timeout"], wire["cache"], wire["annotations"]) == (7000, 60000, {"readOnly": True})
        assert (await ts.call("greet", {"who": "Ann"})).result == "Hello Ann"
        assert (await ts.call("greet", {})).error_kind == "invalid_parameters"
        explanation = ts.orchestrator.explain("greet")
        assert explanation is not None
        settings = explanation[1]
        assert (settings.queue.value, settings.cache_scope.value, settings.priority.value) == ("q", "shared", 5)
    assert (
        open_toolspace(queues=queues, tools={"definitions": [{**DEFINITION, "enabled": False}]}).find_tool("greet")
        is None
    )
    careful_ts = open_toolspace(queues=queues, tools=[{**DEFINITION, "approval": "required"}])
    assert (await careful_ts.call("greet", {"who": "Ann"})).error_kind == "not_permitted"
    internal = open_toolspace(tools=[{"name": "show", "executionType": "internal", "inputSchema": {"type": "object"}}])
    assert (await internal.call("show", {"a": 1})).result == {"success": True, "args": {"a": 1}}


@coverage.covers("tools.overrides.<name>.approval")
async def test_an_override_requires_approval(open_toolspace: OpenToolspace, folder: Path) -> None:
    async with open_toolspace(tools={"overrides": {"counted": {"approval": "required"}}}) as ts:
        assert (await ts.call("counted")).error_kind == "not_permitted"
        assert (await ts.call("busy")).ok


@coverage.covers("defaults.pendingCallTtl", "tools.definitions.<name>.expiresAfter")
async def test_pending_calls_expire_after_the_configured_time(open_toolspace: OpenToolspace, folder: Path) -> None:
    from tests.server.gateway_api import SECRET, open_api
    from toolspace.server.gateway import Gateway

    external_tool = {"executionType": "external", "isAsync": True, "visible": False}
    open_toolspace(
        server={"secretKey": SECRET},
        defaults={"pendingCallTtl": "3d"},
        tools=[{"name": "long", **external_tool}, {"name": "short", **external_tool, "expiresAfter": "2h"}],
    )
    async with (
        Gateway.open(folder / "toolspace.yaml", environ={"HOME": str(folder)}) as gateway,
        open_api(gateway) as api,
    ):
        for name, hours in (("long", 72), ("short", 2)):
            pending = (await api.post(f"/api/tools/{name}/call", {"args": {}})).data
            call = (await api.get(f"/api/calls/{pending['callId']}")).data
            assert round((call["expiresAt"] - call["createdAt"]) / 3_600_000, 3) == hours


@coverage.covers("tools.definitions.<name>.whenUnserved")
async def test_calls_that_nobody_serves_fail_at_once_if_the_tool_says_so(
    open_toolspace: OpenToolspace, folder: Path
) -> None:
    from tests.server.gateway_api import SECRET, open_api
    from toolspace.server.gateway import Gateway

    external_tool = {"executionType": "external", "visible": False, "timeout": 50}
    open_toolspace(
        server={"secretKey": SECRET},
        tools=[{"name": "wait", **external_tool}, {"name": "fail", **external_tool, "whenUnserved": "fail"}],
    )
    async with (
        Gateway.open(folder / "toolspace.yaml", environ={"HOME": str(folder)}) as gateway,
        open_api(gateway) as api,
    ):
        kinds = [(await api.post(f"/api/tools/{name}/call", {})).data["errorKind"] for name in ("wait", "fail")]
        assert kinds == ["timeout", "execution_error"]


@coverage.covers("storage.cache")
async def test_the_cache_on_disk_survives_a_restart(open_toolspace: OpenToolspace, folder: Path) -> None:
    config = {"storage": {"dir": "./state", "cache": "disk"}, "tools": {"overrides": {"counted": {"cache": "1h"}}}}
    answers = []
    for _ in range(2):
        async with open_toolspace(**config) as ts:
            answers.append((await ts.call("counted")).result)
    assert answers == [1, 1]


@coverage.covers(
    "storage.outputs", "storage.outputs.perSession", "storage.outputs.perPrincipal", "storage.outputs.total"
)
@pytest.mark.parametrize("key", ["perSession", "perPrincipal", "total"])
async def test_stored_outputs_have_limits(open_toolspace: OpenToolspace, folder: Path, key: str) -> None:
    config = {"storage": {"outputs": {key: 3000}}, "tools": {"overrides": {"big": {"maxBytes": 500}}}}
    async with open_toolspace(**config) as ts:
        run = ts.run(context=ToolContext(user_id="ann", session_id="s"))
        results = [await run.call("big", {"size": size}) for size in (2000, 1500, 900)]
        assert [result.ok for result in results] == [True, False, True]
        assert results[1].error_kind == "limit_exceeded"
        assert f"storage.outputs.{key}" in (results[1].error or "")


@coverage.covers("functions")
async def test_functions_are_selected(open_toolspace: OpenToolspace, folder: Path) -> None:
    assert open_toolspace().find_tool("counted") is not None
    assert open_toolspace(functions="./tools.py:slow").find_tool("counted") is None


PROVIDER = """
import asyncio
from toolspace import Tool, ToolProvider, ToolResult

class Plug(ToolProvider):
    namespace = "plug"

    def __init__(self, greeting="hello", start=True):
        super().__init__()
        self.greeting, self.start, self.inside, self.most, self.runs = greeting, start, 0, 0, 0

    def list_tools(self):
        return [Tool(name, "", {"type": "object"}) for name in ("greet", "slow", "busy", "counted")]

    async def warmup(self):
        if not self.start:
            raise ConnectionError("nobody answers")

    async def execute(self, name, parameters, context):
        self.runs += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep({"slow": 60, "busy": 0.005}.get(name, 0))
        self.inside -= 1
        return ToolResult(ok=True, result={"greet": self.greeting, "counted": self.runs}.get(name, self.most))
"""


@coverage.covers(
    "providers.<name>.uses", "providers.<name>.namespace", "providers.<name>.settings", "providers.<name>.enabled"
)
async def test_a_provider_is_created_with_its_namespace_and_settings(
    open_toolspace: OpenToolspace, folder: Path
) -> None:
    (folder / "plug.py").write_text(PROVIDER)
    plug = {"uses": "./plug.py:Plug"}
    async with open_toolspace(
        providers={
            "a": plug,
            "b": {**plug, "namespace": "other", "settings": {"greeting": "hi"}},
            "c": {**plug, "namespace": "third", "enabled": False},
        }
    ) as ts:
        assert (await ts.call("plug__greet")).result == "hello"
        assert (await ts.call("other__greet")).result == "hi"
        assert (await ts.call("third__greet")).error_kind == "unknown_tool"


@coverage.covers("providers.<name>.required")
async def test_a_required_provider_must_start(open_toolspace: OpenToolspace, folder: Path) -> None:
    (folder / "plug.py").write_text(PROVIDER)
    plug = {"uses": "./plug.py:Plug", "settings": {"start": False}}
    async with open_toolspace(providers={"a": plug}) as ts:
        assert ts.orchestrator.unavailable_providers() == {"plug": "nobody answers"}
    with pytest.raises(ProviderError, match="nobody answers"):
        await open_toolspace(providers={"a": {**plug, "required": True}}).__aenter__()


@coverage.covers("providers.<name>.toolsAllowed", "providers.<name>.toolsDenied")
async def test_tools_of_a_provider_are_allowed_and_denied(open_toolspace: OpenToolspace, folder: Path) -> None:
    (folder / "plug.py").write_text(PROVIDER)
    plug = {"uses": "./plug.py:Plug", "toolsAllowed": ["*U*", "greet"], "toolsDenied": ["busy"]}
    async with open_toolspace(providers={"a": plug}) as ts:
        assert [tool.name for tool in ts.list_tools() if tool.name.startswith("plug")] == [
            "plug__greet",
            "plug__counted",
        ]
        assert (await ts.call("plug__busy")).error_kind == "not_permitted"


@coverage.covers(
    "providers.<name>.queue",
    "providers.<name>.cache",
    "providers.<name>.cacheScope",
    "providers.<name>.requestTimeoutMs",
    "providers.<name>.circuitBreakerFailures",
    "providers.<name>.circuitBreakerDelay",
)
async def test_a_provider_sets_queue_cache_and_timeout_of_its_tools(
    open_toolspace: OpenToolspace, folder: Path
) -> None:
    (folder / "plug.py").write_text(PROVIDER)
    plug = {"uses": "./plug.py:Plug"}
    async with open_toolspace(queues={"q": {"concurrent": 2}}, providers={"a": {**plug, "queue": "q"}}) as ts:
        results = await asyncio.gather(*(ts.call("plug__busy", {"n": n}) for n in range(6)))
        assert max(result.result for result in results) == 2
    async with open_toolspace(providers={"a": {**plug, "cache": "1m", "requestTimeoutMs": 15}}) as ts:
        assert [(await ts.call("plug__counted")).result for _ in range(2)] == [1, 1]
        assert (await ts.call("plug__counted", context=ToolContext(user_id="ann"))).result == 2
        assert (await ts.call("plug__slow")).error == "Tool execution timed out after 15ms"
    async with open_toolspace(providers={"a": {**plug, "cache": "1m", "cacheScope": "shared"}}) as ts:
        users = [ToolContext(user_id=user) for user in ("ann", "bob")]
        assert [(await ts.call("plug__counted", context=user)).result for user in users] == [1, 1]
    breaker = {"requestTimeoutMs": 15, "circuitBreakerFailures": 1, "circuitBreakerDelay": "1h"}
    async with open_toolspace(providers={"a": {**plug, **breaker}}) as ts:
        errors = [(await ts.call("plug__slow")).error or "" for _ in range(2)]
        assert ["circuit breaker" in error for error in errors] == [False, True]
        [(_, status)] = ts.orchestrator.circuits.statuses()
        assert (status.next_probe_at or 0) > time.time() + 1800


@coverage.covers("storage.redis")
def test_redis_has_no_effect_yet_and_a_warning(open_toolspace: OpenToolspace) -> None:
    warnings = open_toolspace(storage={"redis": "redis://localhost"}).warnings
    assert any("not in effect" in warning for warning in warnings)


OTHER_MODULES = (
    # test_policy_settings.py
    "policies[].",
    # test_quota_settings.py
    "quotas[].",
    # test_source_settings.py
    "mcpServers.",
    "restTools.",
    "openapi.",
    "defaults.mcpInitConcurrency",
    "defaults.startPatience",
    "defaults.traceMCP",
    "defaults.descriptionPrefix",
    "tools.mcpServers",
    # test_configured_hooks.py
    "hooks.",
    # test_gateway_settings.py
    "server.",
    "storage.url",
    # test_agent_settings.py
    "agents.",
    "router.",
    "notifications.",
    "embeddings.",
    "demo",
)


@coverage.covers(
    "tools.allowedHosts",
    "tools.webSearch",
    *(f"tools.webSearch.{key}" for key in ("provider", "apiKey", "maxResults", "searchEngineId", "url")),
)
async def test_network_tools_use_allowed_hosts_and_the_search_engine(open_toolspace: OpenToolspace) -> None:
    from aiohttp import web

    requests: list[Any] = []

    async def search(request: web.Request) -> web.Response:
        body = await request.json()
        requests.append((request.headers.get("Authorization"), body))
        results = [{"title": f"t{n}", "url": f"https://example.com/{n}", "content": "c"} for n in range(9)]
        return web.json_response({"results": results})

    async def custom(request: web.Request) -> web.Response:
        requests.append(dict(request.query))
        return web.json_response({"items": [{"title": "t", "link": "https://example.com", "snippet": "s"}]})

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_post("/search", search)
    app.router.add_get("/custom", custom)
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        url = f"http://127.0.0.1:{port}"
        async with open_toolspace() as ts:
            assert (await ts.call("http_get", {"url": url})).error_kind == "not_permitted"
        async with open_toolspace(tools={"allowedHosts": [f"127.0.0.1:{port}"]}) as ts:
            assert (await ts.call("http_get", {"url": url})).result["body"] == "hello"
        settings = {"provider": "tavily", "apiKey": "key-123", "maxResults": 4, "url": f"{url}/search"}
        async with open_toolspace(tools={"webSearch": settings}) as ts:
            results = (await ts.call("web_search", {"query": "x", "limit": 8})).result["results"]
            assert len(results) == 4
            assert requests[-1][0] == "Bearer key-123"
        settings = {"provider": "google", "apiKey": "key-123", "searchEngineId": "engine", "url": f"{url}/custom"}
        async with open_toolspace(tools={"webSearch": settings}) as ts:
            assert (await ts.call("web_search", {"query": "x"})).ok
            assert requests[-1]["cx"] == "engine"
    finally:
        await runner.cleanup()


def test_every_documented_setting_has_a_test() -> None:
    assert coverage.list_missing("", other_modules=OTHER_MODULES) == []
