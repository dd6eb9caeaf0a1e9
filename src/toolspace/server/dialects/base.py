"""What a dialect is: its `Translator` turns events into another protocol. The dialects and `sse_encoding` use it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from toolspace.core.stored_records import StoredEvent

Payload = Mapping[str, Any]
"""The JSON of one frame."""
T = TypeVar("T")

_MAX_PARTS: Final = 256
_MAX_BYTES: Final = 1024 * 1024


class Translator(Protocol):
    """Translates the events of one stream to another protocol.

    Such a protocol requires an order: only an open message or call can be continued. The translator's state depends on
    the events alone, so all subscribers can share its output.
    """

    def translate(self, event: StoredEvent) -> list[Payload]:
        """Returns the payloads for the next event of the stream."""
        ...

    def opening_payloads(self) -> list[Payload]:
        """Returns the payloads for a new subscriber: they open what is open for the others."""
        ...


@dataclass(frozen=True)
class Dialect:
    """The wire format of a stream."""

    name: str
    translator: Callable[[str], Translator] | None = None
    """Creates a translator for a stream; None for native events."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    ending: bytes = b""
    """Sent at the end of a complete stream."""


NATIVE: Final = Dialect("native")


class OpenParts(Generic[T]):
    """Open messages or calls by id, oldest first. Drops the oldest beyond a number and a size."""

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
        entry = self._parts.get(id)
        return None if entry is None else entry[0]

    def put(self, id: str, part: T, size: int) -> None:
        """Adds a part, or adds to its size in bytes."""
        self._bytes += size
        self._parts[id] = (part, self._parts.get(id, (part, 0))[1] + size)
        while len(self._parts) > 1 and (len(self._parts) > _MAX_PARTS or self._bytes > _MAX_BYTES):
            self._bytes -= self._parts.popitem(last=False)[1][1]

    def pop(self, id: str) -> T | None:
        """Removes and returns a part; None if it was not open."""
        entry = self._parts.pop(id, None)
        if entry is None:
            return None
        self._bytes -= entry[1]
        return entry[0]


def stream_id(stream: str) -> str:
    """Returns the id of the space or run of a stream."""
    return stream.partition(":")[2] or stream
