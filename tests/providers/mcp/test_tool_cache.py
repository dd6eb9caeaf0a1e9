"""The tools of an MCP server's last start are listed while it starts. With real server processes."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.providers.mcp.conftest import SERVERS, until
from toolspace import Toolspace
from toolspace.core.events import ToolsChanged
from toolspace.orchestrator.provider_startup import StartupWait
from toolspace.providers.mcp import tool_cache
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.tool_cache import LastTools, ToolCacheFile

pytestmark = pytest.mark.spec("3.19")
Open = Callable[..., Toolspace]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / tool_cache.FOLDER_NAME


@pytest.fixture
def open_waiting(tmp_path: Path) -> Open:
    """Opens a toolspace with one server that waits for its gate, and does not wait for the server."""

    def open_toolspace(*tools: str, server: dict[str, Any] | None = None, **sections: Any) -> Toolspace:
        (tmp_path / "tools").write_text("\n".join(tools))
        script = f"""
import runpy, sys
tools = open({str(tmp_path / "tools")!r}).read().split("\\n")
sys.argv = ["gated.py", {str(tmp_path / "gate")!r}, *tools]
runpy.run_path({str(SERVERS / "gated.py")!r}, run_name="__main__")
"""
        settings = {"command": sys.executable, "args": ["-c", script], **(server or {})}
        config = {"mcpServers": {"s": settings}, "storage": {"dir": str(tmp_path / "state")}, **sections}
        path = tmp_path / "toolspace.json"
        path.write_text(json.dumps(config))
        ts = Toolspace.open(path)
        ts.startup_wait = StartupWait(only_required=True)
        return ts

    return open_toolspace


async def _start_once(open_waiting: Open, tmp_path: Path, *tools: str, **options: Any) -> None:
    """Starts the server with its gate open, so that its tools are stored, and closes the gate again."""
    (tmp_path / "gate").touch()
    async with open_waiting(*tools, **options) as ts:
        await until(lambda: ts.list_servers()[0].state == "ready", seconds=60)
    (tmp_path / "gate").unlink()


def _names(ts: Toolspace) -> list[str]:
    return [tool.name for tool in ts.list_tools() if tool.name.startswith("s__")]


async def test_tools_of_the_last_start_are_listed_while_the_server_starts(open_waiting: Open, tmp_path: Path) -> None:
    await _start_once(open_waiting, tmp_path, "one:First.", "two")
    async with open_waiting("one:First.", "two") as ts:
        await until(lambda: _names(ts) and ts.list_servers()[0].state == "starting")
        assert _names(ts) == ["s__one", "s__two"]
        assert ts.find_tool("s__one").description == "[s] First."  # pyright: ignore
        assert "Ask before you delete." in ts.orchestrator.instructions()


async def test_without_an_earlier_start_nothing_is_listed(open_waiting: Open) -> None:
    async with open_waiting("one") as ts:
        await until(lambda: ts.list_servers()[0].state == "starting")
        assert _names(ts) == []


async def test_a_call_of_a_tool_from_the_cache_waits_for_the_server(open_waiting: Open, tmp_path: Path) -> None:
    await _start_once(open_waiting, tmp_path, "one")
    async with open_waiting("one") as ts:
        await until(lambda: _names(ts))
        call = asyncio.create_task(ts.call("s__one"))
        await until(lambda: ts.list_servers()[0].calls_in_flight)
        (tmp_path / "gate").touch()
        assert (await call).result == "one"


async def test_a_call_of_a_tool_from_the_cache_waits_no_longer_than_its_timeout(
    open_waiting: Open, tmp_path: Path
) -> None:
    limit = {"requestTimeoutMs": 200}
    await _start_once(open_waiting, tmp_path, "one", server=limit)
    async with open_waiting("one", server=limit) as ts:
        await until(lambda: _names(ts))
        assert (await ts.call("s__one")).error_kind == "timeout"
        assert (await ts.call("s__other")).error_kind == "transport_error"


async def test_the_real_list_replaces_the_cached_one(open_waiting: Open, tmp_path: Path) -> None:
    await _start_once(open_waiting, tmp_path, "one", "two")
    async with open_waiting("two", "three") as ts:
        await until(lambda: _names(ts))
        assert _names(ts) == ["s__one", "s__two"]
        changes: list[ToolsChanged] = []
        ts.bus.subscribe(changes.append, ToolsChanged)
        (tmp_path / "gate").touch()
        await until(lambda: "s__three" in _names(ts), seconds=60)
        assert _names(ts) == ["s__two", "s__three"]
        assert changes
    (tmp_path / "gate").unlink()
    async with open_waiting("two", "three") as ts:
        await until(lambda: _names(ts))
        assert _names(ts) == ["s__two", "s__three"]


async def test_an_unchanged_list_is_no_change(open_waiting: Open, tmp_path: Path) -> None:
    await _start_once(open_waiting, tmp_path, "one")
    async with open_waiting("one") as ts:
        await until(lambda: _names(ts))
        changes: list[ToolsChanged] = []
        ts.bus.subscribe(changes.append, ToolsChanged)
        (tmp_path / "gate").touch()
        await until(lambda: ts.list_servers()[0].state == "ready", seconds=60)
        assert (await ts.call("s__one")).ok
        assert changes == []


async def test_a_call_is_not_sent_to_a_tool_that_differs_from_the_cached_one(
    open_waiting: Open, tmp_path: Path
) -> None:
    """Policies have decided by the old definition: it was read-only."""
    await _start_once(open_waiting, tmp_path, "one!", "two")
    async with open_waiting("one") as ts:
        await until(lambda: _names(ts))
        calls = [asyncio.create_task(ts.call(name)) for name in ("s__one", "s__two")]
        await until(lambda: ts.list_servers()[0].calls_in_flight == 2)
        (tmp_path / "gate").touch()
        results = [await call for call in calls]
        assert [(result.ok, result.executed) for result in results] == [(False, False)] * 2
        assert "has changed" in (results[0].error or "")
        assert "no longer offers" in (results[1].error or "")
        assert (await ts.call("s__one")).ok


async def test_rules_hold_for_cached_tools(open_waiting: Open, tmp_path: Path) -> None:
    await _start_once(open_waiting, tmp_path, "one", "two", "three")
    rules = {"toolsDenied": ["two"]}
    tools = {"overrides": {"s__three": {"enabled": False}, "s__one": {"approval": "required"}}}
    async with open_waiting("one", "two", "three", server=rules, tools=tools) as ts:
        await until(lambda: _names(ts))
        assert _names(ts) == ["s__one"]
        assert (await ts.call("s__two")).error_kind == "not_permitted"
        assert not (await ts.call("s__one")).executed


async def test_another_configuration_does_not_use_the_old_list(open_waiting: Open, tmp_path: Path) -> None:
    await _start_once(open_waiting, tmp_path, "one", server={"env": {"ACCOUNT": "a"}})
    async with open_waiting("one", server={"env": {"ACCOUNT": "b"}}) as ts:
        await until(lambda: ts.list_servers()[0].state == "starting")
        assert _names(ts) == []


async def test_a_server_that_fails_offers_no_cached_tools(open_waiting: Open, tmp_path: Path, folder: Path) -> None:
    await _start_once(open_waiting, tmp_path, "one")
    (tmp_path / "gate").touch()
    (tmp_path / "tools").unlink()
    ts = open_waiting("one")
    (tmp_path / "tools").unlink()  # The server ends with an error.
    async with ts:
        await until(ts.orchestrator.unavailable_providers, seconds=60)
        assert _names(ts) == []
        result = await ts.call("s__one")
        assert (result.error_kind, result.executed) == ("transport_error", False)
        assert "No such file" in (result.error or "")


async def test_files_are_for_the_owner_only_and_contain_no_settings(
    open_waiting: Open, tmp_path: Path, folder: Path
) -> None:
    await _start_once(open_waiting, tmp_path, "one", server={"env": {"API_TOKEN": "s3cret-value"}})
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "s3cret-value" not in file.read_text() + file.name


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[" * 100_000, b'{"entries": 1}', b'{"entries":[{"name":1}],"isStateless":false,"format":1}', b"\xff"],
)
async def test_a_damaged_file_is_ignored(open_waiting: Open, tmp_path: Path, folder: Path, damage: bytes) -> None:
    await _start_once(open_waiting, tmp_path, "one")
    (file,) = folder.iterdir()
    file.write_bytes(damage)
    async with open_waiting("one") as ts:
        await until(lambda: ts.list_servers()[0].state == "starting")
        assert _names(ts) == []
        (tmp_path / "gate").touch()
        assert (await ts.call("s__one")).ok


def test_a_file_that_others_may_write_is_ignored(folder: Path) -> None:
    file = ToolCacheFile(folder, "s", ServerSpec(command="x"))
    file.save(LastTools(entries=({"name": "one"},), is_stateless=False))
    assert file.load() is not None
    (path,) = folder.iterdir()
    path.chmod(0o666)
    assert file.load() is None


def test_stored_lists_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_cache, "MAX_FILES", 3)
    for number in range(6):
        last_tools = LastTools(entries=({"name": f"t{number}"},), is_stateless=False)
        ToolCacheFile(folder, f"s{number}", ServerSpec(command="x")).save(last_tools)
    assert len(list(folder.iterdir())) == 3
    file = ToolCacheFile(folder, "s5", ServerSpec(command="x"))
    file.save(LastTools(entries=({"name": "x" * tool_cache.MAX_FILE_BYTES},), is_stateless=False))
    assert file.load() is None
