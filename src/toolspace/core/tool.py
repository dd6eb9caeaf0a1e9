"""A tool as data: its name, schema, settings and hints. Runs nothing."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import msgspec

from toolspace.core.names import is_local_name
from toolspace.core.validation import SchemaValidator, Validator
from toolspace.errors import ToolDefinitionError


class ToolCategory(enum.StrEnum):
    SYSTEM = "system"
    FILE = "file"
    NETWORK = "network"
    DATA = "data"
    MEMORY = "memory"
    CODE = "code"
    MCP = "mcp"
    REST = "rest"
    AGENT = "agent"
    SPACE = "space"
    CUSTOM = "custom"


ExecutionType = Literal[
    "function",
    "gateway",
    "external",
    "space",
    "internal",
    "static",
    "prebuilt",
    "agent",
    "compute",
    "image",
    "wait",
]


PENDING_EXECUTION_TYPES: frozenset[ExecutionType] = frozenset(("external", "space", "wait"))
"""Tools whose calls are pending: a worker, a person or a timer submits the result."""


class Annotations(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Hints on what a tool does. None: unknown, which is treated like the most careful value."""

    read_only: bool | None = None
    destructive: bool | None = None
    idempotent: bool | None = None
    open_world: bool | None = None


NO_ANNOTATIONS = Annotations()
EMPTY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

ToolHandler = Callable[..., Any]
"""Runs a tool that was defined by a JSON Schema: `handler(parameters, context)`, plain or async."""


class Tool:
    """The definition of a tool, whoever provides it.

    Durations are seconds. `timeout`, `queue` and `cache` are the tool's own settings; the configuration may override
    them. Treat it as immutable: `replace()` returns a changed copy.
    """

    __slots__ = (
        "_description",
        "_input_schema",
        "_output_schema",
        "_validator",
        "annotations",
        "cache",
        "cache_per_user",
        "category",
        "execution",
        "execution_type",
        "expires_after",
        "handler",
        "has_small_results",
        "is_async",
        "name",
        "pauses_run",
        "queue",
        "tags",
        "timeout",
        "version",
        "visible",
    )

    def __init__(
        self,
        name: str,
        description: str = "",
        input_schema: Mapping[str, Any] | None = None,
        *,
        handler: ToolHandler | None = None,
        output_schema: Mapping[str, Any] | None = None,
        category: ToolCategory | str = ToolCategory.CUSTOM,
        execution_type: ExecutionType = "function",
        visible: bool = True,
        is_async: bool = False,
        timeout: float | None = None,
        execution: Mapping[str, Any] | None = None,
        queue: str | None = None,
        cache: float | None = None,
        cache_per_user: bool = False,
        annotations: Annotations | None = None,
        tags: tuple[str, ...] = (),
        version: str | None = None,
        has_small_results: bool = False,
        expires_after: float | None = None,
        pauses_run: bool = False,
    ) -> None:
        self.name = name
        self._description = description
        self._input_schema: Mapping[str, Any] | None = input_schema
        self._output_schema: Mapping[str, Any] | None = output_schema
        self._validator: Validator | None = None
        self.handler = handler
        self.category = category if isinstance(category, ToolCategory) else _category(category, name)
        self.execution_type: ExecutionType = execution_type
        self.visible = visible
        self.is_async = is_async
        self.timeout = timeout
        self.execution = execution
        self.queue = queue
        self.cache = cache
        self.cache_per_user = cache_per_user
        self.annotations = annotations or NO_ANNOTATIONS
        self.tags = tags
        self.version = version
        self.has_small_results = has_small_results
        """Whether its results are always small, so that they are never stored as outputs."""
        self.expires_after = expires_after
        """How long a pending call waits for its result; None: as configured."""
        self.pauses_run = pauses_run
        """Whether the run waits for the result of a pending call, however long it takes."""

    @property
    def description(self) -> str:
        return self._description

    @property
    def input_schema(self) -> Mapping[str, Any]:
        """The JSON Schema (2020-12) of the arguments, as the model sees it."""
        if self._input_schema is None:
            self._input_schema = EMPTY_SCHEMA
        return self._input_schema

    @property
    def output_schema(self) -> Mapping[str, Any] | None:
        return self._output_schema

    @property
    def validator(self) -> Validator:
        """Validates arguments. Built on first use: most tools of a large toolspace are never called."""
        if self._validator is None:
            self._validator = SchemaValidator(self.input_schema, tool=self.name)
        return self._validator

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed. It shares the schema and the validator if they do not change."""
        copy = type(self).__new__(type(self))
        for owner in type(self).__mro__:
            for slot in getattr(owner, "__slots__", ()):
                if hasattr(self, slot):
                    setattr(copy, slot, getattr(self, slot))
        if "input_schema" in changes:
            copy._validator = None
        for field in ("description", "input_schema", "output_schema"):
            if field in changes:
                setattr(copy, f"_{field}", changes.pop(field))
        for field, value in changes.items():
            setattr(copy, field, value)
        return copy

    def to_dict(self) -> dict[str, Any]:
        """Returns the wire form: camelCase, without fields that are not set."""
        wire: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "inputSchema": self.input_schema,
            "category": str(self.category),
            "executionType": self.execution_type,
            "visible": self.visible,
            "isAsync": self.is_async,
        }
        optional = {
            "outputSchema": self.output_schema,
            "timeout": None if self.timeout in (None, math.inf) else round(self.timeout * 1000),
            "execution": self.execution,
            "expiresAfter": None if self.expires_after is None else round(self.expires_after * 1000),
            "pausesRun": self.pauses_run or None,
            "queue": self.queue,
            "cache": None if self.cache is None else round(self.cache * 1000),
            "annotations": msgspec.to_builtins(self.annotations) or None,
            "tags": list(self.tags) or None,
            "version": self.version,
        }
        wire.update((key, value) for key, value in optional.items() if value is not None)
        return wire

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def check_local_name(name: str) -> None:
    """Raises `ToolDefinitionError` unless models and protocols accept the name of a local tool."""
    if not is_local_name(name):
        raise ToolDefinitionError(
            f"{name!r} cannot name a tool; use 1 to 64 of the characters A-Z a-z 0-9 _ - (give one with name=…)"
        )


def _category(text: str, tool: str) -> ToolCategory:
    try:
        return ToolCategory(text)
    except ValueError:
        names = ", ".join(ToolCategory)
        raise ToolDefinitionError(f"tool {tool!r} has the unknown category {text!r}; it is one of {names}") from None
