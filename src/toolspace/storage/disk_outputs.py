"""`DiskOutputs`: stored outputs as files that only their owner may read. No output is ever completely in memory.

root/session-abc/0123456789abcdef        the text, in UTF-8
root/session-abc/0123456789abcdef.json   its `StoredOutput`, the sidecar: written last, so the text is complete
root/session-abc/0123456789abcdef.part   an unfinished text, locked by its writer
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from toolspace.core.extension_points import OutputStore, OutputWriter, StoredOutput, TokenCounter
from toolspace.core.token_count import estimate_tokens
from toolspace.errors import ToolspaceError
from toolspace.storage import private_files
from toolspace.storage.memory_outputs import (
    BLOCK,
    LineSplitter,
    count_lines,
    decode_start,
    encode,
    folder_of,
    may_read,
    new_handle,
    parse_handle,
)
from toolspace.storage.output_quota import OutputLimits, OutputQuota

_T = TypeVar("_T")

_SLICE = 1 << 20
_ABANDONED = 60.0
"""Seconds after which a file without a sidecar and without a writer counts as left by a crash."""
_FOLDER = re.compile(r"session-[A-Za-z0-9_-]{1,64}", re.ASCII)
_FILE = re.compile(r"([0-9a-f]{16})(\.json|\.part|\.json\.part)?", re.ASCII)
_SUFFIXES = (".json", ".json.part", ".part", "")
"""Of the files of one output. The sidecar comes first: without it nobody finds an incomplete output."""
_SIDECAR_LIMIT = 1 << 20


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
        limits: OutputLimits | None = None,
        count_tokens: TokenCounter = estimate_tokens,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ttl = ttl
        self._quota = OutputQuota(limits or OutputLimits(), clock, lambda: _list_outputs(self._root, clock()))
        self.clock = clock
        self.open_writers: set[_DiskWriter] = set()
        self._root = Path(root)
        self._count_tokens = count_tokens
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="toolspace-outputs")

    async def create(self, *, session: str, owner: str | None, tool: str) -> OutputWriter:
        origin = _Origin(session, owner, tool)
        draft = await self.run(lambda: _Draft(self._root, origin, self._count_tokens, self._quota), undo=_Draft.discard)
        writer = _DiskWriter(self, draft)
        self.open_writers.add(writer)
        return writer

    async def find(self, handle: str, *, session: str, owner: str | None) -> StoredOutput | None:
        output = await self.inspect(handle)
        return output if output is not None and may_read(output, session=session, owner=owner) else None

    async def inspect(self, handle: str) -> StoredOutput | None:
        return await self.run(lambda: _find_output(self._root, handle, self.clock()))

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
        outputs = await self.run(lambda: _list_outputs(self._root, self.clock()))
        return sorted({output.session for output in outputs})

    async def sweep(self) -> int:
        return await self.run(lambda: _sweep(self._root, self.clock()))

    async def aclose(self) -> None:
        """Discards unfinished outputs, and waits for the threads."""
        for writer in tuple(self.open_writers):
            await writer.discard()
        await asyncio.to_thread(self._threads.shutdown)

    async def _open(self, output: StoredOutput) -> _Reader:
        return await self.run(lambda: _Reader(self._root, output), undo=_Reader.close)

    async def run(self, work: Callable[[], _T], *, undo: Callable[[_T], object] | None = None) -> _T:
        """Runs `work` in a thread to its end, even if the caller is cancelled.

        `undo` reverts a result that a cancelled caller did not get.
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

    def __init__(self, store: DiskOutputs, draft: _Draft) -> None:
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
        text = self._take_pieces()

        def append_and_commit() -> StoredOutput:
            self._draft.append(text)
            return self._draft.commit(is_json=is_json, now=self._store.clock(), ttl=self._store.ttl)

        output = await self._store.run(append_and_commit)
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
        self._store.open_writers.discard(self)


# The files. Everything below blocks, so it runs in threads.


class _Origin(NamedTuple):
    """Whose output it is, and of which tool."""

    session: str
    owner: str | None
    tool: str


