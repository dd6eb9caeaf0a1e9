"""Registers the tools and providers of one toolspace, and replaces them when its configuration changes.

`Toolspace` has one. It starts and closes no provider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from toolspace.core.extension_points import ToolProvider
from toolspace.core.tool import Tool
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.effective_settings import ProviderRules, ToolRules
from toolspace.orchestrator.layered_orchestrator import LayeredOrchestrator
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.providers.functions import ToolRegistry

if TYPE_CHECKING:
    from toolspace.composition.from_config import ConfiguredParts
    from toolspace.providers.plugins import MountedProvider


class SourceRules:
    """The rules of one toolspace for its own tools, and for those that it inherits from its parent."""

    def __init__(self, overrides: Mapping[str, ToolRules], parent: SourceRules | None) -> None:
        self.own_rules = ProviderRules(overrides=overrides)
        self.hides_builtins = False
        """Whether the toolspace has its own built-in tools instead of those of the parent."""
        self._parent = parent

    def for_internal_tools(self) -> ProviderRules:
        """The rules of the internal tools, the agents and the router, with those of the parent."""
        rules = self.own_rules.only_namespaced()
        return rules if self._parent is None else rules.inherit(self._parent.for_internal_tools())

    def for_added_provider(self, rules: ProviderRules) -> ProviderRules:
        """The rules of a provider that the program added, with those of this toolspace that apply to all providers."""
        return rules.inherit(
            msgspec.structs.replace(self.own_rules.only_namespaced(), overrides=self.own_rules.overrides)
        )

    def hide(self, entry: CatalogEntry) -> bool:
        """Whether the toolspace does not offer a tool of its parent: it is denied, or there are other built-ins."""
        kind = entry.provider.kind
        if kind == "builtin" and self.hides_builtins:
            return True
        rules = self.own_rules if kind in ("local", "builtin", "task") else self.own_rules.only_namespaced()
        return rules.denial_reason(entry.spellings) is not None


class ToolSources:
    """The tools and providers of a toolspace, from its configuration and from the program."""

    def __init__(
        self,
        orchestrator: ToolOrchestrator,
        rules: SourceRules,
        tools: Iterable[Tool | Callable[..., Any]],
        internal: ToolProvider,
    ) -> None:
        stats = orchestrator.call_log.stats
        self.rules = rules
        self.registry = ToolRegistry(tools, stats=stats)
        self.parts: ConfiguredParts | None = None
        self._orchestrator = orchestrator
        self._builtins = ToolRegistry(kind="builtin", stats=stats)
        self._internal_providers: tuple[ToolProvider, ...] = (internal,)
        self._local_providers: tuple[ToolProvider, ...] = (self._builtins, self.registry)
        self._added_providers: dict[ToolProvider, ProviderRules] = {}
        """The providers that the program added, with the rules that it gave."""
        orchestrator.register(self._builtins, rules.own_rules)
        orchestrator.register(self.registry, rules.own_rules)
        orchestrator.register(internal, rules.for_internal_tools())

    def add_provider(self, provider: ToolProvider, rules: ProviderRules) -> None:
        """Registers a provider of the program."""
        self._orchestrator.register(provider, self.rules.for_added_provider(rules))
        self._added_providers[provider] = rules

    def add_local_provider(self, provider: ToolProvider) -> None:
        """Registers a provider under the rules of local tools."""
        self._orchestrator.register(provider, self.rules.own_rules)
        self._local_providers = (*self._local_providers, provider)

    def add_internal_provider(self, provider: ToolProvider) -> None:
        """Registers a provider of `agent__` or `router__` tools, which needs no start."""
        self._orchestrator.register(provider, self.rules.for_internal_tools(), needs_start=False)
        self._internal_providers = (*self._internal_providers, provider)

    def refresh_internal_rules(self) -> None:
        """Applies the rules of the internal tools again. Called if those of the parent may have changed."""
        self._orchestrator.configure(rules=dict.fromkeys(self._internal_providers, self.rules.for_internal_tools()))

    def check(self, parts: ConfiguredParts) -> None:
        """Raises if tool names of these parts conflict with each other or with tools of the program."""
        from toolspace.composition.providers import check_tool_names

        orchestrator = self._orchestrator
        inherited_tools = orchestrator.inherited_tools if isinstance(orchestrator, LayeredOrchestrator) else None
        replaced_providers = (self._builtins, self.registry, inherited_tools, *self._configured_providers())
        other_providers = [provider for provider in orchestrator.providers if provider not in replaced_providers]
        tools = ToolRegistry([*parts.builtins, *self._local_tools(parts)])
        check_tool_names([tools, *other_providers, *(entry.provider for entry in parts.providers.values())])

    def replace(self, parts: ConfiguredParts) -> Sequence[ToolProvider]:
        """Replaces the tools and providers of the last configuration. Returns the removed providers, for closing."""
        is_first = self.parts is None
        old_providers = self._configured_providers()
        local_tools = self._local_tools(parts)
        rules = {entry.provider: entry.rules for entry in parts.providers.values()}
        self.parts, self.rules.own_rules = parts, parts.rules
        removed_providers = [provider for provider in old_providers if provider not in rules]
        for provider in removed_providers:
            provider.retire()
        self._builtins.replace_all(())
        self.registry.replace_all(local_tools)
        self._builtins.replace_all(parts.builtins)
        for provider, provider_rules in rules.items():
            if provider not in old_providers:
                # After the start, a required provider that fails must not stop what runs.
                is_required = provider_rules.required and is_first
                self._orchestrator.register(provider, msgspec.structs.replace(provider_rules, required=is_required))
        self._orchestrator.configure(
            defaults=parts.defaults,
            queues=parts.queues,
            aliases=parts.aliases,
            context=parts.context,
            policy_rules=parts.policy_rules,
            quotas=parts.quotas,
            hooks=parts.hooks,
            masks_secrets=parts.masks_secrets,
            rules={
                **dict.fromkeys(self._local_providers, parts.rules),
                **dict.fromkeys(self._internal_providers, self.rules.for_internal_tools()),
                **{
                    provider: self.rules.for_added_provider(own_rules)
                    for provider, own_rules in self._added_providers.items()
                },
                **rules,
            },
        )
        return removed_providers

    def _configured_providers(self) -> list[MountedProvider]:
        return [] if self.parts is None else [entry.provider for entry in self.parts.providers.values()]

    def _local_tools(self, parts: ConfiguredParts) -> Sequence[Tool]:
        """The functions and definitions of these parts, and the tools that the program added, which stay."""
        old_tools = [] if self.parts is None else [*self.parts.functions, *self.parts.definitions]
        added_tools = [tool for tool in self.registry.list() if tool not in old_tools]
        return [*parts.functions, *parts.definitions, *added_tools]
