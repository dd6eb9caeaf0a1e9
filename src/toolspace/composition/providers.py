"""Makes the providers that a configuration names: MCP servers, REST tools, OpenAPI services, plugins. Starts none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from toolspace.config.load import Config
from toolspace.config.model import McpServer, OpenApi, Provider, RestTool
from toolspace.core import json_text
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import SEPARATOR, sanitise
from toolspace.errors import ConfigError, RegistrationError
from toolspace.orchestrator.settings import ProviderRules, Rules
from toolspace.providers.mcp.callbacks import Callbacks
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.namespaced import Mounted

REST = "rest"
"""The namespace of the REST tools, which are one provider."""


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One provider, made."""

    identity: bytes
    """Where it is the same, making it again would give the same. Rules may differ: they need no new provider."""
    provider: Mounted
    rules: ProviderRules

    def still_is(self, identity: bytes) -> bool:
        return self.identity == identity and self.provider.is_current()


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


def needs_one_provider(config: Config, tool: str) -> bool:
    """Whether a full name says which of the configuration's MCP servers and services offers the tool."""
    named = [*config.mcp_servers, *config.openapi, *([REST] if config.rest_tools else [])]
    return any(_is_within(tool, name) for name in named)


def _is_within(tool: str, namespace: str) -> bool:
    return sanitise(tool).startswith(sanitise(namespace) + SEPARATOR)


def make_mounts(
    config: Config,
    overrides: Mapping[str, Rules],
    running: Mapping[str, Mount],
    callbacks: Callbacks,
    *,
    only_for: str | None = None,
) -> dict[str, Mount]:
    """Every provider that is enabled: the running one where nothing of it changed, else a new one.

    `only_for`: without those that cannot be the one of this tool.
    """
    mounts: dict[str, Mount] = {}
    faults: list[str] = []
    for wanted in _wanted(config, overrides, callbacks):
        if only_for is not None and not wanted.rules.required and not wanted.may_offer(only_for):
            continue
        key = f"{wanted.section}.{wanted.name}"
        known = running.get(key)
        try:
            if known is not None and known.still_is(wanted.identity):
                provider = known.provider
            else:
                inner = wanted.make()
                provider = Mounted(inner, wanted.namespace or inner.namespace or wanted.name)
            mounts[key] = Mount(identity=wanted.identity, provider=provider, rules=wanted.rules)
        except (ConfigError, RegistrationError) as error:
            # The REST tools are one provider, of a section with many entries.
            place = (wanted.section,) if wanted.name == REST else (wanted.section, wanted.name)
            faults.append(f"{config.source(*place)}: {error}")
    faults += _shared_namespaces(config, mounts)
    if faults:
        raise ConfigError("\n".join(faults))
    return mounts


def _wanted(config: Config, overrides: Mapping[str, Rules], callbacks: Callbacks) -> Iterator[_Wanted]:
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


def _plugin(config: Config, entry: Provider, overrides: Mapping[str, Rules], factories: dict[str, object]) -> _Wanted:
    def make() -> ToolProvider:
        from toolspace.providers.plugins import find_factory, make_provider  # Here: most configurations name none.

        uses = entry.uses or entry.name
        if uses not in factories:
            factories[uses] = find_factory(uses, config.base_dir)
        written: Any = None
        at = config.origins.get(("providers", entry.name, "settings"))
        if isinstance(at, tuple):
            written = config.document.data
            for key in at:
                written = written[key]
        return make_provider(factories[uses], uses, entry.settings, written=written)

    return _Wanted(
        section="providers",
        name=entry.name,
        # As text: 1, 1.0 and true are equal in Python, and not to a provider.
        identity=json_text.canonical([entry.uses or entry.name, entry.namespace, entry.settings]),
        namespace=entry.namespace,
        make=make,
        rules=_rules(config, "providers", entry, overrides),
    )


def _gate(config: Config) -> Callable[[], Any]:
    """Makes the gate that the servers of one configuration share, when the first of them is made."""
    made: list[Any] = []

    def gate() -> Any:
        from toolspace.providers.mcp.gate import Gate

        if not made:
            made.append(Gate(config.defaults.mcp_init_concurrency))
        return made[0]

    return gate


