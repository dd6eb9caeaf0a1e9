"""The loop of model and tools: asks the model, makes its calls, gives it the answers, until one of them ends it.

Knows nothing of inboxes, spaces or storage: whoever runs it keeps what is to be kept, through a `Keeper`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from toolspace.agents.failure_review import Failed, Reviewer
from toolspace.agents.run_budget import Frame, Handoff
from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.conversation import (
    DEFAULT_SETTINGS,
    CallAnswer,
    Listener,
    Media,
    ModelCall,
    ModelRequest,
    ModelSettings,
    ModelTurn,
    ResultsTurn,
    ToolChoice,
    Turn,
    UserTurn,
)
from toolspace.core.model import Model
from toolspace.core.result import PENDING, AudioPart, ImagePart, ResourcePart, ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import ModelError
from toolspace.orchestrator import call as calls
from toolspace.orchestrator.run import Run

if TYPE_CHECKING:
    from toolspace.orchestrator.orchestrator import ToolOrchestrator

End = Literal["answered", "reported", "skipped", "handed_off", "paused", "max_steps", "limit", "gave_up", "stopped"]
"""It had no more to say; it gave its final report; it let the matter pass; another agent answers; it waits for a
result; it took too many steps; it spent too much; its tools kept failing; whoever runs it wants it to stop."""
DEFAULT_MAX_STEPS = 20
_MOVES = frozenset(("enter_space", "leave_space"))
"""Actions after which visible calls show elsewhere: what is asked behind one waits for it."""
_LAST_STEP = "This is the last step of this run: finish now, with what you have."
_LONGEST_ARGUMENTS = 2_000_000
_LONGEST_TEXT = 1_000_000
_LONGEST_NAME = 200
MOST_CALLS = 1_000
"""Of one turn. All of them are kept, and told to the model with each request."""


class Ways(msgspec.Struct, frozen=True, kw_only=True):
    """How a loop goes about it."""

    max_steps: int = DEFAULT_MAX_STEPS
    tool_choice: ToolChoice = "auto"
    max_tool_calls_per_turn: int | None = None
    """None: as many as the toolspace allows."""
    review: Literal["rules", "model"] = "rules"
    """Who decides after a failed tool whether to go on."""
    settings: ModelSettings = DEFAULT_SETTINGS


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a loop ended."""

    end: End
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


class Planned(msgspec.Struct, frozen=True):
    """A call that the model asks for, under the id that it is made with."""

    call: ModelCall
    call_id: str
    tool: Tool | None


class Keeper:
    """Keeps what a loop does, and tells it what has happened meanwhile. This one keeps nothing."""

    stopping = False
    """Whether to stop at the next step, which someone else will take."""

    async def preview(self) -> UserTurn | None:
        """What the model should know before its next step, though it is not a part of the conversation."""
        return None

    def listener(self) -> Listener | None:
        """Who hears the model write its next turn."""
        return None

    def call_id(self, index: int) -> str:
        """The id of a call of the turn that is written now."""
        return next(calls.call_ids)

    async def record(self, turns: Sequence[Turn], planned: Sequence[Planned], step: int) -> None:
        """Keeps turns, the last of them the model's, before anything is done for its calls."""

    async def check(self) -> None:
        """Called before each call is made. Raises where it is not for this loop to make any more."""

    def made(self, one: Planned) -> None:
        """Called after each call was made. Raises where another made it."""


