"""The catalog: every tool by its full name, with its provider and its rules; and which tool another name means.

Aliases, original spellings and bare names are resolved too. A name that means no tool gets an entry whose calls fail
with the reason. The orchestrator owns the catalog, which calls no tool.
"""

from __future__ import annotations

import logging
import operator
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from toolspace.core import json_text
from toolspace.core.argument_validation import InvalidArguments
from toolspace.core.extension_points import ToolProvider
from toolspace.core.names import SEPARATOR, did_you_mean, qualify_all, sanitise
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool, check_local_name
from toolspace.errors import ErrorKind, ToolNameConflict
from toolspace.orchestrator.effective_settings import ProviderRules, ToolSpellings, matches_name
from toolspace.orchestrator.tool_search import is_permitted

if TYPE_CHECKING:
    from toolspace.core.tool_context import ToolContext
    from toolspace.orchestrator.call import Arguments, Call
    from toolspace.orchestrator.pipeline import CallHandler, CallServices, InstantHandler
    from toolspace.orchestrator.stages.cache import CacheKeys

_log = logging.getLogger("toolspace.providers")
_SHARED_NAMESPACES = frozenset(("agent", "router"))
"""Namespaces of several providers: a pattern may mean a tool of another one."""


class Failure(NamedTuple):
    """Why every call of an entry fails."""

    kind: ErrorKind
    message: str | Callable[[Call], str]
    """A function if the message depends on what the caller may know."""


