"""HTTP requests: the ASGI types, the one reader of request bodies, and `Request`, which handlers of routes get.

The MCP endpoint uses the types and the reader, too. Knows no resources.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, MutableMapping
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec

from toolspace.core import json_text
from toolspace.core.names import did_you_mean
from toolspace.server.authorization import AnonymousCaller, Caller, SecretKeyCaller
from toolspace.server.responses import Problem, invalid_input

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway
    from toolspace.server.routing import Route
    from toolspace.spaces.ledger import Ledger
    from toolspace.storage.database import Program

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
BODY_TIMEOUT_SECONDS: Final = 30.0
"""Time for a whole body to arrive. Without it, a client that sends one byte at a time would hold its connection."""
MAX_DEPTH: Final = 100
"""Nesting levels of a body. Stored values are put into events and messages and must stay readable inside them."""
_MAX_QUERY_PARAMETERS: Final = 50
_MAX_QUOTED_LENGTH: Final = 200
_ANONYMOUS: Final = AnonymousCaller()
_CLOSE: Final = ((b"connection", b"close"),)


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class Request:
    """An HTTP request. Headers, query and body are parsed when a handler asks for them."""

    __slots__ = ("_body", "_headers", "_max_body", "caller", "gateway", "params", "receive", "route", "scope")

    def __init__(
        self,
        gateway: Gateway,
        route: Route,
        scope: Scope,
        receive: Receive,
        *,
        params: Mapping[str, str],
        max_body: int = MAX_BODY_BYTES,
    ) -> None:
        self.gateway = gateway
        self.route = route
        self.scope = scope
        self.receive = receive
        self.params = params
        """The values of the path parameters, by name."""
        self.caller: Caller = _ANONYMOUS
        self._headers: dict[bytes, bytes] | None = None
        self._max_body = max_body
        self._body: bytes | None = None

    @property
    def ledger(self) -> Ledger:
        return self.gateway.ledger

    async def read(self, program: Callable[P, Program[U]], /, *args: P.args, **kwargs: P.kwargs) -> U:
        """Runs a program that only reads, for at most `server.readTimeout`. Raises `ReadTimeout`."""
        return await self.gateway.request_reads.read(self.caller, program, *args, **kwargs)

    @property
    def method(self) -> str:
        return self.scope["method"]

    @property
    def path(self) -> str:
        return self.scope["path"]

    @property
    def address(self) -> str:
        """The client's IP address."""
        client = self.scope.get("client")
        return client[0] if client else ""

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """All headers. Of one that the request has more than once, the last value."""
        if self._headers is None:
            self._headers = dict(self.scope["headers"])
        return self._headers

    def header(self, name: str) -> str | None:
        """Returns the value of a header. Raises `Problem` 400 if the request has it more than once."""
        headers = self.headers
        value = headers.get(_encode_name(name))
        if value is None:
            return None
        pairs = self.scope["headers"]
        if len(pairs) > len(headers) and sum(key == _encode_name(name) for key, _ in pairs) > 1:
            raise Problem(400, f"The header {name} appears more than once; send it once")
        return value.decode("latin-1").strip(" \t")

    def query(self, kind: type[T]) -> T:
        """Returns the query parameters as a struct. Raises `Problem` 400."""
        text: bytes = self.scope["query_string"]
        values: dict[str, str] = {}
        if text:
            try:
                pairs = parse_qsl(text.decode("ascii"), True, errors="strict", max_num_fields=_MAX_QUERY_PARAMETERS)
            except ValueError as error:
                raise Problem(400, f"Invalid query string: {error}") from None
            for name, value in pairs:
                if name in values:
                    raise Problem(
                        400, f'The query parameter "{name}" appears more than once; send it once', path=f"$.{name}"
                    )
                if "\0" in value:
                    raise Problem(400, f'The query parameter "{name}" contains a NUL character', path=f"$.{name}")
                values[name] = value
            if "cursor" in values:
                values["cursor"] = self._read_cursor(values["cursor"])
        try:
            return msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            raise _explain(error, kind, "query") from None

    def create_cursor(self, position: str) -> str:
        """Returns a cursor for a position in the list of this request. Only this caller can use it, for this list."""
        # All secret keys see the same. The digest tells lists apart; it is no secret: a list has only visible items.
        owner = self.caller.kind if isinstance(self.caller, SecretKeyCaller) else self.caller.subject
        text = "\0".join((owner, self.path, position))
        return f"{position}.{blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=6).hexdigest()}"

    def _read_cursor(self, cursor: str) -> str:
        """Returns the position of a cursor. Raises `Problem` 400 if it is a cursor of another caller or list."""
        position = cursor.rpartition(".")[0]
        if self.create_cursor(position) != cursor:
            raise Problem(
                400, "The cursor is from another list or of another caller; start without a cursor", path="$.cursor"
            )
        return position

    async def body(self) -> bytes:
        """Returns the whole body. Raises `Problem` if it is too large, too slow or incomplete."""
        if self._body is None:
            value = self.header("content-length")
            content_length = None if value is None else value.encode("latin-1")
            try:
                self._body = await read_body(self.receive, content_length, limit=self._max_body)
            except Problem as problem:
                problem.headers = _CLOSE  # The rest of the body must not be parsed as the next request.
                raise
        return self._body

    async def json(self, kind: type[T]) -> T:
        """Returns the JSON body as a struct; a missing body counts as `{}`. Raises `Problem`."""
        body = await self.body()
        if not body:
            body = b"{}"
        else:
            self._check_media_type()
        decoder = _decoders.get(kind)
        if decoder is None:
            decoder = _decoders[kind] = msgspec.json.Decoder(kind)
        try:
            value = decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _explain(error, kind, "body") from None
        except RecursionError:
            raise _too_deep() from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Problem(400, f"The body is not valid JSON: {error}") from None
        # Counting brackets is cheap; the depth is measured only if there are enough of them.
        if len(body) > MAX_DEPTH < body.count(b"[") + body.count(b"{") and json_text.is_too_deep(value, MAX_DEPTH):
            raise _too_deep()
        return value

    async def wait_for_disconnect(self) -> None:
        """Returns when the client has disconnected."""
        if self._body is None:
            await self.body()
        await wait_for_disconnect(self.receive)

    def _check_media_type(self) -> None:
        value = self.header("content-type")
        if value is None or value == "application/json":
            return
        media_type, _, parameters = value.lower().partition(";")
        media_type = media_type.strip()
        is_json = media_type.startswith("application/") and media_type.endswith("+json")
        if media_type != "application/json" and not is_json:
            raise Problem(
                415,
                f'Content-Type "{value}" not supported; send JSON with "content-type: application/json" '
                "(curl: --json '{…}')",
            )
        charset = parameters.partition("charset=")[2].strip(' "')
        if charset not in ("", "utf-8", "utf8"):
            raise Problem(415, f'Charset "{charset}" not supported; send UTF-8')


