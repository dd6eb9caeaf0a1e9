"""Agents that hand what they were asked to others."""

from __future__ import annotations

from typing import Any

import pytest

from toolspace import Agent, Toolspace, tool
from toolspace.core.model import ResultsTurn, Usage, UserTurn
from toolspace.errors import RegistrationError
from toolspace.models.scripted import ScriptedModel, call

HANDOFF = "router__handoff-to"


@tool
async def note(text: str) -> str:
    """Notes something."""
    return text


def hands(to: str, message: str | None = None) -> Any:
    return call(HANDOFF, {"agent": to} | ({"message": message} if message else {}))


def heard(model: ScriptedModel) -> list[str]:
    turn = model.requests[-1].turns[-1]
    assert isinstance(turn, ResultsTurn), turn
    return [answer.text for answer in turn.results]


@pytest.mark.spec("3.41")
async def test_the_destination_answers_the_original_request_with_the_advice() -> None:
    desk = ScriptedModel([hands("billing", "a customer since 2019")], usage=Usage(requests=1, input_tokens=3))
    billing = ScriptedModel(["You owe nothing."], usage=Usage(requests=1, input_tokens=5))
    agents = [
        Agent("desk", model=desk, destinations=["billing", "support"]),
        Agent("billing", model=billing),
        Agent("support", model=ScriptedModel()),
    ]
    async with Toolspace(agents=agents) as ts:
        result = await ts.run_agent("desk", "What do I owe?")
    assert (result.ok, result.text) == (True, "You owe nothing.")
    assert (result.agent, result.path, result.steps) == ("billing", ("desk", "billing"), 2)
    assert result.usage == Usage(requests=2, input_tokens=8)
    assert billing.requests[0].turns == (
        UserTurn("What do I owe?\n\nADVICE from router: a customer since 2019"),
    )  # fmt: skip


@pytest.mark.spec("3.41")
async def test_it_is_there_only_where_destinations_are() -> None:
    router, plain = ScriptedModel(["Mine."]), ScriptedModel(["Mine too.", "Mine."])
    agents = [Agent("router", model=router, destinations=["plain"]), Agent("plain", model=plain)]
    async with Toolspace(agents=agents) as ts:
        await ts.run_agent("router", "Go.")
        await ts.run_agent("plain", "Go.")
        assert HANDOFF in {one.name for one in router.requests[0].tools}
        assert HANDOFF not in {one.name for one in plain.requests[0].tools}
        assert HANDOFF not in {one.name for one in ts.list_tools()}
        refused = await ts.call(HANDOFF, {"agent": "plain"})
        assert not refused.ok
        assert "router.destinations" in (refused.error or "")


@pytest.mark.spec("3.41")
async def test_an_agent_that_is_not_listed_is_an_error_that_lists_them() -> None:
    desk = ScriptedModel([hands("suport"), hands("desk"), "Then I answer."])
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
async def test_a_hand_off_ends_the_run_after_the_calls_beside_it() -> None:
    noted: list[str] = []

    @tool
    async def remember(text: str) -> str:
        """Remembers."""
        noted.append(text)
        return text

    desk = ScriptedModel([[hands("b"), call("remember", {"text": "x"}), hands("c")], "never said"])
    agents = [
        Agent("desk", model=desk, destinations=["b", "c"]),
        Agent("b", model=ScriptedModel(["b answers"])),
        Agent("c", model=ScriptedModel(["c answers"])),
    ]
    async with Toolspace([remember], agents=agents) as ts:
        result = await ts.run_agent("desk", "Go.")
    assert (result.text, noted, desk.remaining_steps) == ("b answers", ["x"], 1)


async def test_hand_offs_are_followed_with_all_advice() -> None:
    c = ScriptedModel(["c answers"])
    agents = [
        Agent("a", model=ScriptedModel([hands("b", "first")]), destinations=["b"]),
        Agent("b", model=ScriptedModel([hands("c", "second")]), destinations=["c"]),
        Agent("c", model=c),
    ]
    async with Toolspace(agents=agents) as ts:
        result = await ts.run_agent("a", "Go.")
    assert result.path == ("a", "b", "c")
    assert c.requests[0].turns == (UserTurn("Go.\n\nADVICE from router: first\n\nADVICE from router: second"),)


@pytest.mark.spec("3.41")
def test_circles_of_routers_are_refused_at_once() -> None:
    agents = [
        Agent("a", destinations=["b"]),
        Agent("b", destinations=["c"]),
        Agent("c", destinations=["a"]),
    ]
    with pytest.raises(RegistrationError, match="in a circle: a → b → c → a"):
        Toolspace(agents=agents)
    with pytest.raises(RegistrationError, match="in a circle: a → a"):
        Toolspace(agents=[Agent("a", destinations=["a"])])


async def test_a_circle_of_hand_offs_at_run_time_is_refused() -> None:
    """Destinations may change while a request is on its way."""
    a = Agent("a", model=ScriptedModel([hands("b")]), destinations=["b"])
    b_model = ScriptedModel([hands("a"), "b answers"])
    b = Agent("b", model=b_model)
    async with Toolspace(agents=[a, b]) as ts:
        b.destinations = ("a",)
        result = await ts.run_agent("a", "Go.")
    assert (result.text, result.path) == ("b answers", ("a", "b"))
    assert "a cycle: a → b → a" in heard(b_model)[0]


async def test_a_called_agent_may_hand_the_call_on() -> None:
    parent = ScriptedModel([call("agent__desk", {"prompt": "What do I owe?"}), "Nothing, they say."])
    billing = ScriptedModel(["Nothing."])
    agents = [
        Agent("parent", model=parent, agents=["desk"]),
        Agent("desk", model=ScriptedModel([hands("billing", "hurry")]), destinations=["billing"]),
        Agent("billing", model=billing),
    ]
    async with Toolspace(agents=agents) as ts:
        result = await ts.run_agent("parent", "Ask.")
        direct = ts.agents.get("desk")
        direct.model = ScriptedModel([hands("billing")])
        ts.agents.get("billing").model = ScriptedModel(["Nothing."])
        called = await ts.call("agent__desk", {"prompt": "What do I owe?"})
    assert result.text == "Nothing, they say."
    assert heard(parent) == ["Nothing."]
    assert result.usage.requests == 4
    assert 'called by the agent "parent"' in billing.requests[0].system
    assert called.extras["agent"] == "billing"
    assert called.extras["path"] == ["desk", "billing"]


async def test_a_request_is_not_handed_to_one_who_waits_for_its_answer() -> None:
    desk = ScriptedModel([hands("parent"), "I answer."])
    agents = [
        Agent("parent", model=ScriptedModel([call("agent__desk", {"prompt": "x"}), "ok"]), agents=["desk"]),
        Agent("desk", model=desk, destinations=["parent"]),
    ]
    async with Toolspace(agents=agents) as ts:
        assert (await ts.run_agent("parent", "Go.")).ok
    assert "Recursion detected: parent → desk → parent" in heard(desk)[0]


async def test_a_router_with_tools_of_its_own_hands_over_too() -> None:
    agents = [
        Agent("desk", model=ScriptedModel([hands("b")]), destinations=["b"], tools=[note]),
        Agent("b", model=ScriptedModel(["b answers"]), tools=[note]),
    ]
    async with Toolspace(agents=agents) as ts:
        assert (await ts.run_agent("desk", "Go.")).path == ("desk", "b")
