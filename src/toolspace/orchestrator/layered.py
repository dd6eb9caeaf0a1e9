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
from toolspace.orchestrator.catalog import Entry
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.queues import QueueBook, QueueSpec
from toolspace.orchestrator.services import Services
from toolspace.orchestrator.settings import Defaults, Effective, ProviderRules
from toolspace.orchestrator.stage import Handler

_SHARED_NAMESPACES = frozenset(("agent", "router"))
"""Namespaces of several providers: one of them does not hide the others."""

Hidden = Callable[[Entry], bool]


class Overlay(ToolOrchestrator):
    """Stands above another orchestrator. Closing it leaves that one open."""

    def __init__(
        self,
        below: ToolOrchestrator,
        *,
        context: ToolContext | None = None,
        defaults: Defaults | None = None,
        queues: Mapping[str, QueueSpec] | None = None,
        cache: ResultCache | None = None,
        hidden: Hidden | None = None,
    ) -> None:
        """`cache` is not the one below: tools of one name are not one tool. `hidden` tools below are not here."""
        super().__init__(context=context or below.context)
        shared = below._services
        self.bus = below.bus
        self._services = Services(
            bus=shared.bus,
            accounting=shared.accounting,
            queues=QueueBook(dict(queues or {})),
            threads=shared.threads,
            count_tokens=shared.count_tokens,
            cache=cache,
            outputs=shared.outputs,
            policies=shared.policies,
            defaults=defaults or shared.defaults,
        )
        self.stored_sessions = below.stored_sessions
        self._below = below
        self._around = below._around
        self._catalog.aliases = below._catalog.aliases
        self._borrowed = _Borrowed(below, self, hidden)
        self._catalog.yielding = self._borrowed
        self._catalog.add(self._borrowed, ProviderRules())
        below._above.add(self)

    @property
    def root(self) -> ToolOrchestrator:
        return self._below.root

    @property
    def borrowed(self) -> ToolProvider:
        """What stands for the tools below."""
        return self._borrowed

    def below_changed(self) -> None:
        if not self.closed:
            self._borrowed.changed()

    def emit_completion(self, call: ToolResult | str) -> bool:
        return super().emit_completion(call) or self._below.emit_completion(call)

    def explain(self, name: str) -> tuple[Entry, Effective] | None:
        entry = self._find(name, None, calling=False)
        return self._below.explain(entry.tool.name) if entry.provider is self._borrowed else super().explain(name)

    def _instructing(self) -> list[ToolProvider]:
        own = [provider for provider in self.providers if provider is not self._borrowed]
        taken = {provider.namespace for provider in own}
        return own + [one for one in self._below._instructing() if not one.namespace or one.namespace not in taken]

    def _reasons(self) -> Mapping[ToolProvider, str]:
        return {**self._below._reasons(), **super()._reasons()}

    async def _patience_with(self, name: str) -> bool:
        return await super()._patience_with(name) or await self._below._patience_with(name)

    def _compile(self, entry: Entry, *, in_run: bool) -> Handler:
        if entry.provider is not self._borrowed:
            return super()._compile(entry, in_run=in_run)
        below, name = self._below, entry.tool.name

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
        self._costs.keep([entry.tool for entry in self._catalog.entries.values()])
        for above in tuple(self._above):
            above.below_changed()

    async def _close_services(self) -> None:
        self._below._above.discard(self)


class _Borrowed(ToolProvider):
    """The tools below, where nothing above has their names."""

    kind = "borrowed"

    def __init__(self, below: ToolOrchestrator, overlay: Overlay, hidden: Hidden | None) -> None:
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

    def offers(self, tool: Tool, context: ToolContext) -> bool:
        return self._below.offers(tool.name, context)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        raise NotImplementedError("calls of these tools go where the tools are")
