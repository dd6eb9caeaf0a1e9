"""The extension points: providers, caches, output and conversation stores, token counters and policies.

Extensions implement them; `toolspace.testing` has a contract test suite for most. Models and embedders are in
`core.language_model`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from toolspace.core.approvals import OPERATORS
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ProviderError

if TYPE_CHECKING:
    from toolspace.core.language_model import Turn


CircuitScope = Literal["provider", "tool", "none"]


class ToolProvider(ABC):
    """A source of tools. Write a subclass for a new kind of source; `toolspace.testing.ProviderContract` tests it.

    `execute` gets the tool's local name, without the namespace, and arguments that fit its schema. It may raise: an
    exception becomes a failed result. Cancelling the coroutine must stop the work.
    """

    kind: str = "custom"
    """The kind of provider: `local`, `mcp`, `rest`, `agent`, …"""
    namespace: str = ""
    """The first part of its tools' full names; empty for tools with bare names."""
    circuit_scope: CircuitScope = "provider"
    """What stops being called after repeated transport errors or timeouts: all its tools, or the tool; or nothing."""
    exact_names: bool = False
    """Whether its names follow the namespace without sanitising, because models are known to accept them."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []

    @abstractmethod
    def list_tools(self) -> Sequence[Tool]:
        """Returns its tools, under their local names."""

    def has_tool(self, name: str) -> bool:
        return any(tool.name == name for tool in self.list_tools())

    @abstractmethod
    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        """Runs one of its tools."""

    async def read_resource(self, uri: str, context: ToolContext) -> dict[str, Any]:
        """Returns a resource in MCP's format: `{"contents": […]}`. Raises `ProviderError` if it has none."""
        raise ProviderError(f"{self.namespace or self.kind} has no resources")

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        """Whether to show one of its tools to this caller now. Does not decide whether it may be called.

        The tool has its full name here: `notes__read`.
        """
        return True

    def describe_execution(self, name: str) -> object:
        """Returns what executes one of its tools, as plain data: the server, the URL, the version; None if nothing.

        If it changes, results that were cached before are not used. Only a digest of it is kept, so it may contain
        secrets.
        """
        return None

    async def warmup(self) -> None:
        """Connects and fetches the list of tools. Called in parallel with other providers; again after a failure."""

    def is_waiting_to_start(self) -> bool:
        """Whether `warmup` waits until other providers have started. The time limit of its start runs only later."""
        return False

    def last_connected_at(self) -> float:
        """Returns when it last connected by itself, in seconds of `time.monotonic`; 0 if it has no connection."""
        return 0.0

    def is_reconnecting(self) -> bool:
        """Whether it is replacing a connection that was lost a moment ago. Timeouts of calls are then no failures."""
        return False

    def get_instructions(self) -> str:
        """Returns instructions for models that use these tools; may be empty."""
        return ""

    async def aclose(self) -> None:
        """Releases everything that it holds. Called once, also after a failed `warmup`."""

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls the listener whenever the list changes. Returns a function that removes the listener."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def notify_changed(self) -> None:
        """Tells the listeners that the list changed. For subclasses."""
        for listener in tuple(self._listeners):
            listener()


class CachedResult(msgspec.Struct, frozen=True):
    """The cached part of a successful result: its value as JSON text, and its typed parts if it has any."""

    text: bytes
    parts: bytes = b""


class ResultCache(ABC):
    """Caches results. It may drop any at any time. If it raises, the call runs without it."""

    @abstractmethod
    async def get(self, key: str) -> CachedResult | None: ...

    def peek(self, key: str) -> CachedResult | None:
        """Returns a result if that needs no waiting; a remote cache always returns None."""
        return None

    @abstractmethod
    async def set(self, key: str, value: CachedResult, ttl: float) -> None:
        """Stores a result for `ttl` seconds."""

    @abstractmethod
    async def clear(self) -> None: ...

    async def aclose(self) -> None: ...


class StoredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a stored output."""

    handle: str
    """`session-<id>/<id>`: the reference that models use."""
    session: str
    owner: str | None
    """The user who may read it, from any session; None if calls have no user: then only its session may read it."""
    tool: str
    bytes: int
    lines: int
    tokens: int
    is_json: bool
    created_at: float
    """Unix seconds."""
    expires_at: float


class OutputWriter(ABC):
    """Writes one output in pieces. Exactly one of `commit` and `discard` ends it."""

    @abstractmethod
    async def write(self, piece: str) -> None: ...

    @abstractmethod
    async def commit(self, *, is_json: bool = False) -> StoredOutput: ...

    @abstractmethod
    async def discard(self) -> None: ...


class OutputStore(ABC):
    """Stores outputs that are too large for a model, for their owner, until they expire."""

    @abstractmethod
    async def create(self, *, session: str, owner: str | None, tool: str) -> OutputWriter: ...

    @abstractmethod
    async def find(self, handle: str, *, session: str, owner: str | None) -> StoredOutput | None:
        """Returns the output if it exists, has not expired, and this reader may read it; else None."""

    @abstractmethod
    async def inspect(self, handle: str) -> StoredOutput | None:
        """Returns the output if it exists and has not expired, whoever owns it. For operators, never for tools."""

    @abstractmethod
    def lines(self, output: StoredOutput) -> AsyncIterator[list[str]]:
        """Yields the lines of an output in batches, without line ends: it may be larger than memory.

        A line longer than one MiB is split into pieces of that size.
        """

    @abstractmethod
    async def text(self, output: StoredOutput, *, limit: int) -> str:
        """Returns the first `limit` bytes, as text."""

    @abstractmethod
    async def sessions(self) -> Sequence[str]:
        """Returns the sessions that have an output that has not expired."""

    @abstractmethod
    async def sweep(self) -> int:
        """Deletes expired outputs. Returns how many."""

    async def aclose(self) -> None: ...


class ConversationStore(ABC):
    """Stores the conversations of `run_agent(…, session=…)`. A session belongs to its owner, the principal."""

    @abstractmethod
    def lock(self, session: str, *, owner: str) -> AbstractAsyncContextManager[None]:
        """Waits until nobody else has locked the session, and locks it. Only the run that has the lock may save."""

    @abstractmethod
    async def load(self, session: str, *, owner: str) -> tuple[Turn, ...]:
        """Returns the conversation; empty if there is none. Raises `StorageError` if it cannot be read."""

    @abstractmethod
    async def save(self, session: str, turns: Sequence[Turn], *, owner: str) -> None:
        """Replaces the conversation. Raises `StorageError` if it cannot be written; then the old one stays."""

    @abstractmethod
    async def delete(self, session: str, *, owner: str) -> bool:
        """Deletes the conversation. Returns whether there was one."""


class TokenCounter(Protocol):
    """Counts the tokens of a text."""

    def __call__(self, text: str, /) -> int: ...


class Allow(msgspec.Struct, frozen=True):
    """The call may run."""


class Deny(msgspec.Struct, frozen=True):
    """The call may not run. `reason` says why."""

    reason: str


class Ask(msgspec.Struct, frozen=True):
    """A person has to approve the call before it runs."""

    reason: str = ""
    """Why, for the person who decides."""
    approvers: tuple[str, ...] = (OPERATORS,)
    """Who may decide: `operators`, `members` of the call's space, the `caller`, or ids of entities."""
    expires_after: float | None = None
    """Seconds until the request expires; None: as long as a pending call waits."""
    source: str = ""
    """The policy or the line of configuration that asks."""


Decision = Allow | Deny | Ask


class Policy(Protocol):
    """Decides whether a call may run. `rule` is its description in `toolspace explain`.

    `Allow` means that this policy has no objection: other policies and the rules of the configuration still decide.
    """

    @property
    def rule(self) -> str: ...

    def decide(self, tool: Tool, context: ToolContext) -> Decision: ...
