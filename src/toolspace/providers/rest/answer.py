"""Reads an HTTP answer into a tool's result: parsed, bounded, streamed where it comes in pieces. Sends nothing."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from aiohttp import ClientResponse

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.http_errors import FAULTS
from toolspace.core.result import AudioPart, Content, ImagePart, ResourcePart, ToolResult
from toolspace.core.secret_masking import redact
from toolspace.errors import ToolLimitError
from toolspace.providers.rest.faults import fault_of
from toolspace.providers.rest.limits import Limits
from toolspace.providers.rest.media import Media, decoder_of, read_content_type, text_of
from toolspace.providers.rest.redirects import REDIRECTS, shown
from toolspace.providers.rest.streams import stream_of

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


async def read_answer(response: ClientResponse, context: ToolContext, limits: Limits) -> ToolResult:
    """The result that an answer stands for. Leaves the rest of an answer unread that is too large."""
    status = response.status
    if not 200 <= status < 300:
        return await _failed(response)
    if response.method == "HEAD":
        return _succeeded(status, {"status": status, "headers": headers_of(response)})
    if status in _NO_CONTENT:
        return _succeeded(status, None)
    media = read_content_type(response.headers.get("Content-Type", ""))
    reader = stream_of(media.type)
    if reader is not None:
        pieces = _bounded(response, b"", _room(context, limits))
        return await _collect(context, reader(pieces), status)
    body, complete = await read_some(response, _AT_ONCE)
    if not complete:
        if media.kind in ("json", "text"):
            return await _read_large(response, body, media, context, limits)
        body, complete = await read_some(response, limits.binary, body)
        if not complete:
            raise _too_large(response, limits.binary)
    return _read(response, body, media)


async def read_some(response: ClientResponse, limit: int, start: bytes = b"") -> tuple[bytes, bool]:
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
    except FAULTS as error:  # `from None`: it carries the whole URL.
        raise fault_of(error, response.url) from None


def headers_of(response: ClientResponse) -> dict[str, str]:
    """All headers, in lower case; what came several times is joined."""
    headers: dict[str, str] = {}
    for name, value in response.headers.items():
        name, value = name.lower(), _header_text(value)
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _succeeded(status: int, value: Any, parts: tuple[Content, ...] = ()) -> ToolResult:
    return ToolResult(True, value, parts=parts, extras={"status": status})


def _read(response: ClientResponse, body: bytes, media: Media) -> ToolResult:
    """A whole answer that is in memory."""
    status = response.status
    if media.kind == "json" or (not media.type and body[:1] in (b"{", b"[")):
        if not body.strip():
            return _succeeded(status, None)
        with suppress(ValueError):  # Where it is not what it says it is, it can still be read as text.
            return _succeeded(status, _parsed(body, media))
    text = text_of(body, media)
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
        part = ResourcePart(uri=shown(response.url), mime_type=mime_type, blob=data)
    return _succeeded(status, part.placeholder, (part,))


def _parsed(body: bytes, media: Media) -> Any:
    if media.charset is None or media.charset.lower() in ("utf-8", "utf8"):
        return json_text.decode(body.removeprefix(b"\xef\xbb\xbf"))
    return json_text.decode(body.decode(media.charset, "replace"))


async def _failed(response: ClientResponse) -> ToolResult:
    """What a status outside 2xx means: the text of the answer tells the model, or the user, what to mend."""
    status = response.status
    body, complete = await read_some(response, _FAILED_BODY)
    body = body[:_FAILED_BODY]
    media = read_content_type(response.headers.get("Content-Type", ""))
    text = text_of(body, media)
    value: Any = None
    if text is not None:
        text = redact(json_text.valid_text(text.strip()))
        value = text
        if media.kind == "json" and complete:
            with suppress(ValueError):
                parsed = _parsed(body, media)
                value = redact(parsed)
                if value != parsed:  # The names in it say more of what is secret than its text.
                    text = json_text.encode(value)
    headers = headers_of(response)
    extras: dict[str, Any] = {
        "status": status,
        "headers": redact({name: headers[name] for name in _SHOWN_HEADERS if name in headers}),
        "body": value,
    }
    message = f"HTTP {status}{_phrase(status)}"
    if status in REDIRECTS and "location" in headers:
        message += f": it redirects to {headers['location'][:200]}, which is not followed for {response.method}"
        message = redact(message)
    elif text:
        message += f": {text[:_SHOWN_BODY]}{'…' if len(text) > _SHOWN_BODY or not complete else ''}"
    return ToolResult(False, error=message, error_kind="execution_error", extras=extras)


async def _read_large(
    response: ClientResponse, start: bytes, media: Media, context: ToolContext, limits: Limits
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


async def _decoded(pieces: AsyncIterable[bytes], media: Media) -> AsyncGenerator[str, None]:
    decoder = decoder_of(media)
    async for piece in pieces:
        if text := decoder.decode(piece):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def _room(context: ToolContext, limits: Limits) -> int:
    """Without a call around it there is no store, and everything is held in memory."""
    return limits.memory if context.handle is None else limits.stored


async def _collect(
    context: ToolContext,
    values: AsyncGenerator[Any, None],
    status: int,
    *,
    announced: bool = True,
    is_json: bool = False,
) -> ToolResult:
    if context.handle is not None:
        result = await context.collect(values, announced=announced, is_json=is_json)
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
        f"{shown(response.url)} answers with more than {limit:,} bytes, which is more than is taken; ask it for less",
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
