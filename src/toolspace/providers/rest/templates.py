"""Templates with `${parameters.x}`: parsed once, filled with the arguments of every call. Sends nothing.

`${parameters.a.b}` is a member of an object, `${parameters.a[0]}` an item of a list, `${parameters}` all arguments.
`${parameters.a:-text}` has a default for a missing argument. Null counts as missing, except in JSON data.

No argument can send a request elsewhere. Scheme, port, user and password of a URL come from the configuration only. A
placeholder in the host fills at most one label, before two literal ones: `https://${parameters.tenant}.example.com`. A
placeholder in the path stays in its segment. `request_builder` uses this module; the OpenAPI provider uses its encoding
of path segments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast
from urllib.parse import quote, unquote

from yarl import URL

from toolspace.core import json_text
from toolspace.core.http_messages import basic_authorization
from toolspace.errors import ToolValidationError

_PLACEHOLDER = re.compile(r"\$\{\s*parameters\b([^{}]*)\}")
_STEP = re.compile(r"\.([^.\[\]\s]+)|\[(\d{1,9})\]")
_MARK = "\0"
"""Encloses the number of a placeholder while a URL is split. No URL contains it; a placeholder may contain a slash."""
_LOOSE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_PATH_SAFE = "%!$&'()*+,;=:@~-._"
_QUERY_SAFE = _PATH_SAFE + "/?[]"
_NEEDS_NO_ENCODING = re.compile(r"[A-Za-z0-9_~-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_HOST_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MAX_DECODINGS = 4


class _Absent:
    """The value of a placeholder whose argument is missing."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()


class Placeholder(NamedTuple):
    """One `${parameters…}`: the path to the argument, and its default."""

    path: tuple[str | int, ...]
    default: str | None = None

    @property
    def name(self) -> str:
        """`a.b[0]`, for messages."""
        text = ""
        for step in self.path:
            text += f"[{step}]" if isinstance(step, int) else (f".{step}" if text else step)
        return text or "parameters"

    def get_value(self, parameters: Mapping[str, Any]) -> Any:
        """The argument, its default, or `ABSENT`. Null is a value here."""
        value: Any = parameters
        for step in self.path:
            if isinstance(value, Mapping):
                value = cast("Mapping[str, Any]", value).get(str(step), ABSENT)
            elif isinstance(value, list) and _is_index(step):
                items = cast("list[Any]", value)
                value = items[int(step)] if int(step) < len(items) else ABSENT
            else:
                value = ABSENT
            if value is ABSENT:
                return ABSENT if self.default is None else self.default
        return value


TemplateParts = tuple[str | Placeholder, ...]
Escape = Callable[[str], str]
Fill = Callable[[Mapping[str, Any]], Any]
"""Returns the value of a template for some arguments, or `ABSENT`."""
FillText = Callable[[Mapping[str, Any]], str]
QueryEntry = str | tuple[str, Fill]
"""An encoded part of the query, or an encoded name and the template of its value."""


def parse_template(text: str) -> TemplateParts:
    """Splits a text into literal parts and placeholders. Raises `ValueError` for an invalid placeholder."""
    parts: list[str | Placeholder] = []
    position = 0
    for match in _PLACEHOLDER.finditer(text):
        if match.start() > position:
            parts.append(text[position : match.start()])
        parts.append(_parse_placeholder(match))
        position = match.end()
    if position < len(text):
        parts.append(text[position:])
    return tuple(parts)


def iter_placeholders(template: object) -> Iterator[tuple[Placeholder, bool]]:
    """Every placeholder of a text or of data, and whether it is the whole of its text."""
    if isinstance(template, str):
        parts = parse_template(template)
        yield from ((part, len(parts) == 1) for part in parts if isinstance(part, Placeholder))
    elif isinstance(template, Mapping):
        for value in cast("Mapping[str, object]", template).values():
            yield from iter_placeholders(value)
    elif isinstance(template, list | tuple):
        for value in cast("Sequence[object]", template):
            yield from iter_placeholders(value)


def argument_text(value: object) -> str:
    """An argument inside a text: a string unchanged, anything else as compact JSON, null as nothing."""
    if isinstance(value, str):
        return value
    return "" if value is None or value is ABSENT else json_text.encode(value)


