"""The document library of agents: documents over the API, and text files in configured folders.

Searches by words (see `storage.queries.documents`). With an embedder, it also ranks the matches by meaning. Follows no
link out of a folder.
"""

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
from typing import Final, NamedTuple

import msgspec

from toolspace.builtin.allowed_paths import walk_folder
from toolspace.core.ids import derived_id
from toolspace.core.language_model import Embedder
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ModelError, RefusedError
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import documents
from toolspace.storage.queries.documents import MAX_DOCUMENT_BYTES, SearchMatch, SearchMatches

_log = logging.getLogger("toolspace.knowledge")

_RANKED_BY_MEANING: Final = 30
"""Of the matches by words, so many are ranked by meaning."""
_MAX_VECTORS: Final = 2_000
_MEANING_SHARE: Final = 0.6
"""The share of meaning in a score; words have the rest."""


class SyncSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What `sync_folders` did."""

    unchanged_count: int
    written_count: int
    removed_count: int
    skipped_files: Sequence[str]
    """Files that are not documents, and why."""


class DocumentLibrary:
    """The documents of all agents. An agent sees its own."""

    def __init__(self, ledger: Ledger, embedder: Embedder | None = None) -> None:
        self._ledger = ledger
        self._embedder = embedder
        self._vectors: OrderedDict[bytes, array[float]] = OrderedDict()
        """The unit vectors of recently ranked passages, by a hash of their text."""

    async def search(self, entity_id: str, query: str, *, limit: int = 5) -> SearchMatches:
        """The passages of an agent's documents that match a query best."""
        if self._embedder is None:
            return await self._ledger.read(documents.search, entity_id, query, limit=limit)
        by_words = await self._ledger.read(documents.search, entity_id, query, limit=max(limit, _RANKED_BY_MEANING))
        try:
            matches = await self._rank_by_meaning(self._embedder, query, by_words.matches)
        except ModelError as error:
            _log.warning("the embedder failed; the matches of a search are ranked by words alone: %s", error)
            matches = by_words.matches
        return SearchMatches(matches[:limit], by_words.total)

    async def sync_folders(self, entity_id: str, paths: Sequence[Path]) -> SyncSummary:
        """Makes the text files at and below these paths documents of an agent, and removes those that are gone.

        Documents of other origin stay.
        """
        stamps = await self._ledger.read(documents.list_file_stamps, entity_id)
        if not paths and not stamps:
            return SyncSummary(unchanged_count=0, written_count=0, removed_count=0, skipped_files=[])
        files = list_text_files(paths, stamps)
        document_ids: set[str] = set()
        skipped_files: list[str] = []
        written_count = 0
        while (file := await asyncio.to_thread(next, files, None)) is not None:
            if file.problem is not None:
                skipped_files.append(f"{file.source}: {file.problem}")
                continue
            if len(document_ids) >= documents.MAX_DOCUMENTS:
                skipped_files.append(f"{file.source}: there are more than {documents.MAX_DOCUMENTS:,} files")
                break
            document_ids.add(file.id)
            if file.text is None:
                continue
            try:
                document = await asyncio.to_thread(
                    documents.prepare,
                    file.id,
                    title=file.title,
                    text=file.text,
                    source=file.source,
                    origin="folder",
                    stamp=file.stamp,
                )
                await self._ledger.write(documents.save, entity_id, document)
                written_count += 1
            except RefusedError as error:
                skipped_files.append(f"{file.source}: {error}")
                document_ids.discard(file.id)
        removed_count = await self._ledger.write(documents.delete, entity_id, sorted(stamps.keys() - document_ids))
        for reason in skipped_files:
            _log.warning("file skipped: %s", reason)
        return SyncSummary(
            unchanged_count=len(document_ids) - written_count,
            written_count=written_count,
            removed_count=removed_count,
            skipped_files=skipped_files,
        )

    async def _rank_by_meaning(
        self, embedder: Embedder, query: str, matches: Sequence[SearchMatch]
    ) -> list[SearchMatch]:
        if len(matches) < 2:
            return list(matches)
        keys = [hashlib.sha256(match.text.encode()).digest() for match in matches]
        missing = {key: match.text for key, match in zip(keys, matches, strict=True) if key not in self._vectors}
        query_embedding, *embeddings = await embedder.embed([query, *missing.values()])
        self._vectors |= {key: _unit_vector(embedding) for key, embedding in zip(missing, embeddings, strict=True)}
        query_vector, best_score = _unit_vector(query_embedding), max(match.score for match in matches)
        rescored_matches: list[SearchMatch] = []
        for key, match in zip(keys, matches, strict=True):
            vector = self._vectors[key]
            self._vectors.move_to_end(key)
            similarity = sum(map(mul, vector, query_vector)) if len(vector) == len(query_vector) else 0.0
            score = _MEANING_SHARE * similarity + (1 - _MEANING_SHARE) * match.score / best_score
            rescored_matches.append(msgspec.structs.replace(match, score=round(score, 4)))
        while len(self._vectors) > _MAX_VECTORS:
            self._vectors.popitem(last=False)
        rescored_matches.sort(key=lambda match: -match.score)
        return rescored_matches


def _unit_vector(vector: Sequence[float]) -> array[float]:
    length = math.sqrt(math.fsum(number * number for number in vector)) or 1.0
    return array("f", (number / length for number in vector))


# Text files in folders

