"""The result of one check of `toolspace doctor`, and how it is printed."""

from __future__ import annotations

from typing import Literal

import msgspec

from toolspace.cli.output import CommandOutput, escape_control_characters

CheckState = Literal["ok", "warning", "problem"]
_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one check."""

    state: CheckState
    subject: str = msgspec.field(name="what")
    message: str = msgspec.field(name="found")
    fix: str = ""


def print_check(output: CommandOutput, check: CheckResult) -> None:
    mark, colour = _MARKS[check.state]
    if output.quiet and check.state == "ok":
        return
    message = escape_control_characters(check.message)
    output.line(f"{output.style(mark, fg=colour, bold=True)} {check.subject}: {message}")
    if check.fix:
        output.line(f"    {'to fix: ' if check.state != 'ok' else ''}{escape_control_characters(check.fix)}")
