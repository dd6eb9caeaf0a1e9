"""The records that the gateway stores: entities, spaces, messages, runs, calls, inbox events, stream events.

Storage creates them, the API returns them. Times are Unix milliseconds. On the wire, names are camelCase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from toolspace.core import json_text

EntityType = Literal["human", "agent", "service"]
MessageStatus = Literal["running", "requires_action", "complete", "error"]
MessageKind = Literal["message", "tool"]
RunStatus = Literal["queued", "running", "waiting_tool", "completed", "failed", "canceled"]
ExecutionTarget = Literal["server", "client", "external"]
ResultSource = Literal["server", "client"]
CallStatus = Literal["running", "completed", "failed", "waiting", "pending", "resolved", "expired", "canceled"]
"""A call that runs here: running → completed | failed | canceled. A call whose result someone else submits: waiting →
resolved, or waiting → pending → resolved, or expired or canceled."""
InboxType = Literal["space_message", "plan", "service", "tool_result", "task"]
InboxStatus = Literal["pending", "processing", "processed", "failed"]
TaskStatus = Literal["running", "completed", "failed", "canceled"]
DocumentOrigin = Literal["api", "folder"]
"""How a document was added: over the API, or from a configured folder."""
Visibility = Literal["full", "name", "none"]
"""What a reader with a public key sees of an event: all of it, the tool's name and the call's id, or nothing."""

OPEN_CALL: frozenset[CallStatus] = frozenset(("waiting", "pending"))
ENDED_RUN: frozenset[RunStatus] = frozenset(("completed", "failed", "canceled"))


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel", eq=False):
    """The base of all records."""


class Entity(Record, frozen=True):
    """A human, an agent or a service, which can be a member of spaces."""

    id: str
    type: EntityType
    name: str
    metadata: Mapping[str, Any] = {}
    created_at: int = 0


class Space(Record, frozen=True):
    id: str
    name: str
    metadata: Mapping[str, Any] = {}
    created_at: int = 0


class Member(Record, frozen=True):
    """An entity that is in a space."""

    entity_id: str
    type: EntityType
    name: str
    joined_at: int


class Message(Record, frozen=True):
    """A message in a space, or a visible tool call."""

    id: str
    space_id: str
    seq: int
    sender_id: str
    kind: MessageKind
    content: Any
    """The text; for a tool call `{toolCallId, toolName, input, output?, error?}`."""
    metadata: Mapping[str, Any]
    status: MessageStatus
    run_id: str | None
    call_id: str | None
    created_at: int
    updated_at: int


class RunRecord(Record, frozen=True):
    """One run of an agent."""

    id: str
    agent_entity_id: str
    space_id: str | None
    """The active space, in which visible calls appear."""
    status: RunStatus
    trigger: Any
    steps: int
    usage: Mapping[str, Any]
    error: str | None
    created_at: int
    completed_at: int | None


class CallRecord(Record, frozen=True):
    """One tool call and its result."""

    call_id: str
    run_id: str | None
    seq: int
    """Its position among the calls of the run."""
    agent_entity_id: str | None
    space_id: str | None
    tool_name: str
    args: Any
    execution_type: str
    execution_target: ExecutionTarget
    visible: bool
    is_async: bool
    status: CallStatus
    result: Any
    is_error: bool
    error_kind: str | None
    source: ResultSource | None
    message_id: str | None
    created_at: int
    resolved_at: int | None
    expires_at: int | None

    def wire(self) -> dict[str, Any]:
        """Returns the wire form, with the field names of a pending call and of a run's call."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        data["toolCallId"] = self.call_id
        data["startedAt"], data["completedAt"] = self.created_at, self.resolved_at
        return data

    def wire_text(self) -> bytes:
        """Returns the same as JSON, encoded directly: results arrive by the thousand."""
        completed = "null" if self.resolved_at is None else self.resolved_at
        aliases = f'{{"startedAt":{self.created_at},"completedAt":{completed},"toolCallId":'.encode()
        return b"%b%b,%b" % (aliases, json_text.encode_bytes(self.call_id), json_text.encode_bytes(self)[1:])


class InboxEvent(Record, frozen=True):
    """An event in the inbox of an agent."""

    event_id: str
    agent_entity_id: str
    type: InboxType
    timestamp: int
    data: Any
    priority: int
    status: InboxStatus
    attempts: int
    error: str | None = None


class Document(Record, frozen=True):
    """A document that an agent can search, without its text."""

    id: str
    entity_id: str
    title: str
    source: str | None
    """Where it is from: a URL, a path, or any text of whoever added it."""
    origin: DocumentOrigin
    size: int
    """Bytes of its text."""
    passages: int
    """How many passages it has."""
    metadata: Mapping[str, Any]
    created_at: int
    updated_at: int


class DocumentWithText(Document, frozen=True):
    """A document with its text."""

    text: str


class TaskRecord(Record, frozen=True):
    """A background task of an agent."""

    id: str
    agent_entity_id: str
    description: str
    input: str
    status: TaskStatus
    run_id: str
    result: Any
    """Its result; null while it is running."""
    reflection: Any
    """`{assessment, toolCallsCount}` after the task was reviewed, or `{error}` if the review failed."""
    created_at: int
    completed_at: int | None


class TurnCall(Record, frozen=True):
    """A tool call in a conversation."""

    call_id: str
    name: str
    arguments: Any
    """As data; as the model's text if that is not JSON."""


class TurnResult(Record, frozen=True):
    """The result of a tool call in a conversation, as the model read it."""

    call_id: str
    name: str
    text: str
    is_error: bool


class TurnRecord(Record, frozen=True, omit_defaults=True):
    """A turn of a conversation with a model."""

    role: Literal["user", "assistant", "tool"]
    """Whose turn: input for the model, the model, or the results of its tool calls."""
    seq: int
    cycle: int
    run_id: str | None
    at: int
    text: str = ""
    calls: Sequence[TurnCall] = ()
    results: Sequence[TurnResult] = ()


class TaskWithMessages(TaskRecord, frozen=True):
    """A task with its conversation, oldest first."""

    messages: Sequence[TurnRecord]


class AgentHistory(Record, frozen=True):
    """The conversation of an agent: a summary of earlier cycles, and turns of the latest ones, oldest first."""

    summary: str | None
    items: Sequence[TurnRecord]
    next: str | None


class StoredEvent(msgspec.Struct, eq=False):
    """One stored event of a stream. Ids count up by one within a stream."""

    stream: str
    id: int
    type: str
    data: Mapping[str, Any]
    at: int
    visibility: Visibility = "full"
    frames: dict[object, bytes] = {}
    """Its encoded frames, one for each dialect and visibility."""

    def __repr__(self) -> str:
        return f"StreamEvent({self.stream}#{self.id} {self.type})"


class NewEvent(msgspec.Struct, frozen=True):
    """An event to append to a stream. The store assigns its id."""

    type: str
    data: Mapping[str, Any]
    visibility: Visibility = "full"


EVENT_TYPES = (
    "message.started",
    "message.delta",
    "message.done",
    "tool.started",
    "tool.streaming",
    "tool.progress",
    "tool.done",
    "tool.error",
    "run.started",
    "run.done",
)
"""The types of events in the streams of spaces and runs."""


def space_stream(space_id: str) -> str:
    """Returns the name of a space's event stream."""
    return f"space:{space_id}"


def run_stream(run_id: str) -> str:
    """Returns the name of a run's event stream."""
    return f"run:{run_id}"
