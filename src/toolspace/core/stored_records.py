"""The records that the gateway stores: entities, spaces, messages, runs, calls, inbox events, stream events.

Storage creates them, the API returns them. Times are Unix milliseconds. On the wire, names are camelCase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

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
ApprovalStatus = Literal["requested", "approved", "denied", "expired", "canceled"]
SessionScope = Literal["agent", "space", "user"]
"""Whether an agent has one session for everything, or one for each space or person."""
TaskStatus = Literal["running", "completed", "failed", "canceled"]
StreamFormat = Literal["native", "ui-message-stream", "ag-ui"]
"""The dialects of event streams."""
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
    """The id of the entity."""
    type: EntityType
    """The type of the entity."""
    name: str
    """The display name."""
    metadata: Mapping[str, Any] = {}
    """Any data about the entity."""
    created_at: int = 0
    """When the entity was created, in Unix milliseconds."""


class AgentEntity(Entity, frozen=True):
    """An agent, and whether it can answer now."""

    is_running: bool | None = None
    """Whether the gateway runs the agent, or a program waits for its inbox. None: unknown."""


class Space(Record, frozen=True):
    id: str
    """The id of the space."""
    name: str
    """The name of the space."""
    metadata: Mapping[str, Any] = {}
    """Any data about the space."""
    created_at: int = 0
    """When the space was created, in Unix milliseconds."""


class Member(Record, frozen=True):
    """An entity that is in a space."""

    entity_id: str
    """The id of the entity."""
    type: EntityType
    """The type of the entity."""
    name: str
    """The display name of the entity."""
    joined_at: int
    """When the entity became a member, in Unix milliseconds."""


class Message(Record, frozen=True):
    """A message in a space, or a visible tool call."""

    id: str
    """The id of the message."""
    space_id: str
    """The space of the message."""
    seq: int
    """The number of the message in the space, from 1."""
    sender_id: str
    """The entity that sent the message."""
    kind: MessageKind
    """`message`, or `tool` for a visible call."""
    content: Any
    """The text; for a tool call `{toolCallId, toolName, input, outputSchema?, output?, error?}`."""
    metadata: Mapping[str, Any]
    """Any data about the message."""
    status: MessageStatus
    """The status of the message."""
    run_id: str | None
    """The run in which an agent wrote the message."""
    call_id: str | None
    """The id of the visible call."""
    created_at: int
    """When the message was created, in Unix milliseconds."""
    updated_at: int
    """When the message was last changed, in Unix milliseconds."""


class AgentScope(NamedTuple):
    """How the sessions of an agent are separated."""

    scope: SessionScope = "agent"
    shares_memories: bool = False
    """Whether all sessions see the memories of the main session."""


class RunRecord(Record, frozen=True):
    """One run of an agent."""

    id: str
    """The id of the run."""
    agent_entity_id: str
    """The agent that runs."""
    space_id: str | None
    """The active space, in which visible calls appear."""
    status: RunStatus
    """The status of the run."""
    trigger: Any
    """Why the run started."""
    steps: int
    """How many turns of the model the run has had."""
    usage: Mapping[str, Any]
    """What the run cost, as reported when it was closed."""
    error: str | None
    """Why the run failed."""
    created_at: int
    """When the run was opened, in Unix milliseconds."""
    completed_at: int | None
    """When the run ended, in Unix milliseconds; null before."""
    principal: str | None
    """For whom the run works: an entity or a key (`key/…`); null for runs of earlier versions."""
    tool_budget_exceeded: bool
    """Whether a call failed because its result did not fit into the context window."""
    session_id: str | None
    """The session of the agent that the run belongs to; null for runs of earlier versions."""


class CallRecord(Record, frozen=True):
    """One tool call and its result."""

    call_id: str
    """The id of the call."""
    run_id: str | None
    """The run of the call; null for a call outside a run."""
    seq: int
    """Its position among the calls of the run."""
    agent_entity_id: str | None
    """The agent on whose behalf the call was made."""
    space_id: str | None
    """The space of the call."""
    tool_name: str
    """The name of the tool."""
    args: Any
    """The arguments."""
    execution_type: str
    """How the tool is executed."""
    execution_target: ExecutionTarget
    """Who executes the call: `server`, `client` (a person in the space) or `external` (a worker)."""
    visible: bool
    """Whether the call is shown in the space."""
    is_async: bool
    """Whether the call returned before its result was available."""
    status: CallStatus
    """The status of the call."""
    result: Any
    """The result: any JSON; `null` and `false` are results too."""
    is_error: bool
    """Whether the result is an error."""
    error_kind: str | None
    """The kind of the failure; docs/errors.md lists the kinds."""
    source: ResultSource | None
    """Who submitted the result."""
    message_id: str | None
    """The message that shows the call in the space."""
    created_at: int
    """When the call was made, in Unix milliseconds."""
    resolved_at: int | None
    """When the call ended, in Unix milliseconds; null before."""
    expires_at: int | None
    """When the call expires without a result, in Unix milliseconds; null for never."""
    client_id: str | None = None
    """The client that submitted the result, if it named itself."""
    output_schema: Mapping[str, Any] | None = None
    """The schema of the result that someone else submits; null if any result is accepted."""

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


class ApprovalRecord(Record, frozen=True):
    """A call that a person decides about, and the decision. Its id is the id of the call."""

    id: str
    """The id of the approval, which is the id of the call."""
    tool_name: str
    """The name of the tool."""
    tool_version: str
    """Changes with the definition of the tool; the approval holds for this one."""
    args: Any
    """The exact arguments that the approval holds for."""
    digest: str
    """The SHA-256 of the arguments."""
    principal: str
    """For whom the call is made."""
    agent_entity_id: str | None
    """The agent on whose behalf the call was made."""
    run_id: str | None
    """The run of the call; null for a call outside a run."""
    space_id: str | None
    """The space of the call."""
    requested_by: tuple[str, ...]
    """Who made the call: the entity, agent or key. They never approve it."""
    policy_version: str
    """Changes with the rules that apply to the tool; the approval holds for this one."""
    rule: str
    """The policy, or the line of configuration, that asks."""
    reason: str
    """Why a person is asked; may be empty."""
    approvers: tuple[str, ...]
    """Who may decide: `operators`, `members`, `caller`, or ids of entities."""
    status: ApprovalStatus
    """`requested`, or how it ended."""
    decided_by: str | None
    """Who decided: an entity, or `key/` and the id of a key."""
    decision_reason: str | None
    """What the approver wrote."""
    remember: str | None
    """For which later calls the decision holds, too: `run`, `session` or `always`."""
    created_at: int
    """When the call was made, in Unix milliseconds."""
    expires_at: int
    """When the request expires, in Unix milliseconds."""
    decided_at: int | None
    """When it was decided, in Unix milliseconds."""

    def wire(self) -> dict[str, Any]:
        """Returns the wire form. `callId` and `toolCallId` repeat the id."""
        return {**msgspec.to_builtins(self), "callId": self.id, "toolCallId": self.id}


class ApprovalRule(Record, frozen=True):
    """A decision that holds for later calls of the same tool and principal."""

    id: str
    """The id of the rule."""
    tool_name: str
    """The name of the tool."""
    principal: str
    """For whom the calls are made."""
    scope: str
    """`always`, `run:` and the id of a run, or `session:` and the id of a session."""
    decision: Literal["approved", "denied"]
    """What the rule decides."""
    reason: str | None
    """What the approver wrote."""
    created_by: str
    """Who decided."""
    created_at: int
    """When it was decided, in Unix milliseconds."""


class InboxEvent(Record, frozen=True):
    """An event in the inbox of an agent."""

    event_id: str
    """The id of the event."""
    agent_entity_id: str
    """The agent whose inbox has the event."""
    type: InboxType
    """The type of the event."""
    timestamp: int
    """When the event happened, in Unix milliseconds."""
    data: Any
    """What happened; it depends on the type."""
    priority: int
    """Events with a lower number are handled first."""
    status: InboxStatus
    """The status of the event."""
    attempts: int
    """How often the event was claimed."""
    error: str | None = None
    """Why the last attempt failed."""
    session_id: str = ""
    """The session of the agent that gets the event."""


class Document(Record, frozen=True):
    """A document that an agent can search, without its text."""

    id: str
    """The id of the document."""
    entity_id: str
    """The agent that can search the document."""
    title: str
    """The title."""
    source: str | None
    """Where it is from: a URL, a path, or any text of whoever added it."""
    origin: DocumentOrigin
    """How the document was added: over this API, or from a configured folder."""
    size: int
    """Bytes of its text."""
    passages: int
    """How many passages it has."""
    metadata: Mapping[str, Any]
    """Any data about the document."""
    created_at: int
    """When the document was added, in Unix milliseconds."""
    updated_at: int
    """When the document was last changed, in Unix milliseconds."""


class DocumentWithText(Document, frozen=True):
    """A document with its text."""

    text: str
    """The text of the document."""


class TaskRecord(Record, frozen=True):
    """A background task of an agent."""

    id: str
    """The id of the task."""
    agent_entity_id: str
    """The agent that started the task."""
    description: str
    """A short description of the task."""
    input: str
    """Everything that the task needs to know."""
    status: TaskStatus
    """The status of the task."""
    run_id: str
    """The run in which the task was started."""
    result: Any
    """Its result; null while it is running."""
    reflection: Any
    """`{assessment, toolCallsCount}` after the task was reviewed, or `{error}` if the review failed."""
    created_at: int
    """When the task was started, in Unix milliseconds."""
    completed_at: int | None
    """When the task ended, in Unix milliseconds; null before."""
    session_id: str
    """The session that started the task."""


class TurnCall(Record, frozen=True):
    """A tool call in a conversation."""

    call_id: str
    """The id of the call."""
    name: str
    """The name of the tool."""
    arguments: Any
    """As data; as the model's text if that is not JSON."""


