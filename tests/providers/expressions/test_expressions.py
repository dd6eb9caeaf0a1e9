"""Expressions: their values, what they cannot access, and that no input makes them slow or large."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolspace.providers.expressions.compiler import MAX_EXPRESSION_LENGTH, Expression
from toolspace.providers.expressions.runtime import STEP_BUDGET, ExpressionError

pytestmark = pytest.mark.spec("6.1")


def value(source: str, input: dict[str, Any] | None = None) -> Any:
    return Expression(source).evaluate(input or {})


def fault(source: str, input: dict[str, Any] | None = None) -> str:
    with pytest.raises(ExpressionError) as error_info:
        value(source, input)
    return str(error_info.value)


ORDER = {"items": [{"price": 2.5, "n": 2}, {"price": 0.1, "n": 3}], "name": "Ann", "tags": ["b", "a"], "empty": None}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1 + 2 * 3 - 4 / 2", 5.0),
        ("7 // 2 + 7 % 4 + 2 ** 10", 1030),
        ("-(3) + abs(-3)", 0),
        ("round(sum(x.price * x.n for x in items), 2)", 5.3),
        ("sum([0.1 for x in range(10)])", 1.0),
        ("[x.n for x in items if x.price > 1]", [2]),
        ("[a + b for a in tags for b in tags]", ["bb", "ba", "ab", "aa"]),
        (
            "{'total': len(items), 'first': items[0].price, 'last': items[-1]['n']}",
            {"total": 2, "first": 2.5, "last": 3},
        ),
        ("name.upper() + '!'", "ANN!"),
        ("f'{name} pays {items[0].price:.2f}, {0.256:.1%} of {1234567:,d}'", "Ann pays 2.50, 25.6% of 1,234,567"),
        ("'yes' if name == 'Ann' and not false else 'no'", "yes"),
        ("name or 'nobody'", "Ann"),
        ("empty or 'nobody'", "nobody"),
        ("1 < 2 <= 2 != 3", True),
        ("'n' in name and 'b' in tags and 'name' in input and 'x' not in tags", True),
        ("true == 1", False),
        ("[1, {'a': 2}] == [1.0, {'a': 2}]", True),
        ("empty is null", True),
        ("has(name) and not has(nobody) and not has(name.first)", True),
        ("default(nobody.at.all, default(empty, 7))", 7),
        ("default(items[9], 0) + default(items[0].n, 9)", 2),
        ("sorted(tags) + reversed(tags) + unique([1, 1.0, true])", ["a", "b", "a", "b", 1, True]),
        ("join(tags, '-') + str({'a': [1.5]})", 'b-a{"a":[1.5]}'),
        ("'a,b'.split(',') + [' x '.strip(), 'aXa'.replace('X', '-').lower()]", ["a", "b", "x", "a-a"]),
        ("name[0] + name[1:] + name[:-1]", "AAnnAn"[0:1] + "nn" + "An"),
        ("max(1, 2.5) + min([4, 3]) + floor(1.9) + ceil(1.1) + int('12') + float('0.5')", 21.0),
        ("range(3) + range(5, 1, -2)", [0, 1, 2, 5, 3]),
        ("keys(items[0]) + values(items[1])", ["price", "n", 0.1, 3]),
        ("[k for k in items[0]]", ["price", "n"]),
        ("any(x.n > 2 for x in items) and all(tags) and count(tags, 'a') == 1", True),
        ("avg([1, 2]) + sqrt(4)", 3.5),
        ("\n  1 +\n  2  # of several lines\n", 3),
        ("null", None),
    ],
)
def test_an_expression_has_its_value(source: str, expected: Any) -> None:
    assert value(source, ORDER) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 +", "the end: "),
        ("1 + (2\n+ 3))", "the end: unmatched ')'"),
        ("1 +\n2 $ 3", "line 2, column 3: invalid syntax"),
        ("lambda: 1", "Lambda is not allowed in an expression"),
        ("[x async for x in y]", ""),
        ("(x := 1)", "NamedExpr is not allowed"),
        ("x & 1", "the operator BitAnd is not allowed"),
        ("sun([1])", 'there is no function "sun"; did you mean "sum"?'),
        ("__import__('os')", 'there is no function "__import__"'),
        ("(1)(2)", "only functions can be called"),
        ("max()", "max takes at least 1 arguments, not 0"),
        ("len(1, 2)", "len takes 1 arguments, not 2"),
        ("round(1, 2, 3)", "round takes 1 to 2 arguments, not 3"),
        ("max(*items)", "max takes positional arguments only"),
        ("has()", "write has(value)"),
        ("f'{x:1000000000d}'", "use a format such as"),
        ("f'{x:{y}}'", "use a format such as"),
        ("x[::2]", "a slice has a start and an end"),
        ("{**x}", "** is not allowed in an object"),
        ("[a for a, b in x]", "`for` takes one name"),
        ("b'x'", "is not JSON"),
        ("1j", "is not JSON"),
        ("...", "is not JSON"),
        ("x\0", "NUL"),
        ("-" * 5000 + "1", "nested too deeply"),
        ("1+" * 4000 + "1", "nested too deeply"),
        ("1" * (MAX_EXPRESSION_LENGTH + 1), "longer than"),
        ("99999999999999999999", "too large"),
    ],
)
def test_an_invalid_expression_is_rejected_at_compile_time(source: str, message: str) -> None:
    with pytest.raises(ExpressionError) as error_info:
        Expression(source)
    assert message in str(error_info.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nobody", '"nobody" is not in the input'),
        ("name.__class__", '"__class__" was looked for in a text, which has no members'),
        ("items.__len__", "was looked for in a list"),
        ("input.__class__", '"__class__" is not there'),
        ("items[5]", "there is no element 5"),
        ("items[0]['x']", '"x" is not there'),
        ("name + 1", "+ cannot add a text and a number; write str(…)"),
        ("name * 3", "* needs a number, not a text"),
        ("name % 3", "% needs a number, not a text"),
        ("true + 1", "+ cannot add a boolean and a number"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("1e308 * 10", "no finite result"),
        ("sum([1e308, 1e308])", "no finite result"),
        ("9 ** 9 ** 9", "too large"),
        ("2.5 ** 10000", "no finite result"),
        ("(-8) ** 0.5", "no finite result"),
        ("0 ** -1", "no finite result"),
        ("9223372036854775807 + 1", "too large"),
        ("name < 1", "< cannot compare a text with a number"),
        ("sorted([1, 'a'])", "sorted cannot compare"),
        ("{1: 2}", "the name of a member needs a text"),
        ("avg([])", "avg of an empty list has no value"),
        ("int('twelve')", '"twelve" is not a number'),
        ("int('9' * 1)", "* needs a number"),
        ("range(1, 2, 0)", "range takes"),
        ("[x for x in name]", "`for x` needs a list, not a text"),
        ("sqrt(-1)", "not negative"),
    ],
)
def test_an_expression_without_a_value_explains_why(source: str, message: str) -> None:
    assert message in fault(source, ORDER)


MANY = {"items": list(range(50_000)), "text": "a" * 1_000_000, "huge": 10**5000}


@pytest.mark.parametrize(
    "source",
    [
        "[[[1 for z in items] for y in items] for x in items]",
        "[x for x in items if x in items]",
        "[1 for x in items if items == items]",
        "[str(items) for x in items]",
        "[text + text for x in items]",
        "text.replace('a', text)",
        "join(items, text)",
        "join([text for x in items], text)",
        "[text[1:] for x in items]",
        "range(10 ** 15)",
        "[sorted(items) for x in items]",
        "unique(items)",
        "[items + items for x in items]",
        "[text.upper() for x in items]",
        "[f'{text}{text}' for x in items]",
        "[text.split('a') for x in items]",
    ],
)
def test_no_input_exceeds_the_step_budget(source: str) -> None:
    assert fault(source, MANY) == "it takes too many steps for this input"


def test_numbers_outside_the_range_are_rejected() -> None:
    for source in ("huge * huge", "huge ** 2", "huge + 1", "-huge", "round(huge)", "sum([huge])"):
        assert "too large" in fault(source, MANY)
    assert value("huge", MANY) == 10**5000


def test_an_expression_lists_the_names_it_reads() -> None:
    expression = Expression("sum(x.price for x in items) * default(rate, 1) if input.ok else y")
    assert set(expression.names) == {"items", "rate", "y"}


def test_comprehension_names_are_local() -> None:
    assert value("[x for x in [1, 2]] + [x]", {"x": 9}) == [1, 2, 9]
    assert value("[[y for y in x] + [len(x)] for x in xs]", {"xs": [[1], []]}) == [[1, 1], [0]]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)
SOURCES = [
    "a + b",
    "a * b / (a - b)",
    "a ** b",
    "[x + b for x in a if x != b]",
    "a[b]",
    "a[:b]",
    "a.x.y",
    "a in b",
    "a < b",
    "a == b",
    "sorted(a) + unique(b)",
    "sum(a) + avg(b)",
    "f'{a}{b:.2f}'",
    "join(a, b)",
    "replace(a, b, b)",
    "split(a, b)",
    "round(a, b)",
    "int(a) + float(b)",
    "range(a, b)",
    "max(a, b)",
    "count(a, b)",
    "{str(a): b}",
]


@given(source=st.sampled_from(SOURCES), a=json_values, b=json_values)
@settings(max_examples=400, deadline=None)
def test_any_input_gives_json_or_an_expression_error(source: str, a: Any, b: Any) -> None:
    try:
        result = Expression(source).evaluate({"a": a, "b": b})
    except ExpressionError:
        return
    json.dumps(result, allow_nan=False)


@given(source=st.text(alphabet="ab1.+-*/()[]{}':,x infor\"f%=<>!\n", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_an_expression_or_an_expression_error(source: str) -> None:
    with suppress(ExpressionError):
        Expression(source).evaluate({"a": 1, "b": [1], "x": {"a": 2}})


def test_the_budget_counts_steps_not_time() -> None:
    small = Expression("sum(x * 2 for x in items)")
    assert small.evaluate({"items": [1, 2]}, budget=100) == 6
    with pytest.raises(ExpressionError, match="too many steps"):
        small.evaluate({"items": [1] * 100}, budget=100)
    assert STEP_BUDGET >= 100_000


@pytest.mark.parametrize("source", ["[text for _ in many]", "{'all': [[many for _ in many] for _ in many]}"])
def test_repetition_cannot_create_a_huge_result(source: str) -> None:
    assert "too large" in fault(source, {"text": "x" * 1_000_000, "many": list(range(220))})


def test_repetition_cannot_create_a_huge_text() -> None:
    input = {"text": "x" * 1_000_000, "many": list(range(220))}
    assert value("[input]", input) == [input]
    assert "too many steps" in fault("len(str([text for _ in many]))", input)
    assert "too many steps" in fault("f'{[text for _ in many]}'", input)
