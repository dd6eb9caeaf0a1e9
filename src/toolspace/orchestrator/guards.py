"""Asks code that is not ours (providers, policies, counters) so that its faults stay its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import Deny, Policy, TokenCounter, ToolProvider
from toolspace.core.tokens import estimate
from toolspace.core.tool import Tool
from toolspace.orchestrator.catalog import Entry

_log = logging.getLogger("toolspace.orchestrator")


def careful_counter(count: TokenCounter) -> TokenCounter:
    """A counter that always has an answer: every call is counted, and none may fail because of it."""
    if count is estimate:
        return count

    def counted(text: str, /) -> int:
        try:
            return count(text)
        except Exception:
            _log.exception("tokens could not be counted; they are estimated")
            return estimate(text)

    return counted


def offers(entry: Entry, caller: ToolContext) -> bool:
    try:
        return entry.provider.offers(entry.tool, caller)
    except Exception:  # Its own code: one that fails must not take the list of all others away.
        _log.exception("provider %s cannot say whether it offers %s", entry.owner, entry.tool.name)
        return False


def permits(tool: Tool, caller: ToolContext, policies: Sequence[Policy]) -> bool:
    """Whether to show a tool: not where a policy would refuse it. One that cannot say decides when it is called."""
    try:
        return not any(isinstance(policy.decide(tool, caller), Deny) for policy in policies)
    except Exception:
        return True


def instructions_of(provider: ToolProvider) -> str:
    try:
        return provider.get_instructions().strip()
    except Exception:
        _log.exception("provider %s cannot give its instructions", provider.namespace or provider.kind)
        return ""


async def close(provider: ToolProvider) -> None:
    try:
        await provider.aclose()
    except (Exception, asyncio.CancelledError):
        # A connection that breaks may show as a cancellation that nobody asked for.
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        _log.exception("provider %s did not close", provider.namespace or provider.kind)
