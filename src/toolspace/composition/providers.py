"""Makes the providers that a configuration names: MCP servers, REST tools, OpenAPI services, plugins. Starts none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from toolspace.config.load import Config
from toolspace.config.provider_settings import McpServerSettings, OpenApiSettings, ProviderSettings, RestToolSettings
from toolspace.core import json_text
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import SEPARATOR, sanitise
from toolspace.errors import ConfigError, RegistrationError
from toolspace.orchestrator.settings import ProviderRules, ToolRules
from toolspace.providers.mcp.callbacks import McpCallbacks
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.plugins import MountedProvider

REST = "rest"
"""The namespace of the REST tools, which are one provider."""


class ConfiguredProvider(msgspec.Struct, frozen=True, kw_only=True):
    """One provider, made."""

    identity: bytes
    """Where it is the same, making it again would give the same. Rules may differ: they need no new provider."""
    provider: MountedProvider
    rules: ProviderRules

    def is_unchanged(self, identity: bytes) -> bool:
        return self.identity == identity and self.provider.is_code_unchanged()


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A provider that the configuration asks for."""

    section: str
    name: str
    identity: bytes
    namespace: str | None
    """None: the provider's own, else the name."""
    make: Callable[[], ToolProvider]
    rules: ProviderRules

    def may_offer(self, tool: str) -> bool:
        """Whether a tool of this full name may be one of its own. Plugins may tell their namespace only when made."""
        return self.section == "providers" or _is_within(tool, self.namespace or self.name)


def belongs_to_one_provider(config: Config, tool: str) -> bool:
    """Whether a full name says which of the configuration's MCP servers and services offers the tool."""
    named = [*config.mcp_servers, *config.openapi, *([REST] if config.rest_tools else [])]
    return any(_is_within(tool, name) for name in named)


def _is_within(tool: str, namespace: str) -> bool:
    return sanitise(tool).startswith(sanitise(namespace) + SEPARATOR)


def build_providers(
    config: Config,
    overrides: Mapping[str, ToolRules],
    running: Mapping[str, ConfiguredProvider],
    callbacks: McpCallbacks,
    *,
    single_tool: str | None = None,
) -> dict[str, ConfiguredProvider]:
    """Every provider that is enabled: the running one where nothing of it changed, else a new one.

    `only_for`: without those that cannot be the one of this tool.
    """
    mounts: dict[str, ConfiguredProvider] = {}
    faults: list[str] = []
    for wanted in _wanted(config, overrides, callbacks):
        if single_tool is not None and not wanted.rules.required and not wanted.may_offer(single_tool):
            continue
        key = f"{wanted.section}.{wanted.name}"
        known = running.get(key)
        try:
            if known is not None and known.is_unchanged(wanted.identity):
                provider = known.provider
            else:
                inner = wanted.make()
                provider = MountedProvider(inner, wanted.namespace or inner.namespace or wanted.name)
            mounts[key] = ConfiguredProvider(identity=wanted.identity, provider=provider, rules=wanted.rules)
        except (ConfigError, RegistrationError) as error:
            # The REST tools are one provider, of a section with many entries.
            place = (wanted.section,) if wanted.name == REST else (wanted.section, wanted.name)
            faults.append(f"{config.source(*place)}: {error}")
    faults += _shared_namespaces(config, mounts)
    if faults:
        raise ConfigError("\n".join(faults))
    return mounts


def _wanted(config: Config, overrides: Mapping[str, ToolRules], callbacks: McpCallbacks) -> Iterator[_Wanted]:
    factories: dict[str, object] = {}  # Entries that use the same share its module, as they would in a program.
    for entry in config.providers.values():
        if entry.enabled:
            yield _plugin(config, entry, overrides, factories)
    servers = [server for server in config.mcp_servers.values() if server.enabled and server.transport is not None]
    if servers:
        gate = _gate(config)
        for server in servers:
            yield _mcp(config, server, overrides, lambda one: _mcp_provider(config, one, gate(), callbacks))
    rest = [tool for tool in config.rest_tools.values() if tool.enabled]
    if rest:
        yield _rest(config, rest, overrides)
    for service in config.openapi.values():
        if service.enabled:
            yield _openapi(config, service, overrides)


def _plugin(
    config: Config, entry: ProviderSettings, overrides: Mapping[str, ToolRules], factories: dict[str, object]
) -> _Wanted:
    def make() -> ToolProvider:
        from toolspace.providers.plugins import build_provider, get_factory  # Here: most configurations name none.

        uses = entry.uses or entry.name
        if uses not in factories:
            factories[uses] = get_factory(uses, config.base_dir)
        written: Any = None
        at = config.origins.get(("providers", entry.name, "settings"))
        if isinstance(at, tuple):
            written = config.document.data
            for key in at:
                written = written[key]
        return build_provider(factories[uses], uses, entry.settings, source_settings=written)

    return _Wanted(
        section="providers",
        name=entry.name,
        # As text: 1, 1.0 and true are equal in Python, and not to a provider.
        identity=json_text.encode_canonical([entry.uses or entry.name, entry.namespace, entry.settings]),
        namespace=entry.namespace,
        make=make,
        rules=_rules(config, "providers", entry, overrides),
    )


