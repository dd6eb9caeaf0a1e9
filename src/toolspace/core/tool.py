"""Tools: `Tool`, `FunctionTool` and the decorator `@tool`. `core.tool_export` writes them in the formats of model APIs.

Everything that offers, lists or calls tools uses it. It runs nothing.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import CO_OPTIMIZED
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack, cast, overload

import msgspec

from toolspace.core import function_schema
from toolspace.core.argument_names import ArgumentNames
from toolspace.core.argument_validation import SchemaValidator, Validator
from toolspace.core.function_signature import (
    FunctionSignature,
    check_parameters,
    execution_style,
    function_name,
    has_text_hints,
    read_signature,
    without_first_parameter,
)
from toolspace.core.names import is_local_name
from toolspace.errors import ToolDefinitionError

if TYPE_CHECKING:
    from toolspace.core.model_schemas import ModelSchema


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
    "function", "gateway", "external", "space", "internal", "static", "prebuilt", "agent", "compute", "image", "wait"
]
CacheScope = Literal["principal", "shared"]
"""Who gets a cached result: the principal whose call it was, or everyone who may reach the same."""
WhenUnserved = Literal["wait", "fail"]
PENDING_EXECUTION_TYPES: frozenset[ExecutionType] = frozenset(("external", "space", "wait"))
"""Tools whose calls are pending: a worker, a person or a timer submits the result."""


class Annotations(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Hints on what a tool does. None: unknown, which is treated like the most careful value."""

    read_only: bool | None = None
    destructive: bool | None = None
    idempotent: bool | None = None
    open_world: bool | None = None


NO_ANNOTATIONS = Annotations()
_ANNOTATION_NAMES = {name.casefold(): name for name in ("readOnly", "destructive", "idempotent", "openWorld")}
EMPTY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

ToolHandler = Callable[..., Any]
"""Runs a tool that was defined by a JSON Schema: `handler(parameters, context)`, plain or async."""


class Tool:
    """The definition of a tool, whoever provides it.

    Durations are seconds. `timeout`, `queue` and `cache` are the tool's own settings; the configuration may override
    them. Treat it as immutable: `replace()` returns a changed copy.
    """

    __slots__ = (
        "_argument_names", "_description", "_input_schema", "_model_schema", "_output_schema", "_validator",
        "annotations", "approval", "cache",
        "cache_scope", "category", "execution", "execution_type", "expires_after", "handler", "has_small_results",
        "is_async", "mcp_fields", "name", "pauses_run", "priority", "queue", "tags", "timeout", "version", "visible",
        "when_unserved",
    )  # fmt: skip

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
        cache_scope: CacheScope | None = None,
        priority: int | None = None,
        annotations: Annotations | Mapping[str, bool] | None = None,
        tags: tuple[str, ...] = (),
        version: str | None = None,
        has_small_results: bool = False,
        expires_after: float | None = None,
        pauses_run: bool = False,
        when_unserved: WhenUnserved = "wait",
        approval: Literal["required", "none"] | None = None,
        mcp_fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._description = description
        self._input_schema: Mapping[str, Any] | None = input_schema
        self._output_schema: Mapping[str, Any] | None = output_schema
        self._validator: Validator | None = None
        self._argument_names: ArgumentNames | Literal[False] | None = None
        self._model_schema: ModelSchema | None = None
        self.handler = handler
        self.category = category if isinstance(category, ToolCategory) else _category(category, name)
        self.execution_type: ExecutionType = execution_type
        self.visible = visible
        self.is_async = is_async
        self.timeout = timeout
        self.execution = execution
        self.queue = queue
        self.cache = cache
        if cache_scope not in (None, "principal", "shared"):
            raise ToolDefinitionError(f"tool {name!r}: cache_scope is 'principal' or 'shared', not {cache_scope!r}")
        self.cache_scope: CacheScope | None = cache_scope
        """Whose calls share its cached results; None: those of one principal, unless its provider says otherwise."""
        self.priority = priority
        """Waiting calls of higher priority leave a queue first; None: 0."""
        self.annotations = to_annotations(annotations, name)
        self.tags = tags
        self.version = version
        self.has_small_results = has_small_results
        """Whether its results are always small, so that they are never stored as outputs."""
        self.expires_after = expires_after
        """How long a pending call waits for its result; None: as configured."""
        self.pauses_run = pauses_run
        """Whether the run waits for the result of a pending call, however long it takes."""
        self.when_unserved: WhenUnserved = when_unserved
        """What a synchronous external call does if nobody serves it: waits for its timeout, or fails at once."""
        self.approval: Literal["required", "none"] | None = approval
        """`required`: a person has to approve each call, unless a policy denies it anyway."""
        self.mcp_fields: Mapping[str, Any] = mcp_fields or {}
        """Further fields for MCP clients: `title`, `icons`, `annotations`, `execution`, `_meta` and unknown ones."""

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

    @property
    def argument_names(self) -> ArgumentNames | None:
        """The names under which models get its arguments; None if models get the names of the input schema."""
        names = self._argument_names
        if names is None:
            names = self._argument_names = ArgumentNames.of(self.input_schema) or False
        return names or None

    @property
    def model_schema(self) -> ModelSchema:
        """The input schema in the form that models get, and what that form does not say."""
        if self._model_schema is None:
            from toolspace.core.model_schemas import build_model_schema

            self._model_schema = build_model_schema(self.input_schema, self.argument_names)
        return self._model_schema

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed. It shares the schema and the validator if they do not change."""
        copy = type(self).__new__(type(self))
        for owner in type(self).__mro__:
            for slot in getattr(owner, "__slots__", ()):
                if hasattr(self, slot):
                    setattr(copy, slot, getattr(self, slot))
        if "input_schema" in changes:
            copy._validator = copy._argument_names = copy._model_schema = None
        if "annotations" in changes:
            changes["annotations"] = to_annotations(changes["annotations"], self.name)
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
            "whenUnserved": None if self.when_unserved == "wait" else self.when_unserved,
            "approval": self.approval,
            "queue": self.queue,
            "priority": self.priority,
            "cache": None if self.cache is None else round(self.cache * 1000),
            "cacheScope": self.cache_scope,
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


class FunctionTool(Tool):
    """A tool that is a Python function. It can still be called like the function.

    Its description, schema and validator are derived from the signature and the docstring when they are first needed.
    """

    __slots__ = ("_namespace", "_own_schema", "_signature", "function", "style")

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        input_schema: Mapping[str, Any] | None = None,
        namespace: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        name = name or function_name(function)
        check_local_name(name)
        super().__init__(name, description or "", input_schema, **settings)
        self.function = function
        self.style = execution_style(function, name)
        self._own_schema = input_schema is not None
        self._namespace = namespace
        self._signature: FunctionSignature | None = None
        check_parameters(function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object | None, owner: type | None = None) -> FunctionTool:
        """Binds `self`, as any method does."""
        if instance is None:
            return self
        bound = self.replace(function=MethodType(self.function, instance))
        bound._signature = None if self._signature is None else without_first_parameter(self._signature)
        bound._validator = bound._argument_names = bound._model_schema = None
        if not self._own_schema:
            bound._input_schema = None
        return bound

    def replace(self, **changes: Any) -> Self:
        copy = super().replace(**changes)
        if "input_schema" in changes:
            copy._own_schema = True
        return copy

    @property
    def signature(self) -> FunctionSignature:
        if self._signature is None:
            self._signature = read_signature(self.function, self.name, self._namespace)
            self._namespace = None
        return self._signature

    @property
    def description(self) -> str:
        return self._description or self.signature.description

    @property
    def input_schema(self) -> Mapping[str, Any]:
        if self._input_schema is None:
            self._input_schema = function_schema.input_schema(self.signature, self.name)
        return self._input_schema

    @property
    def output_schema(self) -> Mapping[str, Any] | None:
        if self._output_schema is None:
            self._output_schema = function_schema.output_schema(self.signature)
        return self._output_schema

    @property
    def validator(self) -> Validator:
        if self._validator is None:
            if self._own_schema:
                self._validator = SchemaValidator(self.input_schema, tool=self.name)
            else:
                self._validator = function_schema.FunctionValidator(
                    self.signature, lambda: self.input_schema, self.name
                )
        return self._validator


class ToolOptions(TypedDict, total=False):
    """The options of `@tool(…)`. Durations are seconds."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any]
    category: ToolCategory | str
    visible: bool
    is_async: bool
    timeout: float
    queue: str
    cache: float
    cache_scope: CacheScope
    priority: int
    annotations: Annotations | Mapping[str, bool]
    tags: tuple[str, ...]
    version: str
    approval: Literal["required", "none"]


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Makes a tool from a function: `@tool`, or `@tool(timeout=5, …)`."""
    if function is not None:
        return FunctionTool(function, namespace=caller_locals(function), **options)

    def decorate(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(function, namespace=caller_locals(function), **options)

    return decorate


def as_tool(item: Tool | Callable[..., Any]) -> Tool:
    """Returns a tool unchanged, and a tool made from a plain function."""
    return item if isinstance(item, Tool) else FunctionTool(item)


def _category(text: str, tool: str) -> ToolCategory:
    try:
        return ToolCategory(text)
    except ValueError:
        names = ", ".join(ToolCategory)
        raise ToolDefinitionError(f"tool {tool!r} has the unknown category {text!r}; it is one of {names}") from None


def caller_locals(function: Callable[..., Any]) -> Mapping[str, Any] | None:
    """Returns the names around a function that is defined inside another, to evaluate hints that are text."""
    if "<locals>" not in getattr(function, "__qualname__", "<locals>") or not has_text_hints(function):
        return None
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]: there is no public API
    names = dict(frame.f_locals)
    while not frame.f_code.co_flags & CO_OPTIMIZED and frame.f_locals is not frame.f_globals and frame.f_back:
        frame = frame.f_back  # The body of a class: its methods also see the names of the function around it.
        names = {**frame.f_locals, **names}
    return names


def to_annotations(value: object, tool_name: str) -> Annotations:
    """The annotations of a tool. A mapping may use the Python names, the names on the wire, or those of MCP.

    Raises `ToolDefinitionError` for anything else.
    """
    if value is None or isinstance(value, Annotations):
        return value or NO_ANNOTATIONS
    with suppress(KeyError, msgspec.ValidationError, AttributeError):
        # `read_only`, `readOnly` and `readOnlyHint` are the same.
        hints = {
            _ANNOTATION_NAMES[name.replace("_", "").casefold().removesuffix("hint")]: hint
            for name, hint in cast("Mapping[str, object]", value).items()
        }
        return msgspec.convert(hints, Annotations)
    names = ", ".join(_ANNOTATION_NAMES.values())
    raise ToolDefinitionError(
        f"tool {tool_name!r}: annotations are Annotations(…), or a mapping of {names} to true or false; "
        f"not {repr(value)[:200]}"
    )
