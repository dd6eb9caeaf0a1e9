"""Programs for entities, spaces and who is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import Entity, EntityType, Member, Space
from toolspace.storage.database import Program, Row

_ENTITY = "id, type, name, metadata, created_at"
_SPACE = "id, name, metadata, created_at"


def create_entity(entity_id: str, type: EntityType, name: str, metadata: Mapping[str, Any]) -> Program[Entity | None]:
    """None where the id is taken."""
    rows = yield (
        f"INSERT INTO entities ({_ENTITY}) VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING RETURNING {_ENTITY}",
        (entity_id, type, name, json_text.encode_for_storage(metadata), now_ms()),
    )
    return _entity(rows[0]) if rows else None


def find_entity(entity_id: str) -> Program[Entity | None]:
    rows = yield f"SELECT {_ENTITY} FROM entities WHERE id = ?", (entity_id,)
    return _entity(rows[0]) if rows else None


def list_entities(
    *, type: str | None = None, sharing_with: str | None = None, after: str = "", limit: int = 100
) -> Program[list[Entity]]:
    """Entities by id; only those that share a space with one of them, if it is named (itself among them)."""
    where, values = ["id > ?"], [after]
    if type is not None:
        where.append("type = ?")
        values.append(type)
    if sharing_with is not None:
        where.append(
            "(id = ? OR id IN (SELECT theirs.entity_id FROM members AS theirs "
            "JOIN members AS mine ON mine.space_id = theirs.space_id WHERE mine.entity_id = ?))"
        )
        values += [sharing_with, sharing_with]
    rows = yield (
        f"SELECT {_ENTITY} FROM entities WHERE {' AND '.join(where)} ORDER BY id LIMIT ?",
        (*values, limit),
    )
    return [_entity(row) for row in rows]


def share_space(one: str, other: str) -> Program[bool]:
    rows = yield (
        "SELECT 1 FROM members AS a JOIN members AS b ON a.space_id = b.space_id "
        "WHERE a.entity_id = ? AND b.entity_id = ? LIMIT 1",
        (one, other),
    )
    return bool(rows)


def update_entity(
    entity_id: str, *, name: str | None = None, metadata: Mapping[str, Any] | None = None
) -> Program[Entity | None]:
    rows = yield (
        "UPDATE entities SET name = COALESCE(?, name), metadata = COALESCE(?, metadata) WHERE id = ? "
        f"RETURNING {_ENTITY}",
        (name, None if metadata is None else json_text.encode_for_storage(metadata), entity_id),
    )
    return _entity(rows[0]) if rows else None


def delete_entity(entity_id: str) -> Program[bool]:
    """With its memberships, and its runs if it is an agent; what it said stays."""
    rows = yield "DELETE FROM entities WHERE id = ? RETURNING id", (entity_id,)
    return bool(rows)


def create_space(space_id: str, name: str, metadata: Mapping[str, Any]) -> Program[Space | None]:
    """None where the id is taken."""
    rows = yield (
        f"INSERT INTO spaces ({_SPACE}, last_seq) VALUES (?, ?, ?, ?, 0) ON CONFLICT (id) DO NOTHING "
        f"RETURNING {_SPACE}",
        (space_id, name, json_text.encode_for_storage(metadata), now_ms()),
    )
    return _space(rows[0]) if rows else None


def find_space(space_id: str) -> Program[Space | None]:
    rows = yield f"SELECT {_SPACE} FROM spaces WHERE id = ?", (space_id,)
    return _space(rows[0]) if rows else None


def list_spaces(*, member: str | None = None, after: str = "", limit: int = 100) -> Program[list[Space]]:
    """Spaces by id; only those that an entity is a member of, if one is named."""
    if member is None:
        rows = yield f"SELECT {_SPACE} FROM spaces WHERE id > ? ORDER BY id LIMIT ?", (after, limit)
    else:
        rows = yield (
            f"SELECT {_SPACE} FROM spaces WHERE id > ? AND id IN (SELECT space_id FROM members WHERE entity_id = ?) "
            "ORDER BY id LIMIT ?",
            (after, member, limit),
        )
    return [_space(row) for row in rows]


def list_space_names(space_ids: Sequence[str]) -> Program[dict[str, str]]:
    """The names of those spaces that there are, by id."""
    rows = yield f"SELECT id, name FROM spaces WHERE id IN ({', '.join('?' * len(space_ids))})", tuple(space_ids)
    return {row[0]: row[1] for row in rows}


def update_space(
    space_id: str, *, name: str | None = None, metadata: Mapping[str, Any] | None = None
) -> Program[Space | None]:
    rows = yield (
        f"UPDATE spaces SET name = COALESCE(?, name), metadata = COALESCE(?, metadata) WHERE id = ? RETURNING {_SPACE}",
        (name, None if metadata is None else json_text.encode_for_storage(metadata), space_id),
    )
    return _space(rows[0]) if rows else None


def lock_space(space_id: str) -> Program[bool]:
    """Nobody shows anything new in a space until the transaction ends. False where there is none."""
    rows = yield "UPDATE spaces SET last_seq = last_seq WHERE id = ? RETURNING id", (space_id,)
    return bool(rows)


def delete_space(space_id: str) -> Program[bool]:
    """With its members and messages. Another one may get its id: what showed here must not show there."""
    shown = "SELECT call_id FROM messages WHERE space_id = ? AND call_id IS NOT NULL"
    yield f"UPDATE calls SET visible = 0, exposure = 'none' WHERE call_id IN ({shown})", (space_id,)
    streams = "SELECT 'run:' || run_id FROM messages WHERE space_id = ? AND run_id IS NOT NULL"
    yield f"UPDATE events SET exposure = 'none' WHERE stream IN ({streams})", (space_id,)
    yield "UPDATE runs SET space_id = NULL WHERE space_id = ?", (space_id,)
    rows = yield "DELETE FROM spaces WHERE id = ? RETURNING id", (space_id,)
    return bool(rows)


def add_member(space_id: str, entity_id: str) -> Program[bool]:
    """Whether it was not there already. Both must exist."""
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
    rows = yield "SELECT 1 FROM members WHERE space_id = ? AND entity_id = ?", (space_id, entity_id)
    return bool(rows)


def list_members(space_id: str) -> Program[list[Member]]:
    rows = yield (
        "SELECT entities.id, entities.type, entities.name, members.joined_at FROM members "
        "JOIN entities ON entities.id = members.entity_id WHERE members.space_id = ? "
        "ORDER BY members.joined_at, entities.id",
        (space_id,),
    )
    return [Member(entity_id=row[0], type=row[1], name=row[2], joined_at=row[3]) for row in rows]


def list_agents(space_id: str, *, besides: str) -> Program[Sequence[str]]:
    """The agents in a space, except the one that speaks."""
    rows = yield (
        "SELECT entities.id FROM members JOIN entities ON entities.id = members.entity_id "
        "WHERE members.space_id = ? AND entities.type = 'agent' AND entities.id <> ?",
        (space_id, besides),
    )
    return [row[0] for row in rows]


def _entity(row: Row) -> Entity:
    return Entity(id=row[0], type=row[1], name=row[2], metadata=json_text.decode(row[3]), created_at=row[4])


def _space(row: Row) -> Space:
    return Space(id=row[0], name=row[1], metadata=json_text.decode(row[2]), created_at=row[3])
