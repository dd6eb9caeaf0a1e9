"""Routes of documents: the texts in which an agent searches with `search_knowledge`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from toolspace.core.ids import new_id
from toolspace.core.stored_records import Document, DocumentWithText
from toolspace.errors import RefusedError
from toolspace.server.api_types import (
    NEW_ID_PATTERN,
    ONE_LINE,
    BodyWithMetadata,
    Name,
    NewId,
    PageQuery,
    ResultPage,
    build_page,
    check_no_nul,
    full_match_pattern,
)
from toolspace.server.idempotency import run_once
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Problem, Response, not_found
from toolspace.server.routes.agents import get_agent_id
from toolspace.server.routing import RouteTable
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program, long_running
from toolspace.storage.queries import documents

_DOCUMENTS = "/api/agents/{agentId}/documents"
_DOCUMENT = _DOCUMENTS + "/{documentId}"
_NEW_ID = re.compile(full_match_pattern(NEW_ID_PATTERN))

routes = RouteTable("documents")


class DocumentBody(BodyWithMetadata, frozen=True, kw_only=True):
    """A document for an agent."""

    title: Name
    """The title."""
    text: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=documents.MAX_DOCUMENT_BYTES,
            description=f"The text; up to {documents.MAX_DOCUMENT_BYTES:,} bytes.",
        ),
    ]
    source: (
        Annotated[str, Meta(min_length=1, max_length=1_000, pattern=ONE_LINE, examples=["https://example.com/faq"])]
        | None
    ) = None
    """Where the text comes from. The agent can cite it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_no_nul("text", self.text)


class NewDocumentBody(DocumentBody, frozen=True, kw_only=True):
    """A document to add."""

    id: NewId | None = None


@routes.add("GET", _DOCUMENTS, "List the documents of an agent, ordered by id, without their texts", query=PageQuery)
async def list_documents(request: Request) -> ResultPage[Document]:
    query = request.query(PageQuery)
    agent_id = await get_agent_id(request)
    records = await request.read(documents.list_documents, agent_id, after=query.cursor or "", limit=query.limit + 1)
    return build_page(records, query.limit)


@routes.add(
    "POST",
    _DOCUMENTS,
    "Add a document for an agent",
    description="The agent finds its passages with `search_knowledge`.",
    body=NewDocumentBody,
    creates=Document,
)
async def create_document(request: Request) -> Response:
    body = await request.json(NewDocumentBody)
    agent_id = await get_agent_id(request)
    document_id = body.id or new_id("doc")
    return await run_once(request, await _prepare_save(agent_id, document_id, body, replaces=False))


@routes.add("GET", _DOCUMENT, "Get a document of an agent, with its text")
async def get_document(request: Request) -> DocumentWithText:
    agent_id = await get_agent_id(request)
    document_id = request.params["documentId"]
    document = await request.read(documents.find, agent_id, document_id)
    if document is None:
        raise not_found("Document", document_id)
    return document


@routes.add(
    "PUT",
    _DOCUMENT,
    "Add or replace a document of an agent",
    description="A document from a configured folder cannot be replaced here: 409.",
    body=DocumentBody,
)
async def put_document(request: Request) -> Document:
    body = await request.json(DocumentBody)
    agent_id = await get_agent_id(request)
    document_id = request.params["documentId"]
    if _NEW_ID.fullmatch(document_id) is None:
        raise Problem(400, f'"{document_id}" is not a valid new id; use up to 100 letters, digits and _.:@~-')
    return await request.ledger.commit(await _prepare_save(agent_id, document_id, body, replaces=True))


@routes.add(
    "DELETE",
    _DOCUMENT,
    "Delete a document of an agent",
    description="A document from a configured folder returns when the folder is read again.",
    status=204,
)
async def delete_document(request: Request) -> Response:
    agent_id = await get_agent_id(request)
    document_id = request.params["documentId"]
    if not await request.ledger.write(documents.delete, agent_id, [document_id]):
        raise not_found("Document", document_id)
    return NO_CONTENT


async def _prepare_save(
    agent_id: str, document_id: str, body: DocumentBody, *, replaces: bool
) -> Callable[[Effects], Program[Document]]:
    """Returns a program that saves a document. The text is split in a thread, so that other requests do not wait."""
    fields: dict[str, Any] = {"title": body.title, "text": body.text, "source": body.source, "metadata": body.metadata}
    document = await asyncio.to_thread(documents.prepare, document_id, **fields)

    @long_running
    def save(_: Effects) -> Program[Document]:
        if not replaces and (yield from documents.exists(agent_id, document_id)):
            raise RefusedError("conflict", f'Document "{document_id}" exists already; PUT replaces it')
        return (yield from documents.save(agent_id, document))

    return save
