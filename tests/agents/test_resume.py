"""A cycle that is cut off goes on where its last step was kept, whatever it was at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import Village, agent, village
from tests.agents.chaos import checks
from tests.agents.chaos.job_agent import KINDS, Clerk, clerks_tools
from tests.agents.crashing_database import Mortal
from toolspace import tool
from toolspace.agents import live_output, subagent_runs
from toolspace.agents.host import entity_id_for
from toolspace.core.context import ToolContext
from toolspace.core.ids import now_ms
from toolspace.core.model import (
    CallDelta,
    CallStarted,
    Model,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelTurn,
    ResultsTurn,
)
from toolspace.core.tool import Annotations
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces import call_transactions, runs
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.sweeper import Sweeper
from toolspace.storage.database import Database
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries import sessions


class Lives:
    """One agent that lives in one process after the other."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.book = folder / "book"
        self.jobs: dict[str, str] = {}

    @asynccontextmanager
    async def life(self, *, boss: bool = True) -> AsyncIterator[tuple[Village, Mortal]]:
        """The next process. Ends as if killed where it died before. `boss`: with someone who answers its calls."""
        mortal = Mortal(self.database)
        await Ledger(self.database).write(
            sessions.release_all_leases, ""
        )  # As if the lease of the one before had ended.
        clerk = agent("clerk", Clerk(mortal.live))
        tools = clerks_tools(self.book, mortal.live)
        async with village(mortal, clerk, tools=tools, folder=self.folder, owns=False) as town:
            answering = asyncio.create_task(self._answer_as_boss(town)) if boss else None
            try:
                yield town, mortal
            finally:
                if answering is not None:
                    answering.cancel()
                    await asyncio.gather(answering, return_exceptions=True)

    async def job(self, town: Village, kind: str) -> None:
        number = str(len(self.jobs) + 1)
        self.jobs[number] = kind
        await town.say(f"job {number} {kind}")

    async def finished(self, *, plans: bool = False) -> None:
        """Waits until every job is done; also those planned for later, if they are meant."""
        while not await checks.settled(self.database, self.jobs, plans=plans):  # noqa: ASYNC110 - in whichever process
            await asyncio.sleep(0.005)

    async def _answer_as_boss(self, town: Village) -> None:
        while True:
            for one in await town.open_calls():
                await town.submit(one.call_id, {"boss": one.args["n"]})
            await asyncio.sleep(0.01)


async def _either(*waiting: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(one) for one in waiting]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.spec("11.4")
@pytest.mark.spec("11.6")
@pytest.mark.spec("6.8")
@pytest.mark.parametrize(
    ("database", "kind"),
    [*(("sqlite", kind) for kind in KINDS), ("postgres", "plain"), ("postgres", "ask")],
    indirect=["database"],
)
async def test_a_process_that_dies_with_any_of_its_writes_leaves_nothing_undone_or_done_twice(
    database: Database, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_output, "FLUSH_SECONDS", 0)  # Each word that is said is a write of its own.
    lives = Lives(database, tmp_path)
    deaths, alive = 0, False
    while not alive:
        deaths += 1
        # A write that happened, and the next that did not, are the same to a database. Not to what is outside of it.
        for lost in (True, False) if kind == "plain" and not database.is_shared else (True,):
            async with lives.life() as (town, mortal):
                mortal.die_at(deaths + 1, lost=lost)  # The first is the message itself.
                await lives.job(town, kind)
                await _either(mortal.dead.wait(), lives.finished())
                alive = not mortal.dead.is_set()
            async with lives.life():
                await asyncio.wait_for(lives.finished(), 10)
    assert deaths > 10
    async with lives.life():
        await asyncio.wait_for(lives.finished(plans=True), 10)
    await checks.check(database, lives.jobs, lives.book, town.agent)


