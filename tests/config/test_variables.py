"""Expansion of variables, and problems with file, line, key and variable."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.config.environment_variables import ExpandedDocument, expand, expand_text
from toolspace.config.file_formats import ConfigDocument, parse_document

ENVIRON = {"NAME": "value", "EMPTY": "", "DOLLAR": "${NAME}"}


def run(text: str, environ: Mapping[str, str] = ENVIRON) -> ExpandedDocument:
    return expand(parse_document(text.encode(), "toolspace.yaml"), environ)


@pytest.mark.spec("5.2")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${NAME}", "value"),
        ("a ${NAME} b ${NAME}", "a value b value"),
        ("${env:NAME}", "value"),
        ("${NAME:-other}", "value"),
        ("${MISSING:-other}", "other"),
        ("${MISSING:-}", ""),
        ("${EMPTY}", ""),
        ("${EMPTY:-other}", "other"),
        ("${MISSING:-${NAME}}", "value"),
        ("${MISSING:-${ALSO:-deep}}!", "deep!"),
        ("${MISSING:-http://x:1/}", "http://x:1/"),
        ("$${NAME}", "${NAME}"),
        ("$$${NAME}", "$${NAME}"),
        ("${MISSING:-$${x}", "${x"),
        ("$NAME $ {NAME} {NAME} 5$", "$NAME $ {NAME} {NAME} 5$"),
        ("/v1/${parameters.city}?k=${NAME}", "/v1/${parameters.city}?k=value"),
        ("${parameters.user-id}", "${parameters.user-id}"),
        ("${DOLLAR}", "${NAME}"),
    ],
)
def test_variables_are_filled_in(text: str, expected: str) -> None:
    assert expand_text(text, ENVIRON) == expected


@pytest.mark.spec("5.2")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("${MISSING}", r"the variable MISSING is not set; set it, or give a default: \$\{MISSING:-value\}"),
        ("${NAMES}", 'NAMES is not set; did you mean "NAME"'),
        ("${MY-VAR}", r'"\$\{MY-VAR\}" is not a variable'),
        ("${}", "is not a variable"),
        ("${NAME", "is not a variable"),
        ("${ NAME }", "is not a variable"),
        ("${input:token}", "asks an editor's user"),
        ("${M:-" * 50 + "}" * 50, "nested deeper"),
    ],
)
def test_a_failed_expansion_has_a_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        expand_text(text, ENVIRON)


def test_only_strings_in_values_are_changed() -> None:
    document = run('"${NAME}": 1\nlist: ["${NAME}", 5, true, null]\n')
    assert document.data == {"${NAME}": 1, "list": ["value", 5, True, None]}
    assert document.original_texts == {("list", 0): "${NAME}"}


def test_every_unset_variable_is_a_problem_of_its_own() -> None:
    document = run("a: ${ONE}\nb: {c: ['${TWO}']}\n")
    assert [problem.path for problem in document.problems] == [("a",), ("b", "c", 0)]
    assert "ONE" in document.problems[0].message


@pytest.mark.parametrize("off", ["enabled: false", "enabled: off", "enabled: ${NOPE:-false}", "disabled: true"])
def test_a_disabled_entry_needs_no_variables(off: str) -> None:
    document = run(f"mcpServers:\n  a:\n    {off}\n    env: {{KEY: '${{SECRET}}', N: '${{NAME}}'}}\n")
    assert document.problems == []
    assert document.data["mcpServers"]["a"]["env"] == {"KEY": "${SECRET}", "N": "value"}


def test_an_enabled_entry_needs_its_variables() -> None:
    assert len(run("a: {enabled: true, env: {KEY: '${SECRET}'}}").problems) == 1


@given(st.text(alphabet=list("${}:-NAMEx. \\"), max_size=40), st.dictionaries(st.text(), st.text(), max_size=3))
def test_no_text_breaks_expansion(text: str, environ: dict[str, str]) -> None:
    expand(ConfigDocument("f", {"a": text, "b": [text]}, {}, {}), environ)
    try:
        result = expand_text(text, environ)
    except ValueError:
        return
    if "${" not in text:
        assert result == text


@given(st.text(max_size=100))
def test_an_escaped_text_stays_the_same(text: str) -> None:
    if "$$" not in text:
        assert expand_text(text.replace("${", "$${"), {}) == text


@given(st.text(st.characters(exclude_characters="$"), max_size=50))
def test_the_value_of_a_variable_is_not_expanded_again(value: str) -> None:
    assert expand_text("<${X}>", {"X": value}) == f"<{value}>"
