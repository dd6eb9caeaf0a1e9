"""Turns an HTTP response into a tool result, by its content type and within limits. Sends nothing.

`redirects_and_retries` uses it. JSON is parsed, text is decoded, images and files become typed parts. Streams (JSON
lines, JSON text sequences, server-sent events) become partial results.
"""

from __future__ import annotations

import codecs
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from functools import lru_cache
from http.client import responses as REASON_PHRASES
from typing import Any, Literal, NamedTuple

import aiohttp
from aiohttp import ClientResponse
from yarl import URL

from toolspace.core import json_text
from toolspace.core.http_client_errors import HTTP_FAILURES, describe_http_failure
from toolspace.core.http_messages import CHARSET_PARAMETER, REDIRECT_STATUSES, display_url, find_codec, join_headers
from toolspace.core.result import AudioPart, Content, ImagePart, ResourcePart, ToolResult
from toolspace.core.secret_masking import mask_secrets
from toolspace.core.sse_decoder import SseDecoder, SseSizeError
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolLimitError, ToolTransportError
from toolspace.providers.rest.client import HttpLimits

_FIRST_READ_BYTES = 1 << 20
"""How much is read before deciding how to treat a body. Most bodies are smaller."""
_MAX_ERROR_BODY_BYTES = 1 << 16
_MAX_ERROR_TEXT = 2_000
_NO_CONTENT_STATUSES = (204, 205)
_REPORTED_HEADERS = (
    *("content-type", "date", "location", "retry-after", "www-authenticate", "x-request-id", "ratelimit"),
    *(f"{prefix}ratelimit-{name}" for prefix in ("", "x-") for name in ("limit", "remaining", "reset")),
)
"""Headers that a failed result carries."""
_TEXT_TYPES = re.compile(
    r"text/.*|.*[/+](xml|yaml|x-yaml)"
    r"|application/(javascript|ecmascript|x-www-form-urlencoded|graphql|toml|sql|x-sh)"
)

_MAX_RECORD_BYTES = 16 << 20
_END_OF_STREAM = b"[DONE]"
"""The last event of model APIs. It is no value."""

MediaKind = Literal["json", "text", "image", "audio", "binary", "unknown"]


class MediaType(NamedTuple):
    """A parsed `Content-Type`."""

    type: str
    """`application/json`; empty if the server sent none."""
    kind: MediaKind
    charset: str | None
    """The declared charset, if Python can decode it."""


async def read_result(response: ClientResponse, context: ToolContext, limits: HttpLimits) -> ToolResult:
    """The tool result of a response. Raises `ToolLimitError` if the body is too large, without reading all of it."""
    status = response.status
    if not 200 <= status < 300:
        return await _failed_result(response)
    if response.method == "HEAD":
        return _successful_result(status, {"status": status, "headers": join_headers(response.headers.items())})
    if status in _NO_CONTENT_STATUSES:
        return _successful_result(status, None)
    media = parse_content_type(response.headers.get("Content-Type", ""))
    # Without a call around it there is no output store, and everything stays in memory.
    max_stream_bytes = limits.max_text_bytes if context.handle is None else limits.max_stored_bytes
    read_stream = _STREAM_READERS.get(media.type)
    if read_stream is not None:
        return await _collect(context, read_stream(_read_pieces(response, b"", max_stream_bytes)), status)
    body, is_complete = await read_up_to(response, _FIRST_READ_BYTES)
    if not is_complete:
        if media.kind in ("json", "text"):
            return await _read_large_text(response, body, media, context, max_stream_bytes)
        body, is_complete = await read_up_to(response, limits.max_binary_bytes, body)
        if not is_complete:
            raise _too_large_error(response, limits.max_binary_bytes)
    return _body_result(response, body, media)


async def read_up_to(response: ClientResponse, limit: int, start: bytes = b"") -> tuple[bytes, bool]:
    """Reads the decompressed body, appended to `start`, until its end or just beyond `limit`.

    Returns the bytes, and whether the whole body fits into the limit.
    """
    content = response.content
    piece = await _read_piece(response)
    if not start and content.at_eof():  # Most bodies are one piece, which need not be copied.
        return piece, len(piece) <= limit
    body = bytearray(start)
    body += piece
    while len(body) <= limit and not content.at_eof():
        body += await _read_piece(response)
    return bytes(body), len(body) <= limit


def transport_error(error: Exception, url: URL) -> ToolTransportError:
    """The tool error of one of `HTTP_FAILURES`. `executed` is False if nothing can have been sent."""
    not_sent = (
        aiohttp.ClientConnectorError,
        aiohttp.ClientConnectorCertificateError,
        aiohttp.ConnectionTimeoutError,
        aiohttp.InvalidURL,
    )
    return ToolTransportError(describe_http_failure(error, url), executed=not isinstance(error, not_sent))


