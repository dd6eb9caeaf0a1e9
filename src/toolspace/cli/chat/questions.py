"""Asks the person what pending calls need: one question after the other, each as a form of one or more fields.

`OpenQuestions` has the pending calls of the space and submits their results. `QuestionForm` turns lines of text into a
result; it shows and sends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec

from toolspace.cli.chat.conversation_view import ConversationView
from toolspace.cli.chat.run_tracker import ChatContext, RunTracker
from toolspace.cli.chat.screen import PROMPT, ChatScreen
from toolspace.cli.output import escape_control_characters, plain_text
from toolspace.client.errors import ApiError, Unprocessable
from toolspace.core import json_text
from toolspace.core.approvals import OPERATORS
from toolspace.core.tool_context import ELICITATION_CALL

_YES: Final = frozenset(("y", "yes", "true", "1", "ok"))
_NO: Final = frozenset(("n", "no", "false", "0"))
_CONFIRMATION_NAME: Final = re.compile(r"confirm|approv|permi|allow|consent|proceed", re.IGNORECASE)
"""Tools with such names and without an output schema ask for a yes or a no."""
_BOOLEAN: Final[Mapping[str, Any]] = {"type": "boolean"}
_MAX_CHOICES: Final = 20


# Pending calls


class _Question:
    """A pending call and the form that answers it."""

    __slots__ = ("data", "form", "is_approval")

    def __init__(self, data: Mapping[str, Any], *, is_approval: bool = False) -> None:
        self.data = data
        self.is_approval = is_approval
        """Whether the answer decides whether the call runs."""
        self.form = self.build_form()

    def build_form(self) -> QuestionForm:
        if self.is_approval:
            return QuestionForm([FormField("confirmed", {**_BOOLEAN, "title": "approve"})])
        return build_form(str(self.data.get("toolName")), self.data.get("input"), self.data.get("outputSchema"))


class OpenQuestions:
    """The pending calls of the space that wait for a person, the oldest first."""

    def __init__(self, context: ChatContext, screen: ChatScreen, view: ConversationView, runs: RunTracker) -> None:
        self._context = context
        self._client = context.client
        self._screen = screen
        self._view = view
        self._runs = runs
        self._open: dict[str, _Question] = {}
        self._call_ids: set[str] = set()
        """All calls that were added: two streams have an event for each."""
        self.form: QuestionForm | None = None
        """The form that the next line answers; None without a question."""

    async def load_open(self) -> None:
        """Adds the calls that were pending before the chat started."""
        for approval in reversed((await self._client.approvals.list()).items):
            if approval.agent_entity_id == self._context.agent.id:
                data = msgspec.to_builtins(approval)
                self.add_approval({**data, "toolCallId": approval.id, "input": approval.args})
        page = await self._client.calls.list(status=["waiting", "pending"], space_id=self._context.space.id)
        for call in reversed(page.items):
            if call.execution_target == "client" and call.visible and call.run_id is not None:
                self.add(
                    {
                        "toolCallId": call.call_id,
                        "toolName": call.tool_name,
                        "input": call.args,
                        "runId": call.run_id,
                        "outputSchema": call.output_schema,
                    }
                )

    def add(self, data: Mapping[str, Any]) -> None:
        """Adds a pending call from the data of its event."""
        call_id = str(data.get("toolCallId"))
        if call_id not in self._call_ids:
            self._call_ids.add(call_id)
            self._open[call_id] = _Question(data)
            self._view.show_question(data)
            self._show_oldest()

    def add_approval(self, data: Mapping[str, Any]) -> None:
        """Adds a call that needs approval, from the data of its event, if the operator at this terminal may decide."""
        approvers: Any = data.get("approvers")
        key = _approval_key(data.get("toolCallId"))
        if key not in self._call_ids and OPERATORS in (approvers or ()):
            self._call_ids.add(key)
            self._open[key] = _Question(data, is_approval=True)
            self._view.show_question(data)
            if reason := data.get("reason"):
                self._view.show_note(f"  it needs approval: {reason}")
            self._show_oldest()

    def remove_approval(self, call_id: str) -> None:
        """Removes the question about a call that was decided, whoever decided it."""
        self.remove(_approval_key(call_id))

    def has_received(self, call_ids: Iterable[str | None]) -> bool:
        """Whether all of these calls were added."""
        received_ids = self._call_ids
        return all(
            call_id in received_ids or _approval_key(call_id) in received_ids
            for call_id in call_ids
            if call_id is not None
        )

    def has_of(self, run_id: str) -> bool:
        """Whether a question of this run is open."""
        return any(question.data.get("runId") == run_id for question in self._open.values())

    def remove(self, call_id: str) -> None:
        """Removes a call that has ended, whoever answered it."""
        if self._open.pop(call_id, None) is not None:
            self._show_oldest()

    async def answer(self, line: str) -> bool:
        """Answers the current question with a line. Returns False if the line is not an answer, but a message."""
        form, word = self.form, line.strip()
        match = next(((key, question) for key, question in self._open.items() if question.form is form), None)
        if form is None or match is None:
            return False
        call_id, question = match
        if word == "/later":
            del self._open[call_id]
            self._view.show_note("left open")
        else:
            result = form.refusal if word == "/decline" and form.refusal is not None else form.answer(line)
            if isinstance(result, InvalidAnswer):
                if _is_talk(word):
                    return False
                self._view.show_problem(f"{result.reason}; /say TEXT sends a message")
                return True
            if result is None:
                self.form = None  # So that the next field is shown.
            else:
                try:
                    await self._submit(question, result.value)
                    self._open.pop(call_id, None)  # Its event may have removed it already.
                except Unprocessable as error:
                    self._view.show_problem(error.detail or str(error))
                    question.form = question.build_form()  # Asks again.
        self._show_oldest()
        return True

    def _show_oldest(self) -> None:
        """Makes the oldest question the current one."""
        form = next((question.form for question in self._open.values()), None)
        if form is not self.form or form is None:
            self.form = form
            self._screen.set_prompt(PROMPT if form is None else form.field.prompt)
            if form is not None and form.field.explanation:
                self._screen.block(escape_control_characters(form.field.explanation))
        self._runs.wake()

    async def _submit(self, question: _Question, value: Any) -> None:
        """Submits an answer. Raises `Unprocessable` if it does not match the output schema of the tool."""
        call_id, run_id = str(question.data.get("toolCallId")), str(question.data.get("runId"))
        try:
            if question.is_approval:
                is_approved = cast("Mapping[str, Any]", value)["confirmed"]
                approval = await self._client.approvals.decide(call_id, "approve" if is_approved else "deny")
                answered_at = approval.decided_at
            else:
                call = await self._client.tools.submit_result(self._context.space.id, run_id, call_id, value)
                answered_at = call.resolved_at
        except Unprocessable:
            raise
        except ApiError as error:  # Somebody else has answered, or the call has expired.
            self._view.show_problem(error.detail or str(error))
        else:
            self._view.show_working()
            self._runs.expect_event(f"tool_result:{call_id}", answered_at or 0)


def _approval_key(call_id: object) -> str:
    """The key of the question whether a call may run. The call itself may be another question later."""
    return f"approval:{call_id}"


def _is_talk(text: str) -> bool:
    """Whether a line that is not a valid answer is meant as a message: it is a sentence or a question."""
    return " " in text or text.endswith("?")


# Forms


class FormResult(NamedTuple):
    """The answer of the person, in the form that the tool expects."""

    value: Any


class InvalidAnswer(NamedTuple):
    """Why a line is not a valid answer."""

    reason: str


class FormField(NamedTuple):
    """One value that the person enters. Without a name it is the whole result."""

    name: str | None
    schema: Mapping[str, Any]
    required: bool = True

    @property
    def choices(self) -> Sequence[Any]:
        values: Any = self.schema.get("enum")
        if isinstance(values, list):
            return cast("list[Any]", values)
        options: Any = self.schema.get("oneOf")
        if isinstance(options, list):
            schemas = cast("list[Any]", options)
            return [schema["const"] for schema in schemas if isinstance(schema, dict) and "const" in schema]
        return ()

    @property
    def prompt(self) -> str:
        """The text in front of the answer."""
        label = self.schema.get("title") or self.name or ""
        if self.type == "boolean":
            default = self.schema.get("default")
            hint = " [Y/n]" if default is True else " [y/N]" if default is False else " [y/n]"
        elif "default" in self.schema:
            hint = f" [{plain_text(self.schema['default'])}]"
        else:
            hint = "" if self.required else " (may be empty)"
        return f"{label}{hint}> ".lstrip()

    @property
    def explanation(self) -> str:
        """The description and the choices; empty if there are none."""
        description = str(self.schema.get("description") or "")
        choices = [f"  {number}) {plain_text(choice)}" for number, choice in enumerate(self.choices[:_MAX_CHOICES], 1)]
        return "\n".join([*([description] if description else []), *choices])

    @property
    def type(self) -> str | None:
        """The type of the schema, without null; None if it has several types or none."""
        names: Any = self.schema.get("type")
        types = [name for name in cast("list[Any]", names) if name != "null"] if isinstance(names, list) else [names]
        return types[0] if len(types) == 1 else None

    def parse(self, line: str) -> FormResult | InvalidAnswer | None:
        """Returns the value of a line; None if an optional field is left empty."""
        text = line.strip()
        if not text:
            if "default" in self.schema:
                return FormResult(self.schema["default"])
            return InvalidAnswer("an answer is required") if self.required else None
        if self.choices:
            return self._parse_choice(text)
        if self.type == "boolean":
            word = text.lower()
            return FormResult(word in _YES) if word in _YES | _NO else InvalidAnswer("y or n")
        if self.type in ("integer", "number"):
            return self._parse_number(text)
        if self.type == "string":
            return FormResult(line)
        return self._parse_json(text, line)

    def _parse_choice(self, text: str) -> FormResult | InvalidAnswer:
        choices = self.choices
        for choice in choices:
            if plain_text(choice).lower() == text.lower():
                return FormResult(choice)
        if text.isdecimal() and len(text) < 6 and 1 <= int(text) <= len(choices):
            return FormResult(choices[int(text) - 1])
        return InvalidAnswer(f"one of {', '.join(map(plain_text, choices[:_MAX_CHOICES]))}, or its number")

    def _parse_number(self, text: str) -> FormResult | InvalidAnswer:
        try:
            value = json_text.decode(text)
        except ValueError:
            value = None
        is_integer = self.type == "integer"
        fits = isinstance(value, int) if is_integer else isinstance(value, int | float)
        if fits and not isinstance(value, bool):
            return FormResult(value)
        return InvalidAnswer("a whole number" if is_integer else "a number")

    def _parse_json(self, text: str, line: str) -> FormResult | InvalidAnswer:
        try:
            return FormResult(json_text.decode(text))
        except ValueError:
            example = {"array": "[…]", "object": "{…}"}.get(self.type or "")
            return FormResult(line) if example is None else InvalidAnswer(f"JSON: {example}")


class QuestionForm:
    """The fields of a question, answered one after the other."""

    def __init__(self, fields: Sequence[FormField], *, is_elicitation: bool = False) -> None:
        """`is_elicitation`: the result answers a question of an MCP server, and is wrapped as MCP requires."""
        self._fields = [*fields]
        self._index = 0
        self._values: dict[str, Any] = {}
        self._is_elicitation = is_elicitation

    @property
    def field(self) -> FormField:
        """The field to answer next."""
        return self._fields[self._index]

    def answer(self, line: str) -> FormResult | InvalidAnswer | None:
        """Returns the result after the last field; None if there is another field."""
        value = self.field.parse(line)
        if isinstance(value, InvalidAnswer):
            return value
        name = self.field.name
        if name is None:
            return self._wrap(value.value if value is not None else None)
        if value is not None:
            self._values[name] = value.value
        self._index += 1
        return self._wrap(self._values) if self._index == len(self._fields) else None

    def _wrap(self, value: Any) -> FormResult:
        if not self._is_elicitation:
            return FormResult(value)
        if isinstance(value, bool):
            return FormResult({"action": "accept" if value else "decline"})
        return FormResult({"action": "accept", "content": value})

    @property
    def refusal(self) -> FormResult | None:
        """The result that declines the question; None if the tool has no such result."""
        return FormResult({"action": "decline"}) if self._is_elicitation else None


def build_form(tool: str, arguments: Any, output_schema: Mapping[str, Any] | None) -> QuestionForm:
    """Returns the form for a call: from the output schema of the tool, else from its name."""
    values: Mapping[str, Any] = cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {}
    if tool == ELICITATION_CALL:
        schema: Any = values.get("requestedSchema")
        return QuestionForm(_fields(schema) or [FormField(None, _BOOLEAN)], is_elicitation=True)
    if output_schema:
        return QuestionForm(_fields(output_schema) or [FormField(None, output_schema)])
    if _CONFIRMATION_NAME.search(tool):
        return QuestionForm([FormField("confirmed", {**_BOOLEAN, "title": " "})])
    return QuestionForm([FormField(None, {})])


def _fields(schema: Any) -> list[FormField]:
    """Returns a field for each property of an object schema; none if it has no properties."""
    properties: Any = cast("dict[str, Any]", schema).get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return []
    names: Any = cast("dict[str, Any]", schema).get("required")
    required_names = cast("list[Any]", names) if isinstance(names, list) else []
    return [
        FormField(name, cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}, name in required_names)
        for name, inner in cast("dict[str, Any]", properties).items()
    ]
