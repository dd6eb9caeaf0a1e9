from __future__ import annotations

import json
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.cli.call import combine_arguments, read_args

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "flag": {"type": "boolean"},
        "text": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "numbers": {"type": "array", "items": {"type": "integer"}},
        "data": {"type": "object"},
        "anything": {},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "one_or_many": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "level": {"enum": [1, 2, 3]},
        "referred": {"$ref": "#/$defs/count"},
        "all": {"allOf": [{"description": "x"}, {"type": "integer"}]},
        "lists": {"$ref": "#/$defs/lists"},
        "endless": {"$ref": "#/$defs/endless"},
    },
    "required": ["n"],
    "$defs": {
        "count": {"type": "integer"},
        "lists": {"type": ["array", "null"], "items": {"$ref": "#/$defs/count"}},
        "endless": {"$ref": "#/$defs/endless"},
    },
}


@pytest.mark.spec("17.2")
@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["n=5"], 5),
        (["n=-5"], -5),
        (["n=100000000000000000000"], 100000000000000000000),
        (["n=five"], "five"),
        (["x=1.5"], 1.5),
        (["flag=true"], True),
        (["flag=FALSE"], False),
        (["text=5"], "5"),
        (["text=true"], "true"),
        (["text=[1]"], "[1]"),
        (["text="], ""),
        (["text=a=b:=c"], "a=b:=c"),
        (["tags=a"], ["a"]),
        (["tags=a", "tags=1"], ["a", "1"]),
        (['tags=["a", "b"]'], ["a", "b"]),
        (["numbers=1", "numbers=2"], [1, 2]),
        (['data={"a": 1}'], {"a": 1}),
        (["anything=5"], 5),
        (["anything=five"], "five"),
        (['anything={"a": [1]}'], {"a": [1]}),
        (["maybe=5"], 5),
        (["maybe=null"], None),
        (["one_or_many=a"], "a"),
        (["one_or_many=a", "one_or_many=b"], ["a", "b"]),
        (["level=2"], 2),
        (["referred=3"], 3),
        (["all=3"], 3),
        (["lists=1", "lists=2"], [1, 2]),
        (["endless=1"], 1),
        (["unknown=1"], 1),
        (["unknown=one"], "one"),
        (["text:=5"], 5),
        (["text:=null"], None),
        (['tags:=["a"]'], ["a"]),
        (["numbers=1", "numbers:=2"], [1, 2]),
    ],
)
def test_a_value_gets_the_type_that_the_schema_asks_for(words: list[str], value: object) -> None:
    key = words[0].partition("=")[0].removesuffix(":")

    converted_value = combine_arguments({}, words, SCHEMA)[key]

    assert converted_value == value
    assert type(converted_value) is type(value)


@pytest.mark.spec("17.2")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["n=1", "n=2"], "n is given 2 times, but it takes one value"),
        (["five"], "did you mean n=five?"),
        (["n=1", "five"], "the parameters are n, x, flag"),
        (["=5"], "is not key=value"),
        ([":=5"], "is not key=value"),
        (["n:=five"], "'n:=five' is not JSON"),
        (["data={a"], "'data={a' is not JSON"),
        (["tags=[a"], "'tags=[a' is not JSON"),
    ],
)
def test_an_invalid_word_is_reported_with_the_right_form(words: list[str], message: str) -> None:
    with pytest.raises(click.UsageError) as error_info:
        combine_arguments({}, words, SCHEMA)

    assert message in error_info.value.message


def test_a_key_value_argument_replaces_the_same_key_of_args() -> None:
    assert combine_arguments({"n": 1, "text": "kept"}, ["n=2"], SCHEMA) == {"n": 2, "text": "kept"}


def test_args_must_be_one_json_object() -> None:
    assert read_args('{"a": 1}') == {"a": 1}
    assert read_args(None) == {}
    for text in ("[1]", "5", "{", '"text"'):
        with pytest.raises(click.UsageError, match="--args"):
            read_args(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.text()), JSON)
def test_any_words_and_schema_give_arguments_or_a_usage_error(words: list[str], node: Any) -> None:
    schemas: list[Any] = [
        SCHEMA,
        {},
        {"properties": node},
        {"properties": {"n": node}, "required": ["n"], "$defs": node},
    ]
    for schema in schemas:
        try:
            arguments = combine_arguments({}, [*words, "n=1"], schema)
        except click.UsageError:
            continue
        json.dumps(arguments)


@given(st.text())
def test_a_string_parameter_gets_any_text_unchanged(text: str) -> None:
    assert combine_arguments({}, [f"text={text}"], SCHEMA) == {"text": text}
