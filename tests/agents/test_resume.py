"""A cycle that was interrupted at any point continues from its last stored step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, run_agents
from tests.agents.agent_harness import private_agent as agent
from tests.agents.chaos import checks
from tests.agents.chaos.job_agent import KINDS, JobModel, job_tools
from tests.agents.crashing_database import CrashingDatabase
from toolspace import tool
from toolspace.agents import live_output, subagent_run_recorder
from toolspace.agents.agent import Agent, entity_id_for
from toolspace.config.agent_settings import RouterSettings
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    Model,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelTurn,
    ResultsTurn,
)
from toolspace.core.stored_records import SessionScope
from toolspace.core.tool import Annotations
from toolspace.core.tool_context import ToolContext
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces import call_transactions, runs
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.heartbeats import ProcessMonitor
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries import sessions


class AgentProcesses:
    """One agent that runs in one process after the other."""

    def __init__(self, database: Database, directory: Path, *, session: SessionScope = "agent") -> None:
        self.database = database
        self.directory = directory
        self.session: SessionScope = session
        self.effects_file = directory / "effects"
        self.jobs: dict[str, str] = {}

    @asynccontextmanager
    async def start(self, *, submits_results: bool = True) -> AsyncIterator[tuple[AgentHarness, CrashingDatabase]]:
        """Runs the next process. `submits_results`: the test submits the results of external calls."""
        crashing_database = CrashingDatabase(self.database)
        await Ledger(self.database).write(sessions.release_all_leases, "")  # As if the previous lease had expired.
        job_agent = agent("clerk", JobModel(crashing_database.check_alive), session=self.session)
        tools = job_tools(self.effects_file, crashing_database.check_alive)
        async with run_agents(crashing_database, job_agent, tools=tools, session_dir=self.directory) as harness:
            submit_task = asyncio.create_task(self._submit_results(harness)) if submits_results else None
            try:
                yield harness, crashing_database
            finally:
                if submit_task is not None:
                    submit_task.cancel()
                    await asyncio.gather(submit_task, return_exceptions=True)

    async def send_job(self, harness: AgentHarness, kind: str) -> None:
        number = str(len(self.jobs) + 1)
        self.jobs[number] = kind
        await harness.send_message(f"job {number} {kind}")

    async def wait_until_done(self, *, plans: bool = False) -> None:
        """Waits until every job is done; with `plans`, also those planned for later."""
        while not await checks.is_done(self.database, self.jobs, plans=plans):  # noqa: ASYNC110 - in any process
            await asyncio.sleep(0.005)

    async def _submit_results(self, harness: AgentHarness) -> None:
        while True:
            for record in await harness.open_calls():
                await harness.submit(record.call_id, {"boss": record.args["n"]})
            await asyncio.sleep(0.01)


async def _wait_for_first(*awaitables: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.spec("11.4")
@pytest.mark.spec("11.6")
@pytest.mark.spec("6.8")
@pytest.mark.spec("19.1")
@pytest.mark.parametrize(
    ("database", "kind", "session"),
    [
        *(("sqlite", kind, "agent") for kind in KINDS),
        *(("sqlite", kind, "space") for kind in ("plain", "ask", "confirm")),
        *(("sqlite", kind, "user") for kind in ("plan", "ask", "confirm")),
        ("postgres", "plain", "user"),
        ("postgres", "ask", "agent"),
    ],
    indirect=["database"],
)
async def test_a_crash_at_any_write_loses_nothing_and_repeats_nothing(
    database: Database, tmp_path: Path, kind: str, session: SessionScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_output, "FLUSH_SECONDS", 0)  # Every streamed part is a write of its own.
    processes = AgentProcesses(database, tmp_path, session=session)
    crashes, is_alive = 0, False
    while not is_alive:
        crashes += 1
        # A committed write, and the next one lost, are the same to the database, but not to effects outside of it.
        for loses_write in (True, False) if kind == "plain" and not database.is_shared else (True,):
            async with processes.start() as (harness, crashing_database):
                crashing_database.crash_at_write(
                    crashes + 1, loses_write=loses_write
                )  # The first write is the message.
                await processes.send_job(harness, kind)
                await _wait_for_first(crashing_database.has_crashed.wait(), processes.wait_until_done())
                is_alive = not crashing_database.has_crashed.is_set()
            async with processes.start():
                await asyncio.wait_for(processes.wait_until_done(), 10)
    assert crashes > 10
    async with processes.start():
        await asyncio.wait_for(processes.wait_until_done(plans=True), 10)
    await checks.check(database, processes.jobs, processes.effects_file, harness.agent)


@pytest.mark.spec("6.4")
@pytest.mark.spec("11.6")
async def test_a_result_that_the_next_process_reads_from_its_call_does_not_come_to_the_inbox_too(
    database: Database, tmp_path: Path
) -> None:
    processes = AgentProcesses(database, tmp_path)
    async with processes.start(submits_results=False) as (harness, crashing_database):
        await processes.send_job(harness, "fetch")
        open_call = await harness.wait_for_open_call()
        # The result comes through another process, for the caller that waits; but that crashes before it gets it.
        await Ledger(database).commit(
            call_transactions.submit, Submission(call_id=open_call.call_id, result={"boss": "1"})
        )
        crashing_database.crash()
    async with processes.start():
        await asyncio.wait_for(processes.wait_until_done(), 10)
    await ProcessMonitor(Ledger(database)).clean_up_all_others()  # The crash is noticed after the run has ended.
    async with processes.start():
        await asyncio.wait_for(processes.wait_until_done(), 10)
    await checks.check(database, processes.jobs, processes.effects_file, harness.agent)


class InterruptedProcess:
    """A process that crashes in the middle of a cycle, and the process that continues."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.database = database
        self.directory = directory
        self.crashing_database = CrashingDatabase(database)

    async def crash(self) -> None:
        """Crashes, and never returns."""
        self.crashing_database.crash()
        await self.crashing_database.check_alive()

    def first(self, model: Model, *tools: Any, **options: Any) -> Any:
        return run_agents(
            self.crashing_database, agent("ada", model, **options), tools=tools, session_dir=self.directory
        )

    @asynccontextmanager
    async def second(self, model: ScriptedModel, *tools: Any, **options: Any) -> AsyncIterator[AgentHarness]:
        await Ledger(self.database).write(sessions.release_all_leases, "")
        ada = agent("ada", model, **options)
        async with run_agents(self.database, ada, tools=tools, session_dir=self.directory) as harness:
            yield harness


