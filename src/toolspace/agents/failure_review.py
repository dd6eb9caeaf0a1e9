"""Decides what an agent does after a call failed: continue, make a new plan, or stop with what it has.

The loop asks a reviewer after each step with a failed call. Executes no calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import msgspec

from toolspace.agents.history import turn_lines
from toolspace.core import json_text
from toolspace.core.json_text import quote_name, single_line
from toolspace.core.language_model import (
    DEFAULT_SETTINGS,
    Model,
    ModelCall,
    ModelRequest,
    ModelSettings,
    ModelToolResult,
    Turn,
    Usage,
    UserTurn,
)
from toolspace.errors import ModelError

Verdict = Literal["continue", "replan", "complete"]
_MAX_TURNS, _MAX_LINE = 30, 2_000
"""The part of a conversation that a reviewing model gets: turns, and characters of each line."""


class Review(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about a step with failed calls."""

    verdict: Verdict
    assessment: str = ""
    lessons: tuple[str, ...] = ()
    next_focus: str | None = None
    usage: Usage | None = None

    @property
    def advice(self) -> str:
        """What the model is told if it is to make a new plan."""
        parts = [self.assessment, *(f"- {lesson}" for lesson in self.lessons)]
        if self.next_focus:
            parts.append(f"Next: {self.next_focus}")
        return "\n".join(filter(None, parts))


class FailedCall(msgspec.Struct, frozen=True):
    """A failed call and its result."""

    call: ModelCall
    result: ModelToolResult


CONTINUE = Review(verdict="continue")


class RuleReviewer:
    """Lets the model continue after a failure; if calls keep failing, asks it for a new plan; in the end gives up.

    Needs no model request: models handle failures well, as long as they do not repeat the same call.
    """

    def __init__(self, *, replan_after: int = 3, give_up_after: int = 3) -> None:
        self._replan_after = replan_after
        self._give_up_after = give_up_after
        self._failed_steps = 0
        self._replans = 0
        self._failure_counts: dict[tuple[str, str], int] = {}

    async def review(self, failed: Sequence[FailedCall], turns: Sequence[Turn]) -> Review:
        self._failed_steps += 1
        repeated_names: list[str] = []
        for failure in failed:
            key = (failure.call.name, failure.call.arguments)
            self._failure_counts[key] = self._failure_counts.get(key, 0) + 1
            if self._failure_counts[key] >= self._replan_after:
                repeated_names.append(failure.call.name)
        if not repeated_names and self._failed_steps < self._replan_after:
            return CONTINUE
        if self._replans >= self._give_up_after:
            return Review(verdict="complete", assessment=f"tools kept failing: {_describe(failed)}")
        self._replans += 1
        self._failed_steps = 0
        self._failure_counts.clear()
        names = ", ".join(map(quote_name, dict.fromkeys(repeated_names)))
        problem = f"The same call of {names} keeps failing" if repeated_names else "Calls keep failing"
        return Review(
            verdict="replan",
            assessment=f"{problem}: {_describe(failed)}",
            lessons=("Do not repeat a call that failed as it was.",),
            next_focus="another tool, other arguments, or an answer from what you have; say what could not be done",
        )

    def on_success(self) -> None:
        self._failed_steps = 0


_QUESTION = """\
A step of an agent's work failed. Judge it, and answer with one JSON object and nothing else:
{"verdict": "continue" | "replan" | "complete", "assessment": "...", "lessons": ["..."], "nextFocus": "..."}
"continue": the failure does not matter, or the agent will handle it by itself. "replan": it should revise its plan,
perhaps with another tool. "complete": what has been done is as good as it gets; it should stop.
"""


class ModelReviewer(RuleReviewer):
    """Asks a model. If the request fails or the answer is malformed, the rules decide."""

    def __init__(self, model: Model, settings: ModelSettings = DEFAULT_SETTINGS) -> None:
        super().__init__()
        self._model = model
        self._settings = settings

    async def review(self, failed: Sequence[FailedCall], turns: Sequence[Turn]) -> Review:
        by_rule = await super().review(failed, turns)
        if by_rule.verdict == "complete":
            return by_rule  # A model that always says "continue" must not keep a run alive.
        calls = "\n".join(
            f"{failure.call.name} {failure.call.arguments[:2_000]} → {failure.result.text[:2_000]}"
            for failure in failed
        )
        # As text: not every provider accepts calls in a request without tools.
        history = "\n".join(line[:_MAX_LINE] for turn in turns[-_MAX_TURNS:] for line in turn_lines(turn))
        prompt = f"WHAT HAPPENED:\n{history}\n\nThese calls failed:\n{calls}\nYour judgement, as JSON:"
        request = ModelRequest(system=_QUESTION, turns=[UserTurn(prompt)], settings=self._settings)
        try:
            turn = await self._model.respond(request)
        except ModelError:
            return by_rule
        try:
            review = _parse(turn.text)
        except ValueError:
            review = by_rule
        return msgspec.structs.replace(review, usage=turn.usage)


def _parse(text: str) -> Review:
    start, end = text.find("{"), text.rfind("}")
    value = json_text.decode(text[start : end + 1])
    if not isinstance(value, dict):
        raise ValueError("the answer is not an object")
    members = cast("dict[str, object]", value)
    verdict = members.get("verdict")
    if verdict not in ("continue", "replan", "complete"):
        raise ValueError(f"no verdict: {verdict!r}")
    lessons = members.get("lessons")
    focus = members.get("nextFocus")
    return Review(
        verdict=verdict,
        assessment=str(members.get("assessment") or ""),
        lessons=tuple(map(str, cast("list[object]", lessons))) if isinstance(lessons, list) else (),
        next_focus=str(focus) if focus else None,
    )


def _describe(failed: Sequence[FailedCall]) -> str:
    return "; ".join(f"{quote_name(failure.call.name)}: {single_line(failure.result.text, 300)}" for failure in failed)
