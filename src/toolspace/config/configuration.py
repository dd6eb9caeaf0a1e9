"""The whole configuration: the keys of a file, the list of all sections, and `Config`, the validated result.

`Config` and `AgentSpec` are what `composition`, the agents, the server and the CLI use. `load` reads files with
`ConfigPart`; `environment_variables`, `documentation` and `json_schema` describe what `SECTIONS` lists. Reads no file.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import msgspec

from toolspace.config import value_types as types
from toolspace.config.agent_settings import (
    AgentIdentity,
    AgentLimits,
    AgentLoopSettings,
    AgentModelSettings,
    AgentSettings,
    ConsciousnessSettings,
    MemorySettings,
    ModelPriceSettings,
    RouterSettings,
    TaskSettings,
)
from toolspace.config.file_formats import ConfigDocument, KeyPath, format_key_path, format_value
from toolspace.config.hook_settings import Hooks, HookSettings
from toolspace.config.policy_settings import Policies, PolicySettings
from toolspace.config.provider_settings import (
    McpServers,
    McpServerSettings,
    OpenApiServices,
    OpenApiSettings,
    Providers,
    ProviderSettings,
    RestTools,
    RestToolSettings,
)
from toolspace.config.quota_settings import Quotas, QuotaSettings
from toolspace.config.secret_references import SecretReference
from toolspace.config.server_settings import (
    EmbeddingSettings,
    NotificationSettings,
    OutputSettings,
    ServerSettings,
    SmtpSettings,
    StorageSettings,
    WebhookSettings,
)
from toolspace.config.tool_settings import (
    DefaultSettings,
    Queues,
    QueueSettings,
    ToolDefinition,
    ToolOverride,
    Tools,
    ToolSettings,
    WebSearchSettings,
)
from toolspace.config.validation import (
    AlreadyReported,
    InvalidValue,
    ReadingContext,
    Section,
    SectionType,
    Setting,
    Value,
    declared_settings,
    list_named_values,
    value_type,
)
from toolspace.config.value_types import ScalarText
from toolspace.core.names import did_you_mean
from toolspace.core.stored_records import SessionScope, StreamFormat

_STREAM_FORMATS: tuple[StreamFormat, ...] = get_args(StreamFormat)
FUNCTION_FILE = re.compile(r"(.+\.py)(?::[\w.]+)?")
"""An entry of `functions` or of `uses` that refers to a Python file."""
_NOT_INHERITED = ("definitions", "mcpServers")
_functions = types.list_of(
    types.string, "string or list of strings", 'a list such as ["./tools.py", "package.module:name"]'
)


@value_type("mapping", "a mapping", {"type": "object"}, fits_variable=False)
def _runtime(value: Value) -> Mapping[str, Any]:
    runtime = value.mapping()
    response_type = _find_response_type(runtime)
    if response_type is not None and response_type not in _STREAM_FORMATS:
        value.context.warn(
            (*value.path, "response", "type"),
            f"{format_value(response_type)} is no format of streams, which stay native; "
            f"expected one of {', '.join(_STREAM_FORMATS)}",
        )
    return runtime


def _find_response_type(runtime: Mapping[str, Any]) -> Any:
    response: Any = runtime.get("response")
    return cast("dict[str, Any]", response).get("type") if isinstance(response, dict) else None


# The keys of a file


class _McpSection(Section, frozen=True, kw_only=True):
    servers: Annotated[McpServers, "The same as `mcpServers`."] = {}


class TopLevelSettings(AgentSettings, frozen=True, kw_only=True):
    """Everything that a file, or an agent that is described inside one, may have at its top level."""

    defaults: Annotated[DefaultSettings, "Holds for every call that has no setting of its own."] = DefaultSettings()
    queues: Annotated[Queues, "Limits on calls, by name."] = {}
    policies: Annotated[Policies, "Rules that decide which calls run, need approval or are denied."] = ()
    quotas: Annotated[Quotas, "How many calls, tokens and dollars callers and agents may use in a time."] = ()
    tools: Annotated[Tools, "Settings of the built-in and local tools, or a list of tools."] = ToolSettings()
    mcp: Annotated[_McpSection, "MCP servers, as in the file of an agent."] = _McpSection()
    mcp_servers: Annotated[McpServers, "MCP servers, by name."] = {}
    servers: Annotated[McpServers, "The same as `mcpServers`."] = {}
    rest_tools: Annotated[RestTools, "Tools that are one HTTP request each."] = {}
    openapi: Annotated[OpenApiServices, "Services that an OpenAPI document describes, by name."] = {}
    providers: Annotated[Providers, "Providers of other packages, or of your own, by name."] = {}
    functions: Annotated[tuple[str, ...], _functions, "Python tools: files, modules, or `module:name`."] = ()
    hooks: Annotated[Hooks, "What runs before and after calls, in this order."] = ()
    storage: Annotated[StorageSettings, "Where state is stored."] = StorageSettings()
    server: Annotated[ServerSettings, "The gateway."] = ServerSettings()
    embeddings: Annotated[EmbeddingSettings | None, "The embedding model of `search_knowledge`."] = None
    demo: Annotated[bool, "Whether a demo agent is created if no agent is configured."] = True
    version: Annotated[ScalarText | None, "Stored, without effect."] = None
    runtime: Annotated[
        Mapping[str, Any], _runtime, "`response.type` is the default format of its streams; the rest has no effect."
    ] = {}
    name: str | None = None
    description: str = ""
    system: str = ""

    @property
    def all_servers(self) -> Mapping[str, McpServerSettings]:
        """The MCP servers of all places where a file may have them."""
        return {**self.mcp_servers, **self.servers, **self.mcp.servers, **self.tools.mcp_servers}


def _select(keys: str) -> tuple[Setting, ...]:
    by_key = {setting.key: setting for setting in declared_settings(TopLevelSettings)}
    return tuple(by_key[key] for key in keys.split())


TOOL_KEYS = _select("defaults queues tools mcp mcpServers servers restTools openapi providers functions")
"""Keys that define tools, for all agents or for one alone."""
PROCESS_KEYS = _select("policies quotas hooks storage server embeddings demo")
"""Keys that only the main file may have."""
ANY_FILE_KEYS = _select("router agents notifications")
AGENT_KEYS = _select(
    "agent model loop tasks autoEnter consciousness limits session memories spaces knowledge version runtime"
)
INLINE_KEYS = declared_settings(AgentIdentity)
"""Keys of `agent` that a definition inside another file may have at its top level."""
SINGLE_SETTINGS = _select("functions demo")
"""The settings at the top level that are no sections."""

SECTIONS: Mapping[str, SectionType[Any]] = {
    name: SectionType(section)
    for name, section in {
        "defaults": DefaultSettings,
        "queues.<name>": QueueSettings,
        "policies[]": PolicySettings,
        "quotas[]": QuotaSettings,
        "tools": ToolSettings,
        "tools.webSearch": WebSearchSettings,
        "tools.overrides.<name>": ToolOverride,
        "tools.definitions.<name>": ToolDefinition,
        "hooks": HookSettings,
        "mcpServers.<name>": McpServerSettings,
        "restTools.<name>": RestToolSettings,
        "openapi.<name>": OpenApiSettings,
        "providers.<name>": ProviderSettings,
        "agents.<name>": AgentSettings,
        "agents.<name>.agent": AgentIdentity,
        "agents.<name>.model": AgentModelSettings,
        "agents.<name>.model.price": ModelPriceSettings,
        "agents.<name>.loop": AgentLoopSettings,
        "agents.<name>.tasks": TaskSettings,
        "agents.<name>.consciousness": ConsciousnessSettings,
        "agents.<name>.limits": AgentLimits,
        "agents.<name>.memories": MemorySettings,
        "router": RouterSettings,
        "notifications": NotificationSettings,
        "notifications.webhook": WebhookSettings,
        "notifications.smtp": SmtpSettings,
        "embeddings": EmbeddingSettings,
        "storage": StorageSettings,
        "storage.outputs": OutputSettings,
        "server": ServerSettings,
    }.items()
}
"""Every section, by its name in the documentation and in its order."""
_OVERRIDABLE_SECTIONS = [
    "defaults",
    "tools",
    "tools.webSearch",
    "notifications.webhook",
    "notifications.smtp",
    "embeddings",
    "storage",
    "server",
]


def list_overridable_settings() -> Iterator[tuple[KeyPath, Setting]]:
    """The settings that an environment variable can override: they have one fixed place and hold one value."""
    for section in _OVERRIDABLE_SECTIONS:
        for setting in SECTIONS[section].settings:
            if setting.value_type.fits_variable and setting.options.environment:
                yield (*section.split("."), setting.key), setting
    for setting in SINGLE_SETTINGS:
        yield (setting.key,), setting


# The validated result


class AgentSpec(Section, frozen=True, kw_only=True):
    """An agent as the configuration describes it."""

    name: str
    description: str = ""
    system: str = ""
    """Its instructions."""
    version: str | None = None
    model: AgentModelSettings = AgentModelSettings()
    loop: AgentLoopSettings = AgentLoopSettings()
    consciousness: ConsciousnessSettings = ConsciousnessSettings()
    limits: AgentLimits = AgentLimits()
    session: SessionScope = "agent"
    """Whether it has one session for everything, or one for each space or person."""
    memories: MemorySettings = MemorySettings()
    memory_dir: Path | None = None
    """The directory of its memory files, if its own definition names one."""
    router: RouterSettings = RouterSettings()
    agents: tuple[str, ...] = ()
    """The agents that it may call."""
    named_tools: tuple[str, ...] = ()
    """The names, patterns and collections by which its `tools` name built-in tools; else those of the main file."""
    tasks: TaskSettings = TaskSettings()
    auto_enter: bool = False
    """Whether a cycle that messages of one space triggered begins in that space."""
    spaces: tuple[str, ...] = ()
    """The names of the spaces that it is a member of from the start."""
    knowledge: tuple[Path, ...] = ()
    """Files and directories that `search_knowledge` searches."""
    notifications: NotificationSettings = NotificationSettings()
    runtime: Mapping[str, Any] = {}
    """As written. `response_format` has what it means."""
    config: "Config | None" = None
    """The configuration of its own tools. None: it has none."""
    path: Path | None = None
    """The file that describes it."""
    max_cost_source: str = ""
    """The line of `limits.maxCost`, if it is set."""

    @property
    def response_format(self) -> StreamFormat | None:
        """The default format of its streams; None: native."""
        response_type = _find_response_type(self.runtime)
        return next((name for name in _STREAM_FORMATS if name == response_type), None)

    @property
    def has_own_tools(self) -> bool:
        """Whether it has tools, or settings of tools, that other agents do not have."""
        return self.config is not None


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration, validated, and the origin of each value."""

    hidden = frozenset(("document", "origins", "secret_values", "secret_references", "parent"))

    defaults: DefaultSettings = DefaultSettings()
    queues: Mapping[str, QueueSettings] = {}
    policies: tuple[PolicySettings | Literal["cautious"], ...] = ()
    quotas: tuple[QuotaSettings, ...] = ()
    tools: ToolSettings = ToolSettings()
    mcp_servers: Mapping[str, McpServerSettings] = {}
    """All servers, in whichever place the file has them."""
    rest_tools: Mapping[str, RestToolSettings] = {}
    openapi: Mapping[str, OpenApiSettings] = {}
    providers: Mapping[str, ProviderSettings] = {}
    agents: Mapping[str, AgentSpec] = {}
    """All agents, of the main file and of the files that it refers to."""
    agent: AgentSpec | None = None
    """The main file's own agent, if it has one: one of `agents`."""
    router: RouterSettings = RouterSettings()
    """Of the main file's own agent."""
    notifications: NotificationSettings = NotificationSettings()
    embeddings: EmbeddingSettings | None = None
    storage: StorageSettings = StorageSettings()
    server: ServerSettings = ServerSettings()
    functions: tuple[str, ...] = ()
    hooks: tuple[HookSettings, ...] = ()
    demo: bool = True
    """Whether a demo agent is created if no agent is configured."""
    path: Path | None = None
    base_dir: Path
    """The directory that relative paths are relative to: that of the file."""
    state_dir: Path
    warnings: tuple[str, ...] = ()
    document: ConfigDocument
    origins: Mapping[KeyPath, KeyPath | str] = {}
    secret_values: frozenset[str] = frozenset()
    """The values that no log may show."""
    secret_references: Mapping[SecretReference, str] = {}
    """The references to secrets in all files, and the place of each."""
    parent: "Config | None" = None
    """For the configuration of one agent: the main configuration, which it inherits settings from."""

    def source(self, *key_path: str | int) -> str:
        """The origin of a setting: `toolspace.yaml:12 (defaults.toolTimeout)`, a variable, or `default`.

        Entries are addressed by their name, whatever shape the file gives them:
        `config.source("mcpServers", "github", "cache")`.
        """
        for end in range(len(key_path), 0, -1):
            origin = self.origins.get(key_path[:end])
            if isinstance(origin, str):
                return f"{origin} (environment)"
            if origin is not None:
                path = (*origin, *key_path[end:])
                if path in self.document.lines:
                    return f"{self.document.format_location(path)} ({format_key_path(path)})"
                break
        if self.parent is not None and _is_inherited(key_path):
            return self.parent.source(*key_path)
        return "default"

    def files(self) -> tuple[Path, ...]:
        """All files that the configuration depends on. A change of one of them requires a reload."""
        paths = [*self._own_files()]
        for agent in self.agents.values():
            paths += [agent.path] if agent.path is not None else []
            paths += agent.config.files() if agent.config is not None else []
        return tuple(dict.fromkeys(paths))

    def list_secret_holders(self) -> Iterator[object]:
        """The enabled entries of tools and providers, and the search engine: what may refer to secrets."""
        sections = (self.providers, self.mcp_servers, self.rest_tools, self.openapi)
        yield from (entry for section in sections for entry in section.values() if entry.enabled)
        yield from (tool.execution for tool in self.tools.definitions.values() if tool.enabled)
        yield self.tools.web_search
        yield from (hook for hook in self.hooks if hook.is_webhook)

    def list_secret_files(self) -> list[Path]:
        """The files of references to secrets. File tools must not read them."""
        return [Path(reference.text) for reference in self.secret_references if reference.kind == "file"]

    def _own_files(self) -> Iterator[Path]:
        if self.path is not None:
            yield self.path
        plugins = [entry.uses for entry in self.providers.values() if entry.uses is not None and entry.enabled]
        hooks = [hook.use for hook in self.hooks]
        for match in filter(None, map(FUNCTION_FILE.fullmatch, (*self.functions, *plugins, *hooks))):
            yield self.base_dir / Path(match[1]).expanduser()
        for service in self.openapi.values():
            if Path(service.spec).is_absolute():
                yield Path(service.spec)
        yield from self.list_secret_files()


