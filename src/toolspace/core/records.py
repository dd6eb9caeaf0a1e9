"""What the gateway keeps, as data: entities, spaces, messages, runs, calls, inbox events, stream events.

Times are Unix milliseconds. On the wire the names are camelCase.
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
"""Of a call that runs here: running → completed | failed | canceled. Of one that someone else answers: waiting →
resolved, waiting → pending → resolved, and expired or canceled."""
InboxType = Literal["space_message", "plan", "service", "tool_result", "task"]
InboxStatus = Literal["pending", "processing", "processed", "failed"]
TaskStatus = Literal["running", "completed", "failed", "canceled"]
DocumentOrigin = Literal["api", "folder"]
"""Who added a document: someone over the API, or a folder that is configured."""
Visibility = Literal["full", "name", "none"]
"""What a public reader sees of an event: all of it, the tool's name and the call's id, or nothing."""

OPEN_CALL: frozenset[CallStatus] = frozenset(("waiting", "pending"))
ENDED_RUN: frozenset[RunStatus] = frozenset(("completed", "failed", "canceled"))


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel", eq=False):
    """A row as programs see it."""


class Entity(Record, frozen=True):
    """Someone who can be in a space."""

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
    """An entity in a space, with what others see of it."""

    entity_id: str
    type: EntityType
    name: str
    joined_at: int


class Message(Record, frozen=True):
    """Something said in a space, or a visible tool call shown there."""

    id: str
    space_id: str
    seq: int
    sender_id: str
    kind: MessageKind
    content: Any
    """The text; of a tool call `{toolCallId, toolName, input, output?, error?}`."""
    metadata: Mapping[str, Any]
    status: MessageStatus
    run_id: str | None
    call_id: str | None
    created_at: int
    updated_at: int


class RunRecord(Record, frozen=True):
    """One think cycle."""

    id: str
    agent_entity_id: str
    space_id: str | None
    """The active space: where visible calls show."""
    status: RunStatus
    trigger: Any
    steps: int
    usage: Mapping[str, Any]
    error: str | None
    created_at: int
    completed_at: int | None


class CallRecord(Record, frozen=True):
    """One tool call and its result; a pending call is one that someone else answers."""

    call_id: str
    run_id: str | None
    seq: int
    """Its place among the calls of the run."""
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
        """As the API shows it: under the names of a pending call and of a run's call alike."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        data["toolCallId"] = self.call_id
        data["startedAt"], data["completedAt"] = self.created_at, self.resolved_at
        return data

    def wire_text(self) -> bytes:
        """The same as JSON, without the detour: results come in by the thousand."""
        completed = "null" if self.resolved_at is None else self.resolved_at
        again = f'{{"startedAt":{self.created_at},"completedAt":{completed},"toolCallId":'.encode()
        return b"%b%b,%b" % (again, json_text.encode_bytes(self.call_id), json_text.encode_bytes(self)[1:])


class InboxEvent(Record, frozen=True):
    """Something that an agent should look at."""

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
    """Something that an agent can look up, without its text."""

    id: str
    entity_id: str
    title: str
    source: str | None
    """Where it is from: a URL, a path, or whatever whoever added it says."""
    origin: DocumentOrigin
    size: int
    """Bytes of its text."""
    passages: int
    """How many passages of it can be found."""
    metadata: Mapping[str, Any]
    created_at: int
    updated_at: int


class DocumentWithText(Document, frozen=True):
    """The same with its text."""

    text: str


class TaskRecord(Record, frozen=True):
    """Work that an agent has done in the background."""

    id: str
    agent_entity_id: str
    description: str
    input: str
    status: TaskStatus
    run_id: str
    result: Any
    """What came of it; null while it is under way."""
    reflection: Any
    """`{assessment, toolCallsCount}`, once someone has looked back on it; `error` where that failed."""
    created_at: int
    completed_at: int | None


class TurnCall(Record, frozen=True):
    """A tool call in a conversation."""

    call_id: str
    name: str
    arguments: Any
    """As data; as the model's text where that could not be read."""


class TurnResult(Record, frozen=True):
    """What a tool call was answered, as the model read it."""

    call_id: str
    name: str
    text: str
    is_error: bool


class TurnRecord(Record, frozen=True, omit_defaults=True):
    """A turn of a conversation with a model."""

    role: Literal["user", "assistant", "tool"]
    """Who spoke: whoever tells the model something, the model, or the tools that it called."""
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
    """What an agent has in mind: what is left of earlier cycles, and turns of the latest ones, oldest first."""

    summary: str | None
    items: Sequence[TurnRecord]
    next: str | None


class StoredEvent(msgspec.Struct, eq=False):
    """One event of a stream, as it is stored: its id grows by one within the stream."""

    stream: str
    id: int
    type: str
    data: Mapping[str, Any]
    at: int
    visibility: Visibility = "full"
    frames: dict[object, bytes] = {}
    """What readers get of it, encoded once for each dialect and projection."""

    def __repr__(self) -> str:
        return f"StreamEvent({self.stream}#{self.id} {self.type})"


class NewEvent(msgspec.Struct, frozen=True):
    """An event that is to be appended to a stream; the store gives it its id."""

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
"""What happens in the streams of spaces and runs."""


def space_stream(space_id: str) -> str:
    """The name of the stream of a space's events."""
    return f"space:{space_id}"


def run_stream(run_id: str) -> str:
    """The name of the stream of a run's events."""
    return f"run:{run_id}"