def compile_data(template: object) -> Fill:
    """Compiles data that contains templates. A text that is one placeholder keeps the argument's type.

    Members and items whose value is `ABSENT` are left out.
    """
    if isinstance(template, str):
        return compile_value(parse_template(template))
    if not any(iter_placeholders(template)):
        return lambda parameters: template
    if isinstance(template, Mapping):
        members = [(key, compile_data(value)) for key, value in cast("Mapping[str, object]", template).items()]

        def fill_mapping(parameters: Mapping[str, Any]) -> Any:
            return {key: value for key, fill in members if (value := fill(parameters)) is not ABSENT}

        return fill_mapping
    items = [compile_data(value) for value in cast("Sequence[object]", template)]

    def fill_list(parameters: Mapping[str, Any]) -> Any:
        return [value for fill in items if (value := fill(parameters)) is not ABSENT]

    return fill_list


def compile_value(parts: TemplateParts) -> Fill:
    """Compiles a text; a single placeholder gives the argument itself."""
    return parts[0].get_value if len(parts) == 1 and isinstance(parts[0], Placeholder) else compile_text(parts)


def compile_text(parts: TemplateParts, escape: Escape | None = None) -> Fill:
    """Compiles a text; every argument is escaped. The value is `ABSENT` if all its placeholders are."""
    if not any(isinstance(part, Placeholder) for part in parts):
        text = "".join(cast("tuple[str, ...]", parts))
        return lambda parameters: text

    def fill(parameters: Mapping[str, Any]) -> Any:
        texts: list[str] = []
        has_argument = False
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            value = part.get_value(parameters)
            if value is not ABSENT and value is not None:
                has_argument = True
                text = argument_text(value)
                texts.append(text if escape is None else escape(text))
        return "".join(texts) if has_argument else ABSENT

    return fill


def _parse_placeholder(match: re.Match[str]) -> Placeholder:
    steps, has_default, default = match[1].partition(":-")
    steps = steps.strip()
    path: list[str | int] = []
    position = 0
    while position < len(steps):
        step = _STEP.match(steps, position)
        if step is None:
            raise ValueError(f"{match[0]} names no parameter; write ${{parameters.name}}, …name.inner}} or …name[0]}}")
        path.append(step[1] if step[1] is not None else int(step[2]))
        position = step.end()
    if path and isinstance(path[0], int):
        raise ValueError(f"{match[0]}: parameters have names; write ${{parameters.name}}")
    return Placeholder(tuple(path), default if has_default else None)


def _is_index(step: str | int) -> bool:
    return isinstance(step, int) or (step.isascii() and step.isdigit() and len(step) < 10)


class UrlTemplate:
    """A parsed URL template with its query."""

    __slots__ = ("_fill_origin", "_fill_path", "_query", "authorization", "fixed_query_names", "required_parameters")

    def __init__(self, url: str, query: Mapping[str, Any]) -> None:
        """Raises `ValueError` if a placeholder stands where it must not, or the URL is invalid."""
        marked_url, placeholders = _mark_placeholders(url.strip())
        scheme, _, rest = marked_url.partition("://")
        if scheme.lower() not in ("http", "https"):
            raise ValueError("it must start with http:// or https://, without a parameter")
        rest, _, fragment = rest.partition("#")
        if _MARK in fragment:
            raise ValueError("no parameter can stand after #: a fragment is never sent")
        rest, _, url_query = rest.partition("?")
        authority, slash, path = rest.partition("/")
        authority, self.authorization = _split_authorization(authority)
        self._fill_origin = _compile_origin(scheme.lower(), authority, placeholders)
        self._fill_path = _compile_path(slash + path or "/", placeholders)
        self.required_parameters = frozenset(_required_names(authority + slash + path, placeholders))
        """The parameters without which there is no URL."""
        self._query: list[QueryEntry] = [
            *(_parse_query_entry(text, placeholders) for text in url_query.split("&") if text),
            *_compile_query(query),
        ]
        encoded_names = (entry if isinstance(entry, str) else entry[0] for entry in self._query)
        self.fixed_query_names = frozenset((*query, *(unquote(text.partition("=")[0]) for text in encoded_names)))
        """The query names that the configuration sets."""

    def build_url(self, parameters: Mapping[str, Any], extra_query: Mapping[str, Any] | None = None) -> URL:
        """The URL for some arguments, with `extra_query` added to its query. Raises `ToolValidationError`."""
        text = self._fill_origin(parameters) + self._fill_path(parameters)
        pairs: list[str] = []
        for entry in self._query:
            if isinstance(entry, str):
                pairs.append(entry)
            else:
                pairs += _encode_pairs(entry[0], entry[1](parameters))
        for name, value in extra_query.items() if extra_query else ():
            pairs += encode_query_parameter(name, value)
        return URL(f"{text}?{'&'.join(pairs)}" if pairs else text, encoded=True)


