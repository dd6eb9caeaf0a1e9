"""The screens of a chat: where it shows messages, and where it reads what the person types.

`ChatScreen` is the interface; `PlainScreen` is for pipes and files, `terminal_screen.TerminalScreen` for terminals. A
screen knows nothing of agents or gateways.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Any, Final, NamedTuple

from toolspace.cli.output import CommandOutput

PROMPT: Final = "you> "
_MAX_LINE_BYTES: Final = 400_000
"""Of one line of standard input: the longest message, in UTF-8."""


class SubmittedLine(NamedTuple):
    """The person has entered a line."""

    text: str


class ControlKey(Enum):
    """The person has pressed a key that is not text."""

    INTERRUPT = "Ctrl-C"
    END = "Ctrl-D on an empty line"


InputAction = SubmittedLine | ControlKey


class ChatScreen:
    """What a conversation writes to and reads from. This one is for `--json`: it shows nothing but errors."""

    is_interactive = False
    """Whether the person may type at any time. Otherwise the next line is read when the conversation is ready."""

    def __init__(self, output: CommandOutput) -> None:
        self._output = output

    def line(self, text: str, **style: Any) -> None:
        """Shows a line about the conversation. The text must have no control characters."""

    def block(self, text: str) -> None:
        """Shows several lines without a style. The text must have no control characters."""
        self.line(text)

    def problem(self, text: str) -> None:
        """Shows an error."""
        self._output.error(text)

    def start_message(self, speaker: str, *, is_agent: bool, is_provisional: bool = False) -> None:
        """Starts a message. `is_agent`: the speaker is the agent that the chat is with.

        `is_provisional`: it may still be withdrawn.
        """

    def append_text(self, text: str) -> None:
        """Adds text to the message that was started."""

    def end_message(self) -> None:
        """Ends the message that was started."""

    def withdraw_message(self) -> None:
        """Removes the provisional message that was started."""

    def show_activity(self, activity: str | None) -> None:
        """Shows what the agent does now; None removes it."""

    def set_prompt(self, prompt: str) -> None:
        """Sets the text in front of the input line."""

    def clear_input(self) -> None:
        """Removes what is typed but not entered."""

    async def read(self) -> InputAction:
        """Waits for what the person does next."""
        line = await _read_line()
        return SubmittedLine(line) if line is not None else ControlKey.END


class PlainScreen(ChatScreen):
    """Writes messages to standard output, and everything else to standard error. For pipes and files."""

    _last_character = "\n"
    _held_text: list[str] | None = None
    """The parts of a provisional message: what is written cannot be withdrawn, so it is written at its end."""

    def line(self, text: str, **style: Any) -> None:
        for line in text.split("\n"):
            self._output.note(line)

    def start_message(self, speaker: str, *, is_agent: bool, is_provisional: bool = False) -> None:
        self._held_text = [] if is_provisional else None
        if not is_agent:
            self.append_text(f"{speaker}: ")

    def append_text(self, text: str) -> None:
        if self._held_text is not None:
            self._held_text.append(text)
        elif text:
            self._output.text(text, end="")
            self._last_character = text[-1]

    def withdraw_message(self) -> None:
        self._held_text = None

    def end_message(self) -> None:
        if self._held_text is not None:
            text, self._held_text = "".join(self._held_text), None
            self.append_text(text)
        if self._last_character != "\n":
            self._output.text("", end="\n")
        self._last_character = "\n"


@asynccontextmanager
async def open_screen(output: CommandOutput) -> AsyncGenerator[ChatScreen]:
    """Yields the screen for the streams of this process."""
    has_terminal = output.is_terminal and os.isatty(0) and os.environ.get("TERM") != "dumb" and hasattr(os, "fork")
    if output.json:
        yield ChatScreen(output)
    elif not has_terminal:
        yield PlainScreen(output)
    else:
        from toolspace.cli.chat.terminal_screen import TerminalScreen  # Here: it imports prompt-toolkit.

        async with TerminalScreen(output) as screen:
            yield screen


async def _read_line() -> str | None:
    """Returns the next line of standard input without its line break; None at the end of the input.

    Reads in a daemon thread that nobody joins, because a blocking read cannot be cancelled.
    """
    loop = asyncio.get_running_loop()
    line: asyncio.Future[bytes] = loop.create_future()

    def deliver(data: bytes) -> None:
        if not line.done():
            line.set_result(data)

    def read() -> None:
        try:
            data = sys.stdin.buffer.readline(_MAX_LINE_BYTES)
        except (OSError, ValueError):
            data = b""
        with suppress(RuntimeError):  # The loop is closed: nobody waits for the line any more.
            loop.call_soon_threadsafe(deliver, data)

    threading.Thread(target=read, daemon=True, name="toolspace-chat-input").start()
    data = await line
    return data.decode("utf-8", "replace").rstrip("\r\n") if data else None
