"""Writes what a command prints: results to standard output, everything else to standard error.

Every command uses `CommandOutput`. Also here: escaping of control characters, cutting and aligning of text for a
terminal, and the status line of work that takes long. Imports nothing heavy: `toolspace --help` needs this module.
"""

from __future__ import annotations

import os
import re
import sys
import time
import unicodedata
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import click

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPINNER_SECONDS = 0.1
_STATUS_DELAY_SECONDS = 1.0
_CLEAR_LINE = "\r\x1b[K"
COLUMN_GAP = "  "
_MIN_WIDTH = 20
"""`shorten` does not cut to fewer columns than this: the text would say nothing."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_JSON_TOKEN = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*")(?P<colon>\s*:)?'
    r"|(?P<word>\b(?:true|false|null)\b)"
    r"|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
)


# Text for terminals


def escape_control_characters(text: str) -> str:
    """Returns the text with its control characters as visible escapes, so that a terminal does not execute them.

    Characters above 0x1F are escaped as in JSON, so that JSON stays valid JSON.
    """
    return _CONTROL.sub(_escape, text.replace("\r\n", "\n"))


def first_line(text: str) -> str:
    """Returns the first line of an untrusted text, with control characters escaped."""
    lines = escape_control_characters(text).strip().splitlines()
    return lines[0].strip() if lines else ""


def plain_text(value: object) -> str:
    """Returns text unchanged, and any other value as JSON."""
    from toolspace.core import json_text  # Imported late: reporting wrong usage does not need it.

    return value if isinstance(value, str) else json_text.encode(value)


def one_line(value: object, limit: int) -> str:
    """Returns the first line of an untrusted value, cut after so many characters with an ellipsis."""
    text = first_line(plain_text(value))
    return text if len(text) <= limit else f"{text[:limit]}…"


def text_width(text: str) -> int:
    """Returns how many columns of a terminal the text takes."""
    return sum(map(_character_width, text))


def cut(text: str, columns: int) -> str:
    """Returns the longest beginning of the text that fits into so many columns."""
    used = 0
    for index, character in enumerate(text):
        used += _character_width(character)
        if used > columns:
            return text[:index]
    return text


def shorten(text: str, columns: int | None) -> str:
    """Returns the text, cut to so many columns with an ellipsis at its end.

    None means no limit. A limit that is too small to be readable is ignored.
    """
    if columns is None or columns < _MIN_WIDTH or text_width(text) <= columns:
        return text
    return cut(text, columns - 1).rstrip() + "…"


def align_columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[list[str]]:
    """Returns the rows with their cells padded to the width of their column. `right` lists right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if index in right else str.ljust for index in range(len(widths))]
    return [[pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)] for row in rows]


def join_columns(cells: Sequence[str]) -> str:
    """Returns one line of a table."""
    return COLUMN_GAP.join(cells).rstrip()


def format_json(value: object) -> str:
    """Returns any value as indented JSON."""
    import msgspec  # Imported late, like the next: reporting wrong usage needs neither.

    from toolspace.core import json_text

    text = json_text.encode(value)
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.MsgspecError, RecursionError):  # Nested too deeply to be indented.
        return text


def _character_width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


# Output


class WriteError(Exception):
    """Standard output cannot be written, for example because the disk is full."""


