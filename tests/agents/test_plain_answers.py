"""The text of a last turn as an answer, and cycles that begin in the space of their messages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, agent, run_agents
from tests.agents.crashing_database import CrashingDatabase
from toolspace.agents.agent import entity_id_for
from toolspace.agents.prompt_builder import PromptContext, build_system_prompt
from toolspace.composition.settings import Settings
from toolspace.config.agent_settings import AgentLoopSettings, RouterSettings
from toolspace.core.hooks import Hook, HookCall, HookDecision
from toolspace.core.ids import now_ms
from toolspace.core.language_model import ModelRequest, ModelTurn
from toolspace.models.scripted import ScriptedModel, call
from toolspace.orchestrator.policy_rules import PolicyRule
from toolspace.spaces import messaging
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import entities_and_spaces, messages, sessions

HELLO = "Hello, Husam!"


@pytest.mark.spec("19.2")
async def test_the_text_of_the_last_turn_is_the_answer_to_a_person(database: Database, tmp_path: Path) -> None:
    """One model request, one message, streamed under one id, in the commit that ends the run."""
    model = ScriptedModel([HELLO])
    async with run_agents(database, agent("ada", model), session_dir=tmp_path) as harness:
        await harness.send_message("Hi")
        run = await harness.wait_for_run()
        assert await harness.sent_texts(harness.agent) == [HELLO]
        assert (run.status, len(model.requests)) == ("completed", 1)
        (message,) = [item for item in await harness.messages() if item.sender_id == harness.agent]
        assert (message.run_id, message.status) == (run.id, "complete")
        events = [
            event for event in await harness.events(f"space:{harness.space}") if message.id in json.dumps(event.data)
        ]
        assert [event.type for event in events] == ["message.started", "message.delta", "message.done"]
        run_events = await harness.events(f"run:{run.id}")
        assert {event.data["messageId"] for event in run_events if event.type == "message.delta"} == {message.id}
        assert run_events[-1].type == "run.done"
        assert run_events[-1].data["spoke"] is True


@pytest.mark.spec("19.2")
@pytest.mark.parametrize(
    ("turns", "settings", "expected"),
    [
        ([call("enter_space", {"spaceId": "spc_room"}), call("send_message", {"text": "Hi."}), "Done."], {}, ["Hi."]),
        ([call("reply", {"text": "Hi.", "channelId": "spc_room"}), "Done."], {}, ["Hi."]),
        ([call("get_goals", {}), HELLO], {}, [HELLO]),
        ([ModelTurn(text="A thought.", calls=(call("skip", id="c1"),)), "Never."], {}, []),
        ([HELLO], {"loop": AgentLoopSettings(plain_text="private")}, []),
        (["  \n"], {}, []),
        ([ModelTurn(text="A thought.", calls=(call("get_goals", id="c1"),)), ""], {}, []),
        ([call("get_goals", {})], {"loop": AgentLoopSettings(max_steps=1)}, []),
        (["x" * 100_001], {}, ["x" * 100_000]),
    ],
    ids=["sent", "replied", "after a call", "skipped", "private", "blank", "empty", "last step", "too long"],
)
async def test_only_an_answer_that_nothing_else_gave_is_delivered(
    sqlite: Database, tmp_path: Path, turns: list[Any], settings: dict[str, Any], expected: list[str]
) -> None:
    async with run_agents(sqlite, agent("ada", ScriptedModel(turns), **settings), session_dir=tmp_path) as harness:
        await harness.send_message("Hi")
        run = await harness.wait_for_run()
        assert await harness.sent_texts(harness.agent) == expected
        done = (await harness.events(f"run:{run.id}"))[-1]
        assert done.data["spoke"] is bool(expected)


@pytest.mark.spec("19.2")
async def test_messages_of_agents_and_events_of_services_get_no_plain_answer(sqlite: Database, tmp_path: Path) -> None:
    ada, bob = ScriptedModel.loop([HELLO]), ScriptedModel.loop(["I say nothing."])
    async with run_agents(sqlite, agent("ada", ada), agent("bob", bob), session_dir=tmp_path) as harness:
        await harness.send_message("Hi", sender=harness.agents[1])
        await harness.wait_for_run()
        await harness.push_event("something happened")
        run = await harness.wait_for_run(2)
        assert await harness.sent_texts(harness.agent) == []
        assert (await harness.events(f"run:{run.id}"))[-1].data["spoke"] is False


@pytest.mark.spec("19.2")
async def test_the_answer_goes_to_the_space_of_the_newest_message_of_a_person(sqlite: Database, tmp_path: Path) -> None:
    has_begun, release = asyncio.Event(), asyncio.Event()

    async def wait(_: ModelRequest) -> str:
        has_begun.set()
        await release.wait()
        return "Nothing to say."

    async with run_agents(sqlite, agent("ada", ScriptedModel([wait, HELLO])), session_dir=tmp_path) as harness:
        await _create_other_space(harness)
        await harness.push_event("begin")
        await has_begun.wait()
        first = await harness.send_message("first")
        while now_ms() <= first.created_at:  # noqa: ASYNC110 - only the time can tell which one is newer
            await asyncio.sleep(0.001)
        await harness.ledger.commit(messaging.send_message, "spc_other", harness.person, "second")
        release.set()
        run = await harness.wait_for_run(2)
        assert len(run.trigger["events"]) == 2
        assert await harness.sent_texts(harness.agent) == []
        (_, answer), _ = await harness.ledger.read(messages.list_latest, "spc_other")
        assert (answer.sender_id, answer.content) == (harness.agent, HELLO)


@pytest.mark.spec("19.2")
@pytest.mark.spec("20.2")
@pytest.mark.parametrize(
    ("rules", "is_sent"),
    [
        ([PolicyRule(decision="deny", tools=("send_message",))], False),
        ([PolicyRule(decision="ask", tools=("*",), principals=("ent_person",))], False),
        ([PolicyRule(decision="ask", tools=("*",), agents=("bob",))], True),
        ([PolicyRule(decision="allow", tools=("send_message",)), PolicyRule(decision="ask", tools=("*",))], True),
        ([PolicyRule(decision="ask", tools=("read_messages",))], True),
    ],
    ids=["denied", "asked for a person", "another agent", "allowed first", "another tool"],
)
async def test_plain_text_does_not_avoid_a_policy_on_messages(
    sqlite: Database, tmp_path: Path, rules: list[PolicyRule], is_sent: bool
) -> None:
    model = ScriptedModel([HELLO])
    async with run_agents(sqlite, agent("ada", model), session_dir=tmp_path, policy_rules=rules) as harness:
        await harness.send_message("Hi")
        run = await harness.wait_for_run()
        assert await harness.sent_texts(harness.agent) == ([HELLO] if is_sent else [])
        assert HELLO not in str([event.data for event in await harness.events(f"space:{harness.space}") if not is_sent])
        assert (await harness.events(f"run:{run.id}"))[-1].data["spoke"] is is_sent
        assert ("Other text that you write is private." in model.requests[0].system) is not is_sent


@pytest.mark.spec("23.1")
@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (HookDecision(arguments={"text": "Hello, ***!"}), ["Hello, ***!"]),
        (HookDecision(deny="too friendly"), []),
        (HookDecision(arguments={"text": ""}), []),
        (None, [HELLO]),
    ],
    ids=["changed", "denied", "emptied", "passed"],
)
async def test_before_hooks_of_messages_see_a_plain_answer(
    sqlite: Database, tmp_path: Path, decision: HookDecision | None, expected: list[str]
) -> None:
    hook_calls: list[HookCall] = []

    def check(hook_call: HookCall) -> HookDecision | None:
        hook_calls.append(hook_call)
        return decision

    settings = Settings(hooks=[Hook(use=check, tools="send_message")])
    async with run_agents(
        sqlite, agent("ada", ScriptedModel([HELLO])), session_dir=tmp_path, settings=settings
    ) as harness:
        await harness.send_message("Hi")
        run = await harness.wait_for_run()
        assert await harness.sent_texts(harness.agent) == expected
        (hook_call,) = hook_calls
        assert (hook_call.tool.name, hook_call.arguments) == ("send_message", {"text": HELLO})
        assert (hook_call.run_id, hook_call.space_id, hook_call.principal) == (run.id, harness.space, harness.person)
        space_events = json.dumps([event.data for event in await harness.events(f"space:{harness.space}")])
        assert (HELLO in space_events) is (expected == [HELLO])


async def _create_other_space(harness: AgentHarness) -> None:
    await harness.ledger.write(entities_and_spaces.create_space, "spc_other", "Other", {})
    for entity in (harness.person, harness.agent):
        await harness.ledger.write(entities_and_spaces.add_member, "spc_other", entity)


@pytest.mark.spec("19.2")
async def test_an_agent_that_has_left_the_space_says_nothing(sqlite: Database, tmp_path: Path) -> None:
    async def leave(_: ModelRequest) -> str:
        await harness.ledger.write(entities_and_spaces.remove_member, harness.space, harness.agent)
        return HELLO

    async with run_agents(sqlite, agent("ada", ScriptedModel([leave])), session_dir=tmp_path) as harness:
        await harness.send_message("Hi")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        assert await harness.sent_texts(harness.agent) == []


@pytest.mark.spec("19.2")
@pytest.mark.spec("3.41")
async def test_the_receiver_of_a_handoff_answers_with_plain_text(sqlite: Database, tmp_path: Path) -> None:
    door = agent(
        "door",
        ScriptedModel([call("router__handoff-to", {"agent": "desk"})]),
        router=RouterSettings(destinations=("desk",)),
    )
    desk = agent("desk", ScriptedModel([HELLO]))
    async with run_agents(sqlite, door, desk, session_dir=tmp_path, names=["door"]) as harness:
        await harness.send_message("Hi")
        await harness.wait_for_run(agent=entity_id_for("desk"))
        assert await harness.sent_texts(entity_id_for("desk")) == [HELLO]
        assert await harness.sent_texts(entity_id_for("door")) == []


@pytest.mark.spec("19.2")
@pytest.mark.spec("11.6")
async def test_a_crash_at_any_write_delivers_the_answer_once(database: Database, tmp_path: Path) -> None:
    crashes, has_finished = 0, False
    while not has_finished:
        crashes += 1
        for loses_write in (True, False):
            crashing_database = CrashingDatabase(database)
            text = f"{HELLO} {crashes} {loses_write}"
            async with run_agents(
                crashing_database, agent("ada", ScriptedModel.loop([text])), session_dir=tmp_path
            ) as harness:
                crashing_database.crash_at_write(crashes + 1, loses_write=loses_write)
                await harness.send_message("Hi")
                has_finished = await _wait_for_end_or_crash(harness, crashing_database)
            await Ledger(database).write(sessions.release_all_leases, "")
            async with run_agents(database, agent("ada", ScriptedModel.loop([text])), session_dir=tmp_path) as harness:
                await _wait_until_answered(harness, text)
                assert (await harness.sent_texts(harness.agent)).count(text) == 1
                assert not [item for item in await harness.messages() if item.status != "complete"]
    assert crashes > 2


async def _wait_for_end_or_crash(harness: AgentHarness, crashing_database: CrashingDatabase) -> bool:
    """Waits until the last message is answered, or until the crash. Returns whether it is answered."""
    answer = asyncio.ensure_future(_wait_until_idle(harness))
    crash = asyncio.ensure_future(crashing_database.has_crashed.wait())
    await asyncio.wait((answer, crash), return_when=asyncio.FIRST_COMPLETED)
    for task in (answer, crash):
        task.cancel()
    await asyncio.gather(answer, crash, return_exceptions=True)
    return not crashing_database.has_crashed.is_set()


async def _wait_until_idle(harness: AgentHarness) -> None:
    while any(event.status in ("pending", "processing") for event in await harness.inbox()):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await harness.wait_until_idle()


async def _wait_until_answered(harness: AgentHarness, text: str) -> None:
    await _wait_until_idle(harness)
    assert text in await harness.sent_texts(harness.agent)


# Cycles that begin in a space


@pytest.mark.spec("19.2")
async def test_a_cycle_begins_in_the_space_of_its_messages(sqlite: Database, tmp_path: Path) -> None:
    """It knows the history, its visible calls show there, and it can send a message at once."""
    model = ScriptedModel([call("send_message", {"text": HELLO}), "Done."])
    async with run_agents(sqlite, agent("ada", model, auto_enter=True), session_dir=tmp_path) as harness:
        await harness.ledger.write(entities_and_spaces.remove_member, harness.space, harness.agent)
        await harness.send_message("Before you came: the code is 4711.")
        await harness.ledger.write(entities_and_spaces.add_member, harness.space, harness.agent)
        await harness.send_message("Hi")
        run = await harness.wait_for_run()
        assert run.space_id == harness.space
        assert await harness.sent_texts(harness.agent) == [HELLO]
        system = model.requests[0].system
        assert "ACTIVE SPACE:\nYou are in Room (spaceId: spc_room). It has 2 messages" in system
        assert "the code is 4711" in system
        assert "begins in that space: you need not enter it" in system
        started_runs = [
            event for event in await harness.events(f"space:{harness.space}") if event.type == "run.started"
        ]
        assert [event.data["runId"] for event in started_runs] == [run.id]


@pytest.mark.spec("19.2")
@pytest.mark.parametrize("events", ["service", "two spaces", "default"])
async def test_other_cycles_begin_outside_of_spaces(sqlite: Database, tmp_path: Path, events: str) -> None:
    model = ScriptedModel.loop(["Done."])
    ada = agent("ada", model, auto_enter=events != "default")
    async with run_agents(sqlite, ada, session_dir=tmp_path) as harness:
        await _create_other_space(harness)

        def send(effects: Effects) -> Program[None]:
            yield from messaging.send_message(effects, harness.space, harness.person, "one")
            if events == "two spaces":
                yield from messaging.send_message(effects, "spc_other", harness.person, "two")

        if events == "service":
            await harness.push_event("something happened")
        else:
            await harness.ledger.commit(send)
        run = await harness.wait_for_run()
        assert run.space_id is None
        assert "ACTIVE SPACE" not in model.requests[0].system


@pytest.mark.spec("19.2")
def test_the_prompt_says_what_happens_to_text() -> None:
    model = ScriptedModel([])
    prompt = build_system_prompt(agent("ada", model), PromptContext())
    private_prompt = build_system_prompt(
        agent("ada", model, loop=AgentLoopSettings(plain_text="private")), PromptContext()
    )
    assert "the text of your last turn is sent to the space of that message, unless you call skip" in prompt
    assert "Other text that you write is private." in private_prompt
    assert "last turn" not in private_prompt


@pytest.mark.spec("9.1")
async def test_a_prompt_names_fifty_spaces_and_counts_the_others(sqlite: Database, tmp_path: Path) -> None:
    model = ScriptedModel(["Done."])
    async with run_agents(sqlite, agent("ada", model), session_dir=tmp_path) as harness:
        for number in range(52):
            await harness.ledger.write(entities_and_spaces.create_space, f"spc_{number}", f"Space {number}", {})
            await harness.ledger.write(entities_and_spaces.add_member, f"spc_{number}", harness.agent)
        await harness.push_event("go")
        await harness.wait_for_run()
    assert model.requests[0].system.count("(spaceId: ") == 50
    assert "… and 3 more: events of your inbox have their spaceId" in model.requests[0].system
