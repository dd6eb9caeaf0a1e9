"""Compiles an operation into a function from arguments to a request. Reads no document and sends nothing.

It writes arguments into paths, queries, headers and cookies in the styles of RFC 6570 that OpenAPI names, and into
bodies: JSON, forms, files, text. A null value is left out. A list or object inside a list or an object has no style and
is written as JSON. `provider` uses it.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import quote, quote_plus, unquote

from yarl import URL

from toolspace.core import json_text
from toolspace.core.http_messages import basic_authorization
from toolspace.errors import ToolValidationError
from toolspace.providers.openapi.inputs import (
    DEFAULT_ENCODING,
    FieldEncoding,
    OpenApiParameter,
    OperationInputs,
    ParameterStyle,
    RequestBody,
    is_json_type,
)
from toolspace.providers.openapi.operations import PATH_PLACEHOLDER, OpenApiOperation
from toolspace.providers.openapi.security import OperationCredentials, percent_encode
from toolspace.providers.rest.client import BuildRequest, HttpRequest
from toolspace.providers.rest.templates import check_path_segment, encode_path_segment

_LITERAL_SAFE = "%!$&'()*+,;=:@~-._"
_ACCEPT = "application/json, */*;q=0.8"
# The reserved characters that a query may contain unencoded, without those that end a value or change its meaning.
_RESERVED = ":/?[]@!$'()*,;="
_MAX_DEEP_OBJECT_DEPTH = 20
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:; ?[a-z-]+=[A-Za-z0-9_.+-]+)*")

Arguments = dict[str, Any]
Segment = str | Callable[[Arguments], str]
WriteValue = Callable[[Any], str]
"""Formats a value that stands alone in its place."""
WritePairs = Callable[[Any], list[str]]
"""Formats a value as `name=value` texts; none if there is nothing to send."""
EncodeText = Callable[[str], str]


class EncodedBody(NamedTuple):
    """A body, or one part of a multipart body."""

    content: bytes
    content_type: str
    filename: str | None = None


def compile_operation(
    operation: OpenApiOperation, server: URL, headers: Mapping[str, str], credentials: OperationCredentials
) -> BuildRequest:
    """Compiles one operation. `headers` are the configured ones; they override credentials and defaults."""
    inputs, method = operation.inputs, operation.method
    configured_names = {name.lower() for name in headers}
    fixed_headers = {"Accept": _ACCEPT, **_user_authorization(server), **credentials.headers}
    fixed_headers = {name: value for name, value in fixed_headers.items() if name.lower() not in configured_names}
    fixed_headers |= headers
    path_writers: dict[str, tuple[str, WriteValue]] = {}
    header_writers: list[tuple[str, str, WriteValue]] = []
    query_writers: list[tuple[str, WritePairs]] = []
    cookie_writers: list[tuple[str, WritePairs]] = []
    for argument, parameter in inputs.parameters:
        match parameter.location:
            case "path":
                path_writers[parameter.name] = argument, _path_writer(parameter)
            case "header":
                header_writers.append((argument, parameter.name, _header_writer(parameter)))
            case "query":
                query_writers.append((argument, _query_writer(parameter)))
            case "cookie":
                cookie_writers.append((argument, _cookie_writer(parameter)))
    path, _, path_query = operation.path.partition("?")
    segments = _compile_segments(path, path_writers)
    base = str(server.with_user(None)).rstrip("/")
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
        # Parts that are safe alone can form `..` together: the dot of a style and a dot in the value.
        check_path_segment(text, names)
        return f"/{text}"

    return write_segment


def _reject_credential_names(pairs: list[str], credentials: list[str]) -> None:
    """Raises if an argument would replace a credential, for example as a member of an exploded object."""
    credential_names = {_pair_name(pair) for pair in credentials}
    for name in map(_pair_name, pairs) if credentials else ():
        if name in credential_names:
            raise ToolValidationError(f"{name}: set by the service's configuration; leave it out")


def _pair_name(pair: str) -> str:
    return unquote(pair.partition("=")[0])


def _user_authorization(server: URL) -> dict[str, str]:
    """The header for a user and password in the configured URL."""
    if server.user is None:
        return {}
    return {"Authorization": basic_authorization(f"{server.user}:{server.password or ''}")}


# Parameters


def _format_value(value: Any) -> str:
    """A plain value as text: `true`, `3`, the text itself; anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))  # In JSON, 3.0 is an integer too.
    return json_text.encode(value)


def _encode_except_reserved(text: str) -> str:
    """Percent-encodes a text, except for the reserved characters that `allowReserved` permits."""
    return quote(text, safe=_RESERVED, errors="replace")


