"""The interface of a database: it runs SQL programs as transactions. SQLite and PostgreSQL implement it.

A program is a generator that yields statements and is sent their rows. It is written once, in the SQL that SQLite and
PostgreSQL share, and knows neither threads nor connections:

    def rename(space_id: str, name: str) -> Program[bool]:
        rows = yield "UPDATE spaces SET name = ? WHERE id = ? RETURNING id", (name, space_id)
        return bool(rows)

A program may run more than once (after a deadlock it runs again), and in any thread. So it may change nothing but rows
and the objects that were made for this attempt.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar
from urllib.parse import parse_qs

from toolspace.core.clock import DatabaseClock
from toolspace.core.stored_records import NewEvent, StoredEvent

_log = logging.getLogger("toolspace.storage")

T = TypeVar("T")
DeferredT = TypeVar("DeferredT", bound="DeferredWrites")
Row = Sequence[Any]
Statement = tuple[str, Sequence[Any]]
"""SQL with `?` for each value, and the values: text, integers or None, because both databases treat those alike."""
Program = Generator[Statement, list[Row], T]
OperationKind = Literal["read", "write"]

SKIP_LOCKED = "/*skip locked*/"
"""Ends a SELECT that picks rows to update: with several writers, it skips rows that another one has locked."""
FOR_UPDATE = "/*locked*/"
"""Ends a SELECT of rows that nobody else may change before the commit."""


READ_CLOCK: Final = "/*clock*/"
"""A statement that every database answers itself, with its time: see `current_time`."""


def current_time() -> Program[int]:
    """The time of the database in Unix milliseconds, for the columns of records. Needs no round trip."""
    rows = yield READ_CLOCK, ()
    return rows[0][0]


class RowBatch(list[Sequence[Any]]):
    """Values of many rows, instead of the values of a statement: it runs once for each row and returns no rows."""

    __slots__ = ()


F = TypeVar("F", bound=Callable[..., Any])


def long_running(program: F) -> F:
    """Marks a program that may touch many rows: it runs in a transaction and a thread of its own."""
    program.is_long_running = True  # type: ignore[attr-defined]
    return program


def is_long_running(program: object) -> bool:
    return getattr(program, "is_long_running", False)


class StaleError(Exception):
    """A row is not as the process remembers it: the caller has to read it."""


class DeferredWrites(Protocol):
    """The writes at the end of a transaction: results of calls, inbox rows, and events by stream.

    They come last because an append locks the counter of its stream until the commit. A database that commits many
    programs together may also write their deferred rows together.
    """

    resolved_calls: list[Sequence[Any]]
    """For `commit_deferred` alone: calls with their results, as `queries.calls.build_resolution` makes them."""
    inbox_rows: list[Sequence[Any]]
    """As `queries.inbox.build_row` makes them."""
    new_events: dict[str, list[NewEvent]]
    stored_events: list[StoredEvent]
    """The new events with their ids, once they are written."""


class Database(ABC):
    """Runs programs. Every acknowledged write survives a crash of the process."""

    reader_count: int = 1
    """How many programs can read at the same time."""
    is_shared: bool = False
    """Whether other processes write to it too, so that this process needs wake-ups from them."""
    clock: DatabaseClock = DatabaseClock()
    """The time that its records have. Programs read it with `current_time`."""
    observer: Callable[[OperationKind, Sequence[float], Sequence[BaseException]], None] | None = None
    """Called after programs have ended, with the seconds that each took, including waits, and the errors."""
    damage: str | None = None
    """What is damaged, once something was found."""

    @property
    def urgent_access(self) -> Database:
        """The same database for short programs that must not wait for others: heartbeats, plans and time-outs."""
        return self

    @abstractmethod
    def run(
        self,
        program: Callable[[], Program[T]],
        *,
        on_commit: Callable[[T], None] | None = None,
        deferred_writes: Callable[[], DeferredWrites] | None = None,
        exclusive: bool = False,
    ) -> Awaitable[T]:
        """Runs a program as one transaction: when this returns all of it is durable, or nothing happened.

        `deferred_writes` returns the writes at the end of the transaction. It is called in each attempt, after the
        program has ended without an error. `exclusive`: the program is `long_running`, so it must not run on the event
        loop, nor in one transaction with others.

        A program that has started runs to its end, even if the caller is cancelled. `on_commit` is called on the event
        loop with the result once it is durable, in that case too.
        """

    @abstractmethod
    def commit_deferred(
        self,
        deferred_writes: DeferredT,
        *,
        on_commit: Callable[[DeferredT], None],
        on_doubt: Callable[[DeferredT], None],
    ) -> Awaitable[bool]:
        """Commits deferred writes that need no program, because nothing has to be read. Otherwise as `run`.

        Returns False, and writes nothing, if a call has changed in the database. If it is unknown whether the commit
        happened, `on_doubt` is called instead of `on_commit`.
        """

    @abstractmethod
    def read(self, program: Callable[[], Program[T]], *, timeout: float | None = None) -> Awaitable[T]:
        """Runs a program that only reads, beside the writers. It sees every write that was acknowledged before.

        After `timeout` seconds, waits included, its statement is ended and `ReadTimeout` is raised.
        """

    def report_damage(self, error: BaseException | str) -> None:
        """Remembers the first damage, and logs it."""
        if self.damage is None:
            self.damage = str(error)
            _log.error("the database is damaged: %s; toolspace doctor says more", self.damage)

    async def measure_clock(self) -> None:
        """Compares the clock of this process with that of the database server, if there is one."""

    def check_free_space(self) -> None:
        """Raises `StorageUnavailable` if this process can tell that the disk is nearly full."""

    @abstractmethod
    async def aclose(self) -> None: ...


class ConnectedProcesses(ABC):
    """The processes that are connected to the database at one moment."""

    epoch: int
    """Changes when this process was disconnected in between: then what it saw before proves nothing."""

    @abstractmethod
    def __contains__(self, process_id: str) -> bool: ...

    @property
    @abstractmethod
    def count(self) -> int:
        """How many they are, with this one."""


class WakeUps(ABC):
    """Carries hints between the processes that share a database: which ids to read again.

    A hint may arrive twice, late or never; its receiver reads the database. After a gap (a lost connection) `on_gap`
    says that anything may have changed.
    """

    @abstractmethod
    def send(self, hints: Iterable[str]) -> None:
        """Sends hints to the other processes, soon. Never waits, never raises."""

    @abstractmethod
    def listen(self, on_hints: Callable[[Sequence[str]], None], on_gap: Callable[[], None]) -> None:
        """Sets what to call on the event loop for hints from other processes."""

    async def announce(self, process_id: str) -> None:
        """Shows the other processes that this one is connected, until it disconnects or dies."""

    async def find_connected(self) -> ConnectedProcesses | None:
        """Returns the processes that are connected now. None: it cannot be told."""
        return None

    async def aclose(self) -> None: ...


# Where the database is

DATABASE_FILE_NAME: Final = "toolspace.db"
_SQLITE_SCHEME: Final = "sqlite:///"


def find_database_file(url: str | None, state_dir: Path) -> Path | None:
    """The SQLite file that `storage.url` names; None if it is the URL of a PostgreSQL. Opens nothing."""
    if url is None:
        return state_dir / DATABASE_FILE_NAME
    return Path(url.removeprefix(_SQLITE_SCHEME)) if url.startswith(_SQLITE_SCHEME) else None


def describe_database(url: str | None, state_dir: Path) -> str:
    """The file, or the URL without user and password."""
    file = find_database_file(url, state_dir)
    return str(file) if file is not None else f"postgresql://{shown_address(url or '')}"


def shown_address(url: str) -> str:
    """Host and database of a URL, without user and password, for messages and logs."""
    # Not parsed as a URL: a malformed one must not show its password either.
    rest = url.partition("://")[2]
    rest, _, query = rest.partition("?")
    authority, slash, database = rest.rpartition("@")[2].partition("/")
    host = authority or next(iter(parse_qs(query).get("host", ())), "localhost")
    return f"{host}{slash}{database}"


# Pages of rows

MAX_PAGE_BYTES: Final = 4 * 1024 * 1024
"""The approximate size limit of one page. A single row may be larger."""
_FIRST_ROWS: Final = 16
"""Rows that are read before the average size is known."""


def read_page(
    read: Callable[[T | None, int], Program[list[T]]],
    size: Callable[[T], int],
    limit: int,
    *,
    max_bytes: int = MAX_PAGE_BYTES,
) -> Program[tuple[list[T], bool]]:
    """Up to `limit` rows, fewer if they are large, and whether there may be more after them.

    `read(last, count)` gives the next rows after `last`; after None, the first ones.
    """
    page: list[T] = []
    total = 0
    count = min(_FIRST_ROWS, limit + 1)
    while count > 0:
        rows = yield from read(page[-1] if page else None, count)
        page += rows
        if len(rows) < count:
            return page[:limit], len(page) > limit
        total += sum(map(size, rows))
        rows_that_fit = (max_bytes - total) * len(page) // max(total, 1)
        count = min(rows_that_fit, limit + 1 - len(page))
    return page[:limit], True
