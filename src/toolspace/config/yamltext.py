"""Reads YAML as plain data, keeping the line of every value.

Built from parser events, not by the library's constructor: that gives lines, refuses keys given twice,
bounds aliases, and reads scalars as YAML 1.2 does, so that `no`, `22:22` and `0123` stay the text that they
look like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import yaml

from toolspace.config.document import MAX_DEPTH, KeyPath, ParsedText, TextSyntaxError

MAX_VALUES = 200_000
"""How many values a document may have with its aliases followed: a few lines of them can mean billions."""

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEAN = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# No leading zeros: what starts with one is a code or a mode, and not the number it would print as.
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
_PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_PREFIX = "tag:yaml.org,2002:"
_yaml: Any = yaml  # The stubs leave `parse` untyped.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Scalar(NamedTuple):
    text: str
    tag: str | None
    """None where the text itself says what it is."""
    line: int
    column: int


class _Sequence(NamedTuple):
    items: list[_Node]
    line: int
    column: int


class _Mapping(NamedTuple):
    pairs: list[tuple[_Scalar, _Node]]
    line: int
    column: int


_Node: TypeAlias = _Scalar | _Sequence | _Mapping


def parse_yaml(text: str) -> ParsedText:
    """The values of a YAML text. Raises `TextFault`; a key given twice is one."""
    try:
        root = _Composer(text).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = error.problem or error.context or "not valid YAML"
        raise TextSyntaxError(reason, mark.line + 1 if mark else 1, mark.column + 1 if mark else None) from None
    except yaml.YAMLError as error:
        raise TextSyntaxError(str(error).splitlines()[0], 1) from None
    if root is None:
        return ParsedText(None, {}, {})
    builder = _Builder()
    return ParsedText(builder.value(root, ()), builder.lines, builder.texts)


class _Composer:
    """Events to nodes. An alias is the very node that its anchor names."""

    def __init__(self, text: str) -> None:
        self.events: Iterator[Any] = iter(_yaml.parse(text, Loader=_LOADER))
        self.anchors: dict[str, _Node | None] = {}

    def document(self) -> _Node | None:
        next(self.events)  # The start of the stream.
        event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            return None
        root = self.node(next(self.events), 0)
        next(self.events)  # The end of the document.
        event = next(self.events)
        if not isinstance(event, yaml.StreamEndEvent):
            line, column = _place(event)
            raise TextSyntaxError('a second document begins here; one file holds one: remove the "---"', line, column)
        return root

    def node(self, event: Any, depth: int) -> _Node:
        line, column = _place(event)
        if depth > MAX_DEPTH:
            raise TextSyntaxError(f"nested deeper than {MAX_DEPTH} levels", line, column)
        anchor: str | None = event.anchor
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(anchor), line, column)
        if anchor is not None:
            self.anchors[anchor] = None  # Being read: an alias to it from inside would never end.
        node: _Node
        if isinstance(event, yaml.ScalarEvent):
            node = _Scalar(event.value, _tag(event, line, column), line, column)
        elif isinstance(event, yaml.SequenceStartEvent):
            _check_tag(event.tag, ("seq",), line, column)
            items: list[_Node] = []
            while not isinstance(inner := next(self.events), yaml.SequenceEndEvent):
                items.append(self.node(inner, depth + 1))
            node = _Sequence(items, line, column)
        else:
            _check_tag(event.tag, ("map",), line, column)
            pairs: list[tuple[_Scalar, _Node]] = []
            while not isinstance(inner := next(self.events), yaml.MappingEndEvent):
                key = self.node(inner, depth + 1)
                if not isinstance(key, _Scalar):
                    raise TextSyntaxError("a key must be plain text, not a list or a mapping", key.line, key.column)
                pairs.append((key, self.node(next(self.events), depth + 1)))
            node = _Mapping(pairs, line, column)
        if anchor is not None:
            self.anchors[anchor] = node
        return node

    def _alias(self, anchor: str, line: int, column: int) -> _Node:
        if anchor not in self.anchors:
            raise TextSyntaxError(f'the alias "*{anchor}" has no anchor "&{anchor}" before it', line, column)
        node = self.anchors[anchor]
        if node is None:
            raise TextSyntaxError(f'the alias "*{anchor}" stands inside what it names', line, column)
        return node


class _Builder:
    """Nodes to values."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.texts: dict[KeyPath, str] = {}
        self.count = 0

    def value(self, node: _Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > MAX_VALUES or len(path) > MAX_DEPTH:
            raise TextSyntaxError("the aliases of this document stand for too many values", node.line, node.column)
        if isinstance(node, _Scalar):
            return self._scalar(node, path)
        if isinstance(node, _Sequence):
            values: list[Any] = []
            for index, item in enumerate(node.items):
                here = (*path, index)
                self.lines[here] = item.line
                values.append(self.value(item, here))
            return values
        return self._mapping(node, path)

    def _mapping(self, node: _Mapping, path: KeyPath) -> dict[str, Any]:
        pairs: dict[str, tuple[_Scalar, _Node]] = {}
        merged: dict[str, tuple[_Scalar, _Node]] = {}
        for key, inner in node.pairs:
            if key.text == "<<" and key.tag is None:
                for name, pair in self._merge(inner, 0).items():
                    merged.setdefault(name, pair)
                continue
            if key.text in pairs:
                first = pairs[key.text][0].line
                message = f"the key {json.dumps(key.text)} is given twice, first in line {first}"
                raise TextSyntaxError(message, key.line, key.column)
            pairs[key.text] = (key, inner)
        values: dict[str, Any] = {}
        for name, (key, inner) in {**merged, **pairs}.items():
            here = (*path, name)
            self.lines[here] = key.line
            values[name] = self.value(inner, here)
        return values

    def _merge(self, node: _Node, depth: int) -> dict[str, tuple[_Scalar, _Node]]:
        """The pairs that `<<` brings in: of one mapping, or of several, the first of which wins."""
        self.count += 1
        if self.count > MAX_VALUES or depth > MAX_DEPTH:
            raise TextSyntaxError("the aliases of this document stand for too many values", node.line, node.column)
        found: dict[str, tuple[_Scalar, _Node]] = {}
        if isinstance(node, _Sequence):
            for item in node.items:
                for name, pair in self._merge(item, depth + 1).items():
                    found.setdefault(name, pair)
            return found
        if not isinstance(node, _Mapping):
            raise TextSyntaxError('"<<" takes a mapping, or a list of mappings', node.line, node.column)
        self.count += len(node.pairs)
        inherited: dict[str, tuple[_Scalar, _Node]] = {}
        for key, inner in node.pairs:
            if key.text == "<<" and key.tag is None:
                inherited |= self._merge(inner, depth + 1)
            else:
                found[key.text] = (key, inner)
        return {**inherited, **found}

    def _scalar(self, node: _Scalar, path: KeyPath) -> Any:
        try:
            value = _read_scalar(node)
        except ValueError as error:
            raise TextSyntaxError(str(error), node.line, node.column) from None
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.texts[path] = node.text
        return value


def _read_scalar(node: _Scalar) -> Any:
    text, tag = node.text, node.tag
    if tag == "str":
        return text
    if tag in (None, "null") and text in _NULL:
        return None
    if tag in (None, "bool") and text in _BOOLEAN:
        return _BOOLEAN[text]
    if tag in (None, "int", "float"):
        if _INTEGER.fullmatch(text):
            return float(text) if tag == "float" else int(text)
        if tag != "float" and _PREFIXED.fullmatch(text):
            return int(text, 0)
        if tag != "int" and _FLOAT.fullmatch(text):
            return float(text)
        if tag != "int" and _SPECIAL.fullmatch(text):
            return float(text.replace(".", ""))
    if tag is not None:
        raise ValueError(f"{json.dumps(text)} is not what its tag !!{tag} says")
    return text


def _tag(event: Any, line: int, column: int) -> str | None:
    plain, quoted = event.implicit
    if event.tag is None or event.tag == "!":
        return None if plain and event.tag is None else "str"
    if plain or quoted:  # The parser filled in a tag of its own.
        return None if plain else "str"
    return _check_tag(event.tag, ("str", "null", "bool", "int", "float"), line, column)


def _check_tag(tag: str | None, allowed: tuple[str, ...], line: int, column: int) -> str | None:
    if tag is None:
        return None
    short = tag.removeprefix(_PREFIX)
    if tag == short or short not in allowed:
        raise TextSyntaxError(f"the tag {json.dumps(tag)} is not allowed; write plain data", line, column)
    return short


def _place(event: Any) -> tuple[int, int]:
    mark = event.start_mark
    return mark.line + 1, mark.column + 1
