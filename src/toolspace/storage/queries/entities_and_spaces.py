"""SQL programs for entities, spaces and members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import Entity, EntityType, Member, Space
from toolspace.storage.database import Program
from toolspace.storage.queries.columns import Columns, insert_into, placeholders

_ENTITY = Columns(Entity, json=("metadata",))
_SPACE = Columns(Space, json=("metadata",))


def create_entity(entity_id: str, type: EntityType, name: str, metadata: Mapping[str, Any]) -> Program[Entity | None]:
    """None if the id is in use."""
    rows = yield (
        f"{insert_into('entities', _ENTITY.names)} ON CONFLICT (id) DO NOTHING RETURNING {_ENTITY.sql}",
        (entity_id, type, name, json_text.encode_for_storage(metadata), now_ms()),
    )
    return _ENTITY.decode_first(rows)


def find_entity(entity_id: str) -> Program[Entity | None]:
    return _ENTITY.decode_first((yield f"SELECT {_ENTITY.sql} FROM entities WHERE id = ?", (entity_id,)))


def list_entities(
    *, type: str | None = None, sharing_with: str | None = None, after: str = "", limit: int = 100
) -> Program[list[Entity]]:
    """Entities by id. `sharing_with`: only this entity and those that share a space with it."""
    where, values = ["id > ?"], [after]
    if type is not None:
        where.append("type = ?")
        values.append(type)
    if sharing_with is not None:
        where.append(
            "(id = ? OR id IN (SELECT other.entity_id FROM members AS other "
            "JOIN members AS own ON own.space_id = other.space_id WHERE own.entity_id = ?))"
        )
        values += [sharing_with, sharing_with]
    rows = yield (
        f"SELECT {_ENTITY.sql} FROM entities WHERE {' AND '.join(where)} ORDER BY id LIMIT ?",
        (*values, limit),
    )
    return _ENTITY.decode_all(rows)


def share_space(first_id: str, second_id: str) -> Program[bool]:
    """Whether two entities are members of one space."""
    rows = yield (
        "SELECT 1 FROM members AS a JOIN members AS b ON a.space_id = b.space_id "
        "WHERE a.entity_id = ? AND b.entity_id = ? LIMIT 1",
        (first_id, second_id),
    )
    return bool(rows)


def update_entity(
    entity_id: str, *, name: str | None = None, metadata: Mapping[str, Any] | None = None
) -> Program[Entity | None]:
    rows = yield (
        "UPDATE entities SET name = COALESCE(?, name), metadata = COALESCE(?, metadata) WHERE id = ? "
        f"RETURNING {_ENTITY.sql}",
        (name, None if metadata is None else json_text.encode_for_storage(metadata), entity_id),
    )
    return _ENTITY.decode_first(rows)


def delete_entity(entity_id: str) -> Program[bool]:
    """Deletes an entity with its memberships, and an agent with its runs. Its messages stay."""
    return bool((yield "DELETE FROM entities WHERE id = ? RETURNING id", (entity_id,)))


def create_space(space_id: str, name: str, metadata: Mapping[str, Any]) -> Program[Space | None]:
    """None if the id is in use."""
    rows = yield (
        f"{insert_into('spaces', (*_SPACE.names, 'last_seq'))} ON CONFLICT (id) DO NOTHING RETURNING {_SPACE.sql}",
        (space_id, name, json_text.encode_for_storage(metadata), now_ms(), 0),
    )
    return _SPACE.decode_first(rows)


def find_space(space_id: str) -> Program[Space | None]:
    return _SPACE.decode_first((yield f"SELECT {_SPACE.sql} FROM spaces WHERE id = ?", (space_id,)))


def list_spaces(*, member: str | None = None, after: str = "", limit: int = 100) -> Program[list[Space]]:
    """Spaces by id; only those of one member, if it is given."""
    if member is None:
        rows = yield f"SELECT {_SPACE.sql} FROM spaces WHERE id > ? ORDER BY id LIMIT ?", (after, limit)
    else:
        rows = yield (
            f"SELECT {_SPACE.sql} FROM spaces WHERE id > ? "
            "AND id IN (SELECT space_id FROM members WHERE entity_id = ?) ORDER BY id LIMIT ?",
            (after, member, limit),
        )
    return _SPACE.decode_all(rows)


def list_space_names(space_ids: Sequence[str]) -> Program[dict[str, str]]:
    """The names of the spaces that exist, by id."""
    rows = yield f"SELECT id, name FROM spaces WHERE id IN ({placeholders(space_ids)})", tuple(space_ids)
    return {row[0]: row[1] for row in rows}


def update_space(
    space_id: str, *, name: str | None = None, metadata: Mapping[str, Any] | None = None
) -> Program[Space | None]:
    rows = yield (
        "UPDATE spaces SET name = COALESCE(?, name), metadata = COALESCE(?, metadata) WHERE id = ? "
        f"RETURNING {_SPACE.sql}",
        (name, None if metadata is None else json_text.encode_for_storage(metadata), space_id),
    )
    return _SPACE.decode_first(rows)


def lock_space(space_id: str) -> Program[bool]:
    """Nobody adds a message to the space until the transaction ends. False if there is no such space."""
    return bool((yield "UPDATE spaces SET last_seq = last_seq WHERE id = ? RETURNING id", (space_id,)))


def delete_space(space_id: str) -> Program[bool]:
    """Deletes a space with its members and messages.

    Another space may get its id later, so calls and events that were visible here become invisible.
    """
    visible_calls = "SELECT call_id FROM messages WHERE space_id = ? AND call_id IS NOT NULL"
    yield f"UPDATE calls SET visible = 0, exposure = 'none' WHERE call_id IN ({visible_calls})", (space_id,)
    streams = "SELECT 'run:' || run_id FROM messages WHERE space_id = ? AND run_id IS NOT NULL"
    yield f"UPDATE events SET exposure = 'none' WHERE stream IN ({streams})", (space_id,)
    yield "UPDATE runs SET space_id = NULL WHERE space_id = ?", (space_id,)
    return bool((yield "DELETE FROM spaces WHERE id = ? RETURNING id", (space_id,)))


def add_member(space_id: str, entity_id: str) -> Program[bool]:
    """False if it is a member already. Both must exist."""
    rows = yield (
        "INSERT INTO members (space_id, entity_id, joined_at) VALUES (?, ?, ?) "
        "ON CONFLICT (space_id, entity_id) DO NOTHING RETURNING entity_id",
        (space_id, entity_id, now_ms()),
    )
    return bool(rows)


def remove_member(space_id: str, entity_id: str) -> Program[bool]:
    rows = yield (
        "DELETE FROM members WHERE space_id = ? AND entity_id = ? RETURNING entity_id",
        (space_id, entity_id),
    )
    return bool(rows)


def is_member(space_id: str, entity_id: str) -> Program[bool]:
    return bool((yield "SELECT 1 FROM members WHERE space_id = ? AND entity_id = ?", (space_id, entity_id)))


def list_members(space_id: str) -> Program[list[Member]]:
    """The members of a space, in the order in which they joined."""
    rows = yield (
        "SELECT entities.id, entities.type, entities.name, members.joined_at FROM members "
        "JOIN entities ON entities.id = members.entity_id WHERE members.space_id = ? "
        "ORDER BY members.joined_at, entities.id",
        (space_id,),
    )
    return [Member(entity_id=row[0], type=row[1], name=row[2], joined_at=row[3]) for row in rows]


def list_agents(space_id: str, *, except_entity: str) -> Program[Sequence[str]]:
    """The ids of the agents in a space, except the sender of a message."""
    rows = yield (
        "SELECT entities.id FROM members JOIN entities ON entities.id = members.entity_id "
        "WHERE members.space_id = ? AND entities.type = 'agent' AND entities.id <> ?",
        (space_id, except_entity),
    )
    return [row[0] for row in rows]
