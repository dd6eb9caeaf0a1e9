"""The installer of third-party packages."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.peers.install import SETS, PeerSet, ensure, npm_package, npm_program, python_program


def test_npm_packages_have_their_pinned_versions() -> None:
    for peers in SETS.values():
        if peers.is_npm and peers.by_default:
            for name, version in json.loads(peers.pins.read_text())["dependencies"].items():
                assert json.loads((npm_package(name) / "package.json").read_text())["version"] == version


def test_programs_run_without_the_path() -> None:
    command = npm_program("@modelcontextprotocol/server-memory")
    assert all(Path(part).is_file() for part in command)
    assert python_program("mcp-server-time").is_file()


def test_unpinned_package_is_an_error_that_says_where_to_add_it() -> None:
    with pytest.raises(LookupError, match=r"left-pad.*tests/peers/package\.json"):
        npm_package("left-pad")
    with pytest.raises(LookupError, match=r"mcp-server-none.*tests/peers/servers\.txt"):
        python_program("mcp-server-none")


def _ensure(peers: PeerSet) -> int:
    """Returns the installation that a process gets."""
    return (ensure(peers) / "pyvenv.cfg").stat().st_ino


def test_concurrent_processes_install_once_per_set_of_pins(tmp_path: Path) -> None:
    peers = PeerSet("demo", tmp_path / "pins.txt", cache=tmp_path / "cache")
    leftovers: list[bool] = []
    for version in (1, 2):
        peers.pins.write_text(f"# No package at all, version {version}.\n")
        with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
            assert len(set(pool.map(_ensure, [peers] * 4))) == 1
        leftover = peers.folder / "leftover"
        leftovers.append(leftover.exists())
        leftover.touch()
    assert leftovers == [False, False]
    ensure(peers)
    assert (peers.folder / "leftover").exists()
