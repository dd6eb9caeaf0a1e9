"""Programs for keys, which are kept as hashes, and for the few secrets that have to be kept as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import Record
from toolspace.storage.database import Program, Row

KeyKind = Literal["secret", "public", "tools"]
Revocation = Literal["revoked", "unknown", "last"]
_COLUMNS = "id, kind, name, hint, scope, created_at, revoked_at, last_used_at, calls, failed"


class KeyScope(Record, frozen=True):
    """What a tool key is for; other kinds leave it empty."""

    tools_allowed: tuple[str, ...] | None = None
    tools_denied: tuple[str, ...] = ()
    agent_entity_id: str | None = None


class KeyRecord(Record, frozen=True):
    """A key as it is kept: whose hash the row has, nobody can tell from it."""

    id: str
    kind: KeyKind
    name: str
    hint: str
    """Its kind and its last characters, to tell it from others."""
    scope: KeyScope
    created_at: int
    revoked_at: int | None
    last_used_at: int | None
    calls: int
    """Tool calls that were made with it, those inside other calls aside; and how many of them failed."""
    failed: int


class KeyUse(NamedTuple):
    """What was done with a key since it was last written down."""

    calls: int
    failed: int
    at: int


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that is to be kept."""

    id: str
    kind: KeyKind
    hash: str
    name: str
    hint: str
    scope: KeyScope = KeyScope()


def create(new: NewKey) -> Program[KeyRecord]:
    rows = yield (
        "INSERT INTO keys (id, kind, hash, name, hint, scope, created_at, revoked_at, last_used_at, calls, failed) "
        f"VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL, 0, 0) RETURNING {_COLUMNS}",
        (new.id, new.kind, new.hash, new.name, new.hint, json_text.encode(msgspec.to_builtins(new.scope)), now_ms()),
    )
    return _key(rows[0])


def create_first(keys: Sequence[NewKey]) -> Program[list[KeyKind]]:
    """Keeps each of these keys if no first key of its kind was ever made; says of which kinds it did.

    However many processes start at once, the key of one of them is kept, and only that one may show it.
    """
    made: list[KeyKind] = []
    for new in keys:
        rows = yield (
            "INSERT INTO secrets (name, value, created_at) VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING "
            "RETURNING name",
            (f"first:{new.kind}", new.id, now_ms()),
        )
        if rows:
            yield from create(new)
            made.append(new.kind)
    return made


def find_by_hash(hash: str) -> Program[KeyRecord | None]:
    """The key of this hash, unless it is revoked."""
    rows = yield f"SELECT {_COLUMNS} FROM keys WHERE hash = ? AND revoked_at IS NULL", (hash,)
    return _key(rows[0]) if rows else None


def find(key_id: str) -> Program[KeyRecord | None]:
    rows = yield f"SELECT {_COLUMNS} FROM keys WHERE id = ?", (key_id,)
    return _key(rows[0]) if rows else None


def list_keys(*, after: str = "", limit: int = 100) -> Program[list[KeyRecord]]:
    """Keys by id, revoked ones too."""
    rows = yield f"SELECT {_COLUMNS} FROM keys WHERE id > ? ORDER BY id LIMIT ?", (after, limit)
    return [_key(row) for row in rows]


def revoke(key_id: str, *, spare_last_secret: bool) -> Program[Revocation]:
    """Ends a key for good. The last secret key stays where nothing else would let anyone in."""
    rows = yield "SELECT kind FROM keys WHERE id = ?", (key_id,)
    if not rows:
        return "unknown"
    if rows[0][0] == "secret" and spare_last_secret:
        # Written to, so that two who revoke two keys at once wait for each other instead of both seeing the other's.
        alive = yield "UPDATE keys SET name = name WHERE kind = 'secret' AND revoked_at IS NULL RETURNING id", ()
        if [row[0] for row in alive] == [key_id]:
            return "last"
    yield "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (now_ms(), key_id)
    return "revoked"


def record_use(uses: Mapping[str, KeyUse]) -> Program[None]:
    """Adds what was done with keys, each by its id. In the order of the ids: no two processes wait for each other."""
    for key_id in sorted(uses):
        use = uses[key_id]
        yield (
            "UPDATE keys SET calls = calls + ?, failed = failed + ?, last_used_at = "
            "CASE WHEN last_used_at IS NULL OR last_used_at < ? THEN ? ELSE last_used_at END WHERE id = ?",
            (use.calls, use.failed, use.at, use.at, key_id),
        )


def get_or_create_secret(name: str, value: str) -> Program[tuple[str, bool]]:
    """The secret of this name, and whether it is the given one: the first that was kept stays."""
    made = yield (
        "INSERT INTO secrets (name, value, created_at) VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING RETURNING name",
        (name, value, now_ms()),
    )
    rows = yield "SELECT value FROM secrets WHERE name = ?", (name,)
    return rows[0][0], bool(made)


def _key(row: Row) -> KeyRecord:
    return KeyRecord(
        id=row[0],
        kind=row[1],
        name=row[2],
        hint=row[3],
        scope=msgspec.convert(json_text.decode(row[4]), KeyScope),
        created_at=row[5],
        revoked_at=row[6],
        last_used_at=row[7],
        calls=row[8],
        failed=row[9],
    )
