"""Agents without a gateway: a program runs one and gets its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolspace import Agent, AgentResult, LoopSettings, RunLimits, Settings, ToolContext, Toolspace, tool
from toolspace.core.language_model import (
    Model,
    ModelListener,
    ModelRequest,
    ModelTurn,
    ResultsTurn,
    TextDelta,
    Usage,
    UserTurn,
)
from toolspace.errors import ModelError, RegistrationError, ToolNotFoundError
from toolspace.models.scripted import ScriptedModel, call


@tool
async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@tool
async def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)


def last_results(model: ScriptedModel, request: int = -1) -> list[tuple[str, bool]]:
    """What the calls before a request came to, as the model read it."""
    turn = model.requests[request].turns[-1]
    assert isinstance(turn, ResultsTurn), turn
    return [(answer.text, answer.is_error) for answer in turn.results]


async def run_agent_once(model: Model, prompt: str = "Go.", *, tools: Any = (add, fail), **options: Any) -> AgentResult:
    async with Toolspace(tools, agents=[Agent("ada", model=model, **options)]) as ts:
        return await ts.run_agent("ada", prompt)


async def test_an_agent_calls_tools_and_answers() -> None:
    model = ScriptedModel([call("add", {"a": 1, "b": 2}), "It is 3."], usage=Usage(requests=1, input_tokens=10))
    result = await run_agent_once(model, "What is 1 + 2?", system="You add.")
    assert (result.ok, result.text, result.end, result.error) == (True, "It is 3.", "answered", None)
    assert (result.agent, result.path, result.steps) == ("ada", ("ada",), 2)
    assert result.usage == Usage(requests=2, input_tokens=20)
    assert [type(turn) for turn in result.turns] == [UserTurn, ModelTurn, ResultsTurn, ModelTurn]
    assert last_results(model) == [("3", False)]
    assert model.requests[0].system.startswith("You add.")
    assert model.requests[0].turns == (UserTurn("What is 1 + 2?"),)


async def test_agents_run_without_opening_the_toolspace() -> None:
    ts = Toolspace([add], agents=[Agent("ada", model=ScriptedModel([call("add", {"a": 2, "b": 2}), "4"]))])
    assert (await ts.run_agent("ada", "2 + 2?")).text == "4"
    await ts.aclose()


async def test_the_final_report_is_the_answer() -> None:
    report = {"status": "success", "format": "markdown", "content": "**3**"}
    result = await run_agent_once(ScriptedModel([call("agent__final_report", report)]))
    assert (result.ok, result.end, result.text, result.value) == (True, "reported", "**3**", "**3**")
    report = {"status": "success", "format": "json", "content_json": {"sum": 3}}
    result = await run_agent_once(ScriptedModel([call("agent__final_report", report)]))
    assert result.value == {"sum": 3}
    assert result.report == report


async def test_a_report_of_failure_is_an_error_result() -> None:
    report = {"status": "failure", "format": "markdown", "content": "There is no such file."}
    result = await run_agent_once(ScriptedModel([call("agent__final_report", report)]))
    assert (result.ok, result.error, result.end) == (False, "There is no such file.", "reported")


async def test_a_listener_receives_the_output_of_the_model() -> None:
    texts: list[str] = []

    def listen(part: Any) -> None:
        texts.append(part.text if isinstance(part, TextDelta) else "")

    async with Toolspace(agents=[Agent("ada", model=ScriptedModel(["One two three."]))]) as ts:
        await ts.run_agent("ada", "Count.", listen=listen)
    assert "".join(texts) == "One two three."
    assert len(texts) > 1


async def test_an_unknown_agent_is_an_error_that_lists_the_agents() -> None:
    async with Toolspace(agents=[Agent("researcher", model=ScriptedModel())]) as ts:
        with pytest.raises(ToolNotFoundError, match='there is no agent "reseacher"; did you mean "researcher"'):
            await ts.run_agent("reseacher", "Go.")


async def test_an_agent_has_its_own_tools_and_those_of_the_toolspace() -> None:
    @tool(name="add")
    async def shout(a: int, b: int) -> str:
        """Adds loudly."""
        return f"{a + b}!"

    @tool
    async def whisper(text: str) -> str:
        """Whispers."""
        return text.lower()

    model = ScriptedModel([[call("add", {"a": 1, "b": 1}), call("whisper", {"text": "X"}), call("fail", {"why": "y"})]])
    agent = Agent("ada", model=model, tools=[shout, whisper])
    async with Toolspace([add, fail], agents=[agent]) as ts:
        await ts.run_agent("ada", "Go.", max_steps=1)
        model_saw = [tool_item.name for tool_item in model.requests[0].tools]
        assert {"add", "whisper", "fail"} <= set(model_saw)
        assert model_saw.count("add") == 1
        records = {record.tool: record.status for record in ts.orchestrator.call_log.recent}
        assert records == {"add": "ok", "whisper": "ok", "fail": "failed"}
        assert [tool_item.name for tool_item in ts.list_tools()] == ["add", "fail", "agent__ada"]
        assert (await ts.call("add", {"a": 1, "b": 1})).result == 2
        assert (await ts.call("whisper", {"text": "X"})).error_kind == "unknown_tool"


async def test_an_agent_that_never_runs_opens_nothing() -> None:
    def unused(n: int) -> Agent:
        return Agent(f"idle{n}", model="openai:gpt-5", tools=[add])

    async with Toolspace(agents=[unused(n) for n in range(100)]) as ts:
        assert len(ts.agents) == 100
        assert len(ts.list_tools()) == 100


# Models that behave badly


class BrokenModel(Model):
    """Raises what it is told to."""

    name = "broken:model"

    def __init__(self, raises: Callable[[], BaseException]) -> None:
        self._raises = raises

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        raise self._raises()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ModelError("overloaded", "the model is busy"), "transport_error"),
        (ModelError("no_key", "set OPENAI_API_KEY"), "execution_error"),
        (TimeoutError("too slow"), "execution_error"),
        (KeyError("choices"), "execution_error"),
    ],
)
async def test_a_model_error_is_an_error_result(error: Exception, kind: str) -> None:
    result = await run_agent_once(BrokenModel(lambda: error))
    assert (result.ok, result.end, result.error_kind) == (False, "failed", kind)
    assert str(error) in (result.error or "")


async def test_a_model_error_after_some_steps_keeps_the_last_text() -> None:
    script = [ModelTurn(text="Let me see.", calls=(call("add", {"a": 1, "b": 2}),)), ModelError("broken", "cut off")]
    result = await run_agent_once(ScriptedModel(script))
    assert (result.ok, result.error, result.text, result.steps) == (False, "cut off", "Let me see.", 1)


async def test_the_model_reads_errors_about_malformed_arguments_and_unknown_tools() -> None:
    model = ScriptedModel(
        [
            [
                call("add", '{"a": 1, "b"'),
                call("add", '["not", "an object"]'),
                call("ad", {"a": 1, "b": 2}),
                call("add", {"a": "one", "b": 2}),
                call("", {}),
                call("add", "\x00"),
                call("add", '{"a": 1' + ", 1" * 100),
            ],
            "I give up.",
        ]
    )
    result = await run_agent_once(model)
    assert (result.ok, result.text) == (True, "I give up.")
    assert [is_error for _, is_error in last_results(model)] == [True] * 7
    assert 'Tool "ad" not found; did you mean "add"' in last_results(model)[2][0]


@pytest.mark.spec("4.3")
@pytest.mark.parametrize(("settings", "expected"), [(Settings(), 3), (Settings(max_concurrent_tools=50), 50)])
async def test_the_calls_of_a_turn_run_side_by_side_up_to_the_limit_with_results_in_order(
    settings: Settings, expected: int
) -> None:
    active_count, most = 0, 0
    all_started = asyncio.Event()

    @tool
    async def meet(n: int) -> int:
        """Waits for as many others as may run at once."""
        nonlocal active_count, most
        active_count += 1
        most = max(most, active_count)
        if active_count == expected:
            all_started.set()
        await all_started.wait()
        await asyncio.sleep(0)
        active_count -= 1
        return n

    model = ScriptedModel([[call("meet", {"n": n}) for n in range(50)], "Met."])
    async with Toolspace(tools=[meet], agents=[Agent("solo", model=model)], settings=settings) as ts:
        result = await ts.run_agent("solo", "Go.")
        assert ts.run().max_concurrent_tools == settings.max_concurrent_tools  # A program's own run.
    assert result.text == "Met."
    assert last_results(model) == [(str(n), False) for n in range(50)]
    assert most == expected


async def test_each_call_beyond_the_limit_of_a_turn_fails() -> None:
    model = ScriptedModel([[call("add", {"a": n, "b": 0}) for n in range(5)], "Done."])
    result = await run_agent_once(model, settings=LoopSettings(max_tool_calls_per_turn=3))
    assert result.ok
    assert [is_error for _, is_error in last_results(model)] == [False] * 3 + [True] * 2


async def test_an_endless_loop_ends_at_max_steps() -> None:
    result = await run_agent_once(
        ScriptedModel.loop([call("add", {"a": 1, "b": 1})]), settings=LoopSettings(max_steps=7)
    )
    assert (result.ok, result.end, result.steps, result.error_kind) == (False, "max_steps", 7, "limit_exceeded")
    assert "loop.maxSteps" in (result.error or "")


async def test_calls_that_keep_failing_end_the_run() -> None:
    model = ScriptedModel(lambda request: call("fail", {"why": f"no disk {len(request.turns)}"}))
    result = await run_agent_once(model, settings=LoopSettings(max_steps=500))
    assert (result.ok, result.end) == (False, "gave_up")
    assert "no disk" in (result.error or "")
    assert result.steps < 100


async def test_a_huge_result_is_stored_and_the_agent_reads_it(tmp_path: Path) -> None:
    @tool
    async def dump() -> str:
        """Says a lot."""
        return "\n".join(f"line {n}" for n in range(100_000))

    def read(request: ModelRequest) -> Any:
        turn = request.turns[-1]
        assert isinstance(turn, ResultsTurn)
        handle = turn.results[0].text.split('"handle":"')[1].split('"')[0]
        assert "agent__read_output" in {tool_item.name for tool_item in request.tools}
        return call("agent__read_output", {"handle": handle, "offset": 99_999})

    model = ScriptedModel([call("dump"), read, "Read."])
    async with Toolspace(
        [dump], agents=[Agent("ada", model=model)], settings=Settings(state_dir=tmp_path)
    ) as ts:  # fmt: skip
        result = await ts.run_agent("ada", "Dump.")
    assert result.text == "Read."
    assert "line 99999" in last_results(model)[0][0]


async def test_a_turn_without_calls_and_text_ends_the_run() -> None:
    result = await run_agent_once(ScriptedModel([ModelTurn()]))
    assert (result.ok, result.text, result.end) == (True, "", "answered")


# Limits


async def test_tokens_and_cost_of_a_run_are_limited() -> None:
    usage = Usage(requests=1, input_tokens=90, output_tokens=10, cost=0.5)
    model = ScriptedModel.loop([call("add", {"a": 1, "b": 1})], usage=usage)
    result = await run_agent_once(model, limits=RunLimits(max_tokens=250))
    assert (result.end, result.steps, result.usage.tokens) == ("limit", 3, 300)
    assert "limits.maxTokens" in (result.error or "")
    result = await run_agent_once(model, limits=RunLimits(max_cost=1.0))
    assert (result.end, result.steps) == ("limit", 2)
    assert "limits.maxCost" in (result.error or "")


async def test_the_timeout_of_a_run_limits_the_model_and_the_tools() -> None:
    never = asyncio.Event()

    @tool
    async def wait() -> None:
        """Waits for what never comes."""
        await never.wait()

    async def silent(request: ModelRequest) -> str:
        await never.wait()
        return "too late"

    result = await run_agent_once(ScriptedModel([silent]), limits=RunLimits(timeout=0.05))
    assert (result.ok, result.end, result.error_kind) == (False, "limit", "limit_exceeded")
    result = await run_agent_once(ScriptedModel([call("wait"), "Done."]), tools=[wait], limits=RunLimits(timeout=0.05))
    assert (result.ok, result.end) == (False, "limit")
    assert "limits.timeout" in (result.error or "")


async def test_canceling_stops_the_model_and_the_tools() -> None:
    stopped: list[str] = []
    reached_event = asyncio.Event()

    async def hang(subject: str) -> None:
        reached_event.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(subject)

    @tool
    async def work() -> None:
        """Works for ever."""
        await hang("tool")

    async def think(request: ModelRequest) -> str:
        await hang("model")
        return ""

    for model in (ScriptedModel([think]), ScriptedModel([call("work"), "Done."])):
        reached_event.clear()
        request_task = asyncio.create_task(run_agent_once(model, tools=[work]))
        await reached_event.wait()
        request_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request_task
    assert stopped == ["model", "tool"]


async def test_restrictions_of_the_caller_apply_to_the_agents_tools(tmp_path: Path) -> None:
    contexts: list[ToolContext] = []

    @tool
    async def look(context: ToolContext) -> str:
        """Looks around."""
        contexts.append(context)
        return "seen"

    agents = [
        Agent("child", model=ScriptedModel.loop([call("look"), "Seen."])),
        Agent("ada", model=ScriptedModel([call("agent__child", {"prompt": "Look."}), "ok"]), agents=["child"]),
    ]
    async with Toolspace([look], agents=agents) as ts:
        context = ToolContext(user_id="u1", allowed_paths=[tmp_path], allowed_hosts=["example.com"])
        await ts.run_agent("ada", "Look.", context=context)
    assert [
        (context.user_id, context.allowed_paths, context.allowed_hosts, context.agent_id) for context in contexts
    ] == [("u1", [tmp_path], ["example.com"], "child")]


async def test_a_tool_can_run_an_agent() -> None:
    @tool
    async def delegate(to: str) -> str:
        """Asks another agent."""
        result = await ts.run_agent(to, "Help.")
        return result.text if result.ok else f"no: {result.error}"

    helper = Agent("helper", model=ScriptedModel(["Helped."]))
    model = ScriptedModel([[call("delegate", {"to": "helper"}), call("delegate", {"to": "ada"})], "Done."])
    ts = Toolspace([delegate], agents=[helper, Agent("ada", model=model)])
    async with ts:
        result = await ts.run_agent("ada", "Go.")
    assert last_results(model) == [("Helped.", False), ("no: Recursion detected: ada → ada", False)]
    assert result.usage.requests == 3


# What cannot be


@pytest.mark.parametrize("name", ["", " x", "a/b", "final_report", "batch", "x" * 58, "é", "a\0b", "__"])
def test_invalid_agent_names_are_rejected(name: str) -> None:
    with pytest.raises(RegistrationError, match="cannot name an agent"):
        Agent(name)


def test_contradicting_agents_are_rejected() -> None:
    with pytest.raises(RegistrationError, match='agents of the agent "a": there is no agent "b"'):
        Toolspace(agents=[Agent("a", agents=["b"])])
    with pytest.raises(RegistrationError, match='there are two agents "a"'):
        Toolspace(agents=[Agent("a"), Agent("a")])
    with pytest.raises(RegistrationError, match='"my agent" and "my-agent" would be one tool, agent__my_agent'):
        Toolspace(agents=[Agent("my agent"), Agent("my-agent")])


def test_referenced_agents_are_registered_too() -> None:
    leaf = Agent("leaf")
    ts = Toolspace(agents=[Agent("root", agents=[Agent("twig", agents=[leaf])], destinations=[leaf])])
    assert [agent.name for agent in ts.agents] == ["root", "leaf", "twig"]


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("gpt5", 'did you mean "gpt-5"'),
        ("lama", "write provider:name, such as"),
        ("openai", '"openai" is a provider: add a name, such as "openai:gpt-'),
    ],
)
def test_an_unknown_model_is_refused_with_a_suggestion(model: str, hint: str) -> None:
    with pytest.raises(ModelError, match=f"unknown model '{model}'.*{hint}") as error_info:
        Agent("a", model=model)
    assert error_info.value.kind == "not_found"


@pytest.mark.parametrize("model", ["gpt-5", "o3", "claude-x", "ollama:llama3:8b", "openai:own", "demo:", "", None])
def test_a_model_whose_provider_is_clear_is_accepted(model: str | None) -> None:
    assert Agent("a", model=model).model == model
