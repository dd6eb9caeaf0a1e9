"""Builds the providers of a configuration: MCP servers, REST tools, OpenAPI services, plugins. Starts none.

Used by `from_config`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from toolspace.composition.mcp_servers import build_server_spec, login_dir, open_tool_cache
from toolspace.config.configuration import Config
from toolspace.config.provider_settings import McpServerSettings, OpenApiSettings, ProviderSettings, RestToolSettings
from toolspace.config.secret_references import resolve_secrets
from toolspace.core import json_text
from toolspace.core.extension_points import ToolProvider
from toolspace.core.names import SEPARATOR, sanitise
from toolspace.errors import ConfigError, ProviderError, RegistrationError, ToolspaceError
from toolspace.orchestrator.catalog import Catalog
from toolspace.orchestrator.effective_settings import ProviderRules, ToolRules
from toolspace.providers.mcp.server_spec import McpCallbacks
from toolspace.providers.mcp.tool_cache import ToolCacheFile
from toolspace.providers.plugins import MountedProvider

if TYPE_CHECKING:
    from toolspace.providers.mcp.open_connection import StartupLimiter
    from toolspace.providers.mcp.provider import McpProvider

T = TypeVar("T")
REST = "rest"
"""The namespace of the REST tools, which are one provider."""
_RULE_FIELDS = (
    "tools_allowed",
    "tools_denied",
    "queue",
    "cache",
    "cache_scope",
    "request_timeout",
    "circuit_breaker_failures",
    "circuit_breaker_delay",
    "enabled",
    "required",
)
"""Settings of an OpenAPI service that become its rules: a change of them does not need a new provider."""


class ConfiguredProvider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider that was built from the configuration."""

    identity: bytes
    """The settings that it was built from. If they are equal, the provider need not be built again. Excludes rules."""
    provider: MountedProvider
    rules: ProviderRules

    def is_unchanged(self, identity: bytes) -> bool:
        return self.identity == identity and self.provider.is_code_unchanged()


class _ProviderPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A provider that the configuration describes, before it is built."""

    section: str
    name: str
    settings: object
    """What the provider is built from, as JSON data, without rules."""
    namespace: str | None = None
    """None: the provider's own, else the name."""
    build: Callable[[], ToolProvider]
    rules: ProviderRules

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    def may_offer(self, tool: str) -> bool:
        """Whether it may offer a tool of this full name. The namespace of a plugin is unknown before it is built."""
        return self.section == "providers" or _is_in_namespace(tool, self.namespace or self.name)


def build_providers(
    config: Config,
    shared_rules: ProviderRules,
    running_providers: Mapping[str, ConfiguredProvider],
    callbacks: McpCallbacks,
    *,
    single_tool: str | None,
) -> dict[str, ConfiguredProvider]:
    """The enabled providers: the running one if its settings are unchanged, else a new one.

    `shared_rules`: the section `tools`; its overrides, and the denied tools with a namespace, apply to every provider.
    `single_tool`: leaves out the providers that cannot offer this tool. Raises `ConfigError` with all problems.
    """
    providers: dict[str, ConfiguredProvider] = {}
    problems: list[str] = []
    denied_tools, overrides = shared_rules.only_namespaced().tools_denied, shared_rules.overrides

    def is_needed(plan: _ProviderPlan) -> bool:
        return single_tool is None or plan.rules.required or plan.may_offer(single_tool)

    # From here, where references to secrets still stand for them: a new token does not change the tools.
    caches = {name: open_tool_cache(server, config) for name, server in config.mcp_servers.items()}
    if (config if config.parent is None else config.parent).secret_references:
        plans = _plan_providers(config, denied_tools, overrides, callbacks, caches)
        config = _resolve_secrets(config, {plan.key for plan in plans if is_needed(plan)})
    for plan in _plan_providers(config, denied_tools, overrides, callbacks, caches):
        if not is_needed(plan):
            continue
        key = plan.key
        running_provider = running_providers.get(key)
        # As JSON text: 1, 1.0 and true are equal in Python, but not for a provider.
        identity = json_text.encode_canonical(plan.settings)
        try:
            if running_provider is not None and running_provider.is_unchanged(identity):
                provider = running_provider.provider
            else:
                inner = plan.build()
                provider = MountedProvider(inner, plan.namespace or inner.namespace or plan.name, settings=identity)
            providers[key] = ConfiguredProvider(identity=identity, provider=provider, rules=plan.rules)
        except (ConfigError, RegistrationError) as error:
            # All entries of the section `restTools` are one provider.
            path = (plan.section,) if plan.name == REST else (plan.section, plan.name)
            problems.append(f"{config.source(*path)}: {error}")
    problems += _find_namespace_conflicts(config, providers)
    if problems:
        raise ConfigError("\n".join(problems))
    return providers


