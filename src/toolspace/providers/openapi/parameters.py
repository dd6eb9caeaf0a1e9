"""What an operation takes beside its body: parameters as the document describes them. Sends nothing."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from toolspace.core import json_text
from toolspace.providers.openapi.document import Broken, Json, Source, mapping
from toolspace.providers.openapi.schemas import Refs, Schemas

Place = Literal["path", "query", "header", "cookie"]
Style = Literal["simple", "label", "matrix", "form", "spaceDelimited", "pipeDelimited", "deepObject"]

PLACES: tuple[Place, ...] = ("path", "query", "header", "cookie")
"""Of two parameters with one name, the first of these keeps it."""

_STYLES: dict[Place, tuple[Style, ...]] = {
    "path": ("simple", "label", "matrix"),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
_SAID_ELSEWHERE = frozenset(("accept", "content-type", "authorization"))
"""Headers that are no parameters, says the standard: bodies, responses and security schemes describe them."""
_ABOUT_THE_MESSAGE = "content-length transfer-encoding connection upgrade te trailer keep-alive expect"
FRAMING = frozenset((*_ABOUT_THE_MESSAGE.split(), "host", "proxy-authorization", "proxy-connection"))
"""Headers that say where a message ends and whom it is for: who chooses them can send a second one inside the first."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a path, a query, a header or a cookie."""

    name: str
    place: Place
    required: bool
    style: Style
    explode: bool
    allow_reserved: bool = False
    as_json: bool = False
    """Described by `content`: sent as JSON text."""
    schema: Any
    """Of its argument: shared by all operations that use the parameter."""
    refs: Refs


def read_parameter(node: Any, source: Source, schemas: Schemas) -> Parameter | None:
    """The parameter that stands there; None for one that is not the caller's to give. Raises `Broken`."""
    said = mapping(node)
    if said is None:
        raise Broken(f"expected a parameter, got {json_text.describe(node)}")
    name, place = said.get("name"), said.get("in")
    if not isinstance(name, str) or not name or place not in PLACES:
        raise Broken(f"a parameter needs a name, and in: {', '.join(PLACES)}; got {name!r} in {place!r}")
    if place in ("header", "cookie") and not can_be_sent(name):
        raise Broken(f"the name of the {place} parameter {name!r} cannot be sent")
    if place == "header" and name.lower() in _SAID_ELSEWHERE | FRAMING:
        return None
    style = said.get("style") or _STYLES[place][0]
    if style not in _STYLES[place]:
        raise Broken(f"the {place} parameter {name!r} has the style {style!r}; it is {' or '.join(_STYLES[place])}")
    explode = said.get("explode")
    refs: Refs = {}
    return Parameter(
        name=name,
        place=place,
        required=place == "path" or said.get("required") is True,
        style=style,
        explode=explode if isinstance(explode, bool) else style == "form",
        allow_reserved=said.get("allowReserved") is True,
        as_json=bool(mapping(said.get("content"))),
        schema=_schema(said, source, schemas, refs),
        refs=refs,
    )


def can_be_sent(name: str) -> bool:
    """Whether it can name a header or a cookie."""
    return _TOKEN.fullmatch(name) is not None


def implied(name: str) -> Parameter:
    """A hole in a path that no parameter describes: it has to be filled all the same."""
    return Parameter(
        name=name, place="path", required=True, style="simple", explode=False, schema={"type": "string"}, refs={}
    )


def _schema(said: Json, source: Source, schemas: Schemas, refs: Refs) -> Any:
    node: Any = said.get("schema")
    if content := mapping(said.get("content")):
        node = (mapping(next(iter(content.values()))) or {}).get("schema")
    converted = schemas.convert({} if node is None else node, source, refs)
    schema = mapping(converted) or {}
    if said.get("allowEmptyValue") is True and said.get("in") == "query" and schema.get("type") != "string":
        schema = {"anyOf": [schema, {"const": ""}]}
    extra: Json = {}
    if isinstance(description := said.get("description"), str) and description:
        extra["description"] = description
    if said.get("deprecated") is True:
        extra["deprecated"] = True
    return {**schema, **extra} if extra else schema
