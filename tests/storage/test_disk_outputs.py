"""Outputs on disk: the contract, permissions, crashes and hostile folders."""

from __future__ import annotations

import asyncio
import os
import resource
import stat
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.storage.cache_contract import Clock
from tests.storage.output_contract import TTL, LocalOutputsContract, all_lines, store
from toolspace.errors import ToolspaceError
from toolspace.storage.disk_outputs import DiskOutputs


class TestDiskOutputs(LocalOutputsContract):
    @pytest.fixture
    async def outputs(self, clock: Clock, tmp_path: Path):
        outputs = DiskOutputs(tmp_path / "outputs", ttl=TTL, clock=clock)
        yield outputs
        await outputs.aclose()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "state" / "outputs"


@pytest.fixture
async def outputs(root: Path) -> AsyncIterator[DiskOutputs]:
    outputs = DiskOutputs(root, ttl=TTL)
    yield outputs
    await outputs.aclose()


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if not path.is_dir())


def open_files(root: Path) -> list[str]:
    links = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return [link for link in links if link.startswith(str(root))]


def age(path: Path, seconds: float) -> None:
    status = path.stat()
    os.utime(path, (status.st_atime, status.st_mtime - seconds))


async def test_no_folder_is_created_before_the_first_output(root: Path, outputs: DiskOutputs) -> None:
    assert await outputs.find("session-a/0123456789abcdef", session="a", owner=None) is None
    assert await outputs.sessions() == []
    assert await outputs.sweep() == 0
    assert not root.parent.exists()


@pytest.mark.spec("4.6")
async def test_files_are_for_their_owner_only_whatever_the_umask(
    root: Path, outputs: DiskOutputs, no_umask: None
) -> None:
    await store(outputs, "done")
    writer = await outputs.create(session="s1", owner=None, tool="t")
    await writer.write("x" * 500_000)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert len(modes) == 5
    await writer.discard()


@pytest.mark.spec("4.6")
async def test_session_folder_is_made_private(root: Path, outputs: DiskOutputs) -> None:
    (root / "session-s1").mkdir(parents=True, mode=0o755)
    await store(outputs, "private")
    assert stat.S_IMODE((root / "session-s1").stat().st_mode) == 0o700


@pytest.mark.spec("4.6")
async def test_outputs_survive_the_store(root: Path, outputs: DiskOutputs) -> None:
    output = await store(outputs, "kept")
    other_outputs = DiskOutputs(root, ttl=TTL)
    assert await other_outputs.find(output.handle, session="s1", owner=None) == output
    assert await other_outputs.text(output, limit=10) == "kept"
    await other_outputs.aclose()


@pytest.mark.spec("4.6")
async def test_large_output_needs_little_memory(outputs: DiskOutputs) -> None:
    piece = ("0123456789abcdef" * 4 + "\n") * 1000
    tracemalloc.start()
    try:
        writer = await outputs.create(session="s1", owner=None, tool="t")
        for _ in range(1600):
            await writer.write(piece)
        output = await writer.commit()
        peak_of_writing = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        lines = 0
        async for batch in outputs.lines(output):
            lines += len(batch)
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert output.bytes > 100_000_000
    assert lines == output.lines == 1_600_000
    assert peak_of_writing < 8_000_000
    assert read < 8_000_000


async def test_event_loop_does_not_wait_for_the_disk(root: Path) -> None:
    on_loop = threading.get_ident()
    counted_on: set[int] = set()

    def count(text: str, /) -> int:
        counted_on.add(threading.get_ident())
        return len(text)

    outputs = DiskOutputs(root, ttl=TTL, count_tokens=count)
    output = await store(outputs, *["x" * 300_000] * 5)
    assert output.tokens == 1_500_000
    assert counted_on
    assert on_loop not in counted_on
    await outputs.aclose()
    assert not any(thread.name.startswith("toolspace-outputs") for thread in threading.enumerate())


async def test_stopping_a_read_early_closes_the_file(root: Path, outputs: DiskOutputs) -> None:
    output = await store(outputs, "line\n" * 500_000)
    batches = outputs.lines(output)
    await anext(batches)
    assert open_files(root)
    await batches.aclose()  # type: ignore[attr-defined]
    assert open_files(root) == []


async def test_discarded_output_leaves_no_file_and_no_folder(root: Path, outputs: DiskOutputs) -> None:
    writer = await outputs.create(session="s1", owner=None, tool="t")
    await writer.write("x" * 1_000_000)
    assert [path.suffix for path in files(root)] == [".part"]
    await writer.discard()
    assert list(root.iterdir()) == []
    assert open_files(root) == []


async def test_closing_the_store_discards_unfinished_outputs(root: Path) -> None:
    outputs = DiskOutputs(root, ttl=TTL)
    await outputs.create(session="s1", owner=None, tool="t")
    await outputs.aclose()
    assert files(root) == []
    assert open_files(root) == []


@pytest.mark.spec("4.5")
async def test_discard_removes_an_output_whose_commit_was_cancelled(root: Path) -> None:
    counting_started = threading.Event()
    go_on = threading.Event()

    def count(text: str, /) -> int:
        counting_started.set()
        go_on.wait()
        return 1

    outputs = DiskOutputs(root, ttl=TTL, count_tokens=count)
    writer = await outputs.create(session="s1", owner=None, tool="t")
    await writer.write("text")
    commit_task = asyncio.create_task(writer.commit())
    await asyncio.to_thread(counting_started.wait)
    commit_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit_task
    go_on.set()
    await writer.discard()
    await outputs.aclose()
    assert files(root) == []
    assert open_files(root) == []


@pytest.mark.spec("4.6")
async def test_full_disk_is_a_clear_error_and_leaves_no_file(root: Path, outputs: DiskOutputs) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = await outputs.create(session="s1", owner=None, tool="fetch")
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
    try:
        await writer.write("x" * 300_000)
        await writer.write("x" * 300_000)
        with pytest.raises(ToolspaceError, match=r"output of 'fetch' cannot be stored in .*outputs: File too large"):
            await writer.write("x" * 300_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(root.iterdir()) == []
    assert open_files(root) == []
    await writer.discard()
    await store(outputs, "there is room again")


@pytest.mark.spec("4.6")
async def test_unwritable_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    outputs = DiskOutputs(tmp_path / "file" / "outputs", ttl=TTL)
    with pytest.raises(ToolspaceError, match=r"cannot be stored in .*outputs: Not a directory"):
        await outputs.create(session="s1", owner=None, tool="t")
    await outputs.aclose()


@pytest.mark.spec("3.33")
async def test_links_are_not_followed(root: Path, outputs: DiskOutputs, tmp_path: Path) -> None:
    output = await store(outputs, "mine", session="s1")
    folder, _, identifier = output.handle.partition("/")
    secret = tmp_path / "secret"
    secret.write_text("not for models")
    (root / folder / identifier).unlink()
    (root / folder / identifier).symlink_to(secret)
    assert await outputs.find(output.handle, session="s1", owner=None) is None
    with pytest.raises(ToolspaceError, match="gone"):
        await outputs.text(output, limit=100)

    elsewhere = tmp_path / "elsewhere"
    (root / folder).rename(elsewhere)
    (root / folder).symlink_to(elsewhere)
    assert await outputs.find(output.handle, session="s1", owner=None) is None
    assert await outputs.sessions() == []
    with pytest.raises(ToolspaceError, match="cannot be stored"):
        await outputs.create(session="s1", owner=None, tool="t")


async def test_pipe_in_place_of_an_output_does_not_block(root: Path, outputs: DiskOutputs) -> None:
    output = await store(outputs, "mine")
    path = root / output.handle
    path.unlink()
    os.mkfifo(path)
    assert await outputs.find(output.handle, session="s1", owner=None) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"handle": 1}', "null", "[" * 60_000])
async def test_output_with_a_damaged_sidecar_is_not_found(root: Path, outputs: DiskOutputs, damage: str) -> None:
    output = await store(outputs, "text")
    (root / f"{output.handle}.json").write_text(damage)
    assert await outputs.find(output.handle, session="s1", owner=None) is None
    assert await outputs.sessions() == []


