"""Compiles a REST tool: its templates into one function from arguments to a request, and the schema that it takes."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

from multidict import CIMultiDict

from toolspace.errors import ToolDefinitionError, ToolValidationError
from toolspace.providers.rest.body import compile_body, refuse_fixed
from toolspace.providers.rest.request import IDEMPOTENT, SAFE, Build, Request
from toolspace.providers.rest.secrets import remember_request_secrets
from toolspace.providers.rest.spec import RestSpec
from toolspace.providers.rest.target import Target
from toolspace.providers.rest.template import ABSENT, Fill, Hole, compile_text, holes, split

_METHOD = re.compile(r"[A-Z]{1,20}")
_QUERY_METHODS = frozenset((*SAFE, "DELETE"))
"""Methods whose unused parameters go to the query."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_FORBIDDEN_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_FRAMING = frozenset(
    ("connection", "content-length", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
"""Where a message ends is the client's to say: another word on it could start a second request inside the first."""
_DEFAULT_HEADERS = (("Accept", "application/json, */*;q=0.8"),)


def compile_request(spec: RestSpec) -> Build:
    """What makes the requests of one tool. Raises `ToolDefinitionError` that names the tool and the field."""
    method = spec.method.upper()
    if not _METHOD.fullmatch(method) or method in ("CONNECT", "TRACE"):
        raise _wrong(spec, "method", f"{spec.method[:40]!r} cannot be sent; use GET, POST, PUT, PATCH or DELETE")
    with _naming(spec, "query"):
        list(holes(spec.query))
    with _naming(spec, "url"):
        target = Target(spec.url, spec.query)
    with _naming(spec, "headers"):
        fixed, open_headers = _compile_headers(spec.headers)
    remember_request_secrets(spec.url, spec.headers, spec.query)
    if target.authorization is not None:
        fixed.setdefault("Authorization", target.authorization)
    with _naming(spec, "body"):
        encode, content_type = compile_body(spec.body, fixed.get("Content-Type"))
    with_body = fixed.copy()
    if content_type is not None:
        with_body.setdefault("Content-Type", content_type)

    used, all_used = _used(spec)
    to_query = method in _QUERY_METHODS
    no_body = to_query and spec.body is None
    idempotent, safe = method in IDEMPOTENT, method in SAFE
    names = target.names

    def build(parameters: dict[str, Any]) -> Request:
        more = None
        if not all_used and not used.issuperset(parameters):
            more = {name: value for name, value in parameters.items() if name not in used}
            if to_query:
                refuse_fixed(more, names)
        body = None if no_body else encode(parameters, None if to_query else more)
        headers = fixed if body is None else with_body
        if open_headers:
            headers = headers.copy()
            for name, fill in open_headers:
                value = fill(parameters)
                if value is not ABSENT:
                    headers[name] = _checked(name, value)
        return Request(method, target.url(parameters, more if to_query else None), headers, body, idempotent, safe)

    return build


def schema_of(spec: RestSpec) -> Mapping[str, Any]:
    """The schema that a tool takes: its own, else the parameters that its templates name."""
    if spec.parameters_schema is not None:
        return spec.parameters_schema
    required = Target(spec.url, spec.query).required
    root: dict[str, Any] = {}
    for hole, whole in _holes(spec):
        _describe(root, hole, whole=whole)
    schema: dict[str, Any] = {"type": "object", "properties": root, "additionalProperties": _takes_all(spec)}
    if required:
        schema["required"] = sorted(required)
    return schema


def _describe(properties: dict[str, Any], hole: Hole, *, whole: bool) -> None:
    """Adds one hole to the properties: an object for each step down, and what stands at the end."""
    for place, step in enumerate(hole.path):
        if isinstance(step, int):
            return
        inner = properties.setdefault(step, {})
        last = place == len(hole.path) - 1
        following = None if last else hole.path[place + 1]
        if last:
            if whole:
                inner.pop("type", None)  # Any JSON keeps its type there.
            elif not inner:
                inner["type"] = "string"
        elif isinstance(following, int):
            properties[step] = {"type": "array"}
        else:
            inner["type"] = "object"
            properties = cast("dict[str, Any]", inner.setdefault("properties", {}))


def _takes_all(spec: RestSpec) -> bool:
    return any(not hole.path for hole, _ in _holes(spec))


def _holes(spec: RestSpec) -> Iterable[tuple[Hole, bool]]:
    """Every hole, and whether it is the whole of a value that keeps its type."""
    for text in (spec.url, *spec.headers.values()):
        yield from ((hole, False) for hole in holes(text))
    yield from _data_holes(spec.query)
    if isinstance(spec.body, str):  # A JSON text may have any value between its quotes and beside them.
        yield from ((hole, True) for hole in holes(spec.body))
    else:
        yield from _data_holes(spec.body)


def _data_holes(value: object) -> Iterable[tuple[Hole, bool]]:
    if isinstance(value, str):
        pieces = split(value)
        yield from ((piece, len(pieces) == 1) for piece in pieces if isinstance(piece, Hole))
    elif isinstance(value, Mapping):
        for inner in cast("Mapping[str, object]", value).values():
            yield from _data_holes(inner)
    elif isinstance(value, list | tuple):
        for inner in cast("list[object]", value):
            yield from _data_holes(inner)


def _used(spec: RestSpec) -> tuple[frozenset[str], bool]:
    """The parameters that some template names, and whether one takes them all."""
    found = [hole for hole, _ in _holes(spec)]
    return frozenset(str(hole.path[0]) for hole in found if hole.path), any(not hole.path for hole in found)


def _compile_headers(headers: Mapping[str, str]) -> tuple[CIMultiDict[str], list[tuple[str, Fill]]]:
    """The headers that are the same on every call, and those with holes. Its messages show no value: keys are there."""
    fixed = CIMultiDict(_DEFAULT_HEADERS)
    open_headers: list[tuple[str, Fill]] = []
    for name, text in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not a header name")
        if name.lower() in _FRAMING:
            raise ValueError(f"{name} is set by the client; leave it out")
        pieces = split(text)
        if any(isinstance(piece, Hole) for piece in pieces):
            if name.lower() in ("host", "content-type"):
                raise ValueError(f"no parameter can stand in {name}: it decides how all else is read")
            open_headers.append((name, compile_text(pieces)))
        elif _FORBIDDEN_VALUE.search(text):
            raise ValueError(f"the value of {name} has a line break or another control character")
        else:
            fixed[name] = text.strip()
    return fixed, open_headers


def _checked(name: str, value: str) -> str:
    if _FORBIDDEN_VALUE.search(value):
        raise ToolValidationError(f"the header {name} would have a line break or another control character in it")
    return value


@contextmanager
def _naming(spec: RestSpec, field: str) -> Generator[None]:
    """What is wrong inside, said of the tool and its field."""
    try:
        yield
    except ValueError as error:
        raise _wrong(spec, field, str(error)) from None


def _wrong(spec: RestSpec, field: str, reason: str) -> ToolDefinitionError:
    return ToolDefinitionError(f"REST tool {spec.name!r}: {field}: {reason}")