@pytest.mark.spec("6.4")
@pytest.mark.spec("11.6")
async def test_a_result_that_the_next_process_found_does_not_come_by_inbox_too(
    database: Database, tmp_path: Path
) -> None:
    lives = Lives(database, tmp_path)
    async with lives.life(boss=False) as (town, mortal):
        await lives.job(town, "fetch")
        asked = await town.until_asked()
        # It comes, through another process, to the caller who waits; which that one will not hear any more.
        await Ledger(database).commit(call_transactions.submit, Submission(call_id=asked.call_id, result={"boss": "1"}))
        mortal.die()
    async with lives.life():
        await asyncio.wait_for(lives.finished(), 10)
    await Sweeper(Ledger(database)).clean_up_dead_nodes(now_ms() + 1)  # The dead are noticed after the run has ended.
    async with lives.life():
        await asyncio.wait_for(lives.finished(), 10)
    await checks.check(database, lives.jobs, lives.book, town.agent)


class Cut:
    """A process that dies in the middle of something, and the one after it."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.mortal = Mortal(database)

    async def die(self) -> None:
        """From now on the process does nothing any more."""
        self.mortal.die()
        await self.mortal.live()

    def first(self, model: Model, *tools: Any, **options: Any) -> Any:
        return village(self.mortal, agent("ada", model, **options), tools=tools, folder=self.folder, owns=False)

    @asynccontextmanager
    async def second(self, model: ScriptedModel, *tools: Any, **options: Any) -> AsyncIterator[Village]:
        await Ledger(self.database).write(sessions.release_all_leases, "")
        ada = agent("ada", model, **options)
        async with village(self.database, ada, tools=tools, folder=self.folder, owns=False) as town:
            yield town


@pytest.mark.spec("11.6")
@pytest.mark.parametrize("annotations", [Annotations(), Annotations(read_only=True), Annotations(idempotent=True)])
@pytest.mark.parametrize("how", ["it dies", "it stops"])
async def test_a_call_in_flight_is_told_as_interrupted_or_made_again_where_that_does_no_harm(
    database: Database, tmp_path: Path, annotations: Annotations, how: str
) -> None:
    cut = Cut(database, tmp_path)
    made: list[str] = []
    in_flight = asyncio.Event()

    @tool(visible=False, annotations=annotations)
    async def act(context: ToolContext) -> str:
        """Acts."""
        made.append(context.call_id)
        if not in_flight.is_set():
            in_flight.set()
            if how == "it dies":
                await cut.die()
            await asyncio.get_running_loop().create_future()
        return "acted"

    @tool(visible=False)
    async def finish() -> str:
        """Is done at once."""
        made.append("finish")
        return "finished"

    first = ScriptedModel([[call("act", id="a"), call("finish", id="b")], "never"])
    async with cut.first(first, act, finish) as town:
        await town.say("Act.")
        await in_flight.wait()
    second = ScriptedModel(["Well."])
    async with cut.second(second, act, finish) as town:
        run = await town.run_ended()
        assert (run.status, run.steps) == ("completed", 2)
        [request] = second.requests
        results = request.turns[-1]
        assert isinstance(results, ResultsTurn)
        told = {answer.id: answer for answer in results.results}
        if annotations == Annotations():
            assert len([one for one in made if one != "finish"]) == 1
            assert told["a"].is_error
            assert "interrupted" in told["a"].text
        else:
            first_id, again = [one for one in made if one != "finish"]
            assert first_id == again
            assert told["a"].text == "acted"
        statuses = {one.tool_name: one.status for one in await town.calls(run.id)}
        assert statuses["act"] == ("failed" if annotations == Annotations() else "completed")


@pytest.mark.spec("11.6")
async def test_a_process_that_dies_while_its_model_thinks_asks_again_and_makes_no_finished_call_again(
    database: Database, tmp_path: Path
) -> None:
    cut = Cut(database, tmp_path)
    made: list[str] = []

    @tool(visible=False)
    async def act() -> str:
        """Acts."""
        made.append("acted")
        return "acted"

    async def dies(request: ModelRequest) -> str:
        await cut.die()
        return "never"

    async with cut.first(ScriptedModel([call("act"), dies]), act) as town:
        await town.say("Act.")
        await cut.mortal.dead.wait()
    second = ScriptedModel(["Done."])
    async with cut.second(second, act) as town:
        run = await town.run_ended()
        assert (run.status, run.steps, made) == ("completed", 2, ["acted"])
        [request] = second.requests
        assert [type(turn).__name__ for turn in request.turns] == ["UserTurn", "ModelTurn", "ResultsTurn"]
        assert len(await town.runs()) == 1


@pytest.mark.spec("11.6")
@pytest.mark.spec("9.1")
async def test_a_message_that_was_being_written_ends_and_is_said_once(database: Database, tmp_path: Path) -> None:
    cut = Cut(database, tmp_path)

    class Dies(Model):
        name = "dies:while it writes"
        asked = 0

        async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
            self.asked += 1
            enter, say = call("enter_space", {"spaceId": "spc_room"}, id="a"), call("send_message", id="b")
            if self.asked == 1:
                return ModelTurn(calls=(enter,))
            assert listen is not None
            listen(CallStarted(0, say.id, say.name))
            listen(CallDelta(0, '{"text": "Hel'))
            while not any(one.status == "running" for one in await town.messages()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await cut.die()
            raise AssertionError

    async with cut.first(Dies()) as town:
        await town.say("Say hello.")
        await cut.mortal.dead.wait()
    async with cut.second(ScriptedModel([call("send_message", {"text": "Hello."}), "Done."])) as town:
        assert (await town.run_ended()).status == "completed"
        assert [one.status for one in await town.messages()] == ["complete", "error", "complete"]
        assert await town.said() == ["Say hello.", "Hello."]


@pytest.mark.spec("11.6")
async def test_a_report_that_was_given_before_the_process_died_ends_the_run(database: Database, tmp_path: Path) -> None:
    cut = Cut(database, tmp_path)
    report = call("agent__final_report", {"status": "success", "format": "markdown", "content": "All is well."})

    def dies_at_the_end(request: ModelRequest) -> ModelCall:
        cut.mortal.die_at(3, lost=True)  # The step and the end of the call are kept. The end of the run is not.
        return report

    async with cut.first(ScriptedModel([dies_at_the_end])) as town:
        await town.say("Report.")
        await cut.mortal.dead.wait()
    second = ScriptedModel([])
    async with cut.second(second) as town:
        run = await town.run_ended()
        assert run.status == "completed"
        assert len(second.requests) == 0


@pytest.mark.spec("11.6")
async def test_a_run_that_was_canceled_while_its_process_was_dead_leaves_nothing_open(
    database: Database, tmp_path: Path
) -> None:
    cut = Cut(database, tmp_path)

    @tool(visible=False)
    async def act() -> str:
        """Acts."""
        await cut.die()
        return "never"

    async with cut.first(ScriptedModel([call("act")]), act) as town:
        await town.say("Act.")
        await cut.mortal.dead.wait()
    [run] = await Ledger(database).read(run_rows.list_runs)
    await Ledger(database).commit(runs.cancel_run, run.id)
    async with cut.second(ScriptedModel(["Hello."]), act) as town:
        await town.say("Hello?")
        await town.run_ended(2)
        assert [one.status for one in await town.runs()] == ["canceled", "completed"]
        assert [one.status for one in await town.calls(run.id)] == ["failed"]
        assert {event.status for event in await town.inbox()} == {"processed"}


@pytest.mark.spec("3.40")
@pytest.mark.spec("11.6")
async def test_an_agent_that_another_called_leaves_no_run_open_where_both_die(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subagent_runs, "MAX_CLOSE_ATTEMPTS", 1)  # The dead need not try again.
    cut = Cut(database, tmp_path)

    async def dies(request: ModelRequest) -> str:
        await cut.die()
        return "never"

    asks = call("agent__child", {"prompt": "Help.", "reason": "a test"})
    parent = agent("ada", ScriptedModel([asks]), agents=("child",))
    child = agent("child", ScriptedModel([dies]))
    async with village(cut.mortal, parent, child, folder=tmp_path, owns=False) as town:
        await town.push({"do": "get help"})
        await cut.mortal.dead.wait()
    await Ledger(database).write(sessions.release_all_leases, "")
    second = ScriptedModel(["Nobody helped."])
    parent, child = agent("ada", second, agents=("child",)), agent("child", ScriptedModel([]))
    async with village(database, parent, child, folder=tmp_path, owns=False) as town:
        assert (await town.run_ended()).status == "completed"
        assert "interrupted" in str(second.requests[0].turns[-1])
        [below] = await town.runs(entity_id_for("child"))
        assert below.status in ("failed", "canceled")
