"""`MemoryOutputs`, and what it shares with `DiskOutputs`: handles, who may read an output, splitting bytes into lines.

`MemoryOutputs` is for tests and for programs that must not use a disk. Touches no file.
"""

from __future__ import annotations

import codecs
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from toolspace.core.extension_points import OutputStore, OutputWriter, StoredOutput, TokenCounter
from toolspace.core.token_count import estimate_tokens
from toolspace.errors import ToolLimitError, ToolspaceError
from toolspace.storage.output_quota import OutputLimits, OutputQuota

LINE_LIMIT = 1 << 20
"""Characters; a longer line is split into pieces."""
BLOCK = 256 * 1024
"""Bytes of one read or write."""

_READABLE = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_HANDLE = re.compile(r"(session-[A-Za-z0-9_-]{1,64})/([0-9a-f]{16})", re.ASCII)


class MemoryOutputs(OutputStore):
    """Stores outputs until they expire. Refuses an output beyond `max_bytes` of all, or beyond `limits`."""

    def __init__(
        self,
        *,
        ttl: float = 3600.0,
        max_bytes: int = 64 * 1024 * 1024,
        limits: OutputLimits | None = None,
        count_tokens: TokenCounter = estimate_tokens,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ttl = ttl
        self.count_tokens = count_tokens
        self.clock = clock
        limits = limits or OutputLimits()
        total = max_bytes if limits.total is None else min(max_bytes, limits.total)
        self.quota = OutputQuota(msgspec.structs.replace(limits, total=total), clock)
        self._outputs: dict[str, tuple[StoredOutput, bytes]] = {}

    async def create(self, *, session: str, owner: str | None, tool: str) -> OutputWriter:
        return _MemoryWriter(self, session=session, owner=owner, tool=tool)

    async def find(self, handle: str, *, session: str, owner: str | None) -> StoredOutput | None:
        output = await self.inspect(handle)
        return output if output is not None and may_read(output, session=session, owner=owner) else None

    async def inspect(self, handle: str) -> StoredOutput | None:
        entry = self._outputs.get(handle)
        return entry[0] if entry is not None and entry[0].expires_at > self.clock() else None

    async def lines(self, output: StoredOutput) -> AsyncIterator[list[str]]:
        data = self._data(output)
        splitter = LineSplitter()
        for start in range(0, len(data) + BLOCK, BLOCK):  # One more than there are: the empty block means the end.
            if lines := splitter.feed(data[start : start + BLOCK]):
                yield lines

    async def text(self, output: StoredOutput, *, limit: int) -> str:
        return decode_start(self._data(output)[: max(0, limit)])

    async def sessions(self) -> Sequence[str]:
        now = self.clock()
        return sorted({output.session for output, _ in self._outputs.values() if output.expires_at > now})

    async def sweep(self) -> int:
        now = self.clock()
        expired = [handle for handle, (output, _) in self._outputs.items() if output.expires_at <= now]
        for handle in expired:
            del self._outputs[handle]
            self.quota.remove(handle)
        return len(expired)

    def add(self, output: StoredOutput, data: bytes) -> None:
        """For the writer: adds a finished output."""
        self._outputs[output.handle] = (output, data)
        self.quota.add(output)

    def _data(self, output: StoredOutput) -> bytes:
        entry = self._outputs.get(output.handle)
        if entry is None:
            raise ToolspaceError(f"the output {output.handle!r} is gone: it expired")
        return entry[1]


class _MemoryWriter(OutputWriter):
    def __init__(self, store: MemoryOutputs, *, session: str, owner: str | None, tool: str) -> None:
        self._store = store
        self._session = session
        self._owner = owner
        self._tool = tool
        self._data = bytearray()
        self._has_ended = False

    async def write(self, piece: str) -> None:
        self._check_open()
        data = encode(piece)
        try:
            self._store.quota.reserve(self._session, self._owner, len(data))
        except ToolLimitError:
            await self.discard()
            raise
        self._data += data

    async def commit(self, *, is_json: bool = False) -> StoredOutput:
        self._check_open()
        self._has_ended = True
        store, data = self._store, bytes(self._data)
        now = store.clock()
        text = data.decode()
        output = StoredOutput(
            handle=new_handle(self._session),
            session=self._session,
            owner=self._owner,
            tool=self._tool,
            bytes=len(data),
            lines=count_lines(text.count("\n"), text[-1:]),
            tokens=store.count_tokens(text),
            is_json=is_json,
            created_at=now,
            expires_at=now + store.ttl,
        )
        store.add(output, data)
        self._data.clear()
        return output

    async def discard(self) -> None:
        self._has_ended = True
        self._store.quota.release(self._session, self._owner, len(self._data))
        self._data.clear()

    def _check_open(self) -> None:
        if self._has_ended:
            raise ToolspaceError(f"the output of {self._tool!r} has ended; nothing can be added to it")


# For both stores


def folder_of(session: str) -> str:
    """The first half of a session's handles: readable if the session is a plain name, otherwise a hash of it."""
    if _READABLE.fullmatch(session) and session != "session-":
        return session if session.startswith("session-") else f"session-{session}"
    import hashlib  # Imported here: few sessions need it.

    return "session-" + hashlib.sha256(session.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def new_handle(session: str) -> str:
    return f"{folder_of(session)}/{os.urandom(8).hex()}"


def parse_handle(handle: str) -> tuple[str, str] | None:
    """Folder and id of a handle. None for any other text: a model may send anything."""
    match = _HANDLE.fullmatch(handle)
    return (match[1], match[2]) if match else None


def may_read(output: StoredOutput, *, session: str, owner: str | None) -> bool:
    """A user may read its outputs from any session; without users, only the same session may.

    Compares the sessions, not their folders: two sessions may share one.
    """
    return output.owner == owner and (owner is not None or output.session == session)


def count_lines(newlines: int, last_character: str) -> int:
    """A last line without a newline counts too."""
    return newlines + (last_character not in ("", "\n"))


def encode(text: str) -> bytes:
    """UTF-8 of any text. Lone surrogates, which UTF-8 cannot encode, become escapes."""
    return text.encode("utf-8", "backslashreplace")


def decode_start(data: bytes) -> str:
    """Decodes bytes that may end in the middle of a character, without that character."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


class LineSplitter:
    """Splits blocks of bytes into lines, with no more than one line in memory."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, block: bytes) -> list[str]:
        """The lines that this block completes; an empty block means the end."""
        lines = (self._rest + self._decoder.decode(block, final=not block)).split("\n")
        self._rest = lines.pop()
        if not block and self._rest:
            lines.append(self._rest)
            self._rest = ""
        if max(map(len, lines), default=0) > LINE_LIMIT:
            lines = [
                line[start : start + LINE_LIMIT] for line in lines for start in range(0, max(len(line), 1), LINE_LIMIT)
            ]
        while len(self._rest) > LINE_LIMIT:
            lines.append(self._rest[:LINE_LIMIT])
            self._rest = self._rest[LINE_LIMIT:]
        return lines
