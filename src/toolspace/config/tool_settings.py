"""Every setting there is: its key, what it takes, its default and its effect. The one table of them.

Loading reads by it, the environment overrides look into it, and `describe` makes the documentation of it. To
add a setting, add its field to `model` and its row here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from toolspace.config import agent_settings, value_types
from toolspace.config.document import KeyPath, format_value
from toolspace.config.entry_readers import EXECUTION_TYPES, TRANSPORT_ALIASES, McpServerType, ToolDefinitionType
from toolspace.config.model import (
    DefaultSettings,
    McpServerSettings,
    OpenApiSettings,
    ProviderSettings,
    QueueSettings,
    RestToolSettings,
    ServerSettings,
    StorageSettings,
    ToolDefinition,
    ToolOverride,
    ToolSettings,
    WebSearchSettings,
)
from toolspace.config.reader import (
    AlreadyReported,
    InvalidValue,
    SectionType,
    Setting,
    Value,
    ValueType,
    list_named_values,
    read_named_entries,
    read_value,
)
from toolspace.core.tool import Annotations, ToolCategory


def _named(kind: ValueType[Any], what: str) -> ValueType[dict[str, Any]]:
    def read(value: Value) -> dict[str, Any]:
        return read_named_entries(kind, value, what=what)

    return ValueType(f"{what} by name", f"a mapping of {what} by name", read, fits_variable=False)


# Rows that several sections share.
_queue = Setting("queue", value_types.string, "The queue that its calls go through.")
_cache = Setting("cache", value_types.cache_duration, "How long a result may answer equal calls; 0 or false: never.")
_cache_per_user = Setting(
    "cachePerUser", value_types.boolean, "Keep the cached results of each user apart.", default="false"
)
_timeout = Setting("timeout", value_types.duration, "How long one call may take, if not `defaults.toolTimeout`.")
_enabled = Setting("enabled", value_types.boolean, "Whether it is there at all.", default="true")
_required = Setting("required", value_types.boolean, "Refuse to start without it.", default="false")
_tags = Setting("tags", value_types.strings, "Words to find it by.")
_headers = Setting("headers", value_types.string_map, "HTTP headers to send.", secret=True)
_request_timeout = Setting(
    "requestTimeoutMs",
    value_types.duration,
    "How long one call of its tools may take, if not `defaults.toolTimeout`.",
    attribute="request_timeout",
    aliases=("requestTimeout",),
)
_tools_allowed = Setting(
    "toolsAllowed",
    value_types.globs,
    "Only these of its tools are offered.",
    aliases=("allowedTools", "includeTools"),
)
_tools_denied = Setting(
    "toolsDenied",
    value_types.globs,
    "These of its tools are not offered, even if allowed.",
    aliases=("deniedTools", "excludeTools"),
)

_annotations = Setting(
    "annotations",
    SectionType(
        Annotations,
        Setting("readOnly", value_types.boolean, "It changes nothing.", aliases=("readOnlyHint",)),
        Setting("destructive", value_types.boolean, "What it changes may be lost.", aliases=("destructiveHint",)),
        Setting("idempotent", value_types.boolean, "Twice does no more than once.", aliases=("idempotentHint",)),
        Setting("openWorld", value_types.boolean, "It reaches beyond this system.", aliases=("openWorldHint",)),
        ignored=lambda key: key == "title",
    ),
    "What it does to the world: `readOnly`, `destructive`, `idempotent`, `openWorld`, each true or false.",
)

DEFAULTS = SectionType(
    DefaultSettings,
    Setting("toolTimeout", value_types.duration, "How long one call may take.", default="30s"),
    Setting(
        "toolResponseMaxBytes",
        value_types.integer(1),
        "A larger result is stored, and the model gets a handle and a preview.",
        default="100000",
    ),
    Setting("toolOutputTtl", value_types.duration, "How long stored results are kept.", default="1d"),
    Setting(
        "pendingCallTtl",
        value_types.duration,
        "How long a call may wait for a worker or a person; then it expires, and its agent is told.",
        default="7d",
    ),
    Setting(
        "maxToolCallsPerTurn",
        value_types.integer(1, nullable=True),
        "How many calls a model may make in one turn; null: any number.",
        default="null",
    ),
    Setting(
        "maxConcurrentTools",
        value_types.integer(1, nullable=True),
        "How many calls of one run may be under way at once; null: any number.",
        default="null",
    ),
    Setting(
        "contextWindow",
        value_types.integer(1, nullable=True),
        "How many tokens of results fit into one run; null: no budget.",
        default="null",
    ),
    Setting(
        "toolSearchThreshold",
        value_types.integer(0, nullable=True),
        "Above so many tokens of definitions the model gets a search tool instead of them all; 0: always, null: never.",
        default="20000",
    ),
    Setting("mcpInitConcurrency", value_types.integer(1), "How many MCP servers start at once.", default="32"),
    Setting("traceMCP", value_types.boolean, "Log every message to and from MCP servers.", default="false"),
)

QUEUE = SectionType(
    QueueSettings,
    Setting("concurrent", value_types.integer(1), "How many calls run at once.", required=True),
    Setting("rate", value_types.rate, "How many calls may begin in a second, minute or hour."),
    Setting("maxWaiting", value_types.integer(0), "How many calls may wait; one more fails with `limit_exceeded`."),
    Setting("waitTimeout", value_types.duration, "How long a call may wait for its turn."),
)

WEB_SEARCH = SectionType(
    WebSearchSettings,
    Setting(
        "provider",
        value_types.choice("tavily", "google", "bing", "duckduckgo"),
        "The engine that is asked.",
        default="duckduckgo",
    ),
    Setting("apiKey", value_types.string, "The key of your account there.", secret=True),
    Setting(
        "maxResults",
        value_types.integer(1),
        "How many results a search gives at most, and if the model does not say.",
        default="10",
    ),
    Setting("searchEngineId", value_types.scalar_string, "Google's id of your search engine.", aliases=("cx",)),
    Setting("url", value_types.string, "Another address of the engine's API."),
)

OVERRIDE = SectionType(
    ToolOverride,
    _timeout,
    _queue,
    _cache,
    Setting("cachePerUser", value_types.boolean, "Keep the cached results of each user apart."),
    Setting(
        "maxBytes", value_types.integer(1), "A larger result is stored; without it `defaults.toolResponseMaxBytes`."
    ),
    Setting("enabled", value_types.boolean, "Whether it is there at all."),
    Setting("visible", value_types.boolean, "Whether its calls show in the active space."),
)

DEFINITION = SectionType(
    ToolDefinition,
    Setting("description", value_types.string, "What the model reads about it."),
    Setting(
        "inputSchema",
        value_types.schema,
        "What it takes; given to the model unchanged.",
        aliases=("parametersSchema",),
    ),
    Setting("outputSchema", value_types.mapping, "What it answers."),
    Setting("category", value_types.choice(*ToolCategory), "What sort of tool it is.", default="custom"),
    Setting("executionType", value_types.choice(*EXECUTION_TYPES), "Who executes it.", required=True),
    Setting("visible", value_types.boolean, "Whether its calls show in the active space.", default="true"),
    Setting("isAsync", value_types.boolean, "Answer `pending` at once; the result comes later.", default="false"),
    _timeout,
    Setting(
        "expiresAfter",
        value_types.duration,
        "How long a call may wait for whoever executes it, if not `defaults.pendingCallTtl`.",
    ),
    Setting("execution", value_types.mapping, "How it is executed; the keys depend on the type.", secret=True),
    _queue,
    _cache,
    _cache_per_user,
    _annotations,
    _tags,
    Setting("version", value_types.scalar_string, "Which version of the tool this is."),
    _enabled,
    named=True,
)


def _auth(value: Value) -> Any:
    if value.data == "oauth":
        return {"type": "authorization_code"}
    if not isinstance(value.data, dict):
        raise InvalidValue("`oauth`, or a mapping with type, clientId and so on")
    return value.mapping()


_oauth = ValueType(
    "`oauth` or mapping", "`oauth`, or a mapping with type, clientId and so on", _auth, fits_variable=False
)

MCP_SERVER = SectionType(
    McpServerSettings,
    Setting(
        "type",
        value_types.choice("stdio", "http", "sse", "websocket", aliases=TRANSPORT_ALIASES),
        "How to reach it; without it the command or the URL says.",
        attribute="transport",
        aliases=("transport",),
    ),
    Setting("command", value_types.string, "The program to start."),
    Setting("args", value_types.strings, "Its arguments.", secret=True),
    Setting("env", value_types.string_map, "Variables for it, beside the harmless ones of your own.", secret=True),
    Setting("cwd", value_types.path, "The folder it starts in."),
    Setting("url", value_types.string, "Where it listens.", aliases=("serverUrl", "httpUrl"), secret=True),
    _headers,
    Setting(
        "auth",
        _oauth,
        "OAuth: `oauth` for a login in the browser, or a mapping with `type` (`authorization_code` or "
        "`client_credentials`), `clientId`, `clientSecret`, `scope`.",
        secret=True,
    ),
    _enabled,
    _required,
    _tools_allowed,
    _tools_denied,
    _queue,
    _cache,
    _request_timeout,
    Setting("idleTimeout", value_types.duration, "Stop it when unused for so long; the next call starts it again."),
    extra="extra",
    named=True,
)

REST_TOOL = SectionType(
    RestToolSettings,
    Setting("description", value_types.string, "What the model reads about it."),
    Setting(
        "method",
        value_types.choice("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"),
        "The HTTP method.",
        default="GET",
    ),
    Setting("url", value_types.string, "Where to; `${parameters.x}` fills in an argument.", required=True, secret=True),
    _headers,
    Setting("query", value_types.mapping, "Query parameters to send.", secret=True),
    Setting("body", value_types.any_value, "The body to send, as data or as text.", secret=True),
    Setting("parametersSchema", value_types.schema, "What the tool takes.", aliases=("inputSchema",)),
    Setting("outputSchema", value_types.mapping, "What it answers."),
    _queue,
    _cache,
    _cache_per_user,
    _timeout,
    _enabled,
    _annotations,
    _tags,
    named=True,
)

OPENAPI = SectionType(
    OpenApiSettings,
    Setting(
        "spec",
        value_types.url_or_path,
        "The document: a URL or a file, JSON or YAML.",
        required=True,
        aliases=("url", "path"),
    ),
    Setting("baseUrl", value_types.string, "Where the service is, if not where the document says."),
    _headers,
    Setting("auth", value_types.mapping, "Credentials by the name of the document's security scheme.", secret=True),
    Setting("tags", value_types.globs, "Only operations with one of these tags."),
    Setting("methods", value_types.strings, "Only operations of these HTTP methods."),
    Setting("paths", value_types.globs, "Only operations below these paths."),
    Setting("operations", value_types.globs, "Only these operations, by `operationId`."),
    _tools_allowed,
    _tools_denied,
    _queue,
    _cache,
    _request_timeout,
    _enabled,
    _required,
    named=True,
    shorthand="spec",
)


PROVIDER = SectionType(
    ProviderSettings,
    Setting(
        "uses",
        value_types.name,
        "The provider: the name under which an installed package offers it, `package.module:Name`, or "
        "`./file.py:Name`; without it the name of the entry.",
    ),
    Setting(
        "namespace",
        value_types.name,
        "The first half of its tools' names; without it the provider's own, else the name of the entry.",
    ),
    Setting("settings", value_types.mapping, "What the provider is made with: its own settings, by name.", secret=True),
    _enabled,
    _required,
    _tools_allowed,
    _tools_denied,
    _queue,
    _cache,
    _request_timeout,
    named=True,
    shorthand="uses",
)


def _servers(value: Value) -> dict[str, McpServerSettings]:
    """MCP servers, whichever of the places for them they stand in: they are all of one list."""
    origins = value.context.origins
    found: dict[str, McpServerSettings] = {}
    for name, inner in list_named_values(value.renamed("mcpServers"), what="MCP servers"):
        if isinstance(first := origins.get(inner.key), tuple):
            inner.report(
                f"the name {format_value(name)} is used twice, first in {value.context.document.format_location(first)}"
            )
            continue
        with suppress(AlreadyReported):
            found[name] = read_value(_server, inner)
    return found


_server = McpServerType(MCP_SERVER)
mcp_servers: ValueType[dict[str, McpServerSettings]] = ValueType(
    "MCP servers by name", "a mapping of MCP servers by name", _servers, fits_variable=False
)

_definitions = _named(ToolDefinitionType(DEFINITION), "tools")

TOOLS = SectionType(
    ToolSettings,
    Setting(
        "timeout",
        value_types.duration,
        "The same as `defaults.toolTimeout`, which wins if both are given.",
        environment=False,
    ),
    Setting(
        "maxConcurrent",
        value_types.integer(1),
        "The same as `defaults.maxConcurrentTools`, which wins if both are given.",
        environment=False,
    ),
    Setting(
        "allowedPaths",
        value_types.paths,
        "The only places that the file tools may touch; without it the folder that Toolspace runs in.",
    ),
    Setting(
        "allowedEnv",
        value_types.globs,
        "The variables that `get_env` and `set_env` may touch; without it a few harmless ones such as `LANG`.",
    ),
    Setting("allowedHosts", value_types.globs, "Private addresses that the network tools may reach all the same."),
    Setting("memoryDir", value_types.path, "Where the memory tools keep their files."),
    Setting("sessionDir", value_types.path, "Where archived sessions lie."),
    Setting("webSearch", WEB_SEARCH, "The search engine behind `web_search`."),
    Setting("builtins", value_types.boolean_or_globs, "Which built-in tools are there.", default="true"),
    Setting("toolsAllowed", value_types.globs, "Only these local tools are offered.", aliases=("allowedTools",)),
    Setting(
        "toolsDenied",
        value_types.globs,
        "These local tools are not offered, even if allowed.",
        aliases=("deniedTools",),
    ),
    Setting("aliases", value_types.string_map, "Other names for tools: alias to name."),
    Setting("overrides", _named(OVERRIDE, "overrides"), "Settings for tools by name or glob."),
    Setting("definitions", _definitions, "Tools declared here, each with a `name`."),
    Setting("mcpServers", mcp_servers, "The same as the section `mcpServers`."),
)

STORAGE = SectionType(
    StorageSettings,
    Setting(
        "url",
        value_types.database_url,
        "The gateway's database: `postgresql://…` for many replicas, or a SQLite file; without it "
        "`toolspace.db` in `dir`.",
        secret=True,
    ),
    Setting("redis", value_types.string, "A Redis for events, queues and cache over replicas.", secret=True),
    Setting(
        "dir",
        value_types.path,
        "Where state is kept; without it `$XDG_STATE_HOME/toolspace`, else `~/.local/state/toolspace`.",
    ),
    Setting("cache", value_types.choice("memory", "disk"), "Where cached results are kept.", default="memory"),
)

SERVER = SectionType(
    ServerSettings,
    Setting("host", value_types.string, "The address that the gateway listens on.", default="127.0.0.1"),
    Setting("port", value_types.integer(0, 65535), "Its port; 0 takes a free one.", default="8787"),
    Setting("publicUrl", value_types.http_url, "Where clients reach it, if a proxy stands before it."),
    Setting(
        "secretKey",
        value_types.secret_string(16),
        "A secret key that is accepted beside those that were made; it is never stored.",
        secret=True,
    ),
    Setting("publicKey", value_types.secret_string(16), "A public key that is accepted beside those that were made."),
    Setting(
        "jwtSecret",
        value_types.secret_string(32),
        "What tokens of entities are signed with; without it one is made on the first start.",
        secret=True,
    ),
    Setting("jwksUrl", value_types.http_url, "Where the keys of another issuer of tokens are published."),
    Setting("jwtClaim", value_types.string, "The claim of a token that names the entity.", default="sub"),
    Setting("jwtAudience", value_types.string, "Take only tokens that are meant for this audience."),
    Setting("jwtIssuer", value_types.string, "Take only tokens of this issuer."),
    Setting(
        "allowedHosts",
        value_types.strings,
        "Names under which it answers, beside those of this machine's loopback and `publicUrl`.",
    ),
    Setting(
        "allowedOrigins", value_types.strings, "Origins of web pages that browsers may call it from, beside its own."
    ),
    Setting("maxBodyBytes", value_types.integer(1), "A larger request is refused with 413.", default="4194304"),
    Setting(
        "maxStreams", value_types.integer(1), "How many event streams may be open; one more gets 503.", default="10000"
    ),
    Setting(
        "maxStreamsPerCaller",
        value_types.integer(1),
        "How many of them one key or entity may have; one more gets 429.",
        default="2000",
    ),
    Setting(
        "rateLimit",
        value_types.nullable(value_types.rate),
        "How many requests an entity with a public key may make; null: any number.",
        default="100/second",
    ),
    Setting(
        "secretRateLimit",
        value_types.nullable(value_types.rate),
        "How many requests a secret or tool key may make; null: any number.",
        default="null",
    ),
    Setting(
        "failedLoginLimit",
        value_types.nullable(value_types.rate),
        "How often one address may come with wrong credentials; null: any number of times.",
        default="60/minute",
    ),
    Setting(
        "maxConcurrentRequests",
        value_types.integer(1),
        "How many requests may be under way, streams aside; one more gets 503.",
        default="4000",
    ),
    Setting(
        "heartbeat",
        value_types.duration,
        "How often a stream on which nothing happens says that it lives.",
        default="15s",
    ),
    Setting(
        "stopTimeout", value_types.duration, "How long running calls may take to end when it stops.", default="10s"
    ),
    Setting(
        "eventRetention",
        value_types.duration,
        "How long events of streams are kept for readers that return.",
        default="7d",
    ),
    Setting(
        "retention",
        value_types.duration,
        "How long calls, runs and tasks that have ended and inbox events that are done are kept; messages stay.",
        default="30d",
    ),
    Setting(
        "workerGrace",
        value_types.duration,
        "How long a worker that lost its connection may take to return before others get its calls.",
        default="3s",
    ),
    Setting("maxActiveAgents", value_types.integer(1), "How many agents may be in a cycle at once.", default="32"),
)


def _tools(value: Value) -> ToolSettings:
    if not isinstance(value.data, list):
        return TOOLS.read(value)
    # A list is the definitions: it stands where `tools` stands, and there are no other settings in the file.
    found = _definitions.read(value.renamed(*value.key, "definitions"))
    rest = TOOLS.read(Value({}, value.context, value.path, value.key))
    return msgspec.structs.replace(rest, definitions=found)


tools = ValueType(
    "mapping of settings, or list of tools",
    "a mapping of settings or a list of tools",
    _tools,
    fits_variable=False,
    has_settings=True,
)
queues = _named(QUEUE, "queues")
rest_tools = _named(REST_TOOL, "REST tools")
openapi = _named(OPENAPI, "services")
providers = _named(PROVIDER, "providers")
functions = value_types.list_of(
    value_types.string, "string or list of strings", 'a list such as ["./tools.py", "package.module:name"]'
)

SECTIONS: Mapping[str, SectionType[Any]] = {
    "defaults": DEFAULTS,
    "queues.<name>": QUEUE,
    "tools": TOOLS,
    "tools.webSearch": WEB_SEARCH,
    "tools.overrides.<name>": OVERRIDE,
    "tools.definitions.<name>": DEFINITION,
    "mcpServers.<name>": MCP_SERVER,
    "restTools.<name>": REST_TOOL,
    "openapi.<name>": OPENAPI,
    "providers.<name>": PROVIDER,
    **agent_settings.SECTIONS,
    "storage": STORAGE,
    "server": SERVER,
}
"""The section of every record, as the documentation names it."""


SINGLE = (
    Setting("functions", functions, "Python tools: files, modules, or `module:name`."),
    Setting(
        "demo",
        value_types.boolean,
        "Where no agent is configured, have one to try things out with.",
        default="true",
    ),
)
"""The settings that are sections by themselves."""


def single_settings() -> Iterator[tuple[KeyPath, Setting]]:
    """The settings that stand at one fixed place and hold one value: those that a variable can override."""
    for section in _OVERRIDABLE:
        for setting in SECTIONS[section].settings:
            if setting.kind.fits_variable and setting.environment:
                yield (*section.split("."), setting.key), setting
    for setting in SINGLE:
        yield (setting.key,), setting


_OVERRIDABLE = (
    "defaults",
    "tools",
    "tools.webSearch",
    "notifications.webhook",
    "notifications.smtp",
    "embeddings",
    "storage",
    "server",
)
