"""The loop of model and tools: asks the model, makes its calls, gives it the answers, until one of them ends it.

Knows nothing of inboxes, spaces or storage: whoever runs it keeps what is to be kept, through a `Keeper`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from toolspace.agents.failure_review import FailedCall, Reviewer
from toolspace.agents.run_budget import AgentRun, Handoff
from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.model import (
    DEFAULT_SETTINGS,
    Media,
    Model,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelSettings,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
    ToolChoice,
    Turn,
    UserTurn,
)
from toolspace.core.result import PENDING_CALL_KEY, AudioPart, ImagePart, ResourcePart, ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ModelError
from toolspace.orchestrator import call as calls
from toolspace.orchestrator.run import Run

if TYPE_CHECKING:
    from toolspace.orchestrator.orchestrator import ToolOrchestrator

EndReason = Literal[
    "answered", "reported", "skipped", "handed_off", "paused", "max_steps", "limit", "gave_up", "stopped"
]
"""It had no more to say; it gave its final report; it let the matter pass; another agent answers; it waits for a
result; it took too many steps; it spent too much; its tools kept failing; whoever runs it wants it to stop."""
DEFAULT_MAX_STEPS = 20
_MOVES = frozenset(("enter_space", "leave_space"))
"""Actions after which visible calls show elsewhere: what is asked behind one waits for it."""
_LAST_STEP = "This is the last step of this run: finish now, with what you have."
_LONGEST_ARGUMENTS = 2_000_000
_LONGEST_TEXT = 1_000_000
_LONGEST_NAME = 200
MAX_CALLS_PER_TURN = 1_000
"""Of one turn. All of them are kept, and told to the model with each request."""


class LoopSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a loop goes about it."""

    max_steps: int = DEFAULT_MAX_STEPS
    tool_choice: ToolChoice = "auto"
    max_tool_calls_per_turn: int | None = None
    """None: as many as the toolspace allows."""
    review: Literal["rules", "model"] = "rules"
    """Who decides after a failed tool whether to go on."""
    model_settings: ModelSettings = DEFAULT_SETTINGS


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a loop ended."""

    end: EndReason
    text: str = ""
    """What the model said last."""
    report: Mapping[str, Any] | None = None
    handoff: Handoff | None = None
    steps: int = 0
    reason: str | None = None
    """Why it ended before it was done."""

    @property
    def answer(self) -> str:
        """What to tell whoever asked: the report's content, else the last text."""
        if self.report is not None:
            content = self.report.get("content")
            if isinstance(content, str):
                return content
        return self.text


class PlannedCall(msgspec.Struct, frozen=True):
    """A call that the model asks for, under the id that it is made with."""

    call: ModelCall
    call_id: str
    tool: Tool | None


class LoopHooks:
    """Keeps what a loop does, and tells it what has happened meanwhile. This one keeps nothing."""

    should_stop = False
    """Whether to stop at the next step, which someone else will take."""

    async def preview_inbox(self) -> UserTurn | None:
        """What the model should know before its next step, though it is not a part of the conversation."""
        return None

    def new_listener(self) -> ModelListener | None:
        """Who hears the model write its next turn."""
        return None

    def get_call_id(self, index: int) -> str:
        """The id of a call of the turn that is written now."""
        return next(calls.call_ids)

    async def save_step(self, turns: Sequence[Turn], planned: Sequence[PlannedCall], step: int) -> None:
        """Keeps turns, the last of them the model's, before anything is done for its calls."""

    async def before_call(self) -> None:
        """Called before each call is made. Raises where it is not for this loop to make any more."""

    def after_call(self, call: PlannedCall) -> None:
        """Called after each call was made. Raises where another made it."""


