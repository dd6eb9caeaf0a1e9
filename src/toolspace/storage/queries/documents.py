"""Programs for what agents can look up: documents, the words in them, and a ranking of their passages (BM25).

Of each word in a document there is one row, with the passages that have it: few rows even for a long document.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import Document, DocumentOrigin, DocumentWithText
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
from toolspace.storage.database import Program, Row, long_running

MAX_DOCUMENT_BYTES: Final = 1_000_000
"""Of one document, as UTF-8."""
MAX_DOCUMENTS: Final = 10_000
MAX_TOTAL_BYTES: Final = 100_000_000
"""Bytes of all documents of one agent."""

_SHOWN = "id, entity_id, title, source, origin, size, passages, metadata, created_at, updated_at"
_ROWS_AT_ONCE: Final = 200
_MOST_WORDS: Final = 32
"""Of a query; the rarest ones count."""
_MANY: Final = 1_000
_CANDIDATES: Final = 60
"""Passages whose text is looked at."""


class PreparedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document that is to be kept, ready to be found."""

    id: str
    title: str
    source: str | None
    metadata: Mapping[str, Any]
    origin: DocumentOrigin
    stamp: str | None
    """Of a file: when it was changed last, and how large it is."""
    size: int
    digest: str
    indexed: IndexedDocument


class SearchMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A passage that fits a query."""

    document_id: str
    title: str
    source: str | None
    text: str
    score: float


class SearchMatches(msgspec.Struct, frozen=True):
    """The best passages, and how many fit in all."""

    matches: list[SearchMatch]
    total: int


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
    """Makes a document ready to be kept. Takes a while for a long one: not on the event loop.

    Raises `RefusedError` where it is too large.
    """
    title, text = _clean(title), _clean(text)
    size = len(text.encode())
    if size > MAX_DOCUMENT_BYTES:
        raise RefusedError(
            "invalid", f'the document "{title}" has {size:,} bytes; one has at most {MAX_DOCUMENT_BYTES:,}, so split it'
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
        indexed=index_document(title, text),
    )


@long_running
def save(entity_id: str, new: PreparedDocument) -> Program[Document]:
    """Keeps a document, in place of the one of its id if there is one. Raises `RefusedError` where there are too many,
    or it would pass from a folder to the API or back."""
    # Written, not only looked at: nobody else changes it until its words are in place.
    rows = yield (
        "UPDATE documents SET stamp = stamp WHERE entity_id = ? AND id = ? RETURNING digest, origin",
        (entity_id, new.id),
    )
    if rows and rows[0][1] != new.origin:
        raise RefusedError("conflict", f'there is a document "{new.id}" already, from elsewhere ({rows[0][1]})')
    yield from _check_room(entity_id, new)
    now = now_ms()
    stored = yield (
        "INSERT INTO documents (entity_id, id, title, source, origin, stamp, size, passages, words, created_at, "
        "updated_at, digest, metadata) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (entity_id, id) DO UPDATE SET title = excluded.title, source = excluded.source, "
        "origin = excluded.origin, stamp = excluded.stamp, size = excluded.size, passages = excluded.passages, "
        "words = excluded.words, updated_at = excluded.updated_at, digest = excluded.digest, "
        f"metadata = excluded.metadata RETURNING {_SHOWN}",
        (
            entity_id,
            new.id,
            new.title,
            new.source,
            new.origin,
            new.stamp,
            new.size,
            len(new.indexed.passages),
            new.indexed.words,
            now,
            now,
            new.digest,
            json_text.encode_for_storage(new.metadata),
        ),
    )
    if not rows or rows[0][0] != new.digest:
        for table in ("document_words", "document_passages"):
            yield f"DELETE FROM {table} WHERE entity_id = ? AND document_id = ?", (entity_id, new.id)
        yield from _add_text(entity_id, new)
    return _document(stored[0])


@long_running
def delete(entity_id: str, document_ids: Sequence[str]) -> Program[int]:
    """Says how many of them there were."""
    deleted = 0
    for document_id in dict.fromkeys(document_ids):
        rows = yield "DELETE FROM documents WHERE entity_id = ? AND id = ? RETURNING id", (entity_id, document_id)
        deleted += len(rows)
    return deleted


def find(entity_id: str, document_id: str) -> Program[DocumentWithText | None]:
    rows = yield f"SELECT {_SHOWN} FROM documents WHERE entity_id = ? AND id = ?", (entity_id, document_id)
    if not rows:
        return None
    document = _document(rows[0])
    rows = yield (
        "SELECT start, text FROM document_passages WHERE entity_id = ? AND document_id = ? ORDER BY number",
        (entity_id, document_id),
    )
    text = join_passages(Passage(row[0], row[1]) for row in rows)
    return DocumentWithText(**msgspec.structs.asdict(document), text=text)


def exists(entity_id: str, document_id: str) -> Program[bool]:
    rows = yield "SELECT 1 FROM documents WHERE entity_id = ? AND id = ?", (entity_id, document_id)
    return bool(rows)


def list_documents(entity_id: str, *, after: str = "", limit: int = 100) -> Program[list[Document]]:
    """Documents by id."""
    rows = yield (
        f"SELECT {_SHOWN} FROM documents WHERE entity_id = ? AND id > ? ORDER BY id LIMIT ?",
        (entity_id, after, limit),
    )
    return [_document(row) for row in rows]


def list_file_stamps(entity_id: str) -> Program[dict[str, str | None]]:
    """Of every document that comes from a folder, by id: the state of its file when it was read."""
    rows = yield "SELECT id, stamp FROM documents WHERE entity_id = ? AND origin = 'folder'", (entity_id,)
    return {row[0]: row[1] for row in rows}


def search(entity_id: str, query: str, *, limit: int) -> Program[SearchMatches]:
    """The passages that fit a query best. Rare words count more, and words that stand near each other."""
    wanted = query_words(_clean(query))
    weights, mean = yield from _weights(entity_id, wanted)
    if not weights:
        return SearchMatches([], 0)
    rows = yield (
        f"SELECT word, document_id, postings FROM document_words WHERE entity_id = ? AND word IN ({_marks(weights)})",
        (entity_id, *weights),
    )
    scores: dict[_Place, float] = {}
    for word, document_id, postings in rows:
        for number, score in bm25_scores(json_text.decode(postings), weights[word], mean):
            place = document_id, number
            scores[place] = scores.get(place, 0.0) + score
    best = heapq.nsmallest(max(_CANDIDATES, limit), scores, key=lambda place: (-scores[place], place))
    found = yield from _read(entity_id, best)
    phrase = [word for word in wanted if word in weights]
    hits = [
        msgspec.structs.replace(hit, score=round(scores[place] + proximity_score(phrase, hit.text, weights), 4))
        for place, hit in found
    ]
    hits.sort(key=lambda hit: -hit.score)
    return SearchMatches(hits[:limit], len(scores))


_Place = tuple[str, int]
"""A document, and the number of a passage in it."""


def _weights(entity_id: str, wanted: Sequence[str]) -> Program[tuple[dict[str, float], float]]:
    """What each word of a query counts, for those that the agent's documents have; and how long a passage is."""
    rows = yield (
        "SELECT CAST(SUM(passages) AS BIGINT), CAST(SUM(words) AS BIGINT) FROM documents WHERE entity_id = ?",
        (entity_id,),
    )
    total: int = rows[0][0] or 0
    if not total or not wanted:
        return {}, 1.0
    mean = max(rows[0][1] / total, 1.0)
    spread: dict[str, int] = {}
    for start in range(0, len(wanted), _ROWS_AT_ONCE):
        some = wanted[start : start + _ROWS_AT_ONCE]
        rows = yield (
            "SELECT word, CAST(SUM(passages) AS BIGINT) FROM document_words "
            f"WHERE entity_id = ? AND word IN ({_marks(some)}) GROUP BY word",
            (entity_id, *some),
        )
        spread |= {row[0]: row[1] for row in rows}
    rarest = sorted(spread, key=lambda word: (spread[word], word))[:_MOST_WORDS]
    telling = rarest
    if total > _MANY:  # What is in every other passage says little, and costs most to look at.
        telling = [word for word in rarest if spread[word] * 2 <= total] or rarest[:1]
    return {word: word_weight(spread[word], total) for word in telling}, mean


