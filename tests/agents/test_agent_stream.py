"""`stream_agent`: the events of a run, and what happens when a program stops reading them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, assert_never

import pytest

from toolspace import (
    Agent,
    AgentCallFinished,
    AgentCallStarted,
    AgentFinished,
    AgentStarted,
    AgentStepFinished,
    AgentStream,
    AgentText,
    AgentTextRestarted,
    AgentThinking,
    RunLimits,
    ToolCanceledError,
    ToolContext,
    ToolNotFoundError,
    Toolspace,
    tool,
)
from toolspace.core.language_model import (
    Model,
    ModelListener,
    ModelRequest,
    ModelTurn,
    ResponseRestarted,
    TextDelta,
    ThinkingDelta,
)
from toolspace.models.scripted import ScriptedModel, call


@tool
async def temperature(city: str) -> int:
    """Returns the temperature of a city."""
    return {"Oslo": 9}[city]


class EndlessTool:
    """A tool that runs until it is cancelled."""

    def __init__(self) -> None:
        self.is_running, self.was_cancelled = asyncio.Event(), asyncio.Event()

        @tool(name="block", timeout=600)
        async def block() -> None:
            """Runs until it is cancelled."""
            self.is_running.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.was_cancelled.set()

        self.tool = block


@pytest.mark.spec("19.4")
async def test_a_stream_has_text_calls_results_steps_and_the_result() -> None:
    model = ScriptedModel([call("temperature", {"city": "Oslo"}), "It has 9 degrees there."])
    lines: list[str] = []
    async with Toolspace([temperature], agents=[Agent("ada", model=model)]) as ts:
        async for event in ts.stream_agent("ada", "How warm is Oslo?"):
            assert event.agent == "ada"
            match event:
                case AgentStarted():
                    lines.append("started")
                case AgentText() | AgentThinking():
                    lines.append(event.text)
                case AgentTextRestarted():
                    lines.append("restarted")
                case AgentCallStarted():
                    lines.append(f"{event.name} {event.arguments}")
                case AgentCallFinished():
                    lines.append(f"{event.name}: {event.result.result}")
                case AgentStepFinished():
                    lines.append(f"step {event.step}")
                case AgentFinished():
                    lines.append(f"finished: {event.result.unwrap()}")
                case _:
                    assert_never(event)
    assert lines == [
        "started", "temperature {'city': 'Oslo'}", "temperature: 9", "step 1",
        "It ", "has ", "9 ", "degrees ", "there.", "step 2", "finished: It has 9 degrees there.",
    ]  # fmt: skip


@pytest.mark.spec("19.4")
async def test_the_last_event_has_the_failure_of_a_run() -> None:
    model = ScriptedModel.loop([[call("temperature", '{"city": '), call("missing")]])
    agent = Agent("ada", model=model, limits=RunLimits(timeout=60))
    async with Toolspace([temperature], agents=[agent]) as ts:
        events = [event async for event in ts.stream_agent("ada", "Go.", max_steps=1)]
    started, finished = [[event for event in events if event.type == kind] for kind in ("call", "result")]
    assert [(event.name, event.arguments) for event in started if isinstance(event, AgentCallStarted)] == [
        ("temperature", '{"city": '), ("missing", {}),
    ]  # fmt: skip
    kinds = {event.name: event.result.error_kind for event in finished if isinstance(event, AgentCallFinished)}
    assert kinds == {"temperature": "invalid_parameters", "missing": "unknown_tool"}
    assert isinstance(last := events[-1], AgentFinished)
    assert (last.result.ok, last.result.end) == (False, "max_steps")


async def test_an_unknown_agent_is_an_error_of_the_loop() -> None:
    async with Toolspace(agents=[Agent("ada", model=ScriptedModel())]) as ts:
        with pytest.raises(ToolNotFoundError, match='there is no agent "eda"; did you mean "ada"'):
            async for _ in ts.stream_agent("eda", "Go."):
                pass


@pytest.mark.spec("19.4")
async def test_text_arrives_while_the_model_writes() -> None:
    may_continue = asyncio.Event()

    class SlowModel(Model):
        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            assert listen is not None
            listen(ThinkingDelta("Hm."))
            listen(TextDelta("Wrong"))
            listen(ResponseRestarted())
            listen(TextDelta("One "))
            await may_continue.wait()
            listen(TextDelta("two."))
            return ModelTurn(text="One two.")

    kinds: list[str] = []
    async with Toolspace(agents=[Agent("ada", model=SlowModel())]) as ts:
        async for event in ts.stream_agent("ada", "Count."):
            kinds.append(event.type)
            if isinstance(event, AgentText) and event.text == "One ":
                may_continue.set()
    assert kinds == ["started", "thinking", "text", "restarted", "text", "text", "step", "finished"]


@pytest.mark.spec("19.4")
async def test_leaving_the_loop_cancels_the_run_and_everything_below_it() -> None:
    endless_tool = EndlessTool()
    child = Agent("child", model=ScriptedModel([call("block")]), tools=[endless_tool.tool])
    parent = Agent("parent", model=ScriptedModel([call("agent__child", {"prompt": "Block."})]), agents=[child])
    async with Toolspace(agents=[parent]) as ts:
        async for event in ts.stream_agent("parent", "Go."):
            if isinstance(event, AgentCallStarted):
                await endless_tool.is_running.wait()
                break
        await endless_tool.was_cancelled.wait()
        await ts.orchestrator.wait_until_idle()


@pytest.mark.spec("19.4")
async def test_leaving_the_loop_cancels_the_run_of_a_stream_that_the_program_holds() -> None:
    endless_tool = EndlessTool()
    async with Toolspace([endless_tool.tool], agents=[Agent("ada", model=ScriptedModel([call("block")]))]) as ts:
        stream = ts.stream_agent("ada", "Go.")
        assert isinstance(await anext(stream), AgentStarted)  # A single event: the run goes on.
        async for event in stream:
            if isinstance(event, AgentCallStarted):
                await endless_tool.is_running.wait()
                break
        await endless_tool.was_cancelled.wait()
        with pytest.raises(ToolCanceledError):
            await anext(stream)


@pytest.mark.spec("19.4")
async def test_an_exception_in_the_loop_cancels_the_run() -> None:
    endless_tool = EndlessTool()
    async with Toolspace([endless_tool.tool], agents=[Agent("ada", model=ScriptedModel([call("block")]))]) as ts:

        async def read() -> None:
            async for event in ts.stream_agent("ada", "Go."):
                if isinstance(event, AgentCallStarted):
                    await endless_tool.is_running.wait()
                    raise RuntimeError("the program failed")

        with pytest.raises(RuntimeError):
            await read()
        gc.collect()
        await endless_tool.was_cancelled.wait()


async def test_cancelling_the_reader_cancels_the_run() -> None:
    endless_tool = EndlessTool()

    async def read(ts: Toolspace) -> None:
        async for _ in ts.stream_agent("ada", "Go."):
            pass

    async with Toolspace([endless_tool.tool], agents=[Agent("ada", model=ScriptedModel([call("block")]))]) as ts:
        reader = asyncio.create_task(read(ts))
        await endless_tool.is_running.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        del reader
        gc.collect()
        await endless_tool.was_cancelled.wait()


async def test_a_stream_that_is_closed_has_ended_its_run() -> None:
    endless_tool = EndlessTool()
    async with Toolspace([endless_tool.tool], agents=[Agent("ada", model=ScriptedModel([call("block")]))]) as ts:
        async with ts.stream_agent("ada", "Go.") as stream:
            async for event in stream:
                if isinstance(event, AgentCallStarted):
                    await endless_tool.is_running.wait()
                    break
        assert endless_tool.was_cancelled.is_set()
        assert [event async for event in stream] == []
        await ts.orchestrator.wait_until_idle()


async def test_closing_the_toolspace_ends_streams() -> None:
    endless_tool = EndlessTool()
    streams: list[AgentStream[str]] = []
    async with Toolspace([endless_tool.tool], agents=[Agent("ada", model=ScriptedModel([call("block")]))]) as ts:
        stream = ts.stream_agent("ada", "Go.")
        streams.append(stream)
        async for event in stream:
            if isinstance(event, AgentCallStarted):
                await endless_tool.is_running.wait()
                break
    assert endless_tool.was_cancelled.is_set()
    with pytest.raises(ToolCanceledError):
        async for _ in streams[0]:
            pass


async def test_a_stream_that_is_never_read_starts_nothing() -> None:
    model = ScriptedModel(["never"])
    async with Toolspace(agents=[Agent("ada", model=model)]) as ts:
        stream = ts.stream_agent("ada", "Go.")
        await stream.aclose()
        assert [event async for event in stream] == []
    assert model.requests == []


@pytest.mark.spec("19.4")
async def test_a_handoff_shows_in_the_stream() -> None:
    expert = Agent("expert", model=ScriptedModel(["I know."]))
    desk = Agent("desk", model=ScriptedModel([call("router__handoff-to", {"agent": "expert"})]), destinations=[expert])
    async with Toolspace(agents=[desk]) as ts:
        events = [event async for event in ts.stream_agent("desk", "Go.", session="s")]
    assert [event.agent for event in events if isinstance(event, AgentStarted)] == ["desk", "expert"]
    assert [event.agent for event in events if isinstance(event, AgentText)] == ["expert", "expert"]
    assert (events[-1].type, events[-1].agent) == ("finished", "expert")


@pytest.mark.spec("19.4")
async def test_a_tool_can_stream_an_agent_below_its_call() -> None:
    @tool
    async def ask(context: ToolContext) -> str:
        """Streams another agent."""
        texts = [event.text async for event in ts.stream_agent("bob", "Hello.") if isinstance(event, AgentText)]
        return "".join(texts)

    ada = Agent("ada", model=ScriptedModel([call("ask"), "Done."]))
    async with Toolspace([ask], agents=[ada, Agent("bob", model=ScriptedModel(["Hello there."]))]) as ts:
        result = await ts.run_agent("ada", "Go.")
    assert result.usage.requests == 3  # The run of the other agent belongs to the first one.


async def test_a_reader_that_is_far_behind_gets_joined_text() -> None:
    class TalkativeModel(Model):
        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            assert listen is not None
            for _ in range(50_000):
                listen(TextDelta("ab"))
            return ModelTurn(text="ab" * 50_000)

    async with Toolspace(agents=[Agent("ada", model=TalkativeModel())]) as ts:
        events: list[Any] = [event async for event in ts.stream_agent("ada", "Go.")]
    assert "".join(event.text for event in events if isinstance(event, AgentText)) == "ab" * 50_000
    assert len(events) < 2_000
