"""SQL programs for API keys, which are stored as hashes, and for the few secrets that are stored as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from toolspace.core import json_text
from toolspace.core.stored_records import Record
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries.statement_builder import Table, first_column, first_value, has_changed, insert_into

KeyKind = Literal["secret", "public", "tools"]
Revocation = Literal["revoked", "unknown", "last"]


class KeyScope(Record, frozen=True):
    """What a tool key may do; empty for other kinds."""

    tools_allowed: tuple[str, ...] | None = None
    tools_denied: tuple[str, ...] = ()
    agent_entity_id: str | None = None


class KeyRecord(Record, frozen=True):
    """A key without its hash."""

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
    """Tool calls that were made with it, without those inside other calls; and how many of them failed."""
    failed: int


class KeyUse(NamedTuple):
    """The use of a key since it was last recorded."""

    calls: int
    failed: int
    at: int


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key to store."""

    id: str
    kind: KeyKind
    hash: str
    name: str
    hint: str
    scope: KeyScope = KeyScope()


def _decode_scope(text: str) -> KeyScope:
    return msgspec.convert(json_text.decode(text), KeyScope)


_KEY = Table("keys", KeyRecord, decoders={"scope": _decode_scope})
_INSERT_SECRET = f"{insert_into('secrets', ('name', 'value', 'created_at'))} ON CONFLICT (name) DO NOTHING"


def create(new: NewKey) -> Program[KeyRecord]:
    values = msgspec.structs.asdict(new) | {"scope": json_text.encode(msgspec.to_builtins(new.scope))}
    now = yield from current_time()
    record = yield from _KEY.insert("", **values, created_at=now, calls=0, failed=0)
    assert record is not None  # It cannot conflict: without a clause for that, the database raises.
    return record


def create_first(keys: Sequence[NewKey]) -> Program[list[KeyKind]]:
    """Stores each of these keys, unless there was a first key of its kind before; returns the kinds that are stored.

    Of many processes that start at once, only one gets its key stored, and only that one may show it.
    """
    kinds: list[KeyKind] = []
    for new in keys:
        now = yield from current_time()
        if (yield from has_changed(_INSERT_SECRET, f"first:{new.kind}", new.id, now)):
            yield from create(new)
            kinds.append(new.kind)
    return kinds


def find_by_hash(hash: str) -> Program[KeyRecord | None]:
    """The key of this hash, unless it is revoked."""
    return _KEY.find("WHERE hash = ? AND revoked_at IS NULL", hash)


def find(key_id: str) -> Program[KeyRecord | None]:
    return _KEY.find("WHERE id = ?", key_id)


def list_keys(*, after: str = "", limit: int = 100) -> Program[list[KeyRecord]]:
    """Keys by id, revoked ones too."""
    return _KEY.select("WHERE id > ? ORDER BY id LIMIT ?", after, limit)


def revoke(key_id: str, *, spare_last_secret: bool) -> Program[Revocation]:
    """Revokes a key for good. `spare_last_secret`: not the last secret key, without which nobody could log in."""
    kind = yield from first_value("SELECT kind FROM keys WHERE id = ?", key_id)
    if kind is None:
        return "unknown"
    if kind == "secret" and spare_last_secret:
        # A write, as a lock: of two that revoke two keys at once, the second waits and sees the first one's change.
        lock = "UPDATE keys SET name = name WHERE kind = 'secret' AND revoked_at IS NULL RETURNING id"
        if (yield from first_column(lock)) == [key_id]:
            return "last"
    now = yield from current_time()
    yield "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (now, key_id)
    return "revoked"


def record_use(uses: Mapping[str, KeyUse]) -> Program[None]:
    """Adds the use of keys, by their ids. In the order of the ids, so that two processes cannot deadlock."""
    for key_id in sorted(uses):
        use = uses[key_id]
        yield (
            "UPDATE keys SET calls = calls + ?, failed = failed + ?, last_used_at = "
            "CASE WHEN last_used_at IS NULL OR last_used_at < ? THEN ? ELSE last_used_at END WHERE id = ?",
            (use.calls, use.failed, use.at, use.at, key_id),
        )


def get_or_create_secret(name: str, value: str) -> Program[tuple[str, bool]]:
    """The secret of this name, and whether it is this value: the first value that was stored stays."""
    now = yield from current_time()
    is_stored = yield from has_changed(_INSERT_SECRET, name, value, now)
    return (yield from first_value("SELECT value FROM secrets WHERE name = ?", name)), is_stored
