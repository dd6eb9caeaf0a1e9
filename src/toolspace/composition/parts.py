"""Turns configuration into parts: tools, rules, queues, a context. Builds them; starts nothing."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from toolspace.composition.providers import ConfiguredProvider, belongs_to_one_provider, build_providers
from toolspace.config.configuration import AgentSpec
from toolspace.config.load import Config
from toolspace.config.tool_definitions import ToolDefinition
from toolspace.core.context import ToolContext
from toolspace.core.names import SEPARATOR, did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.secret_masking import register_secrets
from toolspace.core.tool import Tool, ToolCategory
from toolspace.errors import ConfigError, ToolDefinitionError, ToolExecutionError
from toolspace.orchestrator.queues import QueueSpec, RateLimit
from toolspace.orchestrator.settings import CallDefaults, ProviderRules, SourcedValue, ToolRules
from toolspace.providers.configured_tools import ToolExecution, build_execution
from toolspace.providers.function_loader import list_loaded_files, load_functions
from toolspace.providers.mcp.callbacks import NO_CALLBACKS, McpCallbacks

if TYPE_CHECKING:
    from toolspace.providers.rest.client import HttpClient


AgentCaller = Callable[[str, Mapping[str, Any], ToolContext, str], Awaitable[ToolResult]]
"""Has an agent answer a call: its name, the arguments, the call's context, and what to ask where they do not say."""
_AGENT_KEYS = ("agent", "agentName", "name", "agentId")
_NAME_ONE = "say which under execution.agent"


class ConfiguredParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration asks for."""

    context: ToolContext
    defaults: CallDefaults
    queues: Mapping[str, QueueSpec]
    aliases: Mapping[str, str]
    rules: ProviderRules
    """For local tools: built-ins, functions, definitions."""
    builtins: Sequence[Tool]
    functions: Sequence[Tool]
    definitions: Sequence[Tool]
    providers: Mapping[str, ConfiguredProvider]
    """By section and name in the configuration: `mcpServers.github`; only those that are enabled."""
    client: HttpClient | None
    """What the requests of configured tools go through; None where there is none of them. To be closed."""
    files: Callable[[], Sequence[Path]]
    """What it was read from: the configuration, and the Python files behind its functions and providers."""
    warnings: Sequence[str]
    agents: Sequence[AgentSpec] = ()


def build_parts(
    config: Config,
    running: Mapping[str, ConfiguredProvider] | None = None,
    callbacks: McpCallbacks = NO_CALLBACKS,
    *,
    client: HttpClient | None = None,
    single_tool: str | None = None,
    call_agent: AgentCaller | None = None,
) -> ConfiguredParts:
    """The parts that a configuration describes. Imports the user's functions and providers.

    Of the providers that are `running`, those whose entry has not changed stay; their rules are new all the same.
    `client`: the one of the parts before, whose connections stay open.
    `only_for`: a tool that is to be called, and nothing else; servers and services that it cannot need are left out.
    `call_agent` runs the tools that are agents.
    """
    register_secrets(config.secret_values)  # Before code of the user's runs, and what it does could be logged.
    found = [tool for spec in config.functions for tool in _load(spec, config)]
    functions = list(dict.fromkeys(found))  # A file and one of its functions may both be named.
    rules = _local_rules(config)
    builtins = _builtins(config)
    requests = _Requests(client)
    definitions = _definitions(config, requests, call_agent)
    return ConfiguredParts(
        context=_context(config),
        defaults=_defaults(config),
        queues={name: _queue(queue) for name, queue in config.queues.items()},
        aliases=config.tools.aliases,
        rules=rules,
        builtins=builtins,
        functions=functions,
        definitions=definitions,
        providers=build_providers(
            config,
            rules.overrides,
            running or {},
            callbacks,
            single_tool=_needing_little(config, single_tool, builtins, [*functions, *definitions]),
        ),
        client=requests.client,
        files=lambda: list(dict.fromkeys((*config.files(), *list_loaded_files()))),
        warnings=[
            *config.warnings,
            *_not_yet(config),
            *_missing_queues(config, functions),
            *_of_no_agent(config),
            *_idle_rules(config, [*builtins, *functions, *definitions]),
        ],
        agents=tuple(config.agents.values()),
    )


_READS_STORED = "agent__read_output"


def _needing_little(config: Config, tool: str | None, builtins: Sequence[Tool], local: Sequence[Tool]) -> str | None:
    """The tool's full name, where one provider at most is all that a call of it can need.

    That is not known of a bare name, nor of functions and batches, which may call any tool.
    """
    for _ in config.tools.aliases:  # One may lead to another; a circle of them leads nowhere.
        tool = config.tools.aliases.get(tool or "", tool)
    if tool is None or any(one.name == tool for one in local):
        return None
    alone = tool == _READS_STORED or any(one.name == tool for one in builtins)
    return tool if alone or belongs_to_one_provider(config, tool) else None


def _context(config: Config) -> ToolContext:
    tools = config.tools
    return ToolContext(
        allowed_paths=tools.allowed_paths if tools.allowed_paths is not None else (Path.cwd(),),
        # An agent's own settings are no way to those that it was given.
        protected_paths=(*config.files(), *(config.parent.files() if config.parent else ()), *list_loaded_files()),
        allowed_env=tools.allowed_env,
        allowed_hosts=tools.allowed_hosts,
        memory_dir=tools.memory_dir or Path.cwd() / ".toolspace" / "memory",
        session_dir=tools.session_dir,
        web_search=msgspec.to_builtins(tools.web_search) if tools.web_search is not None else None,
    )


def _defaults(config: Config) -> CallDefaults:
    def setting(name: str, *key: str) -> SourcedValue[Any]:
        return SourcedValue(getattr(config.defaults, name), config.source("defaults", *key))

    return CallDefaults(
        tool_timeout=setting("tool_timeout", "toolTimeout"),
        tool_response_max_bytes=setting("tool_response_max_bytes", "toolResponseMaxBytes"),
        max_tool_calls_per_turn=setting("max_tool_calls_per_turn", "maxToolCallsPerTurn"),
        max_concurrent_tools=setting("max_concurrent_tools", "maxConcurrentTools"),
        context_window=setting("context_window", "contextWindow"),
        tool_search_threshold=setting("tool_search_threshold", "toolSearchThreshold"),
    )


def _queue(queue: Any) -> QueueSpec:
    rate = RateLimit(queue.rate.count, queue.rate.seconds) if queue.rate is not None else None
    return QueueSpec(
        concurrent=queue.concurrent, rate=rate, max_waiting=queue.max_waiting, wait_timeout=queue.wait_timeout
    )


def _local_rules(config: Config) -> ProviderRules:
    tools = config.tools
    overrides: dict[str, ToolRules] = {}
    for name, said in tools.overrides.items():
        values = {field: getattr(said, field) for field in said.__struct_fields__}
        overrides[name] = ToolRules(**values, source=config.source("tools", "overrides", name))
    return ProviderRules(tools_allowed=tools.tools_allowed, tools_denied=tools.tools_denied, overrides=overrides)


class _Requests:
    """The client of configured tools that are HTTP requests, made for the first of them."""

    def __init__(self, client: HttpClient | None) -> None:
        self.client = client

    def __call__(self) -> HttpClient:
        if self.client is None:
            from toolspace.providers.rest.client import HttpClient

            self.client = HttpClient()
        return self.client


def _definitions(config: Config, requests: _Requests, call_agent: AgentCaller | None) -> list[Tool]:
    tools: list[Tool] = []
    faults: list[str] = []
    for definition in config.tools.definitions.values():
        if definition.enabled:
            try:
                if definition.execution_type == "agent" and call_agent is not None:
                    tools.append(_made(definition, _asking(definition, config, call_agent)))
                else:
                    tools.append(_defined(definition, requests))
            except ToolDefinitionError as error:
                key, _, reason = str(error).removeprefix(f"REST tool {definition.name!r}: ").partition(": ")
                place = config.source("tools", "definitions", definition.name, "execution", key)
                faults.append(f"{place}: {reason}")
    if faults:
        raise ConfigError("\n".join(faults))
    return tools


def _defined(definition: ToolDefinition, requests: _Requests) -> Tool:
    description, category = definition.description, definition.category
    if definition.execution_type == "prebuilt":
        from toolspace.agents.prebuilt.provider import (  # Here: it comes with all that is kept.
            build_handler,
            get_action,
        )

        action = get_action(str(definition.execution["action"]))
        made = ToolExecution(handler=build_handler(action), input_schema=definition.input_schema or action.input_schema)
        description = description or action.description
        category = action.category if category is ToolCategory.CUSTOM else category
    elif definition.execution_type == "image":
        from toolspace.models.images import (  # Here: only those who draw need models.
            PROMPT_SCHEMA,
            create_image_handler,
        )

        handler = create_image_handler(definition.name, definition.execution)
        made = ToolExecution(handler=handler, input_schema=definition.input_schema or PROMPT_SCHEMA)
        description = description or "Draws a picture of what the prompt says."
    else:
        made = build_execution(
            definition.name,
            definition.execution_type,
            definition.execution,
            input_schema=definition.input_schema,
            client=requests,
        )
    return _made(definition, made, description=description, category=category)


def _asking(definition: ToolDefinition, config: Config, call_agent: AgentCaller) -> ToolExecution:
    """What has an agent answer the calls of a tool."""
    from toolspace.agents.subagents import AGENT_INPUT  # Here: it comes with all that agents need.

    key = _agent_key(definition)
    name = str(definition.execution[key]) if key is not None else ""
    agents = (config.parent or config).agents
    if key is not None and name not in agents:
        known = did_you_mean(name, agents) or (f"; there are {', '.join(agents)}" if agents else "; there is none")
        raise ToolDefinitionError(f'{key}: there is no agent "{name}"{known}')

    async def handle(parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if not name:
            raise ToolExecutionError(f'tool "{definition.name}" names no agent; {_NAME_ONE}', executed=False)
        return await call_agent(name, parameters, context, definition.description)

    return ToolExecution(handler=handle, input_schema=definition.input_schema or AGENT_INPUT)


def _agent_key(definition: ToolDefinition) -> str | None:
    """Where a tool that is an agent says which; None where it does not."""
    return next((key for key in _AGENT_KEYS if definition.execution.get(key)), None)


def _of_no_agent(config: Config) -> list[str]:
    return [
        f"{config.source('tools', 'definitions', one.name)}: it names no agent, and calls of it fail; {_NAME_ONE}"
        for one in config.tools.definitions.values()
        if one.enabled and one.execution_type == "agent" and _agent_key(one) is None
    ]


def _made(
    definition: ToolDefinition,
    made: ToolExecution,
    *,
    description: str | None = None,
    category: ToolCategory | None = None,
) -> Tool:
    timeout = definition.timeout
    if timeout is None and definition.execution_type == "agent":
        timeout = math.inf  # The agent's own limits hold.
    elif timeout is None and definition.execution_type == "image":
        from toolspace.models.images import IMAGE_TIMEOUT_SECONDS

        timeout = IMAGE_TIMEOUT_SECONDS + 20  # Its own limit first, which says more.
    return Tool(
        definition.name,
        definition.description if description is None else description,
        made.input_schema,
        handler=made.handler,
        output_schema=definition.output_schema,
        category=definition.category if category is None else category,
        execution_type=definition.execution_type,
        visible=definition.visible and definition.execution_type != "prebuilt",
        is_async=definition.is_async,
        timeout=timeout,
        execution=definition.execution,
        queue=definition.queue,
        cache=definition.cache,
        cache_per_user=definition.cache_per_user,
        annotations=definition.annotations,
        tags=definition.tags,
        version=definition.version,
        expires_after=definition.expires_after,
        pauses_run=definition.pauses_run,
    )


def _builtins(config: Config) -> Sequence[Tool]:
    wanted = config.tools.builtins
    if wanted is False:
        return ()
    from toolspace.builtin.catalog import builtin_tools

    if wanted is True:
        return builtin_tools
    patterns = [pattern.casefold() for pattern in wanted]
    names = [tool.name for tool in builtin_tools]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            place = config.source("tools", "builtins")
            raise ConfigError(f"{place}: no built-in tool is called {pattern!r}; they are {', '.join(names)}")
    return [tool for tool in builtin_tools if any(fnmatch.fnmatchcase(tool.name, one) for one in patterns)]


def _load(spec: str, config: Config) -> list[Tool]:
    try:
        return load_functions(spec, config.base_dir)
    except ConfigError as error:
        place = config.source("functions").partition(" ")[0]
        raise ConfigError(f"{place}: {error}") from error.__cause__


def _idle_rules(config: Config, tools: Sequence[Tool]) -> list[str]:
    """Rules for local tools that fit none: most likely misspelt. A name with a namespace may come later."""
    names = [tool.name.casefold() for tool in tools]
    rules = {
        "toolsAllowed": config.tools.tools_allowed or (),
        "toolsDenied": config.tools.tools_denied,
        # Overrides hold for the tools of providers too, by their own names, which are not known yet.
        "overrides": () if _has_providers(config) else tuple(config.tools.overrides),
    }
    idle = [
        f'tools.{key}: "{pattern}" fits no tool'
        for key, patterns in rules.items()
        for pattern in patterns
        if SEPARATOR not in pattern and not fnmatch.filter(names, pattern.casefold())
    ]
    known = {*names, *(alias.casefold() for alias in config.tools.aliases)}
    return idle + [
        f'tools.aliases: "{alias}" means "{target}", which no tool is called'
        for alias, target in config.tools.aliases.items()
        if SEPARATOR not in target and not _has_providers(config) and target.casefold() not in known
    ]


def _has_providers(config: Config) -> bool:
    return any((config.providers, config.mcp_servers, config.rest_tools, config.openapi))


def _missing_queues(config: Config, tools: Sequence[Tool]) -> list[str]:
    return [
        f'tool "{tool.name}" asks for the queue "{tool.queue}", which is not configured; add it under queues'
        for tool in tools
        if tool.queue is not None and tool.queue not in config.queues
    ]


_LATER = (("storage", "redis"),)


def _not_yet(config: Config) -> list[str]:
    """What is configured and has nothing in this version that would follow it: said, not swallowed."""
    unused = [config.source(*path) for path in _LATER if config.source(*path) != "default"]
    return [f"{what}: not in effect, this version has no part that uses it" for what in unused]
