"""File tools reach no state of Toolspace: database, keys, logins, caches, outputs and sockets."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolspace import Settings, Toolspace
from toolspace.builtin.files import file_tools
from toolspace.core.tool_context import ToolContext

SECRET = "jwt-secret-of-the-gateway"
STATE_FILES = (
    "toolspace.db",
    "toolspace.db-wal",
    "toolspace.db-shm",
    "toolspace.db.lock",
    "toolspace.db.before-restore-20260101-000000",
    "toolspace.db.before-restore-20260101-000000-wal",
    "cache.db",
    "cache.db-journal",
    "logins/github.json",
    "conversations/1.json",
    "mcp-tools/github.json",
    "outputs/session/1.txt",
    "sessions/agent/1.md",
    "run/1.sock",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a project whose state directory is `.toolspace`."""
    folder = tmp_path / "project"
    fill_state(folder / ".toolspace")
    (folder / "notes.txt").write_text(f"about {SECRET}")
    monkeypatch.chdir(folder)
    return folder


def fill_state(state_dir: Path) -> None:
    for name in STATE_FILES:
        file = state_dir / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SECRET)


def open_toolspace(folder: Path, *, storage: dict[str, Any] | None = None, **tools: Any) -> Toolspace:
    path = folder / "toolspace.yaml"
    path.write_text(yaml.safe_dump({"storage": storage or {"dir": "./.toolspace"}, "tools": tools}))
    return Toolspace.open(path, environ={"HOME": str(folder.parent / "home"), "PATH": os.environ["PATH"]})


def list_uses(path: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("read_file", {"path": path}),
        ("read_file", {"path": path, "encoding": "base64"}),
        ("get_file_info", {"path": path}),
        ("list_files", {"path": path}),
        ("grep_files", {"pattern": "secret", "path": path}),
        ("write_file", {"path": path, "content": "x"}),
        ("edit_file", {"path": path, "edits": [{"old": "jwt", "new": "x"}]}),
        ("delete_file", {"path": path}),
        ("move_file", {"from": path, "to": "stolen.txt"}),
        ("move_file", {"from": "notes.txt", "to": path, "overwrite": True}),
    ]


async def assert_out_of_reach(ts: Toolspace, path: str) -> None:
    for name, arguments in list_uses(path):
        result = await ts.call(name, arguments)
        assert result.error_kind == "not_permitted", (name, path, result)
        assert "state of Toolspace" in (result.error or "")
        assert SECRET not in str(result)


@pytest.mark.parametrize("name", [*STATE_FILES, "", "outputs", "missing/file.txt", "../.TOOLSPACE/toolspace.db"])
async def test_no_file_tool_reads_or_changes_state(folder: Path, name: str) -> None:
    async with open_toolspace(folder) as ts:
        await assert_out_of_reach(ts, f".toolspace/{name}".rstrip("/"))
    assert all((folder / ".toolspace" / file).read_text() == SECRET for file in STATE_FILES)
    assert not (folder / ".toolspace" / "missing").exists()


@pytest.mark.parametrize("name", STATE_FILES)
async def test_state_is_private_when_the_state_directory_is_an_allowed_path(folder: Path, name: str) -> None:
    (folder / ".toolspace" / "mine.txt").write_text("mine")
    async with open_toolspace(folder, allowedPaths=["./.toolspace", "."]) as ts:
        await assert_out_of_reach(ts, f".toolspace/{name}")
        assert (await ts.call("read_file", {"path": ".toolspace/mine.txt"})).result["content"] == "mine"
        listing = await ts.call("list_files", {"path": ".toolspace", "recursive": True})
        assert [file["name"] for file in listing.result["files"]] == ["mine.txt"]


async def test_links_do_not_lead_to_state(folder: Path) -> None:
    (folder / "link").symlink_to(".toolspace")
    (folder / "file-link").symlink_to(".toolspace/toolspace.db")
    (folder / "hard-link").hardlink_to(folder / ".toolspace" / "toolspace.db")
    (folder / "output").hardlink_to(folder / ".toolspace" / "outputs" / "session" / "1.txt")
    async with open_toolspace(folder) as ts:
        for path in ("link/toolspace.db", "hard-link", "output"):
            await assert_out_of_reach(ts, path)
        for name, arguments in list_uses("file-link")[:6]:
            assert (await ts.call(name, arguments)).error_kind == "not_permitted"


async def test_the_state_of_another_project_is_private(folder: Path) -> None:
    fill_state(folder / "inner" / ".toolspace")
    async with open_toolspace(folder) as ts:
        for path in ("inner/.toolspace/toolspace.db", "inner/.Toolspace", "new/.toolspace/toolspace.db"):
            await assert_out_of_reach(ts, path)
        matches = (await ts.call("grep_files", {"pattern": "secret", "path": "inner"})).result["matches"]
        assert matches == []
    assert not (folder / "new").exists()


async def test_no_tool_can_prepare_the_state_directory_that_the_next_start_would_use(folder: Path) -> None:
    """State of an earlier version is used as long as the project has none of its own."""
    shutil.rmtree(folder / ".toolspace")
    fill_state(folder.parent / "home" / ".local" / "state" / "toolspace")
    config = folder / "toolspace.yaml"
    config.write_text("tools: {allowedPaths: [.]}")
    (folder / "prepared").mkdir()
    environ = {"HOME": str(folder.parent / "home"), "PATH": os.environ["PATH"]}
    async with Toolspace.open(config, environ=environ) as ts:
        assert ts.state_dir != folder / ".toolspace"
        for name, arguments in (
            ("write_file", {"path": ".toolspace/toolspace.db", "content": "x"}),
            ("move_file", {"from": "prepared", "to": ".toolspace"}),
        ):
            assert (await ts.call(name, arguments)).error_kind == "not_permitted"
    assert not (folder / ".toolspace").exists()


