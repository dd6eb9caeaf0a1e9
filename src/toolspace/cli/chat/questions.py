"""What an agent asks the person in a chat: one question after the other, answered by what is typed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, cast

from toolspace.cli.chat.run_tracker import RunTracker
from toolspace.cli.chat.screen import PROMPT, ChatScreen
from toolspace.cli.chat.setup import ChatContext
from toolspace.cli.chat.view import ConversationView
from toolspace.cli.output import escape_control_characters
from toolspace.client.errors import ApiError
from toolspace.core import json_text
from toolspace.core.elicitation import ELICITATION_CALL

# MERGED from forms: A question to a person, asked line by line until there is a result. Shows and sends nothing it…

_YES: Final = frozenset(("y", "yes", "true", "1", "ok"))
_NO: Final = frozenset(("n", "no", "false", "0"))
_CONFIRMS: Final = re.compile(r"confirm|approv|permi|allow|consent|proceed", re.IGNORECASE)
"""Tools with such names ask for a yes or a no, where they do not say what they want."""
_BOOLEAN: Final[Mapping[str, Any]] = {"type": "boolean"}
_MOST_CHOICES: Final = 20


class FormResult(NamedTuple):
    """What the person said, as the tool wants it."""

    value: Any


class InvalidAnswer(NamedTuple):
    """Why a line was not taken."""

    reason: str


class FormField(NamedTuple):
    """One thing to ask for. Without a name it is the whole result."""

    name: str | None
    schema: Mapping[str, Any]
    required: bool = True

    @property
    def choices(self) -> Sequence[Any]:
        found: Any = self.schema.get("enum")
        if isinstance(found, list):
            return cast("list[Any]", found)
        options: Any = self.schema.get("oneOf")
        if isinstance(options, list):
            named = cast("list[Any]", options)
            return [one["const"] for one in named if isinstance(one, dict) and "const" in one]
        return ()

    @property
    def prompt(self) -> str:
        """What to show in front of the answer."""
        label = self.schema.get("title") or self.name or ""
        if self.type == "boolean":
            usual = self.schema.get("default")
            hint = " [Y/n]" if usual is True else " [y/N]" if usual is False else " [y/n]"
        elif "default" in self.schema:
            hint = f" [{_text(self.schema['default'])}]"
        else:
            hint = "" if self.required else " (may be empty)"
        return f"{label}{hint}> ".lstrip()

    @property
    def explanation(self) -> str:
        """What to say before it is asked for; empty where the prompt says it all."""
        said = str(self.schema.get("description") or "")
        listed = [f"  {number}) {_text(one)}" for number, one in enumerate(self.choices[:_MOST_CHOICES], 1)]
        return "\n".join([*([said] if said else []), *listed])

    @property
    def type(self) -> str | None:
        """The one type that it has, null aside."""
        named: Any = self.schema.get("type")
        kinds = [one for one in cast("list[Any]", named) if one != "null"] if isinstance(named, list) else [named]
        return kinds[0] if len(kinds) == 1 else None

    def parse(self, line: str) -> FormResult | InvalidAnswer | None:
        """The value that a line means; None where it is left out."""
        text = line.strip()
        if not text:
            if "default" in self.schema:
                return FormResult(self.schema["default"])
            return InvalidAnswer("an answer is needed here") if self.required else None
        if self.choices:
            return self._choose(text)
        if self.type == "boolean":
            word = text.lower()
            return FormResult(word in _YES) if word in _YES | _NO else InvalidAnswer("y or n")
        if self.type in ("integer", "number"):
            return self._number(text)
        if self.type == "string":
            return FormResult(line)
        return self._json(text, line)

    def _choose(self, text: str) -> FormResult | InvalidAnswer:
        choices = self.choices
        for one in choices:
            if _text(one).lower() == text.lower():
                return FormResult(one)
        if text.isdecimal() and len(text) < 6 and 1 <= int(text) <= len(choices):
            return FormResult(choices[int(text) - 1])
        return InvalidAnswer(f"one of {', '.join(map(_text, choices[:_MOST_CHOICES]))}, or its number")

    def _number(self, text: str) -> FormResult | InvalidAnswer:
        try:
            value = json_text.decode(text)
        except ValueError:
            value = None
        whole = self.type == "integer"
        fits = isinstance(value, int) if whole else isinstance(value, int | float)
        return (
            FormResult(value)
            if fits and not isinstance(value, bool)
            else InvalidAnswer("a whole number" if whole else "a number")
        )

    def _json(self, text: str, line: str) -> FormResult | InvalidAnswer:
        try:
            return FormResult(json_text.decode(text))
        except ValueError:
            kind = {"array": "[…]", "object": "{…}"}.get(self.type or "")
            return FormResult(line) if kind is None else InvalidAnswer(f"JSON: {kind}")


class QuestionForm:
    """A question: its fields one after the other, then the result of all."""

    def __init__(self, fields: Sequence[FormField], *, wraps: bool = False) -> None:
        """`wraps`: the result is an answer to a question of an MCP server."""
        self._fields = [*fields]
        self._at = 0
        self._given: dict[str, Any] = {}
        self._wraps = wraps

    @property
    def field(self) -> FormField:
        return self._fields[self._at]

    def answer(self, line: str) -> FormResult | InvalidAnswer | None:
        """The result, once the last field is answered; None where there is another one to ask for."""
        said = self.field.parse(line)
        if isinstance(said, InvalidAnswer):
            return said
        name = self.field.name
        if name is None:
            return self._whole(said.value if said is not None else None)
        if said is not None:
            self._given[name] = said.value
        self._at += 1
        return self._whole(self._given) if self._at == len(self._fields) else None

    def _whole(self, value: Any) -> FormResult:
        if not self._wraps:
            return FormResult(value)
        if isinstance(value, bool):
            return FormResult({"action": "accept" if value else "decline"})
        return FormResult({"action": "accept", "content": value})

    @property
    def refusal(self) -> FormResult | None:
        """What it means to answer nothing, where that can be said."""
        return FormResult({"action": "decline"}) if self._wraps else None


def build_form(tool: str, asked: Any, output_schema: Mapping[str, Any] | None) -> QuestionForm:
    """How a person answers a tool: as its output schema says, else as its name suggests."""
    given: Mapping[str, Any] = cast("dict[str, Any]", asked) if isinstance(asked, dict) else {}
    if tool == ELICITATION_CALL:
        schema: Any = given.get("requestedSchema")
        return QuestionForm(_fields(schema) or [FormField(None, _BOOLEAN)], wraps=True)
    if output_schema:
        return QuestionForm(_fields(output_schema) or [FormField(None, output_schema)])
    if _CONFIRMS.search(tool):
        return QuestionForm([FormField("confirmed", {**_BOOLEAN, "title": " "})])
    return QuestionForm([FormField(None, {})])


def _fields(schema: Any) -> list[FormField]:
    """The members of an object that are asked for; none where it is no object with known members."""
    members: Any = cast("dict[str, Any]", schema).get("properties") if isinstance(schema, dict) else None
    if not isinstance(members, dict):
        return []
    named: Any = cast("dict[str, Any]", schema).get("required")
    required = cast("list[Any]", named) if isinstance(named, list) else []
    return [
        FormField(name, cast("dict[str, Any]", one) if isinstance(one, dict) else {}, name in required)
        for name, one in cast("dict[str, Any]", members).items()
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json_text.encode(value)


class _Question:
    """A call that waits for a person. It can be answered once its form is known."""

    __slots__ = ("data", "form")

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.form: QuestionForm | None = None


class OpenQuestions:
    """Those that are open, the oldest first."""

    def __init__(self, room: ChatContext, screen: ChatScreen, view: ConversationView, work: RunTracker) -> None:
        self._room = room
        self._client = room.client
        self._screen = screen
        self._view = view
        self._work = work
        self._open: dict[str, _Question] = {}
        self._seen: set[str] = set()
        """All that were asked: two streams tell of each."""
        self._preparing: set[asyncio.Future[None]] = set()
        self.form: QuestionForm | None = None
        """What the next line answers; None: nothing is asked."""

    async def load_open(self) -> None:
        """Asks what was left open before."""
        waiting = await self._client.calls.list(status=["waiting", "pending"], space_id=self._room.space.id)
        for call in reversed(waiting.items):
            if call.execution_target == "client" and call.visible and call.run_id is not None:
                data = {
                    "toolCallId": call.call_id,
                    "toolName": call.tool_name,
                    "input": call.args,
                    "runId": call.run_id,
                }
                self.add(data)

    def add(self, data: Mapping[str, Any]) -> None:
        """Someone is asked something."""
        call_id = str(data.get("toolCallId"))
        if call_id not in self._seen:
            self._seen.add(call_id)
            self._open[call_id] = _Question(data)
            task = asyncio.ensure_future(self._prepare(call_id))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

    def has_received(self, call_ids: Iterable[str | None]) -> bool:
        """Whether it was told of all of these."""
        return all(call_id in self._seen for call_id in call_ids if call_id is not None)

    async def wait_until_ready(self) -> None:
        """Waits until what is open can be answered."""
        await asyncio.gather(*self._preparing)

    def remove(self, call_id: str) -> None:
        """A call has its result, from whomever, or will never get one."""
        if self._open.pop(call_id, None) is not None:
            self._show()

    async def aclose(self) -> None:
        for task in self._preparing:
            task.cancel()
        await asyncio.gather(*self._preparing, return_exceptions=True)

    async def answer(self, line: str) -> None:
        """Takes a line for the question that is being asked."""
        form, word = self.form, line.strip()
        found = next(((key, one) for key, one in self._open.items() if one.form is form), None)
        if form is None or found is None:
            return
        call_id, question = found
        if word == "/later":
            del self._open[call_id]
            self._view.note("left open")
        else:
            said = form.refusal if word == "/decline" and form.refusal is not None else form.answer(line)
            if isinstance(said, InvalidAnswer):
                self._view.wrong(said.reason)
                return
            if said is None:
                self.form = None  # So that its next field is shown.
            else:
                del self._open[call_id]
                await self._submit(call_id, str(question.data.get("runId")), said.value)
        self._show()

    async def _prepare(self, call_id: str) -> None:
        question = self._open[call_id]
        name = str(question.data.get("toolName"))
        schema: Mapping[str, Any] | None = None
        with suppress(ApiError):  # The tool may be the agent's own, which the list does not have.
            schema = (await self._client.tools.get(name)).output_schema
        if call_id in self._open:
            question.form = build_form(name, question.data.get("input"), schema)
            self._view.asked(question.data)
            self._show()

    def _show(self) -> None:
        """Makes the oldest question that is ready the one that is asked."""
        form = next((one.form for one in self._open.values() if one.form is not None), None)
        if form is not self.form or form is None:
            self.form = form
            self._screen.prompt = PROMPT if form is None else form.field.prompt
            if form is not None and form.field.explanation:
                self._screen.block(escape_control_characters(form.field.explanation))
        self._work.wake()

    async def _submit(self, call_id: str, run_id: str, value: Any) -> None:
        try:
            call = await self._client.tools.submit_result(self._room.space.id, run_id, call_id, value)
        except ApiError as error:  # Someone else has answered, or nobody can any more.
            self._view.wrong(error.detail or str(error))
        else:
            self._view.working()
            self._work.expect_event(f"tool_result:{call_id}", call.resolved_at or 0)
