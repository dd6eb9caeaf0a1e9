"""Compiles an operation into one function from arguments to a request. Reads no document, sends nothing."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from yarl import URL

from toolspace.errors import ToolValidationError
from toolspace.providers.openapi.bodies import EncodedBody, compile_body_encoder
from toolspace.providers.openapi.operations import OpenApiOperation, OperationInputs
from toolspace.providers.openapi.parameters import (
    WritePairs,
    WriteValue,
    cookie_writer,
    header_writer,
    path_writer,
    query_writer,
)
from toolspace.providers.openapi.security import OperationCredentials
from toolspace.providers.rest.client import IDEMPOTENT_METHODS, SAFE_METHODS, BuildRequest, HttpRequest
from toolspace.providers.rest.url_template import check_path_segment

_HOLE = re.compile(r"\{([^{}/]+)\}")
_LITERAL_SAFE = "%!$&'()*+,;=:@~-._"
_ACCEPT = "application/json, */*;q=0.8"

Arguments = dict[str, Any]
Segment = str | Callable[[Arguments], str]


def compile_operation(
    operation: OpenApiOperation, server: URL, headers: Mapping[str, str], credentials: OperationCredentials
) -> BuildRequest:
    """What makes the requests of one operation, with the credentials that do not change from call to call."""
    inputs, method = operation.inputs, operation.method
    fixed = {"Accept": _ACCEPT, **_authorization(server), **credentials.headers}
    for name in [one for one in fixed if one.lower() in {other.lower() for other in headers}]:
        del fixed[name]
    fixed |= headers
    path, _, written = operation.path.partition("?")
    holes = {one.name: (arg, path_writer(one)) for arg, one in inputs.parameters if one.location == "path"}
    segments = _segments(path, holes)
    base = str(server.with_user(None)).rstrip("/")
    queries = _pairs(inputs, "query", query_writer)
    cookies = _pairs(inputs, "cookie", cookie_writer)
    open_headers = [(arg, one.name, header_writer(one)) for arg, one in inputs.parameters if one.location == "header"]
    fixed_query = [*([quote(written, safe=_LITERAL_SAFE + "/?[]")] if written else []), *credentials.query]
    encode = _body(inputs)
    has_type = any(name.lower() == "content-type" for name in fixed)
    idempotent, safe = method in IDEMPOTENT_METHODS, method in SAFE_METHODS

    def build(arguments: Arguments) -> HttpRequest:
        text = base + "".join(one if isinstance(one, str) else one(arguments) for one in segments)
        pairs = [pair for name, write in queries if name in arguments for pair in write(arguments[name])]
        if credentials.query:
            _refuse_taken(pairs, credentials.query)
        pairs += fixed_query
        sent = dict(fixed)
        for name, header, write in open_headers:
            if arguments.get(name) is not None:
                sent[header] = write(arguments[name])
        jar = [pair for name, write in cookies if name in arguments for pair in write(arguments[name])]
        if credentials.cookies:
            _refuse_taken(jar, credentials.cookies)
        jar += credentials.cookies
        if jar:
            sent["Cookie"] = "; ".join([sent["Cookie"], *jar] if "Cookie" in sent else jar)
        payload = encode(arguments) if encode is not None else None
        if payload is not None and not has_type:
            sent["Content-Type"] = payload.content_type
        return HttpRequest(
            method,
            URL(f"{text}?{'&'.join(pairs)}" if pairs else text, encoded=True),
            sent,
            payload.content if payload is not None else None,
            idempotent,
            safe,
        )

    return build


def _segments(path: str, holes: Mapping[str, tuple[str, WriteValue]]) -> list[Segment]:
    """The path, cut where arguments go: literal text, and what makes a segment of arguments."""
    parts: list[Segment] = []
    for text in path.lstrip("/").split("/"):
        pieces = _HOLE.split(text)  # Every second one is the name of a hole.
        pieces[::2] = [quote(piece, safe=_LITERAL_SAFE) for piece in pieces[::2]]
        if len(pieces) == 1:
            parts.append(f"/{pieces[0]}")
        else:
            parts.append(_segment(pieces, holes))
    return parts


def _segment(pieces: list[str], holes: Mapping[str, tuple[str, WriteValue]]) -> Callable[[Arguments], str]:
    names = ", ".join(holes[piece][0] for piece in pieces[1::2])

    def write(arguments: Arguments) -> str:
        text = ""
        for place, piece in enumerate(pieces):
            if place % 2 == 0:
                text += piece
                continue
            argument, writer = holes[piece]
            if argument not in arguments:
                raise ToolValidationError(f"{argument}: required, but missing: it is a part of the path")
            text += writer(arguments[argument])
        # Harmless values can be harmful together: the dot of a style, and a dot in the value.
        check_path_segment(text, names)
        return f"/{text}"

    return write


def _pairs(inputs: OperationInputs, place: str, writer: Callable[..., WritePairs]) -> list[tuple[str, WritePairs]]:
    return [(argument, writer(one)) for argument, one in inputs.parameters if one.location == place]


def _refuse_taken(pairs: list[str], credentials: tuple[str, ...]) -> None:
    """An object that is spread out brings names of its own: none of them may stand in for a credential."""
    taken = {unquote(pair.partition("=")[0]) for pair in credentials}
    for name in (unquote(pair.partition("=")[0]) for pair in pairs):
        if name in taken:
            raise ToolValidationError(f"{name}: set by the service's configuration; leave it out")


def _body(inputs: OperationInputs) -> Callable[[Arguments], EncodedBody | None] | None:
    body, argument = inputs.body, inputs.body_argument
    if body is None:
        return None
    encode = compile_body_encoder(body)
    if argument is not None:
        whole = argument
        return lambda arguments: encode(arguments[whole]) if whole in arguments else None
    fields, required = body.fields or {}, body.required

    def collect(arguments: Arguments) -> EncodedBody | None:
        given = {name: value for name, value in arguments.items() if name in fields}
        return encode(given) if given or required else None

    return collect


def _authorization(server: URL) -> dict[str, str]:
    """What a user and password in the configured address mean."""
    if server.user is None:
        return {}
    pair = f"{server.user}:{server.password or ''}"
    return {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
