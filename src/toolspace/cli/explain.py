"""`toolspace explain`: what holds for one tool, and the line of configuration that says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import click

from toolspace.cli.completion import tool_names
from toolspace.cli.local_toolspace import (
    config_environment,
    config_path,
    find_tool,
    not_found_message,
    started_toolspace,
)
from toolspace.cli.logs import mute_provider_warnings
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, escape_control_characters
from toolspace.cli.runner import run
from toolspace.config.load import Config, load_config
from toolspace.core.times import format_duration
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.settings import EffectiveSettings, SourcedValue
from toolspace.toolspace import Toolspace

T = TypeVar("T")


class ExplainedSetting(NamedTuple):
    """One thing that holds for a tool."""

    name: str
    value: Any
    """As it is in JSON: durations in milliseconds."""
    source: str
    shown: str


@click.command("explain", cls=Command)
@click.argument("name", shell_complete=tool_names)
@click.pass_obj
def command(options: Options, name: str) -> int:
    """Show what holds for the tool NAME: its timeout, queue, cache, cap and policy, and what set each."""
    return run(lambda _: _explain(options, name))


async def _explain(options: Options, name: str) -> int:
    mute_provider_warnings(options, of_tool=name)
    async with started_toolspace(options, only_for=name) as ts:
        found = find_tool(ts, name)
        if found is None:
            raise click.UsageError(not_found_message(ts, name))
        entry, settings = found
        config = load_config(config_path(options), environ=config_environment(options))
        rows = _Explanation(ts, config, entry, settings).rows()
        tokens = ts.orchestrator.token_cost(entry.tool)
    if options.json:
        options.output.document(_document(name, entry, rows, tokens))
    else:
        _print(options.output, name, entry, rows, tokens)
    return 0


class _Explanation:
    """Finds what set each thing: the orchestrator knows which rule, the configuration which line."""

    def __init__(self, ts: Toolspace, config: Config, entry: CatalogEntry, settings: EffectiveSettings) -> None:
        self._ts = ts
        self._config = config
        self._entry = entry
        self._settings = settings

    def rows(self) -> list[ExplainedSetting]:
        settings, tool = self._settings, self._entry.tool
        cache = settings.cache.value
        rows = [
            self._row("timeout", settings.timeout, _milliseconds, _or_never),
            self._row("queue", settings.queue, _same, _or_none),
            self._row("cache", settings.cache, _milliseconds, _or_off),
        ]
        if cache:
            rows.append(self._row("cachePerUser", settings.cache_per_user, _same, _yes_no))
        rows += [
            self._row("maxBytes", settings.max_bytes, _same, "{:,}".format),
            self._policy(),
            ExplainedSetting("visible", tool.visible, self._visible_source(), _yes_no(tool.visible)),
        ]
        if settings.queue.value in self._config.queues:
            rows.insert(2, self._queue(settings.queue.value or ""))
        return rows + [
            ExplainedSetting("alias", alias, self._config.source("tools", "aliases", alias), alias)
            for alias in self._aliases()
        ]

    def _row(
        self, key: str, setting: SourcedValue[T], wire: Callable[[T], Any], shown: Callable[[T], str]
    ) -> ExplainedSetting:
        return ExplainedSetting(key, wire(setting.value), self._source(key, setting.source), shown(setting.value))

    def _source(self, key: str, said: str) -> str:
        if (overridden := self._overridden(key)) is not None:
            return overridden
        if said == f"tool {self._entry.tool.name}":
            return self._own_source(key)
        if getattr(self._entry.rules.rules, _snake(key)) is not None:
            return self._config.source(*self._section(), _PROVIDER_KEYS.get(key, key))
        return said

    def _own_source(self, key: str) -> str:
        """What the tool itself says: in the file where it is declared there, else in its code."""
        name = self._entry.tool.name
        declared = name in self._config.tools.definitions
        source = self._config.source("tools", "definitions", name, key) if declared else "default"
        return f"tool {name}" if source == "default" and not declared else source

    def _visible_source(self) -> str:
        return self._overridden("visible") or self._own_source("visible")

    def _overridden(self, key: str) -> str | None:
        """The line of the override that decides a key, if one does."""
        entry = self._entry
        pattern = entry.rules.find_override_pattern(_snake(key), entry.local_name, entry.tool.name)
        return None if pattern is None else self._config.source("tools", "overrides", pattern, key)

    def _queue(self, name: str) -> ExplainedSetting:
        queue = self._config.queues[name]
        facts: dict[str, Any] = {"concurrent": queue.concurrent}
        if queue.rate is not None:
            facts["rate"] = f"{queue.rate.count} in {format_duration(queue.rate.seconds)}"
        if queue.max_waiting is not None:
            facts["maxWaiting"] = queue.max_waiting
        if queue.wait_timeout is not None:
            facts["waitTimeout"] = _milliseconds(queue.wait_timeout)
        shown = ", ".join(f"{key} {value}" for key, value in facts.items())
        return ExplainedSetting("queueRules", facts, self._config.source("queues", name), shown)

    def _policy(self) -> ExplainedSetting:
        """Whether it may be called, and the rule that decides."""
        rules, refusal = self._entry.rules, self._entry.denial_reason
        section = self._section()
        if refusal is None:
            allowed = rules.tools_allowed is not None
            source = self._config.source(*section, "toolsAllowed") if allowed else "default"
            return ExplainedSetting("policy", "allowed", source, "allowed")
        if "toolsDenied" in refusal:
            source = self._config.source(*section, "toolsDenied")
        elif "toolsAllowed" in refusal:
            source = self._config.source(*section, "toolsAllowed")
        else:
            source = self._overridden("enabled") or "default"
        return ExplainedSetting("policy", "denied", source, "denied")

    def _section(self) -> tuple[str, ...]:
        """Where the configuration of its provider stands."""
        # By the place and not by the namespace, which may be the provider's own idea.
        place = self._entry.rules.rules.source
        named = (name for name in self._config.providers if self._config.source("providers", name) == place)
        name = next(named, None)
        return ("tools",) if name is None else ("providers", name)

    def _aliases(self) -> list[str]:
        explain, own = self._ts.orchestrator.explain, self._entry.tool.name
        targets = ((alias, explain(alias)) for alias in self._config.tools.aliases)
        return [alias for alias, found in targets if found is not None and found[0].tool.name == own]


def _document(asked: str, entry: CatalogEntry, rows: list[ExplainedSetting], tokens: int) -> dict[str, Any]:
    settings = {row.name: {"value": row.value, "source": row.source} for row in rows if row.name != "alias"}
    if entry.denial_reason is not None:
        settings["policy"]["reason"] = entry.denial_reason
    return {
        **entry.tool.to_dict(),
        "asked": asked,
        "provider": {"kind": entry.provider.kind, "namespace": entry.provider.namespace},
        "settings": settings,
        "aliases": {row.value: row.source for row in rows if row.name == "alias"},
        "tokens": tokens,
    }


_PROVIDER_KEYS = {"timeout": "requestTimeoutMs"}
"""What a provider's entry calls it, where that is something else."""
_LABELS = {"cachePerUser": "cache per user", "maxBytes": "cap (bytes)", "queueRules": "queue's rules"}


