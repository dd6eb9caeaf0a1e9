"""Encodes arguments as the body of a request: JSON, forms, files, text. Knows nothing of documents."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from urllib.parse import quote_plus

from toolspace.core import json_text
from toolspace.errors import ToolValidationError
from toolspace.providers.openapi.bodies import Body, Encoding, is_json
from toolspace.providers.openapi.parameters import Parameter
from toolspace.providers.openapi.serialize import encoded_reserved, plain, query_writer

_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:; ?[a-z-]+=[A-Za-z0-9_.+-]+)*")
_DEFAULT = Encoding()


class Payload(NamedTuple):
    content: bytes
    content_type: str


Encode = Callable[[Any], Payload]
"""Makes the body of one value: of the fields by name, where the body is an object."""


def payload_encoder(body: Body) -> Encode:
    """What encodes a body. Compiled once per tool."""
    media_type = body.media_type
    if body.kind == "json":
        sent = media_type if is_json(media_type) else "application/json"
        return lambda value: Payload(json_text.encode_bytes(value), sent)
    if body.kind == "text":
        return lambda value: Payload(plain(value).encode("utf-8", "replace"), media_type)
    if body.kind == "form":
        return _form(body)
    if body.kind == "multipart":
        return lambda value: _multipart(_object(value), body)

    def binary(value: Any) -> Payload:
        file = _file(value, "body", media_type if "*" not in media_type else "application/octet-stream")
        return Payload(file.content, file.content_type)

    return binary


def _form(body: Body) -> Encode:
    def writer(name: str) -> Callable[[Any], list[str]]:
        encoding = body.encodings.get(name, _DEFAULT)
        as_json = encoding.content_type is not None and is_json(encoding.content_type)
        styled = _parameter(name, encoding, as_json=as_json)
        write = query_writer(styled, encoded_reserved if encoding.allow_reserved else _plus)
        whole = query_writer(_parameter(name, encoding, as_json=True), _plus)
        # Without a style, an object has no other form than JSON: spread out, it would lose its own name.
        return lambda value: (whole if encoding.style is None and isinstance(value, dict) else write)(value)

    writers = {name: writer(name) for name in body.fields or {}}

    def encode(value: Any) -> Payload:
        pairs: list[str] = []
        for name, item in _object(value).items():
            pairs += (writers.get(name) or writer(name))(item)
        return Payload("&".join(pairs).encode(), body.media_type)

    return encode


def _parameter(name: str, encoding: Encoding, *, as_json: bool) -> Parameter:
    style = encoding.style or "form"
    return Parameter(
        name=name,
        place="query",
        required=False,
        style=style,
        explode=encoding.explode,
        allow_reserved=encoding.allow_reserved,
        as_json=as_json,
        schema=True,
        refs={},
    )


def _plus(text: str) -> str:
    return quote_plus(text, errors="replace")


class _Part(NamedTuple):
    content: bytes
    content_type: str
    filename: str | None = None


def _multipart(value: dict[str, Any], body: Body) -> Payload:
    boundary = secrets.token_hex(16)  # Nobody can know it, so no content can hold it.
    pieces: list[bytes] = []
    for name, item in value.items():
        encoding = body.encodings.get(name, _DEFAULT)
        if item is None:
            continue
        if isinstance(item, list) and not (encoding.content_type and is_json(encoding.content_type)):
            parts = [_part(name, one, encoding) for one in cast("list[Any]", item) if one is not None]
        else:
            parts = [_part(name, item, encoding)]
        for part in parts:
            filename = f'; filename="{_quoted(part.filename)}"' if part.filename is not None else ""
            head = (
                f"--{boundary}\r\n"
                f'Content-Disposition: form-data; name="{_quoted(name)}"{filename}\r\n'
                f"Content-Type: {part.content_type}\r\n\r\n"
            )
            pieces += (head.encode("utf-8", "replace"), part.content, b"\r\n")
    pieces.append(f"--{boundary}--\r\n".encode())
    media_type = body.media_type.partition(";")[0].strip()
    if "*" in media_type:
        media_type = "multipart/form-data"
    return Payload(b"".join(pieces), f"{media_type}; boundary={boundary}")


def _part(name: str, value: Any, encoding: Encoding) -> _Part:
    if encoding.binary:
        return _file(value, name, encoding.content_type or "application/octet-stream")
    said = encoding.content_type
    if said is not None and is_json(said):
        return _Part(json_text.encode_bytes(value), said)
    if isinstance(value, dict | list):
        return _Part(json_text.encode_bytes(cast("object", value)), said or "application/json")
    return _Part(plain(value).encode("utf-8", "replace"), said or "text/plain; charset=utf-8")


def _file(value: Any, name: str, content_type: str) -> _Part:
    filename: str = name
    data = value
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        data = given.get("data")
        filename = str(given.get("filename") or name).replace("\\", "/").rpartition("/")[2] or name
        content_type = str(given.get("contentType") or content_type)
    if not _MEDIA_TYPE.fullmatch(content_type):
        raise ToolValidationError(f"{name}.contentType: expected a media type such as image/png")
    try:
        content = base64.b64decode("".join(str(data).split()), validate=True)
    except (binascii.Error, ValueError):
        raise ToolValidationError(f'{name}: expected the content in base64, such as "aGVsbG8="') from None
    return _Part(content, content_type, filename)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ToolValidationError("body: a form is made of named fields; give an object")
    return cast("dict[str, Any]", value)


def _quoted(text: str) -> str:
    """A name inside quotes: what would end it is written as browsers write it."""
    for character, escape in (("\r", "%0D"), ("\n", "%0A"), ('"', "%22"), ("\0", "")):
        text = text.replace(character, escape)
    return text
