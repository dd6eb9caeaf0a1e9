"""The tool that edits a file: exact text for exact text, all edits or none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from toolspace.builtin import textfiles
from toolspace.builtin.paths import Bounds
from toolspace.builtin.replacing import exclusively, replace
from toolspace.core.context import ToolContext
from toolspace.core.function import tool
from toolspace.core.tool import Annotations
from toolspace.errors import ToolValidationError

_MOST_COUNTED = 1000


class Edit(TypedDict):
    """One replacement."""

    old: str
    new: str
    replaceAll: NotRequired[bool]


# A raw schema keeps the shape of an edit in its place; from the hints it would be a reference, which costs more
# tokens and which some models cannot follow.
@tool(
    category="file",
    annotations=Annotations(read_only=False, destructive=True, idempotent=False, open_world=False),
    input_schema={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "The file."},
            "edits": {
                "type": "array",
                "minItems": 1,
                "description": "Applied in order, each to the result of the one before.",
                "items": {
                    "type": "object",
                    "properties": {
                        "old": {"type": "string", "description": "Exact text in the file; must occur once."},
                        "new": {"type": "string", "description": "The text in its place."},
                        "replaceAll": {
                            "type": "boolean",
                            "description": "Whether to replace every occurrence.",
                            "default": False,
                        },
                    },
                    "required": ["old", "new"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["path", "edits"],
        "additionalProperties": False,
    },
)
def edit_file(path: str, edits: Sequence[Edit], *, context: ToolContext) -> dict[str, Any]:
    """Replaces exact text in a file. Applies all edits or, if one does not fit, none."""
    if not edits:
        raise ToolValidationError("edits: it is empty; give at least one {old, new}")
    with Bounds.of(context).find(path, write=True) as place, exclusively(place, context):
        with place.open() as file:
            text = textfiles.decode(textfiles.read_all(file, path, os.fstat(file.fileno()).st_size), path)
        windows = "\r\n" in text and text.count("\n") == text.count("\r\n")
        for index, edit in enumerate(edits):
            context.check_canceled()
            text = _apply(text, edit, f"edits[{index}]", path, windows)
        replace(place, [textfiles.encode(text, "utf-8")])
    return {"applied": len(edits)}


def _apply(text: str, edit: Edit, which: str, path: str, windows: bool) -> str:
    old, new = edit["old"], edit["new"]
    if not old:
        raise ToolValidationError(f"{which}.old: it is empty; give the text to replace")
    if windows and "\r" not in old + new:
        # Every line of the file ends with \r\n. An edit that knows only \n means the same line ends.
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    if edit.get("replaceAll", False):
        count = text.count(old)
        if count == 0:
            raise _absent(which, path)
        if len(text) + count * (len(new) - len(old)) > textfiles.LARGEST:
            raise ToolValidationError(f"{which}: {path!r} would grow beyond {textfiles.LARGEST:,} characters")
        return text.replace(old, new)
    return replace_only(text, old, new, parameter=f"{which}.old", path=path, way_out=" or set replaceAll")


def replace_only(text: str, old: str, new: str, *, parameter: str, path: str, way_out: str = "") -> str:
    """The text with its only occurrence of `old` replaced. Raises where there is none, or more than one."""
    at = text.find(old)
    if at < 0:
        raise _absent(parameter, path)
    count = _count(text, old, at)
    if count > 1:
        number = f"{count}" if count < _MOST_COUNTED else f"{_MOST_COUNTED} or more"
        raise ToolValidationError(
            f"{parameter}: the text occurs {number} times in {path!r}; give more of the text around it{way_out}. "
            "Nothing was changed"
        )
    return text[:at] + new + text[at + len(old) :]


def _count(text: str, old: str, first: int) -> int:
    """How often the text occurs, overlaps included: `aa` fits into `aaa` at two places."""
    count, at = 0, first
    while at >= 0 and count < _MOST_COUNTED:
        count += 1
        at = text.find(old, at + 1)
    return count


def _absent(parameter: str, path: str) -> ToolValidationError:
    return ToolValidationError(
        f"{parameter}: the text occurs 0 times in {path!r} (not found); copy it exactly, spaces and line ends "
        "included. Nothing was changed"
    )
