from __future__ import annotations

from typing import Any

import pytest

from toolspace.cli.chatforms import Again, Form, Result, form_of

pytestmark = pytest.mark.spec("17.2")


def answered(form: Form, *lines: str) -> Any:
    """The result of these lines, each of which has to be taken."""
    for line in lines[:-1]:
        assert form.take(line) is None
    result = form.take(lines[-1])
    assert isinstance(result, Result), result
    return result.value


@pytest.mark.parametrize(("line", "value"), [("y", True), (" YES ", True), ("n", False), ("no", False)])
def test_a_confirmation_takes_yes_and_no(line: str, value: bool) -> None:
    form = form_of("confirmAction", {"action": "Delete a.txt"}, None)
    assert form.field.prompt == "[y/n]> "
    assert answered(form, line) == {"confirmed": value}


@pytest.mark.parametrize("line", ["", "maybe", "yess", "\x00"])
def test_what_is_neither_is_asked_again(line: str) -> None:
    form = form_of("confirmAction", {}, None)
    assert isinstance(form.take(line), Again)
    assert answered(form, "y") == {"confirmed": True}


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
    form = form_of("bookHotel", {}, schema)
    assert form.field.prompt == "nights> "
    assert isinstance(form.take("two"), Again)
    assert isinstance(form.take("2.5"), Again)
    assert isinstance(form.take("true"), Again)
    assert form.take("2") is None
    assert form.field.explanation == "  1) single\n  2) double"
    assert isinstance(form.take("3"), Again)
    assert form.take("2") is None
    assert form.take("") is None
    assert form.field.prompt == "breakfast [Y/n]> "
    assert form.take("") is None
    assert isinstance(form.take("Ann, Bob"), Again)
    assert form.take('["Ann", "Bob"]') is None
    assert answered(form, " 12 ") == {
        "nights": 2,
        "room": "double",
        "breakfast": True,
        "guests": ["Ann", "Bob"],
        "note": " 12 ",
    }


def test_an_output_that_is_no_object_is_one_answer() -> None:
    assert answered(form_of("rate", {}, {"type": "integer"}), "5") == 5
    assert answered(form_of("agree", {}, {"type": "boolean"}), "n") is False


@pytest.mark.parametrize(
    ("line", "value"), [("four", "four"), ("4", 4), ('{"a": 1}', {"a": 1}), ("null", None), ("[1", "[1")]
)
def test_without_a_schema_a_line_is_json_or_else_text(line: str, value: Any) -> None:
    assert answered(form_of("askUser", {}, None), line) == value


def test_a_question_of_a_server_is_wrapped_as_its_answer() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form = form_of("elicitation", {"message": "Where?", "requestedSchema": schema}, None)
    assert form.refusal == Result({"action": "decline"})
    assert answered(form, "Tokyo") == {"action": "accept", "content": {"city": "Tokyo"}}
    page = form_of("elicitation", {"message": "Log in", "url": "https://example.com"}, None)
    assert answered(page, "n") == {"action": "decline"}


@pytest.mark.parametrize("schema", [{"properties": {"a": True}}, {"properties": []}, {"type": []}, {"enum": "x"}])
def test_a_strange_schema_is_still_answered(schema: dict[str, Any]) -> None:
    assert answered(form_of("odd", None, schema), "1") in (1, {"a": 1})
