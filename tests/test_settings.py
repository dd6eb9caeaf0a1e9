"""5.3: every documented setting has an effect. One test a setting; a setting without one fails here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolspace import ProviderError, ToolContext, Toolspace
from toolspace.config.documentation import list_all_rows

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

Check = Callable[[Callable[..., Toolspace], Path], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def shows(*settings: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        for setting in settings:
            CHECKS[setting] = check
        return check

    return keep


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Toolspace]:
    (tmp_path / "tools.py").write_text(TOOLS)

    def open_with(**config: Any) -> Toolspace:
        path = tmp_path / "toolspace.yaml"
        path.write_text(yaml.safe_dump({"functions": "./tools.py", "storage": {"dir": "./state"}, **config}))
        return Toolspace.open(path, environ={"HOME": str(tmp_path), "PATH": os.environ["PATH"]})

    return open_with


@shows("defaults.toolTimeout", "tools.timeout")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    for config in ({"defaults": {"toolTimeout": 20}}, {"tools": {"timeout": "20ms"}}):
        async with opened(**config) as ts:
            assert (await ts.call("slow")).error == "Tool execution timed out after 20ms"


@shows("defaults.toolResponseMaxBytes")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    async with opened(defaults={"toolResponseMaxBytes": 1000}) as ts:
        assert "tool_output" in (await ts.call("big", {"size": 2000})).result


@shows("defaults.toolOutputTtl", "storage.dir")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    async with opened(defaults={"toolResponseMaxBytes": 1000, "toolOutputTtl": "1h"}) as ts:
        result = await ts.call("big", {"size": 2000})
        assert abs(result.extras["expiresAt"] - result.completed_at - 3_600_000) < 60_000
        assert list((folder / "state" / "outputs").rglob("*"))


@shows("defaults.maxToolCallsPerTurn")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    async with opened(defaults={"maxToolCallsPerTurn": 1}) as ts:
        run = ts.run()
        assert [(await run.call("counted")).ok for _ in range(2)] == [True, False]


@shows("defaults.maxConcurrentTools", "tools.maxConcurrent")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    for config in ({"defaults": {"maxConcurrentTools": 2}}, {"tools": {"maxConcurrent": 2}}):
        async with opened(**config) as ts:
            run = ts.run()
            results = await asyncio.gather(*(run.call("busy", {"n": n}) for n in range(6)))
            assert max(result.result for result in results) == 2


@shows("defaults.contextWindow")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    async with opened(defaults={"contextWindow": 1000}) as ts:
        result = await ts.run().call("big", {"size": 50_000})
        assert result.result["tool_output"]["reason"] == "token_budget"


@shows("defaults.toolSearchThreshold")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    def shown(ts: Toolspace) -> list[str]:
        return [one["name"] for one in ts.to_llm_tools("anthropic")]

    assert "counted" in shown(opened())
    searching = shown(opened(defaults={"toolSearchThreshold": 10}))
    assert "agent__find_tools" in searching
    assert "counted" not in searching


@shows("queues.<name>.concurrent", "tools.overrides.<name>.queue")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    config = {"queues": {"q": {"concurrent": 3}}, "tools": {"overrides": {"busy": {"queue": "q"}}}}
    async with opened(**config) as ts:
        results = await asyncio.gather(*(ts.call("busy", {"n": n}) for n in range(9)))
        assert max(result.result for result in results) == 3


@shows("queues.<name>.rate", "queues.<name>.waitTimeout")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    queue = {"concurrent": 5, "rate": "2/hour", "waitTimeout": 20}
    async with opened(queues={"q": queue}, tools={"overrides": {"counted": {"queue": "q"}}}) as ts:
        assert [(await ts.call("counted")).error_kind for _ in range(3)] == [None, None, "limit_exceeded"]


@shows("queues.<name>.maxWaiting")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    queue = {"concurrent": 1, "maxWaiting": 1}
    async with opened(queues={"q": queue}, tools={"overrides": {"busy": {"queue": "q"}}}) as ts:
        results = await asyncio.gather(*(ts.call("busy") for _ in range(4)))
        assert [result.error_kind for result in results].count("limit_exceeded") == 2


@shows("tools.allowedPaths")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    (folder / "in").mkdir()
    (folder / "in" / "a.txt").write_text("a")
    (folder / "b.txt").write_text("b")
    async with opened(tools={"allowedPaths": ["./in"]}) as ts:
        assert (await ts.call("read_file", {"path": str(folder / "in" / "a.txt")})).ok
        assert (await ts.call("read_file", {"path": str(folder / "b.txt")})).error_kind == "not_permitted"


@shows("tools.allowedEnv")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    os.environ["TOOLSPACE_TEST_NAME"] = "ann"
    try:
        async with opened() as ts:
            assert (await ts.call("get_env", {"key": "TOOLSPACE_TEST_NAME"})).error_kind == "not_permitted"
        async with opened(tools={"allowedEnv": ["TOOLSPACE_TEST_NAME"]}) as ts:
            assert (await ts.call("get_env", {"key": "TOOLSPACE_TEST_NAME"})).result == {"value": "ann"}
        async with opened(tools={"allowedEnv": []}) as ts:
            assert (await ts.call("get_env", {"key": "LANG"})).error_kind == "not_permitted"
    finally:
        del os.environ["TOOLSPACE_TEST_NAME"]


@shows("tools.memoryDir")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    async with opened(tools={"memoryDir": "./notes"}) as ts:
        assert (await ts.call("memory_write", {"path": "facts/a.md", "content": "x"})).ok
    assert (folder / "notes" / "facts" / "a.md").read_text() == "x"


@shows("tools.sessionDir")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    from toolspace.builtin.tasks import session_tools

    (folder / "sessions").mkdir()
    (folder / "sessions" / "old.md").write_text("what was said")
    async with opened(tools={"sessionDir": "./sessions"}) as ts:
        ts.add_tool(session_tools[0])
        assert (await ts.call("session_archive_read", {"file": "old.md"})).result == "what was said"
        assert (await ts.call("session_archive_read", {"file": "../tools.py"})).error_kind == "not_permitted"


@shows("tools.builtins")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    assert opened().find_tool("json_parse") is not None
    assert opened(tools={"builtins": False}).find_tool("json_parse") is None
    some = opened(tools={"builtins": ["json_*"]})
    assert some.find_tool("json_parse") is not None
    assert some.find_tool("read_file") is None


@shows("tools.toolsAllowed", "tools.toolsDenied")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    ts = opened(tools={"toolsAllowed": ["json_*", "counted"], "toolsDenied": ["*_stringify"]})
    local = [one.name for one in ts.list_tools() if not one.name.startswith("agent__")]
    assert local == ["json_parse", "counted"]
    assert (await ts.call("slow")).error_kind == "not_permitted"


@shows("tools.aliases")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    async with opened(tools={"aliases": {"tally": "counted"}}) as ts:
        assert (await ts.call("tally")).tool == "counted"


@shows("tools.overrides", "tools.overrides.<name>.timeout")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    async with opened(tools={"overrides": {"sl*": {"timeout": 15}}}) as ts:
        assert (await ts.call("slow")).error == "Tool execution timed out after 15ms"


@shows("tools.overrides.<name>.cache", "tools.overrides.<name>.cachePerUser")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    for per_user, expected in ((False, [1, 1, 1]), (True, [1, 2, 1])):
        async with opened(tools={"overrides": {"counted": {"cache": "1m", "cachePerUser": per_user}}}) as ts:
            users = [ToolContext(user_id=user) for user in ("ann", "bob", "ann")]
            assert [(await ts.call("counted", context=user)).result for user in users] == expected


@shows("tools.overrides.<name>.maxBytes")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    async with opened(tools={"overrides": {"big": {"maxBytes": 500}}}) as ts:
        assert "tool_output" in (await ts.call("big", {"size": 1000})).result


@shows("tools.overrides.<name>.enabled", "tools.overrides.<name>.visible")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    ts = opened(tools={"overrides": {"slow": {"enabled": False}, "counted": {"visible": False}}})
    assert "slow" not in [one.name for one in ts.list_tools()]
    assert (await ts.call("slow")).error_kind == "not_permitted"
    found = ts.find_tool("counted")
    assert found is not None
    assert found.visible is False


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


@shows(
    "tools.definitions",
    *(f"tools.definitions.<name>.{key}" for key in DEFINITION if key != "name"),
    "tools.definitions.<name>.cachePerUser",
    "tools.definitions.<name>.enabled",
)
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    queues = {"q": {"concurrent": 1}}
    async with opened(queues=queues, tools=[{**DEFINITION, "cachePerUser": True}]) as ts:
        found = ts.find_tool("greet")
        assert found is not None
        wire = found.to_dict()
        for key in ("description", "inputSchema", "outputSchema", "category", "visible", "isAsync", "version", "tags"):
            assert wire[key] == DEFINITION[key], key
        assert (wire["timeout"], wire["cache"], wire["annotations"]) == (7000, 60000, {"readOnly": True})
        assert (await ts.call("greet", {"who": "Ann"})).result == "Hello Ann"
        assert (await ts.call("greet", {})).error_kind == "invalid_parameters"
        explained = ts.orchestrator.explain("greet")
        assert explained is not None
        assert (explained[1].queue.value, explained[1].cache_per_user.value) == ("q", True)
    assert opened(queues=queues, tools={"definitions": [{**DEFINITION, "enabled": False}]}).find_tool("greet") is None
    internal = opened(tools=[{"name": "show", "executionType": "internal", "inputSchema": {"type": "object"}}])
    assert (await internal.call("show", {"a": 1})).result == {"success": True, "args": {"a": 1}}


@shows("defaults.pendingCallTtl", "tools.definitions.<name>.expiresAfter")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    from tests.server.gateway_api import SECRET, open_api
    from toolspace.server.gateway import Gateway

    asked = {"executionType": "external", "isAsync": True, "visible": False}
    opened(
        server={"secretKey": SECRET},
        defaults={"pendingCallTtl": "3d"},
        tools=[{"name": "long", **asked}, {"name": "short", **asked, "expiresAfter": "2h"}],
    )
    async with (
        Gateway.open(folder / "toolspace.yaml", environ={"HOME": str(folder)}) as gateway,
        open_api(gateway) as api,
    ):
        for name, hours in (("long", 72), ("short", 2)):
            pending = (await api.post(f"/api/tools/{name}/call", {"args": {}})).data
            call = (await api.get(f"/api/calls/{pending['callId']}")).data
            assert round((call["expiresAt"] - call["createdAt"]) / 3_600_000, 3) == hours


@shows("storage.cache")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    config = {"storage": {"dir": "./state", "cache": "disk"}, "tools": {"overrides": {"counted": {"cache": "1h"}}}}
    answers = []
    for _ in range(2):
        async with opened(**config) as ts:
            answers.append((await ts.call("counted")).result)
    assert answers == [1, 1]


@shows("functions")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    assert opened().find_tool("counted") is not None
    assert opened(functions="./tools.py:slow").find_tool("counted") is None


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


@shows("providers.<name>.uses", "providers.<name>.namespace", "providers.<name>.settings", "providers.<name>.enabled")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    (folder / "plug.py").write_text(PROVIDER)
    plug = {"uses": "./plug.py:Plug"}
    async with opened(
        providers={
            "a": plug,
            "b": {**plug, "namespace": "other", "settings": {"greeting": "hi"}},
            "c": {**plug, "namespace": "third", "enabled": False},
        }
    ) as ts:
        assert (await ts.call("plug__greet")).result == "hello"
        assert (await ts.call("other__greet")).result == "hi"
        assert (await ts.call("third__greet")).error_kind == "unknown_tool"


@shows("providers.<name>.required")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    (folder / "plug.py").write_text(PROVIDER)
    plug = {"uses": "./plug.py:Plug", "settings": {"start": False}}
    async with opened(providers={"a": plug}) as ts:
        assert ts.orchestrator.unavailable_providers() == {"plug": "nobody answers"}
    with pytest.raises(ProviderError, match="nobody answers"):
        await opened(providers={"a": {**plug, "required": True}}).__aenter__()


@shows("providers.<name>.toolsAllowed", "providers.<name>.toolsDenied")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    (folder / "plug.py").write_text(PROVIDER)
    plug = {"uses": "./plug.py:Plug", "toolsAllowed": ["*U*", "greet"], "toolsDenied": ["busy"]}
    async with opened(providers={"a": plug}) as ts:
        assert [one.name for one in ts.list_tools() if one.name.startswith("plug")] == ["plug__greet", "plug__counted"]
        assert (await ts.call("plug__busy")).error_kind == "not_permitted"


@shows("providers.<name>.queue", "providers.<name>.cache", "providers.<name>.requestTimeoutMs")
async def _(opened: Callable[..., Toolspace], folder: Path) -> None:
    (folder / "plug.py").write_text(PROVIDER)
    plug = {"uses": "./plug.py:Plug"}
    async with opened(queues={"q": {"concurrent": 2}}, providers={"a": {**plug, "queue": "q"}}) as ts:
        results = await asyncio.gather(*(ts.call("plug__busy", {"n": n}) for n in range(6)))
        assert max(result.result for result in results) == 2
    async with opened(providers={"a": {**plug, "cache": "1m", "requestTimeoutMs": 15}}) as ts:
        assert [(await ts.call("plug__counted")).result for _ in range(2)] == [1, 1]
        assert (await ts.call("plug__slow")).error == "Tool execution timed out after 15ms"


LATER: dict[str, dict[str, Any]] = {
    "storage.redis": {"storage": {"redis": "redis://localhost"}},
}
"""Settings that this version reads and checks, and says of that nothing follows them yet."""


def later(setting: str) -> str | None:
    return next((one for one in LATER if setting == one or (one.endswith(".") and setting.startswith(one))), None)


NETWORK = ("tools.allowedHosts", "tools.webSearch")
"""Shown in test_network_settings below: they need a server."""
SOURCES = (
    "mcpServers.",
    "restTools.",
    "openapi.",
    "defaults.mcpInitConcurrency",
    "defaults.traceMCP",
    "tools.mcpServers",
)
"""Shown in test_source_settings.py."""
GATEWAY = ("server.", "storage.url")
"""Shown in test_gateway_settings.py."""
AGENTS = ("agents.", "router.", "notifications.", "embeddings.", "demo")
"""Shown in test_agent_settings.py."""
ELSEWHERE = (*NETWORK, *SOURCES, *GATEWAY, *AGENTS)


@pytest.mark.spec("5.3")
@pytest.mark.parametrize("setting", [row.path for row in list_all_rows() if not row.path.startswith(ELSEWHERE)])
async def test_every_documented_setting_has_an_effect(
    setting: str, opened: Callable[..., Toolspace], tmp_path: Path
) -> None:
    if (name := later(setting)) is not None:
        warnings = opened(**LATER[name]).warnings
        assert any("not in effect" in warning for warning in warnings), f"{setting} is swallowed without a word"
        return
    assert setting in CHECKS, f"{setting} is documented, and no check shows what it does"
    await CHECKS[setting](opened, tmp_path)


@pytest.mark.spec("5.3")
async def test_network_settings_have_an_effect(opened: Callable[..., Toolspace]) -> None:
    from aiohttp import web

    asked: list[Any] = []

    async def search(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append((request.headers.get("Authorization"), body))
        results = [{"title": f"t{n}", "url": f"https://example.com/{n}", "content": "c"} for n in range(9)]
        return web.json_response({"results": results})

    async def custom(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
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
        async with opened() as ts:
            assert (await ts.call("http_get", {"url": url})).error_kind == "not_permitted"
        async with opened(tools={"allowedHosts": [f"127.0.0.1:{port}"]}) as ts:
            assert (await ts.call("http_get", {"url": url})).result["body"] == "hello"
        settings = {"provider": "tavily", "apiKey": "key-123", "maxResults": 4, "url": f"{url}/search"}
        async with opened(tools={"webSearch": settings}) as ts:
            found = (await ts.call("web_search", {"query": "x", "limit": 8})).result["results"]
            assert len(found) == 4
            assert asked[-1][0] == "Bearer key-123"
        settings = {"provider": "google", "apiKey": "key-123", "searchEngineId": "engine", "url": f"{url}/custom"}
        async with opened(tools={"webSearch": settings}) as ts:
            assert (await ts.call("web_search", {"query": "x"})).ok
            assert asked[-1]["cx"] == "engine"
    finally:
        await runner.cleanup()
