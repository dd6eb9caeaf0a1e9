"""Agents that hand requests off to other agents."""

from __future__ import annotations

from typing import Any

import pytest

from toolspace import Agent, Toolspace, tool
from toolspace.core.language_model import ResultsTurn, Usage, UserTurn
from toolspace.errors import RegistrationError
from toolspace.models.scripted import ScriptedModel, call

HANDOFF = "router__handoff-to"


@tool
async def note(text: str) -> str:
    """Notes something."""
    return text


def handoff(to: str, message: str | None = None) -> Any:
    return call(HANDOFF, {"agent": to} | ({"message": message} if message else {}))


def last_results(model: ScriptedModel) -> list[str]:
    turn = model.requests[-1].turns[-1]
    assert isinstance(turn, ResultsTurn), turn
    return [answer.text for answer in turn.results]


@pytest.mark.spec("3.41")
async def test_the_destination_answers_the_original_request_with_the_advice() -> None:
    desk = ScriptedModel([handoff("billing", "a customer since 2019")], usage=Usage(requests=1, input_tokens=3))
    billing_model = ScriptedModel(["You owe nothing."], usage=Usage(requests=1, input_tokens=5))
    agents = [
        Agent("desk", model=desk, destinations=["billing", "support"]),
        Agent("billing", model=billing_model),
        Agent("support", model=ScriptedModel()),
    ]
    async with Toolspace(agents=agents) as ts:
        result = await ts.run_agent("desk", "What do I owe?")
    assert (result.ok, result.text) == (True, "You owe nothing.")
    assert (result.agent, result.path, result.steps) == ("billing", ("desk", "billing"), 2)
    assert result.usage == Usage(requests=2, input_tokens=8)
    assert billing_model.requests[0].turns == (
        UserTurn("What do I owe?\n\nADVICE from router: a customer since 2019"),
    )  # fmt: skip


@pytest.mark.spec("3.41")
async def test_the_handoff_tool_is_offered_only_with_destinations() -> None:
    router, plain = ScriptedModel(["Mine."]), ScriptedModel(["Mine too.", "Mine."])
    agents = [Agent("router", model=router, destinations=["plain"]), Agent("plain", model=plain)]
    async with Toolspace(agents=agents) as ts:
        await ts.run_agent("router", "Go.")
        await ts.run_agent("plain", "Go.")
        assert HANDOFF in {tool_item.name for tool_item in router.requests[0].tools}
        assert HANDOFF not in {tool_item.name for tool_item in plain.requests[0].tools}
        assert HANDOFF not in {tool_item.name for tool_item in ts.list_tools()}
        refusal = await ts.call(HANDOFF, {"agent": "plain"})
        assert not refusal.ok
        assert "router.destinations" in (refusal.error or "")


@pytest.mark.spec("3.41")
async def test_an_unknown_destination_is_an_error_that_lists_the_destinations() -> None:
    desk = ScriptedModel([handoff("suport"), handoff("desk"), "Then I answer."])
    agents = [
        Agent("desk", model=desk, destinations=["billing", "support"]),
        Agent("billing", model=ScriptedModel()),
        Agent("support", model=ScriptedModel()),
    ]
    async with Toolspace(agents=agents) as ts:
        result = await ts.run_agent("desk", "Help.")
    assert (result.text, result.path) == ("Then I answer.", ("desk",))
    first = desk.requests[1].turns[-1]
    assert isinstance(first, ResultsTurn)
    assert '"suport" is not a destination of "desk"; did you mean "support"?' in first.results[0].text
    assert "it may hand over to billing, support" in first.results[0].text


@pytest.mark.spec("3.41")
async def test_a_handoff_ends_the_run_after_the_other_calls_of_the_turn() -> None:
    notes: list[str] = []

    @tool
    async def remember(text: str) -> str:
        """Remembers."""
        notes.append(text)
        return text

    desk = ScriptedModel([[handoff("b"), call("remember", {"text": "x"}), handoff("c")], "never said"])
    agents = [
        Agent("desk", model=desk, destinations=["b", "c"]),
        Agent("b", model=ScriptedModel(["b answers"])),
        Agent("c", model=ScriptedModel(["c answers"])),
    ]
    async with Toolspace([remember], agents=agents) as ts:
        result = await ts.run_agent("desk", "Go.")
    assert (result.text, notes, desk.remaining_steps) == ("b answers", ["x"], 1)


