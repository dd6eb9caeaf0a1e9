"""API keys: creates and revokes them, and counts their calls.

`authentication` verifies keys, and `tool_permissions` says which tools a key may call. Knows nothing of requests.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import string
from collections.abc import Coroutine
from typing import Any, Final, Self

import msgspec

from toolspace.config.server_settings import ServerSettings
from toolspace.core.ids import new_id
from toolspace.core.result import ToolResult
from toolspace.errors import StorageError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.pipeline import CallHandler, StageContext
from toolspace.server.tool_permissions import find_key_id
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.repeated_work import RepeatedWork
from toolspace.storage.queries import keys as rows
from toolspace.storage.queries.keys import KeyKind, KeyRecord, KeyScope, KeyUse, NewKey, Revocation

_log = logging.getLogger("toolspace.access")

PREFIXES: Final[dict[KeyKind, str]] = {"secret": "sk_", "public": "pk_", "tools": "tk_"}
_ALPHABET: Final = string.ascii_letters + string.digits
_KEY_LENGTH: Final = 40
_JWT_SECRET: Final = "jwt_secret"
_JWT_SECRET_LENGTH: Final = 64
_FLUSH_SECONDS: Final = 10.0


class InitialKeys(msgspec.Struct, frozen=True):
    """The keys that the first start created, to be shown once; None for keys that existed before."""

    secret: str | None
    public: str | None
    jwt_secret: str | None


def generate_key(kind: KeyKind) -> str:
    """Returns a random key: the prefix of its kind and 238 bits."""
    return PREFIXES[kind] + _random_text(_KEY_LENGTH)


def hash_key(key: str) -> str:
    """Returns the stored form of a key. One round of SHA-256 is enough, because keys are random."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_hint(key: str) -> str:
    """Returns the part of a key that may be shown later: `sk_…a1b2`."""
    return f"{key[:3]}…{key[-4:]}"


async def create_key(ledger: Ledger, kind: KeyKind, name: str, scope: KeyScope | None = None) -> tuple[KeyRecord, str]:
    """Creates a key. Returns the record and the key itself, of which only the hash is stored."""
    key = generate_key(kind)
    return await ledger.write(rows.create, _new_record(kind, key, name, scope or KeyScope())), key


async def revoke_key(ledger: Ledger, key_id: str, *, has_other_access: bool) -> Revocation:
    """Revokes a key. The last secret key is kept unless there is other access, such as a configured key."""
    return await ledger.write(rows.revoke, key_id, spare_last_secret=not has_other_access)


async def create_missing_keys(ledger: Ledger, server: ServerSettings) -> InitialKeys | None:
    """Creates the keys that are missing on the first start. Returns None if nothing was missing.

    If several processes start at once, one of them creates the keys and gets them.
    """
    configured_keys: dict[KeyKind, str | None] = {"secret": server.secret_key, "public": server.public_key}
    keys: dict[KeyKind, str] = {kind: generate_key(kind) for kind, key in configured_keys.items() if key is None}
    records = [_new_record(kind, key, "first", KeyScope()) for kind, key in keys.items()]
    created_kinds = await ledger.write(rows.create_first, records)
    jwt_secret = None
    if server.jwt_secret is None and server.jwks_url is None:
        secret, is_new = await _get_or_create_jwt_secret(ledger)
        jwt_secret = secret if is_new else None
    if not created_kinds and jwt_secret is None:
        return None
    new_keys = {kind: keys[kind] for kind in created_kinds}
    return InitialKeys(secret=new_keys.get("secret"), public=new_keys.get("public"), jwt_secret=jwt_secret)


async def load_jwt_secret(ledger: Ledger, server: ServerSettings) -> str | None:
    """Returns the configured JWT secret, else the stored one; None if an issuer signs the tokens."""
    if server.jwt_secret is not None or server.jwks_url is not None:
        return server.jwt_secret
    return (await _get_or_create_jwt_secret(ledger))[0]


class KeyUsage:
    """Counts the calls of each key and stores the counts every 10 seconds. `stage` is a stage of the orchestrator.

    A killed process loses the counts since the last flush; the calls themselves are stored.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counts: dict[str, list[int]] = {}
        """Key id → calls, failed calls, and when the key was last used (Unix milliseconds)."""
        self._repeated_work = RepeatedWork()

    async def __aenter__(self) -> Self:
        self._repeated_work.start("storing the use of keys", self._flush_periodically)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._repeated_work.aclose()
        await self.flush()

    def stage(self, plan: StageContext, next: CallHandler, /) -> CallHandler:
        counts = self._counts

        def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
            if (
                call.parent is not None
                or (user := call.base_context.user_id) is None
                or (key_id := find_key_id(user)) is None
            ):
                return next(call)
            return run_and_count(call, key_id)

        async def run_and_count(call: Call, key_id: str) -> ToolResult:
            try:
                result = await next(call)
            except BaseException:
                self._count(key_id, failed=1)
                raise
            if (key_counts := counts.get(key_id)) is not None and result.ok:
                key_counts[0] += 1
            else:
                self._count(key_id, failed=not result.ok)
            return result

        return run

    def record_use(self, key_id: str) -> None:
        """Records that the key authenticated a request now."""
        self._counts.setdefault(key_id, [0, 0, 0])[2] = self._ledger.now_ms()

    async def flush(self) -> None:
        """Stores the counts."""
        snapshot = {key_id: tuple(counts) for key_id, counts in self._counts.items() if any(counts)}
        if not snapshot:
            return
        now = self._ledger.now_ms()
        try:
            uses = {key_id: KeyUse(calls, failed, at or now) for key_id, (calls, failed, at) in snapshot.items()}
            await self._ledger.write(rows.record_use, uses)
        except StorageError as error:
            _log.warning("key usage not stored, retrying in %d s: %s", _FLUSH_SECONDS, error)
            return
        for key_id, (calls, failed, at) in snapshot.items():
            counts = self._counts[key_id]
            counts[0] -= calls
            counts[1] -= failed
            if counts[2] == at:
                counts[2] = 0
            if not any(counts):
                del self._counts[key_id]

    def _count(self, key_id: str, *, failed: int) -> None:
        counts = self._counts.setdefault(key_id, [0, 0, 0])
        counts[0] += 1
        counts[1] += failed

    async def _flush_periodically(self) -> float:
        await self.flush()
        return _FLUSH_SECONDS


def _new_record(kind: KeyKind, key: str, name: str, scope: KeyScope) -> NewKey:
    return NewKey(id=new_id("key"), kind=kind, hash=hash_key(key), name=name, hint=key_hint(key), scope=scope)


async def _get_or_create_jwt_secret(ledger: Ledger) -> tuple[str, bool]:
    """Returns the stored secret, and whether this call created it."""
    return await ledger.write(rows.get_or_create_secret, _JWT_SECRET, _random_text(_JWT_SECRET_LENGTH))


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
