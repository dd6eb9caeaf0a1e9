"""What the adapters need of a toolspace, a run and a call, as types. They import none of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool

Arguments = Mapping[str, Any] | str | bytes | None
LOOP_TOOLS = frozenset(("agent__final_report", "agent__task_status"))
"""They speak to whoever runs the model's loop. Where that is the other library, nobody would listen."""


class RunLike(Protocol):
    """A run, as an adapter uses it."""

    async def call(
        self,
        name: str,
        arguments: Arguments = None,
        *,
        context: ToolContext | None = None,
        call_id: str | None = None,
    ) -> ToolResult: ...

    def next_turn(self) -> int: ...

    def close(self) -> None: ...


class ToolListing(Protocol):
    """The side of the orchestrator that shows tools."""

    def list_tools(self, *, context: ToolContext | None = None) -> Sequence[Tool]: ...

    def tools_for_model(self, run: Any = None, *, context: ToolContext | None = None) -> Sequence[Tool]: ...

    def instructions(self) -> str: ...


class ToolspaceLike(Protocol):
    """A toolspace, as an adapter uses it."""

    @property
    def orchestrator(self) -> ToolListing: ...

    async def call(
        self,
        name: str,
        arguments: Arguments = None,
        *,
        context: ToolContext | None = None,
        call_id: str | None = None,
    ) -> ToolResult: ...

    def run(self, **options: Any) -> RunLike: ...


# What spans tell of


class OperationNode(Protocol):
    """A node of a run's trace."""

    name: str
    started_at: float
    ended_at: float | None
    status: str
    on_end: Callable[[Any], None] | None

    def last(self, kind: Any, /) -> OperationNode | None: ...

    def to_dict(self) -> dict[str, Any]: ...


class TracedRun(Protocol):
    id: str

    @property
    def trace(self) -> OperationNode: ...


class TracedEntry(Protocol):
    tool: Tool
    known: bool


class TracedCall(Protocol):
    """One call, as its span tells of it."""

    id: str
    requested: str
    arguments: Arguments
    base: ToolContext
    started_at: float
    queue_wait: float
    cache_hit: bool
    outcome: ToolResult | None

    @property
    def run(self) -> TracedRun | None: ...
    @property
    def parent(self) -> TracedCall | None: ...


NextStage = Callable[[TracedCall], Coroutine[Any, Any, ToolResult]]


class TracedPipeline(Protocol):
    @property
    def entry(self) -> TracedEntry: ...


class Instrumentable(Protocol):
    """What can be instrumented: an orchestrator."""

    def use(self, stage: Callable[[Any, Any], Any], /) -> Callable[[], None]: ...

    def on_run(self, listener: Callable[[Any], None], /) -> Callable[[], None]: ...


class InstrumentableToolspace(Protocol):
    """Or a toolspace, which owns one."""

    @property
    def orchestrator(self) -> Instrumentable: ...