@pytest.mark.spec("11.6")
@pytest.mark.parametrize(
    "annotations", [Annotations(), Annotations(read_only=True), Annotations(idempotent=True), {"idempotent": True}]
)
@pytest.mark.parametrize("how", ["crash", "stop"])
async def test_an_interrupted_call_is_repeated_if_it_is_harmless_and_else_reported_as_interrupted(
    database: Database, tmp_path: Path, annotations: Annotations | dict[str, bool], how: str
) -> None:
    process = InterruptedProcess(database, tmp_path)
    executed: list[str] = []
    in_flight = asyncio.Event()

    @tool(visible=False, annotations=annotations)
    async def act(context: ToolContext) -> str:
        """Acts."""
        executed.append(context.call_id)
        if not in_flight.is_set():
            in_flight.set()
            if how == "crash":
                await process.crash()
            await asyncio.get_running_loop().create_future()
        return "acted"

    @tool(visible=False)
    async def finish() -> str:
        """Is done at once."""
        executed.append("finish")
        return "finished"

    first = ScriptedModel([[call("act", id="a"), call("finish", id="b")], "never"])
    async with process.first(first, act, finish) as harness:
        await harness.send_message("Act.")
        await in_flight.wait()
    second = ScriptedModel(["Well."])
    async with process.second(second, act, finish) as harness:
        run = await harness.wait_for_run()
        assert (run.status, run.steps) == ("completed", 2)
        [request] = second.requests
        results = request.turns[-1]
        assert isinstance(results, ResultsTurn)
        results_by_id = {answer.id: answer for answer in results.results}
        if annotations == Annotations():
            assert len([call_id for call_id in executed if call_id != "finish"]) == 1
            assert results_by_id["a"].is_error
            assert "interrupted" in results_by_id["a"].text
        else:
            first_id, repeated_id = [call_id for call_id in executed if call_id != "finish"]
            assert first_id == repeated_id
            assert results_by_id["a"].text == "acted"
        statuses = {record.tool_name: record.status for record in await harness.calls(run.id)}
        assert statuses["act"] == ("failed" if annotations == Annotations() else "completed")


