"""Compiles a REST tool into a function from arguments to a request, and builds its input schema. Sends nothing.

`provider` uses it. Templates and URLs are in `templates`; this module adds headers and bodies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape as escape_xml

from multidict import CIMultiDict

from toolspace.core import json_text
from toolspace.core.http_messages import FRAMING_HEADERS, SAFE_METHODS, is_header_name, is_method
from toolspace.core.secret_masking import is_secret_name, register_secrets
from toolspace.errors import ToolDefinitionError, ToolValidationError
from toolspace.providers.rest.client import BuildRequest, HttpRequest
from toolspace.providers.rest.templates import (
    ABSENT,
    Fill,
    Placeholder,
    TemplateParts,
    UrlTemplate,
    argument_text,
    compile_data,
    compile_text,
    encode_query_parameter,
    iter_placeholders,
    parse_template,
)

if TYPE_CHECKING:
    from toolspace.providers.rest.provider import RestSpec

EncodeBody = Callable[[Mapping[str, Any], Mapping[str, Any] | None], bytes | None]
"""Encodes the body for all arguments and those that no template uses. None means that there is no body."""

_QUERY_METHODS = frozenset((*SAFE_METHODS, "DELETE"))
"""Methods that send arguments without a placeholder in the query."""
_INVALID_HEADER_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_DEFAULT_HEADERS = (("Accept", "application/json, */*;q=0.8"),)
_FORM_TYPE = "application/x-www-form-urlencoded"
_XML_QUOTES = {'"': "&quot;", "'": "&apos;"}
_ESCAPED_CHARACTER = re.compile(r"\\.", re.DOTALL)
_SECRET_REQUEST_NAME = re.compile(r"key|auth|token|secret|appid|signature|^sig$", re.IGNORECASE)


def compile_request(spec: RestSpec) -> BuildRequest:
    """Compiles the templates of one tool. Raises `ToolDefinitionError` that names the tool and the field."""
    method = spec.method.upper()
    with _field_errors(spec, "method"):
        if not is_method(method):
            raise ValueError(f"{spec.method[:40]!r} cannot be sent; use GET, POST, PUT, PATCH or DELETE")
    with _field_errors(spec, "query"):
        list(iter_placeholders(spec.query))
    with _field_errors(spec, "url"):
        url_template = UrlTemplate(spec.url, spec.query)
    with _field_errors(spec, "headers"):
        fixed_headers, header_templates = _compile_headers(spec.headers)
    register_request_secrets(spec.url, spec.headers, spec.query)
    if url_template.authorization is not None:
        fixed_headers.setdefault("Authorization", url_template.authorization)
    with _field_errors(spec, "body"):
        encode_body, content_type = _compile_body(spec.body, fixed_headers.get("Content-Type"))
    headers_with_body = fixed_headers.copy()
    if content_type is not None:
        headers_with_body.setdefault("Content-Type", content_type)

    placeholders = [placeholder for placeholder, _ in _list_placeholders(spec)]
    used_names = frozenset(str(placeholder.path[0]) for placeholder in placeholders if placeholder.path)
    uses_all = any(not placeholder.path for placeholder in placeholders)
    rest_in_query = method in _QUERY_METHODS
    has_no_body = rest_in_query and spec.body is None

    def build(parameters: dict[str, Any]) -> HttpRequest:
        unused_parameters = None
        if not uses_all and not used_names.issuperset(parameters):
            unused_parameters = {name: value for name, value in parameters.items() if name not in used_names}
            if rest_in_query:
                _reject_fixed(unused_parameters, url_template.fixed_query_names)
        body = None if has_no_body else encode_body(parameters, None if rest_in_query else unused_parameters)
        headers = fixed_headers if body is None else headers_with_body
        if header_templates:
            headers = headers.copy()
            for name, fill in header_templates:
                value = fill(parameters)
                if value is not ABSENT:
                    headers[name] = _check_header_value(name, value)
        url = url_template.build_url(parameters, unused_parameters if rest_in_query else None)
        return HttpRequest(method, url, headers, body)

    return build


def build_input_schema(spec: RestSpec) -> Mapping[str, Any]:
    """The tool's own schema, or one built from the parameters that its templates name."""
    if spec.parameters_schema is not None:
        return spec.parameters_schema
    required = UrlTemplate(spec.url, spec.query).required_parameters
    properties: dict[str, Any] = {}
    takes_any = False
    for placeholder, keeps_type in _list_placeholders(spec):
        takes_any = takes_any or not placeholder.path
        _add_property(properties, placeholder, keeps_type=keeps_type)
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": takes_any}
    if required:
        schema["required"] = sorted(required)
    return schema


