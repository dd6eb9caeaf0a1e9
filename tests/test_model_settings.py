"""5.3: every setting of an agent's model has an effect, seen by the server that is asked for its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.models.servers import Asked, message, said, status, stream, text_block
from tests.server.scripted_agents import ScriptedModelServer, open_model_server
from toolspace import Toolspace
from toolspace.config.documentation import list_all_rows
from toolspace.models.prices import calculate_cost, find_price

BUSY = status(503, {"error": {"message": "busy"}}, retry_after="0")


class Asking:
    """An agent that is asked something, with settings of its model; and the server that its model is on."""

    def __init__(self, folder: Path, server: ScriptedModelServer) -> None:
        self.folder = folder
        self.server = server

    async def ask(self, model: Any = None, environ: Mapping[str, str] | None = None, **settings: Any) -> Any:
        """The result. A `model` in place of the settings of one is taken as it is."""
        model = model or {"name": "m", "baseUrl": self.server.base_url, "retries": 0, **settings}
        path = self.folder / "toolspace.yaml"
        agents = {"ada": {"system": "Be kind.", "model": model}}
        path.write_text(yaml.safe_dump({"agents": agents, "storage": {"dir": "./state"}}))
        async with Toolspace.open(path, environ=environ or {}) as ts:
            return await ts.run_agent("ada", "Hi")

    async def request(self, **settings: Any) -> Asked:
        """The request that came of it."""
        result = await self.ask(**settings)
        assert result.ok, result.error
        return self.server.asked[-1]


Check = Callable[[Asking], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def shows(*settings: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        CHECKS.update(dict.fromkeys((f"agents.<name>.{setting}" for setting in settings), check))
        return check

    return keep


@shows("model")
async def _(agent: Asking) -> None:
    environ = {"OPENAI_BASE_URL": agent.server.base_url, "OPENAI_API_KEY": "sk-1"}
    assert (await agent.ask("openai:gpt-5", environ)).text == "Done."
    assert agent.server.asked[0].json["model"] == "gpt-5"


@shows("model.provider", "model.apiKey")
async def _(agent: Asking) -> None:
    asked = await agent.request(provider="openai", apiKey="sk-1")
    assert (asked.path, asked.headers["authorization"]) == ("/v1/chat/completions", "Bearer sk-1")
    agent.server.reply(stream(message(text_block("Done."))))
    asked = await agent.request(provider="anthropic", apiKey="sk-2")
    assert (asked.path, asked.headers["x-api-key"]) == ("/v1/messages", "sk-2")


@shows("model.name")
async def _(agent: Asking) -> None:
    assert (await agent.request(name="gpt-4.1")).json["model"] == "gpt-4.1"
    cost = calculate_cost(find_price("gpt-4.1"), input=1000, cached=400, output=50)
    assert cost > 0
    assert (await agent.ask(name="gpt-4.1")).usage.cost == pytest.approx(cost)


@shows("model.temperature", "model.maxOutputTokens", "model.reasoning")
async def _(agent: Asking) -> None:
    wanted = {"temperature", "max_tokens", "max_completion_tokens", "reasoning_effort"}
    assert not wanted & (await agent.request()).json.keys()
    body = (await agent.request(temperature=0.3, maxOutputTokens=77, reasoning="low")).json
    assert body["temperature"] == 0.3
    assert body.get("max_completion_tokens", body.get("max_tokens")) == 77
    assert body["reasoning_effort"] == "low"


@shows("model.baseUrl")
async def _(agent: Asking) -> None:
    asked = await agent.request(baseUrl=f"{agent.server.url}/elsewhere/v2")
    assert asked.path == "/elsewhere/v2/chat/completions"


@shows("model.headers")
async def _(agent: Asking) -> None:
    assert (await agent.request(headers={"X-Team": "blue"})).headers["x-team"] == "blue"


@shows("model.timeout")
async def _(agent: Asking) -> None:
    agent.server.script(agent.server.silence)
    result = await agent.ask(timeout="50ms")
    assert not result.ok
    assert "50 ms" in result.error or "0.05" in result.error, result.error
    await agent.server.hung_up.wait()


@shows("model.retries")
async def _(agent: Asking) -> None:
    agent.server.script(BUSY, said("Here I am."))
    assert not (await agent.ask(retries=0)).ok
    agent.server.script(BUSY, said("Here I am."))
    assert (await agent.ask(retries=1)).text == "Here I am."


SETTINGS = [row.path for row in list_all_rows() if row.path.startswith("agents.<name>.model")]


@pytest.mark.spec("5.3")
@pytest.mark.parametrize("setting", SETTINGS)
async def test_every_documented_setting_of_a_model_has_an_effect(setting: str, tmp_path: Path) -> None:
    assert setting in CHECKS, f"{setting} is documented, and no check shows what it does"
    async with open_model_server() as server:
        await CHECKS[setting](Asking(tmp_path, server))
