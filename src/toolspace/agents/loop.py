"""Runs the loop of model and tools: asks the model, executes its calls and returns the results, until the run ends.

Cycles (`durable_loop.py`) and requests (`subagents.py`) use it. It knows nothing of inboxes, spaces or storage: its
caller stores what must survive, through `loop_hooks.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, cast

import msgspec

from toolspace.agents.agent_run import AgentRun, Handoff, PreparedAgent
from toolspace.agents.failure_review import FailedCall
from toolspace.agents.history import shorten
from toolspace.agents.loop_hooks import LoopHooks, LoopObserver, PlannedCall
from toolspace.agents.model_names import RestoringListener, restore_call
from toolspace.agents.model_quotas import ModelQuotas
from toolspace.agents.structured_output import FINAL_REPORT, OutputCheck
from toolspace.core import json_text
from toolspace.core.argument_names import ArgumentNames
from toolspace.core.language_model import (
    Media,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelStreamPart,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
    Turn,
    UserTurn,
)
from toolspace.core.result import PAUSES_RUN_KEY, PENDING_CALL_KEY, AudioPart, ImagePart, ResourcePart, ToolResult
from toolspace.core.times import format_iso
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ModelError
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.stages.permission_and_validation import BATCH, is_limited_when_repeated

_log = logging.getLogger("toolspace.agents")
EndReason = Literal[
    "answered", "reported", "skipped", "handed_off", "paused", "max_steps", "limit", "gave_up", "stopped"
]
"""Why a loop ended: the model asked for no more calls; it gave its final report; it skipped the request; it handed the
request off; it waits for a result; it reached the maximum of steps; it used up a limit; its calls kept failing; its
caller told it to stop."""
MAX_CALLS_PER_TURN = 1_000
"""Every call of a turn is stored, and sent to the model again with each request."""
_SPACE_CHANGING_ACTIONS = ("enter_space", "leave_space")
"""Visible calls after one of these show in another space, so they wait until it is done."""
_LAST_STEP = "This is the last step of this run: finish now, with what you have."
_MAX_ARGUMENTS = 2_000_000
_MAX_TEXT = 1_000_000
_MAX_NAME = 200
_MAX_SHORTENINGS = 12


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a loop ended."""

    end: EndReason
    text: str = ""
    """The text of the model's last turn."""
    report: Mapping[str, Any] | None = None
    handoff: Handoff | None = None
    steps: int = 0
    reason: str | None = None
    """Why it ended early; None if it did not."""
    notice: str | None = None
    """What to tell the person who waits for an answer, instead of one."""

    @property
    def answer(self) -> str:
        """The answer to the request: the content of the report, else the last text."""
        if self.report is not None:
            content = self.report.get("content")
            if isinstance(content, str):
                return content
        return self.text


