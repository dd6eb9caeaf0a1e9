"""The catalog: every tool by its full name, with its provider and its rules. Resolves aliases and bare names.

The orchestrator owns it. It calls no tool.
"""

from __future__ import annotations

import logging
import operator
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolspace.core import json_text
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import SEPARATOR, did_you_mean, qualify_all, sanitise
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool, check_local_name
from toolspace.core.validation import InvalidArguments
from toolspace.errors import ToolNameConflict
from toolspace.orchestrator.settings import ProviderRules

if TYPE_CHECKING:
    from toolspace.orchestrator.call import Arguments
    from toolspace.orchestrator.pipeline import CallHandler, InstantHandler

_log = logging.getLogger("toolspace.providers")


class CatalogEntry:
    """One tool of one provider, and the handlers of its calls once it was called."""

    __slots__ = (
        "cache_keys",
        "denial_reason",
        "handler",
        "instant_handler",
        "is_registered",
        "is_stale",
        "local_name",
        "provider",
        "rules",
        "run_handler",
        "shared_executions",
        "tool",
    )

    def __init__(
        self, tool: Tool, local_name: str, provider: ToolProvider, rules: ProviderRules, *, is_registered: bool = True
    ) -> None:
        self.tool = tool
        self.local_name = local_name
        self.provider = provider
        self.rules = rules
        self.denial_reason = rules.denial_reason(local_name, tool.name)
        """Why the configuration denies the tool, or None."""
        self.is_registered = is_registered
        """False for the entry of a name that no provider offers: its calls need an entry too."""
        self.handler: CallHandler | None = None
        self.run_handler: CallHandler | None = None
        self.instant_handler: InstantHandler | None = None
        """Returns cached results without waiting; None if this tool cannot have such results."""
        self.cache_keys: dict[str, str] = {}
        """The text of recent arguments → their cache key."""
        self.shared_executions: dict[tuple[AbstractEventLoop, str], SharedExecution] = {}
        """By loop and cache key: the running calls whose result equal calls share."""
        self.is_stale = False
        """Whether the catalog has replaced or removed this entry: results of its last calls are not cached."""

    @property
    def provider_name(self) -> str:
        return _name(self.provider)


class SharedExecution:
    """A running call whose result equal calls share."""

    __slots__ = ("result_future",)

    def __init__(self) -> None:
        self.result_future: Future[ToolResult | None] | None = None
        """Created by the first call that waits. Its result is None if that call has to execute itself."""


