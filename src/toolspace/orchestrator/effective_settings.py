"""The settings of a tool (timeout, queue, cache, result size, circuit breaker), each with the place that set it.

The composition root makes rules from the configuration; the catalog and the pipeline apply them. Reads no files.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from toolspace.core import defaults
from toolspace.core.names import SEPARATOR
from toolspace.core.tool import CacheScope, Tool

T = TypeVar("T")
DEFAULT = "default"


class SourcedValue(msgspec.Struct, Generic[T], frozen=True):
    """A value and where it is set."""

    value: T
    source: str = DEFAULT


class CallDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What applies if neither the tool nor its provider sets it. Durations are seconds."""

    tool_timeout: SourcedValue[float] = SourcedValue(defaults.TOOL_TIMEOUT_SECONDS)
    tool_response_max_bytes: SourcedValue[int] = SourcedValue(defaults.TOOL_RESPONSE_MAX_BYTES)
    max_inline_bytes: SourcedValue[int] = SourcedValue(defaults.MAX_INLINE_BYTES)
    max_tool_calls_per_turn: SourcedValue[int | None] = SourcedValue(None)
    max_concurrent_tools: SourcedValue[int | None] = SourcedValue(None)
    context_window: SourcedValue[int | None] = SourcedValue(None)
    tool_search_threshold: SourcedValue[int | None] = SourcedValue(defaults.TOOL_SEARCH_THRESHOLD)
    circuit_breaker_failures: SourcedValue[int | None] = SourcedValue(defaults.CIRCUIT_BREAKER_FAILURES)
    circuit_breaker_delay: SourcedValue[float] = SourcedValue(defaults.CIRCUIT_BREAKER_DELAY_SECONDS)
    start_patience: SourcedValue[float] = SourcedValue(defaults.START_PATIENCE_SECONDS)


class ToolRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration sets for one tool, or for all tools of a provider. None: not set."""

    timeout: float | None = None
    queue: str | None = None
    priority: int | None = None
    """Calls with a higher one leave their queue first; 0 if it is not set."""
    cache: float | None = None
    cache_scope: CacheScope | None = None
    """`shared`: all principals who may reach the same share its cached results."""
    max_bytes: int | None = None
    enabled: bool | None = None
    visible: bool | None = None
    approval: str | None = None
    """`required`: a person has to approve each call. `none`: the tool's own setting does not hold."""
    circuit_breaker_failures: int | None = None
    """0: no circuit breaker."""
    circuit_breaker_delay: float | None = None
    source: str = DEFAULT
    """Where these rules are written. The key of a rule is appended to it."""


class ToolSpellings(NamedTuple):
    """Every name by which rules and callers may mean one tool."""

    full: tuple[str, ...]
    """The listed name, and the namespace with the provider's own spelling: `fs__delete_file`, `fs__delete-file`."""
    local: tuple[str, ...]
    """Without the namespace. Several tools may have the same one. With the aliases of such a name."""
    aliases: tuple[str, ...] = ()
    """The aliases of a full name."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.full, *self.local, *self.aliases)

    def match(self, pattern: str) -> bool:
        """Whether a pattern means this tool. `f*` does not mean all tools of the server `fs`; `fs__*` does."""
        return matches_name(pattern, self.names if SEPARATOR in pattern else (*self.local, *self.aliases))


class ProviderRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration sets for a provider and its tools."""

    rules: ToolRules = ToolRules()
    tools_allowed: Sequence[str] | None = None
    tools_denied: Sequence[str] = ()
    required: bool = False
    start_patience: float | None = None
    """How long a list of tools waits for its first start, in seconds; None: `CallDefaults.start_patience`."""
    overrides: Mapping[str, ToolRules] = {}
    """Tool name or glob → rules. Each key applies by itself: the most specific rule that matches and sets it wins."""

    def denial_reason(self, spellings: ToolSpellings) -> str | None:
        """Returns why a tool of this provider may not be used, or None. Denying wins over allowing."""
        full_name = spellings.full[0]
        for pattern in self.tools_denied:
            if spellings.match(pattern):
                return f'tool "{full_name}" is denied by toolsDenied ("{pattern}")'
        if self.tools_allowed is not None and not any(map(spellings.match, self.tools_allowed)):
            return f'tool "{full_name}" is not in toolsAllowed'
        enabled = self.find_override("enabled", *spellings.names) if self.overrides else None
        if enabled is not None and enabled.value is False:
            return f'tool "{full_name}" is disabled ({enabled.source})'
        return None

    def only_namespaced(self) -> ProviderRules:
        """Returns the denied tools and overrides whose pattern has a namespace, for tools that are not local.

        Others, such as `*` or `read_*`, do not apply to the tools that control a run (`agent__final_report`).
        """
        return ProviderRules(
            tools_denied=tuple(pattern for pattern in self.tools_denied if SEPARATOR in pattern),
            overrides={pattern: rules for pattern, rules in self.overrides.items() if SEPARATOR in pattern},
        )

    def inherit(self, base: ProviderRules) -> ProviderRules:
        """Returns these rules with the denied tools and overrides of `base`. Equal overrides here win."""
        return msgspec.structs.replace(
            self,
            tools_denied=(*base.tools_denied, *self.tools_denied),
            overrides={**base.overrides, **self.overrides},
        )

    def find_override(self, key: str, *names: str) -> SourcedValue[Any] | None:
        """Returns what the overrides set under a key for the tool with these names, and where; None if nothing."""
        pattern = self.find_override_pattern(key, *names)
        if pattern is None:
            return None
        rules = self.overrides[pattern]
        return SourcedValue(getattr(rules, key), _source_of_key(rules.source, key))

    def find_override_pattern(self, key: str, *names: str) -> str | None:
        """Returns the override that sets a key: the exact name, else the glob with most letters, the last of equals."""
        best_rank: tuple[bool, int, int] | None = None
        best_pattern: str | None = None
        for position, (pattern, rules) in enumerate(self.overrides.items()):
            if getattr(rules, key) is None:
                continue
            is_exact = pattern in names
            if is_exact or matches_name(pattern, names):
                rank = (is_exact, sum(letter not in "*?[]" for letter in pattern), position)
                if best_rank is None or rank > best_rank:
                    best_rank, best_pattern = rank, pattern
        return best_pattern


