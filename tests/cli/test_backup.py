"""`toolspace backup` and `toolspace restore`, with gateways that run and with damaged files."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, write_config
from tests.server.gateway_process import open_process_api, start_gateway_process

pytestmark = pytest.mark.spec("25.2")

Project = Callable[[str, str], Path]
"""Writes a project with this name, whose database is of this kind; returns its configuration."""


@pytest.fixture
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Project:
    def write(name: str, kind: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        storage = {"url": request.getfixturevalue("postgres_url")} if kind == "postgres" else {}
        return write_config(folder, storage=storage)

    return write


async def run_command(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "toolspace", "--config", str(config), *words],
        capture_output=True,
        text=True,
        timeout=120,
    )


async def create_data(api: ApiClient) -> None:
    await api.create("/api/entities", id="ann", type="human", name="Ann ✓")
    await api.create("/api/entities", id="robot", type="agent", name="Robot")
    await api.create("/api/spaces", id="lab", name="Lab", members=["ann", "robot"], metadata={"floor": 3})
    for number in range(30):
        await api.create("/api/spaces/lab/messages", entityId="ann", content=f"message {number} ✓")
    await api.put("/api/agents/robot/memories", {"memories": [{"key": "colour", "value": "blue"}]})


async def read_data(api: ApiClient) -> list[Any]:
    paths = ("/api/entities/ann", "/api/spaces/lab", "/api/spaces/lab/messages?limit=50", "/api/agents/robot/inbox")
    return [(await api.get(path)).data for path in paths]


@pytest.mark.parametrize(("old_kind", "new_kind"), [("sqlite", "postgres"), ("postgres", "sqlite")])
async def test_a_backup_of_a_running_gateway_starts_another_one(
    project: Project, tmp_path: Path, old_kind: str, new_kind: str
) -> None:
    old_config, new_config = project("old", old_kind), project("new", new_kind)
    file = tmp_path / "backup.zip"
    async with start_gateway_process(old_config.parent, old_config) as gateway, open_process_api(gateway) as api:
        await create_data(api)
        session_file = old_config.parent / ".toolspace" / "sessions" / "robot.md"
        session_file.parent.mkdir(parents=True, exist_ok=True)
        session_file.write_text("archived")
        backup = await run_command(old_config, "backup", str(file))
        await api.create("/api/spaces/lab/messages", entityId="ann", content="after the backup")
        before = await read_data(api)
    restore = await run_command(new_config, "restore", str(file))
    second_restore = await run_command(new_config, "restore", str(file))
    async with start_gateway_process(new_config.parent, new_config) as gateway, open_process_api(gateway) as api:
        after = await read_data(api)
        message = await api.create("/api/spaces/lab/messages", entityId="ann", content="continued")

    assert backup.returncode == 0, backup.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert restore.returncode == 0, restore.stderr
    assert second_restore.returncode == 2
    assert "already" in second_restore.stderr
    assert after[2]["items"] == [item for item in before[2]["items"] if item["content"] != "after the backup"]
    assert len(after[2]["items"]) == 30
    assert after[0] == before[0]
    assert after[1]["metadata"] == before[1]["metadata"] == {"floor": 3}
    assert message["seq"] == 31
    assert (new_config.parent / ".toolspace" / "sessions" / "robot.md").read_text() == "archived"


async def test_a_backup_during_writes_has_one_consistent_state(project: Project, tmp_path: Path) -> None:
    config, file = project("old", "sqlite"), tmp_path / "backup.zip"
    async with start_gateway_process(config.parent, config) as gateway, open_process_api(gateway) as api:
        await create_data(api)

        async def write() -> None:
            while True:
                await api.create("/api/spaces/lab/messages", entityId="ann", content="more")

        writer = asyncio.create_task(write())
        backup = await run_command(config, "backup", str(file))
        writer.cancel()
        with suppress(asyncio.CancelledError):
            await writer
    assert backup.returncode == 0, backup.stderr
    with zipfile.ZipFile(file) as archive:
        messages = [json.loads(line) for line in archive.read("tables/messages.jsonl").splitlines()]
        manifest = json.loads(archive.read("manifest.json"))
        spaces = [json.loads(line) for line in archive.read("tables/spaces.jsonl").splitlines()]
    last_seq = spaces[0][manifest["tables"]["spaces"]["columns"].index("last_seq")]
    seq = manifest["tables"]["messages"]["columns"].index("seq")
    assert sorted(row[seq] for row in messages) == list(range(1, last_seq + 1))


async def test_restore_refuses_while_the_gateway_runs_and_keeps_the_old_database(
    project: Project, tmp_path: Path
) -> None:
    config, file = project("old", "sqlite"), tmp_path / "backup.zip"
    async with start_gateway_process(config.parent, config) as gateway, open_process_api(gateway) as api:
        await create_data(api)
        assert (await run_command(config, "backup", str(file))).returncode == 0
        refusal = await run_command(config, "restore", str(file), "--replace")
        await api.create("/api/entities", id="ben", type="human", name="Ben")
    restore_without_option = await run_command(config, "restore", str(file))
    restore_with_option = await run_command(config, "restore", str(file), "--replace", "--json")
    second_file = await run_command(config, "backup", str(file))
    async with start_gateway_process(config.parent, config) as gateway, open_process_api(gateway) as api:
        ann, ben = await api.get("/api/entities/ann"), await api.get("/api/entities/ben")

    assert refusal.returncode == restore_without_option.returncode == second_file.returncode == 2
    assert "in use by process" in refusal.stderr
    assert "--replace" in restore_without_option.stderr
    assert "exists already" in second_file.stderr
    assert restore_with_option.returncode == 0, restore_with_option.stderr
    assert json.loads(restore_with_option.stdout)["tables"]["entities"]["rows"] == 2
    assert (ann.status, ben.status) == (200, 404)
    assert list((config.parent / ".toolspace").glob("toolspace.db.before-restore-*"))


async def test_restore_refuses_a_file_that_is_not_a_whole_backup(project: Project, tmp_path: Path) -> None:
    config, file = project("old", "sqlite"), tmp_path / "backup.zip"
    async with start_gateway_process(config.parent, config) as gateway, open_process_api(gateway) as api:
        await create_data(api)
        assert (await run_command(config, "backup", str(file))).returncode == 0
    new_config = project("new", "sqlite")
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    newer_manifest = {**json.loads(entries["manifest.json"]), "schemaVersion": 10_000}
    first_entity = entries["tables/entities.jsonl"].splitlines(keepends=True)[0]

    async def restore(data: bytes | dict[str, bytes]) -> str:
        damaged_file = tmp_path / "damaged.zip"
        if isinstance(data, bytes):
            damaged_file.write_bytes(data)
        else:
            with zipfile.ZipFile(damaged_file, "w") as archive:
                for name, content in {**entries, **data}.items():
                    archive.writestr(name, content)
        result = await run_command(new_config, "restore", str(damaged_file))
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
        assert not (new_config.parent / ".toolspace" / "toolspace.db").exists()
        return result.stderr

    assert "is not a complete backup" in await restore(b"hello")
    assert "is not a complete backup" in await restore(file.read_bytes()[:-200])
    assert "upgrade Toolspace" in await restore({"manifest.json": json.dumps(newer_manifest).encode()})
    assert "1 rows of the table entities, and should have 2" in await restore({"tables/entities.jsonl": first_entity})
    names = (
        "files/../../outside.txt",
        "/files/outside.txt",
        "files/outside\\..\\x",
        "files/toolspace.db",
        "files/run/1.sock",
    )
    for name in names:
        assert "wrong name" in await restore({name: b"outside"})
    assert not list(tmp_path.rglob("outside*"))
    manifest = json.loads(entries["manifest.json"])
    columns = manifest["tables"]["entities"]["columns"]
    forged_table = {"columns": [*columns[:-1], 'name") SELECT 1 --'], "rows": 2}
    forged_manifest = {**manifest, "tables": {**manifest["tables"], "entities": forged_table}}
    assert "wrong name" in await restore({"manifest.json": json.dumps(forged_manifest).encode()})
    assert "too large" in await restore({"manifest.json": b" " * (17 << 20)})
    large_number = first_entity.replace(b"]", b",%d]" % 10**30)
    assert "table entities" in await restore({"tables/entities.jsonl": large_number})


@pytest.mark.parametrize("offset", [20, 60, 100])
async def test_restore_refuses_a_file_with_wrong_bytes_in_an_entry(
    project: Project, tmp_path: Path, offset: int
) -> None:
    config, file = project("old", "sqlite"), tmp_path / "backup.zip"
    async with start_gateway_process(config.parent, config) as gateway, open_process_api(gateway) as api:
        await create_data(api)
        assert (await run_command(config, "backup", str(file))).returncode == 0
    with zipfile.ZipFile(file) as archive:
        entry = archive.getinfo("tables/messages.jsonl")
    data = bytearray(file.read_bytes())
    start = entry.header_offset + 30 + len(entry.filename) + 20 + offset
    data[start : start + 8] = b"\xff" * 8
    file.write_bytes(data)
    result = await run_command(project("new", "sqlite"), "restore", str(file))
    assert result.returncode == 2
    assert "is damaged" in result.stderr
    assert "Traceback" not in result.stderr


async def test_restore_refuses_a_file_whose_contents_do_not_fit_on_the_disk(project: Project, tmp_path: Path) -> None:
    config, file = project("old", "sqlite"), tmp_path / "backup.zip"
    async with start_gateway_process(config.parent, config) as gateway, open_process_api(gateway):
        assert (await run_command(config, "backup", str(file))).returncode == 0
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("files/outputs/large.txt", b"0" * 1000)
        archive.getinfo("files/outputs/large.txt").file_size = 1 << 60  # Written to the index when the file is closed.
    new_config = project("new", "sqlite")
    result = await run_command(new_config, "restore", str(file))
    assert result.returncode == 2
    assert "bytes of data, and the disk of" in result.stderr
    assert not (new_config.parent / ".toolspace" / "toolspace.db").exists()


async def test_a_backup_has_no_database_that_restore_has_kept(project: Project, tmp_path: Path) -> None:
    config, first, second = project("old", "sqlite"), tmp_path / "first.zip", tmp_path / "second.zip"
    async with start_gateway_process(config.parent, config) as gateway, open_process_api(gateway):
        assert (await run_command(config, "backup", str(first))).returncode == 0
    assert (await run_command(config, "restore", str(first), "--replace")).returncode == 0
    assert list((config.parent / ".toolspace").glob("*.before-restore-*"))
    assert (await run_command(config, "backup", str(second))).returncode == 0
    with zipfile.ZipFile(second) as archive:
        assert not [name for name in archive.namelist() if "toolspace.db" in name]


async def test_what_can_be_read_of_a_damaged_log_is_saved_on_request(project: Project, tmp_path: Path) -> None:
    config, file = project("old", "sqlite"), tmp_path / "backup.zip"
    async with start_gateway_process(config.parent, config) as gateway, open_process_api(gateway) as api:
        await create_data(api)
        await gateway.kill()
    log = config.parent / ".toolspace" / "toolspace.db-wal"
    data = bytearray(log.read_bytes())
    frames = [
        start
        for start in range(32, len(data) - 4120, 4120)
        if data[start + 8 : start + 16] == data[16:24] and data[start + 4 : start + 8] != bytes(4)
    ]
    damaged_frame = frames[len(frames) * 3 // 4]
    data[damaged_frame + 100 : damaged_frame + 106] = b"damage"
    log.write_bytes(data)

    start = await run_command(config, "serve", "--port", "0")
    doctor = await run_command(config, "doctor", "--json")
    refusal = await run_command(config, "backup", str(file))
    backup = await run_command(config, "backup", str(file), "--skip-damaged")
    restore = await run_command(config, "restore", str(file), "--replace")
    async with start_gateway_process(config.parent, config) as gateway, open_process_api(gateway) as api:
        ann = await api.get("/api/entities/ann")

    (check,) = [check for check in json.loads(doctor.stdout)["checks"] if check["what"] == "database"]
    assert start.returncode == refusal.returncode == 2
    assert "is damaged" in start.stderr
    assert "is damaged" in refusal.stderr
    assert (check["state"], "is damaged" in check["found"]) == ("problem", True)
    assert backup.returncode == restore.returncode == 0, backup.stderr + restore.stderr
    assert ann.status == 200


@pytest.mark.parametrize(
    ("name", "is_in_reach"), [("backup.zip", True), (".toolspace/backup.zip", False), ("../backup.zip", False)]
)
async def test_a_backup_that_tools_can_read_is_a_warning(tmp_path: Path, name: str, is_in_reach: bool) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    config = write_config(folder, tools={"allowedPaths": ["."]})
    async with start_gateway_process(folder, config):
        result = await run_command(config, "backup", str(folder / name))
    assert result.returncode == 0, result.stderr
    assert ("tools can read" in result.stderr) is is_in_reach
