from __future__ import annotations

from typing import Any

import pytest

from toolspace.cli.chat.questions import FormResult, InvalidAnswer, QuestionForm, build_form

pytestmark = pytest.mark.spec("17.2")


def answer_all(form: QuestionForm, *lines: str) -> Any:
    """The result of these lines, each of which has to be taken."""
    for line in lines[:-1]:
        assert form.answer(line) is None
    result = form.answer(lines[-1])
    assert isinstance(result, FormResult), result
    return result.value


@pytest.mark.parametrize(("line", "value"), [("y", True), (" YES ", True), ("n", False), ("no", False)])
def test_a_confirmation_accepts_yes_and_no(line: str, value: bool) -> None:
    form = build_form("confirmAction", {"action": "Delete a.txt"}, None)
    assert form.field.prompt == "[y/n]> "
    assert answer_all(form, line) == {"confirmed": value}


@pytest.mark.parametrize("line", ["", "maybe", "yess", "\x00"])
def test_other_answers_to_a_confirmation_are_refused(line: str) -> None:
    form = build_form("confirmAction", {}, None)
    assert isinstance(form.answer(line), InvalidAnswer)
    assert answer_all(form, "y") == {"confirmed": True}


def test_a_form_asks_for_each_property_of_the_output() -> None:
    schema = {
        "type": "object",
        "properties": {
            "nights": {"type": "integer", "description": "How long."},
            "room": {"enum": ["single", "double"]},
            "price": {"type": ["number", "null"]},
            "breakfast": {"type": "boolean", "default": True},
            "guests": {"type": "array"},
            "note": {"type": "string"},
        },
        "required": ["nights", "room", "guests"],
    }
    form = build_form("bookHotel", {}, schema)
    assert form.field.prompt == "nights> "
    assert isinstance(form.answer("two"), InvalidAnswer)
    assert isinstance(form.answer("2.5"), InvalidAnswer)
    assert isinstance(form.answer("true"), InvalidAnswer)
    assert form.answer("2") is None
    assert form.field.explanation == "  1) single\n  2) double"
    assert isinstance(form.answer("3"), InvalidAnswer)
    assert form.answer("2") is None
    assert form.answer("") is None
    assert form.field.prompt == "breakfast [Y/n]> "
    assert form.answer("") is None
    assert isinstance(form.answer("Ann, Bob"), InvalidAnswer)
    assert form.answer('["Ann", "Bob"]') is None
    assert answer_all(form, " 12 ") == {
        "nights": 2,
        "room": "double",
        "breakfast": True,
        "guests": ["Ann", "Bob"],
        "note": " 12 ",
    }


def test_a_schema_that_is_not_an_object_is_one_question() -> None:
    assert answer_all(build_form("rate", {}, {"type": "integer"}), "5") == 5
    assert answer_all(build_form("agree", {}, {"type": "boolean"}), "n") is False


@pytest.mark.parametrize(
    ("line", "value"), [("four", "four"), ("4", 4), ('{"a": 1}', {"a": 1}), ("null", None), ("[1", "[1")]
)
def test_without_a_schema_a_line_is_json_or_text(line: str, value: Any) -> None:
    assert answer_all(build_form("askUser", {}, None), line) == value


def test_an_elicitation_gets_the_wrapped_result_of_mcp() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form = build_form("elicitation", {"message": "Where?", "requestedSchema": schema}, None)
    assert form.refusal == FormResult({"action": "decline"})
    assert answer_all(form, "Tokyo") == {"action": "accept", "content": {"city": "Tokyo"}}
    page = build_form("elicitation", {"message": "Log in", "url": "https://example.com"}, None)
    assert answer_all(page, "n") == {"action": "decline"}


@pytest.mark.parametrize("schema", [{"properties": {"a": True}}, {"properties": []}, {"type": []}, {"enum": "x"}])
def test_an_unusual_schema_can_be_answered(schema: dict[str, Any]) -> None:
    assert answer_all(build_form("odd", None, schema), "1") in (1, {"a": 1})
