"""What to do after tools failed: go on, think again, or be content with what there is. Calls no tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.line_escaping import quote_name, single_line
from toolspace.core.model import (
    DEFAULT_SETTINGS,
    Model,
    ModelCall,
    ModelRequest,
    ModelSettings,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
    Turn,
    Usage,
    UserTurn,
)
from toolspace.errors import ModelError

Verdict = Literal["continue", "replan", "complete"]
_MOST_TURNS, _LONGEST_LINE = 30, 2_000
"""Of a conversation that a model is given to judge."""


class Review(msgspec.Struct, frozen=True, kw_only=True):
    """What a reviewer thinks of a step that failed."""

    verdict: Verdict
    assessment: str = ""
    lessons: tuple[str, ...] = ()
    next_focus: str | None = None
    usage: Usage | None = None

    @property
    def advice(self) -> str:
        """What the model is told where it is to plan anew."""
        parts = [self.assessment, *(f"- {lesson}" for lesson in self.lessons)]
        if self.next_focus:
            parts.append(f"Next: {self.next_focus}")
        return "\n".join(filter(None, parts))


class FailedCall(msgspec.Struct, frozen=True):
    """A call that failed, and how."""

    call: ModelCall
    answer: ModelToolResult


class Reviewer(Protocol):
    """Decides after each step in which a tool failed; told of steps in which none did."""

    async def review(self, failed: Sequence[FailedCall], turns: Sequence[Turn]) -> Review: ...

    def on_success(self) -> None: ...


CONTINUE = Review(verdict="continue")


class RuleReviewer:
    """Lets the model see a failure and go on; where the same fails again, has it plan anew; at last gives up.

    Costs no request: a model reads failures well enough, as long as it does not run in circles.
    """

    def __init__(self, *, replan_after: int = 3, give_up_after: int = 3) -> None:
        self._replan_after = replan_after
        self._give_up_after = give_up_after
        self._in_a_row = 0
        self._replans = 0
        self._seen: dict[tuple[str, str], int] = {}

    async def review(self, failed: Sequence[FailedCall], turns: Sequence[Turn]) -> Review:
        self._in_a_row += 1
        repeated: list[str] = []
        for one in failed:
            key = (one.call.name, one.call.arguments)
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] >= self._replan_after:
                repeated.append(one.call.name)
        if not repeated and self._in_a_row < self._replan_after:
            return CONTINUE
        if self._replans >= self._give_up_after:
            return Review(verdict="complete", assessment=f"tools kept failing: {_reasons(failed)}")
        self._replans += 1
        self._in_a_row = 0
        self._seen.clear()
        which = ", ".join(map(quote_name, dict.fromkeys(repeated)))
        what = f"The same call of {which} keeps failing" if repeated else "Calls keep failing"
        return Review(
            verdict="replan",
            assessment=f"{what}: {_reasons(failed)}",
            lessons=("Do not repeat a call that failed as it was.",),
            next_focus="another tool, other arguments, or an answer from what you have; say what could not be done",
        )

    def on_success(self) -> None:
        self._in_a_row = 0


_QUESTION = """\
A step of an agent's work failed. Judge it, and answer with one JSON object and nothing else:
{"verdict": "continue" | "replan" | "complete", "assessment": "...", "lessons": ["..."], "nextFocus": "..."}
"continue": the failure does not matter, or the agent will see to it by itself. "replan": it should revise its plan,
perhaps with another tool. "complete": what has been done is as good as it gets; it should stop.
"""


class ModelReviewer:
    """Asks a model. Where that cannot be asked, or does not answer in the form, the rules decide."""

    def __init__(self, model: Model, settings: ModelSettings = DEFAULT_SETTINGS) -> None:
        self._model = model
        self._settings = settings
        self._rules = RuleReviewer()

    async def review(self, failed: Sequence[FailedCall], turns: Sequence[Turn]) -> Review:
        by_rule = await self._rules.review(failed, turns)
        if by_rule.verdict == "complete":
            return by_rule  # However often a model says to go on: there is an end.
        calls = "\n".join(f"{one.call.name} {one.call.arguments[:2_000]} → {one.answer.text[:2_000]}" for one in failed)
        told = f"WHAT HAPPENED:\n{_told(turns)}\n\nThese calls failed:\n{calls}\nYour judgement, as JSON:"
        request = ModelRequest(system=_QUESTION, turns=[UserTurn(told)], settings=self._settings)
        try:
            turn = await self._model.respond(request)
        except ModelError:
            return by_rule
        try:
            said = _parse(turn.text)
        except ValueError:
            said = by_rule
        return msgspec.structs.replace(said, usage=turn.usage)

    def on_success(self) -> None:
        self._rules.on_success()


def _told(turns: Sequence[Turn]) -> str:
    """The end of a conversation as text: not every provider takes calls in a request that offers no tools."""
    lines: list[str] = []
    for turn in turns[-_MOST_TURNS:]:
        if isinstance(turn, ModelTurn):
            lines += [turn.text, *(f"→ {one.name} {one.arguments}" for one in turn.calls)]
        elif isinstance(turn, ResultsTurn):
            lines += [f"← {one.name}: {one.text}" for one in turn.results]
        else:
            lines.append(turn.text)
    return "\n".join(line[:_LONGEST_LINE] for line in lines if line)


def _parse(text: str) -> Review:
    start, end = text.find("{"), text.rfind("}")
    said = json_text.decode(text[start : end + 1])
    if not isinstance(said, dict):
        raise ValueError("not an object")
    members = cast("dict[str, object]", said)
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


def _reasons(failed: Sequence[FailedCall]) -> str:
    return "; ".join(f"{quote_name(one.call.name)}: {single_line(one.answer.text, 300)}" for one in failed)
