"""Reads one text member of a JSON object that is still being written. Judges nothing: bad JSON gives less."""

from __future__ import annotations

_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class TextMember:
    """The text of one member of the outermost object, as far as it has come.

    member = TextMember("text")
    member.feed('{"text": "Hel')  # "Hel"
    member.feed('lo"}')  # "lo"
    """

    __slots__ = ("_depth", "_escape", "_high", "_in_text", "_is_key", "_key", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._depth = 0
        self._in_text = False
        self._is_key = True
        self._key = ""
        self._escape: str | None = None
        """What has come of an escape: "" is the backslash alone, `u12` a half of a code."""
        self._high = ""
        """The first half of a character that is written as two escapes."""

    def feed(self, piece: str) -> str:
        """Takes more JSON; gives what of the member's text is in it."""
        found: list[str] = []
        for character in piece:
            if not self._in_text:
                self._outside(character)
                continue
            text = self._inside(character)
            if text and self._depth == 1:
                if self._is_key:
                    self._key += text
                elif self._key == self._name:
                    found.append(text)
        return "".join(found)

    def _outside(self, character: str) -> None:
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

    def _inside(self, character: str) -> str:
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
            self._high = chr(code)
            return ""
        pair, self._high = self._high + chr(code), ""
        return pair.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