def register_request_secrets(url: str, headers: Mapping[str, str], query: Mapping[str, Any] | None = None) -> None:
    """Registers the secrets of a configured request for masking, in case the service sends them back.

    Requests name secrets in more ways than settings do: `X-Key`, `appid`. Texts with placeholders are left out.
    """
    register_secrets(_request_secrets(url, {**headers, **(query or {})}))


def _request_secrets(url: str, values: Mapping[str, Any]) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        if parts.password:
            yield unquote(parts.password)
        pairs = parse_qsl(parts.query)
    except ValueError:
        pairs = []
    for name, value in (*values.items(), *pairs):
        is_secret = is_secret_name(name) or _SECRET_REQUEST_NAME.search(name) is not None
        if is_secret and isinstance(value, str) and not any(iter_placeholders(value)):
            yield value
            yield value.rpartition(" ")[2]  # Without `Bearer`.


def _list_placeholders(spec: RestSpec) -> Iterable[tuple[Placeholder, bool]]:
    """Every placeholder, and whether its argument keeps its JSON type."""
    for text in (spec.url, *spec.headers.values()):
        yield from ((placeholder, False) for placeholder, _ in iter_placeholders(text))
    yield from iter_placeholders(spec.query)
    # In a body that is text, JSON values of any type may stand outside its quotes.
    is_text = isinstance(spec.body, str)
    yield from ((placeholder, is_text or is_whole) for placeholder, is_whole in iter_placeholders(spec.body))


def _add_property(properties: dict[str, Any], placeholder: Placeholder, *, keeps_type: bool) -> None:
    """Adds the schema of one placeholder: an object for each step of its path, and the value at the end."""
    last = len(placeholder.path) - 1
    for index, step in enumerate(placeholder.path):
        if isinstance(step, int):
            return
        schema = properties.setdefault(step, {})
        if index == last:
            if keeps_type:
                schema.pop("type", None)
            elif not schema:
                schema["type"] = "string"
        elif isinstance(placeholder.path[index + 1], int):
            properties[step] = {"type": "array"}
        else:
            schema["type"] = "object"
            properties = cast("dict[str, Any]", schema.setdefault("properties", {}))


def _compile_headers(headers: Mapping[str, str]) -> tuple[CIMultiDict[str], list[tuple[str, Fill]]]:
    """The headers without placeholders, and the templates of the others. Errors omit values: they may be secrets."""
    fixed_headers = CIMultiDict(_DEFAULT_HEADERS)
    templates: list[tuple[str, Fill]] = []
    for name, text in headers.items():
        if not is_header_name(name):
            raise ValueError(f"{name[:80]!r} is not a header name")
        if name.lower() in FRAMING_HEADERS:
            raise ValueError(f"{name} is set by the client; leave it out")
        parts = parse_template(text)
        if any(isinstance(part, Placeholder) for part in parts):
            if name.lower() in ("host", "content-type"):
                raise ValueError(f"no parameter can stand in {name}: it decides how the request is read")
            templates.append((name, compile_text(parts)))
        elif _INVALID_HEADER_VALUE.search(text):
            raise ValueError(f"the value of {name} contains a line break or another control character")
        else:
            fixed_headers[name] = text.strip()
    return fixed_headers, templates


def _check_header_value(name: str, value: str) -> str:
    if _INVALID_HEADER_VALUE.search(value):
        raise ToolValidationError(f"the header {name} would contain a line break or another control character")
    return value


