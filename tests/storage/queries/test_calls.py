"""Calls, on each database: of concurrent changes of status, exactly one succeeds."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest

from toolspace.storage.database import Database, Program
from toolspace.storage.queries import call_delivery, call_lists, calls, entities_and_spaces, runs
from toolspace.storage.queries.calls import CallTransition, NewCall


def _new(call_id: str = "call_1", **fields: Any) -> NewCall:
    defaults: dict[str, Any] = {
        "run_id": "run_1",
        "agent_entity_id": "ada",
        "space_id": "one",
        "tool_name": "ask",
        "args": {"q": 1},
        "execution_type": "external",
        "execution_target": "external",
        "visible": False,
        "visibility": "none",
        "status": "waiting",
        "node_id": "node_1",
    }
    return NewCall(call_id=call_id, **(defaults | fields))


async def _create(database: Database, call_id: str = "call_1", *, seq: int = 1, **fields: Any) -> None:
    assert await database.run(lambda: calls.create(_new(call_id, **fields), seq=seq, message_id=None)) is not None


def _resolve(call_id: str = "call_1", result: Any = 1, **fields: Any) -> Program[CallTransition | None]:
    defaults: dict[str, Any] = {"is_error": False, "source": "client", "submission": None, "submitted_by": None}
    return calls.resolve(call_id, result=result, **(defaults | fields))


async def _create_remembered(database: Database, **fields: Any) -> CallTransition:
    call = await database.run(lambda: calls.create(_new(**fields), seq=1, message_id=None))
    assert call is not None
    return CallTransition(call, "none", None, pauses_run=False)


def _resolve_remembered(remembered_call: CallTransition, result: Any = 1) -> Program[CallTransition | None]:
    transition, resolution = calls.build_resolution(
        remembered_call, result=result, is_error=False, source="client", submission="key", now=7
    )
    return transition if (yield from calls.apply_resolution(resolution)) else None


def _expire(call_id: str = "call_1") -> Program[CallTransition | None]:
    return calls.end(call_id, "expired", error="too late", error_kind="timeout")


@pytest.mark.spec("6.4")
async def test_call_is_stored_with_all_its_fields(database: Database) -> None:
    new = _new(expires_at=database.clock.now_ms() + 5, visible=True, is_async=True, args={"text": "é\0", "big": 2**70})
    new_call = await database.run(lambda: calls.create(new, seq=3, message_id="msg_1"))
    assert await database.run(lambda: calls.create(_new(), seq=4, message_id=None)) is None
    stored_call = await database.read(lambda: calls.find("call_1"))
    assert stored_call is not None
    assert new_call is not None
    assert stored_call.wire() == new_call.wire()
    assert (stored_call.args, stored_call.seq, stored_call.message_id, stored_call.visible, stored_call.is_async) == (
        new.args,
        3,
        "msg_1",
        True,
        True,
    )
    assert (stored_call.status, stored_call.result, stored_call.is_error, stored_call.resolved_at) == (
        "waiting",
        None,
        False,
        None,
    )
    assert await database.read(lambda: calls.find("call_2")) is None


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("result", [None, False, 0, "", [], {}, {"deep": [None, 1.5]}])
async def test_any_json_value_is_a_result(database: Database, result: Any) -> None:
    await _create(database)
    transition = await database.run(lambda: _resolve(result=result))
    assert transition is not None
    assert (transition.call.status, transition.call.result, transition.delivery) == ("resolved", result, "inline")
    assert await database.run(lambda: _resolve(result="another")) is None
    stored_call = await database.read(lambda: calls.find("call_1"))
    assert stored_call is not None
    assert stored_call.result == result
    assert type(stored_call.result) is type(result)


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("space_id", [None, "one"])
@pytest.mark.parametrize("status", ["waiting", "pending"])
async def test_remembered_call_is_resolved_like_any_other(
    database: Database, status: str, space_id: str | None
) -> None:
    remembered_call = await _create_remembered(database, status=status, space_id=space_id)
    transition = await database.run(lambda: _resolve_remembered(remembered_call, {"deep": [None, 1.5]}))
    assert transition is not None
    row = await database.read(lambda: calls.find_with_submission("call_1"))
    assert row is not None
    assert transition.call.wire() == row[0].wire()
    assert (row[0].status, row[0].result, row[1:]) == ("resolved", {"deep": [None, 1.5]}, ("key", None, False))
    assert transition.delivery == ("inline" if status == "waiting" else "inbox")
    assert await database.read(lambda: calls.is_inline("call_1")) is (status == "waiting")
    assert await database.run(lambda: _resolve_remembered(remembered_call)) is None


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("change", ["parked", "expired", "moved", "replaced"])
async def test_call_that_is_not_as_remembered_is_not_resolved(database: Database, change: str) -> None:
    remembered_call = await _create_remembered(
        database, status="waiting", space_id="one", created_at=database.clock.now_ms() - 5
    )

    def replace() -> Program[None]:
        yield "UPDATE calls SET created_at = created_at + 1", ()

    changes: dict[str, Any] = {
        "parked": lambda: calls.make_pending("call_1"),
        "expired": _expire,
        "moved": lambda: calls.remove_from_space("one"),
        "replaced": replace,
    }
    await database.run(changes[change])
    before = await database.read(lambda: calls.find("call_1"))
    assert await database.run(lambda: _resolve_remembered(remembered_call)) is None
    after = await database.read(lambda: calls.find("call_1"))
    assert before is not None
    assert after is not None
    assert before.wire() == after.wire()


@pytest.mark.spec("6.4")
async def test_exactly_one_of_many_resolves_a_remembered_call(database: Database) -> None:
    remembered_call = await _create_remembered(database)
    ways = [lambda: _resolve_remembered(remembered_call), _resolve, _expire] * 8
    ends = await asyncio.gather(*(database.run(way) for way in ways))
    assert len([end for end in ends if end is not None]) == 1


@pytest.mark.spec("6.4")
async def test_result_of_a_pending_call_goes_to_the_inbox(database: Database) -> None:
    await _create(database, wait_until=database.clock.now_ms())
    pending = await database.run(lambda: calls.make_pending("call_1"))
    assert pending is not None
    assert (pending.call.status, pending.delivery) == ("pending", None)
    assert await database.run(lambda: calls.make_pending("call_1")) is None
    transition = await database.run(lambda: _resolve(submission="key", submitted_by="bob", is_error=True))
    assert transition is not None
    assert (transition.delivery, transition.call.is_error) == ("inbox", True)
    row = await database.read(lambda: calls.find_with_submission("call_1"))
    assert row is not None
    assert row[1:] == ("key", "bob", False)
    assert await database.read(lambda: calls.is_inline("call_1")) is False
    assert await database.run(lambda: call_delivery.redirect_to_inbox("call_1")) is None


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("status", ["waiting", "pending"])
async def test_open_call_can_end_without_a_result(database: Database, status: str) -> None:
    await _create(database, status=status)
    transition = await database.run(_expire)
    assert transition is not None
    assert (transition.call.status, transition.call.is_error, transition.call.error_kind) == (
        "expired",
        True,
        "timeout",
    )
    assert (transition.call.result, transition.delivery) == ("too late", "inline" if status == "waiting" else "inbox")
    assert await database.run(_resolve) is None
    assert await database.run(_expire) is None
    assert await database.run(lambda: calls.make_pending("call_1")) is None


@pytest.mark.spec("6.4")
async def test_result_that_races_a_timeout_is_delivered_one_way(database: Database) -> None:
    for number in range(30):
        name = f"call_{number}"
        await _create(database, name)
        programs = [
            lambda n=name: calls.make_pending(n),
            lambda n=name: _resolve(n, "a"),
            lambda n=name: _resolve(n, "b"),
        ]
        if number % 2:
            programs.reverse()
        ends = await asyncio.gather(*map(database.run, programs))
        resolutions = [end for end in ends if end is not None and end.call.status == "resolved"]
        is_pending = any(end is not None and end.call.status == "pending" for end in ends)
        assert len(resolutions) == 1
        assert resolutions[0].delivery == ("inbox" if is_pending else "inline")
        stored_call = await database.read(lambda n=name: calls.find(n))
        assert stored_call is not None
        assert stored_call.result == resolutions[0].call.result


@pytest.mark.spec("6.4")
async def test_exactly_one_of_results_timeouts_and_cancellations_ends_a_call(database: Database) -> None:
    for number in range(15):
        name = f"call_{number}"
        await _create(database, name, status="pending" if number % 2 else "waiting")
        ends = await asyncio.gather(
            *(database.run(lambda n=name, r=r: _resolve(n, r)) for r in range(4)),
            database.run(lambda n=name: _expire(n)),
            database.run(lambda n=name: calls.end(n, "canceled", error="stop", error_kind="canceled")),
        )
        assert len([end for end in ends if end is not None]) == 1


async def test_undelivered_result_is_redirected_once(database: Database) -> None:
    for name in ("call_1", "call_2"):
        await _create(database, name)
        await database.run(lambda name=name: _resolve(name))
    assert sorted(await database.read(lambda: calls.list_orphaned(["node_1"], limit=9))) == [
        ("call_1", "resolved"),
        ("call_2", "resolved"),
    ]
    await database.run(lambda: call_delivery.mark_delivered([]))
    await database.run(lambda: call_delivery.mark_delivered(["call_2", "call_3"]))
    assert await database.run(lambda: call_delivery.redirect_to_inbox("call_2")) is None
    ends = await asyncio.gather(*(database.run(lambda: call_delivery.redirect_to_inbox("call_1")) for _ in range(5)))
    (transition,) = [end for end in ends if end is not None]
    assert transition.delivery == "inbox"
    assert await database.read(lambda: calls.list_orphaned(["node_1"], limit=9)) == []
    assert await database.read(lambda: calls.list_orphaned([], limit=9)) == []


async def test_calls_of_a_dead_process_are_listed(database: Database) -> None:
    await _create(database, "running", status="running")
    await _create(database, "waiting")
    await _create(database, "pending", status="pending")
    await _create(database, "elsewhere", node_id="node_2")
    orphaned_calls = await database.read(lambda: calls.list_orphaned(["node_1", "node_3"], limit=9))
    assert sorted(orphaned_calls) == [("running", "running"), ("waiting", "waiting")]


async def test_running_call_ends_once(database: Database) -> None:
    await _create(database, status="running", execution_target="server")
    assert await database.run(_resolve) is None
    ends = await asyncio.gather(
        *(
            database.run(
                lambda status=status: calls.finish(
                    "call_1", status=status, result={"s": status}, is_error=status != "completed", error_kind=None
                )
            )
            for status in ("completed", "failed", "canceled")
        )
    )
    (transition,) = [end for end in ends if end is not None]
    assert transition.call.result == {"s": transition.call.status}
    assert transition.call.source == "server"


@pytest.mark.spec("6.9")
async def test_due_expired_and_overdue_calls_are_listed(database: Database) -> None:
    now = database.clock.now_ms()
    assert await database.read(calls.find_next_due) is None
    await _create(database, "late", expires_at=now - 1)
    await _create(database, "later", expires_at=now + 60_000)
    await _create(database, "never")
    await _create(database, "ended", expires_at=now - 1)
    await database.run(lambda: _resolve("ended"))
    assert [call.call_id for call in await database.read(lambda: calls.list_expired(limit=9))] == ["late"]
    assert await database.read(calls.find_next_due) == now - 1
    await database.run(lambda: _expire("late"))
    assert await database.read(calls.find_next_due) == now + 60_000
    await _create(database, "nap", due_at=now - 5, execution_type="wait")
    await _create(database, "sleep", due_at=now + 30_000, execution_type="wait")
    assert [call.call_id for call in await database.read(lambda: calls.list_due(limit=9))] == ["nap"]
    assert await database.read(calls.find_next_due) == now - 5
    await _create(database, "overstayed", wait_until=now - 10)
    assert await database.read(lambda: calls.list_overdue(before=now, limit=9)) == ["overstayed"]


@pytest.mark.spec("6.7")
async def test_each_call_is_claimed_by_one_worker(database: Database) -> None:
    for number in range(40):
        await _create(database, f"call_{number:02}", tool_name="ask" if number % 2 else "tell")
    await _create(database, "other", tool_name="other")
    await _create(database, "shown", execution_type="space")

    async def work(worker: str) -> list[str]:
        call_ids: list[str] = []
        while batch := await database.run(lambda: calls.claim(worker, ["ask", "tell"], limit=3)):
            assert len(batch) <= 3
            assert [call.call_id for call in batch] == sorted(call.call_id for call in batch)
            call_ids += [call.call_id for call in batch]
        return call_ids

    shares = await asyncio.gather(*(work(f"wrk_{number}") for number in range(5)))
    assert sorted(chain(*shares)) == [f"call_{number:02}" for number in range(40)]
    claimed_calls = await database.read(lambda: calls.list_claimed("wrk_0"))
    assert [call.call_id for call in claimed_calls] == sorted(shares[0])
    assert await database.run(lambda: calls.claim("wrk_0", [], limit=3)) == []
    assert await database.run(lambda: calls.claim("wrk_0", ["other"], limit=0)) == []


@pytest.mark.spec("6.7")
async def test_released_calls_are_claimed_again_oldest_first(database: Database) -> None:
    for number in range(4):
        await _create(database, f"call_{number}")
    first = await database.run(lambda: calls.claim("wrk_1", ["ask"], limit=2))
    assert [call.call_id for call in first] == ["call_0", "call_1"]
    await database.run(lambda: _resolve("call_0"))
    assert await database.run(lambda: calls.release_claims("wrk_1")) == ["ask"]
    assert await database.run(lambda: calls.release_claims("wrk_1")) == []
    second_claim = await database.run(lambda: calls.claim("wrk_2", ["ask"], limit=2))
    assert [call.call_id for call in second_claim] == ["call_1", "call_2"]


@pytest.mark.spec("6.8")
async def test_last_of_concurrent_results_lets_the_run_continue(database: Database) -> None:
    await database.run(lambda: entities_and_spaces.create_entity("ada", "agent", "Ada", {}))

    def answer(run_id: str, call_id: str) -> Program[bool]:
        yield from calls.lock_paused_run(call_id)
        transition = yield from _resolve(call_id)
        assert transition is not None
        if (yield from calls.has_pausing_calls(run_id)):
            return False
        return (yield from runs.update_status(run_id, "running", from_statuses=("waiting_tool",))) is not None

    for number in range(20):
        run_id = f"run_{number}"
        await database.run(lambda r=run_id: runs.create(r, "ada", space_id=None, trigger=None, status="waiting_tool"))
        names = [f"{run_id}_{part}" for part in "abc"]
        for name in names:
            await _create(database, name, run_id=run_id, pauses_run=True)
        outcomes = await asyncio.gather(*(database.run(lambda r=run_id, n=n: answer(r, n)) for n in names))
        assert sorted(outcomes) == [False, False, True]


async def test_calls_are_listed_newest_first_with_filters(database: Database) -> None:
    for name in ("ada", "bob"):
        await database.run(lambda name=name: entities_and_spaces.create_entity(name, "human", name, {}))
    for space in ("one", "two"):
        await database.run(lambda space=space: entities_and_spaces.create_space(space, space, {}))
    await database.run(lambda: entities_and_spaces.add_member("one", "bob"))
    for number in range(6):
        is_visible = number in {1, 2, 3}
        await _create(
            database,
            f"call_{number}",
            seq=number + 1,
            space_id="two" if number == 3 else "one",
            visibility="full" if is_visible else "name",
            run_id="run_2" if number == 5 else "run_1",
        )
    await database.run(lambda: _resolve("call_4"))

    async def ids(**filters: Any) -> list[str]:
        return [call.call_id for call in await database.read(lambda: call_lists.list_calls(**filters))]

    assert await ids(limit=2) == ["call_5", "call_4"]
    assert await ids(before="call_4", limit=2) == ["call_3", "call_2"]
    assert await ids(statuses=["resolved", "expired"]) == ["call_4"]
    assert await ids(member="bob") == ["call_2", "call_1"]
    assert await ids(member="ada") == []
    assert await ids(run_id="run_2") == ["call_5"]
    assert await ids(space_id="two", tool_name="ask", agent_entity_id="ada") == ["call_3"]
    of_run = await database.read(lambda: calls.list_of_run("run_1", after=2, limit=2))
    assert [(call.call_id, exposure) for call, exposure in of_run] == [("call_2", "full"), ("call_3", "full")]
    assert sorted(await database.read(lambda: calls.list_open_of_run("run_1"))) == [
        "call_0",
        "call_1",
        "call_2",
        "call_3",
    ]


@pytest.mark.spec("26.2")
async def test_calls_of_a_member_are_listed_newest_first_over_all_its_spaces(database: Database) -> None:
    await database.run(lambda: entities_and_spaces.create_entity("joe", "human", "Joe", {}))
    for space in ("one", "two", "three", "foreign"):
        await database.run(lambda space=space: entities_and_spaces.create_space(space, space, {}))
        if space != "foreign":
            await database.run(lambda space=space: entities_and_spaces.add_member(space, "joe"))
    spaces = ["one", "two", "foreign", "one", "one", "three", "two", "one"]
    for number, space in enumerate(spaces):
        new = _new(f"call_{number}", run_id=None, space_id=space, created_at=number // 2, visibility="full")
        await database.run(lambda new=new: calls.create(new, seq=0, message_id=None))
    hidden = _new("call_9", run_id=None, space_id="one", created_at=9, visibility="none")
    await database.run(lambda: calls.create(hidden, seq=0, message_id=None))

    expected = [f"call_{number}" for number in (7, 6, 5, 4, 3, 1, 0)]
    for limit in (1, 2, 3, 10):
        listed_ids: list[str] = []
        while page := await database.read(
            lambda before=listed_ids[-1] if listed_ids else None, limit=limit: call_lists.list_calls(
                member="joe", before=before, limit=limit
            )
        ):
            assert len(page) <= limit
            listed_ids += [call.call_id for call in page]
        assert listed_ids == expected
    of_tool = await database.read(lambda: call_lists.list_calls(member="joe", tool_name="another"))
    assert of_tool == []
    several = await database.read(lambda: call_lists.list_calls(statuses=("waiting", "resolved"), limit=3))
    assert [call.call_id for call in several] == ["call_9", "call_7", "call_6"]
