"""Turns a document's schemas into JSON Schema 2020-12 that stands alone. Knows nothing of operations.

A `$ref` stays one: to `#/$defs/…` of the schema that it is part of. What it means is converted once, whoever uses it,
so a thousand tools share the definitions that they have in common, and circles need no thought.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from toolspace.core import json_text
from toolspace.core.names import digest
from toolspace.providers.openapi import keywords
from toolspace.providers.openapi.document import Broken, Document, Json, Source, Target, mapping, members

View = Literal["request", "response"]
Refs = dict[str, None]
"""The definitions that a schema refers to, in the order in which it does."""

MAX_DEFINITIONS = 2000
"""In one schema: more is a mistake, and no model could read it."""

_COMPONENT = "#/components/schemas/"
_CLEAN = re.compile(r"[A-Za-z0-9_.-]+")
_UNCLEAN = re.compile(r"[^A-Za-z0-9_.-]+")
_NOTHING: frozenset[str] = frozenset()


class Definition(NamedTuple):
    """A schema that has a place of its own, converted, and what it refers to."""

    schema: Any
    refs: Refs


class Schemas:
    """The schemas of one document, as a request or as a response shows them."""

    def __init__(self, document: Document, view: View) -> None:
        self.document = document
        self._hidden = "readOnly" if view == "request" else "writeOnly"
        self._names: dict[str, str] = {}
        self._targets: dict[str, Target] = {}
        self._definitions: dict[str, Definition | Broken] = {}

    def convert(self, node: Any, source: Source, refs: Refs, without: frozenset[str] = _NOTHING) -> Any:
        """The schema in JSON Schema 2020-12. Adds what it refers to. Raises `Broken`.

        `without` are properties that a schema around this one hides, so that it cannot require them.
        """
        if isinstance(node, bool):
            return node
        given = mapping(node)
        if given is None:
            raise Broken(f"expected a schema, got {json_text.describe(node)}")
        if "$ref" in given:
            reference = self._reference(given["$ref"], source, refs)
            if self.document.dialect == "3.0" or len(given) == 1:
                return reference
            given = {key: value for key, value in given.items() if key != "$ref"}
            return reference | self._object(given, source, refs, without)
        return self._object(given, source, refs, without)

    def definitions(self, refs: Iterable[str]) -> Json:
        """`$defs` for a schema that refers to these: they, and all that they lead to. Raises `Broken`."""
        found: Json = {}
        pending = list(refs)
        while pending:
            name = pending.pop()
            if name in found:
                continue
            if len(found) >= MAX_DEFINITIONS:
                raise Broken(f"its schema needs more than {MAX_DEFINITIONS} definitions")
            definition = self.meant_by(name)
            found[name] = definition.schema
            pending.extend(definition.refs)
        return dict(sorted(found.items()))

    def meant_by(self, name: str) -> Definition:
        """What stands under a name in `$defs`. Raises `Broken`."""
        found = self._definitions.get(name)
        if found is None:
            target = self._targets[name]
            refs: Refs = {}
            try:
                found = Definition(self.convert(target.node, target.source, refs), refs)
            except Broken as error:
                found = Broken(f"in {target.key}: {error}")
            except RecursionError:
                found = Broken(f"in {target.key}: it is nested too deeply")
            self._definitions[name] = found
        if isinstance(found, Broken):
            raise found
        return found

    def definition(self, node: Any, source: Source) -> Definition:
        """A schema with the reference that it may be replaced by what that means. Raises `Broken`."""
        target = source.follow(node)
        if target.key:
            return self.meant_by(self._names.get(target.key) or self._name(target))
        refs: Refs = {}
        return Definition(self.convert(node, source, refs), refs)

    def is_hidden(self, node: Any, source: Source) -> bool:
        """Whether a property is not for this view: read-only ones are no part of a request."""
        said = mapping(node)
        if said is not None and "$ref" in said:
            said = mapping(source.target(said["$ref"]).node)
        return said is not None and said.get(self._hidden) is True

    def _object(self, node: Json, source: Source, refs: Refs, without: frozenset[str]) -> Json:
        out: Json = {}
        if "allOf" in node:
            without = without | self._hidden_names(node, source, set())
        for key, value in node.items():
            if (fits := keywords.PLAIN.get(key)) is not None:
                if fits(value):
                    out[key] = value
            elif key == "type":
                self._type(value, out)
            elif key == "properties":
                out[key], dropped = self._properties(value, source, refs)
                without = without | dropped if dropped else without
            elif key in keywords.ONE:
                self._one(key, value, source, refs, out)
            elif key in keywords.SEVERAL:
                if parts := members(value):
                    hidden = without if key == "allOf" else _NOTHING
                    out[key] = [self.convert(part, source, refs, hidden) for part in parts]
            elif key in keywords.NAMED:
                if named := mapping(value):
                    out[key] = {
                        name: self.convert(part, source, refs)
                        for name, part in named.items()
                        if key != "patternProperties" or keywords.is_pattern(name)
                    }
            elif key == "pattern":
                if isinstance(value, str) and keywords.is_pattern(value):
                    out[key] = value
            elif key == "example":
                if keywords.is_short(value):
                    out["examples"] = [value]
            elif key == "examples" and isinstance(value, list):
                out[key] = [one for one in members(value)[:3] if keywords.is_short(one)]
        if "required" in node:
            _require(node["required"], without, out)
        for limit, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if node.get(strict) is True and limit in out:  # As 3.0 writes it.
                out[strict] = out.pop(limit)
        return _with_null(out) if node.get("nullable") is True else out

    def _reference(self, ref: Any, source: Source, refs: Refs) -> Json:
        target = source.target(ref)
        name = self._names.get(target.key) or self._name(target)
        refs[name] = None
        return {"$ref": f"#/$defs/{name}"}

    def _name(self, target: Target) -> str:
        """A name that depends on nothing but the place, so that it never changes with what else is used."""
        plain = target.key.removeprefix(_COMPONENT)
        if target.key == plain or not _CLEAN.fullmatch(plain):
            last = _UNCLEAN.sub("_", target.key.rpartition("/")[2]) or "schema"
            plain = f"{last}_{digest(target.key)}"
        while plain in self._targets:
            plain += "_"
        self._names[target.key] = plain
        self._targets[plain] = target
        return plain

    def _properties(self, value: Any, source: Source, refs: Refs) -> tuple[Json, frozenset[str]]:
        named = mapping(value)
        if named is None:
            raise Broken(f"expected properties by name, got {json_text.describe(value)}")
        kept: Json = {}
        dropped: set[str] = set()
        for name, part in named.items():
            if self.is_hidden(part, source):
                dropped.add(name)
            else:
                kept[name] = self.convert(part, source, refs)
        return kept, frozenset(dropped)

    def _one(self, key: str, value: Any, source: Source, refs: Refs, out: Json) -> None:
        if key == "items" and isinstance(value, list):  # As drafts before 2020 write tuples.
            out["prefixItems"] = [self.convert(part, source, refs) for part in members(value)]
            if not value:
                del out["prefixItems"]
        else:
            out[key] = self.convert(value, source, refs)

    @staticmethod
    def _type(value: Any, out: Json) -> None:
        if value == "file":  # What it was called in Swagger, and still is in many documents.
            out["type"] = "string"
            out["format"] = "binary"
        elif isinstance(value, list):
            types = dict.fromkeys(str(one) for one in members(value))
            if types and all(one in keywords.TYPES for one in types):
                out["type"] = list(types)
        elif isinstance(value, str) and value in keywords.TYPES:
            out["type"] = value

    def _hidden_names(self, node: Json, source: Source, seen: set[int]) -> frozenset[str]:
        """What a schema and those that it is made of hide: one part may require what another hides."""
        seen.add(id(node))
        names: set[str] = set()
        if named := mapping(node.get("properties")):
            names.update(name for name, part in named.items() if self.is_hidden(part, source))
        for part in members(node.get("allOf")):
            target = source.follow(part)
            said = mapping(target.node)
            if said is not None and id(said) not in seen:
                names |= self._hidden_names(said, target.source, seen)
        return frozenset(names)


def with_definitions(schema: Json, definitions: Mapping[str, Any]) -> Json:
    return {**schema, "$defs": definitions} if definitions else schema


def _require(value: Any, without: frozenset[str], out: Json) -> None:
    if isinstance(value, list):
        names = [name for name in dict.fromkeys(map(str, members(value))) if name not in without]
        if names:
            out["required"] = names


def _with_null(schema: Json) -> Json:
    if "$ref" in schema or not keywords.SEVERAL.isdisjoint(schema):
        around = {key: schema[key] for key in ("title", "description", "default") if key in schema}
        inner = {key: value for key, value in schema.items() if key not in around}
        return {**around, "anyOf": [inner, {"type": "null"}]}
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "null":
        schema["type"] = [kind, "null"]
    if "enum" in schema and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema
