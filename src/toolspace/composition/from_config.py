"""Builds the parts of a toolspace from its configuration: tools, rules, queues and the context. Starts nothing.

Also builds the tools that `tools.definitions` defines. Used by `Toolspace.open` and at each reload.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from toolspace.composition.budgets import build_quotas, check_prices, list_unpriced_agents
from toolspace.composition.config_warnings import (
    list_missing_queues,
    list_unmatched_quotas,
    list_unmatched_rules,
    list_unused_settings,
)
from toolspace.composition.hooks import build_hooks
from toolspace.composition.policies import build_policy_rules
from toolspace.composition.providers import ConfiguredProvider, belongs_to_one_provider, build_providers
from toolspace.composition.settings import Settings
from toolspace.config.configuration import AgentSpec, Config
from toolspace.config.find_and_watch import agent_memory_root, key_memory_root, list_state_paths
from toolspace.config.provider_settings import McpServerSettings
from toolspace.config.secret_references import refers_to_secrets, resolve_secrets
from toolspace.config.tool_settings import QueueSettings, ToolDefinition, WebSearchSettings
from toolspace.config.validation import camel_case
from toolspace.core.extension_points import ResultCache
from toolspace.core.hooks import Hook
from toolspace.core.names import (
    did_you_mean,
)
from toolspace.core.prebuilt_actions import PrebuiltAction
from toolspace.core.quotas import Quota
from toolspace.core.result import ToolResult
from toolspace.core.secret_masking import register_secrets
from toolspace.core.tool import NO_ANNOTATIONS, Tool, ToolCategory
from toolspace.core.tool_collections import BUILTIN_NAMES
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ConfigError, ToolDefinitionError, ToolExecutionError
from toolspace.orchestrator.effective_settings import CallDefaults, ProviderRules, SourcedValue, ToolRules
from toolspace.orchestrator.policy_rules import PolicyRule
from toolspace.orchestrator.stages.queue import QueueSpec, RateLimit
from toolspace.providers.configured_tools import OutputSchemaError, ToolExecution, build_execution, check_output_schema
from toolspace.providers.functions import list_loaded_files, load_functions
from toolspace.providers.mcp.server_spec import McpCallbacks
from toolspace.storage.database import find_database_file
from toolspace.storage.output_quota import OutputLimits

if TYPE_CHECKING:
    from toolspace.agents.registry import AgentRegistry
    from toolspace.providers.rest.client import HttpClient

GetAgents = Callable[[], "AgentRegistry"]
_AGENT_KEYS = ("agent", "agentName", "name", "agentId")
_NAME_THE_AGENT = "say which under execution.agent"
_IMAGE_MARGIN_SECONDS = 20
"""The timeout of an image tool is longer than the model's own timeout, whose error message is better."""
_READ_OUTPUT = "agent__read_output"
_SCRIPT_SUFFIXES = frozenset(
    (
        ".py", ".pyz", ".js", ".mjs", ".cjs", ".ts", ".mts", ".cts", ".jsx", ".tsx", ".sh", ".bash", ".rb", ".pl",
        ".php", ".lua", ".jar", ".dll", ".exe", ".wasm", ".ps1", ".r",
    )
)  # fmt: skip


class ConfiguredParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that a configuration describes."""

    context: ToolContext
    defaults: CallDefaults
    queues: Mapping[str, QueueSpec]
    aliases: Mapping[str, str]
    rules: ProviderRules
    """For local tools: built-in tools, functions and definitions."""
    builtins: Sequence[Tool]
    functions: Sequence[Tool]
    definitions: Sequence[Tool]
    hooks: Sequence[Hook] | None
    """None for an agent's own configuration: those of the main file hold for its tools, too."""
    providers: Mapping[str, ConfiguredProvider]
    """The enabled providers, by section and name: `mcpServers.github`."""
    client: HttpClient | None
    """The HTTP client of the definitions; None if no definition needs one. The toolspace closes it."""
    files: Callable[[], Sequence[Path]]
    """The files of the configuration, and the Python files of its functions and providers."""
    warnings: Sequence[str]
    agents: Sequence[AgentSpec] = ()
    masks_secrets: bool | None = None
    """Whether any of its files has a reference to a secret. None for one agent."""
    policy_rules: Sequence[PolicyRule] | None = None
    quotas: Sequence[Quota] | None = None
    """None: those of the main configuration."""
    """None for one agent: the rules of the main configuration apply to its tools, too."""


