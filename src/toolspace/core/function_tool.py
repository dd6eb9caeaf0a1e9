"""Tools that are Python functions: `@tool` and `FunctionTool`. Runs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from inspect import CO_OPTIMIZED
from types import MethodType
from typing import Any, Self, TypedDict, Unpack, overload

from toolspace.core import function_schema
from toolspace.core.signature import (
    FunctionSignature,
    check_parameters,
    execution_style,
    function_name,
    has_text_hints,
    read_signature,
    without_first_parameter,
)
from toolspace.core.tool import Annotations, Tool, ToolCategory, check_local_name
from toolspace.core.validation import SchemaValidator, Validator


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
        bound._validator = None
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
            self._output_schema = function_schema.output_schema(self.signature, self.name)
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
    cache_per_user: bool
    annotations: Annotations
    tags: tuple[str, ...]
    version: str


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Makes a tool from a function: `@tool`, or `@tool(timeout=5, …)`."""
    if function is not None:
        return FunctionTool(function, namespace=_caller_locals(function), **options)

    def decorate(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(function, namespace=_caller_locals(function), **options)

    return decorate


def as_tool(item: Tool | Callable[..., Any]) -> Tool:
    """Returns a tool unchanged, and a tool made from a plain function."""
    return item if isinstance(item, Tool) else FunctionTool(item)


def _caller_locals(function: Callable[..., Any]) -> Mapping[str, Any] | None:
    """Returns the names around a function that is defined inside another, to evaluate hints that are text."""
    if "<locals>" not in getattr(function, "__qualname__", "<locals>") or not has_text_hints(function):
        return None
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]: there is no public API
    names = dict(frame.f_locals)
    while not frame.f_code.co_flags & CO_OPTIMIZED and frame.f_locals is not frame.f_globals and frame.f_back:
        frame = frame.f_back  # The body of a class: its methods also see the names of the function around it.
        names = {**frame.f_locals, **names}
    return names
