from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Toolspace

pytestmark = [pytest.mark.spec("5.3"), pytest.mark.spec("17.1")]


def test_each_setting_names_the_line_that_set_it(toolspace: Toolspace) -> None:
    explanation = json.loads(toolspace("explain", "echo", "--json").stdout)

    assert explanation["settings"] == {
        "timeout": {"value": 5000, "source": "toolspace.yaml:11 (tools.overrides.echo.timeout)"},
        "queue": {"value": None, "source": "default"},
        "cache": {"value": None, "source": "default"},
        "maxBytes": {"value": 5000, "source": "toolspace.yaml:12 (tools.overrides.echo.maxBytes)"},
        "policy": {"value": "allowed", "source": "default"},
        "visible": {"value": True, "source": "tool echo"},
    }
    assert explanation["provider"] == {"kind": "local", "namespace": ""}
    assert explanation["inputSchema"]["properties"]["n"]["type"] == "integer"


def test_settings_of_the_tool_itself_and_of_its_queue_are_shown(toolspace: Toolspace) -> None:
    rows = [line.split() for line in toolspace("explain", "lines").stdout.splitlines()]

    assert ["timeout", "20s", "toolspace.yaml:3", "(defaults.toolTimeout)"] in rows
    assert ["queue", "slow", "tool", "lines"] in rows
    assert ["queue's", "rules", "concurrent", "2", "toolspace.yaml:5", "(queues.slow)"] in rows
    assert ["cache", "1m", "tool", "lines"] in rows


def test_a_denied_tool_names_the_rule(toolspace: Toolspace) -> None:
    by_name = json.loads(toolspace("explain", "delete_file", "--json").stdout)["settings"]["policy"]
    by_glob = json.loads(toolspace("explain", "get_env", "--json").stdout)["settings"]["policy"]

    assert by_name["value"] == "denied"
    assert by_name["source"] == "toolspace.yaml:8 (tools.toolsDenied)"
    assert "toolsDenied" in by_name["reason"]
    assert (by_glob["value"], by_glob["source"]) == ("denied", "toolspace.yaml:13 (tools.overrides.get_*.enabled)")


def test_aliases_resolve_to_the_tool_and_are_listed(toolspace: Toolspace) -> None:
    explanation = json.loads(toolspace("explain", "less", "--json").stdout)

    assert (explanation["asked"], explanation["name"]) == ("less", "read_file")
    assert explanation["aliases"] == {
        "cat": "toolspace.yaml:7 (tools.aliases.cat)",
        "less": "toolspace.yaml:7 (tools.aliases.less)",
    }


@pytest.mark.spec("17.3")
def test_a_variable_is_named_as_the_source(toolspace: Toolspace) -> None:
    result = toolspace("explain", "lines", "--json", TOOLSPACE_TOOL_TIMEOUT="7s")

    assert json.loads(result.stdout)["settings"]["timeout"] == {
        "value": 7000,
        "source": "TOOLSPACE_TOOL_TIMEOUT (environment)",
    }


def test_an_unknown_name_exits_2_with_the_nearest_name(toolspace: Toolspace) -> None:
    result = toolspace("explain", "ehco")

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == 'error: Tool "ehco" not found; did you mean "echo"?\n'


def test_settings_of_a_provider_entry_name_its_line(toolspace: Toolspace, project: Path) -> None:
    (project / "plug.py").write_text(
        "from toolspace import Tool, ToolProvider, ToolResult\n\n"
        "class Plug(ToolProvider):\n"
        "    namespace = 'own'\n"
        "    def list_tools(self):\n"
        "        return [Tool(name, '', {'type': 'object'}) for name in ('look', 'touch')]\n"
        "    async def execute(self, name, parameters, context):\n"
        "        return ToolResult(ok=True, result=None)\n"
    )
    (project / "toolspace.yaml").write_text(
        "queues: {q: {concurrent: 1}}\nproviders:\n  plug:\n    uses: ./plug.py:Plug\n"
        "    requestTimeoutMs: 7000\n    queue: q\n    toolsDenied: [touch]\n"
    )
    look = json.loads(toolspace("explain", "own__look", "--json").stdout)["settings"]
    touch = json.loads(toolspace("explain", "own__touch", "--json").stdout)["settings"]

    assert look["timeout"] == {"value": 7000, "source": "toolspace.yaml:5 (providers.plug.requestTimeoutMs)"}
    assert look["queue"] == {"value": "q", "source": "toolspace.yaml:6 (providers.plug.queue)"}
    assert look["cache"]["source"] == "default"
    assert touch["policy"]["source"] == "toolspace.yaml:7 (providers.plug.toolsDenied)"


