"""Says where inbox events come from, by the names that people know spaces by. Changes nothing that is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from toolspace.core.records import InboxEvent
from toolspace.storage.database import Program
from toolspace.storage.queries import entities


def located(events: Sequence[InboxEvent]) -> Program[Sequence[InboxEvent]]:
    """The same events, with the `spaceName` of their spaces. Of today: a space may have been renamed since."""
    ids = {space_id for event in events if (space_id := _space_of(event)) is not None}
    if not ids:
        return events
    names = yield from entities.space_names(sorted(ids))
    return [_named(event, names) for event in events]


def _space_of(event: InboxEvent) -> str | None:
    data: Any = event.data
    space_id = cast("dict[str, Any]", data).get("spaceId") if isinstance(data, dict) else None
    return space_id if isinstance(space_id, str) and "\0" not in space_id else None


def _named(event: InboxEvent, names: dict[str, str]) -> InboxEvent:
    name = names.get(_space_of(event) or "")
    return event if name is None else msgspec.structs.replace(event, data={**event.data, "spaceName": name})
