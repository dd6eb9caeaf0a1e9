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
from toolspace.server.mcp.tool_service import McpService
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
        self.continue_event = asyncio.Event()
        self.stopped = asyncio.Event()

    def tools(self) -> list[Tool]:
        @tool
        async def greet(context: ToolContext, salutation: str = "Hello", times: int = 1) -> str:
            """Asks for a name."""
            self.started_with.append(salutation)
            try:
                answer = await context.elicit("Who are you?", NAME, key="who")
            except asyncio.CancelledError:
                self.stopped.set()
                raise
            return f"{salutation}, {(answer.content or {})['name']}"

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
            self.continue_event.set()
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
async def mcp_server(serve: Serve, asking_tools: AskingTools) -> Served:
    return await serve(Toolspace(asking_tools.tools()))


async def call(mcp_server: Served, name: str, arguments: dict[str, Any] | None = None, **more: Any) -> RawResponse:
    headers = more.pop("headers", {})
    params = {"_meta": ABLE, "name": name, "arguments": arguments or {}, **more}
    return await mcp_server.request("tools/call", params, **headers)


async def call_until_asked(
    mcp_server: Served, name: str, arguments: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Calls a tool and returns its questions."""
    answer = await call(mcp_server, name, arguments, **more)
    assert answer.status == 200, answer
    result = answer.json["result"]
    assert result["resultType"] == "input_required"
    return result


def name_answer(name: str) -> dict[str, Any]:
    return {"action": "accept", "content": {"name": name}}


def text_of(answer: RawResponse) -> str:
    return answer.json["result"]["content"][0]["text"]


def is_refused(answer: RawResponse) -> bool:
    error = answer.json.get("error", {})
    return answer.status == 400 and (error.get("code"), error.get("message")) == (
        -32602,
        "Invalid or expired requestState",
    )


async def test_suspended_call_continues_and_never_runs_twice(mcp_server: Served, asking_tools: AskingTools) -> None:
    first = await call_until_asked(mcp_server, "greet", {"salutation": "Hi"})
    assert first["inputRequests"]["who"]["method"] == "elicitation/create"
    assert first["inputRequests"]["who"]["params"]["requestedSchema"] == NAME
    assert "io.modelcontextprotocol/serverInfo" in first["_meta"]
    state = first["requestState"]
    answer = await call(
        mcp_server, "greet", {"salutation": "Hi"}, requestState=state, inputResponses={"who": name_answer("Ann")}
    )
    assert text_of(answer) == "Hi, Ann"
    assert asking_tools.started_with == ["Hi"]


async def test_every_round_has_its_own_state(mcp_server: Served) -> None:
    first = await call_until_asked(mcp_server, "twice")
    (key,) = first["inputRequests"]
    second = await call_until_asked(
        mcp_server, "twice", requestState=first["requestState"], inputResponses={key: name_answer("Ann")}
    )
    assert second["requestState"] != first["requestState"]
    assert is_refused(await call(mcp_server, "twice", requestState=first["requestState"], inputResponses={}))
    (key,) = second["inputRequests"]
    answer = await call(
        mcp_server, "twice", requestState=second["requestState"], inputResponses={key: name_answer("Bob")}
    )
    assert text_of(answer) == "Ann Bob"


async def test_concurrent_questions_are_sent_together_and_answered_separately(mcp_server: Served) -> None:
    first = await call_until_asked(mcp_server, "both")
    assert {key: request["method"] for key, request in first["inputRequests"].items()} == {
        "who": "elicitation/create",
        "where": "roots/list",
    }
    second = await call_until_asked(
        mcp_server, "both", requestState=first["requestState"], inputResponses={"who": name_answer("Ann")}
    )
    assert list(second["inputRequests"]) == ["where"]
    roots = {"where": {"roots": [{"uri": "file:///home"}]}}
    answer = await call(mcp_server, "both", requestState=second["requestState"], inputResponses=roots)
    assert text_of(answer) == "Ann in file:///home"


@pytest.mark.parametrize(
    "answers", [{}, {"other": name_answer("Ann")}, {"who": {"roots": []}}], ids=["none", "other", "wrong"]
)
async def test_unanswered_question_is_asked_again(
    mcp_server: Served, asking_tools: AskingTools, answers: dict[str, Any]
) -> None:
    first = await call_until_asked(mcp_server, "greet")
    second = await call_until_asked(mcp_server, "greet", requestState=first["requestState"], inputResponses=answers)
    assert list(second["inputRequests"]) == ["who"]
    more = {"who": name_answer("Ann"), "unknown": name_answer("Bob")}
    answer = await call(mcp_server, "greet", requestState=second["requestState"], inputResponses=more)
    assert text_of(answer) == "Hello, Ann"
    assert len(asking_tools.started_with) == 1


async def test_answer_may_come_with_the_call(mcp_server: Served) -> None:
    assert text_of(await call(mcp_server, "greet", inputResponses={"who": name_answer("Ann")})) == "Hello, Ann"


@pytest.mark.parametrize("change", ["tampered", "cut", "empty", "made up"])
async def test_invalid_state_is_refused(mcp_server: Served, asking_tools: AskingTools, change: str) -> None:
    state = (await call_until_asked(mcp_server, "greet"))["requestState"]
    wrong = {"tampered": state + "-TAMPERED", "cut": state[:-1], "empty": "", "made up": "A" * len(state)}[change]
    assert is_refused(await call(mcp_server, "greet", requestState=wrong, inputResponses={"who": name_answer("Eve")}))
    assert text_of(
        await call(mcp_server, "greet", requestState=state, inputResponses={"who": name_answer("Ann")})
    ).endswith("Ann")
    assert len(asking_tools.started_with) == 1


async def test_state_is_valid_for_its_tool_and_arguments_only(mcp_server: Served) -> None:
    state = (await call_until_asked(mcp_server, "greet", {"salutation": "Hi", "times": 2}))["requestState"]
    more = {"requestState": state, "inputResponses": {"who": name_answer("Ann")}}
    assert is_refused(await call(mcp_server, "greet", {"salutation": "Bye", "times": 2}, **more))
    assert is_refused(await call(mcp_server, "twice", {"salutation": "Hi", "times": 2}, **more))
    assert text_of(await call(mcp_server, "greet", {"times": 2, "salutation": "Hi"}, **more)) == "Hi, Ann"


async def test_state_is_valid_once(mcp_server: Served) -> None:
    state = (await call_until_asked(mcp_server, "greet"))["requestState"]
    more = {"requestState": state, "inputResponses": {"who": name_answer("Ann")}}
    answers = await asyncio.gather(*(call(mcp_server, "greet", **more) for _ in range(5)))
    assert sorted(is_refused(answer) for answer in answers) == [False, True, True, True, True]


def by_user(scope: Scope) -> ToolContext:
    return ToolContext(user_id=dict(scope["headers"])[b"x-user"].decode())


async def test_state_is_valid_for_its_caller_only(serve: Serve, asking_tools: AskingTools) -> None:
    mcp_server = await serve(Toolspace(asking_tools.tools()), authorize=by_user)
    state = (await call_until_asked(mcp_server, "greet", headers={"x_user": "ann"}))["requestState"]
    more = {"requestState": state, "inputResponses": {"who": name_answer("Eve")}}
    assert is_refused(await call(mcp_server, "greet", **more, headers={"x_user": "eve"}))
    assert text_of(await call(mcp_server, "greet", **more, headers={"x_user": "ann"})) == "Hello, Eve"


async def test_suspended_calls_per_caller_are_limited(
    serve: Serve, asking_tools: AskingTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elicitation, "MAX_PER_CALLER", 2)
    mcp_server = await serve(Toolspace(asking_tools.tools()), authorize=by_user)
    states = [
        (await call_until_asked(mcp_server, "greet", headers={"x_user": "eve"}))["requestState"] for _ in range(2)
    ]
    full = await call(mcp_server, "greet", headers={"x_user": "eve"})
    assert full.json["result"]["isError"]
    assert "too many calls wait" in text_of(full)
    await call_until_asked(mcp_server, "greet", headers={"x_user": "ann"})
    more = {"requestState": states[0], "inputResponses": {"who": name_answer("Eve")}}
    assert text_of(await call(mcp_server, "greet", **more, headers={"x_user": "eve"})) == "Hello, Eve"
    await call_until_asked(mcp_server, "greet", headers={"x_user": "eve"})


async def test_suspended_calls_are_limited(mcp_server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elicitation, "MAX_SUSPENDED", 1)
    await call_until_asked(mcp_server, "greet")
    assert "too many calls wait" in text_of(await call(mcp_server, "greet"))


async def test_suspended_call_expires(
    mcp_server: Served, asking_tools: AskingTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elicitation, "EXPIRY_SECONDS", 0.05)
    state = (await call_until_asked(mcp_server, "greet"))["requestState"]
    await asking_tools.stopped.wait()
    assert is_refused(await call(mcp_server, "greet", requestState=state, inputResponses={"who": name_answer("Ann")}))


async def test_suspended_call_that_timed_out_says_so(mcp_server: Served) -> None:
    end_event = asyncio.Event()
    mcp_server.toolspace.bus.subscribe(lambda _: end_event.set(), CallFailed)
    state = (await call_until_asked(mcp_server, "hasty"))["requestState"]
    await end_event.wait()
    answer = await call(mcp_server, "hasty", requestState=state, inputResponses={"who": name_answer("Ann")})
    assert text_of(answer) == "(tool failed: timeout)"


async def test_server_stop_cancels_suspended_calls(asking_tools: AskingTools) -> None:
    async with serve_tools(Toolspace(asking_tools.tools()), Signals()) as mcp_server:
        await call_until_asked(mcp_server, "greet")
    assert asking_tools.stopped.is_set()


async def test_concurrent_questions_are_limited(mcp_server: Served) -> None:
    first = await call_until_asked(mcp_server, "curious")
    assert len(first["inputRequests"]) <= 16
    answer = await call(mcp_server, "curious", requestState=first["requestState"])
    assert "at most 16 questions at once" in text_of(answer)


async def test_question_with_an_unsupported_schema_fails_the_call(mcp_server: Served) -> None:
    answer = await call(mcp_server, "listing")
    assert answer.json["result"]["isError"]
    assert "its schema needs type" in text_of(answer)


async def test_missing_client_capability_is_named(mcp_server: Served) -> None:
    answer = await mcp_server.request("tools/call", {"name": "model", "arguments": {}})
    assert answer.status == 400
    assert answer.json["error"]["code"] == -32021
    assert answer.json["error"]["data"] == {"requiredCapabilities": {"sampling": {}}}
    assert (await mcp_server.request("tools/call", {"name": "greet", "arguments": {}})).json["error"]["data"] == {
        "requiredCapabilities": {"elicitation": {"form": {}}}
    }


@pytest.mark.spec("4.5")
async def test_client_disconnect_after_an_answer_stops_the_call(mcp_server: Served, asking_tools: AskingTools) -> None:
    state = (await call_until_asked(mcp_server, "slow"))["requestState"]
    request = asyncio.create_task(
        call(mcp_server, "slow", requestState=state, inputResponses={"who": name_answer("Ann")})
    )
    await asking_tools.continue_event.wait()
    request.cancel()
    await asking_tools.stopped.wait()
    assert is_refused(await call(mcp_server, "slow", requestState=state))


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
            elicitation.SuspendedCalls(service) as suspended_calls,
        ):
            identity = elicitation.CallIdentity(None, "both", {})
            outcome = await suspended_calls.start(
                identity, "c1", ClientAbilities(form=True, roots=True), {"who": first}
            )
            for answers in ({"who": first, "where": second}, {"who": second, "where": first}):
                if isinstance(outcome, elicitation.InputRequired):
                    assert outcome.wire["inputRequests"].keys() <= {"who", "where"}
                    outcome = await suspended_calls.resume(outcome.wire["requestState"], identity, answers)

    asyncio.run(talk())
