"""The sections of providers: MCP servers, REST tools, OpenAPI services, and providers of other packages.

Used by `tool_settings` and `top_level`. Starts nothing; `composition` builds the providers.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from toolspace.config import value_types as types
from toolspace.config.file_formats import format_value
from toolspace.config.validation import (
    AlreadyReported,
    InvalidValue,
    Section,
    SectionType,
    Setting,
    Value,
    ValueType,
    list_named_values,
    read_value,
)
from toolspace.core.tool import NO_ANNOTATIONS, Annotations

# MERGED from shared_settings: Settings that several sections have: the queue, the cache, the timeout and so on, as typ

QueueName = Annotated[str | None, Setting(types.string, "The queue that its calls go through.")]
Cache = Annotated[
    float | None,
    Setting(types.cache_duration, "How long a result is reused for equal calls; 0 or false: never."),
]
CachePerUser = Annotated[bool, Setting(types.boolean, "Cache the results of each user separately.")]
Timeout = Annotated[
    float | None,
    Setting(types.duration, "How long one call may take; without it `defaults.toolTimeout`."),
]
RequestTimeout = Annotated[
    float | None,
    Setting(
        types.duration,
        "How long one call of its tools may take; without it `defaults.toolTimeout`.",
        key="requestTimeoutMs",
        aliases=("requestTimeout",),
    ),
]
Enabled = Annotated[bool, Setting(types.boolean, "Whether it is used at all.")]
Required = Annotated[bool, Setting(types.boolean, "Refuse to start if it does not start.")]
Tags = Annotated[tuple[str, ...], Setting(types.strings, "Words that a search finds it by.")]
HEADERS = Setting(types.string_map, "HTTP headers to send.", secret=True)
ToolsAllowed = Annotated[
    tuple[str, ...] | None,
    Setting(types.globs, "Offer only these of its tools.", aliases=("allowedTools", "includeTools")),
]
ToolsDenied = Annotated[
    tuple[str, ...],
    Setting(types.globs, "Do not offer these of its tools, even if allowed.", aliases=("deniedTools", "excludeTools")),
]

ANNOTATIONS = SectionType(
    Annotations,
    settings=(
        Setting(types.boolean, "It changes nothing.", aliases=("readOnlyHint",)).bind("read_only", None),
        Setting(types.boolean, "It may destroy data.", aliases=("destructiveHint",)).bind("destructive", None),
        Setting(types.boolean, "A repeated call has no further effect.", aliases=("idempotentHint",)).bind(
            "idempotent", None
        ),
        Setting(types.boolean, "It reaches outside this system.", aliases=("openWorldHint",)).bind("open_world", None),
    ),
    is_ignored=lambda key: key == "title",
)
ToolAnnotations = Annotated[
    Annotations,
    Setting(
        ANNOTATIONS,
        "What kind of effect it has: `readOnly`, `destructive`, `idempotent`, `openWorld`, each true or false.",
    ),
]


Transport = Literal["stdio", "http", "sse", "websocket"]
TRANSPORT_ALIASES: Mapping[str, Transport] = {
    "streamable-http": "http",
    "streamable_http": "http",
    "streamableHttp": "http",
    "remote": "http",
    "local": "stdio",
    "ws": "websocket",
}


def _read_auth(value: Value) -> Any:
    if value.data == "oauth":
        return {"type": "authorization_code"}
    if not isinstance(value.data, dict):
        raise InvalidValue("`oauth`, or a mapping with type, clientId and so on")
    return value.mapping()


_oauth = ValueType(
    "`oauth` or mapping",
    "`oauth`, or a mapping with type, clientId and so on",
    _read_auth,
    schema={"anyOf": [{"const": "oauth"}, {"type": "object"}]},
    fits_variable=False,
)


class McpServerSettings(Section, frozen=True, kw_only=True):
    """How to reach one MCP server."""

    hidden = frozenset(("extra",))

    name: str
    transport: Annotated[
        Transport | None,
        Setting(
            types.choice("stdio", "http", "sse", "websocket", aliases=TRANSPORT_ALIASES),
            "The transport; without it `stdio` for a command, `http` or `websocket` for a URL.",
            key="type",
            aliases=("transport",),
        ),
    ] = None
    """None if the entry has neither a command nor a URL: it cannot start."""
    command: Annotated[str | None, Setting(types.string, "The program to start.")] = None
    args: Annotated[tuple[str, ...], Setting(types.strings, "The arguments of the program.", secret=True)] = ()
    env: Annotated[
        Mapping[str, str],
        Setting(types.string_map, "Environment variables for the program, besides a few harmless ones.", secret=True),
    ] = {}
    cwd: Annotated[Path | None, Setting(types.path, "The working directory of the program.")] = None
    url: Annotated[
        str | None, Setting(types.string, "The URL of the server.", aliases=("serverUrl", "httpUrl"), secret=True)
    ] = None
    headers: Annotated[Mapping[str, str], HEADERS] = {}
    auth: Annotated[
        Mapping[str, Any],
        Setting(
            _oauth,
            "OAuth: `oauth` for a login in the browser, or a mapping with `type` (`authorization_code` or "
            "`client_credentials`), `clientId`, `clientSecret`, `scope`.",
            secret=True,
        ),
    ] = {}
    enabled: Enabled = True
    required: Required = False
    tools_allowed: ToolsAllowed = None
    tools_denied: ToolsDenied = ()
    queue: QueueName = None
    cache: Cache = None
    request_timeout: RequestTimeout = None
    idle_timeout: Annotated[
        float | None, Setting(types.duration, "Stop the server after this time without use; the next call restarts it.")
    ] = None
    extra: Mapping[str, Any] = {}
    """Keys of other programs, kept unchanged."""


class RestToolSettings(Section, frozen=True, kw_only=True):
    """One HTTP request. Its templates still contain `${parameters.x}`."""

    name: str
    description: Annotated[str, Setting(types.string, "The description that the model reads.")] = ""
    method: Annotated[str, Setting(types.choice(*types.HTTP_METHODS), "The HTTP method.")] = "GET"
    url: Annotated[str, Setting(types.string, "The URL; `${parameters.x}` is replaced by an argument.", secret=True)]
    headers: Annotated[Mapping[str, str], HEADERS] = {}
    query: Annotated[Mapping[str, Any], Setting(types.mapping, "Query parameters to send.", secret=True)] = {}
    body: Annotated[Any, Setting(types.any_value, "The body to send, as data or as text.", secret=True)] = None
    parameters_schema: Annotated[
        Mapping[str, Any] | None,
        Setting(types.schema, "The schema of the tool's arguments.", aliases=("inputSchema",)),
    ] = None
    output_schema: Annotated[Mapping[str, Any] | None, Setting(types.mapping, "The schema of its result.")] = None
    queue: QueueName = None
    cache: Cache = None
    cache_per_user: CachePerUser = False
    timeout: Timeout = None
    enabled: Enabled = True
    annotations: ToolAnnotations = NO_ANNOTATIONS
    tags: Tags = ()


class OpenApiSettings(Section, frozen=True, kw_only=True):
    """One service that an OpenAPI document describes."""

    name: str
    spec: Annotated[
        str, Setting(types.url_or_path, "The document: a URL or a file, JSON or YAML.", aliases=("url", "path"))
    ]
    """A URL, or the absolute path of a file."""
    base_url: Annotated[
        str | None, Setting(types.string, "The URL of the service; without it the one in the document.")
    ] = None
    headers: Annotated[Mapping[str, str], HEADERS] = {}
    auth: Annotated[
        Mapping[str, Any],
        Setting(types.mapping, "Credentials by the name of the document's security scheme.", secret=True),
    ] = {}
    tags: Annotated[tuple[str, ...] | None, Setting(types.globs, "Only operations with one of these tags.")] = None
    methods: Annotated[tuple[str, ...] | None, Setting(types.strings, "Only operations of these HTTP methods.")] = None
    paths: Annotated[tuple[str, ...] | None, Setting(types.globs, "Only operations below these paths.")] = None
    operations: Annotated[tuple[str, ...] | None, Setting(types.globs, "Only these operations, by `operationId`.")] = (
        None
    )
    tools_allowed: ToolsAllowed = None
    tools_denied: ToolsDenied = ()
    queue: QueueName = None
    cache: Cache = None
    request_timeout: RequestTimeout = None
    enabled: Enabled = True
    required: Required = False


class ProviderSettings(Section, frozen=True, kw_only=True):
    """A provider of another package, or of the user's own code."""

    name: str
    uses: Annotated[
        str | None,
        Setting(
            types.name,
            "The provider: the name under which an installed package offers it, `package.module:Name`, or "
            "`./file.py:Name`; without it the name of the entry.",
        ),
    ] = None
    namespace: Annotated[
        str | None,
        Setting(
            types.name,
            "The first part of its tools' names; without it the provider's own namespace, else the name of the entry.",
        ),
    ] = None
    settings: Annotated[
        Mapping[str, Any],
        Setting(types.mapping, "The provider's own settings, which it is created with.", secret=True),
    ] = {}
    enabled: Enabled = True
    required: Required = False
    tools_allowed: ToolsAllowed = None
    tools_denied: ToolsDenied = ()
    queue: QueueName = None
    cache: Cache = None
    request_timeout: RequestTimeout = None


