"""The data tools: parse and write JSON, encode and decode base64."""

from __future__ import annotations

import base64
import json
import math
import re
from typing import Any, NoReturn

from toolspace.core.tool import Annotations, tool
from toolspace.errors import ToolValidationError

_PURE = Annotations(read_only=True, idempotent=True, open_world=False)
_NON_BASE64_CHARACTER = re.compile(r"[^A-Za-z0-9+/]")
_SURROGATE = re.compile("[\ud800-\udfff]")


@tool(category="data", annotations=_PURE)
def json_parse(text: str) -> dict[str, Any]:
    """Parses JSON text.

    Args:
        text: The JSON text.
    """
    try:
        data = json.loads(text.removeprefix("\ufeff"), parse_constant=_reject_constant, parse_float=_parse_finite)
    except json.JSONDecodeError as error:
        excerpt = repr(error.doc[error.pos : error.pos + 20]) if error.pos < len(error.doc) else "the end"
        raise ToolValidationError(
            f"text: not JSON: {error.msg} in line {error.lineno}, column {error.colno}, at {excerpt}"
        ) from None
    except RecursionError:
        raise ToolValidationError("text: nested too deeply to be parsed") from None
    except ValueError as error:
        raise ToolValidationError(f"text: not JSON: {error}") from None
    return {"data": data}


@tool(category="data", annotations=_PURE)
def json_stringify(data: Any, pretty: bool = False) -> dict[str, Any]:
    """Writes data as JSON text.

    Args:
        data: Any JSON value.
        pretty: Whether to indent it on several lines.
    """
    indent, separators = (2, (",", ": ")) if pretty else (None, (",", ":"))
    try:
        text = json.dumps(data, ensure_ascii=False, indent=indent, separators=separators, allow_nan=False)
    except RecursionError:
        raise ToolValidationError("data: nested too deeply to be written as JSON") from None
    except (ValueError, TypeError) as error:
        raise ToolValidationError(f"data: cannot be written as JSON: {error}") from None
    # JSON may escape half of a surrogate pair, but text cannot contain it.
    return {"text": _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)}


@tool(category="data", annotations=_PURE)
def base64_encode(text: str) -> dict[str, Any]:
    """Encodes text as base64 of its UTF-8 bytes.

    Args:
        text: The text to encode.
    """
    try:
        return {"encoded": base64.b64encode(text.encode()).decode("ascii")}
    except UnicodeEncodeError as error:
        raise ToolValidationError(
            f"text: character {error.start} is half of a surrogate pair, which UTF-8 cannot encode; leave it out"
        ) from None


@tool(category="data", annotations=_PURE)
def base64_decode(encoded: str) -> dict[str, Any]:
    """Decodes base64 of UTF-8 text.

    Args:
        encoded: Base64, standard or URL-safe, with or without padding.
    """
    data = decode_base64(encoded, "encoded")
    try:
        return {"decoded": data.decode()}
    except UnicodeDecodeError as error:
        raise ToolValidationError(
            f"encoded: it contains {len(data)} bytes that are not UTF-8 text (byte {error.start} is "
            f"0x{data[error.start]:02x}); to save them as a file, use write_file with encoding base64"
        ) from None


data_tools = (json_parse, json_stringify, base64_encode, base64_decode)


def decode_base64(text: str, parameter: str) -> bytes:
    """Decodes base64 of either alphabet, padded or not. Raises `ToolValidationError` that names the parameter."""
    standard = "".join(text.split()).replace("-", "+").replace("_", "/")
    unpadded_text = standard.rstrip("=")
    if match := _NON_BASE64_CHARACTER.search(unpadded_text):
        raise ToolValidationError(f"{parameter}: not base64: {match[0]!r} is not one of its characters")
    if len(unpadded_text) % 4 == 1 or len(standard) - len(unpadded_text) > 2:
        raise ToolValidationError(
            f"{parameter}: not base64: {len(standard)} characters do not encode a whole number of bytes"
        )
    return base64.b64decode(unpadded_text + "=" * (-len(unpadded_text) % 4))


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value; use null")


def _parse_finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number