class AgentLoop:
    """One run of one agent. `turns` is all that the model has been told and has said; it grows."""

    def __init__(
        self,
        model: Model,
        tools: ToolOrchestrator,
        tool_run: Run,
        *,
        agent_run: AgentRun,
        system: str,
        turns: list[Turn],
        context: ToolContext,
        settings: LoopSettings,
        reviewer: Reviewer,
        hooks: LoopHooks | None = None,
        steps: int = 0,
    ) -> None:
        self.model = model
        self.tool_run = tool_run
        if tool_run.context_window is None:  # Else configuration says how much of it is to be used.
            tool_run.context_window = model.context_window
        self.agent_run = agent_run
        self.system = system
        self.turns = turns
        self.steps = steps
        """How many turns the model has had in this run."""
        self._tools = tools
        self._context = context
        self._settings = settings
        self._reviewer = reviewer
        self._hooks = hooks or LoopHooks()
        self._unsaved_turns: list[Turn] = []
        """Turns since the last that was kept."""
        self.known_results: dict[str, ToolResult] = {}
        """Results that are there already, by the ids of their calls: those are not made again."""
        self.is_waiting_for_model = False
        """Whether the model is being asked now."""
        self._nudged = False
        self._is_first_turn = True
        self._offered: tuple[object, tuple[Tool, ...]] | None = None

    async def run(self, unfinished: tuple[ModelTurn, Sequence[str]] | None = None) -> RunOutcome:
        """Runs until it ends. `unfinished`: a turn of the model that was kept, and nothing that follows from it."""
        if unfinished is not None:
            turn, call_ids = unfinished
            self._is_first_turn = False
            planned = self.plan_calls(turn, call_ids)
            ended = await self._act(turn, planned) if planned else self._stop(turn)
            if ended is not None:
                return ended
        while True:
            if self._hooks.should_stop:
                return self._end("stopped")
            if self.steps >= self._settings.max_steps:
                reason = f"it took {self.steps} steps, and no more are allowed (loop.maxSteps)"
                return self._end("max_steps", reason=reason)
            if (reason := self.agent_run.exhausted_reason()) is not None:
                return self._end("limit", reason=reason)
            turn = await self._ask_within()
            if turn is None:
                continue  # Others have spent what was left: the bounds say why it ends.
            self.steps += 1
            if turn.usage.tokens:
                self.tool_run.tokens_used = turn.usage.tokens  # All of the conversation is in each request.
            turn, left_out = _bounded(turn)
            planned = self.plan_calls(turn)
            self._add_turn(turn)
            await self._hooks.save_step(self._unsaved_turns, planned, self.steps)
            self._unsaved_turns = []
            ended = await self._act(turn, planned) if planned else self._stop(turn)
            if ended is not None:
                return ended
            if left_out:
                self._add_turn(UserTurn(f"REVIEW: {left_out} calls of your turn were not made; ask for fewer at once."))

    def add_turn(self, turn: Turn) -> None:
        """Adds to the conversation, before the next step."""
        self._add_turn(turn)

    @property
    def unsaved_turns(self) -> Sequence[Turn]:
        """Turns that were not kept yet: they come with the next step, or with whoever ends the run."""
        return self._unsaved_turns

    async def _ask_within(self) -> ModelTurn | None:
        """Asks the model, and books what that cost. None where there is no room for it any more."""
        frame = self.agent_run
        self.is_waiting_for_model = True
        try:
            if frame.is_unlimited:
                turn = await self._ask()
                frame.add_usage(turn.usage)
                return turn
            await frame.begin_request()
            try:
                if frame.exhausted_reason() is not None:
                    return None
                turn = await self._ask()
                frame.add_usage(turn.usage)
                return turn
            finally:
                frame.end_request()
        finally:
            self.is_waiting_for_model = False

    async def _ask(self) -> ModelTurn:
        if self._is_first_turn:
            self._is_first_turn = False  # A run begins with one.
        else:
            self.tool_run.next_turn()
        turns: Sequence[Turn] = self.turns
        preview = await self._hooks.preview_inbox()
        last = self.steps + 1 >= self._settings.max_steps > 1
        if preview is not None or last:
            notes = [preview] if preview is not None else []
            turns = [*turns, *notes, *([UserTurn(_LAST_STEP)] if last else [])]
        request = ModelRequest(
            system=self.system,
            turns=turns,
            tools=self._offer(),
            tool_choice=self._choice(),
            settings=self._settings.model_settings,
        )
        listener = self._hooks.new_listener()
        remaining = self.agent_run.remaining_seconds
        if remaining == float("inf"):
            return await self.model.respond(request, listener)
        try:
            async with asyncio.timeout(max(remaining, 0.001)):
                return await self.model.respond(request, listener)
        except TimeoutError:
            raise ModelError(
                "unavailable", f"{self.model.name} did not answer within the run's limits.timeout"
            ) from None

    def _choice(self) -> ToolChoice:
        said = self._settings.tool_choice
        # A tool that is named is the one to begin with: were it forced again and again, the run would never end.
        return said if not self.steps or said in ("auto", "required", "none") else "auto"

    def _offer(self) -> tuple[Tool, ...]:
        """What the model may call now. The same tuple where nothing changed: models keep what they made of it."""
        tools, run = self._tools, self.tool_run
        state = (tools.revision, len(run.discovered_tools), run.session in tools.stored_sessions)
        if self._offered is None or self._offered[0] != state:
            offered = tuple(tools.tools_for_model(run, context=self._context))
            if self._offered is not None and self._offered[1] == offered:
                offered = self._offered[1]
            self._offered = (state, offered)
        return self._offered[1]

    def plan_calls(self, turn: ModelTurn, call_ids: Sequence[str] = ()) -> list[PlannedCall]:
        """The calls of a turn, under ids of their own, or those that it was kept with."""
        keeper, find = self._hooks, self._tools.find
        return [
            PlannedCall(call, call_ids[index] if index < len(call_ids) else keeper.get_call_id(index), find(call.name))
            for index, call in enumerate(turn.calls)
        ]

    async def _act(self, turn: ModelTurn, planned: Sequence[PlannedCall]) -> RunOutcome | None:
        """Makes the calls of a turn. How the run ended, if one of them ended it."""
        results = await self._make_all(planned)
        answers = tuple(to_call_answer(one.call, result) for one, result in zip(planned, results, strict=True))
        self._add_turn(ResultsTurn(answers))
        if self.tool_run.is_finished:
            return self._end("reported", turn.text)
        if self.agent_run.handoff is not None:
            return self._end("handed_off", turn.text)
        if self.agent_run.is_skipped:
            return self._end("skipped", turn.text)
        if any(_pauses(one, result) for one, result in zip(planned, results, strict=True)):
            return self._end("paused", turn.text)
        return await self._look_back(turn, planned, answers)

    async def _look_back(
        self, turn: ModelTurn, planned: Sequence[PlannedCall], answers: Sequence[ModelToolResult]
    ) -> RunOutcome | None:
        failed = [FailedCall(one.call, answer) for one, answer in zip(planned, answers, strict=True) if answer.is_error]
        if not failed:
            self._reviewer.on_success()
            return None
        review = await self._reviewer.review(failed, self.turns)
        if review.usage is not None:
            self.agent_run.add_usage(review.usage)
        if review.verdict == "complete":
            return self._end("gave_up", turn.text, reason=review.assessment)
        if review.verdict == "replan":
            self._add_turn(UserTurn(f"REVIEW: {review.advice}"))
        return None

    def _stop(self, turn: ModelTurn) -> RunOutcome | None:
        """The model asks for nothing more."""
        nudge = self.tool_run.final_report_reminder
        if nudge is not None and not self._nudged:
            self._nudged = True
            self._add_turn(UserTurn(nudge))
            return None
        return self._end("answered", turn.text)

    async def _make_all(self, planned: Sequence[PlannedCall]) -> list[ToolResult]:
        if len(planned) == 1:
            return [await self._make(planned[0])]
        results: dict[int, ToolResult] = {}
        for group in _groups(planned):
            if len(group) == 1 and len(group[0]) == 1:
                index = group[0][0]
                results[index] = await self._make(planned[index])
                continue
            try:
                async with asyncio.TaskGroup() as tasks:
                    for lane in group:
                        tasks.create_task(self._make_in_order(planned, lane, results))
            except ExceptionGroup as several:
                raise several.exceptions[0] from None  # The first has stopped the others.
        return [results[index] for index in range(len(planned))]

    async def _make_in_order(
        self, planned: Sequence[PlannedCall], lane: Sequence[int], results: dict[int, ToolResult]
    ) -> None:
        for index in lane:
            results[index] = await self._make(planned[index])

    async def _make(self, one: PlannedCall) -> ToolResult:
        result = self.known_results.pop(one.call_id, None)
        if result is None:
            await self._hooks.before_call()
            result = await self._execute(one)
            self._hooks.after_call(one)
        if result.ok and one.tool is not None and is_prebuilt_action(one.tool, "skip"):
            self.agent_run.is_skipped = True
        return result

    async def _execute(self, one: PlannedCall) -> ToolResult:
        arguments = one.call.arguments
        # Text that says nothing means no arguments: providers send it for calls that take none.
        # What is called so is no tool; but that it was tried is kept.
        name = one.call.name if one.tool is not None else json_text.storable_text(one.call.name[:_LONGEST_NAME])
        return await self._tools.execute(
            name, arguments or "{}", context=self._context, run=self.tool_run, call_id=one.call_id
        )

    def _add_turn(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._unsaved_turns.append(turn)

    def _end(self, end: EndReason, text: str | None = None, *, reason: str | None = None) -> RunOutcome:
        if text is None:
            said = next((turn for turn in reversed(self.turns) if isinstance(turn, ModelTurn)), None)
            text = said.text if said is not None else ""
        return RunOutcome(
            end=end,
            text=text,
            report=self.tool_run.final_report,
            handoff=self.agent_run.handoff,
            steps=self.steps,
            reason=reason,
        )


def _bounded(turn: ModelTurn) -> tuple[ModelTurn, int]:
    """A turn as it is kept, and how many calls are left out of it: a model that went astray writes megabytes."""
    calls = turn.calls
    long = any(len(one.arguments) > _LONGEST_ARGUMENTS for one in calls)
    if not long and len(calls) <= MAX_CALLS_PER_TURN and len(turn.text) <= _LONGEST_TEXT:
        return turn, 0
    kept = tuple(
        one if len(one.arguments) <= _LONGEST_ARGUMENTS
        else msgspec.structs.replace(one, arguments='{"too long": ')  # What no tool takes.
        for one in calls[:MAX_CALLS_PER_TURN]
    )  # fmt: skip
    return msgspec.structs.replace(turn, text=turn.text[:_LONGEST_TEXT], calls=kept), len(calls) - len(kept)


def to_call_answer(call: ModelCall, result: ToolResult) -> ModelToolResult:
    """A result as the model reads it."""
    media: tuple[Media, ...] = ()
    if result.parts:
        media = tuple(part for part in result.parts if isinstance(part, ImagePart | AudioPart | ResourcePart))
    return ModelToolResult(call.id, call.name, result.text, not result.ok, media)


def is_prebuilt_action(tool: Tool, action: str) -> bool:
    """Whether a tool is this prebuilt action, whatever configuration calls it."""
    if tool.execution_type != "prebuilt":
        return False
    said = tool.execution.get("action") if tool.execution else None
    return action in (tool.name, said)


def _pauses(one: PlannedCall, result: ToolResult) -> bool:
    return one.tool is not None and one.tool.pauses_run and result.ok and PENDING_CALL_KEY in result.extras


def _groups(planned: Sequence[PlannedCall]) -> list[list[list[int]]]:
    """What may run at once: groups one after the other, the lanes of a group beside each other, a lane in its order.

    An agent's own actions are a lane: two messages are said in the order in which it wrote them.
    """
    groups: list[list[list[int]]] = []
    lanes: list[list[int]] = []
    own: list[int] = []
    for index, one in enumerate(planned):
        tool = one.tool
        if tool is not None and any(is_prebuilt_action(tool, action) for action in _MOVES):
            groups += [lanes] if lanes else []
            groups.append([[index]])
            lanes, own = [], []
        elif tool is not None and tool.execution_type == "prebuilt":
            if not own:
                lanes.append(own)
            own.append(index)
        else:
            lanes.append([index])
    return [*groups, *([lanes] if lanes else [])]