def _is_inherited(key_path: tuple[str | int, ...]) -> bool:
    """Whether an agent inherits a setting of the main file."""
    if key_path[:1] == ("tools",):
        return len(key_path) > 1 and key_path[1] not in _NOT_INHERITED
    return key_path[:1] in (("defaults",), ("queues",), ("storage",), ("server",))


# Reading a file


class ConfigPart:
    """A whole file, or the part of one that describes an agent."""

    def __init__(self, context: ReadingContext, path: KeyPath = ()) -> None:
        self.context = context
        self.path = path
        self.data: Mapping[str, Any] = context.document.data
        for key in path:
            self.data = cast("Any", self.data)[key]

    def read(self, *keys: Setting) -> TopLevelSettings:
        """Reads what is valid. Problems are reported, and later checks still run."""
        section = SectionType(TopLevelSettings, settings=keys, is_ignored=_is_ignored_key, is_lenient=True)
        try:
            return section.read(Value(self.data, self.context, self.path))
        except (AlreadyReported, InvalidValue):
            return TopLevelSettings()

    def format_location(self) -> str:
        return self.context.document.format_location(self.path)

    def find_origin(self, *key: str | int) -> KeyPath:
        """The place of a setting in the document."""
        origin = self.context.origins.get(key)
        return origin if isinstance(origin, tuple) else (*self.path, *key)

    def check_references(self, settings: TopLevelSettings, more_queues: Iterable[str] = ()) -> None:
        """Reports references to queues that do not exist, and aliases that lead back to themselves."""
        queues = [*self.list_queues(), *more_queues]
        for key, queue in _list_queue_references(settings):
            if queue not in queues and key in self.context.origins:
                origin = self.context.origins[key]
                example = f"; add it: queues: {{{format_key_path((queue,))}: {{concurrent: 3}}}}"
                hint = did_you_mean(queue, queues) or example
                variable = origin if isinstance(origin, str) else None
                self.context.report(self.find_origin(*key), f"there is no queue {format_value(queue)}{hint}", variable)
        self._check_aliases(settings.tools.aliases)

    def list_queues(self) -> list[str]:
        """The names of the queues, including invalid ones: those have their own problem."""
        with suppress(InvalidValue):
            silent_context = ReadingContext(self.context.document, base_dir=self.context.base_dir)
            queues = Value(self.data.get("queues"), silent_context)
            return [name for name, _ in list_named_values(queues, entry_label="queues")]
        return []

    def _check_aliases(self, aliases: Mapping[str, str]) -> None:
        reported_aliases: set[str] = set()
        for alias in aliases:
            chain = [alias]
            while (target := aliases.get(chain[-1])) is not None and target not in chain:
                chain.append(target)
            if target == alias and alias not in reported_aliases:
                reported_aliases.update(chain)
                names = " → ".join(format_key_path((name,)) for name in (*chain, alias))
                path = (*self.find_origin("tools", "aliases"), alias)
                self.context.report(path, f"the alias leads back to itself: {names}")

    def merge_defaults(self, settings: TopLevelSettings, base: DefaultSettings | None = None) -> DefaultSettings:
        """The defaults over those of `base`, with the older settings of `tools` that mean the same."""
        origins = self.context.origins
        result = settings.defaults
        if base is not None:
            written_fields = [
                setting.attribute
                for setting in declared_settings(DefaultSettings)
                if ("defaults", setting.key) in origins
            ]
            result = msgspec.structs.replace(
                base, **{name: getattr(settings.defaults, name) for name in written_fields}
            )
        changes: dict[str, Any] = {}
        for old_key, key, attribute, value in (
            ("timeout", "toolTimeout", "tool_timeout", settings.tools.timeout),
            ("maxConcurrent", "maxConcurrentTools", "max_concurrent_tools", settings.tools.max_concurrent),
        ):
            if value is None:
                continue
            if ("defaults", key) not in origins:
                changes[attribute] = value
                origins["defaults", key] = origins["tools", old_key]
            elif getattr(settings.defaults, attribute) != value:
                name = format_key_path(("defaults", key))
                self.context.warn(self.find_origin("tools", old_key), f"has no effect, as {name} says otherwise")
        return msgspec.structs.replace(result, **changes)


def _list_queue_references(settings: TopLevelSettings) -> Iterator[tuple[KeyPath, str]]:
    sections: Iterable[tuple[KeyPath, Mapping[str, Any]]] = (
        (("mcpServers",), settings.all_servers),
        (("restTools",), settings.rest_tools),
        (("openapi",), settings.openapi),
        (("providers",), settings.providers),
        (("tools", "definitions"), settings.tools.definitions),
        (("tools", "overrides"), settings.tools.overrides),
    )
    for prefix, entries in sections:
        for name, entry in entries.items():
            if entry.queue is not None and entry.enabled is not False:
                yield (*prefix, name, "queue"), entry.queue


def _is_ignored_key(key: str) -> bool:
    """Whether a key at the top level is left alone: `x-…` is for the user's anchors, `inputs` is VS Code's."""
    return key.startswith("x-") or key in ("$schema", "inputs")
