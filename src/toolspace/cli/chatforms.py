"""A question to a person, asked line by line until there is a result. Shows and sends nothing itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from toolspace.core import json_text
from toolspace.core.questions import ELICITATION

_YES: Final = frozenset(("y", "yes", "true", "1", "ok"))
_NO: Final = frozenset(("n", "no", "false", "0"))
_CONFIRMS: Final = re.compile(r"confirm|approv|permi|allow|consent|proceed", re.IGNORECASE)
"""Tools with such names ask for a yes or a no, where they do not say what they want."""
_BOOLEAN: Final[Mapping[str, Any]] = {"type": "boolean"}
_MOST_CHOICES: Final = 20


class Result(NamedTuple):
    """What the person said, as the tool wants it."""

    value: Any


class Again(NamedTuple):
    """Why a line was not taken."""

    reason: str


class Field(NamedTuple):
    """One thing to ask for. Without a name it is the whole result."""

    name: str | None
    schema: Mapping[str, Any]
    required: bool = True

    @property
    def choices(self) -> Sequence[Any]:
        found: Any = self.schema.get("enum")
        if isinstance(found, list):
            return cast("list[Any]", found)
        options: Any = self.schema.get("oneOf")
        if isinstance(options, list):
            named = cast("list[Any]", options)
            return [one["const"] for one in named if isinstance(one, dict) and "const" in one]
        return ()

    @property
    def prompt(self) -> str:
        """What to show in front of the answer."""
        label = self.schema.get("title") or self.name or ""
        if self.type == "boolean":
            usual = self.schema.get("default")
            hint = " [Y/n]" if usual is True else " [y/N]" if usual is False else " [y/n]"
        elif "default" in self.schema:
            hint = f" [{_text(self.schema['default'])}]"
        else:
            hint = "" if self.required else " (may be empty)"
        return f"{label}{hint}> ".lstrip()

    @property
    def explanation(self) -> str:
        """What to say before it is asked for; empty where the prompt says it all."""
        said = str(self.schema.get("description") or "")
        listed = [f"  {number}) {_text(one)}" for number, one in enumerate(self.choices[:_MOST_CHOICES], 1)]
        return "\n".join([*([said] if said else []), *listed])

    @property
    def type(self) -> str | None:
        """The one type that it has, null aside."""
        named: Any = self.schema.get("type")
        kinds = [one for one in cast("list[Any]", named) if one != "null"] if isinstance(named, list) else [named]
        return kinds[0] if len(kinds) == 1 else None

    def read(self, line: str) -> Result | Again | None:
        """The value that a line means; None where it is left out."""
        text = line.strip()
        if not text:
            if "default" in self.schema:
                return Result(self.schema["default"])
            return Again("an answer is needed here") if self.required else None
        if self.choices:
            return self._choose(text)
        if self.type == "boolean":
            word = text.lower()
            return Result(word in _YES) if word in _YES | _NO else Again("y or n")
        if self.type in ("integer", "number"):
            return self._number(text)
        if self.type == "string":
            return Result(line)
        return self._json(text, line)

    def _choose(self, text: str) -> Result | Again:
        choices = self.choices
        for one in choices:
            if _text(one).lower() == text.lower():
                return Result(one)
        if text.isdecimal() and len(text) < 6 and 1 <= int(text) <= len(choices):
            return Result(choices[int(text) - 1])
        return Again(f"one of {', '.join(map(_text, choices[:_MOST_CHOICES]))}, or its number")

    def _number(self, text: str) -> Result | Again:
        try:
            value = json_text.decode(text)
        except ValueError:
            value = None
        whole = self.type == "integer"
        fits = isinstance(value, int) if whole else isinstance(value, int | float)
        return (
            Result(value) if fits and not isinstance(value, bool) else Again("a whole number" if whole else "a number")
        )

    def _json(self, text: str, line: str) -> Result | Again:
        try:
            return Result(json_text.decode(text))
        except ValueError:
            kind = {"array": "[…]", "object": "{…}"}.get(self.type or "")
            return Result(line) if kind is None else Again(f"JSON: {kind}")


class Form:
    """A question: its fields one after the other, then the result of all."""

    def __init__(self, fields: Sequence[Field], *, wraps: bool = False) -> None:
        """`wraps`: the result is an answer to a question of an MCP server."""
        self._fields = [*fields]
        self._at = 0
        self._given: dict[str, Any] = {}
        self._wraps = wraps

    @property
    def field(self) -> Field:
        return self._fields[self._at]

    def take(self, line: str) -> Result | Again | None:
        """The result, once the last field is answered; None where there is another one to ask for."""
        said = self.field.read(line)
        if isinstance(said, Again):
            return said
        name = self.field.name
        if name is None:
            return self._whole(said.value if said is not None else None)
        if said is not None:
            self._given[name] = said.value
        self._at += 1
        return self._whole(self._given) if self._at == len(self._fields) else None

    def _whole(self, value: Any) -> Result:
        if not self._wraps:
            return Result(value)
        if isinstance(value, bool):
            return Result({"action": "accept" if value else "decline"})
        return Result({"action": "accept", "content": value})

    @property
    def refusal(self) -> Result | None:
        """What it means to answer nothing, where that can be said."""
        return Result({"action": "decline"}) if self._wraps else None


def form_of(tool: str, asked: Any, output_schema: Mapping[str, Any] | None) -> Form:
    """How a person answers a tool: as its output schema says, else as its name suggests."""
    given: Mapping[str, Any] = cast("dict[str, Any]", asked) if isinstance(asked, dict) else {}
    if tool == ELICITATION:
        schema: Any = given.get("requestedSchema")
        return Form(_fields(schema) or [Field(None, _BOOLEAN)], wraps=True)
    if output_schema:
        return Form(_fields(output_schema) or [Field(None, output_schema)])
    if _CONFIRMS.search(tool):
        return Form([Field("confirmed", {**_BOOLEAN, "title": " "})])
    return Form([Field(None, {})])


def _fields(schema: Any) -> list[Field]:
    """The members of an object that are asked for; none where it is no object with known members."""
    members: Any = cast("dict[str, Any]", schema).get("properties") if isinstance(schema, dict) else None
    if not isinstance(members, dict):
        return []
    named: Any = cast("dict[str, Any]", schema).get("required")
    required = cast("list[Any]", named) if isinstance(named, list) else []
    return [
        Field(name, cast("dict[str, Any]", one) if isinstance(one, dict) else {}, name in required)
        for name, one in cast("dict[str, Any]", members).items()
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json_text.encode(value)
