"""Makes the orchestrator's rules from the section `policies`. Used by `from_config` at the start and at each reload."""

from __future__ import annotations

from typing import Final

from toolspace.config.configuration import Config
from toolspace.config.policy_settings import CAUTIOUS, PolicySettings
from toolspace.errors import ConfigError
from toolspace.orchestrator.effective_settings import DEFAULT
from toolspace.orchestrator.policy_rules import Condition, PolicyRule, cautious_rules

_INPUTS: Final = ("arguments", "tool", "principal")


def build_policy_rules(config: Config) -> tuple[PolicyRule, ...]:
    """The rules in their order. Raises `ConfigError` with all expressions that are wrong, each with its line."""
    rules: list[PolicyRule] = []
    problems: list[str] = []
    for index, policy in enumerate(config.policies):
        if isinstance(policy, str):
            # It may be an entry of the list, or the whole section.
            sources = (config.source("policies", index), config.source("policies"))
            source = next((source for source in sources if source != DEFAULT), DEFAULT)
            rules += cautious_rules(f"{source}: {CAUTIOUS}")
            continue
        try:
            rules.append(_build_rule(policy, config.source("policies", index)))
        except ConfigError as error:
            problems.append(f"{config.source('policies', index, 'expression')}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(rules)


def _build_rule(policy: PolicySettings, source: str) -> PolicyRule:
    return PolicyRule(
        decision=policy.decision,
        tools=policy.tool,
        servers=policy.server,
        agents=policy.agent,
        principals=policy.principal,
        categories=policy.category,
        annotations=policy.annotations,
        expression=policy.expression,
        condition=_compile(policy.expression) if policy.expression is not None else None,
        approvers=policy.approvers,
        reason=policy.reason,
        expires_after=policy.expires_after,
        source=source,
    )


def _compile(text: str) -> Condition:
    # Imported here: only configurations with expressions need the parser.
    from toolspace.providers.expressions.compiler import Expression
    from toolspace.providers.expressions.runtime import ExpressionError

    try:
        expression = Expression(text)
    except ExpressionError as error:
        raise ConfigError(f"{error}") from None
    for name in expression.names:
        if name not in _INPUTS:
            raise ConfigError(f'unknown name "{name}"; an expression of a policy reads {", ".join(_INPUTS)}')
    return expression.evaluate
