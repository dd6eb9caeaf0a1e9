"""Suspended calls of the stateless era, with hostile, careless and vanished clients."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.mcp.conftest import META, RawResponse, Serve, Served, Signals, serve_tools
from toolspace import Tool, ToolContext, Toolspace, tool
from toolspace.core.events import CallFailed
from toolspace.server.mcp import elicitation
from toolspace.server.mcp.elicitation import ClientAbilities
from toolspace.server.mcp.tools import McpService
from toolspace.server.requests import Scope

pytestmark = [pytest.mark.spec("3.16"), pytest.mark.spec("12.3")]
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ABLE = {
    **META,
    "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}, "sampling": {}, "roots": {}},
}


WORDS = ("action", "accept", "content", "name", "roots", "uri", "file:///home")


class AskingTools:
    """Tools that ask. They count how often they ran, and record how they ended."""

    def __init__(self) -> None:
        self.started_with: list[str] = []
        self.continued = asyncio.Event()
        self.stopped = asyncio.Event()

    def tools(self) -> list[Tool]:
        @tool
        async def greet(context: ToolContext, greeting: str = "Hello", times: int = 1) -> str:
            """Asks for a name."""
            self.started_with.append(greeting)
            try:
                answer = await context.elicit("Who are you?", NAME, key="who")
            except asyncio.CancelledError:
                self.stopped.set()
                raise
            return f"{greeting}, {(answer.content or {})['name']}"

        @tool
        async def twice(context: ToolContext) -> str:
            """Asks for two names, one after the other."""
            first = await context.elicit("First?", NAME)
            second = await context.elicit("Second?", NAME)
            return f"{(first.content or {})['name']} {(second.content or {})['name']}"

        @tool
        async def both(context: ToolContext) -> str:
            """Asks for a name and for roots concurrently."""
            answer, folders = await asyncio.gather(context.elicit("Who?", NAME, key="who"), context.roots(key="where"))
            return f"{(answer.content or {})['name']} in {folders[0]}"

        @tool(timeout=0.1)
        async def hasty(context: ToolContext) -> str:
            """Has a short time-out."""
            return (await context.elicit("Who?", NAME, key="who")).action

        @tool
        async def curious(context: ToolContext) -> str:
            """Asks too many questions."""
            await asyncio.gather(*(context.elicit(f"{number}?") for number in range(100)))
            return "satisfied"

        @tool
        async def listing(context: ToolContext) -> str:
            """Asks with a schema that no form can show."""
            return (await context.elicit("?", {"type": "array"})).action

        @tool
        async def slow(context: ToolContext) -> str:
            """Asks, and then runs for a long time."""
            await context.elicit("Who?", NAME, key="who")
            self.continued.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.stopped.set()
            return "never"

        @tool
        async def model(context: ToolContext) -> str:
            """Uses sampling."""
            message = {"role": "user", "content": {"type": "text", "text": "?"}}
            return str(await context.sample({"messages": [message], "maxTokens": 1}))

        return [greet, twice, both, hasty, curious, listing, slow, model]


@pytest.fixture
def asking_tools() -> AskingTools:
    return AskingTools()


@pytest.fixture
async def served(serve: Serve, asking_tools: AskingTools) -> Served:
    return await serve(Toolspace(asking_tools.tools()))


async def call(served: Served, name: str, arguments: dict[str, Any] | None = None, **more: Any) -> RawResponse:
    headers = more.pop("headers", {})
    params = {"_meta": ABLE, "name": name, "arguments": arguments or {}, **more}
    return await served.request("tools/call", params, **headers)


async def call_until_asked(
    served: Served, name: str, arguments: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Calls a tool and returns its questions."""
    answer = await call(served, name, arguments, **more)
    assert answer.status == 200, answer
    result = answer.json["result"]
    assert result["resultType"] == "input_required"
    return result


def named(name: str) -> dict[str, Any]:
    return {"action": "accept", "content": {"name": name}}


def text_of(answer: RawResponse) -> str:
    return answer.json["result"]["content"][0]["text"]


def is_refused(answer: RawResponse) -> bool:
    error = answer.json.get("error", {})
    return answer.status == 400 and (error.get("code"), error.get("message")) == (
        -32602,
        "Invalid or expired requestState",
    )


async def test_suspended_call_continues_and_never_runs_twice(served: Served, asking_tools: AskingTools) -> None:
    first = await call_until_asked(served, "greet", {"greeting": "Hi"})
    assert first["inputRequests"]["who"]["method"] == "elicitation/create"
    assert first["inputRequests"]["who"]["params"]["requestedSchema"] == NAME
    assert "io.modelcontextprotocol/serverInfo" in first["_meta"]
    state = first["requestState"]
    answer = await call(served, "greet", {"greeting": "Hi"}, requestState=state, inputResponses={"who": named("Ann")})
    assert text_of(answer) == "Hi, Ann"
    assert asking_tools.started_with == ["Hi"]


