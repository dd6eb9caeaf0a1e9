"""Metrics of agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.model_server import error_reply
from tests.server.scripted_agents import (
    AgentGateway,
    HeldTurn,
    agent_config,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from tests.server.test_prometheus_format import samples

pytestmark = pytest.mark.spec("12.4")


async def read_metrics(setup: AgentGateway) -> dict[str, str]:
    return samples((await setup.api.get("/metrics")).body)


async def test_cycles_are_counted_by_outcome_and_models_by_tokens_and_cost(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        agents = {
            "ada": agent_config(model_server, model={"name": "gpt-4.1"}),
            "bob": agent_config(model_server, model={"name": "of-bob"}),
        }
        async with open_agent_gateway(tmp_path, model_server, agents=agents) as setup:
            model_server.script(tool_calls_turn(("skip", {"reason": "not mine"})), model="gpt-4.1")
            model_server.script(error_reply(401, {"error": {"message": "no"}}), model="of-bob")
            await setup.say("Hi")
            await setup.wait_for_run_end()
            await setup.wait_for_run_end(agent="bob")
            metrics = await read_metrics(setup)
    assert metrics['toolspace_agent_cycles_total{outcome="skipped"}'] == "1"
    assert metrics['toolspace_agent_cycles_total{outcome="failed"}'] == "1"
    name = 'model="openai-compatible:gpt-4.1"'
    assert metrics[f'toolspace_model_requests_total{{{name},status="ok"}}'] == "1"
    kinds = ("input", "cached", "output")
    tokens = [metrics[f'toolspace_model_tokens_total{{{name},kind="{kind}"}}'] for kind in kinds]
    assert tokens == ["1000", "400", "50"]
    assert float(metrics[f"toolspace_model_cost_dollars_total{{{name}}}"]) == pytest.approx(0.0018)
    refused_requests = 'toolspace_model_requests_total{model="openai-compatible:of-bob",status="not_permitted"}'
    assert metrics[refused_requests] == "1"


async def test_active_agents_are_counted(tmp_path: Path) -> None:
    async with open_model_server() as model_server, open_agent_gateway(tmp_path, model_server) as setup:
        gate = HeldTurn()
        model_server.script(gate)
        assert (await read_metrics(setup))["toolspace_agents_active"] == "0"
        await setup.push_event("go")
        await model_server.wait_for_requests()
        assert (await read_metrics(setup))["toolspace_agents_active"] == "1"
        gate.open()
        await setup.wait_for_run_end()
        assert (await read_metrics(setup))['toolspace_agent_cycles_total{outcome="answered"}'] == "1"


async def test_a_cancelled_run_is_counted_as_cancelled(tmp_path: Path) -> None:
    async with open_model_server() as model_server, open_agent_gateway(tmp_path, model_server) as setup:
        model_server.script(model_server.never_answer)
        await setup.push_event("go")
        await model_server.wait_for_requests()
        (run,) = await setup.list_runs()
        await setup.api.post(f"/api/runs/{run['id']}/cancel")
        await model_server.client_closed.wait()
        await setup.push_event("and again")
        await setup.wait_for_run_end(2)
        metrics = await read_metrics(setup)
    assert metrics['toolspace_agent_cycles_total{outcome="canceled"}'] == "1"
    assert metrics['toolspace_model_requests_total{model="openai-compatible:m",status="canceled"}'] == "1"
