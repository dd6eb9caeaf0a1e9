"""The gateway's entities, spaces, agents, servers and keys as methods. One call is one request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from toolspace.client.events import EventSubscription
from toolspace.client.responses import ApiKey, InboxClaim, Page, decode_response
from toolspace.client.transport import Transport, quote_segment
from toolspace.core.ids import new_id
from toolspace.core.records import (
    AgentHistory,
    Document,
    DocumentWithText,
    Entity,
    EntityType,
    InboxEvent,
    InboxStatus,
    InboxType,
    Member,
    Message,
    RunRecord,
    Space,
    TaskRecord,
    TaskStatus,
    TaskWithMessages,
)

T = TypeVar("T")
StreamFormat = Literal["native", "ui-message-stream", "ag-ui"]


class ApiResource:
    """What the parts of the API have in common."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def _get(self, kind: type[T], path: str, **query: Any) -> T:
        return decode_response(kind, await self._transport.request("GET", path, query=query))

    async def _create(self, kind: type[T], path: str, body: object) -> T:
        """Makes something, once: should the answer be lost, asking again under the same key finds what was made."""
        return decode_response(
            kind, await self._transport.request("POST", path, body=body, idempotency_key=new_id("idk"))
        )

    async def _do(self, kind: type[T], path: str, body: object = None) -> T:
        """Moves something to where it may be already: that may be said twice."""
        return decode_response(kind, await self._transport.request("POST", path, body=body, is_repeatable=True))

    async def _change(self, kind: type[T], path: str, body: object) -> T:
        return decode_response(kind, await self._transport.request("PATCH", path, body=body))

    async def _delete(self, path: str) -> None:
        await self._transport.request("DELETE", path)


def without_none(**members: Any) -> dict[str, Any]:
    """A body of what was given."""
    return {name: value for name, value in members.items() if value is not None}


async def iterate_pages(list_page: Callable[[str | None], Coroutine[Any, Any, Page[T]]]) -> AsyncIterator[T]:
    """Every item of a list, page after page."""
    cursor: str | None = None
    while True:
        page = await list_page(cursor)
        for item in page.items:
            yield item
        if page.next is None:
            return
        cursor = page.next


class EntitiesApi(ApiResource):
    """People, agents and services."""

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
        return await self._change(
            Entity, f"/api/entities/{quote_segment(entity_id)}", without_none(name=name, metadata=metadata)
        )

    async def delete(self, entity_id: str) -> None:
        await self._delete(f"/api/entities/{quote_segment(entity_id)}")

    async def create_token(self, entity_id: str, *, expires_in: int | None = None) -> str:
        """A token with which the entity can come by itself, beside the public key. `expires_in`: seconds."""
        path = f"/api/entities/{quote_segment(entity_id)}/token"
        return (await self._do(dict[str, Any], path, without_none(expiresIn=expires_in)))["token"]


class SpacesApi(ApiResource):
    """Spaces, who is in them, what is said there, and what happens there."""

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
        return await self._change(Space, _space(space_id), without_none(name=name, metadata=metadata))

    async def delete(self, space_id: str) -> None:
        await self._delete(_space(space_id))

    async def list_members(self, space_id: str) -> Sequence[Member]:
        return (await self._get(Page[Member], f"{_space(space_id)}/members")).items

    async def add_member(self, space_id: str, entity_id: str) -> Member:
        path = f"{_space(space_id)}/members/{quote_segment(entity_id)}"
        return decode_response(Member, await self._transport.request("PUT", path))

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
        """Oldest first: the newest ones, or those around a `seq`; `next` leads on in the same direction."""
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
        """Says something: as `entity_id` with a secret key, as oneself with a token."""
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
        """What happens in a space, from now on, behind an event, or from the first that is kept:

        async for event in client.spaces.subscribe(space_id):
            ...
        """
        query = stream_query(format, from_start)
        return EventSubscription(
            self._transport, f"{_space(space_id)}/stream", query=query, last_event_id=last_event_id
        )