async def test_a_state_directory_behind_a_link_is_private(folder: Path) -> None:
    (folder / ".toolspace").rename(folder / "disk")
    (folder / ".toolspace").symlink_to("disk")
    async with open_toolspace(folder) as ts:
        await assert_out_of_reach(ts, "disk/toolspace.db")


async def test_folders_that_contain_state_cannot_be_moved(folder: Path) -> None:
    fill_state(folder / "var" / "state")
    async with open_toolspace(folder, storage={"dir": "./var/state"}) as ts:
        result = await ts.call("move_file", {"from": "var", "to": "other"})
        assert result.error_kind == "not_permitted"
        assert (await ts.call("list_files", {"path": "var"})).result["files"] == []


async def test_listing_and_searching_skip_state(folder: Path) -> None:
    (folder / "hard-link").hardlink_to(folder / ".toolspace" / "toolspace.db")
    (folder / "a").write_text("twice")
    (folder / "b").hardlink_to(folder / "a")
    async with open_toolspace(folder) as ts:
        listing = await ts.call("list_files", {"path": ".", "recursive": True})
        assert [file["path"] for file in listing.result["files"]] == ["a", "b", "notes.txt", "toolspace.yaml"]
        for arguments in ({"pattern": "secret"}, {"pattern": "secret", "path": str(folder)}):
            matches = (await ts.call("grep_files", arguments)).result["matches"]
            assert [Path(match["path"]).name for match in matches] == ["notes.txt"]


async def test_a_database_outside_the_state_directory_is_private(folder: Path) -> None:
    suffixes = ("", "-wal", "-shm", "-journal", ".lock", ".before-restore-20260101-000000")
    for suffix in suffixes:
        (folder / f"own.sqlite{suffix}").write_text(SECRET)
    async with open_toolspace(folder, storage={"dir": "./.toolspace", "url": "sqlite:///./own.sqlite"}) as ts:
        for suffix in suffixes:
            await assert_out_of_reach(ts, f"own.sqlite{suffix}")


async def test_the_real_cache_of_a_toolspace_is_private(folder: Path) -> None:
    async with open_toolspace(folder, storage={"dir": "./new", "cache": "disk"}) as ts:
        await assert_out_of_reach(ts, "new/cache.db")


async def test_allowed_folders_inside_the_state_directory_stay_allowed(folder: Path) -> None:
    (folder / ".toolspace" / "demo").mkdir()
    (folder / ".toolspace" / "demo" / "a.txt").write_text("a")
    async with open_toolspace(folder, allowedPaths=["./.toolspace/demo"]) as ts:
        assert (await ts.call("read_file", {"path": ".toolspace/demo/a.txt"})).ok
        assert (await ts.call("write_file", {"path": ".toolspace/demo/b.txt", "content": "b"})).ok
        assert (await ts.call("memory_write", {"path": "facts/me.md", "content": "b"})).ok


async def test_state_of_a_program_is_private(folder: Path) -> None:
    settings = Settings(state_dir=folder / ".toolspace")
    async with Toolspace(file_tools, settings=settings, context=ToolContext(allowed_paths=[folder])) as ts:
        await assert_out_of_reach(ts, ".toolspace/toolspace.db")
        result = await ts.call(
            "read_file", {"path": ".toolspace/toolspace.db"}, context=ToolContext(allowed_paths=["/"], user_id="ann")
        )
        assert result.error_kind == "not_permitted"


@pytest.mark.parametrize("setting", ["memoryDir", "sessionDir"])
async def test_no_file_tool_reaches_configured_memories_and_archives(folder: Path, setting: str) -> None:
    (folder / "own").mkdir()
    (folder / "own" / "facts.md").write_text(SECRET)
    async with open_toolspace(folder, **{setting: "./own"}) as ts:
        await assert_out_of_reach(ts, "own/facts.md")
        assert (await ts.call("read_file", {"path": "notes.txt"})).ok


async def test_memory_tools_reach_the_memory_directory(folder: Path) -> None:
    async with open_toolspace(folder, memoryDir="./own") as ts:
        assert (await ts.call("memory_write", {"path": "facts/one.md", "content": "one"})).ok
        assert "one" in str((await ts.call("memory_read", {"path": "facts/one.md"})).result)


@pytest.mark.spec("19.1")
async def test_no_agent_reads_the_memory_files_of_another_with_file_tools(folder: Path) -> None:
    agents = {
        "ada": {"model": "demo", "tools": {"memoryDir": "./of-ada", "builtins": True}},
        "ben": {"model": "demo", "tools": {"allowedPaths": ["."], "builtins": True}},
    }
    (folder / "toolspace.yaml").write_text(yaml.safe_dump({"agents": agents, "storage": {"dir": ".toolspace"}}))
    of_ada, of_ben = (
        folder / "of-ada" / "facts.md",
        folder / ".toolspace" / "memory-agents" / "ben" / "main" / "facts.md",
    )
    for file in (of_ada, of_ben):
        file.parent.mkdir(parents=True)
        file.write_text(SECRET)
    async with Toolspace.open(folder / "toolspace.yaml", environ={}) as ts:
        for name in ("ada", "ben"):
            async with ts.agents.acquire(name) as prepared_agent:
                for file in (of_ada, of_ben):
                    result = await prepared_agent.tools.execute("read_file", {"path": str(file)})
                    assert SECRET not in str(result.to_dict()), (name, file)
                    assert not result.ok
