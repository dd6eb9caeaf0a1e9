"""Every setting there is: its key, what it takes, its default and its effect. The one table of them.

Loading reads by it, the environment overrides look into it, and `describe` makes the documentation of it. To
add a setting, add its field to `model` and its row here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from toolspace.config import agentsettings, kinds
from toolspace.config.document import KeyPath, shown
from toolspace.config.model import (
    Defaults,
    McpServer,
    OpenApi,
    Override,
    Provider,
    Queue,
    RestTool,
    Server,
    Storage,
    ToolDefinition,
    ToolSettings,
    WebSearch,
)
from toolspace.config.reading import Kind, Record, Reported, Setting, Value, Wrong, attempt, entries, named_values
from toolspace.config.shapes import EXECUTION_TYPES, TRANSPORT_ALIASES, DefinitionKind, ServerKind
from toolspace.core.tool import Annotations, ToolCategory


def _named(kind: Kind[Any], what: str) -> Kind[dict[str, Any]]:
    def read(value: Value) -> dict[str, Any]:
        return entries(kind, value, what=what)

    return Kind(f"{what} by name", f"a mapping of {what} by name", read, single=False)


# Rows that several sections share.
_queue = Setting("queue", kinds.text, "The queue that its calls go through.")
_cache = Setting("cache", kinds.cache, "How long a result may answer equal calls; 0 or false: never.")
_cache_per_user = Setting("cachePerUser", kinds.flag, "Keep the cached results of each user apart.", default="false")
_timeout = Setting("timeout", kinds.duration, "How long one call may take, if not `defaults.toolTimeout`.")
_enabled = Setting("enabled", kinds.flag, "Whether it is there at all.", default="true")
_required = Setting("required", kinds.flag, "Refuse to start without it.", default="false")
_tags = Setting("tags", kinds.words, "Words to find it by.")
_headers = Setting("headers", kinds.word_map, "HTTP headers to send.", secret=True)
_request_timeout = Setting(
    "requestTimeoutMs",
    kinds.duration,
    "How long one call of its tools may take, if not `defaults.toolTimeout`.",
    attribute="request_timeout",
    aliases=("requestTimeout",),
)
_tools_allowed = Setting(
    "toolsAllowed",
    kinds.globs,
    "Only these of its tools are offered.",
    aliases=("allowedTools", "includeTools"),
)
_tools_denied = Setting(
    "toolsDenied",
    kinds.globs,
    "These of its tools are not offered, even if allowed.",
    aliases=("deniedTools", "excludeTools"),
)

_annotations = Setting(
    "annotations",
    Record(
        Annotations,
        Setting("readOnly", kinds.flag, "It changes nothing.", aliases=("readOnlyHint",)),
        Setting("destructive", kinds.flag, "What it changes may be lost.", aliases=("destructiveHint",)),
        Setting("idempotent", kinds.flag, "Twice does no more than once.", aliases=("idempotentHint",)),
        Setting("openWorld", kinds.flag, "It reaches beyond this system.", aliases=("openWorldHint",)),
        ignored=lambda key: key == "title",
    ),
    "What it does to the world: `readOnly`, `destructive`, `idempotent`, `openWorld`, each true or false.",
)

DEFAULTS = Record(
    Defaults,
    Setting("toolTimeout", kinds.duration, "How long one call may take.", default="30s"),
    Setting(
        "toolResponseMaxBytes",
        kinds.integer(1),
        "A larger result is stored, and the model gets a handle and a preview.",
        default="100000",
    ),
    Setting("toolOutputTtl", kinds.duration, "How long stored results are kept.", default="1d"),
    Setting(
        "pendingCallTtl",
        kinds.duration,
        "How long a call may wait for a worker or a person; then it expires, and its agent is told.",
        default="7d",
    ),
    Setting(
        "maxToolCallsPerTurn",
        kinds.integer(1, nullable=True),
        "How many calls a model may make in one turn; null: any number.",
        default="null",
    ),
    Setting(
        "maxConcurrentTools",
        kinds.integer(1, nullable=True),
        "How many calls of one run may be under way at once; null: any number.",
        default="null",
    ),
    Setting(
        "contextWindow",
        kinds.integer(1, nullable=True),
        "How many tokens of results fit into one run; null: no budget.",
        default="null",
    ),
    Setting(
        "toolSearchThreshold",
        kinds.integer(0, nullable=True),
        "Above so many tokens of definitions the model gets a search tool instead of them all; 0: always, null: never.",
        default="20000",
    ),
    Setting("mcpInitConcurrency", kinds.integer(1), "How many MCP servers start at once.", default="32"),
    Setting("traceMCP", kinds.flag, "Log every message to and from MCP servers.", default="false"),
)

QUEUE = Record(
    Queue,
    Setting("concurrent", kinds.integer(1), "How many calls run at once.", required=True),
    Setting("rate", kinds.rate, "How many calls may begin in a second, minute or hour."),
    Setting("maxWaiting", kinds.integer(0), "How many calls may wait; one more fails with `limit_exceeded`."),
    Setting("waitTimeout", kinds.duration, "How long a call may wait for its turn."),
)

WEB_SEARCH = Record(
    WebSearch,
    Setting(
        "provider",
        kinds.choice("tavily", "google", "bing", "duckduckgo"),
        "The engine that is asked.",
        default="duckduckgo",
    ),
    Setting("apiKey", kinds.text, "The key of your account there.", secret=True),
    Setting(
        "maxResults",
        kinds.integer(1),
        "How many results a search gives at most, and if the model does not say.",
        default="10",
    ),
    Setting("searchEngineId", kinds.word, "Google's id of your search engine.", aliases=("cx",)),
    Setting("url", kinds.text, "Another address of the engine's API."),
)

OVERRIDE = Record(
    Override,
    _timeout,
    _queue,
    _cache,
    Setting("cachePerUser", kinds.flag, "Keep the cached results of each user apart."),
    Setting("maxBytes", kinds.integer(1), "A larger result is stored; without it `defaults.toolResponseMaxBytes`."),
    Setting("enabled", kinds.flag, "Whether it is there at all."),
    Setting("visible", kinds.flag, "Whether its calls show in the active space."),
)

DEFINITION = Record(
    ToolDefinition,
    Setting("description", kinds.text, "What the model reads about it."),
    Setting(
        "inputSchema",
        kinds.schema,
        "What it takes; given to the model unchanged.",
        aliases=("parametersSchema",),
    ),
    Setting("outputSchema", kinds.mapping, "What it answers."),
    Setting("category", kinds.choice(*ToolCategory), "What sort of tool it is.", default="custom"),
    Setting("executionType", kinds.choice(*EXECUTION_TYPES), "Who executes it.", required=True),
    Setting("visible", kinds.flag, "Whether its calls show in the active space.", default="true"),
    Setting("isAsync", kinds.flag, "Answer `pending` at once; the result comes later.", default="false"),
    _timeout,
    Setting(
        "expiresAfter",
        kinds.duration,
        "How long a call may wait for whoever executes it, if not `defaults.pendingCallTtl`.",
    ),
    Setting("execution", kinds.mapping, "How it is executed; the keys depend on the type.", secret=True),
    _queue,
    _cache,
    _cache_per_user,
    _annotations,
    _tags,
    Setting("version", kinds.word, "Which version of the tool this is."),
    _enabled,
    named=True,
)


def _auth(value: Value) -> Any:
    if value.data == "oauth":
        return {"type": "authorization_code"}
    if not isinstance(value.data, dict):
        raise Wrong("`oauth`, or a mapping with type, clientId and so on")
    return value.mapping()


_oauth = Kind("`oauth` or mapping", "`oauth`, or a mapping with type, clientId and so on", _auth, single=False)

MCP_SERVER = Record(
    McpServer,
    Setting(
        "type",
        kinds.choice("stdio", "http", "sse", "websocket", aliases=TRANSPORT_ALIASES),
        "How to reach it; without it the command or the URL says.",
        attribute="transport",
        aliases=("transport",),
    ),
    Setting("command", kinds.text, "The program to start."),
    Setting("args", kinds.words, "Its arguments.", secret=True),
    Setting("env", kinds.word_map, "Variables for it, beside the harmless ones of your own.", secret=True),
    Setting("cwd", kinds.path, "The folder it starts in."),
    Setting("url", kinds.text, "Where it listens.", aliases=("serverUrl", "httpUrl"), secret=True),
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
    Setting("idleTimeout", kinds.duration, "Stop it when unused for so long; the next call starts it again."),
    extra="extra",
    named=True,
)

REST_TOOL = Record(
    RestTool,
    Setting("description", kinds.text, "What the model reads about it."),
    Setting(
        "method",
        kinds.choice("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"),
        "The HTTP method.",
        default="GET",
    ),
    Setting("url", kinds.text, "Where to; `${parameters.x}` fills in an argument.", required=True, secret=True),
    _headers,
    Setting("query", kinds.mapping, "Query parameters to send.", secret=True),
    Setting("body", kinds.anything, "The body to send, as data or as text.", secret=True),
    Setting("parametersSchema", kinds.schema, "What the tool takes.", aliases=("inputSchema",)),
    Setting("outputSchema", kinds.mapping, "What it answers."),
    _queue,
    _cache,
    _cache_per_user,
    _timeout,
    _enabled,
    _annotations,
    _tags,
    named=True,
)

OPENAPI = Record(
    OpenApi,
    Setting(
        "spec",
        kinds.location,
        "The document: a URL or a file, JSON or YAML.",
        required=True,
        aliases=("url", "path"),
    ),
    Setting("baseUrl", kinds.text, "Where the service is, if not where the document says."),
    _headers,
    Setting("auth", kinds.mapping, "Credentials by the name of the document's security scheme.", secret=True),
    Setting("tags", kinds.globs, "Only operations with one of these tags."),
    Setting("methods", kinds.words, "Only operations of these HTTP methods."),
    Setting("paths", kinds.globs, "Only operations below these paths."),
    Setting("operations", kinds.globs, "Only these operations, by `operationId`."),
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


PROVIDER = Record(
    Provider,
    Setting(
        "uses",
        kinds.label,
        "The provider: the name under which an installed package offers it, `package.module:Name`, or "
        "`./file.py:Name`; without it the name of the entry.",
    ),
    Setting(
        "namespace",
        kinds.label,
        "The first half of its tools' names; without it the provider's own, else the name of the entry.",
    ),
    Setting("settings", kinds.mapping, "What the provider is made with: its own settings, by name.", secret=True),
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


def _servers(value: Value) -> dict[str, McpServer]:
    """MCP servers, whichever of the places for them they stand in: they are all of one list."""
    origins = value.session.origins
    found: dict[str, McpServer] = {}
    for name, inner in named_values(value.renamed("mcpServers"), what="MCP servers"):
        if isinstance(first := origins.get(inner.name), tuple):
            inner.note(f"the name {shown(name)} is given twice, first in {value.session.document.place(first)}")
            continue
        with suppress(Reported):
            found[name] = attempt(_server, inner)
    return found


_server = ServerKind(MCP_SERVER)
mcp_servers: Kind[dict[str, McpServer]] = Kind(
    "MCP servers by name", "a mapping of MCP servers by name", _servers, single=False
)

_definitions = _named(DefinitionKind(DEFINITION), "tools")

TOOLS = Record(
    ToolSettings,
    Setting(
        "timeout",
        kinds.duration,
        "The same as `defaults.toolTimeout`, which wins if both are given.",
        environment=False,
    ),
    Setting(
        "maxConcurrent",
        kinds.integer(1),
        "The same as `defaults.maxConcurrentTools`, which wins if both are given.",
        environment=False,
    ),
    Setting(
        "allowedPaths",
        kinds.paths,
        "The only places that the file tools may touch; without it the folder that Toolspace runs in.",
    ),
    Setting(
        "allowedEnv",
        kinds.globs,
        "The variables that `get_env` and `set_env` may touch; without it a few harmless ones such as `LANG`.",
    ),
    Setting("allowedHosts", kinds.globs, "Private addresses that the network tools may reach all the same."),
    Setting("memoryDir", kinds.path, "Where the memory tools keep their files."),
    Setting("sessionDir", kinds.path, "Where archived sessions lie."),
    Setting("webSearch", WEB_SEARCH, "The search engine behind `web_search`."),
    Setting("builtins", kinds.names_or_flag, "Which built-in tools are there.", default="true"),
    Setting("toolsAllowed", kinds.globs, "Only these local tools are offered.", aliases=("allowedTools",)),
    Setting(
        "toolsDenied",
        kinds.globs,
        "These local tools are not offered, even if allowed.",
        aliases=("deniedTools",),
    ),
    Setting("aliases", kinds.word_map, "Other names for tools: alias to name."),
    Setting("overrides", _named(OVERRIDE, "overrides"), "Settings for tools by name or glob."),
    Setting("definitions", _definitions, "Tools declared here, each with a `name`."),
    Setting("mcpServers", mcp_servers, "The same as the section `mcpServers`."),
)

STORAGE = Record(
    Storage,
    Setting(
        "url",
        kinds.database,
        "The gateway's database: `postgresql://…` for many replicas, or a SQLite file; without it "
        "`toolspace.db` in `dir`.",
        secret=True,
    ),
    Setting("redis", kinds.text, "A Redis for events, queues and cache over replicas.", secret=True),
    Setting(
        "dir",
        kinds.path,
        "Where state is kept; without it `$XDG_STATE_HOME/toolspace`, else `~/.local/state/toolspace`.",
    ),
    Setting("cache", kinds.choice("memory", "disk"), "Where cached results are kept.", default="memory"),
)

SERVER = Record(
    Server,
    Setting("host", kinds.text, "The address that the gateway listens on.", default="127.0.0.1"),
    Setting("port", kinds.integer(0, 65535), "Its port; 0 takes a free one.", default="8787"),
    Setting("publicUrl", kinds.web_address, "Where clients reach it, if a proxy stands before it."),
    Setting(
        "secretKey",
        kinds.secret_text(16),
        "A secret key that is accepted beside those that were made; it is never stored.",
        secret=True,
    ),
    Setting("publicKey", kinds.secret_text(16), "A public key that is accepted beside those that were made."),
    Setting(
        "jwtSecret",
        kinds.secret_text(32),
        "What tokens of entities are signed with; without it one is made on the first start.",
        secret=True,
    ),
    Setting("jwksUrl", kinds.web_address, "Where the keys of another issuer of tokens are published."),
    Setting("jwtClaim", kinds.text, "The claim of a token that names the entity.", default="sub"),
    Setting("jwtAudience", kinds.text, "Take only tokens that are meant for this audience."),
    Setting("jwtIssuer", kinds.text, "Take only tokens of this issuer."),
    Setting(
        "allowedHosts",
        kinds.words,
        "Names under which it answers, beside those of this machine's loopback and `publicUrl`.",
    ),
    Setting("allowedOrigins", kinds.words, "Origins of web pages that browsers may call it from, beside its own."),
    Setting("maxBodyBytes", kinds.integer(1), "A larger request is refused with 413.", default="4194304"),
    Setting("maxStreams", kinds.integer(1), "How many event streams may be open; one more gets 503.", default="10000"),
    Setting(
        "maxStreamsPerCaller",
        kinds.integer(1),
        "How many of them one key or entity may have; one more gets 429.",
        default="2000",
    ),
    Setting(
        "rateLimit",
        kinds.nullable(kinds.rate),
        "How many requests an entity with a public key may make; null: any number.",
        default="100/second",
    ),
    Setting(
        "secretRateLimit",
        kinds.nullable(kinds.rate),
        "How many requests a secret or tool key may make; null: any number.",
        default="null",
    ),
    Setting(
        "failedLoginLimit",
        kinds.nullable(kinds.rate),
        "How often one address may come with wrong credentials; null: any number of times.",
        default="60/minute",
    ),
    Setting(
        "maxConcurrentRequests",
        kinds.integer(1),
        "How many requests may be under way, streams aside; one more gets 503.",
        default="4000",
    ),
    Setting(
        "heartbeat", kinds.duration, "How often a stream on which nothing happens says that it lives.", default="15s"
    ),
    Setting("stopTimeout", kinds.duration, "How long running calls may take to end when it stops.", default="10s"),
    Setting(
        "eventRetention", kinds.duration, "How long events of streams are kept for readers that return.", default="7d"
    ),
    Setting(
        "retention",
        kinds.duration,
        "How long calls, runs and tasks that have ended and inbox events that are done are kept; messages stay.",
        default="30d",
    ),
    Setting(
        "workerGrace",
        kinds.duration,
        "How long a worker that lost its connection may take to return before others get its calls.",
        default="3s",
    ),
    Setting("maxActiveAgents", kinds.integer(1), "How many agents may be in a cycle at once.", default="32"),
)


def _tools(value: Value) -> ToolSettings:
    if not isinstance(value.data, list):
        return TOOLS.read(value)
    # A list is the definitions: it stands where `tools` stands, and there are no other settings in the file.
    found = _definitions.read(value.renamed(*value.name, "definitions"))
    rest = TOOLS.read(Value({}, value.session, value.at, value.name))
    return msgspec.structs.replace(rest, definitions=found)


tools = Kind(
    "mapping of settings, or list of tools",
    "a mapping of settings or a list of tools",
    _tools,
    single=False,
    nested=True,
)
queues = _named(QUEUE, "queues")
rest_tools = _named(REST_TOOL, "REST tools")
openapi = _named(OPENAPI, "services")
providers = _named(PROVIDER, "providers")
functions = kinds.listing(
    kinds.text, "string or list of strings", 'a list such as ["./tools.py", "package.module:name"]'
)

SECTIONS: Mapping[str, Record[Any]] = {
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
    **agentsettings.SECTIONS,
    "storage": STORAGE,
    "server": SERVER,
}
"""The section of every record, as the documentation names it."""


SINGLE = (
    Setting("functions", functions, "Python tools: files, modules, or `module:name`."),
    Setting(
        "demo",
        kinds.flag,
        "Where no agent is configured, have one to try things out with.",
        default="true",
    ),
)
"""The settings that are sections by themselves."""


def single_settings() -> Iterator[tuple[KeyPath, Setting]]:
    """The settings that stand at one fixed place and hold one value: those that a variable can override."""
    for section in _OVERRIDABLE:
        for setting in SECTIONS[section].settings:
            if setting.kind.single and setting.environment:
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
