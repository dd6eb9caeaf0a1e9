"""What the pieces of an expression do when it is evaluated. Each takes its steps from the budget before it works."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

from toolspace.core import json_text
from toolspace.providers.expressions.values import (
    Absent,
    ExpressionError,
    Scope,
    finite,
    is_number,
    kind_of,
    number,
    truth,
)

Eval = Callable[[Scope], Any]
"""A piece of an expression, compiled."""
Loop = tuple[str, Eval, list[Eval]]
"""One `for` of a comprehension: its name, what it goes through, its conditions."""

SIGNS: Mapping[str, Callable[[Any, Any], Any]] = {
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: left / right,
    "//": lambda left, right: left // right,
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def loop(scope: Scope, loops: list[Loop], depth: int, value: Eval, found: list[Any]) -> None:
    name, source, tests = loops[depth]
    over = source(scope)
    if isinstance(over, Mapping):
        over = list(cast("Mapping[str, Any]", over))  # Its keys.
    if not isinstance(over, list | tuple):
        raise ExpressionError(f"`for {name}` needs a list, not {kind_of(over)}")
    for item in cast("list[Any]", over):
        scope.spend(1)
        scope.names[name] = item
        if all(truth(test(scope)) for test in tests):
            if depth + 1 < len(loops):
                loop(scope, loops, depth + 1, value, found)
            else:
                found.append(value(scope))


def member(inner: Eval, name: str) -> Eval:
    def look(scope: Scope) -> Any:
        scope.spend(1)
        value = inner(scope)
        if not isinstance(value, Mapping):
            raise Absent(f'"{name}" was looked for in {kind_of(value)}, which has no members')
        members = cast("Mapping[str, Any]", value)
        if name not in members:
            raise Absent(f'"{name}" is not there')
        return members[name]

    return look


def subscript(inner: Eval, index: Eval) -> Eval:
    def look(scope: Scope) -> Any:
        scope.spend(1)
        value, place = inner(scope), index(scope)
        if isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            if not isinstance(place, str) or place not in members:
                raise Absent(f"{json_text.describe(place)} is not there")
            return members[place]
        if isinstance(value, str | list | tuple):
            try:
                return cast("Any", value)[index_of(place)]
            except IndexError:
                raise Absent(f"there is no element {place}") from None
        raise Absent(f"{json_text.describe(place)} was looked for in {kind_of(value)}, which has no elements")

    return look


def index_of(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ExpressionError(f"a place in a list is a whole number, not {kind_of(value)}")


def whole(value: object) -> int:
    found = number(value, "the format d")
    if found != int(found):
        raise ExpressionError("the format d needs a whole number")
    return int(found)


def add(scope: Scope, left: object, right: object) -> Any:
    scope.spend(1)
    if is_number(left) and is_number(right):
        return finite(number(left, "+") + number(right, "+"), "+")
    if isinstance(left, str) and isinstance(right, str):
        scope.spend_text(len(left) + len(right))
        return left + right
    kinds = f"{kind_of(left)} and {kind_of(right)}"
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        first, second = cast("list[Any]", left), cast("list[Any]", right)
        scope.spend(len(first) + len(second))
        return [*first, *second]
    raise ExpressionError(f"+ cannot add {kinds}; write str(…) for the text of a value")


def junction(values: list[Eval], *, stop: bool) -> Eval:
    def run(scope: Scope) -> Any:
        found: Any = None
        for value in values:
            scope.spend(1)
            found = value(scope)
            if truth(found) == stop:
                break
        return found

    return run


def listing(elements: list[Eval]) -> Eval:
    def make(scope: Scope) -> list[Any]:
        scope.spend(len(elements) + 1)
        return [element(scope) for element in elements]

    return make


def joined(parts: list[Eval]) -> Eval:
    def make(scope: Scope) -> str:
        texts = [part(scope) for part in parts]
        scope.spend_text(sum(map(len, texts)))
        return "".join(texts)

    return make
