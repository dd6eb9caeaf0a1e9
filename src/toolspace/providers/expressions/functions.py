"""The functions that expressions may call. Each says what it costs before it makes anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from toolspace.core import json_text
from toolspace.providers.expressions.values import (
    Evaluation,
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
"""Takes the scope and its arguments, all of them values."""


def _length(scope: Evaluation, value: Any) -> int:
    if isinstance(value, str | list | tuple | Mapping):
        return len(cast("Sequence[Any]", value))
    raise ExpressionError(f"len needs a text, a list or an object, not {type_name(value)}")


def _sum(scope: Evaluation, values: Any) -> Any:
    listed = require_list(values, "sum")
    scope.spend(len(listed))
    numbers = [require_number(one, "sum") for one in listed]
    if all(isinstance(one, int) for one in numbers):
        return require_finite(sum(numbers), "sum")
    try:
        return require_finite(math.fsum(numbers), "sum")  # 0.1 ten times is 1.0.
    except OverflowError:
        raise ExpressionError("sum has no finite result") from None


def _average(scope: Evaluation, values: Any) -> Any:
    listed = require_list(values, "avg")
    if not listed:
        raise ExpressionError("avg of nothing has no value")
    return require_finite(_sum(scope, listed) / len(listed), "avg")


def _extreme(name: str, pick: Callable[..., Any]) -> Function:
    def run(scope: Evaluation, *values: Any) -> Any:
        listed = require_list(values[0], name) if len(values) == 1 else values
        if not listed:
            raise ExpressionError(f"{name} of nothing has no value")
        scope.spend(len(listed))
        for one in listed:
            check_comparable(listed[0], one, name)
        return pick(listed)

    return run


def _sorted(scope: Evaluation, values: Any) -> list[Any]:
    listed = require_list(values, "sorted")
    scope.spend(len(listed) * max(len(listed).bit_length(), 1))
    for one in listed:
        check_comparable(listed[0], one, "sorted")
    return sorted(listed)


def _unique(scope: Evaluation, values: Any) -> list[Any]:
    found: list[Any] = []
    for one in require_list(values, "unique"):
        if not contains(scope, found, one):
            found.append(one)
    return found


def _range(scope: Evaluation, *bounds: Any) -> list[int]:
    whole = [_whole(scope, bound) for bound in bounds]
    if not 1 <= len(whole) <= 3 or (len(whole) == 3 and whole[2] == 0):
        raise ExpressionError("range takes an end, a start and an end, or those and a step other than 0")
    wanted = range(*whole)
    scope.spend(_count(wanted))
    return list(wanted)


def _count(wanted: range) -> int:
    try:
        return len(wanted)
    except OverflowError:
        raise ExpressionError("range is too long") from None


def _round(scope: Evaluation, value: Any, digits: Any = 0) -> Any:
    places = require_number(digits, "round")
    if not isinstance(places, int) or not 0 <= places <= 15:
        raise ExpressionError("round takes 0 to 15 digits")
    whole = require_number(value, "round")
    return round(whole) if places == 0 else require_finite(round(whole, places), "round")


def _numeric(name: str, function: Callable[[Any], Any]) -> Function:
    def run(scope: Evaluation, value: Any) -> Any:
        return require_finite(function(require_number(value, name)), name)

    return run


def _whole(scope: Evaluation, value: Any) -> int:
    """A number without its fraction, or the number that a text writes."""
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, bool):
        return int(value)
    return int(require_finite(int(require_number(value, "int")), "int"))


def _float(scope: Evaluation, value: Any) -> float:
    return float(_parsed(value) if isinstance(value, str) else require_number(value, "float"))


def _parsed(written: str) -> int | float:
    if len(written) <= 40:
        for kind in (int, float):
            try:
                return require_finite(kind(written), "a number")
            except (ValueError, OverflowError):
                continue
    raise ExpressionError(f"{json_text.describe(written)} does not write a number")


def to_text(scope: Evaluation, value: Any) -> str:
    """A text as it is, anything else as JSON."""
    if isinstance(value, str):
        made = value
    else:
        scope.check_text(json_length(value))
        made = json_text.encode(value)
    scope.spend_text(len(made))
    return made


def _join(scope: Evaluation, values: Any, separator: Any = "") -> str:
    between = require_text(separator, "join")
    listed = require_list(values, "join")
    parts = [to_text(scope, one) for one in listed]
    scope.spend_text(len(between) * len(parts) + sum(map(len, parts)))
    return between.join(parts)


def _split(scope: Evaluation, value: Any, separator: Any = None) -> list[str]:
    whole = require_text(value, "split")
    if separator is not None and not require_text(separator, "split"):
        raise ExpressionError("split needs a separator that is not empty")
    scope.spend_text(len(whole))
    parts = whole.split(separator)
    scope.spend(len(parts))
    return parts


def _replace(scope: Evaluation, value: Any, old: Any, new: Any) -> str:
    whole, gone, put = require_text(value, "replace"), require_text(old, "replace"), require_text(new, "replace")
    if not gone:
        raise ExpressionError("replace needs a text to look for that is not empty")
    scope.spend_text(len(whole))
    scope.spend_text(whole.count(gone) * len(put) + len(whole))
    return whole.replace(gone, put)


def _changed(name: str, change: Callable[[str], str]) -> Function:
    def run(scope: Evaluation, value: Any) -> str:
        whole = require_text(value, name)
        scope.spend_text(len(whole))
        return change(whole)

    return run


def _tested(name: str, test: Callable[[str, str], bool]) -> Function:
    def run(scope: Evaluation, value: Any, part: Any) -> bool:
        return test(require_text(value, name), require_text(part, name))

    return run


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ExpressionError(f"{what} needs an object, not {type_name(value)}")
    return cast("Mapping[str, Any]", value)


def _keys(scope: Evaluation, value: Any) -> list[str]:
    found = _object(value, "keys")
    scope.spend(len(found))
    return list(found)


def _values(scope: Evaluation, value: Any) -> list[Any]:
    found = _object(value, "values")
    scope.spend(len(found))
    return list(found.values())


def _count_of(scope: Evaluation, values: Any, wanted: Any) -> int:
    return sum(is_equal(scope, one, wanted) for one in require_list(values, "count"))


def _quantified(name: str, quantify: Callable[[Sequence[Any]], bool]) -> Function:
    def run(scope: Evaluation, values: Any) -> bool:
        listed = require_list(values, name)
        scope.spend(len(listed))
        return quantify(listed)

    return run


def _reversed(scope: Evaluation, values: Any) -> Any:
    listed = require_text(values, "reversed") if isinstance(values, str) else require_list(values, "reversed")
    scope.spend(len(listed))
    return listed[::-1] if isinstance(listed, str) else list(reversed(listed))


def _square_root(scope: Evaluation, value: Any) -> float:
    found = require_number(value, "sqrt")
    if found < 0:
        raise ExpressionError("sqrt needs a number that is not negative")
    return math.sqrt(found)


def _bool(scope: Evaluation, value: Any) -> bool:
    return is_true(value)


def _is_number(scope: Evaluation, value: Any) -> bool:
    return is_number(value)


FUNCTIONS: Mapping[str, Function] = {
    "abs": _numeric("abs", abs),
    "all": _quantified("all", all),
    "any": _quantified("any", any),
    "avg": _average,
    "bool": _bool,
    "ceil": _numeric("ceil", math.ceil),
    "contains": contains,
    "count": _count_of,
    "endswith": _tested("endswith", str.endswith),
    "float": _float,
    "floor": _numeric("floor", math.floor),
    "int": _whole,
    "is_number": _is_number,
    "join": _join,
    "keys": _keys,
    "len": _length,
    "lower": _changed("lower", str.lower),
    "max": _extreme("max", max),
    "min": _extreme("min", min),
    "range": _range,
    "replace": _replace,
    "reversed": _reversed,
    "round": _round,
    "sorted": _sorted,
    "split": _split,
    "sqrt": _square_root,
    "startswith": _tested("startswith", str.startswith),
    "str": to_text,
    "strip": _changed("strip", str.strip),
    "sum": _sum,
    "unique": _unique,
    "upper": _changed("upper", str.upper),
    "values": _values,
}
