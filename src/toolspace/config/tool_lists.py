"""The types of settings that list tools: names, globs and collections. Used by the sections of tools and agents."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

from toolspace.config import value_types as types
from toolspace.config.validation import AlreadyReported, InvalidValue, Value, value_type
from toolspace.core.tool_collections import expand_collections, unknown_collection_problem

tool_names = types.list_of(types.string, "list of tools", "a list of tools: names, globs or collections")


def check_collections(values: Iterable[Value], *, is_strict: bool) -> None:
    """Reports names that look like collections of tools and are none. Raises `AlreadyReported` if there is one."""
    problems = {value: unknown_collection_problem(str(value.data), is_strict=is_strict) for value in values}
    for value, problem in problems.items():
        if problem is not None:
            value.report(problem)
    if any(problems.values()):
        raise AlreadyReported


@value_type(tool_names.label, tool_names.expected, tool_names.schema, separator=",")
def selected_tools(value: Value) -> tuple[str, ...]:
    """Tools that are selected by name, with the names of collections as written. Any name may be a collection."""
    names = tool_names.read(value)
    check_collections(value.elements(), is_strict=True)
    return names


@value_type(tool_names.label, tool_names.expected, tool_names.schema, separator=",")
def tool_patterns(value: Value) -> tuple[str, ...]:
    """Names and globs of tools, with the tools of collections instead of their names."""
    names = tool_names.read(value)
    check_collections(value.elements(), is_strict=False)
    return expand_collections(names)


@value_type(
    "boolean or list of tools",
    f"true, false, or {tool_names.expected}",
    {"anyOf": [{"type": "boolean"}, tool_names]},
    separator=",",
)
def boolean_or_tools(value: Value) -> bool | tuple[str, ...]:
    with suppress(InvalidValue):
        return types.boolean.read(value)
    try:
        return tool_patterns.read(value)
    except InvalidValue:
        raise InvalidValue(f"true, false, or {tool_names.expected}") from None


ToolPatterns = Annotated[tuple[str, ...], tool_patterns]
