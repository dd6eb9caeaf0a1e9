"""Measure: a call with a quota that SQLite counts, against a call that is stored; and a provider's circuit breaker."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import Contestant, Report, concurrently, race, repeat
from benchmarks.workloads import ARGUMENTS, add, create_toolspace
from toolspace import Quota, Tool, ToolContext, ToolProvider, ToolResult, Toolspace, tool
from toolspace.core.ids import new_id
from toolspace.spaces import runs
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.spaces.call_recorder import CallRecorder
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.spaces.quota_counters import StoredQuotas
from toolspace.storage.queries import entities_and_spaces
from toolspace.storage.sqlite.database import SqliteDatabase

CALLERS = 32
QUOTAS = (Quota(per="principal", calls_per_day=10**9),)
DURABLE, WITH_QUOTA, BOTH = "a stored call", "a call with a quota", "a stored call with a quota"
TOGETHER = f", {CALLERS} callers"
BREAKER, NO_BREAKER = "a provider's call, with its circuit breaker", "without"
Call = Callable[[], Awaitable[Any]]


async def measure() -> Report:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        database = await SqliteDatabase.open(Path(folder) / "toolspace.db")
        stack.push_async_callback(database.aclose)
        ledger = Ledger(database)
        durable = await _stored_calls(ledger, _open_toolspace(ledger))
        both = await _stored_calls(ledger, _open_toolspace(ledger, quotas=QUOTAS))
        quota_toolspace = _open_toolspace(ledger, quotas=QUOTAS)
        calls: dict[str, Call] = {
            DURABLE: durable,
            WITH_QUOTA: lambda: quota_toolspace.call("add", ARGUMENTS),
            BOTH: both,
        }
        contestants = [Contestant(name, repeat(call)) for name, call in calls.items()]
        contestants += [Contestant(name + TOGETHER, concurrently(CALLERS, call)) for name, call in calls.items()]
        timings = await race(contestants, rounds=15, slice_ms=40)
    breaker_timings = await race(
        [
            Contestant(BREAKER, repeat(_provider_call())),
            Contestant(NO_BREAKER, repeat(_provider_call(circuit_breaker_failures=None))),
        ],
        rounds=60,
    )
    report = Report("Quotas on SQLite, and circuit breakers")
    report.ratio("a call with a quota / a stored call", timings.ratio(WITH_QUOTA, DURABLE), aim=1.5)
    report.ratio(f"the same{TOGETHER}", timings.ratio(WITH_QUOTA + TOGETHER, DURABLE + TOGETHER), aim=1.5)
    report.ratio("a stored call with a quota / without", timings.ratio(BOTH, DURABLE), aim=1.5)
    report.ratio("a provider's call with a circuit breaker / without", breaker_timings.ratio(BREAKER, NO_BREAKER))
    report.times(timings, [contestant.name for contestant in contestants])
    report.times(breaker_timings, [BREAKER, NO_BREAKER])
    return report


def _open_toolspace(ledger: Ledger, **settings: Any) -> Toolspace:
    ts = create_toolspace([tool(visible=False)(add)], **settings)
    ts.orchestrator.configure(quota_store=StoredQuotas(ledger))
    return ts


async def _stored_calls(ledger: Ledger, ts: Toolspace) -> Call:
    """Calls in a run, each stored before it starts and when it has ended."""
    agent = new_id("ent")
    await ledger.write(entities_and_spaces.create_entity, agent, "agent", "Ada", {})
    record = await ledger.commit(runs.open_run, agent)
    ts.orchestrator.add_stage(CallRecorder(ledger, ts.bus).stage)
    host = GatewayCallHost(PendingCalls(ledger), run_id=record.id, agent_entity_id=agent)
    run, context = ts.run(id=record.id), ToolContext(agent_entity_id=agent, host=host)
    return lambda: ts.call("add", ARGUMENTS, context=context, run=run)


class _Service(ToolProvider):
    namespace = "service"

    def list_tools(self) -> Sequence[Tool]:
        return [Tool("add", "Adds.", {"type": "object"})]

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult(True, 3)


def _provider_call(**settings: Any) -> Call:
    ts = create_toolspace([], providers=[_Service()], **settings)
    return lambda: ts.call("service__add", ARGUMENTS)
