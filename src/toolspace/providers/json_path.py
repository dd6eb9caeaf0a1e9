"""Finds values of a JSON text by a JSONPath (RFC 9535), within a number of steps.

`internal_tools` uses it for stored outputs, in a thread. The JSONPath library has no limit of its own, and nested
filters take exponential time. Its environment accepts another parser: ours makes segments that count what they visit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from toolspace.core import json_text
from toolspace.errors import ToolCanceledError, ToolExecutionError, ToolValidationError

if TYPE_CHECKING:
    from jsonpath import JSONPathMatch

MAX_VALUES: Final = 10_000
_MAX_PATH_CHARACTERS: Final = 1_000
_MAX_STEPS: Final = 3_000_000
"""A few seconds of one processor."""
_STEPS_PER_CHECK: Final = 1_000
_ITEMS_PER_STEP: Final = 32
"""Looking at one item of a list takes so much less time than making a node of it."""
_LEVELS_PER_STEP: Final = 8
"""The path of a node takes time, too."""


class _StepLimitError(Exception):
    """A JSONPath query took too many steps."""


class _StepBudget:
    """The steps that one query may still take."""

    def __init__(self, is_abandoned: threading.Event) -> None:
        self._is_abandoned = is_abandoned
        self._remaining = _MAX_STEPS
        self._next_check = _MAX_STEPS - _STEPS_PER_CHECK

    def take(self, count: int = 1) -> None:
        """Raises `_StepLimitError` after too many steps, and `ToolCanceledError` if nobody waits any more."""
        self._remaining -= count
        if self._remaining <= self._next_check:
            self._next_check = self._remaining - _STEPS_PER_CHECK
            if self._remaining < 0:
                raise _StepLimitError
            if self._is_abandoned.is_set():
                raise ToolCanceledError("canceled")


def find_values(text: str, path: str, is_abandoned: threading.Event) -> list[Any]:
    """Returns what a JSONPath finds in a JSON text: at most one value more than `MAX_VALUES`.

    Raises `ToolValidationError` after too many steps, and `ToolCanceledError` once `is_abandoned` is set.
    """
    if len(path) > _MAX_PATH_CHARACTERS:
        raise ToolValidationError(f"jsonPath: at most {_MAX_PATH_CHARACTERS} characters, got {len(path)}")
    try:
        document = json_text.decode(text)
    except ValueError as error:
        raise ToolExecutionError(f"the output is not JSON ({error}); use pattern or offset") from None
    environment = _create_environment(_StepBudget(is_abandoned))
    try:
        matches = environment.finditer(path, document)
        return [match.obj for match in itertools.islice(matches, MAX_VALUES + 1)]
    except ToolCanceledError:
        raise
    except _StepLimitError:
        raise ToolValidationError(
            f"jsonPath: {json_text.describe(path)} takes more than {_MAX_STEPS:,} steps in this output; "
            "use a path with fewer filters and without `..`, or use pattern"
        ) from None
    except Exception as error:  # The library raises its own errors, and others for unusual paths.
        # Not `str(error)`: the library puts the path into it, which fails if the path is empty.
        reason = str(error.args[0] if error.args else type(error).__name__).partition("\n")[0]
        raise ToolValidationError(f"jsonPath: {json_text.describe(path)}: {reason}") from None


def _create_environment(budget: _StepBudget) -> Any:
    # Imported here: they take 80 ms.
    import jsonpath
    from jsonpath.parse import Parser as BaseParser
    from jsonpath.segments import JSONPathChildSegment, JSONPathRecursiveDescentSegment, JSONPathSegment

    def count(nodes: Iterable[JSONPathMatch]) -> Iterator[JSONPathMatch]:
        for node in nodes:
            value = node.obj
            item_count = len(cast("list[object]", value)) if isinstance(value, dict | list) else 0
            budget.take(1 + len(node.parts) // _LEVELS_PER_STEP + item_count // _ITEMS_PER_STEP)
            yield node

    class ChildSegment(JSONPathChildSegment):
        def resolve(self, nodes: Iterable[JSONPathMatch]) -> Iterator[JSONPathMatch]:
            return count(super().resolve(count(nodes)))

    class DescentSegment(JSONPathRecursiveDescentSegment):
        def resolve(self, nodes: Iterable[JSONPathMatch]) -> Iterator[JSONPathMatch]:
            visited_nodes = count(descendant for node in nodes for descendant in _descend(node))
            for node in visited_nodes:
                for selector in self.selectors:
                    yield from count(selector.resolve(node))

    class Parser(BaseParser):
        def parse_query(self, stream: Any) -> Iterator[JSONPathSegment]:
            for segment in super().parse_query(stream):
                is_descent = isinstance(segment, JSONPathRecursiveDescentSegment)
                segment_class = DescentSegment if is_descent else ChildSegment
                yield segment_class(env=segment.env, token=segment.token, selectors=segment.selectors)

    class Environment(jsonpath.JSONPathEnvironment):
        parser_class = Parser

        def is_truthy(self, obj: object) -> bool:
            budget.take()  # Each item that a filter tests.
            return super().is_truthy(obj)

        def compare(self, *operands: Any, **named_operands: Any) -> bool:
            # The interpreter compares whole documents in one call, so each of their values is a step.
            budget.take(_count_values([*operands, *named_operands.values()]))
            return super().compare(*operands, **named_operands)

    environment = Environment(strict=True)
    for name in ("match", "search"):
        # They run regular expressions of the caller without a time limit.
        environment.function_extensions.pop(name, None)
    return environment


def _descend(node: JSONPathMatch) -> Iterator[JSONPathMatch]:
    """Yields a node and the lists and objects below it, each before those that it contains."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        yield node
        value = node.obj
        if isinstance(value, dict):
            items: list[tuple[Any, object]] = list(cast("dict[str, object]", value).items())
        elif isinstance(value, list):
            items = list(enumerate(cast("list[object]", value)))
        else:
            continue
        nodes += [node.new_child(item, key) for key, item in reversed(items) if _is_container(item)]


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list)


def _count_values(value: object) -> int:
    """The number of values in a JSON value."""
    if isinstance(value, dict):
        return 1 + sum(_count_values(item) for item in cast("dict[str, object]", value).values())
    if isinstance(value, list):
        return 1 + sum(_count_values(item) for item in cast("list[object]", value))
    return 1