def _path_writer(parameter: OpenApiParameter) -> WriteValue:
    """Returns a function that writes a value into a path segment. Its caller checks the joined segment again."""
    name, style, explode = parameter.name, parameter.style, parameter.explode
    prefix, separator = {"simple": ("", ","), "label": (".", "."), "matrix": (";", ";")}[style]
    encoded_name = percent_encode(name)

    def encode(text: str) -> str:
        return encode_path_segment(text, name)

    def write(value: Any) -> str:
        if not _members(value):  # An empty segment may select another operation.
            raise ToolValidationError(f"{name}: it is a part of the path and must not be empty")
        if parameter.as_json:
            return encode(json_text.encode(value))
        if explode and isinstance(value, dict):
            return prefix + separator.join(f"{percent_encode(key)}={encode(item)}" for key, item in _items(value))
        texts = _list_texts(value, encode)
        if style != "matrix":
            return prefix + (separator if explode else ",").join(texts)
        return "".join(f";{encoded_name}={text}" for text in (texts if explode else [",".join(texts)]))

    return write


def _header_writer(parameter: OpenApiParameter) -> WriteValue:
    """Returns a function that writes a value into a header, unencoded. It refuses control characters."""

    def write(value: Any) -> str:
        if parameter.as_json:
            text = json_text.encode(value)
        elif parameter.explode and isinstance(value, dict):
            text = ",".join(f"{key}={item}" for key, item in _items(value))
        else:
            text = ",".join(_list_texts(value, str))
        if any((ord(character) < 32 and character != "\t") or ord(character) == 127 for character in text):
            raise ToolValidationError(
                f"{parameter.name}: a header cannot contain line breaks or other control characters"
            )
        return json_text.valid_text(text).strip(" \t")

    return write


def _query_writer(parameter: OpenApiParameter) -> WritePairs:
    encode = _encode_except_reserved if parameter.allow_reserved else percent_encode
    return _pair_writer(
        percent_encode(parameter.name), parameter.style, encode, explode=parameter.explode, as_json=parameter.as_json
    )


def _cookie_writer(parameter: OpenApiParameter) -> WritePairs:
    """Returns a function that writes encoded values: a cookie cannot contain a semicolon, a comma or a space."""
    return _pair_writer(
        parameter.name, parameter.style, percent_encode, explode=parameter.explode, as_json=parameter.as_json
    )


def _pair_writer(name: str, style: ParameterStyle, encode: EncodeText, *, explode: bool, as_json: bool) -> WritePairs:
    """Returns a function that writes a value into a query, cookies or a form. `name` is already encoded."""
    # Encoded, although OpenAPI 3.0 shows them unencoded: a URL cannot contain a space or a bar.
    separator = {"spaceDelimited": "%20", "pipeDelimited": "%7C"}.get(style, ",")

    def write(value: Any) -> list[str]:
        if value is None:
            return []
        if as_json:
            return [f"{name}={encode(json_text.encode(value))}"]
        if isinstance(value, dict) and style == "deepObject":
            return [f"{name}{path}={encode(text)}" for path, text in _deep_items(value, encode, 0)]
        if isinstance(value, dict) and explode:
            return [f"{encode(key)}={encode(item)}" for key, item in _items(value)]
        texts = _list_texts(value, encode)
        if isinstance(value, list) and (explode or style == "deepObject"):
            return [f"{name}={text}" for text in texts]
        return [f"{name}={separator.join(texts)}"] if texts else []

    return write


def _list_texts(value: Any, encode: EncodeText) -> list[str]:
    """The encoded members of a list, keys and values of an object, or the value itself."""
    if isinstance(value, dict):
        return [encode(text) for item in _items(value) for text in item]
    return [encode(_format_value(member)) for member in _members(value)]


def _items(value: Any) -> list[tuple[str, str]]:
    """The members of an object that are not null."""
    members = cast("dict[str, Any]", value)
    return [(name, _format_value(item)) for name, item in members.items() if item is not None]


