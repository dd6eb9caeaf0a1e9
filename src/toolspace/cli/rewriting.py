"""Replaces a settings file of another program as a whole, or not at all. Knows nothing of what is in it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from toolspace.config.parse import display_name
from toolspace.errors import ConfigError

MAX_BYTES = 50_000_000
"""Some clients keep their whole history beside their servers."""
_ATTEMPTS = 5


def read_text(path: Path) -> str:
    """The text of a settings file; empty where there is none. Raises `ConfigError`."""
    return _read(_target(path), display_name(path))[0]


def rewrite(path: Path, change: Callable[[str], str]) -> tuple[str, str]:
    """Replaces the text of a file by what `change` makes of it; gives the text before and after.

    Its mode stays, and a link to it stays a link. The new text is on the disk before it takes the old one's place.
    """
    name = display_name(path)
    target = _target(path)
    for _ in range(_ATTEMPTS):
        text, before = _read(target, name)
        changed = change(text)
        if changed == text:
            return text, changed
        if _replace(target, name, changed.encode(), before):
            return text, changed
    raise ConfigError(f"{name}: changes all the time; close the program that writes it, and try again")


def _target(path: Path) -> Path:
    """The file itself, where the path is a link: the dotfiles of many people are."""
    name = display_name(path)
    try:
        link = path.lstat()
    except FileNotFoundError:
        return path
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if not stat.S_ISLNK(link.st_mode):
        return path
    try:
        target = path.resolve(strict=True)
        owner = target.stat().st_uid
    except (OSError, RuntimeError):
        where = f"is a link to {os.readlink(path)}, which is not there"
        raise ConfigError(f"{name}: {where}; make that file, or remove the link") from None
    if hasattr(os, "geteuid") and link.st_uid not in (os.geteuid(), owner):
        raise ConfigError(f"{name}: is a link that another user made, to a file that is not theirs; remove it")
    return target


def _read(target: Path, name: str) -> tuple[str, os.stat_result | None]:
    try:
        # Not blocking: a pipe would keep us waiting.
        file = os.open(target, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return "", None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    with os.fdopen(file, "rb") as stream:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{name}: is no regular file")
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES:,} bytes; add the server by hand")
    try:
        return content.decode(), status
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text ({error.reason}); nothing was changed") from None


def _replace(target: Path, name: str, content: bytes, before: os.stat_result | None) -> bool:
    """Whether it could be replaced: not where another program has written it since it was read."""
    if before is not None and hasattr(os, "geteuid") and before.st_uid != os.geteuid() != 0:
        raise ConfigError(f"{name}: belongs to another user; nothing was changed")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file, made = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(content)
                stream.flush()
                _keep_owner_and_mode(file, before)
                os.fsync(file)
            if not _unchanged(target, before):
                os.unlink(made)
                return False
            os.replace(made, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(made)
            raise
    except OSError as error:
        raise ConfigError(f"{name}: cannot be written: {error.strerror or error}; nothing was changed") from None
    return True


def _keep_owner_and_mode(file: int, before: os.stat_result | None) -> None:
    if not hasattr(os, "fchmod"):
        return
    if before is None:
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(file, 0o666 & ~mask)  # As any new file of the user's.
        return
    if os.geteuid() == 0:
        os.fchown(file, before.st_uid, before.st_gid)
    os.fchmod(file, stat.S_IMODE(before.st_mode))


def _unchanged(target: Path, before: os.stat_result | None) -> bool:
    try:
        now = target.stat()
    except FileNotFoundError:
        return before is None
    return before is not None and (now.st_ino, now.st_mtime_ns, now.st_size) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_size,
    )
