"""YAML becomes plain data: strictly and with lines for configuration files, leniently and bounded for OpenAPI."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from toolspace.core.yaml_text import MAX_JSON_DEPTH, YamlSyntaxError, parse_yaml, parse_yaml_as_json

SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12)
DATA = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(DATA)
def test_both_parsers_read_back_what_pyyaml_writes(data: Any) -> None:
    text = yaml.safe_dump(data, allow_unicode=True)
    assert parse_yaml(text).data == data
    assert parse_yaml_as_json(text) == data


@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), DATA, min_size=1, max_size=5))
def test_every_top_level_value_has_the_line_of_its_key(data: dict[str, Any]) -> None:
    text = yaml.safe_dump(data, allow_unicode=True)
    document = parse_yaml(text)
    lines = text.split("\n")
    for key in data:
        assert lines[document.lines[key,] - 1].startswith(f"{key}:") or lines[document.lines[key,] - 1].startswith(
            (f"'{key}'", f'"{key}"', f"? {key}")
        )


def test_aliases_have_the_lines_of_their_anchor() -> None:
    document = parse_yaml("base: &base\n  x: 1\ncopy: *base\nmerged:\n  <<: *base\n  y: 2\n")
    assert document.data == {"base": {"x": 1}, "copy": {"x": 1}, "merged": {"x": 1, "y": 2}}
    assert document.lines["copy",] == 3
    assert document.lines["copy", "x"] == 2
    assert document.lines["merged", "x"] == 2


def test_numbers_keep_the_text_that_was_written() -> None:
    document = parse_yaml("version: 1.10\ncount: 1_000\nname: x\n")
    assert document.data == {"version": 1.1, "count": 1000, "name": "x"}
    assert document.number_texts == {("version",): "1.10", ("count",): "1_000"}


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("no", "no", "no"),
        ("22:22", "22:22", "22:22"),
        ("2020-01-01", "2020-01-01", "2020-01-01"),
        ("0123", "0123", 123),
        ("1_000", 1000, "1_000"),
        ("0o17", 15, 15),
        ("0x1F", 31, 31),
        (".inf", float("inf"), ".inf"),
        ("1e999", float("inf"), "1e999"),
        ("'5'", "5", "5"),
        ("!!str 5", "5", "5"),
        ("!!int 5", 5, "5"),
        ("~", None, None),
        ("", None, None),
    ],
)
def test_scalars_are_read_as_yaml_1_2(text: str, strict: Any, lenient: Any) -> None:
    assert parse_yaml(text).data == strict
    assert parse_yaml_as_json(text) == lenient


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("a: 1\na: 2\n", "given twice, first in line 1", 2),
        ("a: 1\n---\nb: 2\n", "a second document begins here", 2),
        ("a: !foo x\n", "not allowed", 1),
        ("a: !!int x\n", "not what its tag !!int says", 1),
        ("a:\n  <<: 5\n", "takes a mapping", 2),
        ("x: 1\na: *b\n", "has no anchor", 2),
        ("? [1]\n: 2\n", "a key must be plain text", 1),
        ("a: b: c\n", "mapping values are not allowed", 1),
        ("a: " + "9" * 5000 + "\n", "4300 digits", 1),
    ],
)
def test_strict_parsing_names_the_line_of_the_fault(text: str, message: str, line: int) -> None:
    with pytest.raises(YamlSyntaxError, match=message) as error:
        parse_yaml(text)
    assert error.value.line == line


def test_lenient_parsing_ignores_tags_duplicate_keys_and_further_documents() -> None:
    assert parse_yaml_as_json("a: 1\na: !foo 2\n200: ok\n---\nb: 3\n") == {"a": "2", "200": "ok"}


def test_lenient_parsing_shares_the_value_of_an_anchor() -> None:
    data = parse_yaml_as_json("a: &a {x: 1}\nb: *a\nc: [*a, *a]\n")
    assert data["b"] is data["a"]
    assert data["c"][1] is data["a"]


def test_lenient_errors_include_the_line() -> None:
    with pytest.raises(YamlSyntaxError, match=r"in line 2$"):
        parse_yaml_as_json("a: 1\nb: *c\n")
    with pytest.raises(YamlSyntaxError, match=f"nested deeper than {MAX_JSON_DEPTH} levels"):
        parse_yaml_as_json("[" * (MAX_JSON_DEPTH + 2) + "]" * (MAX_JSON_DEPTH + 2))


@given(st.text(alphabet="ab:&*<-[]{},'\"!?|>#~0.5 \n\t", max_size=60))
def test_any_text_is_data_or_a_syntax_error(text: str) -> None:
    for parse in (parse_yaml, parse_yaml_as_json):
        try:
            parse(text)
        except YamlSyntaxError as error:
            assert error.line >= 1  # noqa: PT017 - any text may be valid