@pytest.mark.spec("11.6")
async def test_after_a_crash_during_a_request_the_model_is_asked_again_and_no_ended_call_is_repeated(
    database: Database, tmp_path: Path
) -> None:
    process = InterruptedProcess(database, tmp_path)
    executed: list[str] = []

    @tool(visible=False)
    async def act() -> str:
        """Acts."""
        executed.append("acted")
        return "acted"

    async def crash_during_request(request: ModelRequest) -> str:
        await process.crash()
        return "never"

    async with process.first(ScriptedModel([call("act"), crash_during_request]), act) as harness:
        await harness.send_message("Act.")
        await process.crashing_database.has_crashed.wait()
    second = ScriptedModel(["Done."])
    async with process.second(second, act) as harness:
        run = await harness.wait_for_run()
        assert (run.status, run.steps, executed) == ("completed", 2, ["acted"])
        [request] = second.requests
        assert [type(turn).__name__ for turn in request.turns] == ["UserTurn", "ModelTurn", "ResultsTurn"]
        assert len(await harness.runs()) == 1


@pytest.mark.spec("11.6")
async def test_after_a_crash_before_the_first_response_the_model_is_asked_again(
    database: Database, tmp_path: Path
) -> None:
    process = InterruptedProcess(database, tmp_path)

    async def crash_during_request(request: ModelRequest) -> str:
        await process.crash()
        return "never"

    async with process.first(ScriptedModel([crash_during_request])) as harness:
        await harness.send_message("Hello?")
        await process.crashing_database.has_crashed.wait()
    second = ScriptedModel(["Done."])
    async with process.second(second) as harness:
        run = await harness.wait_for_run()
        assert (run.status, run.steps, len(await harness.runs())) == ("completed", 1, 1)
        [request] = second.requests
        assert [type(turn).__name__ for turn in request.turns] == ["UserTurn"]
        assert [event.attempts for event in await harness.inbox()] == [1]


@pytest.mark.spec("11.6")
async def test_a_call_that_was_not_started_is_executed_under_its_stored_id(database: Database, tmp_path: Path) -> None:
    process = InterruptedProcess(database, tmp_path)
    executed: list[str] = []

    @tool(visible=False, annotations=Annotations(read_only=True))
    async def look() -> str:
        """Looks."""
        if not process.crashing_database.has_crashed.is_set():
            await process.crash()
        return "looked"

    @tool(visible=False)
    async def act(context: ToolContext) -> str:
        """Acts."""
        executed.append(context.call_id)
        return "acted"

    # The call after enter_space waits for it, so it has not started when the process crashes.
    calls = [call("look"), call("enter_space", {"spaceId": "spc_room"}), call("act")]
    async with process.first(ScriptedModel([calls]), look, act) as harness:
        await harness.send_message("Act.")
        await process.crashing_database.has_crashed.wait()
    async with process.second(ScriptedModel(["Done."]), look, act) as harness:
        assert (await harness.wait_for_run()).status == "completed"
        stored_turn = (await harness.history())[1].stored_turn
        assert executed == [stored_turn.call_ids[2]]


