"""Renders inbox events as lines that a model reads, and parses such lines. Does not claim events from an inbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import is_id
from toolspace.core.json_text import quote, quote_name, quote_truncated
from toolspace.core.stored_records import InboxEvent

MAX_EVENT_CHARACTERS = 100_000
"""The maximum number of characters of an event's content in its line."""
HANDOFF_PREFIX = "handoff:"
"""The start of the ids of handoff events."""
_MAX_PREVIEW = 80
_LINE = re.compile(
    r"\[(?P<type>[a-z_]+) (?P<event>\S+)(?: in (?P<space>\"(?:[^\"\\]|\\.)*\") \((?P<spaceId>\S+)\))?\] "
)
_SENDER = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^"():\[\]]*) \([^()]*\)(?: \[replies to \S+\])?: ')
"""The sender of a message. A name without quotes has no character that could end it."""


class InboxLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event, parsed from its line."""

    type: str
    event_id: str
    space: str | None
    space_id: str | None
    rest: str
    """`Husam (human): "Book a hotel"`, `confirmAction (callId: call_1): {"confirmed": true}`."""

    @property
    def message_text(self) -> str:
        """The text of a message, without its sender."""
        match = _SENDER.match(self.rest)
        text = self.rest[match.end() :] if match is not None else ""
        try:
            value = json_text.decode(text)
        except ValueError:
            return text
        return value if isinstance(value, str) else text


def render(event: InboxEvent, max_characters: int = MAX_EVENT_CHARACTERS) -> str:
    """Returns an event as one line, whatever it contains. Longer content is cut."""
    data = _as_dict(event.data)
    return f"[{event.type} {event.event_id}{_space(data)}] {_body(event, data, max_characters)}"


def preview(event: InboxEvent) -> str:
    """Returns a short line, enough to see whether the event matters now."""
    data = _as_dict(event.data)
    if event.type == "space_message":
        content = data.get("content")
        text = content if isinstance(content, str) else json_text.encode(content)
        space = quote_name(data.get("spaceName") or data.get("spaceId"))
        return f"[{space}] {quote_name(data.get('senderName'))}: {quote(_shorten(text))}"
    return f"[{event.type}] {_shorten(_body(event, data, MAX_EVENT_CHARACTERS))}"


def parse(text: str) -> list[InboxLine]:
    """Returns the events in a text that a model was given. Ignores other lines."""
    matches = map(_LINE.match, text.split("\n"))  # Not `splitlines`: content may have other line ends.
    return [
        InboxLine(
            type=match["type"],
            event_id=match["event"],
            space=json_text.decode(match["space"]) if match["space"] is not None else None,
            space_id=match["spaceId"],
            rest=match.string[match.end() :],
        )
        for match in matches
        if match is not None
    ]


def _as_dict(data: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", data) if isinstance(data, dict) else {}


def _space(data: Mapping[str, Any]) -> str:
    space_id = data.get("spaceId")
    if not isinstance(space_id, str) or not is_id(space_id):
        return ""
    return f" in {quote(data.get('spaceName') or space_id)} ({space_id})"


def _body(event: InboxEvent, data: Mapping[str, Any], max_characters: int) -> str:
    type = event.type
    if type == "space_message":
        replied_id = _replied_message_id(data)
        reply = f" [replies to {replied_id}]" if replied_id is not None else ""
        content = quote_truncated(data.get("content"), max_characters, "read_messages gives all of it")
        return f"{quote_name(data.get('senderName'))} ({quote_name(data.get('senderType'))}){reply}: {content}"
    if type == "tool_result":
        result = quote_truncated(data.get("result"), max_characters)
        status = "" if not data.get("isError") else f"{data.get('status', 'failed')}: "
        task = f", taskId: {data['taskId']}" if "taskId" in data else ""
        note = "; you may have received it before" if data.get("mayBeKnown") is True else ""
        return f"{quote_name(data.get('toolName'))} (callId: {data.get('callId')}{task}{note}): {status}{result}"
    if type == "plan" and "instruction" in data:
        instruction = quote_truncated(data.get("instruction"), max_characters, "get_plans gives all of it")
        return f"{quote_name(data.get('name'))} (planId: {data.get('planId')}): {instruction}"
    if type == "task" and "taskId" in data:
        result = quote_truncated(data.get("result"), max_characters, "task_replay gives all of it")
        return f"{quote_name(data.get('description'))} (taskId: {data['taskId']}) {data.get('status')}: {result}"
    if type == "service" and event.event_id.startswith(HANDOFF_PREFIX) and isinstance(data.get("handoff"), dict):
        return _handoff_body(data, data["handoff"], max_characters)
    return quote_truncated(event.data, max_characters)


def _handoff_body(data: Mapping[str, Any], handoff: Mapping[str, Any], max_characters: int) -> str:
    message = handoff.get("message")
    advice = f", with the advice {quote_truncated(message, max_characters)}" if message else ""
    received_ids = data.get("heard")  # Messages of the request that this agent also got as a member of the space.
    parts: list[str] = []
    if data.get("request") is not None or not received_ids:
        parts.append(quote_truncated(data["request"], max_characters))
    if received_ids:
        messages = quote_truncated(received_ids, max_characters)
        parts.append(f"messages that you received yourself {messages}; skip them if you have handled them")
    return f"handed off by {quote_name(handoff.get('from'))}{advice}: {'; '.join(parts)}"


def _replied_message_id(data: Mapping[str, Any]) -> str | None:
    """Returns the id of the message that this one replies to. Ignores a `replyTo` that is no id."""
    metadata = data.get("metadata")
    replied_id = cast("dict[str, Any]", metadata).get("replyTo") if isinstance(metadata, dict) else None
    return replied_id if isinstance(replied_id, str) and is_id(replied_id) else None


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_PREVIEW else f"{line[:_MAX_PREVIEW]}…"
