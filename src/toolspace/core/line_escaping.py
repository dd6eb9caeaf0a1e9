"""Escapes texts of other people or programs for a line that a model or an operator reads.

The text can neither end the line nor be mistaken for another part of it. Inbox lines, agents and logs use it.
"""

from __future__ import annotations

import re
from typing import Final

from toolspace.core import json_text

MAX_NAME: Final = 200
_PLAIN_NAME: Final = re.compile(r"[\w.,'&@/+#-]+(?: [\w.,'&@/+#-]+)*")
_LINE_BREAKS: Final = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x7f\x85\u2028\u2029"}
"""Characters that end a line or move the cursor, and that JSON does not escape."""


def quote(value: object) -> str:
    """Returns data as JSON in one line, for every definition of a line end."""
    text = json_text.encode(value)
    return text if text.isascii() and "\x7f" not in text else text.translate(_LINE_BREAKS)


def quote_truncated(value: object, max_characters: int, hint: str = "") -> str:
    """Returns data as JSON in one line. A longer text is cut and says so; `hint` tells how to get the rest."""
    text = value if isinstance(value, str) else json_text.encode(value)
    if len(text) <= max_characters:
        return quote(value)
    notice = f"cut off after {max_characters} of {len(text)} characters{hint and '; '}{hint}"
    return quote(f"{text[:max_characters]}… ({notice})")


def quote_name(name: object) -> str:
    """Returns a name as it is if it consists of words, else in quotes, so that its end is visible."""
    text = name if isinstance(name, str) else json_text.encode(name)
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 2 * MAX_NAME]).split())
    if len(text) > MAX_NAME:
        text = f"{text[:MAX_NAME]}…"
    return text if _PLAIN_NAME.fullmatch(text) else quote(text)


def single_line(text: str, max_characters: int | None = None) -> str:
    """Returns a text as it is if it is one line, else in quotes. A longer text is cut."""
    if max_characters is not None and len(text) > max_characters:
        text = f"{text[:max_characters]}…"
    return text if text.isprintable() else quote(text)