class AmbiguousName(Exception):
    """Several namespaces offer a tool of this bare name."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)


class Catalog:
    """All entries. Finding one by its full name is a dict lookup, however many there are."""

    def __init__(self, on_change: Callable[[ToolProvider], None]) -> None:
        self.entries: dict[str, CatalogEntry] = {}
        self.aliases: Mapping[str, str] = {}
        self.version = 0
        """Changes whenever the entries change, for whatever is derived from them."""
        self.fallback_provider: ToolProvider | None = None
        """A provider whose tool gives way if another provider offers the same name: that is no conflict."""
        self._on_change = on_change
        self._providers: dict[ToolProvider, tuple[ProviderRules, Callable[[], None]]] = {}
        """Each provider's rules, and the function that ends the subscription to its changes."""
        self._spellings: dict[str, list[CatalogEntry]] | None = None
        self._listed_tools: dict[ToolProvider, Sequence[Tool]] = {}
        """The tools of each provider that its entries were made from."""
        self._conflicts: dict[ToolProvider, set[str]] = {}
        """Names that a provider lists and another provider has."""

    @property
    def providers(self) -> list[ToolProvider]:
        return list(self._providers)

    def __iter__(self) -> Iterator[CatalogEntry]:
        """Iterates over the entries that may be used, in the order of their providers."""
        return (entry for entry in self.entries.values() if entry.denial_reason is None)

    def add(self, provider: ToolProvider, rules: ProviderRules) -> None:
        """Adds a provider's tools. Raises `ToolNameConflict` if another provider offers one of the names."""
        entries = self._create_entries(provider, rules)
        self.check_names_available(provider, entries)
        self.entries.update(entries)
        self._notify(provider)
        self._providers[provider] = (rules, provider.on_change(lambda: self._refresh(provider)))
        self._refresh_fallback(provider)

    def remove(self, provider: ToolProvider) -> None:
        _, unsubscribe = self._providers.pop(provider)
        unsubscribe()
        self._conflicts.pop(provider, None)
        self._listed_tools.pop(provider, None)
        self.entries = {entry.tool.name: entry for entry in self._retire(provider)}
        self._notify(provider)
        self._resolve_conflicts()
        self._refresh_fallback(provider)

    def close(self) -> None:
        """Removes all entries. The providers remain listed, so that the orchestrator can close them."""
        for _, unsubscribe in self._providers.values():
            unsubscribe()
        self.entries = {}
        self._spellings = {}

    def configure(self, rules: Mapping[ToolProvider, ProviderRules]) -> None:
        """Sets new rules. Every entry is created again, so that no handler follows the old ones."""
        for provider, (old_rules, unsubscribe) in list(self._providers.items()):
            self._providers[provider] = (rules.get(provider, old_rules), unsubscribe)
            self._refresh(provider)

    def resolve(self, name: str, arguments: Arguments, *, is_call: bool = True) -> CatalogEntry | None:
        """Returns the entry for a name that is no full name: an alias, an original spelling, or a unique bare name.

        If several tools of one provider fit a bare name, a call takes the one whose schema its arguments fit. Raises
        `AmbiguousName` if several providers offer the bare name.
        """
        for _ in range(len(self.aliases)):  # An alias may point to another; a cycle of them ends here.
            if name not in self.aliases or name in self.entries:
                break
            name = self.aliases[name]
        if (entry := self.entries.get(name)) is not None:
            return entry
        matches = self._by_spelling().get(name, [])
        exact = [entry for entry in matches if SEPARATOR in name and _original_name(entry) == name]
        if exact:
            return exact[0]
        usable = [entry for entry in matches if entry.denial_reason is None] or matches
        if len({entry.provider for entry in usable}) > 1:
            raise AmbiguousName(entry.tool.name for entry in usable)
        fitting = [entry for entry in usable if not is_call or _accepts(entry.tool, arguments)]
        return fitting[0] if len(fitting) == 1 else None

    def not_found_message(self, name: str, candidates: Iterable[str]) -> str:
        """Returns the message for a name that means no tool. `candidates` are the names that the caller may know."""
        if name in self.aliases:
            return f'Tool "{name}" not found: it is an alias of "{self.aliases[name]}", which no provider offers'
        return f'Tool "{name}" not found{did_you_mean(name, candidates)}'

    def _refresh(self, provider: ToolProvider) -> None:
        """Replaces the entries of a provider whose list changed. Running calls keep their old entries."""
        rules, _ = self._providers[provider]
        try:
            entries = self._create_entries(provider, rules)
        except Exception as error:  # Code of an extension: its exception must not reach the caller of `notify_changed`.
            _log.warning("provider %s cannot list its tools: %r; keeping its last list", _name(provider), error)
            entries = {
                name: CatalogEntry(_configured_tool(entry.tool, name, rules), entry.local_name, provider, rules)
                for name, entry in self.entries.items()
                if entry.provider is provider
            }
        reported = self._conflicts.pop(provider, set[str]())
        conflicts = {name: owner for name in entries if (owner := self._find_owner(provider, name))}
        for name in conflicts.keys() - reported if provider is not self.fallback_provider else ():
            owner, provider_name = conflicts[name], _name(provider)
            _log.warning('"%s" is offered by %r and %r; using that of %r', name, owner, provider_name, owner)
        if conflicts:
            self._conflicts[provider] = set(conflicts)
        current = [*self._retire(provider), *(entry for name, entry in entries.items() if name not in conflicts)]
        positions = {provider: position for position, provider in enumerate(self._providers)}
        current.sort(key=lambda entry: positions[entry.provider])
        self.entries = {entry.tool.name: entry for entry in current}
        self._notify(provider)
        self._resolve_conflicts()
        self._refresh_fallback(provider)

    def _refresh_fallback(self, changed: ToolProvider) -> None:
        """Refreshes the fallback provider after another provider changed: other names may be free now."""
        if self.fallback_provider in self._providers and changed is not self.fallback_provider:
            self._refresh(self.fallback_provider)

    def _resolve_conflicts(self) -> None:
        """Refreshes the providers that have a name in conflict which is free now."""
        for provider, names in list(self._conflicts.items()):
            if names - self.entries.keys():
                self._refresh(provider)

    def is_current(self, provider: ToolProvider) -> bool:
        """Whether the entries of a provider were made from exactly the tools that it lists now."""
        try:
            previous, current = self._listed_tools.get(provider, ()), provider.list_tools()
            return len(previous) == len(current) and all(map(operator.is_, previous, current))
        except Exception:  # Code of an extension. `_refresh` reports it.
            return False

    def _create_entries(self, provider: ToolProvider, rules: ProviderRules) -> dict[str, CatalogEntry]:
        tools = provider.list_tools()
        self._listed_tools[provider] = tools
        entries: dict[str, CatalogEntry] = {}
        if not provider.namespace:
            for tool in tools:
                check_local_name(tool.name)
                if tool.name in entries:
                    raise ToolNameConflict(f'"{tool.name}" is offered twice by {provider.kind!r}; rename one')
                configured = _configured_tool(tool, tool.name, rules)
                entries[tool.name] = CatalogEntry(configured, tool.name, provider, rules)
            return entries
        if provider.exact_names:
            names = {tool.name: f"{provider.namespace}{SEPARATOR}{tool.name}" for tool in tools}
        else:
            names = qualify_all(provider.namespace, (tool.name for tool in tools))
        for tool in tools:
            full_name = names[tool.name]
            entries[full_name] = CatalogEntry(_configured_tool(tool, full_name, rules), tool.name, provider, rules)
        return entries

    def check_names_available(self, provider: ToolProvider, names: Iterable[str]) -> None:
        """Raises `ToolNameConflict` if another provider offers one of these names."""
        for name in names:
            if owner := self._find_owner(provider, name):
                raise ToolNameConflict(
                    f'"{name}" is offered by {owner!r} and {_name(provider)!r}; rename one, or give it a namespace'
                )

    def _find_owner(self, provider: ToolProvider, name: str) -> str | None:
        """Returns the name of another provider that has this tool name, or None."""
        entry = self.entries.get(name)
        if entry is None or entry.provider in (provider, self.fallback_provider):
            return None
        return entry.provider_name

    def _retire(self, provider: ToolProvider) -> list[CatalogEntry]:
        """Marks the entries of a provider as stale. Returns all others."""
        for entry in self.entries.values():
            if entry.provider is provider:
                entry.is_stale = True
        return [entry for entry in self.entries.values() if not entry.is_stale]

    def _notify(self, provider: ToolProvider) -> None:
        self.version += 1
        self._spellings = None
        self._on_change(provider)

    def _by_spelling(self) -> dict[str, list[CatalogEntry]]:
        if self._spellings is None:
            spellings: dict[str, list[CatalogEntry]] = {}
            for entry in self.entries.values():
                if entry.provider.namespace:
                    bare_name = entry.tool.name.removeprefix(sanitise(entry.provider.namespace) + SEPARATOR)
                    for spelling in dict.fromkeys((_original_name(entry), entry.local_name, bare_name)):
                        spellings.setdefault(spelling, []).append(entry)
            self._spellings = spellings
        return self._spellings


def _configured_tool(tool: Tool, name: str, rules: ProviderRules) -> Tool:
    """Returns the tool under its full name, with the visibility that the configuration sets."""
    override = rules.find_override("visible", tool.name, name) if rules.overrides else None
    if override is not None:
        return tool.replace(name=name, visible=override.value)
    return tool if tool.name == name else tool.replace(name=name)


def _name(provider: ToolProvider) -> str:
    return provider.namespace or provider.kind


def _original_name(entry: CatalogEntry) -> str:
    return f"{entry.provider.namespace}{SEPARATOR}{entry.local_name}"


def _accepts(tool: Tool, arguments: Arguments) -> bool:
    try:
        values: dict[str, Any] = json_text.parse_arguments(arguments)
        tool.validator.from_mapping(values)
    except (InvalidArguments, ValueError):
        return False
    except Exception:  # The schema itself is broken, which the call reports.
        return True
    return True
