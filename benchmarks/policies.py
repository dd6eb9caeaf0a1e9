"""Measure: a call with rules of `policies`. Those that depend on the tool alone are decided before the first call."""

from __future__ import annotations

from benchmarks.harness import Contestant, Report, race, repeat
from benchmarks.workloads import ARGUMENTS, add, create_toolspace
from toolspace import Toolspace
from toolspace.core.tool import Annotations
from toolspace.orchestrator.policy_rules import PolicyRule
from toolspace.providers.expressions.compiler import Expression

PLAIN = "Toolspace.call, without rules"
TOOL_RULES = "Toolspace.call, 20 rules by tool, server or annotation"
PRINCIPAL_RULES = "Toolspace.call, 20 rules by principal"
EXPRESSION_RULE = "Toolspace.call, 1 rule with an expression"
EXPRESSION_RULES = "Toolspace.call, 20 rules with an expression"
_TEXT = 'arguments.a > 100 and principal != "root"'


async def measure() -> Report:
    by_tool = (
        *(PolicyRule(decision="deny", tools=[f"delete_{number}_*"]) for number in range(7)),
        *(PolicyRule(decision="ask", servers=[f"server_{number}"]) for number in range(7)),
        *(PolicyRule(decision="ask", annotations=Annotations(destructive=True)) for _ in range(5)),
        PolicyRule(decision="allow", tools=["add"]),
    )
    by_principal = tuple(PolicyRule(decision="deny", principals=[f"tools/{number}"]) for number in range(20))
    by_expression = tuple(
        PolicyRule(decision="deny", expression=_TEXT, condition=Expression(_TEXT).evaluate) for _ in range(20)
    )
    contestants = [
        Contestant(name, repeat(_with_rules(rules).call, "add", ARGUMENTS))
        for name, rules in (
            (PLAIN, ()),
            (TOOL_RULES, by_tool),
            (PRINCIPAL_RULES, by_principal),
            (EXPRESSION_RULE, by_expression[:1]),
            (EXPRESSION_RULES, by_expression),
        )
    ]
    timings = await race(contestants, rounds=80)
    report = Report("Policies: a call with rules")
    report.ratio(
        "20 rules by tool, server or annotation, against a call without", timings.ratio(TOOL_RULES, PLAIN), must=1.15
    )
    report.ratio("20 rules by principal, against a call without", timings.ratio(PRINCIPAL_RULES, PLAIN))
    report.ratio("1 rule with an expression, against a call without", timings.ratio(EXPRESSION_RULE, PLAIN))
    report.ratio("20 rules with an expression, against a call without", timings.ratio(EXPRESSION_RULES, PLAIN))
    report.times(timings, [contestant.name for contestant in contestants])
    return report


def _with_rules(rules: tuple[PolicyRule, ...]) -> Toolspace:
    toolspace = create_toolspace([add])
    toolspace.orchestrator.configure(policy_rules=rules)
    return toolspace
