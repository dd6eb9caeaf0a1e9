"""Names of arguments that every model accepts, and the way back to the names of the tool.

Providers of models refuse a whole request if one property of one tool has a key such as `filter[x]`. Models get another
name for it, and the orchestrator restores the tool's own name before it validates a call. `Tool.argument_names` has the
names of a tool; it is None for nearly all tools, whose calls pay nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from toolspace.core import json_text
from toolspace.core.schema_parts import (
    IN_PLACE_KEYWORDS,
    JsonSchema,
    References,
    as_list,
    as_names,
    as_schema,
    is_list,
    is_schema,
    list_types,
    walk_schemas,
)

MAX_NAME_LENGTH = 64
_MODEL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_REFUSED_CHARACTERS = re.compile(r"[^a-zA-Z0-9_.-]+")
_CHECKSUM_LENGTH = 9
_MAX_DEPTH = 100
_MAX_STEPS = 100_000
"""A limit on the work for one call: a hostile schema may have very many parts that describe one value."""


def is_model_name(name: str) -> bool:
    """Whether every model accepts a property of this name."""
    return _MODEL_NAME.fullmatch(name) is not None


class ArgumentNames:
    """The names for models of one tool's arguments, at any depth of its schema."""

    __slots__ = ("_names_by_model_name", "_references", "_schema", "_shapes", "model_names")

    def __init__(self, schema: JsonSchema, model_names: Mapping[str, str]) -> None:
        self.model_names = model_names
        """The tool's name of a property → the name for models. No model name is a property of the tool."""
        self._schema = schema
        self._references = References(schema)
        self._names_by_model_name = {model_name: name for name, model_name in model_names.items()}
        self._shapes: dict[tuple[int, ...], _Shape] = {}

    @classmethod
    def of(cls, schema: JsonSchema) -> ArgumentNames | None:
        """Returns the names for a schema; None if models accept all of its names."""
        names = _property_names(schema)
        refused_names = [name for name in names if not is_model_name(name)]
        return cls(schema, _choose_names(refused_names, names)) if refused_names else None

    def restore(self, arguments: Mapping[str, Any] | str | bytes) -> Mapping[str, Any] | str | bytes:
        """Returns arguments of a model under the tool's names. What is no JSON object is returned unchanged.

        A key stays if the object also has the tool's name, or if its schema does not declare that name there.
        """
        try:
            values = json_text.parse_arguments(arguments)
        except ValueError:
            return arguments  # Validation reports what is wrong.
        return cast("Mapping[str, Any]", _Restoration(self).restore(values, (self._schema,), 0))

    def shape_of(self, parts: tuple[JsonSchema, ...]) -> _Shape:
        """Returns what the schemas of one value say about its keys and items."""
        key = tuple(map(id, parts))
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) > 1_000:
                self._shapes.clear()
            shape = self._shapes[key] = self._build_shape(parts)
        return shape

    @property
    def root_parts(self) -> tuple[JsonSchema, ...]:
        return (self._schema,)

    def _build_shape(self, parts: Iterable[JsonSchema]) -> _Shape:
        all_parts = self._list_in_place_parts(parts)
        names: dict[str, list[JsonSchema]] = {}
        other_parts: list[JsonSchema] = []
        items: list[JsonSchema] = []
        for part in all_parts:
            for name in _declared_names(part):
                names.setdefault(name, [])
            for name, schema in as_schema(part.get("properties")).items():
                names.setdefault(name, []).append(as_schema(schema))
            patterns = as_schema(part.get("patternProperties")).values()
            more = (part.get("additionalProperties"), part.get("unevaluatedProperties"))
            other_parts += [as_schema(schema) for schema in (*patterns, *more) if is_schema(schema)]
            candidates = [
                *as_list(part.get("prefixItems")),
                *(as_list(part.get("items")) or [part.get("items")]),
                part.get("additionalItems"),
                part.get("unevaluatedItems"),
                part.get("contains"),
            ]
            items += [as_schema(schema) for schema in candidates if is_schema(schema)]
        renames = {
            self.model_names[name]: name
            for name in names
            if name in self.model_names  # A model name is never a declared name.
        }
        types = {type for part in all_parts for type in list_types(part)}
        return _Shape(
            renames,
            {name: tuple(schemas) for name, schemas in names.items()},
            tuple(other_parts),
            tuple(items),
            is_text=not types or "string" in types,
        )

    def _list_in_place_parts(self, parts: Iterable[JsonSchema]) -> list[JsonSchema]:
        """Returns the schemas that may all describe one value: with references followed, and all alternatives."""
        result: dict[int, JsonSchema] = {}
        stack = list(parts)
        while stack:
            part = stack.pop()
            if id(part) in result:
                continue
            result[id(part)] = part
            references = [part[keyword] for keyword in ("$ref", "$dynamicRef") if keyword in part]
            stack.extend(as_schema(self._references.resolve(reference)) for reference in references)
            for keyword in IN_PLACE_KEYWORDS:
                stack.extend(map(as_schema, as_list(part.get(keyword))))
            stack.extend(as_schema(part.get(keyword)) for keyword in ("if", "then", "else") if keyword in part)
            stack.extend(map(as_schema, as_schema(part.get("dependentSchemas")).values()))
        return list(result.values())


