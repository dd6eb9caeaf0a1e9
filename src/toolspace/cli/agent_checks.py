"""The checks of `toolspace doctor` for agents: models, knowledge files, and the embedding model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from toolspace.agents.agent import Agent, entity_id_for
from toolspace.agents.offered_tools import AgentToolPolicy
from toolspace.cli.check_result import CheckResult
from toolspace.composition.from_config import select_builtins
from toolspace.composition.process_secrets import resolve_process_secrets
from toolspace.config.agent_settings import AgentModelSettings
from toolspace.config.configuration import AgentSpec, Config
from toolspace.config.secret_references import load_secrets, resolve_secrets
from toolspace.config.server_settings import EmbeddingSettings
from toolspace.core.extension_points import Deny
from toolspace.core.tool_collections import ToolSelection
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ConfigError, ModelError, StorageError, ToolspaceError
from toolspace.orchestrator.effective_settings import ProviderRules, ToolSpellings, matches_name
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.policy_rules import compile_policy, effective_annotations
from toolspace.toolspace import Toolspace

T = TypeVar("T")
_MAX_LISTED = 10
_DATABASE_SECONDS = 10.0


async def check_agents(config: Config, environ: Mapping[str, str]) -> AsyncIterator[CheckResult]:
    """Checks the model and the knowledge files of each agent, the demo agent, and the embedding model."""
    for agent in config.agents.values():
        yield await _check_model(agent, environ)
        for path in agent.knowledge:
            if not path.exists():
                fix = f"create it, or remove it from knowledge in {agent.path}"
                yield CheckResult("warning", "agents", f"{agent.name}: its knowledge {path} does not exist", fix)
    for check in _check_builtin_tools(config):
        yield check
    if not config.agents and config.demo:
        yield _check_demo(environ)
    if config.embeddings is not None:
        yield await _check_embeddings(config.embeddings, environ)


def _check_builtin_tools(config: Config) -> Iterator[CheckResult]:
    """Says which of the available built-in tools agents are not offered, unless they name a collection."""
    agents_by_tools: dict[tuple[str, ...], list[str]] = {}
    for agent in config.agents.values():
        agents_by_tools.setdefault(_list_tools_not_offered(config, agent), []).append(agent.name)
    for tools, agents in agents_by_tools.items():
        if tools:
            message = f"{', '.join(agents)}: built-in tools that change something are not offered: {', '.join(tools)}"
            fix = "to offer some: add their names, or allTaskTools, to the tools of the agent"
            yield CheckResult("ok", "agent tools", message, fix)


def _list_tools_not_offered(config: Config, agent: AgentSpec) -> tuple[str, ...]:
    from toolspace.builtin.catalog import builtin_tools, tool_collections  # Imported here: only agents need it.

    selection = ToolSelection.from_names(agent.named_tools)
    if selection.collection_tools:
        return ()
    own_config = agent.config
    has_own_builtins = own_config is not None and (
        own_config.tools.builtins is not False or ("tools", "builtins") in own_config.origins
    )
    tools = own_config.tools if own_config is not None and has_own_builtins else config.tools
    rules = ProviderRules(tools_allowed=tools.tools_allowed, tools_denied=tools.tools_denied)
    candidates = (*select_builtins(tools.builtins, builtin_tools), *tool_collections["mainAgentTools"])
    return tuple(
        tool.name
        for tool in dict.fromkeys(candidates)
        if not tool.annotations.read_only
        and not selection.has_builtin(tool.name)
        and rules.denial_reason(ToolSpellings((tool.name,), (tool.name,))) is None
    )


async def check_agent_tools(config: Config, ts: Toolspace) -> AsyncIterator[CheckResult]:
    """Checks the sources of tools that only one agent has, and warns of destructive tools that no policy covers.

    `ts` has started its providers.
    """
    shared_failures = ts.orchestrator.unavailable_providers()
    agents_by_tools: dict[tuple[str, ...], list[str]] = {}
    for agent in config.agents.values():
        try:
            async with ts.agents.open_tools(agent.name) as tools:
                for name, reason in tools.unavailable_providers().items():
                    if name not in shared_failures:
                        fix = f"correct {name} in {agent.path}, or set enabled: false"
                        yield CheckResult("problem", "providers", f"{agent.name}: {name}: {reason}", fix)
                names = tuple(_list_uncovered_tools(ts.agents.get(agent.name), tools))
        except ToolspaceError as error:
            yield CheckResult("problem", "agents", f"{agent.name}: {error}", f"correct its tools in {agent.path}")
            continue
        agents_by_tools.setdefault(names, []).append(agent.name)
    for names, agents in agents_by_tools.items():
        if names:
            shown_names = ", ".join((*names[:_MAX_LISTED], *(["…"] if len(names) > _MAX_LISTED else [])))
            message = f"{', '.join(agents)}: no policy covers these destructive tools: {shown_names}"
            fix = "add rules for them to policies, or policies: cautious; a harmless tool says destructive: false"
            yield CheckResult("warning", "policies", message, fix)


def _list_uncovered_tools(agent: Agent, tools: ToolOrchestrator) -> Iterator[str]:
    """The names of the destructive tools of an agent that no rule, and no setting of the tool, decides on."""
    offered_tools, context = AgentToolPolicy(agent, tools), ToolContext()
    for listed_entry in tools.entries():
        name = listed_entry.tool.name
        if isinstance(offered_tools.decide(listed_entry.tool, context), Deny):
            continue
        explanation = tools.explain(name)  # An inherited tool has the entry of the toolspace that it comes from.
        if explanation is None or not effective_annotations(explanation[0]).destructive:
            continue
        policy = compile_policy(tools.services.policy_rules, explanation[0], explanation[1].approval)
        is_covered = policy.approval is not None or any(
            rule.agents is None or any(matches_name(pattern, (agent.name,)) for pattern in rule.agents)
            for rule in policy.rules
        )
        if not is_covered:
            yield name


def describe_shared_conversation(agent_name: str) -> tuple[str, str]:
    """Describes an agent that has one conversation with different people: what that means, and what to do."""
    message = f"{agent_name}: it shares spaces with different people, and has one conversation with all of them"
    return message, f"set session: space or session: user for {agent_name}; session: agent if that is meant"


async def check_session_scopes(config: Config) -> AsyncIterator[CheckResult]:
    """Warns of agents with one session that share spaces with different people, according to the database."""
    agents = {entity_id_for(agent.name): agent for agent in config.agents.values() if agent.session == "agent"}
    if agents:
        for agent_id in await _list_agents_of_several_people(config):
            if agent_id in agents:
                message, fix = describe_shared_conversation(agents[agent_id].name)
                yield CheckResult("warning", "agents", message, fix)


async def check_failed_events(config: Config) -> AsyncIterator[CheckResult]:
    """Warns of inbox events that are set aside for an operator, according to the database."""
    from toolspace.storage.queries.inbox import FAILED_EVENTS_BY_AGENT

    for agent_id, count in await _query_database(config, FAILED_EVENTS_BY_AGENT):
        message = f"{agent_id}: {count} {'event' if count == 1 else 'events'} of its inbox failed"
        fix = (
            f"read why: GET /api/agents/{agent_id}/inbox?status=failed; "
            f"then retry: POST /api/agents/{agent_id}/inbox/EVENT/retry"
        )
        yield CheckResult("warning", "inbox", message, fix)


async def _list_agents_of_several_people(config: Config) -> list[str]:
    from toolspace.storage.queries.entities_and_spaces import AGENTS_OF_SEVERAL_PEOPLE

    return [row[0] for row in await _query_database(config, AGENTS_OF_SEVERAL_PEOPLE)]


async def _query_database(config: Config, query: str) -> list[tuple[Any, ...]]:
    """Reads the database without changing it. Returns no rows if it cannot be read: another check says so."""
    from toolspace.storage.database import find_database_file

    with suppress(ConfigError, StorageError, OSError, ValueError):
        storage = (await asyncio.to_thread(resolve_process_secrets, config)).storage
        file = find_database_file(storage.url, config.state_dir)
        if file is not None:
            return await asyncio.to_thread(_query_sqlite, file, query)
        return await _query_postgres(storage.url or "", query)
    return []


def _query_sqlite(file: Path, query: str) -> list[tuple[Any, ...]]:
    import sqlite3

    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)) as connection:
            return connection.execute(query).fetchall()
    except sqlite3.Error:
        return []


async def _query_postgres(url: str, query: str) -> list[tuple[Any, ...]]:
    from toolspace.storage.postgres.database import load_driver

    driver = load_driver()
    with suppress(TimeoutError, driver.PostgresError, driver.InterfaceError):
        async with asyncio.timeout(_DATABASE_SECONDS):
            connection = await driver.connect(url)
            try:
                return [tuple(row) for row in await connection.fetch(query)]
            finally:
                connection.terminate()
    return []


async def _check_model(agent: AgentSpec, environ: Mapping[str, str]) -> CheckResult:
    from toolspace.models.registry import choose_model, open_model  # Imported here: only agents need it.

    try:
        settings = await _resolve(agent.model)
    except ConfigError as error:
        return CheckResult("problem", "agents", f"{agent.name}: {error}", f"correct its model in {agent.path}")
    try:
        model = open_model(settings.provider, settings.name, environ=environ, **_endpoint(settings))
    except ModelError as error:
        if settings.provider is None and settings.name is None and error.kind == "no_key":
            fix = "set a key such as OPENAI_API_KEY, ANTHROPIC_API_KEY or GEMINI_API_KEY, or set its model"
            return CheckResult("problem", "agents", f"{agent.name}: has no model, and no key is set", fix)
        message, _, fix = str(error).partition("; ")
        return CheckResult("problem", "agents", f"{agent.name}: {message}", fix or f"correct its model in {agent.path}")
    await model.aclose()
    provider, name = choose_model(settings.provider, settings.name, environ)
    # Without the query of the URL, which may have a key in it.
    place = f" at {settings.base_url.partition('?')[0]}" if settings.base_url is not None else ""
    return CheckResult("ok", "agents", f"{agent.name}: {provider}:{name}".removesuffix(":") + place)


async def _resolve(settings: T) -> T:
    """The settings with their secrets. Raises `ConfigError`."""
    await load_secrets(settings)
    return resolve_secrets(settings)


def _endpoint(settings: AgentModelSettings | EmbeddingSettings) -> dict[str, Any]:
    return {"base_url": settings.base_url, "api_key": settings.api_key, "headers": settings.headers}


def _check_demo(environ: Mapping[str, str]) -> CheckResult:
    from toolspace.models.registry import find_default_model

    model = find_default_model(environ)
    behaviour = f"uses {model[0]}:{model[1]}" if model is not None else "follows a few fixed rules, as no key is set"
    return CheckResult("ok", "agents", f"none is configured; the demo agent {behaviour}")


async def _check_embeddings(settings: EmbeddingSettings, environ: Mapping[str, str]) -> CheckResult:
    from toolspace.models.embeddings import open_embedder

    try:
        settings = await _resolve(settings)
    except ConfigError as error:
        return CheckResult("problem", "embeddings", str(error), "correct embeddings in the configuration")
    try:
        embedder = open_embedder(settings.model, environ=environ, **_endpoint(settings))
    except ModelError as error:
        message, _, fix = str(error).partition("; ")
        return CheckResult("problem", "embeddings", message, fix or "correct embeddings in the configuration")
    await embedder.aclose()
    return CheckResult("ok", "embeddings", settings.model)
