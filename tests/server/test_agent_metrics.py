"""What operators see of agents in /metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.servers import status
from tests.server.test_exposition import samples
from tests.server.thinking import Gate, House, calls, described, housed, thinking

pytestmark = pytest.mark.spec("12.4")


async def figures(house: House) -> dict[str, str]:
    return samples((await house.api.get("/metrics")).body)


async def test_cycles_are_counted_by_how_they_end_and_models_by_what_they_cost(tmp_path: Path) -> None:
    async with thinking() as brain:
        agents = {"ada": described(brain, model={"name": "gpt-4.1"}), "bob": described(brain, model={"name": "of-bob"})}
        async with housed(tmp_path, brain, agents=agents) as house:
            brain.script(calls(("skip", {"reason": "not mine"})), model="gpt-4.1")
            brain.script(status(401, {"error": {"message": "no"}}), model="of-bob")
            await house.say("Hi")
            await house.ended()
            await house.ended(agent="bob")
            found = await figures(house)
    assert found['toolspace_agent_cycles_total{outcome="skipped"}'] == "1"
    assert found['toolspace_agent_cycles_total{outcome="failed"}'] == "1"
    name = 'model="openai-compatible:gpt-4.1"'
    assert found[f'toolspace_model_requests_total{{{name},status="ok"}}'] == "1"
    kinds = ("input", "cached", "output")
    tokens = [found[f'toolspace_model_tokens_total{{{name},kind="{kind}"}}'] for kind in kinds]
    assert tokens == ["1000", "400", "50"]
    assert float(found[f"toolspace_model_cost_dollars_total{{{name}}}"]) == pytest.approx(0.0018)
    refused = 'toolspace_model_requests_total{model="openai-compatible:of-bob",status="not_permitted"}'
    assert found[refused] == "1"


async def test_who_thinks_now_is_counted(tmp_path: Path) -> None:
    async with thinking() as brain, housed(tmp_path, brain) as house:
        gate = Gate()
        brain.script(gate)
        assert (await figures(house))["toolspace_agents_active"] == "0"
        await house.push("go")
        await brain.until_asked()
        assert (await figures(house))["toolspace_agents_active"] == "1"
        gate.open()
        await house.ended()
        assert (await figures(house))['toolspace_agent_cycles_total{outcome="answered"}'] == "1"


async def test_a_run_that_is_canceled_is_counted_so(tmp_path: Path) -> None:
    async with thinking() as brain, housed(tmp_path, brain) as house:
        brain.script(brain.silence)
        await house.push("go")
        await brain.until_asked()
        (run,) = await house.runs()
        await house.api.post(f"/api/runs/{run['id']}/cancel")
        await brain.hung_up.wait()
        await house.push("and again")
        await house.ended(2)
        found = await figures(house)
    assert found['toolspace_agent_cycles_total{outcome="canceled"}'] == "1"
    assert found['toolspace_model_requests_total{model="openai-compatible:m",status="canceled"}'] == "1"
