"""Reads the signature of a Python function: parameters, type hints, defaults and docstring. Does not call it.

`core.tool` uses it. Docstrings of the Google, NumPy and Sphinx styles are parsed here, because a thousand
tools are read at start and the libraries for it take longer than everything else.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from inspect import cleandoc
from typing import Annotated, Any, ForwardRef, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolDefinitionError

ExecutionStyle = Literal["async", "sync", "stream"]
MISSING: Any = inspect.Parameter.empty
_Kind = Literal["positional", "named", "extra"]
_KINDS: dict[Any, _Kind] = {inspect.Parameter.POSITIONAL_ONLY: "positional", inspect.Parameter.VAR_KEYWORD: "extra"}
_GOOGLE = re.compile(
    r"^(Args|Arguments|Parameters|Params|Keyword Arg(?:ument)?s|Other Parameters"
    r"|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|Warnings?)"
    r":\s*$",
    re.MULTILINE,
)
_NUMPY = re.compile(r"^([A-Z][A-Za-z ]+)\n-{3,}\s*$", re.MULTILINE)
_SPHINX = re.compile(r"^:(\w+)(?:\s+([^:\n]*?))?:[ \t]*(.*(?:\n[ \t]+.*)*)", re.MULTILINE)
_GOOGLE_ITEM = re.compile(
    r"^(\*{0,2}\w+(?:, ?\*{0,2}\w+)*)\s*(?:\([^\n]*?\))?\s*:[ \t]*(.*(?:\n(?:[ \t]+.*|[ \t]*(?=\n)))*)", re.MULTILINE
)
_NUMPY_ITEM = re.compile(
    r"^(\*{0,2}\w+(?:, ?\*{0,2}\w+)*)(?:\s*:[^\n]*)?\n((?:[ \t]+.*(?:\n|$)|[ \t]*\n)+)", re.MULTILINE
)
_ARGUMENT_HEADINGS = frozenset(
    ("args", "arguments", "parameters", "params", "keyword args", "keyword arguments", "other parameters")
)


class FunctionParameter(NamedTuple):
    """One parameter that the caller fills in."""

    name: str
    hint: Any
    default: Any
    description: str | None


class FunctionSignature(NamedTuple):
    """The parameters of a function: those of the caller, and the context that the system adds."""

    description: str
    parameters: tuple[FunctionParameter, ...]
    kwargs_hint: Any
    """The hint of `**kwargs`; `MISSING` if there are none."""
    returns: Any
    context_parameter: str | None
    """The parameter that gets the `ToolContext`."""
    positional_only: tuple[str, ...]
    """The parameters that cannot be passed by name, in order."""
    bound_names: frozenset[str]
    """The parameters that a `partial` has set. A caller may not set them, not even through `**kwargs`."""


class _RawParameter(NamedTuple):
    name: str
    kind: _Kind
    default: Any
    hint: Any = MISSING
    """The hint, if it is not in `__annotations__`."""


def execution_style(function: Callable[..., Any], tool: str) -> ExecutionStyle:
    """Returns how the function runs: on the loop, in a thread, or as a stream."""
    # The outermost wrapper decides. A plain wrapper returns what the wrapped function returns.
    for candidate in (_callable_code(function), _target(function)):
        if inspect.isasyncgenfunction(candidate):
            return "stream"
        if inspect.iscoroutinefunction(candidate):
            return "async"
    if inspect.isgeneratorfunction(_target(function)):
        raise ToolDefinitionError(
            f"tool {tool!r} is a plain generator; make it `async def` to stream what it yields, or return a list"
        )
    return "sync"


def function_name(function: Callable[..., Any]) -> str:
    target = function.func if isinstance(function, functools.partial) else function
    return getattr(target, "__name__", None) or type(target).__name__


def check_parameters(function: Callable[..., Any], tool: str) -> None:
    """Raises `ToolDefinitionError` for parameters that no caller can set."""
    _raw_parameters(function, tool)


def read_signature(
    function: Callable[..., Any], tool: str, namespace: Mapping[str, Any] | None = None
) -> FunctionSignature:
    """Returns the signature of a function. It costs some microseconds, so it is read when first needed."""
    target = _target(function)
    hints = _hints(target, tool, namespace)
    doc = parse_docstring(target.__doc__ or _class_doc(function))
    parameters: list[FunctionParameter] = []
    positional: list[str] = []
    extra: Any = MISSING
    context: str | None = None
    bound_names = _bound_names(function)
    for name, kind, default, own_hint in _raw_parameters(function, tool):
        hint = hints.get(name, Any if own_hint is MISSING or isinstance(own_hint, str) else own_hint)
        if name in bound_names:
            continue
        if kind == "extra":
            extra = hint
            continue
        if is_context_hint(hint):
            if context is not None:
                raise ToolDefinitionError(f"tool {tool!r} takes two contexts, {context!r} and {name!r}; one is enough")
            context = name
        else:
            parameters.append(FunctionParameter(name, hint, default, doc.arguments.get(name)))
        if kind == "positional":
            positional.append(name)
    returns = hints.get("return", MISSING)
    return FunctionSignature(
        doc.description, tuple(parameters), extra, returns, context, tuple(positional), bound_names
    )


def is_context_hint(hint: object) -> bool:
    """Whether a hint is `ToolContext`, perhaps optional or annotated."""
    if isinstance(hint, type):
        return issubclass(hint, ToolContext)
    origin = get_origin(hint)
    if origin is Annotated:
        return is_context_hint(get_args(hint)[0])
    return (origin is Union or origin is types.UnionType) and any(map(is_context_hint, get_args(hint)))


def has_text_hints(function: Callable[..., Any]) -> bool:
    """Whether a hint of the function is text, wholly or in part, so that evaluating it needs the names around it."""
    annotations = cast("Mapping[str, Any]", getattr(_target(function), "__annotations__", None) or {})
    return any(map(_is_text, annotations.values()))


def without_first_parameter(signature: FunctionSignature) -> FunctionSignature:
    """Returns the signature of a bound method from that of its function."""
    first = signature.parameters[0].name
    positional = tuple(name for name in signature.positional_only if name != first)
    return signature._replace(parameters=signature.parameters[1:], positional_only=positional)


def _raw_parameters(function: Callable[..., Any], tool: str) -> list[_RawParameter]:
    if type(function) is types.FunctionType and not ({"__wrapped__", "__signature__"} & function.__dict__.keys()):
        return _from_code(function, tool)
    return _from_inspect(function, tool)


def _bound_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset()


def _from_code(function: types.FunctionType, tool: str) -> list[_RawParameter]:
    """Returns the same as `_from_inspect` in a tenth of the time (benchmark `register`)."""
    code = function.__code__
    if code.co_flags & inspect.CO_VARARGS:
        raise _variadic(tool, code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
    count, named_count = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names, defaults = code.co_varnames, function.__defaults__ or ()
    named_defaults: Mapping[str, Any] = function.__kwdefaults__ or {}
    values = (MISSING,) * (count - len(defaults)) + defaults
    raw = [
        _RawParameter(name, "positional" if index < code.co_posonlyargcount else "named", default)
        for index, (name, default) in enumerate(zip(names, values, strict=False))
    ]
    raw += [_RawParameter(name, "named", named_defaults.get(name, MISSING)) for name in names[count:named_count]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        raw.append(_RawParameter(names[named_count], "extra", MISSING))
    return raw


def _from_inspect(function: Callable[..., Any], tool: str) -> list[_RawParameter]:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise ToolDefinitionError(
            f"the parameters of tool {tool!r} cannot be read ({error}); give it an input_schema"
        ) from None
    raw: list[_RawParameter] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise _variadic(tool, parameter.name)
        kind = _KINDS.get(parameter.kind, "named")
        raw.append(_RawParameter(parameter.name, kind, parameter.default, parameter.annotation))
    return raw


def _variadic(tool: str, name: str) -> ToolDefinitionError:
    return ToolDefinitionError(
        f"tool {tool!r} takes *{name}, which no model can fill in; take a list instead: {name}: list[str]"
    )


def _hints(target: Any, tool: str, namespace: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if isinstance(target, type) and inspect.isfunction(target.__init__):
        target = target.__init__
    annotations = cast("Mapping[str, Any]", getattr(target, "__annotations__", None) or {})
    if not any(map(_is_text, annotations.values())):
        return annotations
    names = dict(namespace) if namespace else None
    try:
        return get_type_hints(target, localns=names, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        if _is_text(annotations.get("return")):
            # The type of the result may be known to type checkers only; those of the parameters may not.
            substitute = types.FunctionType(_empty_function.__code__, getattr(target, "__globals__", {}))
            substitute.__annotations__ = {name: hint for name, hint in annotations.items() if name != "return"}
            return _hints(substitute, tool, namespace)
        raise ToolDefinitionError(
            f"a type hint of tool {tool!r} cannot be resolved: {error}; import its type where the function can "
            "see it when it runs, not only under TYPE_CHECKING"
        ) from error


def _target(function: Callable[..., Any]) -> Any:
    """Returns the function inside partials and wrappers, or the `__call__` of an object."""
    current: Any = function
    while isinstance(current, functools.partial) or hasattr(current, "__wrapped__"):
        current = current.func if isinstance(current, functools.partial) else inspect.unwrap(current)
    return _callable_code(current)


def _callable_code(function: Callable[..., Any]) -> Any:
    """Returns what runs when it is called: itself, or the `__call__` of an object. Unwraps partials, not wrappers."""
    current: Any = function
    while isinstance(current, functools.partial):
        current = cast("Any", current).func
    return type(current).__call__ if _is_object(current) else current


def _is_object(function: Any) -> bool:
    """Whether it is a callable instance, and not a function, a method or a class."""
    return not isinstance(function, types.FunctionType | types.MethodType | type) and not inspect.isbuiltin(function)


def _is_text(hint: object) -> bool:
    if type(hint) is type:
        return False  # The most common case, first.
    if isinstance(hint, str | ForwardRef):
        return True
    origin = get_origin(hint)
    if origin is None or origin is Literal:
        return False
    parts = get_args(hint)
    return any(map(_is_text, parts[:1] if origin is Annotated else parts))


def _class_doc(function: Callable[..., Any]) -> str | None:
    if isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        return None
    return type(function).__doc__ if _is_object(function) else None


def _empty_function() -> None: ...


# Docstrings


class Docstring(NamedTuple):
    """A description, and the description of each argument."""

    description: str
    arguments: dict[str, str]


def parse_docstring(text: str | None) -> Docstring:
    """Returns the description and the arguments of a docstring."""
    if not text:
        return Docstring("", {})
    text = cleandoc(text).strip()
    if "\n" not in text:
        return Docstring(text, {})
    if headings := list(_GOOGLE.finditer(text)):
        return _parse_sections(text, headings, _GOOGLE_ITEM)
    if headings := list(_NUMPY.finditer(text)):
        return _parse_sections(text, headings, _NUMPY_ITEM)
    if ":param" in text or ":arg" in text:
        return _parse_sphinx(text)
    return Docstring(text, {})


def _parse_sections(text: str, headings: list[re.Match[str]], item: re.Pattern[str]) -> Docstring:
    arguments: dict[str, str] = {}
    for index, heading in enumerate(headings):
        if heading[1].casefold() not in _ARGUMENT_HEADINGS:
            continue
        end = headings[index + 1].start() if index + 1 < len(headings) else len(text)
        body = cleandoc("\n" + text[heading.end() : end])
        for match in item.finditer(body):
            arguments.update((name.strip(" *"), _join_lines(match[2])) for name in match[1].split(","))
    return Docstring(text[: headings[0].start()].strip(), arguments)


def _parse_sphinx(text: str) -> Docstring:
    arguments: dict[str, str] = {}
    first = len(text)
    for match in _SPHINX.finditer(text):
        first = min(first, match.start())
        if match[1] in ("param", "parameter", "arg", "argument") and match[2]:
            arguments[match[2].split()[-1].lstrip("*")] = _join_lines(match[3])
    return Docstring(text[:first].strip(), arguments)


def _join_lines(lines: str) -> str:
    return " ".join(lines.split())
