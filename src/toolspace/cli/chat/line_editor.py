"""Edits one line as its keys come in, as bytes from a terminal. Writes nothing: whoever shows it asks how it looks."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

_MOST_TEXT: Final = 100_000
"""Characters of a message."""
_MOST_HISTORY: Final = 500
_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[^\[O])", re.DOTALL)
_INCOMPLETE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|O)?$")
_PASTE_BEGINS, _PASTE_ENDS = "\x1b[200~", "\x1b[201~"
_NEW_LINE: Final = "↵"
"""What a line break within the text looks like."""


class SubmittedLine(NamedTuple):
    """A line is complete."""

    text: str


class ControlKey(Enum):
    """What is asked for beside the text."""

    INTERRUPT = "Ctrl-C"
    END = "Ctrl-D on an empty line"


Action = SubmittedLine | ControlKey


class LineEditor:
    """A line, the place in it, and the lines before it."""

    def __init__(self) -> None:
        self.text = ""
        self.cursor = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest: str = ""
        self._pasting = False
        self._history: list[str] = []
        self._place: int = 0
        self._begun = ""
        """What was being written when one went back to older lines."""

    def feed(self, data: bytes) -> list[Action]:
        """Takes what was typed; what came of it, beside changes of the text."""
        waiting = self._rest + self._decode(data)
        actions: list[Action] = []
        while waiting:
            if self._pasting:
                waiting = self._paste(waiting)
                if self._pasting:
                    break
                continue
            if waiting[0] != "\x1b":
                self._type(waiting[0], actions)
                waiting = waiting[1:]
            elif (sequence := _ESCAPE.match(waiting)) is not None:
                waiting = waiting[sequence.end() :]
                self._obey(sequence[0])
            elif _INCOMPLETE.match(waiting):
                break
            else:
                waiting = waiting[1:]
        self._rest = waiting
        return actions

    def shown(self, columns: int) -> tuple[str, int]:
        """As much of the line as fits around the cursor, and the column of the cursor in it."""
        text = self.text.replace("\n", _NEW_LINE).replace("\t", " ")
        start = self.cursor
        used = 0
        # From the cursor to the left as far as there is room, then to the right.
        while start > 0 and used + width(text[start - 1]) < columns:
            start -= 1
            used += width(text[start])
        end, whole = self.cursor, used
        while end < len(text) and whole + width(text[end]) < columns:
            whole += width(text[end])
            end += 1
        return text[start:end], used

    def clear(self) -> None:
        self.text, self.cursor = "", 0

    def _type(self, char: str, actions: list[Action]) -> None:
        if char in ("\r", "\n"):
            actions.append(SubmittedLine(self._submit()))
        elif char == "\x03":
            actions.append(ControlKey.INTERRUPT)
        elif char == "\x04" and not self.text:
            actions.append(ControlKey.END)
        elif (command := _COMMANDS.get(char)) is not None:
            command(self)
        elif char >= " " and char != "\x7f":
            self._insert(char)

    def _insert(self, text: str) -> None:
        text = text[: max(0, _MOST_TEXT - len(self.text))]
        self.text = self.text[: self.cursor] + text + self.text[self.cursor :]
        self.cursor += len(text)

    def _paste(self, waiting: str) -> str:
        """Takes pasted text as one piece, once its end is there: a line break in it sends nothing."""
        end = waiting.find(_PASTE_ENDS)
        if end < 0:
            # Of what is too long the head is kept, and the tail that may be a part of its end.
            return waiting if len(waiting) <= 2 * _MOST_TEXT else waiting[:_MOST_TEXT] + waiting[-len(_PASTE_ENDS) :]
        self._pasting = False
        plain = waiting[:end].replace("\r\n", "\n").replace("\r", "\n")
        self._insert("".join(char for char in plain if char in "\n\t" or char.isprintable()))
        return waiting[end + len(_PASTE_ENDS) :]

    def _submit(self) -> str:
        text = self.text
        if text.strip() and (not self._history or self._history[-1] != text):
            self._history = [*self._history, text][-_MOST_HISTORY:]
        self._place = len(self._history)
        self.clear()
        return text

    def _obey(self, sequence: str) -> None:
        if sequence == _PASTE_BEGINS:
            self._pasting = True
        elif (command := _SEQUENCES.get(sequence)) is not None:
            command(self)

    # What keys do

    def left(self) -> None:
        self.cursor = max(0, self.cursor - 1)

    def right(self) -> None:
        self.cursor = min(len(self.text), self.cursor + 1)

    def home(self) -> None:
        self.cursor = 0

    def end(self) -> None:
        self.cursor = len(self.text)

    def back(self) -> None:
        if self.cursor:
            self.left()
            self.delete()

    def delete(self) -> None:
        self.text = self.text[: self.cursor] + self.text[self.cursor + 1 :]

    def cut_to_start(self) -> None:
        self.text, self.cursor = self.text[self.cursor :], 0

    def cut_to_end(self) -> None:
        self.text = self.text[: self.cursor]

    def cut_word(self) -> None:
        kept = re.sub(r"\S+\s*$", "", self.text[: self.cursor])
        self.text, self.cursor = kept + self.text[self.cursor :], len(kept)

    def older(self) -> None:
        if self._place == len(self._history):
            self._begun = self.text
        self._go_to(self._place - 1)

    def newer(self) -> None:
        self._go_to(self._place + 1)

    def _go_to(self, place: int) -> None:
        if 0 <= place <= len(self._history) and place != self._place:
            self._place = place
            self.text = self._history[place] if place < len(self._history) else self._begun
            self.end()


def width(char: str) -> int:
    """How many columns of a terminal a character takes."""
    if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


_Command = Callable[[LineEditor], None]

_COMMANDS: Final[dict[str, _Command]] = {
    "\x01": LineEditor.home,
    "\x02": LineEditor.left,
    "\x04": LineEditor.delete,
    "\x05": LineEditor.end,
    "\x06": LineEditor.right,
    "\x08": LineEditor.back,
    "\x0b": LineEditor.cut_to_end,
    "\x0e": LineEditor.newer,
    "\x10": LineEditor.older,
    "\x15": LineEditor.cut_to_start,
    "\x17": LineEditor.cut_word,
    "\x7f": LineEditor.back,
}
_SEQUENCES: Final[dict[str, _Command]] = {
    **dict.fromkeys(("\x1b[A", "\x1bOA"), LineEditor.older),
    **dict.fromkeys(("\x1b[B", "\x1bOB"), LineEditor.newer),
    **dict.fromkeys(("\x1b[C", "\x1bOC"), LineEditor.right),
    **dict.fromkeys(("\x1b[D", "\x1bOD"), LineEditor.left),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~"), LineEditor.home),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~"), LineEditor.end),
    "\x1b[3~": LineEditor.delete,
    "\x1b\x7f": LineEditor.cut_word,
}