def _print(output: CommandOutput, asked: str, entry: CatalogEntry, rows: list[ExplainedSetting], tokens: int) -> None:
    tool = entry.tool
    origin = f"{tool.category}, from {entry.provider_name}, {tokens:,} tokens"
    output.line(f"{output.style(tool.name, bold=True)}  {output.style(origin, fg='cyan')}")
    if asked != tool.name:
        output.line(f"  ({escape_control_characters(asked)} means this tool)")
    for line in escape_control_characters(tool.description).strip().splitlines():
        output.line(f"  {line}".rstrip())
    output.line("")
    labels = [_LABELS.get(row.name, row.name) for row in rows]
    first, second = max(map(len, labels)), max(len(row.shown) for row in rows)
    for label, row in zip(labels, rows, strict=True):
        shown = escape_control_characters(row.shown).ljust(second)
        output.line(f"  {label.ljust(first)}  {shown}  {output.style(row.source, fg='bright_black')}")
    if entry.denial_reason is not None:
        output.line(f"\n  It cannot be called: {escape_control_characters(entry.denial_reason)}.")
    output.line("\ninput schema")
    output.value(dict(tool.input_schema))


def _same(value: Any) -> Any:
    return value


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else round(seconds * 1000, 3)


def _or_none(name: str | None) -> str:
    return name or "none"


def _or_never(seconds: float) -> str:
    return "none" if math.isinf(seconds) else format_duration(seconds)


def _or_off(seconds: float | None) -> str:
    return format_duration(seconds) if seconds else "off"


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _snake(key: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in key)
