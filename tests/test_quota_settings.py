"""The section `quotas`: each key, errors with their line, `toolspace explain`, and reload."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.gateway_api import open_api, write_config
from tests.setting_coverage import SettingCoverage
from toolspace import ConfigError, ToolContext, Toolspace
from toolspace.server.gateway import Gateway

pytestmark = [pytest.mark.spec("5.3"), pytest.mark.spec("22.1")]
coverage = SettingCoverage("quotas[].")
TOOLS = """
from toolspace import tool

@tool
def look() -> str:
    return "seen"

@tool
def walk() -> str:
    return "walked"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


def write(folder: Path, *quotas: Any) -> Path:
    path = folder / "toolspace.yaml"
    document = {"functions": "./tools.py", "storage": {"dir": "./state"}, "demo": False, "quotas": list(quotas)}
    path.write_text(yaml.safe_dump(document))
    return path


def open_toolspace(folder: Path, *quotas: Any) -> Toolspace:
    return Toolspace.open(write(folder, *quotas), environ={"HOME": str(folder), "PATH": os.environ["PATH"]})


async def count_allowed(ts: Toolspace, name: str = "look", **context: Any) -> int:
    return sum([(await ts.call(name, context=ToolContext(**context))).ok for _ in range(4)])


async def test_a_quota_for_a_tool_or_agent_that_does_not_exist_is_a_warning(folder: Path) -> None:
    quotas = [
        {"tool": ["look", "lok", "read_*", "send_message", "agent__batch"], "callsPerDay": 9},
        {"tool": ["gthub__*", "agent__nobody"], "callsPerDay": 9},
        {"agent": ["ada", "ent_*", "ads*"], "callsPerDay": 9},
        {"principal": "ent_ann", "key": "key_*", "callsPerDay": 9},
    ]
    path = write(folder, *quotas)
    path.write_text(path.read_text() + "agents: {ada: {model: demo}}\n")
    async with Toolspace.open(path, environ={"HOME": str(folder)}) as ts:
        warnings = [warning for warning in ts.warnings if "quotas" in warning]
    assert [warning.partition(" (")[2] for warning in warnings] == [
        'quotas[0].tool): "lok" matches no tool',
        'quotas[1].tool): "gthub__*" matches no tool',
        'quotas[1].tool): "agent__nobody" matches no tool',
        'quotas[2].agent): "ads*" matches no agent',
    ]
    # The tools of a server are known only after its start.
    path.write_text(path.read_text() + "mcpServers: {gthub: {url: 'http://127.0.0.1:9/mcp'}}\n")
    warnings = Toolspace.open(path, environ={"HOME": str(folder)}).warnings
    assert [warning.partition("): ")[2] for warning in warnings if "quotas" in warning] == [
        '"agent__nobody" matches no tool',
        '"ads*" matches no agent',
    ]


@pytest.mark.spec("22.1")
@pytest.mark.parametrize(
    "tools",
    [
        "tools: [{name: ask, description: Asks., executionType: internal, inputSchema: {type: object}}]",
        "restTools: {ask: {description: Asks., method: GET, url: 'http://127.0.0.1:9/'}}",
    ],
)
def test_a_quota_for_a_tool_of_one_agent_is_no_warning(folder: Path, tools: str) -> None:
    path = write(folder, {"tool": ["ask", "rest__ask"] if "rest" in tools else "ask", "callsPerDay": 9})
    path.write_text(path.read_text() + f"agents: {{ada: {{model: demo, {tools}}}}}\n")
    assert [warning for warning in Toolspace.open(path, environ={}).warnings if "quotas" in warning] == []


@coverage.covers("callsPerMinute", "callsPerHour", "callsPerDay")
async def test_calls_are_limited_by_minute_hour_and_day(folder: Path) -> None:
    for key in ("callsPerHour", "callsPerDay"):
        async with open_toolspace(folder, {key: 2}) as ts:
            assert await count_allowed(ts) == 2
    async with open_toolspace(folder, {"callsPerMinute": 1}) as ts:
        results = [await ts.call("look") for _ in range(3)]  # A new minute may begin meanwhile.
        assert any("1 calls per minute" in (result.error or "") for result in results)


