"""The section `policies`: which calls may run, which a person has to approve, and which are denied.

Used by `configuration`. `composition` compiles the expressions and makes rules for the orchestrator.
"""

from typing import Annotated, Literal

from toolspace.config import value_types as types
from toolspace.config.provider_settings import ANNOTATIONS
from toolspace.config.tool_lists import ToolPatterns
from toolspace.config.validation import InvalidValue, Section, SectionType, SettingOptions, Value, value_type
from toolspace.config.value_types import Duration, Globs, Names
from toolspace.core.approvals import OPERATORS
from toolspace.core.tool import NO_ANNOTATIONS, Annotations, ToolCategory

CAUTIOUS = "cautious"
_categories = types.list_of(types.choice(*ToolCategory), "list of categories", "a list of categories")


class PolicySettings(Section, frozen=True, kw_only=True):
    """One rule. Everything that is given has to match."""

    decision: Annotated[
        Literal["allow", "ask", "deny"],
        "What happens: `allow` runs the call, `ask` asks a person first, `deny` refuses it.",
        SettingOptions(aliases=("decide", "action")),
    ]
    tool: Annotated[ToolPatterns | None, "Tools, by any of their names.", SettingOptions(aliases=("tools",))] = None
    server: Annotated[
        Globs | None, "MCP servers, services and other providers, by name.", SettingOptions(aliases=("servers",))
    ] = None
    agent: Annotated[Globs | None, "The agents that make the call.", SettingOptions(aliases=("agents",))] = None
    principal: Annotated[
        Globs | None,
        "For whom the call is made: an entity, `key/…`, `tools/…` or `local`.",
        SettingOptions(aliases=("principals",)),
    ] = None
    category: Annotated[
        tuple[str, ...] | None, _categories, "Categories of tools.", SettingOptions(aliases=("categories",))
    ] = None
    annotations: Annotated[
        Annotations,
        ANNOTATIONS,
        "What effect the tool has: `readOnly`, `destructive`, `idempotent`, `openWorld`, each true or false.",
    ] = NO_ANNOTATIONS
    expression: Annotated[
        str | None,
        "What the call must be like: an expression over `arguments`, `tool` and `principal`.",
        SettingOptions(aliases=("when",)),
    ] = None
    approvers: Annotated[Names, "Who may approve: `operators`, `members`, `caller`, or ids of entities."] = (OPERATORS,)
    reason: Annotated[str, "Why, for the person who decides and for the model."] = ""
    expires_after: Annotated[
        Duration | None, "How long a request waits for a decision; without it `defaults.pendingCallTtl`."
    ] = None


POLICY = SectionType(PolicySettings)


@value_type("rule", f"a rule, or {CAUTIOUS}", {"anyOf": [{"const": CAUTIOUS}, POLICY]}, fits_variable=False)
def _rule(value: Value) -> PolicySettings | Literal["cautious"]:
    if value.data == CAUTIOUS:
        return CAUTIOUS
    if not isinstance(value.data, dict):
        raise InvalidValue(f"a rule such as {{tool: delete_*, decision: ask}}, or {CAUTIOUS}")
    return POLICY.read(value)


_rules = types.list_of(_rule, f"list of rules, or `{CAUTIOUS}`", f"a list of rules, or {CAUTIOUS}")
Policies = Annotated[
    tuple[PolicySettings | Literal["cautious"], ...],
    types.ValueType(_rules.label, _rules.expected, _rules.read, _rules.schema, fits_variable=False),
]
