"""Encoding of conversations and tools for all providers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace import Tool
from toolspace.core.language_model import ModelCall, ModelToolResult, ModelTurn, ResultsTurn, Turn, UserTurn
from toolspace.models.request_encoding import (
    ToolEncoder,
    TurnLayout,
    encode_arguments,
    normalize_turns,
    split_turn,
)

texts = st.sampled_from(["", " ", "a", "b\n", "\x00", "ä"])
ids = st.sampled_from(["", "x", "y", "toolu_1", "a b", "z" * 80])
names = st.sampled_from(["add", "", "no such!", "2fa", "n" * 90])
calls = st.builds(ModelCall, ids, names, st.sampled_from(["", "{}", "{bad", "[1]", '{"a":1}', "null"]))
answers = st.builds(ModelToolResult, ids, names, texts, st.booleans())
turns = st.one_of(
    st.builds(UserTurn, texts),
    st.builds(
        lambda text, calls: ModelTurn(text=text, calls=tuple(calls)),
        texts,
        st.lists(calls, max_size=4),
    ),
    st.builds(lambda results: ResultsTurn(tuple(results)), st.lists(answers, max_size=4)),
)


@given(st.lists(turns, max_size=8))
def test_any_conversation_becomes_a_valid_one(conversation: list[Turn]) -> None:
    normalized_turns = normalize_turns(conversation)
    assert isinstance(normalized_turns[0], UserTurn)
    assert not isinstance(normalized_turns[-1], ModelTurn)
    seen_ids: set[str] = set()
    for place, turn in enumerate(normalized_turns):
        before = normalized_turns[place - 1] if place else None
        match turn:
            case UserTurn():
                assert turn.text.strip()
                assert not isinstance(before, UserTurn)
            case ModelTurn():
                assert turn.calls or turn.text.strip()
                for call in turn.calls:
                    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", call.id)
                    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", call.name)
                    assert call.id not in seen_ids
                    seen_ids.add(call.id)
                next_turn = normalized_turns[place + 1] if place + 1 < len(normalized_turns) else None
                assert isinstance(next_turn, ResultsTurn) == bool(turn.calls)
            case ResultsTurn():
                assert isinstance(before, ModelTurn)
                assert [result.id for result in turn.results] == [call.id for call in before.calls]
    assert normalize_turns(normalized_turns) == normalized_turns


def test_a_valid_conversation_is_unchanged() -> None:
    conversation: list[Turn] = [
        UserTurn("hi"),
        ModelTurn(calls=(ModelCall("a", "add", "{}"), ModelCall("b", "add", "{}"))),
        ResultsTurn((ModelToolResult("a", "add", "1"), ModelToolResult("b", "add", "2"))),
        ModelTurn(text="ok"),
        UserTurn("more"),
    ]
    assert all(result is original for result, original in zip(normalize_turns(conversation), conversation, strict=True))


def test_results_are_matched_with_their_calls_in_any_order() -> None:
    call_turn = ModelTurn(calls=(ModelCall("a", "f", "{}"), ModelCall("b", "g", "{}"), ModelCall("c", "h", "{}")))
    result_turn = ResultsTurn(
        (ModelToolResult("c", "h", "3"), ModelToolResult("stray", "x", "0"), ModelToolResult("a", "f", "1"))
    )
    _, _, results = normalize_turns([UserTurn("x"), call_turn, result_turn])
    assert isinstance(results, ResultsTurn)
    assert [result.text for result in results.results] == ["1", "(no result: the call was interrupted)", "3"]


@pytest.mark.parametrize(
    ("arguments", "expected_object"),
    [
        ("", {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ("{bad", {"_malformed": "{bad"}),
        ("[1]", {"_malformed": "[1]"}),
        ("[" * 100_000, {"_malformed": "[" * 100_000}),
        ('{"a": "\ud800"}', {"_malformed": '{"a": "?"}'}),
    ],
)
def test_arguments_are_sent_back_as_an_object(arguments: str, expected_object: dict[str, Any]) -> None:
    assert json.loads(bytes(encode_arguments(ModelCall("a", "f", arguments)))) == expected_object


def test_a_turn_is_split_in_its_order() -> None:
    layout = TurnLayout()
    layout.add_text(2)
    layout.add_text(1)
    layout.add_entry({"type": "seal", "value": "s"})
    layout.add_call(0)
    layout.add_text(2)
    layout.add_call(1)
    result, two = ModelCall("a", "f", "{}"), ModelCall("b", "g", "{}")
    turn = ModelTurn(text="abcde", calls=(result, two), thinking_data=layout.entries, model="m")
    assert list(split_turn(turn, "m")) == ["abc", {"type": "seal", "value": "s"}, result, "de", two]
    assert list(split_turn(turn, "another")) == ["abcde", result, two]
    # Whoever kept less of it than was said still gets what is left.
    cut = ModelTurn(text="ab", calls=(two,), thinking_data=layout.entries, model="m")
    assert list(split_turn(cut, "m")) == ["ab", {"type": "seal", "value": "s"}, two]


@pytest.mark.parametrize(
    ("schema", "normalized_turns"),
    [
        ({"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        ({"type": "object"}, {"type": "object", "properties": {}}),
        ({}, {"type": "object", "properties": {}}),
        (
            {
                "anyOf": [
                    {"properties": {"a": {}, "c": {}}, "required": ["a", "c"]},
                    {"properties": {"b": {}}, "required": ["c"]},
                ]
            },
            {
                "type": "object",
                "properties": {"a": {}, "c": {}, "b": {}},
                "required": ["c"],
                "description": "give one of these sets of parameters: a, c; c",
            },
        ),
        (
            {
                "type": "object",
                "properties": {"x": {}},
                "required": ["x"],
                "additionalProperties": False,
                "allOf": [{"properties": {"a": {}}, "required": ["a"]}, True],
            },
            {"type": "object", "properties": {"x": {}, "a": {}}, "required": ["x", "a"]},
        ),
    ],
)
def test_schemas_become_plain_objects(schema: dict[str, Any], normalized_turns: dict[str, Any]) -> None:
    assert Tool("t", "", schema).model_schema.schema == normalized_turns


def test_tools_are_encoded_once_for_the_same_tuple() -> None:
    toolbox = ToolEncoder("anthropic")
    tools = (Tool("add", "Adds."),)
    assert toolbox.encode(tools) is toolbox.encode(tools)
    assert toolbox.encode(tools, brief=True) is not toolbox.encode(tools)
    for number in range(40):  # It remembers a few, not all.
        toolbox.encode((Tool(f"t{number}", ""),))
    assert toolbox.encode(tools).names == {"add"}
