"""`toolspace doctor`: prints what the checks found, and how to fix it."""

from __future__ import annotations

import os

import click
import msgspec

from toolspace.cli.checking import Check
from toolspace.cli.checks import all_checks
from toolspace.cli.interrupts import run
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import Output, neutral
from toolspace.cli.status import waiting

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


@click.command("doctor", cls=Command)
@click.pass_obj
def command(options: Options) -> int:
    """Check the installation, the configuration, the storage, the servers and providers; say how to fix each."""
    return run(lambda _: _examine(options))


async def _examine(options: Options) -> int:
    output = options.output
    set_up_logs(options, os.environ)
    checks: list[Check] = []
    async with waiting(output, "checking"):
        async for check in all_checks(options):
            checks.append(check)
            if not options.json:
                _print(output, check)
    problems = sum(check.state == "problem" for check in checks)
    if options.json:
        output.document({"ok": not problems, "checks": msgspec.to_builtins(checks)})
    elif problems:
        output.error(f"{problems} {'problem' if problems == 1 else 'problems'} to mend")
    return 1 if problems else 0


def _print(output: Output, check: Check) -> None:
    mark, colour = _MARKS[check.state]
    if output.quiet and check.state == "ok":
        return
    output.line(f"{output.style(mark, fg=colour, bold=True)} {check.what}: {neutral(check.found)}")
    if check.fix:
        output.line(f"    {'to fix: ' if check.state != 'ok' else ''}{neutral(check.fix)}")
