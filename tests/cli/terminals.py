"""A command that believes it runs in a terminal, for tests: what it shows, and what people type."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_PATIENCE_SECONDS = 30


TOOLSPACE = (sys.executable, "-m", "toolspace")


class Terminal:
    """Runs `toolspace …`, or another program, in a pseudo-terminal."""

    def __init__(
        self,
        *words: str,
        cwd: Path,
        environ: Mapping[str, str],
        columns: int = 80,
        program: Sequence[str] = TOOLSPACE,
    ) -> None:
        self._pid, self._side = pty.fork()
        if self._pid == 0:
            os.chdir(cwd)
            # The size before anything runs: the command asks for it once.
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            os.execve(program[0], [*program, *words], dict(environ))
        self.shown = ""
        self._code: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            os.kill(self._pid, 9)
            os.waitpid(self._pid, 0)
        os.close(self._side)

    def wait_for(self, text: str) -> None:
        """Reads until the text is on the screen."""
        while text not in self.shown:
            assert self._read(), f"{text!r} was never shown: {self.shown!r}"

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def end(self) -> int:
        """The exit code, once the command has ended."""
        while self._read():
            pass
        if self._code is None:
            _, status = os.waitpid(self._pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def _read(self) -> bool:
        ready, _, _ = select.select([self._side], [], [], _PATIENCE_SECONDS)
        assert ready, f"nothing more was shown: {self.shown!r}"
        try:
            data = os.read(self._side, 65_536)
        except OSError:  # How a terminal says that its last user is gone.
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)
