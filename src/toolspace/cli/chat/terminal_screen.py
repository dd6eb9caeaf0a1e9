"""A chat on a terminal: messages scroll up, the input line of prompt-toolkit stays at the bottom.

While the screen is open, every write of the command goes through it: it erases the input line, writes, and draws the
line again. So output that arrives while a person types never mixes with what they type. Only `toolspace chat` on a
terminal imports this module, because importing prompt-toolkit takes time.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output

from toolspace.cli.chat.screen import PROMPT, ChatScreen, ControlKey, InputAction, SubmittedLine
from toolspace.cli.output import (
    SPINNER,
    SPINNER_SECONDS,
    CommandOutput,
    cut,
    escape_control_characters,
    first_line,
)

_MAX_TEXT: Final = 100_000
"""Characters of a message, as a space accepts it."""


class TerminalScreen(ChatScreen):
    """Shows complete lines above, and below them the unfinished line of a message, the activity and the input."""

    is_interactive = True

    def __init__(self, output: CommandOutput) -> None:
        super().__init__(output)
        self._prompt = PROMPT
        self._actions: asyncio.Queue[InputAction] = asyncio.Queue()
        self._speaker = ""
        """Stands in front of the first line of a message."""
        self._unfinished_line = ""
        """The end of the message so far that has no line break yet; of a provisional message all of it."""
        self._is_provisional = False
        self._activity: str | None = None
        self._activity_start = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._file = os.fdopen(os.dup(self._output.descriptor), "w", encoding="utf-8", errors="replace")
        colours = None if self._output.has_colour else ColorDepth.DEPTH_1_BIT
        terminal = Vt100_Output.from_pty(self._file, os.environ.get("TERM"), default_color_depth=colours)
        terminal.enable_cpr = False  # The position of the cursor is not needed: the input is drawn where it stands.
        self._session: PromptSession[str] = PromptSession(
            self._draw_prompt,
            output=terminal,
            key_bindings=self._key_bindings(),
            enable_suspend=True,
            erase_when_done=True,
            reserve_space_for_menu=0,
        )
        self._session.default_buffer.on_text_changed += _limit_text
        self._previous_hook, self._output.around_write = self._output.around_write, self._write_above
        # Signals and exceptions stay with the command: its own handlers cancel the chat and restore the terminal.
        self._prompt_task = asyncio.ensure_future(
            self._session.prompt_async(handle_sigint=False, set_exception_handler=False)
        )
        self._prompt_task.add_done_callback(lambda _: self._actions.put_nowait(ControlKey.END))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.show_activity(None)
        self.end_message()
        application = self._session.app
        if application.is_running and not application.is_done:
            application.exit(result="")
        else:
            self._prompt_task.cancel()  # It has not started yet, or has ended already.
        await asyncio.gather(self._prompt_task, return_exceptions=True)
        self._output.around_write = self._previous_hook
        self._file.close()

    # Output

    def line(self, text: str, **style: Any) -> None:
        self._output.line(self._output.style(text, **style))

    def block(self, text: str) -> None:
        self._output.line(text)

    def problem(self, text: str) -> None:
        self._output.line(self._output.style(escape_control_characters(text), fg="red"))

    def start_message(self, speaker: str, *, is_agent: bool, is_provisional: bool = False) -> None:
        self.end_message()
        self._speaker = f"{speaker}: "
        self._is_provisional = is_provisional
        self._session.app.invalidate()

    def append_text(self, text: str) -> None:
        self._unfinished_line += escape_control_characters(text)
        # A complete line scrolls up, where it cannot be removed any more.
        if not self._is_provisional:
            lines, line_break, self._unfinished_line = self._unfinished_line.rpartition("\n")
            if line_break:
                self._write_message_lines(lines)
        self._session.app.invalidate()

    def withdraw_message(self) -> None:
        self._speaker, self._unfinished_line, self._is_provisional = "", "", False
        self._session.app.invalidate()

    def end_message(self) -> None:
        self._is_provisional = False
        if self._speaker or self._unfinished_line:
            line, self._unfinished_line = self._unfinished_line, ""
            self._write_message_lines(line)

    def show_activity(self, activity: str | None) -> None:
        if activity is not None and self._activity is None:
            self._activity_start = time.monotonic()
            self._animate()
        elif activity is None and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._activity = activity
        self._session.app.invalidate()

    def _animate(self) -> None:
        self._timer = self._loop.call_later(SPINNER_SECONDS, self._animate)
        self._session.app.invalidate()

    def _write_message_lines(self, lines: str) -> None:
        speaker, self._speaker = self._speaker, ""
        self._output.line((self._output.style(speaker, fg="cyan", bold=True) if speaker else "") + lines)

    def _write_above(self, write: Callable[[], None]) -> None:
        """Writes above the input line. Log lines of other threads are handed to the thread of the loop."""
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self._write_above, write)
            return
        application = self._session.app
        if application.is_running:
            application.renderer.erase()
        write()
        application.invalidate()

    def _draw_prompt(self) -> StyleAndTextTuples:
        """Returns what stands in front of the input: an unfinished message, the activity, and the prompt itself."""
        size = self._session.app.output.get_size()
        columns = size.columns or 80
        fragments: StyleAndTextTuples = []
        if self._speaker or self._unfinished_line:
            # Of a long text only the end, so that the input stays visible.
            rows = max(1, size.rows // 2)
            text = "\n".join(self._unfinished_line[-columns * rows :].split("\n")[-rows:])
            fragments += [("ansicyan bold", self._speaker), ("", text), ("", "\n")]
        if self._activity is not None:
            seconds = time.monotonic() - self._activity_start
            frame = SPINNER[int(seconds / SPINNER_SECONDS) % len(SPINNER)]
            activity = cut(first_line(f"{frame} {self._activity} {seconds:.0f}s · Ctrl-C cancels"), columns - 1)
            fragments += [("ansibrightblack", activity), ("", "\n")]
        prompt = cut(first_line(self._prompt) + " ", max(1, columns // 2))
        return [*fragments, ("ansigreen bold", prompt)]

    # Input

    async def read(self) -> InputAction:
        return await self._actions.get()

    def set_prompt(self, prompt: str) -> None:
        self._prompt = prompt
        self._session.app.invalidate()

    def clear_input(self) -> None:
        self._session.default_buffer.reset()

    def _key_bindings(self) -> KeyBindings:
        bindings = KeyBindings()

        @bindings.add("enter")
        def _submit(event: KeyPressEvent) -> None:
            text = event.current_buffer.text
            if text.strip():
                prompt = self._output.style(f"{first_line(self._prompt)} ", dim=True)
                self._output.line(prompt + escape_control_characters(text))
            event.current_buffer.reset(append_to_history=bool(text.strip()))
            self._actions.put_nowait(SubmittedLine(text))

        @bindings.add("c-c")
        def _interrupt(event: KeyPressEvent) -> None:
            self._actions.put_nowait(ControlKey.INTERRUPT)

        @bindings.add("c-d")
        def _end(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.delete()
            else:
                self._actions.put_nowait(ControlKey.END)

        @bindings.add("escape", Keys.Any)
        def _ignore(event: KeyPressEvent) -> None:
            """Without this, Alt and a letter that has no binding would insert the letter."""

        @bindings.add(Keys.BracketedPaste)
        def _paste(event: KeyPressEvent) -> None:
            # Line breaks stay in the message and do not submit it; control characters are dropped.
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            event.current_buffer.insert_text(
                "".join(character for character in text if character in "\n\t" or character.isprintable())
            )

        return bindings


def _limit_text(buffer: Buffer) -> None:
    if len(buffer.text) > _MAX_TEXT:
        buffer.text = buffer.text[:_MAX_TEXT]
