"""Routes for what agents can look up: the documents that are given to them, for whoever operates them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from toolspace.core.ids import new_id
from toolspace.core.records import Document, DocumentWithText
from toolspace.errors import RefusedError
from toolspace.server.api_types import (
    MAX_METADATA,
    NEW_ID_PATTERN,
    ONE_LINE,
    JsonRequestBody,
    Metadata,
    Name,
    NewId,
    PageQuery,
    ResultPage,
    build_page,
    check_json_size,
    check_no_nul,
    full_match_pattern,
)
from toolspace.server.authorization import Access, get_visible_agent
from toolspace.server.idempotency import run_once
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Response
from toolspace.server.routing import Route
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program, long_running
from toolspace.storage.queries import documents

_DOCUMENTS = "/api/agents/{agentId}/documents"
_DOCUMENT = _DOCUMENTS + "/{documentId}"
_TAG = "documents"
_ID = re.compile(full_match_pattern(NEW_ID_PATTERN))


class DocumentBody(JsonRequestBody, frozen=True, kw_only=True):
    """Something that an agent can look up."""

    title: Name
    text: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=documents.MAX_DOCUMENT_BYTES,
            description=f"Up to {documents.MAX_DOCUMENT_BYTES:,} bytes.",
        ),
    ]
    source: (
        Annotated[str, Meta(min_length=1, max_length=1_000, pattern=ONE_LINE, examples=["https://example.com/faq"])]
        | None
    ) = None
    metadata: Metadata = msgspec.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        check_no_nul("text", self.text)
        check_json_size("metadata", self.metadata, MAX_METADATA)


class NewDocumentBody(DocumentBody, frozen=True, kw_only=True):
    id: NewId | None = None


async def list_documents(request: Request) -> ResultPage[Document]:
    query = request.query(PageQuery)
    agent_id = await _agent(request)
    found = await request.gateway.ledger.read(
        documents.list_documents, agent_id, after=query.cursor or "", limit=query.limit + 1
    )
    return build_page(found, query.limit, lambda document: document.id)


async def add_document(request: Request) -> Response:
    body = await request.json(NewDocumentBody)
    agent_id = await _agent(request)
    document_id = body.id or new_id("doc")
    return await run_once(request, await _putting(agent_id, document_id, body, replaces=False))


async def get_document(request: Request) -> DocumentWithText:
    agent_id = await _agent(request)
    document_id = request.params["documentId"]
    found = await request.gateway.ledger.read(documents.find, agent_id, document_id)
    if found is None:
        raise _missing(document_id)
    return found


async def put_document(request: Request) -> Document:
    body = await request.json(DocumentBody)
    agent_id = await _agent(request)
    document_id = request.params["documentId"]
    if _ID.fullmatch(document_id) is None:
        raise Problem(400, f'"{document_id}" cannot be an id of your own; use up to 100 letters and digits')
    return await request.gateway.ledger.commit(await _putting(agent_id, document_id, body, replaces=True))


async def delete_document(request: Request) -> Response:
    agent_id = await _agent(request)
    document_id = request.params["documentId"]
    if not await request.gateway.ledger.write(documents.delete, agent_id, [document_id]):
        raise _missing(document_id)
    return NO_CONTENT


async def _putting(
    agent_id: str, document_id: str, body: DocumentBody, *, replaces: bool
) -> Callable[[Effects], Program[Document]]:
    """What keeps a document. Made ready in a thread: nobody else waits for that."""
    new = await asyncio.to_thread(
        documents.prepare,
        document_id,
        title=body.title,
        text=body.text,
        source=body.source,
        metadata=body.metadata,
    )

    @long_running
    def putting(_: Effects) -> Program[Document]:
        if not replaces and (yield from documents.exists(agent_id, document_id)):
            raise RefusedError("conflict", f'there is a document "{document_id}" already; PUT replaces it')
        return (yield from documents.save(agent_id, new))

    return putting


async def _agent(request: Request) -> str:
    agent = await get_visible_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    return agent.id


def _missing(document_id: str) -> Problem:
    return Problem(404, f'the agent has no document "{document_id}"')


ROUTES = [
    Route(
        method="GET",
        path=_DOCUMENTS,
        handler=list_documents,
        access=Access.SECRET,
        tag=_TAG,
        summary="The documents of an agent, by id, without their texts",
        query=PageQuery,
        response=ResultPage[Document],
    ),
    Route(
        method="POST",
        path=_DOCUMENTS,
        handler=add_document,
        access=Access.SECRET,
        tag=_TAG,
        summary="Give an agent a document to look things up in",
        description="`search_knowledge` finds passages of it from then on.",
        body=NewDocumentBody,
        response=Document,
        status=201,
        accepts_idempotency_key=True,
    ),
    Route(
        method="GET",
        path=_DOCUMENT,
        handler=get_document,
        access=Access.SECRET,
        tag=_TAG,
        summary="One document of an agent, with its text",
        response=DocumentWithText,
    ),
    Route(
        method="PUT",
        path=_DOCUMENT,
        handler=put_document,
        access=Access.SECRET,
        tag=_TAG,
        summary="Add a document of an agent, or replace it",
        description="One that comes from a folder is changed there: 409.",
        body=DocumentBody,
        response=Document,
    ),
    Route(
        method="DELETE",
        path=_DOCUMENT,
        handler=delete_document,
        access=Access.SECRET,
        tag=_TAG,
        summary="Take a document from an agent",
        description="One that comes from a folder is there again when the folder is next read.",
        status=204,
    ),
]
