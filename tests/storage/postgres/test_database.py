"""Only PostgreSQL: concurrent writers, lost connections, and a server that goes down and comes back."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.servers.postgres import LocalPostgresServer
from toolspace.errors import StorageError, StorageInDoubt, StorageUnavailable
from toolspace.storage import migrations
from toolspace.storage.database import Program
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import inbox


def _store_name(name: str) -> Program[str]:
    rows = yield "INSERT INTO secrets (name, value, created_at) VALUES (?, '', 0) RETURNING name", (name,)
    return rows[0][0]


def _list_names() -> Program[list[str]]:
    rows = yield "SELECT name FROM secrets ORDER BY name", ()
    return [row[0] for row in rows]


def _versions() -> Program[list[int]]:
    rows = yield "SELECT version FROM migrations ORDER BY version", ()
    return [row[0] for row in rows]


@pytest.mark.spec("15.2")
async def test_processes_that_start_at_once_migrate_once(postgres_url: str) -> None:
    databases = await asyncio.gather(*(PostgresDatabase.open(postgres_url) for _ in range(6)))
    assert await databases[0].read(_versions) == list(range(1, len(migrations.MIGRATIONS) + 1))
    await databases[1].run(lambda: _store_name("a"))
    assert await databases[2].read(_list_names) == ["a"]
    await asyncio.gather(*(database.aclose() for database in databases))


@pytest.mark.spec("15.2")
async def test_database_of_a_newer_version_or_of_another_program_is_refused(postgres_url: str) -> None:
    database = await PostgresDatabase.open(postgres_url)

    def age() -> Program[None]:
        yield "INSERT INTO migrations (version, applied_at) VALUES (?, 0)", (len(migrations.MIGRATIONS) + 1,)

    await database.run(age)
    with pytest.raises(StorageError, match=f"is at version {len(migrations.MIGRATIONS) + 1}"):
        await PostgresDatabase.open(postgres_url)

    def take_over() -> Program[None]:
        yield "DROP TABLE migrations", ()

    await database.run(take_over)
    with pytest.raises(StorageError, match=r"cannot be used: .*already exists"):
        await PostgresDatabase.open(postgres_url)
    await database.aclose()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:s3cr3t@127.0.0.1:1/db", "127.0.0.1:1/db does not answer"),
        ("postgresql://me:s3cr3t@no-such-host.invalid/db", "no-such-host.invalid/db does not answer"),
        ("postgresql://me:s3cr3t/x@host:5432/db", "not understood"),
        ("postgresql://me:s3cr3t@host:port/db", "not understood"),
        ("mysql://me:s3cr3t@host/db", "not the URL of a PostgreSQL"),
    ],
)
async def test_error_of_an_unreachable_address_does_not_show_the_password(url: str, message: str) -> None:
    with pytest.raises(StorageError) as failure:
        await PostgresDatabase.open(url)
    assert message in str(failure.value)
    assert "s3cr3t" not in repr(failure.value) + repr(failure.value.__cause__)


async def test_error_of_a_wrong_password_does_not_show_it(postgres_url: str) -> None:
    user, _, rest = postgres_url.removeprefix("postgresql://").partition(":")
    url = f"postgresql://{user}:wr0ng@{rest.partition('@')[2]}"
    with pytest.raises(StorageUnavailable, match="password authentication failed") as failure:
        await PostgresDatabase.open(url)
    assert "wr0ng" not in str(failure.value)


async def test_error_without_the_driver_says_how_to_install_it() -> None:
    program = (
        "import sys, asyncio; sys.modules['asyncpg'] = None\n"
        "from toolspace.storage.postgres.database import PostgresDatabase\n"
        "asyncio.run(PostgresDatabase.open('postgresql://localhost/x'))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE)
    _, message = await process.communicate()
    assert b"StorageError: PostgreSQL needs the package asyncpg" in message
    assert b"pip install 'toolspace[postgres]'" in message


async def test_conflicting_programs_run_again(postgres_url: str) -> None:
    database = await PostgresDatabase.open(f"{postgres_url}?deadlock_timeout=20ms")
    for name in ("a", "b"):
        await database.run(lambda name=name: _store_name(name))
    attempts = 0

    def add(number: int, names: tuple[str, str]) -> Program[None]:
        nonlocal attempts
        attempts += 1
        for name in names:
            yield "UPDATE secrets SET created_at = created_at + 1 WHERE name = ?", (name,)
            yield "SELECT pg_sleep(0.01)", ()  # So that they conflict.

    await asyncio.gather(*(database.run(lambda n=n: add(n, ("a", "b") if n % 2 else ("b", "a"))) for n in range(8)))

    def counts() -> Program[list[int]]:
        rows = yield "SELECT created_at FROM secrets", ()
        return [row[0] for row in rows]

    assert await database.read(counts) == [8, 8]
    assert attempts > 8
    await database.aclose()


@pytest.mark.spec("15.3")
async def test_program_runs_again_if_the_connection_is_lost_before_the_commit(postgres_url: str) -> None:
    database = await PostgresDatabase.open(postgres_url)
    attempts = 0

    def read_interrupted() -> Program[str]:
        nonlocal attempts
        attempts += 1
        name = yield from _store_name("a")
        if attempts == 1:
            yield "SELECT pg_terminate_backend(pg_backend_pid())", ()
        return name

    assert await database.run(read_interrupted) == "a"
    assert (attempts, await database.read(_list_names)) == (2, ["a"])
    await database.aclose()


@pytest.mark.spec("15.3")
async def test_commit_in_doubt_is_not_repeated(postgres_url: str) -> None:
    database = await PostgresDatabase.open(postgres_url)

    def arm() -> Program[None]:
        yield (
            "CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END'",
            (),
        )
        yield (
            "CREATE CONSTRAINT TRIGGER cut AFTER INSERT ON secrets DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION cut()",
            (),
        )

    await database.run(arm)
    attempts = 0

    def once() -> Program[str]:
        nonlocal attempts
        attempts += 1
        return (yield from _store_name("a"))

    with pytest.raises(StorageInDoubt, match="may have happened, or not"):
        await database.run(once)
    assert attempts == 1
    assert await database.read(_list_names) == []
    await database.aclose()


async def test_cancelled_reads_leave_usable_connections(postgres_url: str) -> None:
    database = await PostgresDatabase.open(postgres_url, connections=2)
    observer = await PostgresDatabase.open(postgres_url, connections=1)

    def briefly() -> Program[None]:
        yield "SELECT pg_sleep(60)", ()

    def at_length() -> Program[None]:
        yield "SELECT 1", ()
        yield "SELECT pg_sleep(60)", ()

    def sleepers() -> Program[int]:
        rows = yield (
            "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()",
            (),
        )
        return rows[0][0]

    for slow in (briefly, briefly, at_length):
        reads = [asyncio.create_task(database.read(slow)) for _ in range(2)]
        while await observer.read(sleepers) < 2:
            pass
        for read in reads:
            read.cancel()
        await asyncio.wait(reads)
        while await observer.read(sleepers):
            pass  # Nobody waits for the read.
    await asyncio.gather(*(database.run(lambda n=n: _store_name(str(n))) for n in range(6)))
    assert len(await database.read(_list_names)) == 6
    await asyncio.gather(database.aclose(), observer.aclose())


@pytest.mark.spec("15.3")
async def test_calls_fail_while_the_server_is_down_and_work_again_afterwards(
    stoppable_postgres: LocalPostgresServer,
) -> None:
    url = stoppable_postgres.url()
    database = await PostgresDatabase.open(url)
    await asyncio.gather(*(database.run(lambda n=n: _store_name(f"before {n}")) for n in range(10)))
    for turn, end in enumerate((stoppable_postgres.stop, stoppable_postgres.crash)):
        await asyncio.to_thread(end)
        for ask in (database.run(lambda: _store_name("meanwhile")), database.read(_list_names)):
            with pytest.raises(StorageUnavailable, match=f"127.0.0.1:{stoppable_postgres.port}/postgres") as failure:
                await ask
            assert url.split(":")[2].split("@")[0] not in str(failure.value)
        await asyncio.to_thread(stoppable_postgres.start)
        await asyncio.gather(*(database.run(lambda name=f"after {turn} {n}": _store_name(name)) for n in range(10)))
    assert len(await database.read(_list_names)) == 30
    await database.aclose()


@pytest.mark.spec("15.2")
@pytest.mark.spec("15.3")
@pytest.mark.parametrize("how", ["stop", "crash"])
async def test_acknowledged_writes_survive_a_restart_of_the_server(
    stoppable_postgres: LocalPostgresServer, how: str
) -> None:
    database = await PostgresDatabase.open(stoppable_postgres.url())
    acknowledged_ids: set[str] = set()
    enough = asyncio.Event()

    async def write(name: str) -> None:
        number = 0
        while True:
            event = f"{name}-{number}"
            number += 1
            try:
                await database.run(lambda event=event: inbox.add(name, event, "service", {}, priority=1))
            except StorageUnavailable:
                return
            acknowledged_ids.add(event)
            if len(acknowledged_ids) > 300:
                enough.set()

    writers = [asyncio.create_task(write(str(number))) for number in range(10)]
    await enough.wait()
    await asyncio.to_thread(getattr(stoppable_postgres, how))
    await asyncio.gather(*writers)
    await asyncio.to_thread(stoppable_postgres.start)

    def every() -> Program[set[str]]:
        rows = yield "SELECT event_id FROM inbox", ()
        return {row[0] for row in rows}

    assert acknowledged_ids <= await database.read(every)
    await database.aclose()


async def test_text_sorts_by_bytes_whatever_the_locale_of_the_server(postgres_url: str) -> None:
    database = await PostgresDatabase.open(postgres_url)

    def collations() -> Program[set[str]]:
        rows = yield (
            "SELECT collation_name FROM information_schema.columns WHERE data_type = 'text' "
            "AND table_schema = 'public'",
            (),
        )
        return {row[0] for row in rows}

    names = await database.read(collations)
    await database.aclose()
    assert names == {"C"}
