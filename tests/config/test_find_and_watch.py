"""The search for the configuration file, and watching files: each change is reported once, after it has settled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from toolspace.config.find_and_watch import CONFIG_NAMES, find_config, watch_files

FAST = 0.01
PATIENCE = 20.0


async def change(changes: AsyncIterator[None]) -> None:
    async with asyncio.timeout(PATIENCE):
        await anext(changes)


class Looks:
    """Counts the checks of the watcher, which the tests wait for."""

    def __init__(self, *paths: Path) -> None:
        self.paths = list(paths)
        self.count = 0
        self.condition = asyncio.Condition()

    def __call__(self) -> list[Path]:
        self.count += 1
        asyncio.get_running_loop().call_soon(self._tell)
        return self.paths

    def _tell(self) -> None:
        async def notify() -> None:
            async with self.condition:
                self.condition.notify_all()

        self.task = asyncio.ensure_future(notify())

    async def more(self, number: int) -> None:
        target_count = self.count + number
        async with asyncio.timeout(PATIENCE), self.condition:
            await self.condition.wait_for(lambda: self.count >= target_count)


@pytest.mark.spec("5.4")
async def test_a_change_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text("a")
    changes = watch_files(lambda: [path], interval=FAST)
    path.write_text("ab")
    await change(changes)


@pytest.mark.spec("5.4")
async def test_a_change_before_the_first_step_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.yaml"
    changes = watch_files(lambda: [path], interval=FAST)
    path.write_text("new")
    await change(changes)


@pytest.mark.spec("5.4")
async def test_a_save_by_renaming_is_a_change_even_at_the_same_time_and_size(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text("a")
    stat = path.stat()
    changes = watch_files(lambda: [path], interval=FAST)
    other_path = tmp_path / "toolspace.yaml.tmp"
    other_path.write_text("b")
    os.utime(other_path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other_path.replace(path)
    await change(changes)


async def test_a_file_that_vanishes_for_a_moment_is_no_change(tmp_path: Path) -> None:
    path, other_path = tmp_path / "toolspace.yaml", tmp_path / "b.py"
    path.write_text("a")
    other_path.write_text("b")
    looks = Looks(path, other_path)
    changes = watch_files(looks, interval=FAST)
    next_change = asyncio.ensure_future(anext(changes))
    await looks.more(1)
    path.rename(tmp_path / "aside")
    await looks.more(1)
    (tmp_path / "aside").rename(path)
    await looks.more(4)
    assert not next_change.done()
    other_path.write_text("changed")
    async with asyncio.timeout(PATIENCE):
        await next_change


async def test_a_removed_file_is_one_change(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text("a")
    looks = Looks(path)
    changes = watch_files(looks, interval=FAST)
    path.unlink()
    await change(changes)
    next_change = asyncio.ensure_future(anext(changes))
    await looks.more(6)
    assert not next_change.done()
    path.write_text("back")
    async with asyncio.timeout(PATIENCE):
        await next_change


async def test_a_new_file_in_the_list_is_no_change(tmp_path: Path) -> None:
    path, added_path = tmp_path / "toolspace.yaml", tmp_path / "tools.py"
    path.write_text("a")
    added_path.write_text("b")
    looks = Looks(path)
    changes = watch_files(looks, interval=FAST)
    next_change = asyncio.ensure_future(anext(changes))
    await looks.more(2)
    looks.paths.append(added_path)
    await looks.more(4)
    assert not next_change.done()
    added_path.write_text("changed")
    async with asyncio.timeout(PATIENCE):
        await next_change


# Finding the file


@pytest.mark.spec("17.2")
def test_the_nearest_file_upwards_is_found(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "toolspace.toml").touch()
    assert find_config(deep) == tmp_path / "toolspace.toml"
    (tmp_path / "a" / "toolspace.json").touch()
    assert find_config(deep) == tmp_path / "a" / "toolspace.json"


def test_yaml_takes_precedence_and_a_directory_of_that_name_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "toolspace.yaml").mkdir()
    for name in CONFIG_NAMES[1:]:
        (tmp_path / name).touch()
    assert find_config(tmp_path) == tmp_path / "toolspace.yml"


def test_a_relative_start_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolspace.yaml").touch()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert find_config(Path()) == tmp_path / "toolspace.yaml"


def test_without_a_file_none_is_found() -> None:
    assert find_config(Path("/nowhere/at/all")) is None