def build_parts(
    config: Config,
    previous: ConfiguredParts | None,
    callbacks: McpCallbacks,
    get_agents: GetAgents,
    *,
    single_tool: str | None,
) -> ConfiguredParts:
    """The parts that a configuration describes. Imports the user's functions and providers.

    `previous`: the parts before a reload. Its HTTP client and its providers whose entry has not changed are used again.
    `get_agents` returns the agents; called when a tool of the type `agent` runs.
    `single_tool`: the only tool that will be called. Providers that it cannot need are left out.
    """
    check_prices(config)
    register_secrets(config.secret_values)  # Before the user's code runs, which may log them.
    # Without duplicates: the configuration may list a file and one of its functions.
    functions = list(dict.fromkeys(tool for entry in config.functions for tool in _load_functions(entry, config)))
    rules = _build_local_rules(config)
    builtins = _select_builtins(config)
    http_client = _SharedHttpClient(previous.client if previous is not None else None)
    single_tool = _resolve_single_tool(config, single_tool, builtins, functions)
    # Before the definitions: importing a provider may register prebuilt actions.
    providers = build_providers(
        config, rules, previous.providers if previous is not None else {}, callbacks, single_tool=single_tool
    )
    definitions = _build_defined_tools(config, http_client, get_agents, single_tool)
    hooks = build_hooks(config, http_client) if config.parent is None else None
    return ConfiguredParts(
        context=_build_context(config, single_tool),
        defaults=_build_defaults(config),
        queues={name: _build_queue(queue) for name, queue in config.queues.items()},
        aliases=config.tools.aliases,
        rules=rules,
        builtins=builtins,
        functions=functions,
        definitions=definitions,
        hooks=hooks,
        providers=providers,
        client=http_client.client,
        files=lambda: list(dict.fromkeys((*config.files(), *list_loaded_files()))),
        warnings=[
            *config.warnings,
            *list_unpriced_agents(config),
            *list_unused_settings(config),
            *list_missing_queues(config, functions),
            *_list_tools_without_agent(config),
            *list_unmatched_rules(config, [*builtins, *functions, *definitions]),
            *list_unmatched_quotas(config, [*builtins, *functions, *definitions]),
        ],
        agents=tuple(config.agents.values()),
        masks_secrets=bool(config.secret_references) if config.parent is None else None,
        policy_rules=build_policy_rules(config) if config.parent is None else None,
        quotas=build_quotas(config) if config.parent is None else None,
    )


def build_settings(config: Config) -> Settings:
    """The settings that a toolspace is created with; the others are applied later, and again after a reload."""
    outputs = config.storage.outputs
    return Settings(
        tool_output_ttl=config.defaults.tool_output_ttl,
        output_limits=OutputLimits(
            per_session=outputs.per_session, per_principal=outputs.per_principal, total=outputs.total
        ),
        state_dir=config.state_dir,
    )


def open_cache(config: Config) -> ResultCache | None:
    """The cache on disk; None for the default, a cache in memory."""
    if config.storage.cache != "disk":
        return None
    from toolspace.storage.sqlite_cache import SqliteCache

    return SqliteCache(config.state_dir / "cache.db")


def _resolve_single_tool(
    config: Config, tool: str | None, builtins: Sequence[Tool], functions: Sequence[Tool]
) -> str | None:
    """The full name of the tool if its call needs one provider at most, else None.

    A bare name may belong to any provider; functions and batches may call any tool.
    """
    for _ in config.tools.aliases:  # An alias may lead to another one; at most once to each.
        tool = config.tools.aliases.get(tool or "", tool)
    if tool is None or any(name == tool for name in (*config.tools.definitions, *(local.name for local in functions))):
        return None
    needs_no_provider = tool == _READ_OUTPUT or any(builtin.name == tool for builtin in builtins)
    return tool if needs_no_provider or belongs_to_one_provider(config, tool) else None


def _default_memory_dir() -> Path:
    return Path.cwd() / ".toolspace" / "memory"


def _list_memory_dirs(main_config: Config) -> Iterator[Path]:
    """The memory directories of the toolspace and of agents that have one of their own."""
    yield main_config.tools.memory_dir or _default_memory_dir()
    yield from (agent.memory_dir for agent in main_config.agents.values() if agent.memory_dir is not None)


def _build_context(config: Config, single_tool: str | None) -> ToolContext:
    tools = config.tools
    memory_dir = tools.memory_dir or _default_memory_dir()
    # Memories and archives belong to their agents: only the memory and session tools reach them.
    own_dirs = [
        folder
        for path in dict.fromkeys((memory_dir, *_list_memory_dirs(config.parent or config)))
        for folder in (path, key_memory_root(path), agent_memory_root(path))
    ]
    if tools.session_dir is not None:
        own_dirs.append(tools.session_dir)
    own_dirs += (config.parent or config).list_secret_files()
    # The secrets of the search engine are left alone if no call can need them.
    web_search = tools.web_search if single_tool not in (None, "web_search") else _resolve_web_search(config)
    return ToolContext(
        allowed_paths=tools.allowed_paths if tools.allowed_paths is not None else (Path.cwd(),),
        # With the files of the main configuration: an agent must not change its permissions there.
        protected_paths=tuple(_list_protected_files(config)),
        private_paths=list_state_paths(
            config.state_dir, find_database_file(config.storage.url, config.state_dir), own_dirs
        ),
        writable_code=tools.allow_writing_code,
        allowed_env=tools.allowed_env,
        allowed_hosts=tools.allowed_hosts,
        memory_dir=memory_dir,
        session_dir=tools.session_dir,
        web_search=msgspec.to_builtins(web_search) if web_search is not None else None,
    )


def _resolve_web_search(config: Config) -> WebSearchSettings | None:
    try:
        return resolve_secrets(config.tools.web_search)
    except ConfigError as error:
        raise ConfigError(f"{config.source('tools', 'webSearch')}: {error}") from None


def _list_protected_files(config: Config) -> Iterator[Path]:
    """The files that decide what runs: configuration, and code that `tools.allowWritingCode` does not match."""
    sources = [source for source in (config, config.parent) if source is not None]
    for source in sources:
        yield from source.files()
    writable_code = [os.path.realpath(pattern) for pattern in config.tools.allow_writing_code]
    for file in _list_code_files(sources):
        if not any(fnmatch.fnmatch(os.path.realpath(file), pattern) for pattern in writable_code):
            yield file


def _list_code_files(sources: Sequence[Config]) -> Iterator[Path]:
    """Loaded code, and the programs and scripts of MCP servers."""
    yield from list_loaded_files()
    for source in sources:
        for server in source.mcp_servers.values():
            for file in _list_program_files(server):
                yield file
                if file.is_symlink():  # The link decides what runs, too.
                    yield Path(os.path.realpath(file.parent)) / file.name


def _list_program_files(server: McpServerSettings) -> Iterator[Path]:
    """The program of a server, and the scripts and modules (`-m`) among its arguments. One may be `--option=file`."""
    folder = Path.cwd() / (server.cwd.expanduser() if server.cwd is not None else ".")
    command = os.path.expanduser(server.command or "")
    if os.path.dirname(command):
        yield folder / command
    elif command and (program := shutil.which(command, path=server.env.get("PATH"))):
        yield Path(program).absolute()
    for option, module in itertools.pairwise(server.args):
        if option == "-m":  # Python: a module or package, which is usually in the server's folder.
            name = module.replace(".", "/")
            yield from (folder / name / "__main__.py", folder / name / "__init__.py", folder / f"{name}.py")
    for argument in server.args:
        file = folder / os.path.expanduser(argument.partition("=")[2] if argument.startswith("-") else argument)
        with suppress(OSError, ValueError):  # Not every argument can be a path.
            is_script = file.suffix.lower() in _SCRIPT_SUFFIXES or os.access(file, os.X_OK)
            if is_script and not file.is_dir():
                yield file


