"""Compiles a REST tool: its templates into one function from arguments to a request, and the schema that it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape as escape_xml

from multidict import CIMultiDict

from toolspace.core import json_text
from toolspace.core.secret_masking import is_secret_name, register_secrets
from toolspace.errors import ToolDefinitionError, ToolValidationError
from toolspace.providers.rest.client import IDEMPOTENT_METHODS, SAFE_METHODS, BuildRequest, HttpRequest
from toolspace.providers.rest.template import (
    ABSENT,
    Escape,
    Fill,
    Placeholder,
    TemplateParts,
    argument_text,
    compile_data,
    compile_text,
    iter_placeholders,
    parse_template,
)
from toolspace.providers.rest.url_template import UrlTemplate, encode_query_parameter

if TYPE_CHECKING:
    from toolspace.providers.rest.provider import RestSpec

# MERGED from body: Bodies with holes: data that becomes JSON or a form, and text whose holes are escaped as its ty…

EncodeBody = Callable[[Mapping[str, Any], Mapping[str, Any] | None], bytes | None]
"""The body for some arguments, with those that nothing else uses merged in; None where there is nothing to send."""

_XML = {'"': "&quot;", "'": "&apos;"}


def compile_body(template: object, content_type: str | None) -> tuple[EncodeBody, str | None]:
    """What makes the body, and its content type where the configuration gave none."""
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if isinstance(template, str):
        pieces = parse_template(template)
        if not (len(pieces) == 1 and isinstance(pieces[0], Placeholder)):
            return _compile_text(pieces, media_type)
    fill = compile_data(template) if template is not None else None
    fixed = frozenset(cast("Mapping[str, Any]", template)) if isinstance(template, Mapping) else None
    as_form = media_type == "application/x-www-form-urlencoded"
    # An argument that is the whole body of a text type goes as it is, and not as a JSON string.
    as_text_type = bool(media_type) and not _is_json(media_type)

    def encode(parameters: Mapping[str, Any], more: Mapping[str, Any] | None) -> bytes | None:
        value: Any = ABSENT if fill is None else fill(parameters)
        if more:
            if fixed is not None:
                reject_fixed(more, fixed)
                value = {**value, **more}
            elif fill is None:
                value = more
            else:
                reject_unused(more)
        if value is ABSENT:
            return None
        if as_form and isinstance(value, Mapping):
            return _form(cast("Mapping[str, Any]", value))
        if as_text_type and isinstance(value, str):
            return value.encode("utf-8", "replace")
        return json_text.encode_bytes(value)

    return encode, None if content_type else "application/json"


def reject_fixed(parameters: Mapping[str, Any], fixed: frozenset[str]) -> None:
    """What the configuration has set, no argument sets anew: it may be a key, or the filter that keeps users apart."""
    if not fixed.isdisjoint(parameters):
        names = ", ".join(sorted(fixed.intersection(parameters)))
        raise ToolValidationError(f"{names}: set by the tool's configuration; leave it out")


def reject_unused(parameters: Mapping[str, Any]) -> None:
    """An argument without effect would mislead whoever gave it."""
    raise ToolValidationError(f"{', '.join(parameters)}: the tool's body has no place for it; leave it out")


def _is_json(media_type: str) -> bool:
    return media_type.endswith(("/json", "+json"))


def _compile_text(pieces: TemplateParts, media_type: str) -> tuple[EncodeBody, str | None]:
    looks_like_json = isinstance(pieces[0], str) and pieces[0].lstrip()[:1] in ("{", "[") if pieces else False
    if _is_json(media_type) or (not media_type and looks_like_json):
        return _json_text(pieces), None if media_type else "application/json"
    escape: Escape | None = None
    if media_type == "application/x-www-form-urlencoded":
        escape = _escape_form
    elif media_type.endswith(("/xml", "+xml")):
        escape = _escape_xml
    fill = compile_text(pieces, escape)

    def encode(parameters: Mapping[str, Any], more: Mapping[str, Any] | None) -> bytes | None:
        if more:
            reject_unused(more)
        text = fill(parameters)
        return b"" if text is ABSENT else text.encode("utf-8", "replace")

    return encode, None if media_type else "text/plain; charset=utf-8"


def _json_text(pieces: TemplateParts) -> EncodeBody:
    """A hole between quotes is a piece of that string; one outside is a JSON value of its own."""
    quoted: list[bool] = []
    inside = False
    for piece in pieces:
        quoted.append(inside)
        if isinstance(piece, str):
            inside = _ends_in_string(piece, inside)

    def encode(parameters: Mapping[str, Any], more: Mapping[str, Any] | None) -> bytes | None:
        if more:
            reject_unused(more)
        parts: list[str] = []
        for piece, in_string in zip(pieces, quoted, strict=True):
            if isinstance(piece, str):
                parts.append(piece)
                continue
            value = piece.get_value(parameters)
            if in_string:
                parts.append(json_text.encode(argument_text(value))[1:-1])
            else:
                parts.append("null" if value is ABSENT else json_text.encode(value))
        return "".join(parts).encode("utf-8", "replace")

    return encode


def _ends_in_string(text: str, inside: bool) -> bool:
    escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = inside
        elif character == '"':
            inside = not inside
    return inside


def _form(values: Mapping[str, Any]) -> bytes:
    return "&".join(pair for name, value in values.items() for pair in encode_query_parameter(name, value)).encode()


def _escape_form(text: str) -> str:
    return quote(text, safe="", errors="replace")


def _escape_xml(text: str) -> str:
    return escape_xml(text, _XML)


# MERGED from secrets: Which configured values a service must not be able to bring into a log or an error, by sendi…

_KEY_NAME = re.compile(r"key|auth|token|secret|appid|signature|^sig$", re.IGNORECASE)


def remember_request_secrets(url: str, headers: Mapping[str, str], query: Mapping[str, Any] | None = None) -> None:
    """Remembers the keys in a configured request, which are named in more ways than other settings: `X-Key`, `appid`.

    Texts with holes are left out: arguments fill them.
    """
    register_secrets(_secrets(url, {**headers, **(query or {})}))


def _secrets(url: str, named: Mapping[str, Any]) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        if parts.password:
            yield unquote(parts.password)
        pairs = parse_qsl(parts.query)
    except ValueError:
        pairs = []
    for name, value in (*named.items(), *pairs):
        if (
            isinstance(value, str)
            and (is_secret_name(name) or _KEY_NAME.search(name))
            and not any(iter_placeholders(value))
        ):
            yield value
            yield value.rpartition(" ")[2]  # Without `Bearer`.


_METHOD = re.compile(r"[A-Z]{1,20}")
_QUERY_METHODS = frozenset((*SAFE_METHODS, "DELETE"))
"""Methods whose unused parameters go to the query."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_FORBIDDEN_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_FRAMING = frozenset(
    ("connection", "content-length", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
"""Where a message ends is the client's to say: another word on it could start a second request inside the first."""
_DEFAULT_HEADERS = (("Accept", "application/json, */*;q=0.8"),)


def compile_request(spec: RestSpec) -> BuildRequest:
    """What makes the requests of one tool. Raises `ToolDefinitionError` that names the tool and the field."""
    method = spec.method.upper()
    if not _METHOD.fullmatch(method) or method in ("CONNECT", "TRACE"):
        raise _wrong(spec, "method", f"{spec.method[:40]!r} cannot be sent; use GET, POST, PUT, PATCH or DELETE")
    with _naming(spec, "query"):
        list(iter_placeholders(spec.query))
    with _naming(spec, "url"):
        target = UrlTemplate(spec.url, spec.query)
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
    idempotent, safe = method in IDEMPOTENT_METHODS, method in SAFE_METHODS
    names = target.fixed_query_names

    def build(parameters: dict[str, Any]) -> HttpRequest:
        more = None
        if not all_used and not used.issuperset(parameters):
            more = {name: value for name, value in parameters.items() if name not in used}
            if to_query:
                reject_fixed(more, names)
        body = None if no_body else encode(parameters, None if to_query else more)
        headers = fixed if body is None else with_body
        if open_headers:
            headers = headers.copy()
            for name, fill in open_headers:
                value = fill(parameters)
                if value is not ABSENT:
                    headers[name] = _checked(name, value)
        return HttpRequest(
            method, target.build_url(parameters, more if to_query else None), headers, body, idempotent, safe
        )

    return build


def build_input_schema(spec: RestSpec) -> Mapping[str, Any]:
    """The schema that a tool takes: its own, else the parameters that its templates name."""
    if spec.parameters_schema is not None:
        return spec.parameters_schema
    required = UrlTemplate(spec.url, spec.query).required_parameters
    root: dict[str, Any] = {}
    for hole, whole in _holes(spec):
        _describe(root, hole, whole=whole)
    schema: dict[str, Any] = {"type": "object", "properties": root, "additionalProperties": _takes_all(spec)}
    if required:
        schema["required"] = sorted(required)
    return schema


def _describe(properties: dict[str, Any], hole: Placeholder, *, whole: bool) -> None:
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


def _holes(spec: RestSpec) -> Iterable[tuple[Placeholder, bool]]:
    """Every hole, and whether it is the whole of a value that keeps its type."""
    for text in (spec.url, *spec.headers.values()):
        yield from ((hole, False) for hole in iter_placeholders(text))
    yield from _data_holes(spec.query)
    if isinstance(spec.body, str):  # A JSON text may have any value between its quotes and beside them.
        yield from ((hole, True) for hole in iter_placeholders(spec.body))
    else:
        yield from _data_holes(spec.body)


def _data_holes(value: object) -> Iterable[tuple[Placeholder, bool]]:
    if isinstance(value, str):
        pieces = parse_template(value)
        yield from ((piece, len(pieces) == 1) for piece in pieces if isinstance(piece, Placeholder))
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
        pieces = parse_template(text)
        if any(isinstance(piece, Placeholder) for piece in pieces):
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
