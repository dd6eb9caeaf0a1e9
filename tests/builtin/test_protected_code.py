"""File tools cannot change what runs: loaded code, and the programs and scripts of MCP servers."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from toolspace import ToolResult, Toolspace


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with functions that import a module, and a server of a program and a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "guarded_tools.py").write_text(
        "import guarded_helper\nfrom toolspace import tool\n\n"
        "@tool\ndef greet() -> str:\n    return guarded_helper.TEXT\n"
    )
    (tmp_path / "code" / "guarded_helper.py").write_text("TEXT = 'hi'\n")
    for name in (
        "bin/serve",
        "bin/real",
        "scripts/main.mjs",
        "scripts/other.py",
        "data/records.json",
        "data/notes.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "real").chmod(0o755)
    (tmp_path / "bin" / "link").symlink_to("real")
    servers = {
        "a": {"command": "./bin/serve", "args": ["scripts/main.mjs", "--load=scripts/other.py", "./data"]},
        "b": {"command": "./bin/link", "args": ["data/records.json"]},
        "c": {"command": "python3", "args": ["-u", "-m", "server_module.inner"]},
    }
    for server in servers.values():
        server["cwd"] = str(tmp_path)
    config = {"functions": "./code/guarded_tools.py", "storage": {"dir": "./state"}, "mcpServers": servers}
    (tmp_path / "toolspace.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def open_toolspace(folder: Path) -> Toolspace:
    environ = {"HOME": str(folder / "home"), "PATH": os.environ["PATH"]}
    return Toolspace.open(folder / "toolspace.yaml", environ=environ, single_tool="write_file")


@pytest.mark.parametrize(
    "path",
    [
        "code/guarded_tools.py",
        "code/guarded_helper.py",
        "code/Guarded_Helper.py",
        "code/new_module.py",
        "code/guarded_helper.so",
        "code/guarded_helper.pyc",
        "code/guarded_helper/__init__.py",
        "code/guarded_helper/__init__.pyc",
        "code/__pycache__/guarded_helper.cpython-311.pyc",
        "code/guarded_helper",
        "bin/serve",
        "bin/link",
        "bin/real",
        "scripts/main.mjs",
        "scripts/other.py",
        "server_module/inner.py",
        "server_module/inner/__main__.py",
        "toolspace.yaml",
    ],
)
async def test_what_runs_cannot_be_written(folder: Path, path: str) -> None:
    (folder / "payload").write_text("x")
    before = (folder / path).read_bytes() if (folder / path).exists() else None
    async with open_toolspace(folder) as ts:
        for name, arguments in (
            ("write_file", {"path": path, "content": "x"}),
            ("move_file", {"from": "payload", "to": path, "overwrite": True}),
            ("delete_file", {"path": path}),
        ):
            result = await ts.call(name, arguments)
            assert result.error_kind == "not_permitted", (name, result)
    assert ((folder / path).read_bytes() if (folder / path).exists() else None) == before


async def test_a_refused_write_creates_no_folder(folder: Path) -> None:
    async with open_toolspace(folder) as ts:
        assert (
            await ts.call("write_file", {"path": "code/json/__init__.py", "content": "x"})
        ).error_kind == "not_permitted"
        arguments = {"from": "data/notes.txt", "to": "new/inner/toolspace.yaml"}
        assert (await ts.call("move_file", arguments)).error_kind == "not_permitted"
    assert not (folder / "code" / "json").exists()
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    "path", ["data/records.json", "data/notes.txt", "data/new.py", "code/notes.txt", "code/data/table.py", "bin/other"]
)
async def test_other_files_can_be_written(folder: Path, path: str) -> None:
    async with open_toolspace(folder) as ts:
        assert (await ts.call("write_file", {"path": path, "content": "x"})).ok
        assert (await ts.call("read_file", {"path": "bin/serve"})).ok


async def wait_for_open_folder(folder: Path, call: asyncio.Future[ToolResult]) -> None:
    """Waits until a call has opened a folder, which the test itself has opened once, or has ended."""
    name = str(folder)
    while not call.done():
        paths = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        if paths.count(name) > 1:
            return
        await asyncio.sleep(0)


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder_fd)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc shows which folders are open")
async def test_a_file_that_is_written_during_a_move_is_not_put_beside_code(folder: Path) -> None:
    (folder / "package").mkdir()
    async with open_toolspace(folder) as ts:
        with lock_folder(folder / "package"):
            call = asyncio.ensure_future(ts.call("write_file", {"path": "package/__init__.py", "content": "x"}))
            await wait_for_open_folder(folder / "package", call)
            (folder / "package").rename(folder / "code" / "json")
        result = await call
    assert result.error == "'package/__init__.py' was not changed: its folder was moved meanwhile; try again"
    assert list((folder / "code" / "json").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc shows which folders are open")
async def test_a_folder_that_becomes_a_package_during_its_move_is_not_moved(folder: Path) -> None:
    (folder / "package").mkdir()
    async with open_toolspace(folder) as ts:
        with lock_folder(folder / "package"):
            call = asyncio.ensure_future(ts.call("move_file", {"from": "package", "to": "code/json"}))
            await wait_for_open_folder(folder / "package", call)
            (folder / "package" / "__init__.py").write_text("x")
        assert (await call).error_kind == "not_permitted"
    assert not (folder / "code" / "json").exists()


@pytest.mark.parametrize("is_link", [False, True])
async def test_a_package_cannot_be_moved_in_place_of_code(folder: Path, *, is_link: bool) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("TEXT = 'replaced'\n")
    if is_link:
        (folder / "link").symlink_to("package")
    source = "link" if is_link else "package"
    async with open_toolspace(folder) as ts:
        result = await ts.call("move_file", {"from": source, "to": "code/json"})
        assert result.error_kind == "not_permitted", result
        assert (await ts.call("move_file", {"from": source, "to": "data/package"})).ok
    assert not (folder / "code" / "json").exists()
