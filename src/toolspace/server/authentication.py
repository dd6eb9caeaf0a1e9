"""Tells who calls, from the headers of a request. Which things of the gateway are theirs, `membership` tells.

The way of most requests is one lookup: what was verified once holds for a few seconds, then it is looked up again, so
that a key which was revoked in another process ends soon. One that is revoked here ends at once.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

from toolspace.config.server_settings import ServerSettings
from toolspace.server.asgi import Scope
from toolspace.server.authorization import CONFIGURED_KEY_ID, Caller, EntityCaller, SecretKeyCaller, ToolKeyCaller
from toolspace.server.keys import PREFIXES, generate_key, hash_key, load_jwt_secret
from toolspace.server.problems import Problem, unavailable
from toolspace.server.rate_limit import FailedLoginLimiter
from toolspace.server.tokens import EntityTokens, InvalidToken, IssuerKeys, IssuerUnavailable
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import entities
from toolspace.storage.queries import keys as key_rows
from toolspace.storage.queries.keys import KeyKind, KeyRecord

CACHE_SECONDS: Final = 3.0
"""How long what was verified holds. A key that is revoked by another process works here no longer than that."""
_KNOWN_SECONDS: Final = 3600.0
"""How long credentials that were good are not slowed down by the failures of others at the same address."""
_MOST_KNOWN: Final = 20_000
_LONGEST_KNOWN: Final = 4_096
"""Bytes of credentials that are remembered. Longer ones are good too, but spaces in front of a key make many of one."""
_LOCAL: Final = "key_local"
_WAYS: Final = (
    "send a secret key (x-secret-key, or Authorization: Bearer sk_…), "
    "or a public key (x-public-key) with a token (Authorization: Bearer …)"
)

HeaderPairs = Iterable[tuple[bytes, bytes]]


class _Given(NamedTuple):
    """The headers that say who calls, as they came."""

    authorization: bytes | None
    secret: bytes | None
    public: bytes | None


class _Known(NamedTuple):
    caller: Caller
    fresh_until: float
    known_until: float


class Authenticator:
    """Knows callers by their keys and tokens. `open` one; it looks up what it has not seen lately."""

    def __init__(self, ledger: Ledger, server: ServerSettings, tokens: EntityTokens) -> None:
        self.tokens = tokens
        self.on_key_used: Callable[[str], None] = lambda key_id: None
        """Hears now and then, by its id, that a key is in use."""
        self._ledger = ledger
        self._failures = FailedLoginLimiter(server.failed_login_limit)
        self._known: dict[_Given, _Known] = {}
        self._changes = 0
        self._listeners: list[Callable[[], None]] = []
        self._configured: dict[KeyKind, str] = {}
        """Hashes of the keys that are no rows: as configured."""
        if server.secret_key is not None:
            self._configured["secret"] = hash_key(server.secret_key)
        if server.public_key is not None:
            self._configured["public"] = hash_key(server.public_key)
        self._local: set[str] = set()

    @classmethod
    async def open(cls, ledger: Ledger, server: ServerSettings) -> Authenticator:
        """With what configuration says, and the secret for tokens that was made on the first start."""
        issuer = IssuerKeys(server.jwks_url) if server.jwks_url is not None else None
        tokens = EntityTokens(
            secret=await load_jwt_secret(ledger, server),
            issuer_keys=issuer,
            claim=server.jwt_claim,
            audience=server.jwt_audience,
            issuer=server.jwt_issuer,
        )
        return cls(ledger, server, tokens)

    async def aclose(self) -> None:
        await self.tokens.aclose()

    @property
    def has_configured_secret_key(self) -> bool:
        """Whether someone gets in whatever keys are revoked."""
        return "secret" in self._configured

    def create_local_key(self) -> str:
        """A secret key that lives as long as this process, for those who may ask it directly."""
        key = generate_key("secret")
        self._local.add(hash_key(key))
        return key

    def invalidate(self) -> None:
        """Keys or entities changed here: everyone is looked up anew."""
        self._changes += 1
        self._known = {given: known._replace(fresh_until=0.0) for given, known in self._known.items()}
        for listener in self._listeners:
            listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Whom to tell that those who were let in may not be any more."""
        self._listeners.append(listener)

    def authenticate(self, pairs: HeaderPairs, address: str) -> Caller | Awaitable[Caller]:
        """Who calls: at once where that is known, else it has to be awaited. Raises `Problem` 401, 429 or 503."""
        given = _read(pairs)
        known = self._known.get(given)
        now = time.monotonic()
        if known is not None and now < known.fresh_until:
            return known.caller
        if (known is None or now > known.known_until) and not self._is_beyond_guessing(given):
            self._failures.check(address)
        return self._look_up(given, address)

    async def is_valid(self, pairs: HeaderPairs) -> bool:
        """Whether credentials that opened a stream are still good. Unknown while the database is away: raises."""
        given = _read(pairs)
        known = self._known.get(given)
        if known is not None and time.monotonic() < known.fresh_until:
            return True
        try:
            await self._look_up(given, None)
        except Problem as problem:
            if problem.status == 401:
                return False
            raise
        return True

    async def _look_up(self, given: _Given, address: str | None) -> Caller:
        changes = self._changes
        try:
            caller, seconds = await self._verify(given)
        except Problem as problem:
            self._known.pop(given, None)
            if problem.status == 401 and address is not None and given.public is None and given != _NOTHING:
                self._failures.record(address)
            raise
        if isinstance(caller, SecretKeyCaller | EntityCaller | ToolKeyCaller):
            self.on_key_used(caller.key_id)
        if changes != self._changes:
            seconds = 0.0  # What was read may be from before the change.
        if sum(len(value) for value in given if value is not None) > _LONGEST_KNOWN:
            return caller
        now = time.monotonic()
        while len(self._known) >= _MOST_KNOWN:
            self._known.pop(next(iter(self._known)))
        self._known.pop(given, None)  # To the end: the oldest go first.
        self._known[given] = _Known(caller, now + min(seconds, CACHE_SECONDS), now + _KNOWN_SECONDS)
        return caller

    def _is_beyond_guessing(self, given: _Given) -> bool:
        """Nobody guesses a signature, and new tokens come all the time, also to addresses at which someone else guesses
        keys, or has one that expired. Nor the key of this very process, by which its operator looks into it."""
        if given.public is not None or not self._local:
            return given.public is not None
        key = given.secret or (given.authorization or b"").rpartition(b" ")[2]
        return hash_key(key.decode("latin-1")) in self._local

    async def _verify(self, given: _Given) -> tuple[Caller, float]:
        """The caller, and for how many seconds that holds at most."""
        bearer = _bearer(given.authorization)
        if given.public is not None:
            if given.secret is not None:
                raise _unknown("x-secret-key and x-public-key are two different credentials; send one of them")
            return await self._verify_public(_text(given.public, "x-public-key"), bearer)
        key = _text(given.secret, "x-secret-key") if given.secret is not None else None
        if key is not None and bearer is not None and not hmac.compare_digest(key.encode(), bearer.encode()):
            raise _unknown("x-secret-key and Authorization are two different credentials; send one of them")
        key = key if key is not None else bearer
        if key is None:
            raise _unknown(f"credentials are needed: {_WAYS}")
        return await self._verify_key(key), CACHE_SECONDS

    async def _verify_key(self, key: str) -> Caller:
        digest = hash_key(key)
        if digest in self._local:
            return SecretKeyCaller(key_id=_LOCAL)
        if self._is_configured("secret", digest):
            return SecretKeyCaller(key_id=CONFIGURED_KEY_ID)
        record = await self._find(digest) if key.startswith((PREFIXES["secret"], PREFIXES["tools"])) else None
        if record is not None and record.kind == "secret":
            return SecretKeyCaller(key_id=record.id)
        if record is not None and record.kind == "tools":
            scope = record.scope
            return ToolKeyCaller(
                key_id=record.id,
                tools_allowed=scope.tools_allowed,
                tools_denied=scope.tools_denied,
                agent_entity_id=scope.agent_entity_id,
            )
        if key.startswith(PREFIXES["public"]):
            raise _unknown("a public key goes into x-public-key, with a token beside it (Authorization: Bearer …)")
        if key.count(".") == 2:
            raise _unknown("a token needs the public key beside it (x-public-key: pk_…)")
        raise _unknown("the key is unknown or was revoked")

    async def _verify_public(self, key: str, token: str | None) -> tuple[Caller, float]:
        if token is None:
            raise _unknown("a public key needs a token that names an entity (Authorization: Bearer …)")
        if token.startswith((PREFIXES["secret"], PREFIXES["tools"])):
            raise _unknown("x-public-key and the key in Authorization are two different credentials; send one of them")
        digest = hash_key(key)
        key_id = CONFIGURED_KEY_ID
        if not self._is_configured("public", digest):
            record = await self._find(digest)
            if record is None or record.kind != "public":
                raise _unknown("the public key is unknown or was revoked")
            key_id = record.id
        try:
            named = await self.tokens.verify(token)
        except InvalidToken as error:
            raise _unknown(str(error)) from None
        except IssuerUnavailable as error:
            raise unavailable(f"{error}; try again") from None
        if await self._ledger.read(entities.find_entity, named.entity_id) is None:
            raise _unknown(f'the token names "{named.entity_id}", which is no entity here')
        caller = EntityCaller(entity_id=named.entity_id, key_id=key_id, expires_at=named.expires_at)
        return caller, named.expires_at / 1000 - time.time()

    async def _find(self, digest: str) -> KeyRecord | None:
        return await self._ledger.read(key_rows.find_by_hash, digest)

    def _is_configured(self, kind: KeyKind, digest: str) -> bool:
        wanted = self._configured.get(kind)
        return wanted is not None and hmac.compare_digest(wanted, digest)


