"""The rules of `policies`: which calls may run, which a person has to approve, and which are denied.

`composition` makes the rules from the configuration. The stage `policy` compiles them for each tool, so that what
depends on the tool alone is decided once and not for each call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.approvals import OPERATORS
from toolspace.core.extension_points import Allow, Ask, Decision, Deny
from toolspace.core.names import AGENT_NAMESPACE, RESERVED_AGENT_NAMES, sanitise
from toolspace.core.tool import Annotations, Tool
from toolspace.orchestrator.effective_settings import SourcedValue, ToolSpellings, matches_name

if TYPE_CHECKING:
    from toolspace.orchestrator.call import Call
    from toolspace.orchestrator.catalog import CatalogEntry

_log = logging.getLogger("toolspace.policies")
_REMOTE_KINDS: Final = frozenset(("mcp", "rest", "openapi"))
"""Providers whose tools are executed by others: annotations that are not set count as MCP says."""
_ALLOW: Final = Allow()

Condition = Callable[[Mapping[str, Any]], Any]
"""Evaluates an expression over `arguments`, `tool` and `principal`. Raises `ValueError` if it has no value."""


class PolicyRule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule. Everything that is set has to match; a list matches if one of its patterns does."""

    decision: Literal["allow", "ask", "deny"]
    tools: Sequence[str] | None = None
    servers: Sequence[str] | None = None
    agents: Sequence[str] | None = None
    principals: Sequence[str] | None = None
    categories: Sequence[str] | None = None
    annotations: Annotations = Annotations()
    """The values that the tool must have; None: any."""
    expression: str | None = None
    condition: Condition | None = None
    """The compiled expression."""
    approvers: tuple[str, ...] = (OPERATORS,)
    reason: str = ""
    expires_after: float | None = None
    source: str = ""
    """The line of configuration."""

    def matches_tool(self, entry: CatalogEntry, annotations: Annotations) -> bool:
        """Whether everything that depends on the tool alone matches."""
        namespace = entry.provider.namespace
        return (
            (self.tools is None or any(self._matches_name(pattern, entry.spellings) for pattern in self.tools))
            and (
                self.servers is None
                or (bool(namespace) and _matches_any(self.servers, (namespace, sanitise(namespace))))
            )
            and (self.categories is None or str(entry.tool.category) in self.categories)
            and all(
                expected is None or getattr(annotations, name) == expected
                for name, expected in msgspec.structs.asdict(self.annotations).items()
            )
        )

    def _matches_name(self, pattern: str, spellings: ToolSpellings) -> bool:
        if self.decision == "allow" and self.servers is None:
            # Not by the name without namespace: a server could offer a tool that is named like an allowed one.
            return matches_name(pattern, (*spellings.full, *spellings.aliases))
        return matches_name(pattern, spellings.names)

    @property
    def depends_on_call(self) -> bool:
        return self.agents is not None or self.principals is not None or self.condition is not None

    def matches_call(self, call: Call) -> bool:
        """Whether everything else matches. An expression without a value matches, unless the rule allows."""
        context = call.base_context
        if self.principals is not None and not _matches_any(self.principals, (context.principal,)):
            return False
        if self.agents is not None:
            agent_name = context.agent.name if context.agent is not None else None
            names = (agent_name, context.agent_id, context.agent_entity_id)
            if not _matches_any(self.agents, filter(None, names)):
                return False
        if self.condition is None:
            return True
        try:
            arguments = {**_list_defaults(call.tool), **json_text.to_json_data(call.values)}
            return bool(
                self.condition({"arguments": arguments, "tool": _describe(call.entry), "principal": context.principal})
            )
        except ValueError as error:
            _log.warning('%s: the expression has no value for a call of "%s": %s', self.source, call.tool.name, error)
            return self.decision != "allow"

    @property
    def text(self) -> str:
        """The decision, and what it depends on besides the tool: `ask if arguments.amount > 100`."""
        conditions = [
            *([f"agent is {' or '.join(self.agents)}"] if self.agents is not None else []),
            *([f"principal is {' or '.join(self.principals)}"] if self.principals is not None else []),
            *([self.expression] if self.expression is not None else []),
        ]
        return f"{self.decision} if {' and '.join(conditions)}" if conditions else self.decision

    def decide(self, tool: Tool) -> Decision:
        """What the rule decides about a call that it matches."""
        if self.decision == "allow":
            return _ALLOW
        if self.decision == "deny":
            return Deny(self.reason or f'tool "{tool.name}" is denied by a policy')
        return Ask(self.reason, self.approvers, self.expires_after, self.source)


