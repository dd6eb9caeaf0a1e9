"""Logins at MCP servers, kept in files that only their owner can read. Knows nothing of HTTP or of OAuth's flows.

One file per server, named by a hash, so that a list of the folder tells nothing. Everything is opened through the
folder's descriptor and never through a symbolic link. POSIX only.
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
"""How a client shows at the token endpoint who it is."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: a planted pipe must not hang the thread that opens it.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_BYTES = 256 * 1024
_LOCK_PATIENCE = 60.0
"""Seconds to wait for another process that renews the same login; it has half of that for itself."""
_LOCK_POLL = 0.02


class StoredLogin(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What was granted for one server, and what is needed to renew it."""

    access_token: str
    refresh_token: str | None = None
    renew_at: float | None = None
    """Unix seconds, a little before the access token expires. None: the authorization server did not say."""
    scope: str | None = None
    token_endpoint: str
    revocation_endpoint: str | None = None
    resource: str | None = None
    """The server as the tokens name it (RFC 8707), where they do."""
    client_id: str
    client_secret: str | None = None
    """Only one that the authorization server made for us: a configured one stays in the configuration."""
    client_auth: ClientAuth = "none"

    def is_due(self) -> bool:
        return self.renew_at is not None and time.time() >= self.renew_at

    def __repr__(self) -> str:
        return "Login(…)"


class TokenStore:
    """The logins of one user, in one folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told: set[str] = set()

    def login_file(self, *, name: str, url: str, client_id: str | None) -> LoginFile:
        """The place of one server's login. Another URL or client is another place: tokens never move along."""
        identity = msgspec.json.encode([name, url, client_id or ""])
        return LoginFile(self, hashlib.sha256(identity).hexdigest()[:40], name)

    @contextlib.contextmanager
    def open_folder(self, *, create: bool) -> Generator[int]:
        """The folder's descriptor. One that is open to others is closed to them."""
        try:
            if create:
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    self.folder.mkdir(mode=0o700)
            folder = os.open(self.folder, _FOLDER)
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

    def warn_once(self, about: str, message: str, *values: object) -> None:
        if about not in self._told:
            self._told.add(about)
            _log.warning(message, *values)

    def __repr__(self) -> str:
        return "TokenStore(…)"


class LoginFile:
    """One server's login on disk. Reading and writing block: one small file, when a token changes."""

    def __init__(self, store: TokenStore, key: str, server: str) -> None:
        self._store = store
        self._file, self._new, self._lock = f"{key}.json", f"{key}.new", f"{key}.lock"
        self._server = server

    def read(self) -> StoredLogin | None:
        """The stored login, or None: also where the file is not ours or makes no sense, which is told once."""
        if not os.path.lexists(self._store.folder):
            return None  # Not made for a look: most servers need no login.
        try:
            with self._store.open_folder(create=False) as folder:
                file = os.open(self._file, _READ, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(error.strerror or "it cannot be opened")  # ELOOP: a symbolic link.
            return None
        except ProviderError as error:
            self._refuse(str(error))
            return None
        try:
            return self._read_open(file)
        finally:
            os.close(file)

    def _read_open(self, file: int) -> StoredLogin | None:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            self._refuse("it is not a plain file of yours")
            return None
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(file, 0o600)
            self._store.warn_once(
                f"{self._file} mode",
                "The login of server %r was readable by others; it no longer is. Log out and in again if others use"
                " this machine.",
                self._server,
            )
        with open(file, "rb", closefd=False) as stream:
            text = stream.read(_MOST_BYTES + 1)
        try:
            if len(text) > _MOST_BYTES:
                raise ValueError
            return msgspec.json.decode(text, type=StoredLogin)
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors. Their text may quote a token.
            self._refuse("it is damaged")
            return None

    def _refuse(self, reason: str) -> None:
        self._store.warn_once(
            f"{self._file} {reason}", "The stored login of server %r is not used: %s.", self._server, reason
        )

    def write(self, login: StoredLogin) -> None:
        """Replaces the stored login as a whole: a reader sees the old one or the new one. Hold the lock."""
        with self._store.open_folder(create=True) as folder:
            try:
                self._replace(msgspec.json.encode(login), within=folder)
            except OSError as error:
                where = str(self._store.folder)
                raise ProviderError(
                    f"cannot store the login of server {self._server!r} in {where!r}: {error.strerror}"
                ) from None
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(self._new, dir_fd=folder)  # Only where it did not become the file.

    def _replace(self, text: bytes, *, within: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._new, dir_fd=within)  # Left by a process that was killed here.
        file = os.open(self._new, _CREATE, 0o600, dir_fd=within)
        try:
            os.fchmod(file, 0o600)  # Whatever the umask took away.
            with open(file, "wb", closefd=False) as stream:
                stream.write(text)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(self._new, self._file, src_dir_fd=within, dst_dir_fd=within)

    def remove(self) -> bool:
        """Forgets the login; says whether there was one."""
        with self._store.open_folder(create=True) as folder:
            try:
                os.unlink(self._file, dir_fd=folder)
            except FileNotFoundError:
                return False
            return True

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncGenerator[None]:
        """One holder at a time among all processes and all connections of this one.

        A lock file of its own, which stays: the login's file is replaced on every write.
        """
        with self._store.open_folder(create=True) as folder:
            try:
                file = os.open(self._lock, _LOCK, 0o600, dir_fd=folder)
            except OSError as error:
                raise ProviderError(f"cannot lock the login of server {self._server!r}: {error.strerror}") from None
        try:
            await self._take(file)
            yield
        finally:
            os.close(file)  # Gives the lock back too.

    async def _take(self, file: int) -> None:
        until = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Polled, not waited for in a thread: a thread in flock() could not be cancelled.
                if time.monotonic() >= until:
                    raise ProviderError(
                        f"another process has been renewing the login of server {self._server!r} for"
                        f" {_LOCK_PATIENCE:g} s; end it, or try again"
                    ) from None
                await asyncio.sleep(_LOCK_POLL)
            except OSError:
                return  # Some network file systems cannot lock: then the last writer wins.
            else:
                return

    def __repr__(self) -> str:
        return f"LoginSlot({self._server!r})"
