"""Every documented setting of MCP servers, REST tools and OpenAPI services has an effect."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from time import time as now
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests.providers.mcp.conftest import until
from tests.setting_coverage import SettingCoverage
from toolspace import ConfigError, ProviderError, ToolContext, Toolspace
from toolspace.orchestrator.provider_startup import StartupWait

pytestmark = [pytest.mark.spec("5.3"), pytest.mark.spec("3.2")]

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
"""A minimal MCP server: one of the library takes a second to start."""


class ExternalServer:
    """A web server that returns the request. It is also an OpenAPI service and a stateless MCP server."""

    def __init__(self) -> None:
        self.url = ""
        self.active_count = self.most = self.runs = 0
        self.requests: list[dict[str, Any]] = []

    async def rest(self, request: web.Request) -> web.Response:
        self.runs += 1
        self.active_count += 1
        self.most = max(self.most, self.active_count)
        try:
            if request.path == "/slow":
                await asyncio.sleep(60)
            await asyncio.sleep(0.02)
        finally:
            self.active_count -= 1
        received_request = {
            "method": request.method,
            "path": request.path,
            "query": dict(request.query),
            "team": request.headers.get("x-team"),
            "key": request.headers.get("x-key"),
            "authorization": request.headers.get("authorization"),
            "body": await request.text(),
            "run": self.runs,
        }
        self.requests.append(received_request)
        return web.json_response(received_request)

    async def mcp(self, request: web.Request) -> web.Response:
        message = await request.json()
        self.requests.append(
            {"team": request.headers.get("x-team"), "authorization": request.headers.get("authorization")}
        )
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
async def external_server() -> AsyncIterator[ExternalServer]:
    server = ExternalServer()
    app = web.Application()
    app.router.add_post("/mcp", server.mcp)
    app.router.add_post("/token", server.token)
    app.router.add_route("*", "/{rest:.*}", server.rest)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


class SourceSetup:
    """Opens toolspaces with settings, in one folder and with one external server."""

    def __init__(self, folder: Path, external_server: ExternalServer) -> None:
        self.folder = folder
        self.external_server = external_server

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
        tool = {"url": f"{self.external_server.url}/hello", **settings}
        return self.open(restTools={"r": tool}, queues={"q": {"concurrent": 2}})

    def openapi(self, **settings: Any) -> Toolspace:
        (self.folder / "api.json").write_text(json.dumps(self.external_server.document()))
        return self.open(openapi={"o": {"spec": "./api.json", **settings}}, queues={"q": {"concurrent": 2}})


coverage = SettingCoverage()


@pytest.fixture
def setup(tmp_path: Path, external_server: ExternalServer) -> SourceSetup:
    return SourceSetup(tmp_path, external_server)


def names(ts: Toolspace, namespace: str) -> list[str]:
    return [tool.name.partition("__")[2] for tool in ts.list_tools() if tool.name.startswith(namespace + "__")]


@coverage.covers(
    "mcpServers.<name>.command", "mcpServers.<name>.args", "mcpServers.<name>.env", "mcpServers.<name>.cwd"
)
async def test_an_mcp_server_starts_with_command_arguments_environment_and_directory(setup: SourceSetup) -> None:
    (setup.folder / "inner").mkdir()
    server = setup.server("x", "y", env={"COLOUR": "blue"}, cwd="./inner")
    async with setup.open(mcpServers={"s": server}) as ts:
        assert (await ts.call("s__where")).text == f"{(setup.folder / 'inner').resolve()}|blue|x|y"


@coverage.covers("tools.mcpServers")
async def test_mcp_servers_may_be_listed_under_tools(setup: SourceSetup) -> None:
    async with setup.open(tools={"mcpServers": [{"name": "s", **setup.server()}]}) as ts:
        assert (await ts.call("s__where")).ok


@coverage.covers("mcpServers.<name>.url", "mcpServers.<name>.headers", "mcpServers.<name>.type")
async def test_an_mcp_server_is_reached_by_url_with_headers(setup: SourceSetup) -> None:
    server = {"type": "http", "url": f"{setup.external_server.url}/mcp", "headers": {"x-team": "blue"}}
    async with setup.open(mcpServers={"s": server}) as ts:
        assert (await ts.call("s__t")).result == "hi"
        assert setup.external_server.requests[-1]["team"] == "blue"
    async with setup.open(mcpServers={"s": {**server, "type": "websocket"}}) as ts:
        assert "ws://" in ts.orchestrator.unavailable_providers()["s"]


@coverage.covers("mcpServers.<name>.auth")
async def test_an_mcp_server_is_authorized_with_oauth(setup: SourceSetup) -> None:
    auth = {"type": "client_credentials", "clientId": "me", "clientSecret": "s3cret-s3cret", "colour": "red"}
    with pytest.raises(ConfigError, match="colour"):
        setup.open(mcpServers={"s": {"url": f"{setup.external_server.url}/mcp", "auth": auth}})


@coverage.covers("mcpServers.<name>.enabled")
async def test_an_mcp_server_can_be_disabled(setup: SourceSetup) -> None:
    async with setup.mcp(enabled=False) as ts:
        assert names(ts, "s") == []


@coverage.covers("mcpServers.<name>.required")
async def test_a_required_mcp_server_must_start(setup: SourceSetup) -> None:
    broken = {"command": "no-such-command"}
    async with setup.open(mcpServers={"s": broken}) as ts:
        assert "no-such-command" in ts.orchestrator.unavailable_providers()["s"]
    with pytest.raises(ProviderError, match="no-such-command"):
        await setup.open(mcpServers={"s": {**broken, "required": True}}).__aenter__()


@coverage.covers("mcpServers.<name>.toolsAllowed", "mcpServers.<name>.toolsDenied")
async def test_tools_of_an_mcp_server_are_allowed_and_denied(setup: SourceSetup) -> None:
    async with setup.mcp(toolsAllowed=["*U*"], toolsDenied=["busy"]) as ts:
        assert names(ts, "s") == ["counted"]
        assert (await ts.call("s__busy", {"n": 1})).error_kind == "not_permitted"


@coverage.covers("mcpServers.<name>.queue", "mcpServers.<name>.cache", "mcpServers.<name>.requestTimeoutMs")
async def test_an_mcp_server_sets_queue_cache_and_timeout_of_its_tools(setup: SourceSetup) -> None:
    async with setup.mcp(queue="q", cache="1m") as ts:
        results = await asyncio.gather(*(ts.call("s__busy", {"n": n}) for n in range(4)))
        assert max(int(result.text) for result in results) == 2
        assert [(await ts.call("s__counted")).text for _ in range(2)] == ["1", "1"]
    async with setup.mcp(requestTimeoutMs=100) as ts:
        assert (await ts.call("s__slow")).error == "Tool execution timed out after 100ms"


@coverage.covers("mcpServers.<name>.idleTimeout")
async def test_an_idle_mcp_server_is_stopped(setup: SourceSetup) -> None:
    async with setup.mcp(idleTimeout="100ms") as ts:
        await until(lambda: ts.list_servers()[0].state == "idle")


@pytest.mark.spec("3.15")
@coverage.covers("mcpServers.<name>.descriptionPrefix", "defaults.descriptionPrefix")
async def test_descriptions_of_an_mcp_server_begin_with_its_name(setup: SourceSetup) -> None:
    def describe(ts: Toolspace) -> str:
        tool = ts.find_tool("s__busy")
        assert tool is not None
        return tool.description

    async with setup.mcp() as ts:
        prefixed_description = describe(ts)
        assert prefixed_description.startswith("[s]")
        exported_tools = {tool["function"]["name"]: tool["function"] for tool in ts.to_llm_tools()}
        assert exported_tools["s__busy"]["description"] == prefixed_description
    async with setup.mcp(descriptionPrefix=False) as ts:
        assert describe(ts) == prefixed_description.removeprefix("[s]").strip()
    server = {"url": f"{setup.external_server.url}/mcp"}
    for own_setting, default, is_prefixed in ((None, False, False), (True, False, True), (False, True, False)):
        settings = server if own_setting is None else {**server, "descriptionPrefix": own_setting}
        async with setup.open(mcpServers={"s": settings}, defaults={"descriptionPrefix": default}) as ts:
            (tool,) = [tool for tool in ts.list_tools() if tool.name.startswith("s__")]
            assert tool.description.startswith("[s]") is is_prefixed


@coverage.covers("defaults.mcpInitConcurrency")
async def test_concurrent_starts_of_mcp_servers_are_limited(setup: SourceSetup) -> None:
    log = setup.folder / "starts.log"
    script = Path(__file__).parent / "providers" / "mcp" / "servers" / "scripted.py"
    servers = {f"s{index}": {"command": sys.executable, "args": [str(script), str(log)]} for index in range(3)}
    async with setup.open(mcpServers=servers, defaults={"mcpInitConcurrency": 1}):
        words = [line.split()[0] for line in log.read_text().splitlines()]
    assert [word for word in words if word in ("start", "greeted")] == ["start", "greeted"] * 3


@coverage.covers("defaults.startPatience", "mcpServers.<name>.startPatience")
@pytest.mark.spec("3.19")
async def test_lists_wait_for_starting_servers_within_their_patience(setup: SourceSetup) -> None:
    gate = setup.folder / "gate"
    script = Path(__file__).parent / "providers" / "mcp" / "servers" / "gated.py"
    server = {"command": sys.executable, "args": [str(script), str(gate), "work"]}

    async def start_and_list(own_setting: Any, default: Any) -> tuple[Toolspace, asyncio.Task[None]]:
        servers = {"s": server if own_setting is None else {**server, "startPatience": own_setting}}
        ts = setup.open(mcpServers=servers, defaults={"startPatience": default})
        ts.startup_wait = StartupWait(only_required=True)
        await ts.__aenter__()
        list_wait = asyncio.create_task(ts.orchestrator.wait_for_lists())
        await asyncio.wait((list_wait,), timeout=0.3)
        return ts, list_wait

    for own_setting, default, is_patient in ((None, 0, False), (None, "1h", True), (0, "1h", False), ("1h", 0, True)):
        gate.unlink(missing_ok=True)
        ts, list_wait = await start_and_list(own_setting, default)
        async with asyncio.timeout(60):
            assert list_wait.done() is not is_patient
            gate.touch()
            await list_wait
            assert (ts.find_tool("s__work") is not None) or not is_patient
            await ts.aclose()


@coverage.covers("defaults.traceMCP")
async def test_messages_of_mcp_servers_are_logged(setup: SourceSetup) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("toolspace.mcp")
    level = logger.level
    logger.addHandler(handler)
    try:
        server = {"url": f"{setup.external_server.url}/mcp"}
        async with setup.open(mcpServers={"s": server}) as ts:
            await ts.call("s__t")
        assert not any("tools/call" in line for line in lines)
        async with setup.open(mcpServers={"s": server}, defaults={"traceMCP": True}) as ts:
            await ts.call("s__t")
        assert any("s → " in line and "tools/call" in line for line in lines)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@coverage.covers(
    "restTools.<name>.url",
    "restTools.<name>.method",
    "restTools.<name>.headers",
    "restTools.<name>.query",
    "restTools.<name>.body",
)
async def test_a_rest_tool_sends_the_configured_request(setup: SourceSetup) -> None:
    tool: dict[str, Any] = {
        "url": f"{setup.external_server.url}/of/${{parameters.who}}",
        "method": "PUT",
        "headers": {"x-team": "blue"},
        "query": {"page": "${parameters.page}"},
        "body": {"name": "${parameters.who}"},
    }
    async with setup.rest(**tool) as ts:
        received_request = (await ts.call("rest__r", {"who": "a/b", "page": 3})).result
    assert received_request["method"] == "PUT"
    assert received_request["team"] == "blue"
    assert received_request["query"] == {"page": "3"}
    assert json.loads(received_request["body"]) == {"name": "a/b"}


@coverage.covers(
    "restTools.<name>.description",
    "restTools.<name>.parametersSchema",
    "restTools.<name>.outputSchema",
    "restTools.<name>.annotations",
    "restTools.<name>.tags",
)
async def test_a_rest_tool_has_the_configured_description_and_schemas(setup: SourceSetup) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = setup.rest(
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


@coverage.covers("restTools.<name>.approval")
async def test_a_rest_tool_may_require_approval(setup: SourceSetup) -> None:
    async with setup.rest(approval="required") as ts:
        assert (await ts.call("rest__r")).error_kind == "not_permitted"
    assert setup.external_server.runs == 0


@coverage.covers("restTools.<name>.cache", "restTools.<name>.cacheScope")
async def test_a_rest_tool_caches_its_results(setup: SourceSetup) -> None:
    for scope, most in (("shared", 1), ("principal", 2)):
        setup.external_server.runs = 0
        async with setup.rest(cache="1m", cacheScope=scope) as ts:
            for user in ("ann", "bob", "ann"):
                await ts.call("rest__r", context=ToolContext(user_id=user))
        assert setup.external_server.runs == most


@coverage.covers(
    "restTools.<name>.queue", "restTools.<name>.priority", "restTools.<name>.timeout", "restTools.<name>.enabled"
)
async def test_a_rest_tool_has_a_queue_and_a_timeout_and_can_be_disabled(setup: SourceSetup) -> None:
    async with setup.rest(queue="q", priority=3, query={"n": "${parameters.n}"}) as ts:
        explanation = ts.orchestrator.explain("rest__r")
        assert explanation is not None
        assert explanation[1].priority.value == 3
        await asyncio.gather(*(ts.call("rest__r", {"n": n}) for n in range(6)))
        assert setup.external_server.most == 2
    async with setup.rest(url=f"{setup.external_server.url}/slow", timeout=50) as ts:
        assert (await ts.call("rest__r")).error == "Tool execution timed out after 50ms"
    async with setup.rest(enabled=False) as ts:
        assert names(ts, "rest") == []


@coverage.covers("openapi.<name>.spec", "openapi.<name>.baseUrl", "openapi.<name>.headers", "openapi.<name>.auth")
async def test_an_openapi_service_is_called_with_url_headers_and_credentials(setup: SourceSetup) -> None:
    async with setup.openapi(headers={"x-team": "blue"}, auth={"key": "k-123456789"}) as ts:
        received_request = (await ts.call("o__safe")).result
        assert (received_request["path"], received_request["team"], received_request["key"]) == (
            "/safe",
            "blue",
            "k-123456789",
        )
    async with setup.openapi() as ts:
        assert "key" in (await ts.call("o__safe")).error
    async with setup.openapi(baseUrl=f"{setup.external_server.url}/v2") as ts:
        assert (await ts.call("o__listCats")).result["path"] == "/v2/cats"


@coverage.covers("openapi.<name>.tags", "openapi.<name>.methods", "openapi.<name>.paths", "openapi.<name>.operations")
async def test_operations_of_an_openapi_service_are_selected(setup: SourceSetup) -> None:
    for filters, expected_names in (
        ({"tags": ["cats"]}, ["addCat", "listCats"]),
        ({"methods": ["post"]}, ["addCat"]),
        ({"paths": ["/d*"]}, ["listDogs"]),
        ({"operations": ["list*"]}, ["listCats", "listDogs"]),
    ):
        async with setup.openapi(**filters) as ts:
            assert sorted(names(ts, "o")) == expected_names, filters


@coverage.covers("openapi.<name>.toolsAllowed", "openapi.<name>.toolsDenied", "openapi.<name>.enabled")
async def test_tools_of_an_openapi_service_are_allowed_and_denied(setup: SourceSetup) -> None:
    async with setup.openapi(toolsAllowed=["list*"], toolsDenied=["*dogs"]) as ts:
        assert names(ts, "o") == ["listCats"]
    async with setup.openapi(enabled=False) as ts:
        assert names(ts, "o") == []


@coverage.covers("openapi.<name>.queue", "openapi.<name>.cache", "openapi.<name>.requestTimeoutMs")
async def test_an_openapi_service_sets_queue_cache_and_timeout_of_its_tools(setup: SourceSetup) -> None:
    async with setup.openapi(queue="q") as ts:
        await asyncio.gather(*(ts.call(name) for name in ("o__listCats", "o__listDogs", "o__addCat", "o__listCats")))
        assert setup.external_server.most == 2
    async with setup.openapi(requestTimeoutMs=80) as ts:
        assert (await ts.call("o__slow")).error == "Tool execution timed out after 80ms"
    async with setup.openapi(cache="1m") as ts:
        runs = [(await ts.call("o__listCats")).result["run"] for _ in range(2)]
        assert runs[0] == runs[1]


@coverage.covers("mcpServers.<name>.cacheScope", "openapi.<name>.cacheScope")
async def test_a_source_may_share_cached_results_among_principals(setup: SourceSetup) -> None:
    for scope, is_equal in (("shared", True), ("principal", False)):
        async with setup.mcp(cache="1m", cacheScope=scope) as mcp, setup.openapi(cache="1m", cacheScope=scope) as http:
            for ts, name in ((mcp, "s__counted"), (http, "o__listCats")):
                ann, bob = [await ts.call(name, context=ToolContext(user_id=user)) for user in ("ann", "bob")]
                assert (ann.text == bob.text) is is_equal, name


@pytest.mark.spec("22.4")
@coverage.covers(
    *(f"{section}.<name>.circuitBreaker{key}" for section in ("mcpServers", "openapi") for key in ("Failures", "Delay"))
)
@pytest.mark.parametrize("section", ["mcp", "openapi"])
async def test_a_source_has_its_own_circuit_breaker(setup: SourceSetup, section: str) -> None:
    open_source, name = {"mcp": (setup.mcp, "s__slow"), "openapi": (setup.openapi, "o__slow")}[section]
    for failures, refused_count in ((1, 2), (2, 1), (0, 0)):
        settings = {"circuitBreakerFailures": failures, "circuitBreakerDelay": "1h"}
        async with open_source(requestTimeoutMs=80, **settings) as ts:
            errors = [(await ts.call(name)).error or "" for _ in range(3)]
            assert ["circuit breaker" in error for error in errors].count(True) == refused_count
            statuses = list(ts.orchestrator.circuits.statuses())
            assert len(statuses) == (1 if failures else 0)
            assert all((status.next_probe_at or 0) > now() + 1800 for _, status in statuses)


@coverage.covers("openapi.<name>.required")
async def test_a_required_openapi_service_must_start(setup: SourceSetup) -> None:
    async with setup.openapi(spec="./missing.json") as ts:
        assert "missing.json" in ts.orchestrator.unavailable_providers()["o"]
    with pytest.raises(ProviderError, match=r"missing\.json"):
        await setup.openapi(spec="./missing.json", required=True).__aenter__()


def test_every_documented_setting_of_a_source_has_a_test() -> None:
    prefixes = ("mcpServers.", "restTools.", "openapi.")
    settings = ("defaults.mcpInitConcurrency", "defaults.startPatience", "defaults.traceMCP", "tools.mcpServers")
    assert coverage.list_missing(*prefixes, *settings) == []
