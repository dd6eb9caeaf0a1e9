"""The stage `quota`: refuses a call if a quota of the caller, the agent or the tool is used up, and counts the others.

It comes before the cache, so a cached result counts too. Quotas on tokens and costs are for models: `agents/` charges
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolspace.core.names import RESERVED_AGENT_NAMES, agent_tool_name
from toolspace.core.quotas import Quota, unique_charges
from toolspace.core.result import ToolResult
from toolspace.errors import ToolspaceError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.effective_settings import matches_name

if TYPE_CHECKING:
    from toolspace.orchestrator.catalog import CatalogEntry
    from toolspace.orchestrator.pipeline import CallHandler, CallServices, StageContext

_RUN_CONTROL_TOOLS = frozenset(map(agent_tool_name, RESERVED_AGENT_NAMES))
_ANY_TOOL = "*"


def quota(stage: StageContext, next: CallHandler, /) -> CallHandler:
    quotas = find_quotas(stage.services, stage.entry)
    if not quotas:
        return next
    services, name = stage.services, stage.entry.tool.name

    async def run(call: Call) -> ToolResult:
        context = call.base_context
        now = services.quota_store.now_ms()
        charges = unique_charges(charge for item in quotas for charge in item.charge_call(context, name, now=now))
        if charges:
            call.prepare_to_wait()
            try:
                exceeded_charge = await call.within_deadline(services.quota_store.take(charges))
            except ToolspaceError as error:
                return call.fail("internal_error", f"the quotas cannot be checked: {error}", executed=False)
            if exceeded_charge is not None:
                return call.fail("limit_exceeded", exceeded_charge.refusal)
        return await next(call)

    return run


def find_quotas(services: CallServices, entry: CatalogEntry) -> list[Quota]:
    """The quotas that limit the calls of a tool. Those for all tools are not for tools that control a run."""
    tool, names = entry.tool, entry.spellings.names
    controls_run = (
        tool.execution_type == "prebuilt" or tool.name in _RUN_CONTROL_TOOLS or entry.provider.kind == "router"
    )
    return [
        item
        for item in services.quotas
        if item.limits_calls
        and (
            not controls_run
            if item.tools is None
            else any(
                matches_name(pattern, names) and not (controls_run and pattern == _ANY_TOOL) for pattern in item.tools
            )
        )
    ]