async def read_body(receive: Receive, content_length: bytes | None, *, limit: int) -> bytes:
    """Returns the whole request body.

    Raises `Problem`: 413 if the body is larger than `limit`, 408 if it takes too long, 400 if the connection closes
    before the body is complete. A partial body is never returned, even if it is valid JSON.
    """
    if content_length is not None and content_length.isdigit() and int(content_length[:20]) > limit:
        raise _too_large(limit)
    message, pending = _poll(receive())
    if message is not None and message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")  # Most bodies have arrived already and need no timer.
        if len(body) > limit:
            raise _too_large(limit)
        return body
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            if message is None:
                message = await pending
            chunks = bytearray()
            while message["type"] == "http.request":
                chunks += message.get("body", b"")
                if len(chunks) > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return bytes(chunks)
                message = await receive()
    except TimeoutError:
        detail = f"The request body did not arrive within {BODY_TIMEOUT_SECONDS:g} s"
        raise Problem(408, detail, headers=_CLOSE) from None
    raise Problem(400, "The connection was closed before the request body was complete")


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def find_transport(receive: Receive) -> asyncio.Transport | None:
    """Returns the connection of a request, for `abort()`; None if the server is not uvicorn.

    A polite close would wait for a client that does not read.
    """
    # uvicorn's `receive` is a method of the object that has the transport.
    return getattr(getattr(receive, "__self__", None), "transport", None)


def _poll(receive_call: Awaitable[Message]) -> tuple[Message | None, Awaitable[Message]]:
    """Returns the message if it is available without waiting, else None and what to await for it."""
    if not isinstance(receive_call, Coroutine):
        return None, receive_call
    coroutine = cast("Coroutine[Any, Any, Message]", receive_call)
    try:
        return None, _resume(coroutine, coroutine.send(None))
    except StopIteration as stop:
        return stop.value, coroutine


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, Message], awaited_future: Any) -> Generator[Any, Any, Message]:
    """Continues a coroutine whose first step was made by hand and which waits for something."""
    while True:
        try:
            try:
                value = yield awaited_future
            except BaseException as error:
                awaited_future = coroutine.throw(error)
            else:
                awaited_future = coroutine.send(value)
        except StopIteration as stop:
            return stop.value


@cache
def _encode_name(name: str) -> bytes:
    """Returns a header name in the form that ASGI uses."""
    return name.lower().encode("latin-1")


def _too_large(limit: int) -> Problem:
    return Problem(413, f"The request body is too large; at most {limit} bytes are accepted")


def _too_deep() -> Problem:
    return Problem(400, f"The body is nested too deeply; at most {MAX_DEPTH} levels are accepted")


def _explain(error: msgspec.ValidationError, kind: Any, place: Literal["body", "query"]) -> Problem:
    """Adds to a validation error the names or values that would be valid."""
    problem = invalid_input(error, place=place)
    path = problem.extra_members["path"]
    _, is_unknown_field, rest = str(error).partition("unknown field `")
    if is_unknown_field and path == "$":
        fields: tuple[str, ...] = getattr(kind, "__struct_encode_fields__", ())
        name = rest.partition("`")[0]
        name = name if len(name) <= _MAX_QUOTED_LENGTH else f"{name[:_MAX_QUOTED_LENGTH]}…"
        hint = did_you_mean(name, fields) or (f"; known: {', '.join(fields)}" if fields else "")
        noun = "field" if place == "body" else "parameter"
        return Problem(400, f'Unknown {noun} "{name}" in the {place}{hint}', path=f"$.{name}")
    if "enum value" in problem.detail and (choices := _choices(kind, path)):
        return Problem(400, f"{problem.detail}; expected one of {', '.join(choices)}", path=path)
    return problem


def _choices(kind: Any, path: str) -> list[str]:
    """Returns the texts that a field of a struct may have, if it is one of a few."""
    struct = msgspec.inspect.type_info(kind)
    if not isinstance(struct, msgspec.inspect.StructType):
        return []
    for field in struct.fields:
        if path == f"$.{field.encode_name}":
            options = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
            literals = (option for option in options if isinstance(option, msgspec.inspect.LiteralType))
            return [str(value) for literal in literals for value in literal.values]
    return []