def _members(value: Any) -> list[Any]:
    """The members of a list or an object, or the value itself; null is left out."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    members = cast("list[Any]", value) if isinstance(value, list) else [value]
    return [member for member in members if member is not None]


def _deep_items(value: Any, encode: EncodeText, depth: int) -> Iterator[tuple[str, str]]:
    """Yields paths such as `[a][b]` and their texts. Objects that are nested too deeply are written as JSON."""
    for name, item in cast("dict[str, Any]", value).items():
        path = f"[{encode(name)}]"
        if isinstance(item, dict) and depth < _MAX_DEEP_OBJECT_DEPTH:
            yield from ((path + rest, text) for rest, text in _deep_items(cast("Any", item), encode, depth + 1))
        else:
            members = _members(item) if not isinstance(item, dict) else [cast("Any", item)]
            yield from ((path, _format_value(member)) for member in members)


# Bodies


def _compile_body(inputs: OperationInputs) -> Callable[[Arguments], EncodedBody | None] | None:
    body, argument = inputs.body, inputs.body_argument
    if body is None:
        return None
    encode = _body_encoder(body)
    if argument is not None:
        return lambda arguments: encode(arguments[argument]) if argument in arguments else None
    field_names = body.fields.properties.keys() if body.fields is not None else ()

    def encode_fields(arguments: Arguments) -> EncodedBody | None:
        values = {name: value for name, value in arguments.items() if name in field_names}
        return encode(values) if values or body.required else None

    return encode_fields


def _body_encoder(body: RequestBody) -> Callable[[Any], EncodedBody]:
    """Encodes one value: an object of the fields by name, or the whole body. Raises `ToolValidationError`."""
    media_type = body.media_type
    match body.kind:
        case "json":
            content_type = media_type if is_json_type(media_type) else "application/json"
            return lambda value: EncodedBody(json_text.encode_bytes(value), content_type)
        case "text":
            return lambda value: EncodedBody(_format_value(value).encode("utf-8", "replace"), media_type)
        case "form":
            return _form_encoder(body)
        case "multipart":
            return lambda value: _encode_multipart(_check_object(value), body)
        case "binary":
            default_type = media_type if "*" not in media_type else "application/octet-stream"
            return lambda value: _file_part(value, "body", default_type)


def _form_encoder(body: RequestBody) -> Callable[[Any], EncodedBody]:
    def field_writer(name: str) -> WritePairs:
        encoding = body.encodings.get(name, DEFAULT_ENCODING)
        write_json = _pair_writer(_encode_form_text(name), "form", _encode_form_text, explode=True, as_json=True)
        write = _pair_writer(
            percent_encode(name) if encoding.allow_reserved else _encode_form_text(name),
            encoding.style or "form",
            _encode_except_reserved if encoding.allow_reserved else _encode_form_text,
            explode=encoding.explode,
            as_json=encoding.is_json,
        )
        # Without a style, an object is sent as JSON: exploded, it would lose the name of its field.
        return lambda value: (write_json if encoding.style is None and isinstance(value, dict) else write)(value)

    writers = {name: field_writer(name) for name in (body.fields.properties if body.fields is not None else ())}

    def encode(value: Any) -> EncodedBody:
        pairs: list[str] = []
        for name, item in _check_object(value).items():
            pairs += (writers.get(name) or field_writer(name))(item)
        return EncodedBody("&".join(pairs).encode(), body.media_type)

    return encode


def _encode_form_text(text: str) -> str:
    return quote_plus(text, errors="replace")


def _encode_multipart(value: dict[str, Any], body: RequestBody) -> EncodedBody:
    boundary = secrets.token_hex(16)  # Unpredictable, so no content can contain it.
    pieces: list[bytes] = []
    for name, item in value.items():
        encoding = body.encodings.get(name, DEFAULT_ENCODING)
        if item is None:
            continue
        if isinstance(item, list) and not encoding.is_json:
            parts = [_field_part(name, member, encoding) for member in cast("list[Any]", item) if member is not None]
        else:
            parts = [_field_part(name, item, encoding)]
        for part in parts:
            filename = f'; filename="{_escape_quoted(part.filename)}"' if part.filename is not None else ""
            head = (
                f"--{boundary}\r\n"
                f'Content-Disposition: form-data; name="{_escape_quoted(name)}"{filename}\r\n'
                f"Content-Type: {part.content_type}\r\n\r\n"
            )
            pieces += (head.encode("utf-8", "replace"), part.content, b"\r\n")
    pieces.append(f"--{boundary}--\r\n".encode())
    media_type = body.media_type.partition(";")[0].strip()
    if "*" in media_type:
        media_type = "multipart/form-data"
    return EncodedBody(b"".join(pieces), f"{media_type}; boundary={boundary}")


def _field_part(name: str, value: Any, encoding: FieldEncoding) -> EncodedBody:
    content_type = encoding.content_type
    if encoding.binary:
        return _file_part(value, name, content_type or "application/octet-stream")
    if encoding.is_json or isinstance(value, dict | list):
        return EncodedBody(json_text.encode_bytes(cast("object", value)), content_type or "application/json")
    return EncodedBody(_format_value(value).encode("utf-8", "replace"), content_type or "text/plain; charset=utf-8")


def _file_part(value: Any, name: str, content_type: str) -> EncodedBody:
    filename: str = name
    data = value
    if isinstance(value, dict):
        file = cast("dict[str, Any]", value)
        data = file.get("data")
        filename = str(file.get("filename") or name).replace("\\", "/").rpartition("/")[2] or name
        content_type = str(file.get("contentType") or content_type)
    if not _MEDIA_TYPE.fullmatch(content_type):
        raise ToolValidationError(f"{name}.contentType: expected a media type such as image/png")
    try:
        content = base64.b64decode("".join(str(data).split()), validate=True)
    except (binascii.Error, ValueError):
        raise ToolValidationError(f'{name}: expected the content in base64, such as "aGVsbG8="') from None
    return EncodedBody(content, content_type, filename)


def _check_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ToolValidationError("body: a form has named fields; give an object")
    return cast("dict[str, Any]", value)


def _escape_quoted(text: str) -> str:
    """Escapes a name inside quotes as browsers do."""
    for character, escape in (("\r", "%0D"), ("\n", "%0A"), ('"', "%22"), ("\0", "")):
        text = text.replace(character, escape)
    return text
