"""Inbox events as the lines that a model reads, and such lines read back. Takes nothing out of an inbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import is_id
from toolspace.core.line_escaping import quote, quote_name, quote_truncated
from toolspace.core.records import InboxEvent

MAX_EVENT_CHARACTERS = 100_000
"""Characters of what one event says."""
HANDOFF_PREFIX = "handoff:"
"""How the ids of events begin in which an agent hands on what it was asked."""
_LONGEST_PREVIEW = 80
_LINE = re.compile(
    r"\[(?P<type>[a-z_]+) (?P<event>\S+)(?: in (?P<space>\"(?:[^\"\\]|\\.)*\") \((?P<spaceId>\S+)\))?\] "
)
_SAID = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^"():\[\]]*) \([^()]*\)(?: \[replies to \S+\])?: ')
"""Who says something. A name that is not in quotes holds nothing that could end it."""


class InboxLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event, read back from its line."""

    type: str
    event_id: str
    space: str | None
    space_id: str | None
    rest: str
    """`Husam (human): "Book a hotel"`, `confirmAction (callId: call_1): {"confirmed": true}`."""

    @property
    def message_text(self) -> str:
        """What was said, of a message."""
        match = _SAID.match(self.rest)
        text = self.rest[match.end() :] if match is not None else ""
        try:
            value = json_text.decode(text)
        except ValueError:
            return text
        return value if isinstance(value, str) else text


def render(event: InboxEvent, max_characters: int = MAX_EVENT_CHARACTERS) -> str:
    """One event as one line, whatever it says. Of contents that are longer, the beginning."""
    said = _members(event.data)
    return f"[{event.type} {event.event_id}{_place(said)}] {_body(event, said, max_characters)}"


def preview(event: InboxEvent) -> str:
    """A short line: enough to see whether it matters now."""
    said = _members(event.data)
    if event.type == "space_message":
        text = said.get("content")
        text = text if isinstance(text, str) else json_text.encode(text)
        place = quote_name(said.get("spaceName") or said.get("spaceId"))
        return f"[{place}] {quote_name(said.get('senderName'))}: {_short(text)}"
    return f"[{event.type}] {_short(_body(event, said, MAX_EVENT_CHARACTERS), is_quoted=False)}"


def parse(text: str) -> list[InboxLine]:
    """The events in what a model was told; other lines are left out."""
    lines: list[InboxLine] = []
    for line in text.split("\n"):  # Not by all that ends a line: what people write may hold the others.
        match = _LINE.match(line)
        if match is not None:
            space = match["space"]
            lines.append(
                InboxLine(
                    type=match["type"],
                    event_id=match["event"],
                    space=json_text.decode(space) if space is not None else None,
                    space_id=match["spaceId"],
                    rest=line[match.end() :],
                )
            )
    return lines


def _members(data: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", data) if isinstance(data, dict) else {}


def _place(data: Mapping[str, Any]) -> str:
    space_id = data.get("spaceId")
    if not isinstance(space_id, str) or not is_id(space_id):
        return ""
    return f" in {quote(data.get('spaceName') or space_id)} ({space_id})"


def _body(event: InboxEvent, data: Mapping[str, Any], longest: int) -> str:
    type = event.type
    if type == "space_message":
        replied = _replied(data)
        advice = f" [replies to {replied}]" if replied is not None else ""
        said = quote_truncated(data.get("content"), longest, "read_messages gives all of it")
        return f"{quote_name(data.get('senderName'))} ({quote_name(data.get('senderType'))}){advice}: {said}"
    if type == "tool_result":
        result = quote_truncated(data.get("result"), longest)
        how = "" if not data.get("isError") else f"{data.get('status', 'failed')}: "
        task = f", taskId: {data['taskId']}" if "taskId" in data else ""
        return f"{quote_name(data.get('toolName'))} (callId: {data.get('callId')}{task}): {how}{result}"
    if type == "plan" and "instruction" in data:
        instruction = quote_truncated(data.get("instruction"), longest, "get_plans gives all of it")
        return f"{quote_name(data.get('name'))} (planId: {data.get('planId')}): {instruction}"
    if type == "task" and "taskId" in data:
        result = quote_truncated(data.get("result"), longest, "task_replay gives all of it")
        return f"{quote_name(data.get('description'))} (taskId: {data['taskId']}) {data.get('status')}: {result}"
    if type == "service" and event.event_id.startswith(HANDOFF_PREFIX) and isinstance(data.get("handoff"), dict):
        handed: dict[str, Any] = data["handoff"]
        advice = f", with the advice {quote_truncated(handed['message'], longest)}" if handed.get("message") else ""
        heard = data.get("heard")
        known = (
            f"what you heard yourself {quote_truncated(heard, longest)}; skip if you have seen to it" if heard else ""
        )
        request = quote_truncated(data["request"], longest) if data.get("request") is not None or not known else ""
        return f"handed on by {quote_name(handed.get('from'))}{advice}: {'; '.join(filter(None, (request, known)))}"
    return quote_truncated(event.data, longest)


def _replied(data: Mapping[str, Any]) -> str | None:
    """The message that one replies to. What it has of its sender's own under that name is none."""
    metadata = data.get("metadata")
    replied = cast("dict[str, Any]", metadata).get("replyTo") if isinstance(metadata, dict) else None
    return replied if isinstance(replied, str) and is_id(replied) else None


def _short(text: str, *, is_quoted: bool = True) -> str:
    line = " ".join(text.split())
    cut = line if len(line) <= _LONGEST_PREVIEW else f"{line[:_LONGEST_PREVIEW]}…"
    return quote(cut) if is_quoted else cut
