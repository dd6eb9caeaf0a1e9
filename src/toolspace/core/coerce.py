"""Mends arguments where the schema makes the meaning plain: `"5"` for an integer. Decides nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from toolspace.core import json_text

Schema = Mapping[str, Any]
Places = dict[str | int, "Places | None"]
"""The places that a check found wrong, as a tree: `{"a": {0: None}}` is `a[0]`. None means all of it."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": True, "false": False}
_DEPTH = 32
_STEPS = 50_000
"""A schema that refers to itself in several ways has more paths than anyone can walk; so has a huge value."""


def coerce(schema: Schema, value: object, wrong: Places | None = None) -> object:
    """The value with every plain misunderstanding mended; the rest is left as it is for the check to name.

    What lies outside the places that are `wrong` is not touched: it is right as it is.
    """
    return _Mender(schema).mend(schema, value, wrong, 0)


def add_place(wrong: Places | None, path: Sequence[str | int]) -> Places | None:
    """The tree with one more place in it."""
    if wrong is None or not path:
        return None
    node = wrong
    for step in path[:-1]:
        inside = node.setdefault(step, {})
        if inside is None:
            return wrong
        node = inside
    node[path[-1]] = None
    return wrong


class _Mender:
    """Mends one value, within a bounded number of steps."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = _STEPS

    def mend(self, schema: object, value: object, wrong: Places | None, depth: int) -> object:
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > _DEPTH or self._left < 0:
            return value
        here = _follow(cast("Schema", schema), self._root)
        for keyword in ("anyOf", "oneOf"):
            options = here.get(keyword)
            if isinstance(options, list):
                value = self._one_of(cast("list[object]", options), value, wrong, depth)
        for part in _list(here, "allOf"):
            value = self.mend(part, value, wrong, depth + 1)
        wanted = _types(here)
        if wanted and not _fits(value, wanted):
            value = _convert(value, wanted)
            wrong = None
        if isinstance(value, dict):
            return self._object(here, cast("dict[str, object]", value), wrong, depth)
        if isinstance(value, list) and "items" in here:
            items, inside = here["items"], cast("list[object]", value)
            return [
                self.mend(items, item, wrong and wrong[index], depth + 1) if wrong is None or index in wrong else item
                for index, item in enumerate(inside)
            ]
        return cast("object", value)

    def _object(self, schema: Schema, value: dict[str, object], wrong: Places | None, depth: int) -> dict[str, object]:
        properties = cast("Mapping[str, object]", schema.get("properties") or {})
        required = _list(schema, "required")
        rest = schema.get("additionalProperties")
        mended: dict[str, object] = {}
        for name, item in value.items():
            if wrong is not None and name not in wrong:
                mended[name] = item
                continue
            known = properties.get(name, rest)
            if item is None and name in properties and name not in required and not _takes_null(known, self._root):
                continue  # Models write null for "leave it out".
            mended[name] = self.mend(known, item, wrong and wrong[name], depth + 1)
        return mended

    def _one_of(self, options: list[object], value: object, wrong: Places | None, depth: int) -> object:
        followed = [_follow(cast("Schema", option), self._root) for option in options if isinstance(option, Mapping)]
        fitting = [option for option in followed if not _types(option) or _fits(value, _types(option))]
        for option in sorted(fitting, key=lambda option: not _plausible(option, value)) or followed:
            mended = self.mend(option, value, wrong, depth + 1)
            types = _types(option)
            if not types or _fits(mended, types):
                return mended
        return value


def _plausible(option: Schema, value: object) -> bool:
    """Whether an object may be meant as this option: what tells the options apart (`kind`) is right."""
    if not isinstance(value, Mapping):
        return True
    inside = cast("Mapping[object, object]", value)
    if any(name not in inside for name in _list(option, "required")):
        return False
    properties = cast("Mapping[str, object]", option.get("properties") or {})
    for name, schema in properties.items():
        if name in inside and isinstance(schema, Mapping):
            marks = cast("Schema", schema)
            if "const" in marks and marks["const"] != inside[name]:
                return False
            if "enum" in marks and inside[name] not in _list(marks, "enum"):
                return False
    return True


def _convert(value: object, wanted: frozenset[str]) -> object:
    if isinstance(value, str):
        text = value.strip()
        if "boolean" in wanted and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        if "integer" in wanted and _INTEGER.fullmatch(text):
            return int(text)
        if "number" in wanted and _NUMBER.fullmatch(text) and math.isfinite(number := float(text)):
            return number
        if "null" in wanted and text.lower() in ("null", "none", ""):
            return None
        if (text[:1] == "{" and "object" in wanted) or (text[:1] == "[" and "array" in wanted):
            try:
                return json_text.decode(text)
            except ValueError:
                return value
    elif isinstance(value, float) and "integer" in wanted and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _takes_null(schema: object, root: Schema, depth: int = 0) -> bool:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return True
    here = _follow(cast("Schema", schema), root)
    for keyword in ("anyOf", "oneOf"):
        options = here.get(keyword)
        if isinstance(options, list):
            return any(_takes_null(option, root, depth + 1) for option in cast("list[object]", options))
    if "enum" in here:
        return None in _list(here, "enum")
    types = _types(here)
    return not types or "null" in types


def _follow(schema: Schema, root: Schema) -> Schema:
    for _ in range(_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: object = root
        for step in reference[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or step not in target:
                return schema
            target = cast("object", target[step])
        if not isinstance(target, Mapping):
            return schema
        schema = cast("Schema", target)
    return schema


def _list(schema: Schema, keyword: str) -> list[object]:
    found = schema.get(keyword)
    return cast("list[object]", found) if isinstance(found, list) else []


def _types(schema: Schema) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    return frozenset(cast("list[str]", kind)) if isinstance(kind, list) else frozenset()


def _fits(value: object, wanted: frozenset[str]) -> bool:
    match value:
        case None:
            return "null" in wanted
        case bool():
            return "boolean" in wanted
        case int():
            return "integer" in wanted or "number" in wanted
        case float():
            return "number" in wanted
        case str():
            return "string" in wanted
        case list():
            return "array" in wanted
        case Mapping():
            return "object" in wanted
        case _:
            return False
