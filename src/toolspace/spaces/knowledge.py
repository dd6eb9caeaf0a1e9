"""What agents can look up: documents that someone adds, and files in folders. Finds by words, and where an embedder is
given orders what was found by meaning."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import mul
from pathlib import Path
from typing import Any

import msgspec

from toolspace.core.embedder import Embedder
from toolspace.core.ids import new_id
from toolspace.core.records import Document
from toolspace.errors import ModelError, RefusedError
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.text_folders import TextFile, text_files
from toolspace.storage.queries import documents
from toolspace.storage.queries.documents import Found, Hit, NewDocument

_log = logging.getLogger("toolspace.knowledge")

_REORDERED = 30
"""Of what was found by words, so many are ordered by meaning."""
_MOST_VECTORS = 2_000
_BY_MEANING = 0.6
"""What meaning counts, and words the rest."""


class Synced(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an agent's folders."""

    kept: int
    """Files that are as they were."""
    written: int
    removed: int
    skipped: Sequence[str]
    """Files that are no documents, and why."""


class Library:
    """The documents of all agents. Each sees its own."""

    def __init__(self, ledger: Ledger, embedder: Embedder | None = None) -> None:
        self._ledger = ledger
        self._embedder = embedder
        self._vectors: OrderedDict[bytes, array[float]] = OrderedDict()
        """Of passages that were looked at lately, of length one."""

    async def put(
        self,
        entity_id: str,
        document_id: str | None = None,
        *,
        title: str,
        text: str,
        source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Document:
        """Adds a document, or replaces one. Raises `RefusedError` where it is too large or there are too many."""
        new = await asyncio.to_thread(
            documents.prepare,
            document_id or new_id("doc"),
            title=title,
            text=text,
            source=source,
            metadata=metadata,
        )
        return await self._ledger.write(documents.put, entity_id, new)

    async def search(self, entity_id: str, query: str, *, limit: int = 5) -> Found:
        """The passages of an agent's documents that fit a query best."""
        if self._embedder is None:
            return await self._ledger.read(documents.search, entity_id, query, limit=limit)
        found = await self._ledger.read(documents.search, entity_id, query, limit=max(limit, _REORDERED))
        try:
            hits = await self._reordered(self._embedder, query, found.hits)
        except ModelError as error:
            _log.warning("what was found is in the order of its words alone: %s", error)
            hits = found.hits
        return Found(hits[:limit], found.total)

    async def sync(self, entity_id: str, paths: Sequence[Path]) -> Synced:
        """Makes the text files at and below these paths documents of an agent: adds and changes what is new there, and
        removes what is gone. Documents that were added otherwise stay."""
        known = await self._ledger.read(documents.stamps, entity_id)
        if not paths and not known:
            return Synced(kept=0, written=0, removed=0, skipped=[])
        files = text_files(paths, known)
        seen: set[str] = set()
        skipped: list[str] = []
        written = 0
        while (file := await asyncio.to_thread(next, files, None)) is not None:
            if file.problem is not None:
                skipped.append(f"{file.source}: {file.problem}")
                continue
            if len(seen) >= documents.MOST_DOCUMENTS:
                skipped.append(f"{file.source}: there are more than {documents.MOST_DOCUMENTS:,} files")
                break
            seen.add(file.id)
            if file.text is None:
                continue
            try:
                await self._ledger.write(documents.put, entity_id, await asyncio.to_thread(_prepared, file))
                written += 1
            except RefusedError as error:
                skipped.append(f"{file.source}: {error}")
                seen.discard(file.id)
        removed = await self._ledger.write(documents.delete, entity_id, sorted(known.keys() - seen))
        for reason in skipped:
            _log.warning("not a document: %s", reason)
        return Synced(kept=len(seen) - written, written=written, removed=removed, skipped=skipped)

    async def _reordered(self, embedder: Embedder, query: str, hits: Sequence[Hit]) -> list[Hit]:
        if len(hits) < 2:
            return list(hits)
        keys = [hashlib.sha256(hit.text.encode()).digest() for hit in hits]
        missing = {key: hit.text for key, hit in zip(keys, hits, strict=True) if key not in self._vectors}
        wanted, *vectors = await embedder.embed([query, *missing.values()])
        fresh = {key: _unit(vector) for key, vector in zip(missing, vectors, strict=True)}
        self._vectors |= fresh
        target, best = _unit(wanted), max(hit.score for hit in hits)
        ordered: list[Hit] = []
        for key, hit in zip(keys, hits, strict=True):
            vector = self._vectors[key]
            self._vectors.move_to_end(key)
            likeness = sum(map(mul, vector, target)) if len(vector) == len(target) else 0.0
            score = _BY_MEANING * likeness + (1 - _BY_MEANING) * hit.score / best
            ordered.append(msgspec.structs.replace(hit, score=round(score, 4)))
        while len(self._vectors) > _MOST_VECTORS:
            self._vectors.popitem(last=False)
        ordered.sort(key=lambda hit: -hit.score)
        return ordered


def _prepared(file: TextFile) -> NewDocument:
    return documents.prepare(
        file.id, title=file.title, text=file.text or "", source=file.source, origin="folder", stamp=file.stamp
    )


def _unit(vector: Sequence[float]) -> array[float]:
    length = math.sqrt(math.fsum(number * number for number in vector)) or 1.0
    return array("f", (number / length for number in vector))
