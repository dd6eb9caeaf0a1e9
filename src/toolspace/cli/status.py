"""A line at the bottom of the terminal that says what takes so long. Appears after a second, leaves no trace."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from toolspace.cli.output import Output, one_line

_PATIENCE_SECONDS = 1.0
_FRAME_SECONDS = 0.1
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[K"


class Status:
    """What is being waited for. `detail` may change meanwhile; `hide` ends the line for good."""

    def __init__(self, label: str) -> None:
        self.detail = ""
        self._label = label
        self._began = time.monotonic()
        self._shown = False
        self._hidden = False

    def hide(self) -> None:
        self.clear()
        self._hidden = True

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            _write(_CLEAR)

    async def animate(self) -> None:
        await asyncio.sleep(_PATIENCE_SECONDS)
        frame = 0
        while not self._hidden:
            elapsed = time.monotonic() - self._began
            text = f"{_FRAMES[frame % len(_FRAMES)]} {self._label} {elapsed:.0f}s {self.detail}"
            _write(_CLEAR + one_line(text)[: _columns() - 1])
            self._shown = True
            frame += 1
            await asyncio.sleep(_FRAME_SECONDS)


@asynccontextmanager
async def waiting(output: Output, label: str) -> AsyncGenerator[Status]:
    """Shows the label while the block runs: for people at a terminal, unless they want it quiet."""
    status = Status(label)
    if output.json or output.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield status
        return
    before, output.before_write = output.before_write, status.clear
    task = asyncio.create_task(status.animate())
    try:
        yield status
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        status.hide()
        output.before_write = before


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


def _write(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