def require_bearer_token(token: str) -> Callable[[Scope], None]:
    """Returns a check that raises `Problem` 401 unless a request has `Authorization: Bearer <token>`."""
    if not token:
        raise ValueError("the token is empty, so every request would pass; give a longer one, or none")
    expected = token.encode()

    def check(scope: Scope) -> None:
        authorization = _read(scope["headers"]).authorization or b""
        scheme, _, value = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(value.strip(), expected):
            raise _unknown("A bearer token is required (Authorization: Bearer ...)")

    return check


def _read(pairs: HeaderPairs) -> _Given:
    authorization = secret = public = None
    for name, value in pairs:
        if name == b"authorization":
            if authorization is not None:
                raise _twice("Authorization")
            authorization = value
        elif name == b"x-secret-key":
            if secret is not None:
                raise _twice("x-secret-key")
            secret = value
        elif name == b"x-public-key":
            if public is not None:
                raise _twice("x-public-key")
            public = value
    return _Given(authorization, secret, public)


_NOTHING: Final = _Given(None, None, None)


def _bearer(authorization: bytes | None) -> str | None:
    if authorization is None:
        return None
    scheme, _, rest = authorization.strip(b" \t").partition(b" ")
    if scheme.lower() != b"bearer":
        raise _unknown(f"Authorization has to be Bearer and a key or token; {_WAYS}")
    return _text(rest, "Authorization: Bearer")


def _text(value: bytes, name: str) -> str:
    text = value.strip(b" \t").decode("latin-1")
    if not text:
        raise _unknown(f"{name} is empty; {_WAYS}")
    if not text.isascii() or " " in text:
        raise _unknown(f"{name} is no key or token; {_WAYS}")
    return text


def _twice(name: str) -> Problem:
    return _unknown(f"{name} is there more than once; send it once")


def _unknown(detail: str) -> Problem:
    return Problem(401, detail, headers=((b"www-authenticate", b"Bearer"),))
