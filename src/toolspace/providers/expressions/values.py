"""The JSON values of expressions: type checks, operators, and the step budget of an evaluation.

Every operation spends its steps before it creates anything. `compiler` and `functions` use it.
"""

from __future__ import annotations

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


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_number(value: object, what: str) -> int | float:
    """The value, if it is a number in the supported range. `what` names the operation in errors."""
    if not is_number(value):
        raise ExpressionError(f"{what} needs a number, not {type_name(value)}")
    if isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
        raise ExpressionError(f"{what}: the number is too large")
    return value


def require_finite(value: Any, what: str) -> int | float:
    """A result, if it is a number that JSON can represent."""
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ExpressionError(f"{what} has no finite result")
    return require_number(value, what)


def require_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ExpressionError(f"{what} needs a text, not {type_name(value)}")
    return value


def require_list(value: object, what: str) -> Sequence[Any]:
    """The elements of a list."""
    if not isinstance(value, list | tuple):
        raise ExpressionError(f"{what} needs a list, not {type_name(value)}")
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


def is_true(value: object) -> bool:
    """Empty values, zero, false and null are false."""
    return bool(value)


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


def power(base: object, exponent: object) -> int | float:
    first, second = require_number(base, "**"), require_number(exponent, "**")
    # Checked before computing: a large power of an integer takes long.
    if isinstance(first, int) and abs(first) > 1 and second * math.log2(abs(first)) > _MAX_BITS:
        raise ExpressionError("**: the result is too large")
    try:
        return require_finite(first**second, "**")
    except (OverflowError, ZeroDivisionError):
        raise ExpressionError("** has no finite result") from None


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


def check_comparable(first: object, second: object, what: str) -> bool:
    """True if both are numbers or both are texts; raises otherwise."""
    if (is_number(first) and is_number(second)) or (isinstance(first, str) and isinstance(second, str)):
        return True
    raise ExpressionError(f"{what} cannot compare {type_name(first)} with {type_name(second)}")


Evaluate = Callable[[EvaluationScope], Any]
"""A compiled part of an expression."""
Loop = tuple[str, Evaluate, list[Evaluate]]
"""One `for` of a comprehension: its name, its list, its conditions."""

OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda first, second: first / second,
    "//": lambda first, second: first // second,
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def run_loops(scope: EvaluationScope, loops: list[Loop], depth: int, element: Evaluate, results: list[Any]) -> None:
    """Runs the loops of a comprehension from `depth` on, and appends each element to `results`."""
    name, source, tests = loops[depth]
    items = source(scope)
    if isinstance(items, Mapping):
        items = list(cast("Mapping[str, Any]", items))  # Its keys.
    if not isinstance(items, list | tuple):
        raise ExpressionError(f"`for {name}` needs a list, not {type_name(items)}")
    for item in cast("list[Any]", items):
        scope.spend(1)
        scope.names[name] = item
        if all(is_true(test(scope)) for test in tests):
            if depth + 1 < len(loops):
                run_loops(scope, loops, depth + 1, element, results)
            else:
                results.append(element(scope))


def compile_member(inner: Evaluate, name: str) -> Evaluate:
    def evaluate(scope: EvaluationScope) -> Any:
        scope.spend(1)
        value = inner(scope)
        if not isinstance(value, Mapping):
            raise MissingValueError(f'"{name}" was looked for in {type_name(value)}, which has no members')
        members = cast("Mapping[str, Any]", value)
        if name not in members:
            raise MissingValueError(f'"{name}" is not there')
        return members[name]

    return evaluate


def compile_subscript(inner: Evaluate, index: Evaluate) -> Evaluate:
    def evaluate(scope: EvaluationScope) -> Any:
        scope.spend(1)
        value, key = inner(scope), index(scope)
        if isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            if not isinstance(key, str) or key not in members:
                raise MissingValueError(f"{json_text.describe(key)} is not there")
            return members[key]
        if isinstance(value, str | list | tuple):
            try:
                return cast("Any", value)[require_index(key)]
            except IndexError:
                raise MissingValueError(f"there is no element {key}") from None
        raise MissingValueError(
            f"{json_text.describe(key)} was looked for in {type_name(value)}, which has no elements"
        )

    return evaluate


def require_index(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ExpressionError(f"the index of a list is a whole number, not {type_name(value)}")


def require_whole(value: object) -> int:
    number = require_number(value, "the format d")
    if number != int(number):
        raise ExpressionError("the format d needs a whole number")
    return int(number)


def add_values(scope: EvaluationScope, first: object, second: object) -> Any:
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


def compile_boolean(values: list[Evaluate], *, stop: bool) -> Evaluate:
    """`or` stops at the first true value (`stop=True`), `and` at the first false one."""

    def evaluate(scope: EvaluationScope) -> Any:
        result: Any = None
        for value in values:
            scope.spend(1)
            result = value(scope)
            if is_true(result) == stop:
                break
        return result

    return evaluate


def compile_list(elements: list[Evaluate]) -> Evaluate:
    def evaluate(scope: EvaluationScope) -> list[Any]:
        scope.spend(len(elements) + 1)
        return [element(scope) for element in elements]

    return evaluate


def compile_joined_text(parts: list[Evaluate]) -> Evaluate:
    def evaluate(scope: EvaluationScope) -> str:
        texts = [part(scope) for part in parts]
        scope.spend_text(sum(map(len, texts)))
        return "".join(texts)

    return evaluate
