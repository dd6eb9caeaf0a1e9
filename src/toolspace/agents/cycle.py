"""One cycle of one session: a run of the loop, each step of it kept before it has an effect.

A cycle that was cut off goes on where its last step was kept: calls that ended are not made again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from toolspace.agents import cycle_transactions
from toolspace.agents.cycle_transactions import Begun, Hold, LeaseLost, Step
from toolspace.agents.failure_review import ModelReviewer, RuleReviewer
from toolspace.agents.handoff import path_of
from toolspace.agents.history import Recollection, recollect, shorten
from toolspace.agents.live_output import Writer
from toolspace.agents.loop import Keeper, Loop, Outcome, Planned, Ways, is_action
from toolspace.agents.prompt_builder import mind_of, system_prompt
from toolspace.agents.run_budget import Bounds, Frame, Handoff
from toolspace.core import json_text
from toolspace.core.context import TaskHost, ToolContext
from toolspace.core.conversation import Listener, ModelTurn, ResultsTurn, Turn, Usage, UserTurn
from toolspace.core.ids import new_id
from toolspace.core.interfaces import Allow, Decision, Deny
from toolspace.core.model import Model
from toolspace.core.records import OPEN_CALL, CallRecord
from toolspace.core.result import PENDING, ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ErrorKind, ModelError
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.spaces import call_transactions, messaging, runs
from toolspace.spaces.call_host import CallRoom
from toolspace.spaces.call_recorder import written_ahead
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import CallDesk
from toolspace.storage.queries import sessions
from toolspace.storage.queries.calls import NewCall

_log = logging.getLogger("toolspace.agents")
now = time.monotonic
_FINAL_REPORT = "agent__final_report"
_HANDOFF = "router__handoff-to"
_SHORTENED_AT_MOST = 12


class Thinker(msgspec.Struct, frozen=True, kw_only=True):
    """An agent, ready to think."""

    name: str
    entity_id: str
    system: str
    model: Model
    tools: ToolOrchestrator
    ways: Ways = Ways()
    bounds: Bounds = Bounds()
    helpers: tuple[str, ...] = ()
    destinations: tuple[str, ...] = ()
    session_dir: Path | None = None
    tasks: TaskHost | None = None
    offered: Callable[[Tool], bool] | None = None
    """Which of the tools it is given; None: all."""
    brief: str | None = None
    """What it is told in place of who it is and what it has in mind, where it does a piece of work and nothing else:
    then its agent's inbox is not its concern either."""
    task_id: str = ""


class _Offered:
    """Lets a run use some of the tools alone, however it got to know of others."""

    rule = "tools for this kind of work"

    def __init__(self, offered: Callable[[Tool], bool]) -> None:
        self._offered = offered

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        return Allow() if self._offered(tool) else Deny(f'"{tool.name}" is not for this kind of work')


