"""Configurations of other programs load unchanged: servers of MCP clients, tools with older names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolspace.config.agent_settings import AgentLoopSettings
from toolspace.config.configuration import Config
from toolspace.config.load import load_config
from toolspace.config.provider_settings import McpServerSettings
from toolspace.config.tool_settings import ToolDefinition
from toolspace.core.tool import ToolCategory
from toolspace.errors import ConfigError


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load(content: str | dict[str, Any], name: str = "toolspace.json", **environ: str) -> Config:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return load_config(path, environ=environ)

    return load


@pytest.fixture
def tool(load: Any) -> Any:
    def tool(**definition: Any) -> ToolDefinition:
        return load({"tools": [{"name": "t", **definition}]}).tools.definitions["t"]

    return tool


# Examples as people have them


@pytest.mark.spec("5.1")
def test_a_list_of_servers_is_read(load: Any, tmp_path: Path) -> None:
    config = load(
        """
tools:
  timeout: 30000        # ms
  maxConcurrent: 3
  allowedPaths:
    - "./data"
    - "./docs"
    - "./src"
  webSearch:
    provider: "tavily"   # or another
    apiKey: "${WEB_SEARCH_API_KEY}"
    maxResults: 10
  mcpServers:
    - name: "filesystem"
      transport: stdio
      command: npx
      args: ["-y", "@modelcontextprotocol/server-filesystem", "/tmp"]
      env: {}
      cwd: .
      enabled: true
    - name: "remote"
      transport: sse
      url: "http://localhost:3000/sse"
      enabled: false
""",
        "config.yml",
        WEB_SEARCH_API_KEY="key",
    )
    assert config.defaults.tool_timeout == 30
    assert config.defaults.max_concurrent_tools == 3
    assert config.tools.allowed_paths == (tmp_path / "data", tmp_path / "docs", tmp_path / "src")
    assert config.tools.web_search is not None
    assert config.tools.web_search.api_key == "key"
    assert config.mcp_servers["filesystem"] == McpServerSettings(
        name="filesystem",
        transport="stdio",
        command="npx",
        args=("-y", "@modelcontextprotocol/server-filesystem", "/tmp"),
        cwd=tmp_path,
    )
    remote = config.mcp_servers["remote"]
    assert (remote.transport, remote.url, remote.enabled) == ("sse", "http://localhost:3000/sse", False)
    assert config.warnings == ()


@pytest.mark.spec("5.1")
def test_defaults_servers_and_queues_are_read(load: Any) -> None:
    config = load(
        """
defaults:
  toolTimeout: 30000
  toolResponseMaxBytes: 100000

mcpServers:
  github:
    type: stdio
    command: npx
    args: ["-y", "@mcp/github"]
    toolsAllowed: ["search_code", "get_file_contents"]
    queue: github-queue

queues:
  github-queue:
    concurrent: 5
