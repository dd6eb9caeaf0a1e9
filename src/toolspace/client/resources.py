"""The routes for entities, spaces, agents, servers and keys as methods. Each method sends one request.

`call_resources` has the routes for tools, calls and runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

from toolspace.client.errors import UnexpectedResponse
from toolspace.client.events import EventSubscription
from toolspace.client.transport import Transport, quote_segment
from toolspace.core.ids import new_id
from toolspace.core.records import (
    AgentHistory,
    CallStatus,
    Document,
    DocumentWithText,
    Entity,
    EntityType,
    ExecutionTarget,
    InboxEvent,
    InboxStatus,
    InboxType,
    Member,
    Message,
    Record,
    ResultSource,
    RunRecord,
    Space,
    TaskRecord,
    TaskStatus,
    TaskWithMessages,
)
from toolspace.errors import ERROR_CLASSES, ErrorKind, ToolExecutionError

# MERGED from responses: The types of responses that are not stored records: pages, results of calls, claims, tools and


T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A page of a list. `next` is the cursor of the next page; None on the last one."""

    items: list[T]
    next: str | None = None


class CallResult(Record, frozen=True):
    """The result of a call. If it is pending, the result comes later to the agent's inbox and to `calls.get`."""

    ok: bool
    result: Any = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    executed: bool = False
    tool: str | None = None
    call_id: str | None = None
    duration_ms: float = 0.0
    content: Any = None
    extras: Mapping[str, Any] = {}
    status: Literal["pending"] | None = None
    pending_tool_call_id: str | None = None

    @property
    def is_pending(self) -> bool:
        return self.pending_tool_call_id is not None

    def unwrap(self) -> Any:
        """Returns the result of a successful call. Raises the `ToolError` of a failed one."""
        if self.ok:
            return self.result
        raise ERROR_CLASSES.get(self.error_kind or "execution_error", ToolExecutionError)(
            self.error or "the tool failed", tool=self.tool, executed=self.executed
        )


class RunCall(Record, frozen=True):
    """A call of a run. Of calls to the agent's own tools, members of the space see only the tool."""

    tool_call_id: str
    tool_name: str
    seq: int | None = None
    args: Any = None
    execution_type: str | None = None
    execution_target: ExecutionTarget | None = None
    status: CallStatus | None = None
    result: Any = None
    is_error: bool = False
    source: ResultSource | None = None
    started_at: int | None = None
    completed_at: int | None = None


class InboxClaim(Record, frozen=True):
    """Claimed inbox events. Each must be acknowledged or released with this claim before the lease expires."""

    claim: str
    lease_until: int
    items: list[InboxEvent]


class ToolInfo(Record, frozen=True):
    """A tool as the gateway lists it."""

    name: str
    description: str = ""
    input_schema: Mapping[str, Any] = {}
    output_schema: Mapping[str, Any] | None = None
    category: str = "custom"
    execution_type: str | None = None
    visible: bool = False
    is_async: bool = False


class ApiKey(Record, frozen=True):
    """An API key. `key` is its secret text, which only the response of `create` has."""

    id: str
    kind: Literal["secret", "public", "tools"]
    name: str
    hint: str
    tools_allowed: Sequence[str] | None = None
    tools_denied: Sequence[str] = ()
    agent_entity_id: str | None = None
    created_at: int = 0
    revoked_at: int | None = None
    last_used_at: int | None = None
    calls: int = 0
    failed: int = 0
    key: str | None = None

    def __repr__(self) -> str:
        return f"Key(id={self.id!r}, kind={self.kind!r}, name={self.name!r}, hint={self.hint!r})"


def decode_response(kind: type[T], data: Any) -> T:
    """Returns the response as a type. Raises `UnexpectedResponse`."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise UnexpectedResponse(
            f"the response has an unknown form: {error}; do the client and the gateway have the same version?"
        ) from None


StreamFormat = Literal["native", "ui-message-stream", "ag-ui"]


class ApiResource:
    """The base of all parts of the API."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def _send(self, kind: type[T], method: str, path: str, body: object = None, **options: Any) -> T:
        """Sends a request with the options of `Transport.request`, and returns the response as a type."""
        return decode_response(kind, await self._transport.request(method, path, body=body, **options))

    async def _get(self, kind: type[T], path: str, **query: Any) -> T:
        return await self._send(kind, "GET", path, query=query)

    async def _create(self, kind: type[T], path: str, body: object) -> T:
        """Creates something once: a retry with the same idempotency key returns the first response."""
        return await self._send(kind, "POST", path, body, idempotency_key=new_id("idk"))

    async def _post(self, kind: type[T], path: str, body: object = None) -> T:
        """Sends a POST that has no further effect when it is repeated."""
        return await self._send(kind, "POST", path, body, is_repeatable=True)

    async def _delete(self, path: str) -> None:
        await self._transport.request("DELETE", path)


