"""SQL programs for entities, spaces and members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolspace.core import json_text
from toolspace.core.stored_records import Entity, EntityType, Member, SessionScope, Space
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries.statement_builder import (
    Table,
    first_column,
    has_changed,
    insert_into,
    json_or_null,
    placeholders,
    where_clause,
)

_ENTITY = Table("entities", Entity, json=("metadata",))
_SPACE = Table("spaces", Space, json=("metadata",))
EXISTS = "deleted_at IS NULL"
"""The condition for spaces that are not being deleted: see `space_deletion`."""
_SET_NAME_AND_METADATA = "name = COALESCE(?, name), metadata = COALESCE(?, metadata) WHERE id = ?"


def create_entity(entity_id: str, type: EntityType, name: str, metadata: Mapping[str, Any]) -> Program[Entity | None]:
    """None if the id is in use."""
    now = yield from current_time()
    return (yield from _ENTITY.insert(id=entity_id, type=type, name=name, metadata=metadata, created_at=now))


def find_entity(entity_id: str) -> Program[Entity | None]:
    return _ENTITY.find("WHERE id = ?", entity_id)


def list_entities(
    *, type: str | None = None, sharing_with: str | None = None, after: str = "", limit: int = 100
) -> Program[list[Entity]]:
    """Entities by id. `sharing_with`: only this entity and those that share a space with it."""
    shares_space = (
        "(id = ? OR id IN (SELECT other.entity_id FROM members AS other "
        "JOIN members AS own ON own.space_id = other.space_id WHERE own.entity_id = ?))"
    )
    both = None if sharing_with is None else [sharing_with, sharing_with]
    conditions, values = where_clause(("id > ?", after), ("type = ?", type), (shares_space, both))
    return _ENTITY.select(f"{conditions}ORDER BY id LIMIT ?", *values, limit)


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
    return _ENTITY.update(_SET_NAME_AND_METADATA, name, json_or_null(metadata), entity_id)


def delete_entity(entity_id: str) -> Program[bool]:
    """Deletes an entity with its memberships, and an agent with its runs. Its messages stay."""
    return has_changed("DELETE FROM entities WHERE id = ?", entity_id)


def create_space(space_id: str, name: str, metadata: Mapping[str, Any]) -> Program[Space | None]:
    """None if the id is in use."""
    now = yield from current_time()
    return (yield from _SPACE.insert(id=space_id, name=name, metadata=metadata, created_at=now, last_seq=0))


def find_space(space_id: str) -> Program[Space | None]:
    return _SPACE.find(f"WHERE id = ? AND {EXISTS}", space_id)


def list_spaces(
    *, member: str | None = None, other_member: str | None = None, after: str = "", limit: int = 100
) -> Program[list[Space]]:
    """Spaces by id; only those of one member, or of two, if they are given."""
    of_member = "id IN (SELECT space_id FROM members WHERE entity_id = ?)"
    conditions, values = where_clause(("id > ?", after), (of_member, member), (of_member, other_member))
    return _SPACE.select(f"{conditions}AND {EXISTS} ORDER BY id LIMIT ?", *values, limit)


def count_spaces(member: str, *, other_member: str | None = None) -> Program[int]:
    """How many spaces an entity is a member of; with another entity, how many they share."""
    select = "SELECT COUNT(*) FROM members WHERE entity_id = ?"
    if other_member is None:
        return (yield select, (member,))[0][0]
    shared = "AND space_id IN (SELECT space_id FROM members WHERE entity_id = ?)"
    return (yield f"{select} {shared}", (member, other_member))[0][0]


def list_space_names(space_ids: Sequence[str]) -> Program[dict[str, str]]:
    """The names of the spaces that exist, by id."""
    select = f"SELECT id, name FROM spaces WHERE id IN ({placeholders(space_ids)}) AND {EXISTS}"
    rows = yield select, tuple(space_ids)
    return {row[0]: row[1] for row in rows}


def update_space(
    space_id: str, *, name: str | None = None, metadata: Mapping[str, Any] | None = None
) -> Program[Space | None]:
    return _SPACE.update(f"{_SET_NAME_AND_METADATA} AND {EXISTS}", name, json_or_null(metadata), space_id)


def lock_metadata(space_id: str) -> Program[Mapping[str, Any]]:
    """The metadata of a space, which nobody else changes until the transaction ends. Empty if the space is missing."""
    rows = yield f"UPDATE spaces SET metadata = metadata WHERE id = ? AND {EXISTS} RETURNING metadata", (space_id,)
    return json_text.decode(rows[0][0]) if rows else {}


AGENTS_OF_SEVERAL_PEOPLE = (
    "SELECT own.entity_id FROM entities agents JOIN members own ON own.entity_id = agents.id "
    "JOIN members other ON other.space_id = own.space_id JOIN entities people ON people.id = other.entity_id "
    "WHERE agents.type = 'agent' AND people.type = 'human' GROUP BY own.entity_id HAVING COUNT(DISTINCT people.id) > 1"
)
"""The ids of the agents that share spaces with different people."""


def list_agents_of_several_people() -> Program[list[str]]:
    return first_column(AGENTS_OF_SEVERAL_PEOPLE)


def add_member(space_id: str, entity_id: str) -> Program[bool]:
    """False if it is a member already. Both must exist."""
    insert = f"{insert_into('members', ('space_id', 'entity_id', 'joined_at'))} ON CONFLICT DO NOTHING"
    now = yield from current_time()
    return (yield from has_changed(insert, space_id, entity_id, now))


def remove_member(space_id: str, entity_id: str) -> Program[bool]:
    return has_changed("DELETE FROM members WHERE space_id = ? AND entity_id = ?", space_id, entity_id)


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


def list_agents(space_id: str, *, except_entity: str = "") -> Program[Sequence[tuple[str, SessionScope]]]:
    """The ids of the agents in a space, each with the scope of its sessions; except one, such as the sender of
    a message."""
    rows = yield (
        "SELECT entities.id, COALESCE(sessions.scope, 'agent') FROM members "
        "JOIN entities ON entities.id = members.entity_id LEFT JOIN sessions ON sessions.id = entities.id "
        "WHERE members.space_id = ? AND entities.type = 'agent' AND entities.id <> ?",
        (space_id, except_entity),
    )
    return [(row[0], row[1]) for row in rows]
