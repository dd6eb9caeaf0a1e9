"""What others have written, as a part of a line that a model reads: it can neither end the line nor pass for another.

Knows nothing of what the lines are about.
"""

from __future__ import annotations

import re
from typing import Final

from toolspace.core import json_text

LONGEST_NAME: Final = 200
_PLAIN_NAME: Final = re.compile(r"[\w.,'&@/+#-]+(?: [\w.,'&@/+#-]+)*")
_BREAKS: Final = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x7f\x85\u2028\u2029"}
"""What ends lines, or moves a cursor, and JSON lets stand as it is."""


def quote(value: object) -> str:
    """Data as JSON, in one line whatever a reader takes for the end of one."""
    text = json_text.encode(value)
    return text if text.isascii() and "\x7f" not in text else text.translate(_BREAKS)


def quote_truncated(value: object, max_characters: int, hint: str = "") -> str:
    """The same; of more than `most` characters the beginning, as a text that says so, and `way` how to get the rest."""
    text = value if isinstance(value, str) else json_text.encode(value)
    if len(text) <= max_characters:
        return quote(value)
    return quote(
        f"{text[:max_characters]}… (cut off after {max_characters} of {len(text)} characters{hint and '; '}{hint})"
    )


def quote_name(name: object) -> str:
    """A name: as it is where it is made of words alone, else in quotes, so that it shows where it ends."""
    text = name if isinstance(name, str) else json_text.encode(name)
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 2 * LONGEST_NAME]).split())
    if len(text) > LONGEST_NAME:
        text = f"{text[:LONGEST_NAME]}…"
    return text if _PLAIN_NAME.fullmatch(text) else quote(text)


def single_line(text: str, max_characters: int | None = None) -> str:
    """A text: as it is where it is one line, else in quotes. Of more than `most` characters only the beginning."""
    if max_characters is not None and len(text) > max_characters:
        text = f"{text[:max_characters]}…"
    return text if text.isprintable() else quote(text)
