"""Encodes and decodes JSON: compact text of any Python value, canonical text for keys, arguments of calls.

Everything that writes or reads JSON uses it. It never fails on a value that a tool returns. The functions `quote…` and
`single_line` escape texts of other people or programs for a line that a model or an operator reads: such a text can
neither end the line nor be mistaken for another part of it.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, cast

import msgspec

MAX_STORED_DEPTH = 200
"""How many levels stored data has at most: it becomes part of other data, and other programs read it."""
_MAX_INTEGER_BITS = 14_000
"""Python does not write longer integers in decimal, because that takes quadratic time."""
_CONTAINERS = (Mapping, list, tuple, msgspec.Struct)
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_MAX_NAME: Final = 200
"""Characters of a name in a line."""
_PLAIN_NAME: Final = re.compile(r"[\w.,'&@/+#-]+(?: [\w.,'&@/+#-]+)*")
_LINE_BREAKS: Final = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x7f\x85\u2028\u2029"}
"""Characters that end a line or move the cursor, and that JSON does not escape."""


def encode(value: object) -> str:
    """Returns compact JSON of anything that a tool may return."""
    return encode_bytes(value).decode()


def encode_bytes(value: object) -> bytes:
    try:
        return _encoder.encode(value)
    except Exception:
        # Rare values (integers beyond 64 bits, mixed keys, lone surrogates, cycles, objects that raise): slower, but
        # nothing is lost.
        return _encode_slowly(value).encode("utf-8", "replace")


def encode_for_storage(value: object) -> str:
    """Like `encode`, for data that is stored. Levels below `MAX_STORED_DEPTH` are cut."""
    try:
        text = _encoder.encode(value).decode()  # Not by `encode`: results per second (benchmarks/gateway_results.py).
    except Exception:
        text = encode(value)
    # Each level has two brackets, so most texts are too short to be too deep.
    if len(text) > 2 * MAX_STORED_DEPTH and text.count("[") + text.count("{") > MAX_STORED_DEPTH and is_too_deep(value):
        return encode(_cut_levels(value, MAX_STORED_DEPTH))
    return text


def is_too_deep(value: object, levels: int = MAX_STORED_DEPTH) -> bool:
    """Whether data has more levels than that; by default, too many to be stored whole."""
    containers = [value]
    for _ in range(levels):
        containers = [child for item in containers for child in _children(item) if isinstance(child, _CONTAINERS)]
        if not containers:
            return False
    return True


def encode_canonical(value: object) -> bytes:
    """Returns the same text for all equal values: keys are sorted."""
    try:
        return _canonical_encoder.encode(value)
    except Exception:
        return _encode_slowly(value).encode("utf-8", "surrogatepass")  # Two different texts must not become one key.


def encoded_size(value: object) -> int:
    """Returns how many bytes the JSON of a value has. Raises `ValueError` if the value contains itself."""
    try:
        return len(_encoder.encode(value))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception:
        return len(encode_bytes(value))


def decode(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises `ValueError` with the position of the error."""
    try:
        return _decoder.decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        if "out of range" not in str(error):
            raise ValueError(str(error)) from None
        # The standard library also reads integers beyond 64 bits, which some versions of msgspec do not.
        import json

        try:
            return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        except (ValueError, RecursionError):
            raise ValueError(str(error)) from None


def to_json_data(value: object) -> Any:
    """Returns the value as JSON data: dicts, lists, strings, numbers, booleans and None."""
    kind = type(value)
    if value is None or kind is bool or (kind is int and cast("int", value).bit_length() < 64):
        return value
    if kind is str:
        return valid_text(cast("str", value))
    return decode(encode_bytes(value))


