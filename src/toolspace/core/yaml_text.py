"""Reads YAML 1.2 as plain data, with the line of every value. Reads no files and knows no settings.

Configuration files use `parse_yaml`, which is strict. OpenAPI documents, which strangers write, use
`parse_yaml_as_json`. Both build their values from parser events. PyYAML's own constructor expands nested aliases
without a limit, accepts a key twice, and reads `no`, `12:30` and `2020-01-01` as something other than text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec
import yaml

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_DEPTH = 100
MAX_VALUES = 200_000
"""How many values a configuration file may have after its aliases are expanded: a few lines can mean billions."""
MAX_JSON_DEPTH = 150
MAX_JSON_VALUES = 5_000_000

_CONSTANTS: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), ("null", None)),
    **dict.fromkeys(("true", "True", "TRUE"), ("bool", True)),
    **dict.fromkeys(("false", "False", "FALSE"), ("bool", False)),
}
# A number with a leading zero is a code or a file mode in a configuration file, so it stays text.
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_JSON_INTEGER = re.compile(r"[-+]?[0-9]+")
_JSON_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_PREFIXED_INTEGER = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_MAX_JSON_NUMBER = 400
_TAG_PREFIX = "tag:yaml.org,2002:"
_SCALAR_TAGS = ("str", "null", "bool", "int", "float")
_yaml: Any = yaml  # The stubs leave `parse` untyped.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlSyntaxError(ValueError):
    """The text is not valid YAML, or not the plain data that is expected. Knows where."""

    def __init__(self, message: str, line: int, column: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


class YamlDocument(NamedTuple):
    """The values of a YAML text."""

    data: Any
    lines: dict[KeyPath, int]
    """The line of every value: for a value in a mapping, the line of its key."""
    number_texts: dict[KeyPath, str]
    """How each number was written, which can differ from how it prints: `1.10`."""


class _BaseNode(msgspec.Struct, frozen=True, gc=False):
    """A value of the text. Nodes are never part of a cycle, so the garbage collector need not track them."""

    tag: str | None
    """The tag as it is written, or None. For a scalar, "str" means quotes, and None that its form decides its type."""
    mark: Any
    """Its position in the text, counted from 0."""


class _Scalar(_BaseNode, frozen=True, gc=False):
    text: str


class _Sequence(_BaseNode, frozen=True, gc=False):
    items: list[_Node]


class _Mapping(_BaseNode, frozen=True, gc=False):
    pairs: list[tuple[_Scalar, _Node]]


_Node: TypeAlias = _Scalar | _Sequence | _Mapping
_Pairs: TypeAlias = dict[str, tuple[_Scalar, _Node]]


def parse_yaml(text: str) -> YamlDocument:
    """Returns the values of a configuration file and their lines. Raises `YamlSyntaxError`.

    A key that occurs twice, a second document, and a tag other than those of plain data are errors.
    """
    composer = _Composer(text, max_depth=MAX_DEPTH, max_values=MAX_VALUES)
    root = composer.compose(is_single=True)
    if root is None:
        return YamlDocument(None, {}, {})
    builder = _Builder()
    return YamlDocument(builder.build(root, ()), builder.lines, builder.number_texts)


def parse_yaml_as_json(text: str) -> Any:
    """Returns the JSON value of a stranger's YAML text. Raises `YamlSyntaxError`, whose message includes the line.

    An alias is the same object as the value of its anchor. Tags are ignored, the last of two equal keys wins, and
    keys are text: the response code `200`, which YAML reads as a number, is "200".
    """
    try:
        composer = _Composer(text, max_depth=MAX_JSON_DEPTH, max_values=MAX_JSON_VALUES)
        root = composer.compose(is_single=False)
        return None if root is None else _JsonBuilder(composer.anchored_ids).build(root)
    except YamlSyntaxError as error:
        raise YamlSyntaxError(f"{error} in line {error.line}", error.line, error.column) from None


class _Composer:
    """Turns parser events into nodes. An alias becomes the same node as its anchor."""

    def __init__(self, text: str, *, max_depth: int, max_values: int) -> None:
        self.anchored_ids: set[int] = set()
        """The `id()` of every node that has an anchor."""
        self._text = text
        self._max_depth = max_depth
        self._max_values = max_values
        self._count = 0
        self._anchors: dict[str, _Node | None] = {}
        self._events: Iterator[Any] = iter(())

    def compose(self, *, is_single: bool) -> _Node | None:
        """Returns the root of the first document, or None. `is_single`: a second document is an error."""
        try:
            self._events = iter(_yaml.parse(self._text, Loader=_LOADER))
            return self._document(is_single)
        except yaml.MarkedYAMLError as error:
            mark: Any = error.problem_mark or error.context_mark
            reason = error.problem or error.context or "not valid YAML"
            raise _error_at(mark, reason) if mark else YamlSyntaxError(reason, 1) from None
        except yaml.YAMLError as error:
            raise YamlSyntaxError(str(error).splitlines()[0], 1) from None

    def _document(self, is_single: bool) -> _Node | None:
        next(self._events)  # The start of the stream.
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        root = self._node(next(self._events), 0)
        if is_single:
            next(self._events)  # The end of the document.
            event = next(self._events)
            if not isinstance(event, yaml.StreamEndEvent):
                message = 'a second document begins here; one file holds one: remove the "---"'
                raise _error_at(event.start_mark, message)
        return root

    def _node(self, event: Any, depth: int) -> _Node:
        mark = event.start_mark
        self._count += 1
        if self._count > self._max_values:
            raise _error_at(mark, f"more than {self._max_values} values")
        if depth > self._max_depth:
            raise _error_at(mark, f"nested deeper than {self._max_depth} levels")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), mark)
        anchor: str | None = event.anchor
        if anchor is not None:
            self._anchors[anchor] = None  # Not complete: an alias to it from inside would never end.
        node: _Node
        if isinstance(event, yaml.ScalarEvent):
            node = _Scalar(_scalar_tag(event), mark, event.value)
        elif isinstance(event, yaml.SequenceStartEvent):
            items: list[_Node] = []
            while not isinstance(inner := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(inner, depth + 1))
            node = _Sequence(event.tag, mark, items)
        else:
            pairs: list[tuple[_Scalar, _Node]] = []
            while not isinstance(inner := next(self._events), yaml.MappingEndEvent):
                key = self._node(inner, depth + 1)
                if not isinstance(key, _Scalar):
                    raise _error_at(key.mark, "a key must be plain text, not a list or a mapping")
                self._count -= 1  # Keys are not values.
                pairs.append((key, self._node(next(self._events), depth + 1)))
            node = _Mapping(event.tag, mark, pairs)
        if anchor is not None:
            self._anchors[anchor] = node
            self.anchored_ids.add(id(node))
        return node

    def _alias(self, anchor: str, mark: Any) -> _Node:
        if anchor not in self._anchors:
            raise _error_at(mark, f'the alias "*{anchor}" has no anchor "&{anchor}" before it')
        node = self._anchors[anchor]
        if node is None:
            raise _error_at(mark, f'the alias "*{anchor}" stands inside the value of its anchor')
        return node


class _Builder:
    """Turns nodes into values, strictly, and keeps their lines. Expands aliases."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.number_texts: dict[KeyPath, str] = {}
        self._count = 0

    def build(self, node: _Node, path: KeyPath) -> Any:
        self._count_value(node, len(path))
        if isinstance(node, _Scalar):
            return self._scalar(node, path)
        if isinstance(node, _Sequence):
            _check_tag(node, ("seq",))
            return [self._child(item, item.mark, (*path, index)) for index, item in enumerate(node.items)]
        return self._mapping(node, path)

    def _child(self, node: _Node, mark: Any, path: KeyPath) -> Any:
        self.lines[path] = mark.line + 1
        return self.build(node, path)

    def _mapping(self, node: _Mapping, path: KeyPath) -> dict[str, Any]:
        _check_tag(node, ("map",))
        pairs: _Pairs = {}
        included_pairs: _Pairs = {}
        for key, inner in node.pairs:
            if _is_merge_key(key):
                for name, pair in self._merge(inner, 0).items():
                    included_pairs.setdefault(name, pair)
                continue
            if key.text in pairs:
                first_line = pairs[key.text][0].mark.line + 1
                raise _error_at(key.mark, f"the key {json.dumps(key.text)} is given twice, first in line {first_line}")
            pairs[key.text] = (key, inner)
        items = (included_pairs | pairs).items()
        return {name: self._child(inner, key.mark, (*path, name)) for name, (key, inner) in items}

    def _merge(self, node: _Node, depth: int) -> _Pairs:
        """Returns the pairs that `<<` includes: of one mapping, or of several, the first of which wins."""
        self._count_value(node, depth)
        pairs: _Pairs = {}
        if isinstance(node, _Sequence):
            for item in node.items:
                for name, pair in self._merge(item, depth + 1).items():
                    pairs.setdefault(name, pair)
            return pairs
        if not isinstance(node, _Mapping):
            raise _error_at(node.mark, '"<<" takes a mapping, or a list of mappings')
        self._count += len(node.pairs)
        included_pairs: _Pairs = {}
        for key, inner in node.pairs:
            if _is_merge_key(key):
                included_pairs |= self._merge(inner, depth + 1)
            else:
                pairs[key.text] = (key, inner)
        return included_pairs | pairs

    def _scalar(self, node: _Scalar, path: KeyPath) -> Any:
        tag = node.tag if node.tag in (None, "str") else _check_tag(node, _SCALAR_TAGS)
        try:
            value = _strict_scalar(node.text, tag)
        except ValueError as error:
            raise _error_at(node.mark, str(error)) from None
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.number_texts[path] = node.text
        return value

    def _count_value(self, node: _Node, depth: int) -> None:
        self._count += 1
        if self._count > MAX_VALUES or depth > MAX_DEPTH:
            raise _error_at(node.mark, "the aliases of this document stand for too many values")