@lru_cache(256)
def parse_content_type(header: str) -> MediaType:
    """Parses a `Content-Type` header."""
    media_type = header.partition(";")[0].strip().lower()
    match = CHARSET_PARAMETER.search(header)
    return MediaType(media_type, _media_kind(media_type), match[1] if match and find_codec(match[1]) else None)


def decode_text(body: bytes, media: MediaType) -> str | None:
    """The text of a body; None if it is binary."""
    if media.kind in ("image", "audio"):  # Some frameworks add a charset to every response.
        return None
    if media.charset is not None:
        if media.kind in ("json", "text"):
            return body.decode(media.charset, "replace")
        with suppress(UnicodeDecodeError):
            text = body.decode(media.charset)
            return None if "\0" in text else text
        return None
    if media.kind == "binary":
        return None
    try:
        if media.kind != "unknown" or b"\0" not in body:
            return body.decode("utf-8-sig")
    except UnicodeDecodeError:
        # Text without a charset that is not UTF-8 is most often Windows-1252.
        if media.kind != "unknown":
            return body.decode("cp1252", "replace")
    return None


def _media_kind(media_type: str) -> MediaKind:
    if media_type.endswith(("/json", "+json")):
        return "json"
    if _TEXT_TYPES.fullmatch(media_type):  # Before images: a model can read `image/svg+xml`.
        return "text"
    if media_type.startswith("image/"):
        return "image"
    if media_type.startswith("audio/"):
        return "audio"
    return "unknown" if media_type in ("", "application/octet-stream") else "binary"


def _successful_result(status: int, value: Any, parts: tuple[Content, ...] = ()) -> ToolResult:
    return ToolResult(True, value, parts=parts, extras={"status": status})


def _body_result(response: ClientResponse, body: bytes, media: MediaType) -> ToolResult:
    """The result of a successful response whose whole body is in memory."""
    status = response.status
    if media.kind == "json" or (not media.type and body[:1] in (b"{", b"[")):
        if not body.strip():
            return _successful_result(status, None)
        with suppress(ValueError):  # A body that is not the JSON it claims to be is returned as text.
            return _successful_result(status, _parse_json(body, media))
    text = decode_text(body, media)
    if text is not None:
        return _successful_result(status, text)
    data = b64encode(body).decode()
    part: Content
    if media.kind == "image":
        part = ImagePart(data=data, mime_type=media.type)
    elif media.kind == "audio":
        part = AudioPart(data=data, mime_type=media.type)
    else:
        mime_type = media.type or "application/octet-stream"
        part = ResourcePart(uri=display_url(response.url), mime_type=mime_type, blob=data)
    return _successful_result(status, part.placeholder, (part,))


def _parse_json(body: bytes, media: MediaType) -> Any:
    if media.charset is None or media.charset.lower() in ("utf-8", "utf8"):
        return json_text.decode(body.removeprefix(codecs.BOM_UTF8))
    return json_text.decode(body.decode(media.charset, "replace"))


async def _failed_result(response: ClientResponse) -> ToolResult:
    """The result of a status outside 2xx. Its error shows the body, which explains what to correct."""
    status = response.status
    body, is_complete = await read_up_to(response, _MAX_ERROR_BODY_BYTES)
    body = body[:_MAX_ERROR_BODY_BYTES]
    media = parse_content_type(response.headers.get("Content-Type", ""))
    text = decode_text(body, media)
    value: Any = None
    if text is not None:
        value = text = mask_secrets(json_text.valid_text(text.strip()))
        if media.kind == "json" and is_complete:
            with suppress(ValueError):
                parsed_value = _parse_json(body, media)
                value = mask_secrets(parsed_value)
                if value != parsed_value:  # Member names reveal more secrets than the plain text does.
                    text = json_text.encode(value)
    headers = join_headers(response.headers.items())
    extras: dict[str, Any] = {
        "status": status,
        "headers": mask_secrets({name: headers[name] for name in _REPORTED_HEADERS if name in headers}),
        "body": value,
    }
    # The standard phrase: the server chooses its own freely, and it would stand in the first line of the error.
    message = f"HTTP {status} {REASON_PHRASES.get(status, '')}".rstrip()
    if status in REDIRECT_STATUSES and "location" in headers:
        message += f": redirects to {headers['location'][:200]}; redirects are not followed for {response.method}"
        message = mask_secrets(message)
    elif text:
        message += f": {text[:_MAX_ERROR_TEXT]}{'…' if len(text) > _MAX_ERROR_TEXT or not is_complete else ''}"
    return ToolResult(False, error=message, error_kind="execution_error", extras=extras)


async def _read_large_text(
    response: ClientResponse, start: bytes, media: MediaType, context: ToolContext, limit: int
) -> ToolResult:
    """Collects text that is too large to read at once, piece by piece, as streams are collected."""
    is_json = media.kind == "json"
    pieces = _decode_pieces(_read_pieces(response, start, limit), media.charset)
    result = await _collect(context, pieces, response.status, emit_partials=False, is_json=is_json)
    if is_json and isinstance(result.result, str):  # It was small enough to stay in memory.
        with suppress(ValueError):
            result.result, result.encoded = json_text.decode(result.result), None
    return result


