"""SPEC 21.1 over every interface: two principals share no result, list, running execution or error text."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from tests.server.gateway_api import ApiClient, open_api, write_config
from tests.server.scripted_agents import (
    MODEL,
    PERSON,
    ROOM,
    AgentGateway,
    agent_config,
    list_result_texts,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from tests.server.test_approvals import poll
from toolspace import ToolContext, Toolspace
from toolspace.server.gateway import Gateway

TOOLS = """
import asyncio, os
from toolspace import ToolContext, tool

callers = []
both_called = asyncio.Event()

@tool(cache=3600, visible=False)
async def diary(page: int, context: ToolContext) -> dict:
    return {"owner": context.principal, "id": os.urandom(8).hex()}

@tool(cache=3600, cache_scope="shared", visible=False)
async def weather(page: int, context: ToolContext) -> dict:
    return {"owner": context.principal, "id": os.urandom(8).hex()}

@tool(cache=3600, visible=False)
async def meet(page: int, context: ToolContext) -> dict:
    callers.append(context.principal)
    if len(callers) == 2:
        both_called.set()
    await both_called.wait()  # Never, if two callers share one execution.
    raise ValueError(f"the secret of {context.principal}")

@tool
async def long_diary(context: ToolContext) -> str:
    return f"the diary of {context.principal}\\n" * 20_000
"""

Call = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""Calls a tool as one principal; returns its result, or the text of its error."""


def write_project(folder: Path, **server: Any) -> Path:
    (folder / "tools.py").write_text(TOOLS)
    storage = {"cache": "disk", "dir": str(folder / "state")}
    return write_config(folder, functions="./tools.py", storage=storage, server=server)


def call_with_context(ts: Toolspace, user: str | None) -> Call:
    async def call(name: str, arguments: dict[str, Any]) -> Any:
        result = await ts.call(name, arguments, context=ToolContext(user_id=user))
        return result.result if result.ok else result.error

    return call


@asynccontextmanager
async def open_library(folder: Path) -> AsyncIterator[list[Call]]:
    async with Toolspace.open(write_project(folder)) as ts:
        yield [call_with_context(ts, "ann"), call_with_context(ts, "bob")]


@asynccontextmanager
async def open_runs(folder: Path) -> AsyncIterator[list[Call]]:
    async with Toolspace.open(write_project(folder)) as ts:

        def call_in_run(user: str) -> Call:
            run = ts.run(context=ToolContext(user_id=user))

            async def call(name: str, arguments: dict[str, Any]) -> Any:
                result = await run.call(name, arguments)
                return result.result if result.ok else result.error

            return call

        yield [call_in_run("ann"), call_in_run("bob")]


@asynccontextmanager
async def open_batches(folder: Path) -> AsyncIterator[list[Call]]:
    async with Toolspace.open(write_project(folder)) as ts:

        def call_in_batch(user: str) -> Call:
            async def call(name: str, arguments: dict[str, Any]) -> Any:
                batch = {"calls": [{"id": "1", "tool": name, "parameters": arguments}]}
                result = await ts.call("agent__batch", batch, context=ToolContext(user_id=user))
                (entry,) = result.result["results"]
                return entry["output"] if entry["ok"] else entry["error"]

            return call

        yield [call_in_batch("ann"), call_in_batch("bob")]


@asynccontextmanager
async def open_gateway(folder: Path) -> AsyncIterator[tuple[ApiClient, list[str]]]:
    """Serves a gateway; yields a client with its secret key, and two tool keys."""
    async with Gateway.open(write_project(folder)) as gateway, open_api(gateway) as api:
        keys = [await api.create("/api/keys", kind="tools", name=name) for name in ("ann", "bob")]
        yield api, [key["key"] for key in keys]


def call_over_http(api: ApiClient, path: str, *, has_name: bool = False) -> Call:
    async def call(name: str, arguments: dict[str, Any]) -> Any:
        body = {"args": arguments, **({"name": name} if has_name else {})}
        data = (await api.post(path.format(name=name), body)).data
        return data["result"] if data["ok"] else data["error"]

    return call


@asynccontextmanager
async def open_http(folder: Path) -> AsyncIterator[list[Call]]:
    async with open_gateway(folder) as (api, keys):
        clients = [api.with_headers(authorization=f"Bearer {key}") for key in keys]
        yield [call_over_http(client, "/api/tools/{name}/call") for client in clients]


