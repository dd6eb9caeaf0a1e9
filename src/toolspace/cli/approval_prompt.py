"""Asks the person at the terminal to approve a call: `toolspace call` uses it.

Whoever calls tools in a terminal of this machine is an operator, and may approve what operators or callers may.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from toolspace.cli.output import CommandOutput, escape_control_characters
from toolspace.core.approvals import CALLER, OPERATORS, ApprovalDecision, ApprovalRequest


class ApprovalPrompt:
    """The `on_approval` of a command."""

    def __init__(self, output: CommandOutput) -> None:
        self._output = output
        self.before_question: Callable[[], None] = lambda: None
        """Called before the question is shown, to remove a status line."""

    async def __call__(self, request: ApprovalRequest) -> ApprovalDecision:
        name, rule = request.tool.name, request.source
        source = f" ({rule})" if rule else ""
        if not {OPERATORS, CALLER}.intersection(request.approvers):
            approvers = ", ".join(request.approvers)
            return ApprovalDecision(False, f'the tool "{name}" needs the approval of {approvers}{source}')
        if self._output.json or not sys.stdin.isatty() or not sys.stderr.isatty():
            reason = "nobody can be asked without a terminal, or with --json"
            return ApprovalDecision(False, f'the tool "{name}" needs approval{source}, and {reason}')
        self.before_question()
        print(f"{escape_control_characters(request.message)} [y/N] ", end="", file=sys.stderr, flush=True)
        answer = await _read_line()
        is_approved = answer.strip().lower() in ("y", "yes")
        return ApprovalDecision(is_approved, None if is_approved else "the person at the terminal did not approve it")


async def _read_line() -> str:
    """Reads a line from the terminal, without blocking the loop, so that Ctrl-C and timeouts still work."""
    loop = asyncio.get_running_loop()
    if sys.platform == "win32":
        return await asyncio.to_thread(sys.stdin.readline)
    is_readable = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), is_readable.set)
    try:
        await is_readable.wait()
        return sys.stdin.readline()
    finally:
        loop.remove_reader(sys.stdin.fileno())
