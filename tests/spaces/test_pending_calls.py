"""Pending calls: results in time, late, never, twice, and at the same moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.spaces.service_harness import hold_write_lock, pending_tool, service_harness
from toolspace.errors import RefusedError
from toolspace.spaces import call_transactions
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.workers import Workers
from toolspace.storage.database import Database
from toolspace.storage.sqlite.database import SqliteDatabase


@pytest.mark.spec("6.3")
@pytest.mark.spec("6.4")
async def test_timely_result_is_returned_inline(database: Database) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "fetch", {"q": 1}))
        call = await harness.wait_until_started(run)
        assert (call.status, call.args, call.execution_target) == ("waiting", {"q": 1}, "external")
        await harness.submit(call.call_id, {"answer": 42})
        result = await call_task
        assert result.unwrap() == {"answer": 42}
        row = await harness.get_call(call.call_id)
        assert (row.status, row.result, row.is_error, row.source) == ("resolved", {"answer": 42}, False, "client")
        assert await harness.inbox() == []


@pytest.mark.spec("6.3")
async def test_async_tool_returns_pending_and_its_result_goes_to_the_inbox(database: Database) -> None:
    async with service_harness(database, pending_tool("approve", is_async=True)) as harness:
        run = await harness.open_run()
        result = await harness.call(run, "approve")
        pending = result.unwrap()
        assert pending == {"status": "pending", "pendingToolCallId": result.call_id}
        assert (await harness.get_call(result.call_id)).status == "pending"
        await harness.submit(result.call_id, True)
        (event,) = await harness.inbox()
        assert event.type == "tool_result"
        assert event.data["result"] is True
        assert event.data["callId"] == result.call_id


@pytest.mark.spec("6.3")
@pytest.mark.spec("6.4")
async def test_late_result_goes_to_the_inbox(database: Database) -> None:
    async with service_harness(database, pending_tool("slow", timeout=0.05)) as harness:
        await harness.register_worker("slow")
        run = await harness.open_run()
        result = await harness.call(run, "slow")
        assert (result.ok, result.error, result.error_kind) == (False, "Tool timed out after 50ms", "timeout")
        assert (await harness.get_call(result.call_id)).status == "pending"
        await harness.submit(result.call_id, None)
        (event,) = await harness.inbox()
        assert event.data["result"] is None
        assert (await harness.get_call(result.call_id)).status == "resolved"


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
async def test_empty_values_are_results(database: Database, value: Any) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "fetch"))
        call = await harness.wait_until_started(run)
        await harness.submit(call.call_id, value)
        assert (await call_task).unwrap() == value
        assert await harness.inbox() == []


@pytest.mark.spec("6.4")
async def test_results_that_race_timeouts_are_delivered_exactly_once(database: Database) -> None:
    async with service_harness(
        database, pending_tool("race", timeout=0.2), pending_tool("patient", timeout=60.0)
    ) as harness:
        await harness.register_worker("race", "patient")
        run = await harness.open_run()
        inline: Counter[str] = Counter()
        accepted_counts: Counter[str] = Counter()

        async def call(number: int) -> None:
            name = "race" if number % 4 else "patient"
            result = await harness.call(run, name, {"n": number}, call_id=f"call_{number}")
            if result.ok:
                assert result.result == f"r{number}"
                inline[result.call_id] += 1

        async def post(number: int) -> None:
            try:
                await harness.submit(f"call_{number}", f"r{number}")
                accepted_counts[f"call_{number}"] += 1
            except RefusedError as error:
                assert error.reason == "conflict"  # noqa: PT017 - most submissions lose

        async def race(number: int) -> None:
            call_task = asyncio.create_task(call(number))
            while True:
                try:
                    await harness.get_call(f"call_{number}")
                    break
                except AssertionError:
                    await asyncio.sleep(0.001)
            await asyncio.sleep((number % 13) * 0.03)
            await asyncio.gather(post(number), post(number), call_task)

        await asyncio.gather(*map(race, range(120)))
        by_inbox = Counter(event.data["callId"] for event in await _all_inbox(harness))
        assert accepted_counts == {f"call_{number}": 1 for number in range(120)}
        assert inline + by_inbox == accepted_counts
        assert inline
        assert by_inbox


@pytest.mark.spec("6.5")
async def test_second_result_is_refused(database: Database) -> None:
    async with service_harness(database, pending_tool("approve", is_async=True)) as harness:
        run = await harness.open_run()
        call_id = (await harness.call(run, "approve")).call_id
        await harness.submit(call_id, "yes", key="a")
        with pytest.raises(RefusedError, match="has its result already") as refusal:
            await harness.submit(call_id, "no", key="b")
        assert refusal.value.details["result"] == "yes"
        repetition = await harness.submit(call_id, "no", key="a")
        assert repetition.result == "yes"
        assert len(await harness.inbox()) == 1


@pytest.mark.spec("6.5")
async def test_result_for_another_run_or_of_a_non_member_is_refused(database: Database) -> None:
    async with service_harness(database, pending_tool("approve", "space", is_async=True, visible=True)) as harness:
        run, other_run = await harness.open_run(in_space=True), await harness.open_run()
        call_id = (await harness.call(run, "approve")).call_id
        for options, reason in (
            ({"run_id": other_run}, "forbidden"),
            ({"run_id": "run_none"}, "not_found"),
            ({"space_id": "spc_none"}, "not_found"),
            ({"entity_id": "ent_stranger"}, "forbidden"),
        ):
            with pytest.raises(RefusedError) as refusal:
                await harness.submit(call_id, 1, **options)
            assert refusal.value.reason == reason
        with pytest.raises(RefusedError) as refusal:
            await harness.submit("call_unknown", 1)
        assert refusal.value.reason == "not_found"
        assert (
            await harness.submit(call_id, 1, entity_id=harness.person, run_id=run, space_id=harness.space)
        ).status == "resolved"


@pytest.mark.spec("6.5")
@pytest.mark.spec("7.2")
async def test_visible_call_is_a_message_that_ends_with_its_result(database: Database) -> None:
    async with service_harness(
        database, pending_tool("confirmAction", "space", is_async=True, visible=True)
    ) as harness:
        run = await harness.open_run(in_space=True)
        call_id = (await harness.call(run, "confirmAction", {"text": "Book?"})).call_id
        (message,) = await harness.messages()
        assert (message.kind, message.status, message.sender_id) == ("tool", "requires_action", harness.agent)
        assert message.content == {"toolCallId": call_id, "toolName": "confirmAction", "input": {"text": "Book?"}}
        await harness.submit(call_id, {"confirmed": True})
        (message,) = await harness.messages()
        assert message.status == "complete"
        assert message.content["output"] == {"confirmed": True}
        types = [event.type for event in await harness.events(f"space:{harness.space}")]
        assert types == ["run.started", "tool.started", "tool.ready", "tool.done"]


@pytest.mark.spec("6.5")
async def test_submitted_error_fails_the_call_and_its_message(database: Database) -> None:
    async with service_harness(database, pending_tool("approve", "space", visible=True)) as harness:
        run = await harness.open_run(in_space=True)
        call_task = asyncio.create_task(harness.call(run, "approve"))
        call = await harness.wait_until_started(run)
        await harness.submit(call.call_id, "the user closed the page", is_error=True)
        result = await call_task
        assert (result.error, result.error_kind) == ("the user closed the page", "execution_error")
        (message,) = await harness.messages()
        assert (message.status, message.content["error"]) == ("error", "the user closed the page")


@pytest.mark.spec("6.6")
async def test_visible_tool_needs_an_active_space(database: Database) -> None:
    async with service_harness(database, pending_tool("confirmAction", "space", visible=True)) as harness:
        run = await harness.open_run()
        result = await harness.call(run, "confirmAction")
        expected = 'Tool "confirmAction" is visible but you are not in a space. Call enter_space first.'
        assert (result.error, result.executed) == (expected, False)
        assert (await harness.get_call(result.call_id)).status == "failed"


@pytest.mark.spec("6.7")
async def test_call_without_a_worker_waits_for_its_timeout_and_becomes_pending(database: Database) -> None:
    async with service_harness(database, pending_tool("fetch", timeout=0.05)) as harness:
        run = await harness.open_run()
        result = await harness.call(run, "fetch")
        assert (result.error, result.error_kind) == ("Tool timed out after 50ms; no worker serves it", "timeout")
        assert result.extras["status"] == "pending"
        assert (await harness.get_call(result.call_id)).status == "pending"
        await harness.submit(result.call_id, "late")
        (event,) = await harness.inbox()
        assert event.data["result"] == "late"


@pytest.mark.spec("6.7")
async def test_worker_that_connects_while_the_call_waits_answers_it(database: Database) -> None:
    async with service_harness(database, pending_tool("fetch", timeout=60.0)) as harness:
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "fetch"))
        call = await harness.wait_until_started(run)
        async with Workers(harness.ledger) as workers, workers.connect("wrk_a", ["fetch"], 1) as worker:
            ((kind, _),) = await worker.next_events()
            assert kind == "offered"
            await harness.submit(call.call_id, "in time")
            assert (await call_task).unwrap() == "in time"


@pytest.mark.spec("6.7")
async def test_timeout_does_not_blame_a_missing_worker_if_someone_could_answer(database: Database) -> None:
    external = pending_tool("fetch", timeout=0.05)
    person = pending_tool("ask", "space", visible=True, timeout=0.05)
    async with service_harness(database, external, person) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run(in_space=True)
        for name in ("fetch", "ask"):
            assert (await harness.call(run, name)).error == "Tool timed out after 50ms"


@pytest.mark.spec("6.7")
async def test_call_of_a_tool_with_when_unserved_fail_fails_at_once_without_a_worker(database: Database) -> None:
    tools = [
        pending_tool("fetch", when_unserved="fail"),
        pending_tool("later", is_async=True, when_unserved="fail"),
    ]
    async with service_harness(database, *tools) as harness:
        run = await harness.open_run()
        result = await harness.call(run, "fetch")
        assert 'no worker serves the tool "fetch"' in str(result.error)
        assert not result.executed
        assert (await harness.get_call(result.call_id)).status == "failed"
        with pytest.raises(RefusedError, match="takes no result any more: it is failed"):
            await harness.submit(result.call_id, 1)
        assert (await harness.call(run, "later")).unwrap()["status"] == "pending"
        await harness.register_worker("fetch")
        call_task = asyncio.create_task(harness.call(run, "fetch", call_id="call_2"))
        await harness.wait_until_awaited("call_2")
        call_task.cancel()
        await asyncio.gather(call_task, return_exceptions=True)


@pytest.mark.spec("6.1")
async def test_wait_tool_is_resolved_by_its_timer(database: Database) -> None:
    pause = pending_tool("pause", "wait", execution={"duration": 50})
    async with service_harness(database, pause) as harness:
        run = await harness.open_run()
        result = await harness.call(run, "pause")
        assert result.unwrap()["waited"] >= 50
        # The time counts from the request, however long storing it took.
        row = await harness.get_call(result.call_id)
        assert row.expires_at == row.created_at + round(harness.pending_calls.ttl * 1000)


@pytest.mark.spec("6.9")
async def test_expired_call_notifies_its_agent(database: Database) -> None:
    async with service_harness(
        database, pending_tool("approve", "space", is_async=True, visible=True, expires_after=0.05)
    ) as harness:
        run = await harness.open_run(in_space=True)
        notification = harness.ledger.waiters.register(f"inbox:{harness.agent}")
        call_id = (await harness.call(run, "approve")).call_id
        harness.sweeper.wake()
        await notification
        (event,) = await harness.inbox()
        assert (event.data["status"], event.data["isError"]) == ("expired", True)
        assert (await harness.get_call(call_id)).status == "expired"
        (message,) = await harness.messages()
        assert message.status == "error"
        with pytest.raises(RefusedError, match="takes no result any more"):
            await harness.submit(call_id, 1)


@pytest.mark.spec("6.8")
async def test_run_paused_by_a_tool_continues_with_the_result(database: Database) -> None:
    from toolspace.spaces import runs

    async with service_harness(database, pending_tool("askUser", pauses_run=True)) as harness:
        run = await harness.open_run()
        call_id = (await harness.call(run, "askUser")).call_id
        assert (await harness.ledger.read(runs.get_run, run)).status == "waiting_tool"
        await harness.submit(call_id, "blue")
        assert (await harness.ledger.read(runs.get_run, run)).status == "running"
        assert len(await harness.inbox()) == 1


async def test_result_of_a_cancelled_caller_goes_to_the_inbox(database: Database) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "fetch"))
        call = await harness.wait_until_started(run)
        call_task.cancel()
        await asyncio.gather(call_task, return_exceptions=True)
        await harness.pending_calls.aclose()
        assert (await harness.get_call(call.call_id)).status == "pending"
        await harness.submit(call.call_id, "late")
        assert [event.data["result"] for event in await harness.inbox()] == ["late"]


async def test_cancelled_call_ends_for_its_caller(database: Database) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "fetch"))
        call = await harness.wait_until_started(run)
        await harness.pending_calls.cancel(call.call_id)
        result = await call_task
        assert result.error_kind == "canceled"
        assert (await harness.get_call(call.call_id)).status == "canceled"


async def test_canceling_a_run_ends_its_open_calls_and_stops_running_ones(database: Database) -> None:
    from toolspace import tool
    from toolspace.spaces import runs

    has_begun = asyncio.Event()

    @tool(visible=False)
    async def hang() -> str:
        has_begun.set()
        await asyncio.Event().wait()
        return ""

    async with service_harness(database, pending_tool("later", is_async=True), hang) as harness:
        run = await harness.open_run()
        pending = (await harness.call(run, "later")).call_id
        call_task = asyncio.create_task(harness.call(run, "hang"))
        await has_begun.wait()
        await harness.ledger.commit(runs.cancel_run, run)
        result = await call_task
        assert result.error_kind == "canceled"
        assert (await harness.get_call(pending)).status == "canceled"
        assert (await harness.get_call(result.call_id)).status == "canceled"
        refusals = await asyncio.gather(harness.call(run, "later"), return_exceptions=True)
        assert isinstance(refusals[0], RefusedError)


async def test_draining_makes_waiting_calls_pending(database: Database) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "fetch"))
        call = await harness.wait_until_started(run)
        await harness.pending_calls.drain()
        assert (await call_task).unwrap() == {"status": "pending", "pendingToolCallId": call.call_id}
        assert (await harness.get_call(call.call_id)).status == "pending"


async def _all_inbox(harness: Any) -> list[Any]:
    from toolspace.storage.queries import inbox

    return await harness.ledger.read(inbox.list_events, harness.agent, limit=10_000)


async def test_pending_result_is_not_cached(database: Database) -> None:
    async with service_harness(database, pending_tool("approve", is_async=True, cache=60.0)) as harness:
        run = await harness.open_run()
        first, second = await harness.call(run, "approve"), await harness.call(run, "approve")
        assert first.unwrap()["pendingToolCallId"] != second.unwrap()["pendingToolCallId"]


@pytest.mark.spec("3.16")
async def test_a_python_tool_can_ask_the_people_in_its_space(database: Database) -> None:
    from toolspace import ToolContext, tool

    colour = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}

    @tool(visible=False)
    async def paint(context: ToolContext) -> str:
        answer = await context.elicit("Which colour?", colour)
        return f"{answer.action} {(answer.content or {}).get('colour')}"

    async with service_harness(database, paint) as harness:
        run = await harness.open_run(in_space=True)
        call_task = asyncio.create_task(harness.call(run, "paint"))
        async with await harness.ledger.hub.subscribe(f"space:{harness.space}", after=0) as reader:
            async for batch in reader:
                questions = [event.data for event in batch if event.data.get("toolName") == "elicitation"]
                if questions:
                    break
        assert questions[0]["input"] == {"message": "Which colour?", "requestedSchema": colour}
        await harness.submit(
            questions[0]["toolCallId"], {"action": "accept", "content": {"colour": "blue"}}, entity_id=harness.person
        )
        assert (await call_task).unwrap() == "accept blue"


@pytest.mark.spec("6.4")
async def test_caller_of_a_call_made_pending_elsewhere_is_told_and_the_inbox_gets_the_result(
    database: Database,
) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "fetch"))
        call = await harness.wait_until_started(run)
        # As another process does that declares this one dead.
        await harness.ledger.commit(call_transactions.make_pending, call.call_id)
        assert (await call_task).unwrap()["pendingToolCallId"] == call.call_id
        await harness.submit(call.call_id, "here")
        assert [event.data["callId"] for event in await harness.inbox()] == [call.call_id]


@pytest.mark.spec("6.4")
async def test_caller_that_learns_late_of_its_pending_call_does_not_get_the_result(
    database: Database,
) -> None:
    async with service_harness(database, pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "fetch"))
        call = await harness.wait_until_started(run)
        other_ledger = Ledger(database)
        await other_ledger.commit(call_transactions.make_pending, call.call_id)
        await other_ledger.commit(call_transactions.submit, Submission(call_id=call.call_id, result="here"))
        harness.ledger.waiters.wake(f"call:{call.call_id}")
        assert (await call_task).unwrap()["pendingToolCallId"] == call.call_id
        assert [event.data["callId"] for event in await harness.inbox()] == [call.call_id]


@pytest.mark.spec("6.4")
async def test_result_of_a_caller_cancelled_while_its_call_is_stored_goes_to_the_inbox(
    tmp_path: Path,
) -> None:
    async with service_harness(await SqliteDatabase.open(tmp_path / "a.db"), pending_tool("fetch")) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        async with hold_write_lock(tmp_path / "a.db"):
            call_task = asyncio.create_task(harness.call(run, "fetch", call_id="call_1"))
            await harness.wait_until_awaited("call_1")
            call_task.cancel()
            await asyncio.gather(call_task, return_exceptions=True)
            wake_up = harness.ledger.waiters.register("call:call_1")
        await wake_up
        await harness.submit("call_1", "here")
        assert [event.data["callId"] for event in await harness.inbox()] == ["call_1"]
