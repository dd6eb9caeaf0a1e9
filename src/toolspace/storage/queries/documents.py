"""SQL programs for the documents of agents: storing, listing, and a full-text search over their passages (BM25).

Each word of a document has one row, which lists the passages with that word: few rows even for a long document.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from toolspace.core import json_text
from toolspace.core.stored_records import Document, DocumentOrigin, DocumentWithText
from toolspace.core.text_search import (
    IndexedDocument,
    Passage,
    bm25_scores,
    index_document,
    join_passages,
    proximity_score,
    query_words,
    word_weight,
)
from toolspace.errors import RefusedError
from toolspace.storage.database import Program, RowBatch, current_time, long_running
from toolspace.storage.queries.statement_builder import Table, count_changes, insert_into, placeholders

MAX_DOCUMENT_BYTES: Final = 1_000_000
"""The maximum size of one document, as UTF-8."""
MAX_DOCUMENTS: Final = 10_000
MAX_TOTAL_BYTES: Final = 100_000_000
"""The maximum size of all documents of one agent."""

_WORDS_AT_ONCE: Final = 200
_MAX_QUERY_WORDS: Final = 32
"""Of a longer query, only the rarest words are searched."""
_MANY_PASSAGES: Final = 1_000
_CANDIDATES: Final = 60
"""Passages whose text is read and scored."""


class PreparedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document with its search index, ready to be stored."""

    id: str
    title: str
    source: str | None
    metadata: Mapping[str, Any]
    origin: DocumentOrigin
    stamp: str | None
    """The size and modification time of the file; None if the document does not come from a file."""
    size: int
    digest: str
    index: IndexedDocument


class SearchMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A passage that matches a query."""

    document_id: str
    title: str
    source: str | None
    text: str
    score: float


class SearchMatches(msgspec.Struct, frozen=True):
    """The best matches, and how many passages match in all."""

    matches: list[SearchMatch]
    total: int


_DOCUMENT = Table("documents", Document, json=("metadata",))
_OR_REPLACE = (
    _DOCUMENT.on_conflict_update("entity_id, id", except_columns=("entity_id", "id", "created_at"))
    + ", stamp = excluded.stamp, words = excluded.words, digest = excluded.digest"
)


def prepare(
    document_id: str,
    *,
    title: str,
    text: str,
    source: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    origin: DocumentOrigin = "api",
    stamp: str | None = None,
) -> PreparedDocument:
    """Indexes a document. Takes a while for a long one, so do not call it on the event loop.

    Raises `RefusedError` if the document is too large.
    """
    title, text = _clean(title), _clean(text)
    size = len(text.encode())
    if size > MAX_DOCUMENT_BYTES:
        raise RefusedError(
            "invalid", f'the document "{title}" has {size:,} bytes; the limit is {MAX_DOCUMENT_BYTES:,}, so split it'
        )
    return PreparedDocument(
        id=document_id,
        title=title,
        source=None if source is None else _clean(source),
        metadata=metadata or {},
        origin=origin,
        stamp=stamp,
        size=size,
        digest=hashlib.sha256(f"{title}\0{text}".encode()).hexdigest(),
        index=index_document(title, text),
    )


@long_running
def save(entity_id: str, new: PreparedDocument) -> Program[Document]:
    """Stores a document, or replaces the one with the same id.

    Raises `RefusedError` if the agent has too many, or if the existing one has another origin (folder or API).
    """
    # The update changes nothing. It locks the row, so that nobody changes the document until its words are stored.
    previous = yield (
        "UPDATE documents SET stamp = stamp WHERE entity_id = ? AND id = ? RETURNING digest, origin",
        (entity_id, new.id),
    )
    if previous and previous[0][1] != new.origin:
        raise RefusedError("conflict", f'the document "{new.id}" exists already, with the origin {previous[0][1]!r}')
    yield from _check_limits(entity_id, new)
    now = yield from current_time()
    document = yield from _DOCUMENT.insert(
        _OR_REPLACE,
        id=new.id,
        entity_id=entity_id,
        title=new.title,
        source=new.source,
        origin=new.origin,
        size=new.size,
        passages=len(new.index.passages),
        metadata=new.metadata,
        created_at=now,
        updated_at=now,
        stamp=new.stamp,
        words=new.index.words,
        digest=new.digest,
    )
    assert document is not None
    if not previous or previous[0][0] != new.digest:
        for table in ("document_words", "document_passages"):
            yield f"DELETE FROM {table} WHERE entity_id = ? AND document_id = ?", (entity_id, new.id)
        yield from _add_text(entity_id, new)
    return document


@long_running
def delete(entity_id: str, document_ids: Sequence[str]) -> Program[int]:
    """Deletes documents of one agent; returns how many were deleted."""
    delete = "DELETE FROM documents WHERE entity_id = ? AND id = ?"
    deleted_count = 0
    for document_id in dict.fromkeys(document_ids):
        deleted_count += yield from count_changes(delete, entity_id, document_id)
    return deleted_count


def find(entity_id: str, document_id: str) -> Program[DocumentWithText | None]:
    document = yield from _DOCUMENT.find("WHERE entity_id = ? AND id = ?", entity_id, document_id)
    if document is None:
        return None
    select = "SELECT start, text FROM document_passages WHERE entity_id = ? AND document_id = ? ORDER BY number"
    rows = yield select, (entity_id, document_id)
    text = join_passages(Passage(row[0], row[1]) for row in rows)
    return DocumentWithText(**msgspec.structs.asdict(document), text=text)


def exists(entity_id: str, document_id: str) -> Program[bool]:
    return bool((yield "SELECT 1 FROM documents WHERE entity_id = ? AND id = ?", (entity_id, document_id)))


def list_documents(entity_id: str, *, after: str = "", limit: int = 100) -> Program[list[Document]]:
    """The next documents after an id, in the order of their ids."""
    return _DOCUMENT.select("WHERE entity_id = ? AND id > ? ORDER BY id LIMIT ?", entity_id, after, limit)


def list_file_stamps(entity_id: str) -> Program[dict[str, str | None]]:
    """The stamp of every document that comes from a folder, by id: the state of its file when it was read."""
    rows = yield "SELECT id, stamp FROM documents WHERE entity_id = ? AND origin = 'folder'", (entity_id,)
    return {row[0]: row[1] for row in rows}


def search(entity_id: str, query: str, *, limit: int) -> Program[SearchMatches]:
    """The passages that match a query best. Rare words count more, and words that are near each other."""
    words = query_words(_clean(query))
    weights, mean_length = yield from _weigh_words(entity_id, words)
    if not weights:
        return SearchMatches([], 0)
    select = "SELECT word, document_id, postings FROM document_words"
    rows = yield f"{select} WHERE entity_id = ? AND word IN ({placeholders(weights)})", (entity_id, *weights)
    scores: dict[_PassageKey, float] = {}
    for word, document_id, postings in rows:
        for number, score in bm25_scores(json_text.decode(postings), weights[word], mean_length):
            key = document_id, number
            scores[key] = scores.get(key, 0.0) + score
    best = heapq.nsmallest(max(_CANDIDATES, limit), scores, key=lambda key: (-scores[key], key))
    candidates = yield from _read_passages(entity_id, best)
    phrase = [word for word in words if word in weights]
    matches = [
        msgspec.structs.replace(match, score=round(scores[key] + proximity_score(phrase, match.text, weights), 4))
        for key, match in candidates
    ]
    matches.sort(key=lambda match: -match.score)
    return SearchMatches(matches[:limit], len(scores))


_PassageKey = tuple[str, int]
"""A document, and the number of a passage in it."""


def _weigh_words(entity_id: str, words: Sequence[str]) -> Program[tuple[dict[str, float], float]]:
    """The weight of each word of a query that the agent's documents have, and the mean length of a passage."""
    select = "SELECT CAST(SUM(passages) AS BIGINT), CAST(SUM(words) AS BIGINT) FROM documents WHERE entity_id = ?"
    rows = yield select, (entity_id,)
    total: int = rows[0][0] or 0
    if not total or not words:
        return {}, 1.0
    mean_length = max(rows[0][1] / total, 1.0)
    passage_counts: dict[str, int] = {}
    for start in range(0, len(words), _WORDS_AT_ONCE):
        chunk = words[start : start + _WORDS_AT_ONCE]
        rows = yield (
            "SELECT word, CAST(SUM(passages) AS BIGINT) FROM document_words "
            f"WHERE entity_id = ? AND word IN ({placeholders(chunk)}) GROUP BY word",
            (entity_id, *chunk),
        )
        passage_counts |= {row[0]: row[1] for row in rows}
    rarest = sorted(passage_counts, key=lambda word: (passage_counts[word], word))[:_MAX_QUERY_WORDS]
    if total > _MANY_PASSAGES:  # A word in every second passage says little, and costs most to look up.
        rarest = [word for word in rarest if passage_counts[word] * 2 <= total] or rarest[:1]
    return {word: word_weight(passage_counts[word], total) for word in rarest}, mean_length


