"""One request as handlers see it: path parameters, query, headers, JSON body and caller. Knows no resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec

from toolspace.core import json_text
from toolspace.core.names import did_you_mean
from toolspace.server.asgi import MAX_BODY_BYTES, Receive, Scope, read_body, wait_for_disconnect
from toolspace.server.authorization import AnonymousCaller, Caller
from toolspace.server.problems import Problem, invalid_input
from toolspace.server.routing import Route

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway

T = TypeVar("T")

MAX_DEPTH: Final = 100
"""Nesting levels of a body. Stored values are put into events and messages and must stay readable inside them."""
_MAX_QUERY_PARAMETERS: Final = 50
_MAX_QUOTED_LENGTH: Final = 200
_ANONYMOUS: Final = AnonymousCaller()


class _HeaderNames(dict[str, bytes]):
    """Caches header names in the form that ASGI uses."""

    def __missing__(self, name: str) -> bytes:
        encoded = self[name] = name.lower().encode("latin-1")
        return encoded


_header_names = _HeaderNames()
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

    def header(self, name: str) -> str | None:
        """Returns the value of a header. Raises `Problem` 400 if the request has it more than once."""
        headers = self._headers
        if headers is None:
            headers = self._headers = dict(self.scope["headers"])
        value = headers.get(_header_names[name])
        if value is None:
            return None
        pairs = self.scope["headers"]
        if len(pairs) > len(headers) and sum(key == _header_names[name] for key, _ in pairs) > 1:
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
        try:
            return msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            raise _explain(error, kind, "query") from None

    async def body(self) -> bytes:
        """Returns the whole body. Raises `Problem` if it is too large, too slow or incomplete."""
        if self._body is None:
            value = self.header("content-length")
            content_length = None if value is None else value.encode("latin-1")
            self._body = await read_body(self.receive, content_length, limit=self._max_body)
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
