"""The runtime of expressions: JSON values, operators, the functions that they may call, and the step budget.

Every operation spends its steps before it computes. Used by `compiler`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard, cast

from toolspace.core import json_text

STEP_BUDGET: Final = 100_000
"""Steps of one evaluation, some tens of milliseconds. One operation, one element or 16 new characters is a step."""
MAX_RESULT_LENGTH: Final = 8 * 1024 * 1024
"""Characters of a result. A text that occurs a thousand times in a list costs few steps, but is written each time."""
_CHARACTERS_PER_STEP: Final = 16
_MAX_INTEGER: Final = 2**63
_MAX_BITS: Final = 63


class ExpressionError(ValueError):
    """An expression cannot be compiled, or has no value for an input."""


class MissingValueError(ExpressionError):
    """A value is not in the input."""


class EvaluationScope:
    """The state of one evaluation: its input, the names that comprehensions bind, and the remaining steps."""

    __slots__ = ("input", "names", "remaining_steps")

    def __init__(self, input: Mapping[str, Any], budget: int = STEP_BUDGET) -> None:
        self.input = input
        self.names: dict[str, Any] = {}
        self.remaining_steps = budget

    def spend(self, steps: int) -> None:
        """Spends steps of the budget. Raises `ExpressionError` if there are too few."""
        self.remaining_steps -= steps
        if self.remaining_steps < 0:
            raise ExpressionError("it takes too many steps for this input")

    def spend_text(self, characters: int) -> None:
        """Spends the steps of a text. Called before the text is created, so that it cannot grow without limit."""
        self.spend(characters // _CHARACTERS_PER_STEP + 1)

    def check_text(self, characters: int) -> None:
        """Raises if a text of this length exceeds the remaining steps."""
        if characters // _CHARACTERS_PER_STEP > self.remaining_steps:
            self.spend(self.remaining_steps + 1)


Function = Callable[..., Any]
"""Takes the scope and the values of its arguments."""
BinaryFunction = Callable[[EvaluationScope, Any, Any], Any]


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_number(value: object, operation: str) -> int | float:
    """The value, if it is a number in the supported range. `operation` names the operation in errors."""
    if not is_number(value):
        raise ExpressionError(f"{operation} needs a number, not {type_name(value)}")
    if isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
        raise ExpressionError(f"{operation}: the number is too large")
    return value


def require_finite(value: Any, operation: str) -> int | float:
    """A result, if it is a number that JSON can represent."""
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ExpressionError(f"{operation} has no finite result")
    return require_number(value, operation)


def require_text(value: object, operation: str) -> str:
    if not isinstance(value, str):
        raise ExpressionError(f"{operation} needs a text, not {type_name(value)}")
    return value


def require_list(value: object, operation: str) -> Sequence[Any]:
    """The elements of a list."""
    if not isinstance(value, list | tuple):
        raise ExpressionError(f"{operation} needs a list, not {type_name(value)}")
    return cast("Sequence[Any]", value)


def type_name(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list() | tuple():
            return "a list"
        case _:
            return "an object"


def json_length(value: object, lengths: dict[int, int] | None = None) -> int:
    """The minimum length of its JSON text. An object that occurs several times is measured once (`lengths`)."""
    if isinstance(value, str):
        return len(value) + 2
    if not isinstance(value, list | tuple | Mapping):
        return 1
    lengths = {} if lengths is None else lengths
    length = lengths.get(id(cast("object", value)))
    if length is None:
        if isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            length = 2 + sum(len(key) + json_length(item, lengths) for key, item in members.items())
        else:
            length = 2 + sum(json_length(item, lengths) for item in cast("Sequence[Any]", value))
        lengths[id(cast("object", value))] = length
    return length


def _power(scope: EvaluationScope, base: object, exponent: object) -> int | float:
    scope.spend(1)
    first, second = require_number(base, "**"), require_number(exponent, "**")
    # Checked before computing: a large power of an integer takes long.
    if isinstance(first, int) and abs(first) > 1 and second * math.log2(abs(first)) > _MAX_BITS:
        raise ExpressionError("**: the result is too large")
    try:
        return require_finite(first**second, "**")
    except (OverflowError, ZeroDivisionError):
        raise ExpressionError("** has no finite result") from None


def _arithmetic(sign: str, compute: Callable[[Any, Any], Any]) -> BinaryFunction:
    def run(scope: EvaluationScope, first: Any, second: Any) -> int | float:
        scope.spend(1)
        try:
            return require_finite(compute(require_number(first, sign), require_number(second, sign)), sign)
        except ZeroDivisionError:
            raise ExpressionError("division by zero") from None
        except OverflowError:
            raise ExpressionError(f"{sign} has no finite result") from None

    return run


def _order(sign: str, compare: Callable[[Any, Any], bool]) -> BinaryFunction:
    return lambda scope, first, second: check_comparable(first, second, sign) and compare(first, second)


def is_equal(scope: EvaluationScope, first: object, second: object) -> bool:
    """Whether two values are the same JSON. Unlike in Python, true does not equal 1."""
    pairs: list[tuple[Any, Any]] = [(first, second)]
    scope.spend(1)
    while pairs:
        first, second = pairs.pop()
        if isinstance(first, bool) or isinstance(second, bool):
            if first is not second:
                return False
        elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
            first_items, second_items = cast("Sequence[Any]", first), cast("Sequence[Any]", second)
            scope.spend(len(first_items))
            if len(first_items) != len(second_items):
                return False
            pairs.extend(zip(first_items, second_items, strict=True))
        elif isinstance(first, Mapping) and isinstance(second, Mapping):
            first_members, second_members = cast("Mapping[str, Any]", first), cast("Mapping[str, Any]", second)
            scope.spend(len(first_members))
            if first_members.keys() != second_members.keys():
                return False
            pairs.extend((value, second_members[key]) for key, value in first_members.items())
        else:
            if isinstance(first, str):
                scope.spend_text(len(first))
            if first != second:
                return False
    return True


def contains(scope: EvaluationScope, container: object, value: object) -> bool:
    """Whether a list contains an element, an object a key, or a text another text."""
    if isinstance(container, str):
        scope.spend_text(len(container))
        return require_text(value, "in") in container
    if isinstance(container, Mapping):
        return isinstance(value, str) and value in container
    return any(is_equal(scope, item, value) for item in require_list(container, "in"))


def check_comparable(first: object, second: object, operation: str) -> bool:
    """True if both are numbers or both are texts; raises otherwise."""
    if (is_number(first) and is_number(second)) or (isinstance(first, str) and isinstance(second, str)):
        return True
    raise ExpressionError(f"{operation} cannot compare {type_name(first)} with {type_name(second)}")


def _add(scope: EvaluationScope, first: object, second: object) -> Any:
    scope.spend(1)
    if is_number(first) and is_number(second):
        return require_finite(require_number(first, "+") + require_number(second, "+"), "+")
    if isinstance(first, str) and isinstance(second, str):
        scope.spend_text(len(first) + len(second))
        return first + second
    types = f"{type_name(first)} and {type_name(second)}"
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        first_items, second_items = cast("list[Any]", first), cast("list[Any]", second)
        scope.spend(len(first_items) + len(second_items))
        return [*first_items, *second_items]
    raise ExpressionError(f"+ cannot add {types}; write str(…) for the text of a value")


OPERATORS: Mapping[type[ast.operator], BinaryFunction] = {
    ast.Add: _add,
    ast.Sub: _arithmetic("-", operator.sub),
    ast.Mult: _arithmetic("*", operator.mul),
    ast.Div: _arithmetic("/", lambda first, second: first / second),
    ast.FloorDiv: _arithmetic("//", lambda first, second: first // second),
    ast.Mod: _arithmetic("%", operator.mod),
    ast.Pow: _power,
}
COMPARISONS: Mapping[type[ast.cmpop], BinaryFunction] = {
    ast.Eq: is_equal,
    ast.Is: is_equal,
    ast.NotEq: lambda scope, first, second: not is_equal(scope, first, second),
    ast.IsNot: lambda scope, first, second: not is_equal(scope, first, second),
    ast.In: lambda scope, first, second: contains(scope, second, first),
    ast.NotIn: lambda scope, first, second: not contains(scope, second, first),
    ast.Lt: _order("<", operator.lt),
    ast.LtE: _order("<=", operator.le),
    ast.Gt: _order(">", operator.gt),
    ast.GtE: _order(">=", operator.ge),
}


# Functions


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
        raise ExpressionError("avg of an empty list has no value")
    return require_finite(_sum(scope, items) / len(items), "avg")


def _extreme(name: str, pick: Callable[..., Any]) -> Function:
    def run(scope: EvaluationScope, *values: Any) -> Any:
        items = require_list(values[0], name) if len(values) == 1 else values
        if not items:
            raise ExpressionError(f"{name} of an empty list has no value")
        scope.spend(len(items))
        for item in items:
            check_comparable(items[0], item, name)
        return pick(items)

    return run


def _sort(scope: EvaluationScope, values: Any) -> list[Any]:
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


def _object_function(name: str, list_members: Callable[[Mapping[str, Any]], list[Any]]) -> Function:
    def run(scope: EvaluationScope, value: Any) -> list[Any]:
        if not isinstance(value, Mapping):
            raise ExpressionError(f"{name} needs an object, not {type_name(value)}")
        members = cast("Mapping[str, Any]", value)
        scope.spend(len(members))
        return list_members(members)

    return run


def _count(scope: EvaluationScope, values: Any, value: Any) -> int:
    return sum(is_equal(scope, item, value) for item in require_list(values, "count"))


def _list_test(name: str, quantify: Callable[[Sequence[Any]], bool]) -> Function:
    def run(scope: EvaluationScope, values: Any) -> bool:
        items = require_list(values, name)
        scope.spend(len(items))
        return quantify(items)

    return run


def _reverse(scope: EvaluationScope, values: Any) -> Any:
    items = require_text(values, "reversed") if isinstance(values, str) else require_list(values, "reversed")
    scope.spend(len(items))
    return items[::-1] if isinstance(items, str) else list(reversed(items))


def _square_root(scope: EvaluationScope, value: Any) -> float:
    number = require_number(value, "sqrt")
    if number < 0:
        raise ExpressionError("sqrt needs a number that is not negative")
    return math.sqrt(number)


def _predicate(test: Callable[[Any], bool]) -> Function:
    def run(scope: EvaluationScope, value: Any) -> bool:
        return test(value)

    return run


FUNCTIONS: Mapping[str, Function] = {
    "abs": _number_function("abs", abs),
    "all": _list_test("all", all),
    "any": _list_test("any", any),
    "avg": _average,
    "bool": _predicate(bool),
    "ceil": _number_function("ceil", math.ceil),
    "contains": contains,
    "count": _count,
    "endswith": _text_test("endswith", str.endswith),
    "float": _to_float,
    "floor": _number_function("floor", math.floor),
    "int": _to_integer,
    "is_number": _predicate(is_number),
    "join": _join,
    "keys": _object_function("keys", list),
    "len": _length,
    "lower": _text_function("lower", str.lower),
    "max": _extreme("max", max),
    "min": _extreme("min", min),
    "range": _range,
    "replace": _replace,
    "reversed": _reverse,
    "round": _round,
    "sorted": _sort,
    "split": _split,
    "sqrt": _square_root,
    "startswith": _text_test("startswith", str.startswith),
    "str": to_text,
    "strip": _text_function("strip", str.strip),
    "sum": _sum,
    "unique": _unique,
    "upper": _text_function("upper", str.upper),
    "values": _object_function("values", lambda members: list(members.values())),
}