def _build_defaults(config: Config) -> CallDefaults:
    return CallDefaults(
        **{
            name: SourcedValue(getattr(config.defaults, name), config.source("defaults", camel_case(name)))
            for name in CallDefaults.__struct_fields__
        }
    )


def _build_queue(queue: QueueSettings) -> QueueSpec:
    rate = RateLimit(queue.rate.count, queue.rate.seconds) if queue.rate is not None else None
    return QueueSpec(
        concurrent=queue.concurrent, rate=rate, max_waiting=queue.max_waiting, wait_timeout=queue.wait_timeout
    )


def _build_local_rules(config: Config) -> ProviderRules:
    tools = config.tools
    overrides: dict[str, ToolRules] = {}
    for name, override in tools.overrides.items():
        values = {field: getattr(override, field) for field in override.__struct_fields__}
        overrides[name] = ToolRules(**values, source=config.source("tools", "overrides", name))
    return ProviderRules(tools_allowed=tools.tools_allowed, tools_denied=tools.tools_denied, overrides=overrides)


def _select_builtins(config: Config) -> Sequence[Tool]:
    selection = config.tools.builtins
    if selection is False:
        return ()
    from toolspace.builtin.catalog import builtin_tools

    for pattern in selection if selection is not True else ():
        if not fnmatch.filter((*(tool.name for tool in builtin_tools), *BUILTIN_NAMES), pattern.casefold()):
            place, names = config.source("tools", "builtins"), ", ".join(tool.name for tool in builtin_tools)
            raise ConfigError(f"{place}: no built-in tool matches {pattern!r}; they are {names}")
    return select_builtins(selection, builtin_tools)


def select_builtins(selection: bool | Sequence[str], tools: Sequence[Tool]) -> Sequence[Tool]:
    """The built-in tools that `tools.builtins` selects."""
    if isinstance(selection, bool):
        return tools if selection else ()
    patterns = [pattern.casefold() for pattern in selection]
    return [tool for tool in tools if any(fnmatch.fnmatchcase(tool.name, pattern) for pattern in patterns)]


def _load_functions(entry: str, config: Config) -> list[Tool]:
    try:
        return load_functions(entry, config.base_dir)
    except ConfigError as error:
        place = config.source("functions").partition(" ")[0]
        raise ConfigError(f"{place}: {error}") from error.__cause__


# Tools that the configuration defines


class _SharedHttpClient:
    """The client of defined tools that are HTTP requests. The first of them creates it."""

    def __init__(self, client: HttpClient | None) -> None:
        self.client = client

    def __call__(self) -> HttpClient:
        if self.client is None:
            from toolspace.providers.rest.client import HttpClient

            self.client = HttpClient()
        return self.client


