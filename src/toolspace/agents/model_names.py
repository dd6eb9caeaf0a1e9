"""Restores the tools' own names in the calls of a model, complete and while the model writes them.

The conversation keeps the names that the model has written, because it has to read its own calls again. Events, records
and executions of the calls have the names of the tools. The loop uses it; `core.argument_names` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from toolspace.core import json_text
from toolspace.core.argument_names import ArgumentNames, StreamedNames
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    ModelCall,
    ModelListener,
    ModelStreamPart,
    ResponseRestarted,
)


def restore_call(call: ModelCall, names: ArgumentNames | None) -> ModelCall:
    """Returns the call with the names of the tool. Arguments that are no JSON object stay as they are."""
    if names is None or not call.arguments:
        return call
    arguments = names.restore(call.arguments)
    if isinstance(arguments, str | bytes):
        return call
    return msgspec.structs.replace(call, arguments=json_text.encode(arguments))


class RestoringListener:
    """Passes the pieces of a response on, with the names of the tools in the arguments of calls."""

    __slots__ = ("_find_names", "_listen", "_streams")

    def __init__(self, listen: ModelListener, find_names: Callable[[str], ArgumentNames | None]) -> None:
        self._listen = listen
        self._find_names = find_names
        self._streams: dict[int, StreamedNames] = {}

    def __call__(self, part: ModelStreamPart) -> None:
        if isinstance(part, CallDelta):
            stream = self._streams.get(part.index)
            if stream is not None:
                text = stream.feed(part.text)
                if not text:
                    return
                part = CallDelta(part.index, text)
        elif isinstance(part, CallStarted):
            names = self._find_names(part.name)
            if names is not None:
                self._streams[part.index] = StreamedNames(names)
        elif isinstance(part, ResponseRestarted):
            self._streams.clear()
        self._listen(part)
