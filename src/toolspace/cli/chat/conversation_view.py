"""Turns the events of a chat into text on its screen: messages, calls, charts and activity. Asks nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from toolspace.cli.chat.screen import ChatScreen
from toolspace.cli.output import (
    CommandOutput,
    cut,
    escape_control_characters,
    first_line,
    one_line,
    plain_text,
    text_width,
)

_HIDDEN_TOOLS: Final = frozenset(("enter_space", "leave_space", "send_message", "skip"))
"""Tools whose calls are not shown, because their effect is."""
_MAX_VALUE: Final = 100
_MAX_ERROR: Final = 500
_MAX_BARS: Final = 40
_MAX_LABEL: Final = 20
_BAR_WIDTH: Final = 30
_MAX_NUMBER: Final = 1e300
"""Larger integers cannot be divided as floats."""


class ConversationView:
    """Shows each message and each call once, even if several streams have it."""

    def __init__(
        self,
        screen: ChatScreen,
        output: CommandOutput,
        *,
        person_id: str,
        agent_id: str,
        names: Mapping[str, str],
        is_busy: Callable[[], bool],
    ) -> None:
        """`names` has the name of every entity in the space; `is_busy` returns whether the agent has work."""
        self._is_busy = is_busy
        self._screen = screen
        self._output = output
        self._person_id = person_id
        self._agent_id = agent_id
        self._names = names
        self._calls: dict[str, dict[str, Any]] = {}
        """Running call → the data of its events."""
        self._ended_calls: set[str] = set()
        self._message_id: str | None = None
        """The message that grows on the screen. Other messages are shown when they are complete."""
        self._message_text = ""

    # Messages

    def start_message(self, data: Mapping[str, Any]) -> None:
        sender = str(data.get("senderId"))
        if sender != self._person_id and self._message_id is None:
            self._message_id, self._message_text = str(data.get("messageId")), ""
            self._screen.start_message(
                self._name(sender),
                is_agent=sender == self._agent_id,
                is_provisional=data.get("provisional") is True,
            )

    def append_delta(self, data: Mapping[str, Any]) -> None:
        if data.get("messageId") != self._message_id:
            return
        delta = str(data.get("delta", ""))
        if data.get("restart") and self._message_text:
            # Text on the screen cannot be taken back.
            self._screen.append_text("… (starts again)\n")
            self._message_text = ""
        self._message_text += delta
        self._screen.append_text(delta)

    def finish_message(self, message: Mapping[str, Any]) -> None:
        sender = str(message.get("senderId"))
        has_failed = message.get("status") == "error"
        text = plain_text(message.get("content"))
        if message.get("id") == self._message_id:
            if has_failed and message.get("metadata", {}).get("withdrawn"):
                self._screen.withdraw_message()
            elif has_failed:
                self._screen.append_text("… (not finished)")
            elif text.startswith(self._message_text):
                self._screen.append_text(text[len(self._message_text) :])
            else:
                self._screen.append_text("\n" + text)
            self.abort_message()
        elif not has_failed and sender != self._person_id:
            self._screen.start_message(self._name(sender), is_agent=sender == self._agent_id)
            self._screen.append_text(text)
            self._screen.end_message()

    def abort_message(self) -> None:
        """Ends the message that grows on the screen, if there is one."""
        if self._message_id is not None:
            self._screen.end_message()
            self._message_id, self._message_text = None, ""

    def show_history(self, entries: Sequence[Any]) -> None:
        """Shows earlier messages and calls of the space."""
        for entry in entries:
            if entry.kind == "message":
                sender = "you" if entry.sender_id == self._person_id else self._name(entry.sender_id)
                text = escape_control_characters(plain_text(entry.content))
                self._screen.line(f"{sender}: {text}", dim=True)
            else:
                self._screen.line(f"  {entry.status} {first_line(str(entry.content.get('toolName')))}", dim=True)

    # Calls

    def start_call(self, data: Mapping[str, Any]) -> None:
        call_id = str(data.get("toolCallId"))
        if call_id not in self._ended_calls:
            self._calls[call_id] = {**data}
            self.show_activity()

    def update_call(self, data: Mapping[str, Any]) -> None:
        """Shows the progress of a call, or that the model is writing one."""
        call = self._calls.get(str(data.get("toolCallId")))
        if call is not None:
            call.update({key: data[key] for key in ("progress", "total", "message") if key in data})
            self.show_activity()
        elif data.get("toolName") not in _HIDDEN_TOOLS:
            self.show_working(str(data.get("toolName")))

    def finish_call(self, data: Mapping[str, Any]) -> None:
        call_id, name = str(data.get("toolCallId")), str(data.get("toolName"))
        if call_id in self._ended_calls:
            return
        call = self._calls.pop(call_id, None)
        self._ended_calls.add(call_id)
        if call is None:
            return  # It started in another space, or before this chat.
        duration = f" {data['durationMs']} ms" if data.get("durationMs") is not None else ""
        if "error" in data:
            if data.get("errorKind") != "canceled":
                text = f"  ✗ {first_line(name)}{duration}: {one_line(data['error'], _MAX_ERROR)}"
                self._screen.line(text, fg="red")
        elif name not in _HIDDEN_TOOLS:
            arguments = one_line(call["input"], _MAX_VALUE) if call.get("input") not in (None, {}) else ""
            # A person's answer is more interesting than the time that it took.
            detail = duration if data.get("source") != "client" else f" {one_line(data.get('output'), _MAX_VALUE)}"
            self._screen.line(self._fit(f"  ✓ {first_line(name)}{detail} {arguments}".rstrip()), dim=True)
            if (chart := draw_chart(name, call.get("input"))) is not None:
                self._screen.block(chart)
        self.show_activity()

    def show_activity(self) -> None:
        """Shows the running call at the bottom of a terminal."""
        calls = [call for call in self._calls.values() if call.get("toolName") not in _HIDDEN_TOOLS]
        if calls:
            call = calls[-1]
            progress = f" {call['progress']:g}" if isinstance(call.get("progress"), int | float) else ""
            total = f"/{call['total']:g}" if progress and isinstance(call.get("total"), int | float) else ""
            message = f" {call['message']}" if isinstance(call.get("message"), str) else ""
            self.show_working(f"{call.get('toolName')}{progress}{total}{message}")
        elif self._is_busy():
            self.show_working()
        else:
            self._screen.show_activity(None)  # It was a call of somebody else.

    def show_working(self, detail: str = "") -> None:
        """Shows that the agent works."""
        name = self._name(self._agent_id)
        self._screen.show_activity(f"{name}: {first_line(detail)}" if detail else f"{name} is working")

    def show_idle(self) -> None:
        """Removes the activity: the agent has nothing more to do."""
        self._calls.clear()
        self._screen.show_activity(None)

    def show_question(self, data: Mapping[str, Any]) -> None:
        """Shows the tool and the arguments of a call that a person answers."""
        self._calls.pop(str(data.get("toolCallId")), None)
        name, arguments = str(data.get("toolName")), data.get("input")
        self._screen.line(f"? {first_line(name)}", fg="yellow", bold=True)
        if isinstance(arguments, dict):
            values = cast("dict[str, Any]", arguments)
            lines = [f"    {first_line(key)}: {_indent(value)}" for key, value in values.items()]
        else:
            lines = [f"    {_indent(arguments)}"] if arguments is not None else []
        if lines:
            self._screen.block("\n".join(lines))

    # Other lines

    def show_note(self, text: str) -> None:
        self._screen.line(escape_control_characters(text), dim=True)

    def show_problem(self, text: str) -> None:
        self._screen.problem(text)

    def _fit(self, text: str) -> str:
        """Returns the text, cut to one row of the terminal."""
        columns = self._output.columns
        row = text if columns is None else cut(text, columns - 1)
        return row if row == text else f"{row[:-1]}…"

    def _name(self, entity_id: str) -> str:
        return first_line(self._names.get(entity_id, entity_id))


def draw_chart(tool: str, arguments: Any) -> str | None:
    """Returns the bar chart that a tool shows, drawn with characters; None if the call shows no chart."""
    chart: Mapping[str, Any] = cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {}
    values: Any = chart.get("values")
    if not tool.lower().endswith("chart") or not isinstance(values, list) or not values:
        return None
    numbers = cast("list[Any]", values)
    if not all(isinstance(number, int | float) and abs(number) < _MAX_NUMBER for number in numbers):
        return None
    raw_labels: Any = chart.get("labels")
    labels = [str(position) for position in range(1, len(numbers) + 1)]
    if isinstance(raw_labels, list) and len(cast("list[Any]", raw_labels)) == len(numbers):
        labels = [first_line(str(label))[:_MAX_LABEL] for label in cast("list[Any]", raw_labels)]
    label_width = max(map(text_width, labels[:_MAX_BARS]))
    largest = max(abs(number) for number in numbers) or 1
    lines = [f"    {first_line(str(chart.get('title', '')))}"]
    for label, number in list(zip(labels, numbers, strict=True))[:_MAX_BARS]:
        padding = " " * (label_width - text_width(label))
        lines.append(f"    {label}{padding} {'█' * round(abs(number) / largest * _BAR_WIDTH)} {number:g}")
    return "\n".join(lines)


def _indent(value: Any) -> str:
    return escape_control_characters(plain_text(value)).replace("\n", "\n      ")
