"""The parts of a toolspace, a run and a call that the adapters use, as protocols. Imports only `core`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool

Arguments = Mapping[str, Any] | str | bytes | None
LOOP_TOOLS = frozenset(("agent__final_report", "agent__task_status"))
"""Tools whose results are for the owner of the model loop. Another library's loop would ignore them."""


# For adapters that call tools


class RunLike(Protocol):
    """A run that an adapter calls tools in."""

    def call(
        self,
        name: str,
        arguments: Arguments = None,
        *,
        context: ToolContext | None = None,
        call_id: str | None = None,
    ) -> Coroutine[Any, Any, ToolResult]: ...

    def next_turn(self) -> int: ...

    def close(self) -> None: ...


class ToolListing(Protocol):
    """The methods of an orchestrator that list tools."""

    def list_tools(self, *, context: ToolContext | None = None) -> Sequence[Tool]: ...

    def tools_for_model(self, run: Any = None, *, context: ToolContext | None = None) -> Sequence[Tool]: ...

    def instructions(self) -> str: ...


class ToolspaceLike(Protocol):
    """A toolspace that an adapter calls tools of."""

    @property
    def orchestrator(self) -> ToolListing: ...

    def call(
        self,
        name: str,
        arguments: Arguments = None,
        *,
        context: ToolContext | None = None,
        call_id: str | None = None,
    ) -> Coroutine[Any, Any, ToolResult]: ...

    def run(self, **options: Any) -> RunLike: ...


# For adapters that trace calls


class TraceNode(Protocol):
    """A node in the trace of a run: the run itself, a turn or a call."""

    name: str
    started_at: float
    ended_at: float | None
    status: str
    on_end: Callable[[Any], None] | None

    def last_child(self, kind: Any, /) -> TraceNode | None: ...

    def to_dict(self) -> dict[str, Any]: ...


class TracedRun(Protocol):
    """A run whose trace becomes spans."""

    id: str

    @property
    def trace(self) -> TraceNode: ...


class TracedEntry(Protocol):
    """The catalog entry of a tool."""

    tool: Tool
    is_registered: bool


class TracedCall(Protocol):
    """A call that becomes a span."""

    id: str
    requested_name: str
    arguments: Arguments
    base_context: ToolContext
    started_at: float
    queue_wait: float
    cache_hit: bool
    outcome: ToolResult | None

    @property
    def run(self) -> TracedRun | None: ...
    @property
    def parent(self) -> TracedCall | None: ...


NextStage = Callable[[TracedCall], Coroutine[Any, Any, ToolResult]]


class TracedStageContext(Protocol):
    """What a stage of the pipeline is compiled from."""

    @property
    def entry(self) -> TracedEntry: ...


class Instrumentable(Protocol):
    """An orchestrator that accepts a stage around its calls."""

    def add_stage(self, stage: Callable[[Any, Any], Any], /) -> Callable[[], None]: ...

    def on_run(self, listener: Callable[[Any], None], /) -> Callable[[], None]: ...


class InstrumentableToolspace(Protocol):
    """A toolspace with such an orchestrator."""

    @property
    def orchestrator(self) -> Instrumentable: ...
