"""Every tool by its name: who offers it, under which rules, and what a name that is not quite right means."""

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
    from toolspace.orchestrator.stage import CallHandler, InstantHandler


_log = logging.getLogger("toolspace.providers")


class CatalogEntry:
    """One tool of one provider, with the handlers that run it once someone called it."""

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
        """Why configuration forbids it, or None."""
        self.is_registered = is_registered
        """Whether anyone offers it; a call of a name that nobody offers needs an entry too."""
        self.handler: CallHandler | None = None
        self.instant_handler: InstantHandler | None = None
        """Answers a call that needs no waiting at all; None where no call of this tool can be answered so."""
        self.cache_keys: dict[str, str] = {}
        """Arguments as they were written → their key in the cache, for texts seen lately."""
        self.shared_executions: dict[tuple[AbstractEventLoop, str], SharedExecution] = {}
        """The calls under way that equal ones may share, by their key; with the loop, which has to be the same."""
        self.run_handler: CallHandler | None = None
        self.is_stale = False
        """Whether another entry stands in its place, or none: what its last calls answer is not to be kept."""

    @property
    def provider_name(self) -> str:
        return _name(self.provider)


class SharedExecution:
    """A call under way. `landed` is made by the first that waits for its outcome; None means: run it yourself."""

    __slots__ = ("result_future",)

    def __init__(self) -> None:
        self.result_future: Future[ToolResult | None] | None = None


