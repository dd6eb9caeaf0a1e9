"""Daily budgets of tokens and cost, by agent and by principal: a run over its budget fails and says when it resets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import agent, run_agents
from tests.agents.scripted_sessions import ScriptedSessions, wait_until_done
from tests.setting_coverage import SettingCoverage
from toolspace import Agent, Quota, Settings, ToolContext, Toolspace, tool
from toolspace.builtin.memory import memory_tools
from toolspace.config.agent_settings import ConsciousnessSettings
from toolspace.core.language_model import ModelRequest, Usage
from toolspace.core.quotas import MemoryQuotas
from toolspace.core.times import format_iso, parse_iso_time, to_milliseconds
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database, Program

pytestmark = pytest.mark.spec("22.2")
coverage = SettingCoverage("quotas[].")
USAGE = Usage(requests=1, input_tokens=90, output_tokens=10, cost=0.5)


DAY_MS = 24 * 3_600_000


@tool(visible=False)
async def act() -> str:
    """Acts."""
    return "acted"


def make_agent(name: str = "ada", *script: Any, **options: Any) -> Agent:
    model = ScriptedModel.loop(script or ["Done."], usage=USAGE)
    return Agent(name, model=model, **options)


@pytest.mark.spec("22.1")
@coverage.covers("tokensPerDay", "costPerDay")
@pytest.mark.parametrize(
    ("quota", "text"),
    [
        (Quota(per="agent", tokens_per_day=150), "150 tokens per day"),
        (Quota(per="agent", cost_per_day=0.75), "$0.75 per day"),
    ],
)
async def test_a_run_over_the_budget_of_its_agent_fails_until_the_reset(quota: Quota, text: str) -> None:
    time = "2100-03-01T12:00:00Z"
    settings = Settings(quotas=[quota])
    async with Toolspace(agents=[make_agent(), make_agent("bob")], settings=settings) as ts:
        ts.orchestrator.configure(quota_store=MemoryQuotas(clock=lambda: to_milliseconds(parse_iso_time(time))))
        assert [(await ts.run_agent("ada", "Hi")).ok for _ in range(2)] == [True, True]
        result = await ts.run_agent("ada", "Hi")
        assert (result.ok, result.end, result.error_kind, result.steps) == (False, "limit", "limit_exceeded", 0)
        assert result.error == f'the quota of {text} for "ada" (quotas) is used up; it resets at 2100-03-02T00:00:00Z'
        assert (await ts.run_agent("bob", "Hi")).ok
        time = "2100-03-02T00:00:00Z"
        assert (await ts.run_agent("ada", "Hi")).ok


async def test_the_budget_is_checked_before_each_request() -> None:
    ada = make_agent("ada", call("act"))
    async with Toolspace([act], agents=[ada], settings=Settings(quotas=[Quota(per="agent", tokens_per_day=250)])) as ts:
        result = await ts.run_agent("ada", "Hi")
        assert (result.end, result.steps) == ("limit", 3)
        assert "it resets at" in (result.error or "")


async def test_each_user_has_a_budget() -> None:
    settings = Settings(quotas=[Quota(per="principal", cost_per_day=0.5)])
    async with Toolspace(agents=[make_agent()], settings=settings) as ts:
        for user, is_allowed in (("ann", True), ("bob", True), ("ann", False)):
            assert (await ts.run_agent("ada", "Hi", context=ToolContext(user_id=user))).ok == is_allowed


async def test_a_sub_agent_spends_its_own_budget_and_that_of_the_user() -> None:
    bob = make_agent("bob")
    ada = make_agent("ada", call("agent__bob", {"prompt": "Help."}), "Done.", agents=[bob])
    for quota, errors in (
        (Quota(agents=["bob"], per="agent", cost_per_day=0.5), [None, None]),
        (Quota(per="principal", cost_per_day=1.5), [None, 'the quota of $1.5 per day for "ann"']),
    ):
        async with Toolspace(agents=[ada], settings=Settings(quotas=[quota])) as ts:
            context = ToolContext(user_id="ann")
            results = [await ts.run_agent("ada", "Hi", context=context) for _ in range(2)]
            assert [result.error and result.error.partition(" (")[0] for result in results] == errors
            if quota.per == "agent":
                assert "is used up" in str(results[1].turns)  # The result of the second call of bob.


async def test_calls_of_tools_do_not_use_a_budget_of_tokens() -> None:
    async with Toolspace([act], settings=Settings(quotas=[Quota(tokens_per_day=1)])) as ts:
        assert all([(await ts.call("act")).ok for _ in range(5)])


async def test_the_run_of_a_gateway_fails_with_the_reason_and_its_events_are_done(
    database: Database, tmp_path: Path
) -> None:
    model = ScriptedModel.loop([call("act"), "Done."], usage=USAGE)
    ada = agent("ada", model)
    options = {"tools": [act], "session_dir": tmp_path, "quotas": [Quota(per="agent", cost_per_day=1)]}
    async with run_agents(database, ada, **options) as harness:
        await harness.send_message("Hi")
        assert (await harness.wait_for_run()).status == "completed"
    async with run_agents(database, ada, **options) as harness:  # After a restart.
        await harness.send_message("Hi again")
        run = await harness.wait_for_run(2)
        assert (run.status, run.steps) == ("failed", 0)
        reset = format_iso((harness.ledger.now_ms() // DAY_MS + 1) * DAY_MS)
        assert f"it resets at {reset}" in (run.error or "")
        assert {event.status for event in await harness.inbox()} == {"processed"}
        assert (await harness.sent_texts(harness.agent))[-1] == (
            f"I cannot answer: the budget for today is used up. It resets at {reset}."
        )
    assert len(model.requests) == 2


def _list_amounts() -> Program[list[int]]:
    """What is counted for each quota and subject."""
    return [row[0] for row in (yield "SELECT amount FROM quota_counters", ())]


@pytest.mark.spec("11.4")
async def test_the_summary_of_a_compaction_is_charged_to_its_run_and_to_the_daily_budgets(
    database: Database, tmp_path: Path
) -> None:
    def respond(request: ModelRequest) -> str:
        return "the gist" if request.system.startswith("You keep the memory") else "word " * 200

    model = ScriptedModel(respond, usage=USAGE)
    ada = agent("ada", model, consciousness=ConsciousnessSettings(max_tokens=300, min_recent_cycles=1))
    quotas = [Quota(per="agent", tokens_per_day=350), Quota(per="principal", tokens_per_day=10_000)]
    async with run_agents(database, ada, session_dir=tmp_path, quotas=quotas) as harness:
        for number in range(1, 4):
            await harness.send_message(f"message {number}")
            await harness.wait_for_run(number)
        first_run, second_run, third_run = await harness.runs()
        assert [run.usage["requests"] for run in (first_run, second_run)] == [1, 2]
        assert second_run.usage["inputTokens"] == 2 * USAGE.input_tokens
        assert (third_run.status, third_run.usage["requests"]) == ("completed", 1)  # Its compaction waits.
        summaries = [request for request in model.requests if request.system.startswith("You keep the memory")]
        assert len(summaries) == 1
        assert await harness.ledger.read(_list_amounts) == [400, 400]


@pytest.mark.spec("11.5")
async def test_tasks_and_reflections_are_charged_to_the_agent_and_the_person(
    database: Database, tmp_path: Path
) -> None:
    spawn = call("spawn_task", {"description": "look it up", "input": "How high is the Zugspitze?"})
    scripts = ScriptedSessions(main=[spawn], task=["2,962 m"], reflection=["It went well."], usage=USAGE)
    quotas = [Quota(per="agent", tokens_per_day=10_000), Quota(per="principal", tokens_per_day=10_000)]
    async with run_agents(
        database,
        agent("ada", scripts.model),
        tools=memory_tools,
        session_dir=tmp_path,
        context=ToolContext(memory_dir=tmp_path / "memory"),
        quotas=quotas,
    ) as harness:
        await harness.send_message("How high is it?")
        await wait_until_done(harness)
        assert [len(scripts.requests_of(kind)) for kind in ("task", "reflection")] == [1, 1]
        tokens = len(scripts.model.requests) * USAGE.tokens
        assert await harness.ledger.read(_list_amounts) == [tokens, tokens]


def test_the_limits_of_models_have_a_test() -> None:
    assert coverage.list_missing("quotas[].tokensPerDay", "quotas[].costPerDay") == []
