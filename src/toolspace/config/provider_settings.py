"""The sections of providers: MCP servers, REST tools, OpenAPI services, and providers of other packages.

Also has the settings that several sections share: the queue, the cache, the timeout and so on, as types of their
fields. Used by the modules of the other sections. Starts nothing; `composition` builds the providers.

No `from __future__ import annotations` in the modules with sections: their annotations are read when they are imported.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from toolspace.config import value_types as types
from toolspace.config.file_formats import format_value
from toolspace.config.tool_lists import ToolPatterns
from toolspace.config.validation import (
    SECRET,
    AlreadyReported,
    InvalidValue,
    Section,
    SectionType,
    Setting,
    SettingOptions,
    Value,
    camel_case,
    list_named_values,
    read_value,
    value_type,
)
from toolspace.config.value_types import Duration, Globs, Name, ObjectSchema
from toolspace.core.tool import NO_ANNOTATIONS, Annotations, CacheScope

# Settings that several sections have

QueueName = Annotated[str | None, "The queue that its calls go through."]
Cache = Annotated[float | None, types.cache_duration, "How long a result is reused for equal calls; 0 or false: never."]
CacheScopeSetting = Annotated[
    CacheScope | None,
    types.cache_scope,
    "Who gets a cached result: the `principal` whose call it was, or all who may reach the same (`shared`); "
    "without it `principal`.",
    SettingOptions(aliases=("cachePerUser",)),
]
Priority = Annotated[
    int | None, types.integer(-1000, 1000), "Waiting calls of higher priority leave the queue first; without it 0."
]
Timeout = Annotated[Duration | None, "How long one call may take; without it `defaults.toolTimeout`."]
Enabled = Annotated[bool, "Whether it is used at all."]
Approval = Annotated[
    Literal["required", "none"] | None, types.choice("required", "none"), "`required`: a person approves each call."
]
CircuitBreakerFailures = Annotated[
    int | None,
    types.integer(0),
    "After how many transport errors or timeouts in a row its calls fail at once; 0: never. Without it "
    "`defaults.circuitBreakerFailures`.",
]
CircuitBreakerDelay = Annotated[
    Duration | None, "How long until its next call is let through; without it `defaults.circuitBreakerDelay`."
]
Headers = Annotated[Mapping[str, str], "HTTP headers to send.", SECRET]

_EFFECTS = {
    "read_only": "It changes nothing.",
    "destructive": "It may destroy data.",
    "idempotent": "A repeated call has no further effect.",
    "open_world": "It reaches outside this system.",
}
ANNOTATIONS = SectionType(
    Annotations,
    settings=[
        Setting(name, types.boolean, effect, SettingOptions(aliases=(f"{camel_case(name)}Hint",)), None)
        for name, effect in _EFFECTS.items()
    ],
    is_ignored=lambda key: key == "title",
)


class SingleToolSettings(Section, frozen=True, kw_only=True):
    """What every tool has that the configuration describes by itself."""

    output_schema: Annotated[Mapping[str, Any] | None, "The schema of its result."] = None
    timeout: Timeout = None
    queue: QueueName = None
    cache: Cache = None
    cache_scope: CacheScopeSetting = None
    priority: Priority = None
    approval: Approval = None
    annotations: Annotated[
        Annotations,
        ANNOTATIONS,
        "What kind of effect it has: `readOnly`, `destructive`, `idempotent`, `openWorld`, each true or false.",
    ] = NO_ANNOTATIONS
    tags: Annotated[tuple[str, ...], "Words that a search finds it by."] = ()
    enabled: Enabled = True


class ToolSourceSettings(Section, frozen=True, kw_only=True):
    """What every source of several tools has: an MCP server, an OpenAPI service, a provider of another package."""

    enabled: Enabled = True
    required: Annotated[bool, "Refuse to start if it does not start."] = False
    tools_allowed: Annotated[
        ToolPatterns | None, "Offer only these of its tools.", SettingOptions(aliases=("allowedTools", "includeTools"))
    ] = None
    tools_denied: Annotated[
        ToolPatterns,
        "Do not offer these of its tools, even if allowed.",
        SettingOptions(aliases=("deniedTools", "excludeTools")),
    ] = ()
    queue: QueueName = None
    cache: Cache = None
    cache_scope: CacheScopeSetting = None
    request_timeout: Annotated[
        Duration | None,
        "How long one call of its tools may take; without it `defaults.toolTimeout`.",
        SettingOptions(key="requestTimeoutMs", aliases=("requestTimeout",)),
    ] = None
    circuit_breaker_failures: CircuitBreakerFailures = None
    circuit_breaker_delay: CircuitBreakerDelay = None


Transport = Literal["stdio", "http", "sse", "websocket"]
TRANSPORT_ALIASES: Mapping[str, Transport] = {
    "streamable-http": "http",
    "streamable_http": "http",
    "streamableHttp": "http",
    "remote": "http",
    "local": "stdio",
    "ws": "websocket",
}


@value_type(
    "`oauth` or mapping",
    "`oauth`, or a mapping with type, clientId and so on",
    {"anyOf": [{"const": "oauth"}, {"type": "object"}]},
    fits_variable=False,
)
def _oauth(value: Value) -> Any:
    if value.data == "oauth":
        return {"type": "authorization_code"}
    if not isinstance(value.data, dict):
        raise InvalidValue("`oauth`, or a mapping with type, clientId and so on")
    return value.mapping()


class McpServerSettings(ToolSourceSettings, frozen=True, kw_only=True):
    """How to reach one MCP server."""

    hidden = frozenset(("extra",))

    name: str
    transport: Annotated[
        Transport | None,
        types.choice("stdio", "http", "sse", "websocket", aliases=TRANSPORT_ALIASES),
        "The transport; without it `stdio` for a command, `http` or `websocket` for a URL.",
        SettingOptions(key="type", aliases=("transport",)),
    ] = None
    """None if the entry has neither a command nor a URL: it cannot start."""
    command: Annotated[str | None, "The program to start."] = None
    args: Annotated[tuple[str, ...], "The arguments of the program.", SECRET] = ()
    env: Annotated[
        Mapping[str, str], "Environment variables for the program, besides a few harmless ones.", SECRET
    ] = {}
    cwd: Annotated[Path | None, "The working directory of the program."] = None
    url: Annotated[
        str | None, "The URL of the server.", SettingOptions(aliases=("serverUrl", "httpUrl"), secret=True)
    ] = None
    headers: Headers = {}
    auth: Annotated[
        Mapping[str, Any],
        _oauth,
        "OAuth: `oauth` for a login in the browser, or a mapping with `type` (`authorization_code` or "
        "`client_credentials`), `clientId`, `clientSecret`, `scope`.",
        SECRET,
    ] = {}
    description_prefix: Annotated[
        bool | None,
        "Whether the descriptions of its tools begin with `[name]`; without it `defaults.descriptionPrefix`.",
    ] = None
    idle_timeout: Annotated[
        Duration | None, "Stop the server after this time without use; the next call restarts it."
    ] = None
    start_patience: Annotated[
        float | None,
        types.duration_or_zero,
        "How long lists of tools wait while this server starts; without it `defaults.startPatience`.",
    ] = None
    extra: Mapping[str, Any] = {}
    """Keys of other programs, kept unchanged."""


class RestToolSettings(SingleToolSettings, frozen=True, kw_only=True):
    """One HTTP request. Its templates still contain `${parameters.x}`."""

    name: str
    description: Annotated[str, "The description that the model reads."] = ""
    method: Annotated[str, types.choice(*types.HTTP_METHODS), "The HTTP method."] = "GET"
    url: Annotated[str, "The URL; `${parameters.x}` is replaced by an argument.", SECRET]
    headers: Headers = {}
    query: Annotated[Mapping[str, Any], "Query parameters to send.", SECRET] = {}
    body: Annotated[Any, types.any_value, "The body to send, as data or as text.", SECRET] = None
    parameters_schema: Annotated[
        ObjectSchema | None, "The schema of the tool's arguments.", SettingOptions(aliases=("inputSchema",))
    ] = None


class OpenApiSettings(ToolSourceSettings, frozen=True, kw_only=True):
    """One service that an OpenAPI document describes."""

    shorthand = "spec"

    name: str
    spec: Annotated[
        str, types.url_or_path, "The document: a URL or a file, JSON or YAML.", SettingOptions(aliases=("url", "path"))
    ]
    """A URL, or the absolute path of a file."""
    base_url: Annotated[str | None, "The URL of the service; without it the one in the document."] = None
    headers: Headers = {}
    auth: Annotated[Mapping[str, Any], "Credentials by the name of the document's security scheme.", SECRET] = {}
    tags: Annotated[Globs | None, "Only operations with one of these tags."] = None
    methods: Annotated[tuple[str, ...] | None, "Only operations of these HTTP methods."] = None
    paths: Annotated[Globs | None, "Only operations below these paths."] = None
    operations: Annotated[Globs | None, "Only these operations, by `operationId`."] = None


class ProviderSettings(ToolSourceSettings, frozen=True, kw_only=True):
    """A provider of another package, or of the user's own code."""

    shorthand = "uses"

    name: str
    uses: Annotated[
        Name | None,
        "The provider: the name under which an installed package offers it, `package.module:Name`, or "
        "`./file.py:Name`; without it the name of the entry.",
    ] = None
    namespace: Annotated[
        Name | None,
        "The first part of its tools' names; without it the provider's own namespace, else the name of the entry.",
    ] = None
    settings: Annotated[Mapping[str, Any], "The provider's own settings, which it is created with.", SECRET] = {}


