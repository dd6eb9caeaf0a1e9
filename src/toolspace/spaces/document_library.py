"""What agents can look up: documents that someone adds, and files in folders. Finds by words, and where an embedder is
given orders what was found by meaning."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import re
import stat
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from operator import mul
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import msgspec

from toolspace.builtin.allowed_paths import walk_folder
from toolspace.core.context import ToolContext
from toolspace.core.ids import derived_id, new_id
from toolspace.core.model import Embedder
from toolspace.core.records import Document
from toolspace.errors import ModelError, RefusedError
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import documents
from toolspace.storage.queries.documents import MAX_DOCUMENT_BYTES, PreparedDocument, SearchMatch, SearchMatches

# MERGED from text_folders: Reads the text files of folders, for an agent to look things up in. Follows no link, ke…

ENDINGS: Final = frozenset(
    re.split(
        r"\s",
        ".md .markdown .mdx .txt .text .rst .adoc .org .tex .html .htm .xhtml .xml .json .jsonl .ndjson .yaml .yml "
        ".toml .csv .tsv .log .srt .vtt",
    )
)
"""Files in folders that are documents. One that is named itself is one whatever its name."""
_HTML: Final = frozenset((".html", ".htm", ".xhtml"))
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LARGEST_FILE: Final = 8 * MAX_DOCUMENT_BYTES
"""Of a page, of which only the text counts."""
_HEADING: Final = re.compile(r"^#\s+(\S.*?)\s*#*\s*$", re.MULTILINE)
_LONGEST_TITLE: Final = 200


class TextFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as a document, or why it is none."""

    source: str
    """Its folder's name and its path there."""
    id: str = ""
    stamp: str = ""
    title: str = ""
    text: str | None = None
    """None where the file is as it was."""
    problem: str | None = None


def text_files(paths: Sequence[Path], known: Mapping[str, str | None]) -> Iterator[TextFile]:
    """The text files at and below these paths. `known`: the stamps of those that were read before, by id."""
    seen: set[str] = set()
    for path in paths:
        real = path.resolve()  # Where the operator's own path is a link, that is what was meant.
        found = _below(real) if real.is_dir() else iter([_Place(None, real.name, real.name, str(real))])
        for place in found:
            if place.path not in seen:
                seen.add(place.path)
                yield _read(place, known)


class _Place(NamedTuple):
    """Where a file is."""

    folder: int | None
    """The open folder that it is in; None: its path says it all."""
    name: str
    source: str
    path: str


def _below(root: Path) -> Iterator[_Place]:
    try:
        start = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        _log.warning("%s cannot be read: %s", root, error.strerror or error)
        return
    try:
        for visit in walk_folder(start, ToolContext()):
            for entry in visit.entries:
                inside = visit.entry_path(entry.name)
                if entry.name.startswith("."):
                    continue  # `.git`, and what else is not meant to be looked at.
                if entry.is_dir(follow_symlinks=False):
                    visit.pending_folders.append(inside)
                elif PurePosixPath(entry.name).suffix.lower() in ENDINGS and entry.is_file(follow_symlinks=False):
                    yield _Place(visit.folder_fd, entry.name, f"{root.name}/{inside}", str(root / inside))
    finally:
        os.close(start)


def _read(place: _Place, known: Mapping[str, str | None]) -> TextFile:
    source, document_id = _printable(place.source), derived_id("doc", place.path)
    try:
        file = os.open(place.path if place.folder is None else place.name, _FILE, dir_fd=place.folder)
        with os.fdopen(file, "rb") as opened:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return TextFile(source=source, problem="it is no regular file")
            stamp = f"{status.st_mtime_ns}:{status.st_size}"
            if known.get(document_id) == stamp:
                return TextFile(source=source, id=document_id, stamp=stamp)
            data = opened.read(_LARGEST_FILE + 1)
    except OSError as error:
        return TextFile(source=source, problem=error.strerror or str(error))
    return _document(source, document_id, stamp, data)


def _document(source: str, document_id: str, stamp: str, data: bytes) -> TextFile:
    if len(data) > _LARGEST_FILE:
        return TextFile(source=source, problem=f"it has more than {_LARGEST_FILE:,} bytes")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = data.decode("utf-16", "replace")
    elif b"\0" in data:
        return TextFile(source=source, problem="it is binary")
    else:
        text = data.decode("utf-8-sig", "replace")
    path = PurePosixPath(source)
    title = path.stem
    if path.suffix.lower() in _HTML:
        page = _Page()
        page.feed(text)
        page.close()
        title, text = page.title or title, page.text
    elif (heading := _HEADING.search(text, 0, 2_000)) is not None:
        title = heading[1]
    if (size := len(text.encode("utf-8", "replace"))) > MAX_DOCUMENT_BYTES:
        return TextFile(
            source=source, problem=f"its text has {size:,} bytes; a document has at most {MAX_DOCUMENT_BYTES:,}"
        )
    title = " ".join(title.split())[:_LONGEST_TITLE]
    return TextFile(source=source, id=document_id, stamp=stamp, title=title or path.name, text=text)


