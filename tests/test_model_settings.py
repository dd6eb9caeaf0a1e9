"""Every documented setting of an agent's model has an effect, seen by the model server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.models.model_server import (
    ModelApiRequest,
    anthropic_message,
    error_reply,
    stream_reply,
    text_block,
    text_completion,
)
from tests.server.scripted_agents import ScriptedModelServer, open_model_server
from tests.setting_coverage import SettingCoverage
from toolspace import Agent, ConfigError, RunLimits, Toolspace
from toolspace.models.prices import calculate_cost, find_price

pytestmark = pytest.mark.spec("5.3")

BUSY = error_reply(503, {"error": {"message": "busy"}}, retry_after="0")


class AgentWithModel:
    """An agent with a configured model, and the server of the model."""

    def __init__(self, folder: Path, server: ScriptedModelServer) -> None:
        self.folder = folder
        self.server = server

    async def ask(self, model: Any = None, environ: Mapping[str, str] | None = None, **settings: Any) -> Any:
        """The result of a prompt. `model` replaces the settings."""
        model = model or {"name": "m", "baseUrl": self.server.base_url, "retries": 0, **settings}
        path = self.folder / "toolspace.yaml"
        agents = {"ada": {"system": "Be kind.", "model": model}}
        path.write_text(yaml.safe_dump({"agents": agents, "storage": {"dir": "./state"}}))
        async with Toolspace.open(path, environ=environ or {}) as ts:
            return await ts.run_agent("ada", "Hi")

    async def request(self, **settings: Any) -> ModelApiRequest:
        """The request that the model server got."""
        result = await self.ask(**settings)
        assert result.ok, result.error
        return self.server.requests[-1]


coverage = SettingCoverage("agents.<name>.")


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[AgentWithModel]:
    async with open_model_server() as server:
        yield AgentWithModel(tmp_path, server)


@coverage.covers("model")
async def test_a_model_is_named_in_one_word(agent: AgentWithModel) -> None:
    environ = {"OPENAI_BASE_URL": agent.server.base_url, "OPENAI_API_KEY": "sk-1"}
    assert (await agent.ask("openai:gpt-5", environ)).text == "Done."
    assert agent.server.requests[0].json["model"] == "gpt-5"


@coverage.covers("model.provider", "model.apiKey")
async def test_a_provider_has_its_api_and_key(agent: AgentWithModel) -> None:
    request = await agent.request(provider="openai", apiKey="sk-1")
    assert (request.path, request.headers["authorization"]) == ("/v1/chat/completions", "Bearer sk-1")
    agent.server.reply(stream_reply(anthropic_message(text_block("Done."))))
    request = await agent.request(provider="anthropic", apiKey="sk-2")
    assert (request.path, request.headers["x-api-key"]) == ("/v1/messages", "sk-2")


@coverage.covers("model.name")
async def test_the_model_name_is_sent_and_priced(agent: AgentWithModel) -> None:
    assert (await agent.request(name="gpt-4.1")).json["model"] == "gpt-4.1"
    cost = calculate_cost(find_price("gpt-4.1"), input=1000, cached=400, output=50)
    assert cost > 0
    assert (await agent.ask(name="gpt-4.1")).usage.cost == pytest.approx(cost)


@pytest.mark.spec("22.2")
@coverage.covers("model.price", "model.price.input", "model.price.output", "model.price.cachedInput")
async def test_a_model_has_the_configured_price(agent: AgentWithModel) -> None:
    usage = (await agent.ask(name="gpt-4.1", price={"input": 3, "output": 7})).usage
    assert usage.cached_tokens > 0
    assert usage.cost == pytest.approx((3 * usage.input_tokens + 7 * usage.output_tokens) / 1e6)
    usage = (await agent.ask(price={"input": 3, "cachedInput": 1, "output": 7})).usage
    expected_cost = 3 * (usage.input_tokens - usage.cached_tokens) + usage.cached_tokens + 7 * usage.output_tokens
    assert usage.cost == pytest.approx(expected_cost / 1e6)


@pytest.mark.spec("22.2")
@pytest.mark.parametrize(
    ("model", "is_known"),
    [
        ("{baseUrl: 'http://127.0.0.1:9', name: m}", False),
        ("openai:gpt-999", False),
        ("ollama:llama3", False),
        ("{baseUrl: 'http://127.0.0.1:9', name: m, price: {input: 1, output: 2}}", True),
        ("openai:gpt-4.1", True),
        ("demo", True),
        ("openrouter:meta/llama", True),
    ],
)
def test_a_limit_of_cost_needs_a_price_when_the_configuration_loads(tmp_path: Path, model: str, is_known: bool) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text(f"agents:\n  ada:\n    system: Help.\n    model: {model}\n    limits:\n      maxCost: 0.5\n")
    if is_known:
        assert Toolspace.open(path, environ={"HOME": str(tmp_path)}).agents.find("ada") is not None
        return
    with pytest.raises(ConfigError) as error:
        Toolspace.open(path, environ={"HOME": str(tmp_path)})
    assert "toolspace.yaml:6: agents.ada.limits.maxCost: the price of the model" in str(error.value)
    assert "model.price" in str(error.value)


@pytest.mark.spec("22.2")
async def test_a_model_of_a_program_needs_a_price_too(agent: AgentWithModel) -> None:
    ada = Agent("ada", model="ollama:llama3", limits=RunLimits(max_cost=1))
    async with Toolspace(agents=[ada]) as ts:
        assert "model.price" in ((await ts.run_agent("ada", "Hi")).error or "")


@pytest.mark.spec("22.2")
def test_a_quota_of_cost_warns_of_agents_whose_price_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.yaml"
    agents = "agents: {ada: {model: 'ollama:llama3'}, bob: {model: 'openai:gpt-4.1'}}"
    path.write_text(f"{agents}\nquotas: [{{per: agent, costPerDay: 1}}]\n")
    warnings = [text for text in Toolspace.open(path, environ={"HOME": str(tmp_path)}).warnings if "costPerDay" in text]
    assert len(warnings) == 1
    assert '"ada"' in warnings[0]


@coverage.covers("model.temperature", "model.maxOutputTokens", "model.reasoning")
async def test_sampling_settings_are_sent(agent: AgentWithModel) -> None:
    optional_keys = {"temperature", "max_tokens", "max_completion_tokens", "reasoning_effort"}
    assert not optional_keys & (await agent.request()).json.keys()
    body = (await agent.request(temperature=0.3, maxOutputTokens=77, reasoning="low")).json
    assert body["temperature"] == 0.3
    assert body.get("max_completion_tokens", body.get("max_tokens")) == 77
    assert body["reasoning_effort"] == "low"


@coverage.covers("model.baseUrl")
async def test_another_base_url_is_used(agent: AgentWithModel) -> None:
    request = await agent.request(baseUrl=f"{agent.server.url}/elsewhere/v2")
    assert request.path == "/elsewhere/v2/chat/completions"


@coverage.covers("model.headers")
async def test_headers_are_sent(agent: AgentWithModel) -> None:
    assert (await agent.request(headers={"X-Team": "blue"})).headers["x-team"] == "blue"


@coverage.covers("model.timeout")
async def test_a_slow_response_times_out(agent: AgentWithModel) -> None:
    agent.server.script(agent.server.never_answer)
    result = await agent.ask(timeout="50ms")
    assert not result.ok
    assert "50 ms" in result.error or "0.05" in result.error, result.error
    await agent.server.client_closed.wait()


@coverage.covers("model.retries")
async def test_a_busy_provider_is_retried(agent: AgentWithModel) -> None:
    agent.server.script(BUSY, text_completion("Here I am."))
    assert not (await agent.ask(retries=0)).ok
    agent.server.script(BUSY, text_completion("Here I am."))
    assert (await agent.ask(retries=1)).text == "Here I am."


def test_every_documented_setting_of_a_model_has_a_test() -> None:
    assert coverage.list_missing("agents.<name>.model") == []
