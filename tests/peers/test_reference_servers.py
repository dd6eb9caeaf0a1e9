"""Third-party servers with data: files, memory, time, git, SQLite."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from tests.peers.servers import clock, editor_file, filesystem, git, memory, sqlite
from toolspace import Toolspace
from toolspace.core.result import ImagePart
from toolspace.providers.mcp.server_spec import McpCallbacks

PIXEL = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x02\x00\x00\x00\x90wS\xde\x00\x00\x00\x0c"
    b"IDATx\x9cc\xf8\xcf\xc0\x00\x00\x03\x01\x01\x00\xc9\xfe\x92\xef\x00\x00\x00\x00IEND\xaeB`\x82"
)


@pytest.mark.spec("3.15")
async def test_filesystem_server_stays_inside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "pixel.png").write_bytes(PIXEL)
    async with Toolspace.open(editor_file(tmp_path, files=filesystem(folder))) as ts:
        write_result = await ts.call("files__write_file", {"path": str(folder / "a.txt"), "content": "Zoë"})
        read = await ts.call("files__read_text_file", {"path": str(folder / "a.txt")})
        image = await ts.call("files__read_media_file", {"path": str(folder / "pixel.png")})
        outside_read = await ts.call("files__read_text_file", {"path": str(tmp_path / "secret.txt")})
    assert write_result.ok
    assert read.result == {"content": "Zoë"}
    assert (folder / "a.txt").read_text() == "Zoë"
    assert any(isinstance(part, ImagePart) and part.mime_type == "image/png" for part in image.content)
    assert outside_read.error_kind == "execution_error"
    assert "secret" not in outside_read.text.replace("secret.txt", "")


@pytest.mark.spec("3.16")
async def test_roots_replace_the_folders_of_the_command_line(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (second / "here.txt").write_text("matches")
    file = editor_file(tmp_path, files=filesystem(first))
    async with Toolspace.open(file, callbacks=McpCallbacks(roots=lambda: (second,))) as ts:
        # The server asks for them some time after its start.
        async with asyncio.timeout(60):
            while str(second) not in (await ts.call("files__list_allowed_directories")).text:
                pass
        assert (await ts.call("files__read_text_file", {"path": str(second / "here.txt")})).ok


@pytest.mark.spec("3.11")
async def test_memory_server_keeps_its_data(tmp_path: Path) -> None:
    # `env` of the editor's entry names the file.
    file = editor_file(tmp_path, memory=memory(tmp_path / "memory.jsonl"))
    ada = {"name": "Ada", "entityType": "person", "observations": ["wrote the first program"]}
    async with Toolspace.open(file) as ts:
        creation = await ts.call("memory__create_entities", {"entities": [ada]})
        assert creation.ok
        await ts.restart_server("memory")
        matches = await ts.call("memory__search_nodes", {"query": "program"})
        assert matches.result["entities"] == [ada]
    async with Toolspace.open(file) as ts:
        graph = await ts.call("memory__read_graph")
    assert graph.result["entities"] == [ada]


@pytest.mark.spec("3.15")
async def test_time_server_converts_times(tmp_path: Path) -> None:
    async with Toolspace.open(editor_file(tmp_path, clock=clock())) as ts:
        arguments = {"source_timezone": "Europe/Berlin", "target_timezone": "Asia/Tokyo", "time": "12:00"}
        result = await ts.call("clock__convert_time", arguments)
        wrong = await ts.call("clock__get_current_time", {"timezone": "Mars/Olympus"})
    assert result.result["time_difference"] in {"+7.0h", "+8.0h"}
    assert wrong.error_kind == "execution_error"
    assert "Mars/Olympus" in (wrong.error or "")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    subprocess.run(["git", "init", "--quiet", "-b", "main", str(folder)], check=True)
    for key, value in (("user.name", "Ada"), ("user.email", "ada@example.org")):
        subprocess.run(["git", "-C", str(folder), "config", key, value], check=True)
    return folder


@pytest.mark.spec("3.15")
async def test_git_server_makes_a_commit(tmp_path: Path, repository: Path) -> None:
    (repository / "notes.txt").write_text("one\n")
    place = {"repo_path": str(repository)}
    async with Toolspace.open(editor_file(tmp_path, git=git(repository))) as ts:
        assert (await ts.call("git__git_add", {**place, "files": ["notes.txt"]})).ok
        assert "+one" in (await ts.call("git__git_diff_staged", place)).text
        assert (await ts.call("git__git_commit", {**place, "message": "Take notes"})).ok
        log = await ts.call("git__git_log", {**place, "max_count": "1"})
        elsewhere = await ts.call("git__git_status", {"repo_path": str(tmp_path)})
    assert "Take notes" in log.text
    assert elsewhere.error_kind == "execution_error"


@pytest.mark.spec("3.10")
async def test_sqlite_server_of_the_old_sdk_works(tmp_path: Path) -> None:
    async with Toolspace.open(editor_file(tmp_path, db=sqlite(tmp_path / "data.db"))) as ts:
        assert ts.list_servers()[0].era == "handshake"
        assert (await ts.call("db__create_table", {"query": "CREATE TABLE people (name TEXT, born INTEGER)"})).ok
        assert (await ts.call("db__write_query", {"query": "INSERT INTO people VALUES ('Ada', 1815)"})).ok
        rows = await ts.call("db__read_query", {"query": "SELECT * FROM people"})
        refusal = await ts.call("db__read_query", {"query": "DROP TABLE people"})
        assert "people" in (await ts.call("db__list_tables")).text
    assert "Ada" in rows.text
    assert "1815" in rows.text
    assert "Only SELECT" in refusal.text
