"""The PostgreSQL server of the tests leaves no process and no file behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import asyncpg
import pytest

from tests.servers.postgres import PostgresServer, local_postgres_server

_STARTER = """
import sys
from tests.servers.postgres import local_postgres_server
with local_postgres_server() as server:
    print(server.port, server.folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, None])
def test_a_server_ends_with_the_process_that_started_it(end: signal.Signals | None) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    port, folder = starter.stdout.readline().decode().split()
    socket.create_connection(("127.0.0.1", int(port))).close()
    if end is not None:
        starter.send_signal(end)
    starter.stdin.close()
    starter.wait()
    starter.stdout.close()
    until = time.monotonic() + 30
    while Path(folder).exists():
        assert time.monotonic() < until, "the files of the server still exist"
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))


async def test_a_database_is_empty_and_dropped_afterwards(postgres_server: PostgresServer) -> None:
    for _ in range(2):
        with postgres_server.database() as url:
            connection = await asyncpg.connect(url)
            await connection.execute("CREATE TABLE mine (id TEXT)")
            await connection.close()
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await asyncpg.connect(url)


async def test_a_restarted_server_keeps_its_data() -> None:
    with local_postgres_server(log_min_messages="error") as server:
        server.sql("CREATE TABLE kept (id TEXT)")
        for end in (server.stop, server.crash):
            end()
            with pytest.raises(OSError):
                server.sql("SELECT 1")
            server.start()
            server.sql("SELECT id FROM kept")
