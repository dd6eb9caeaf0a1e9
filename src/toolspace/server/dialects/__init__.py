"""The dialects of streams: native events, the AI SDK's UI message stream, and AG-UI. They translate; they send nothing.

`event_encoding` and `sse` use them. They import core records only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from toolspace.server.dialects.ag_ui import AgUiTranslator
from toolspace.server.dialects.ai_sdk import UiMessageStreamTranslator
from toolspace.server.dialects.interface import Dialect, Payload, Translator

NATIVE: Final = Dialect("native")
UI_MESSAGE_STREAM: Final = Dialect(
    "ui-message-stream",
    translator=UiMessageStreamTranslator,
    headers=((b"x-vercel-ai-ui-message-stream", b"v1"),),
    ending=b"data: [DONE]\n\n",
)
AG_UI: Final = Dialect("ag-ui", translator=AgUiTranslator)

DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.name: dialect for dialect in (NATIVE, UI_MESSAGE_STREAM, AG_UI)
}  # fmt: skip
"""Dialects by the value of `?format=`."""

__all__ = ["AG_UI", "DIALECTS", "NATIVE", "UI_MESSAGE_STREAM", "Dialect", "Payload", "Translator"]
