"""The section `policies`: each key of a rule, `cautious`, errors with their line, and reload."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.setting_coverage import SettingCoverage
from toolspace import ConfigError, ToolContext, Toolspace

pytestmark = [pytest.mark.spec("5.3"), pytest.mark.spec("20.1")]
coverage = SettingCoverage("policies[].")
SERVER = {
    "command": sys.executable,
    "args": [str(Path(__file__).parent / "providers" / "mcp" / "servers" / "plain.py")],
}
"""Offers `echo`, without annotations."""
TOOLS = """
from toolspace import tool
from toolspace.core.tool import Annotations

@tool(category="data")
def look(path: str = "/") -> str:
    return "seen"

@tool(annotations=Annotations(destructive=True))
def wipe(path: str = "/", force: bool = False) -> str:
    return "wiped"

@tool(annotations=Annotations(open_world=True))
def send(to: str = "x") -> str:
    return "sent"

@tool(annotations=Annotations(open_world=True, read_only=True))
def fetch() -> str:
    return "fetched"
"""


class Rules:
    """A toolspace with rules, and the tools that a person was asked about."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[Any] = []
        (folder / "tools.py").write_text(TOOLS)

    def open(self, *rules: Any, **config: Any) -> Toolspace:
        self.write(*rules, **config)
        return Toolspace.open(
            self.folder / "toolspace.yaml",
            environ={"HOME": str(self.folder), "PATH": os.environ["PATH"]},
            on_approval=self._deny,
        )

    def write(self, *rules: Any, **config: Any) -> None:
        policies = rules[0] if rules and isinstance(rules[0], str) else list(rules)
        document = {"functions": "./tools.py", "storage": {"dir": "./state"}, **config, "policies": policies}
        (self.folder / "toolspace.yaml").write_text(yaml.safe_dump(document))

    def _deny(self, request: Any) -> bool:
        self.requests.append(request)
        return False


async def decide(ts: Toolspace, name: str, arguments: Any = None, **context: Any) -> str:
    """What happens to a call: `allow`, `ask` or `deny`."""
    result = await ts.call(name, arguments or {}, context=ToolContext(**context))
    if result.ok:
        return "allow"
    assert (result.error_kind, result.executed) == ("not_permitted", False)
    return "ask" if "not approved" in (result.error or "") else "deny"


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    return Rules(tmp_path)


@coverage.covers("decision", "tool", "reason")
async def test_the_first_rule_that_matches_decides(rules: Rules) -> None:
    async with rules.open(
        {"tool": "look", "decision": "allow"},
        {"tools": ["w*", "l*"], "decision": "deny", "reason": "not today"},
        {"tool": "*", "decision": "ask", "reason": "who knows"},
    ) as ts:
        assert [await decide(ts, name) for name in ("look", "wipe", "send")] == ["allow", "deny", "ask"]
        assert (await ts.call("wipe")).error == "Permission denied: not today"
        assert rules.requests[-1].reason == "who knows"
        assert rules.requests[-1].source.endswith("(policies[2])")


@coverage.covers("category", "annotations")
async def test_rules_match_by_category_and_annotations(rules: Rules) -> None:
    async with rules.open(
        {"category": ["data", "file"], "decision": "deny"},
        {"annotations": {"openWorld": True, "readOnly": False}, "decision": "ask"},
    ) as ts:
        names = ("look", "send", "fetch", "wipe")
        assert [await decide(ts, name) for name in names] == ["deny", "ask", "allow", "allow"]


@coverage.covers("agent", "principal")
async def test_rules_match_by_agent_and_principal(rules: Rules) -> None:
    async with rules.open(
        {"agent": "intern*", "decision": "deny"}, {"principal": ["tools/*", "bob"], "decision": "ask"}
    ) as ts:
        assert await decide(ts, "look", agent_id="intern-1") == "deny"
        assert await decide(ts, "look", agent_id="chief") == "allow"
        assert [await decide(ts, "look", user_id=user) for user in ("bob", "tools/key_1", "ann")] == [
            "ask",
            "ask",
            "allow",
        ]


@coverage.covers("expression")
async def test_rules_match_by_an_expression(rules: Rules) -> None:
    async with rules.open(
        {"expression": 'tool.name == "wipe" and arguments.force', "decision": "deny"},
        {"when": 'arguments.path.startswith("/etc") and principal != "root"', "tool": "wipe", "decision": "ask"},
        {"tool": "look", "expression": "arguments.missing.part", "decision": "ask"},
        {"tool": "send", "expression": "arguments.missing.part", "decision": "allow"},
        {"tool": "send", "decision": "deny"},
    ) as ts:
        assert await decide(ts, "wipe", {"force": True}) == "deny"  # Without `force`, its default counts.
        assert await decide(ts, "wipe", {"path": "/etc/passwd"}) == "ask"
        assert await decide(ts, "wipe", {"path": "/etc/passwd"}, user_id="root") == "allow"
        assert await decide(ts, "wipe", {"path": "/tmp"}) == "allow"
        # An expression without a value is decided carefully.
        assert await decide(ts, "look") == "ask"
        assert await decide(ts, "send") == "deny"