class AgentLoop:
    """The loop of one run. Changes the run's conversation, steps and usage."""

    def __init__(
        self,
        prepared_agent: PreparedAgent,
        agent_run: AgentRun,
        tool_run: Run,
        *,
        system: str,
        context: ToolContext,
        hooks: LoopHooks,
        observer: LoopObserver | None = None,
        output: OutputCheck | None = None,
    ) -> None:
        """`output`: the type that the answer must have."""
        self.agent_run = agent_run
        self.tool_run = tool_run
        self.known_results: dict[str, ToolResult] = {}
        """Results by call id of calls that an earlier process has executed: they are not executed again."""
        self._prepared_agent = prepared_agent
        self._system = system
        self._context = context
        self._hooks = hooks
        self._observer = observer
        self._output = output
        self.quotas = ModelQuotas(prepared_agent.tools, context, agent_run.budget)
        self._reviewer = prepared_agent.new_reviewer()
        self._has_reminded_of_report = False
        self._is_first_request = True
        self._offered_tools: tuple[object, tuple[Tool, ...]] | None = None

    async def run_within_context(
        self, unfinished_turn: tuple[ModelTurn, Sequence[PlannedCall]] | None = None
    ) -> RunOutcome:
        """As `run`; but if the conversation is too long for the model, shortens it and asks again."""
        run, shortenings = self.agent_run, 0
        while True:
            try:
                return await self.run(unfinished_turn)
            except ModelError as error:
                shortenings += 1
                if error.kind != "too_long" or shortenings > _MAX_SHORTENINGS or not shorten(run.turns, keep=2):
                    raise
                _log.info(
                    'agent "%s": the conversation is too long for %s; shortening it and asking again',
                    run.name,
                    self._prepared_agent.model.name,
                )
                self.tool_run.tokens_used = 0  # The next response says how much is left of it.
                unfinished_turn = None  # Its calls have been executed: the request after them failed.

    async def run(self, unfinished_turn: tuple[ModelTurn, Sequence[PlannedCall]] | None = None) -> RunOutcome:
        """Runs until the loop ends. `unfinished_turn`: the last turn of the conversation and its calls, if its results
        are missing. Raises `ModelError`, and what the hooks raise."""
        run, settings = self.agent_run, self._prepared_agent.settings
        if unfinished_turn is not None:
            self._is_first_request = False
            if (outcome := await self._finish_turn(*unfinished_turn)) is not None:
                return outcome
        while True:
            if self._hooks.should_stop:
                return self._end("stopped")
            if run.steps >= settings.max_steps:
                reason = f"it reached the maximum of {run.steps} steps (loop.maxSteps)"
                return self._end("max_steps", reason=reason)
            if (reason := run.budget.exhausted_reason()) is not None:
                return self._end("limit", reason=reason)
            if (charge := await self.quotas.find_exhausted()) is not None:
                notice = (
                    f"I cannot answer: the budget for today is used up. It resets at {format_iso(charge.reset_at)}."
                )
                return self._end("limit", reason=charge.refusal, notice=notice)
            turn = await self._request_within_budget()
            if turn is None:
                continue  # Other runs have used the rest of the budget: `exhausted_reason` tells which limit.
            run.steps += 1
            # Every request contains the whole conversation. Some servers report less than its results alone have.
            self.tool_run.tokens_used = max(self.tool_run.tokens_used, turn.usage.tokens)
            turn, dropped_calls = _truncate(turn)
            calls = self.plan_calls(turn)
            run.add_turn(turn)
            await self._hooks.save_step(run.unsaved_turns, calls, run.steps)
            run.unsaved_turns = []
            outcome = await self._finish_turn(turn, calls)
            if self._observer is not None:
                self._observer.on_step_finished(run.steps, turn)
            if outcome is not None:
                return outcome
            if dropped_calls:
                note = f"REVIEW: {dropped_calls} calls of your turn were not executed; make fewer calls at once."
                run.add_turn(UserTurn(note))

    def plan_calls(self, turn: ModelTurn, call_ids: Sequence[str] = ()) -> list[PlannedCall]:
        """The calls of a turn, with new ids, or with the ids that they were stored with."""
        hooks, find = self._hooks, self._prepared_agent.tools.find
        return [
            PlannedCall(
                restore_call(call, self._find_names(call.name)),
                call_ids[index] if index < len(call_ids) else hooks.get_call_id(index),
                find(call.name),
            )
            for index, call in enumerate(turn.calls)
        ]

    def _find_names(self, tool_name: str) -> ArgumentNames | None:
        """The names under which the model has the arguments of a tool, if they are not those of the tool."""
        tool = self._prepared_agent.tools.find(tool_name)
        if tool is not None and self._output is not None and tool.name == FINAL_REPORT:
            tool = self._output.describe_report(tool)
        return tool.argument_names if tool is not None else None

    def count_earlier_calls(self, calls: Sequence[ModelCall]) -> None:
        """Counts the calls that earlier processes made in this run, so that the limit of equal calls still holds."""
        for name, arguments in _list_single_calls(calls):
            tool = self._prepared_agent.tools.find(name)
            if tool is not None and is_limited_when_repeated(tool):
                with suppress(Exception):  # Invalid calls, and those of a tool with a broken schema, were not counted.
                    values = json_text.parse_arguments(arguments)
                    if tool.argument_names is not None:
                        values = cast("dict[str, Any]", tool.argument_names.restore(values))
                    values = tool.validator.from_mapping(values)
                    self.tool_run.count_equal_call(tool, values)

    # Asking the model

    async def _request_within_budget(self) -> ModelTurn | None:
        """Asks the model and adds the usage. Returns None if the budget was used up in the meantime."""
        run, budget = self.agent_run, self.agent_run.budget
        run.is_waiting_for_model = True
        try:
            async with budget.request():
                if budget.exhausted_reason() is not None:
                    return None
                turn = await self._request()
                await self.quotas.add(turn.usage)
                return turn
        finally:
            run.is_waiting_for_model = False

    async def _request(self) -> ModelTurn:
        run, model, settings = self.agent_run, self._prepared_agent.model, self._prepared_agent.settings
        if self._is_first_request:
            self._is_first_request = False  # A new tool run is at its first turn already.
        else:
            self.tool_run.next_turn()
        turns: Sequence[Turn] = run.turns
        preview = await self._hooks.preview_inbox()
        is_last_step = run.steps + 1 >= settings.max_steps > 1
        if preview is not None or is_last_step:
            notes = [preview] if preview is not None else []
            turns = [*turns, *notes, *([UserTurn(_LAST_STEP)] if is_last_step else [])]
        tool_choice = settings.tool_choice
        if run.steps and tool_choice not in ("auto", "required", "none"):
            tool_choice = "auto"  # Forced in every step, a named tool would keep the run from ending.
        await self._prepared_agent.tools.wait_for_lists()
        request = ModelRequest(
            system=self._system,
            turns=turns,
            tools=self._list_tools(),
            tool_choice=tool_choice,
            settings=settings.model_settings,
        )
        listener = self._new_listener()
        remaining = run.budget.remaining_seconds
        if remaining == float("inf"):
            return await model.respond(request, listener)
        try:
            async with asyncio.timeout(max(remaining, 0.001)):
                return await model.respond(request, listener)
        except TimeoutError:
            reason = f"did not answer within {max(remaining, 0):.3g} s, the rest of the run's limits.timeout"
            raise ModelError("unavailable", f"{model.name} {reason}") from None

    def _new_listener(self) -> ModelListener | None:
        """The listener of the hooks and that of the observer, as one."""
        listener = self._join_listeners()
        # Only tools whose arguments have other names for models need the wrapper, and nearly none do.
        if listener is None or all(self._find_names(tool.name) is None for tool in self._list_tools()):
            return listener
        return RestoringListener(listener, self._find_names)

    def _join_listeners(self) -> ModelListener | None:
        listener = self._hooks.new_listener()
        if self._observer is None:
            return listener
        observe = self._observer.on_model_output
        if listener is None:
            return observe

        def listen(part: ModelStreamPart) -> None:
            listener(part)
            observe(part)

        return listen

    def _list_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call now. Returns the same tuple while nothing changes: models cache by it."""
        tools, run = self._prepared_agent.tools, self.tool_run
        state = (tools.revision, len(run.discovered_tools), run.session in tools.stored_sessions)
        if self._offered_tools is None or self._offered_tools[0] != state:
            new_tools = tuple(tools.tools_for_model(run, context=self._context))
            if (output := self._output) is not None:
                new_tools = tuple(
                    output.describe_report(tool) if tool.name == FINAL_REPORT else tool for tool in new_tools
                )
            if self._offered_tools is not None and self._offered_tools[1] == new_tools:
                new_tools = self._offered_tools[1]
            self._offered_tools = (state, new_tools)
        return self._offered_tools[1]

    # Executing its calls

    async def _finish_turn(self, turn: ModelTurn, calls: Sequence[PlannedCall]) -> RunOutcome | None:
        """Executes the calls of a turn. Returns the outcome if the run ends with this turn."""
        run = self.agent_run
        if not calls:
            return self._end_or_remind(turn)
        results = await self._execute_all(calls)
        model_results = tuple(to_model_result(plan.call, result) for plan, result in zip(calls, results, strict=True))
        run.add_turn(ResultsTurn(model_results))
        if self.tool_run.is_finished:
            return self._end("reported", turn.text)
        if run.handoff is not None:
            return self._end("handed_off", turn.text)
        if run.is_skipped:
            return self._end("skipped", turn.text)
        for plan, result in zip(calls, results, strict=True):
            pauses_run = result.extras.get(PAUSES_RUN_KEY) or (plan.tool is not None and plan.tool.pauses_run)
            if pauses_run and result.ok and PENDING_CALL_KEY in result.extras:
                return self._end("paused", turn.text)
        if self._output is not None and self._output.is_exhausted:
            return self._end("gave_up", turn.text, reason=self._output.failure)
        return await self._review_failures(turn, calls, model_results)

    async def _review_failures(
        self, turn: ModelTurn, calls: Sequence[PlannedCall], results: Sequence[ModelToolResult]
    ) -> RunOutcome | None:
        failed = [FailedCall(plan.call, result) for plan, result in zip(calls, results, strict=True) if result.is_error]
        if not failed:
            self._reviewer.on_success()
            return None
        review = await self._reviewer.review(failed, self.agent_run.turns)
        if review.usage is not None:
            await self.quotas.add(review.usage)
        if review.verdict == "complete":
            return self._end("gave_up", turn.text, reason=review.assessment)
        if review.verdict == "replan":
            self.agent_run.add_turn(UserTurn(f"REVIEW: {review.advice}"))
        return None

    def _end_or_remind(self, turn: ModelTurn) -> RunOutcome | None:
        """Ends the run after a turn without calls; reminds the model once if its final report is missing."""
        reminder = self.tool_run.final_report_reminder
        if reminder is not None and not self._has_reminded_of_report:
            self._has_reminded_of_report = True
            self.agent_run.add_turn(UserTurn(reminder))
            return None
        if (output := self._output) is not None and not output.check_text(turn.text):
            if output.is_exhausted:
                return self._end("gave_up", turn.text, reason=output.failure)
            self.agent_run.add_turn(UserTurn(output.advice))
            return None
        return self._end("answered", turn.text)

    async def _execute_all(self, calls: Sequence[PlannedCall]) -> list[ToolResult]:
        if len(calls) == 1:
            return [await self._execute(calls[0])]
        results: dict[int, ToolResult] = {}
        for group in _group_calls(calls):
            if len(group) == 1 and len(group[0]) == 1:
                index = group[0][0]
                results[index] = await self._execute(calls[index])
                continue
            try:
                async with asyncio.TaskGroup() as tasks:
                    for lane in group:
                        tasks.create_task(self._execute_lane(calls, lane, results))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None  # The first error has stopped the other lanes.
        return [results[index] for index in range(len(calls))]

    async def _execute_lane(
        self, calls: Sequence[PlannedCall], lane: Sequence[int], results: dict[int, ToolResult]
    ) -> None:
        for index in lane:
            results[index] = await self._execute(calls[index])

    async def _execute(self, plan: PlannedCall) -> ToolResult:
        result = self.known_results.pop(plan.call_id, None)
        if result is None:
            await self._hooks.before_call()
            if self._observer is not None:
                self._observer.on_call_started(plan)
            # The name of a tool that does not exist is stored with the failed call, so it must be storable.
            name = plan.call.name if plan.tool is not None else json_text.storable_text(plan.call.name[:_MAX_NAME])
            result = await self._prepared_agent.tools.execute(
                name,
                plan.call.arguments or "{}",  # Providers send an empty text for calls without arguments.
                context=self._context,
                run=self.tool_run,
                call_id=plan.call_id,
            )
            self._hooks.after_call(plan)
            if self._observer is not None:
                self._observer.on_call_finished(plan, result)
        if result.ok and plan.tool is not None and is_prebuilt_action(plan.tool, "skip"):
            self.agent_run.is_skipped = True
        return result

    def _end(
        self, end: EndReason, text: str | None = None, *, reason: str | None = None, notice: str | None = None
    ) -> RunOutcome:
        run = self.agent_run
        if text is None:
            text = next((turn.text for turn in reversed(run.turns) if isinstance(turn, ModelTurn)), "")
        return RunOutcome(
            end=end,
            text=text,
            report=self.tool_run.final_report,
            handoff=run.handoff,
            steps=run.steps,
            reason=reason,
            notice=notice,
        )


def _truncate(turn: ModelTurn) -> tuple[ModelTurn, int]:
    """Limits the size of a turn, because a faulty model may write megabytes. Returns the turn and the number of calls
    that were dropped."""
    calls = turn.calls
    has_long_arguments = any(len(call.arguments) > _MAX_ARGUMENTS for call in calls)
    if not has_long_arguments and len(calls) <= MAX_CALLS_PER_TURN and len(turn.text) <= _MAX_TEXT:
        return turn, 0
    remaining = tuple(
        call if len(call.arguments) <= _MAX_ARGUMENTS
        else msgspec.structs.replace(call, arguments='{"too long": ')  # Not valid JSON: every tool rejects it.
        for call in calls[:MAX_CALLS_PER_TURN]
    )  # fmt: skip
    return msgspec.structs.replace(turn, text=turn.text[:_MAX_TEXT], calls=remaining), len(calls) - len(remaining)


def _list_single_calls(calls: Sequence[ModelCall]) -> Iterator[tuple[str, Any]]:
    """The names and arguments of calls, with those inside of batches instead of the batches."""
    for call in calls:
        if call.name != BATCH:
            yield call.name, call.arguments or "{}"
            continue
        with suppress(ValueError, TypeError, KeyError):  # An invalid batch was not executed.
            for item in json_text.parse_arguments(call.arguments)["calls"]:
                yield item["tool"], item.get("parameters")


def to_model_result(call: ModelCall, result: ToolResult) -> ModelToolResult:
    """Converts the result of a call to what the model reads."""
    media: tuple[Media, ...] = ()
    if result.parts:
        media = tuple(part for part in result.parts if isinstance(part, ImagePart | AudioPart | ResourcePart))
    return ModelToolResult(call.id, call.name, result.text, not result.ok, media)


def is_prebuilt_action(tool: Tool, *actions: str) -> bool:
    """Whether a tool is one of these prebuilt actions. Configuration may give the tool another name."""
    if tool.execution_type != "prebuilt":
        return False
    return tool.name in actions or bool(tool.execution and tool.execution.get("action") in actions)


def changes_space(tool: Tool) -> bool:
    """Whether a call of the tool moves the run into a space or out of it."""
    return is_prebuilt_action(tool, *_SPACE_CHANGING_ACTIONS)


def _group_calls(calls: Sequence[PlannedCall]) -> list[list[list[int]]]:
    """Decides which calls run at the same time. Groups run one after the other, the lanes of a group at the same time,
    the calls of a lane in order.

    All prebuilt actions are one lane: two messages must appear in the order in which the model wrote them.
    """
    groups: list[list[list[int]]] = []
    lanes: list[list[int]] = []
    prebuilt_lane: list[int] = []
    for index, plan in enumerate(calls):
        tool = plan.tool
        if tool is not None and changes_space(tool):
            groups += [lanes] if lanes else []
            groups.append([[index]])
            lanes, prebuilt_lane = [], []
        elif tool is not None and tool.execution_type == "prebuilt":
            if not prebuilt_lane:
                lanes.append(prebuilt_lane)
            prebuilt_lane.append(index)
        else:
            lanes.append([index])
    return [*groups, *([lanes] if lanes else [])]