class CatalogEntry(msgspec.Struct, eq=False):
    """One tool of one provider, and the handlers of its calls once it was called."""

    tool: Tool
    local_name: str
    provider: ToolProvider
    rules: ProviderRules
    spellings: ToolSpellings
    failure: Failure | None = None
    """Set if no provider offers the name: its calls need an entry too."""
    is_registered: bool = True
    denial_reason: str | None = None
    """Why the configuration denies the tool, or None."""
    handler: CallHandler | None = None
    run_handler: CallHandler | None = None
    instant_handler: InstantHandler | None = None
    """Returns cached results without waiting; None if this tool cannot have such results."""
    fingerprint: str = ""
    """What the tool executes, as a digest; empty until a cache needs it. See `tool_fingerprint`."""
    cache_keys: CacheKeys | None = None
    """The keys of its cached results; None until the first call that may be cached."""
    shared_executions: dict[tuple[AbstractEventLoop, str], Future[ToolResult | None] | None] = {}
    """By loop and cache key: the running calls whose result equal calls share. The first call that waits creates the
    future; its result is None if the waiting calls have to execute themselves."""
    is_stale: bool = False
    """Whether the catalog has replaced or removed this entry: results of its last calls are not cached."""

    def __post_init__(self) -> None:
        self.is_registered = self.failure is None
        self.denial_reason = self.rules.denial_reason(self.spellings)

    @property
    def provider_name(self) -> str:
        return _name(self.provider)


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
        self._reported_patterns: set[tuple[ToolProvider, str]] = set()
        """Patterns that fit no tool of a provider, and were logged."""
        self._conflicts: dict[ToolProvider, set[str]] = {}
        """Names that a provider lists and another provider has."""

    @property
    def providers(self) -> list[ToolProvider]:
        return list(self._providers)

    def find_unmatched(self, patterns: Iterable[str]) -> list[str]:
        """Returns the patterns that match no tool, denied ones included."""
        spellings = [entry.spellings for entry in self.entries.values()]
        return [pattern for pattern in patterns if not any(matches_name(pattern, tool.names) for tool in spellings)]

    def get_timeout(self, provider: ToolProvider, default: float) -> float:
        """Returns how long calls of a provider may take, if the rules for one of its tools say nothing else."""
        timeout = self._providers[provider][0].rules.timeout
        return default if timeout is None else timeout

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
        self._reported_patterns = {item for item in self._reported_patterns if item[0] is not provider}
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
        fitting_entries = [entry for entry in usable if not is_call or _accepts(entry.tool, arguments)]
        return fitting_entries[0] if len(fitting_entries) == 1 else None

    def _refresh(self, provider: ToolProvider) -> None:
        """Replaces the entries of a provider whose list changed. Running calls keep their old entries."""
        rules, _ = self._providers[provider]
        try:
            entries = self._create_entries(provider, rules)
        except Exception as error:  # Code of an extension: its exception must not reach the caller of `notify_changed`.
            _log.warning("provider %s cannot list its tools: %r; keeping its last list", _name(provider), error)
            aliases = _invert(self.aliases)
            entries = {
                name: _create_entry(entry.tool, entry.local_name, name, provider, rules, aliases)
                for name, entry in self.entries.items()
                if entry.provider is provider
            }
        reported_names = self._conflicts.pop(provider, set[str]())
        conflicts = {name: owner for name in entries if (owner := self._find_owner(provider, name))}
        for name in conflicts.keys() - reported_names if provider is not self.fallback_provider else ():
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

    def _refresh_fallback(self, changed_provider: ToolProvider) -> None:
        """Refreshes the fallback provider after another provider changed: other names may be free now."""
        if self.fallback_provider in self._providers and changed_provider is not self.fallback_provider:
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
        aliases = _invert(self.aliases)
        if not provider.namespace:
            for tool in tools:
                check_local_name(tool.name)
                if tool.name in entries:
                    raise ToolNameConflict(f'"{tool.name}" is offered twice by {provider.kind!r}; rename one')
                entries[tool.name] = _create_entry(tool, tool.name, tool.name, provider, rules, aliases)
            return entries
        if provider.exact_names:
            names = {tool.name: f"{provider.namespace}{SEPARATOR}{tool.name}" for tool in tools}
        else:
            names = qualify_all(provider.namespace, (tool.name for tool in tools))
        for tool in tools:
            full_name = names[tool.name]
            entries[full_name] = _create_entry(tool, tool.name, full_name, provider, rules, aliases)
        self._report_unmatched(provider, rules, entries.values())
        return entries

    def _report_unmatched(
        self, provider: ToolProvider, rules: ProviderRules, entries: Collection[CatalogEntry]
    ) -> None:
        """Logs each rule for this provider that fits none of its tools, once. An empty list is not known yet."""
        if not entries:
            return
        namespaces = tuple(
            f"{name}{SEPARATOR}".casefold() for name in (provider.namespace, sanitise(provider.namespace))
        )
        patterns = {
            "toolsAllowed": rules.tools_allowed or (),
            "toolsDenied": rules.tools_denied,
            # Without a namespace, an override may mean a tool of another provider.
            "overrides": [pattern for pattern in rules.overrides if SEPARATOR in pattern],
        }
        for key, pattern in [(section, item) for section in patterns for item in patterns[section]]:
            if SEPARATOR in pattern and not pattern.casefold().startswith(namespaces):
                continue
            if (provider, pattern) in self._reported_patterns or any(
                entry.spellings.match(pattern) for entry in entries
            ):
                continue
            if provider.namespace not in _SHARED_NAMESPACES:
                self._reported_patterns.add((provider, pattern))
                _log.warning('provider %s: %s: "%s" matches no tool', _name(provider), key, pattern)

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