@coverage.covers("approvers", "expiresAfter")
async def test_a_rule_says_who_approves_and_how_long_they_are_asked(rules: Rules) -> None:
    rule = {"tool": "look", "decision": "ask", "approvers": ["ann", "members"], "expiresAfter": "2h"}
    async with rules.open(rule) as ts:
        assert await decide(ts, "look") == "ask"
    assert (rules.requests[0].approvers, rules.requests[0].expires_after) == (("ann", "members"), 7200.0)


@coverage.covers("server")
async def test_rules_match_the_tools_of_a_server_in_every_spelling(rules: Rules) -> None:
    servers = {"my-server": SERVER}
    async with rules.open({"server": "my-server", "decision": "deny"}, mcpServers=servers) as ts:
        assert await decide(ts, "my_server__echo", {"text": "x"}) == "deny"
        assert await decide(ts, "look") == "allow"
        for pattern in ("echo", "my-server__echo", "my_server__e*", "ECHO"):
            rules.write({"tool": pattern, "decision": "deny"}, mcpServers=servers)
            await ts.reload()
            for name in ("my_server__echo", "echo", "my-server__echo"):
                assert await decide(ts, name, {"text": "x"}) == "deny", (pattern, name)


async def test_an_allowed_name_does_not_allow_the_tool_of_a_server_with_the_same_name(rules: Rules) -> None:
    servers = {"evil": SERVER, "good": SERVER}
    async with rules.open(
        {"tool": "echo", "decision": "allow"},
        {"tool": "echo", "server": "good", "decision": "allow"},
        {"tool": "*", "decision": "deny"},
        mcpServers=servers,
    ) as ts:
        assert await decide(ts, "evil__echo", {"text": "x"}) == "deny"
        assert await decide(ts, "good__echo", {"text": "x"}) == "allow"


@pytest.mark.parametrize("as_last_rule", [False, True])
async def test_cautious_asks_for_what_may_destroy_or_reaches_outside(rules: Rules, as_last_rule: bool) -> None:
    policies = ({"tool": "send", "decision": "allow"}, "cautious") if as_last_rule else ("cautious",)
    async with rules.open(*policies, mcpServers={"remote": SERVER}) as ts:
        decisions = [await decide(ts, name) for name in ("look", "wipe", "send", "fetch")]
        assert decisions == ["allow", "ask", "allow" if as_last_rule else "ask", "allow"]
        # Nothing is annotated there: destructive and open-world, as MCP says.
        assert await decide(ts, "remote__echo", {"text": "x"}) == "ask"


@pytest.mark.spec("5.2")
@pytest.mark.parametrize(
    ("policies", "line", "message"),
    [
        ("[{tool: x, decision: maybe}]", 3, "allow, ask, deny"),
        ("[{tool: x}]", 3, '"decision" is missing'),
        ("[{tol: x, decision: ask}]", 3, "unknown key"),
        ("[{tool: x, decision: ask, expression: 'a +'}]", 3, "policies[0].expression"),
        ("[{tool: x, decision: ask, expression: 'amount > 1'}]", 3, 'unknown name "amount"'),
        ("[{category: fish, decision: ask}]", 3, "system, file"),
        ("careless", 3, "cautious"),
        ("[careful]", 3, "cautious"),
    ],
)
def test_a_wrong_rule_is_an_error_with_its_line(tmp_path: Path, policies: str, line: int, message: str) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text(f"storage: {{dir: ./state}}\n\npolicies: {policies}\n")
    with pytest.raises(ConfigError) as error:
        Toolspace.open(path, environ={})
    assert f"toolspace.yaml:{line}" in str(error.value)
    assert message in str(error.value)


@pytest.mark.spec("5.4")
async def test_a_reload_applies_new_rules(rules: Rules) -> None:
    async with rules.open({"tool": "look", "decision": "deny"}) as ts:
        assert await decide(ts, "look") == "deny"
        rules.write({"tool": "wipe", "decision": "deny"})
        await ts.reload()
        assert [await decide(ts, name) for name in ("look", "wipe")] == ["allow", "deny"]


async def test_the_rules_apply_to_the_own_tools_of_an_agent(rules: Rules) -> None:
    own_tool = {"name": "own", "executionType": "static", "execution": {"output": "ran"}}
    agents = {"helper": {"system": "Help.", "model": "openai:gpt-6.1-sol", "tools": [own_tool]}}
    async with rules.open({"tool": "own", "decision": "deny"}, agents=agents, demo=False) as ts:
        agent = ts.agents.find("helper")
        assert agent is not None
        own_tools = ts._create_for(agent)
        assert (await own_tools.call("own")).error_kind == "not_permitted"
        await own_tools.aclose()


def test_every_key_of_a_rule_has_a_test() -> None:
    assert coverage.list_missing("policies[].") == []
