"""The text of a YAML document in a form that the parser accepts, where YAML 1.2 accepts more than the parser.

The parser implements YAML 1.1. It refuses control characters that texts may have, takes NEL and the Unicode separators
for line ends, and refuses tabs that version 1.2 allows. `YamlSource` replaces them by characters that the document does
not use, and restores them in the values. Lines and columns stay. `core.yaml_text` uses it.
"""

from __future__ import annotations

import re

_REPLACED_CHARACTERS = "\t" + "".join(map(chr, (*range(0x7F, 0xA0), 0x2028, 0x2029)))
_REFUSED = re.compile(r"[\x7f-\x9f\u2028\u2029]")
_PRIVATE_START, _PRIVATE_END = 0xF0000, 0xFFFFD
_TAB_IN_BLOCK = re.compile(r"(\|[-+0-9]{0,2}[ \t]*(?:#[^\n]*)?\r?\n(?:[ ]*\r?\n)*[ ]+)\t")
_SURROGATE_PAIR = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_MAX_REPAIRS = 20
"""Each repair of one place parses the text again."""


class YamlSource:
    """A text for the parser, and the way back from its values."""

    def __init__(self, text: str) -> None:
        self.parser_text = text
        self._replacements: dict[int, str] = {}
        self._originals: dict[int, str] = {}
        self._repairs = 0
        if _REFUSED.search(text):
            self._prepare()
            self.parser_text = text.translate(
                {code: character for code, character in self._replacements.items() if code != ord("\t")}
            )

    def restore(self, value: str) -> str:
        """Returns the value of a scalar with its own characters."""
        return value.translate(self._originals) if self._originals else value

    def repair(self, reason: str, line: int, column: int) -> bool:
        """Changes the text after an error of the parser at a place. Returns whether to parse it again."""
        self._repairs += 1
        text = self.parser_text
        if self._repairs > _MAX_REPAIRS:
            return False
        if "tab character where an indentation space" in reason:
            self._prepare()
            tab = self._replacements[ord("\t")]
            self.parser_text = _TAB_IN_BLOCK.sub(lambda match: match[1] + tab, text)
        elif "invalid Unicode character escape" in reason:
            self.parser_text = _SURROGATE_PAIR.sub(_join_surrogates, text)
        elif "cannot start any token" in reason or "tab character that violates" in reason:
            self._replace_tabs(line, column)
        return self.parser_text != text

    def _replace_tabs(self, line: int, column: int) -> None:
        """Replaces tabs that only separate: of an empty line, or after `-`, `?` and `:`."""
        lines = self.parser_text.split("\n")
        if line >= len(lines):
            return
        text = lines[line]
        if not text.strip():
            lines[line] = text.replace("\t", " ")
        elif text[column : column + 1] == "\t" and text[:column].rstrip(" ")[-1:] in ("-", "?", ":"):
            rest = text[column:].lstrip("\t ")
            lines[line] = text[:column] + " " * (len(text) - column - len(rest)) + rest
        self.parser_text = "\n".join(lines)

    def _prepare(self) -> None:
        """Chooses the replacements: private characters that the text does not use."""
        if self._replacements:
            return
        used_characters = set(self.parser_text)
        unused_codes = (code for code in range(_PRIVATE_START, _PRIVATE_END) if chr(code) not in used_characters)
        pairs = list(zip(_REPLACED_CHARACTERS, unused_codes, strict=False))
        self._replacements = {ord(character): chr(code) for character, code in pairs}
        self._originals = {code: character for character, code in pairs}


def _join_surrogates(match: re.Match[str]) -> str:
    code = 0x10000 + ((int(match[1], 16) - 0xD800) << 10) + int(match[2], 16) - 0xDC00
    return f"\\U{code:08X}"