@asynccontextmanager
async def open_http_runs(folder: Path) -> AsyncIterator[list[Call]]:
    async with open_gateway(folder) as (api, _):
        calls: list[Call] = []
        agent = await api.create("/api/entities", type="agent", name="ada")
        for name in ("ann", "bob"):
            key = await api.create("/api/keys", kind="secret", name=name)
            client = api.with_headers(authorization=f"Bearer {key['key']}")
            run = await client.create("/api/runs", agentEntityId=agent["id"])
            calls.append(call_over_http(client, f"/api/runs/{run['id']}/calls", has_name=True))
        yield calls


def call_over_mcp(client: Client) -> Call:
    async def call(name: str, arguments: dict[str, Any]) -> Any:
        result = await client.call_tool(name, arguments)
        text = result.content[0].text  # type: ignore[union-attr]
        return text if result.is_error else json.loads(text)

    return call


async def connect(stack: AsyncExitStack, url: str, key: str, mode: Any) -> Client:
    http = await stack.enter_async_context(
        httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=httpx2.Timeout(30))
    )
    return await stack.enter_async_context(Client(streamable_http_client(url, http_client=http), mode=mode))


@asynccontextmanager
async def open_mcp(folder: Path, mode: Any) -> AsyncIterator[list[Call]]:
    async with open_gateway(folder) as (api, keys), AsyncExitStack() as stack:
        yield [call_over_mcp(await connect(stack, f"{api.url}/mcp", key, mode)) for key in keys]


@asynccontextmanager
async def open_mcp_sessions(folder: Path) -> AsyncIterator[list[Call]]:
    async with open_mcp(folder, "legacy") as calls:
        yield calls


@asynccontextmanager
async def open_stateless_mcp(folder: Path) -> AsyncIterator[list[Call]]:
    async with open_mcp(folder, "auto") as calls:
        yield calls


@asynccontextmanager
async def open_mcp_stdio(folder: Path) -> AsyncIterator[list[Call]]:
    """A process at the terminal is `local`. The other principal is a user of a program with the same cache on disk."""
    config = write_project(folder)
    args = ["-m", "toolspace", "--config", str(config), "mcp"]
    command = StdioServerParameters(command=sys.executable, args=args, env=dict(os.environ))
    async with Client(stdio_client(command)) as client, Toolspace.open(config) as ts:
        yield [call_over_mcp(client), call_with_context(ts, "bob")]


@asynccontextmanager
async def open_command_line(folder: Path) -> AsyncIterator[list[Call]]:
    config = write_project(folder)

    async def call(name: str, arguments: dict[str, Any]) -> Any:
        options = ("--config", str(config), "call", name, "--args", json.dumps(arguments), "--json")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "toolspace", *options, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        data = json.loads(output)
        return data["result"] if data["ok"] else data["error"]

    async with Toolspace.open(config) as ts:
        yield [call, call_with_context(ts, "bob")]


def call_by_agent(setup: AgentGateway, sender: str, kind: str) -> Call:
    """Lets a person ask an agent, which calls the tool itself, or lets a sub-agent or a background task call it."""
    model_server = setup.model_server

    async def call(name: str, arguments: dict[str, Any]) -> Any:
        turn = tool_calls_turn((name, arguments))
        scripts = {
            "agent": [turn, "Done."],
            "subagent": [tool_calls_turn(("agent__bob", {"prompt": "Call it.", "reason": "why"})), "Done."],
            # The agent and its task ask the same model, in any order: both call the tool.
            "task": [tool_calls_turn(("spawn_task", {"description": "call", "input": "Call it."})), turn, turn],
        }
        model, result_count = ("of-bob", 1) if kind == "subagent" else (MODEL, 2 if kind == "task" else 1)
        old_count = len(model_server.list_requests(model))
        model_server.script(*scripts[kind])
        if kind == "subagent":
            model_server.script(turn, "Done.", model="of-bob")
        await setup.say("Call it.", sender=sender)

        async def read_results() -> list[Any]:
            requests = model_server.list_requests(model)[old_count:]
            texts = [list_result_texts(item)[-1] for item in requests if item["messages"][-1]["role"] == "tool"]
            return [json.loads(text) for text in texts if '"owner"' in text]

        async def read_open_runs() -> list[Any]:
            runs = (await setup.api.get("/api/runs")).data["items"]
            return [run for run in runs if run["status"] in ("queued", "running", "waiting_tool")]

        results = await poll(read_results, lambda results: len(results) >= result_count)
        assert all(result == results[-1] for result in results)
        await poll(read_open_runs, lambda runs: not runs)
        return results[-1]

    return call


