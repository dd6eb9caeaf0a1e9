"""Inbox events as the lines that a model reads, and such lines read back. Takes nothing out of an inbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from toolspace.core import jsontext
from toolspace.core.records import InboxEvent

_LONGEST_PREVIEW = 80
_LINE = re.compile(
    r"\[(?P<type>[a-z_]+) (?P<event>\S+)(?: in (?P<space>\"(?:[^\"\\]|\\.)*\") \((?P<spaceId>\S+)\))?\] "
)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One event, read back from its line."""

    type: str
    event_id: str
    space: str | None
    space_id: str | None
    rest: str
    """`Husam (human): "Book a hotel"`, `confirmAction (callId: call_1): {"confirmed": true}`."""

    @property
    def said(self) -> str:
        """What was said, of a message."""
        _, _, text = self.rest.partition("): ")
        try:
            value = jsontext.decode(text)
        except ValueError:
            return text
        return value if isinstance(value, str) else text


def render(event: InboxEvent) -> str:
    """One event as one line."""
    said = _members(event.data)
    return f"[{event.type} {event.event_id}{_place(said)}] {_body(event.type, said, event.data)}"


def preview(event: InboxEvent) -> str:
    """A short line: enough to see whether it matters now."""
    said = _members(event.data)
    if event.type == "space_message":
        text = said.get("content")
        text = text if isinstance(text, str) else jsontext.encode(text)
        return f"[{said.get('spaceName') or said.get('spaceId')}] {said.get('senderName')}: {_short(text)}"
    return f"[{event.type}] {_short(_body(event.type, said, event.data), quote=False)}"


def parse(text: str) -> list[Line]:
    """The events in what a model was told; other lines are left out."""
    lines: list[Line] = []
    for line in text.split("\n"):  # Not by all that ends a line: what people write may hold the others.
        match = _LINE.match(line)
        if match is not None:
            space = match["space"]
            lines.append(
                Line(
                    type=match["type"],
                    event_id=match["event"],
                    space=jsontext.decode(space) if space is not None else None,
                    space_id=match["spaceId"],
                    rest=line[match.end() :],
                )
            )
    return lines


def _members(data: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", data) if isinstance(data, dict) else {}


def _place(data: Mapping[str, Any]) -> str:
    space_id = data.get("spaceId")
    if not isinstance(space_id, str):
        return ""
    return f" in {jsontext.encode(data.get('spaceName') or space_id)} ({space_id})"


def _body(type: str, data: Mapping[str, Any], whole: Any) -> str:
    if type == "space_message":
        advice = f" [replies to {data['metadata']['replyTo']}]" if _replies(data) else ""
        return f"{data.get('senderName')} ({data.get('senderType')}){advice}: {jsontext.encode(data.get('content'))}"
    if type == "tool_result":
        result = jsontext.encode(data.get("result"))
        how = "" if not data.get("isError") else f"{data.get('status', 'failed')}: "
        task = f", taskId: {data['taskId']}" if "taskId" in data else ""
        return f"{data.get('toolName')} (callId: {data.get('callId')}{task}): {how}{result}"
    if type == "plan" and "instruction" in data:
        return f"{data.get('name')} (planId: {data.get('planId')}): {jsontext.encode(data.get('instruction'))}"
    if type == "task" and "taskId" in data:
        result = jsontext.encode(data.get("result"))
        return f"{data.get('description')} (taskId: {data['taskId']}) {data.get('status')}: {result}"
    if type == "service" and isinstance(data.get("handoff"), dict):
        handed: dict[str, Any] = data["handoff"]
        advice = f", with the advice {jsontext.encode(handed['message'])}" if handed.get("message") else ""
        return f"handed on by {handed.get('from')}{advice}: {jsontext.encode(data.get('request'))}"
    return jsontext.encode(whole)


def _replies(data: Mapping[str, Any]) -> bool:
    metadata = data.get("metadata")
    return isinstance(metadata, dict) and "replyTo" in metadata


def _short(text: str, *, quote: bool = True) -> str:
    line = " ".join(text.split())
    cut = line if len(line) <= _LONGEST_PREVIEW else f"{line[:_LONGEST_PREVIEW]}…"
    return jsontext.encode(cut) if quote else cut
