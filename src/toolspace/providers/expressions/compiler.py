"""Compiles expressions: Python's own parser, and of what it gives only what computes with JSON. Runs no Python code.

A name or `a.b` looks into the input and never at an object of Python, `x.f(y)` is the function `f(x, y)`, and every
operation takes steps from one budget, so that no input can make an expression run long or grow large.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

from toolspace.core.names import did_you_mean
from toolspace.providers.expressions.functions import FUNCTIONS, to_text
from toolspace.providers.expressions.values import (
    MAX_RESULT_LENGTH,
    OPERATORS,
    STEP_BUDGET,
    Evaluate,
    Evaluation,
    ExpressionError,
    Loop,
    MissingValueError,
    add_values,
    check_comparable,
    compile_boolean,
    compile_joined_text,
    compile_list,
    compile_member,
    compile_subscript,
    contains,
    is_equal,
    is_true,
    json_length,
    power,
    require_finite,
    require_index,
    require_number,
    require_text,
    require_whole,
    run_loops,
    type_name,
)

MAX_EXPRESSION_LENGTH = 10_000
"""Characters of an expression."""
INPUT = "input"
_CONSTANTS: Mapping[str, Any] = {"true": True, "false": False, "null": None}
_SPECIAL = ("default", "has")
_FORMAT = re.compile(r"(,?(\.\d{1,2}f|d)?|(\.\d{1,2})?%)")
_NUMERIC: Mapping[type[ast.operator], str] = {
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
_ORDER: Mapping[type[ast.cmpop], str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


class Expression:
    """An expression that was understood. `names` are the properties of the input that it looks at."""

    def __init__(self, source: str) -> None:
        """Raises `ExpressionError` with the place of the fault."""
        compiler = _Compiler()
        self._eval = compiler.compile(_parse(source))
        self.names: tuple[str, ...] = tuple(compiler.names)

    def evaluate(self, input: Mapping[str, Any], *, budget: int = STEP_BUDGET) -> Any:
        """Its value for an input: JSON. Raises `ExpressionError` where it has none."""
        try:
            value = self._eval(Evaluation(input, budget))
            if json_length(value) > MAX_RESULT_LENGTH:
                raise ExpressionError("the result is too large")
            return value
        except ExpressionError:
            raise
        except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
            raise ExpressionError(str(error) or type(error).__name__) from None


def _parse(source: str) -> ast.expr:
    if len(source) > MAX_EXPRESSION_LENGTH:
        raise ExpressionError(f"it is longer than {MAX_EXPRESSION_LENGTH} characters")
    if "\0" in source:
        raise ExpressionError("it has a NUL character")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # What Python thinks of a "\\d" is nobody's concern here.
            # In brackets of their own lines: an expression may have several, and end with a comment.
            return ast.parse(f"(\n{source}\n)", mode="eval").body
    except SyntaxError as error:
        line = (error.lineno or 1) - 1
        ended = line > source.count("\n") + 1  # Where the bracket was that stands around it.
        raise ExpressionError(f"{'the end' if ended else f'line {line}, column {error.offset}'}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise ExpressionError("it is nested too deeply") from None


def _fault(node: ast.AST, message: str) -> ExpressionError:
    place = cast("Any", node)
    return ExpressionError(f"line {place.lineno - 1}, column {place.col_offset + 1}: {message}")


class _Compiler:
    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._bound: list[str] = []
        """Names that comprehensions around the present node have given."""

    def compile(self, node: ast.expr) -> Evaluate:
        try:
            return self._node(node)
        except RecursionError:
            raise ExpressionError("it is nested too deeply") from None

    def _node(self, node: ast.expr) -> Evaluate:
        match node:
            case ast.Constant(value=value):
                return self._constant(node, value)
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=inner, attr=name):
                return compile_member(self._node(inner), name)
            case ast.Subscript(value=inner, slice=ast.Slice() as part):
                return self._slice(self._node(inner), part)
            case ast.Subscript(value=inner, slice=index):
                return compile_subscript(self._node(inner), self._node(index))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._node(operand)
                return lambda scope: not is_true(inner(scope))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._node(operand)
                return lambda scope: require_finite(-require_number(inner(scope), "-"), "-")
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(node, self._node(left), op, self._node(right))
            case ast.BoolOp(op=op, values=values):
                return compile_boolean([self._node(value) for value in values], stop=isinstance(op, ast.Or))
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._compare(node, left, ops, others)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                test, body, orelse = self._node(test), self._node(body), self._node(orelse)
                return lambda scope: body(scope) if is_true(test(scope)) else orelse(scope)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return compile_list([self._node(element) for element in elements])
            case ast.Dict(keys=keys, values=values):
                return self._object(node, keys, values)
            case (
                ast.ListComp(elt=element, generators=generators) | ast.GeneratorExp(elt=element, generators=generators)
            ):
                return self._comprehension(generators, element)
            case ast.JoinedStr(values=parts):
                return compile_joined_text([self._part(part) for part in parts])
            case ast.Call():
                return self._call(node)
            case _:
                raise _fault(node, f"{type(node).__name__} has no place in an expression")

    def _constant(self, node: ast.expr, value: object) -> Evaluate:
        if value is None or isinstance(value, bool | str):
            return lambda scope: value
        if isinstance(value, int | float):
            found = require_finite(value, "a number")
            return lambda scope: found
        raise _fault(node, f"{value!r:.40} is not JSON")

    def _name(self, name: str) -> Evaluate:
        if name in self._bound:
            return lambda scope: scope.names[name]
        if name in _CONSTANTS:
            value = _CONSTANTS[name]
            return lambda scope: value
        if name != INPUT:
            self.names[name] = None

        def look(scope: Evaluation) -> Any:
            scope.spend(1)
            if name in scope.input:
                return scope.input[name]
            if name == INPUT:
                return scope.input
            raise MissingValueError(f'"{name}" is not in the input')

        return look

    def _slice(self, inner: Evaluate, part: ast.Slice) -> Evaluate:
        if part.step is not None:
            raise _fault(part.step, "a slice has a start and an end, no step")
        start = self._node(part.lower) if part.lower is not None else None
        end = self._node(part.upper) if part.upper is not None else None

        def cut(scope: Evaluation) -> Any:
            value = inner(scope)
            if not isinstance(value, str | list | tuple):
                raise ExpressionError(f"a slice needs a text or a list, not {type_name(value)}")
            bounds = [None if bound is None else require_index(bound(scope)) for bound in (start, end)]
            found = cast("Any", value)[bounds[0] : bounds[1]]
            scope.spend(len(found) // (16 if isinstance(found, str) else 1) + 1)
            return found

        return cut

    def _binary(self, node: ast.AST, left: Evaluate, op: ast.operator, right: Evaluate) -> Evaluate:
        if isinstance(op, ast.Add):
            return lambda scope: add_values(scope, left(scope), right(scope))
        if isinstance(op, ast.Pow):

            def raised(scope: Evaluation) -> Any:
                scope.spend(1)
                return power(left(scope), right(scope))

            return raised
        if type(op) not in _NUMERIC:
            raise _fault(node, f"the operator {type(op).__name__} has no place in an expression")
        sign = _NUMERIC[type(op)]
        compute = OPERATORS[sign]

        def run(scope: Evaluation) -> Any:
            scope.spend(1)
            first, second = require_number(left(scope), sign), require_number(right(scope), sign)
            try:
                return require_finite(compute(first, second), sign)
            except ZeroDivisionError:
                raise ExpressionError("division by zero") from None
            except OverflowError:
                raise ExpressionError(f"{sign} has no finite result") from None

        return run

    def _compare(self, node: ast.AST, first: ast.expr, ops: list[ast.cmpop], others: list[ast.expr]) -> Evaluate:
        left = self._node(first)
        steps = [(self._comparison(node, op), self._node(other)) for op, other in zip(ops, others, strict=True)]

        def run(scope: Evaluation) -> bool:
            scope.spend(1)
            one = left(scope)
            for test, right in steps:
                other = right(scope)
                if not test(scope, one, other):
                    return False
                one = other
            return True

        return run

    def _comparison(self, node: ast.AST, op: ast.cmpop) -> Callable[[Evaluation, Any, Any], bool]:
        match op:
            case ast.Eq() | ast.Is():
                return is_equal
            case ast.NotEq() | ast.IsNot():
                return lambda scope, one, other: not is_equal(scope, one, other)
            case ast.In():
                return lambda scope, one, other: contains(scope, other, one)
            case ast.NotIn():
                return lambda scope, one, other: not contains(scope, other, one)
            case _:
                sign = _ORDER[type(op)]
                compare = OPERATORS[sign]
                return lambda scope, one, other: check_comparable(one, other, sign) and compare(one, other)

    def _object(self, node: ast.AST, keys: list[ast.expr | None], values: list[ast.expr]) -> Evaluate:
        pairs: list[tuple[Evaluate, Evaluate]] = []
        for key, value in zip(keys, values, strict=True):
            if key is None:
                raise _fault(node, "** has no place in an object; name its members")
            pairs.append((self._node(key), self._node(value)))

        def make(scope: Evaluation) -> dict[str, Any]:
            scope.spend(len(pairs) + 1)
            return {require_text(key(scope), "the name of a member"): value(scope) for key, value in pairs}

        return make

    def _comprehension(self, generators: list[ast.comprehension], element: ast.expr) -> Evaluate:
        bound = len(self._bound)
        loops: list[Loop] = []
        for generator in generators:
            if not isinstance(generator.target, ast.Name) or generator.is_async:
                raise _fault(generator.target, "`for` takes one name")
            source = self._node(generator.iter)
            self._bound.append(generator.target.id)
            loops.append((generator.target.id, source, [self._node(test) for test in generator.ifs]))
        value = self._node(element)
        del self._bound[bound:]

        def run(scope: Evaluation) -> list[Any]:
            found: list[Any] = []
            outer = dict(scope.names)
            try:
                run_loops(scope, loops, 0, value, found)
            finally:
                scope.names = outer
            return found

        return run

    def _part(self, node: ast.expr) -> Evaluate:
        """A piece of an f-string."""
        if not isinstance(node, ast.FormattedValue):
            return self._node(node)
        inner = self._node(node.value)
        if node.format_spec is None:
            return lambda scope: to_text(scope, inner(scope))
        parts = cast("ast.JoinedStr", node.format_spec).values
        spec = parts[0].value if len(parts) == 1 and isinstance(parts[0], ast.Constant) else None
        if not isinstance(spec, str) or not _FORMAT.fullmatch(spec):
            raise _fault(node, "a format is one such as .2f, ,.2f, d or .1%")
        # `d` is for whole numbers; a whole number that came as 3.0 is one.
        if spec.endswith("d"):
            return lambda scope: format(require_whole(inner(scope)), spec)
        return lambda scope: format(require_number(inner(scope), "a format"), spec)

    def _call(self, node: ast.Call) -> Evaluate:
        match node.func:
            case ast.Name(id=name):
                given = node.args
            case ast.Attribute(value=first, attr=name):
                given = [first, *node.args]
            case _:
                raise _fault(node, "only functions can be called, by their names")
        if node.keywords or any(isinstance(one, ast.Starred) for one in given):
            raise _fault(node, f"{name} takes its arguments by their places")
        if name in _SPECIAL:
            return self._special(node, name, given)
        function = FUNCTIONS.get(name)
        if function is None:
            known = did_you_mean(name, (*FUNCTIONS, *_SPECIAL)) or f"; there are {', '.join(FUNCTIONS)}"
            raise _fault(node, f'there is no function "{name}"{known}')
        arguments = [self._node(one) for one in given]

        def run(scope: Evaluation) -> Any:
            scope.spend(1)
            values = [argument(scope) for argument in arguments]
            return function(scope, *values)

        _check_count(node, name, function, len(arguments))
        return run

    def _special(self, node: ast.Call, name: str, given: list[ast.expr]) -> Evaluate:
        """`has(x)`: whether it is in the input. `default(x, y)`: y where x is not there, or null."""
        if len(given) != (1 if name == "has" else 2):
            raise _fault(node, "write has(value), or default(value, otherwise)")
        value = self._node(given[0])
        otherwise = self._node(given[1]) if name == "default" else None

        def run(scope: Evaluation) -> Any:
            scope.spend(1)
            try:
                found = value(scope)
            except MissingValueError:
                return False if otherwise is None else otherwise(scope)
            if otherwise is None:
                return True
            return otherwise(scope) if found is None else found

        return run


def _check_count(node: ast.Call, name: str, function: Callable[..., Any], given: int) -> None:
    code = function.__code__
    least = code.co_argcount - 1 - len(function.__defaults__ or ())
    most = math.inf if code.co_flags & 0x04 else code.co_argcount - 1  # With *args there is no end.
    if code.co_flags & 0x04:
        least = 1
    if not least <= given <= most:
        wanted = f"{least}" if least == most else f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise _fault(node, f"{name} takes {wanted} arguments, not {given}")
