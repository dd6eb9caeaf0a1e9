"""Where a chat shows: a terminal with a line to write in at its bottom, or plain text for files, pipes and programs.

Knows nothing of agents: it has lines, text that grows, a prompt, and what is being waited for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

from toolspace.cli.chat.line_editor import Action, ControlKey, LineEditor, SubmittedLine, width
from toolspace.cli.output import CommandOutput, escape_control_characters, first_line

PROMPT: Final = "you> "
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME_SECONDS: Final = 0.1
_CLEAR: Final = "\r\x1b[K"
_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
_MOST_LINE: Final = 400_000
"""Bytes of one line of input: as many as the longest message can have."""


class ChatScreen(Protocol):
    """What a chat writes to and reads from."""

    prompt: str
    keeps_typing: bool
    """Whether people may write at any time, or what comes next is read when the chat is ready for it."""

    def line(self, text: str, **style: Any) -> None:
        """A line about the conversation, with nothing in it that a terminal would obey."""
        ...

    def block(self, text: str) -> None:
        """Lines that an agent shows to people, or asks them; the same holds for these."""
        ...

    def problem(self, text: str) -> None:
        """What went wrong."""
        ...

    def start_message(self, speaker: str, *, known: bool) -> None:
        """Someone begins to say something. `known`: it is the one whom the chat is with."""
        ...

    def append_text(self, text: str) -> None: ...

    def end_message(self) -> None: ...

    def show_activity(self, what: str | None) -> None:
        """What is being waited for; None: nothing."""
        ...

    async def read(self) -> Action:
        """What the person does next."""
        ...


class PlainScreen:
    """What is said goes to standard output as it is, everything else to standard error."""

    keeps_typing = False

    def __init__(self, output: CommandOutput) -> None:
        self.prompt = PROMPT
        self._output = output
        self._last = "\n"

    def line(self, text: str, **style: Any) -> None:
        for line in text.split("\n"):
            self._output.note(line)

    def block(self, text: str) -> None:
        self.line(text)

    def problem(self, text: str) -> None:
        self._output.error(text)

    def start_message(self, speaker: str, *, known: bool) -> None:
        if not known:
            self._output.text(f"{speaker}: ", end="")

    def append_text(self, text: str) -> None:
        if text:
            self._output.text(text, end="")
            self._last = text[-1]

    def end_message(self) -> None:
        if self._last != "\n":
            self._output.text("", end="\n")
        self._last = "\n"

    def show_activity(self, what: str | None) -> None:
        pass

    async def read(self) -> Action:
        line = await _read_line()
        return SubmittedLine(line) if line is not None else ControlKey.END


class SilentScreen(PlainScreen):
    """Shows nothing, for programs that read the events."""

    def line(self, text: str, **style: Any) -> None:
        pass

    def block(self, text: str) -> None:
        pass

    def start_message(self, speaker: str, *, known: bool) -> None:
        pass

    def append_text(self, text: str) -> None:
        pass

    def end_message(self) -> None:
        pass


class TerminalScreen:
    """A terminal. The last row is what the person writes, or while that is empty what is being waited for."""

    keeps_typing = True

    def __init__(self, output: CommandOutput) -> None:
        self.prompt = PROMPT
        self.editor = LineEditor()
        self._output = output
        self._actions: asyncio.Queue[Action] = asyncio.Queue()
        self._shown = False
        """Whether the last row is drawn."""
        self._saying = False
        self._column = 0
        """How far the text that grows has come in its row; what it is about to wrap is not known here."""
        self._busy: str | None = None
        self._since = 0.0
        self._frame = 0
        self._timer: asyncio.TimerHandle | None = None
        self._drawing: asyncio.Handle | None = None

    @contextmanager
    def open(self) -> Generator[None]:
        """Takes the terminal while the block runs: keys come one by one, and Ctrl-C is one of them."""
        import termios

        loop = asyncio.get_running_loop()
        before: list[Any] = termios.tcgetattr(0)
        changed: list[Any] = [*before[:6], [*before[6]]]
        changed[3] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
        changed[6][termios.VINTR] = b"\0"  # A key like others here, because it has several meanings.
        changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0

        def take() -> None:
            termios.tcsetattr(0, termios.TCSADRAIN, changed)
            self._output.piece(_PASTE_ON)

        take()
        hook, self._output.before_write = self._output.before_write, self._make_room
        loop.add_reader(0, self._readable)
        loop.add_signal_handler(signal.SIGCONT, take)  # A shell takes the terminal back when one is put to sleep.
        self._draw_soon()
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGCONT)
            loop.remove_reader(0)
            self.show_activity(None)
            self._stop_drawing()
            self._clear()
            self._output.before_write = hook
            with suppress(OSError):
                self._output.piece(_PASTE_OFF)
            termios.tcsetattr(0, termios.TCSADRAIN, before)

    def line(self, text: str, **style: Any) -> None:
        self._output.line(self._output.style(text, **style))

    def block(self, text: str) -> None:
        self._output.line(text)

    def problem(self, text: str) -> None:
        self._output.line(self._output.style(escape_control_characters(text), fg="red"))

    def start_message(self, speaker: str, *, known: bool) -> None:
        self._write(f"{self._output.style(speaker, fg='cyan', bold=True)}: ")
        self._saying, self._column = True, 1

    def append_text(self, text: str) -> None:
        if text:
            self._write(escape_control_characters(text))
            self._column = 0 if text.endswith("\n") else 1

    def end_message(self) -> None:
        if self._column:
            self._write("\n")
        self._saying, self._column = False, 0
        self._draw_soon()

    def show_activity(self, what: str | None) -> None:
        if what is not None and self._busy is None:
            self._since = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(_FRAME_SECONDS, self._tick)
        elif what is None and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what != self._busy:
            self._busy = what
            self._draw_soon()

    async def read(self) -> Action:
        return await self._actions.get()

    def _readable(self) -> None:
        try:
            data = os.read(0, 65_536)
        except OSError:
            data = b""
        if not data:  # The terminal is gone.
            asyncio.get_running_loop().remove_reader(0)
            self._actions.put_nowait(ControlKey.END)
            return
        for action in self.editor.feed(data):
            if isinstance(action, SubmittedLine) and action.text.strip():
                self._output.line(
                    self._output.style(f"{first_line(self.prompt)} ", dim=True) + escape_control_characters(action.text)
                )
            self._actions.put_nowait(action)
        self._draw_soon()

    # The last row

    def _write(self, text: str) -> None:
        """A part of a line. It is not torn by what `_make_room` does for others."""
        saying, self._saying = self._saying, False
        self._output.piece(text)
        self._saying = saying

    def _make_room(self) -> None:
        """Something else is about to be written."""
        if self._saying and self._column:
            self._column = 0
            self._write("\n")
        self._clear()
        self._draw_soon()

    def _clear(self) -> None:
        if self._shown:
            self._shown = False
            self._raw(_CLEAR)

    def _draw_soon(self) -> None:
        if self._drawing is None:
            self._drawing = asyncio.get_running_loop().call_soon(self._draw)

    def _stop_drawing(self) -> None:
        if self._drawing is not None:
            self._drawing.cancel()
            self._drawing = None

    def _draw(self) -> None:
        self._drawing = None
        if self._saying:
            return  # There is no row below a text that grows; what is typed meanwhile shows when it has ended.
        columns = self._output.columns or 80
        if self._busy is not None and not self.editor.text and self.prompt == PROMPT:
            self._raw(f"{_CLEAR}{self._waiting(columns)}")
        else:
            prompt = fitted(first_line(self.prompt) + " ", max(1, columns // 2))
            room = max(2, columns - sum(map(width, prompt)))
            text, column = self.editor.shown(room)
            behind = sum(map(width, text)) - column
            back = f"\x1b[{behind}D" if behind else ""
            prompt = self._output.style(prompt, fg="green", bold=True)
            self._raw(f"{_CLEAR}{prompt}{escape_control_characters(text)}{back}")
        self._shown = True

    def _waiting(self, columns: int) -> str:
        elapsed = time.monotonic() - self._since
        text = f"{_FRAMES[self._frame % len(_FRAMES)]} {self._busy} {elapsed:.0f}s · Ctrl-C cancels"
        return self._output.style(fitted(first_line(text), columns - 1), dim=True)

    def _tick(self) -> None:
        self._frame += 1
        self._timer = asyncio.get_running_loop().call_later(_FRAME_SECONDS, self._tick)
        self._draw_soon()

    def _raw(self, text: str) -> None:
        """Writes on the last row itself, for which no room has to be made."""
        hook, self._output.before_write = self._output.before_write, lambda: None
        try:
            self._output.piece(text)
        finally:
            self._output.before_write = hook


def fitted(text: str, columns: int) -> str:
    """As much of a text as fits."""
    used = 0
    for at, char in enumerate(text):
        used += width(char)
        if used > columns:
            return text[:at]
    return text


def choose_screen(output: CommandOutput) -> ChatScreen:
    """The screen that fits where the command runs."""
    if output.json:
        return SilentScreen(output)
    fancy = output.terminal and os.isatty(0) and os.environ.get("TERM") != "dumb" and hasattr(os, "fork")
    return TerminalScreen(output) if fancy else PlainScreen(output)


async def _read_line() -> str | None:
    """The next line of standard input, without its end; None where there is none.

    In a thread of its own that nobody waits for: one that reads cannot be stopped.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[bytes] = loop.create_future()

    def give(data: bytes) -> None:
        if not found.done():
            found.set_result(data)

    def read() -> None:
        try:
            data = sys.stdin.buffer.readline(_MOST_LINE)
        except (OSError, ValueError):
            data = b""
        with suppress(RuntimeError):  # The loop is closed: nobody wants it any more.
            loop.call_soon_threadsafe(give, data)

    threading.Thread(target=read, daemon=True, name="toolspace-chat-input").start()
    data = await found
    return data.decode("utf-8", "replace").rstrip("\r\n") if data else None
