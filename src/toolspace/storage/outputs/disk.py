"""`DiskOutputs`: stored outputs as files that only their owner may read. No output is ever completely in memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from toolspace.core.interfaces import OutputStore, OutputWriter, StoredOutput, TokenCounter
from toolspace.core.tokens import estimate_tokens
from toolspace.errors import ToolspaceError
from toolspace.storage.outputs import files
from toolspace.storage.outputs.handles import BLOCK, LineSplitter, decode_start, may_read

_T = TypeVar("_T")


class DiskOutputs(OutputStore):
    """Stores outputs as files under `root` for `ttl` seconds.

    Threads of its own use the disk: the event loop never waits for it, and tools that fill the common thread pool
    do not delay it.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        ttl: float,
        count_tokens: TokenCounter = estimate_tokens,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = Path(root)
        self._ttl = ttl
        self._count_tokens = count_tokens
        self._clock = clock
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="toolspace-outputs")
        self._writers: set[_DiskWriter] = set()

    async def create(self, *, session: str, owner: str | None, tool: str) -> OutputWriter:
        origin = files.Origin(session, owner, tool)
        draft = await self.run(lambda: files.Draft(self._root, origin, self._count_tokens), undo=files.Draft.discard)
        writer = _DiskWriter(self, draft)
        self._writers.add(writer)
        return writer

    async def find(self, handle: str, *, session: str, owner: str | None) -> StoredOutput | None:
        output = await self.inspect(handle)
        return output if output is not None and may_read(output, session=session, owner=owner) else None

    async def inspect(self, handle: str) -> StoredOutput | None:
        return await self.run(lambda: files.find_output(self._root, handle, self._clock()))

    async def lines(self, output: StoredOutput) -> AsyncIterator[list[str]]:
        reader = await self._open(output)
        splitter = LineSplitter()
        try:
            block = b"-"
            while block:
                block = await self.run(lambda: reader.read(BLOCK))
                if lines := splitter.feed(block):
                    yield lines
        finally:
            await self.run(reader.close)

    async def text(self, output: StoredOutput, *, limit: int) -> str:
        reader = await self._open(output)
        try:
            return decode_start(await self.run(lambda: reader.read(limit)))
        finally:
            await self.run(reader.close)

    async def sessions(self) -> Sequence[str]:
        return await self.run(lambda: files.sessions(self._root, self._clock()))

    async def sweep(self) -> int:
        return await self.run(lambda: files.sweep(self._root, self._clock()))

    async def aclose(self) -> None:
        """Discards unfinished outputs, and waits for the threads."""
        for writer in tuple(self._writers):
            await writer.discard()
        await asyncio.to_thread(self._threads.shutdown)

    async def _open(self, output: StoredOutput) -> files.Reader:
        return await self.run(lambda: files.Reader(self._root, output), undo=files.Reader.close)

    async def commit(self, draft: files.Draft, rest: str, *, is_json: bool) -> StoredOutput:
        """For the writer: appends the rest and commits the draft."""

        def work() -> StoredOutput:
            draft.append(rest)
            return draft.commit(is_json=is_json, now=self._clock(), ttl=self._ttl)

        return await self.run(work)

    def remove_writer(self, writer: _DiskWriter) -> None:
        """For the writer: it is closed."""
        self._writers.discard(writer)

    async def run(self, work: Callable[[], _T], *, undo: Callable[[_T], object] | None = None) -> _T:
        """Runs `work` in a thread to its end, even if the caller is canceled.

        `undo` reverts a result that a canceled caller did not get.
        """
        job = self._threads.submit(work)
        try:
            return await asyncio.shield(asyncio.wrap_future(job))
        except asyncio.CancelledError:
            if undo is not None:
                job.add_done_callback(lambda job: None if job.exception() else undo(job.result()))
            raise


class _DiskWriter(OutputWriter):
    """Collects pieces and passes them to a thread one block at a time."""

    def __init__(self, store: DiskOutputs, draft: files.Draft) -> None:
        self._store = store
        self._draft = draft
        self._pieces: list[str] = []
        self._size = 0
        self._closed = False

    async def write(self, piece: str) -> None:
        if self._closed:
            raise ToolspaceError("the output has ended; nothing can be added to it")
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size >= BLOCK:
            text = self._take_pieces()
            await self._store.run(lambda: self._draft.append(text))

    async def commit(self, *, is_json: bool = False) -> StoredOutput:
        output = await self._store.commit(self._draft, self._take_pieces(), is_json=is_json)
        self._close()
        return output

    async def discard(self) -> None:
        # Not after a commit whose caller got the result.
        if not self._closed:
            self._close()
            await self._store.run(self._draft.discard)

    def _take_pieces(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        return text

    def _close(self) -> None:
        self._closed = True
        self._pieces.clear()
        self._store.remove_writer(self)