TEXT_SUFFIXES: Final = frozenset(
    re.split(
        r"\s",
        ".md .markdown .mdx .txt .text .rst .adoc .org .tex .html .htm .xhtml .xml .json .jsonl .ndjson .yaml .yml "
        ".toml .csv .tsv .log .srt .vtt",
    )
)
"""Suffixes of documents in folders. A file that is configured by its own path may have any suffix."""
_HTML_SUFFIXES: Final = frozenset((".html", ".htm", ".xhtml"))
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAX_FILE_BYTES: Final = 8 * MAX_DOCUMENT_BYTES
"""Larger than a document: of an HTML page only the text counts."""
_HEADING: Final = re.compile(r"^#\s+(\S.*?)\s*#*\s*$", re.MULTILINE)
_MAX_TITLE: Final = 200


class TextFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as a document, or the reason why it is not one."""

    source: str
    """The name of its folder, and its path there."""
    id: str = ""
    stamp: str = ""
    title: str = ""
    text: str | None = None
    """None if the file is unchanged."""
    problem: str | None = None


class _FileLocation(NamedTuple):
    folder_fd: int | None
    """The descriptor of its folder; None: the path is complete."""
    name: str
    source: str
    path: str


def list_text_files(paths: Sequence[Path], stamps: Mapping[str, str | None]) -> Iterator[TextFile]:
    """The text files at and below these paths. `stamps`: of the documents that were read before, by id."""
    visited_paths: set[str] = set()
    for path in paths:
        real_path = path.resolve()  # A configured path may be a link.
        if real_path.is_dir():
            locations = _walk(real_path)
        else:
            locations = iter([_FileLocation(None, real_path.name, real_path.name, str(real_path))])
        for location in locations:
            if location.path not in visited_paths:
                visited_paths.add(location.path)
                yield _read_file(location, stamps)


def _walk(root: Path) -> Iterator[_FileLocation]:
    try:
        root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        _log.warning("folder %s cannot be read: %s", root, error.strerror or error)
        return
    try:
        for visit in walk_folder(root_fd, ToolContext()):
            for entry in visit.entries:
                path = visit.entry_path(entry.name)
                if entry.name.startswith("."):
                    continue  # `.git` and other hidden files.
                if entry.is_dir(follow_symlinks=False):
                    visit.pending_folders.append(path)
                elif _suffix(entry.name) in TEXT_SUFFIXES and entry.is_file(follow_symlinks=False):
                    yield _FileLocation(visit.folder_fd, entry.name, f"{root.name}/{path}", str(root / path))
    finally:
        os.close(root_fd)


def _read_file(location: _FileLocation, stamps: Mapping[str, str | None]) -> TextFile:
    # File names are bytes: the source is the part of them that can be shown.
    source = location.source.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    document_id = derived_id("doc", location.path)
    name = location.path if location.folder_fd is None else location.name
    try:
        descriptor = os.open(name, _OPEN_FLAGS, dir_fd=location.folder_fd)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return TextFile(source=source, problem="it is no regular file")
            stamp = f"{status.st_mtime_ns}:{status.st_size}"
            if stamps.get(document_id) == stamp:
                return TextFile(source=source, id=document_id, stamp=stamp)
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        return TextFile(source=source, problem=error.strerror or str(error))
    return _parse_file(source, document_id, stamp, data)


def _parse_file(source: str, document_id: str, stamp: str, data: bytes) -> TextFile:
    if len(data) > _MAX_FILE_BYTES:
        return TextFile(source=source, problem=f"it has more than {_MAX_FILE_BYTES:,} bytes")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = data.decode("utf-16", "replace")
    elif b"\0" in data:
        return TextFile(source=source, problem="it is binary")
    else:
        text = data.decode("utf-8-sig", "replace")
    path = PurePosixPath(source)
    title = path.stem
    if _suffix(source) in _HTML_SUFFIXES:
        page = _HtmlPage()
        page.feed(text)
        page.close()
        title, text = page.title or title, page.text
    elif (heading := _HEADING.search(text, 0, 2_000)) is not None:
        title = heading[1]
    if (size := len(text.encode("utf-8", "replace"))) > MAX_DOCUMENT_BYTES:
        problem = f"its text has {size:,} bytes; a document has at most {MAX_DOCUMENT_BYTES:,}"
        return TextFile(source=source, problem=problem)
    title = " ".join(title.split())[:_MAX_TITLE]
    return TextFile(source=source, id=document_id, stamp=stamp, title=title or path.name, text=text)


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()


class _HtmlPage(HTMLParser):
    """The visible text of an HTML page, and its title."""

    _BLOCKS: Final = frozenset(
        re.split(
            r"\s",
            "address article aside blockquote br dd div dl dt fieldset figcaption footer form h1 h2 h3 h4 h5 h6 header "
            "hr li main nav ol p pre section table td th title tr ul",
        )
    )
    _INVISIBLE: Final = frozenset(("script", "style", "template", "noscript", "svg"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._pieces: list[str] = []
        self._title: list[str] = []
        self._in_title = False
        self._invisible_tags: list[str] = []

    @property
    def title(self) -> str:
        return " ".join("".join(self._title).split())

    @property
    def text(self) -> str:
        lines = (" ".join(line.split()) for line in "".join(self._pieces).splitlines())
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._INVISIBLE:
            self._invisible_tags.append(tag)
        self._in_title = self._in_title or tag == "title"
        if tag in self._BLOCKS:
            self._pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._invisible_tags:
            del self._invisible_tags[self._invisible_tags.index(tag) :]
        if tag == "title":
            self._in_title = False
        if tag in self._BLOCKS:
            self._pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self._invisible_tags:
            return
        (self._title if self._in_title else self._pieces).append(data)