class _Shape(NamedTuple):
    """What the schemas of one value say about it."""

    renames: Mapping[str, str]
    properties: Mapping[str, tuple[JsonSchema, ...]]
    other_parts: tuple[JsonSchema, ...]
    """The schemas of properties that are not declared."""
    items: tuple[JsonSchema, ...]
    is_text: bool
    """Whether the value may be a text."""

    def parts_of(self, name: str) -> tuple[JsonSchema, ...]:
        return self.properties.get(name) or self.other_parts


class _Restoration:
    """Restores the names in the arguments of one call, in a bounded number of steps."""

    def __init__(self, names: ArgumentNames) -> None:
        self._names = names
        self._remaining_steps = _MAX_STEPS

    def restore(self, value: object, parts: tuple[JsonSchema, ...], depth: int) -> object:
        self._remaining_steps -= len(parts) + 1
        if not parts or depth > _MAX_DEPTH or self._remaining_steps < 0:
            return value
        if isinstance(value, str) and value[:1] in ("{", "["):
            value = self._parse_text(value, parts)
        if isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            shape = self._names.shape_of(parts)
            result: dict[str, object] = {}
            for key, item in fields.items():
                name = shape.renames.get(key, key)
                if name in fields:
                    name = key
                result[name] = self.restore(item, shape.parts_of(name), depth + 1)
            return result
        if is_list(value):
            items = self._names.shape_of(parts).items
            return [self.restore(item, items, depth + 1) for item in cast("list[object]", value)] if items else value
        return cast("object", value)

    def _parse_text(self, text: str, parts: tuple[JsonSchema, ...]) -> object:
        """Returns the object that a model has written as text; the text itself where a text is expected."""
        if self._names.shape_of(parts).is_text:
            return text
        try:
            return json_text.decode(text)
        except ValueError:
            return text


