"""Deleting spaces with many messages: they are gone at once, and their rows are deleted in slices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient
from toolspace.core.stored_records import NewEvent
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.space_deletion import delete_space, finish_deletions
from toolspace.spaces.sweeper import Sweeper
from toolspace.storage.database import Database, Program, RowBatch
from toolspace.storage.queries import calls, entities_and_spaces, events, messages, runs, space_deletion

_MESSAGES = 1_500


def _fill(space_id: str) -> Program[None]:
    """A space with many messages of two runs, one of them with many events, and with a visible call."""
    yield from entities_and_spaces.create_entity("ada", "agent", "Ada", {})
    yield from entities_and_spaces.create_space(space_id, "Large", {})
    yield from entities_and_spaces.add_member(space_id, "ada")
    for run_id in ("run_1", "run_2"):
        yield from runs.create(run_id, "ada", space_id=space_id, trigger={})
        yield from runs.update_status(run_id, "completed", from_statuses=("running",), ends=True)
        yield from events.append(f"run:{run_id}", [NewEvent("run.step", {}, "full")] * 450)
    yield from events.append(f"space:{space_id}", [NewEvent("message", {}, "full")] * 450)
    new_call = calls.NewCall(
        call_id="call_1", run_id="run_1", agent_entity_id="ada", space_id=space_id, tool_name="t", args={},
        execution_type="server", execution_target="server", visible=True, visibility="full", status="running",
        node_id="node_1",
    )  # fmt: skip
    yield from calls.create(new_call, seq=1, message_id=None)
    yield from calls.finish("call_1", status="completed", result=1, is_error=False, error_kind=None)
    yield from messages.create("msg_call", space_id, "ada", {}, kind="tool", run_id="run_1", call_id="call_1")
    rows = RowBatch((f"msg_{number}", space_id, number, f"run_{number % 2 + 1}") for number in range(2, _MESSAGES))
    yield (
        "INSERT INTO messages (id, space_id, seq, sender_id, kind, content, metadata, status, run_id, created_at, "
        "updated_at) VALUES (?, ?, ?, 'ada', 'message', '\"Hello\"', '{}', 'complete', ?, 1, 1)",
        rows,
    )
    yield "UPDATE spaces SET last_seq = ? WHERE id = ?", (_MESSAGES, space_id)


def _count(sql: str, *values: Any) -> Program[int]:
    rows = yield sql, values
    return rows[0][0]


_COUNT_MESSAGES = "SELECT COUNT(*) FROM messages WHERE space_id = ?"


@pytest.mark.spec("26.2")
async def test_large_space_disappears_at_once_and_its_rows_are_deleted_in_slices(database: Database) -> None:
    ledger = Ledger(database)
    await ledger.write(_fill, "den")
    assert await ledger.commit(delete_space, "den")
    assert await ledger.read(_count, _COUNT_MESSAGES, "den") > _MESSAGES / 2
    assert await ledger.read(entities_and_spaces.find_space, "den") is None
    assert await ledger.read(entities_and_spaces.list_spaces) == []
    assert await ledger.read(entities_and_spaces.list_space_names, ["den"]) == {}
    assert not await ledger.read(entities_and_spaces.is_member, "den", "ada")
    assert await ledger.write(entities_and_spaces.update_space, "den", name="x") is None
    assert await ledger.write(messages.create, "msg_late", "den", "ada", "Hello?") is None
    assert await ledger.write(entities_and_spaces.create_space, "den", "New", {}) is None
    assert not await ledger.commit(delete_space, "den")

    await finish_deletions(ledger)
    assert await ledger.write(entities_and_spaces.create_space, "den", "New", {})
    for sql in (
        _COUNT_MESSAGES,
        "SELECT COUNT(*) FROM events WHERE stream = 'space:' || ?",
        "SELECT COUNT(*) FROM runs WHERE space_id = ?",
        "SELECT COUNT(*) FROM events WHERE stream LIKE 'run:%' AND exposure <> 'none' AND ? <> ''",
    ):
        assert await ledger.read(_count, sql, "den") == 0
    call = await ledger.read(calls.find, "call_1")
    assert call is not None
    assert not call.visible


@pytest.mark.spec("26.2")
async def test_no_slice_of_a_deletion_changes_many_rows(database: Database) -> None:
    ledger = Ledger(database)
    await ledger.write(_fill, "den")
    await ledger.write(space_deletion.start, "den")
    tables = ("messages", "events WHERE exposure <> 'none'", "runs WHERE space_id IS NOT NULL")

    async def count_rows() -> int:
        return sum([await ledger.read(_count, f"SELECT COUNT(*) FROM {table}") for table in tables])

    rows, is_finished = await count_rows(), False
    while not is_finished:
        is_finished = await ledger.write(space_deletion.delete_rows, "den", 100)
        previous_rows, rows = rows, await count_rows()
        assert previous_rows - rows <= 200  # As many messages, and as many events of their runs.


@pytest.mark.spec("26.2")
async def test_next_process_finishes_a_deletion_that_a_crash_interrupted(database: Database) -> None:
    ledger = Ledger(database)
    await ledger.write(_fill, "den")
    await ledger.commit(delete_space, "den")  # Nobody continues: this process has no sweeper.
    async with Sweeper(Ledger(database)), asyncio.timeout(30):
        while await ledger.read(space_deletion.is_started, "den"):
            pass
    assert await ledger.read(_count, _COUNT_MESSAGES, "den") == 0


@pytest.mark.spec("26.2")
async def test_id_of_a_large_space_can_be_used_again_when_its_rows_are_deleted(each_database_api: ApiClient) -> None:
    api = each_database_api
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    await api.create("/api/spaces", id="den", name="Large", members=["ann"])
    send = [api.post("/api/spaces/den/messages", {"entityId": "ann", "content": "Hello"}) for _ in range(900)]
    assert {response.status for response in await asyncio.gather(*send)} == {201}
    assert (await api.delete("/api/spaces/den")).status == 204
    assert (await api.get("/api/spaces/den")).status == 404
    assert (await api.get("/api/spaces/den/messages")).status == 404
    async with asyncio.timeout(30):
        while (
            response := await api.post("/api/spaces", {"id": "den", "name": "New", "members": ["ann"]})
        ).status != 201:
            assert response.status == 409
            assert "is being deleted" in response.detail
    assert (await api.get("/api/spaces/den/messages")).data["items"] == []
