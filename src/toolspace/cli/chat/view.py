"""Turns what happens in a space into what a person reads: words as they are said, tools as they go. Asks nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from toolspace.cli.chat.line_editor import width
from toolspace.cli.chat.screen import ChatScreen, fitted
from toolspace.cli.output import CommandOutput, escape_control_characters, first_line
from toolspace.core import json_text

_QUIET: Final = frozenset(("enter_space", "leave_space", "send_message", "skip"))
"""Tools whose effect is seen anyway."""
_TEXT: Final = 100
_REASON: Final = 500
_MOST_BARS: Final = 40
_BAR: Final = 30
_LARGEST: Final = 1e300
"""Beyond it, whole numbers are none that a bar can be computed of."""


class ConversationView:
    """Shows messages and calls, each once, however often it is told of them."""

    def __init__(
        self,
        screen: ChatScreen,
        output: CommandOutput,
        *,
        me: str,
        agent: str,
        names: Mapping[str, str],
        is_busy: Callable[[], bool],
    ) -> None:
        """`me` and `agent` are ids; `names` has what people call everyone in the space; `is_busy` whether the agent has
        something to do."""
        self._is_busy = is_busy
        self._screen = screen
        self._output = output
        self._me = me
        self._agent = agent
        self._names = names
        self._calls: dict[str, dict[str, Any]] = {}
        """What each call that runs was asked."""
        self._over: set[str] = set()
        self._saying: str | None = None
        """The message that grows on the screen. Others are shown when they are done."""
        self._said = ""

    # Messages

    def message_started(self, data: Mapping[str, Any]) -> None:
        if data.get("senderId") != self._me and self._saying is None:
            self._begin(str(data.get("messageId")), str(data.get("senderId")))

    def message_grew(self, data: Mapping[str, Any]) -> None:
        if data.get("messageId") != self._saying:
            return
        delta = str(data.get("delta", ""))
        if data.get("restart") and self._said:
            # What is on the screen cannot be taken back.
            self._say("… (begins again)\n")
            self._said = ""
        self._said += delta
        self._say(delta)

    def message_done(self, message: Mapping[str, Any]) -> None:
        sender = str(message.get("senderId"))
        failed = message.get("status") == "error"
        content = message.get("content")
        text = content if isinstance(content, str) else json_text.encode(content)
        if message.get("id") == self._saying:
            if failed:
                self._say("… (not finished)")
            elif text.startswith(self._said):
                self._say(text[len(self._said) :])
            else:
                self._say("\n" + text)
            self._screen.end_message()
            self._saying, self._said = None, ""
        elif not failed and sender != self._me:
            self._screen.start_message(self._name(sender), known=sender == self._agent)
            self._say(text)
            self._screen.end_message()

    def break_off(self) -> None:
        """Nobody goes on with what was being said."""
        if self._saying is not None:
            self._screen.end_message()
            self._saying, self._said = None, ""

    def recall(self, messages: Sequence[Any]) -> None:
        """Messages of the past."""
        for message in messages:
            if message.kind == "message":
                said = message.content if isinstance(message.content, str) else json_text.encode(message.content)
                who = "you" if message.sender_id == self._me else self._name(message.sender_id)
                self._line(f"{who}: {escape_control_characters(said)}", dim=True)
            else:
                self._line(f"  {message.status} {first_line(str(message.content.get('toolName')))}", dim=True)

    # Calls

    def call_started(self, data: Mapping[str, Any]) -> None:
        call_id = str(data.get("toolCallId"))
        if call_id not in self._over:
            self._calls[call_id] = {**data}
            self.show_work()

    def call_moved(self, data: Mapping[str, Any]) -> None:
        """A call is being written, or says how far it is."""
        call = self._calls.get(str(data.get("toolCallId")))
        if call is not None:
            call.update({key: data[key] for key in ("progress", "total", "message") if key in data})
            self.show_work()
        elif data.get("toolName") not in _QUIET:
            self.working(str(data.get("toolName")))

    def call_ended(self, data: Mapping[str, Any]) -> None:
        call_id, name = str(data.get("toolCallId")), str(data.get("toolName"))
        if call_id in self._over:
            return
        begun = self._calls.pop(call_id, None)
        self._over.add(call_id)
        if begun is None:
            return  # It began elsewhere, or before all this.
        took = f" {data['durationMs']} ms" if data.get("durationMs") is not None else ""
        if "error" in data:
            if data.get("errorKind") != "canceled":
                self._line(f"  ✗ {first_line(name)}{took}: {_short(data['error'], _REASON)}", fg="red")
        elif name not in _QUIET:
            # A tool has the time it took; a person who was asked has not.
            asked = _short(begun["input"]) if begun.get("input") not in (None, {}) else ""
            took = took if data.get("source") != "client" else f" {_short(data.get('output'))}"
            self._line(self._fitted(f"  ✓ {first_line(name)}{took} {asked}".rstrip()), dim=True)
            if (drawn := draw_chart(name, begun.get("input"))) is not None:
                self._screen.block(drawn)
        self.show_work()

    def show_work(self) -> None:
        """Says what is running, at the bottom of a terminal."""
        running = [call for call in self._calls.values() if call.get("toolName") not in _QUIET]
        if not running and not self._is_busy():
            self._screen.show_activity(None)  # It was someone else who worked.
        elif not running:
            self.working()
        else:
            call = running[-1]
            progress = f" {call['progress']:g}" if isinstance(call.get("progress"), int | float) else ""
            total = f"/{call['total']:g}" if progress and isinstance(call.get("total"), int | float) else ""
            said = f" {call['message']}" if isinstance(call.get("message"), str) else ""
            self.working(f"{call.get('toolName')}{progress}{total}{said}")

    def working(self, detail: str = "") -> None:
        """The agent works."""
        who = self._name(self._agent)
        self._screen.show_activity(f"{who}: {first_line(detail)}" if detail else f"{who} is working")

    def rests(self) -> None:
        """The agent has nothing more to do."""
        self._calls.clear()
        self._screen.show_activity(None)

    def asked(self, data: Mapping[str, Any]) -> None:
        """Someone is asked something; how it is answered is for others."""
        self._calls.pop(str(data.get("toolCallId")), None)
        name, asked = str(data.get("toolName")), data.get("input")
        self._line(f"? {first_line(name)}", fg="yellow", bold=True)
        if isinstance(asked, dict):
            lines = [f"    {first_line(key)}: {_value(value)}" for key, value in cast("dict[str, Any]", asked).items()]
        else:
            lines = [f"    {_value(asked)}"] if asked is not None else []
        if lines:
            self._screen.block("\n".join(lines))

    # Anything else

    def note(self, text: str) -> None:
        self._line(escape_control_characters(text), dim=True)

    def wrong(self, text: str) -> None:
        """What went wrong."""
        self._screen.problem(text)

    def _begin(self, message_id: str, sender: str) -> None:
        self._saying, self._said = message_id, ""
        self._screen.start_message(self._name(sender), known=sender == self._agent)

    def _say(self, text: str) -> None:
        self._screen.append_text(text)

    def _line(self, text: str, **style: Any) -> None:
        self._screen.line(text, **style)

    def _fitted(self, text: str) -> str:
        """In one row, where the screen has rows."""
        columns = self._output.columns
        cut = text if columns is None else fitted(text, columns - 1)
        return cut if cut == text else f"{cut[:-1]}…"

    def _name(self, entity_id: str) -> str:
        return first_line(self._names.get(entity_id, entity_id))


def draw_chart(tool: str, asked: Any) -> str | None:
    """A chart that a tool shows, in characters; None where there is none to show."""
    given: Mapping[str, Any] = cast("dict[str, Any]", asked) if isinstance(asked, dict) else {}
    values: Any = given.get("values")
    if not tool.lower().endswith("chart") or not isinstance(values, list) or not values:
        return None
    numbers = cast("list[Any]", values)
    if not all(isinstance(one, int | float) and abs(one) < _LARGEST for one in numbers):
        return None
    labels: Any = given.get("labels")
    named = (
        cast("list[Any]", labels) if isinstance(labels, list) and len(cast("list[Any]", labels)) == len(numbers) else []
    )
    names = [first_line(str(one))[:20] for one in named] or [str(place) for place in range(1, len(numbers) + 1)]
    longest = max(sum(map(width, name)) for name in names[:_MOST_BARS])
    most = max(abs(one) for one in numbers) or 1
    lines = [f"    {first_line(str(given.get('title', '')))}"]
    for name, number in list(zip(names, numbers, strict=True))[:_MOST_BARS]:
        pad = " " * (longest - sum(map(width, name)))
        lines.append(f"    {name}{pad} {'█' * round(abs(number) / most * _BAR)} {number:g}")
    return "\n".join(lines)


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json_text.encode(value)
    return escape_control_characters(text).replace("\n", "\n      ")


def _short(value: Any, most: int = _TEXT) -> str:
    text = first_line(value if isinstance(value, str) else json_text.encode(value))
    return text if len(text) <= most else f"{text[:most]}…"
