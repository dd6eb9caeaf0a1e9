"""`make conformance`: runs the MCP conformance suite against our server and our client, in both eras.

    python -m tests.conformance                              everything
    python -m tests.conformance --side client --scenario auth/basic-cimd -v

Ends with 1 where a check fails that `expected.yaml` does not name, or one passes that it names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.conformance.expected import Expected, load
from tests.conformance.suite import REVISIONS, SIDES, Outcome, Side, run_all, scenarios


@contextmanager
def target(side: Side) -> Iterator[list[str]]:
    """Yields the target of the suite: the URL of a running server, or the command of a client."""
    if side == "client":
        # The suite splits the command at spaces and gives it to a shell.
        yield ["--command", f"{sys.executable} -m tests.conformance.client"]
        return
    server = subprocess.Popen([sys.executable, "-m", "tests.conformance.server"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if not url:
            raise SystemExit("the server under test did not start; what it said is above")
        yield ["--url", url]
    finally:
        server.terminate()
        server.wait(30)


class ConformanceReport:
    """Compares outcomes with the expected failures, and prints the differences."""

    def __init__(self, expected: Expected, *, verbose: bool) -> None:
        self._expected = expected
        self._verbose = verbose
        self.surprises = 0

    def side(self, side: Side, revision: str, outcomes: Sequence[Outcome]) -> None:
        required = [outcome for outcome in outcomes if outcome.scenario.optional is None]
        print(f"\n{side}, {revision}")
        for outcome in outcomes:
            self._scenario(outcome)
        green = sum(not outcome.failed for outcome in required)
        foreign = sum(self._expected.is_foreign(outcome) for outcome in required)
        extra = [outcome for outcome in outcomes if outcome.scenario.optional]
        print(f"  required: {green} of {len(required)} scenarios pass, {foreign} are of things that are not offered")
        print(f"  optional: {sum(not outcome.failed for outcome in extra)} of {len(extra)}")
        print(f"  checks: {_checks(required)}; optional: {_checks(extra)}")

    def _scenario(self, outcome: Outcome) -> None:
        scenario = outcome.scenario
        lines: list[str] = []
        for check, failures in outcome.failed.items():
            reason = self._expected.reason(scenario, check)
            if reason is None:
                self.surprises += 1
                lines.append(f"    UNEXPECTED {check}: {failures}")
            elif self._verbose:
                lines.append(f"    {check}: {failures}\n      expected, {reason}")
        stale = sorted(self._expected.stale(outcome))
        self.surprises += len(stale)
        lines += [f"    PASSES NOW {check}: take it out of tests/conformance/expected.yaml" for check in stale]
        if lines or self._verbose:
            optional = f" ({scenario.optional})" if scenario.optional else ""
            print(
                f"  {'✗' if outcome.failed else '✓'} {scenario.name}{optional}: {outcome.passed_count} passed",
                flush=True,
            )
            print("\n".join(lines), end="\n" if lines else "", flush=True)


def _checks(outcomes: Sequence[Outcome]) -> str:
    passed_count = sum(outcome.passed_count for outcome in outcomes)
    failed_count = sum(len(outcome.failed) for outcome in outcomes)
    return f"{passed_count} passed, {failed_count} failed"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--revision", choices=REVISIONS)
    parser.add_argument("--scenario", help="only those whose name contains this")
    parser.add_argument("-v", "--verbose", action="store_true", help="every scenario, and the expected failures too")
    options = parser.parse_args()
    report = ConformanceReport(load(), verbose=options.verbose)
    for side in SIDES if options.side is None else (options.side,):
        with target(side) as address:
            for revision in REVISIONS if options.revision is None else (options.revision,):
                matching_scenarios = [
                    scenario for scenario in scenarios(side, revision) if (options.scenario or "") in scenario.name
                ]
                report.side(side, revision, list(run_all(matching_scenarios, address, at_once=os.cpu_count() or 2)))
    if report.surprises:
        print(f"\n{report.surprises} checks are not as expected")
    return 1 if report.surprises else 0


if __name__ == "__main__":
    sys.exit(main())