def without_none(**members: Any) -> dict[str, Any]:
    """Returns a body with the members that are not None."""
    return {name: value for name, value in members.items() if value is not None}


async def iterate_pages(list_page: Callable[[str | None], Coroutine[Any, Any, Page[T]]]) -> AsyncIterator[T]:
    """Yields every item of a list, page after page."""
    cursor: str | None = None
    while True:
        page = await list_page(cursor)
        for item in page.items:
            yield item
        if page.next is None:
            return
        cursor = page.next


class EntitiesApi(ApiResource):
    """Entities: humans, agents and services."""

    async def create(
        self, type: EntityType, name: str, *, id: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Entity:
        return await self._create(Entity, "/api/entities", without_none(type=type, name=name, id=id, metadata=metadata))

    async def list(
        self, *, type: EntityType | None = None, limit: int | None = None, cursor: str | None = None
    ) -> Page[Entity]:
        return await self._get(Page[Entity], "/api/entities", type=type, limit=limit, cursor=cursor)

    def all(self, *, type: EntityType | None = None) -> AsyncIterator[Entity]:
        return iterate_pages(lambda cursor: self.list(type=type, cursor=cursor))

    async def get(self, entity_id: str) -> Entity:
        return await self._get(Entity, f"/api/entities/{quote_segment(entity_id)}")

    async def update(
        self, entity_id: str, *, name: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Entity:
        path = f"/api/entities/{quote_segment(entity_id)}"
        return await self._send(Entity, "PATCH", path, without_none(name=name, metadata=metadata))

    async def delete(self, entity_id: str) -> None:
        await self._delete(f"/api/entities/{quote_segment(entity_id)}")

    async def create_token(self, entity_id: str, *, expires_in: int | None = None) -> str:
        """Returns a token for the entity, which it uses with the public key. `expires_in`: seconds."""
        path = f"/api/entities/{quote_segment(entity_id)}/token"
        return (await self._post(dict[str, Any], path, without_none(expiresIn=expires_in)))["token"]


class SpacesApi(ApiResource):
    """Spaces with their members, messages and events."""

    async def create(
        self,
        name: str,
        *,
        members: Sequence[str] = (),
        id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Space:
        body = without_none(name=name, members=list(members), id=id, metadata=metadata)
        return await self._create(Space, "/api/spaces", body)

    async def list(self, *, limit: int | None = None, cursor: str | None = None) -> Page[Space]:
        return await self._get(Page[Space], "/api/spaces", limit=limit, cursor=cursor)

    def all(self) -> AsyncIterator[Space]:
        return iterate_pages(lambda cursor: self.list(cursor=cursor))

    async def get(self, space_id: str) -> Space:
        return await self._get(Space, _space(space_id))

    async def update(
        self, space_id: str, *, name: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Space:
        return await self._send(Space, "PATCH", _space(space_id), without_none(name=name, metadata=metadata))

    async def delete(self, space_id: str) -> None:
        await self._delete(_space(space_id))

    async def list_members(self, space_id: str) -> Sequence[Member]:
        return (await self._get(Page[Member], f"{_space(space_id)}/members")).items

    async def add_member(self, space_id: str, entity_id: str) -> Member:
        path = f"{_space(space_id)}/members/{quote_segment(entity_id)}"
        return await self._send(Member, "PUT", path)

    async def remove_member(self, space_id: str, entity_id: str) -> None:
        await self._delete(f"{_space(space_id)}/members/{quote_segment(entity_id)}")

    async def list_messages(
        self,
        space_id: str,
        *,
        after: int | None = None,
        before: int | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page[Message]:
        """Returns messages, oldest first: the newest ones, or those `after` or `before` a `seq`."""
        path = f"{_space(space_id)}/messages"
        return await self._get(Page[Message], path, after=after, before=before, limit=limit, cursor=cursor)

    async def get_message(self, space_id: str, message_id: str) -> Message:
        return await self._get(Message, f"{_space(space_id)}/messages/{quote_segment(message_id)}")

    async def send_message(
        self,
        space_id: str,
        content: str,
        *,
        entity_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        reply_to: str | None = None,
        id: str | None = None,
    ) -> Message:
        """Sends a message: with a secret key as `entity_id`, with a token as its entity."""
        body = without_none(content=content, entityId=entity_id, metadata=metadata, replyTo=reply_to, id=id)
        return await self._create(Message, f"{_space(space_id)}/messages", body)

    def subscribe(
        self,
        space_id: str,
        *,
        last_event_id: str | int | None = None,
        format: StreamFormat = "native",
        from_start: bool = False,
    ) -> EventSubscription:
        """Iterates over the events of a space: new ones, those after `last_event_id`, or from the oldest stored one.

        async for event in client.spaces.subscribe(space_id):
            ...
        """
        query = stream_query(format, from_start)
        return EventSubscription(
            self._transport, f"{_space(space_id)}/stream", query=query, last_event_id=last_event_id
        )


class AgentsApi(ApiResource):
    """Agents with their inbox, runs, background tasks, history and documents."""

    async def list(self, *, limit: int | None = None, cursor: str | None = None) -> Page[Entity]:
        return await self._get(Page[Entity], "/api/agents", limit=limit, cursor=cursor)

    def all(self) -> AsyncIterator[Entity]:
        return iterate_pages(lambda cursor: self.list(cursor=cursor))

    async def get(self, agent_id: str) -> Entity:
        return await self._get(Entity, _agent(agent_id))

    async def list_inbox(
        self,
        agent_id: str,
        *,
        status: InboxStatus | None = None,
        limit: int | None = None,
        wait: float | None = None,
    ) -> Sequence[InboxEvent]:
        """Returns the events of the inbox. `wait`: how many seconds to wait for an event if there is none."""
        query = {"status": status, "limit": limit, "wait": wait}
        path = f"{_agent(agent_id)}/inbox"
        page = await self._send(Page[InboxEvent], "GET", path, query=query, no_timeout=wait is not None)
        return page.items

    async def push_event(self, agent_id: str, data: Any, *, event_id: str | None = None) -> bool:
        """Adds a service event to the inbox. Returns False if the inbox has had this `event_id` before."""
        body = without_none(eventId=event_id, data=data)
        return bool((await self._create(dict[str, Any], f"{_agent(agent_id)}/inbox", body))["fresh"])

    async def claim(
        self,
        agent_id: str,
        *,
        count: int | None = None,
        lease_seconds: float | None = None,
        types: Sequence[InboxType] | None = None,
        wait: float | None = None,
    ) -> InboxClaim:
        """Claims events. Those that are not acknowledged or released before the lease expires become pending again."""
        body = without_none(count=count, leaseSeconds=lease_seconds, types=types, wait=wait)
        return await self._send(InboxClaim, "POST", f"{_agent(agent_id)}/inbox/claim", body, no_timeout=True)

    async def acknowledge(self, agent_id: str, event_ids: Sequence[str], *, claim: str | None = None) -> Sequence[str]:
        """Acknowledges handled events. Returns the ids that the claim still had; the others have expired."""
        body = without_none(eventIds=list(event_ids), claim=claim)
        return (await self._post(dict[str, Any], f"{_agent(agent_id)}/inbox/done", body))["done"]

    async def release(
        self, agent_id: str, event_ids: Sequence[str], *, claim: str | None = None, error: str | None = None
    ) -> Sequence[InboxEvent]:
        """Releases events that could not be handled. They are retried with growing delays, and fail in the end."""
        body = without_none(eventIds=list(event_ids), claim=claim, error=error)
        return (await self._post(Page[InboxEvent], f"{_agent(agent_id)}/inbox/return", body)).items

    async def retry_event(self, agent_id: str, event_id: str) -> InboxEvent:
        """Makes an event that has failed pending again."""
        path = f"{_agent(agent_id)}/inbox/{quote_segment(event_id)}/retry"
        return await self._send(InboxEvent, "POST", path)

    async def list_runs(self, agent_id: str, *, limit: int | None = None, cursor: str | None = None) -> Page[RunRecord]:
        return await self._get(Page[RunRecord], f"{_agent(agent_id)}/runs", limit=limit, cursor=cursor)

    async def list_tasks(
        self,
        agent_id: str,
        *,
        date: str | None = None,
        status: TaskStatus | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page[TaskRecord]:
        """Returns background tasks, newest first. `date`: only those started on that day, as YYYY-MM-DD."""
        path = f"{_agent(agent_id)}/tasks"
        return await self._get(Page[TaskRecord], path, date=date, status=status, limit=limit, cursor=cursor)

    async def get_task(self, agent_id: str, task_id: str) -> TaskWithMessages:
        """Returns one background task with its conversation."""
        return await self._get(TaskWithMessages, f"{_agent(agent_id)}/tasks/{quote_segment(task_id)}")

    async def cancel_task(self, agent_id: str, task_id: str) -> TaskRecord:
        return await self._post(TaskRecord, f"{_agent(agent_id)}/tasks/{quote_segment(task_id)}/cancel")

    async def get_history(self, agent_id: str, *, limit: int | None = None, cursor: str | None = None) -> AgentHistory:
        """Returns the summaries of earlier cycles and the latest turns; `next` is the cursor of older turns."""
        return await self._get(AgentHistory, f"{_agent(agent_id)}/history", limit=limit, cursor=cursor)

    async def list_documents(
        self, agent_id: str, *, limit: int | None = None, cursor: str | None = None
    ) -> Page[Document]:
        """Returns the documents of the agent, without their texts."""
        return await self._get(Page[Document], f"{_agent(agent_id)}/documents", limit=limit, cursor=cursor)

    async def get_document(self, agent_id: str, document_id: str) -> DocumentWithText:
        return await self._get(DocumentWithText, f"{_agent(agent_id)}/documents/{quote_segment(document_id)}")

    async def add_document(
        self,
        agent_id: str,
        title: str,
        text: str,
        *,
        source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        id: str | None = None,
    ) -> Document:
        """Adds a document that the agent can search."""
        body = without_none(id=id, title=title, text=text, source=source, metadata=metadata)
        return await self._create(Document, f"{_agent(agent_id)}/documents", body)

    async def put_document(
        self,
        agent_id: str,
        document_id: str,
        title: str,
        text: str,
        *,
        source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Document:
        """Adds a document with an id, or replaces the one with that id."""
        body = without_none(title=title, text=text, source=source, metadata=metadata)
        path = f"{_agent(agent_id)}/documents/{quote_segment(document_id)}"
        return await self._send(Document, "PUT", path, body)

    async def delete_document(self, agent_id: str, document_id: str) -> None:
        await self._delete(f"{_agent(agent_id)}/documents/{quote_segment(document_id)}")


class ServersApi(ApiResource):
    """The MCP servers of the gateway."""

    async def list(self) -> Sequence[dict[str, Any]]:
        return (await self._get(Page[dict[str, Any]], "/api/servers")).items

    async def get(self, name: str) -> dict[str, Any]:
        return await self._get(dict[str, Any], f"/api/servers/{quote_segment(name)}")

    async def restart(self, name: str) -> dict[str, Any]:
        path = f"/api/servers/{quote_segment(name)}/restart"
        return await self._send(dict[str, Any], "POST", path, no_timeout=True)


class KeysApi(ApiResource):
    """The API keys of the gateway."""

    async def list(self, *, limit: int | None = None, cursor: str | None = None) -> Page[ApiKey]:
        return await self._get(Page[ApiKey], "/api/keys", limit=limit, cursor=cursor)

    def all(self) -> AsyncIterator[ApiKey]:
        return iterate_pages(lambda cursor: self.list(cursor=cursor))

    async def create(
        self,
        kind: Literal["secret", "public", "tools"],
        name: str | None = None,
        *,
        tools_allowed: Sequence[str] | None = None,
        tools_denied: Sequence[str] | None = None,
        agent_entity_id: str | None = None,
    ) -> ApiKey:
        """Creates a key. `key` of the response is its secret text, which is never shown again."""
        body = without_none(
            kind=kind,
            name=name,
            toolsAllowed=tools_allowed,
            toolsDenied=tools_denied,
            agentEntityId=agent_entity_id,
        )
        # Without an idempotency key: to repeat the response the gateway would have to store the secret text.
        return await self._send(ApiKey, "POST", "/api/keys", body)

    async def revoke(self, key_id: str) -> None:
        await self._delete(f"/api/keys/{quote_segment(key_id)}")


def stream_query(format: StreamFormat, from_start: bool) -> dict[str, Any]:
    return {
        "format": None if format == "native" else format,
        "from": "start" if from_start else None,
    }


def _space(space_id: str) -> str:
    return f"/api/spaces/{quote_segment(space_id)}"


def _agent(agent_id: str) -> str:
    return f"/api/agents/{quote_segment(agent_id)}"