@asynccontextmanager
async def open_agents_of(folder: Path, kind: str) -> AsyncIterator[list[Call]]:
    (folder / "tools.py").write_text(TOOLS)
    async with open_model_server() as model_server:
        agents = {
            "ada": agent_config(model_server, agents=["bob"], tools=["spawn_task"], session="user"),
            "bob": agent_config(model_server, model={"name": "of-bob"}, spaces=[]),
        }
        async with open_agent_gateway(folder, model_server, agents=agents, functions="./tools.py") as setup:
            other_person = await setup.api.create("/api/entities", type="human", name="Bob")
            await setup.api.create(f"/api/spaces/{ROOM}/members", entityId=other_person["id"])
            yield [call_by_agent(setup, sender, kind) for sender in (PERSON, other_person["id"])]


IN_ONE_PROCESS = [
    open_library, open_runs, open_batches, open_http, open_http_runs, open_mcp_sessions, open_stateless_mcp,
]  # fmt: skip
AGENTS = [partial(open_agents_of, kind=kind) for kind in ("agent", "subagent", "task")]
INTERFACES = [*IN_ONE_PROCESS, open_mcp_stdio, open_command_line, *AGENTS]


def name_interface(interface: Any) -> str:
    if isinstance(interface, partial):
        return interface.keywords["kind"]
    return interface.__name__.removeprefix("open_")


@pytest.mark.spec("21.1")
@pytest.mark.spec("4.2")
@pytest.mark.parametrize("interface", INTERFACES, ids=name_interface)
async def test_principals_share_only_what_is_said_to_be_shared(interface: Any, tmp_path: Path) -> None:
    async with interface(tmp_path) as (ann, bob):
        pages = [await call("diary", {"page": 1}) for call in (ann, bob, ann, bob)]
        assert pages[0] == pages[2]  # The cache is on.
        assert pages[1] == pages[3]
        assert pages[0]["id"] != pages[1]["id"]
        assert pages[0]["owner"] != pages[1]["owner"]
        forecasts = [await call("weather", {"page": 1}) for call in (ann, bob)]
        assert forecasts[0] == forecasts[1]


@pytest.mark.spec("21.1")
@pytest.mark.parametrize("interface", IN_ONE_PROCESS, ids=name_interface)
async def test_principals_do_not_share_a_running_execution_or_its_error(interface: Any, tmp_path: Path) -> None:
    async with interface(tmp_path) as (ann, bob):
        owners = [(await call("diary", {"page": 1}))["owner"] for call in (ann, bob)]
        errors = await asyncio.wait_for(asyncio.gather(*(call("meet", {"page": 1}) for call in (ann, bob))), 25)
        for error, owner in zip(errors, owners, strict=True):
            assert f"the secret of {owner}" in error


@pytest.mark.spec("21.1")
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_stored_outputs_of_another_key_are_unknown(tmp_path: Path, mode: str) -> None:
    async with open_gateway(tmp_path) as (api, keys), AsyncExitStack() as stack:
        ann, bob = [await connect(stack, f"{api.url}/mcp", key, mode) for key in keys]
        outputs = [await call_over_mcp(client)("long_diary", {}) for client in (ann, bob)]
        handles = [output["tool_output"]["handle"] for output in outputs]
        for client, own_handle, foreign_handle in ((ann, *handles), (bob, *reversed(handles))):
            listed_uris = [str(resource.uri) for resource in (await client.list_resources()).resources]
            assert len(listed_uris) == 1
            assert own_handle in listed_uris[0]
            with pytest.raises(Exception, match="no resource"):
                await client.read_resource(listed_uris[0].replace(own_handle, foreign_handle))
            result = await client.call_tool("agent__read_output", {"handle": foreign_handle})
            assert result.is_error
            result = await client.call_tool("agent__read_output", {"handle": own_handle})
            assert not result.is_error


@pytest.mark.spec("21.1")
async def test_a_session_of_an_mcp_client_is_refused_to_other_keys(tmp_path: Path) -> None:
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    initialize = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
    async with open_gateway(tmp_path) as (api, keys):
        ann, bob = [api.with_headers(authorization=f"Bearer {key}") for key in keys]
        accept = {"accept": "application/json, text/event-stream"}
        session = {
            **accept,
            "mcp-session-id": (await ann.post("/mcp", initialize, headers=accept)).headers["mcp-session-id"],
        }
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        assert (await ann.post("/mcp", body, headers=session)).status == 200
        for caller in (bob, api):
            assert (await caller.post("/mcp", body, headers=session)).status in (403, 404)
            assert (await caller.request("DELETE", "/mcp", headers=session)).status in (403, 404)
        assert (await ann.post("/mcp", body, headers=session)).status == 200
