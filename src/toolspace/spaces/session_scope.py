"""Which session of an agent an event belongs to, and which spaces a session reaches.

An agent whose `session` is `space` or `user` has a session for each space or person, besides its main session. The
scope is stored with the main session, so that any process can deliver an event to the right session.
"""

from __future__ import annotations

from toolspace.core.ids import agent_of_session, scope_key_of, session_id_for
from toolspace.core.stored_records import SessionScope, Space
from toolspace.errors import RefusedError
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, runs, sessions


def open_session(
    agent_entity_id: str,
    scope: SessionScope,
    *,
    space_id: str | None,
    person_id: str | None,
    default_key: str = "",
) -> Program[str]:
    """Returns the session of an agent for a space or a person, and creates it if it is new.

    `person_id` may be any principal: only a human who is a member of the space has a session. If the scope does not
    determine a session, `default_key` does: that of the main session, unless it is given.
    """
    scope_key = default_key
    if scope == "space" and space_id is not None:
        scope_key = f"space:{space_id}"
    elif scope == "user" and person_id is not None and (yield from _is_person(person_id, space_id)):
        scope_key = f"user:{person_id}"
    session_id = session_id_for(agent_entity_id, scope_key)
    if scope_key:
        yield from sessions.create_scoped(session_id)
    return session_id


def _is_person(entity_id: str, space_id: str | None) -> Program[bool]:
    if space_id is not None and not (yield from entities_and_spaces.is_member(space_id, entity_id)):
        return False
    entity = yield from entities_and_spaces.find_entity(entity_id)
    return entity is not None and entity.type == "human"


def find_principal_of_run(run_id: str | None) -> Program[str | None]:
    """The person or key that a run works for; None if its agent works for itself."""
    run = (yield from runs.find(run_id)) if run_id is not None else None
    return run.principal if run is not None and run.principal != run.agent_entity_id else None


def check_space(session_id: str, space_id: str) -> Program[None]:
    """Raises `RefusedError` if a space is not within the scope of a session. The caller checks the membership."""
    kind, _, id = scope_key_of(session_id).partition(":")
    if kind == "space" and space_id != id:
        raise RefusedError("forbidden", f'this conversation belongs to the space "{id}" and reaches no other space')
    if kind == "user" and not (yield from entities_and_spaces.is_member(space_id, id)):
        raise RefusedError(
            "forbidden", f'this conversation belongs to "{id}", who is not a member of the space "{space_id}"'
        )


def list_spaces(session_id: str, *, limit: int) -> Program[list[Space]]:
    """The first spaces that a session reaches, by id."""
    agent_id = agent_of_session(session_id)
    kind, _, id = scope_key_of(session_id).partition(":")
    if kind == "space":
        space = yield from entities_and_spaces.find_space(id)
        is_member = yield from entities_and_spaces.is_member(id, agent_id)
        return [space] if space is not None and is_member else []
    person_id = id if kind == "user" else None
    return (yield from entities_and_spaces.list_spaces(member=agent_id, other_member=person_id, limit=limit))


def count_spaces(session_id: str) -> Program[int]:
    """How many spaces a session reaches. Not for the session of a space, which reaches one."""
    kind, _, id = scope_key_of(session_id).partition(":")
    person_id = id if kind == "user" else None
    return entities_and_spaces.count_spaces(agent_of_session(session_id), other_member=person_id)