def _read_passages(entity_id: str, keys: Sequence[_PassageKey]) -> Program[list[tuple[_PassageKey, SearchMatch]]]:
    """The passages of these keys that still exist."""
    select = (
        "SELECT title, source, text FROM document_passages JOIN documents ON documents.entity_id = "
        "document_passages.entity_id AND documents.id = document_id "
        "WHERE document_passages.entity_id = ? AND document_id = ? AND number = ?"
    )
    passages: list[tuple[_PassageKey, SearchMatch]] = []
    for document_id, number in keys:
        rows = yield select, (entity_id, document_id, number)
        for title, source, text in rows:
            match = SearchMatch(document_id=document_id, title=title, source=source, text=text.strip(), score=0.0)
            passages.append(((document_id, number), match))
    return passages


def _check_limits(entity_id: str, new: PreparedDocument) -> Program[None]:
    select = "SELECT COUNT(*), CAST(COALESCE(SUM(size), 0) AS BIGINT) FROM documents WHERE entity_id = ?"
    rows = yield select, (entity_id,)
    count, size = rows[0]
    rows = yield "SELECT size FROM documents WHERE entity_id = ? AND id = ?", (entity_id, new.id)
    if rows:
        count, size = count - 1, size - rows[0][0]
    if count >= MAX_DOCUMENTS:
        raise RefusedError("invalid", f"an agent has at most {MAX_DOCUMENTS:,} documents; delete some first")
    if size + new.size > MAX_TOTAL_BYTES:
        raise RefusedError(
            "invalid", f"the documents of an agent have at most {MAX_TOTAL_BYTES:,} bytes in all; delete some first"
        )


def _add_text(entity_id: str, new: PreparedDocument) -> Program[None]:
    passages = enumerate(new.index.passages)
    yield (
        insert_into("document_passages", ("entity_id", "document_id", "number", "start", "text")),
        RowBatch((entity_id, new.id, number, passage.start, passage.text) for number, passage in passages),
    )
    words = sorted(new.index.postings.items())  # Sorted, so that two writers cannot deadlock.
    yield (
        insert_into("document_words", ("entity_id", "document_id", "word", "passages", "postings")),
        RowBatch((entity_id, new.id, word, len(places) // 3, json_text.encode(places)) for word, places in words),
    )


def _clean(text: str) -> str:
    """Text that both databases can store."""
    return json_text.valid_text(text.replace("\0", " ") if "\0" in text else text)