class _JsonBuilder:
    """Turns nodes into JSON values, leniently. Does not copy the value of an alias, but counts it."""

    def __init__(self, anchored_ids: set[int]) -> None:
        self._anchored_ids = anchored_ids
        self._values: dict[int, tuple[Any, int]] = {}
        """By the `id()` of each node with an anchor: its value, and how many values that is."""
        self._count = 0

    def build(self, node: _Node) -> Any:
        if (record := self._values.get(id(node))) is not None:
            value, count = record
            self._count_values(count + 1, node)
            return value
        count_before = self._count
        self._count_values(1, node)
        if isinstance(node, _Scalar):
            value = _json_scalar(node)
        elif isinstance(node, _Sequence):
            value = [self.build(item) for item in node.items]
        else:
            value = self._mapping(node)
        if id(node) in self._anchored_ids:
            self._values[id(node)] = (value, self._count - count_before)
        return value

    def _mapping(self, node: _Mapping) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        sources: list[Any] = []
        for key, inner in node.pairs:
            value = self.build(inner)
            if _is_merge_key(key):
                sources += cast("list[Any]", value) if isinstance(value, list) else [value]
            else:
                mapping[key.text] = value
        for source in sources:
            if isinstance(source, dict):
                for name, value in cast("dict[str, Any]", source).items():
                    mapping.setdefault(name, value)
        return mapping

    def _count_values(self, count: int, node: _Node) -> None:
        self._count += count
        if self._count > MAX_JSON_VALUES:
            raise _error_at(node.mark, f"more than {MAX_JSON_VALUES} values after its aliases are expanded")


