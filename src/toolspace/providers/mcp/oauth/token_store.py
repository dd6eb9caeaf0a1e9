"""Stores the logins at MCP servers, in files that only their owner can read. Knows nothing of HTTP or OAuth flows.

There is one file per server. Its name is a hash, so that a directory listing shows nothing. Files are opened relative
to the folder's descriptor and never through a symbolic link. POSIX only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Literal

import msgspec

from toolspace.errors import ProviderError

_log = logging.getLogger("toolspace.mcp")

ClientAuth = Literal["none", "client_secret_basic", "client_secret_post"]
"""How a client authenticates at the token endpoint."""

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking: opening a pipe that somebody placed there must not hang.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_FILE_BYTES = 256 * 1024
_LOCK_SECONDS = 60.0
"""How long to wait for another process that renews the same login, which takes half of that at most."""
_LOCK_POLL_SECONDS = 0.02


class StoredLogin(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The tokens for one server, and what is needed to renew them."""

    access_token: str
    refresh_token: str | None = None
    renew_at: float | None = None
    """Unix seconds, shortly before the access token expires. None: the lifetime is unknown."""
    scope: str | None = None
    token_endpoint: str
    revocation_endpoint: str | None = None
    resource: str | None = None
    """The resource indicator of the tokens (RFC 8707), if they have one."""
    client_id: str
    client_secret: str | None = None
    """Only if the authorization server issued it at registration. A configured secret is never stored here."""
    client_auth: ClientAuth = "none"

    def is_due(self) -> bool:
        return self.renew_at is not None and time.time() >= self.renew_at

    def __repr__(self) -> str:
        return "Login(…)"


class TokenStore:
    """The folder with the logins of one user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._warnings: set[str] = set()

    def login_file(self, *, name: str, url: str, client_id: str | None) -> LoginFile:
        """Returns the file of one server's login. Another URL or client has another file."""
        identity = msgspec.json.encode([name, url, client_id or ""])
        return LoginFile(self, hashlib.sha256(identity).hexdigest()[:40], name)

    @contextlib.contextmanager
    def open_folder(self, *, create: bool) -> Generator[int]:
        """Opens the folder and yields its descriptor. Removes the access rights of other users."""
        try:
            if create:
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    self.folder.mkdir(mode=0o700)
            folder = os.open(self.folder, _FOLDER_FLAGS)
        except OSError as error:
            raise ProviderError(
                f"cannot keep logins in {str(self.folder)!r}: {error.strerror}; it must be a real folder of yours"
            ) from None
        try:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid():
                raise ProviderError(f"cannot keep logins in {str(self.folder)!r}: it belongs to another user")
            if stat.S_IMODE(status.st_mode) != 0o700:
                os.fchmod(folder, 0o700)
            yield folder
        finally:
            os.close(folder)

    def warn_once(self, key: str, message: str, *values: object) -> None:
        if key not in self._warnings:
            self._warnings.add(key)
            _log.warning(message, *values)

    def __repr__(self) -> str:
        return "TokenStore(…)"


class LoginFile:
    """One server's login on disk. Reading and writing block, for one small file whenever a token changes."""

    def __init__(self, store: TokenStore, key: str, server: str) -> None:
        self._store = store
        self._file, self._new, self._lock = f"{key}.json", f"{key}.new", f"{key}.lock"
        self._server = server

    def read(self) -> StoredLogin | None:
        """Returns the stored login, or None. A file that is unsafe or damaged counts as None, with one warning."""
        if not os.path.lexists(self._store.folder):
            return None  # Reading does not create the folder: most servers need no login.
        try:
            with self._store.open_folder(create=False) as folder:
                file = os.open(self._file, _READ_FLAGS, dir_fd=folder)
            try:
                return self._read_open(file)
            finally:
                os.close(file)
        except FileNotFoundError:
            return None
        except (OSError, ProviderError) as error:
            reason = getattr(error, "strerror", None) or str(error)  # For a symbolic link: ELOOP.
            warning = "Server %r: the stored login is not used: %s."
            self._store.warn_once(f"{self._file} {reason}", warning, self._server, reason)
            return None

    def _read_open(self, file: int) -> StoredLogin:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            raise ProviderError("it is not a plain file of yours")
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(file, 0o600)
            self._store.warn_once(
                f"{self._file} mode",
                "Server %r: the stored login was readable by other users; it no longer is. If others use this machine,"
                " log out and in again.",
                self._server,
            )
        with open(file, "rb", closefd=False) as stream:
            text = stream.read(_MAX_FILE_BYTES + 1)
        try:
            if len(text) > _MAX_FILE_BYTES:
                raise ValueError
            return msgspec.json.decode(text, type=StoredLogin)
        except (ValueError, RecursionError):  # Not the text of the error: it may quote a token.
            raise ProviderError("it is damaged") from None

    def write(self, login: StoredLogin) -> None:
        """Replaces the stored login atomically. The caller must hold the lock."""
        with self._store.open_folder(create=True) as folder:
            try:
                self._replace(msgspec.json.encode(login), folder)
            except OSError as error:
                place = f"{self._server!r} in {str(self._store.folder)!r}"
                raise ProviderError(f"cannot store the login of server {place}: {error.strerror}") from None
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(self._new, dir_fd=folder)  # Left only if an error occurred.

    def _replace(self, text: bytes, folder: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._new, dir_fd=folder)  # Left by a process that was killed.
        file = os.open(self._new, _CREATE_FLAGS, 0o600, dir_fd=folder)
        try:
            os.fchmod(file, 0o600)  # The umask may have removed rights.
            with open(file, "wb", closefd=False) as stream:
                stream.write(text)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(self._new, self._file, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self) -> bool:
        """Deletes the login. Returns whether there was one."""
        with self._store.open_folder(create=True) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file, dir_fd=folder)
                return True
            return False

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncGenerator[None]:
        """Locks the login against other processes and other connections of this process.

        The lock has its own file, which stays, because every write replaces the login's file.
        """
        with self._store.open_folder(create=True) as folder:
            try:
                file = os.open(self._lock, _LOCK_FLAGS, 0o600, dir_fd=folder)
            except OSError as error:
                raise ProviderError(f"cannot lock the login of server {self._server!r}: {error.strerror}") from None
        try:
            await self._acquire(file)
            yield
        finally:
            os.close(file)  # Releases the lock, too.

    async def _acquire(self, file: int) -> None:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Polls, because a thread that waits in flock() could not be cancelled.
                if time.monotonic() >= deadline:
                    raise ProviderError(
                        f"another process has been renewing the login of server {self._server!r} for"
                        f" {_LOCK_SECONDS:g} s; end it, or try again"
                    ) from None
                await asyncio.sleep(_LOCK_POLL_SECONDS)
            except OSError:
                return None  # Some network file systems have no locks: the last writer wins.

    def __repr__(self) -> str:
        return f"LoginSlot({self._server!r})"
