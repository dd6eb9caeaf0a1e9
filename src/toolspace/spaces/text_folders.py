"""Reads the text files of folders, for an agent to look things up in. Follows no link, keeps nothing."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import msgspec

from toolspace.builtin.walking import walk
from toolspace.core.context import ToolContext
from toolspace.core.ids import derived_id
from toolspace.storage.queries.documents import MOST_BYTES

_log = logging.getLogger("toolspace.knowledge")

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
_LARGEST_FILE: Final = 8 * MOST_BYTES
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
        for visit in walk(start, ToolContext()):
            for entry in visit.entries:
                inside = visit.inside(entry.name)
                if entry.name.startswith("."):
                    continue  # `.git`, and what else is not meant to be looked at.
                if entry.is_dir(follow_symlinks=False):
                    visit.ahead.append(inside)
                elif PurePosixPath(entry.name).suffix.lower() in ENDINGS and entry.is_file(follow_symlinks=False):
                    yield _Place(visit.folder, entry.name, f"{root.name}/{inside}", str(root / inside))
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
    if (size := len(text.encode("utf-8", "replace"))) > MOST_BYTES:
        return TextFile(source=source, problem=f"its text has {size:,} bytes; a document has at most {MOST_BYTES:,}")
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
