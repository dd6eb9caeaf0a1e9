"""The output of a model is streamed while the model writes it, to those who may see it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, agent, private_agent, run_agents
from toolspace import Tool
from toolspace.core.json_text import StreamedTextField
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    Model,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelTurn,
    ResponseRestarted,
    TextDelta,
)
from toolspace.core.stored_records import StoredEvent
from toolspace.errors import ModelError
from toolspace.storage.database import Database


class PacedModel(Model):
    """Streams scripted parts, and waits for the test between them."""

    name = "test:paced"

    def __init__(self, *script: list[Any] | ModelTurn) -> None:
        self._script = list(script)
        self.go_on = asyncio.Event()
        self.before_turn: Callable[[], Awaitable[Any]] | None = None

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        if self.before_turn is not None:
            await self.before_turn()
        step = self._script.pop(0)
        if isinstance(step, ModelTurn):
            return step
        assert listen is not None
        *parts, turn = step
        for part in parts:
            if part == "wait":
                await self.go_on.wait()
                self.go_on.clear()
            else:
                listen(part)
        return turn


def _call(name: str, arguments: str) -> ModelTurn:
    return ModelTurn(calls=(ModelCall("c1", name, arguments),), finish="tools")


_ENTER = _call("enter_space", '{"spaceId": "spc_room"}')


async def _wait_for_event(harness: AgentHarness, type: str, *, stream: str | None = None) -> StoredEvent:
    """The next event of a type in the space."""
    async with await harness.ledger.hub.subscribe(stream or f"space:{harness.space}", after=0) as subscription:
        async for batch in subscription:
            for event in batch:
                if event.type == type:
                    return event
    raise AssertionError("the stream ended")


@pytest.mark.spec("9.1")
@pytest.mark.spec("7.5")
async def test_a_message_is_streamed_while_the_model_writes_it_and_sent_once(
    database: Database, tmp_path: Path
) -> None:
    model = PacedModel(
        _ENTER,
        [
            CallStarted(0, "c1", "send_message"),
            CallDelta(0, '{"te'),
            CallDelta(0, 'xt": "Good mor'),
            "wait",
            CallDelta(0, 'ning"}'),
            _call("send_message", '{"text": "Good morning"}'),
        ],
        ModelTurn(text="done"),
    )
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        message = await harness.send_message("Hello?")
        delta = await _wait_for_event(harness, "message.delta")
        assert delta.data["delta"] == "Good mor"
        assert await harness.sent_texts() == ["Hello?"]  # Not complete yet.
        model.go_on.set()
        await harness.wait_for_run()
        assert await harness.sent_texts() == ["Hello?", "Good morning"]
        events = [
            event for event in await harness.events(f"space:{harness.space}") if event.type.startswith("message.")
        ]
        own_events = [
            event
            for event in events
            if event.data.get("messageId", message.id) != message.id or _is_own(event, harness)
        ]
        assert [event.type for event in own_events][-4:] == [
            "message.started",
            "message.delta",
            "message.delta",
            "message.done",
        ]


def _is_own(event: StoredEvent, harness: AgentHarness) -> bool:
    return event.type == "message.done" and event.data["message"]["senderId"] == harness.agent


@pytest.mark.spec("7.5")
async def test_the_arguments_of_a_visible_tool_are_streamed(database: Database, tmp_path: Path) -> None:
    async def draw(parameters: dict[str, Any], context: Any) -> Any:
        return {"drawn": parameters["title"]}

    chart = Tool("draw_chart", "Draws.", {"type": "object"}, handler=draw, visible=True)
    model = PacedModel(
        _ENTER,
        [
            CallStarted(0, "c1", "draw_chart"),
            CallDelta(0, '{"title": "Sa'),
            "wait",
            CallDelta(0, 'les"}'),
            _call("draw_chart", '{"title": "Sales"}'),
        ],
        ModelTurn(text="done"),
    )
    async with run_agents(database, agent("ada", model), tools=[chart], session_dir=tmp_path) as harness:
        await harness.send_message("Draw.")
        early = await _wait_for_event(harness, "tool.streaming")
        assert early.data["inputDelta"] == '{"title": "Sa'
        assert early.visibility == "full"
        model.go_on.set()
        run = await harness.wait_for_run()
        events = await harness.events(f"space:{harness.space}")
        own_events = [event for event in events if event.data.get("toolCallId") == early.data["toolCallId"]]
        types = [event.type for event in own_events]
        assert types == ["tool.started", "tool.streaming", "tool.streaming", "tool.ready", "tool.done"]
        started, *deltas, ready, _ = own_events
        assert "input" not in started.data
        assert "".join(event.data["inputDelta"] for event in deltas) == '{"title": "Sales"}'
        assert (ready.data["input"], ready.data["inputSchema"]) == ({"title": "Sales"}, {"type": "object"})
        assert [
            event.type
            for event in await harness.events(f"run:{run.id}")
            if event.data.get("toolCallId") == early.data["toolCallId"]
        ] == types
        assert run.status == "completed"


async def _list_types(harness: AgentHarness, name: str) -> list[str]:
    """The types of the events of a tool in the space."""
    events = await harness.events(f"space:{harness.space}")
    return [event.type for event in events if event.data.get("toolName") == name]


@pytest.mark.spec("7.5")
async def test_a_call_of_a_restarted_response_that_calls_another_tool_ends_with_an_error(
    database: Database, tmp_path: Path
) -> None:
    model = PacedModel(
        _ENTER,
        [
            CallStarted(0, "c1", "set_goals"),
            CallDelta(0, '{"go'),
            "wait",
            ResponseRestarted(),
            CallStarted(0, "c1", "set_memories"),
            CallDelta(0, '{"memories": []}'),
            CallStarted(1, "c2", "get_goals"),
            _call("set_memories", '{"memories": [{"key": "a", "value": "b"}]}'),
        ],
        ModelTurn(text="done"),
    )
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Remember.")
        await _wait_for_event(harness, "tool.streaming")
        model.go_on.set()
        await harness.wait_for_run()
        assert await _list_types(harness, "set_goals") == ["tool.started", "tool.streaming", "tool.error"]
        assert await _list_types(harness, "set_memories") == [
            "tool.started",
            "tool.streaming",
            "tool.ready",
            "tool.done",
        ]
        assert await _list_types(harness, "get_goals") == []  # Not in the final turn, and never published.


@pytest.mark.spec("7.5")
async def test_a_call_that_the_model_does_not_finish_ends_with_an_error(database: Database, tmp_path: Path) -> None:
    class Breaking(PacedModel):
        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            turn = await super().respond(request, listen)
            if turn.text == "break":
                raise ModelError("invalid", "it broke off")
            return turn

    model = Breaking(_ENTER, [CallStarted(0, "c1", "set_goals"), "wait", ModelTurn(text="break")])
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Set a goal.")
        while await _list_types(harness, "set_goals") != ["tool.started"]:  # Before the first part of its input.
            await _wait_for_event(harness, "tool.started")
        model.go_on.set()
        assert (await harness.wait_for_run()).status == "failed"
        assert await _list_types(harness, "set_goals") == ["tool.started", "tool.error"]


@pytest.mark.spec("7.5")
async def test_a_visible_call_after_a_change_of_the_space_is_published_only_in_its_space(
    database: Database, tmp_path: Path
) -> None:
    async def draw(parameters: dict[str, Any], context: Any) -> Any:
        return "drawn"

    chart = Tool("draw_chart", "Draws.", {"type": "object"}, handler=draw, visible=True)
    calls = (
        ModelCall("c1", "draw_chart", "{}"),
        ModelCall("c2", "enter_space", '{"spaceId": "spc_room"}'),
        ModelCall("c3", "draw_chart", '{"title": "Sales"}'),
    )
    parts = [part for index, call in enumerate(calls) for part in (CallStarted(index, call.id, call.name),)]
    model = PacedModel([*parts, CallDelta(2, '{"title":'), ModelTurn(calls=calls)], ModelTurn(text="done"))
    async with run_agents(database, agent("ada", model), tools=[chart], session_dir=tmp_path) as harness:
        await harness.send_message("Draw.")
        run = await harness.wait_for_run()
        assert await _list_types(harness, "draw_chart") == ["tool.started", "tool.ready", "tool.done"]
        own_events = [
            event for event in await harness.events(f"run:{run.id}") if event.data.get("toolName") == "draw_chart"
        ]
        by_call = {event.data["toolCallId"]: event.visibility for event in own_events}
        assert sorted(by_call.values()) == ["full", "none"]  # The first was in no space.
        for call_id in by_call:
            types = [event.type for event in own_events if event.data["toolCallId"] == call_id]
            assert types[:2] == ["tool.started", "tool.ready"]
            assert len(types) == 3


async def test_a_restarted_response_replaces_what_was_streamed_before(database: Database, tmp_path: Path) -> None:
    model = PacedModel(
        _ENTER,
        [
            CallStarted(0, "c1", "send_message"),
            CallDelta(0, '{"text": "Wro'),
            "wait",
            ResponseRestarted(),
            CallStarted(0, "c1", "send_message"),
            CallDelta(0, '{"text": "Right"}'),
            _call("send_message", '{"text": "Right"}'),
        ],
        ModelTurn(text="done"),
    )
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        await _wait_for_event(harness, "message.delta")
        model.go_on.set()
        await harness.wait_for_run()
        deltas = [
            event.data for event in await harness.events(f"space:{harness.space}") if event.type == "message.delta"
        ]
        assert [(delta["delta"], delta.get("restart", False)) for delta in deltas] == [("Wro", False), ("Right", True)]
        assert await harness.sent_texts() == ["Hello?", "Right"]


async def test_a_streamed_message_ends_with_an_error_if_the_model_fails(database: Database, tmp_path: Path) -> None:
    class Breaking(PacedModel):
        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            turn = await super().respond(request, listen) if self._script else ModelTurn(text="break")
            if turn.text == "break":
                raise ModelError("invalid", "it broke off")
            return turn

    model = Breaking(
        _ENTER,
        [CallStarted(0, "c1", "send_message"), CallDelta(0, '{"text": "Half'), "wait", ModelTurn(text="break")],
    )
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        await _wait_for_event(harness, "message.delta")
        model.go_on.set()
        run = await harness.wait_for_run()
        assert run.status == "failed"
        completed_events = [
            event.data["message"]
            for event in await harness.events(f"space:{harness.space}")
            if event.type == "message.done"
        ]
        assert [message["status"] for message in completed_events] == ["complete", "error"]
        assert await harness.sent_texts() == ["Hello?"]


async def test_the_text_of_the_model_is_only_on_the_stream_of_the_run(database: Database, tmp_path: Path) -> None:
    model = PacedModel([TextDelta("I wonder "), TextDelta("why."), ModelTurn(text="I wonder why.")])
    async with run_agents(database, private_agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hello?")
        run = await harness.wait_for_run()
        thoughts = [event for event in await harness.events(f"run:{run.id}") if event.type == "message.delta"]
        assert [event.data["delta"] for event in thoughts] == ["I wonder why."]
        assert {event.visibility for event in thoughts} == {"none"}
        assert not [event for event in await harness.events(f"space:{harness.space}") if event.type == "message.delta"]


@pytest.mark.parametrize(
    ("text", "member"),
    [
        ('{"text": "Hello"}', "Hello"),
        ('{"other": {"text": "no"}, "text": "yes"}', "yes"),
        ('{"list": ["text", "x"], "text": "a\\nb\\u00e9\\ud83d\\ude00\\"q\\""}', 'a\nbé😀"q"'),
        ('{"text": 5, "more": "text"}', ""),
        ('["text", "x"]', ""),
        ('{"text": "unfin', "unfin"),
        ('{"text": "bad \\uZZZZ escape \\ud83d alone"}', "bad  escape  alone"),
    ],
)
def test_a_streamed_text_field_is_parsed_from_json_in_any_pieces(text: str, member: str) -> None:
    assert StreamedTextField("text").feed(text) == member
    piecewise = StreamedTextField("text")
    assert "".join(map(piecewise.feed, text)) == member
