"""Finds the tool that a name means. A name that means none gets an entry whose calls fail with the reason.

The orchestrator uses it for every name that is no full name. A failed call is recorded and announced like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import SEPARATOR, sanitise
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ErrorKind
from toolspace.orchestrator.call import Arguments, Call
from toolspace.orchestrator.catalog import AmbiguousName, Catalog, CatalogEntry
from toolspace.orchestrator.pipeline import CallHandler, CallServices, Stage, StageContext
from toolspace.orchestrator.settings import ProviderRules, resolve_settings
from toolspace.orchestrator.stages.announce import announce
from toolspace.orchestrator.stages.call_log import record
from toolspace.orchestrator.tool_search import is_permitted

Message = str | Callable[[Call], str]
"""The error message of a call, or a function that returns it: what a caller may learn depends on its permissions."""


class NameResolver:
    """Resolves names with a catalog. Names that a caller may not use do not appear in its error messages."""

    def __init__(self, catalog: Catalog, services: CallServices) -> None:
        self._catalog = catalog
        self._services = services

    def resolve(
        self,
        name: str,
        arguments: Arguments,
        *,
        is_call: bool,
        unavailable: Callable[[], Mapping[ToolProvider, str]],
        outer_stages: Sequence[Stage],
    ) -> CatalogEntry:
        """Returns the entry that a name means, or one whose calls fail.

        `unavailable` returns why each provider that is not ready is not.
        """
        try:
            entry = self._catalog.entries.get(name) or self._catalog.resolve(name, arguments, is_call=is_call)
        except AmbiguousName as error:
            message = partial(self._ambiguous_message, name, tuple(error.names))
            return self.create_missing_entry(name, "unknown_tool", message, outer_stages)
        if entry is not None:
            return entry
        for provider, reason in unavailable().items():
            if provider.namespace and sanitise(name).startswith(sanitise(provider.namespace) + SEPARATOR):
                text = f'provider "{provider.namespace}" is not available: {reason}'
                message = partial(self._unavailable_message, name, text)
                return self.create_missing_entry(name, "transport_error", message, outer_stages)
        return self.create_missing_entry(name, "unknown_tool", partial(self._not_found_message, name), outer_stages)

    def create_missing_entry(
        self, name: str, kind: ErrorKind, message: Message, outer_stages: Sequence[Stage]
    ) -> CatalogEntry:
        """Returns an entry whose calls fail with this message."""
        entry = CatalogEntry(Tool(name), name, _NO_PROVIDER, _NO_RULES, is_registered=False)
        entry.handler = entry.run_handler = self.failing_handler(entry, kind, message, outer_stages)
        return entry

    def failing_handler(
        self, entry: CatalogEntry, kind: ErrorKind, message: Message, outer_stages: Sequence[Stage]
    ) -> CallHandler:
        """Returns a handler that fails every call, but records and announces it."""

        async def fail(call: Call) -> ToolResult:
            return call.fail(kind, message if isinstance(message, str) else message(call), executed=False)

        settings = resolve_settings(entry.tool, entry.local_name, entry.rules, self._services.defaults)
        context = StageContext(entry, settings, self._services, in_run=True)
        handler = record(context, fail)
        for stage in reversed(outer_stages):
            handler = stage(context, handler)
        return announce(context, handler)

    def _not_found_message(self, name: str, call: Call) -> str:
        return self._catalog.not_found_message(name, self._permitted_names(self._catalog, call))

    def _ambiguous_message(self, name: str, candidates: Sequence[str], call: Call) -> str:
        entries = self._catalog.entries
        candidate_entries = (entries[candidate] for candidate in candidates if candidate in entries)
        names = [f'"{candidate}"' for candidate in self._permitted_names(candidate_entries, call)]
        if not names:
            return self._not_found_message(name, call)
        return f'Tool "{name}" not found: it could mean {", ".join(names)}; use the full name'

    def _unavailable_message(self, name: str, reason: str, call: Call) -> str:
        may_know = is_permitted(Tool(name), call.base_context, self._services.policies)
        return reason if may_know else self._not_found_message(name, call)

    def _permitted_names(self, entries: Iterable[CatalogEntry], call: Call) -> Iterable[str]:
        policies, caller = self._services.policies, call.base_context
        return (entry.tool.name for entry in entries if not policies or is_permitted(entry.tool, caller, policies))


class _NoProvider(ToolProvider):
    kind = "none"

    def list_tools(self) -> Sequence[Tool]:
        return ()

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        raise NotImplementedError


_NO_PROVIDER = _NoProvider()
_NO_RULES = ProviderRules()
