"""What a dialect is: a translator of events that remembers what is open, and how a stream of it begins and ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from toolspace.core.records import StoredEvent

Payload = Mapping[str, Any]
"""What one frame carries, as JSON."""
T = TypeVar("T")

_MOST_OPEN: Final = 256
_MOST_BYTES: Final = 1024 * 1024


class Translator(Protocol):
    """Says events in another language, which has rules about their order: what is not open cannot be continued.

    What it remembers is a function of the events alone, the same for every reader, so that all share what it says.
    """

    def translate(self, event: StoredEvent) -> list[Payload]:
        """What to say for the next event of the stream."""
        ...

    def opening(self) -> list[Payload]:
        """What to say to a reader who comes now: it opens what others saw being opened."""
        ...


@dataclass(frozen=True)
class Dialect:
    name: str
    translator: Callable[[str], Translator] | None = None
    """Makes one for a stream. None: events are said as they are."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    ending: bytes = b""
    """What is written where a stream is complete."""


class OpenParts(Generic[T]):
    """What has begun and has not ended, by id, oldest first: as much as fits."""

    def __init__(self) -> None:
        self._parts: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __contains__(self, id: str) -> bool:
        return id in self._parts

    def __iter__(self) -> Iterator[tuple[str, T]]:
        return iter([(id, part) for id, (part, _) in self._parts.items()])

    def get(self, id: str) -> T | None:
        found = self._parts.get(id)
        return None if found is None else found[0]

    def put(self, id: str, part: T, size: int) -> None:
        """Opens a part, or says that it has grown by so many bytes."""
        self._bytes += size
        self._parts[id] = (part, self._parts.get(id, (part, 0))[1] + size)
        while len(self._parts) > 1 and (len(self._parts) > _MOST_OPEN or self._bytes > _MOST_BYTES):
            self._bytes -= self._parts.popitem(last=False)[1][1]

    def pop(self, id: str) -> T | None:
        """Ends a part; None where it was not open."""
        found = self._parts.pop(id, None)
        if found is None:
            return None
        self._bytes -= found[1]
        return found[0]


def stream_id(stream: str) -> str:
    """The id of the space or the run whose stream it is."""
    return stream.partition(":")[2] or stream
