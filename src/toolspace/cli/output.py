"""Where the command line writes: results to standard output, everything else to standard error."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import click

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_JSON_TOKEN = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*")(?P<colon>\s*:)?'
    r"|(?P<word>\b(?:true|false|null)\b)"
    r"|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
)


def escape_control_characters(text: str) -> str:
    """The text with nothing in it that a terminal would obey: control characters show as their escapes.

    What is above 0x1F is escaped as JSON would, so that JSON stays JSON.
    """
    return _CONTROL.sub(_escape, text.replace("\r\n", "\n"))


def first_line(text: str) -> str:
    """The first line of a text that may come from anywhere."""
    lines = escape_control_characters(text).strip().splitlines()
    return lines[0].strip() if lines else ""


class WriteError(Exception):
    """Standard output takes no more."""


class CommandOutput:
    """Writes for people, or JSON for programs.

    Takes standard output for itself: what tools and the programs that they start print there goes to standard
    error instead, so that a result is never mixed with anything.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self._encoding = sys.stdout.encoding
        self._out = _claim()
        self.terminal = os.isatty(self._out)
        self._colour = self.terminal and _colour_wanted()
        self._colour_errors = sys.stderr.isatty() and _colour_wanted()
        self.before_write: Callable[[], None] = lambda: None
        """Called before anything is written: takes a status line away."""

    # Results

    def text(self, text: str, *, end: str = "\n") -> None:
        """A result as text, as it is; on a terminal without what the terminal would obey."""
        self._write((escape_control_characters(text) if self.terminal else text) + end)

    def line(self, text: str) -> None:
        """A line that this program wrote itself, colours included."""
        self._write(text + "\n")

    def piece(self, text: str) -> None:
        """A part of a line that this program wrote itself."""
        self._write(text)

    def value(self, value: object) -> None:
        """A result as readable JSON."""
        text = format_json(value)
        if self.terminal:
            text = escape_control_characters(text)
        self.line(self._highlight(text) if self._colour else text)

    def document(self, value: object) -> None:
        """The one JSON document of `--json`. JSON is UTF-8, whatever the terminal's encoding is."""
        text = format_json(value)
        self._write_bytes(
            (escape_control_characters(text) if self.terminal else text).encode("utf-8", "replace") + b"\n"
        )

    @property
    def columns(self) -> int | None:
        """How wide the terminal is; None where the output is none, and may be as wide as it likes."""
        if not self.terminal:
            return None
        try:
            return os.get_terminal_size(self._out).columns or 80
        except OSError:
            return 80

    def style(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self._colour else text

    # Everything else

    def error(self, message: str, kind: str | None = None) -> None:
        """What went wrong, for people."""
        mark = self.style_error("error:", fg="red", bold=True)
        self.err(f"{mark} {self._shown(message)}{f' ({kind})' if kind else ''}")

    def warning(self, message: str) -> None:
        if not self.quiet:
            self.err(f"{self.style_error('warning:', fg='yellow', bold=True)} {self._shown(message)}")

    def note(self, message: str) -> None:
        if not self.quiet:
            self.err(self._shown(message))

    def err(self, line: str) -> None:
        """One line on standard error. That nobody can read it is no reason to fail."""
        self.before_write()
        with suppress(OSError, ValueError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def style_error(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self._colour_errors else text

    def _shown(self, message: str) -> str:
        # Indented, so that no line of a message can pass for one of ours.
        return (escape_control_characters(message) if sys.stderr.isatty() else message).replace("\n", "\n    ")

    def _write(self, text: str) -> None:
        # As bytes, and in one step: a text stream would keep what it could not write, and fail again at exit.
        self._write_bytes(text.encode(self._encoding, "backslashreplace"))

    def _write_bytes(self, data: bytes) -> None:
        self.before_write()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._out, rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise WriteError(f"the result cannot be written: {error.strerror}") from error

    def _highlight(self, text: str) -> str:
        return _JSON_TOKEN.sub(_coloured, text)


def format_json(value: object) -> str:
    """Readable JSON of anything."""
    import msgspec  # Here, with the next: an error in the usage is told without them.

    from toolspace.core import json_text

    text = json_text.encode(value)
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.MsgspecError, RecursionError):  # Nested too deeply to be indented.
        return text


def fill_standard_streams() -> None:
    """Opens what the caller closed (`2>&-`): otherwise the next file opened would take its place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest free number: this one.
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", errors="replace", closefd=False)
            setattr(sys, name, stream)


def _claim() -> int:
    """The descriptor of standard output, taken out of everyone else's reach."""
    sys.stdout.flush()
    number = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return number


def _colour_wanted() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


def _coloured(match: re.Match[str]) -> str:
    text = match["text"]
    if text is None:
        return click.style(match[0], fg="magenta" if match["word"] else "yellow")
    if match["colon"] is not None:
        return click.style(text, fg="cyan") + match["colon"]
    return click.style(text, fg="green")


# MERGED from status: A line at the bottom of the terminal that says what takes so long. Appears after a second, le…

_PATIENCE_SECONDS = 1.0
_FRAME_SECONDS = 0.1
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[K"


class StatusLine:
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
            _write(_CLEAR + first_line(text)[: _columns() - 1])
            self._shown = True
            frame += 1
            await asyncio.sleep(_FRAME_SECONDS)


@asynccontextmanager
async def show_status(output: CommandOutput, label: str) -> AsyncGenerator[StatusLine]:
    """Shows the label while the block runs: for people at a terminal, unless they want it quiet."""
    status = StatusLine(label)
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