def _resolve_secrets(config: Config, needed_keys: Container[str]) -> Config:
    """The configuration with the secrets of the providers that are needed. Raises `ConfigError` with all problems."""
    problems: list[str] = []

    def resolve(section: str, entries: Mapping[str, T]) -> dict[str, T]:
        resolved_entries = dict(entries)
        for name, entry in entries.items():
            is_rest = section == "restTools" and cast("Any", entry).enabled
            if f"{section}.{REST if is_rest else name}" in needed_keys:
                try:
                    resolved_entries[name] = resolve_secrets(entry)
                except ConfigError as error:
                    problems.append(f"{config.source(section, name)}: {error}")
        return resolved_entries

    resolved_config = msgspec.structs.replace(
        config,
        providers=resolve("providers", config.providers),
        mcp_servers=resolve("mcpServers", config.mcp_servers),
        rest_tools=resolve("restTools", config.rest_tools),
        openapi=resolve("openapi", config.openapi),
    )
    if problems:
        raise ConfigError("\n".join(problems))
    return resolved_config


def belongs_to_one_provider(config: Config, tool: str) -> bool:
    """Whether the full name of a tool has the namespace of a configured MCP server or service."""
    namespaces = [*config.mcp_servers, *config.openapi, *([REST] if config.rest_tools else [])]
    return any(_is_in_namespace(tool, namespace) for namespace in namespaces)


def find_mcp_providers(providers: Iterable[ToolProvider]) -> dict[str, McpProvider]:
    """The MCP servers among the providers, by namespace."""
    inner_providers = (provider.inner if isinstance(provider, MountedProvider) else provider for provider in providers)
    # By kind instead of by class: the class would import the MCP library.
    servers = [cast("McpProvider", provider) for provider in inner_providers if provider.kind == "mcp"]
    return {server.namespace: server for server in servers}


def check_tool_names(providers: Iterable[ToolProvider]) -> None:
    """Raises if two providers offer the same name, or a provider cannot list its tools."""
    catalog = Catalog(lambda _: None)
    try:
        for provider in providers:
            try:
                catalog.add(provider, ProviderRules())
            except ToolspaceError:
                raise
            except Exception as error:  # Code of others may raise anything; callers handle `ToolspaceError`.
                name = provider.namespace or provider.kind
                raise ProviderError(f"provider {name} cannot list its tools: {error!r}") from error
    finally:
        for provider in catalog.providers:
            catalog.remove(provider)


def _plan_providers(
    config: Config,
    tools_denied: Sequence[str],
    overrides: Mapping[str, ToolRules],
    callbacks: McpCallbacks,
    caches: Mapping[str, ToolCacheFile],
) -> Iterator[_ProviderPlan]:
    def build_rules(section: str, entry: ProviderSettings | McpServerSettings | OpenApiSettings) -> ProviderRules:
        source = config.source(section, entry.name)
        return ProviderRules(
            rules=ToolRules(
                timeout=entry.request_timeout,
                queue=entry.queue,
                cache=entry.cache,
                cache_scope=entry.cache_scope,
                circuit_breaker_failures=entry.circuit_breaker_failures,
                circuit_breaker_delay=entry.circuit_breaker_delay,
                source=source,
            ),
            tools_allowed=entry.tools_allowed,
            tools_denied=(*entry.tools_denied, *tools_denied),
            required=entry.required,
            start_patience=entry.start_patience if isinstance(entry, McpServerSettings) else None,
            overrides=overrides,
        )

    factories: dict[str, object] = {}  # Entries with the same `uses` share its module, as in a Python program.
    for entry in config.providers.values():
        if entry.enabled:
            yield _ProviderPlan(
                section="providers",
                name=entry.name,
                settings=[entry.uses or entry.name, entry.namespace, entry.settings],
                namespace=entry.namespace,
                build=partial(_build_plugin, config, entry, factories),
                rules=build_rules("providers", entry),
            )
    limiters: list[StartupLimiter] = []
    for server in config.mcp_servers.values():
        if server.enabled and server.transport is not None:
            yield _ProviderPlan(
                section="mcpServers",
                name=server.name,
                settings=[
                    msgspec.to_builtins(build_server_spec(server, config), enc_hook=str),
                    config.defaults.trace_mcp,
                ],
                build=partial(_build_mcp_provider, config, server, limiters, callbacks, caches[server.name]),
                rules=build_rules("mcpServers", server),
            )
    rest_tools = [tool for tool in config.rest_tools.values() if tool.enabled]
    if rest_tools:
        yield _ProviderPlan(
            section="restTools",
            name=REST,
            settings=[_copy_fields(tool, RestToolSettings) for tool in rest_tools],
            namespace=REST,
            build=partial(_build_rest_provider, rest_tools),
            rules=ProviderRules(tools_denied=tools_denied, overrides=overrides),
        )
    for service in config.openapi.values():
        if service.enabled:
            fields = _copy_fields(service, OpenApiSettings)
            yield _ProviderPlan(
                section="openapi",
                name=service.name,
                settings={name: fields[name] for name in fields if name not in _RULE_FIELDS},
                namespace=service.name,
                build=partial(_build_openapi_provider, service),
                rules=build_rules("openapi", service),
            )