async def test_handoffs_are_followed_and_their_advice_accumulates() -> None:
    c = ScriptedModel(["c answers"])
    agents = [
        Agent("a", model=ScriptedModel([handoff("b", "first")]), destinations=["b"]),
        Agent("b", model=ScriptedModel([handoff("c", "second")]), destinations=["c"]),
        Agent("c", model=c),
    ]
    async with Toolspace(agents=agents) as ts:
        result = await ts.run_agent("a", "Go.")
    assert result.path == ("a", "b", "c")
    assert c.requests[0].turns == (UserTurn("Go.\n\nADVICE from router: first\n\nADVICE from router: second"),)


@pytest.mark.spec("3.41")
def test_circular_destinations_are_rejected_at_registration() -> None:
    agents = [
        Agent("a", destinations=["b"]),
        Agent("b", destinations=["c"]),
        Agent("c", destinations=["a"]),
    ]
    with pytest.raises(RegistrationError, match="in a circle: a → b → c → a"):
        Toolspace(agents=agents)
    with pytest.raises(RegistrationError, match="in a circle: a → a"):
        Toolspace(agents=[Agent("a", destinations=["a"])])


async def test_a_circular_handoff_at_run_time_is_rejected() -> None:
    """Destinations may change while a request is on its way."""
    a = Agent("a", model=ScriptedModel([handoff("b")]), destinations=["b"])
    b_model = ScriptedModel([handoff("a"), "b answers"])
    b = Agent("b", model=b_model)
    async with Toolspace(agents=[a, b]) as ts:
        b.destinations = ("a",)
        result = await ts.run_agent("a", "Go.")
    assert (result.text, result.path) == ("b answers", ("a", "b"))
    assert "a cycle: a → b → a" in last_results(b_model)[0]


async def test_a_subagent_can_hand_its_call_off() -> None:
    parent = ScriptedModel([call("agent__desk", {"prompt": "What do I owe?"}), "Nothing, they say."])
    billing_model = ScriptedModel(["Nothing."])
    agents = [
        Agent("parent", model=parent, agents=["desk"]),
        Agent("desk", model=ScriptedModel([handoff("billing", "hurry")]), destinations=["billing"]),
        Agent("billing", model=billing_model),
    ]
    async with Toolspace(agents=agents) as ts:
        result = await ts.run_agent("parent", "Ask.")
        direct = ts.agents.get("desk")
        direct.model = ScriptedModel([handoff("billing")])
        ts.agents.get("billing").model = ScriptedModel(["Nothing."])
        call_result = await ts.call("agent__desk", {"prompt": "What do I owe?"})
    assert result.text == "Nothing, they say."
    assert last_results(parent) == ["Nothing."]
    assert result.usage.requests == 4
    assert 'called by the agent "parent"' in billing_model.requests[0].system
    assert call_result.extras["agent"] == "billing"
    assert call_result.extras["path"] == ["desk", "billing"]


async def test_a_handoff_to_a_waiting_agent_is_rejected() -> None:
    desk = ScriptedModel([handoff("parent"), "I answer."])
    agents = [
        Agent("parent", model=ScriptedModel([call("agent__desk", {"prompt": "x"}), "ok"]), agents=["desk"]),
        Agent("desk", model=desk, destinations=["parent"]),
    ]
    async with Toolspace(agents=agents) as ts:
        assert (await ts.run_agent("parent", "Go.")).ok
    assert "Recursion detected: parent → desk → parent" in last_results(desk)[0]


async def test_a_router_with_its_own_tools_can_hand_off() -> None:
    agents = [
        Agent("desk", model=ScriptedModel([handoff("b")]), destinations=["b"], tools=[note]),
        Agent("b", model=ScriptedModel(["b answers"]), tools=[note]),
    ]
    async with Toolspace(agents=agents) as ts:
        assert (await ts.run_agent("desk", "Go.")).path == ("desk", "b")
