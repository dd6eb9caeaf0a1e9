"""What is known to fail in the conformance suite is told, with its reason, and nothing else is forgiven."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml

from tests.conformance.expected import ALWAYS_HELD, FILE, Cause, Expected, Known, load
from tests.conformance.suite import REVISIONS, Outcome, Scenario
from tests.peers.install import ROOT

PROMPTS = Scenario("server", REVISIONS[0], "prompts-list")


def known(**changes: Any) -> Expected:
    entry: dict[str, Any] = {
        "side": "server",
        "revisions": REVISIONS,
        "scenarios": ("prompts-list",),
        "checks": (),
        "cause": "not offered",
        "reason": "no prompts",
    }
    return Expected([Known(**entry | changes)])


@pytest.mark.parametrize("entry", load().entries, ids=lambda entry: entry.scenarios[0])
def test_every_expected_failure_is_in_the_docs_page(entry: Known) -> None:
    assert entry.row in (ROOT / "docs" / "conformance.md").read_text()
    assert entry.cause in get_args(Cause)


def test_no_expected_failure_is_listed_twice() -> None:
    named = [
        (entry.side, revision, scenario, check)
        for entry in load().entries
        for revision in entry.revisions
        for scenario in entry.scenarios
        for check in entry.checks or ("*",)
    ]
    assert len(named) == len(set(named))
    assert set().union(*(entry.keys() for entry in yaml.safe_load(FILE.read_text()))) <= {
        *("side", "revisions", "scenarios", "checks", "cause", "reason")
    }


def test_unexpected_failure_is_reported() -> None:
    assert known().reason(PROMPTS, "prompts-list") == "not offered: no prompts"
    assert known().reason(Scenario("client", REVISIONS[0], "prompts-list"), "prompts-list") is None
    assert known(revisions=REVISIONS[1:]).reason(PROMPTS, "prompts-list") is None
    assert known(checks=("other",)).reason(PROMPTS, "prompts-list") is None
    assert known().reason(PROMPTS, ALWAYS_HELD) is None


def test_expected_failure_that_passes_is_stale() -> None:
    assert known().stale(Outcome(PROMPTS, 2, {})) == {"all of it"}
    assert known().stale(Outcome(PROMPTS, 1, {"prompts-list": "no such method"})) == set()
    assert known(checks=("a", "b")).stale(Outcome(PROMPTS, 1, {"a": "…"})) == {"b"}
