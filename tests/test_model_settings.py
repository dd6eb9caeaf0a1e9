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
from toolspace import Toolspace
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