class AmbiguousName(Exception):
    """A bare name that several namespaces offer."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)


class Catalog:
    """All entries. Finding one by its full name is one dict lookup, however many there are."""

    def __init__(self, on_change: Callable[[ToolProvider], None]) -> None:
        self.entries: dict[str, CatalogEntry] = {}
        self.aliases: Mapping[str, str] = {}
        self.version = 0
        """Changes whenever the entries do; what is derived from them compares it."""
        self._on_change = on_change
        self._providers: dict[ToolProvider, tuple[ProviderRules, Callable[[], None]]] = {}
        self._spellings: dict[str, list[CatalogEntry]] | None = None
        self._listed: dict[ToolProvider, Sequence[Tool]] = {}
        """What each provider gave, of which its entries were made."""
        self._lost: dict[ToolProvider, set[str]] = {}
        """Names that a provider would offer, and another one does."""
        self.fallback_provider: ToolProvider | None = None
        """One that gives way: a name that another offers too is the other's, and that is no conflict."""

    @property
    def providers(self) -> list[ToolProvider]:
        return list(self._providers)

    def __iter__(self) -> Iterator[CatalogEntry]:
        """The entries that may be used, in the order of their providers."""
        return (entry for entry in self.entries.values() if entry.denial_reason is None)

    def add(self, provider: ToolProvider, rules: ProviderRules) -> None:
        """Takes a provider's tools in. A name that someone else offers is an error that names both."""
        entries = self._entries_of(provider, rules)
        self.check_names_available(provider, entries)
        self.entries.update(entries)
        self._changed(provider)
        self._providers[provider] = (rules, provider.on_change(lambda: self._refresh(provider)))
        self._yield(provider)

    def remove(self, provider: ToolProvider) -> None:
        _, forget = self._providers.pop(provider)
        forget()
        self._lost.pop(provider, None)
        self._listed.pop(provider, None)
        self.entries = {entry.tool.name: entry for entry in self._without(provider)}
        self._changed(provider)
        self._give_back()
        self._yield(provider)

    def close(self) -> None:
        """Offers nothing any more; the providers are still known, to be closed."""
        for _, forget in self._providers.values():
            forget()
        self.entries = {}
        self._spellings = {}

    def configure(self, rules: Mapping[ToolProvider, ProviderRules]) -> None:
        """Puts new rules in force: every entry is made anew, so that no handler follows the old ones."""
        for provider, (old, forget) in list(self._providers.items()):
            self._providers[provider] = (rules.get(provider, old), forget)
            self._refresh(provider)

    def resolve(self, name: str, arguments: Arguments, *, is_call: bool = True) -> CatalogEntry | None:
        """The entry that a name means when it is no full name: alias, original spelling, or unique bare name.

        A call has to fit the tool that a bare name means; whoever only asks has no arguments. Raises `Ambiguous`
        where a bare name could mean several.
        """
        for _ in range(len(self.aliases)):  # An alias may lead to another; a circle of them leads nowhere.
            if name not in self.aliases or name in self.entries:
                break
            name = self.aliases[name]
        if (entry := self.entries.get(name)) is not None:
            return entry
        matches = self._by_spelling().get(name, [])
        exact = [entry for entry in matches if SEPARATOR in name and _original(entry) == name]
        if exact:
            return exact[0]
        usable = [entry for entry in matches if entry.denial_reason is None] or matches
        if len({entry.provider for entry in usable}) > 1:
            raise AmbiguousName(entry.tool.name for entry in usable)
        fitting = [entry for entry in usable if not is_call or _fits(entry.tool, arguments)]
        return fitting[0] if len(fitting) == 1 else None

    def not_found_message(self, name: str, candidates: Iterable[str]) -> str:
        """What to say to a caller who may know of these tools."""
        if name in self.aliases:
            return f'Tool "{name}" not found: it is an alias of "{self.aliases[name]}", which nobody offers'
        return f'Tool "{name}" not found{did_you_mean(name, candidates)}'

    def _refresh(self, provider: ToolProvider) -> None:
        """The provider's list changed: its entries are replaced in one go; calls in flight keep theirs."""
        rules, _ = self._providers[provider]
        try:
            fresh = self._entries_of(provider, rules)
        except Exception as error:  # Its own code: what it raises must not reach whoever says that the list changed.
            _log.warning("provider %s cannot list its tools: %r; it keeps those it had", _name(provider), error)
            fresh = {
                name: CatalogEntry(_as_configured(entry.tool, name, rules), entry.local_name, provider, rules)
                for name, entry in self.entries.items()
                if entry.provider is provider
            }
        known = self._lost.pop(provider, set[str]())
        lost = {name: owner for name in fresh if (owner := self._conflict(provider, name))}
        for name in lost.keys() - known if provider is not self.fallback_provider else ():
            owner, mine = lost[name], _name(provider)
            _log.warning('"%s" is offered by %r and %r; it stays that of %r', name, owner, mine, owner)
        if lost:
            self._lost[provider] = set(lost)
        others = self._without(provider)
        order = {one: position for position, one in enumerate(self._providers)}
        entries = [*others, *(entry for name, entry in fresh.items() if name not in lost)]
        self.entries = {entry.tool.name: entry for entry in sorted(entries, key=lambda one: order[one.provider])}
        self._changed(provider)
        self._give_back()
        self._yield(provider)

    def _yield(self, changed: ToolProvider) -> None:
        """Another provider offers other names now: the one that gives way looks at its own again."""
        if self.fallback_provider in self._providers and changed is not self.fallback_provider:
            self._refresh(self.fallback_provider)

    def _give_back(self) -> None:
        """Lets providers offer what they could not while another had the name."""
        for provider, names in list(self._lost.items()):
            if names - self.entries.keys():
                self._refresh(provider)

    def is_current(self, provider: ToolProvider) -> bool:
        """Whether the entries of a provider were made of just the tools that it lists now."""
        try:
            known, now = self._listed.get(provider, ()), provider.list_tools()
            return len(known) == len(now) and all(map(operator.is_, known, now))
        except Exception:  # Its own code; whoever refreshes reports it.
            return False

    def _entries_of(self, provider: ToolProvider, rules: ProviderRules) -> dict[str, CatalogEntry]:
        tools = provider.list_tools()
        self._listed[provider] = tools
        entries: dict[str, CatalogEntry] = {}
        if not provider.namespace:
            for tool in tools:
                check_local_name(tool.name)
                if tool.name in entries:
                    raise ToolNameConflict(f'"{tool.name}" is offered twice by {provider.kind!r}; rename one')
                entries[tool.name] = CatalogEntry(_as_configured(tool, tool.name, rules), tool.name, provider, rules)
            return entries
        if provider.exact_names:
            names = {tool.name: f"{provider.namespace}{SEPARATOR}{tool.name}" for tool in tools}
        else:
            names = qualify_all(provider.namespace, (tool.name for tool in tools))
        for tool in tools:
            full = names[tool.name]
            entries[full] = CatalogEntry(_as_configured(tool, full, rules), tool.name, provider, rules)
        return entries

    def check_names_available(self, provider: ToolProvider, names: Iterable[str]) -> None:
        """Raises where another provider offers one of these names."""
        for name in names:
            if owner := self._conflict(provider, name):
                raise ToolNameConflict(
                    f'"{name}" is offered by {owner!r} and {_name(provider)!r}; rename one, or give it a namespace'
                )

    def _conflict(self, provider: ToolProvider, name: str) -> str | None:
        existing = self.entries.get(name)
        if existing is None or existing.provider in (provider, self.fallback_provider):
            return None
        return existing.provider_name

    def _without(self, provider: ToolProvider) -> list[CatalogEntry]:
        """The entries of all others, when those of this one end."""
        for entry in self.entries.values():
            if entry.provider is provider:
                entry.is_stale = True
        return [entry for entry in self.entries.values() if not entry.is_stale]

    def _changed(self, provider: ToolProvider) -> None:
        self.version += 1
        self._spellings = None
        self._on_change(provider)

    def _by_spelling(self) -> dict[str, list[CatalogEntry]]:
        if self._spellings is None:
            spellings: dict[str, list[CatalogEntry]] = {}
            for entry in self.entries.values():
                if entry.provider.namespace:
                    bare = entry.tool.name.removeprefix(sanitise(entry.provider.namespace) + SEPARATOR)
                    for spelling in dict.fromkeys((_original(entry), entry.local_name, bare)):
                        spellings.setdefault(spelling, []).append(entry)
            self._spellings = spellings
        return self._spellings


def _as_configured(tool: Tool, name: str, rules: ProviderRules) -> Tool:
    """The tool under its full name, as visible as configuration wants it."""
    said = rules.find_override("visible", tool.name, name) if rules.overrides else None
    if said is not None:
        return tool.replace(name=name, visible=said.value)
    return tool if tool.name == name else tool.replace(name=name)


def _name(provider: ToolProvider) -> str:
    return provider.namespace or provider.kind


def _original(entry: CatalogEntry) -> str:
    return f"{entry.provider.namespace}{SEPARATOR}{entry.local_name}"


def _fits(tool: Tool, arguments: Arguments) -> bool:
    try:
        values: dict[str, Any] = json_text.parse_arguments(arguments)
        tool.validator.from_mapping(values)
    except (InvalidArguments, ValueError):
        return False
    except Exception:  # The schema itself is broken, which the call can say.
        return True
    return True