class _Draft:
    """An unfinished output. Any thread may call its methods, one at a time."""

    def __init__(self, root: Path, origin: _Origin, count_tokens: TokenCounter, quota: OutputQuota) -> None:
        self._root = root
        self._origin = origin
        self._quota = quota
        self._count_tokens = count_tokens
        self._lock = threading.Lock()
        self._bytes = 0
        self._newlines = 0
        self._tokens = 0
        self._last_character = ""
        self._is_committed = False
        self._closed = False
        try:
            self._handle, self._folder, self._file = _create_draft(root, origin.session)
        except OSError as error:
            raise self._cannot_store(error) from error
        self._folder_name, _, self._id = self._handle.partition("/")

    def append(self, text: str) -> None:
        with self._lock, self._clean_up_on_error():
            for start in range(0, len(text), _SLICE):  # In slices: encoding copies the text.
                piece = text[start : start + _SLICE]
                data = encode(piece)
                self._quota.reserve(self._origin.session, self._origin.owner, len(data))
                self._bytes += len(data)
                private_files.write_all(self._file, data)
                self._newlines += piece.count("\n")
                self._tokens += self._count_tokens(piece)
                self._last_character = piece[-1:]

    def commit(self, *, is_json: bool, now: float, ttl: float) -> StoredOutput:
        with self._lock, self._clean_up_on_error():
            output = StoredOutput(
                handle=self._handle,
                **self._origin._asdict(),
                bytes=self._bytes,
                lines=count_lines(self._newlines, self._last_character),
                tokens=self._tokens,
                is_json=is_json,
                created_at=now,
                expires_at=now + ttl,
            )
            os.rename(f"{self._id}.part", self._id, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            _write_sidecar(output, self._id, self._folder)
            self._is_committed = True
            self._quota.add(output)
            # Closing the file unlocks it: only now can another process's sweep see that the output is complete.
            self._close()
            return output

    def discard(self) -> None:
        """Removes the output, even a committed one: its caller was cancelled and does not know of it."""
        with self._lock:
            self._remove()

    @contextlib.contextmanager
    def _clean_up_on_error(self) -> Generator[None]:
        """Removes the output if an error occurs, and says in the error what to do."""
        if self._closed:
            raise ToolspaceError(f"the output of {self._origin.tool!r} has ended; nothing can be added to it")
        try:
            yield
        except BaseException as error:
            self._remove()
            if isinstance(error, OSError):
                raise self._cannot_store(error) from error
            raise

    def _cannot_store(self, error: OSError) -> ToolspaceError:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free some space there" if is_full else "store outputs in a folder that you may write to"
        reason = error.strerror or error
        return ToolspaceError(
            f"the output of {self._origin.tool!r} cannot be stored in {self._root}: {reason}; {advice}"
        )

    def _remove(self) -> None:
        if self._closed:
            if self._is_committed:
                self._is_committed = False
                self._quota.remove(self._handle)
                with contextlib.suppress(OSError), _open_folder(self._root, self._folder_name) as folder:
                    _remove_files(self._id, folder)
            return
        self._quota.release(self._origin.session, self._origin.owner, self._bytes)
        with contextlib.suppress(OSError):
            _remove_files(self._id, self._folder)
        self._close()
        with contextlib.suppress(OSError):  # Not empty: others are using it.
            os.rmdir(self._root / self._folder_name)

    def _close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            os.close(self._file)
        os.close(self._folder)


class _Reader:
    """A stored output, open for reading. `close` waits for a read in progress."""

    def __init__(self, root: Path, output: StoredOutput) -> None:
        self._lock = threading.Lock()
        parts = parse_handle(output.handle)
        try:
            if parts is None:
                raise FileNotFoundError(output.handle)
            with _open_folder(root, parts[0]) as folder:
                self._file = private_files.open_file(parts[1], folder=folder)
        except OSError as error:
            raise ToolspaceError(f"the output {output.handle!r} is gone: it expired or was removed") from error

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end of the file."""
        with self._lock:
            parts: list[bytes] = []
            while size > 0 and self._file >= 0 and (part := os.read(self._file, min(size, _SLICE))):
                parts.append(part)
                size -= len(part)
            return b"".join(parts)

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def _create_draft(root: Path, session: str) -> tuple[str, int, int]:
    """Creates a draft: its handle, and the descriptors of its folder and of its file."""
    private_files.make_private_folder(root)
    with _close_afterwards(private_files.open_root(root)) as top:
        for _ in range(8):
            handle = new_handle(session)
            name, _, identifier = handle.partition("/")
            with contextlib.suppress(FileNotFoundError):
                # A sweep may remove the empty folder before the file is in it: then it tries again.
                folder = private_files.open_folder(name, parent=top, create=True)
                try:
                    return handle, folder, private_files.create_file(f"{identifier}.part", folder=folder)
                except BaseException:
                    os.close(folder)
                    raise
    raise FileNotFoundError(f"the folder {folder_of(session)!r} was removed right after it was created, 8 times")


def _find_output(root: Path, handle: str, now: float) -> StoredOutput | None:
    """The output of a handle, if it is complete and has not expired."""
    parts = parse_handle(handle)
    if parts is None:
        return None
    try:
        with _open_folder(root, parts[0]) as folder:
            output = _read_sidecar(parts[1], folder)
            if output is None or output.handle != handle or output.expires_at <= now:
                return None
            os.close(private_files.open_file(parts[1], folder=folder))
            return output
    except OSError:
        return None


def _list_outputs(root: Path, now: float) -> list[StoredOutput]:
    """The outputs that have not expired."""
    outputs: list[StoredOutput] = []
    for folder, _ in _open_folders(root):
        for identifier, suffixes in _list_files(folder).items():
            output = _read_sidecar(identifier, folder) if suffixes >= {"", ".json"} else None
            if output is not None and output.expires_at > now:
                outputs.append(output)
    return outputs


def _sweep(root: Path, now: float) -> int:
    """Removes expired outputs, leftovers of crashed writers, and empty folders. Several processes may do so at once."""
    removed_count = 0
    for folder, name in _open_folders(root):
        for identifier, suffixes in _list_files(folder).items():
            with contextlib.suppress(OSError):
                removed_count += _sweep_output(identifier, suffixes, folder, now)
        with contextlib.suppress(OSError):  # Not empty, or gone already.
            os.rmdir(root / name)
    return removed_count


def _sweep_output(identifier: str, suffixes: set[str], folder: int, now: float) -> bool:
    """Returns whether it removed an expired output."""
    output = _read_sidecar(identifier, folder) if suffixes >= {"", ".json"} else None
    if output is not None:
        return output.expires_at <= now and _remove_files(identifier, folder)
    if _is_abandoned(identifier, suffixes, folder, now):
        _remove_files(identifier, folder)
    return False


def _remove_files(identifier: str, folder: int) -> bool:
    """Removes the files of an output. Returns whether it had a sidecar."""
    has_sidecar, *_ = [private_files.remove(identifier + suffix, folder=folder) for suffix in _SUFFIXES]
    return has_sidecar


def _is_abandoned(identifier: str, suffixes: set[str], folder: int, now: float) -> bool:
    for suffix in suffixes:
        with _close_afterwards(private_files.open_file(identifier + suffix, folder=folder)) as file:
            if now - os.fstat(file).st_mtime < _ABANDONED or private_files.is_locked(file):
                return False
    # Read again, now that nobody has the file open: a commit may have finished in between.
    return _read_sidecar(identifier, folder) is None or identifier not in os.listdir(folder)


def _write_sidecar(output: StoredOutput, identifier: str, folder: int) -> None:
    import json  # Unlike msgspec it encodes lone surrogates. Here: few processes need it.

    data = json.dumps(msgspec.structs.asdict(output)).encode()
    draft = f"{identifier}.json.part"
    with _close_afterwards(private_files.create_file(draft, folder=folder)) as file:
        private_files.write_all(file, data)
    os.rename(draft, f"{identifier}.json", src_dir_fd=folder, dst_dir_fd=folder)


def _read_sidecar(identifier: str, folder: int) -> StoredOutput | None:
    """The content of a sidecar; None if it is missing or damaged."""
    import json

    try:
        with _close_afterwards(private_files.open_file(f"{identifier}.json", folder=folder)) as file:
            data = os.read(file, _SIDECAR_LIMIT)
        return msgspec.convert(json.loads(data), StoredOutput)
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors.
        return None


def _list_files(folder: int) -> dict[str, set[str]]:
    """Id → the suffixes of its files. Ignores files that are not ours."""
    suffixes: dict[str, set[str]] = {}
    for name in os.listdir(folder):
        if match := _FILE.fullmatch(name):
            suffixes.setdefault(match[1], set()).add(match[2] or "")
    return suffixes


def _open_folders(root: Path) -> Iterator[tuple[int, str]]:
    """The session folders, each with an open descriptor while the caller uses it."""
    try:
        names = sorted(name for name in os.listdir(root) if _FOLDER.fullmatch(name))
    except FileNotFoundError:
        return
    for name in names:
        # Skips one that is a link, another user's, or removed by another process.
        with contextlib.suppress(OSError), _open_folder(root, name) as folder:
            yield folder, name


@contextlib.contextmanager
def _open_folder(root: Path, name: str) -> Generator[int]:
    with _close_afterwards(private_files.open_root(root)) as top:
        folder = private_files.open_folder(name, parent=top)
    with _close_afterwards(folder):
        yield folder


@contextlib.contextmanager
def _close_afterwards(descriptor: int) -> Generator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
