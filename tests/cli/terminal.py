"""A command in a pseudo-terminal, for tests: what its screen shows, and what a person types."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import pyte

_TIMEOUT_SECONDS = 30
_ROWS = 24


TOOLSPACE = (sys.executable, "-m", "toolspace")


class Terminal:
    """Runs `toolspace …`, or another program, in a pseudo-terminal and emulates its screen."""

    def __init__(
        self,
        *words: str,
        cwd: Path,
        environ: Mapping[str, str],
        columns: int = 80,
        program: Sequence[str] = TOOLSPACE,
    ) -> None:
        self._pid, self._descriptor = pty.fork()
        if self._pid == 0:
            os.chdir(cwd)
            # Set before the program starts, because it may read the size only once.
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
            os.execve(program[0], [*program, *words], dict(environ))
        self.output = ""
        """Everything that was written, escape sequences included."""
        self._screen = pyte.Screen(columns, _ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._exit_code: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._exit_code is None:
            os.kill(self._pid, 9)
            os.waitpid(self._pid, 0)
        os.close(self._descriptor)

    @property
    def screen(self) -> list[str]:
        """The rows of the screen, without trailing spaces and empty rows."""
        return [row.rstrip() for row in self._screen.display if row.strip()]

    @property
    def cursor_column(self) -> int:
        return self._screen.cursor.x

    def wait_for(self, text: str) -> None:
        """Reads until the text was written, or is on the screen."""
        self.wait_until(lambda: text in self.output or text in "\n".join(self._screen.display), text)

    def wait_for_screen(self, *rows: str) -> None:
        """Reads until these are the last rows of the screen."""
        self.wait_until(lambda: self.screen[-len(rows) :] == [*rows], rows)

    def wait_until(self, condition: Callable[[], bool], expected: object) -> None:
        """Reads until the condition holds."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not condition():
            has_output = time.monotonic() < deadline and self._read()
            assert has_output, f"{expected!r} was never shown: {self.screen!r}, {self.output!r}"

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def end(self) -> int:
        """Returns the exit code, when the command has ended."""
        while self._read():
            pass
        if self._exit_code is None:
            _, status = os.waitpid(self._pid, 0)
            self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def _read(self) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], _TIMEOUT_SECONDS)
        assert ready, f"nothing more was shown: {self.screen!r}"
        try:
            data = os.read(self._descriptor, 65_536)
        except OSError:  # The program has closed the terminal.
            return False
        self.output += data.decode(errors="replace")
        self._stream.feed(data)
        return bool(data)
