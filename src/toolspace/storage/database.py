"""The seam between what is kept and where: programs of SQL that any database runs as one transaction.

A program is a generator that yields statements and is sent their rows. It is written once, in the SQL that SQLite and
PostgreSQL share, and knows neither threads nor connections:

    def rename(space_id: str, name: str) -> Program[bool]:
        rows = yield "UPDATE spaces SET name = ? WHERE id = ? RETURNING id", (name, space_id)
        return bool(rows)

It may run more than once (a database may ask for a second attempt), and not on the event loop: it changes nothing but
rows and what was handed to it for that attempt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar

from toolspace.core.records import NewEvent, StoredEvent
from toolspace.storage.postgres.driver import shown_address

T = TypeVar("T")
A = TypeVar("A", bound="DeferredWrites")
Row = Sequence[Any]
Statement = tuple[str, Sequence[Any]]
"""SQL with `?` for each value, and the values: text, integers, None. Nothing else, so that both databases agree."""
Program = Generator[Statement, list[Row], T]
OperationKind = Literal["read", "write"]


class RowBatch(list[Sequence[Any]]):
    """In the place of a statement's values, those of many rows: it is run for each of them, and gives nothing back."""

    __slots__ = ()


F = TypeVar("F", bound=Callable[..., Any])


def long_running(program: F) -> F:
    """Marks a program that may touch many rows at once: nobody else should wait while it does."""
    program.is_large = True  # type: ignore[attr-defined]
    return program


def is_long_running(program: object) -> bool:
    return getattr(program, "is_large", False)


SKIP_LOCKED = "/*skip locked*/"
"""Write it at the end of a SELECT that picks rows to update: where several writers exist, taken rows are passed by."""
FOR_UPDATE = "/*locked*/"
"""Write it at the end of a SELECT of rows that must stay as they are until the commit: whoever changes them waits."""


class StaleError(Exception):
    """Something is not as it was taken to be from memory: whoever did looks for itself."""


class DeferredWrites(Protocol):
    """What a program leaves to be written at the end of its transaction: calls that have their results, what goes to
    inboxes, and events, by the streams that get them.

    Last, so that nobody waits long for a stream's counter; and a database that commits many programs together may
    write theirs together.
    """

    resolved_calls: list[Sequence[Any]]
    """Where there is no program, for `append`: calls as `stores.sql.calls` resolves them, with what they are taken to
    be before."""
    inbox_rows: list[Sequence[Any]]
    """Rows for inboxes, as `stores.sql.inbox` makes them."""
    new_events: dict[str, list[NewEvent]]
    stored_events: list[StoredEvent]
    """As they were stored."""


class Database(ABC):
    """Runs programs. Every acknowledged write survives a crash of the process."""

    is_shared: bool = False
    """Whether other processes write to it too, so that what they did has to be heard of."""
    observer: Callable[[OperationKind, Sequence[float], Sequence[BaseException]], None] | None = None
    """Told of programs that ended: how many seconds each took, with waiting for its turn, and how some failed."""

    @abstractmethod
    def run(
        self,
        program: Callable[[], Program[T]],
        *,
        on_commit: Callable[[T], None] | None = None,
        deferred: Callable[[], DeferredWrites] | None = None,
        exclusive: bool = False,
    ) -> Awaitable[T]:
        """Runs a program as one transaction: all of it is durable when this returns, or nothing happened.

        `tail` is asked, once the program has ended well, for what belongs at the end of the transaction. `aside`: it
        may take long, and must not hold up the event loop.

        What was begun is brought to its end even if whoever asked is canceled. `then` is called with the result once
        it is durable, on the event loop, in that case too: others must hear of what happened.
        """

    @abstractmethod
    def commit_deferred(
        self, deferred: A, *, on_commit: Callable[[A], None], on_doubt: Callable[[A], None]
    ) -> Awaitable[bool]:
        """Writes what a program would leave to the end, where all else is known and nothing has to be read: a
        transaction as that of `run`. False where a call is not as it was taken to be; nothing happened then.

        `in_doubt` is called, instead of `then`, where nobody knows whether it happened."""

    @abstractmethod
    def read(self, program: Callable[[], Program[T]]) -> Awaitable[T]:
        """Runs a program that only reads, beside the writers. It sees everything acknowledged before it began."""

    def check_free_space(self) -> None:
        """Raises `StorageUnavailable` where there is hardly room for more, as far as this process can tell."""

    @abstractmethod
    async def aclose(self) -> None: ...


class WakeUps(ABC):
    """Carries hints between the processes that share a database: which ids to look at again.

    A hint may come twice, late or not at all; whoever hears one reads the database. After a gap (a lost connection)
    `on_gap` says that anything may have changed.
    """

    @abstractmethod
    def send(self, hints: Iterable[str]) -> None:
        """Tells the other processes, soon. Never waits, never raises."""

    @abstractmethod
    def listen(self, on_hints: Callable[[Sequence[str]], None], on_gap: Callable[[], None]) -> None:
        """Whom to tell what the others said; on the event loop."""

    async def aclose(self) -> None: ...


# MERGED from locations: Where the database is that configuration names: a SQLite file, or a PostgreSQL elsewhere. …

DATABASE_FILE_NAME = "toolspace.db"
_SQLITE = "sqlite:///"


def find_database_file(url: str | None, state_dir: Path) -> Path | None:
    """The file that `storage.url` means; None where it means a PostgreSQL."""
    if url is None:
        return state_dir / DATABASE_FILE_NAME
    return Path(url.removeprefix(_SQLITE)) if url.startswith(_SQLITE) else None


def describe_database(url: str | None, state_dir: Path) -> str:
    """Where the data is, as people may see it: without the password that leads there."""
    file = find_database_file(url, state_dir)
    return str(file) if file is not None else f"postgresql://{shown_address(url or '')}"


# MERGED from paging: Pages that end where they get large: each row may be as large as its writer liked, and one an…

MAX_PAGE_BYTES: Final = 4 * 1024 * 1024
"""Of one page, about; a single row may be larger."""
_FIRST: Final = 16
"""Rows that are read before it is known how large they are."""


def read_page(
    read: Callable[[T | None, int], Program[list[T]]],
    size: Callable[[T], int],
    limit: int,
    *,
    most: int = MAX_PAGE_BYTES,
) -> Program[tuple[list[T], bool]]:
    """Up to `limit` rows, fewer where they are large, and whether there may be more behind them.

    `read` gives so many behind a row, or from the beginning.
    """
    found: list[T] = []
    total = 0
    wanted = min(_FIRST, limit + 1)
    while wanted > 0:
        some = yield from read(found[-1] if found else None, wanted)
        found += some
        if len(some) < wanted:
            return found[:limit], len(found) > limit
        total += sum(map(size, some))
        fitting = (most - total) * len(found) // max(total, 1)
        wanted = min(fitting, limit + 1 - len(found))
    return found[:limit], True
