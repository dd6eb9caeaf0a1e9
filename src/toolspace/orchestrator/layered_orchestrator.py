"""An orchestrator with its own tools on top of a parent's tools, which it calls as if they were its own.

Each agent has one. A call of a parent's tool runs exactly as in the parent: with its queues, caches, rules and stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from toolspace.core.extension_points import ResultCache, ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.catalog import CatalogEntry, NameResolver
from toolspace.orchestrator.effective_settings import CallDefaults, EffectiveSettings, ProviderRules
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.pipeline import CallHandler
from toolspace.orchestrator.stages.queue import QueueRegistry, QueueSpec
from toolspace.orchestrator.tool_listing import ToolListing

_SHARED_NAMESPACES = frozenset(("agent", "router"))
"""Namespaces of several providers: a provider here does not hide those of the parent."""

ToolFilter = Callable[[CatalogEntry], bool]


class LayeredOrchestrator(ToolOrchestrator):
    """An orchestrator that inherits the tools of a parent. Closing it leaves the parent open."""

    def __init__(
        self,
        parent: ToolOrchestrator,
        *,
        context: ToolContext | None = None,
        defaults: CallDefaults | None = None,
        queues: Mapping[str, QueueSpec] | None = None,
        cache: ResultCache | None = None,
        is_hidden: ToolFilter | None = None,
    ) -> None:
        """`cache` must not be the parent's: equal names may be different tools. `is_hidden` tools are not inherited."""
        super().__init__(context=context or parent.context)
        shared = parent._services
        self.bus = parent.bus
        self._services = msgspec.structs.replace(
            shared,
            queues=QueueRegistry(),
            cache=cache,
            defaults=defaults or shared.defaults,
            deferred_completions={},
            killed_count=0,
        )
        self._services.queues.configure(queues or {})
        self.stored_sessions = parent.stored_sessions
        self._names = NameResolver(self._catalog, self._services)
        self._listing = ToolListing(self._catalog, self._services)
        self._parent = parent
        self._outer_stages = parent._outer_stages
        self._catalog.aliases = parent._catalog.aliases
        self._inherited_tools = _InheritedTools(parent, self, is_hidden)
        self._catalog.fallback_provider = self._inherited_tools
        self._catalog.add(self._inherited_tools, ProviderRules())
        parent._layers.add(self)

    @property
    def root(self) -> ToolOrchestrator:
        return self._parent.root

    @property
    def inherited_tools(self) -> ToolProvider:
        """The provider that stands for the parent's tools."""
        return self._inherited_tools

    def find_provider_kind(self, name: str) -> str | None:
        kind = super().find_provider_kind(name)
        return self._parent.find_provider_kind(name) if kind == self._inherited_tools.kind else kind

    def parent_changed(self) -> None:
        if not self.closed:
            self._inherited_tools.notify_changed()

    def emit_completion(self, call: ToolResult | str) -> bool:
        return super().emit_completion(call) or self._parent.emit_completion(call)

    def explain(self, name: str) -> tuple[CatalogEntry, EffectiveSettings] | None:
        entry = self._find(name, None, is_call=False)
        return (
            self._parent.explain(entry.tool.name) if entry.provider is self._inherited_tools else super().explain(name)
        )

    def _instruction_providers(self) -> list[ToolProvider]:
        own_providers = [provider for provider in self.providers if provider is not self._inherited_tools]
        own_namespaces = {provider.namespace for provider in own_providers}
        return own_providers + [
            provider
            for provider in self._parent._instruction_providers()
            if not provider.namespace or provider.namespace not in own_namespaces
        ]

    def _unavailable_reasons(self) -> Mapping[ToolProvider, str]:
        return {**self._parent._unavailable_reasons(), **super()._unavailable_reasons()}

    async def wait_for_lists(self) -> None:
        await self._parent.wait_for_lists()
        await super().wait_for_lists()

    async def _wait_for_start(self, name: str) -> bool:
        return await super()._wait_for_start(name) or await self._parent._wait_for_start(name)

    def _compile(self, entry: CatalogEntry, *, in_run: bool) -> CallHandler:
        if entry.provider is not self._inherited_tools:
            return super()._compile(entry, in_run=in_run)
        parent, name = self._parent, entry.tool.name

        async def run_in_parent(call: Call) -> ToolResult:
            call.entry = parent_entry = parent._find(name, call.arguments)
            handler = parent_entry.run_handler if in_run else parent_entry.handler
            return await (handler or parent._compile(parent_entry, in_run=in_run))(call)

        if in_run:
            entry.run_handler = run_in_parent
        else:
            entry.handler = run_in_parent
        return run_in_parent

    def _list_changed(self, provider: ToolProvider) -> None:
        """Tells only the layers above: for everyone else the tools have not changed, so no event is emitted."""
        self._listing.forget_removed_tools()
        for layer in tuple(self._layers):
            layer.parent_changed()

    async def _close_services(self) -> None:
        self._parent._layers.discard(self)


class _InheritedTools(ToolProvider):
    """The parent's tools, except those whose names or namespaces are used here."""

    kind = "borrowed"
    circuit_scope = "none"

    def __init__(self, parent: ToolOrchestrator, layer: LayeredOrchestrator, is_hidden: ToolFilter | None) -> None:
        super().__init__()
        self._parent = parent
        self._layer = layer
        self._is_hidden = is_hidden

    def list_tools(self) -> Sequence[Tool]:
        own_namespaces = {provider.namespace for provider in self._layer.providers if provider is not self}
        own_namespaces -= _SHARED_NAMESPACES
        return [
            entry.tool
            for entry in self._parent.entries()
            if not (entry.provider.namespace and entry.provider.namespace in own_namespaces)
            and not (self._is_hidden is not None and self._is_hidden(entry))
        ]

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        return self._parent.is_offered(tool.name, context)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        raise NotImplementedError("the layer runs calls of these tools in the parent")
