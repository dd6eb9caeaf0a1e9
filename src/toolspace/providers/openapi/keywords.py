"""Which JSON Schema keywords a document's schemas keep, and what each may hold. Converts nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

TYPES = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
_LONGEST_EXAMPLE = 200


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_anything(value: Any) -> bool:
    return True


def _is_dependency(value: Any) -> bool:
    return isinstance(value, dict) and all(is_names(one) for one in cast("dict[str, Any]", value).values())


def is_names(value: Any) -> bool:
    """Whether it may stand as `required`."""
    if not isinstance(value, list):
        return False
    names = cast("list[Any]", value)
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


@functools.lru_cache(4096)
def is_pattern(pattern: str) -> bool:
    """Whether the checker of arguments can compile it; what it cannot, would make the whole schema invalid."""
    import jsonschema_rs  # Here: most documents have no pattern, and it takes 30 ms to import.

    try:
        jsonschema_rs.validator_for({"pattern": pattern})
    except (ValueError, jsonschema_rs.ValidationError):
        return False
    return True


def is_short(value: Any) -> bool:
    """Whether an example is worth showing to a model."""
    return len(value) <= _LONGEST_EXAMPLE if isinstance(value, str) else isinstance(value, int | float)


PLAIN: dict[str, Callable[[Any], bool]] = {
    "title": _is_text,
    "description": _is_text,
    "default": _is_anything,
    "const": _is_anything,
    "enum": _is_list,
    "format": _is_text,
    "deprecated": _is_flag,
    "readOnly": _is_flag,
    "writeOnly": _is_flag,
    "maximum": _is_number,
    "minimum": _is_number,
    "exclusiveMaximum": _is_number,
    "exclusiveMinimum": _is_number,
    "multipleOf": _is_positive,
    "maxLength": _is_count,
    "minLength": _is_count,
    "maxItems": _is_count,
    "minItems": _is_count,
    "maxContains": _is_count,
    "minContains": _is_count,
    "maxProperties": _is_count,
    "minProperties": _is_count,
    "uniqueItems": _is_flag,
    "contentEncoding": _is_text,
    "contentMediaType": _is_text,
    "dependentRequired": _is_dependency,
}
"""Keywords that hold a plain value: kept as they are where the value is one that they may hold."""
_ONE = "items not if then else contains propertyNames additionalProperties unevaluatedItems unevaluatedProperties"
ONE = frozenset((*_ONE.split(), "contentSchema"))
"""Keywords that hold one schema."""
SEVERAL = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
"""Keywords that hold a list of schemas."""
NAMED = frozenset(("patternProperties", "dependentSchemas"))
"""Keywords that hold schemas by name."""
