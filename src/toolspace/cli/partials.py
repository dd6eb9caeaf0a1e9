"""Prints what a call gives out while it runs, as it comes, and knows whether that was the whole result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast

from toolspace.cli.output import Output, WriteError
from toolspace.core import json_text
from toolspace.core.events import CallPartial
from toolspace.core.result import ToolResult


class Partials:
    """Keeps sums of what was printed, not the text: a stream may be larger than memory."""

    def __init__(
        self, output: Output, call_id: str, *, on_first: Callable[[], None], on_gone: Callable[[], object]
    ) -> None:
        self._output = output
        self._call_id = call_id
        self._on_first = on_first
        self._on_gone = on_gone
        self.fault: Exception | None = None
        """Why nothing can be printed any more: nobody reads, or there is no room."""
        self._count = 0
        self._all_text = True
        self._text = _Sum()
        self._values = _Sum()
        self._mid_line = False

    def __call__(self, event: CallPartial) -> None:
        if event.call_id != self._call_id or self.fault is not None:
            return
        if not self._count:
            self._on_first()
        self._count += 1
        try:
            self._print(event.value)
        except (BrokenPipeError, WriteError) as error:
            self.fault = error
            self._on_gone()

    def end_line(self) -> None:
        if self._mid_line and self.fault is None:
            self._output.text("")
        self._mid_line = False

    def are(self, result: ToolResult) -> bool:
        """Whether what was printed is the whole result already."""
        value: Any = result.result
        if not self._count or not result.ok:
            return False
        if isinstance(value, str):
            return self._all_text and self._text.same(_Sum(value.encode("utf-8", "surrogatepass")))
        if isinstance(value, list):
            return self._values.same(_Sum(*(_item(one) for one in cast("list[object]", value))))
        if result.extras.get("stored"):
            # The brackets around the values are one byte more than the commas after them.
            size = self._text.size if self._all_text else self._values.size + 1
            return value["tool_output"]["bytes"] == size
        return False

    def _print(self, value: object) -> None:
        self._values.add(_item(value))
        if isinstance(value, str):
            self._text.add(value.encode("utf-8", "surrogatepass"))
            self._mid_line = not value.endswith("\n") if value else self._mid_line
            self._output.text(value, end="")
            return
        self._all_text = False
        self.end_line()
        self._output.text(json_text.encode(value))


class _Sum:
    def __init__(self, *pieces: bytes) -> None:
        self.size = 0
        self._hash = hashlib.sha256()
        for piece in pieces:
            self.add(piece)

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self._hash.update(piece)

    def same(self, other: _Sum) -> bool:
        return self._hash.digest() == other._hash.digest()


def _item(value: object) -> bytes:
    return json_text.encode_bytes(value) + b","
