"""Keys: how they look, how they are kept, and the first ones. Knows nothing of requests."""

from __future__ import annotations

import hashlib
import secrets
import string
from typing import Final

import msgspec

from toolspace.config.model import Server
from toolspace.core.ids import new_id
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import keys as rows
from toolspace.storage.queries.keys import KeyKind, KeyRecord, KeyScope, NewKey, Revocation

PREFIXES: Final[dict[KeyKind, str]] = {"secret": "sk_", "public": "pk_", "tools": "tk_"}
_ALPHABET: Final = string.ascii_letters + string.digits
_LENGTH: Final = 40
_JWT_SECRET: Final = "jwt_secret"


class FirstKeys(msgspec.Struct, frozen=True):
    """What was made on the first start, to be shown once; None for what was configured or made before."""

    secret: str | None
    public: str | None
    jwt_secret: str | None


def generate(kind: KeyKind) -> str:
    """A key that nobody guesses: 238 bits of chance behind the prefix of its kind."""
    return PREFIXES[kind] + _chance(_LENGTH)


def hashed(key: str) -> str:
    """What is kept of a key. One round is enough: there is no dictionary of keys made by chance."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def hint(key: str) -> str:
    """What may be shown of a key later: `sk_…a1b2`."""
    return f"{key[:3]}…{key[-4:]}"


async def create(ledger: Ledger, kind: KeyKind, name: str, scope: KeyScope | None = None) -> tuple[KeyRecord, str]:
    """Makes a key. The text is given this once: only its hash is kept."""
    text = generate(kind)
    return await ledger.write(rows.add, _new(kind, text, name, scope or KeyScope())), text


async def revoke(ledger: Ledger, key_id: str, *, another_way_in: bool) -> Revocation:
    """Ends a key. The last secret one stays, unless there is another way in, such as a configured key."""
    return await ledger.write(rows.revoke, key_id, spare_last_secret=not another_way_in)


async def ensure_keys(ledger: Ledger, server: Server) -> FirstKeys | None:
    """Makes the keys that are missing on a first start; None where nothing had to be made.

    Of several processes that start at once, one makes them and gets them back.
    """
    wanted: list[KeyKind] = []
    if server.secret_key is None:
        wanted.append("secret")
    if server.public_key is None:
        wanted.append("public")
    texts: dict[KeyKind, str] = {kind: generate(kind) for kind in wanted}
    made = await ledger.write(rows.add_first, [_new(kind, text, "first", KeyScope()) for kind, text in texts.items()])
    jwt_secret = None
    if server.jwt_secret is None and server.jwks_url is None:
        kept, new = await ledger.write(rows.keep_secret, _JWT_SECRET, _chance(64))
        jwt_secret = kept if new else None
    if not made and jwt_secret is None:
        return None
    shown = {kind: texts[kind] for kind in made}
    return FirstKeys(secret=shown.get("secret"), public=shown.get("public"), jwt_secret=jwt_secret)


async def shared_secret(ledger: Ledger, server: Server) -> str | None:
    """What tokens are signed with: as configured, else as made on the first start; none where an issuer signs them."""
    if server.jwt_secret is not None or server.jwks_url is not None:
        return server.jwt_secret
    kept, _ = await ledger.write(rows.keep_secret, _JWT_SECRET, _chance(64))
    return kept


def _new(kind: KeyKind, text: str, name: str, scope: KeyScope) -> NewKey:
    return NewKey(id=new_id("key"), kind=kind, hash=hashed(text), name=name, hint=hint(text), scope=scope)


def _chance(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