def matches_name(pattern: str, names: Iterable[str]) -> bool:
    """Whether a glob matches one of these names. Ignores case."""
    folded_pattern = pattern.casefold()
    return any(fnmatch.fnmatchcase(name.casefold(), folded_pattern) for name in names)


class EffectiveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one tool, and where each is set."""

    timeout: SourcedValue[float]
    queue: SourcedValue[str | None]
    priority: SourcedValue[int]
    cache: SourcedValue[float | None]
    cache_scope: SourcedValue[CacheScope]
    max_bytes: SourcedValue[int]
    approval: SourcedValue[str | None]
    circuit_breaker_failures: SourcedValue[int | None]
    """None or 0: no circuit breaker."""
    circuit_breaker_delay: SourcedValue[float]


def resolve_settings(
    tool: Tool, names: Sequence[str], provider: ProviderRules, defaults: CallDefaults
) -> EffectiveSettings:
    """Returns the settings of a tool. Overrides win over the tool itself, then come its provider and the defaults.

    `names` are all names of the tool, for the overrides.
    """

    def choose(key: str, tool_value: Any, default: SourcedValue[Any]) -> SourcedValue[Any]:
        if provider.overrides and (override := provider.find_override(key, *names)) is not None:
            return override
        if tool_value is not None:
            return SourcedValue(tool_value, f"tool {tool.name}")
        if (value := getattr(provider.rules, key)) is not None:
            return SourcedValue(value, _source_of_key(provider.rules.source, key))
        return default

    return EffectiveSettings(
        timeout=choose("timeout", tool.timeout, defaults.tool_timeout),
        queue=choose("queue", tool.queue, SourcedValue(None)),
        priority=choose("priority", tool.priority, SourcedValue(0)),
        cache=choose("cache", tool.cache, SourcedValue(None)),
        cache_scope=choose("cache_scope", tool.cache_scope, SourcedValue("principal")),
        max_bytes=choose("max_bytes", None, defaults.tool_response_max_bytes),
        approval=choose("approval", tool.approval, SourcedValue(None)),
        circuit_breaker_failures=choose("circuit_breaker_failures", None, defaults.circuit_breaker_failures),
        circuit_breaker_delay=choose("circuit_breaker_delay", None, defaults.circuit_breaker_delay),
    )


def _source_of_key(source: str, key: str) -> str:
    """Appends the camelCase name of a key to a source; inside the closing parenthesis, if the source ends with one."""
    head, *rest = key.split("_")
    name = f"{head}{''.join(part.title() for part in rest)}"
    return f"{source[:-1]}.{name})" if source.endswith(")") else f"{source}.{name}"