class NameResolver:
    """Finds the tool that a name means. Names that a caller may not use do not appear in its error messages."""

    def __init__(self, catalog: Catalog, services: CallServices) -> None:
        self._catalog = catalog
        self._services = services

    def resolve(
        self, name: str, arguments: Arguments, *, is_call: bool, unavailable: Callable[[], Mapping[ToolProvider, str]]
    ) -> CatalogEntry:
        """Returns the entry that a name means, or one whose calls fail.

        `unavailable` returns why each provider that is not ready is not.
        """
        try:
            entry = self._catalog.entries.get(name) or self._catalog.resolve(name, arguments, is_call=is_call)
        except AmbiguousName as error:
            return missing_entry(name, "unknown_tool", partial(self._ambiguous_message, name, tuple(error.names)))
        if entry is not None:
            return entry
        for provider, reason in unavailable().items():
            if provider.namespace and sanitise(name).startswith(sanitise(provider.namespace) + SEPARATOR):
                text = f'provider "{provider.namespace}" is not available: {reason}'
                return missing_entry(name, "transport_error", partial(self._unavailable_message, name, text))
        return missing_entry(name, "unknown_tool", partial(self._not_found_message, name))

    def _not_found_message(self, name: str, call: Call) -> str:
        aliases = self._catalog.aliases
        if name in aliases:
            return f'Tool "{name}" not found: it is an alias of "{aliases[name]}", which no provider offers'
        return f'Tool "{name}" not found{did_you_mean(name, self._permitted_names(self._catalog, call))}'

    def _ambiguous_message(self, name: str, candidates: Sequence[str], call: Call) -> str:
        entries = self._catalog.entries
        candidate_entries = (entries[candidate] for candidate in candidates if candidate in entries)
        names = [f'"{candidate}"' for candidate in self._permitted_names(candidate_entries, call)]
        if not names:
            return self._not_found_message(name, call)
        return f'Tool "{name}" not found: it could mean {", ".join(names)}; use the full name'

    def _unavailable_message(self, name: str, reason: str, call: Call) -> str:
        may_know = is_permitted(Tool(name), call.base_context, self._services.list_policies())
        return reason if may_know else self._not_found_message(name, call)

    def _permitted_names(self, entries: Iterable[CatalogEntry], call: Call) -> Iterable[str]:
        policies, caller = self._services.list_policies(), call.base_context
        return (entry.tool.name for entry in entries if not policies or is_permitted(entry.tool, caller, policies))


def missing_entry(name: str, kind: ErrorKind, message: str | Callable[[Call], str]) -> CatalogEntry:
    """Returns an entry whose calls fail with this message."""
    spellings = ToolSpellings((name,), (name,))
    return CatalogEntry(Tool(name), name, _NO_PROVIDER, _NO_RULES, spellings, Failure(kind, message))


class _NoProvider(ToolProvider):
    kind = "none"
    circuit_scope = "none"

    def list_tools(self) -> Sequence[Tool]:
        return ()

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        raise NotImplementedError


_NO_PROVIDER = _NoProvider()
_NO_RULES = ProviderRules()


def _create_entry(
    tool: Tool,
    local_name: str,
    name: str,
    provider: ToolProvider,
    rules: ProviderRules,
    aliases: Mapping[str, Sequence[str]],
) -> CatalogEntry:
    """Returns the entry of a tool under its full name. `aliases` maps a name to its aliases."""
    if provider.namespace:
        full_names = dict.fromkeys((name, f"{provider.namespace}{SEPARATOR}{local_name}"))
        local_names = dict.fromkeys((local_name, name.removeprefix(sanitise(provider.namespace) + SEPARATOR)))
    else:
        full_names = local_names = {name: None}
    spellings = ToolSpellings(tuple(full_names), tuple(local_names))
    if aliases:
        full_aliases = tuple(alias for full_name in full_names for alias in aliases.get(full_name, ()))
        local_aliases = [alias for local in local_names for alias in aliases.get(local, ()) if local not in full_names]
        spellings = ToolSpellings(tuple(full_names), (*local_names, *local_aliases), full_aliases)
    override = rules.find_override("visible", *spellings.names) if rules.overrides else None
    if override is not None:
        tool = tool.replace(name=name, visible=override.value)
    elif tool.name != name:
        tool = tool.replace(name=name)
    return CatalogEntry(tool, local_name, provider, rules, spellings)


def _invert(aliases: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """Returns each target with its aliases. An alias of an alias counts for the last target."""
    aliases_by_target: dict[str, list[str]] = {}
    for alias, target in aliases.items():
        for _ in range(len(aliases)):  # A cycle of aliases ends here.
            if target not in aliases:
                break
            target = aliases[target]
        aliases_by_target.setdefault(target, []).append(alias)
    return aliases_by_target


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
