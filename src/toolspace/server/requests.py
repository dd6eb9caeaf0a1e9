"""One request as handlers see it: parameters, query, headers, a body that is read once and bounded, and who asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from toolspace.core import json_text
from toolspace.core.names import did_you_mean
from toolspace.server.asgi import MAX_BODY_BYTES, Receive, Scope, read_body
from toolspace.server.authorization import AnonymousCaller, Caller
from toolspace.server.problems import Problem, invalid_input
from toolspace.server.routing import Route

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway

T = TypeVar("T")

MAX_DEPTH: Final = 100
"""Levels of a body. What is stored is put into events and messages, and must still be readable inside them."""
_MOST_PARAMETERS: Final = 50
_LONGEST_SHOWN: Final = 200
"""Characters of what was sent that an answer says again."""
_NOBODY: Final = AnonymousCaller()


class _Names(dict[str, bytes]):
    """Names of headers that handlers ask for, as they come on the wire."""

    def __missing__(self, name: str) -> bytes:
        wanted = self[name] = name.lower().encode("latin-1")
        return wanted


_names = _Names()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class Request:
    """What was asked. Headers, query and body are looked at when a handler wants them, not before."""

    __slots__ = ("_body", "_headers", "_limit", "caller", "gateway", "params", "receive", "route", "scope")

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
        """The values of the parameters in the path, by name."""
        self.caller: Caller = _NOBODY
        self._headers: dict[bytes, bytes] | None = None
        self._limit = max_body
        self._body: bytes | None = None

    @property
    def method(self) -> str:
        return self.scope["method"]

    @property
    def path(self) -> str:
        return self.scope["path"]

    @property
    def address(self) -> str:
        """Where the connection comes from."""
        client = self.scope.get("client")
        return client[0] if client else ""

    def header(self, name: str) -> str | None:
        """The value of a header. One that is there twice means two things, so it is refused."""
        headers = self._headers
        if headers is None:
            headers = self._headers = dict(self.scope["headers"])
        found = headers.get(_names[name])
        if found is None:
            return None
        pairs = self.scope["headers"]
        if len(pairs) > len(headers) and sum(key == _names[name] for key, _ in pairs) > 1:
            raise Problem(400, f"the header {name} is there more than once; send it once")
        return found.decode("latin-1").strip(" \t")

    def query(self, kind: type[T]) -> T:
        """The query as this struct."""
        text: bytes = self.scope["query_string"]
        values: dict[str, str] = {}
        if text:
            try:
                pairs = parse_qsl(text.decode("ascii"), True, errors="strict", max_num_fields=_MOST_PARAMETERS)
            except ValueError as error:
                raise Problem(400, f"the query cannot be read: {error}") from None
            for name, value in pairs:
                if name in values:
                    raise Problem(400, f'the query has "{name}" more than once; give it once', path=f"$.{name}")
                if "\0" in value:
                    raise Problem(400, f'"{name}" has a NUL character; leave it out', path=f"$.{name}")
                values[name] = value
        try:
            return msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            raise _explained(error, kind, "query") from None

    async def body(self) -> bytes:
        """The whole body. Raises `Problem` where it is too large, too slow, or ends in the middle."""
        if self._body is None:
            content_length = self.header("content-length")
            declared = None if content_length is None else content_length.encode("latin-1")
            self._body = await read_body(self.receive, declared, limit=self._limit)
        return self._body

    async def json(self, kind: type[T]) -> T:
        """The body as this struct. No body at all is an empty object."""
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
            raise _explained(error, kind, "body") from None
        except RecursionError:
            raise Problem(400, "the body is nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Problem(400, f"the body cannot be read: {error}") from None
        if len(body) > MAX_DEPTH < body.count(b"[") + body.count(b"{") and json_text.is_too_deep(value, MAX_DEPTH):
            raise Problem(400, f"the body is nested too deeply; at most {MAX_DEPTH} levels are taken")
        return value

    async def wait_for_disconnect(self) -> None:
        """Waits until the client has gone away."""
        if self._body is None:
            await self.body()
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def _check_media_type(self) -> None:
        value = self.header("content-type")
        if value is None or value == "application/json":
            return
        essence, _, parameters = value.lower().partition(";")
        essence = essence.strip()
        if essence != "application/json" and not (essence.startswith("application/") and essence.endswith("+json")):
            raise Problem(
                415, f'the body is "{value}"; send JSON, with "content-type: application/json" (curl: --json \'{{…}}\')'
            )
        charset = parameters.partition("charset=")[2].strip(' "')
        if charset not in ("", "utf-8", "utf8"):
            raise Problem(415, f'JSON is UTF-8 here, not "{charset}"')


def _explained(error: msgspec.ValidationError, kind: Any, place: Any) -> Problem:
    problem = invalid_input(error, place=place)
    _, unknown, rest = str(error).partition("unknown field `")
    if unknown and problem.extra_members["path"] == "$":
        known: tuple[str, ...] = getattr(kind, "__struct_encode_fields__", ())
        name = rest.partition("`")[0]
        name = name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}…"
        near = did_you_mean(name, known) or (f"; known are {', '.join(known)}" if known else "")
        return Problem(400, f'the {place} has "{name}", which means nothing here{near}', path=f"$.{name}")
    if "enum value" in problem.detail and (choices := _choices(kind, problem.extra_members["path"])):
        return Problem(
            400, f"{problem.detail}; expected one of {', '.join(choices)}", path=problem.extra_members["path"]
        )
    return problem


def _choices(kind: Any, path: str) -> list[str]:
    """What a member of a struct may be, where it is one of a few texts."""
    shape = msgspec.inspect.type_info(kind)
    if not isinstance(shape, msgspec.inspect.StructType):
        return []
    for field in shape.fields:
        if path == f"$.{field.encode_name}":
            types = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
            return [str(v) for one in types if isinstance(one, msgspec.inspect.LiteralType) for v in one.values]
    return []