""",
        "toolspace.yaml",
    )
    assert config.mcp_servers["github"].tools_allowed == ("search_code", "get_file_contents")
    assert config.queues["github-queue"].concurrent == 5


@pytest.mark.spec("5.1")
def test_every_setting_of_a_server_is_read(load: Any) -> None:
    entry = {
        "type": "stdio",
        "command": "npx",
        "args": ["-y", "@mcp/github"],
        "env": {"GITHUB_TOKEN": "${GITHUB_TOKEN}"},
        "toolsAllowed": ["search_code", "get_file"],
        "toolsDenied": ["delete_repo"],
        "cache": 300000,
        "queue": "github-queue",
    }
    queues = {"github-queue": {"concurrent": 1}}
    config = load({"mcpServers": {"github": entry}, "queues": queues}, GITHUB_TOKEN="t")
    server = config.mcp_servers["github"]
    assert (server.env, server.tools_denied, server.cache) == ({"GITHUB_TOKEN": "t"}, ("delete_repo",), 300)


@pytest.mark.spec("5.1")
def test_servers_that_only_name_a_queue_load_with_a_warning(load: Any) -> None:
    config = load(
        {
            "queues": {"github": {"concurrent": 3}, "slow-api": {"concurrent": 1}},
            "mcpServers": {"github": {"queue": "github"}, "slow-service": {"queue": "slow-api"}},
        }
    )
    assert config.mcp_servers["slow-service"].queue == "slow-api"
    assert len(config.warnings) == 2
    assert 'mcpServers.github: has neither "command" nor "url", so it cannot start' in config.warnings[0]


@pytest.mark.spec("5.1")
def test_a_rest_tool_is_read(load: Any) -> None:
    config = load(
        {
            "restTools": {
                "weather": {
                    "description": "Get weather data for a city",
                    "method": "GET",
                    "url": "https://api.weather.com/v1/${parameters.city}",
                    "headers": {"Authorization": "Bearer ${WEATHER_API_KEY}"},
                    "parametersSchema": {
                        "type": "object",
                        "properties": {"city": {"type": "string", "description": "City name"}},
                        "required": ["city"],
                    },
                }
            }
        },
        WEATHER_API_KEY="k",
    )
    rest = config.rest_tools["weather"]
    assert rest.url == "https://api.weather.com/v1/${parameters.city}"
    assert rest.headers == {"Authorization": "Bearer k"}
    assert rest.parameters_schema is not None
    assert rest.parameters_schema["required"] == ["city"]


AGENT = {
    "version": "1.0",
    "agent": {"name": "goal-aware-assistant", "description": "Tracks goals.", "system": "You track goals.\n"},
    "model": {"provider": "openai", "name": "gpt-4o", "temperature": 0.7, "maxOutputTokens": 1500},
    "loop": {"maxSteps": 10, "toolChoice": "auto"},
    "tools": [
        {"name": "setGoals", "executionType": "prebuilt", "execution": {"action": "setGoals"}},
        {"name": "getGoals", "executionType": "prebuilt", "execution": {"action": "getGoals"}},
    ],
    "mcp": {
        "servers": [
            {
                "name": "github-tools",
                "url": "https://mcp.github.com",
                "transport": "http",
                "allowedTools": ["list_prs", "create_issue"],
            }
        ]
    },
    "runtime": {"response": {"type": "ui-message-stream"}},
}


@pytest.mark.spec("5.1")
def test_an_agent_file_is_a_configuration_too(load: Any) -> None:
    config = load(AGENT, "agent.json")
    assert list(config.tools.definitions) == ["setGoals", "getGoals"]
    assert list(config.mcp_servers) == ["github-tools"]
    assert config.agent is not None
    assert config.agent.loop == AgentLoopSettings(max_steps=10)


@pytest.mark.spec("5.1")
def test_an_agent_file_with_mcp_servers_only_is_read(load: Any) -> None:
    config = load({"mcp": AGENT["mcp"]})
    assert config.mcp_servers["github-tools"].transport == "http"


@pytest.mark.spec("5.1")
def test_tool_definitions_with_comments_are_read(load: Any) -> None:
    config = load(
        """
{"tools": [
  {
    "name": "confirmAction",
    "description": "Ask the user to confirm an action",
    "inputSchema": { /* JSON Schema */ },
    "executionType": "space",
    "visible": true,
    "isAsync": true,
    "timeout": 30000,
    "execution": { "url": "...", "method": "POST" }
  },
  {
    "name": "fetchWeather",
    "executionType": "gateway",
    "visible": true,
    "execution": { "url": "https://api.weather.com/current", "method": "GET" }
  },
  { "name": "fetchExternalData", "executionType": "external", "visible": false, "isAsync": false, "timeout": 10000 },
  { "name": "displayChart", "executionType": "internal", "visible": true },
  {
    "name": "setGoals",
    "description": "Set or update your goals.",
    "executionType": "prebuilt",
    "execution": { "action": "setGoals" }
  }
]}
"""
    )
    tools = config.tools.definitions
    assert tools["confirmAction"] == ToolDefinition(
        name="confirmAction",
        description="Ask the user to confirm an action",
        input_schema={},
        execution_type="space",
        visible=True,
        is_async=True,
        timeout=30,
        execution={"url": "...", "method": "POST"},
    )
    assert tools["fetchExternalData"].timeout == 10
    assert tools["displayChart"].visible is True
    assert tools["setGoals"].execution == {"action": "setGoals"}


# Execution types


@pytest.mark.spec("6.1")
@pytest.mark.parametrize(
    ("written_type", "execution", "means"),
    [
        ("request", {"url": "https://x"}, "gateway"),
        ("basic", None, "external"),
        ("basic", {}, "external"),
        ("basic", {"mode": "no-execution"}, "external"),
        ("basic", {"mode": "pass-through"}, "internal"),
        ("basic", {"mode": "static", "output": 1}, "static"),
        ("ai-agent", {"agent": "a"}, "agent"),
        ("image-generator", {}, "image"),
        ("waiting", {"duration": 5}, "wait"),
        ("compute", {"expression": "1"}, "compute"),
        (None, {"url": "https://x"}, "gateway"),
    ],
)
def test_older_execution_types_mean_the_same(tool: Any, written_type: str | None, execution: Any, means: str) -> None:
    assert tool(executionType=written_type, execution=execution).execution_type == means


@pytest.mark.spec("6.2")
@pytest.mark.parametrize(
    ("kind", "execution", "visible"),
    [
        ("space", {}, True),
        ("external", {}, True),
        ("gateway", {"url": "u"}, True),
        ("internal", {}, False),
        ("static", {"output": ""}, False),
        ("compute", {"expression": "1"}, False),
        ("prebuilt", {"action": "a"}, False),
    ],
)
def test_the_default_of_visible_depends_on_the_execution_type(
    tool: Any, kind: str, execution: Any, visible: bool
) -> None:
    assert tool(executionType=kind, execution=execution).visible is visible
    assert tool(executionType=kind, execution=execution, visible=not visible).visible is not visible


def test_a_basic_tool_without_timeout_pauses_its_run(tool: Any) -> None:
    assert tool(executionType="basic").pauses_run is True
    assert tool(executionType="basic", timeout=5).pauses_run is False
    assert tool(executionType="external").pauses_run is False


def test_every_setting_of_a_definition_is_read(tool: Any) -> None:
    definition = tool(
        executionType="space",
        category="data",
        cache="5m",
        cachePerUser=True,
        annotations={"readOnly": True, "openWorldHint": False},
        tags=["a"],
        version=1.5,
        outputSchema={"type": "array"},
    )
    assert definition.category is ToolCategory.DATA
    assert (definition.cache, definition.cache_scope, definition.tags, definition.version) == (
        300,
        "principal",
        ("a",),
        "1.5",
    )
    assert (definition.annotations.read_only, definition.annotations.open_world) == (True, False)


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ({}, 'tools[0]: "executionType" is missing; expected one of gateway'),
        ({"executionType": "spaec"}, 'got "spaec"; did you mean "space"?'),
        ({"executionType": ["space"]}, "got a list"),
        ({"executionType": "basic", "execution": {"mode": "x"}}, "tools[0].execution.mode: expected one of no-exec"),
        ({"executionType": "gateway"}, '"url" is missing, which the execution type gateway needs'),
        ({"executionType": "static", "execution": {}}, '"output" is missing'),
        ({"executionType": "space", "name": "has space"}, '"has space" cannot name a tool'),
        ({"executionType": "space", "inputSchema": {"type": "string"}}, 'a JSON Schema of type "object"'),
        ({"executionType": "space", "category": "misc"}, "tools[0].category: expected one of system, file"),
        ({"executionType": "space", "display": {}}, "tools[0].display: unknown key"),
    ],
)
def test_a_wrong_definition_is_reported_with_its_place(tool: Any, definition: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error_info:
        tool(**definition)
    assert message in str(error_info.value)


# MCP servers of other programs


@pytest.mark.parametrize(
    ("entry", "transport"),
    [
        ({"command": "x"}, "stdio"),
        ({"url": "https://x/mcp"}, "http"),
        ({"url": "wss://x"}, "websocket"),
        ({"type": "streamable-http", "url": "u"}, "http"),
        ({"type": "streamableHttp", "url": "u"}, "http"),
        ({"transport": "ws", "url": "u"}, "websocket"),
        ({"serverUrl": "https://x"}, "http"),
        ({"httpUrl": "https://x"}, "http"),
    ],
)
def test_the_transport_follows_from_the_entry(load: Any, entry: dict[str, Any], transport: str) -> None:
    assert load({"mcpServers": {"a": entry}}).mcp_servers["a"].transport == transport


@pytest.mark.spec("3.11")
def test_an_editors_file_loads_unchanged(load: Any, tmp_path: Path) -> None:
    config = load(
        """
{
  "inputs": [{"type": "promptString", "id": "key", "password": true}],
  "servers": {
    "files": {
      "type": "stdio", "command": "npx", "args": ["${workspaceFolder}/x", 8080, 1.10, true],
      "envFile": "${workspaceFolder}/.env", "env": {"PORT": 8080, "KEY": "${env:KEY}", "UNSET": null},
    },
    "off": {"url": "https://x", "disabled": true, "headers": {"A": "${input:key}"}}, // not now
  },
}
""",
        ".vscode/mcp.json",
        KEY="k",
    )
    files = config.mcp_servers["files"]
    assert files.args == (f"{tmp_path}/x", "8080", "1.10", "true")
    assert files.env == {"PORT": "8080", "KEY": "k"}
    assert files.extra == {"envFile": f"{tmp_path}/.env"}
    assert config.mcp_servers["off"].enabled is False
    assert config.source("mcpServers", "off", "enabled").endswith("(servers.off.disabled)")


@pytest.mark.spec("3.11")
def test_unknown_keys_of_a_server_are_kept_and_misspellings_are_warnings(load: Any) -> None:
    config = load({"mcpServers": {"a": {"command": "x", "autoApprove": ["y"], "toolsDenid": ["z"]}}})
    assert config.mcp_servers["a"].extra == {"autoApprove": ["y"], "toolsDenid": ["z"]}
    (warning,) = config.warnings
    assert 'mcpServers.a.toolsDenid: unknown key, kept without effect; did you mean "toolsDenied"?' in warning


def test_the_timeout_of_a_server_needs_a_unit(load: Any) -> None:
    config = load({"mcpServers": {"a": {"command": "x", "timeout": "5s"}, "b": {"command": "x", "timeout": 60}}})
    assert config.mcp_servers["a"].request_timeout == 5
    assert config.source("mcpServers", "a", "requestTimeoutMs").endswith("(mcpServers.a.timeout)")
    assert config.mcp_servers["b"].request_timeout is None
    assert "mcpServers.b.timeout: has no effect" in config.warnings[0]


def test_openapi_takes_a_bare_location_a_mapping_or_a_list(load: Any, tmp_path: Path) -> None:
    assert load({"openapi": {"a": "./api.yaml"}}).openapi["a"].spec == str(tmp_path / "api.yaml")
    assert load({"openapi": [{"name": "a", "url": "https://x/y", "tags": ["t"]}]}).openapi["a"].tags == ("t",)
