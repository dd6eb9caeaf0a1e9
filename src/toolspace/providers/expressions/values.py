"""Values of expressions: JSON and nothing else. What they may be compared and computed with, and what that costs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard, cast

from toolspace.core import json_text

STEP_BUDGET: Final = 100_000
"""Steps of one evaluation: some tens of milliseconds. A step is one operation, one element, or 16 characters made."""
MAX_RESULT_LENGTH: Final = 8 * 1024 * 1024
"""Characters of a result: a text that is a thousand times in a list costs few steps, but is written so many times."""
_CHARACTERS_A_STEP: Final = 16
_LARGEST: Final = 2**63
_MOST_BITS: Final = 63


class ExpressionError(ValueError):
    """An expression that cannot be compiled, or has no value for this input."""


class MissingValueError(ExpressionError):
    """Something that is not in the input."""


class Evaluation:
    """One evaluation: its input, the names bound on the way, and the steps that are left."""

    __slots__ = ("input", "names", "remaining_steps")

    def __init__(self, input: Mapping[str, Any], budget: int = STEP_BUDGET) -> None:
        self.input = input
        self.names: dict[str, Any] = {}
        self.remaining_steps = budget

    def spend(self, steps: int) -> None:
        self.remaining_steps -= steps
        if self.remaining_steps < 0:
            raise ExpressionError("it takes too many steps for this input")

    def spend_text(self, characters: int) -> None:
        """Said before a text is made: a short input must not become a long one."""
        self.spend(characters // _CHARACTERS_A_STEP + 1)

    def check_text(self, characters: int) -> None:
        """Raises where a text of that length could not be paid for."""
        if characters // _CHARACTERS_A_STEP > self.remaining_steps:
            self.spend(self.remaining_steps + 1)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_number(value: object, what: str) -> int | float:
    """The value, if one can compute with it."""
    if not is_number(value):
        raise ExpressionError(f"{what} needs a number, not {type_name(value)}")
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise ExpressionError(f"{what}: the number is too large")
    return value


def require_finite(value: Any, what: str) -> int | float:
    """A result, if it is a number that JSON can carry."""
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
    """Empty, zero, false and null are false."""
    return bool(value)


def json_length(value: object, _known: dict[int, int] | None = None) -> int:
    """The characters that its JSON has at least. What is in it many times is looked at once."""
    if isinstance(value, str):
        return len(value) + 2
    if not isinstance(value, list | tuple | Mapping):
        return 1
    known = {} if _known is None else _known
    found = known.get(id(cast("object", value)))
    if found is None:
        if isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            found = 2 + sum(len(key) + json_length(one, known) for key, one in members.items())
        else:
            found = 2 + sum(json_length(one, known) for one in cast("Sequence[Any]", value))
        known[id(cast("object", value))] = found
    return found


def power(base: object, exponent: object) -> int | float:
    left, right = require_number(base, "**"), require_number(exponent, "**")
    # Known before it is computed: a large power of a whole number takes long.
    if isinstance(left, int) and abs(left) > 1 and right * math.log2(abs(left)) > _MOST_BITS:
        raise ExpressionError("**: the result is too large")
    try:
        return require_finite(left**right, "**")
    except (OverflowError, ZeroDivisionError):
        raise ExpressionError("** has no finite result") from None


def is_equal(scope: Evaluation, left: object, right: object) -> bool:
    """Whether two values are the same JSON. Unlike in Python, true is not 1."""
    pairs: list[tuple[Any, Any]] = [(left, right)]
    scope.spend(1)
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, bool) or isinstance(other, bool):
            if one is not other:
                return False
        elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
            first, second = cast("Sequence[Any]", one), cast("Sequence[Any]", other)
            scope.spend(len(first))
            if len(first) != len(second):
                return False
            pairs.extend(zip(first, second, strict=True))
        elif isinstance(one, Mapping) and isinstance(other, Mapping):
            these, those = cast("Mapping[str, Any]", one), cast("Mapping[str, Any]", other)
            scope.spend(len(these))
            if these.keys() != those.keys():
                return False
            pairs.extend((value, those[key]) for key, value in these.items())
        else:
            if isinstance(one, str):
                scope.spend_text(len(one))
            if one != other:
                return False
    return True


def contains(scope: Evaluation, container: object, wanted: object) -> bool:
    """Whether a list has an element, an object a key, a text a part."""
    if isinstance(container, str):
        scope.spend_text(len(container))
        return require_text(wanted, "in") in container
    if isinstance(container, Mapping):
        return isinstance(wanted, str) and wanted in container
    return any(is_equal(scope, one, wanted) for one in require_list(container, "in"))


def check_comparable(left: object, right: object, what: str) -> bool:
    """Whether one can come before the other: two numbers, or two texts."""
    if (is_number(left) and is_number(right)) or (isinstance(left, str) and isinstance(right, str)):
        return True
    raise ExpressionError(f"{what} cannot compare {type_name(left)} with {type_name(right)}")


# MERGED from operations: What the pieces of an expression do when it is evaluated. Each takes its steps from the b…

Evaluate = Callable[[Evaluation], Any]
"""A piece of an expression, compiled."""
Loop = tuple[str, Evaluate, list[Evaluate]]
"""One `for` of a comprehension: its name, what it goes through, its conditions."""

OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
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


def run_loops(scope: Evaluation, loops: list[Loop], depth: int, value: Evaluate, found: list[Any]) -> None:
    name, source, tests = loops[depth]
    over = source(scope)
    if isinstance(over, Mapping):
        over = list(cast("Mapping[str, Any]", over))  # Its keys.
    if not isinstance(over, list | tuple):
        raise ExpressionError(f"`for {name}` needs a list, not {type_name(over)}")
    for item in cast("list[Any]", over):
        scope.spend(1)
        scope.names[name] = item
        if all(is_true(test(scope)) for test in tests):
            if depth + 1 < len(loops):
                run_loops(scope, loops, depth + 1, value, found)
            else:
                found.append(value(scope))


def compile_member(inner: Evaluate, name: str) -> Evaluate:
    def look(scope: Evaluation) -> Any:
        scope.spend(1)
        value = inner(scope)
        if not isinstance(value, Mapping):
            raise MissingValueError(f'"{name}" was looked for in {type_name(value)}, which has no members')
        members = cast("Mapping[str, Any]", value)
        if name not in members:
            raise MissingValueError(f'"{name}" is not there')
        return members[name]

    return look


def compile_subscript(inner: Evaluate, index: Evaluate) -> Evaluate:
    def look(scope: Evaluation) -> Any:
        scope.spend(1)
        value, place = inner(scope), index(scope)
        if isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            if not isinstance(place, str) or place not in members:
                raise MissingValueError(f"{json_text.describe(place)} is not there")
            return members[place]
        if isinstance(value, str | list | tuple):
            try:
                return cast("Any", value)[require_index(place)]
            except IndexError:
                raise MissingValueError(f"there is no element {place}") from None
        raise MissingValueError(
            f"{json_text.describe(place)} was looked for in {type_name(value)}, which has no elements"
        )

    return look


def require_index(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ExpressionError(f"a place in a list is a whole number, not {type_name(value)}")


def require_whole(value: object) -> int:
    found = require_number(value, "the format d")
    if found != int(found):
        raise ExpressionError("the format d needs a whole number")
    return int(found)


def add_values(scope: Evaluation, left: object, right: object) -> Any:
    scope.spend(1)
    if is_number(left) and is_number(right):
        return require_finite(require_number(left, "+") + require_number(right, "+"), "+")
    if isinstance(left, str) and isinstance(right, str):
        scope.spend_text(len(left) + len(right))
        return left + right
    kinds = f"{type_name(left)} and {type_name(right)}"
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        first, second = cast("list[Any]", left), cast("list[Any]", right)
        scope.spend(len(first) + len(second))
        return [*first, *second]
    raise ExpressionError(f"+ cannot add {kinds}; write str(…) for the text of a value")


def compile_boolean(values: list[Evaluate], *, stop: bool) -> Evaluate:
    def run(scope: Evaluation) -> Any:
        found: Any = None
        for value in values:
            scope.spend(1)
            found = value(scope)
            if is_true(found) == stop:
                break
        return found

    return run


def compile_list(elements: list[Evaluate]) -> Evaluate:
    def make(scope: Evaluation) -> list[Any]:
        scope.spend(len(elements) + 1)
        return [element(scope) for element in elements]

    return make


def compile_joined_text(parts: list[Evaluate]) -> Evaluate:
    def make(scope: Evaluation) -> str:
        texts = [part(scope) for part in parts]
        scope.spend_text(sum(map(len, texts)))
        return "".join(texts)

    return make