def _printable(path: str) -> str:
    """A path as text that can be shown: names of files are bytes."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class _Page(HTMLParser):
    """The text of a page, without what is not shown of it."""

    _BLOCKS: Final = frozenset(
        re.split(
            r"\s",
            "address article aside blockquote br dd div dl dt fieldset figcaption footer form h1 h2 h3 h4 h5 h6 header "
            "hr li main nav ol p pre section table td th title tr ul",
        )
    )
    _UNSHOWN: Final = frozenset(("script", "style", "template", "noscript", "svg"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._pieces: list[str] = []
        self._title: list[str] = []
        self._in_title = False
        self._unshown: list[str] = []

    @property
    def title(self) -> str:
        return " ".join("".join(self._title).split())

    @property
    def text(self) -> str:
        lines = (" ".join(line.split()) for line in "".join(self._pieces).splitlines())
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._UNSHOWN:
            self._unshown.append(tag)
        self._in_title = self._in_title or tag == "title"
        if tag in self._BLOCKS:
            self._pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._unshown:
            del self._unshown[self._unshown.index(tag) :]
        if tag == "title":
            self._in_title = False
        if tag in self._BLOCKS:
            self._pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self._unshown:
            return
        (self._title if self._in_title else self._pieces).append(data)


_log = logging.getLogger("toolspace.knowledge")

_REORDERED = 30
"""Of what was found by words, so many are ordered by meaning."""
_MOST_VECTORS = 2_000
_BY_MEANING = 0.6
"""What meaning counts, and words the rest."""


class SyncSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an agent's folders."""

    unchanged: int
    """Files that are as they were."""
    written: int
    removed: int
    skipped: Sequence[str]
    """Files that are no documents, and why."""


class DocumentLibrary:
    """The documents of all agents. Each sees its own."""

    def __init__(self, ledger: Ledger, embedder: Embedder | None = None) -> None:
        self._ledger = ledger
        self._embedder = embedder
        self._vectors: OrderedDict[bytes, array[float]] = OrderedDict()
        """Of passages that were looked at lately, of length one."""

    async def save(
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
        return await self._ledger.write(documents.save, entity_id, new)

    async def search(self, entity_id: str, query: str, *, limit: int = 5) -> SearchMatches:
        """The passages of an agent's documents that fit a query best."""
        if self._embedder is None:
            return await self._ledger.read(documents.search, entity_id, query, limit=limit)
        found = await self._ledger.read(documents.search, entity_id, query, limit=max(limit, _REORDERED))
        try:
            hits = await self._reordered(self._embedder, query, found.matches)
        except ModelError as error:
            _log.warning("what was found is in the order of its words alone: %s", error)
            hits = found.matches
        return SearchMatches(hits[:limit], found.total)

    async def sync_folders(self, entity_id: str, paths: Sequence[Path]) -> SyncSummary:
        """Makes the text files at and below these paths documents of an agent: adds and changes what is new there, and
        removes what is gone. Documents that were added otherwise stay."""
        known = await self._ledger.read(documents.list_file_stamps, entity_id)
        if not paths and not known:
            return SyncSummary(unchanged=0, written=0, removed=0, skipped=[])
        files = text_files(paths, known)
        seen: set[str] = set()
        skipped: list[str] = []
        written = 0
        while (file := await asyncio.to_thread(next, files, None)) is not None:
            if file.problem is not None:
                skipped.append(f"{file.source}: {file.problem}")
                continue
            if len(seen) >= documents.MAX_DOCUMENTS:
                skipped.append(f"{file.source}: there are more than {documents.MAX_DOCUMENTS:,} files")
                break
            seen.add(file.id)
            if file.text is None:
                continue
            try:
                await self._ledger.write(documents.save, entity_id, await asyncio.to_thread(_prepared, file))
                written += 1
            except RefusedError as error:
                skipped.append(f"{file.source}: {error}")
                seen.discard(file.id)
        removed = await self._ledger.write(documents.delete, entity_id, sorted(known.keys() - seen))
        for reason in skipped:
            _log.warning("not a document: %s", reason)
        return SyncSummary(unchanged=len(seen) - written, written=written, removed=removed, skipped=skipped)

    async def _reordered(self, embedder: Embedder, query: str, hits: Sequence[SearchMatch]) -> list[SearchMatch]:
        if len(hits) < 2:
            return list(hits)
        keys = [hashlib.sha256(hit.text.encode()).digest() for hit in hits]
        missing = {key: hit.text for key, hit in zip(keys, hits, strict=True) if key not in self._vectors}
        wanted, *vectors = await embedder.embed([query, *missing.values()])
        fresh = {key: _unit(vector) for key, vector in zip(missing, vectors, strict=True)}
        self._vectors |= fresh
        target, best = _unit(wanted), max(hit.score for hit in hits)
        ordered: list[SearchMatch] = []
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


def _prepared(file: TextFile) -> PreparedDocument:
    return documents.prepare(
        file.id, title=file.title, text=file.text or "", source=file.source, origin="folder", stamp=file.stamp
    )


def _unit(vector: Sequence[float]) -> array[float]:
    length = math.sqrt(math.fsum(number * number for number in vector)) or 1.0
    return array("f", (number / length for number in vector))
