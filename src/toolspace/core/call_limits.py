"""Limits on calls that the configuration declares and the orchestrator enforces: plain data."""

from __future__ import annotations

import msgspec

from toolspace.core.tool import Tool


class RepeatedCallLimits(msgspec.Struct, frozen=True):
    """How often a model may make the same call in one run."""

    calls: int = 5
    read_only_calls: int = 20
    """For tools that are annotated as read-only: reading again is often useful."""

    def for_tool(self, tool: Tool) -> int:
        return self.read_only_calls if tool.annotations.read_only else self.calls


DEFAULT_REPEATED_CALLS = RepeatedCallLimits()
