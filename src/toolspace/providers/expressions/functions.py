"""The functions that expressions may call. Each spends its steps before it creates anything. `compiler` uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from toolspace.core import json_text
from toolspace.providers.expressions.values import (
    EvaluationScope,
    ExpressionError,
    check_comparable,
    contains,
    is_equal,
    is_number,
    is_true,
    json_length,
    require_finite,
    require_list,
    require_number,
    require_text,
    type_name,
)

Function = Callable[..., Any]
"""Takes the scope and the values of its arguments."""


def _length(scope: EvaluationScope, value: Any) -> int:
    if isinstance(value, str | list | tuple | Mapping):
        return len(cast("Sequence[Any]", value))
    raise ExpressionError(f"len needs a text, a list or an object, not {type_name(value)}")


def _sum(scope: EvaluationScope, values: Any) -> Any:
    items = require_list(values, "sum")
    scope.spend(len(items))
    numbers = [require_number(item, "sum") for item in items]
    if all(isinstance(number, int) for number in numbers):
        return require_finite(sum(numbers), "sum")
    try:
        return require_finite(math.fsum(numbers), "sum")  # 0.1 ten times is 1.0.
    except OverflowError:
        raise ExpressionError("sum has no finite result") from None


def _average(scope: EvaluationScope, values: Any) -> Any:
    items = require_list(values, "avg")
    if not items:
        raise ExpressionError("avg of nothing has no value")
    return require_finite(_sum(scope, items) / len(items), "avg")


def _extreme(name: str, pick: Callable[..., Any]) -> Function:
    def run(scope: EvaluationScope, *values: Any) -> Any:
        items = require_list(values[0], name) if len(values) == 1 else values
        if not items:
            raise ExpressionError(f"{name} of nothing has no value")
        scope.spend(len(items))
        for item in items:
            check_comparable(items[0], item, name)
        return pick(items)

    return run


def _sorted(scope: EvaluationScope, values: Any) -> list[Any]:
    items = require_list(values, "sorted")
    scope.spend(len(items) * max(len(items).bit_length(), 1))
    for item in items:
        check_comparable(items[0], item, "sorted")
    return sorted(items)


def _unique(scope: EvaluationScope, values: Any) -> list[Any]:
    distinct: list[Any] = []
    for item in require_list(values, "unique"):
        if not contains(scope, distinct, item):
            distinct.append(item)
    return distinct


def _range(scope: EvaluationScope, *bounds: Any) -> list[int]:
    integers = [_to_integer(scope, bound) for bound in bounds]
    if not 1 <= len(integers) <= 3 or (len(integers) == 3 and integers[2] == 0):
        raise ExpressionError("range takes an end, a start and an end, or those and a step other than 0")
    numbers = range(*integers)
    try:
        scope.spend(len(numbers))
    except OverflowError:
        raise ExpressionError("range is too long") from None
    return list(numbers)


def _round(scope: EvaluationScope, value: Any, digits: Any = 0) -> Any:
    places = require_number(digits, "round")
    if not isinstance(places, int) or not 0 <= places <= 15:
        raise ExpressionError("round takes 0 to 15 digits")
    number = require_number(value, "round")
    return round(number) if places == 0 else require_finite(round(number, places), "round")


def _number_function(name: str, function: Callable[[Any], Any]) -> Function:
    def run(scope: EvaluationScope, value: Any) -> Any:
        return require_finite(function(require_number(value, name)), name)

    return run


def _to_integer(scope: EvaluationScope, value: Any) -> int:
    """A number without its fraction, or the integer in a text."""
    if isinstance(value, str):
        value = _parse_number(value)
    if isinstance(value, bool):
        return int(value)
    return int(require_finite(int(require_number(value, "int")), "int"))


def _to_float(scope: EvaluationScope, value: Any) -> float:
    return float(_parse_number(value) if isinstance(value, str) else require_number(value, "float"))


def _parse_number(text: str) -> int | float:
    if len(text) <= 40:
        for kind in (int, float):
            try:
                return require_finite(kind(text), "a number")
            except (ValueError, OverflowError):
                continue
    raise ExpressionError(f"{json_text.describe(text)} is not a number")


def to_text(scope: EvaluationScope, value: Any) -> str:
    """A text unchanged, anything else as JSON."""
    if isinstance(value, str):
        text = value
    else:
        scope.check_text(json_length(value))
        text = json_text.encode(value)
    scope.spend_text(len(text))
    return text


def _join(scope: EvaluationScope, values: Any, separator: Any = "") -> str:
    separator_text = require_text(separator, "join")
    items = require_list(values, "join")
    parts = [to_text(scope, item) for item in items]
    scope.spend_text(len(separator_text) * len(parts) + sum(map(len, parts)))
    return separator_text.join(parts)


def _split(scope: EvaluationScope, value: Any, separator: Any = None) -> list[str]:
    text = require_text(value, "split")
    if separator is not None and not require_text(separator, "split"):
        raise ExpressionError("split needs a separator that is not empty")
    scope.spend_text(len(text))
    parts = text.split(separator)
    scope.spend(len(parts))
    return parts


def _replace(scope: EvaluationScope, value: Any, old: Any, new: Any) -> str:
    text, old_text, new_text = (require_text(item, "replace") for item in (value, old, new))
    if not old_text:
        raise ExpressionError("replace needs a text to look for that is not empty")
    scope.spend_text(len(text))
    scope.spend_text(text.count(old_text) * len(new_text) + len(text))
    return text.replace(old_text, new_text)


def _text_function(name: str, change: Callable[[str], str]) -> Function:
    def run(scope: EvaluationScope, value: Any) -> str:
        text = require_text(value, name)
        scope.spend_text(len(text))
        return change(text)

    return run


def _text_test(name: str, test: Callable[[str, str], bool]) -> Function:
    def run(scope: EvaluationScope, value: Any, part: Any) -> bool:
        return test(require_text(value, name), require_text(part, name))

    return run


def _require_object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ExpressionError(f"{what} needs an object, not {type_name(value)}")
    return cast("Mapping[str, Any]", value)


def _keys(scope: EvaluationScope, value: Any) -> list[str]:
    members = _require_object(value, "keys")
    scope.spend(len(members))
    return list(members)


def _values(scope: EvaluationScope, value: Any) -> list[Any]:
    members = _require_object(value, "values")
    scope.spend(len(members))
    return list(members.values())


def _count(scope: EvaluationScope, values: Any, value: Any) -> int:
    return sum(is_equal(scope, item, value) for item in require_list(values, "count"))


def _list_test(name: str, quantify: Callable[[Sequence[Any]], bool]) -> Function:
    def run(scope: EvaluationScope, values: Any) -> bool:
        items = require_list(values, name)
        scope.spend(len(items))
        return quantify(items)

    return run


def _reversed(scope: EvaluationScope, values: Any) -> Any:
    items = require_text(values, "reversed") if isinstance(values, str) else require_list(values, "reversed")
    scope.spend(len(items))
    return items[::-1] if isinstance(items, str) else list(reversed(items))


def _square_root(scope: EvaluationScope, value: Any) -> float:
    number = require_number(value, "sqrt")
    if number < 0:
        raise ExpressionError("sqrt needs a number that is not negative")
    return math.sqrt(number)


def _bool(scope: EvaluationScope, value: Any) -> bool:
    return is_true(value)


def _is_number(scope: EvaluationScope, value: Any) -> bool:
    return is_number(value)


FUNCTIONS: Mapping[str, Function] = {
    "abs": _number_function("abs", abs),
    "all": _list_test("all", all),
    "any": _list_test("any", any),
    "avg": _average,
    "bool": _bool,
    "ceil": _number_function("ceil", math.ceil),
    "contains": contains,
    "count": _count,
    "endswith": _text_test("endswith", str.endswith),
    "float": _to_float,
    "floor": _number_function("floor", math.floor),
    "int": _to_integer,
    "is_number": _is_number,
    "join": _join,
    "keys": _keys,
    "len": _length,
    "lower": _text_function("lower", str.lower),
    "max": _extreme("max", max),
    "min": _extreme("min", min),
    "range": _range,
    "replace": _replace,
    "reversed": _reversed,
    "round": _round,
    "sorted": _sorted,
    "split": _split,
    "sqrt": _square_root,
    "startswith": _text_test("startswith", str.startswith),
    "str": to_text,
    "strip": _text_function("strip", str.strip),
    "sum": _sum,
    "unique": _unique,
    "upper": _text_function("upper", str.upper),
    "values": _values,
}
