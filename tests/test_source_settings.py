"""5.3 for what comes from outside: every setting of MCP servers, REST tools and OpenAPI services has an effect."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests.providers.mcp.conftest import until
from tests.test_settings import SOURCES
from toolspace import ConfigError, ProviderError, ToolContext, Toolspace
from toolspace.config.documentation import list_all_rows

SERVER = """
import json, os, sys, threading, time

counts = {"runs": 0, "inside": 0, "most": 0}
lock = threading.Lock()

def where():
    return "|".join((os.getcwd(), os.environ.get("COLOUR", ""), *sys.argv[1:]))

def counted():
    counts["runs"] += 1
    return str(counts["runs"])

def busy(n):
    with lock:
        counts["inside"] += 1
        counts["most"] = max(counts["most"], counts["inside"])
    time.sleep(0.05)
    with lock:
        counts["inside"] -= 1
    return str(counts["most"])

def slow():
    time.sleep(60)

tools = {one.__name__: one for one in (where, counted, busy, slow)}

def result_of(method, params):
    if method == "initialize":
        server = {"name": "small", "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in tools]}
    return {"content": [{"type": "text", "text": tools[params["name"]](**params.get("arguments") or {})}]}

def answer(request):
    reply = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] in ("initialize", "tools/list", "tools/call"):
        reply["result"] = result_of(request["method"], request.get("params") or {})
    else:
        reply["error"] = {"code": -32601, "message": "Method not found"}
    with lock:
        print(json.dumps(reply), flush=True)