def _mcp(
    config: Config, server: McpServer, overrides: Mapping[str, Rules], make: Callable[[McpServer], ToolProvider]
) -> _Wanted:
    said = msgspec.to_builtins(server_spec(server), enc_hook=str)
    return _Wanted(
        section="mcpServers",
        name=server.name,
        identity=json_text.canonical([said, config.defaults.trace_mcp]),
        namespace=None,
        make=lambda: make(server),
        rules=_rules(config, "mcpServers", server, overrides),
    )


def _mcp_provider(config: Config, server: McpServer, gate: Any, callbacks: Callbacks) -> ToolProvider:
    # Here: the MCP library takes most of a second to import, and only those with servers should wait for it.
    import importlib.metadata

    from toolspace.providers.mcp.oauth import oauth_for
    from toolspace.providers.mcp.opening import Hooks
    from toolspace.providers.mcp.provider import McpProvider
    from toolspace.providers.mcp.tokens import TokenStore

    spec = server_spec(server)
    if config.defaults.trace_mcp:
        logging.getLogger("toolspace.mcp").setLevel(logging.DEBUG)  # Asked for, so to be seen.
    hooks = Hooks(
        callbacks=callbacks,
        gate=gate,
        auth=oauth_for(server.name, spec, store=TokenStore(tokens_dir(config)), interact=None),
        trace=config.defaults.trace_mcp,
        version=importlib.metadata.version("toolspace"),
    )
    return McpProvider(server.name, spec, hooks)


def tokens_dir(config: Config) -> Path:
    """Where logins at MCP servers are kept."""
    return config.state_dir / "logins"


def server_spec(server: McpServer) -> ServerSpec:
    """The server as the provider takes it."""
    same = {name: getattr(server, name) for name in ServerSpec.__struct_fields__}
    return ServerSpec(**same)


def _rest(config: Config, tools: list[RestTool], overrides: Mapping[str, Rules]) -> _Wanted:
    def make() -> ToolProvider:
        from toolspace.providers.rest.provider import RestProvider
        from toolspace.providers.rest.spec import RestSpec

        return RestProvider([RestSpec(**_fields(tool, RestSpec)) for tool in tools])

    return _Wanted(
        section="restTools",
        name=REST,
        identity=json_text.canonical([_fields(tool, RestTool) for tool in tools]),
        namespace=REST,
        make=make,
        rules=ProviderRules(overrides=overrides),
    )


def _openapi(config: Config, service: OpenApi, overrides: Mapping[str, Rules]) -> _Wanted:
    def make() -> ToolProvider:
        from toolspace.providers.openapi.provider import OpenApiProvider
        from toolspace.providers.openapi.spec import OpenApiSpec

        return OpenApiProvider(service.name, OpenApiSpec(**_fields(service, OpenApiSpec)))

    rules = ("tools_allowed", "tools_denied", "queue", "cache", "request_timeout", "enabled", "required")
    said = {name: value for name, value in _fields(service, OpenApi).items() if name not in rules}
    return _Wanted(
        section="openapi",
        name=service.name,
        identity=json_text.canonical(said),
        namespace=service.name,
        make=make,
        rules=_rules(config, "openapi", service, overrides),
    )


def _fields(entry: Any, kind: Any) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in kind.__struct_fields__ if hasattr(entry, name)}


def _rules(
    config: Config, section: str, entry: Provider | McpServer | OpenApi, overrides: Mapping[str, Rules]
) -> ProviderRules:
    source = config.source(section, entry.name)
    return ProviderRules(
        rules=Rules(timeout=entry.request_timeout, queue=entry.queue, cache=entry.cache, source=source),
        tools_allowed=entry.tools_allowed,
        tools_denied=entry.tools_denied,
        required=entry.required,
        overrides=overrides,
    )


def _shared_namespaces(config: Config, mounts: Mapping[str, Mount]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for key, mount in mounts.items():
        namespace = mount.provider.namespace
        section, _, name = key.partition(".")
        owner = owners.setdefault(sanitise(namespace), key)
        if owner != key:
            place = config.source(section, name)
            way_out = "give it one with namespace" if section == "providers" else "rename one of them"
            yield f'{place}: the namespace "{namespace}" is that of {owner} already; {way_out}'