def _build_plugin(config: Config, entry: ProviderSettings, factories: dict[str, object]) -> ToolProvider:
    from toolspace.providers.plugins import build_provider, get_factory

    uses = entry.uses or entry.name
    if uses not in factories:
        factories[uses] = get_factory(uses, config.base_dir)
    source_settings: Any = None
    path = config.origins.get(("providers", entry.name, "settings"))
    if isinstance(path, tuple):
        source_settings = config.document.data
        for key in path:
            source_settings = source_settings[key]
    return build_provider(factories[uses], uses, entry.settings, source_settings=source_settings)


def _build_mcp_provider(
    config: Config,
    server: McpServerSettings,
    limiters: list[StartupLimiter],
    callbacks: McpCallbacks,
    tool_cache: ToolCacheFile,
) -> ToolProvider:
    """`limiters` holds the one limiter that all servers share. It is empty until the first server is built."""
    # Imported here: importing the MCP library takes almost a second, and only configurations with servers need it.
    import importlib.metadata

    from toolspace.providers.mcp.oauth.authorization import create_http_auth
    from toolspace.providers.mcp.oauth.token_store import TokenStore
    from toolspace.providers.mcp.open_connection import ConnectionOptions, StartupLimiter
    from toolspace.providers.mcp.provider import McpProvider

    if not limiters:
        limiters.append(StartupLimiter(config.defaults.mcp_init_concurrency))
    spec = build_server_spec(server, config)
    if config.defaults.trace_mcp:
        logging.getLogger("toolspace.mcp").setLevel(logging.DEBUG)
    options = ConnectionOptions(
        callbacks=callbacks,
        startup_limiter=limiters[0],
        auth=create_http_auth(server.name, spec, store=TokenStore(login_dir(config)), open_login_page=None),
        tool_cache=tool_cache,
        trace=config.defaults.trace_mcp,
        version=importlib.metadata.version("toolspace"),
    )
    return McpProvider(server.name, spec, options)


def _build_rest_provider(tools: list[RestToolSettings]) -> ToolProvider:
    from toolspace.providers.rest.provider import RestProvider, RestSpec

    return RestProvider([RestSpec(**_copy_fields(tool, RestSpec)) for tool in tools])


def _build_openapi_provider(service: OpenApiSettings) -> ToolProvider:
    from toolspace.providers.openapi.provider import OpenApiProvider, OpenApiSpec

    return OpenApiProvider(service.name, OpenApiSpec(**_copy_fields(service, OpenApiSpec)))


def _copy_fields(entry: Any, struct: Any) -> dict[str, Any]:
    """The values of the fields that the entry and the struct share."""
    return {name: getattr(entry, name) for name in struct.__struct_fields__ if hasattr(entry, name)}


def _find_namespace_conflicts(config: Config, providers: Mapping[str, ConfiguredProvider]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for key, entry in providers.items():
        namespace = entry.provider.namespace
        section, _, name = key.partition(".")
        owner = owners.setdefault(sanitise(namespace), key)
        if owner != key:
            place = config.source(section, name)
            remedy = "set another one with `namespace`" if section == "providers" else "rename one of them"
            yield f'{place}: the namespace "{namespace}" is that of {owner} already; {remedy}'


def _is_in_namespace(tool: str, namespace: str) -> bool:
    return sanitise(tool).startswith(sanitise(namespace) + SEPARATOR)
