"""Reads an HTTP answer into a tool's result: parsed, bounded, streamed where it comes in pieces. Sends nothing."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import ClientResponse
from yarl import URL

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.http_errors import HTTP_FAILURES, describe_http_failure
from toolspace.core.result import AudioPart, Content, ImagePart, ResourcePart, ToolResult
from toolspace.core.secret_masking import mask_secrets
from toolspace.core.sse import SseDecoder, SseSizeError
from toolspace.errors import ToolLimitError, ToolTransportError
from toolspace.providers.rest.client import HttpLimits
from toolspace.providers.rest.media import MediaType, decode_text, parse_content_type, text_decoder
from toolspace.providers.rest.redirects import REDIRECT_STATUSES, display_url

# MERGED from streams: Answers that come piece by piece: JSON lines, JSON sequences, server-sent events. Bytes in, …

Values = AsyncGenerator[Any, None]

_LONGEST = 16 << 20
_RECORD_SEPARATOR = b"\x1e"
_END = b"[DONE]"
"""What model APIs send last. It says that there is nothing more, and is nothing itself."""


def find_stream_reader(media_type: str) -> Callable[[AsyncIterator[bytes]], Values] | None:
    """What reads a stream of this type; None where the type is no stream."""
    return _READERS.get(media_type)


async def read_json_lines(pieces: AsyncIterator[bytes]) -> Values:
    """Each line as its JSON value; one that is no JSON as its text."""
    async for line in _split(pieces, _newlines):
        if line := line.strip():
            yield _json_or_text(line)


async def read_json_sequence(pieces: AsyncIterator[bytes]) -> Values:
    """Each record of a JSON text sequence (RFC 7464)."""
    async for record in _split(pieces, _records):
        if record := record.strip():
            yield _json_or_text(record)


async def read_events(pieces: AsyncIterator[bytes]) -> Values:
    """The data of each event: an object or a list where it is one, else its text. With its name, where it has one."""
    decoder = SseDecoder(_LONGEST)
    async for piece in pieces:
        try:
            events = decoder.feed(piece)
        except SseSizeError:
            raise _too_long() from None
        for event in events:
            if event.data == _END:
                return
            if event.data is not None:
                yield _event(event.event, event.data)
    # An event without an empty line behind it is not complete, and the standard drops it.


def _event(name: str, data: bytes) -> Any:
    # Only objects and lists: a stream of text may have a `5` or a `true` in it, which is text all the same.
    value: Any = _json_or_text(data) if data[:1] in (b"{", b"[") else data.decode("utf-8", "replace")
    return value if name == "message" else {"event": name, "data": value}


def _json_or_text(line: bytes) -> Any:
    try:
        return json_text.decode(line)
    except ValueError:
        return line.decode("utf-8", "replace")


async def _split(pieces: AsyncIterator[bytes], cut: Callable[[bytes], list[bytes]]) -> AsyncGenerator[bytes, None]:
    """The records between separators. One that never ends is refused before it fills the memory."""
    begun: list[bytes] = []
    size = 0
    async for piece in pieces:
        begun.append(piece)
        size += len(piece)
        if len(cut(piece)) > 1:  # Only then: joining a long record anew for each of its pieces would take for ever.
            *whole, rest = cut(b"".join(begun))
            for record in whole:
                yield record
            begun, size = [rest], len(rest)
        if size > _LONGEST:
            raise _too_long()
    for record in cut(b"".join(begun)):
        yield record


def _newlines(data: bytes) -> list[bytes]:
    return data.split(b"\n")


def _records(data: bytes) -> list[bytes]:
    return data.split(_RECORD_SEPARATOR)


def _too_long() -> ToolLimitError:
    return ToolLimitError(f"a single record of the answer is longer than {_LONGEST >> 20} MiB", executed=True)


_READERS: dict[str, Callable[[AsyncIterator[bytes]], Values]] = {
    "application/x-ndjson": read_json_lines,
    "application/ndjson": read_json_lines,
    "application/jsonl": read_json_lines,
    "application/x-jsonl": read_json_lines,
    "application/jsonlines": read_json_lines,
    "application/x-jsonlines": read_json_lines,
    "application/json-lines": read_json_lines,
    "application/json-seq": read_json_sequence,
    "text/event-stream": read_events,
}


# MERGED from faults: A request that got no answer as a tool's error: says whether anything can have been sent.


def transport_error(error: Exception, url: URL) -> ToolTransportError:
    """What one of `FAULTS` means for a call."""
    # A certificate error is both of these, and none of them has sent anything.
    before = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.InvalidURL)
    before = before or isinstance(error, aiohttp.ClientConnectorCertificateError)
    return ToolTransportError(describe_http_failure(error, url), executed=not before)


_AT_ONCE = 1 << 20
"""What is read before anything is decided: most answers are smaller."""
_FAILED_BODY = 1 << 16
_SHOWN_BODY = 2_000
_NO_CONTENT = (204, 205)
_SHOWN_HEADERS = (
    "content-type",
    "date",
    "location",
    "ratelimit",
    "ratelimit-limit",
    "ratelimit-remaining",
    "ratelimit-reset",
    "retry-after",
    "www-authenticate",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "x-request-id",
)


async def read_result(response: ClientResponse, context: ToolContext, limits: HttpLimits) -> ToolResult:
    """The result that an answer stands for. Leaves the rest of an answer unread that is too large."""
    status = response.status
    if not 200 <= status < 300:
        return await _failed(response)
    if response.method == "HEAD":
        return _succeeded(status, {"status": status, "headers": join_headers(response)})
    if status in _NO_CONTENT:
        return _succeeded(status, None)
    media = parse_content_type(response.headers.get("Content-Type", ""))
    reader = find_stream_reader(media.type)
    if reader is not None:
        pieces = _bounded(response, b"", _room(context, limits))
        return await _collect(context, reader(pieces), status)
    body, complete = await read_up_to(response, _AT_ONCE)
    if not complete:
        if media.kind in ("json", "text"):
            return await _read_large(response, body, media, context, limits)
        body, complete = await read_up_to(response, limits.max_binary_bytes, body)
        if not complete:
            raise _too_large(response, limits.max_binary_bytes)
    return _read(response, body, media)


async def read_up_to(response: ClientResponse, limit: int, start: bytes = b"") -> tuple[bytes, bool]:
    """The body, unpacked, until there is more than `limit`; and whether that is all of it."""
    content = response.content
    piece = await _piece(response)
    if not start and content.at_eof():  # The way of most answers: one piece, which is not copied.
        return piece, len(piece) <= limit
    body = bytearray(start)
    body += piece
    while len(body) <= limit and not content.at_eof():
        body += await _piece(response)
    return bytes(body), len(body) <= limit


async def _piece(response: ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except HTTP_FAILURES as error:  # `from None`: it carries the whole URL.
        raise transport_error(error, response.url) from None


def join_headers(response: ClientResponse) -> dict[str, str]:
    """All headers, in lower case; what came several times is joined."""
    headers: dict[str, str] = {}
    for name, value in response.headers.items():
        name, value = name.lower(), _header_text(value)
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _succeeded(status: int, value: Any, parts: tuple[Content, ...] = ()) -> ToolResult:
    return ToolResult(True, value, parts=parts, extras={"status": status})


def _read(response: ClientResponse, body: bytes, media: MediaType) -> ToolResult:
    """A whole answer that is in memory."""
    status = response.status
    if media.kind == "json" or (not media.type and body[:1] in (b"{", b"[")):
        if not body.strip():
            return _succeeded(status, None)
        with suppress(ValueError):  # Where it is not what it says it is, it can still be read as text.
            return _succeeded(status, _parsed(body, media))
    text = decode_text(body, media)
    if text is not None:
        return _succeeded(status, text)
    data = b64encode(body).decode()
    part: Content
    if media.kind == "image":
        part = ImagePart(data=data, mime_type=media.type)
    elif media.kind == "audio":
        part = AudioPart(data=data, mime_type=media.type)
    else:
        mime_type = media.type or "application/octet-stream"
        part = ResourcePart(uri=display_url(response.url), mime_type=mime_type, blob=data)
    return _succeeded(status, part.placeholder, (part,))


def _parsed(body: bytes, media: MediaType) -> Any:
    if media.charset is None or media.charset.lower() in ("utf-8", "utf8"):
        return json_text.decode(body.removeprefix(b"\xef\xbb\xbf"))
    return json_text.decode(body.decode(media.charset, "replace"))


async def _failed(response: ClientResponse) -> ToolResult:
    """What a status outside 2xx means: the text of the answer tells the model, or the user, what to mend."""
    status = response.status
    body, complete = await read_up_to(response, _FAILED_BODY)
    body = body[:_FAILED_BODY]
    media = parse_content_type(response.headers.get("Content-Type", ""))
    text = decode_text(body, media)
    value: Any = None
    if text is not None:
        text = mask_secrets(json_text.valid_text(text.strip()))
        value = text
        if media.kind == "json" and complete:
            with suppress(ValueError):
                parsed = _parsed(body, media)
                value = mask_secrets(parsed)
                if value != parsed:  # The names in it say more of what is secret than its text.
                    text = json_text.encode(value)
    headers = join_headers(response)
    extras: dict[str, Any] = {
        "status": status,
        "headers": mask_secrets({name: headers[name] for name in _SHOWN_HEADERS if name in headers}),
        "body": value,
    }
    message = f"HTTP {status}{_phrase(status)}"
    if status in REDIRECT_STATUSES and "location" in headers:
        message += f": it redirects to {headers['location'][:200]}, which is not followed for {response.method}"
        message = mask_secrets(message)
    elif text:
        message += f": {text[:_SHOWN_BODY]}{'…' if len(text) > _SHOWN_BODY or not complete else ''}"
    return ToolResult(False, error=message, error_kind="execution_error", extras=extras)


async def _read_large(
    response: ClientResponse, start: bytes, media: MediaType, context: ToolContext, limits: HttpLimits
) -> ToolResult:
    """Text that is too large to be read at once goes where the results of streams go, as it comes."""
    is_json = media.kind == "json"
    pieces = _decoded(_bounded(response, start, _room(context, limits)), media)
    result = await _collect(context, pieces, response.status, announced=False, is_json=is_json)
    if is_json and isinstance(result.result, str):  # It fitted after all.
        with suppress(ValueError):
            result.result, result.encoded = json_text.decode(result.result), None
    return result


async def _bounded(response: ClientResponse, start: bytes, limit: int) -> AsyncGenerator[bytes, None]:
    """The pieces of a body as they come. An error, and not a cut, where there are more bytes than the limit."""
    size = len(start)
    if start:
        yield start
    content = response.content
    while not content.at_eof():
        piece = await _piece(response)
        size += len(piece)
        if size > limit:
            raise _too_large(response, limit)
        yield piece


async def _decoded(pieces: AsyncIterable[bytes], media: MediaType) -> AsyncGenerator[str, None]:
    decoder = text_decoder(media)
    async for piece in pieces:
        if text := decoder.decode(piece):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def _room(context: ToolContext, limits: HttpLimits) -> int:
    """Without a call around it there is no store, and everything is held in memory."""
    return limits.max_text_bytes if context.handle is None else limits.max_stored_bytes


async def _collect(
    context: ToolContext,
    values: AsyncGenerator[Any, None],
    status: int,
    *,
    announced: bool = True,
    is_json: bool = False,
) -> ToolResult:
    if context.handle is not None:
        result = await context.collect(values, emit_partials=announced, is_json=is_json)
    else:
        gathered: list[Any] = []
        async for value in values:
            if announced:
                context.emit_partial(value)
            gathered.append(value)
        all_text = all(isinstance(value, str) for value in gathered)
        result = ToolResult(True, "".join(gathered) if all_text else gathered)
    result.extras = {"status": status, **result.extras}
    return result


def _too_large(response: ClientResponse, limit: int) -> ToolLimitError:
    return ToolLimitError(
        f"{display_url(response.url)} answers with more than {limit:,} bytes, the limit; request less",
        executed=True,
    )


def _phrase(status: int) -> str:
    # Not the server's own words: they are its to choose, and stand in the message's first line.
    try:
        return f" {HTTPStatus(status).phrase}"
    except ValueError:
        return ""


def _header_text(value: str) -> str:
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