def _strict_scalar(text: str, tag: str | None) -> Any:
    """Returns the value of a scalar. Raises `ValueError` if the text does not fit the tag, or is too long a number."""
    if tag == "str":
        return text
    if text in _CONSTANTS and tag in (None, _CONSTANTS[text][0]):
        return _CONSTANTS[text][1]
    if tag in (None, "int", "float"):
        if _INTEGER.fullmatch(text):
            return float(text) if tag == "float" else int(text)
        if tag != "float" and _PREFIXED_INTEGER.fullmatch(text):
            return int(text, 0)
        if tag != "int" and _FLOAT.fullmatch(text):
            return float(text)
        if tag != "int" and _SPECIAL_FLOAT.fullmatch(text):
            return float(text.replace(".", ""))
    if tag is not None:
        raise ValueError(f"{json.dumps(text)} is not what its tag !!{tag} says")
    return text


def _json_scalar(node: _Scalar) -> Any:
    text = node.text
    if node.tag is not None:
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text][1]
    if text[0] in "+-.0123456789" and len(text) < _MAX_JSON_NUMBER:
        if _JSON_INTEGER.fullmatch(text):
            return int(text)
        if _PREFIXED_INTEGER.fullmatch(text):
            return int(text, 0)
        if _JSON_FLOAT.fullmatch(text):
            number = float(text)
            return number if abs(number) != float("inf") else text
    return text


def _is_merge_key(key: _Scalar) -> bool:
    return key.text == "<<" and key.tag is None


def _scalar_tag(event: Any) -> str | None:
    is_plain, is_quoted = event.implicit
    if event.tag == "!" or (is_quoted and not is_plain):
        return "str"
    # The parser sets a tag of its own on plain text; only a tag without either flag stands in the text.
    return None if is_plain else event.tag or "str"


def _check_tag(node: _Node, allowed: tuple[str, ...]) -> str | None:
    if node.tag is None:
        return None
    short = node.tag.removeprefix(_TAG_PREFIX)
    if node.tag == short or short not in allowed:
        raise _error_at(node.mark, f"the tag {json.dumps(node.tag)} is not allowed; write plain data")
    return short


def _error_at(mark: Any, message: str) -> YamlSyntaxError:
    return YamlSyntaxError(message, mark.line + 1, mark.column + 1)
