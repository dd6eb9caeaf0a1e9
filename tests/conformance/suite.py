"""Runs scenarios of the MCP conformance suite and parses their results."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.peers.install import npm_package, npm_program

Side = Literal["server", "client"]
SIDES: tuple[Side, ...] = ("server", "client")
REVISIONS = ("2025-11-25", "2026-07-28")
"""The last revision with a handshake, and the stateless one."""

PACKAGE = "@modelcontextprotocol/conformance"
SCENARIO_TIMEOUT_S = 60


@dataclass(frozen=True)
class Scenario:
    side: Side
    revision: str
    name: str
    optional: str | None = None
    """Why the revision does not require it: `extension`, `pending` or `added-after-release`."""


@dataclass(frozen=True)
class Outcome:
    """The result of one scenario: the number of passed checks, and the failed ones."""

    scenario: Scenario
    passed_count: int
    failed: dict[str, str]
    """Reason by check. Includes warnings for a SHOULD that is not followed, as the suite counts them."""


def scenarios(side: Side, revision: str) -> list[Scenario]:
    """Returns the scenarios of a revision, required or not."""
    text = (npm_package(PACKAGE) / "requirements" / f"{revision}.yaml").read_text()
    document: dict[str, Any] = yaml.safe_load(text)
    required = [Scenario(side, revision, name) for name in document[side]]
    # `leg` is the side of an entry.
    unscored_scenarios = [
        Scenario(side, revision, entry["scenario"], entry["reason"])
        for entry in document["not_scored"]
        if entry["leg"] == side
    ]
    return required + unscored_scenarios


def run_all(scenarios: Sequence[Scenario], target: Sequence[str], *, at_once: int) -> Iterator[Outcome]:
    """Runs scenarios against `target`: `--url …` of a server, or `--command …` of a client."""
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda scenario: run(scenario, target), scenarios)


def run(scenario: Scenario, target: Sequence[str]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        command = [
            *npm_program(PACKAGE),
            scenario.side,
            *target,
            *("--scenario", scenario.name),
            *("--spec-version", scenario.revision, "--force"),
            *("--timeout", str(SCENARIO_TIMEOUT_S * 1000)),
            *("--output-dir", folder),
        ]
        process = subprocess.run(
            command,
            env={**os.environ, "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=SCENARIO_TIMEOUT_S * 2,
        )
        checks = [check for file in Path(folder).rglob("checks.json") for check in json.loads(file.read_text())]
        words = [file.read_text() for file in Path(folder).rglob("stderr.txt")]  # The output of the client under test.
    failed: dict[str, str] = {}
    for check in checks:
        if check["status"] in {"FAILURE", "WARNING"}:
            failed.setdefault(check["id"], check.get("errorMessage") or check["description"])
    if process.returncode and not failed:
        # The scenario failed as a whole, or the client under test exited with an error.
        failed["exit"] = ("".join(words) or process.stderr or process.stdout).strip()[-1500:]
    passed_count = sum(check["status"] == "SUCCESS" for check in checks)
    return Outcome(scenario, passed_count, failed)