MCP_SERVER = SectionType(McpServerSettings)
REST_TOOL = SectionType(RestToolSettings)
OPENAPI = SectionType(OpenApiSettings, shorthand="spec")
PROVIDER = SectionType(ProviderSettings, shorthand="uses")


def _read_server(value: Value) -> McpServerSettings:
    """Reads an MCP server as any client writes it."""
    entry = dict(value.mapping())
    is_disabled = isinstance(entry.get("disabled"), bool) and "enabled" not in entry
    if is_disabled:
        entry["enabled"] = not entry.pop("disabled")
    server = MCP_SERVER.read(Value(entry, value.context, value.path, value.key))
    if is_disabled:
        value.context.origins[*value.key, "enabled"] = (*value.path, "disabled")
    if isinstance(timeout := server.extra.get("timeout"), str):
        seconds = read_value(types.duration, value.child("timeout", timeout, key="requestTimeoutMs"))
        server = msgspec.structs.replace(server, request_timeout=server.request_timeout or seconds)
    elif timeout is not None:
        value.context.warn(
            (*value.path, "timeout"),
            'has no effect, as programs disagree on its unit; write requestTimeoutMs, or a string such as "30s" here',
        )
    return _with_transport(value, server)


def _with_transport(value: Value, server: McpServerSettings) -> McpServerSettings:
    transport = server.transport
    if transport is None:
        if server.command is not None:
            transport = "stdio"
        elif server.url is not None:
            transport = "websocket" if server.url.startswith(("ws://", "wss://")) else "http"
    required_key = "command" if transport == "stdio" else "url"
    if transport is None:
        value.context.warn(value.path, 'has neither "command" nor "url", so it cannot start')
    elif getattr(server, required_key) is None and server.enabled:
        value.report(f'"{required_key}" is missing, which the transport {transport} needs')
        raise AlreadyReported
    return msgspec.structs.replace(server, transport=transport)


_server = ValueType("mapping", "a mapping", _read_server, schema={"anyOf": [MCP_SERVER]}, fits_variable=False)


def _read_servers(value: Value) -> dict[str, McpServerSettings]:
    """Reads MCP servers. All places where a file may have them form one list, in which a name exists once."""
    origins = value.context.origins
    servers: dict[str, McpServerSettings] = {}
    for name, inner in list_named_values(value.with_key("mcpServers"), entry_label="MCP servers"):
        if isinstance(first_path := origins.get(inner.key), tuple):
            place = value.context.document.format_location(first_path)
            inner.report(f"the name {format_value(name)} is given twice, first in {place}")
            continue
        with suppress(AlreadyReported):
            servers[name] = read_value(_server, inner)
    return servers


mcp_servers_type: ValueType[dict[str, McpServerSettings]] = ValueType(
    "MCP servers by name",
    "a mapping of MCP servers by name",
    _read_servers,
    schema=types.entries_schema(_server),
    fits_variable=False,
)
rest_tools_type = types.entries_by_name(REST_TOOL, "REST tools")
openapi_type = types.entries_by_name(OPENAPI, "services")
providers_type = types.entries_by_name(PROVIDER, "providers")