@pytest.mark.spec("3.41")
@pytest.mark.spec("11.6")
@pytest.mark.parametrize("loses_write", [True, False])
async def test_a_handoff_arrives_once_after_a_crash_at_the_end_of_its_run(
    database: Database, tmp_path: Path, loses_write: bool
) -> None:
    process = InterruptedProcess(database, tmp_path)
    handoff = call("router__handoff-to", {"agent": "clerk"})

    def crash_at_the_end(request: ModelRequest) -> ModelCall:
        process.crashing_database.crash_at_write(3, loses_write=loses_write)
        # The writes are: the step, the end of the call, the end of the run.
        return handoff

    def agents(router_model: ScriptedModel, clerk_model: ScriptedModel) -> list[Agent]:
        return [
            agent("ada", router_model, router=RouterSettings(destinations=("clerk",))),
            agent("clerk", clerk_model),
        ]

    first = agents(ScriptedModel([crash_at_the_end]), ScriptedModel([]))
    async with run_agents(process.crashing_database, *first, session_dir=tmp_path) as harness:
        await harness.push_event({"question": "How much?"})
        await process.crashing_database.has_crashed.wait()
    await Ledger(database).write(sessions.release_all_leases, "")
    clerk_model = ScriptedModel(["Nothing to do."])
    async with run_agents(database, *agents(ScriptedModel([]), clerk_model), session_dir=tmp_path) as harness:
        clerk = entity_id_for("clerk")
        assert (await harness.wait_for_run(agent=clerk)).status == "completed"
        assert [run.status for run in await harness.runs()] == ["completed"]
        assert [event.status for event in await harness.inbox(clerk)] == ["processed"]
        assert len(clerk_model.requests) == 1
        assert "How much?" in str(clerk_model.requests[0].turns[0])


