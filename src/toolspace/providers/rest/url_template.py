"""Where a request goes: URLs and queries with holes, such that no argument can aim them elsewhere. Sends nothing.

Scheme, port, user and password are the configuration's alone. A hole in the host fills at most one label, with two
literal ones behind it: `https://${parameters.tenant}.example.com`. A hole in the path stays in its segment.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast
from urllib.parse import quote, unquote

from yarl import URL

from toolspace.errors import ToolValidationError
from toolspace.providers.rest.template import (
    ABSENT,
    Fill,
    Placeholder,
    TemplateParts,
    argument_text,
    compile_data,
    compile_value,
    iter_placeholders,
    parse_template,
)

FillText = Callable[[Mapping[str, Any]], str]
QueryEntry = str | tuple[str, Fill]
"""A part of a query: encoded already, or an encoded name and what gives its value."""

_MARK = "\0"
"""Stands around the number of a hole while a URL is taken apart: no URL has it, and a default may hold a slash."""
_LOOSE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_PATH_SAFE = "%!$&'()*+,;=:@~-._"
_QUERY_SAFE = _PATH_SAFE + "/?[]"
_HARMLESS = re.compile(r"[A-Za-z0-9_~-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_DECODINGS = 4


class UrlTemplate:
    """A URL template, taken apart."""

    __slots__ = ("_base", "_path", "_query", "authorization", "fixed_query_names", "required_parameters")

    def __init__(self, url: str, query: Mapping[str, Any]) -> None:
        """Raises `ValueError`, with the way out, where the template leaves open what it must not."""
        marked, found = _mark(url.strip())
        scheme, _, rest = marked.partition("://")
        if scheme.lower() not in ("http", "https"):
            raise ValueError("it must start with http:// or https://, and no parameter can stand there")
        rest, _, fragment = rest.partition("#")
        if _MARK in fragment:
            raise ValueError("what follows # is never sent, so no parameter can stand there")
        rest, _, written = rest.partition("?")
        authority, slash, path = rest.partition("/")
        authority, self.authorization = _authorization(authority)
        self._base = _base(scheme.lower(), authority, found)
        self._path = _path(slash + path or "/", found)
        self.required_parameters = frozenset(_names_in(authority + slash + path, found))
        """The parameters that a URL cannot be made without."""
        self._query = [*(_entry(text, found) for text in written.split("&") if text), *_entries(query)]
        set_here = (entry if isinstance(entry, str) else entry[0] for entry in self._query)
        self.fixed_query_names = frozenset((*query, *(unquote(text.partition("=")[0]) for text in set_here)))
        """The names in its query that the configuration has set."""

    def build_url(self, parameters: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> URL:
        """The URL for some arguments, with `more` in its query. Raises `ToolValidationError`."""
        text = self._base(parameters) + self._path(parameters)
        pairs: list[str] = []
        for entry in self._query:
            if isinstance(entry, str):
                pairs.append(entry)
            else:
                pairs += _pairs(entry[0], entry[1](parameters))
        for name, value in more.items() if more else ():
            pairs += encode_query_parameter(name, value)
        return URL(f"{text}?{'&'.join(pairs)}" if pairs else text, encoded=True)


def encode_path_segment(text: str, name: str) -> str:
    """A value as a part of one path segment, which it can never leave: neither here nor on servers that decode
    twice, or take `\\` and `..;` for what they look like. Raises `ToolValidationError` that names it."""
    if _HARMLESS.fullmatch(text):
        return text
    if not text:
        raise ToolValidationError(f"{name}: empty, but it is a part of the path; give a value")
    if _CONTROL.search(text):
        raise ToolValidationError(f"{name}: a part of the path has no control characters")
    check_path_segment(text, name)
    return quote(text, safe="")


def check_path_segment(text: str, name: str) -> None:
    """Refuses what some server takes for the way up, in a value or in a whole segment."""
    for _ in range(_DECODINGS):
        if any(part.partition(";")[0].strip() in (".", "..") for part in text.replace("\\", "/").split("/")):
            raise ToolValidationError(f'{name}: "." and ".." cannot be parts of the path')
        if (decoded := unquote(text)) == text:
            return
        text = decoded
    raise ToolValidationError(f"{name}: percent-encoded {_DECODINGS} times over; give the value as it is")


def encode_query_parameter(name: str, value: object) -> list[str]:
    """A parameter in a query: nothing where it is absent or null, a list once for each item, an object as JSON."""
    return _pairs(_quoted(name), value)


def _pairs(name: str, value: object) -> list[str]:
    if value is ABSENT or value is None:
        return []
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        return [f"{name}={_quoted(argument_text(item))}" for item in items if item is not None]
    return [f"{name}={_quoted(argument_text(value))}"]


def _quoted(text: str) -> str:
    if _HARMLESS.fullmatch(text):
        return text
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise ToolValidationError("a text for the query is not valid Unicode") from None


def _mark(url: str) -> tuple[str, list[Placeholder]]:
    """The text with a mark for each hole, and the holes."""
    if _CONTROL.search(url):
        raise ValueError("it has a line break or another control character")
    found: list[Placeholder] = []
    text = ""
    for piece in parse_template(url):
        if isinstance(piece, Placeholder):
            text += f"{_MARK}{len(found)}{_MARK}"
            found.append(piece)
        else:
            text += piece
    return text, found


def _unmark(text: str, found: list[Placeholder]) -> TemplateParts:
    parts = text.split(_MARK)
    return tuple(found[int(part)] if place % 2 else part for place, part in enumerate(parts) if part)


def _names_in(text: str, found: list[Placeholder]) -> Iterable[str]:
    for piece in _unmark(text, found):
        if isinstance(piece, Placeholder) and piece.path and piece.default is None:
            yield str(piece.path[0])


def _authorization(authority: str) -> tuple[str, str | None]:
    """The host and port, and what a user and password before them mean as a header."""
    user, at, host = authority.rpartition("@")
    if not at:
        return authority, None
    if _MARK in user:
        raise ValueError("no parameter can stand in the user name or password; use an Authorization header")
    name, _, password = user.partition(":")
    return host, "Basic " + b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()


def _base(scheme: str, authority: str, found: list[Placeholder]) -> FillText:
    example = re.sub(f"{_MARK}[0-9]+{_MARK}", "x", authority)
    try:
        origin = URL(f"{scheme}://{example}").origin()
    except ValueError as error:
        raise ValueError(f"it names no host that could be asked: {error}") from None
    if _MARK not in authority:
        fixed = str(origin)
        return lambda parameters: fixed
    host, colon, port = authority.partition(":")
    written = host.split(".")
    if len(written) < 3 or any(_MARK in label for label in written[-2:]):
        raise ValueError(
            "a parameter in the host needs two fixed labels behind it, as in https://${parameters.tenant}.example.com"
        )
    # What is fixed comes from the example, where it is in ASCII.
    known = cast("str", origin.raw_host).split(".")
    labels = [
        _unmark(label, found) if _MARK in label else (fixed,) for label, fixed in zip(written, known, strict=True)
    ]

    def fill(parameters: Mapping[str, Any]) -> str:
        return f"{scheme}://{'.'.join(_label(pieces, parameters) for pieces in labels)}{colon}{port}"

    return fill


def _label(pieces: TemplateParts, parameters: Mapping[str, Any]) -> str:
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return pieces[0]
    text = "".join(piece if isinstance(piece, str) else _needed(piece, parameters) for piece in pieces)
    if not _LABEL.fullmatch(text):
        names = ", ".join(piece.name for piece in pieces if isinstance(piece, Placeholder))
        raise ToolValidationError(f"{names}: a part of a host name has letters, digits and hyphens only")
    return text


def _path(path: str, found: list[Placeholder]) -> FillText:
    parts: list[str | FillText] = []
    for segment in path.split("/")[1:]:
        pieces = _unmark(segment, found)
        if all(isinstance(piece, str) for piece in pieces):
            literal = "/" + _literal("".join(cast("tuple[str, ...]", pieces)), _PATH_SAFE)
            if parts and isinstance(parts[-1], str):
                parts[-1] += literal
            else:
                parts.append(literal)
        else:
            parts.append(_segment(pieces))
    if len(parts) == 1 and isinstance(parts[0], str):
        fixed = parts[0]
        return lambda parameters: fixed
    return lambda parameters: "".join(part if isinstance(part, str) else part(parameters) for part in parts)


def _segment(pieces: TemplateParts) -> FillText:
    pieces = tuple(_literal(piece, _PATH_SAFE) if isinstance(piece, str) else piece for piece in pieces)
    if len(pieces) == 1 and isinstance(only := pieces[0], Placeholder):
        return lambda parameters: "/" + encode_path_segment(_needed(only, parameters), only.name)

    def fill(parameters: Mapping[str, Any]) -> str:
        text = "".join(
            piece if isinstance(piece, str) else encode_path_segment(_needed(piece, parameters), piece.name)
            for piece in pieces
        )
        # Harmless values can be harmful together: `.` before a hole, and `.` in it.
        check_path_segment(text, ", ".join(piece.name for piece in pieces if isinstance(piece, Placeholder)))
        return "/" + text

    return fill


def _needed(hole: Placeholder, parameters: Mapping[str, Any]) -> str:
    value = hole.get_value(parameters)
    if value is ABSENT or value is None:
        raise ToolValidationError(f"{hole.name}: required, but missing: it is a part of the URL")
    if isinstance(value, list | tuple):
        return ",".join(argument_text(item) for item in cast("list[object]", value))
    return argument_text(value)


def _entry(text: str, found: list[Placeholder]) -> QueryEntry:
    """A `name=value` of the URL itself, where literal text is encoded already."""
    name, _, value = text.partition("=")
    if _MARK in name:
        raise ValueError("no parameter can be the name of a query parameter")
    if _MARK not in value:
        return _literal(text, _QUERY_SAFE)
    # Decoded, because it is encoded as a whole afterwards.
    pieces = (unquote(piece) if isinstance(piece, str) else piece for piece in _unmark(value, found))
    return _literal(name, _QUERY_SAFE), compile_value(tuple(pieces))


def _entries(query: Mapping[str, Any]) -> Iterable[QueryEntry]:
    for name, value in query.items():
        if any(iter_placeholders(value)):
            yield _quoted(name), compile_data(value)
        else:
            yield from encode_query_parameter(name, value)


def _literal(text: str, safe: str) -> str:
    """Text of a template, with what a URL cannot hold encoded and what is encoded already left as it is."""
    return quote(_LOOSE_PERCENT.sub("%25", text), safe=safe)
