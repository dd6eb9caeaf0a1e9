"""`toolspace explain`: shows the settings of one tool, and the line of configuration that sets each one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import click

from toolspace.cli.config_file import read_config
from toolspace.cli.local_toolspace import (
    complete_tool_name,
    find_tool,
    not_found_message,
    started_toolspace,
)
from toolspace.cli.logs import mute_provider_warnings
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, align_columns, escape_control_characters, join_columns
from toolspace.config.configuration import Config
from toolspace.config.validation import snake_case
from toolspace.core.hooks import Hook
from toolspace.core.times import format_duration
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.effective_settings import DEFAULT, EffectiveSettings, SourcedValue
from toolspace.orchestrator.policy_rules import compile_policy
from toolspace.orchestrator.stages.circuit_breaker import find_circuit_scope
from toolspace.orchestrator.stages.quota import find_quotas
from toolspace.toolspace import Toolspace

T = TypeVar("T")
_PROVIDER_KEYS = {"timeout": "requestTimeoutMs"}
"""Settings that have another key in the entry of a provider."""
_LABELS = {
    "cacheScope": "cache scope",
    "maxBytes": "cap (bytes)",
    "queueRules": "queue's rules",
    "circuitBreakerFailures": "circuit breaker",
    "circuitBreakerDelay": "breaker's delay",
}

_REPEATED_ROWS = ("alias", "hook", "quota", "rule")


class ExplainedSetting(NamedTuple):
    """One setting of a tool."""

    name: str
    value: Any
    """As in JSON: durations in milliseconds."""
    source: str
    text: str
    """As people read it."""


@click.command("explain", cls=Command)
@click.argument("name", shell_complete=complete_tool_name)
@click.pass_obj
async def command(options: Options, name: str) -> int:
    """Show the settings of the tool NAME (timeout, queue, cache, size limit, policy) and where each one is set."""
    mute_provider_warnings(options, of_tool=name)
    async with started_toolspace(options, single_tool=name) as ts:
        match = find_tool(ts, name)
        if match is None:
            raise click.UsageError(not_found_message(ts, name))
        entry, settings = match
        rows = _Explanation(ts, read_config(options), entry, settings).rows()
        tokens = ts.orchestrator.token_cost(entry.tool)
    if options.json:
        options.output.document(_document(name, entry, rows, tokens))
    else:
        _print(options.output, name, entry, rows, tokens)
    return 0


class _Explanation:
    """Combines the rule that decides each setting, from the orchestrator, with its line in the configuration."""

    def __init__(self, ts: Toolspace, config: Config, entry: CatalogEntry, settings: EffectiveSettings) -> None:
        self._ts = ts
        self._config = config
        self._entry = entry
        self._settings = settings
        self._tool_policy = compile_policy(ts.orchestrator.services.policy_rules, entry, settings.approval)

    def rows(self) -> list[ExplainedSetting]:
        settings, tool = self._settings, self._entry.tool
        visible_source = self._override_source("visible") or self._definition_source("visible")
        rows = [
            self._row("timeout", settings.timeout, _format_timeout, _milliseconds),
            self._row("queue", settings.queue, lambda name: name or "none"),
            self._row("cache", settings.cache, lambda time: format_duration(time) if time else "off", _milliseconds),
        ]
        if settings.priority.value:
            rows.append(self._row("priority", settings.priority, str))
        if settings.cache.value:
            rows.append(self._row("cacheScope", settings.cache_scope, str))
        rows += [
            self._row("maxBytes", settings.max_bytes, "{:,}".format),
            self._policy(),
            *self._policy_rules(),
            *(
                ExplainedSetting("quota", quota.text, quota.source, quota.text)
                for quota in find_quotas(self._ts.orchestrator.services, self._entry)
            ),
            ExplainedSetting("visible", tool.visible, visible_source, _yes_no(tool.visible)),
        ]
        rows += self._circuit_breaker()
        rows += self._hooks()
        if settings.queue.value in self._config.queues:
            rows.insert(2, self._queue(settings.queue.value or ""))
        return rows + [
            ExplainedSetting("alias", alias, self._config.source("tools", "aliases", alias), alias)
            for alias in self._aliases()
        ]

    def _circuit_breaker(self) -> Iterator[ExplainedSetting]:
        settings = self._settings
        if find_circuit_scope(self._entry) == "none":
            return
        yield self._row("circuitBreakerFailures", settings.circuit_breaker_failures, _format_failures)
        if settings.circuit_breaker_failures.value:
            yield self._row(
                "circuitBreakerDelay", settings.circuit_breaker_delay, format_duration, lambda time: round(time * 1000)
            )

    def _row(
        self,
        key: str,
        setting: SourcedValue[T],
        to_text: Callable[[T], str],
        to_json: Callable[[T], Any] = lambda value: value,
    ) -> ExplainedSetting:
        source = self._source(key, setting.source)
        return ExplainedSetting(key, to_json(setting.value), source, to_text(setting.value))

    def _source(self, key: str, source: str) -> str:
        if (override := self._override_source(key)) is not None:
            return override
        if source == f"tool {self._entry.tool.name}":
            return self._definition_source(key)
        if getattr(self._entry.rules.rules, snake_case(key)) is not None:
            return self._config.source(*self._section(), _PROVIDER_KEYS.get(key, key))
        return source

    def _definition_source(self, key: str) -> str:
        """Returns where the definition of the tool sets a key: in the configuration, else in its code."""
        name = self._entry.tool.name
        if name not in self._config.tools.definitions:
            return f"tool {name}"
        return self._config.source("tools", "definitions", name, key)

    def _override_source(self, key: str) -> str | None:
        """Returns the line of the override that decides a key, or None."""
        entry = self._entry
        pattern = entry.rules.find_override_pattern(snake_case(key), *entry.spellings.names)
        return None if pattern is None else self._config.source("tools", "overrides", pattern, key)

    def _queue(self, name: str) -> ExplainedSetting:
        queue = self._config.queues[name]
        rules: dict[str, Any] = {"concurrent": queue.concurrent}
        if queue.rate is not None:
            rules["rate"] = f"{queue.rate.count} in {format_duration(queue.rate.seconds)}"
        if queue.max_waiting is not None:
            rules["maxWaiting"] = queue.max_waiting
        if queue.wait_timeout is not None:
            rules["waitTimeout"] = _milliseconds(queue.wait_timeout)
        text = ", ".join(f"{key} {value}" for key, value in rules.items())
        return ExplainedSetting("queueRules", rules, self._config.source("queues", name), text)

    def _hooks(self) -> list[ExplainedSetting]:
        """Returns a row for each line of `hooks` that matches the tool."""
        registry = self._ts.orchestrator.services.hooks
        before, after, error = registry.select(self._entry.spellings)
        hooks: dict[str, Hook] = {}
        for hook in registry.hooks:
            if hook in (*before, *after, *error):
                hooks.setdefault(hook.source, hook)  # One that masks has two points with the same source.
        return [
            ExplainedSetting("hook", _describe_hook(hook), source, f"{hook.on}: {hook.label}")
            for source, hook in hooks.items()
        ]

    def _policy(self) -> ExplainedSetting:
        """Returns whether the tool may be called, and the rule that decides it."""
        reason = self._entry.denial_reason
        rules, approval = self._tool_policy.rules, self._tool_policy.approval
        if reason is None and rules and not rules[0].depends_on_call and rules[0].decision != "allow":
            policy = "ask" if rules[0].decision == "ask" else "denied"
            return ExplainedSetting("policy", policy, rules[0].source, policy)
        if reason is None and any(rule.decision != "allow" for rule in rules):
            return ExplainedSetting("policy", "conditional", rules[0].source, "depends on the call")
        if reason is None and approval is not None:
            return ExplainedSetting("policy", "ask", self._source("approval", approval.source), "ask")
        if reason is None and rules:
            return ExplainedSetting("policy", "allowed", rules[0].source, "allowed")
        if reason is None:
            policy, key = "allowed", "toolsAllowed" if self._entry.rules.tools_allowed is not None else ""
        else:
            policy, key = "denied", next((key for key in ("toolsDenied", "toolsAllowed") if key in reason), "")
        if key:
            source = self._config.source(*self._section(), key)
            if source == DEFAULT:  # A pattern with a namespace may also be in the section `tools`.
                source = self._config.source("tools", key)
        else:
            source = (self._override_source("enabled") if reason is not None else None) or "default"
        return ExplainedSetting("policy", policy, source, policy)

    def _policy_rules(self) -> Iterator[ExplainedSetting]:
        """Yields the rules of `policies` that may decide on calls of the tool, if they depend on the call."""
        if any(rule.depends_on_call for rule in self._tool_policy.rules):
            for rule in self._tool_policy.rules:
                yield ExplainedSetting("rule", rule.text, rule.source, rule.text)

    def _section(self) -> tuple[str, ...]:
        """Returns the key path of the provider's configuration."""
        # Found by its line, not by the namespace, which a provider may choose itself.
        config, line = self._config, self._entry.rules.rules.source
        sections = {"providers": config.providers, "mcpServers": config.mcp_servers, "openapi": config.openapi}
        paths = ((section, name) for section, entries in sections.items() for name in entries)
        return next((path for path in paths if config.source(*path) == line), ("tools",))

    def _aliases(self) -> list[str]:
        targets = {alias: self._ts.orchestrator.explain(alias) for alias in self._config.tools.aliases}
        own_name = self._entry.tool.name
        return [alias for alias, match in targets.items() if match is not None and match[0].tool.name == own_name]


