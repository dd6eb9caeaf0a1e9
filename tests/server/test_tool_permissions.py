"""Which tools a tool key may use, by every spelling of a tool."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.orchestrator.test_catalog import Echo
from tests.server.gateway_api import ApiClient
from toolspace import Settings, Toolspace
from toolspace.server.authorization import ToolKeyCaller
from toolspace.server.tool_permissions import ToolKeyPolicy


def open_toolspace(policy: ToolKeyPolicy) -> Toolspace:
    settings = Settings(aliases={"rm": "fs__delete_file"}, policies=[policy])
    ts = Toolspace(providers=[Echo("fs", "delete-file", "find")], settings=settings)
    policy.get_spellings = ts.orchestrator.get_spellings
    return ts


@pytest.mark.parametrize(
    "pattern", ["fs__delete-file", "fs__delete_file", "delete-file", "delete_file", "rm", "FS__d*"]
)
async def test_a_key_denies_a_tool_by_every_spelling(pattern: str) -> None:
    policy = ToolKeyPolicy()
    async with open_toolspace(policy) as ts:
        context = policy.context_for(ToolKeyCaller(key_id="k1", tools_denied=(pattern,)))
        for name in ("fs__delete_file", "fs__delete-file", "delete_file", "rm"):
            assert (await ts.call(name, {"q": "1"}, context=context)).error_kind == "not_permitted"
        assert (await ts.call("fs__find", {"q": "1"}, context=context)).ok


@pytest.mark.parametrize(
    ("pattern", "is_allowed"),
    [("fs__delete-file", True), ("fs__delete_file", True), ("rm", True), ("FS__d*", True), ("delete_file", False)],
)
async def test_a_key_allows_a_tool_by_its_full_names_and_aliases(pattern: str, is_allowed: bool) -> None:
    policy = ToolKeyPolicy()
    async with open_toolspace(policy) as ts:
        context = policy.context_for(ToolKeyCaller(key_id="k1", tools_allowed=(pattern,)))
        for name in ("fs__delete_file", "fs__delete-file", "rm"):
            assert (await ts.call(name, {"q": "1"}, context=context)).ok is is_allowed
        assert (await ts.call("fs__find", {"q": "1"}, context=context)).error_kind == "not_permitted"


@pytest.mark.parametrize("pattern", ["rest__get-x", "rest__get_x", "REST__get*"])
async def test_the_section_tools_denies_tools_of_providers_by_their_full_names(tmp_path: Path, pattern: str) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text(
        "storage: {dir: ./state}\n"
        f"tools: {{toolsDenied: ['{pattern}', agent__nope, agent__batch, rset__x, '*__get']}}\n"
        "restTools: {get-x: {url: 'http://127.0.0.1:9/x'}, other: {url: 'http://127.0.0.1:9/y'}}\n"
    )
    async with Toolspace.open(path) as ts:
        names = [tool.name for tool in ts.list_tools()]
        assert "rest__get_x" not in names
        assert "rest__other" in names
        assert (await ts.call("rest__get-x")).error_kind == "not_permitted"
        assert 'tools.toolsDenied: "agent__nope" matches no tool' in ts.warnings
        assert 'tools.toolsDenied: "rset__x" matches no tool: no server or service is named "rset"' in ts.warnings
        assert not [warning for warning in ts.warnings if "agent__batch" in warning or "*__get" in warning]


async def test_a_pattern_of_a_key_that_matches_no_tool_is_a_warning(
    api: ApiClient, caplog: pytest.LogCaptureFixture
) -> None:
    await api.create("/api/keys", kind="tools", toolsAllowed=["current_tim", "current_*"], toolsDenied=["sleeep"])
    messages = [record.getMessage() for record in caplog.records if "matches no tool" in record.getMessage()]
    assert [message.partition(": ")[2] for message in messages] == [
        'toolsAllowed: "current_tim" matches no tool',
        'toolsDenied: "sleeep" matches no tool',
    ]