def encode_path_segment(text: str, name: str) -> str:
    """Encodes a value as a part of one path segment. Raises `ToolValidationError` that names the parameter.

    The value cannot leave its segment, not even on servers that decode twice, or take `\\` for `/` and `..;` for `..`.
    """
    if _NEEDS_NO_ENCODING.fullmatch(text):
        return text
    if not text:
        raise ToolValidationError(f"{name}: empty, but it is a part of the path; give a value")
    if _CONTROL.search(text):
        raise ToolValidationError(f"{name}: a part of the path cannot contain control characters")
    check_path_segment(text, name)
    return quote(text, safe="")


def check_path_segment(text: str, name: str) -> None:
    """Raises `ToolValidationError` if a server could take a value or a segment for `.` or `..`."""
    for _ in range(_MAX_DECODINGS):
        if any(part.partition(";")[0].strip() in (".", "..") for part in text.replace("\\", "/").split("/")):
            raise ToolValidationError(f'{name}: "." and ".." cannot be parts of the path')
        if (decoded_text := unquote(text)) == text:
            return
        text = decoded_text
    raise ToolValidationError(f"{name}: percent-encoded {_MAX_DECODINGS} times over; give the plain value")


def encode_query_parameter(name: str, value: object) -> list[str]:
    """`name=value` texts: none for a missing or null value, one per item of a list, an object as JSON."""
    return _encode_pairs(_encode_query_text(name), value)


def _encode_pairs(encoded_name: str, value: object) -> list[str]:
    if value is ABSENT or value is None:
        return []
    items = cast("list[object]", value) if isinstance(value, list | tuple) else [value]
    return [f"{encoded_name}={_encode_query_text(argument_text(item))}" for item in items if item is not None]


def _encode_query_text(text: str) -> str:
    if _NEEDS_NO_ENCODING.fullmatch(text):
        return text
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise ToolValidationError("a text for the query is not valid Unicode") from None


def _mark_placeholders(url: str) -> tuple[str, list[Placeholder]]:
    """The URL with a numbered mark for each placeholder, and the placeholders."""
    if _CONTROL.search(url):
        raise ValueError("it contains a line break or another control character")
    placeholders: list[Placeholder] = []
    text = ""
    for part in parse_template(url):
        if isinstance(part, Placeholder):
            text += f"{_MARK}{len(placeholders)}{_MARK}"
            placeholders.append(part)
        else:
            text += part
    return text, placeholders


def _restore_placeholders(text: str, placeholders: list[Placeholder]) -> TemplateParts:
    parts = text.split(_MARK)
    return tuple(placeholders[int(part)] if index % 2 else part for index, part in enumerate(parts) if part)


def _required_names(text: str, placeholders: list[Placeholder]) -> Iterable[str]:
    for part in _restore_placeholders(text, placeholders):
        if isinstance(part, Placeholder) and part.path and part.default is None:
            yield str(part.path[0])


def _split_authorization(authority: str) -> tuple[str, str | None]:
    """Host and port, and the `Authorization` header for a user and password before them."""
    user, separator, host = authority.rpartition("@")
    if not separator:
        return authority, None
    if _MARK in user:
        raise ValueError("no parameter can stand in the user name or password; use an Authorization header")
    name, _, password = user.partition(":")
    return host, basic_authorization(f"{unquote(name)}:{unquote(password)}")


