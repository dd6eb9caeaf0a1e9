"""Sample rows and arguments for the programs in `toolspace.storage.queries`. See `statement_collection`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from toolspace.core.ids import now_ms
from toolspace.core.language_model import UserTurn
from toolspace.core.quotas import QuotaCharge
from toolspace.core.stored_records import AgentScope, NewEvent
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import (
    approvals,
    calls,
    documents,
    entities_and_spaces,
    events,
    goals_and_memories,
    idempotency,
    inbox,
    keys,
    messages,
    plans,
    quotas,
    runs,
    sessions,
    space_deletion,
    tasks,
    workers_and_presence,
)

SCOPED: Final = "ada/space:spc_1"
LATER: Final = now_ms() + 1_000_000
_CALL_IDS: Final = ("call_pending", "call_waiting", "call_running", "call_inline", "call_done", "call_none")
RunProgram = Callable[[Program[Any]], Any]


def _call(call_id: str, status: str, **values: Any) -> calls.NewCall:
    fields: dict[str, Any] = {
        "run_id": "run_1",
        "agent_entity_id": "ada",
        "space_id": "spc_1",
        "tool_name": "book_room",
        "args": {},
        "execution_type": "external",
        "execution_target": "external",
        "visible": True,
        "visibility": "full",
        "node_id": "node_1",
        "principal": "ent_joe",
        "created_at": 1,
    }
    return calls.NewCall(call_id=call_id, status=status, **{**fields, **values})  # type: ignore[arg-type]


def _approval(call_id: str) -> approvals.NewApproval:
    return approvals.NewApproval(
        id=call_id,
        tool_name="book_room",
        tool_version="1",
        digest="d",
        principal="ent_joe",
        requested_by=("ent_joe",),
        policy_version="1",
        rule="r",
        reason="costs money",
        approvers=("members",),
        context={},
        execution={},
        expires_at=LATER,
    )


def _document(text: str = "green tea and black tea") -> documents.PreparedDocument:
    return documents.prepare("doc_1", title="Tea", text=text)


def _plan(plan_id: str, session_id: str) -> plans.Plan:
    times = {"scheduled_at": 5, "next_run_at": 5, "last_run_at": None, "created_at": 1, "updated_at": 1}
    texts = dict.fromkeys(("run_after", "cron", "timezone"))
    return plans.Plan(
        id=plan_id,
        entity_id="ada",
        session_id=session_id,
        name="Walk",
        instruction="Go",
        status="active",
        **texts,
        **times,  # type: ignore[arg-type]
    )


def _turn(run_id: str | None = "run_1") -> sessions.NewTurn:
    return sessions.NewTurn(stored_turn=sessions.StoredTurn(UserTurn("Hello")), tokens=3, run_id=run_id)


def _charge(amount: int, limit: int) -> QuotaCharge:
    return QuotaCharge(key="q", name="calls", amount=amount, limit=limit, window_start=0, reset_at=100)


def _key(kind: str, number: int = 1) -> keys.NewKey:
    return keys.NewKey(id=f"key_{kind}_{number}", kind=kind, hash=f"h_{kind}_{number}", name=kind, hint="…")  # type: ignore[arg-type]


def seed() -> Iterator[Program[Any]]:
    """The programs that fill the small database."""
    create_session = partial(sessions.create, agent_entity_id="ada")
    yield entities_and_spaces.create_entity("ada", "agent", "Ada", {})
    yield entities_and_spaces.create_entity("ent_joe", "human", "Joe", {})
    yield entities_and_spaces.create_space("spc_1", "Tea", {})
    yield entities_and_spaces.create_space("spc_deleted", "Old", {})
    yield entities_and_spaces.create_space("spc_empty", "Empty", {})
    yield messages.create("msg_0", "spc_deleted", "ada", "Hello", run_id="run_1", call_id="call_done")
    yield events.append("space:spc_old", [NewEvent("message", {}, "full")])
    for space_id in ("spc_deleted", "spc_empty"):
        yield space_deletion.start(space_id)
    yield entities_and_spaces.add_member("spc_1", "ada")
    yield entities_and_spaces.add_member("spc_1", "ent_joe")
    yield create_session("ada", kind="agent")
    yield create_session(SCOPED, kind="agent", scope_key="space:spc_1")
    yield create_session("task_1", kind="task")
    yield create_session("ses_free", kind="agent")
    for session_id in ("ada", SCOPED, "task_1"):
        yield sessions.acquire_lease(session_id, "node_1", lease_ms=1)
    yield sessions.append_turns("ada", 1, [_turn(), _turn(None)])
    yield runs.create("run_1", "ada", space_id="spc_1", trigger={})
    yield runs.create("run_2", "ada", space_id=None, trigger={})
    yield runs.update_status("run_2", "completed", from_statuses=("running",), ends=True)
    yield messages.create("msg_1", "spc_1", "ada", "Hello", status="running", run_id="run_1")
    yield messages.create("msg_2", "spc_1", "ada", "Bye", status="error", run_id="run_1")
    yield messages.create("msg_3", "spc_1", "ent_joe", "Hi", kind="tool", call_id="call_pending")
    overdue_call = _call("call_waiting", "waiting", wait_until=1, due_at=1, expires_at=1)
    for number, new in enumerate(
        (
            _call("call_pending", "pending", pauses_run=True, expires_at=1),
            overdue_call,
            _call("call_inline", "waiting"),
            _call("call_running", "running"),
            _call("call_done", "running", run_id=None),
        )
    ):
        yield calls.create(new, seq=number, message_id=None)
        yield approvals.create(_approval(new.call_id))
    yield calls.resolve("call_inline", result=1, is_error=False, source="client", submission=None)
    yield calls.finish("call_done", status="completed", result=1, is_error=False, error_kind=None)
    yield approvals.decide("call_done", "approved", node_id="node_1")
    yield approvals.remember("book_room", "ent_joe", "always", decision="allow", reason=None, created_by="ent_joe")
    for session_id in ("ada", SCOPED):
        for number in range(4):
            event_id = f"{'scoped' if session_id == SCOPED else 'evt'}_{number}"
            yield inbox.add(session_id, event_id, "service", {}, priority=1, at=number)
    yield inbox.claim("ada", "claim_1", count=1, lease_ms=-10)
    yield _update("UPDATE inbox SET status = 'failed' WHERE event_id = 'evt_3'")
    yield events.append("run:run_1", [NewEvent("run.started", {}, "full")])
    yield events.append("space:spc_1", [NewEvent("message", {}, "full")])
    for kind in ("secret", "public"):
        yield keys.create(_key(kind))
    yield workers_and_presence.record_heartbeat("node_1", started_at=1)
    for number in (1, 2, 3):
        yield workers_and_presence.register_worker(f"wrk_{number}", ["book_room"], node_id="node_1")
    yield workers_and_presence.register_holder("sub_1", ["space:spc_1"], node_id="node_1")
    yield calls.claim("wrk_3", ["book_room"], limit=1)
    yield workers_and_presence.mark_left("wrk_3", node_id="node_1")
    yield idempotency.claim_key("key_used", "f", "node_1")
    for session_id, number in (("ada", 1), (SCOPED, 2)):
        yield plans.save(_plan(f"plan_{number}", session_id))
        yield goals_and_memories.set_goals(
            session_id, [goals_and_memories.GoalChange(description="Write", id="goal_1")], clear=False
        )
        yield goals_and_memories.set_memories(session_id, [("tea", "green")])
        yield tasks.create(f"task_{number}", session_id, "Brew", "{}")
    yield tasks.finish("task_2", "completed", {})
    yield documents.save("ada", _document())
    yield quotas.add([_charge(1, 5)])
    yield _run_once("call_0")


def _update(sql: str) -> Program[None]:
    yield sql, ()


def _effects() -> Effects:
    effects = Effects()
    effects.inbox_rows.append(inbox.build_row("ada", "evt_new", "service", {}, priority=1, at=1))
    effects.emit("space:spc_1", NewEvent("message", {}, "full"))
    return effects


def _resolution(run: RunProgram, space_id: str | None = "spc_1") -> Sequence[Any]:
    record = msgspec.structs.replace(run(calls.find("call_waiting")), space_id=space_id)
    remembered_call = calls.CallTransition(record, "full", None, False)
    _, row = calls.build_resolution(remembered_call, result=1, is_error=False, source="client", submission=None, now=1)
    return row


VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    # Ids that the small database has, in the state that most programs ask for.
    "agent_entity_id": ("ada",),
    "entity_id": ("ada",),
    "principal": ("ent_joe",),
    "member": ("ent_joe",),
    "other_member": ("ada",),
    "sharing_with": ("ent_joe",),
    "except_entity": ("ent_joe",),
    "first_id": ("ada",),
    "second_id": ("ent_joe",),
    "sender_id": ("ada",),
    "space_id": ("spc_1", "spc_none"),
    "space_ids": (("spc_1",),),
    "call_id": _CALL_IDS,
    "approval_id": ("call_pending",),
    "call_ids": (_CALL_IDS,),
    "calls_to_finish": (("call_running",), ()),
    "except_calls": (("call_running",), ()),
    "run_id": ("run_1", "run_2", "run_none"),
    "except_runs": (("run_1",), ()),
    "session_id": ("ada", SCOPED),
    "session_ids": (("ada", SCOPED), ()),
    "message_id": ("msg_1", "msg_2", "msg_3", "msg_none"),
    "event_id": ("evt_0", "evt_3", "evt_new"),
    "event_ids": (("evt_0", "evt_1"),),
    "claim": ("claim_1",),
    "old_claim": ("claim_1",),
    "document_id": ("doc_1", "doc_none"),
    "document_ids": (("doc_1",),),
    "task_id": ("task_1",),
    "plan_id": ("plan_1",),
    "plan_ids": (("plan_1",),),
    "goal_ids": (("goal_1",),),
    "key_id": ("key_secret_1", "key_public_1", "key_none"),
    "hash": ("h_secret_1",),
    "node_id": ("node_1", "node_none"),
    "node_ids": (("node_1",), ()),
    "except_node": ("node_9",),
    "worker_id": ("wrk_3", "wrk_1", "wrk_none"),
    "holder": ("wrk_1",),
    "stream": ("run:run_1",),
    "scope_key": ("space:spc_1",),
    "tool_name": ("book_room",),
    # Other values
    "limit": (10, 1),
    "seconds_ago": (0.0,),
    "key": ("key_new", "key_used"),
    "tools": (("book_room",), ()),
    "topics": (("tool:book_room",), ()),
    "statuses": (("pending",), ("waiting", "pending"), ()),
    "from_statuses": (("running",),),
    "status": ("running", "pending", "completed", "waiting", "processed"),
    "type": ("service", "agent"),
    "types": (("service",), ()),
    "unless": (("complete", "error"),),
    "token": (1,),
    "leases": ((("ada", 1), ("ses_free", 9)),),
    "agent_scope": (AgentScope(),),
    "all_writes": ((),),
    "turns": ((_turn(),),),
    "stored_turn": (_turn().stored_turn,),
    "events": ((NewEvent("run.started", {}, "full"),),),
    "charges": ((_charge(1, 5),), (_charge(6, 5),)),
    "keys": (("tea",),),
    "values": ((("tea", "black"), ("milk", "no")),),
    "changes": ((goals_and_memories.GoalChange(description="Read", id="goal_2"),),),
    "query": ("green tea", ""),
    "uses": ({"key_secret_1": keys.KeyUse(1, 0, 5)},),
    "execution": ({"dueIn": 1, "expiresIn": 1, "type": "x", "target": "server", "visible": 1, "visibility": "full"},),
    "source": ("server",),
    "error_kind": (None, "timeout"),
    "scopes": (("always", "run:run_1"),),
}
"""Values of parameters, by name; the first is used while other parameters vary."""


def special_samples(run: RunProgram) -> dict[Callable[..., Any], list[Callable[[], Program[Any]]]]:
    """Programs whose parameters are records, or which need a certain state."""
    capacity = workers_and_presence.WorkerCapacity
    return {
        approvals.create: [lambda: approvals.create(_approval("call_none"))],
        approvals.get_approved_call: [
            lambda: approvals.get_approved_call(run(approvals.find("call_pending"))),
        ],
        calls.create: [lambda: calls.create(_call("call_new", "waiting"), seq=9, message_id=None)],
        calls.apply_resolution: [
            lambda: calls.apply_resolution(_resolution(run)),
            lambda: calls.apply_resolution(_resolution(run, None)),
        ],
        documents.save: [
            lambda: documents.save("ada", _document()),
            lambda: documents.save("ada", _document("another tea")),
        ],
        events.list_of_types: [lambda: events.list_of_types("run:run_1", ["run.started"])],
        events.resolve_deferred_calls: [
            lambda: events.resolve_deferred_calls(Effects(resolved_calls=[_resolution(run)]))
        ],
        events.write_deferred: [lambda: events.write_deferred([_effects()]), lambda: events.write_deferred([])],
        inbox.add_rows: [lambda: inbox.add_rows(_effects().inbox_rows)],
        keys.create: [lambda: keys.create(_key("secret", 2))],
        keys.create_first: [lambda: keys.create_first([_key("secret", 2)])],
        plans.save: [lambda: plans.save(_plan("plan_3", "ada"))],
        plans.advance: [lambda: plans.advance(run(plans.find("plan_1")), status="active", next_run_at=9)],
        sessions.list_cycle_starts: [lambda: sessions.list_cycle_starts(run(sessions.find("ada")), since=0, limit=5)],
        space_deletion.delete_rows: [
            lambda space_id=space_id: space_deletion.delete_rows(space_id, 10)
            for space_id in ("spc_deleted", "spc_old", "spc_1", "spc_empty")
        ],
        workers_and_presence.assign_calls: [
            lambda: workers_and_presence.assign_calls(
                [
                    capacity("wrk_none", ("book_room",), 1),
                    capacity("wrk_1", ("walk_dog",), 1),
                    capacity("wrk_1", ("book_room",), 3),
                    capacity("wrk_2", ("book_room",), 300),
                    capacity("wrk_1", ("book_room",), 1),
                ],
                node_id="node_1",
            ),
        ],
        _run_once: [lambda call_id=call_id: _run_once(call_id) for call_id in (None, "call_1")]
        + [lambda: _run_twice("call_1")],
    }


def _run_once(call_id: str | None) -> Program[Any]:
    return idempotency.run_once("ada", call_id, runs.find("run_1"))


def _run_twice(call_id: str) -> Program[Any]:
    yield from _run_once(call_id)
    return (yield from _run_once(call_id))