@coverage.covers("per", "principal", "agent", "key", "tool")
async def test_a_quota_is_for_whom_it_names(folder: Path) -> None:
    ann, bob, key, ada = {"user_id": "ann"}, {"user_id": "bob"}, {"user_id": "tools/k1"}, {"agent_id": "ada"}
    for quota, allowed in (
        ({"per": "principal"}, (2, 2, 2, 2)),
        ({"per": "user"}, (2, 2, 2, 2)),
        ({"per": "all"}, (2, 0, 0, 0)),
        ({"principal": ["ann", "b*"]}, (2, 2, 4, 4)),
        ({"principal": "*", "per": "all"}, (2, 0, 0, 0)),
        ({"key": "k1"}, (4, 4, 2, 4)),
        ({"per": "key"}, (4, 4, 2, 4)),
        ({"agent": "ada"}, (4, 4, 4, 2)),
        ({"per": "agent"}, (4, 4, 4, 2)),
        ({"tool": "wa*"}, (4, 4, 4, 4)),
    ):
        async with open_toolspace(folder, {**quota, "callsPerDay": 2}) as ts:
            assert tuple([await count_allowed(ts, **caller) for caller in (ann, bob, key, ada)]) == allowed, quota
    async with open_toolspace(folder, {"per": "tool", "tools": ["look", "walk"], "callsPerDay": 1}) as ts:
        assert [await count_allowed(ts, name) for name in ("look", "walk")] == [1, 1]


@pytest.mark.parametrize(
    ("quota", "message"),
    [
        ("{callsPerDay: 0}", "an integer of at least 1"),
        ("{callsPerDay: many}", "an integer of at least 1"),
        ("{costPerDay: -1}", "a number of at least 0"),
        ("{per: planet, callsPerDay: 1}", "one of all, principal, key, agent, tool"),
        ("{callsPerDays: 1}", 'did you mean "callsPerDay"'),
        ("{per: principal}", "it has no limit; give callsPerMinute"),
        ("{tool: look, costPerDay: 1}", "count what models use"),
        ("{per: tool, tokensPerDay: 1}", "count what models use"),
        ("5", "a quota such as"),
    ],
)
def test_a_wrong_quota_is_an_error_with_its_line(folder: Path, quota: str, message: str) -> None:
    path = folder / "toolspace.yaml"
    path.write_text(f"storage: {{dir: ./state}}\nquotas:\n  - {{callsPerDay: 5}}\n  - {quota}\n")
    with pytest.raises(ConfigError) as error:
        Toolspace.open(path, environ={})
    assert "toolspace.yaml:4" in str(error.value)
    assert message in str(error.value)


@pytest.mark.spec("5.4")
async def test_a_reload_applies_new_quotas_and_keeps_what_was_counted(folder: Path) -> None:
    async with open_toolspace(folder, {"callsPerDay": 2}) as ts:
        assert await count_allowed(ts) == 2
        write(folder, {"callsPerDay": 3})
        await ts.reload()
        assert await count_allowed(ts) == 1
        write(folder)
        await ts.reload()
        assert await count_allowed(ts) == 4


async def test_the_quota_of_a_key_holds_over_http_and_restarts(folder: Path) -> None:
    quota = {"per": "key", "tool": "look", "callsPerDay": 2}
    path = write_config(folder, functions="./tools.py", storage={"dir": str(folder / "state")}, quotas=[quota])
    results: list[Any] = []
    for _ in range(3):
        async with Gateway.open(path, environ={}) as gateway, open_api(gateway) as api:
            results.append((await api.post("/api/tools/look/call", {"args": {}})).data)
    assert [result["ok"] for result in results] == [True, True, False]
    assert (results[2]["errorKind"], results[2]["executed"]) == ("limit_exceeded", False)
    assert "it resets at 20" in results[2]["error"]


def test_every_key_of_a_quota_has_a_test() -> None:
    assert coverage.list_missing("quotas[].", other_modules=("quotas[].tokensPerDay", "quotas[].costPerDay")) == []