async def test_every_round_has_its_own_state(served: Served) -> None:
    first = await call_until_asked(served, "twice")
    (key,) = first["inputRequests"]
    second = await call_until_asked(
        served, "twice", requestState=first["requestState"], inputResponses={key: named("Ann")}
    )
    assert second["requestState"] != first["requestState"]
    assert is_refused(await call(served, "twice", requestState=first["requestState"], inputResponses={}))
    (key,) = second["inputRequests"]
    answer = await call(served, "twice", requestState=second["requestState"], inputResponses={key: named("Bob")})
    assert text_of(answer) == "Ann Bob"


async def test_concurrent_questions_are_sent_together_and_answered_separately(served: Served) -> None:
    first = await call_until_asked(served, "both")
    assert {key: request["method"] for key, request in first["inputRequests"].items()} == {
        "who": "elicitation/create",
        "where": "roots/list",
    }
    second = await call_until_asked(
        served, "both", requestState=first["requestState"], inputResponses={"who": named("Ann")}
    )
    assert list(second["inputRequests"]) == ["where"]
    roots = {"where": {"roots": [{"uri": "file:///home"}]}}
    answer = await call(served, "both", requestState=second["requestState"], inputResponses=roots)
    assert text_of(answer) == "Ann in file:///home"


@pytest.mark.parametrize(
    "answers", [{}, {"other": named("Ann")}, {"who": {"roots": []}}], ids=["none", "other", "wrong"]
)
async def test_unanswered_question_is_asked_again(
    served: Served, asking_tools: AskingTools, answers: dict[str, Any]
) -> None:
    first = await call_until_asked(served, "greet")
    second = await call_until_asked(served, "greet", requestState=first["requestState"], inputResponses=answers)
    assert list(second["inputRequests"]) == ["who"]
    more = {"who": named("Ann"), "unknown": named("Bob")}
    answer = await call(served, "greet", requestState=second["requestState"], inputResponses=more)
    assert text_of(answer) == "Hello, Ann"
    assert len(asking_tools.started_with) == 1


async def test_answer_may_come_with_the_call(served: Served) -> None:
    assert text_of(await call(served, "greet", inputResponses={"who": named("Ann")})) == "Hello, Ann"


@pytest.mark.parametrize("change", ["tampered", "cut", "empty", "made up"])
async def test_invalid_state_is_refused(served: Served, asking_tools: AskingTools, change: str) -> None:
    state = (await call_until_asked(served, "greet"))["requestState"]
    wrong = {"tampered": state + "-TAMPERED", "cut": state[:-1], "empty": "", "made up": "A" * len(state)}[change]
    assert is_refused(await call(served, "greet", requestState=wrong, inputResponses={"who": named("Eve")}))
    assert text_of(await call(served, "greet", requestState=state, inputResponses={"who": named("Ann")})).endswith(
        "Ann"
    )
    assert len(asking_tools.started_with) == 1


async def test_state_is_valid_for_its_tool_and_arguments_only(served: Served) -> None:
    state = (await call_until_asked(served, "greet", {"greeting": "Hi", "times": 2}))["requestState"]
    more = {"requestState": state, "inputResponses": {"who": named("Ann")}}
    assert is_refused(await call(served, "greet", {"greeting": "Bye", "times": 2}, **more))
    assert is_refused(await call(served, "twice", {"greeting": "Hi", "times": 2}, **more))
    assert text_of(await call(served, "greet", {"times": 2, "greeting": "Hi"}, **more)) == "Hi, Ann"


async def test_state_is_valid_once(served: Served) -> None:
    state = (await call_until_asked(served, "greet"))["requestState"]
    more = {"requestState": state, "inputResponses": {"who": named("Ann")}}
    answers = await asyncio.gather(*(call(served, "greet", **more) for _ in range(5)))
    assert sorted(is_refused(answer) for answer in answers) == [False, True, True, True, True]


def by_user(scope: Scope) -> ToolContext:
    return ToolContext(user_id=dict(scope["headers"])[b"x-user"].decode())


async def test_state_is_valid_for_its_caller_only(serve: Serve, asking_tools: AskingTools) -> None:
    served = await serve(Toolspace(asking_tools.tools()), authorize=by_user)
    state = (await call_until_asked(served, "greet", headers={"x_user": "ann"}))["requestState"]
    more = {"requestState": state, "inputResponses": {"who": named("Eve")}}
    assert is_refused(await call(served, "greet", **more, headers={"x_user": "eve"}))
    assert text_of(await call(served, "greet", **more, headers={"x_user": "ann"})) == "Hello, Eve"


