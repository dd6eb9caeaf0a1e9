"""An orchestrator with tools of its own above those of another, which it calls as if they were its own.

Calls of the tools below take the very way that they take there: its queues, caches, rules and observers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ResultCache, ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.queues import QueueRegistry, QueueSpec
from toolspace.orchestrator.settings import CallDefaults, EffectiveSettings, ProviderRules
from toolspace.orchestrator.stage import CallHandler, CallServices

_SHARED_NAMESPACES = frozenset(("agent", "router"))
"""Namespaces of several providers: one of them does not hide the others."""

ToolFilter = Callable[[CatalogEntry], bool]


class LayeredOrchestrator(ToolOrchestrator):
    """Stands above another orchestrator. Closing it leaves that one open."""

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
        """`cache` is not the one below: tools of one name are not one tool. `hidden` tools below are not here."""
        super().__init__(context=context or parent.context)
        shared = parent._services
        self.bus = parent.bus
        self._services = CallServices(
            bus=shared.bus,
            call_log=shared.call_log,
            queues=QueueRegistry(dict(queues or {})),
            threads=shared.threads,
            count_tokens=shared.count_tokens,
            cache=cache,
            outputs=shared.outputs,
            policies=shared.policies,
            defaults=defaults or shared.defaults,
        )
        self.stored_sessions = parent.stored_sessions
        self._parent = parent
        self._outer_stages = parent._outer_stages
        self._catalog.aliases = parent._catalog.aliases
        self._inherited = _Borrowed(parent, self, is_hidden)
        self._catalog.fallback_provider = self._inherited
        self._catalog.add(self._inherited, ProviderRules())
        parent._layers.add(self)

    @property
    def root(self) -> ToolOrchestrator:
        return self._parent.root

    @property
    def inherited_tools(self) -> ToolProvider:
        """What stands for the tools below."""
        return self._inherited

    def parent_changed(self) -> None:
        if not self.closed:
            self._inherited.notify_changed()

    def emit_completion(self, call: ToolResult | str) -> bool:
        return super().emit_completion(call) or self._parent.emit_completion(call)

    def explain(self, name: str) -> tuple[CatalogEntry, EffectiveSettings] | None:
        entry = self._find(name, None, calling=False)
        return self._parent.explain(entry.tool.name) if entry.provider is self._inherited else super().explain(name)

    def _instruction_providers(self) -> list[ToolProvider]:
        own = [provider for provider in self.providers if provider is not self._inherited]
        taken = {provider.namespace for provider in own}
        return own + [
            one for one in self._parent._instruction_providers() if not one.namespace or one.namespace not in taken
        ]

    def _unavailable_reasons(self) -> Mapping[ToolProvider, str]:
        return {**self._parent._unavailable_reasons(), **super()._unavailable_reasons()}

    async def _wait_for_start(self, name: str) -> bool:
        return await super()._wait_for_start(name) or await self._parent._wait_for_start(name)

    def _compile(self, entry: CatalogEntry, *, in_run: bool) -> CallHandler:
        if entry.provider is not self._inherited:
            return super()._compile(entry, in_run=in_run)
        below, name = self._parent, entry.tool.name

        async def lent(call: Call) -> ToolResult:
            call.entry = source = below._find(name, call.arguments)
            handler = source.run_handler if in_run else source.handler
            return await (handler or below._compile(source, in_run=in_run))(call)

        if in_run:
            entry.run_handler = lent
        else:
            entry.handler = lent
        return lent

    def _list_changed(self, provider: ToolProvider) -> None:
        """Nobody else is told: what others see of the tools has not changed."""
        self._costs.retain([entry.tool for entry in self._catalog.entries.values()])
        for above in tuple(self._layers):
            above.parent_changed()

    async def _close_services(self) -> None:
        self._parent._layers.discard(self)


class _Borrowed(ToolProvider):
    """The tools below, where nothing above has their names."""

    kind = "borrowed"

    def __init__(self, below: ToolOrchestrator, overlay: LayeredOrchestrator, hidden: ToolFilter | None) -> None:
        super().__init__()
        self._below = below
        self._overlay = overlay
        self._hidden = hidden

    def list_tools(self) -> Sequence[Tool]:
        own = {provider.namespace for provider in self._overlay.providers if provider is not self}
        own -= _SHARED_NAMESPACES
        return [
            entry.tool
            for entry in self._below.entries()
            if not (entry.provider.namespace and entry.provider.namespace in own)
            and not (self._hidden is not None and self._hidden(entry))
        ]

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        return self._below.is_offered(tool.name, context)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        raise NotImplementedError("calls of these tools go where the tools are")