@pytest.mark.spec("4.6")
async def test_sidecar_of_another_output_is_ignored(root: Path, outputs: DiskOutputs) -> None:
    output = await store(outputs, "text", session="s1")
    (root / "session-s1").rename(root / "session-s2")
    identifier = output.handle.partition("/")[2]
    assert await outputs.find(f"session-s2/{identifier}", session="s1", owner=None) is None


@pytest.mark.spec("4.6")
async def test_sweep_removes_empty_folders_and_leaves_foreign_files(root: Path) -> None:
    clock = Clock()
    outputs = DiskOutputs(root, ttl=TTL, clock=clock)
    await store(outputs, "old", session="gone")
    await store(outputs, "old", session="stays")
    (root / "session-stays" / "notes.txt").write_text("someone's")
    (root / "README").write_text("someone's")
    clock.now += TTL
    assert await outputs.sweep() == 2
    assert sorted(path.name for path in root.rglob("*")) == ["README", "notes.txt", "session-stays"]
    await outputs.aclose()


async def test_concurrent_sweeps_count_every_output_once(root: Path) -> None:
    clock = Clock()
    first, second = DiskOutputs(root, ttl=TTL, clock=clock), DiskOutputs(root, ttl=TTL, clock=clock)
    for number in range(60):
        await store(first, "old", session=f"s{number % 7}")
    clock.now += TTL
    assert sum(await asyncio.gather(first.sweep(), second.sweep(), first.sweep(), second.sweep())) == 60
    assert list(root.iterdir()) == []
    await first.aclose()
    await second.aclose()


async def test_sweep_leaves_an_output_that_is_being_written(root: Path, outputs: DiskOutputs) -> None:
    writer = await outputs.create(session="s1", owner=None, tool="t")
    await writer.write("x" * 500_000)
    age(files(root)[0], 1_000_000)
    assert await outputs.sweep() == 0
    output = await writer.commit()
    age(root / output.handle, 1_000_000)
    assert await outputs.sweep() == 0
    assert await outputs.find(output.handle, session="s1", owner=None) == output


async def test_writing_and_sweeping_one_session_at_once_works(outputs: DiskOutputs) -> None:
    async def write() -> None:
        for number in range(100):
            writer = await outputs.create(session="s1", owner=None, tool="t")
            if number % 2:
                await writer.discard()
            else:
                assert await all_lines(outputs, await writer.commit()) == []

    async def sweep(write_task: asyncio.Task[None]) -> None:
        while not write_task.done():
            await outputs.sweep()

    write_task = asyncio.create_task(write())
    await sweep(write_task)
    await write_task


WRITER = """
import asyncio, sys
from toolspace.storage.disk_outputs import DiskOutputs

async def main(root):
    outputs = DiskOutputs(root, ttl=600)
    writer = await outputs.create(session="s1", owner=None, tool="t")
    await writer.write("x" * 1_000_000)
    print("written", flush=True)
    sys.stdin.readline()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.spec("4.6")
async def test_leftovers_of_a_killed_writer_are_not_found_and_are_swept(root: Path, outputs: DiskOutputs) -> None:
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(root), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert await writer.stdout.readline() == b"written\n"
    [part] = files(root)
    age(part, 3600)
    await outputs.sweep()
    assert files(root) == [part], "its writer lives"

    writer.kill()
    await writer.communicate()
    handle = f"session-s1/{part.stem}"
    assert part.stat().st_size > 0
    assert await outputs.find(handle, session="s1", owner=None) is None
    assert await outputs.sessions() == []
    await outputs.sweep()
    assert list(root.iterdir()) == []


@pytest.mark.spec("4.6")
async def test_text_without_a_sidecar_is_swept(root: Path, outputs: DiskOutputs) -> None:
    output = await store(outputs, "text")
    (root / f"{output.handle}.json").unlink()
    await outputs.sweep()
    assert files(root) == [root / output.handle], "a moment ago: its sidecar may be on its way"
    age(root / output.handle, 120)
    await outputs.sweep()
    assert list(root.iterdir()) == []
