"""The checks of the conformance suite that are expected to fail, and why. Runs none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.conformance.suite import REVISIONS, Outcome, Scenario, Side

ALWAYS_CHECKED = "wire-schema-valid"
"""The check of every message against the protocol's schema, in every scenario."""
FILE = Path(__file__).with_name("expected.yaml")
Cause = Literal["ours", "not offered", "suite", "library"]


@dataclass(frozen=True)
class ExpectedFailure:
    """Failures with one reason."""

    side: Side
    revisions: tuple[str, ...]
    scenarios: tuple[str, ...]
    checks: tuple[str, ...]
    """Empty: every check of these scenarios except `ALWAYS_CHECKED` may fail, and at least one does."""
    cause: Cause
    reason: str

    @property
    def row(self) -> str:
        """Its line in docs/conformance.md."""
        names = self.checks or self.scenarios
        eras = "both" if self.revisions == REVISIONS else ", ".join(self.revisions)
        return f"| {', '.join(f'`{name}`' for name in names)} | {self.side} | {eras} | {self.cause}: {self.reason} |"

    def covers(self, scenario: Scenario, check: str) -> bool:
        return self._is_of(scenario) and (check in self.checks if self.checks else check != ALWAYS_CHECKED)

    def passing_checks(self, outcome: Outcome) -> Iterable[str]:
        """Returns the checks that are expected to fail here, but passed."""
        if not self._is_of(outcome.scenario):
            return ()
        if not self.checks:
            return () if outcome.failed else ("all of it",)
        return (check for check in self.checks if check not in outcome.failed)

    def _is_of(self, scenario: Scenario) -> bool:
        is_era = scenario.side == self.side and scenario.revision in self.revisions
        return is_era and scenario.name in self.scenarios


class Expected:
    def __init__(self, entries: Iterable[ExpectedFailure]) -> None:
        self.entries = tuple(entries)

    def reason(self, scenario: Scenario, check: str) -> str | None:
        return next((f"{entry.cause}: {entry.reason}" for entry in self.entries if entry.covers(scenario, check)), None)

    def is_foreign(self, outcome: Outcome) -> bool:
        """Whether all failures of a scenario are features that are not offered."""
        causes = {
            entry.cause for entry in self.entries for check in outcome.failed if entry.covers(outcome.scenario, check)
        }
        return causes == {"not offered"}

    def stale(self, outcome: Outcome) -> set[str]:
        return {check for entry in self.entries for check in entry.passing_checks(outcome)}


def load(file: Path = FILE) -> Expected:
    entries: list[dict[str, Any]] = yaml.safe_load(file.read_text()) or []
    return Expected(
        ExpectedFailure(
            side=entry["side"],
            revisions=tuple(map(str, entry.get("revisions", REVISIONS))),  # YAML parses them as dates.
            scenarios=tuple(entry["scenarios"]),
            checks=tuple(entry.get("checks", ())),
            cause=entry["cause"],
            reason=entry["reason"],
        )
        for entry in entries
    )