class TurnResult(Record, frozen=True):
    """The result of a tool call in a conversation, as the model read it."""

    call_id: str
    """The id of the call."""
    name: str
    """The name of the tool."""
    text: str
    """The result as text."""
    is_error: bool
    """Whether the result is an error."""


class TurnRecord(Record, frozen=True, omit_defaults=True):
    """A turn of a conversation with a model."""

    role: Literal["user", "assistant", "tool"]
    """Whose turn: input for the model, the model, or the results of its tool calls."""
    seq: int
    """The number of the turn in the conversation, from 1."""
    cycle: int
    """The cycle of the agent, from 1."""
    run_id: str | None
    """The run of the turn."""
    at: int
    """When the turn was stored, in Unix milliseconds."""
    text: str = ""
    """The text of the turn."""
    calls: Sequence[TurnCall] = ()
    """The tool calls of the model."""
    results: Sequence[TurnResult] = ()
    """The results of the tool calls of the previous turn."""


class TaskWithMessages(TaskRecord, frozen=True):
    """A task with its conversation, oldest first."""

    messages: Sequence[TurnRecord]
    """The conversation of the task, oldest turn first."""


class AgentHistory(Record, frozen=True):
    """The conversation of an agent: a summary of earlier cycles, and turns of the latest ones, oldest first."""

    summary: str | None
    """The summary of earlier cycles; null if no cycle was summarized."""
    items: Sequence[TurnRecord]
    """The turns of this page."""
    next: str | None
    """The `cursor` of the next page; null on the last page."""


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
        return f"StoredEvent({self.stream}#{self.id} {self.type})"


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
    "tool.ready",
    "tool.progress",
    "tool.done",
    "tool.error",
    "approval.requested",
    "approval.decided",
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
