"""Policies: the decisions of a program's policies, of `approval: required`, and of the callback that approves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toolspace import (
    Allow,
    ApprovalDecision,
    ApprovalRequest,
    Ask,
    Deny,
    Settings,
    Tool,
    ToolContext,
    ToolRules,
    Toolspace,
    tool,
)
from toolspace.core.tool import Annotations
from toolspace.orchestrator.policy_rules import PolicyRule

pytestmark = pytest.mark.spec("20.1")


class Fixed:
    """A policy that always decides the same."""

    rule = "fixed"

    def __init__(self, decision: Any) -> None:
        self._decision = decision

    def decide(self, tool: Tool, context: ToolContext) -> Any:
        return self._decision


class Account:
    """A tool with an effect, and the requests for approval."""

    def __init__(self) -> None:
        self.payments: list[int] = []
        self.requests: list[ApprovalRequest] = []
        self.answer: Any = True

        @tool
        async def pay(amount: int) -> int:
            self.payments.append(amount)
            return amount

        self.pay = pay

    def decide(self, request: ApprovalRequest) -> Any:
        self.requests.append(request)
        return self.answer

    def open(self, *policies: Any, rules: tuple[PolicyRule, ...] = (), **options: Any) -> Toolspace:
        ts = Toolspace(tools=[self.pay], settings=Settings(policies=policies, **options), on_approval=self.decide)
        ts.orchestrator.configure(policy_rules=rules)
        return ts


@pytest.fixture
def account() -> Account:
    return Account()


async def test_a_call_that_is_asked_for_runs_only_if_it_is_approved(account: Account) -> None:
    async with account.open(Fixed(Ask("money"))) as ts:
        approved_result = await ts.call("pay", {"amount": "5"})
        account.answer = ApprovalDecision(False, "too expensive")
        denied_result = await ts.call("pay", {"amount": 6})
    assert approved_result.result == 5
    assert account.payments == [5]
    assert (denied_result.error_kind, denied_result.error, denied_result.executed) == (
        "not_permitted",
        "Permission denied: too expensive",
        False,
    )
    request = account.requests[0]
    assert (request.tool.name, request.arguments, request.principal) == ("pay", {"amount": 5}, "local")
    assert (request.reason, request.approvers, request.source) == ("money", ("operators",), "the policy (fixed)")


async def test_an_asynchronous_callback_has_the_time_of_the_call() -> None:
    is_asked, tools_called = asyncio.Event(), []

    @tool(timeout=0.05)
    async def work() -> None:
        tools_called.append("work")

    async def never(request: ApprovalRequest) -> bool:
        is_asked.set()
        await asyncio.Event().wait()
        return True

    async with Toolspace(tools=[work], settings=Settings(policies=[Fixed(Ask())]), on_approval=never) as ts:
        result = await ts.call("work")
    assert is_asked.is_set()
    assert (result.error_kind, result.executed, tools_called) == ("not_permitted", False, [])
    assert result.error == "Permission denied: nobody approved the call within 50ms"


async def test_without_a_callback_the_result_says_how_to_approve(account: Account) -> None:
    async with Toolspace(tools=[account.pay], settings=Settings(policies=[Fixed(Ask())])) as ts:
        result = await ts.call("pay", {"amount": 5})
    assert (result.error_kind, result.executed, account.payments) == ("not_permitted", False, [])
    assert "on_approval" in (result.error or "")
    assert "/api/approvals" in (result.error or "")


@pytest.mark.parametrize(
    ("policy", "rule", "expected"),
    [
        (Allow(), "allow", "ran"),
        (Allow(), "ask", "asked"),
        (Allow(), "deny", "denied"),
        (Ask(), "allow", "asked"),
        (Ask(), "ask", "asked"),
        (Ask(), "deny", "denied"),
        (Deny("no"), "allow", "denied"),
    ],
)
async def test_policies_of_the_program_come_first_and_the_strictest_decision_holds(
    account: Account, policy: Any, rule: Any, expected: str
) -> None:
    async with account.open(Fixed(policy), rules=(PolicyRule(decision=rule),)) as ts:
        result = await ts.call("pay", {"amount": 1})
    outcome = "denied" if not result.ok else "asked" if account.requests else "ran"
    assert outcome == expected


async def test_a_denial_of_one_policy_wins_over_a_question_of_another(account: Account) -> None:
    async with account.open(Fixed(Ask()), Fixed(Deny("never"))) as ts:
        result = await ts.call("pay", {"amount": 1})
    assert (result.error, account.requests) == ("Permission denied: never", [])


@pytest.mark.spec("4.1")
async def test_policies_decide_after_validation_and_before_the_cache() -> None:
    decisions: list[Any] = []

    class Counting:
        rule = "counting"

        def decide(self, tool: Tool, context: ToolContext) -> Any:
            decisions.append(tool.name)
            return Allow() if len(decisions) < 4 else Deny("enough")

    @tool(cache=60)
    async def square(n: int) -> int:
        return n * n

    async with Toolspace(tools=[square], settings=Settings(policies=[Counting()])) as ts:
        decisions.clear()
        assert (await ts.call("square", {"n": "many"})).error_kind == "invalid_parameters"
        assert decisions == []
        results = [await ts.call("square", {"n": 2}) for _ in range(4)]
    assert [result.ok for result in results] == [True, True, True, False]


async def test_a_rule_holds_for_a_cached_result_that_needs_no_waiting(account: Account) -> None:
    @tool(cache=60)
    async def square(n: int) -> int:
        return n * n

    async with Toolspace(tools=[square]) as ts:
        assert [(await ts.call("square", {"n": 2})).result for _ in range(2)] == [4, 4]
        ts.orchestrator.configure(policy_rules=(PolicyRule(decision="deny", tools=["square"]),))
        assert (await ts.call("square", {"n": 2})).error_kind == "not_permitted"


async def test_approval_required_is_the_short_form(account: Account) -> None:
    account.answer = False

    @tool(approval="required")
    async def wipe() -> None: ...

    async with account.open(overrides={"pay": ToolRules(approval="required")}) as ts:
        ts.add_tool(wipe)
        results = [await ts.call("pay", {"amount": 1}), await ts.call("wipe")]
    assert [result.error_kind for result in results] == ["not_permitted", "not_permitted"]
    assert [request.tool.name for request in account.requests] == ["pay", "wipe"]
    assert account.payments == []


async def test_an_allowing_rule_does_not_cancel_approval_required(account: Account) -> None:
    rules = (PolicyRule(decision="allow"),)
    async with account.open(rules=rules, overrides={"pay": ToolRules(approval="required")}) as ts:
        await ts.call("pay", {"amount": 1})
    assert len(account.requests) == 1


async def test_an_override_may_remove_the_requirement_of_a_tool(account: Account) -> None:
    @tool(approval="required")
    async def wipe() -> str:
        return "done"

    async with account.open(overrides={"wipe": ToolRules(approval="none")}) as ts:
        ts.add_tool(wipe)
        assert (await ts.call("wipe")).result == "done"
    assert account.requests == []


@pytest.mark.parametrize(("scope", "requests"), [(None, 4), ("run", 3), ("session", 2), ("always", 2)])
async def test_a_decision_is_remembered_for_the_same_tool_and_principal(
    account: Account, scope: Any, requests: int
) -> None:
    account.answer = ApprovalDecision(True, remember=scope)
    async with account.open(Fixed(Ask())) as ts:
        ann, bob = ToolContext(user_id="ann"), ToolContext(user_id="bob")
        run = ts.run(context=ann)
        await run.call("pay", {"amount": 1})
        await run.call("pay", {"amount": 2})
        await ts.call("pay", {"amount": 3}, context=ToolContext(user_id="ann", session_id=run.session))
        await ts.call("pay", {"amount": 4}, context=bob)
    assert account.payments == [1, 2, 3, 4]
    assert len(account.requests) == requests


async def test_calls_of_batches_tools_and_runs_are_decided_too(account: Account) -> None:
    @tool
    async def shop(context: ToolContext) -> Any:
        return (await context.call("pay", {"amount": 3})).error_kind

    rules = (PolicyRule(decision="deny", tools=["pay"]),)
    async with account.open(rules=rules) as ts:
        ts.add_tool(shop)
        batch = {"calls": [{"id": "1", "tool": "pay", "parameters": {"amount": 1}}]}
        run = ts.run()
        results = (await run.call("agent__batch", batch)).result["results"]
        nested = await ts.call("shop")
        in_run = await run.call("pay", {"amount": 2})
    assert [result["ok"] for result in results] == [False]
    assert (nested.result, in_run.error_kind, account.payments) == ("not_permitted", "not_permitted", [])


async def test_a_call_that_waits_for_approval_can_be_cancelled(account: Account) -> None:
    is_asked = asyncio.Event()

    async def never(request: ApprovalRequest) -> bool:
        is_asked.set()
        await asyncio.Event().wait()
        return True

    settings = Settings(policies=[Fixed(Ask())])
    async with Toolspace(tools=[account.pay], settings=settings, on_approval=never) as ts:
        call = asyncio.create_task(ts.call("pay", {"amount": 1}, call_id="call_1"))
        await is_asked.wait()
        assert ts.cancel("call_1")
        result = await call
    assert (result.error_kind, result.executed, account.payments) == ("canceled", False, [])


async def test_rules_that_depend_on_the_tool_alone_leave_no_stage_behind(account: Account) -> None:
    rules = (
        *(PolicyRule(decision="deny", tools=[f"other_{number}"]) for number in range(20)),
        PolicyRule(decision="ask", annotations=Annotations(destructive=True)),
    )
    async with account.open() as plain, account.open(rules=rules) as ts_with_rules:
        depths = []
        for ts in (plain, ts_with_rules):
            await ts.call("pay", {"amount": 1})
            explanation = ts.orchestrator.explain("pay")
            assert explanation is not None
            handler, depth = explanation[0].handler, 0
            while handler is not None:
                closure = getattr(handler, "__closure__", None) or ()
                names = handler.__code__.co_freevars
                cells = dict(zip(names, closure, strict=True))
                handler = cells["next"].cell_contents if "next" in cells else None
                depth += 1
            depths.append(depth)
    assert depths[0] == depths[1]
