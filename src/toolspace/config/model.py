"""The configuration as typed data: frozen, durations in seconds, paths absolute. Reads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from toolspace.core.tool import NO_ANNOTATIONS, Annotations, ExecutionType, ToolCategory

if TYPE_CHECKING:
    from toolspace.config.configuration import Config

Transport = Literal["stdio", "http", "sse", "websocket"]
SearchEngine = Literal["tavily", "google", "bing", "duckduckgo"]
CacheKind = Literal["memory", "disk"]
SmtpTls = Literal["none", "starttls", "tls"]
Review = Literal["rules", "model"]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the configuration. Its text shows no secret, so that it may be logged."""

    secrets: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        fields = (
            f"{name}={'…' if name in self.secrets and getattr(self, name) else repr(getattr(self, name))}"
            for name in self.__struct_fields__
        )
        return f"{type(self).__name__}({', '.join(fields)})"


class DefaultSettings(Section, frozen=True, kw_only=True):
    """What holds for every call unless something nearer says otherwise."""

    tool_timeout: float = 30.0
    tool_response_max_bytes: int = 100_000
    tool_output_ttl: float = 86_400.0
    pending_call_ttl: float = 604_800.0
    max_tool_calls_per_turn: int | None = None
    max_concurrent_tools: int | None = None
    context_window: int | None = None
    tool_search_threshold: int | None = 20_000
    """None: the model always sees every tool."""
    mcp_init_concurrency: int = 32
    trace_mcp: bool = False


class RateSetting(Section, frozen=True, kw_only=True):
    """So many calls in so many seconds."""

    count: int
    seconds: float


class QueueSettings(Section, frozen=True, kw_only=True):
    concurrent: int
    rate: RateSetting | None = None
    max_waiting: int | None = None
    wait_timeout: float | None = None


