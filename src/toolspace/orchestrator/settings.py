"""What holds for a tool: its timeout, queue, cache and cap, each with the place that set it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from toolspace.core import defaults
from toolspace.core.tool import Tool

T = TypeVar("T")
DEFAULT = "default"


class SourcedValue(msgspec.Struct, Generic[T], frozen=True):
    """A value and where it came from."""

    value: T
    source: str = DEFAULT


class CallDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What holds where a tool and its provider say nothing. Durations are seconds."""

    tool_timeout: SourcedValue[float] = SourcedValue(defaults.TOOL_TIMEOUT_SECONDS)
    tool_response_max_bytes: SourcedValue[int] = SourcedValue(defaults.TOOL_RESPONSE_MAX_BYTES)
    max_tool_calls_per_turn: SourcedValue[int | None] = SourcedValue(None)
    max_concurrent_tools: SourcedValue[int | None] = SourcedValue(None)
    context_window: SourcedValue[int | None] = SourcedValue(None)
    tool_search_threshold: SourcedValue[int | None] = SourcedValue(defaults.TOOL_SEARCH_THRESHOLD)


class ToolRules(msgspec.Struct, frozen=True, kw_only=True):
    """What configuration says of one tool, or of all tools of a provider. None says nothing."""

    timeout: float | None = None
    queue: str | None = None
    cache: float | None = None
    cache_per_user: bool | None = None
    max_bytes: int | None = None
    enabled: bool | None = None
    visible: bool | None = None
    source: str = DEFAULT
    """Where these rules are written; a rule's own key is added to it."""


class ProviderRules(msgspec.Struct, frozen=True, kw_only=True):
    """What configuration says of a provider and its tools."""

    rules: ToolRules = ToolRules()
    tools_allowed: Sequence[str] | None = None
    tools_denied: Sequence[str] = ()
    required: bool = False
    overrides: Mapping[str, ToolRules] = {}
    """Tool name or glob → rules. Each key holds by itself: of all rules that fit and say it, the most specific."""

    def denial_reason(self, own_name: str, full_name: str) -> str | None:
        """Why a tool of this provider may not be used, or None. Deny wins."""

        def fits(pattern: str) -> bool:
            return fnmatch.fnmatchcase(own_name.casefold(), pattern.casefold())

        for pattern in self.tools_denied:
            if fits(pattern):
                return f'tool "{full_name}" is denied by toolsDenied ("{pattern}")'
        if self.tools_allowed is not None and not any(map(fits, self.tools_allowed)):
            return f'tool "{full_name}" is not in toolsAllowed'
        said = self.find_override("enabled", own_name, full_name)
        if said is not None and said.value is False:
            return f'tool "{full_name}" is disabled ({said.source})'
        return None

    def find_override(self, key: str, *names: str) -> SourcedValue[Any] | None:
        """What the overrides say under one key of the tool with these names, and where."""
        pattern = self.find_override_pattern(key, *names)
        if pattern is None:
            return None
        rules = self.overrides[pattern]
        return SourcedValue(getattr(rules, key), _place(rules.source, key))

    def find_override_pattern(self, key: str, *names: str) -> str | None:
        """The override that decides a key: an exact name, else the glob with most letters, the last of equals."""
        best: tuple[bool, int, int] | None = None
        chosen: str | None = None
        for position, (pattern, rules) in enumerate(self.overrides.items()):
            if getattr(rules, key) is None:
                continue
            exact = pattern in names
            folded = pattern.casefold()
            if exact or any(fnmatch.fnmatchcase(name.casefold(), folded) for name in names):
                rank = (exact, sum(letter not in "*?[]" for letter in pattern), position)
                if best is None or rank > best:
                    best, chosen = rank, pattern
        return chosen


class EffectiveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for one tool, and why."""

    timeout: SourcedValue[float]
    queue: SourcedValue[str | None]
    cache: SourcedValue[float | None]
    cache_per_user: SourcedValue[bool]
    max_bytes: SourcedValue[int]


def resolve_settings(tool: Tool, own_name: str, provider: ProviderRules, defaults: CallDefaults) -> EffectiveSettings:
    """Configuration of the tool, then the tool itself, then its provider, then the defaults."""

    def choose(key: str, own: Any, fallback: SourcedValue[Any]) -> SourcedValue[Any]:
        if provider.overrides and (said := provider.find_override(key, own_name, tool.name)) is not None:
            return said
        if own is not None:
            return SourcedValue(own, f"tool {tool.name}")
        if (value := getattr(provider.rules, key)) is not None:
            return SourcedValue(value, _place(provider.rules.source, key))
        return fallback

    return EffectiveSettings(
        timeout=choose("timeout", tool.timeout, defaults.tool_timeout),
        queue=choose("queue", tool.queue, SourcedValue(None)),
        cache=choose("cache", tool.cache, SourcedValue(None)),
        cache_per_user=choose("cache_per_user", tool.cache_per_user or None, SourcedValue(False)),
        max_bytes=choose("max_bytes", None, defaults.tool_response_max_bytes),
    )


def _place(source: str, key: str) -> str:
    head, *rest = key.split("_")
    name = f"{head}{''.join(part.title() for part in rest)}"
    return f"{source[:-1]}.{name})" if source.endswith(")") else f"{source}.{name}"