class StreamedNames:
    """Restores the names in the JSON text of arguments while a model writes it."""

    __slots__ = ("_frames", "_is_escaped", "_is_key", "_names", "_text")

    def __init__(self, names: ArgumentNames) -> None:
        self._names = names
        self._frames: list[_Frame] = []
        self._text: list[str] | None = None
        """The characters of the key that is being read."""
        self._is_key: bool | None = None
        """Whether the text that is being read is a key; None outside of texts."""
        self._is_escaped = False

    def feed(self, piece: str) -> str:
        """Returns the next piece of the text. A key is returned when it is complete."""
        output: list[str] = []
        for character in piece:
            if self._is_key is None:
                self._read_structure(character)
                if self._is_key:
                    self._text = [character]
                else:
                    output.append(character)
                continue
            (output if self._text is None else self._text).append(character)
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                if self._text is not None:
                    output.append(self._end_key("".join(self._text)))
                    self._text = None
                self._is_key = None
        return "".join(output)

    def _read_structure(self, character: str) -> None:
        frame = self._frames[-1] if self._frames else None
        if character == '"':
            self._is_key = frame is not None and frame.expects_key
        elif character in "{[" and len(self._frames) < _MAX_DEPTH:
            self._frames.append(_Frame(self._parts_of_value(frame), is_object=character == "{"))
        elif character in "}]" and frame is not None:
            self._frames.pop()
        elif frame is not None and character == ",":
            frame.expects_key = frame.is_object
        elif frame is not None and character == ":":
            frame.expects_key = False

    def _parts_of_value(self, frame: _Frame | None) -> tuple[JsonSchema, ...]:
        if frame is None:
            return self._names.root_parts
        shape = self._names.shape_of(frame.parts)
        return shape.parts_of(frame.key) if frame.is_object else shape.items

    def _end_key(self, text: str) -> str:
        frame = self._frames[-1]
        try:
            key: Any = json_text.decode(text)
        except ValueError:
            return text
        name = self._names.shape_of(frame.parts).renames.get(key, key)
        if name in frame.keys:
            name = key
        frame.key = name
        frame.keys.add(name)
        return text if name == key else json_text.encode(name)


class _Frame:
    """An object or an array of which the end has not been read."""

    __slots__ = ("expects_key", "is_object", "key", "keys", "parts")

    def __init__(self, parts: tuple[JsonSchema, ...], *, is_object: bool) -> None:
        self.parts = parts
        self.is_object = is_object
        self.expects_key = is_object
        self.key = ""
        self.keys: set[str] = set()


def _declared_names(schema: JsonSchema) -> Iterable[str]:
    """Yields the names of properties that one schema names, wherever it does, without those of schemas inside it."""
    yield from as_schema(schema.get("properties"))
    yield from as_names(schema.get("required"))
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, names in as_schema(schema.get(keyword)).items():
            yield name
            yield from as_names(names)


def _property_names(schema: JsonSchema) -> dict[str, None]:
    names: dict[str, None] = {}
    for part in walk_schemas(schema):
        if "properties" in part or "required" in part or "dependentRequired" in part or "dependentSchemas" in part:
            names.update((name, None) for name in _declared_names(part) if isinstance(cast("object", name), str))
    return names


def _choose_names(refused_names: Iterable[str], all_names: Iterable[str]) -> dict[str, str]:
    """Returns a name for each refused one. It follows from the names alone, not from their order."""
    plain_names = {name: _plain_name(name) for name in refused_names}
    uses: dict[str, int] = {}
    for name in (*plain_names.values(), *all_names):
        uses[name] = uses.get(name, 0) + 1
    return {
        name: plain_name if plain_name and uses[plain_name] == 1 else _unique_name(name, plain_name, uses)
        for name, plain_name in sorted(plain_names.items())
    }


def _plain_name(name: str) -> str:
    """`filter[x]` → `filter_x`; "" if too little of the name is left."""
    import unicodedata  # Imported here: few tools have such names.

    ascii_text = unicodedata.normalize("NFKD", name[:1_000]).encode("ascii", "ignore").decode()
    plain_name = _REFUSED_CHARACTERS.sub("_", ascii_text).strip("_")
    return plain_name if len(plain_name) <= MAX_NAME_LENGTH else ""


def _unique_name(name: str, plain_name: str, uses: dict[str, int]) -> str:
    prefix = plain_name or _plain_name(name[:MAX_NAME_LENGTH]) or "field"
    import zlib  # Imported here: few tools have such names.

    checksum = zlib.crc32(name.encode("utf-8", "replace"))
    while True:
        unique_name = f"{prefix[: MAX_NAME_LENGTH - _CHECKSUM_LENGTH]}_{checksum:08x}"
        if unique_name not in uses:
            uses[unique_name] = 1
            return unique_name
        checksum = (checksum + 1) & 0xFFFFFFFF
