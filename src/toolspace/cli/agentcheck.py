"""What `toolspace doctor` looks at in agents: their models, the keys of these, what they are to know. Asks no model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping

from toolspace.cli.checking import Check
from toolspace.config.load import Config
from toolspace.config.model import AgentSpec, Embeddings
from toolspace.errors import ModelError


async def agent_checks(config: Config, environ: Mapping[str, str]) -> AsyncIterator[Check]:
    """One for each agent, or for the one to try things out with, and one for everything that they lack."""
    for agent in config.agents.values():
        yield await _model(agent, environ)
        for check in _knowledge(agent):
            yield check
    if not config.agents and config.demo:
        yield _demo(environ)
    if config.embeddings is not None:
        yield await _embeddings(config.embeddings, environ)


async def _model(agent: AgentSpec, environ: Mapping[str, str]) -> Check:
    from toolspace.models.registry import choose, open_model  # Here: few look at agents.

    said = agent.model
    try:
        model = open_model(
            said.provider,
            said.name,
            environ=environ,
            base_url=said.base_url,
            api_key=said.api_key,
            headers=said.headers,
        )
    except ModelError as error:
        if said.provider is None and said.name is None and error.kind == "no_key":
            fix = "set a key such as OPENAI_API_KEY, ANTHROPIC_API_KEY or GEMINI_API_KEY, or give it a model"
            return Check("problem", "agents", f"{agent.name}: names no model, and no key is set", fix)
        found, _, way = str(error).partition("; ")
        return Check("problem", "agents", f"{agent.name}: {found}", way or f"mend its model in {agent.path}")
    await model.aclose()
    provider, name = choose(said.provider, said.name, environ)
    # Without its query, which some have a key in.
    place = f" at {said.base_url.partition('?')[0]}" if said.base_url is not None else ""
    return Check("ok", "agents", f"{agent.name}: {provider}:{name}".removesuffix(":") + place)


def _demo(environ: Mapping[str, str]) -> Check:
    from toolspace.models.registry import default_model

    found = default_model(environ)
    how = f"thinks with {found[0]}:{found[1]}" if found is not None else "goes by a few rules, as no key is set"
    return Check("ok", "agents", f"none is configured; the one to try things out with {how}")


async def _embeddings(said: Embeddings, environ: Mapping[str, str]) -> Check:
    from toolspace.models.embeddings import open_embedder

    try:
        embedder = open_embedder(
            said.model, environ=environ, base_url=said.base_url, api_key=said.api_key, headers=said.headers
        )
    except ModelError as error:
        found, _, way = str(error).partition("; ")
        return Check("problem", "embeddings", found, way or "mend embeddings in the configuration")
    await embedder.aclose()
    return Check("ok", "embeddings", said.model)


def _knowledge(agent: AgentSpec) -> Iterator[Check]:
    for path in agent.knowledge:
        if not path.exists():
            fix = f"make it, or take it out of knowledge in {agent.path}"
            yield Check("warning", "agents", f"{agent.name}: there is no {path} to know", fix)
