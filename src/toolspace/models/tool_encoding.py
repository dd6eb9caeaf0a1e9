"""Tools as the bytes of a request, made once for the same tools. Sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.export import ToolFormat, export_tools
from toolspace.core.tool import Tool

_CHOICES = ("oneOf", "anyOf", "allOf")
_REFUSED = (*_CHOICES, "not", "enum", "if", "then", "else")
"""What providers do not take at the top of a tool's schema, only inside."""
_REMEMBERED = 16
_BRIEF = 1000
"""Characters of a description that even the strictest provider takes."""

Finish = Callable[[list[dict[str, Any]]], Any]
"""What a provider makes of the list of definitions."""


class Encoded(msgspec.Struct, frozen=True):
    """Tools as a request has them."""

    tools: tuple[Tool, ...]
    raw: msgspec.Raw
    names: frozenset[str]


class Toolbox:
    """Remembers what it made of tuples of tools, by identity: the same agent asks with the same tuple."""

    __slots__ = ("_finish", "_format", "_made")

    def __init__(self, format: ToolFormat, finish: Finish | None = None) -> None:
        self._format: ToolFormat = format
        self._finish = finish
        self._made: dict[tuple[int, bool], Encoded] = {}

    def encode(self, tools: tuple[Tool, ...], *, brief: bool = False) -> Encoded:
        key = (id(tools), brief)
        found = self._made.get(key)
        if found is not None:  # It holds the tuple, so the id cannot have become another's.
            return found
        exported = [_accepted(one, brief=brief) for one in export_tools(tools, self._format)]
        made: Any = exported if self._finish is None else self._finish(exported)
        if len(self._made) >= _REMEMBERED:
            del self._made[next(iter(self._made))]
        raw = msgspec.Raw(json_text.encode_bytes(made))
        self._made[key] = Encoded(tools, raw, frozenset(tool.name for tool in tools))
        return self._made[key]


def object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that is plainly an object at its top, as providers want it.

    Alternatives at the top become one object with all their properties, of which those are required that each of
    them requires. The model may then write what the tool refuses; it hears of that and writes again.
    """
    kind = schema.get("type")
    if kind == "object" and not any(word in schema for word in _REFUSED):
        return schema if "properties" in schema else {**schema, "properties": {}}
    made = {key: value for key, value in schema.items() if key not in _REFUSED}
    properties: dict[str, Any] = dict(_mapping(schema.get("properties")))
    required: list[str] = list(schema.get("required") or ())
    for word in _CHOICES:
        options = [_mapping(one) for one in cast("list[Any]", schema.get(word) or [])]
        demanded = [set[str](one.get("required") or ()) for one in options]
        for one in options:
            for name, value in _mapping(one.get("properties")).items():
                properties.setdefault(name, value)
        if demanded:
            shared = demanded[0].union(*demanded) if word == "allOf" else demanded[0].intersection(*demanded)
            required += sorted(shared - set(required))
    made |= {"type": "object", "properties": properties}
    if required:
        made["required"] = required
    if made.get("additionalProperties") is False and len(properties) > len(_mapping(schema.get("properties"))):
        del made["additionalProperties"]
    return made


def _accepted(definition: dict[str, Any], *, brief: bool) -> dict[str, Any]:
    inner: dict[str, Any] = definition.get("function") or definition
    for key in ("parameters", "input_schema"):
        if key in inner:
            inner[key] = object_schema(inner[key])
    if brief and len(inner["description"]) > _BRIEF:
        inner["description"] = f"{inner['description'][:_BRIEF]}…"
    return definition


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