# MCP servers, as other programs write them

_server_section = SectionType(McpServerSettings)


@value_type("mapping", "a mapping", {"anyOf": [_server_section]}, fits_variable=False)
def _server(value: Value) -> McpServerSettings:
    """Reads an MCP server as any client writes it."""
    entry = dict(value.mapping())
    is_disabled = isinstance(entry.get("disabled"), bool) and "enabled" not in entry
    if is_disabled:
        entry["enabled"] = not entry.pop("disabled")
    server = _server_section.read(value.with_data(entry))
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
        value.fail(f'"{required_key}" is missing, which the transport {transport} needs')
    return msgspec.structs.replace(server, transport=transport)


@value_type(
    "MCP servers by name", "a mapping of MCP servers by name", types.entries_schema(_server), fits_variable=False
)
def _servers(value: Value) -> dict[str, McpServerSettings]:
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


McpServers = Annotated[Mapping[str, McpServerSettings], _servers]
RestTools = Annotated[
    Mapping[str, RestToolSettings], types.entries_by_name(SectionType(RestToolSettings), "REST tools")
]
OpenApiServices = Annotated[
    Mapping[str, OpenApiSettings], types.entries_by_name(SectionType(OpenApiSettings), "services")
]
Providers = Annotated[Mapping[str, ProviderSettings], types.entries_by_name(SectionType(ProviderSettings), "providers")]