def _format_failures(count: int | None) -> str:
    return f"after {count} failures" if count else "off"


def _document(requested_name: str, entry: CatalogEntry, rows: list[ExplainedSetting], tokens: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        row.name: {"value": row.value, "source": row.source} for row in rows if row.name not in _REPEATED_ROWS
    }
    if rules := [{"value": row.value, "source": row.source} for row in rows if row.name == "rule"]:
        settings["policy"]["rules"] = rules
    if quotas := [{"value": row.value, "source": row.source} for row in rows if row.name == "quota"]:
        settings["quotas"] = quotas
    if entry.denial_reason is not None:
        settings["policy"]["reason"] = entry.denial_reason
    return {
        **entry.tool.to_dict(),
        "asked": requested_name,
        "provider": {"kind": entry.provider.kind, "namespace": entry.provider.namespace},
        "settings": settings,
        "hooks": [{**row.value, "source": row.source} for row in rows if row.name == "hook"],
        "aliases": {row.value: row.source for row in rows if row.name == "alias"},
        "tokens": tokens,
    }


def _print(
    output: CommandOutput, requested_name: str, entry: CatalogEntry, rows: list[ExplainedSetting], tokens: int
) -> None:
    tool = entry.tool
    origin = f"{tool.category}, from {entry.provider_name}, {tokens:,} tokens"
    output.line(f"{output.style(tool.name, bold=True)}  {output.style(origin, fg='cyan')}")
    if requested_name != tool.name:
        output.line(f"  ({escape_control_characters(requested_name)} means this tool)")
    for line in escape_control_characters(tool.description).strip().splitlines():
        output.line(f"  {line}".rstrip())
    output.line("")
    cells = align_columns([[_LABELS.get(row.name, row.name), escape_control_characters(row.text)] for row in rows])
    for row, (label, text) in zip(rows, cells, strict=True):
        output.line("  " + join_columns([label, text, output.style(row.source, fg="bright_black")]))
    if entry.denial_reason is not None:
        output.line(f"\n  It cannot be called: {escape_control_characters(entry.denial_reason)}.")
    output.line("\ninput schema")
    output.value(dict(tool.input_schema))


def _describe_hook(hook: Hook) -> dict[str, Any]:
    return {
        "on": hook.on,
        "use": hook.label,
        "tools": list(hook.patterns),
        "onFailure": hook.on_failure,
        "timeout": _milliseconds(hook.timeout),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else round(seconds * 1000, 3)


def _format_timeout(seconds: float) -> str:
    return "none" if math.isinf(seconds) else format_duration(seconds)


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
