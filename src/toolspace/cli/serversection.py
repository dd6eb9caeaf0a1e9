"""Imported servers as a section of a new toolspace.yaml, with where each came from. Reads nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from toolspace.cli.importing import Found
from toolspace.cli.output import one_line

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@+-]*")
_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*\}")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
_UNPRINTED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_HEAD = """\
# --- MCP servers, as your editors have them.
mcpServers:
"""


def server_section(found: Iterable[Found], home: Path) -> str:
    """The text of the section. It can be loaded as it is: a server that lacks a variable is off."""
    return _HEAD + "\n".join(line for server in found for line in _server(server, home))


def shown_path(path: Path, home: Path) -> str:
    """A path as people write it, on one line."""
    try:
        return one_line(f"~/{path.relative_to(home)}")
    except ValueError:
        return one_line(str(path))


def _server(server: Found, home: Path) -> Iterator[str]:
    yield f"  # From {server.client.title}: {shown_path(server.path, home)}"
    yield f"  {_scalar(server.name)}:"
    entry = dict(server.entry)
    off = entry.pop("enabled", True) is False
    for key, value in entry.items():
        if isinstance(value, dict):
            yield f"    {key}:"
            for name, inner in cast("Mapping[str, str]", value).items():
                yield f"      {_scalar(name)}: {_scalar(inner)}{_comment(server, inner)}"
        else:
            words = cast("list[str]", value) if isinstance(value, list) else [str(value)]
            written = f"[{', '.join(json_text(word) for word in words)}]" if isinstance(value, list) else _scalar(value)
            yield f"    {key}: {written}{''.join(dict.fromkeys(_comment(server, word) for word in words))}"
    if off:
        yield "    enabled: false"
    elif server.unset:
        yield f"    enabled: false  # Set {' and '.join(server.unset)}, then remove this line."
    yield ""


def _comment(server: Found, value: str) -> str:
    names = [name for name in server.secrets if f"${{{name}}}" in value]
    return f"  # Set {' and '.join(names)}: the value was not copied." if names else ""


def _scalar(value: Any) -> str:
    text = str(value)
    plain = _PLAIN.fullmatch(text) or _REFERENCE.fullmatch(text)
    return text if plain and text.casefold() not in _WORDS else json_text(text)


def json_text(text: str) -> str:
    """A text in double quotes, which YAML reads as JSON does, but for a few characters."""
    return _UNPRINTED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))