class Loop:
    """One run of one agent. `turns` is all that the model has been told and has said; it grows."""

    def __init__(
        self,
        model: Model,
        tools: ToolOrchestrator,
        run: Run,
        *,
        frame: Frame,
        system: str,
        turns: list[Turn],
        context: ToolContext,
        ways: Ways,
        reviewer: Reviewer,
        keeper: Keeper | None = None,
        steps: int = 0,
    ) -> None:
        self.model = model
        self.run = run
        if run.context_window is None:  # Else configuration says how much of it is to be used.
            run.context_window = model.context_window
        self.frame = frame
        self.system = system
        self.turns = turns
        self.steps = steps
        """How many turns the model has had in this run."""
        self._tools = tools
        self._context = context
        self._ways = ways
        self._reviewer = reviewer
        self._keeper = keeper or Keeper()
        self._new: list[Turn] = []
        """Turns since the last that was kept."""
        self.known: dict[str, ToolResult] = {}
        """Results that are there already, by the ids of their calls: those are not made again."""
        self.is_asking = False
        """Whether the model is being asked now."""
        self._nudged = False
        self._is_first_turn = True
        self._offered: tuple[object, tuple[Tool, ...]] | None = None

    async def think(self, unfinished: tuple[ModelTurn, Sequence[str]] | None = None) -> Outcome:
        """Runs until it ends. `unfinished`: a turn of the model that was kept, and nothing that follows from it."""
        if unfinished is not None:
            turn, call_ids = unfinished
            self._is_first_turn = False
            planned = self.plan(turn, call_ids)
            ended = await self._act(turn, planned) if planned else self._stop(turn)
            if ended is not None:
                return ended
        while True:
            if self._keeper.stopping:
                return self._end("stopped")
            if self.steps >= self._ways.max_steps:
                reason = f"it took {self.steps} steps, and no more are allowed (loop.maxSteps)"
                return self._end("max_steps", reason=reason)
            if (reason := self.frame.exhausted()) is not None:
                return self._end("limit", reason=reason)
            turn = await self._ask_within()
            if turn is None:
                continue  # Others have spent what was left: the bounds say why it ends.
            self.steps += 1
            if turn.usage.tokens:
                self.run.tokens_used = turn.usage.tokens  # All of the conversation is in each request.
            turn, left_out = _bounded(turn)
            planned = self.plan(turn)
            self._say(turn)
            await self._keeper.record(self._new, planned, self.steps)
            self._new = []
            ended = await self._act(turn, planned) if planned else self._stop(turn)
            if ended is not None:
                return ended
            if left_out:
                self._say(UserTurn(f"REVIEW: {left_out} calls of your turn were not made; ask for fewer at once."))

    def say(self, turn: Turn) -> None:
        """Adds to the conversation, before the next step."""
        self._say(turn)

    @property
    def unkept(self) -> Sequence[Turn]:
        """Turns that were not kept yet: they come with the next step, or with whoever ends the run."""
        return self._new

    async def _ask_within(self) -> ModelTurn | None:
        """Asks the model, and books what that cost. None where there is no room for it any more."""
        frame = self.frame
        self.is_asking = True
        try:
            if frame.free:
                turn = await self._ask()
                frame.book(turn.usage)
                return turn
            await frame.begin_request()
            try:
                if frame.exhausted() is not None:
                    return None
                turn = await self._ask()
                frame.book(turn.usage)
                return turn
            finally:
                frame.end_request()
        finally:
            self.is_asking = False

    async def _ask(self) -> ModelTurn:
        if self._is_first_turn:
            self._is_first_turn = False  # A run begins with one.
        else:
            self.run.next_turn()
        turns: Sequence[Turn] = self.turns
        preview = await self._keeper.preview()
        last = self.steps + 1 >= self._ways.max_steps > 1
        if preview is not None or last:
            notes = [preview] if preview is not None else []
            turns = [*turns, *notes, *([UserTurn(_LAST_STEP)] if last else [])]
        request = ModelRequest(
            system=self.system,
            turns=turns,
            tools=self._offer(),
            tool_choice=self._choice(),
            settings=self._ways.settings,
        )
        listener = self._keeper.listener()
        remaining = self.frame.remaining_seconds
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
        said = self._ways.tool_choice
        # A tool that is named is the one to begin with: were it forced again and again, the run would never end.
        return said if not self.steps or said in ("auto", "required", "none") else "auto"

    def _offer(self) -> tuple[Tool, ...]:
        """What the model may call now. The same tuple where nothing changed: models keep what they made of it."""
        tools, run = self._tools, self.run
        state = (tools.revision, len(run.discovered), run.session in tools.stored_sessions)
        if self._offered is None or self._offered[0] != state:
            offered = tuple(tools.tools_for_model(run, context=self._context))
            if self._offered is not None and self._offered[1] == offered:
                offered = self._offered[1]
            self._offered = (state, offered)
        return self._offered[1]

    def plan(self, turn: ModelTurn, call_ids: Sequence[str] = ()) -> list[Planned]:
        """The calls of a turn, under ids of their own, or those that it was kept with."""
        keeper, find = self._keeper, self._tools.find
        return [
            Planned(call, call_ids[index] if index < len(call_ids) else keeper.call_id(index), find(call.name))
            for index, call in enumerate(turn.calls)
        ]

    async def _act(self, turn: ModelTurn, planned: Sequence[Planned]) -> Outcome | None:
        """Makes the calls of a turn. How the run ended, if one of them ended it."""
        results = await self._make_all(planned)
        answers = tuple(answer_of(one.call, result) for one, result in zip(planned, results, strict=True))
        self._say(ResultsTurn(answers))
        if self.run.finished:
            return self._end("reported", turn.text)
        if self.frame.handoff is not None:
            return self._end("handed_off", turn.text)
        if self.frame.skipped:
            return self._end("skipped", turn.text)
        if any(_pauses(one, result) for one, result in zip(planned, results, strict=True)):
            return self._end("paused", turn.text)
        return await self._look_back(turn, planned, answers)

    async def _look_back(
        self, turn: ModelTurn, planned: Sequence[Planned], answers: Sequence[CallAnswer]
    ) -> Outcome | None:
        failed = [Failed(one.call, answer) for one, answer in zip(planned, answers, strict=True) if answer.is_error]
        if not failed:
            self._reviewer.went_well()
            return None
        review = await self._reviewer.review(failed, self.turns)
        if review.usage is not None:
            self.frame.book(review.usage)
        if review.verdict == "complete":
            return self._end("gave_up", turn.text, reason=review.assessment)
        if review.verdict == "replan":
            self._say(UserTurn(f"REVIEW: {review.advice}"))
        return None

    def _stop(self, turn: ModelTurn) -> Outcome | None:
        """The model asks for nothing more."""
        nudge = self.run.nudge
        if nudge is not None and not self._nudged:
            self._nudged = True
            self._say(UserTurn(nudge))
            return None
        return self._end("answered", turn.text)

    async def _make_all(self, planned: Sequence[Planned]) -> list[ToolResult]:
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
        self, planned: Sequence[Planned], lane: Sequence[int], results: dict[int, ToolResult]
    ) -> None:
        for index in lane:
            results[index] = await self._make(planned[index])

    async def _make(self, one: Planned) -> ToolResult:
        result = self.known.pop(one.call_id, None)
        if result is None:
            await self._keeper.check()
            result = await self._execute(one)
            self._keeper.made(one)
        if result.ok and one.tool is not None and is_action(one.tool, "skip"):
            self.frame.skipped = True
        return result

    async def _execute(self, one: Planned) -> ToolResult:
        arguments = one.call.arguments
        # Text that says nothing means no arguments: providers send it for calls that take none.
        # What is called so is no tool; but that it was tried is kept.
        name = one.call.name if one.tool is not None else json_text.kept_text(one.call.name[:_LONGEST_NAME])
        return await self._tools.execute(
            name, arguments or "{}", context=self._context, run=self.run, call_id=one.call_id
        )

    def _say(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._new.append(turn)

    def _end(self, end: End, text: str | None = None, *, reason: str | None = None) -> Outcome:
        if text is None:
            said = next((turn for turn in reversed(self.turns) if isinstance(turn, ModelTurn)), None)
            text = said.text if said is not None else ""
        return Outcome(
            end=end,
            text=text,
            report=self.run.final_report,
            handoff=self.frame.handoff,
            steps=self.steps,
            reason=reason,
        )


def _bounded(turn: ModelTurn) -> tuple[ModelTurn, int]:
    """A turn as it is kept, and how many calls are left out of it: a model that went astray writes megabytes."""
    calls = turn.calls
    long = any(len(one.arguments) > _LONGEST_ARGUMENTS for one in calls)
    if not long and len(calls) <= MOST_CALLS and len(turn.text) <= _LONGEST_TEXT:
        return turn, 0
    kept = tuple(
        one if len(one.arguments) <= _LONGEST_ARGUMENTS
        else msgspec.structs.replace(one, arguments='{"too long": ')  # What no tool takes.
        for one in calls[:MOST_CALLS]
    )  # fmt: skip
    return msgspec.structs.replace(turn, text=turn.text[:_LONGEST_TEXT], calls=kept), len(calls) - len(kept)


def answer_of(call: ModelCall, result: ToolResult) -> CallAnswer:
    """A result as the model reads it."""
    media: tuple[Media, ...] = ()
    if result.parts:
        media = tuple(part for part in result.parts if isinstance(part, ImagePart | AudioPart | ResourcePart))
    return CallAnswer(call.id, call.name, result.text, not result.ok, media)


def is_action(tool: Tool, action: str) -> bool:
    """Whether a tool is this prebuilt action, whatever configuration calls it."""
    if tool.execution_type != "prebuilt":
        return False
    said = tool.execution.get("action") if tool.execution else None
    return action in (tool.name, said)


def _pauses(one: Planned, result: ToolResult) -> bool:
    return one.tool is not None and one.tool.pauses_run and result.ok and PENDING in result.extras


def _groups(planned: Sequence[Planned]) -> list[list[list[int]]]:
    """What may run at once: groups one after the other, the lanes of a group beside each other, a lane in its order.

    An agent's own actions are a lane: two messages are said in the order in which it wrote them.
    """
    groups: list[list[list[int]]] = []
    lanes: list[list[int]] = []
    own: list[int] = []
    for index, one in enumerate(planned):
        tool = one.tool
        if tool is not None and any(is_action(tool, action) for action in _MOVES):
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