def _gate(config: Config) -> Callable[[], Any]:
    """Makes the gate that the servers of one configuration share, when the first of them is made."""
    made: list[Any] = []

    def gate() -> Any:
        from toolspace.providers.mcp.connect import StartupLimiter

        if not made:
            made.append(StartupLimiter(config.defaults.mcp_init_concurrency))
        return made[0]

    return gate


def _mcp(
    config: Config,
    server: McpServerSettings,
    overrides: Mapping[str, ToolRules],
    make: Callable[[McpServerSettings], ToolProvider],
) -> _Wanted:
    said = msgspec.to_builtins(build_server_spec(server), enc_hook=str)
    return _Wanted(
        section="mcpServers",
        name=server.name,
        identity=json_text.encode_canonical([said, config.defaults.trace_mcp]),
        namespace=None,
        make=lambda: make(server),
        rules=_rules(config, "mcpServers", server, overrides),
    )


def _mcp_provider(config: Config, server: McpServerSettings, gate: Any, callbacks: McpCallbacks) -> ToolProvider:
    # Here: the MCP library takes most of a second to import, and only those with servers should wait for it.
    import importlib.metadata

    from toolspace.providers.mcp.connect import ConnectionOptions
    from toolspace.providers.mcp.oauth.authorization import create_http_auth
    from toolspace.providers.mcp.oauth.token_store import TokenStore
    from toolspace.providers.mcp.provider import McpProvider

    spec = build_server_spec(server)
    if config.defaults.trace_mcp:
        logging.getLogger("toolspace.mcp").setLevel(logging.DEBUG)  # Asked for, so to be seen.
    hooks = ConnectionOptions(
        callbacks=callbacks,
        startup_limiter=gate,
        auth=create_http_auth(server.name, spec, store=TokenStore(login_dir(config)), open_login_page=None),
        trace=config.defaults.trace_mcp,
        version=importlib.metadata.version("toolspace"),
    )
    return McpProvider(server.name, spec, hooks)


def login_dir(config: Config) -> Path:
    """Where logins at MCP servers are kept."""
    return config.state_dir / "logins"


def build_server_spec(server: McpServerSettings) -> ServerSpec:
    """The server as the provider takes it."""
    same = {name: getattr(server, name) for name in ServerSpec.__struct_fields__}
    return ServerSpec(**same)


def _rest(config: Config, tools: list[RestToolSettings], overrides: Mapping[str, ToolRules]) -> _Wanted:
    def make() -> ToolProvider:
        from toolspace.providers.rest.provider import RestProvider, RestSpec

        return RestProvider([RestSpec(**_fields(tool, RestSpec)) for tool in tools])

    return _Wanted(
        section="restTools",
        name=REST,
        identity=json_text.encode_canonical([_fields(tool, RestToolSettings) for tool in tools]),
        namespace=REST,
        make=make,
        rules=ProviderRules(overrides=overrides),
    )


def _openapi(config: Config, service: OpenApiSettings, overrides: Mapping[str, ToolRules]) -> _Wanted:
    def make() -> ToolProvider:
        from toolspace.providers.openapi.provider import OpenApiProvider, OpenApiSpec

        return OpenApiProvider(service.name, OpenApiSpec(**_fields(service, OpenApiSpec)))

    rules = ("tools_allowed", "tools_denied", "queue", "cache", "request_timeout", "enabled", "required")
    said = {name: value for name, value in _fields(service, OpenApiSettings).items() if name not in rules}
    return _Wanted(
        section="openapi",
        name=service.name,
        identity=json_text.encode_canonical(said),
        namespace=service.name,
        make=make,
        rules=_rules(config, "openapi", service, overrides),
    )


def _fields(entry: Any, kind: Any) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in kind.__struct_fields__ if hasattr(entry, name)}


def _rules(
    config: Config,
    section: str,
    entry: ProviderSettings | McpServerSettings | OpenApiSettings,
    overrides: Mapping[str, ToolRules],
) -> ProviderRules:
    source = config.source(section, entry.name)
    return ProviderRules(
        rules=ToolRules(timeout=entry.request_timeout, queue=entry.queue, cache=entry.cache, source=source),
        tools_allowed=entry.tools_allowed,
        tools_denied=entry.tools_denied,
        required=entry.required,
        overrides=overrides,
    )


def _shared_namespaces(config: Config, mounts: Mapping[str, ConfiguredProvider]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for key, mount in mounts.items():
        namespace = mount.provider.namespace
        section, _, name = key.partition(".")
        owner = owners.setdefault(sanitise(namespace), key)
        if owner != key:
            place = config.source(section, name)
            way_out = "give it one with namespace" if section == "providers" else "rename one of them"
            yield f'{place}: the namespace "{namespace}" is that of {owner} already; {way_out}'
