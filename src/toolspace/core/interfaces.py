"""Every extension point of Toolspace, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool


class ToolProvider(ABC):
    """A source of tools. Write one subclass for a new kind of source; `toolspace.testing` checks it.

    `execute` gets the tool's own name, without the namespace, and arguments that fit its schema. It may raise: an
    exception becomes a failed result. Cancelling the coroutine must stop the work.
    """

    kind: str = "custom"
    """What sort of provider this is: `local`, `mcp`, `rest`, `agent`, …"""
    namespace: str = ""
    """The first half of its tools' names; empty for tools with bare names."""
    exact_names: bool = False
    """Whether its names stand behind the namespace just as they are, because models are known to take them."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []

    @abstractmethod
    def list_tools(self) -> Sequence[Tool]:
        """The tools it offers now, under its own names for them."""

    def has_tool(self, name: str) -> bool:
        return any(tool.name == name for tool in self.list_tools())

    @abstractmethod
    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        """Runs one of its tools."""

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """Whether to show one of its tools to this caller now. Says nothing of whether it may be called.

        The tool has its full name here: `notes__read`.
        """
        return True

    async def warmup(self) -> None:
        """Gets ready: connects, fetches its list. Called once, beside the other providers."""

    def get_instructions(self) -> str:
        """What a model should know to use these tools well; may be empty."""
        return ""

    async def aclose(self) -> None:
        """Lets go of everything it holds. Called once, also after a failed `warmup`."""

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Asks to be told when the list changed. The answer takes the request back."""
        self._listeners.append(listener)

        def forget() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return forget

    def notify_changed(self) -> None:
        """For subclasses: says that the list is another one now."""
        for listener in tuple(self._listeners):
            listener()


class CachedResult(msgspec.Struct, frozen=True):
    """What a cache keeps of a successful call: its value as JSON text, and its typed parts if it had any."""

    text: bytes
    parts: bytes = b""


class ResultCache(ABC):
    """Keeps results for a while. May forget at any time; may raise, which costs the call nothing but the hit."""

    @abstractmethod
    async def get(self, key: str) -> CachedResult | None: ...

    def peek(self, key: str) -> CachedResult | None:
        """What it can tell without waiting; a cache that has to ask elsewhere cannot tell anything."""
        return None

    @abstractmethod
    async def set(self, key: str, value: CachedResult, ttl: float) -> None:
        """Keeps a result for `ttl` seconds."""

    @abstractmethod
    async def clear(self) -> None: ...

    async def aclose(self) -> None: ...


class StoredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a stored output without reading it."""

    handle: str
    """`session-<id>/<id>`, as models see it."""
    session: str
    owner: str | None
    """The user it belongs to; None where calls have no user, and the session alone decides."""
    tool: str
    bytes: int
    lines: int
    tokens: int
    is_json: bool
    created_at: float
    """Unix seconds."""
    expires_at: float


class OutputWriter(ABC):
    """Takes one output in, piece by piece. Exactly one of `commit` and `discard` ends it."""

    @abstractmethod
    async def write(self, piece: str) -> None: ...

    @abstractmethod
    async def commit(self, *, is_json: bool = False) -> StoredOutput: ...

    @abstractmethod
    async def discard(self) -> None: ...


class OutputStore(ABC):
    """Keeps outputs that are too large for a model, for their owner, until they expire."""

    @abstractmethod
    async def create(self, *, session: str, owner: str | None, tool: str) -> OutputWriter: ...

    @abstractmethod
    async def find(self, handle: str, *, session: str, owner: str | None) -> StoredOutput | None:
        """The output, if it exists, has not expired, and this reader may read it; else None, whatever the reason."""

    @abstractmethod
    async def inspect(self, handle: str) -> StoredOutput | None:
        """The output, if it exists and has not expired, whoever it belongs to: for an operator, never for a tool."""

    @abstractmethod
    def lines(self, output: StoredOutput) -> AsyncIterator[list[str]]:
        """The lines of an output, without their ends, in batches: it may be larger than memory.

        A line longer than a mebibyte comes in pieces of that size.
        """

    @abstractmethod
    async def text(self, output: StoredOutput, *, limit: int) -> str:
        """The first `limit` bytes, as text."""

    @abstractmethod
    async def sessions(self) -> Sequence[str]:
        """The sessions that hold an output that has not expired."""

    @abstractmethod
    async def sweep(self) -> int:
        """Removes what has expired; says how many."""

    async def aclose(self) -> None: ...


class TokenCounter(Protocol):
    """How many tokens a text costs a model."""

    def __call__(self, text: str, /) -> int: ...


class Allow(msgspec.Struct, frozen=True):
    """The call may run."""


class Deny(msgspec.Struct, frozen=True):
    """The call may not run, and why."""

    reason: str


Decision = Allow | Deny


class Policy(Protocol):
    """Says who may call what. `rule` is how `toolspace explain` shows it."""

    @property
    def rule(self) -> str: ...

    def decide(self, tool: Tool, context: ToolContext) -> Decision: ...


SearchProvider = Callable[[str, int], Awaitable[Sequence[Mapping[str, Any]]]]
"""Finds pages on the web: a query and how many, to `{title, url, snippet}` each."""
