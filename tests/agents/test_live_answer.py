"""Plain text reaches the space while the model writes it, and disappears if it was not the answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, agent, private_agent, run_agents
from tests.agents.crashing_database import CrashingDatabase
from tests.agents.test_live_output import PacedModel
from toolspace import Hook, HookCall, Settings
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    ModelCall,
    ModelTurn,
    ResponseRestarted,
    TextDelta,
)
from toolspace.core.stored_records import StoredEvent
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces, sessions

GOALS = ModelTurn(text="Let me look.", calls=(ModelCall("c1", "get_goals", "{}"),), finish="tools")


async def _wait_for(harness: AgentHarness, type: str, **data: Any) -> StoredEvent:
    """The first event of this type and data on the space's stream that is not about the person's message."""
    async with await harness.ledger.hub.subscribe(f"space:{harness.space}", after=0) as subscription:
        async for batch in subscription:
            for event in batch:
                sender = event.data.get("message", event.data).get("senderId")
                if event.type == type and sender != harness.person and data.items() <= event.data.items():
                    return event
    raise AssertionError("the stream ended")


async def _answer_events(harness: AgentHarness) -> list[StoredEvent]:
    """The events of the agent's messages on the stream of the space."""
    events = await harness.events(f"space:{harness.space}")
    own_ids = {
        event.data["messageId"]
        for event in events
        if event.type == "message.started" and event.data["senderId"] == harness.agent
    }
    return [event for event in events if _message_id(event) in own_ids]


def _message_id(event: StoredEvent) -> str | None:
    return event.data["message"]["id"] if event.type == "message.done" else event.data.get("messageId")


def _describe(events: list[StoredEvent]) -> list[tuple[str, Any]]:
    """The events as their type, and the text or the status."""
    return [
        (
            event.type.removeprefix("message."),
            event.data.get("delta") if event.type != "message.done" else event.data["message"]["status"],
        )
        for event in events
    ]


@pytest.mark.spec("19.2")
async def test_plain_text_is_streamed_into_the_space_while_the_model_writes_it(
    database: Database, tmp_path: Path
) -> None:
    model = PacedModel(
        [
            TextDelta("\n Hel"),
            "wait",
            TextDelta("lo, "),
            "wait",
            TextDelta("Husam! \n"),
            ModelTurn(text="\n Hello, Husam! \n"),
        ]
    )
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hi")
        delta = await _wait_for(harness, "message.delta")
        assert delta.data["delta"] == "Hel"
        assert await harness.sent_texts(harness.agent) == []
        model.go_on.set()
        await _wait_for(harness, "message.delta", delta="lo,")
        model.go_on.set()
        run = await harness.wait_for_run()
        assert await harness.sent_texts(harness.agent) == ["Hello, Husam!"]
        events = await _answer_events(harness)
        assert _describe(events) == [
            ("started", None),
            ("delta", "Hel"),
            ("delta", "lo,"),
            ("delta", " Husam!"),
            ("done", "complete"),
        ]
        assert events[0].data["provisional"] is True
        assert events[-1].data["message"]["metadata"] == {}
        assert {_message_id(event) for event in events} == {
            event.data["messageId"] for event in await harness.events(f"run:{run.id}") if event.type == "message.delta"
        }


@pytest.mark.spec("19.2")
async def test_text_before_a_call_is_withdrawn_and_the_last_text_is_the_answer(
    database: Database, tmp_path: Path
) -> None:
    model = PacedModel(
        [TextDelta("Let me look."), "wait", CallStarted(0, "c1", "get_goals"), "wait", CallDelta(0, "{}"), GOALS],
        [TextDelta("You have none."), "wait", ModelTurn(text="You have none.")],
    )
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("What are my goals?")
        await _wait_for(harness, "message.delta", delta="Let me look.")
        assert [message.status for message in await harness.messages()] == ["complete", "running"]
        model.go_on.set()
        done = await _wait_for(harness, "message.done")  # While the model still writes the call.
        assert done.data["message"]["status"] == "error"
        assert done.data["message"]["metadata"]["withdrawn"] is True
        assert done.data["message"]["content"] == ""
        assert [message.content for message in await harness.messages()] == ["What are my goals?"]
        model.go_on.set()
        await _wait_for(harness, "message.delta", delta="You have none.")
        model.go_on.set()
        await harness.wait_for_run()
        assert [message.content for message in await harness.messages() if message.kind == "message"] == [
            "What are my goals?",
            "You have none.",
        ]
        assert _describe(await _answer_events(harness)) == [
            ("started", None),
            ("delta", "Let me look."),
            ("done", "error"),
            ("started", None),
            ("delta", "You have none."),
            ("done", "complete"),
        ]


@pytest.mark.spec("19.2")
async def test_text_beside_a_call_that_the_model_announced_only_at_the_end_is_withdrawn(
    sqlite: Database, tmp_path: Path
) -> None:
    model = PacedModel([TextDelta("Let me look."), "wait", GOALS], ModelTurn(text="None."))
    async with run_agents(sqlite, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hi")
        await _wait_for(harness, "message.delta")
        model.go_on.set()
        await harness.wait_for_run()
        assert await harness.sent_texts(harness.agent) == ["None."]
        assert not [message for message in await harness.messages() if message.status != "complete"]


@pytest.mark.spec("19.2")
async def test_text_after_an_announced_call_stays_private(sqlite: Database, tmp_path: Path) -> None:
    model = PacedModel(
        [CallStarted(0, "c1", "get_goals"), TextDelta("A thought."), "wait", GOALS], ModelTurn(text="None.")
    )
    async with run_agents(sqlite, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hi")
        run_id = (await _first_run(harness)).id
        await harness.wait_for_event(run_id, "message.delta")
        model.go_on.set()
        await harness.wait_for_run()
        assert "A thought." not in json.dumps([event.data for event in await _answer_events(harness)])
        assert await harness.sent_texts(harness.agent) == ["None."]


async def _first_run(harness: AgentHarness) -> Any:
    while not (runs := await harness.runs()):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.005)
    return runs[0]


@pytest.mark.spec("19.2")
@pytest.mark.parametrize("reason", ["private", "sent", "agents", "left", "hook"])
async def test_text_that_will_not_be_the_answer_is_not_streamed(sqlite: Database, tmp_path: Path, reason: str) -> None:
    turn = [TextDelta("Hello."), "wait", ModelTurn(text="Hello.")]
    send = ModelTurn(calls=(ModelCall("c1", "reply", '{"text": "Sent.", "channelId": "spc_room"}'),), finish="tools")
    model = PacedModel(*([send] if reason == "sent" else []), turn)
    agents = [private_agent("ada", model) if reason == "private" else agent("ada", model)]
    if reason == "agents":
        agents.append(agent("bob", ScriptedModel.loop(["Nothing."])))

    def watch(call: HookCall) -> None:
        """Could deny the message."""

    hooks = (Hook(use=watch, tools="send_message"),) if reason == "hook" else ()
    async with run_agents(sqlite, *agents, session_dir=tmp_path, settings=Settings(hooks=hooks)) as harness:
        sender = harness.agents[1] if reason == "agents" else None
        if reason == "left":
            model.before_turn = lambda: harness.ledger.write(
                entities_and_spaces.remove_member, harness.space, harness.agent
            )
        await harness.send_message("Hi", sender=sender)
        await harness.wait_for_event((await _first_run(harness)).id, "message.delta")
        model.go_on.set()
        await harness.wait_for_run()
        deltas = [text for kind, text in _describe(await _answer_events(harness)) if kind == "delta"]
        assert deltas == (["Hello."] if reason == "hook" else [])  # With hooks: in the commit that ends the run.
        expected = {"sent": ["Sent."], "hook": ["Hello."]}.get(reason, [])
        assert await harness.sent_texts(harness.agent) == expected
        assert not [message for message in await harness.messages() if message.status != "complete"]


@pytest.mark.spec("19.2")
async def test_text_that_the_model_writes_again_replaces_what_was_streamed(sqlite: Database, tmp_path: Path) -> None:
    model = PacedModel(
        [TextDelta("Good mor"), "wait", ResponseRestarted(), TextDelta("Hello."), "wait", ModelTurn(text="Hello.")]
    )
    async with run_agents(sqlite, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hi")
        await _wait_for(harness, "message.delta", delta="Good mor")
        model.go_on.set()
        restart = await _wait_for(harness, "message.delta", delta="Hello.")
        assert restart.data["restart"] is True
        model.go_on.set()
        run = await harness.wait_for_run()
        assert await harness.sent_texts(harness.agent) == ["Hello."]
        deltas = [event.data for event in await harness.events(f"run:{run.id}") if event.type == "message.delta"]
        assert [delta.get("restart") for delta in deltas] == [None, True]


@pytest.mark.spec("19.2")
async def test_text_of_a_model_that_fails_is_withdrawn_and_the_next_attempt_answers(
    sqlite: Database, tmp_path: Path
) -> None:
    class FailingModel(PacedModel):
        has_failed = False

        async def respond(self, request: Any, listen: Any = None) -> ModelTurn:
            turn = await super().respond(request, listen)
            if not self.has_failed:
                self.has_failed = True
                raise ModelError("unavailable", "the connection broke")
            return turn

    model = FailingModel([TextDelta("Hel"), "wait", ModelTurn(text="Hel")], ModelTurn(text="Hello."))
    async with run_agents(sqlite, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hi")
        await _wait_for(harness, "message.delta")
        model.go_on.set()
        await harness.wait_for_run(2)
        assert [message.content for message in await harness.messages()] == ["Hi", "Hello."]


@pytest.mark.spec("19.2")
@pytest.mark.spec("11.6")
async def test_text_that_was_streamed_when_the_process_was_killed_is_withdrawn_and_the_answer_is_sent_once(
    database: Database, tmp_path: Path
) -> None:
    crashing_database = CrashingDatabase(database)
    model = PacedModel([TextDelta("Hel"), "wait", ModelTurn(text="Hello.")])
    ada = agent("ada", model)
    async with run_agents(crashing_database, ada, session_dir=tmp_path) as harness:
        await harness.send_message("Hi")
        await _wait_for(harness, "message.delta")
        crashing_database.crash()
        model.go_on.set()
    await Ledger(database).write(sessions.release_all_leases, "")
    ada = agent("ada", ScriptedModel(["Hello."]))
    async with run_agents(database, ada, session_dir=tmp_path) as harness:
        assert (await harness.wait_for_run()).status == "completed"
        assert [message.content for message in await harness.messages()] == ["Hi", "Hello."]
        assert _describe(await _answer_events(harness)) == [
            ("started", None),
            ("delta", "Hel"),
            ("done", "error"),
            ("started", None),
            ("delta", "Hello."),
            ("done", "complete"),
        ]