async def test_suspended_calls_per_caller_are_limited(
    serve: Serve, asking_tools: AskingTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elicitation, "MAX_PER_CALLER", 2)
    served = await serve(Toolspace(asking_tools.tools()), authorize=by_user)
    states = [(await call_until_asked(served, "greet", headers={"x_user": "eve"}))["requestState"] for _ in range(2)]
    full = await call(served, "greet", headers={"x_user": "eve"})
    assert full.json["result"]["isError"]
    assert "too many calls wait" in text_of(full)
    await call_until_asked(served, "greet", headers={"x_user": "ann"})
    more = {"requestState": states[0], "inputResponses": {"who": named("Eve")}}
    assert text_of(await call(served, "greet", **more, headers={"x_user": "eve"})) == "Hello, Eve"
    await call_until_asked(served, "greet", headers={"x_user": "eve"})


async def test_suspended_calls_are_limited(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elicitation, "MAX_SUSPENDED", 1)
    await call_until_asked(served, "greet")
    assert "too many calls wait" in text_of(await call(served, "greet"))


async def test_suspended_call_expires(
    served: Served, asking_tools: AskingTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elicitation, "EXPIRY_SECONDS", 0.05)
    state = (await call_until_asked(served, "greet"))["requestState"]
    await asking_tools.stopped.wait()
    assert is_refused(await call(served, "greet", requestState=state, inputResponses={"who": named("Ann")}))


async def test_suspended_call_that_timed_out_says_so(served: Served) -> None:
    ended = asyncio.Event()
    served.toolspace.bus.subscribe(lambda _: ended.set(), CallFailed)
    state = (await call_until_asked(served, "hasty"))["requestState"]
    await ended.wait()
    answer = await call(served, "hasty", requestState=state, inputResponses={"who": named("Ann")})
    assert text_of(answer) == "(tool failed: timeout)"


async def test_server_stop_cancels_suspended_calls(asking_tools: AskingTools) -> None:
    async with serve_tools(Toolspace(asking_tools.tools()), Signals()) as served:
        await call_until_asked(served, "greet")
    assert asking_tools.stopped.is_set()


async def test_concurrent_questions_are_limited(served: Served) -> None:
    first = await call_until_asked(served, "curious")
    assert len(first["inputRequests"]) <= 16
    answer = await call(served, "curious", requestState=first["requestState"])
    assert "at most 16 questions at once" in text_of(answer)


async def test_question_with_an_unsupported_schema_fails_the_call(served: Served) -> None:
    answer = await call(served, "listing")
    assert answer.json["result"]["isError"]
    assert "its schema needs type" in text_of(answer)


async def test_missing_client_capability_is_named(served: Served) -> None:
    answer = await served.request("tools/call", {"name": "model", "arguments": {}})
    assert answer.status == 400
    assert answer.json["error"]["code"] == -32021
    assert answer.json["error"]["data"] == {"requiredCapabilities": {"sampling": {}}}
    assert (await served.request("tools/call", {"name": "greet", "arguments": {}})).json["error"]["data"] == {
        "requiredCapabilities": {"elicitation": {"form": {}}}
    }


@pytest.mark.spec("4.5")
async def test_client_disconnect_after_an_answer_stops_the_call(served: Served, asking_tools: AskingTools) -> None:
    state = (await call_until_asked(served, "slow"))["requestState"]
    request = asyncio.create_task(call(served, "slow", requestState=state, inputResponses={"who": named("Ann")}))
    await asking_tools.continued.wait()
    request.cancel()
    await asking_tools.stopped.wait()
    assert is_refused(await call(served, "slow", requestState=state))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner),
    max_leaves=10,
)


@given(first=JSON, second=JSON)
def test_any_answer_makes_the_call_ask_again_or_end(first: Any, second: Any) -> None:
    async def talk() -> None:
        asking_tools = AskingTools()
        async with (
            Toolspace(asking_tools.tools()) as ts,
            McpService(ts) as service,
            elicitation.SuspendedCalls(service) as suspended,
        ):
            identity = elicitation.CallIdentity(None, "both", {})
            outcome = await suspended.start(identity, "c1", ClientAbilities(form=True, roots=True), {"who": first})
            for answers in ({"who": first, "where": second}, {"who": second, "where": first}):
                if isinstance(outcome, elicitation.InputRequired):
                    assert outcome.wire["inputRequests"].keys() <= {"who", "where"}
                    outcome = await suspended.resume(outcome.wire["requestState"], identity, answers)

    asyncio.run(talk())
