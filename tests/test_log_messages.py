"""The messages of the log are written in one way: lower case at the beginning, no full stop at the end."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import toolspace

SOURCE = Path(toolspace.__file__).parent
_METHODS = frozenset(("debug", "info", "warning", "error", "exception", "critical"))
_NAMES = ("MCP", "OAuth", "OpenAPI", "PostgreSQL", "Settings", "SQLite", "Toolspace", "HTTP", "URL")


def _list_messages() -> Iterator[tuple[str, str]]:
    """The place and the text of each message."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
                logger = node.func.value
                message = node.args[0] if node.args else None
                if isinstance(logger, ast.Name) and logger.id == "_log" and isinstance(message, ast.Constant):
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", str(message.value)


def test_log_messages_begin_in_lower_case_and_have_no_full_stop() -> None:
    messages = list(_list_messages())
    assert len(messages) > 50
    assert [
        (place, text)
        for place, text in messages
        if (text[:1].isupper() and not text.startswith(_NAMES)) or text.endswith(".")
    ] == []
