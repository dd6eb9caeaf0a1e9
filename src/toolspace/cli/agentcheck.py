"""What `toolspace doctor` looks at in agents: their models, the keys of these, what they are to know. Asks no model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping

from toolspace.cli.checking import Check
from toolspace.config.load import Config
from toolspace.config.model import AgentSpec
from toolspace.errors import ModelError


async def agent_checks(config: Config, environ: Mapping[str, str]) -> AsyncIterator[Check]:
    """One for each agent, and one for everything that it lacks."""
    for agent in config.agents.values():
        yield await _model(agent, environ)
        for check in _knowledge(agent):
            yield check


async def _model(agent: AgentSpec, environ: Mapping[str, str]) -> Check:
    from toolspace.models.opening import default_model, open_model  # Here: few look at agents.

    said = agent.model
    provider, name = said.provider, said.name or ""
    if provider is None:
        chosen = default_model(environ)
        if chosen is None:
            fix = "set a key such as OPENAI_API_KEY, ANTHROPIC_API_KEY or GEMINI_API_KEY, or give it a model"
            return Check("problem", "agents", f"{agent.name}: names no model, and no key is set", fix)
        provider, name = chosen
    try:
        model = open_model(
            provider, name, environ=environ, base_url=said.base_url, api_key=said.api_key, headers=said.headers
        )
    except ModelError as error:
        found, _, way = str(error).partition("; ")
        return Check("problem", "agents", f"{agent.name}: {found}", way or f"mend its model in {agent.path}")
    await model.aclose()
    return Check("ok", "agents", f"{agent.name}: {provider}:{name}".removesuffix(":"))


def _knowledge(agent: AgentSpec) -> Iterator[Check]:
    for path in agent.knowledge:
        if not path.exists():
            fix = f"make it, or take it out of knowledge in {agent.path}"
            yield Check("warning", "agents", f"{agent.name}: there is no {path} to know", fix)