def _read(entity_id: str, places: Sequence[_Place]) -> Program[list[tuple[_Place, SearchMatch]]]:
    """The passages at these places, those that are still there."""
    found: list[tuple[_Place, SearchMatch]] = []
    for document_id, number in places:
        rows = yield (
            "SELECT title, source, text FROM document_passages JOIN documents ON documents.entity_id = "
            "document_passages.entity_id AND documents.id = document_id "
            "WHERE document_passages.entity_id = ? AND document_id = ? AND number = ?",
            (entity_id, document_id, number),
        )
        for title, source, text in rows:
            hit = SearchMatch(document_id=document_id, title=title, source=source, text=text.strip(), score=0.0)
            found.append(((document_id, number), hit))
    return found


def _check_room(entity_id: str, new: PreparedDocument) -> Program[None]:
    rows = yield (
        "SELECT COUNT(*), CAST(COALESCE(SUM(size), 0) AS BIGINT) FROM documents WHERE entity_id = ?",
        (entity_id,),
    )
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
    passages = enumerate(new.indexed.passages)
    yield from _add_rows(
        "document_passages (entity_id, document_id, number, start, text)",
        [(entity_id, new.id, number, passage.start, passage.text) for number, passage in passages],
    )
    postings = sorted(new.indexed.postings.items())  # In one order: two writers must not wait for each other.
    yield from _add_rows(
        "document_words (entity_id, word, document_id, passages, postings)",
        [(entity_id, word, new.id, len(places) // 3, json_text.encode(places)) for word, places in postings],
    )


def _add_rows(where: str, rows: Sequence[tuple[str | int, ...]]) -> Program[None]:
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[start : start + _ROWS_AT_ONCE]
        marks = ", ".join(["(?, ?, ?, ?, ?)"] * len(some))
        yield f"INSERT INTO {where} VALUES {marks}", [value for row in some for value in row]


def _marks(values: Sequence[str] | Mapping[str, float]) -> str:
    return ", ".join("?" * len(values))


def _clean(text: str) -> str:
    """A text that every database keeps."""
    return json_text.valid_text(text.replace("\0", " ") if "\0" in text else text)


def _document(row: Row) -> Document:
    return Document(
        id=row[0],
        entity_id=row[1],
        title=row[2],
        source=row[3],
        origin=row[4],
        size=row[5],
        passages=row[6],
        metadata=json_text.decode(row[7]),
        created_at=row[8],
        updated_at=row[9],
    )