def cautious_rules(source: str) -> tuple[PolicyRule, ...]:
    """The rules of `cautious`: asks for destructive tools, and for open-world tools that are not read-only."""
    return (
        PolicyRule(
            decision="ask", annotations=Annotations(destructive=True), reason="it is destructive", source=source
        ),
        PolicyRule(
            decision="ask",
            annotations=Annotations(open_world=True, read_only=False),
            reason="it changes something outside this system",
            source=source,
        ),
    )


class ToolPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The rules that matter for one tool, in their order."""

    tool: Tool
    rules: tuple[PolicyRule, ...] = ()
    """Only the last one may match every call of the tool."""
    approval: Ask | None = None
    """Set if the tool itself requires approval."""

    @property
    def always_allows(self) -> bool:
        return self.approval is None and all(rule.decision == "allow" for rule in self.rules)

    @property
    def asks_caller(self) -> bool:
        """Whether a call may have to be approved by its caller."""
        return any(rule.decision == "ask" and "caller" in rule.approvers for rule in self.rules)

    @property
    def version(self) -> str:
        """Identifies these rules."""
        import hashlib  # Imported here: programs that only call tools do not need it.

        rules = [(rule.decision, rule.agents, rule.principals, rule.expression, rule.approvers) for rule in self.rules]
        return hashlib.sha256(json_text.encode_canonical((rules, self.approval is not None))).hexdigest()[:16]

    def find_rule(self, call: Call) -> PolicyRule | None:
        """The first rule that matches a call."""
        for rule in self.rules:
            if not rule.depends_on_call or rule.matches_call(call):
                return rule
        return None

    def decide(self, call: Call) -> Decision:
        """Decides about a call whose arguments are valid. A tool that requires approval is asked for or denied."""
        rule = self.find_rule(call)
        decision = _ALLOW if rule is None else rule.decide(self.tool)
        return self.approval if self.approval is not None and isinstance(decision, Allow) else decision


def compile_policy(
    rules: Sequence[PolicyRule], entry: CatalogEntry, approval: SourcedValue[str | None] | None = None
) -> ToolPolicy:
    """Keeps the rules that may match a call of the tool, up to the first one that matches every call.

    Tools that control their own run are not asked for: nobody could execute them after the run has paused.
    """
    annotations = effective_annotations(entry)
    matching_rules: list[PolicyRule] = []
    controls_run = _controls_run(entry)
    for rule in rules:
        if rule.matches_tool(entry, annotations) and not (controls_run and rule.decision == "ask"):
            matching_rules.append(rule)
            if not rule.depends_on_call:
                break
    is_required = approval is not None and approval.value == "required"
    ask = Ask("the tool requires approval", source=approval.source) if approval is not None and is_required else None
    return ToolPolicy(tool=entry.tool, rules=tuple(matching_rules), approval=ask)


def effective_annotations(entry: CatalogEntry) -> Annotations:
    """The annotations of a tool, with a value for each that is not set.

    Tools of others are destructive and open-world unless they say otherwise, as MCP defines it; our own are not.
    """
    annotations, is_remote = entry.tool.annotations, entry.provider.kind in _REMOTE_KINDS
    is_read_only = bool(annotations.read_only)
    destructive = annotations.destructive if annotations.destructive is not None else is_remote
    return Annotations(
        read_only=is_read_only,
        destructive=destructive and not is_read_only,
        idempotent=bool(annotations.idempotent),
        open_world=annotations.open_world if annotations.open_world is not None else is_remote,
    )


def _controls_run(entry: CatalogEntry) -> bool:
    """Whether a tool only affects the run that calls it: final reports, batches (of calls that are decided), `skip`."""
    provider, name = entry.provider, entry.local_name
    if provider.namespace == AGENT_NAMESPACE and name in RESERVED_AGENT_NAMES:
        return True
    return provider.kind == "router" or (entry.tool.execution_type == "prebuilt" and name == "skip")


def _matches_any(patterns: Iterable[str], names: Iterable[str]) -> bool:
    names = tuple(names)
    return any(matches_name(pattern, names) for pattern in patterns)


def _list_defaults(tool: Tool) -> dict[str, Any]:
    """The arguments that a tool has if the caller leaves them out, as far as its schema says."""
    properties = tool.input_schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    items = cast("Mapping[str, Any]", properties).items()
    return {name: schema["default"] for name, schema in items if isinstance(schema, Mapping) and "default" in schema}


def _describe(entry: CatalogEntry) -> dict[str, Any]:
    """A tool as expressions see it."""
    annotations = msgspec.structs.asdict(effective_annotations(entry))
    return {
        "name": entry.tool.name,
        "server": entry.provider.namespace,
        "category": str(entry.tool.category),
        "version": entry.tool.version,
        "annotations": {
            "readOnly": annotations["read_only"],
            "destructive": annotations["destructive"],
            "idempotent": annotations["idempotent"],
            "openWorld": annotations["open_world"],
        },
    }
