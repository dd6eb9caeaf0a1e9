"""`DiskConversations`: conversations as files that only their owner may read. Several processes may use one folder.

root/0123…cdef.json   the conversation of a session; the name is a hash of owner and session
root/0123…cdef.lock   locked by the process that continues the conversation
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path

import msgspec

from toolspace.core import json_text
from toolspace.core.extension_points import ConversationStore
from toolspace.core.language_model import Turn
from toolspace.errors import StorageError
from toolspace.storage import private_files
from toolspace.storage.memory_conversations import ConversationLocks

_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_FIRST_DELAY, _MAX_DELAY = 0.02, 0.5
"""Seconds between two attempts to lock a session that another process has."""


class _StoredConversation(msgspec.Struct, frozen=True):
    session: str
    owner: str
    turns: tuple[Turn, ...]


_decoder = msgspec.json.Decoder(_StoredConversation)


class DiskConversations(ConversationStore):
    """Keeps conversations as files under `root`. A save is on the disk when it returns."""

    def __init__(self, root: str | os.PathLike[str], *, before_create: Callable[[], None] | None = None) -> None:
        """`before_create` is called, in a thread, before the folder `root` is created."""
        self._root = Path(root)
        self._before_create = before_create
        self._locks = ConversationLocks()

    @contextlib.asynccontextmanager
    async def lock(self, session: str, *, owner: str) -> AsyncGenerator[None]:
        async with self._locks.lock((owner, session)):
            file = await asyncio.to_thread(self._open_lock, _file_name(session, owner), session)
            try:
                await _acquire(file)
                yield
            finally:
                os.close(file)  # Releases the lock, too.

    async def load(self, session: str, *, owner: str) -> tuple[Turn, ...]:
        return await asyncio.to_thread(self._load, _file_name(session, owner), session)

    async def save(self, session: str, turns: Sequence[Turn], *, owner: str) -> None:
        data = json_text.encode_bytes(_StoredConversation(session, owner, tuple(turns)))
        await asyncio.to_thread(self._save, _file_name(session, owner), session, data)

    async def delete(self, session: str, *, owner: str) -> bool:
        return await asyncio.to_thread(self._delete, _file_name(session, owner), session)

    def _open_lock(self, name: str, session: str) -> int:
        with self._open_folder("locked", session, create=True) as folder:
            return os.open(f"{name}.lock", _LOCK_FLAGS, 0o600, dir_fd=folder)

    def _load(self, name: str, session: str) -> tuple[Turn, ...]:
        try:
            with self._open_folder("read", session) as folder:
                file = private_files.open_file(f"{name}.json", folder=folder)
                with open(file, "rb") as stream:
                    return _decoder.decode(stream.read()).turns
        except FileNotFoundError:
            return ()
        except (msgspec.DecodeError, UnicodeError) as error:
            path = self._root / f"{name}.json"
            raise StorageError(f'session "{session}": {path} cannot be read ({error}); remove it') from None

    def _save(self, name: str, session: str, data: bytes) -> None:
        draft = f"{name}.{secrets.token_hex(4)}.part"
        with self._open_folder("saved", session, create=True) as folder:
            try:
                file = private_files.create_file(draft, folder=folder)
                try:
                    private_files.write_all(file, data)
                    os.fsync(file)
                finally:
                    os.close(file)
                os.replace(draft, f"{name}.json", src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except BaseException:
                private_files.remove(draft, folder=folder)
                raise

    def _delete(self, name: str, session: str) -> bool:
        try:
            with self._open_folder("deleted", session) as folder:
                return private_files.remove(f"{name}.json", folder=folder)
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _open_folder(self, action: str, session: str, *, create: bool = False) -> Generator[int]:
        """Opens the folder. Turns errors into `StorageError`, except that a file does not exist."""
        try:
            if create:
                if self._before_create is not None and not self._root.is_dir():
                    self._before_create()
                private_files.make_private_folder(self._root)
            folder = private_files.open_root(self._root)
            try:
                yield folder
            finally:
                os.close(folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f'session "{session}" cannot be {action} in {self._root}: {error.strerror}') from None


async def _acquire(file: int) -> None:
    delay = _FIRST_DELAY
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Polls, because a thread that waits in flock() could not be cancelled.
            await asyncio.sleep(delay)
            delay = min(delay * 2, _MAX_DELAY)
        except OSError:
            return None  # Some network file systems have no locks: the last writer wins.


def _file_name(session: str, owner: str) -> str:
    return hashlib.sha256(f"{len(owner)}:{owner}{session}".encode("utf-8", "surrogatepass")).hexdigest()
