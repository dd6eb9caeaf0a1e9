"""The trace of a run, as a tree of spans: run → turn → call → child run. Exported as JSON and to OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

SpanKind = Literal["run", "turn", "call"]
_MAX_CHILDREN = 10_000


class Span:
    """One node of the tree. Times are Unix milliseconds."""

    __slots__ = (
        "_attributes",
        "_load_attributes",
        "children",
        "dropped_children",
        "ended_at",
        "id",
        "kind",
        "name",
        "on_end",
        "started_at",
        "status",
    )

    def __init__(self, kind: SpanKind, name: str, *, id: str | None = None, started_at: float | None = None) -> None:
        self.kind: SpanKind = kind
        self.name = name
        self.id = id or name
        self.started_at = time.time() * 1000 if started_at is None else started_at
        self.ended_at: float | None = None
        self.status = "running"
        self._attributes: dict[str, Any] = {}
        self._load_attributes: Callable[[], dict[str, Any]] | None = None
        self.children: list[Span] = []
        self.dropped_children = 0
        """Children beyond the limit: a run of a million calls must not hold a million spans."""
        self.on_end: Callable[[Span], None] | None = None
        """Called once, when the span has ended."""

    @property
    def attributes(self) -> dict[str, Any]:
        if self._load_attributes is not None:
            self._attributes.update(self._load_attributes())
            self._load_attributes = None
        return self._attributes

    def describe_later(self, load: Callable[[], dict[str, Any]]) -> None:
        """Sets the function that returns further attributes. It runs when someone reads them; most are never read."""
        self._load_attributes = load

    def start_child(self, kind: SpanKind, name: str, *, id: str | None = None, started_at: float | None = None) -> Span:
        child = Span(kind, name, id=id, started_at=started_at)
        self.add_child(child)
        return child

    def add_child(self, child: Span) -> None:
        if len(self.children) < _MAX_CHILDREN:
            self.children.append(child)
        else:
            self.dropped_children += 1

    def end(self, status: str = "ok", *, at: float | None = None) -> None:
        if self.ended_at is None:
            self.ended_at = time.time() * 1000 if at is None else at
            self.status = status
            for child in self.children:
                if child.kind == "turn":  # A call that is still running ends by itself.
                    child.end(status)
            if self.on_end is not None:
                self.on_end(self)

    def last_child(self, kind: SpanKind) -> Span | None:
        for child in reversed(self.children):
            if child.kind == kind:
                return child
        return None

    def end_last_child(self, kind: SpanKind) -> None:
        child = self.last_child(kind)
        if child is not None:
            child.end()

    def to_dict(self) -> dict[str, Any]:
        wire: dict[str, Any] = {
            "kind": self.kind,
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "startedAt": round(self.started_at),
            "endedAt": None if self.ended_at is None else round(self.ended_at),
            **self.attributes,
            "children": [child.to_dict() for child in self.children],
        }
        if self.dropped_children:
            wire["droppedChildren"] = self.dropped_children
        return wire
