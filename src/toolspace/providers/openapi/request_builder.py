"""Compiles an operation into a function from arguments to a request. Reads no document and sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from yarl import URL

from toolspace.core.http_messages import basic_authorization
from toolspace.errors import ToolValidationError
from toolspace.providers.openapi.inputs import (
    EncodedBody,
    WritePairs,
    WriteValue,
    compile_body_encoder,
    cookie_writer,
    header_writer,
    path_writer,
    query_writer,
)
from toolspace.providers.openapi.operations import PATH_PLACEHOLDER, OpenApiOperation, OperationInputs
from toolspace.providers.openapi.security import OperationCredentials
from toolspace.providers.rest.client import BuildRequest, HttpRequest
from toolspace.providers.rest.templates import check_path_segment

_LITERAL_SAFE = "%!$&'()*+,;=:@~-._"
_ACCEPT = "application/json, */*;q=0.8"

Arguments = dict[str, Any]
Segment = str | Callable[[Arguments], str]


def compile_operation(
    operation: OpenApiOperation, server: URL, headers: Mapping[str, str], credentials: OperationCredentials
) -> BuildRequest:
    """Compiles one operation. `headers` are the configured ones; they override credentials and defaults."""
    inputs, method = operation.inputs, operation.method
    fixed_headers = {"Accept": _ACCEPT, **_user_authorization(server), **credentials.headers}
    configured_names = {name.lower() for name in headers}
    fixed_headers = {name: value for name, value in fixed_headers.items() if name.lower() not in configured_names}
    fixed_headers |= headers
    path, _, path_query = operation.path.partition("?")
    path_writers = {
        parameter.name: (argument, path_writer(parameter))
        for argument, parameter in inputs.parameters
        if parameter.location == "path"
    }
    segments = _compile_segments(path, path_writers)
    base = str(server.with_user(None)).rstrip("/")
    query_writers = _pair_writers(inputs, "query", query_writer)
    cookie_writers = _pair_writers(inputs, "cookie", cookie_writer)
    header_writers = [
        (argument, parameter.name, header_writer(parameter))
        for argument, parameter in inputs.parameters
        if parameter.location == "header"
    ]
    fixed_query = [*([quote(path_query, safe=_LITERAL_SAFE + "/?[]")] if path_query else []), *credentials.query]
    encode_body = _compile_body(inputs)
    has_content_type = any(name.lower() == "content-type" for name in fixed_headers)

    def build(arguments: Arguments) -> HttpRequest:
        text = base + "".join(segment if isinstance(segment, str) else segment(arguments) for segment in segments)
        query = [pair for name, write in query_writers if name in arguments for pair in write(arguments[name])]
        _reject_credential_names(query, credentials.query)
        query += fixed_query
        request_headers = dict(fixed_headers)
        for name, header, write in header_writers:
            if arguments.get(name) is not None:
                request_headers[header] = write(arguments[name])
        cookies = [pair for name, write in cookie_writers if name in arguments for pair in write(arguments[name])]
        _reject_credential_names(cookies, credentials.cookies)
        cookies += credentials.cookies
        if cookies:
            if "Cookie" in request_headers:
                cookies.insert(0, request_headers["Cookie"])
            request_headers["Cookie"] = "; ".join(cookies)
        body = encode_body(arguments) if encode_body is not None else None
        if body is not None and not has_content_type:
            request_headers["Content-Type"] = body.content_type
        url = URL(f"{text}?{'&'.join(query)}" if query else text, encoded=True)
        return HttpRequest(method, url, request_headers, body.content if body is not None else None)

    return build


def _compile_segments(path: str, writers: Mapping[str, tuple[str, WriteValue]]) -> list[Segment]:
    """The path segments: literal text, or a function that writes arguments into the segment."""
    segments: list[Segment] = []
    for text in path.lstrip("/").split("/"):
        parts = PATH_PLACEHOLDER.split(text)  # Every second part is the name of a placeholder.
        parts[::2] = [quote(part, safe=_LITERAL_SAFE) for part in parts[::2]]
        segments.append(f"/{parts[0]}" if len(parts) == 1 else _compile_segment(parts, writers))
    return segments


def _compile_segment(parts: list[str], writers: Mapping[str, tuple[str, WriteValue]]) -> Callable[[Arguments], str]:
    names = ", ".join(writers[part][0] for part in parts[1::2])

    def write_segment(arguments: Arguments) -> str:
        text = ""
        for index, part in enumerate(parts):
            if index % 2 == 0:
                text += part
                continue
            argument, write = writers[part]
            if argument not in arguments:
                raise ToolValidationError(f"{argument}: required, but missing: it is a part of the path")
            text += write(arguments[argument])
        # Two harmless parts can be harmful together: the dot of a style and a dot in the value.
        check_path_segment(text, names)
        return f"/{text}"

    return write_segment


def _pair_writers(
    inputs: OperationInputs, location: str, writer: Callable[..., WritePairs]
) -> list[tuple[str, WritePairs]]:
    return [
        (argument, writer(parameter)) for argument, parameter in inputs.parameters if parameter.location == location
    ]


def _reject_credential_names(pairs: list[str], credentials: tuple[str, ...]) -> None:
    """Raises if an argument sets a credential: the members of an exploded object have names of their own."""
    if not credentials:
        return
    credential_names = {_pair_name(pair) for pair in credentials}
    for name in map(_pair_name, pairs):
        if name in credential_names:
            raise ToolValidationError(f"{name}: set by the service's configuration; leave it out")


def _pair_name(pair: str) -> str:
    return unquote(pair.partition("=")[0])


def _compile_body(inputs: OperationInputs) -> Callable[[Arguments], EncodedBody | None] | None:
    body, argument = inputs.body, inputs.body_argument
    if body is None:
        return None
    encode = compile_body_encoder(body)
    if argument is not None:
        return lambda arguments: encode(arguments[argument]) if argument in arguments else None
    fields, required = body.fields or {}, body.required

    def encode_fields(arguments: Arguments) -> EncodedBody | None:
        values = {name: value for name, value in arguments.items() if name in fields}
        return encode(values) if values or required else None

    return encode_fields


def _user_authorization(server: URL) -> dict[str, str]:
    """The header for a user and password in the configured URL."""
    if server.user is None:
        return {}
    return {"Authorization": basic_authorization(f"{server.user}:{server.password or ''}")}