class AgentsApi(ApiResource):
    """Agents, and what waits for them."""

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
        """What is in the inbox. `wait`: where there is nothing, so many seconds for something to come."""
        answer = await self._transport.request(
            "GET",
            f"{_agent(agent_id)}/inbox",
            query={"status": status, "limit": limit, "wait": wait},
            no_timeout=wait is not None,
        )
        return decode_response(Page[InboxEvent], answer).items

    async def push_event(self, agent_id: str, data: Any, *, event_id: str | None = None) -> bool:
        """Tells an agent news of a service. One `event_id` gets there once; False where it had been there before."""
        answer = await self._create(
            dict[str, Any], f"{_agent(agent_id)}/inbox", without_none(eventId=event_id, data=data)
        )
        return bool(answer["fresh"])

    async def claim(
        self,
        agent_id: str,
        *,
        count: int | None = None,
        lease_seconds: float | None = None,
        types: Sequence[InboxType] | None = None,
        wait: float | None = None,
    ) -> InboxClaim:
        """Takes events to look after. What is neither done nor given back before the lease ends goes to others."""
        body = without_none(count=count, leaseSeconds=lease_seconds, types=types, wait=wait)
        answer = await self._transport.request("POST", f"{_agent(agent_id)}/inbox/claim", body=body, no_timeout=True)
        return decode_response(InboxClaim, answer)

    async def acknowledge(self, agent_id: str, event_ids: Sequence[str], *, claim: str | None = None) -> Sequence[str]:
        """These events were looked after. Says which of them; the others were not in the claim's hands any more."""
        body = without_none(eventIds=list(event_ids), claim=claim)
        return (await self._do(dict[str, Any], f"{_agent(agent_id)}/inbox/done", body))["done"]

    async def release(
        self, agent_id: str, event_ids: Sequence[str], *, claim: str | None = None, error: str | None = None
    ) -> Sequence[InboxEvent]:
        """Events that could not be looked after: they come again, later and later, and after some times no more."""
        body = without_none(eventIds=list(event_ids), claim=claim, error=error)
        return (await self._do(Page[InboxEvent], f"{_agent(agent_id)}/inbox/return", body)).items

    async def retry_event(self, agent_id: str, event_id: str) -> InboxEvent:
        """Lets an event that failed for good be tried anew."""
        path = f"{_agent(agent_id)}/inbox/{quote_segment(event_id)}/retry"
        return decode_response(InboxEvent, await self._transport.request("POST", path))

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
        """What it has done in the background, newest first; `date`: only what began on that day, as YYYY-MM-DD."""
        path = f"{_agent(agent_id)}/tasks"
        return await self._get(Page[TaskRecord], path, date=date, status=status, limit=limit, cursor=cursor)

    async def get_task(self, agent_id: str, task_id: str) -> TaskWithMessages:
        """One task, with its conversation."""
        return await self._get(TaskWithMessages, f"{_agent(agent_id)}/tasks/{quote_segment(task_id)}")

    async def cancel_task(self, agent_id: str, task_id: str) -> TaskRecord:
        return await self._do(TaskRecord, f"{_agent(agent_id)}/tasks/{quote_segment(task_id)}/cancel")

    async def get_history(self, agent_id: str, *, limit: int | None = None, cursor: str | None = None) -> AgentHistory:
        """What it has in mind: what is left of earlier cycles, and its latest turns; `next` leads to older ones."""
        return await self._get(AgentHistory, f"{_agent(agent_id)}/history", limit=limit, cursor=cursor)

    async def list_documents(
        self, agent_id: str, *, limit: int | None = None, cursor: str | None = None
    ) -> Page[Document]:
        """What it can look up, without the texts."""
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
        """Gives an agent a document to look things up in."""
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
        """Adds a document under an id, or replaces the one that is there."""
        body = without_none(title=title, text=text, source=source, metadata=metadata)
        path = f"{_agent(agent_id)}/documents/{quote_segment(document_id)}"
        return decode_response(Document, await self._transport.request("PUT", path, body=body))

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
        return decode_response(dict[str, Any], await self._transport.request("POST", path, no_timeout=True))


class KeysApi(ApiResource):
    """The keys of the gateway."""

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
        """Makes a key; `key` of the answer is its text, which nobody can see again."""
        body = without_none(
            kind=kind,
            name=name,
            toolsAllowed=tools_allowed,
            toolsDenied=tools_denied,
            agentEntityId=agent_entity_id,
        )
        # Without a key for repeating it: the gateway would have to keep the text to answer the same again.
        return decode_response(ApiKey, await self._transport.request("POST", "/api/keys", body=body))

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