for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        threading.Thread(target=answer, args=(request,), daemon=True).start()
"""
"""An MCP server by hand: one of the library takes a second to start."""


class Outside:
    """A web server that says what arrived, and is an OpenAPI service and a stateless MCP server as well."""

    def __init__(self) -> None:
        self.url = ""
        self.inside = self.most = self.runs = 0
        self.seen: list[dict[str, Any]] = []

    async def rest(self, request: web.Request) -> web.Response:
        self.runs += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            if request.path == "/slow":
                await asyncio.sleep(60)
            await asyncio.sleep(0.02)
        finally:
            self.inside -= 1
        arrived = {
            "method": request.method,
            "path": request.path,
            "query": dict(request.query),
            "team": request.headers.get("x-team"),
            "key": request.headers.get("x-key"),
            "authorization": request.headers.get("authorization"),
            "body": await request.text(),
            "run": self.runs,
        }
        self.seen.append(arrived)
        return web.json_response(arrived)

    async def mcp(self, request: web.Request) -> web.Response:
        message = await request.json()
        self.seen.append({"team": request.headers.get("x-team"), "authorization": request.headers.get("authorization")})
        if message["method"] == "server/discover":
            result: dict[str, Any] = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
            result |= {"resultType": "complete", "ttlMs": 0, "cacheScope": "public"}
        elif message["method"] == "tools/list":
            result = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
        else:
            result = {"content": [{"type": "text", "text": "hi"}], "resultType": "complete"}
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})

    async def token(self, request: web.Request) -> web.Response:
        return web.json_response({"access_token": "machine-token", "token_type": "Bearer", "expires_in": 3600})

    def document(self) -> dict[str, Any]:
        def operation(name: str, tag: str) -> dict[str, Any]:
            return {"operationId": name, "tags": [tag], "responses": {"200": {"description": "ok"}}}

        return {
            "openapi": "3.1.0",
            "info": {"title": "outside", "version": "1"},
            "servers": [{"url": self.url}],
            "paths": {
                "/cats": {"get": operation("listCats", "cats"), "post": operation("addCat", "cats")},
                "/dogs": {"get": operation("listDogs", "dogs")},
                "/slow": {"get": operation("slow", "other")},
                "/safe": {"get": {**operation("safe", "other"), "security": [{"key": []}]}},
            },
            "components": {"securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "x-key"}}},
        }


@pytest.fixture
async def outside() -> AsyncIterator[Outside]:
    made = Outside()
    app = web.Application()
    app.router.add_post("/mcp", made.mcp)
    app.router.add_post("/token", made.token)
    app.router.add_route("*", "/{rest:.*}", made.rest)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


class World:
    """What a check has to work with."""

    def __init__(self, folder: Path, outside: Outside) -> None:
        self.folder = folder
        self.outside = outside

    def open(self, **config: Any) -> Toolspace:
        path = self.folder / "toolspace.yaml"
        path.write_text(yaml.safe_dump({"storage": {"dir": "./state"}, "tools": {"builtins": False}, **config}))
        return Toolspace.open(path, environ={"HOME": str(self.folder), "PATH": os.environ["PATH"]})

    def server(self, *args: str, **settings: Any) -> dict[str, Any]:
        script = self.folder / "server.py"
        script.write_text(SERVER)
        return {"command": sys.executable, "args": [str(script), *args], **settings}

    def mcp(self, **settings: Any) -> Toolspace:
        return self.open(mcpServers={"s": self.server(**settings)}, queues={"q": {"concurrent": 2}})

    def rest(self, **settings: Any) -> Toolspace:
        tool = {"url": f"{self.outside.url}/hello", **settings}
        return self.open(restTools={"r": tool}, queues={"q": {"concurrent": 2}})

    def openapi(self, **settings: Any) -> Toolspace:
        (self.folder / "api.json").write_text(json.dumps(self.outside.document()))
        return self.open(openapi={"o": {"spec": "./api.json", **settings}}, queues={"q": {"concurrent": 2}})


Check = Callable[[World], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def shows(*settings: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(settings, check))
        return check

    return keep


def names(ts: Toolspace, namespace: str) -> list[str]:
    return [tool.name.partition("__")[2] for tool in ts.list_tools() if tool.name.startswith(namespace + "__")]


@shows("mcpServers.<name>.command", "mcpServers.<name>.args", "mcpServers.<name>.env", "mcpServers.<name>.cwd")
async def _(world: World) -> None:
    (world.folder / "inner").mkdir()
    server = world.server("x", "y", env={"COLOUR": "blue"}, cwd="./inner")
    async with world.open(mcpServers={"s": server}) as ts:
        assert (await ts.call("s__where")).text == f"{(world.folder / 'inner').resolve()}|blue|x|y"


@shows("tools.mcpServers")
async def _(world: World) -> None:
    async with world.open(tools={"mcpServers": [{"name": "s", **world.server()}]}) as ts:
        assert (await ts.call("s__where")).ok


@shows("mcpServers.<name>.url", "mcpServers.<name>.headers", "mcpServers.<name>.type")
async def _(world: World) -> None:
    server = {"type": "http", "url": f"{world.outside.url}/mcp", "headers": {"x-team": "blue"}}
    async with world.open(mcpServers={"s": server}) as ts:
        assert (await ts.call("s__t")).result == "hi"
        assert world.outside.seen[-1]["team"] == "blue"
    async with world.open(mcpServers={"s": {**server, "type": "websocket"}}) as ts:
        assert "ws://" in ts.orchestrator.unavailable_providers()["s"]


@shows("mcpServers.<name>.auth")
async def _(world: World) -> None:
    auth = {"type": "client_credentials", "clientId": "me", "clientSecret": "s3cret-s3cret", "colour": "red"}
    with pytest.raises(ConfigError, match="colour"):
        world.open(mcpServers={"s": {"url": f"{world.outside.url}/mcp", "auth": auth}})


@shows("mcpServers.<name>.enabled")
async def _(world: World) -> None:
    async with world.mcp(enabled=False) as ts:
        assert names(ts, "s") == []


@shows("mcpServers.<name>.required")
async def _(world: World) -> None:
    broken = {"command": "no-such-command"}
    async with world.open(mcpServers={"s": broken}) as ts:
        assert "no-such-command" in ts.orchestrator.unavailable_providers()["s"]
    with pytest.raises(ProviderError, match="no-such-command"):
        await world.open(mcpServers={"s": {**broken, "required": True}}).__aenter__()


@shows("mcpServers.<name>.toolsAllowed", "mcpServers.<name>.toolsDenied")
async def _(world: World) -> None:
    async with world.mcp(toolsAllowed=["*U*"], toolsDenied=["busy"]) as ts:
        assert names(ts, "s") == ["counted"]
        assert (await ts.call("s__busy", {"n": 1})).error_kind == "not_permitted"


@shows("mcpServers.<name>.queue", "mcpServers.<name>.cache", "mcpServers.<name>.requestTimeoutMs")
async def _(world: World) -> None:
    async with world.mcp(queue="q", cache="1m") as ts:
        results = await asyncio.gather(*(ts.call("s__busy", {"n": n}) for n in range(4)))
        assert max(int(result.text) for result in results) == 2
        assert [(await ts.call("s__counted")).text for _ in range(2)] == ["1", "1"]
    async with world.mcp(requestTimeoutMs=100) as ts:
        assert (await ts.call("s__slow")).error == "Tool execution timed out after 100ms"


@shows("mcpServers.<name>.idleTimeout")
async def _(world: World) -> None:
    async with world.mcp(idleTimeout="100ms") as ts:
        await until(lambda: ts.list_servers()[0].state == "idle")


@shows("defaults.mcpInitConcurrency")
async def _(world: World) -> None:
    log = world.folder / "starts.log"
    script = Path(__file__).parent / "providers" / "mcp" / "servers" / "scripted.py"
    servers = {f"s{index}": {"command": sys.executable, "args": [str(script), str(log)]} for index in range(3)}
    async with world.open(mcpServers=servers, defaults={"mcpInitConcurrency": 1}):
        words = [line.split()[0] for line in log.read_text().splitlines()]
    assert [word for word in words if word in ("start", "greeted")] == ["start", "greeted"] * 3


@shows("defaults.traceMCP")
async def _(world: World) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("toolspace.mcp")
    level = logger.level
    logger.addHandler(handler)
    try:
        server = {"url": f"{world.outside.url}/mcp"}
        async with world.open(mcpServers={"s": server}) as ts:
            await ts.call("s__t")
        assert not any("tools/call" in line for line in lines)
        async with world.open(mcpServers={"s": server}, defaults={"traceMCP": True}) as ts:
            await ts.call("s__t")
        assert any("s → " in line and "tools/call" in line for line in lines)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@shows(
    "restTools.<name>.url",
    "restTools.<name>.method",
    "restTools.<name>.headers",
    "restTools.<name>.query",
    "restTools.<name>.body",
)
async def _(world: World) -> None:
    tool: dict[str, Any] = {
        "url": f"{world.outside.url}/of/${{parameters.who}}",
        "method": "PUT",
        "headers": {"x-team": "blue"},
        "query": {"page": "${parameters.page}"},
        "body": {"name": "${parameters.who}"},
    }
    async with world.rest(**tool) as ts:
        arrived = (await ts.call("rest__r", {"who": "a/b", "page": 3})).result
    assert arrived["method"] == "PUT"
    assert arrived["team"] == "blue"
    assert arrived["query"] == {"page": "3"}
    assert json.loads(arrived["body"]) == {"name": "a/b"}


@shows(
    "restTools.<name>.description",
    "restTools.<name>.parametersSchema",
    "restTools.<name>.outputSchema",
    "restTools.<name>.annotations",
    "restTools.<name>.tags",
)
async def _(world: World) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = world.rest(
        description="Says hello.",
        parametersSchema=schema,
        outputSchema={"type": "object"},
        annotations={"destructive": True},
        tags=["greeting"],
    ).find_tool("rest__r")
    assert tool is not None
    assert (tool.description, tool.input_schema, tool.output_schema) == ("Says hello.", schema, {"type": "object"})
    assert tool.annotations.destructive is True
    assert tool.tags == ("greeting",)


@shows("restTools.<name>.cache", "restTools.<name>.cachePerUser")
async def _(world: World) -> None:
    for per_user, most in ((False, 1), (True, 2)):
        world.outside.runs = 0
        async with world.rest(cache="1m", cachePerUser=per_user) as ts:
            for user in ("ann", "bob", "ann"):
                await ts.call("rest__r", context=ToolContext(user_id=user))
        assert world.outside.runs == most


@shows("restTools.<name>.queue", "restTools.<name>.timeout", "restTools.<name>.enabled")
async def _(world: World) -> None:
    async with world.rest(queue="q", query={"n": "${parameters.n}"}) as ts:
        await asyncio.gather(*(ts.call("rest__r", {"n": n}) for n in range(6)))
        assert world.outside.most == 2
    async with world.rest(url=f"{world.outside.url}/slow", timeout=50) as ts:
        assert (await ts.call("rest__r")).error == "Tool execution timed out after 50ms"
    async with world.rest(enabled=False) as ts:
        assert names(ts, "rest") == []


@shows("openapi.<name>.spec", "openapi.<name>.baseUrl", "openapi.<name>.headers", "openapi.<name>.auth")
async def _(world: World) -> None:
    async with world.openapi(headers={"x-team": "blue"}, auth={"key": "k-123456789"}) as ts:
        arrived = (await ts.call("o__safe")).result
        assert (arrived["path"], arrived["team"], arrived["key"]) == ("/safe", "blue", "k-123456789")
    async with world.openapi() as ts:
        assert "key" in (await ts.call("o__safe")).error
    async with world.openapi(baseUrl=f"{world.outside.url}/v2") as ts:
        assert (await ts.call("o__listCats")).result["path"] == "/v2/cats"


@shows("openapi.<name>.tags", "openapi.<name>.methods", "openapi.<name>.paths", "openapi.<name>.operations")
async def _(world: World) -> None:
    for filters, left in (
        ({"tags": ["cats"]}, ["addCat", "listCats"]),
        ({"methods": ["post"]}, ["addCat"]),
        ({"paths": ["/d*"]}, ["listDogs"]),
        ({"operations": ["list*"]}, ["listCats", "listDogs"]),
    ):
        async with world.openapi(**filters) as ts:
            assert sorted(names(ts, "o")) == left, filters


@shows("openapi.<name>.toolsAllowed", "openapi.<name>.toolsDenied", "openapi.<name>.enabled")
async def _(world: World) -> None:
    async with world.openapi(toolsAllowed=["list*"], toolsDenied=["*dogs"]) as ts:
        assert names(ts, "o") == ["listCats"]
    async with world.openapi(enabled=False) as ts:
        assert names(ts, "o") == []


@shows("openapi.<name>.queue", "openapi.<name>.cache", "openapi.<name>.requestTimeoutMs")
async def _(world: World) -> None:
    async with world.openapi(queue="q") as ts:
        await asyncio.gather(*(ts.call(name) for name in ("o__listCats", "o__listDogs", "o__addCat", "o__listCats")))
        assert world.outside.most == 2
    async with world.openapi(requestTimeoutMs=80) as ts:
        assert (await ts.call("o__slow")).error == "Tool execution timed out after 80ms"
    async with world.openapi(cache="1m") as ts:
        runs = [(await ts.call("o__listCats")).result["run"] for _ in range(2)]
        assert runs[0] == runs[1]


@shows("openapi.<name>.required")
async def _(world: World) -> None:
    async with world.openapi(spec="./missing.json") as ts:
        assert "missing.json" in ts.orchestrator.unavailable_providers()["o"]
    with pytest.raises(ProviderError, match=r"missing\.json"):
        await world.openapi(spec="./missing.json", required=True).__aenter__()


@pytest.mark.parametrize("setting", [row.path for row in list_all_rows() if row.path.startswith(SOURCES)])
def test_every_documented_setting_of_a_source_has_a_check(setting: str) -> None:
    assert setting in CHECKS, f"{setting} is documented, and no check shows what it does"


TOGETHER = {check: [setting for setting, one in CHECKS.items() if one is check] for check in CHECKS.values()}


@pytest.mark.spec("5.3")
@pytest.mark.spec("3.2")
@pytest.mark.parametrize("check", TOGETHER, ids=[settings[0] for settings in TOGETHER.values()])
async def test_the_settings_of_a_source_have_an_effect(check: Check, outside: Outside, tmp_path: Path) -> None:
    await check(World(tmp_path, outside))
