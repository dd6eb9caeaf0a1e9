"""The demo's rules about files: lists, reads and searches its folder, asks before it deletes, charts a table."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, NamedTuple, cast

from toolspace.core import json_text
from toolspace.models.demoscript import MOST_LISTED, Heard, Request, Script, Want, say

_MOST_SHOWN: Final = 1_500
"""Characters of a file that are said."""
_NO_FOLDER: Final = "I was given no folder to look into."


class _File(NamedTuple):
    name: str
    """Within the folder."""
    path: str
    size: int


def list_files(request: Request, match: re.Match[str]) -> Script[None]:
    found = yield from _files(request)
    if not found:
        if found is not None:
            yield from say("The folder is empty.")
        return
    lines = [f"  {file.name} ({file.size} bytes)" for file in found[:MOST_LISTED]]
    more = [f"  … and {len(found) - MOST_LISTED} more"] if len(found) > MOST_LISTED else []
    yield from say("\n".join([f"In {request.folder}:", *lines, *more]))


def read_file(request: Request, match: re.Match[str]) -> Script[None]:
    found = yield from _files(request)
    if found is None:
        return
    chosen = _named(found, request.text)
    if len(chosen) != 1:
        names = ", ".join(file.name for file in (chosen or found)[:MOST_LISTED]) or "none at all"
        yield from say(f"Which file? There is {names}.")
        return
    heard = yield Want("read_file", {"path": chosen[0].path})
    text = str(heard.data.get("content", ""))
    if heard.failed:
        yield from say(f"I cannot read {chosen[0].name}: {heard.reason}")
    else:
        shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
        yield from say(f"{chosen[0].name}:\n{shown.strip() or '(it is empty)'}")


def search_files(request: Request, match: re.Match[str]) -> Script[None]:
    if request.folder is None:
        yield from say(_NO_FOLDER)
        return
    wanted = (match["what"] or match["other"]).strip(" ?.!\"'")
    heard = yield Want("grep_files", {"pattern": re.escape(wanted), "path": request.folder, "ignoreCase": True})
    if heard.failed:
        yield from say(f"I cannot search: {heard.reason}")
        return
    hits: Sequence[Mapping[str, Any]] = heard.data.get("matches") or ()
    lines = [
        f"  {_within(request.folder, str(hit.get('path')))}:{hit.get('line')}: {str(hit.get('text', '')).strip()}"
        for hit in hits[:MOST_LISTED]
    ]
    yield from say("\n".join([f'"{wanted}" is in:', *lines]) if lines else f'No file has "{wanted}" in it.')


def delete_files(request: Request, match: re.Match[str]) -> Script[None]:
    found = yield from _files(request)
    if found is None:
        return
    chosen = _named(found, match["what"])
    if not chosen:
        names = ", ".join(file.name for file in found[:MOST_LISTED]) or "nothing"
        yield from say(f"I do not know what to delete. There is {names}.")
        return
    names = ", ".join(file.name for file in chosen)
    asked = {
        "action": f"Delete {names}",
        "details": f"{sum(file.size for file in chosen)} bytes in all; they cannot be brought back.",
        "items": [file.path for file in chosen],
    }
    heard = yield Want("confirmAction", asked)
    if heard.failed:
        yield from say(f"I delete nothing without asking, and I cannot ask: {heard.reason}")
    elif heard.data.get("status") == "pending":
        yield from say(f"Shall I delete {names}? I wait for your answer to the question above.")
    else:
        yield from decided(asked, heard)


def decided(asked: Mapping[str, Any], heard: Heard) -> Script[None]:
    """Goes on after people were asked whether files may be deleted."""
    paths = [str(path) for path in asked.get("items") or ()]
    names = str(asked.get("action", "")).removeprefix("Delete ")
    if heard.failed:
        yield from say(f"I delete nothing: {heard.reason}")
        return
    if not agrees(heard.text):
        yield from say(f"All right, I keep {names}.")
        return
    failed: list[str] = []
    for path in paths:
        done = yield Want("delete_file", {"path": path})
        if done.failed:
            failed.append(f"{PurePath(path).name}: {done.reason}")
    if failed:
        yield from say("Not all of it could be deleted. " + "; ".join(failed))
    else:
        yield from say(f"Deleted {names}.")


def agrees(text: str) -> bool:
    """Whether an answer means yes: `{"confirmed": true}`, `true`, "yes" and their like."""
    try:
        said: Any = json_text.decode(text)
    except ValueError:
        said = text
    if isinstance(said, dict):
        given = cast("dict[str, Any]", said)
        said = next((given[key] for key in ("confirmed", "approved", "accepted", "answer", "value") if key in given), 0)
    return said is True or (isinstance(said, str) and said.strip().lower() in ("yes", "y", "true", "ok", "confirm"))


def _files(request: Request) -> Script[Sequence[_File] | None]:
    """The files of the folder; None where that failed, and was said."""
    if request.folder is None:
        yield from say(_NO_FOLDER)
        return None
    heard = yield Want("list_files", {"path": request.folder, "recursive": True})
    if heard.failed:
        yield from say(f"I cannot look into the folder: {heard.reason}")
        return None
    entries: Sequence[Mapping[str, Any]] = heard.data.get("files") or ()
    return [
        _File(_within(request.folder, str(one["path"])), str(one["path"]), int(one.get("size") or 0))
        for one in entries
        if one.get("type") == "file"
    ]


def _within(folder: str, path: str) -> str:
    return path.removeprefix(folder.rstrip("/") + "/")


def _named(files: Sequence[_File], text: str) -> list[_File]:
    """The files that a text means: by their names, else by words that are in their paths."""
    said = text.lower()
    exact = [file for file in files if file.name.lower() in said or PurePath(file.name).name.lower() in said]
    if exact:
        return exact
    # "drafts" means what has "draft" in it; short words are in too many names.
    words = [word.rstrip("s") for word in re.findall(r"[\w-]{4,}", said) if word not in _NO_NAMES]
    return [file for file in files if any(word in file.name.lower() for word in words)]


_NO_NAMES: Final = frozenset(
    ("clean", "delete", "remove", "tidy", "file", "files", "folder", "please", "read", "show", "open", "that", "what")
)


# A chart


def draw_chart(request: Request, match: re.Match[str]) -> Script[None]:
    found = yield from _files(request)
    if found is None:
        return
    tables = [file for file in found if file.name.lower().endswith(".csv")]
    chosen = _named(tables, request.text) or tables
    if not chosen:
        yield from say("There is no table (.csv) to draw a chart of.")
        return
    heard = yield Want("read_file", {"path": chosen[0].path})
    if heard.failed:
        yield from say(f"I cannot read {chosen[0].name}: {heard.reason}")
        return
    title, labels, values = _columns(str(heard.data.get("content", "")), chosen[0].name)
    if not values:
        yield from say(f"{chosen[0].name} has no column of numbers.")
        return
    shown = yield Want("displayChart", {"title": title, "type": "bar", "labels": labels, "values": values})
    if shown.failed:
        yield from say(f"I cannot show a chart: {shown.reason}")
        return
    best = labels[values.index(max(values))]
    yield from say(f"Here is {title}, from {chosen[0].name}: {sum(values):g} in all, and most of it in {best}.")


def _columns(text: str, name: str) -> tuple[str, list[str], list[float]]:
    """The first column as labels, and the first one with numbers in every row as values."""
    rows = [row for row in csv.reader(text.splitlines()) if row]
    if len(rows) < 2:
        return name, [], []
    head, *body = rows
    for column in range(1, len(head)):
        try:
            values = [float(row[column]) for row in body]
        except (ValueError, IndexError):
            continue
        return f"{head[column]} by {head[0]}".capitalize(), [row[0] for row in body], values
    return name, [], []
