"""The client under test: connects to the suite's server as any toolspace, and does what the scenario needs.

MCP_CONFORMANCE_SCENARIO=tools_call python -m tests.conformance.client http://localhost:1234/mcp
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from toolspace import ToolContext, Toolspace
from toolspace.core.result import ToolResult
from toolspace.providers.mcp.oauth.authorization import create_http_auth
from toolspace.providers.mcp.oauth.token_store import TokenStore
from toolspace.providers.mcp.open_connection import ConnectionOptions
from toolspace.providers.mcp.provider import McpProvider
from toolspace.providers.mcp.server_spec import (
    ElicitationRequest,
    ElicitationResult,
    McpCallbacks,
    SamplingRequest,
    ServerSpec,
)

NAME = "peer"
CLIENT_PAGE = "https://conformance-test.local/client-metadata.json"
"""The client metadata URL that the suite knows."""

Play = Callable[[Toolspace], Awaitable[None]]


# Callbacks


async def fill_in_form(question: ElicitationRequest, _: ToolContext | None) -> ElicitationResult:
    """A user who accepts the defaults of a form, or confirms."""
    fields: Mapping[str, Mapping[str, Any]] = (question.schema or {}).get("properties", {})
    content = {name: field["default"] for name, field in fields.items() if "default" in field}
    content |= {name: True for name, field in fields.items() if name not in content and field["type"] == "boolean"}
    return ElicitationResult(action="accept", content=content)


async def sample(_: SamplingRequest, __: ToolContext | None) -> Mapping[str, Any]:
    return {"role": "assistant", "content": {"type": "text", "text": "fine"}, "model": "scripted"}


async def log_in(_: str, url: str) -> None:
    """A browser whose user agrees: the page redirects to the client at once."""
    async with httpx2.AsyncClient(follow_redirects=True) as browser:
        await browser.get(url)


# Scenarios


async def only_list(_: Toolspace) -> None:
    """Connecting lists the tools."""


async def call_everything(toolspace: Toolspace) -> None:
    for tool in toolspace.list_tools():
        if tool.name.startswith(NAME):
            await toolspace.call(tool.name, {})


async def add_numbers(toolspace: Toolspace) -> None:
    must(await toolspace.call(f"{NAME}__add_numbers", {"a": 5, "b": 3}))


async def call_as_told(toolspace: Toolspace) -> None:
    for call in scenario_context()["toolCalls"]:
        must(await toolspace.call(f"{NAME}__{call['name']}", call["arguments"]))


async def call_with_region(toolspace: Toolspace) -> None:
    for tool in toolspace.list_tools():
        if tool.name.startswith(NAME):
            await toolspace.call(tool.name, {"region": "us-west1"})


async def echo_schema(toolspace: Toolspace) -> None:
    rich = toolspace.find_tool(f"{NAME}__json_schema_2020_12_tool")
    assert rich is not None
    must(await toolspace.call(f"{NAME}__json_schema_echo", {"schema": dict(rich.input_schema)}))


PLAYS: dict[str, Play] = {
    "initialize": only_list,
    "json-schema-ref-no-deref": only_list,
    "tools_call": add_numbers,
    "http-custom-headers": call_as_told,
    "http-invalid-tool-headers": call_with_region,
    "json-schema-2020-12-preservation": echo_schema,
}
"""For other scenarios: calls every tool once, without arguments."""


def must(result: ToolResult) -> None:
    result.unwrap()


def scenario_context() -> dict[str, Any]:
    return json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))


def auth_of(scenario: str) -> dict[str, Any]:
    """Returns the `auth` setting for this server."""
    if not scenario.startswith("auth/"):
        return {}
    context = scenario_context()
    credentials = {"clientId": context.get("client_id"), "clientSecret": context.get("client_secret")}
    credentials = {key: value for key, value in credentials.items() if value}
    if scenario.startswith("auth/client-credentials"):
        return {"type": "client_credentials", **credentials}
    return {"type": "authorization_code", **(credentials or {"clientMetadataUrl": CLIENT_PAGE})}


@asynccontextmanager
async def connected(url: str, scenario: str) -> AsyncIterator[Toolspace]:
    spec = ServerSpec(url=url, auth=auth_of(scenario))
    with tempfile.TemporaryDirectory() as folder:
        options = ConnectionOptions(
            callbacks=McpCallbacks(elicit=fill_in_form, sample=sample, roots=lambda: (Path(folder),)),
            auth=create_http_auth(NAME, spec, store=TokenStore(Path(folder) / "tokens"), open_login_page=log_in),
        )
        async with Toolspace(providers=[McpProvider(NAME, spec, options)]) as toolspace:
            if reason := toolspace.orchestrator.unavailable_providers().get(NAME):
                raise SystemExit(f"not connected: {reason}")
            yield toolspace


async def main(url: str) -> None:
    scenario = os.environ["MCP_CONFORMANCE_SCENARIO"]
    async with connected(url, scenario) as toolspace:
        await PLAYS.get(scenario, call_everything)(toolspace)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1]))
