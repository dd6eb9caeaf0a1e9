"""The section `quotas`: how many calls, tokens and dollars callers, agents and tools may use in a time.

Used by `configuration`. `composition` makes quotas for the orchestrator.
"""

from typing import Annotated

import msgspec

from toolspace.config import value_types as types
from toolspace.config.tool_lists import ToolPatterns
from toolspace.config.validation import InvalidValue, Section, SectionType, SettingOptions, Value, value_type
from toolspace.config.value_types import Count, Globs
from toolspace.core.quotas import QuotaSubject

_LIMITS = ("calls_per_minute", "calls_per_hour", "calls_per_day", "tokens_per_day", "cost_per_day")
_EXAMPLE = "a quota such as {per: principal, callsPerDay: 1000}"


class QuotaSettings(Section, frozen=True, kw_only=True):
    """One quota. Everything that is given has to match."""

    per: Annotated[
        QuotaSubject | None,
        types.choice("all", "principal", "key", "agent", "tool", aliases={"user": "principal"}),
        "What has a counter of its own: each `principal` (or `user`), `key`, `agent` or `tool`, or `all` together; "
        "without it what is named below: principals, keys or agents, else all.",
    ] = None
    tool: Annotated[
        ToolPatterns | None, "Only calls of these tools, by any of their names.", SettingOptions(aliases=("tools",))
    ] = None
    agent: Annotated[Globs | None, "Only these agents.", SettingOptions(aliases=("agents",))] = None
    principal: Annotated[
        Globs | None,
        "Only for these principals: an entity, `key/…`, `tools/…` or `local`.",
        SettingOptions(aliases=("principals", "user", "users")),
    ] = None
    key: Annotated[Globs | None, "Only callers with these keys, by id.", SettingOptions(aliases=("keys",))] = None
    calls_per_minute: Annotated[Count | None, "How many calls may be made in a minute."] = None
    calls_per_hour: Annotated[Count | None, "How many calls may be made in an hour."] = None
    calls_per_day: Annotated[Count | None, "How many calls may be made in a day."] = None
    tokens_per_day: Annotated[Count | None, "How many tokens the models of agents may use in a day."] = None
    cost_per_day: Annotated[
        float | None, types.number(0), "How many US dollars the models of agents may cost in a day."
    ] = None


QUOTA = SectionType(QuotaSettings)


@value_type("quota", _EXAMPLE, {"anyOf": [QUOTA]}, fits_variable=False)
def _quota(value: Value) -> QuotaSettings:
    if not isinstance(value.data, dict):
        raise InvalidValue(_EXAMPLE)
    quota = QUOTA.read(value)
    if all(getattr(quota, limit) is None for limit in _LIMITS):
        value.fail("it has no limit; give callsPerMinute, callsPerHour, callsPerDay, tokensPerDay or costPerDay")
    limits_models = quota.tokens_per_day is not None or quota.cost_per_day is not None
    if limits_models and (quota.tool is not None or quota.per == "tool"):
        value.fail("tokensPerDay and costPerDay count what models use, so they cannot be for tools; use another quota")
    if quota.per is None:
        subjects: tuple[tuple[QuotaSubject, object], ...] = (
            ("principal", quota.principal),
            ("key", quota.key),
            ("agent", quota.agent),
        )
        subject = next((subject for subject, patterns in subjects if patterns is not None), "all")
        quota = msgspec.structs.replace(quota, per=subject)
    return quota


_quotas = types.list_of(_quota, "list of quotas", "a list of quotas")
Quotas = Annotated[
    tuple[QuotaSettings, ...],
    types.ValueType(_quotas.label, _quotas.expected, _quotas.read, _quotas.schema, fits_variable=False),
]