def _compile_body(template: object, content_type: str | None) -> tuple[EncodeBody, str | None]:
    """The function that encodes the body, and the content type to set if the configuration has none."""
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if isinstance(template, str):
        parts = parse_template(template)
        if not (len(parts) == 1 and isinstance(parts[0], Placeholder)):
            return _compile_text_body(parts, media_type)
    fill = compile_data(template) if template is not None else None
    fixed_names = frozenset(cast("Mapping[str, Any]", template)) if isinstance(template, Mapping) else None
    is_form = media_type == _FORM_TYPE
    # An argument that is the whole body of a text type is sent unchanged, not as a JSON string.
    is_text_type = bool(media_type) and not _is_json(media_type)

    def encode(parameters: Mapping[str, Any], unused_parameters: Mapping[str, Any] | None) -> bytes | None:
        value: Any = ABSENT if fill is None else fill(parameters)
        if unused_parameters:
            if fixed_names is not None:
                _reject_fixed(unused_parameters, fixed_names)
                value = {**value, **unused_parameters}
            elif fill is None:
                value = unused_parameters
            else:
                _reject_unused(unused_parameters)
        if value is ABSENT:
            return None
        if is_form and isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value).items()
            return "&".join(pair for member in members for pair in encode_query_parameter(*member)).encode()
        if is_text_type and isinstance(value, str):
            return value.encode("utf-8", "replace")
        return json_text.encode_bytes(value)

    return encode, None if content_type else "application/json"


def _compile_text_body(parts: TemplateParts, media_type: str) -> tuple[EncodeBody, str | None]:
    looks_like_json = bool(parts) and isinstance(parts[0], str) and parts[0].lstrip()[:1] in ("{", "[")
    default_type = "text/plain; charset=utf-8"
    if _is_json(media_type) or (not media_type and looks_like_json):
        fill, default_type = _compile_json_text(parts), "application/json"
    elif media_type == _FORM_TYPE:
        fill = compile_text(parts, partial(quote, safe="", errors="replace"))
    elif media_type.endswith(("/xml", "+xml")):
        fill = compile_text(parts, partial(escape_xml, entities=_XML_QUOTES))
    else:
        fill = compile_text(parts)

    def encode(parameters: Mapping[str, Any], unused_parameters: Mapping[str, Any] | None) -> bytes:
        if unused_parameters:
            _reject_unused(unused_parameters)
        text = fill(parameters)
        return b"" if text is ABSENT else text.encode("utf-8", "replace")

    return encode, None if media_type else default_type


def _compile_json_text(parts: TemplateParts) -> Fill:
    """JSON written as text. A placeholder inside quotes is a part of that string; one outside is a JSON value."""
    fills: list[Fill] = []
    in_string = False
    for part in parts:
        if isinstance(part, str):
            fills.append(compile_text((part,)))
            in_string ^= _ESCAPED_CHARACTER.sub("", part).count('"') % 2 == 1
        else:
            fills.append(partial(_fill_json, part, in_string))
    return lambda parameters: "".join(fill(parameters) for fill in fills)


def _fill_json(placeholder: Placeholder, in_string: bool, parameters: Mapping[str, Any]) -> str:
    value = placeholder.get_value(parameters)
    if in_string:
        return json_text.encode(argument_text(value))[1:-1]
    return "null" if value is ABSENT else json_text.encode(value)


def _reject_fixed(parameters: Mapping[str, Any], fixed_names: frozenset[str]) -> None:
    """Raises if an argument sets what the configuration sets: a secret, or a filter that separates users."""
    if not fixed_names.isdisjoint(parameters):
        names = ", ".join(sorted(fixed_names.intersection(parameters)))
        raise ToolValidationError(f"{names}: set by the tool's configuration; leave it out")


def _reject_unused(parameters: Mapping[str, Any]) -> None:
    """Raises: an argument without effect would mislead the caller."""
    raise ToolValidationError(f"{', '.join(parameters)}: the tool's body has no place for it; leave it out")


def _is_json(media_type: str) -> bool:
    return media_type.endswith(("/json", "+json"))


@contextmanager
def _field_errors(spec: RestSpec, field: str) -> Generator[None]:
    """Turns a `ValueError` into an error that names the tool and the field."""
    try:
        yield
    except ValueError as error:
        raise ToolDefinitionError(f"REST tool {spec.name!r}: {field}: {error}") from None
