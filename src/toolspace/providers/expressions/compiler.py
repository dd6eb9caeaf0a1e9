"""Compiles expressions: parses them with Python's parser and accepts only nodes that compute JSON. Runs no Python code.

A name or `a.b` reads the input, never an attribute of a Python object; `x.f(y)` is the function `f(x, y)`. Every
operation spends steps of one budget, so that no input makes an expression slow or large.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from toolspace.core import json_text
from toolspace.core.names import did_you_mean
from toolspace.providers.expressions.runtime import (
    COMPARISONS,
    FUNCTIONS,
    MAX_RESULT_LENGTH,
    OPERATORS,
    STEP_BUDGET,
    EvaluationScope,
    ExpressionError,
    MissingValueError,
    json_length,
    require_finite,
    require_number,
    require_text,
    to_text,
    type_name,
)

MAX_EXPRESSION_LENGTH = 10_000
INPUT = "input"
Evaluate = Callable[[EvaluationScope], Any]
"""A compiled part of an expression."""
Loop = tuple[str, Evaluate, list[Evaluate]]
"""One `for` of a comprehension: its name, its list, its conditions."""

_CONSTANTS: Mapping[str, Any] = {"true": True, "false": False, "null": None}
_SPECIAL_FUNCTIONS = ("default", "has")
"""Functions whose first argument may be missing in the input."""
_FORMAT = re.compile(r"(,?(\.\d{1,2}f|d)?|(\.\d{1,2})?%)")


class Expression:
    """A compiled expression. `names` are the properties of the input that it reads."""

    def __init__(self, source: str) -> None:
        """Raises `ExpressionError` with line and column."""
        compiler = _Compiler()
        self._evaluate = compiler.compile(_parse(source))
        self.names: tuple[str, ...] = tuple(compiler.names)

    def evaluate(self, input: Mapping[str, Any], *, budget: int = STEP_BUDGET) -> Any:
        """Its JSON value for an input. Raises `ExpressionError` if it has none."""
        try:
            value = self._evaluate(EvaluationScope(input, budget))
            if json_length(value) > MAX_RESULT_LENGTH:
                raise ExpressionError("the result is too large")
            return value
        except ExpressionError:
            raise
        except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
            raise ExpressionError(str(error) or type(error).__name__) from None


def _parse(source: str) -> ast.expr:
    if len(source) > MAX_EXPRESSION_LENGTH:
        raise ExpressionError(f"the expression is longer than {MAX_EXPRESSION_LENGTH} characters")
    if "\0" in source:
        raise ExpressionError("the expression contains a NUL character")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of escapes such as "\\d".
            # In brackets on separate lines: an expression may have several lines and end with a comment.
            return ast.parse(f"(\n{source}\n)", mode="eval").body
    except SyntaxError as error:
        line = (error.lineno or 1) - 1
        is_at_end = line > source.count("\n") + 1  # The line of the closing bracket.
        position = "the end" if is_at_end else f"line {line}, column {error.offset}"
        raise ExpressionError(f"{position}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise ExpressionError("the expression is nested too deeply") from None


def _error_at(node: ast.AST, message: str) -> ExpressionError:
    position = cast("Any", node)
    return ExpressionError(f"line {position.lineno - 1}, column {position.col_offset + 1}: {message}")


class _Compiler:
    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._bound_names: list[str] = []
        """Names that the comprehensions around the current node bind."""

    def compile(self, node: ast.expr) -> Evaluate:
        try:
            return self._node(node)
        except RecursionError:
            raise ExpressionError("the expression is nested too deeply") from None

    def _node(self, node: ast.expr) -> Evaluate:
        match node:
            case ast.Constant(value=value):
                return self._constant(node, value)
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=inner, attr=name):
                inner = self._node(inner)
                return lambda scope: _get_member(scope, inner(scope), name)
            case ast.Subscript(value=inner, slice=ast.Slice() as part):
                return self._slice(self._node(inner), part)
            case ast.Subscript(value=inner, slice=index):
                inner, index = self._node(inner), self._node(index)
                return lambda scope: _get_item(scope, inner(scope), index(scope))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._node(operand)
                return lambda scope: not inner(scope)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._node(operand)
                return lambda scope: require_finite(-require_number(inner(scope), "-"), "-")
            case ast.BinOp(left=first, op=op, right=second):
                return self._binary(node, self._node(first), op, self._node(second))
            case ast.BoolOp(op=op, values=values):
                return partial(_evaluate_boolean, [self._node(value) for value in values], isinstance(op, ast.Or))
            case ast.Compare(left=first, ops=ops, comparators=operands):
                return self._compare(first, ops, operands)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                test, body, orelse = self._node(test), self._node(body), self._node(orelse)
                return lambda scope: body(scope) if test(scope) else orelse(scope)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return partial(_evaluate_list, [self._node(element) for element in elements])
            case ast.Dict(keys=keys, values=values):
                return self._object(node, keys, values)
            case (
                ast.ListComp(elt=element, generators=generators) | ast.GeneratorExp(elt=element, generators=generators)
            ):
                return self._comprehension(generators, element)
            case ast.JoinedStr(values=parts):
                return partial(_join_texts, [self._part(part) for part in parts])
            case ast.Call():
                return self._call(node)
            case _:
                raise _error_at(node, f"{type(node).__name__} is not allowed in an expression")

    def _constant(self, node: ast.expr, value: object) -> Evaluate:
        if value is None or isinstance(value, bool | str):
            return lambda scope: value
        if isinstance(value, int | float):
            number = require_finite(value, "a number")
            return lambda scope: number
        raise _error_at(node, f"{value!r:.40} is not JSON")

    def _name(self, name: str) -> Evaluate:
        if name in self._bound_names:
            return lambda scope: scope.names[name]
        if name in _CONSTANTS:
            value = _CONSTANTS[name]
            return lambda scope: value
        if name != INPUT:
            self.names[name] = None

        def evaluate(scope: EvaluationScope) -> Any:
            scope.spend(1)
            if name in scope.input:
                return scope.input[name]
            if name == INPUT:
                return scope.input
            raise MissingValueError(f'"{name}" is not in the input')

        return evaluate

    def _slice(self, inner: Evaluate, node: ast.Slice) -> Evaluate:
        if node.step is not None:
            raise _error_at(node.step, "a slice has a start and an end, no step")
        ends = [None if end is None else self._node(end) for end in (node.lower, node.upper)]

        def evaluate(scope: EvaluationScope) -> Any:
            value = inner(scope)
            if not isinstance(value, str | list | tuple):
                raise ExpressionError(f"a slice needs a text or a list, not {type_name(value)}")
            start, stop = (None if end is None else _require_index(end(scope)) for end in ends)
            part = cast("Any", value)[start:stop]
            scope.spend(len(part) // (16 if isinstance(part, str) else 1) + 1)
            return part

        return evaluate

    def _binary(self, node: ast.AST, first: Evaluate, op: ast.operator, second: Evaluate) -> Evaluate:
        operate = OPERATORS.get(type(op))
        if operate is None:
            raise _error_at(node, f"the operator {type(op).__name__} is not allowed in an expression")
        return lambda scope: operate(scope, first(scope), second(scope))

    def _compare(self, first: ast.expr, ops: list[ast.cmpop], operands: list[ast.expr]) -> Evaluate:
        evaluate_first = self._node(first)
        steps = [(COMPARISONS[type(op)], self._node(item)) for op, item in zip(ops, operands, strict=True)]

        def evaluate(scope: EvaluationScope) -> bool:
            scope.spend(1)
            first_value = evaluate_first(scope)
            for is_fulfilled, evaluate_next in steps:
                second_value = evaluate_next(scope)
                if not is_fulfilled(scope, first_value, second_value):
                    return False
                first_value = second_value
            return True

        return evaluate

    def _object(self, node: ast.AST, keys: list[ast.expr | None], values: list[ast.expr]) -> Evaluate:
        pairs: list[tuple[Evaluate, Evaluate]] = []
        for key, value in zip(keys, values, strict=True):
            if key is None:
                raise _error_at(node, "** is not allowed in an object; name its members")
            pairs.append((self._node(key), self._node(value)))

        def evaluate(scope: EvaluationScope) -> dict[str, Any]:
            scope.spend(len(pairs) + 1)
            return {require_text(key(scope), "the name of a member"): value(scope) for key, value in pairs}

        return evaluate

    def _comprehension(self, generators: list[ast.comprehension], element: ast.expr) -> Evaluate:
        outer_count = len(self._bound_names)
        loops: list[Loop] = []
        for generator in generators:
            if not isinstance(generator.target, ast.Name) or generator.is_async:
                raise _error_at(generator.target, "`for` takes one name")
            source = self._node(generator.iter)
            self._bound_names.append(generator.target.id)
            loops.append((generator.target.id, source, [self._node(test) for test in generator.ifs]))
        value = self._node(element)
        del self._bound_names[outer_count:]

        def evaluate(scope: EvaluationScope) -> list[Any]:
            results: list[Any] = []
            outer_names = dict(scope.names)
            try:
                _run_loops(scope, loops, 0, value, results)
            finally:
                scope.names = outer_names
            return results

        return evaluate

    def _part(self, node: ast.expr) -> Evaluate:
        """A part of an f-string."""
        if not isinstance(node, ast.FormattedValue):
            return self._node(node)
        inner = self._node(node.value)
        if node.format_spec is None:
            return lambda scope: to_text(scope, inner(scope))
        parts = cast("ast.JoinedStr", node.format_spec).values
        spec = parts[0].value if len(parts) == 1 and isinstance(parts[0], ast.Constant) else None
        if not isinstance(spec, str) or not _FORMAT.fullmatch(spec):
            raise _error_at(node, "use a format such as .2f, ,.2f, d or .1%")
        # `d` formats whole numbers, such as 3 and 3.0.
        if spec.endswith("d"):
            return lambda scope: format(_require_whole(inner(scope)), spec)
        return lambda scope: format(require_number(inner(scope), "a format"), spec)

    def _call(self, node: ast.Call) -> Evaluate:
        match node.func:
            case ast.Name(id=name):
                argument_nodes = node.args
            case ast.Attribute(value=first, attr=name):
                argument_nodes = [first, *node.args]
            case _:
                raise _error_at(node, "only functions can be called: write their name, such as len(x)")
        if node.keywords or any(isinstance(item, ast.Starred) for item in argument_nodes):
            raise _error_at(node, f"{name} takes positional arguments only")
        if name in _SPECIAL_FUNCTIONS:
            return self._special(node, name, argument_nodes)
        function = FUNCTIONS.get(name)
        if function is None:
            hint = did_you_mean(name, (*FUNCTIONS, *_SPECIAL_FUNCTIONS)) or f"; there are {', '.join(FUNCTIONS)}"
            raise _error_at(node, f'there is no function "{name}"{hint}')
        arguments = [self._node(item) for item in argument_nodes]

        _check_count(node, name, function, len(arguments))

        def evaluate(scope: EvaluationScope) -> Any:
            scope.spend(1)
            return function(scope, *[argument(scope) for argument in arguments])

        return evaluate

    def _special(self, node: ast.Call, name: str, argument_nodes: list[ast.expr]) -> Evaluate:
        """`has(x)`: whether x is in the input. `default(x, y)`: y if x is missing or null."""
        if len(argument_nodes) != (1 if name == "has" else 2):
            raise _error_at(node, "write has(value), or default(value, otherwise)")
        value = self._node(argument_nodes[0])
        otherwise = self._node(argument_nodes[1]) if name == "default" else None

        def evaluate(scope: EvaluationScope) -> Any:
            scope.spend(1)
            try:
                result = value(scope)
            except MissingValueError:
                return False if otherwise is None else otherwise(scope)
            if otherwise is None:
                return True
            return otherwise(scope) if result is None else result

        return evaluate


def _check_count(node: ast.Call, name: str, function: Callable[..., Any], count: int) -> None:
    """Raises if a function does not take this number of arguments beside the scope."""
    code = function.__code__
    maximum: float = code.co_argcount - 1
    minimum = code.co_argcount - 1 - len(function.__defaults__ or ())
    expected = f"{minimum}" if minimum == maximum else f"{minimum} to {maximum}"
    if code.co_flags & inspect.CO_VARARGS:
        minimum, maximum, expected = 1, math.inf, "at least 1"
    if not minimum <= count <= maximum:
        raise _error_at(node, f"{name} takes {expected} arguments, not {count}")


def _run_loops(scope: EvaluationScope, loops: list[Loop], depth: int, element: Evaluate, results: list[Any]) -> None:
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
        if all(test(scope) for test in tests):
            if depth + 1 < len(loops):
                _run_loops(scope, loops, depth + 1, element, results)
            else:
                results.append(element(scope))


def _get_member(scope: EvaluationScope, value: object, name: str) -> Any:
    scope.spend(1)
    if not isinstance(value, Mapping):
        raise MissingValueError(f'"{name}" was looked for in {type_name(value)}, which has no members')
    members = cast("Mapping[str, Any]", value)
    if name not in members:
        raise MissingValueError(f'"{name}" is not there: the object has no such member')
    return members[name]


def _get_item(scope: EvaluationScope, value: object, key: object) -> Any:
    scope.spend(1)
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value)
        if not isinstance(key, str) or key not in members:
            raise MissingValueError(f"{json_text.describe(key)} is not there")
        return members[key]
    if isinstance(value, str | list | tuple):
        try:
            return cast("Any", value)[_require_index(key)]
        except IndexError:
            raise MissingValueError(f"there is no element {key}") from None
    raise MissingValueError(f"{json_text.describe(key)} was looked for in {type_name(value)}, which has no elements")


def _evaluate_boolean(values: list[Evaluate], stop: bool, scope: EvaluationScope) -> Any:
    """`or` stops at the first true value (`stop=True`), `and` at the first false one."""
    result: Any = None
    for value in values:
        scope.spend(1)
        result = value(scope)
        if bool(result) == stop:
            break
    return result


def _evaluate_list(elements: list[Evaluate], scope: EvaluationScope) -> list[Any]:
    scope.spend(len(elements) + 1)
    return [element(scope) for element in elements]


def _join_texts(parts: list[Evaluate], scope: EvaluationScope) -> str:
    texts = [part(scope) for part in parts]
    scope.spend_text(sum(map(len, texts)))
    return "".join(texts)


def _require_index(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ExpressionError(f"the index of a list is a whole number, not {type_name(value)}")


def _require_whole(value: object) -> int:
    number = require_number(value, "the format d")
    if number != int(number):
        raise ExpressionError("the format d needs a whole number")
    return int(number)
