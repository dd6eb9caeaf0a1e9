"""Reads parts of decoded JSON whose form nobody has checked yet."""

from __future__ import annotations

from typing import Any, cast

JsonObject = dict[str, Any]


def as_object(value: Any) -> JsonObject | None:
    """The value if it is an object, otherwise None."""
    return cast("JsonObject", value) if isinstance(value, dict) else None


def as_list(value: Any) -> list[Any]:
    """The value if it is a list, otherwise an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []
