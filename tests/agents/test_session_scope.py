"""Session scope: with `session: space` or `user`, each space or person has its own conversation with an agent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, run_agents
from tests.agents.agent_harness import private_agent as agent
from tests.agents.chaos.job_agent import external_tool
from toolspace.agents.agent import entity_id_for
from toolspace.builtin.catalog import memory_tools
from toolspace.config.agent_settings import AgentLimits, ConsciousnessSettings, MemorySettings, RouterSettings
from toolspace.core.ids import session_id_for
from toolspace.core.language_model import ModelRequest, ResultsTurn
from toolspace.core.stored_records import ENDED_RUN, InboxEvent, RunRecord, SessionScope
from toolspace.core.tool_context import ToolContext
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces import messaging
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces, goals_and_memories, sessions, tasks

pytestmark = pytest.mark.spec("19.1")

CARLA, DAVE = "ent_carla", "ent_dave"
HERS, HIS, BOTH = "spc_hers", "spc_his", "spc_both"
SCOPES: tuple[SessionScope, ...] = ("space", "user")


def session_of(harness: AgentHarness, scope: SessionScope, person: str) -> str:
    """The session of the first agent for a person, who writes in a space of their own."""
    scope_key = f"user:{person}" if scope == "user" else f"space:{HERS if person == CARLA else HIS}"
    return session_id_for(harness.agent, scope_key)


def is_for(request: ModelRequest, word: str) -> bool:
    """Whether the person whose messages have a word triggered the run."""
    return any(word in str(turn) for turn in request.turns)


def results_of(request: ModelRequest) -> list[str]:
    """The results of the calls before a request."""
    results = [turn for turn in request.turns if isinstance(turn, ResultsTurn)]
    return [result.text for result in results[-1].results] if results else []


def per_person(carla: list[Any], dave: list[Any]) -> ScriptedModel:
    """A model with a script for each person: one says "apples", the other "pears"."""
    scripts = {"apples": list(carla), "pears": list(dave)}

    def respond(request: ModelRequest) -> Any:
        word = "apples" if is_for(request, "apples") else "pears"
        script = scripts[word]
        step = script.pop(0) if script else "Done."
        return step(request) if callable(step) else step

    return ScriptedModel(respond)


async def add_people(harness: AgentHarness) -> None:
    """Carla and Dave have a space each with all agents."""
    await harness.add_person(CARLA, HERS)
    await harness.add_person(DAVE, HIS)


async def say(harness: AgentHarness, person: str, text: str, space: str | None = None) -> None:
    await harness.send_message(text, sender=person, space=space or (HERS if person == CARLA else HIS))


async def wait_for_run_of(harness: AgentHarness, session_id: str, count: int = 1) -> RunRecord:
    """Waits until so many runs of a session have ended. Returns the last of them."""
    while True:
        ended_runs = [run for run in await harness.runs() if run.session_id == session_id and run.status in ENDED_RUN]
        if len(ended_runs) >= count:
            await harness.wait_until_idle()
            return ended_runs[count - 1]
        await asyncio.sleep(0.01)


async def events_of(harness: AgentHarness, session_id: str) -> list[InboxEvent]:
    return [event for event in await harness.inbox() if event.session_id == session_id]


@pytest.mark.parametrize("scope", SCOPES)
async def test_the_words_of_one_person_never_reach_a_prompt_for_another(
    database: Database, tmp_path: Path, scope: SessionScope
) -> None:
    def store(word: str) -> list[Any]:
        return [
            call("set_memories", {"memories": [{"key": "fruit", "value": word}]}),
            call("set_goals", {"goals": [{"id": "goal-1", "description": f"buy {word}"}]}),
            call("set_plans", {"plans": [{"name": word, "instruction": f"eat {word}", "runAfter": "1 hour"}]}),
        ]

    read_calls = [call("get_memories"), call("get_goals"), call("get_plans"), call("task_list"), call("peek_inbox")]
    model = per_person([store("apples"), "Stored."], [store("pears"), "Stored.", read_calls, "Read."])
    async with run_agents(database, agent("ada", model, session=scope), session_dir=tmp_path) as harness:
        await add_people(harness)
        await say(harness, CARLA, "I like apples")
        await wait_for_run_of(harness, session_of(harness, scope, CARLA))
        await say(harness, DAVE, "I like pears")
        await wait_for_run_of(harness, session_of(harness, scope, DAVE))
        await say(harness, DAVE, "What do I like?")
        await wait_for_run_of(harness, session_of(harness, scope, DAVE), 2)
        his_requests = [request for request in model.requests if is_for(request, "pears")]
        assert len(his_requests) == 4
        assert not [request for request in his_requests if "apples" in str(request)]
        assert "hers" not in his_requests[-1].system
        assert "eat pears" in results_of(his_requests[-1])[2]
        assert not [request for request in model.requests if is_for(request, "apples") and "pears" in str(request)]
        # The operator sees all of it.
        memories = await harness.ledger.read(goals_and_memories.list_memories_of_agent, harness.agent)
        assert sorted(memory.value for memory in memories) == ["apples", "pears"]
        goals = await harness.ledger.read(goals_and_memories.list_goals_of_agent, harness.agent)
        assert [goal.id for goal in goals] == ["goal-1", "goal-1"]
        assert await harness.history() == []


async def test_with_scope_agent_all_people_have_one_conversation(sqlite: Database, tmp_path: Path) -> None:
    model = ScriptedModel.loop("Hm.")
    async with run_agents(sqlite, agent("ada", model), session_dir=tmp_path) as harness:
        await add_people(harness)
        for number, person in enumerate((CARLA, DAVE), 1):
            await say(harness, person, f"I am {person}")
            await harness.wait_for_run(number)
        assert CARLA in str(model.requests[1].turns)
        assert {run.session_id for run in await harness.runs()} == {harness.agent}


@pytest.mark.parametrize("scope", SCOPES)
async def test_nobody_waits_for_the_model_request_of_another(
    database: Database, tmp_path: Path, scope: SessionScope
) -> None:
    may_answer = asyncio.Event()

    async def wait(request: ModelRequest) -> str:
        if is_for(request, "apples"):
            await may_answer.wait()
        return "Done."

    async with run_agents(database, agent("ada", ScriptedModel(wait), session=scope), session_dir=tmp_path) as harness:
        await add_people(harness)
        await say(harness, CARLA, "apples")
        await say(harness, DAVE, "pears")
        his_session = session_of(harness, scope, DAVE)
        while not [run for run in await harness.runs() if run.session_id == his_session and run.status in ENDED_RUN]:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        assert "running" in {run.status for run in await harness.runs()}
        may_answer.set()
        await wait_for_run_of(harness, session_of(harness, scope, CARLA))


async def test_an_agent_runs_as_many_sessions_at_once_as_it_may(sqlite: Database, tmp_path: Path) -> None:
    may_answer, active_count, most_active = asyncio.Event(), 0, 0

    async def wait(request: ModelRequest) -> str:
        nonlocal active_count, most_active
        active_count += 1
        most_active = max(most_active, active_count)
        await may_answer.wait()
        active_count -= 1
        return "Done."

    ada = agent("ada", ScriptedModel(wait), session="user", limits=AgentLimits(max_parallel_sessions=2))
    ben = agent("ben", ScriptedModel.loop("Done."))
    async with run_agents(sqlite, ada, ben, session_dir=tmp_path) as harness:
        people = [f"ent_{number}" for number in range(5)]
        for person in people:
            await harness.add_person(person, f"spc_{person}")
            await harness.send_message("Hello", sender=person, space=f"spc_{person}")
        # The places that the first agent may not use are free for others.
        while not [run for run in await harness.runs(harness.agents[1]) if run.status in ENDED_RUN]:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        while most_active < 2:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        may_answer.set()
        await harness.wait_for_run(len(people))
        assert most_active == 2
        assert {run.principal for run in await harness.runs()} == set(people)


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_session_reaches_only_the_spaces_of_its_scope(
    database: Database, tmp_path: Path, scope: SessionScope
) -> None:
    tries = [
        call("enter_space", {"spaceId": HERS}),
        call("send_message", {"text": "Hello, Carla"}),
        call("enter_space", {"spaceId": HIS}),
        call("read_messages", {"spaceId": HIS}),
        call("get_space_context", {"spaceId": HIS}),
        call("update_space_metadata", {"spaceId": HIS, "metadata": {"a": 1}}),
        call("reply", {"channelId": HIS, "text": "Hello, Dave"}),
        call("read_messages", {"spaceId": BOTH}),
    ]
    model = per_person([tries, "Done."], ["Noted."])
    async with run_agents(database, agent("ada", model, session=scope), session_dir=tmp_path) as harness:
        await add_people(harness)
        for person in (CARLA, DAVE):
            await harness.add_person(person, BOTH)
        await say(harness, DAVE, "my pears are secret")
        await wait_for_run_of(harness, session_of(harness, scope, DAVE))
        await say(harness, CARLA, "apples")
        await wait_for_run_of(harness, session_of(harness, scope, CARLA))
        request = next(request for request in reversed(model.requests) if is_for(request, "apples"))
        entry, message, *refusals, common = results_of(request)
        assert "secret" not in str(request)
        assert all("this conversation belongs to" in text for text in refusals), refusals
        # Messages of a space are seen by every session that may read the space.
        assert ("messages" in json.loads(common)) if scope == "user" else "this conversation belongs to" in common
        assert json.loads(entry)["success"]
        assert json.loads(message)["status"] == "delivered"
        names = {"space": {"hers"}, "user": {"hers", "both"}}[scope]
        assert {
            name
            for name in ("hers", "his", "both")
            if f'- "{name}"' in request.system or f"- {name} " in request.system
        } == names


async def test_the_main_session_reaches_all_spaces_of_the_agent(sqlite: Database, tmp_path: Path) -> None:
    model = ScriptedModel(
        [[call("enter_space", {"spaceId": HERS}), call("send_message", {"text": "It has come."})], "Done."]
    )
    async with run_agents(sqlite, agent("ada", model, session="space"), session_dir=tmp_path) as harness:
        await add_people(harness)
        await harness.push_event({"order": 4711})
        run = await harness.wait_for_run()
        assert (run.session_id, run.space_id) == (harness.agent, HERS)


@pytest.mark.parametrize("scope", SCOPES)
async def test_plans_tasks_and_late_results_come_back_to_the_session_that_caused_them(
    database: Database, tmp_path: Path, scope: SessionScope
) -> None:
    plan = {"name": "Look", "instruction": "apples again", "runAfter": "1 second"}
    begin = [
        call("set_plans", {"plans": [plan]}),
        call("spawn_task", {"description": "count apples", "input": "How many?"}),
        call("askLater", {"n": "1"}),
    ]
    model = per_person([begin], [])
    later = external_tool("askLater", "external", is_async=True, visible=False)
    async with run_agents(database, agent("ada", model, session=scope), tools=[later], session_dir=tmp_path) as harness:
        await add_people(harness)
        await say(harness, CARLA, "apples")
        open_call = await harness.wait_for_open_call()
        await harness.submit(open_call.call_id, {"answer": 42})
        her_session = session_of(harness, scope, CARLA)
        handled_types: set[str] = set()
        while len(handled_types) < 4:
            events = await events_of(harness, her_session)
            handled_types = {event.type for event in events if event.status == "processed"}
            await asyncio.sleep(0.01)
        assert handled_types == {"space_message", "plan", "task", "tool_result"}
        await harness.wait_until_idle()
        assert {run.session_id for run in await harness.runs()} == {her_session}
        assert {run.principal for run in await harness.runs()} == {CARLA}
        (task,) = await harness.ledger.read(tasks.list_tasks, harness.agent)
        assert task.session_id == her_session
        assert await harness.history() == []


async def test_a_task_is_out_of_reach_of_other_sessions(sqlite: Database, tmp_path: Path) -> None:
    task_ids: list[str] = []

    def replay(request: ModelRequest) -> Any:
        return [call("task_list"), call("task_replay", {"taskId": task_ids[0]})]

    spawn = call("spawn_task", {"description": "count apples", "input": "How many apples?"})
    model = per_person([spawn, "Wait."], [replay, "Tried."])
    async with run_agents(sqlite, agent("ada", model, session="user"), session_dir=tmp_path) as harness:
        await add_people(harness)
        await say(harness, CARLA, "apples")
        await wait_for_run_of(harness, session_of(harness, "user", CARLA), 2)
        task_ids += [task.id for task in await harness.ledger.read(tasks.list_tasks, harness.agent)]
        await say(harness, DAVE, "pears")
        await wait_for_run_of(harness, session_of(harness, "user", DAVE))
        request = next(request for request in reversed(model.requests) if is_for(request, "pears"))
        assert results_of(request)[0] == "[]"
        assert "the agent has no task" in results_of(request)[1]
        assert "apples" not in str(request)


async def test_the_preview_shows_only_events_of_the_session(sqlite: Database, tmp_path: Path) -> None:
    may_answer = asyncio.Event()

    async def wait(request: ModelRequest) -> Any:
        if is_for(request, "first pears"):
            await may_answer.wait()
            return call("get_goals") if not results_of(request) else "Done."
        return "Done."

    model = ScriptedModel(wait)
    async with run_agents(sqlite, agent("ada", model, session="user"), session_dir=tmp_path) as harness:
        await harness.add_person(CARLA, BOTH)
        await harness.add_person(DAVE, BOTH)
        await say(harness, DAVE, "first pears", BOTH)
        while not model.requests:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        await say(harness, CARLA, "apples", BOTH)
        await say(harness, DAVE, "second pears", BOTH)
        may_answer.set()
        await wait_for_run_of(harness, session_of(harness, "user", DAVE), 2)
        previews = [str(turn) for request in model.requests for turn in request.turns if "[INBOX PREVIEW" in str(turn)]
        assert previews
        assert all("second pears" in preview and "apples" not in preview for preview in previews)


async def test_an_answer_of_another_agent_comes_to_the_session_of_the_person_it_is_for(
    sqlite: Database, tmp_path: Path
) -> None:
    speak = [call("enter_space", {"spaceId": BOTH}), call("send_message", {"text": "I help."})]
    ada = agent("ada", ScriptedModel.loop("Hm."), session="user", limits=AgentLimits(max_agent_turns=9))
    ben = agent("ben", ScriptedModel([speak, "Done."]))
    async with run_agents(sqlite, ada, ben, session_dir=tmp_path) as harness:
        await harness.add_person(CARLA, BOTH)
        await harness.add_person(DAVE, BOTH)
        await say(harness, CARLA, "apples", BOTH)
        her_session = session_of(harness, "user", CARLA)
        await wait_for_run_of(harness, her_session, 2)
        assert len(await events_of(harness, her_session)) == 2
        # A message behind which there is no person comes to the main session.
        await harness.ledger.commit(messaging.send_message, BOTH, harness.agents[1], "Good morning")
        await wait_for_run_of(harness, harness.agent)


async def test_a_handoff_comes_to_the_session_of_the_person(sqlite: Database, tmp_path: Path) -> None:
    router = agent(
        "router",
        ScriptedModel([call("router__handoff-to", {"agent": "clerk"})]),
        router=RouterSettings(destinations=("clerk",)),
    )
    clerk = agent("clerk", ScriptedModel.loop("Done."), session="user")
    async with run_agents(sqlite, router, clerk, session_dir=tmp_path) as harness:
        await harness.add_person(CARLA, HERS)
        await harness.ledger.write(entities_and_spaces.remove_member, HERS, entity_id_for("clerk"))
        await say(harness, CARLA, "apples")
        run = await harness.wait_for_run(agent=entity_id_for("clerk"))
        assert run.session_id == session_id_for(entity_id_for("clerk"), f"user:{CARLA}")


async def test_what_a_subagent_stores_stays_in_the_scope_of_its_caller(sqlite: Database, tmp_path: Path) -> None:
    child_requests: list[ModelRequest] = []
    child_results: list[list[str]] = []

    def remember(request: ModelRequest) -> Any:
        child_requests.append(request)
        child_results.append(results_of(request))  # Now: the turns of a request grow.
        step = (len(child_requests) - 1) % 3
        word = "apples" if "apples" in str(request.turns) else "pears"
        if step == 0:
            return [call("get_memories"), call("memory_list")]
        if step == 1:
            return [
                call("set_memories", {"memories": [{"key": "fruit", "value": word}]}),
                call("memory_write", {"path": "facts/fruit.md", "content": word}),
            ]
        return "Done."

    ask = [call("agent__child", {"prompt": "Remember apples"})], [call("agent__child", {"prompt": "Remember pears"})]
    parent = agent("parent", per_person([*ask[0], "Done."], [*ask[1], "Done."]), session="user", agents=("child",))
    child = agent("child", ScriptedModel(remember), tools=memory_tools)
    context = ToolContext(memory_dir=tmp_path / "memory")
    async with run_agents(sqlite, parent, child, session_dir=tmp_path, context=context) as harness:
        await add_people(harness)
        for space in (HERS, HIS):
            await harness.ledger.write(entities_and_spaces.remove_member, space, entity_id_for("child"))
        for person, word in ((CARLA, "apples"), (DAVE, "pears")):
            await say(harness, person, word)
            await wait_for_run_of(harness, session_of(harness, "user", person))
        assert len(child_requests) == 6
        assert "apples" not in str(child_requests[3:])
        assert child_results[4] == ['{"memories":[]}', "[]"]


async def test_shared_memories_are_seen_by_all_sessions_and_stored_on_request(
    database: Database, tmp_path: Path
) -> None:
    memories = [{"key": "hours", "value": "9 to 5", "shared": True}, {"key": "fruit", "value": "apples"}]
    read_calls = [call("get_memories"), call("delete_memories", {"keys": ["hours"], "shared": True})]
    model = per_person([call("set_memories", {"memories": memories}), "Stored."], [read_calls, "Deleted."])
    ada = agent("ada", model, session="space", memories=MemorySettings(shared=True))
    async with run_agents(database, ada, session_dir=tmp_path) as harness:
        await add_people(harness)
        await say(harness, CARLA, "apples")
        await wait_for_run_of(harness, session_of(harness, "space", CARLA))
        await say(harness, DAVE, "pears")
        await wait_for_run_of(harness, session_of(harness, "space", DAVE))
        first, last = [request for request in model.requests if is_for(request, "pears")]
        assert "- hours (shared): 9 to 5" in first.system
        assert json.loads(results_of(last)[0]) == {"memories": [{"key": "hours", "value": "9 to 5", "shared": True}]}
        assert json.loads(results_of(last)[1])["deleted"] == 1
        assert "apples" not in str(last)


async def test_a_shared_memory_is_refused_if_none_are_shared(sqlite: Database, tmp_path: Path) -> None:
    memories = [{"key": "hours", "value": "9 to 5", "shared": True}]
    model = ScriptedModel([call("set_memories", {"memories": memories}), "Hm."])
    async with run_agents(sqlite, agent("ada", model, session="space"), session_dir=tmp_path) as harness:
        await add_people(harness)
        await say(harness, CARLA, "apples")
        await wait_for_run_of(harness, session_of(harness, "space", CARLA))
        assert "your conversations share no memories" in results_of(model.requests[-1])[0]
        assert await harness.ledger.read(goals_and_memories.list_memories_of_agent, harness.agent) == []


@pytest.mark.parametrize("scope", ["agent", *SCOPES])
async def test_each_agent_and_session_has_memory_files_of_its_own(
    sqlite: Database, tmp_path: Path, scope: SessionScope
) -> None:
    write = call("memory_write", {"path": "facts/fruit.md", "content": "> Summary: apples"})
    model = per_person(
        [write, "Stored."], [[call("memory_list"), call("memory_read", {"path": "facts/fruit.md"})], "Read."]
    )
    other_model = ScriptedModel([call("memory_list"), "Read."])
    context = ToolContext(memory_dir=tmp_path / "memory")
    ada = agent("ada", model, session=scope, tools=memory_tools)
    ben = agent("ben", other_model, tools=memory_tools)
    async with run_agents(sqlite, ada, ben, session_dir=tmp_path, context=context) as harness:
        await harness.add_person(CARLA, HERS)
        await harness.ledger.write(entities_and_spaces.remove_member, HERS, entity_id_for("ben"))
        await say(harness, CARLA, "apples")
        await harness.wait_for_run()
        await harness.push_event({"n": 1}, agent=harness.agents[1])
        await harness.wait_for_run(agent=harness.agents[1])
        assert results_of(other_model.requests[-1]) == ["[]"]
        if scope != "agent":
            await harness.add_person(DAVE, HIS)
            await harness.ledger.write(entities_and_spaces.remove_member, HIS, entity_id_for("ben"))
            await say(harness, DAVE, "pears")
            await wait_for_run_of(harness, session_of(harness, scope, DAVE))
            request = next(request for request in reversed(model.requests) if is_for(request, "pears"))
            assert results_of(request)[0] == "[]"
            assert "apples" not in str(request)


async def test_archives_belong_to_their_session(sqlite: Database, tmp_path: Path) -> None:
    limits = ConsciousnessSettings(max_tokens=1, min_recent_cycles=1)
    archive = "cycles-000001-000001.md"
    read = call("session_archive_read", {"file": archive})
    model = per_person(["One.", "Two.", "Summary of apples.", read, "Read."], ["One.", read, "Read."])
    ada = agent("ada", model, session="user", consciousness=limits)
    async with run_agents(sqlite, ada, session_dir=tmp_path) as harness:
        await add_people(harness)
        for number in (1, 2, 3):
            await say(harness, CARLA, f"apples {number}")
            await wait_for_run_of(harness, session_of(harness, "user", CARLA), number)
        request = next(request for request in reversed(model.requests) if "session_archive_read" in str(request.turns))
        assert "apples 1" in results_of(request)[0]
        await say(harness, DAVE, "pears")
        await wait_for_run_of(harness, session_of(harness, "user", DAVE))
        await say(harness, DAVE, "pears again")
        await wait_for_run_of(harness, session_of(harness, "user", DAVE), 2)
        request = next(request for request in reversed(model.requests) if is_for(request, "pears again"))
        assert "there is no archive" in results_of(request)[0]


async def test_the_sessions_of_a_deleted_space_or_person_are_deleted(database: Database, tmp_path: Path) -> None:
    from toolspace.server.routes.entities_and_spaces import delete_entity_transaction
    from toolspace.spaces.space_deletion import delete_space

    memory = call("set_memories", {"memories": [{"key": "fruit", "value": "apples"}]})
    agents = [
        agent("ada", ScriptedModel.loop([memory, "Stored."]), session="space"),
        agent("ben", ScriptedModel.loop([memory, "Stored."]), session="user"),
    ]
    async with run_agents(database, *agents, session_dir=tmp_path) as harness:
        await harness.add_person(CARLA, HERS)
        await say(harness, CARLA, "apples")
        for agent_id in harness.agents:
            await harness.wait_for_run(agent=agent_id)
        await harness.ledger.commit(delete_space, HERS)
        await harness.ledger.commit(delete_entity_transaction, CARLA)
        for agent_id in harness.agents:
            assert await harness.ledger.read(goals_and_memories.list_memories_of_agent, agent_id) == []
            assert await harness.inbox(agent_id) == []
        assert await harness.ledger.read(sessions.find, session_of(harness, "space", CARLA)) is None


async def test_events_of_an_earlier_scope_are_still_handled(sqlite: Database, tmp_path: Path) -> None:
    plan = {"name": "Look", "instruction": "apples again", "runAfter": "1 second"}
    previous_agent = agent("ada", per_person([call("set_plans", {"plans": [plan]}), "Planned."], []), session="user")
    async with run_agents(sqlite, previous_agent, session_dir=tmp_path) as harness:
        await add_people(harness)
        await say(harness, CARLA, "apples")
        await wait_for_run_of(harness, session_of(harness, "user", CARLA))
    async with run_agents(sqlite, agent("ada", ScriptedModel.loop("Hm.")), session_dir=tmp_path) as harness:
        await wait_for_run_of(harness, session_of(harness, "user", CARLA), 2)
        await say(harness, DAVE, "pears")
        await wait_for_run_of(harness, harness.agent)