async def _read_piece(response: ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except HTTP_FAILURES as error:  # `from None`: the error contains the whole URL.
        raise transport_error(error, response.url) from None


async def _read_pieces(response: ClientResponse, start: bytes, limit: int) -> AsyncGenerator[bytes, None]:
    """`start`, then the rest of the body as it arrives. Raises `ToolLimitError` beyond the limit."""
    size = len(start)
    if start:
        yield start
    while not response.content.at_eof():
        piece = await _read_piece(response)
        size += len(piece)
        if size > limit:
            raise _too_large_error(response, limit)
        yield piece


async def _decode_pieces(pieces: AsyncIterable[bytes], charset: str | None) -> AsyncGenerator[str, None]:
    decoder = codecs.getincrementaldecoder(charset or "utf-8-sig")("replace")
    async for piece in pieces:
        if text := decoder.decode(piece):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


async def _collect(
    context: ToolContext,
    values: AsyncGenerator[Any, None],
    status: int,
    *,
    emit_partials: bool = True,
    is_json: bool = False,
) -> ToolResult:
    """Collects values into one result, in the output store if there is a call around it."""
    if context.handle is not None:
        result = await context.collect(values, emit_partials=emit_partials, is_json=is_json)
    else:
        collected_values: list[Any] = []
        async for value in values:
            if emit_partials:
                context.emit_partial(value)
            collected_values.append(value)
        is_text = all(isinstance(value, str) for value in collected_values)
        result = ToolResult(True, "".join(collected_values) if is_text else collected_values)
    result.extras = {"status": status, **result.extras}
    return result


def _too_large_error(response: ClientResponse, limit: int) -> ToolLimitError:
    return ToolLimitError(
        f"the response of {display_url(response.url)} has more than {limit:,} bytes, the limit; request less",
        executed=True,
    )


# Streams: bytes in, JSON values out


async def read_json_lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """Each non-empty line as its JSON value, or as text if it is no JSON."""
    async for line in _split(pieces, b"\n"):
        yield _json_or_text(line)


async def read_json_sequence(pieces: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """Each record of a JSON text sequence (RFC 7464)."""
    async for record in _split(pieces, b"\x1e"):
        yield _json_or_text(record)


async def read_events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """The data of each event, parsed if it is a JSON object or list. A named event is `{event, data}`."""
    decoder = SseDecoder(_MAX_RECORD_BYTES)
    async for piece in pieces:
        try:
            events = decoder.feed(piece)
        except SseSizeError:
            raise _too_long_error() from None
        for event in events:
            if event.data == _END_OF_STREAM:
                return
            if (data := event.data) is not None:
                # Only objects and lists: in a stream of text, `5` and `true` are text too.
                value = _json_or_text(data) if data[:1] in (b"{", b"[") else data.decode("utf-8", "replace")
                yield value if event.event == "message" else {"event": event.event, "data": value}
    # An event without an empty line after it is incomplete; the standard drops it.


def _json_or_text(record: bytes) -> Any:
    try:
        return json_text.decode(record)
    except ValueError:
        return record.decode("utf-8", "replace")


async def _split(pieces: AsyncIterator[bytes], separator: bytes) -> AsyncGenerator[bytes, None]:
    """The stripped, non-empty records. Raises `ToolLimitError` if a record does not end within the limit."""
    unfinished_pieces: list[bytes] = []
    size = 0
    async for piece in pieces:
        unfinished_pieces.append(piece)
        size += len(piece)
        # Joined only when a record ends: joining a long record for each of its pieces takes quadratic time.
        if separator in piece:
            *records, rest = b"".join(unfinished_pieces).split(separator)
            for record in records:
                if record := record.strip():
                    yield record
            unfinished_pieces, size = [rest], len(rest)
        if size > _MAX_RECORD_BYTES:
            raise _too_long_error()
    if record := b"".join(unfinished_pieces).strip():
        yield record


def _too_long_error() -> ToolLimitError:
    return ToolLimitError(
        f"one record of the streamed response is longer than {_MAX_RECORD_BYTES >> 20} MiB", executed=True
    )


_STREAM_READERS: dict[str, Callable[[AsyncIterator[bytes]], AsyncGenerator[Any, None]]] = {
    "application/json-seq": read_json_sequence,
    "text/event-stream": read_events,
    "application/x-ndjson": read_json_lines,
    "application/ndjson": read_json_lines,
    "application/jsonl": read_json_lines,
    "application/x-jsonl": read_json_lines,
    "application/jsonlines": read_json_lines,
    "application/x-jsonlines": read_json_lines,
    "application/json-lines": read_json_lines,
}
