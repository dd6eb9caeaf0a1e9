"""Values of expressions: JSON and nothing else. What they may be compared and computed with, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard, cast

BUDGET: Final = 100_000
"""Steps of one evaluation: some tens of milliseconds. A step is one operation, one element, or 16 characters made."""
LARGEST_RESULT: Final = 8 * 1024 * 1024
"""Characters of a result: a text that is a thousand times in a list costs few steps, but is written so many times."""
_CHARACTERS_A_STEP: Final = 16
_LARGEST: Final = 2**63
_MOST_BITS: Final = 63


class ExpressionError(ValueError):
    """An expression that cannot be compiled, or has no value for this input."""


class Absent(ExpressionError):
    """Something that is not in the input."""


class Scope:
    """One evaluation: its input, the names bound on the way, and the steps that are left."""

    __slots__ = ("input", "left", "names")

    def __init__(self, input: Mapping[str, Any], budget: int = BUDGET) -> None:
        self.input = input
        self.names: dict[str, Any] = {}
        self.left = budget

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise ExpressionError("it takes too many steps for this input")

    def spend_text(self, characters: int) -> None:
        """Said before a text is made: a short input must not become a long one."""
        self.spend(characters // _CHARACTERS_A_STEP + 1)

    def check_text(self, characters: int) -> None:
        """Raises where a text of that length could not be paid for."""
        if characters // _CHARACTERS_A_STEP > self.left:
            self.spend(self.left + 1)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: object, what: str) -> int | float:
    """The value, if one can compute with it."""
    if not is_number(value):
        raise ExpressionError(f"{what} needs a number, not {kind_of(value)}")
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise ExpressionError(f"{what}: the number is too large")
    return value


def finite(value: Any, what: str) -> int | float:
    """A result, if it is a number that JSON can carry."""
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ExpressionError(f"{what} has no finite result")
    return number(value, what)


def text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ExpressionError(f"{what} needs a text, not {kind_of(value)}")
    return value


def items(value: object, what: str) -> Sequence[Any]:
    """The elements of a list."""
    if not isinstance(value, list | tuple):
        raise ExpressionError(f"{what} needs a list, not {kind_of(value)}")
    return cast("Sequence[Any]", value)


def kind_of(value: object) -> str:
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


def truth(value: object) -> bool:
    """Empty, zero, false and null are false."""
    return bool(value)


def weight(value: object, _known: dict[int, int] | None = None) -> int:
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
            found = 2 + sum(len(key) + weight(one, known) for key, one in members.items())
        else:
            found = 2 + sum(weight(one, known) for one in cast("Sequence[Any]", value))
        known[id(cast("object", value))] = found
    return found


def power(base: object, exponent: object) -> int | float:
    left, right = number(base, "**"), number(exponent, "**")
    # Known before it is computed: a large power of a whole number takes long.
    if isinstance(left, int) and abs(left) > 1 and right * math.log2(abs(left)) > _MOST_BITS:
        raise ExpressionError("**: the result is too large")
    try:
        return finite(left**right, "**")
    except (OverflowError, ZeroDivisionError):
        raise ExpressionError("** has no finite result") from None


def equal(scope: Scope, left: object, right: object) -> bool:
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


def contains(scope: Scope, container: object, wanted: object) -> bool:
    """Whether a list has an element, an object a key, a text a part."""
    if isinstance(container, str):
        scope.spend_text(len(container))
        return text(wanted, "in") in container
    if isinstance(container, Mapping):
        return isinstance(wanted, str) and wanted in container
    return any(equal(scope, one, wanted) for one in items(container, "in"))


def comparable(left: object, right: object, what: str) -> bool:
    """Whether one can come before the other: two numbers, or two texts."""
    if (is_number(left) and is_number(right)) or (isinstance(left, str) and isinstance(right, str)):
        return True
    raise ExpressionError(f"{what} cannot compare {kind_of(left)} with {kind_of(right)}")