@pytest.mark.spec("11.6")
@pytest.mark.spec("9.1")
async def test_a_message_that_was_streamed_during_the_crash_ends_with_an_error_and_is_sent_once(
    database: Database, tmp_path: Path
) -> None:
    process = InterruptedProcess(database, tmp_path)

    class CrashingModel(Model):
        name = "test:crashes"
        request_count = 0

        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            self.request_count += 1
            enter, say = call("enter_space", {"spaceId": "spc_room"}, id="a"), call("send_message", id="b")
            if self.request_count == 1:
                return ModelTurn(calls=(enter,))
            assert listen is not None
            listen(CallStarted(0, say.id, say.name))
            listen(CallDelta(0, '{"text": "Hel'))
            while not any(message.status == "running" for message in await harness.messages()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await process.crash()
            raise AssertionError

    async with process.first(CrashingModel()) as harness:
        await harness.send_message("Say hello.")
        await process.crashing_database.has_crashed.wait()
    async with process.second(ScriptedModel([call("send_message", {"text": "Hello."}), "Done."])) as harness:
        assert (await harness.wait_for_run()).status == "completed"
        assert [message.status for message in await harness.messages()] == ["complete", "error", "complete"]
        assert await harness.sent_texts() == ["Say hello.", "Hello."]


@pytest.mark.spec("7.5")
@pytest.mark.spec("11.6")
async def test_a_call_that_was_announced_before_the_crash_ends_with_an_error_if_the_model_does_not_make_it(
    database: Database, tmp_path: Path
) -> None:
    process = InterruptedProcess(database, tmp_path)

    class CrashingModel(Model):
        name = "test:crashes"
        request_count = 0

        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            self.request_count += 1
            if self.request_count == 1:
                return ModelTurn(calls=(call("enter_space", {"spaceId": "spc_room"}, id="a"),))
            assert listen is not None
            listen(CallStarted(0, "b", "set_goals"))
            listen(CallDelta(0, '{"goals": [{"desc'))
            while not any(event.type == "tool.streaming" for event in await harness.events("space:spc_room")):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await process.crash()
            raise AssertionError

    async with process.first(CrashingModel()) as harness:
        await harness.send_message("Set a goal.")
        await process.crashing_database.has_crashed.wait()
    async with process.second(ScriptedModel(["Done."])) as harness:
        run = await harness.wait_for_run()
        assert run.status == "completed"
        for stream in ("space:spc_room", f"run:{run.id}"):
            events = [event for event in await harness.events(stream) if event.data.get("toolName") == "set_goals"]
            assert [event.type for event in events] == ["tool.started", "tool.streaming", "tool.error"]
            assert events[2].data["errorKind"] == "canceled"
            assert {event.visibility for event in events} == {"name"}


@pytest.mark.spec("7.5")
@pytest.mark.spec("11.6")
async def test_a_call_that_was_announced_before_the_crash_and_starts_after_it_has_one_started_event(
    database: Database, tmp_path: Path
) -> None:
    process = InterruptedProcess(database, tmp_path)

    @tool(visible=False, annotations=Annotations(read_only=True))
    async def look() -> str:
        """Looks."""
        if not process.crashing_database.has_crashed.is_set():
            await process.crash()
        return "looked"

    @tool(visible=False)
    async def act() -> str:
        """Acts."""
        return "acted"

    class StreamingModel(Model):
        name = "test:streams"

        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            # The call after enter_space waits for it, so it has not started when the process crashes.
            calls = (call("look", id="a"), call("enter_space", {"spaceId": "spc_room"}, id="b"), call("act", id="c"))
            assert listen is not None
            for index, model_call in enumerate(calls):
                listen(CallStarted(index, model_call.id, model_call.name))
                listen(CallDelta(index, model_call.arguments))
            return ModelTurn(calls=calls)

    async with process.first(StreamingModel(), look, act) as harness:
        await harness.send_message("Act.")
        await process.crashing_database.has_crashed.wait()
    async with process.second(ScriptedModel(["Done."]), look, act) as harness:
        run = await harness.wait_for_run()
        assert run.status == "completed"
        for name in ("look", "act"):
            events = [event for event in await harness.events(f"run:{run.id}") if event.data.get("toolName") == name]
            assert [event.type for event in events] == ["tool.started", "tool.streaming", "tool.ready", "tool.done"]


@pytest.mark.spec("11.6")
async def test_a_final_report_before_the_crash_ends_the_run(database: Database, tmp_path: Path) -> None:
    process = InterruptedProcess(database, tmp_path)
    report = call("agent__final_report", {"status": "success", "format": "markdown", "content": "All is well."})

    def crash_at_the_end(request: ModelRequest) -> ModelCall:
        # The step and the end of the call are stored, the end of the run is not.
        process.crashing_database.crash_at_write(3, loses_write=True)
        return report

    async with process.first(ScriptedModel([crash_at_the_end])) as harness:
        await harness.send_message("Report.")
        await process.crashing_database.has_crashed.wait()
    second = ScriptedModel([])
    async with process.second(second) as harness:
        run = await harness.wait_for_run()
        assert run.status == "completed"
        assert len(second.requests) == 0


@pytest.mark.spec("11.6")
async def test_a_run_that_is_cancelled_after_the_crash_leaves_nothing_open(database: Database, tmp_path: Path) -> None:
    process = InterruptedProcess(database, tmp_path)

    @tool(visible=False)
    async def act() -> str:
        """Acts."""
        await process.crash()
        return "never"

    async with process.first(ScriptedModel([call("act")]), act) as harness:
        await harness.send_message("Act.")
        await process.crashing_database.has_crashed.wait()
    [run] = await Ledger(database).read(run_rows.list_runs)
    await Ledger(database).commit(runs.cancel_run, run.id)
    async with process.second(ScriptedModel(["Hello."]), act) as harness:
        await harness.send_message("Hello?")
        await harness.wait_for_run(2)
        assert [record.status for record in await harness.runs()] == ["canceled", "completed"]
        assert [record.status for record in await harness.calls(run.id)] == ["failed"]
        assert {event.status for event in await harness.inbox()} == {"processed"}


@pytest.mark.spec("3.40")
@pytest.mark.spec("11.6")
async def test_a_subagent_run_does_not_stay_open_after_the_crash(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subagent_run_recorder, "MAX_CLOSE_ATTEMPTS", 1)  # A crashed process does not try again.
    process = InterruptedProcess(database, tmp_path)

    async def crash_during_request(request: ModelRequest) -> str:
        await process.crash()
        return "never"

    asks = call("agent__child", {"prompt": "Help.", "reason": "a test"})
    parent = agent("ada", ScriptedModel([asks]), agents=("child",))
    child = agent("child", ScriptedModel([crash_during_request]))
    async with run_agents(process.crashing_database, parent, child, session_dir=tmp_path) as harness:
        await harness.push_event({"do": "get help"})
        await process.crashing_database.has_crashed.wait()
    await Ledger(database).write(sessions.release_all_leases, "")
    second = ScriptedModel(["Nobody helped."])
    parent, child = agent("ada", second, agents=("child",)), agent("child", ScriptedModel([]))
    async with run_agents(database, parent, child, session_dir=tmp_path) as harness:
        assert (await harness.wait_for_run()).status == "completed"
        assert "interrupted" in str(second.requests[0].turns[-1])
        [child_run] = await harness.runs(entity_id_for("child"))
        assert child_run.status in ("failed", "canceled")
