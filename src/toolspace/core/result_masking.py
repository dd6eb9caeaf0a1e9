"""Masks secrets and personal data in results: e-mail addresses, payment cards, phone numbers and IBANs.

The included hooks use it, and the stage `mask_secrets` for the values of references to secrets. Each search takes time
in proportion to the text. Long texts are masked in pieces, so that a thread that does it leaves the event loop its
turns. `secret_masking` masks logs; it cuts long data, and this does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.result import Content, JsonPart, ResourcePart, TextPart, ToolResult
from toolspace.core.secret_masking import MASK, is_secret_name, mask_secrets
from toolspace.core.secret_values import StreamMasking, reference_secrets

MaskText = Callable[[str], str]

_PIECE_CHARACTERS = 64 * 1024
_PIECE_ENDS = re.compile(r'[\n,;{}\[\]<>"]')
"""Characters that are not inside anything that is masked."""
_MAX_DEPTH = 200
_SHORTEST_CARD = 10**12
_SHORTEST_SECRET_NUMBER = 1_000

_LOCAL_PART_BACKWARDS = re.compile(r"[\w.%+'-]{0,63}[\w+-]")
_AT_SIGN = re.compile(r"(?<=[\w+-])(?:@|%40)(?=[^\W_])")
_DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}[^\W\d_]{2,24}(?![^\W_])")
_SEPARATOR = r"[ .\u00a0\u2009\u2010\u2011\u2013-]"
_CARD = re.compile(rf"(?<![\w.,])(?:[2-6]\d{{12,18}}|[2-6]\d{{3}}(?:{_SEPARATOR}\d{{2,7}}){{2,4}})(?!\d)")
_IBAN_START = re.compile(r"(?<![^\W_])[A-Za-z]{2}\d{2}(?=[ -]?[A-Za-z0-9])")
_IBAN_LENGTHS = {
    country: length
    for length, countries in {
        15: "NO", 16: "BE BI", 18: "DK FI FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK",
        21: "CH CR HR LI LV", 22: "BG BH DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL",
        24: "AD CZ DZ ES MD PK RO SA SE SK TN VG", 25: "AO CV LY MZ PT ST", 26: "IR IS TR",
        27: "BF BJ CF CG CI CM FR GR IT MC MG ML MR NE SM SN TD TG",
        28: "AL AZ BY CY DO GT HU KM LB MA NI PL SV YE", 29: "BR EG PS QA UA",
        30: "JO KW MU", 31: "MT SC", 32: "LC", 33: "RU",
    }.items()
    for country in countries.split()
}  # fmt: skip
_PHONE = re.compile(
    r"(?<![\w.+/-])(?:"
    r"(?:\+|00)[ ]?[1-9](?:[ ./()\u00a0\u2011-]{0,3}\d){6,14}"  # International: +49 30 123456.
    r"|(?:1[ .-])?(?:\(\d{3}\)[ ]?|\d{3}[ .-])\d{3}[ .-]\d{4}"  # North American: (555) 123-4567.
    r"|\(?0[1-9]\d{0,4}\)?(?:[ ./-]{1,2}\d{2,8}){1,4}"  # National: 030 1234567, 06 12 34 56 78.
    r"|0[1-9]\d{8,10}"
    r")(?![\w/-])"
)
_DATE = re.compile(r"\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{4}[./-]\d{2}[./-]\d{2}")
_ASSIGNMENT = re.compile(
    r"(?i)((?:password|passwd|passphrase|secret|(?:api|access|private)[_-]?key|(?:auth|access|refresh)[_-]?token)"
    r"[\"']?\s{0,5}[:=]\s{0,5}[\"']?)[^\s\"',;&}]{4,500}"
)
_KEY_START = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----")
_KEY_END = re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY-----")
_MAX_KEY_CHARACTERS = 20_000


def mask_secrets_in_result(result: ToolResult) -> ToolResult:
    """Returns a copy without registered secrets, keys, tokens, and values under a name such as `password`."""
    return _mask_result(result, mask_secret_text, hides_named_values=True)


def mask_personal_data_in_result(result: ToolResult) -> ToolResult:
    """Returns a copy without e-mail addresses, payment cards, phone numbers and IBANs."""
    return _mask_result(result, mask_personal_text, hides_named_values=False)


def has_reference_secrets(result: ToolResult) -> bool:
    """Whether a result contains the value of a reference to a secret. Fast: it searches the text that models read."""
    is_in = reference_secrets.is_in
    return (
        is_in(result.text)
        or (not result.ok and is_in(result.error or ""))
        or bool(result.parts and is_in(json_text.encode((result.result, result.parts))))
        or bool(result.extras and is_in(json_text.encode(result.extras)))
    )


def mask_reference_secrets(result: ToolResult) -> ToolResult:
    """Returns a copy without the values of references to secrets. Raises `ValueError` for data with too many levels."""
    return _mask_result(result, reference_secrets.mask, hides_named_values=False, min_number=_SHORTEST_SECRET_NUMBER)


def mask_reference_secrets_in_data(value: Any) -> Any:
    """Returns JSON data without the values of references to secrets. Raises `ValueError` for too many levels."""
    if isinstance(value, str):
        return reference_secrets.mask(value)
    if not reference_secrets.is_in(json_text.encode(value)):
        return value
    return _DataMasking(reference_secrets.mask, False, _SHORTEST_SECRET_NUMBER).mask(json_text.to_json_data(value))


def create_stream_masking() -> StreamMasking:
    """Returns the masking for the stream of one call."""
    return StreamMasking(reference_secrets, mask_reference_secrets_in_data)


def mask_secret_text(text: str) -> str:
    return "".join(map(_mask_secret_piece, _split(_mask_private_keys(text))))  # A key has several lines.


def mask_personal_text(text: str) -> str:
    return "".join(map(_mask_personal_piece, _split(text)))


def _mask_private_keys(text: str) -> str:
    pieces: list[str] = []
    start = 0
    while (head := _KEY_START.search(text, start)) is not None:
        end = _KEY_END.search(text, head.end(), head.end() + _MAX_KEY_CHARACTERS)
        pieces += text[start : head.start()], MASK
        start = end.end() if end is not None else head.end() + _MAX_KEY_CHARACTERS
    return "".join((*pieces, text[start:])) if pieces else text


def _mask_secret_piece(text: str) -> str:
    return _ASSIGNMENT.sub(rf"\1{MASK}", mask_secrets(text))


def _mask_personal_piece(text: str) -> str:
    if any(map(str.isdigit, text)):
        text = _mask_cards(text)
        text = _mask_ibans(text)
        text = _PHONE.sub(lambda match: match[0] if _is_no_phone(match[0]) else "[phone]", text)
    return _mask_addresses(text)


def _split(text: str) -> Iterator[str]:
    """Yields the text in pieces, cut where nothing that is masked can be."""
    start = 0
    while len(text) - start > 2 * _PIECE_CHARACTERS:
        end = _PIECE_ENDS.search(text, start + _PIECE_CHARACTERS, start + 2 * _PIECE_CHARACTERS)
        stop = end.end() if end is not None else start + _PIECE_CHARACTERS
        yield text[start:stop]
        start = stop
    yield text[start:]


# Personal data


def _mask_addresses(text: str) -> str:
    pieces: list[str] = []
    start = 0
    for sign in _AT_SIGN.finditer(text):
        if sign.start() < start:
            continue
        before = text[max(start, sign.start() - 64) : sign.start()]
        local_part = _LOCAL_PART_BACKWARDS.match(before[::-1])
        domain = _DOMAIN.match(text, sign.end())
        if local_part is not None and domain is not None:
            pieces += text[start : sign.start() - local_part.end()], "[email]"
            start = domain.end()
    return "".join((*pieces, text[start:])) if pieces else text


def _mask_cards(text: str) -> str:
    pieces: list[str] = []
    start = position = 0
    while (match := _CARD.search(text, position)) is not None:
        end = _find_card_end(match[0])
        if end:
            pieces += text[start : match.start()], "[card]"
            start = position = match.start() + end
        else:
            # The next group of digits may begin a card.
            group = re.search(r"\D", match[0])
            position = match.start() + group.end() if group is not None else match.end()
    return "".join((*pieces, text[start:])) if pieces else text


def _find_card_end(text: str) -> int:
    """Returns where a card number at the start of a text with groups of digits ends; 0 if there is none."""
    ends = [match.end() for match in re.finditer(r"\d+", text)]
    for end in reversed(ends):
        digits = "".join(filter(str.isdigit, text[:end]))
        if 13 <= len(digits) <= 19 and _has_luhn_checksum(digits):
            return end
    return 0


def _has_luhn_checksum(digits: str) -> bool:
    total = 0
    for position, digit in enumerate(reversed(digits)):
        value = int(digit) * (position % 2 + 1)
        total += value - 9 if value > 9 else value
    return total % 10 == 0 and len(set(digits)) > 1


def _mask_ibans(text: str) -> str:
    pieces: list[str] = []
    start = 0
    for match in _IBAN_START.finditer(text):
        if match.start() < start:
            continue
        if end := _find_iban_end(text, match.start()):
            pieces += text[start : match.start()], "[iban]"
            start = end
    return "".join((*pieces, text[start:])) if pieces else text


def _find_iban_end(text: str, start: int) -> int:
    """Returns where the IBAN that starts here ends; 0 if there is none."""
    length = _IBAN_LENGTHS.get(text[start : start + 2].upper())
    if length is None:
        return 0
    characters: list[str] = []
    position = start
    while len(characters) < length and position < len(text):
        character = text[position]
        if character.isascii() and character.isalnum():
            characters.append(character.upper())
        elif character not in " -\u00a0" or not text[position - 1].isalnum():
            return 0
        position += 1
    if len(characters) < length or text[position : position + 1].isalnum():
        return 0
    digits = "".join(str(int(character, 36)) for character in (*characters[4:], *characters[:4]))
    return position if int(digits) % 97 == 1 else 0


def _is_no_phone(text: str) -> bool:
    digit_count = sum(map(str.isdigit, text))
    return not 7 <= digit_count <= 17 or (text[0] in "(0" and digit_count < 9) or _DATE.match(text) is not None


# Results


def _mask_result(
    result: ToolResult, mask_text: MaskText, *, hides_named_values: bool, min_number: int = _SHORTEST_CARD
) -> ToolResult:
    data_masking = _DataMasking(mask_text, hides_named_values, min_number)
    content = result.structured_content
    return msgspec.structs.replace(
        result,
        result=data_masking.mask(result.result),
        error=None if result.error is None else mask_text(result.error),
        parts=tuple(map(data_masking.mask_part, result.parts)),
        extras=data_masking.mask(result.extras),
        structured_content=msgspec.UNSET if content is msgspec.UNSET else data_masking.mask(content),
        encoded=None,
    )


class _DataMasking:
    """Masks texts in JSON data, also those that are keys, and numbers from `min_number` on as if they were texts."""

    def __init__(self, mask_text: MaskText, hides_named_values: bool, min_number: int) -> None:
        self._min_number = min_number
        self._mask_text = mask_text
        self._hides_named_values = hides_named_values

    def mask(self, value: Any, depth: int = 0) -> Any:
        """Raises `ValueError` for data with too many levels."""
        if isinstance(value, str):
            return self._mask_text(value)
        if isinstance(value, int) and not isinstance(value, bool):
            text = self._mask_text(str(value)) if value >= self._min_number else None
            return value if text is None or text == str(value) else text
        if not isinstance(value, Mapping | list | tuple):
            return value
        if depth >= _MAX_DEPTH:
            raise ValueError(f"the result has more than {_MAX_DEPTH} levels")
        if not isinstance(value, Mapping):
            return [self.mask(item, depth + 1) for item in cast("list[Any]", value)]
        items: dict[str, Any] = {}
        for key, item in cast("Mapping[str, Any]", value).items():
            is_hidden = self._hides_named_values and is_secret_name(str(key)) and item not in (None, "", True, False)
            items[self._unique_key(self._mask_text(str(key)), items)] = (
                MASK if is_hidden else self.mask(item, depth + 1)
            )
        return items

    def mask_part(self, part: Content) -> Content:
        if part.fields is not msgspec.UNSET:
            part = msgspec.structs.replace(part, fields=self.mask(part.fields))
        if isinstance(part, TextPart):
            return msgspec.structs.replace(part, text=self._mask_text(part.text))
        if isinstance(part, JsonPart):
            return msgspec.structs.replace(part, value=self.mask(part.value))
        if isinstance(part, ResourcePart):
            return msgspec.structs.replace(
                part,
                uri=self._mask_text(part.uri),
                name=None if part.name is None else self._mask_text(part.name),
                text=None if part.text is None else self._mask_text(part.text),
            )
        return part  # Images and audio.

    @staticmethod
    def _unique_key(key: str, items: Mapping[str, Any]) -> str:
        """Two keys may be equal after masking; none may get lost."""
        number, unique_key = 1, key
        while unique_key in items:
            number += 1
            unique_key = f"{key} {number}"
        return unique_key