def _build_defined_tools(
    config: Config, http_client: _SharedHttpClient, get_agents: GetAgents, single_tool: str | None
) -> list[Tool]:
    """The enabled tools. Raises `ConfigError` with all problems.

    `single_tool` is another tool, if given: then tools that refer to secrets are left out, and no secret is read.
    """
    tools: list[Tool] = []
    problems: list[str] = []
    for definition in config.tools.definitions.values():
        if definition.enabled and (single_tool is None or not refers_to_secrets(definition.execution)):
            try:
                tools.append(_build_defined_tool(definition, config, http_client, get_agents))
                check_output_schema(tools[-1])
            except OutputSchemaError as error:
                problems.append(f"{config.source('tools', 'definitions', definition.name, 'outputSchema')}: {error}")
            except ToolDefinitionError as error:
                key, _, reason = str(error).removeprefix(f"REST tool {definition.name!r}: ").partition(": ")
                place = config.source("tools", "definitions", definition.name, "execution", key)
                problems.append(f"{place}: {reason}")
            except ConfigError as error:
                problems.append(f"{config.source('tools', 'definitions', definition.name, 'execution')}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return tools


def _build_defined_tool(
    definition: ToolDefinition, config: Config, http_client: _SharedHttpClient, get_agents: GetAgents
) -> Tool:
    description, category, timeout = definition.description, definition.category, definition.timeout
    input_schema, annotations = definition.input_schema, definition.annotations
    settings = resolve_secrets(definition.execution)
    match definition.execution_type:
        case "prebuilt":
            # Imported here: it imports the whole storage.
            from toolspace.agents.prebuilt.provider import build_execution as build_action_execution
            from toolspace.agents.prebuilt.provider import get_action

            action = get_action(str(definition.execution["action"]))
            execution = build_action_execution(action, input_schema)
            source = action.tool if isinstance(action, PrebuiltAction) else action
            description = description or source.description
            category = source.category if category is ToolCategory.CUSTOM else category
            annotations = source.annotations if annotations == NO_ANNOTATIONS else annotations
        case "image":
            from toolspace.models.images import IMAGE_TIMEOUT_SECONDS, PROMPT_SCHEMA, create_image_handler

            handler = create_image_handler(definition.name, settings)
            execution = ToolExecution(handler=handler, input_schema=input_schema or PROMPT_SCHEMA)
            description = description or "Draws a picture of what the prompt says."
            timeout = IMAGE_TIMEOUT_SECONDS + _IMAGE_MARGIN_SECONDS if timeout is None else timeout
        case "agent":
            execution = _build_agent_execution(definition, config, get_agents)
            timeout = math.inf if timeout is None else timeout  # The agent has its own limits.
        case _:
            execution = build_execution(
                definition.name,
                definition.execution_type,
                settings,
                input_schema=input_schema,
                client=http_client,
            )
    return Tool(
        definition.name,
        description,
        execution.input_schema,
        handler=execution.handler,
        output_schema=definition.output_schema,
        category=category,
        execution_type=definition.execution_type,
        visible=definition.visible and definition.execution_type != "prebuilt",
        is_async=definition.is_async,
        timeout=timeout,
        execution=definition.execution,  # Without secrets: lists of tools show it.
        queue=definition.queue,
        cache=definition.cache,
        cache_scope=definition.cache_scope,
        priority=definition.priority,
        approval=definition.approval,
        annotations=annotations,
        tags=definition.tags,
        version=definition.version,
        expires_after=definition.expires_after,
        pauses_run=definition.pauses_run,
        when_unserved=definition.when_unserved,
    )


def _build_agent_execution(definition: ToolDefinition, config: Config, get_agents: GetAgents) -> ToolExecution:
    from toolspace.agents.subagents import AGENT_INPUT, call_agent  # Imported here: they import the agent runtime.

    key = _find_agent_key(definition)
    name = str(definition.execution[key]) if key is not None else ""
    agents = (config.parent or config).agents
    if key is not None and name not in agents:
        hint = did_you_mean(name, agents) or (f"; there are {', '.join(agents)}" if agents else "; none is set up")
        raise ToolDefinitionError(f'{key}: there is no agent "{name}"{hint}')

    async def handle(parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if not name:
            raise ToolExecutionError(f'tool "{definition.name}" names no agent; {_NAME_THE_AGENT}', executed=False)
        return await call_agent(get_agents(), name, parameters, context, task=definition.description)

    return ToolExecution(handler=handle, input_schema=definition.input_schema or AGENT_INPUT)


def _find_agent_key(definition: ToolDefinition) -> str | None:
    """The key of `execution` that names the agent."""
    return next((key for key in _AGENT_KEYS if definition.execution.get(key)), None)


def _list_tools_without_agent(config: Config) -> list[str]:
    """A warning for each tool of the type `agent` that names no agent."""
    return [
        f"{config.source('tools', 'definitions', tool.name)}: it names no agent, and calls of it fail; "
        f"{_NAME_THE_AGENT}"
        for tool in config.tools.definitions.values()
        if tool.enabled and tool.execution_type == "agent" and _find_agent_key(tool) is None
    ]