def valid_text(text: str) -> str:
    """Returns a text that UTF-8 can encode: lone surrogates, as in undecodable file names, become `?`."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def storable_text(text: str) -> str:
    """Returns a text that every database can store: without lone surrogates and NUL."""
    return valid_text(text).replace("\0", "�")


def parse_arguments(arguments: Mapping[str, Any] | str | bytes | None) -> dict[str, Any]:
    """Returns the arguments of a call as a dict. Raises `ValueError` if they are no JSON object."""
    if arguments is None:
        return {}
    if isinstance(arguments, str | bytes | bytearray):
        if not arguments.strip():
            return {}
        value = decode(bytes(arguments) if isinstance(arguments, bytearray) else arguments)
    else:
        value = arguments
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a JSON object, got {describe(value)}")
    return dict(cast("Mapping[str, Any]", value))


def describe(value: object, limit: int = 60) -> str:
    """Returns the JSON of a value for a message, cut after `limit` characters."""
    text = encode(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def quote(value: object) -> str:
    """Returns data as JSON in one line, for every definition of a line end."""
    text = encode(value)
    return text if text.isascii() and "\x7f" not in text else text.translate(_LINE_BREAKS)


def quote_truncated(value: object, max_characters: int, hint: str = "") -> str:
    """Returns data as JSON in one line. A longer text is cut and says so; `hint` tells how to get the rest."""
    text = value if isinstance(value, str) else encode(value)
    if len(text) <= max_characters:
        return quote(value)
    notice = f"cut off after {max_characters} of {len(text)} characters{hint and '; '}{hint}"
    return quote(f"{text[:max_characters]}… ({notice})")


def quote_name(name: object) -> str:
    """Returns a name as it is if it consists of words, else in quotes, so that its end is visible."""
    text = name if isinstance(name, str) else encode(name)
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 2 * _MAX_NAME]).split())
    if len(text) > _MAX_NAME:
        text = f"{text[:_MAX_NAME]}…"
    return text if _PLAIN_NAME.fullmatch(text) else quote(text)


def single_line(text: str, max_characters: int | None = None) -> str:
    """Returns a text as it is if it is one line, else in quotes. A longer text is cut."""
    if max_characters is not None and len(text) > max_characters:
        text = f"{text[:max_characters]}…"
    return text if text.isprintable() else quote(text)


def _encode_hook(value: object) -> object:
    """Returns a value that msgspec can encode in place of one that it cannot."""
    if isinstance(value, str):
        return str.__str__(value)  # A subclass, which msgspec does not support.
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return dict(cast("Mapping[object, object]", value))
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, type):
        return str(value)
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json", by_alias=True)
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):
        return list(cast("Any", value))
    return str(value)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return cast("Mapping[Any, Any]", value).values()
    if isinstance(value, list | tuple):
        return cast("Iterable[Any]", value)
    if isinstance(value, msgspec.Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    return ()


def _cut_levels(value: Any, levels: int) -> Any:
    if isinstance(value, msgspec.Struct):
        value = _fields(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if not levels:
        return "…"
    if isinstance(value, Mapping):
        return {key: _cut_levels(child, levels - 1) for key, child in cast("Mapping[Any, Any]", value).items()}
    return [_cut_levels(child, levels - 1) for child in cast("list[Any]", value)]


def _encode_slowly(value: object) -> str:
    import json

    return json.dumps(_jsonable(value, frozenset()), ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _jsonable(value: object, ancestor_ids: frozenset[int]) -> object:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _MAX_INTEGER_BITS else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(cast("bytes", value)).decode()
    if id(value) in ancestor_ids or len(ancestor_ids) > 200:
        return "…"
    ancestor_ids = ancestor_ids | {id(value)}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {key if isinstance(key, str) else str(key): _jsonable(item, ancestor_ids) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item, ancestor_ids) for item in cast("list[object]", value)]
    if (fields := _fields(value)) is not None:
        return {name: _jsonable(item, ancestor_ids) for name, item in fields.items()}
    for convert in (partial(msgspec.to_builtins, enc_hook=_encode_hook, str_keys=True), _encode_hook):
        try:
            return _jsonable(convert(value), ancestor_ids)
        except Exception:  # Code of the value's class failed: its type has to do.
            continue
    return f"<{type(value).__name__}>"


def _fields(value: object) -> dict[str, object] | None:
    """Returns the fields of a struct or a dataclass, unconverted: they may lead back to it. None for other values."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        fields: dict[str, object] = {config.tag_field: config.tag} if config.tag_field else {}
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        values = {encoded_name: getattr(value, name, None) for encoded_name, name in names}
        return fields | {name: item for name, item in values.items() if item is not msgspec.UNSET}
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return {name: getattr(value, name, None) for name in cast("Any", value).__dataclass_fields__}
    return None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_encoder = msgspec.json.Encoder(enc_hook=_encode_hook)
_canonical_encoder = msgspec.json.Encoder(enc_hook=_encode_hook, order="deterministic")
_decoder = msgspec.json.Decoder()


class StreamedTextField:
    """Reads one text field of a JSON object that is still being written. Invalid JSON yields less text, no error.

    field = StreamedTextField("text")
    field.feed('{"text": "Hel')  # "Hel"
    field.feed('lo"}')  # "lo"
    """

    __slots__ = ("_depth", "_escape", "_high_surrogate", "_in_text", "_is_key", "_key", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._depth = 0
        self._in_text = False
        self._is_key = True
        self._key = ""
        self._escape: str | None = None
        """The escape sequence so far, without its backslash: `u12` is half of a code. None outside of one."""
        self._high_surrogate = ""
        """The first half of a character that is written as two escapes."""

    def feed(self, piece: str) -> str:
        """Adds a piece of the JSON. Returns the part of the field's text that it has."""
        texts: list[str] = []
        for character in piece:
            if not self._in_text:
                self._read_outside(character)
                continue
            text = self._read_inside(character)
            if text and self._depth == 1:
                if self._is_key:
                    self._key += text
                elif self._key == self._name:
                    texts.append(text)
        return "".join(texts)

    def _read_outside(self, character: str) -> None:
        if character == '"':
            self._in_text = True
            if self._depth == 1 and self._is_key:
                self._key = ""
        elif character in "{[":
            self._depth += 1
            self._is_key = character == "{"
        elif character in "}]":
            self._depth -= 1
            self._is_key = False
        elif character == ":":
            self._is_key = False
        elif character == "," and self._depth == 1:
            self._is_key = True

    def _read_inside(self, character: str) -> str:
        """Reads a character inside a string. Returns the text that it completes."""
        if self._escape is None:
            if character == "\\":
                self._escape = ""
                return ""
            if character == '"':
                self._in_text = False
                return ""
            return character
        if self._escape == "" and character != "u":
            self._escape = None
            return _ESCAPES.get(character, character)
        self._escape += character
        if len(self._escape) < 5:  # `u` and four digits.
            return ""
        digits, self._escape = self._escape[1:], None
        try:
            code = int(digits, 16)
        except ValueError:
            return ""
        if 0xD800 <= code < 0xDC00:
            self._high_surrogate = chr(code)
            return ""
        pair, self._high_surrogate = self._high_surrogate + chr(code), ""
        return pair.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