class CommandOutput:
    """Writes text for people, or JSON for programs.

    Takes over standard output: what tools and their child processes print there goes to standard error instead, so
    that it never mixes with a result.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self._encoding = sys.stdout.encoding
        self.descriptor = _take_over_stdout()
        """The file descriptor of the real standard output."""
        self.is_terminal = os.isatty(self.descriptor)
        self.has_colour = self.is_terminal and _is_colour_wanted()
        self._has_error_colour = sys.stderr.isatty() and _is_colour_wanted()
        self.around_write: Callable[[Callable[[], None]], None] = lambda write: write()
        """Executes every write to the two streams. Replaced by what keeps a line at the bottom of the terminal."""

    # Results, on standard output

    def text(self, text: str, *, end: str = "\n") -> None:
        """Writes a result unchanged; on a terminal with control characters escaped."""
        self._write((escape_control_characters(text) if self.is_terminal else text) + end)

    def line(self, text: str) -> None:
        """Writes a trusted line, colour codes included."""
        self._write(text + "\n")

    def value(self, value: object) -> None:
        """Writes a result as indented JSON."""
        text = format_json(value)
        if self.is_terminal:
            text = escape_control_characters(text)
        self.line(_JSON_TOKEN.sub(_colour_token, text) if self.has_colour else text)

    def document(self, value: object) -> None:
        """Writes the one JSON document of `--json`, always as UTF-8."""
        text = format_json(value)
        text = escape_control_characters(text) if self.is_terminal else text
        self._write_bytes(text.encode("utf-8", "replace") + b"\n")

    @property
    def columns(self) -> int | None:
        """The width of the terminal; None where standard output is not a terminal."""
        return _terminal_columns(self.descriptor) if self.is_terminal else None

    def style(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self.has_colour else text

    # Messages, on standard error

    def error(self, message: str, kind: str | None = None) -> None:
        mark = self.style_error("error:", fg="red", bold=True)
        self.err(f"{mark} {self._indent(message)}{f' ({kind})' if kind else ''}")

    def warning(self, message: str) -> None:
        if not self.quiet:
            self.err(f"{self.style_error('warning:', fg='yellow', bold=True)} {self._indent(message)}")

    def note(self, message: str) -> None:
        if not self.quiet:
            self.err(self._indent(message))

    def err(self, line: str) -> None:
        """Writes one line to standard error. Never fails: a closed stream is ignored."""

        def write() -> None:
            with suppress(OSError, ValueError):
                sys.stderr.write(line + "\n")
                sys.stderr.flush()

        self.around_write(write)

    def style_error(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self._has_error_colour else text

    def _indent(self, message: str) -> str:
        # Further lines are indented, so that no line of a message can pass for a line of this program.
        text = escape_control_characters(message) if sys.stderr.isatty() else message
        return text.replace("\n", "\n    ")

    def _write(self, text: str) -> None:
        # As bytes and unbuffered: a text stream would keep what it could not write, and fail again at exit.
        self._write_bytes(text.encode(self._encoding, "backslashreplace"))

    def _write_bytes(self, data: bytes) -> None:
        def write() -> None:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]

        try:
            self.around_write(write)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise WriteError(f"the result cannot be written: {error.strerror}") from error


def open_closed_streams() -> None:
    """Opens the standard streams that the caller closed (`2>&-`). Otherwise the next file would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest free number, which is this one.
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", errors="replace", closefd=False)
            setattr(sys, name, stream)


def _take_over_stdout() -> int:
    """Returns a new descriptor of standard output; the old number becomes a copy of standard error."""
    sys.stdout.flush()
    number = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return number


def _is_colour_wanted() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _colour_token(match: re.Match[str]) -> str:
    text = match["text"]
    if text is None:
        return click.style(match[0], fg="magenta" if match["word"] else "yellow")
    if match["colon"] is not None:
        return click.style(text, fg="cyan") + match["colon"]
    return click.style(text, fg="green")


# Status line


class StatusLine:
    """One line at the bottom of the terminal: what is running, for how long, and how far it is."""

    def __init__(self, label: str, get_detail: Callable[[], str] | None = None) -> None:
        self.detail = ""
        """The progress. May change while the line is shown."""
        self._get_detail = get_detail
        self._label = label
        self._started = time.monotonic()
        self._is_shown = False
        self._is_hidden = False

    def hide(self) -> None:
        """Removes the line for good."""
        self.clear()
        self._is_hidden = True

    def clear(self) -> None:
        if self._is_shown:
            self._is_shown = False
            _write_status(_CLEAR_LINE)

    async def animate(self) -> None:
        """Shows the line after a second, and updates it until it is hidden."""
        import asyncio  # Imported late: commands that wait for nothing do not need it.

        await asyncio.sleep(_STATUS_DELAY_SECONDS)
        frame = 0
        while not self._is_hidden:
            seconds = time.monotonic() - self._started
            if self._get_detail is not None:
                self.detail = self._get_detail()
            text = f"{SPINNER[frame % len(SPINNER)]} {self._label} {seconds:.0f}s {self.detail}"
            _write_status(_CLEAR_LINE + first_line(text)[: _terminal_columns(sys.stderr.fileno()) - 1])
            self._is_shown = True
            frame += 1
            await asyncio.sleep(SPINNER_SECONDS)


@asynccontextmanager
async def show_status(
    output: CommandOutput, label: str, get_detail: Callable[[], str] | None = None
) -> AsyncGenerator[StatusLine]:
    """Shows a status line while the block runs, if standard error is a terminal and `--quiet` is not set.

    `get_detail` returns the progress, each time that the line is drawn.
    """
    import asyncio

    status = StatusLine(label, get_detail)
    if output.json or output.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield status
        return

    def clear_and_write(write: Callable[[], None]) -> None:
        status.clear()
        write()

    previous, output.around_write = output.around_write, clear_and_write
    task = asyncio.create_task(status.animate())
    try:
        yield status
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        status.hide()
        output.around_write = previous


def _terminal_columns(descriptor: int) -> int:
    try:
        return os.get_terminal_size(descriptor).columns or 80
    except OSError:
        return 80


def _write_status(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