@pytest.mark.spec("20.1")
def test_the_policy_of_a_tool_names_its_rules_and_their_lines(toolspace: Toolspace, project: Path) -> None:
    with (project / "toolspace.yaml").open("a") as file:
        file.write("policies:\n  - {tool: echo, expression: 'arguments.n > 3', decision: deny}\n  - cautious\n")
    lines = (project / "toolspace.yaml").read_text().splitlines()
    first = lines.index("policies:") + 2
    rules = [
        {"value": "deny if arguments.n > 3", "source": f"toolspace.yaml:{first} (policies[0])"},
    ]
    echo = json.loads(toolspace("explain", "echo", "--json").stdout)["settings"]["policy"]
    assert echo == {"value": "conditional", "source": rules[0]["source"], "rules": rules}
    write_file = json.loads(toolspace("explain", "write_file", "--json").stdout)["settings"]["policy"]
    assert write_file == {"value": "ask", "source": f"toolspace.yaml:{first + 1} (policies[1]): cautious"}
    assert "deny if arguments.n > 3" in toolspace("explain", "echo").stdout


@pytest.mark.spec("20.1")
def test_the_policy_cautious_names_its_line(toolspace: Toolspace, project: Path) -> None:
    with (project / "toolspace.yaml").open("a") as file:
        file.write("policies: cautious\n")
    line = (project / "toolspace.yaml").read_text().splitlines().index("policies: cautious") + 1
    policy = json.loads(toolspace("explain", "write_file", "--json").stdout)["settings"]["policy"]
    assert policy == {"value": "ask", "source": f"toolspace.yaml:{line} (policies): cautious"}


@pytest.mark.spec("22.1")
def test_the_quotas_of_a_tool_are_shown_with_their_line(toolspace: Toolspace, project: Path) -> None:
    path = project / "toolspace.yaml"
    quotas = ["quotas:", "  - {tool: ec*, per: user, callsPerDay: 7}", "  - {tool: other, callsPerDay: 1}"]
    path.write_text("\n".join((path.read_text(), *quotas, "")))
    line = path.read_text().splitlines().index(quotas[1]) + 1
    quota = {"value": "7 calls per day for each principal", "source": f"toolspace.yaml:{line} (quotas[0])"}
    assert json.loads(toolspace("explain", "echo", "--json").stdout)["settings"]["quotas"] == [quota]
    assert quota["value"] in toolspace("explain", "echo").stdout


@pytest.mark.spec("23.1")
def test_hooks_are_shown_with_their_lines(toolspace: Toolspace, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("def check(call):\n    return None\n")
    (tmp_path / "toolspace.yaml").write_text(
        "hooks:\n"
        '  - {on: before, tools: "read_*", use: ./hooks.py:check, timeout: 2s}\n'
        '  - {on: after, tools: "other*", use: mask_secrets}\n'
        "  - {on: after, use: mask_personal_data, onFailure: open}\n"
    )
    rows = [line.split() for line in toolspace("explain", "read_file", cwd=tmp_path).stdout.splitlines()]
    assert [row for row in rows if row[:1] == ["hook"]] == [
        ["hook", "before:", "./hooks.py:check", "toolspace.yaml:2", "(hooks[0])"],
        ["hook", "after:", "mask_personal_data", "toolspace.yaml:4", "(hooks[2])"],
    ]
    hooks = json.loads(toolspace("explain", "read_file", "--json", cwd=tmp_path).stdout)["hooks"]
    assert hooks[0] == {
        "on": "before",
        "use": "./hooks.py:check",
        "tools": ["read_*"],
        "onFailure": "closed",
        "timeout": 2000,
        "source": "toolspace.yaml:2 (hooks[0])",
    }
    result = toolspace("call", "current_time", cwd=tmp_path)
    assert result.returncode == 0


@pytest.mark.spec("22.4")
def test_settings_of_a_service_name_their_lines(toolspace: Toolspace, tmp_path: Path) -> None:
    operation = {"operationId": "list_cats", "responses": {"200": {"description": "ok"}}}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "cats", "version": "1"},
        "servers": [{"url": "http://127.0.0.1:9"}],
        "paths": {"/cats": {"get": operation}},
    }
    (tmp_path / "cats.json").write_text(json.dumps(document))
    path = tmp_path / "cats.yaml"
    path.write_text(
        "defaults: {circuitBreakerDelay: 1m}\n"
        "queues: {q: {concurrent: 1}}\n"
        "openapi:\n"
        "  cats:\n"
        "    spec: ./cats.json\n"
        "    queue: q\n"
        "    circuitBreakerFailures: 2\n"
        "tools: {overrides: {read_file: {timeout: 1s}}}\n"
    )
    settings = json.loads(toolspace("--config", str(path), "explain", "cats__list_cats", "--json").stdout)["settings"]
    assert settings["queue"] == {"value": "q", "source": f"{path}:6 (openapi.cats.queue)"}
    line = f"{path}:7 (openapi.cats.circuitBreakerFailures)"
    assert settings["circuitBreakerFailures"] == {"value": 2, "source": line}
    assert settings["circuitBreakerDelay"] == {"value": 60_000, "source": f"{path}:1 (defaults.circuitBreakerDelay)"}
    path.write_text(path.read_text().replace("Failures: 2", "Failures: 0"))
    rows = [line.split() for line in toolspace("--config", str(path), "explain", "cats__list_cats").stdout.splitlines()]
    assert ["circuit", "breaker", "off", f"{path}:7", "(openapi.cats.circuitBreakerFailures)"] in rows
    assert "circuitBreakerFailures" not in json.loads(toolspace("explain", "echo", "--json").stdout)["settings"]
