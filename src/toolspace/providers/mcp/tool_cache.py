"""Stores the tools that each MCP server listed last, so that they can be listed again while the server starts.

There is one file per server, and only its owner may read it. Its name is a hash of the server's configuration: a server
whose configuration changes does not see the old list. What cannot be read is ignored, because the server lists its
tools itself a moment later. Does not import the MCP SDK. POSIX only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.providers.mcp.server_spec import ServerSpec

_log = logging.getLogger("toolspace.mcp")
FOLDER_NAME = "mcp-tools"
MAX_FILE_BYTES = 2 * 1024 * 1024
"""A longer list is not stored."""
MAX_FILES = 200
"""The oldest files above this number are deleted."""
_FORMAT = 1
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking: opening a pipe that somebody placed there must not hang.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHER_FIELDS = ("description_prefix", "idle_timeout")
"""Fields of a `ServerSpec` that do not change which tools the server lists."""


class LastTools(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a server listed last."""

    entries: tuple[Mapping[str, Any], ...]
    """The entries of `tools/list`, as the server sent them."""
    is_stateless: bool
    server: str | None = None
    """The name and version that the server reported."""
    instructions: str = ""
    format: int = _FORMAT


_decoder = msgspec.json.Decoder(LastTools)


class ToolCacheFile:
    """The stored list of one server. Reading and writing block."""

    def __init__(self, folder: Path, name: str, spec: ServerSpec) -> None:
        """`spec` may contain references to secrets instead of the secrets: it is only compared."""
        self._folder = folder
        self._file_name = f"{_create_fingerprint(name, spec)}.json"
        self._file_content: bytes | None = None
        """What is known to be in the file."""

    def load(self) -> LastTools | None:
        """Returns the stored list; None if there is none that can be used."""
        try:
            folder = os.open(self._folder, _FOLDER_FLAGS)
        except OSError:
            return None
        try:
            data = _read_private_file(self._file_name, folder)
            last_tools = _decoder.decode(data) if data is not None else None
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
            return None
        finally:
            os.close(folder)
        if last_tools is None or last_tools.format != _FORMAT:
            return None
        self._file_content = data
        return last_tools

    def save(self, last_tools: LastTools) -> None:
        """Stores a list, or deletes the file if the list is too long. Logs a failure: the next start has no list."""
        try:
            data = json_text.encode_bytes(msgspec.to_builtins(last_tools))
            if data == self._file_content:
                return
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            folder = os.open(self._folder, _FOLDER_FLAGS)
            try:
                if os.fstat(folder).st_uid != os.geteuid():
                    return  # A folder of another user: the lists are not for them.
                os.fchmod(folder, 0o700)
                self._write(data, folder)
            finally:
                os.close(folder)
        except (OSError, ValueError, RecursionError) as error:
            _log.info("the tools of an MCP server could not be stored for its next start: %s", error)

    def _write(self, data: bytes, folder: int) -> None:
        if len(data) > MAX_FILE_BYTES:
            with suppress(FileNotFoundError):
                os.unlink(self._file_name, dir_fd=folder)
            return
        # Renamed when it is complete: another process never reads half of it.
        temporary_name = f"{self._file_name}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            with os.fdopen(os.open(temporary_name, _CREATE_FLAGS, 0o600, dir_fd=folder), "wb") as file:
                file.write(data)
            os.rename(temporary_name, self._file_name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary_name, dir_fd=folder)
            raise
        self._file_content = data
        _delete_oldest(folder)


def _create_fingerprint(name: str, spec: ServerSpec) -> str:
    fields = {key: value for key, value in msgspec.structs.asdict(spec).items() if key not in _OTHER_FIELDS}
    # Without a directory of its own, a program runs in the current one, and its arguments may be relative to it.
    directory = os.getcwd() if spec.kind == "stdio" and spec.cwd is None else None
    identity = json_text.encode_canonical(msgspec.to_builtins([name, fields, directory], enc_hook=str))
    return hashlib.sha256(identity).hexdigest()[:40]


def _read_private_file(name: str, folder: int) -> bytes | None:
    """Returns the content; None if there is no such file, or if it is not a file of this user's alone."""
    try:
        descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        is_private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o022
        if not stat.S_ISREG(status.st_mode) or not is_private or status.st_size > MAX_FILE_BYTES:
            return None
        return file.read(MAX_FILE_BYTES + 1)


def _delete_oldest(folder: int) -> None:
    names = os.listdir(folder)
    if len(names) <= MAX_FILES:
        return
    times: dict[str, float] = {}
    for name in names:
        with suppress(OSError):  # Another process may have deleted it.
            times[name] = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
    for name in sorted(times, key=lambda name: times[name])[: len(names) - MAX_FILES]:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
