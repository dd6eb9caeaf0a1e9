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
from typing import Any, Literal, Protocol, TypeVar

from toolspace.core.records import NewEvent, StreamEvent

T = TypeVar("T")
A = TypeVar("A", bound="Tail")
Row = Sequence[Any]
Statement = tuple[str, Sequence[Any]]
"""SQL with `?` for each value, and the values: text, integers, None. Nothing else, so that both databases agree."""
Program = Generator[Statement, list[Row], T]
Kind = Literal["read", "write"]


class Rows(list[Sequence[Any]]):
    """In the place of a statement's values, those of many rows: it is run for each of them, and gives nothing back."""

    __slots__ = ()


F = TypeVar("F", bound=Callable[..., Any])


def large(program: F) -> F:
    """Marks a program that may touch many rows at once: nobody else should wait while it does."""
    program.is_large = True  # type: ignore[attr-defined]
    return program


def is_large(program: object) -> bool:
    return getattr(program, "is_large", False)


SKIP_LOCKED = "/*skip locked*/"
"""Write it at the end of a SELECT that picks rows to update: where several writers exist, taken rows are passed by."""
LOCKED = "/*locked*/"
"""Write it at the end of a SELECT of rows that must stay as they are until the commit: whoever changes them waits."""


class StaleError(Exception):
    """Something is not as it was taken to be from memory: whoever did looks for itself."""


class Tail(Protocol):
    """What a program leaves to be written at the end of its transaction: calls that have their results, what goes to
    inboxes, and events, by the streams that get them.

    Last, so that nobody waits long for a stream's counter; and a database that commits many programs together may
    write theirs together.
    """

    resolved: list[Sequence[Any]]
    """Where there is no program, for `append`: calls as `stores.sql.calls` resolves them, with what they are taken to
    be before."""
    pushed: list[Sequence[Any]]
    """Rows for inboxes, as `stores.sql.inbox` makes them."""
    new: dict[str, list[NewEvent]]
    events: list[StreamEvent]
    """As they were stored."""


class Database(ABC):
    """Runs programs. Every acknowledged write survives a crash of the process."""

    shared: bool = False
    """Whether other processes write to it too, so that what they did has to be heard of."""
    observe: Callable[[Kind, Sequence[float], Sequence[BaseException]], None] | None = None
    """Told of programs that ended: how many seconds each took, with waiting for its turn, and how some failed."""

    @abstractmethod
    def run(
        self,
        program: Callable[[], Program[T]],
        *,
        then: Callable[[T], None] | None = None,
        tail: Callable[[], Tail] | None = None,
        aside: bool = False,
    ) -> Awaitable[T]:
        """Runs a program as one transaction: all of it is durable when this returns, or nothing happened.

        `tail` is asked, once the program has ended well, for what belongs at the end of the transaction. `aside`: it
        may take long, and must not hold up the event loop.

        What was begun is brought to its end even if whoever asked is canceled. `then` is called with the result once
        it is durable, on the event loop, in that case too: others must hear of what happened.
        """

    @abstractmethod
    def append(self, tail: A, *, then: Callable[[A], None], in_doubt: Callable[[A], None]) -> Awaitable[bool]:
        """Writes what a program would leave to the end, where all else is known and nothing has to be read: a
        transaction as that of `run`. False where a call is not as it was taken to be; nothing happened then.

        `in_doubt` is called, instead of `then`, where nobody knows whether it happened."""

    @abstractmethod
    def read(self, program: Callable[[], Program[T]]) -> Awaitable[T]:
        """Runs a program that only reads, beside the writers. It sees everything acknowledged before it began."""

    def check_room(self) -> None:
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