def _compile_origin(scheme: str, authority: str, placeholders: list[Placeholder]) -> FillText:
    example = re.sub(f"{_MARK}[0-9]+{_MARK}", "x", authority)
    try:
        origin = URL(f"{scheme}://{example}").origin()
    except ValueError as error:
        raise ValueError(f"it has no valid host: {error}") from None
    if _MARK not in authority:
        origin_text = str(origin)
        return lambda parameters: origin_text
    host, colon, port = authority.partition(":")
    label_texts = host.split(".")
    if len(label_texts) < 3 or any(_MARK in label for label in label_texts[-2:]):
        raise ValueError(
            "a parameter in the host needs two fixed labels behind it, as in https://${parameters.tenant}.example.com"
        )
    # Fixed labels come from the example, which yarl has encoded as ASCII.
    ascii_labels = cast("str", origin.raw_host).split(".")
    labels = [
        _restore_placeholders(text, placeholders) if _MARK in text else (ascii_label,)
        for text, ascii_label in zip(label_texts, ascii_labels, strict=True)
    ]

    def fill(parameters: Mapping[str, Any]) -> str:
        return f"{scheme}://{'.'.join(_fill_label(parts, parameters) for parts in labels)}{colon}{port}"

    return fill


def _fill_label(parts: TemplateParts, parameters: Mapping[str, Any]) -> str:
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    text = "".join(part if isinstance(part, str) else _get_required_text(part, parameters) for part in parts)
    if not _HOST_LABEL.fullmatch(text):
        names = ", ".join(part.name for part in parts if isinstance(part, Placeholder))
        raise ToolValidationError(f"{names}: a part of a host name can contain only letters, digits and hyphens")
    return text


def _compile_path(path: str, placeholders: list[Placeholder]) -> FillText:
    if _MARK not in path:
        literal_path = _encode_literal(path, _PATH_SAFE + "/")
        return lambda parameters: literal_path
    segments = [_compile_segment(_restore_placeholders(segment, placeholders)) for segment in path.split("/")[1:]]
    return lambda parameters: "".join(fill(parameters) for fill in segments)


def _compile_segment(parts: TemplateParts) -> FillText:
    parts = tuple(_encode_literal(part, _PATH_SAFE) if isinstance(part, str) else part for part in parts)
    names = ", ".join(part.name for part in parts if isinstance(part, Placeholder))

    def fill(parameters: Mapping[str, Any]) -> str:
        text = "".join(
            part if isinstance(part, str) else encode_path_segment(_get_required_text(part, parameters), part.name)
            for part in parts
        )
        if len(parts) > 1:  # Two harmless parts can be harmful together: `.` in the template and in the argument.
            check_path_segment(text, names)
        return "/" + text

    return fill


def _get_required_text(placeholder: Placeholder, parameters: Mapping[str, Any]) -> str:
    value = placeholder.get_value(parameters)
    if value is ABSENT or value is None:
        raise ToolValidationError(f"{placeholder.name}: required, but missing: it is a part of the URL")
    if isinstance(value, list | tuple):
        return ",".join(argument_text(item) for item in cast("list[object]", value))
    return argument_text(value)


def _parse_query_entry(text: str, placeholders: list[Placeholder]) -> QueryEntry:
    """A `name=value` of the URL itself, whose literal text is already encoded."""
    name, _, value = text.partition("=")
    if _MARK in name:
        raise ValueError("no parameter can be the name of a query parameter")
    if _MARK not in value:
        return _encode_literal(text, _QUERY_SAFE)
    # Decoded here, because the filled value is encoded as a whole.
    parts = (unquote(part) if isinstance(part, str) else part for part in _restore_placeholders(value, placeholders))
    return _encode_literal(name, _QUERY_SAFE), compile_value(tuple(parts))


def _compile_query(query: Mapping[str, Any]) -> Iterable[QueryEntry]:
    for name, value in query.items():
        if any(iter_placeholders(value)):
            yield _encode_query_text(name), compile_data(value)
        else:
            yield from encode_query_parameter(name, value)


def _encode_literal(text: str, safe: str) -> str:
    """Encodes what a URL cannot contain, and keeps what is already encoded."""
    return quote(_LOOSE_PERCENT.sub("%25", text), safe=safe)
