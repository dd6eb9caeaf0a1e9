"""Fills the database of a gateway with a million calls, and prints how long requests take and how busy it is when idle.

Not one of the measures of `python -m benchmarks`: filling takes minutes. Run it by hand:

    python -m benchmarks.million_rows
    python -m benchmarks.million_rows --postgres postgresql://user:password@localhost/empty_database
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gateway_process import member, secret, write_config
from benchmarks.processes import Server, start_server

_NOW = int(time.time() * 1000)
_MESSAGES_OF_LARGE_SPACE = 200_000
_STATUS = "CASE WHEN n % 1000 = 0 THEN 'pending' WHEN n % 20 = 1 THEN 'failed' ELSE 'completed' END"


def build_statements(rows: int) -> list[str]:
    """The statements that fill the tables. `numbers(COUNT)` stands for a table with the numbers `n` from 1."""
    at = f"{_NOW} - 1000000 + n"
    agent, space = "'agent_' || (n % 1000 + 1)", "'spc_' || (n % 1000 + 1)"
    return [
        f"INSERT INTO entities (id, type, name, metadata, created_at) SELECT 'agent_' || n, 'agent', 'A', '{{}}', {at} "
        "FROM numbers(1000)",
        f"INSERT INTO entities (id, type, name, metadata, created_at) VALUES ('ann', 'human', 'Ann', '{{}}', {_NOW})",
        f"INSERT INTO spaces (id, name, metadata, created_at, last_seq) SELECT 'spc_' || n, 'S', '{{}}', {at}, "
        f"{_MESSAGES_OF_LARGE_SPACE} FROM numbers(1000)",
        f"INSERT INTO members (space_id, entity_id, joined_at) SELECT 'spc_' || n, 'ann', {at} FROM numbers(20)",
        "INSERT INTO runs (id, agent_entity_id, space_id, status, trigger_data, steps, usage, created_at, "
        f"completed_at, last_call_seq) SELECT 'run_' || n, {agent}, {space}, 'completed', '{{}}', 1, '{{}}', {at}, "
        f"{at}, 0 FROM numbers({rows // 5})",
        "INSERT INTO calls (call_id, run_id, seq, agent_entity_id, space_id, tool_name, args, execution_type, "
        "execution_target, visible, is_async, exposure, status, result, is_error, created_at, resolved_at, expires_at, "
        f"pauses, node_id, principal) SELECT 'call_' || n, 'run_' || (n % 200000 + 1), n, {agent}, {space}, "
        "'tool_' || (n % 100), '{\"q\": \"a question of some length\"}', 'external', 'external', 1, 0, "
        f"CASE WHEN n % 50 = 0 THEN 'full' ELSE 'none' END, {_STATUS}, '\"An answer.\"', 0, {at}, {at}, "
        f"{_NOW + 10**9}, 0, 'node_old', {agent} FROM numbers({rows})",
        "INSERT INTO messages (id, space_id, seq, sender_id, kind, content, metadata, status, created_at, updated_at) "
        f"SELECT 'msg_' || n, 'spc_1000', n, 'ann', 'message', '\"Hello\"', '{{}}', 'complete', {at}, {at} "
        f"FROM numbers({_MESSAGES_OF_LARGE_SPACE})",
        f"INSERT INTO events (stream, id, type, data, exposure, at) SELECT 'space:' || {space}, n, 'message', "
        f"'{{}}', 'full', {_NOW} + n FROM numbers({rows})",
        "INSERT INTO inbox (agent_entity_id, event_id, type, priority, at, seq, data, status, attempts, available_at, "
        f"session_id) SELECT {agent}, 'evt_' || n, 'service', 1, {_NOW}, n, '{{}}', 'processed', 1, 0, {agent} "
        f"FROM numbers({rows // 5})",
        "INSERT INTO sessions (id, agent_entity_id, kind, token, lease_until, cycle, last_seq, agent_turns, attempts, "
        f"created_at, scope_key) SELECT {agent} || '/user:' || n, {agent}, 'agent', 0, 0, 0, 0, 0, 0, {at}, "
        f"'user:' || n FROM numbers({rows // 5})",
    ]


def fill_sqlite(file: Path, rows: int) -> None:
    count_up = "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {0})"
    series = f"({count_up} SELECT n FROM numbers)"
    with sqlite3.connect(file) as connection:
        for statement in build_statements(rows):
            start, _, count = statement.partition("numbers(")
            connection.execute(f"{start}{series.format(count.rstrip(')'))}" if count else statement)


def fill_postgres(url: str, rows: int) -> None:
    async def fill() -> None:
        import asyncpg  # pyright: ignore[reportMissingTypeStubs]

        connection: Any = await asyncpg.connect(url)
        for statement in build_statements(rows):
            start, _, count = statement.partition("numbers(")
            series = f"generate_series(1, {count.rstrip(')')}) AS n"
            await connection.execute(f"{start}{series}" if count else statement, timeout=3600)
        await connection.execute("ANALYZE", timeout=3600)
        await connection.close()

    asyncio.run(fill())


def get(server: Server, path: str, headers: Mapping[str, str], method: str = "GET") -> int:
    request = urllib.request.Request(server.url + path, headers=dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def measure_requests(server: Server) -> None:
    paths: list[tuple[str, Mapping[str, str]]] = [
        ("/api/calls?status=pending", secret()),
        ("/api/calls?status=expired", secret()),
        ("/api/calls?status=waiting,pending", secret()),
        ("/api/calls?toolName=tool_7", secret()),
        ("/api/calls?toolName=missing", secret()),
        ("/api/calls?spaceId=spc_7", secret()),
        ("/api/calls?principal=agent_7", secret()),
        ("/api/calls?status=pending", member("ann")),
        ("/api/calls?toolName=missing", member("ann")),
        ("/api/runs", secret()),
        ("/api/runs?status=failed", secret()),
        ("/api/runs?spaceId=spc_7", secret()),
        ("/metrics", secret()),
    ]
    for path, headers in paths:
        times: list[float] = []
        status = 0
        for _ in range(3):
            started_at = time.perf_counter()
            status = get(server, path, headers)
            times.append(time.perf_counter() - started_at)
        role = "operator" if "x-secret-key" in headers else "member"
        print(f"  {path:42} {role:9} {status}  {min(times) * 1000:9.1f} ms", flush=True)


def measure_deletion(server: Server) -> None:
    started_at = time.perf_counter()
    status = get(server, "/api/spaces/spc_1000", secret(), "DELETE")
    print(f"  DELETE a space of {_MESSAGES_OF_LARGE_SPACE:,} messages: {status} after "
          f"{(time.perf_counter() - started_at) * 1000:.0f} ms", flush=True)  # fmt: skip
    body = json.dumps({"id": "spc_1000", "name": "New"}).encode()
    while True:
        request = urllib.request.Request(
            f"{server.url}/api/spaces", body, {**secret(), "content-type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=120):
                break
        except urllib.error.HTTPError:
            time.sleep(1)
    print(f"  its rows are deleted after {time.perf_counter() - started_at:.0f} s", flush=True)


def _cpu_seconds(pid: int) -> float:
    """Of all threads, also of those that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_idle(server: Server, seconds: float, backends: Callable[[], list[int]]) -> float:
    """The share of a core that the gateway, and its database if it is local, use when nobody asks for anything."""
    time.sleep(20)  # After a start it checks the pages of its file.

    def cpu() -> float:
        return sum(_cpu_seconds(pid) for pid in (server.pid, *backends()))

    before, started_at = cpu(), time.perf_counter()
    time.sleep(seconds)
    return (cpu() - before) / (time.perf_counter() - started_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--postgres", metavar="URL", help="an empty database; without it, SQLite")
    parser.add_argument("--postgres-pid", type=int, help="the main process of a local server, to count its work too")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each idle measure")
    options = parser.parse_args()

    def backends() -> list[int]:
        children = Path(f"/proc/{options.postgres_pid}/task/{options.postgres_pid}/children")
        return [int(pid) for pid in children.read_text().split()] if options.postgres_pid else []

    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder))
        if options.postgres:
            text = config.read_text().replace(
                f"storage: {{dir: {folder}/state}}", f"storage: {{url: '{options.postgres}'}}"
            )
            config.write_text(text)
        with start_server("gateway", str(config)) as server:
            empty = measure_idle(server, options.seconds, backends)
        print(f"idle, empty: {empty:.2%} of a core", flush=True)
        started_at = time.perf_counter()
        if options.postgres:
            fill_postgres(options.postgres, options.rows)
        else:
            fill_sqlite(Path(folder, "state", "toolspace.db"), options.rows)
        print(f"filled with {options.rows:,} calls in {time.perf_counter() - started_at:.0f} s", flush=True)
        started_at = time.perf_counter()
        with start_server("gateway", str(config)) as server:
            print(f"started in {time.perf_counter() - started_at:.1f} s", flush=True)
            full = measure_idle(server, options.seconds, backends)
            print(f"idle, full: {full:.2%} of a core; {full - empty:+.2%} (must: less than 1 %)", flush=True)
            measure_requests(server)
            measure_deletion(server)


if __name__ == "__main__":
    main()
