"""What a rule of the demo is made of: a script that yields the calls it wants, one by one, and is sent their answers.

It depends on nothing else: the same answers lead to the same calls, so that it can be run again up to any place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, NamedTuple, TypeVar, cast

from toolspace.core import json_text

T = TypeVar("T")

MOST_LISTED: Final = 30
"""Lines of a list that are said."""


class Want(NamedTuple):
    """A tool call that a script wants."""

    name: str
    arguments: Mapping[str, Any]


class Heard(NamedTuple):
    """What came of it."""

    text: str
    failed: bool = False

    @property
    def data(self) -> Mapping[str, Any]:
        """The answer as an object; empty where it is none."""
        try:
            found = json_text.decode(self.text)
        except ValueError:
            return {}
        return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}

    @property
    def reason(self) -> str:
        """Why it failed, without the words around it."""
        return self.text.removeprefix("(tool failed: ").removesuffix(")")


class Request(NamedTuple):
    """What a person said in a space, and where the demo's files are."""

    text: str
    space_id: str
    folder: str | None


Script = Generator[Want, Heard, T]
Rule = Callable[[Request, "re.Match[str]"], Script[None]]


def say(text: str) -> Script[Heard]:
    return (yield Want("send_message", {"text": text}))