class WebSearchSettings(Section, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Which engine `web_search` asks. `msgspec.to_builtins` gives it as it is written in the file."""

    secrets = frozenset(("api_key",))

    provider: SearchEngine = "duckduckgo"
    api_key: str | None = None
    max_results: int = 10
    search_engine_id: str | None = None
    url: str | None = None


class ToolOverride(Section, frozen=True, kw_only=True):
    """What the user says of tools whose name fits. None: nothing said. A cache of 0 is off."""

    timeout: float | None = None
    queue: str | None = None
    cache: float | None = None
    cache_per_user: bool | None = None
    max_bytes: int | None = None
    enabled: bool | None = None
    visible: bool | None = None


class ToolDefinition(Section, frozen=True, kw_only=True):
    """A tool declared in configuration, with the execution type under its present name."""

    name: str
    execution_type: ExecutionType
    description: str = ""
    input_schema: Mapping[str, Any] | None = None
    output_schema: Mapping[str, Any] | None = None
    category: ToolCategory = ToolCategory.CUSTOM
    visible: bool = True
    is_async: bool = False
    timeout: float | None = None
    execution: Mapping[str, Any] = {}
    queue: str | None = None
    cache: float | None = None
    cache_per_user: bool = False
    annotations: Annotations = NO_ANNOTATIONS
    tags: tuple[str, ...] = ()
    version: str | None = None
    enabled: bool = True
    expires_after: float | None = None
    """How long a pending call may wait; None: `Defaults.pending_call_ttl`."""
    pauses_run: bool = False
    """Written as `basic` without a timeout: the run itself waits for the result, however long it takes."""

    secrets = frozenset(("execution",))


class McpServerSettings(Section, frozen=True, kw_only=True):
    """How to reach one MCP server."""

    secrets = frozenset(("args", "env", "url", "headers", "auth", "extra"))

    name: str
    transport: Transport | None = None
    """None where the entry says neither a command nor a URL: it cannot start."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    cwd: Path | None = None
    url: str | None = None
    headers: Mapping[str, str] = {}
    auth: Mapping[str, Any] = {}
    enabled: bool = True
    required: bool = False
    tools_allowed: tuple[str, ...] | None = None
    tools_denied: tuple[str, ...] = ()
    queue: str | None = None
    cache: float | None = None
    request_timeout: float | None = None
    idle_timeout: float | None = None
    extra: Mapping[str, Any] = {}
    """Keys that mean nothing here, kept as they are."""


class RestToolSettings(Section, frozen=True, kw_only=True):
    """One request to one service. `${parameters.x}` is still in its templates."""

    secrets = frozenset(("url", "headers", "query", "body"))

    name: str
    url: str
    description: str = ""
    method: str = "GET"
    headers: Mapping[str, str] = {}
    query: Mapping[str, Any] = {}
    body: Any = None
    parameters_schema: Mapping[str, Any] | None = None
    output_schema: Mapping[str, Any] | None = None
    queue: str | None = None
    cache: float | None = None
    cache_per_user: bool = False
    timeout: float | None = None
    enabled: bool = True
    annotations: Annotations = NO_ANNOTATIONS
    tags: tuple[str, ...] = ()


class OpenApiSettings(Section, frozen=True, kw_only=True):
    """One service described by an OpenAPI document."""

    secrets = frozenset(("headers", "auth"))

    name: str
    spec: str
    """A URL, or the absolute path of a file."""
    base_url: str | None = None
    headers: Mapping[str, str] = {}
    auth: Mapping[str, Any] = {}
    tags: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    operations: tuple[str, ...] | None = None
    tools_allowed: tuple[str, ...] | None = None
    tools_denied: tuple[str, ...] = ()
    queue: str | None = None
    cache: float | None = None
    request_timeout: float | None = None
    enabled: bool = True
    required: bool = False


class ProviderSettings(Section, frozen=True, kw_only=True):
    """A provider that another package brings, or the user's own code."""

    secrets = frozenset(("settings",))

    name: str
    uses: str | None = None
    """None: the installed one of this name."""
    namespace: str | None = None
    """None: the provider's own, else the name."""
    settings: Mapping[str, Any] = {}
    enabled: bool = True
    required: bool = False
    tools_allowed: tuple[str, ...] | None = None
    tools_denied: tuple[str, ...] = ()
    queue: str | None = None
    cache: float | None = None
    request_timeout: float | None = None


class ToolSettings(Section, frozen=True, kw_only=True):
    """The `tools` section. A list there is its `definitions`."""

    timeout: float | None = None
    """As written; `Config.defaults` has what holds."""
    max_concurrent: int | None = None
    """As written; `Config.defaults` has what holds."""
    allowed_paths: tuple[Path, ...] | None = None
    allowed_env: tuple[str, ...] | None = None
    """None: a few harmless ones. An empty list allows none."""
    allowed_hosts: tuple[str, ...] | None = None
    memory_dir: Path | None = None
    session_dir: Path | None = None
    web_search: WebSearchSettings | None = None
    builtins: bool | tuple[str, ...] = True
    tools_allowed: tuple[str, ...] | None = None
    tools_denied: tuple[str, ...] = ()
    aliases: Mapping[str, str] = {}
    overrides: Mapping[str, ToolOverride] = {}
    definitions: Mapping[str, ToolDefinition] = {}
    mcp_servers: Mapping[str, McpServerSettings] = {}
    """As written; `Config.mcp_servers` has all of them."""


class RouterSettings(Section, frozen=True, kw_only=True):
    destinations: tuple[str, ...] = ()


class StorageSettings(Section, frozen=True, kw_only=True):
    secrets = frozenset(("url", "redis"))

    url: str | None = None
    """`postgresql://…`, or `sqlite:///` and an absolute path. None: SQLite in the state folder."""
    redis: str | None = None
    dir: Path | None = None
    """As written; `Config.state_dir` has what holds."""
    cache: CacheKind = "memory"


class ServerSettings(Section, frozen=True, kw_only=True):
    """The gateway: where it listens, whom it knows, how much it takes."""

    secrets = frozenset(("secret_key", "jwt_secret"))

    host: str = "127.0.0.1"
    port: int = 8787
    public_url: str | None = None
    """None: as it listens."""
    secret_key: str | None = None
    public_key: str | None = None
    jwt_secret: str | None = None
    jwks_url: str | None = None
    jwt_claim: str = "sub"
    jwt_audience: str | None = None
    jwt_issuer: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    max_streams: int = 10_000
    max_streams_per_caller: int = 2_000
    rate_limit: RateSetting | None = RateSetting(count=100, seconds=1.0)
    """Of one caller with a public key; None: no limit."""
    secret_rate_limit: RateSetting | None = None
    failed_login_limit: RateSetting | None = RateSetting(count=60, seconds=60.0)
    """Of one address."""
    max_concurrent_requests: int = 4_000
    heartbeat: float = 15.0
    stop_timeout: float = 10.0
    event_retention: float = 604_800.0
    retention: float = 2_592_000.0
    worker_grace: float = 3.0
    max_active_agents: int = 32
    """How many agents may be in a cycle at once."""


class WebhookSettings(Section, frozen=True, kw_only=True):
    """Where notifications are posted to."""

    secrets = frozenset(("url", "headers"))

    url: str
    headers: Mapping[str, str] = {}


class SmtpSettings(Section, frozen=True, kw_only=True):
    """The mail server that notifications go through."""

    secrets = frozenset(("username", "password"))

    host: str
    port: int | None = None
    """None: the usual one for `tls`: 25, 587 or 465."""
    sender: str
    to: tuple[str, ...]
    allowed_recipients: tuple[str, ...] = ()
    """Globs of addresses that an agent may choose itself, besides `to`."""
    username: str | None = None
    password: str | None = None
    tls: SmtpTls = "starttls"


class NotificationSettings(Section, frozen=True, kw_only=True):
    """How `send_notification` reaches people. Neither: it cannot."""

    webhook: WebhookSettings | None = None
    smtp: SmtpSettings | None = None


class EmbeddingSettings(Section, frozen=True, kw_only=True):
    """Who tells how close the meanings of texts are, for `search_knowledge`."""

    secrets = frozenset(("api_key", "headers"))

    model: str
    base_url: str | None = None
    """None: the provider's own address."""
    api_key: str | None = None
    """None: the provider's own variable."""
    headers: Mapping[str, str] = {}


class AgentModelSettings(Section, frozen=True, kw_only=True):
    """Which model an agent thinks with. Without a provider: the one whose key is in the environment."""

    secrets = frozenset(("api_key", "headers"))

    provider: str | None = None
    name: str | None = None
    """None: the provider's usual one."""
    temperature: float | None = None
    max_output_tokens: int | None = None
    reasoning: str | None = None
    base_url: str | None = None
    api_key: str | None = None
    """None: the provider's own variable."""
    headers: Mapping[str, str] = {}
    timeout: float = 600.0
    retries: int = 4


class AgentLoopSettings(Section, frozen=True, kw_only=True):
    """How the model and its tools take turns."""

    max_steps: int = 20
    tool_choice: str = "auto"
    """`auto`, `required`, `none`, or the name of a tool."""
    max_tool_calls_per_turn: int | None = None
    """None: `Defaults.max_tool_calls_per_turn`."""
    review: Review = "rules"
    """Who decides after a failed tool whether to go on."""


class ConsciousnessSettings(Section, frozen=True, kw_only=True):
    """How much of its past an agent has in mind."""

    max_tokens: int = 100_000
    min_recent_cycles: int = 3


class AgentLimits(Section, frozen=True, kw_only=True):
    """What an agent may not exceed."""

    max_agent_turns: int = 6
    """How often agents may answer one another before a person says something."""
    cycles_per_minute: int = 60
    max_tokens: int | None = None
    """Of one run, with those of the agents that it calls. None: any number."""
    max_cost: float | None = None
    """In US dollars, of one run."""
    timeout: float | None = None
    """Seconds for one run."""
    max_depth: int = 8
    """How deep agents may call agents."""
    inbox_batch: int = 50
    """How many events one cycle takes."""


class AgentSpec(Section, frozen=True, kw_only=True):
    """An agent as configuration describes it."""

    name: str
    description: str = ""
    system: str = ""
    """Its instructions."""
    version: str | None = None
    model: AgentModelSettings = AgentModelSettings()
    loop: AgentLoopSettings = AgentLoopSettings()
    consciousness: ConsciousnessSettings = ConsciousnessSettings()
    limits: AgentLimits = AgentLimits()
    router: RouterSettings = RouterSettings()
    agents: tuple[str, ...] = ()
    """Agents that it may call."""
    spaces: tuple[str, ...] = ()
    """Names of the spaces that it is put into at the start."""
    knowledge: tuple[Path, ...] = ()
    """Files and folders that `search_knowledge` looks into."""
    notifications: NotificationSettings = NotificationSettings()
    runtime: Mapping[str, Any] = {}
    """As written; it means nothing here."""
    config: Config | None = None
    """What a toolspace of its own is assembled from. None: it says nothing of tools."""
    path: Path | None = None
    """The file that describes it."""

    @property
    def has_own_tools(self) -> bool:
        """Whether it has tools, or settings of tools, that are its alone."""
        return self.config is not None
