"""The output schema of an operation: what its one successful answer holds, where that is simple to say."""

from __future__ import annotations

from typing import Any

from toolspace.core import json_text
from toolspace.providers.openapi.bodies import is_json
from toolspace.providers.openapi.document import Broken, Json, mapping
from toolspace.providers.openapi.operations import Operation
from toolspace.providers.openapi.schemas import Refs, Schemas, with_definitions

MAX_BYTES = 16_000
"""A schema larger than this costs every reader of the list more than it tells."""


class Output:
    """Makes the schema when someone asks for it: of a large document, few ever do."""

    __slots__ = ("_made", "_operation", "_schema", "_schemas")

    def __init__(self, operation: Operation, schemas: Schemas) -> None:
        self._operation = operation
        self._schemas = schemas
        self._made = False
        self._schema: Json | None = None

    @property
    def schema(self) -> Json | None:
        if not self._made:
            try:
                self._schema = self._make()
            except (Broken, RecursionError):
                self._schema = None  # The call works without it.
            self._made = True
        return self._schema

    def _make(self) -> Json | None:
        node = self._success()
        if node is None:
            return None
        refs: Refs = {}
        target = self._operation.source.follow(node)
        content = mapping((mapping(target.node) or {}).get("content")) or {}
        media = [mapping(one) for name, one in content.items() if is_json(name)]
        if len(media) != 1 or len(content) != 1 or not media[0] or "schema" not in media[0]:
            return None
        schema = mapping(self._schemas.convert(media[0]["schema"], target.source, refs))
        if schema is None:
            return None
        whole = with_definitions(schema, self._schemas.definitions(refs))
        return whole if json_text.size(whole) <= MAX_BYTES else None

    def _success(self) -> Any:
        """The one answer that means success; with several, no schema would hold."""
        responses = mapping(self._operation.responses) or {}
        found = [node for status, node in responses.items() if status.startswith("2")]
        return found[0] if len(found) == 1 else None
