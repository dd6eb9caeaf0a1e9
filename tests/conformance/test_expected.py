"""Expected failures of the conformance suite are documented with a reason, and all others are reported."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml

from tests.conformance.expected import ALWAYS_CHECKED, FILE, Cause, Expected, ExpectedFailure, load
from tests.conformance.suite import REVISIONS, Outcome, Scenario
from tests.peers.install import ROOT

PROMPTS = Scenario("server", REVISIONS[0], "prompts-list")


def expected_with(**changes: Any) -> Expected:
    entry: dict[str, Any] = {
        "side": "server",
        "revisions": REVISIONS,
        "scenarios": ("prompts-list",),
        "checks": (),
        "cause": "not offered",
        "reason": "no prompts",
    }
    return Expected([ExpectedFailure(**entry | changes)])


@pytest.mark.parametrize("entry", load().entries, ids=lambda entry: entry.scenarios[0])
def test_every_expected_failure_is_in_the_docs_page(entry: ExpectedFailure) -> None:
    assert entry.row in (ROOT / "docs" / "conformance.md").read_text()
    assert entry.cause in get_args(Cause)


def test_no_expected_failure_is_listed_twice() -> None:
    names = [
        (entry.side, revision, scenario, check)
        for entry in load().entries
        for revision in entry.revisions
        for scenario in entry.scenarios
        for check in entry.checks or ("*",)
    ]
    assert len(names) == len(set(names))
    assert set().union(*(entry.keys() for entry in yaml.safe_load(FILE.read_text()))) <= {
        *("side", "revisions", "scenarios", "checks", "cause", "reason")
    }


def test_unexpected_failure_is_reported() -> None:
    assert expected_with().reason(PROMPTS, "prompts-list") == "not offered: no prompts"
    assert expected_with().reason(Scenario("client", REVISIONS[0], "prompts-list"), "prompts-list") is None
    assert expected_with(revisions=REVISIONS[1:]).reason(PROMPTS, "prompts-list") is None
    assert expected_with(checks=("other",)).reason(PROMPTS, "prompts-list") is None
    assert expected_with().reason(PROMPTS, ALWAYS_CHECKED) is None


def test_expected_failure_that_passes_is_stale() -> None:
    assert expected_with().stale(Outcome(PROMPTS, 2, {})) == {"all of it"}
    assert expected_with().stale(Outcome(PROMPTS, 1, {"prompts-list": "no such method"})) == set()
    assert expected_with(checks=("a", "b")).stale(Outcome(PROMPTS, 1, {"a": "…"})) == {"b"}