class Cycle(Keeper):
    """One run of an agent, or of one of its tasks."""

    def __init__(self, desk: CallDesk, thinker: Thinker, hold: Hold, begun: Begun, *, about: str = "") -> None:
        self._desk = desk
        self._ledger: Ledger = desk.ledger
        self._thinker = thinker
        self._hold = hold
        self.agent_entity_id = hold.agent_entity_id
        self._cycle = begun.cycle
        self.run_id = begun.run.id
        self._run = begun.run
        self._is_new = bool(begun.events)
        self._about = about
        self._room = CallRoom(
            desk,
            run_id=begun.run.id,
            agent_entity_id=hold.agent_entity_id,
            space_id=begun.run.space_id,
            confirms=False,
        )
        self.frame = Frame(
            thinker.name,
            bounds=thinker.bounds,
            helpers=thinker.helpers,
            destinations=thinker.destinations,
        )
        if begun.run.usage:
            self.frame.usage = msgspec.convert(begun.run.usage, Usage)
        self._steps = begun.run.steps
        self._planned: Sequence[Planned] = ()
        self._loop: Loop | None = None
        self._writer: Writer | None = None
        self._news = True
        self._preview: UserTurn | None = None
        self.held_at = now()
        """When this process last knew that the session is its own."""

    async def think(self) -> Outcome:
        """Runs the cycle to its end. Raises `ModelError`, `LeaseLost`, `RunOver`, `StorageError`."""
        if not self._is_new:
            # What was being said when it was cut off is said anew, or not at all.
            await self._ledger.commit(messaging.abandon_messages_of, self.run_id)
        recalled = await self._recall()
        forget = self._ledger.waiters.listen(f"inbox:{self._hold.agent_entity_id}", self._hear)
        try:
            loop = self._loop = await self._make_loop(recalled.turns)
            unfinished = None
            if recalled.unfinished is not None:
                unfinished = (recalled.unfinished, recalled.call_ids)
                loop.turns.append(recalled.unfinished)
                self._planned = loop.plan(recalled.unfinished, recalled.call_ids)
                await self._see_to_calls(loop, recalled.unfinished, recalled.call_ids)
            return await self._turn(loop, unfinished)
        finally:
            forget()
            if self._writer is not None:
                await self._writer.break_off()

    @property
    def thinker(self) -> Thinker:
        return self._thinker

    def leave(self) -> None:
        """Another process goes on with it: what is cut off now is left as it is."""
        self._room.moves_on = True

    @property
    def is_asking(self) -> bool:
        """Whether the model is being asked now."""
        return self._loop is not None and self._loop.is_asking

    def step(self) -> Step:
        """What the loop has said that was not kept yet."""
        turns = list(self._loop.unkept) if self._loop is not None else []
        return Step(
            run_id=self.run_id,
            cycle=self._cycle,
            turns=[self._awaiting(turn) for turn in turns],
            number=self._loop.steps if self._loop is not None else self._steps,
            usage=self.frame.usage,
        )

    # What the loop asks of its keeper

    async def preview(self) -> UserTurn | None:
        if self._news and self._thinker.brief is None:
            self._news = False
            self._preview = await self._ledger.read(cycle_transactions.preview, self._hold.agent_entity_id)
        return self._preview

    def listener(self) -> Listener | None:
        self._writer = Writer(
            self._room, self._thinker.tools.find, guard=partial(cycle_transactions.confirm, self._hold)
        )
        return self._writer

    def call_id(self, index: int) -> str:
        return self._writer.call_id(index) if self._writer is not None else new_id("call")

    async def record(self, turns: Sequence[Turn], planned: Sequence[Planned], step: int) -> None:
        writer = self._writer
        self._planned = planned
        self._news = self._news or any(one.tool is not None and is_action(one.tool, "peek_inbox") for one in planned)
        kept = Step(
            run_id=self.run_id,
            cycle=self._cycle,
            turns=turns,
            planned=planned,
            number=step,
            usage=self.frame.usage,
            begins=self._written_ahead(planned),
            streamed=await writer.settle() if writer is not None else None,
        )
        asked_at = now()
        self._room.written.update(await self._ledger.commit(cycle_transactions.record, self._hold, kept))
        self.held_at, self._writer = asked_at, None

    async def check(self) -> None:
        asked_at = now()
        if asked_at - self.held_at > cycle_transactions.LEASE_MS / 1000:
            # It was away for that long, and others may have taken it for dead: what it does now, they do too.
            await self._ledger.write(cycle_transactions.confirm, self._hold)
            self.held_at = asked_at

    def made(self, one: Planned) -> None:
        if self._room.taken == one.call_id:
            # The process that was taken for dead made it, after it was looked at what that had left: so look again.
            raise LeaseLost(f'the call "{one.call_id}" was made by another process')

    # The parts of a cycle

    async def _recall(self) -> Recollection:
        session = await self._ledger.read(sessions.one, self._hold.session_id)
        rows = await self._ledger.read(sessions.history, self._hold.session_id)
        first = next((row.kept.turn for row in rows if row.run_id == self.run_id), None)
        self.frame.before = await self._ledger.read(path_of, self._run)
        self.frame.request = self._about or (first.text if isinstance(first, UserTurn) else "")
        return recollect(rows, run_id=self.run_id, summary=session.summary if session is not None else None)

    async def _make_loop(self, turns: list[Turn]) -> Loop:
        thinker = self._thinker
        context = ToolContext(
            agent_id=thinker.name,
            agent_entity_id=self._hold.agent_entity_id,
            run_id=self.run_id,
            task_id=thinker.task_id,
            session_dir=thinker.session_dir,
            tasks=thinker.tasks,
            host=self._room,
            agent=self.frame,
        )
        seconds = self.frame.remaining_seconds
        run = thinker.tools.run(
            id=self.run_id,
            context=context,
            session=f"session-{self._hold.session_id}",  # What one cycle stored, the next can read.
            policy=_Offered(thinker.offered) if thinker.offered is not None else None,
            deadline=None if seconds == float("inf") else seconds,
            **({} if thinker.ways.max_tool_calls_per_turn is None
               else {"max_tool_calls_per_turn": thinker.ways.max_tool_calls_per_turn}),
        )  # fmt: skip
        return Loop(
            thinker.model,
            thinker.tools,
            run,
            frame=self.frame,
            system=thinker.brief if thinker.brief is not None else await self._system(context),
            turns=turns,
            context=context,
            ways=thinker.ways,
            reviewer=(
                ModelReviewer(thinker.model, thinker.ways.settings)
                if thinker.ways.review == "model"
                else RuleReviewer()
            ),
            keeper=self,
            steps=self._steps,
        )

    async def _system(self, context: ToolContext) -> str:
        thinker = self._thinker
        return system_prompt(
            thinker.name,
            thinker.system,
            await self._ledger.read(mind_of, self._hold.agent_entity_id),
            tools=thinker.tools.instructions(context=context),
            entity_id=self._hold.agent_entity_id,
        )

    async def _turn(self, loop: Loop, unfinished: tuple[ModelTurn, Sequence[str]] | None) -> Outcome:
        shortened = 0
        while True:
            try:
                return await loop.think(unfinished)
            except ModelError as error:
                shortened += 1
                if error.kind != "too_long" or shortened > _SHORTENED_AT_MOST or not shorten(loop.turns, keep=2):
                    raise
                _log.info(
                    "%s: the conversation was too long for %s, and is shortened", loop.frame.name, loop.model.name
                )
                unfinished = None  # Its calls are made: what failed is the request after them.

    async def _see_to_calls(self, loop: Loop, turn: ModelTurn, call_ids: Sequence[str]) -> None:
        """Finds out what became of the calls of a turn that was cut off."""
        found = await self._ledger.commit(cycle_transactions.adopt, self._hold, call_ids, self._ledger.node_id)
        for call_id, call in zip(call_ids, turn.calls, strict=True):
            if call_id not in found:
                continue  # It was not begun: it is made now.
            record, is_inboxs = found[call_id]
            tool = self._thinker.tools.find(call.name)
            if record.status == "running" and tool is not None and may_repeat(tool):
                self._room.written[call_id] = call_transactions.Begun(record, fresh=True)
                continue
            if record.status == "running":
                record = await self._ledger.commit(runs.interrupt_call, call_id) or record
            loop.known[call_id] = known_result(record, is_inboxs=is_inboxs)
            self._restore(loop, record)

    def _restore(self, loop: Loop, call: CallRecord) -> None:
        """What a call that ended had decided for its run."""
        if call.is_error or call.status in OPEN_CALL:
            return
        result, args = cast("Mapping[str, Any]", call.result), cast("Mapping[str, Any]", call.args)
        if call.tool_name == _FINAL_REPORT:
            loop.run.final_report = {key: value for key, value in result.items() if key != "accepted"}
        elif call.tool_name == _HANDOFF:
            self.frame.handoff = Handoff(str(args.get("agent")), args.get("message"))

    def _written_ahead(self, planned: Sequence[Planned]) -> list[NewCall]:
        """The calls that can be written down with the step: all that run here, up to one that changes the space."""
        found: list[NewCall] = []
        for one in planned:
            if one.tool is None:
                continue
            new = written_ahead(one.tool, one.call.arguments or "{}", one.call_id, self._room, self._ledger.node_id)
            if new is not None:
                found.append(new)
            if is_action(one.tool, "enter_space") or is_action(one.tool, "leave_space"):
                break
        return found

    def _awaiting(self, turn: Turn) -> Turn:
        """Marks the answers that are not there yet, where the run waits for them."""
        if not isinstance(turn, ResultsTurn) or len(turn.answers) != len(self._planned):
            return turn
        answers = tuple(
            msgspec.structs.replace(answer, text=f"{cycle_transactions.AWAITED} {answer.text}")
            if one.tool is not None and one.tool.pauses_run and not answer.is_error
            else answer
            for one, answer in zip(self._planned, turn.answers, strict=True)
        )
        return ResultsTurn(answers)

    def _hear(self, _: Any) -> None:
        self._news = True


def may_repeat(tool: Tool) -> bool:
    """Whether a call of it that was cut off may be made again: the second time changes nothing more."""
    return bool(tool.annotations.read_only or tool.annotations.idempotent)


def known_result(call: CallRecord, *, is_inboxs: bool) -> ToolResult:
    """The result of a call that was made before, as its caller gets it."""
    if is_inboxs or call.status in OPEN_CALL:
        pending = {"status": "pending", PENDING: call.call_id}
        return ToolResult(True, pending, extras={PENDING: call.call_id}, tool=call.tool_name, call_id=call.call_id)
    if not call.is_error:
        return ToolResult(True, call.result, tool=call.tool_name, call_id=call.call_id)
    text = call.result if isinstance(call.result, str) else json_text.describe(call.result, 500)
    kinds: Mapping[str, ErrorKind] = {"canceled": "canceled", "expired": "timeout"}
    kind: ErrorKind = kinds.get(call.status, "execution_error")
    return ToolResult(False, error=text, error_kind=kind, tool=call.tool_name, call_id=call.call_id)
