"""Counts how large a JSON Schema is with its references followed. Validates nothing.

Providers leave out tools whose schema is too large: a few lines of references that double each other make a validator
work for hours. `core.argument_validation` uses the size to limit how much work it spends on explaining wrong arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

MAX_SCHEMA_SIZE = 100_000
"""Values of one schema with its references followed. Schemas that are written for models have a few hundred."""
MAX_SHOWN_SCHEMA_BYTES = 64 * 1024
"""Larger schemas are not in the events of calls; `GET /api/tools/{name}` has them."""

_NAME_KEYWORDS = frozenset(("properties", "patternProperties", "dependentSchemas", "dependentRequired"))
_DEFINITION_KEYWORDS = frozenset(("$defs", "definitions"))
_DATA_KEYWORDS = frozenset(("const", "enum", "default", "examples", "example"))
_UNION_KEYWORDS = frozenset(("anyOf", "oneOf"))
_REFERENCE_KEYWORDS = ("$ref", "$dynamicRef", "$recursiveRef")


class SchemaTooLarge(ValueError):
    """The schema cannot be offered. The message says why."""


class SchemaSize(NamedTuple):
    """The size of a schema. A definition that refers to itself counts once inside itself."""

    values: int
    """Values with every reference followed."""
    union_values: int
    """How many of them are options of `anyOf` and `oneOf`."""
    is_recursive: bool


def measure_schema(schema: Mapping[str, Any]) -> SchemaSize:
    """Returns the size of a schema. Raises `SchemaTooLarge` above the limit.

    Each part is counted once, so the time is in proportion to the length of the schema as it is written.
    """
    counter = _Counter(schema)
    try:
        values, union_values = counter.count(schema)
    except RecursionError:
        raise SchemaTooLarge("its schema is nested too deeply") from None
    return SchemaSize(values, union_values, counter.is_recursive)


class _Counter:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._anchors: dict[str, object] | None = None
        self._counts: dict[int, tuple[int, int] | None] = {}
        """Counts of referenced parts by their id; None while a part is being counted."""
        self.is_recursive = False

    def count(self, node: object) -> tuple[int, int]:
        """Returns the number of values, and how many of them are options of unions."""
        values, union_values = 1, 0
        if isinstance(node, list):
            for item in cast("list[object]", node):
                item_values, item_union_values = self.count(item)
                values += item_values
                union_values += item_union_values
        elif isinstance(node, Mapping):
            for keyword, value in cast("Mapping[str, object]", node).items():
                if keyword in _DEFINITION_KEYWORDS:
                    continue  # Counted where they are referred to.
                part_values, part_union_values = self._count_keyword(keyword, value)
                values += part_values
                union_values += part_values if keyword in _UNION_KEYWORDS else part_union_values
        if values > MAX_SCHEMA_SIZE:
            raise SchemaTooLarge(
                f"its schema has more than {MAX_SCHEMA_SIZE:,} values when its references are followed"
            )
        return values, union_values

    def _count_keyword(self, keyword: str, value: object) -> tuple[int, int]:
        if keyword in _REFERENCE_KEYWORDS and isinstance(value, str):
            return self._count_reference(value)
        if keyword in _DATA_KEYWORDS:
            return _count_data(value), 0
        if keyword in _NAME_KEYWORDS and isinstance(value, Mapping):
            counts = [self.count(part) for part in cast("Mapping[str, object]", value).values()]
            return 1 + sum(count[0] for count in counts), sum(count[1] for count in counts)
        return self.count(value)

    def _count_reference(self, reference: str) -> tuple[int, int]:
        target = self._resolve(reference)
        if target is None:
            return 1, 0  # Validation refuses it: it leads nowhere, or out of the schema.
        key = id(target)
        if key in self._counts:
            count = self._counts[key]
            if count is None:
                self.is_recursive = True
                return 1, 0
            return count
        self._counts[key] = None
        count = self._counts[key] = self.count(target)
        return count

    def _resolve(self, reference: str) -> object:
        if self._anchors is None:
            self._anchors = {}
            self._collect_anchors(self._root, is_root=True)
        base = self._root.get("$id")
        if isinstance(base, str) and base and not base.startswith("#"):
            reference = reference.removeprefix(base.rstrip("#"))
        if reference in ("", "#"):
            return self._root
        if not reference.startswith("#/"):
            return self._anchors.get(reference)
        # A pointer in a URI may be percent-encoded, and one such as `#/allOf/0` leads into a list.
        from urllib.parse import unquote

        target: object = self._root
        for step in unquote(reference[2:]).split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping):
                target = cast("Mapping[str, object]", target).get(step)
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(cast("list[object]", target)):
                target = cast("list[object]", target)[int(step)]
            else:
                return None
        return target

    def _collect_anchors(self, node: object, *, is_root: bool = False, are_names: bool = False) -> None:
        """Collects the anchors. Raises `SchemaTooLarge` for `$id`, which changes what references mean."""
        if isinstance(node, list):
            for item in cast("list[object]", node):
                self._collect_anchors(item)
        elif isinstance(node, Mapping):
            for keyword, value in cast("Mapping[str, object]", node).items():
                if not are_names and keyword in _DATA_KEYWORDS:
                    continue
                if not are_names and isinstance(value, str):
                    if keyword in ("$anchor", "$dynamicAnchor"):
                        assert self._anchors is not None
                        self._anchors[f"#{value}"] = cast("object", node)
                    elif keyword == "$id" and not is_root and not value.startswith("#"):
                        raise SchemaTooLarge(
                            f"its schema has references and the part $id {value[:100]!r}; refer to #/$defs/… instead"
                        )
                has_names = keyword in _NAME_KEYWORDS or keyword in _DEFINITION_KEYWORDS
                self._collect_anchors(value, are_names=has_names and not are_names)


def _count_data(value: object) -> int:
    if isinstance(value, Mapping):
        return 1 + sum(map(_count_data, cast("Mapping[str, object]", value).values()))
    return 1 + sum(map(_count_data, cast("list[object]", value))) if isinstance(value, list) else 1
