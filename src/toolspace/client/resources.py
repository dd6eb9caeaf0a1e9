"""The routes for entities, spaces, agents, servers and keys as methods, and the base of all such classes.

Each method sends one request. `client` has the routes for tools, calls and runs. Records such as `Entity` and `Message`
are in `toolspace.core.stored_records`; the types of other responses stand here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

from toolspace.client.acknowledgements import Acknowledgements
from toolspace.client.errors import UnexpectedResponse
from toolspace.client.events import EventSubscription
from toolspace.client.transport import Transport, api_path
from toolspace.core.approvals import ApprovalScope
from toolspace.core.ids import new_id
from toolspace.core.stored_records import (
    AgentEntity,
    AgentHistory,
    ApprovalRecord,
    Document,
    DocumentWithText,
    Entity,
    EntityType,
    InboxEvent,
    InboxStatus,
    InboxType,
    Member,
    Message,
    Record,
    RunRecord,
    Space,
    StreamFormat,
    TaskRecord,
    TaskStatus,
    TaskWithMessages,
)

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A page of a list. `next` is the cursor of the next page; None on the last one."""

    items: list[T]
    next: str | None = None


class InboxClaim(Record, frozen=True):
    """Claimed inbox events. Each must be acknowledged or released with this claim before the lease expires."""

    claim: str
    lease_until: int
    items: list[InboxEvent]


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

    def _subscribe(
        self, path: str, last_event_id: str | int | None, format: StreamFormat, from_start: bool
    ) -> EventSubscription:
        query = {"format": format, "from": "start" if from_start else None}
        return EventSubscription(self._transport, path, query=query, last_event_id=last_event_id)


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
        return await self._get(Entity, api_path("entities", entity_id))

    async def update(
        self, entity_id: str, *, name: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Entity:
        body = without_none(name=name, metadata=metadata)
        return await self._send(Entity, "PATCH", api_path("entities", entity_id), body)

    async def delete(self, entity_id: str) -> None:
        await self._delete(api_path("entities", entity_id))

    async def create_token(self, entity_id: str, *, expires_in: int | None = None) -> str:
        """Returns a token for the entity, which it sends together with the public key. `expires_in`: seconds."""
        path, body = api_path("entities", entity_id, "token"), without_none(expiresIn=expires_in)
        return (await self._post(dict[str, Any], path, body))["token"]


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
        return await self._get(Space, api_path("spaces", space_id))

    async def update(
        self, space_id: str, *, name: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Space:
        body = without_none(name=name, metadata=metadata)
        return await self._send(Space, "PATCH", api_path("spaces", space_id), body)

    async def delete(self, space_id: str) -> None:
        await self._delete(api_path("spaces", space_id))

    async def list_members(self, space_id: str) -> Sequence[Member]:
        return (await self._get(Page[Member], api_path("spaces", space_id, "members"))).items

    async def add_member(self, space_id: str, entity_id: str) -> Member:
        return await self._send(Member, "PUT", api_path("spaces", space_id, "members", entity_id))

    async def remove_member(self, space_id: str, entity_id: str) -> None:
        await self._delete(api_path("spaces", space_id, "members", entity_id))

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
        path = api_path("spaces", space_id, "messages")
        return await self._get(Page[Message], path, after=after, before=before, limit=limit, cursor=cursor)

    async def get_message(self, space_id: str, message_id: str) -> Message:
        return await self._get(Message, api_path("spaces", space_id, "messages", message_id))

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
        return await self._create(Message, api_path("spaces", space_id, "messages"), body)

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
        return self._subscribe(api_path("spaces", space_id, "stream"), last_event_id, format, from_start)


class AgentsApi(ApiResource):
    """Agents with their inbox, runs, background tasks, history and documents."""

    def __init__(self, transport: Transport, acknowledgements: Acknowledgements) -> None:
        super().__init__(transport)
        self._acknowledgements = acknowledgements

    async def list(self, *, limit: int | None = None, cursor: str | None = None) -> Page[AgentEntity]:
        return await self._get(Page[AgentEntity], "/api/agents", limit=limit, cursor=cursor)

    def all(self) -> AsyncIterator[AgentEntity]:
        return iterate_pages(lambda cursor: self.list(cursor=cursor))

    async def get(self, agent_id: str) -> AgentEntity:
        return await self._get(AgentEntity, api_path("agents", agent_id))

    async def list_inbox(
        self,
        agent_id: str,
        *,
        status: InboxStatus | None = None,
        session: str | None = None,
        limit: int | None = None,
        wait: float | None = None,
    ) -> Sequence[InboxEvent]:
        """Returns the events of the inbox, or of one session. `wait`: how many seconds to wait for an event if there
        is none."""
        await self._acknowledgements.flush()
        query = {"status": status, "session": session, "limit": limit, "wait": wait}
        path, no_timeout = api_path("agents", agent_id, "inbox"), wait is not None
        return (await self._send(Page[InboxEvent], "GET", path, query=query, no_timeout=no_timeout)).items

    async def push_event(
        self, agent_id: str, data: Any, *, event_id: str | None = None, session: str | None = None
    ) -> bool:
        """Adds a service event to the inbox, for one session of the agent if it is given. Returns False if the inbox
        already has an event with this id."""
        body = without_none(eventId=event_id, session=session, data=data)
        return bool((await self._create(dict[str, Any], api_path("agents", agent_id, "inbox"), body))["fresh"])

    async def claim(
        self,
        agent_id: str,
        *,
        count: int | None = None,
        lease_seconds: float | None = None,
        types: Sequence[InboxType] | None = None,
        session: str | None = None,
        wait: float | None = None,
    ) -> InboxClaim:
        """Claims events, only those of a session if it is given. Those that are not acknowledged or released before
        the lease expires become pending again."""
        await self._acknowledgements.flush()
        body = without_none(count=count, leaseSeconds=lease_seconds, types=types, session=session, wait=wait)
        return await self._send(
            InboxClaim, "POST", api_path("agents", agent_id, "inbox", "claim"), body, no_timeout=True
        )

    async def acknowledge(self, agent_id: str, event_ids: Sequence[str], *, claim: str | None = None) -> Sequence[str]:
        """Acknowledges handled events. Returns the ids that the claim still had; for the others the lease expired."""
        body = without_none(eventIds=list(event_ids), claim=claim)
        return (await self._post(dict[str, Any], api_path("agents", agent_id, "inbox", "done"), body))["done"]

    async def release(
        self, agent_id: str, event_ids: Sequence[str], *, claim: str | None = None, error: str | None = None
    ) -> Sequence[InboxEvent]:
        """Releases events that were not handled. They are retried with growing delays, and fail after the last try."""
        body = without_none(eventIds=list(event_ids), claim=claim, error=error)
        return (await self._post(Page[InboxEvent], api_path("agents", agent_id, "inbox", "return"), body)).items

    async def retry_event(self, agent_id: str, event_id: str) -> InboxEvent:
        """Makes a failed event pending again."""
        return await self._send(InboxEvent, "POST", api_path("agents", agent_id, "inbox", event_id, "retry"))

    async def list_runs(self, agent_id: str, *, limit: int | None = None, cursor: str | None = None) -> Page[RunRecord]:
        return await self._get(Page[RunRecord], api_path("agents", agent_id, "runs"), limit=limit, cursor=cursor)

    async def list_tasks(
        self,
        agent_id: str,
        *,
        date: str | None = None,
        status: TaskStatus | None = None,
        session: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page[TaskRecord]:
        """Returns background tasks, newest first. `date`: only those started on that day, as YYYY-MM-DD. `session`:
        only those that this session started."""
        path = api_path("agents", agent_id, "tasks")
        return await self._get(
            Page[TaskRecord], path, date=date, status=status, session=session, limit=limit, cursor=cursor
        )

    async def get_task(self, agent_id: str, task_id: str) -> TaskWithMessages:
        """Returns one background task with its conversation."""
        return await self._get(TaskWithMessages, api_path("agents", agent_id, "tasks", task_id))

    async def cancel_task(self, agent_id: str, task_id: str) -> TaskRecord:
        return await self._post(TaskRecord, api_path("agents", agent_id, "tasks", task_id, "cancel"))

    async def get_history(
        self, agent_id: str, *, session: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> AgentHistory:
        """Returns the summary of earlier cycles and the latest turns of a session, by default the agent's main one;
        `next` is the cursor of older turns."""
        path = api_path("agents", agent_id, "history")
        return await self._get(AgentHistory, path, session=session, limit=limit, cursor=cursor)

    async def list_documents(
        self, agent_id: str, *, limit: int | None = None, cursor: str | None = None
    ) -> Page[Document]:
        """Returns the documents of the agent, without their texts."""
        return await self._get(Page[Document], api_path("agents", agent_id, "documents"), limit=limit, cursor=cursor)

    async def get_document(self, agent_id: str, document_id: str) -> DocumentWithText:
        return await self._get(DocumentWithText, api_path("agents", agent_id, "documents", document_id))

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
        return await self._create(Document, api_path("agents", agent_id, "documents"), body)

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
        return await self._send(Document, "PUT", api_path("agents", agent_id, "documents", document_id), body)

    async def delete_document(self, agent_id: str, document_id: str) -> None:
        await self._delete(api_path("agents", agent_id, "documents", document_id))


class ServersApi(ApiResource):
    """The MCP servers of the gateway."""

    async def list(self) -> Sequence[dict[str, Any]]:
        return (await self._get(Page[dict[str, Any]], "/api/servers")).items

    async def get(self, name: str) -> dict[str, Any]:
        return await self._get(dict[str, Any], api_path("servers", name))

    async def restart(self, name: str) -> dict[str, Any]:
        return await self._send(dict[str, Any], "POST", api_path("servers", name, "restart"), no_timeout=True)


class ApprovalsApi(ApiResource):
    """Calls that wait for the approval of a person."""

    async def list(
        self,
        *,
        status: str | None = None,
        run_id: str | None = None,
        space_id: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page[ApprovalRecord]:
        """Lists those that wait for a decision, newest first; with `status` others, or `all`."""
        query = {"status": status, "runId": run_id, "spaceId": space_id, "limit": limit, "cursor": cursor}
        return await self._get(Page[ApprovalRecord], "/api/approvals", **query)

    async def decide(
        self,
        approval_id: str,
        decision: Literal["approve", "deny"],
        *,
        reason: str | None = None,
        remember: ApprovalScope | None = None,
    ) -> ApprovalRecord:
        """Approves or denies a call, once. An approved call is executed by the gateway."""
        body = without_none(decision=decision, reason=reason, remember=remember)
        return await self._send(ApprovalRecord, "POST", api_path("approvals", approval_id), body)


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
        scope = {"toolsAllowed": tools_allowed, "toolsDenied": tools_denied, "agentEntityId": agent_entity_id}
        # Without an idempotency key: to repeat the response the gateway would have to store the secret text.
        return await self._send(ApiKey, "POST", "/api/keys", without_none(kind=kind, name=name, **scope))

    async def revoke(self, key_id: str) -> None:
        await self._delete(api_path("keys", key_id))
