"""Authentication: identifies the caller from the headers of a request. `authorization` decides what the caller may do.

Most requests take one dictionary lookup. A verified caller is cached for `CACHE_SECONDS`, so that a key which another
process revoked stops working soon; a key which this process revokes stops working at once.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

from toolspace.config.server_settings import ServerSettings
from toolspace.server.access_tokens import EntityTokens, InvalidToken, IssuerKeys, IssuerUnavailable
from toolspace.server.api_keys import PREFIXES, generate_key, hash_key, load_jwt_secret
from toolspace.server.authorization import CONFIGURED_KEY_ID, Caller, EntityCaller, SecretKeyCaller, ToolKeyCaller
from toolspace.server.rate_limit import FailedLoginLimiter
from toolspace.server.requests import Scope
from toolspace.server.responses import Problem, unavailable
from toolspace.server.tool_permissions import create_tool_key_caller
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import entities_and_spaces
from toolspace.storage.queries import keys as key_rows
from toolspace.storage.queries.keys import KeyKind

CACHE_SECONDS: Final = 3.0
"""How long a verified caller is cached, and a key that another process revoked still works here."""
_TRUSTED_SECONDS: Final = 3600.0
"""How long valid credentials are exempt from the limit on failed logins from the same address."""
_MAX_CACHED: Final = 20_000
_MAX_CACHED_LENGTH: Final = 4_096
"""Bytes of credentials that are cached. Longer ones work too, but padding could create many entries for one key."""
_LOCAL_KEY_ID: Final = "key_local"
_HOW_TO_AUTHENTICATE: Final = (
    "send a secret key (x-secret-key, or Authorization: Bearer sk_…), "
    "or a public key (x-public-key) with a token (Authorization: Bearer …)"
)

_CREDENTIAL_HEADERS: Final = {
    b"authorization": "Authorization",
    b"x-secret-key": "x-secret-key",
    b"x-public-key": "x-public-key",
}
"""In the order of `_Credentials`."""

HeaderPairs = Iterable[tuple[bytes, bytes]]
IdentifiedCaller = SecretKeyCaller | EntityCaller | ToolKeyCaller


class _Credentials(NamedTuple):
    """The headers with credentials, as they were sent."""

    authorization: bytes | None = None
    secret_key: bytes | None = None
    public_key: bytes | None = None


class _CachedCaller(NamedTuple):
    caller: Caller
    valid_until: float
    trusted_until: float


class Authenticator:
    """Identifies callers by their keys and tokens. Create one with `open`."""

    def __init__(self, ledger: Ledger, server: ServerSettings, tokens: EntityTokens) -> None:
        self.tokens = tokens
        self.on_key_used: Callable[[str], None] = lambda key_id: None
        """Called with the id of a key each time the key is verified."""
        self._ledger = ledger
        self._failed_logins = FailedLoginLimiter(server.failed_login_limit)
        self._cache: dict[_Credentials, _CachedCaller] = {}
        self._changes = 0
        self._listeners: list[Callable[[], None]] = []
        configured_keys: dict[KeyKind, str | None] = {"secret": server.secret_key, "public": server.public_key}
        self._configured_hashes = {kind: hash_key(key) for kind, key in configured_keys.items() if key is not None}
        """Hashes of the keys from the configuration, which have no database row."""
        self._local_hashes: set[str] = set()

    @classmethod
    async def open(cls, ledger: Ledger, server: ServerSettings) -> Authenticator:
        """Creates an authenticator from the configuration and the stored JWT secret."""
        issuer_keys = IssuerKeys(server.jwks_url) if server.jwks_url is not None else None
        tokens = EntityTokens(
            secret=await load_jwt_secret(ledger, server),
            issuer_keys=issuer_keys,
            claim=server.jwt_claim,
            audience=server.jwt_audience,
            issuer=server.jwt_issuer,
        )
        return cls(ledger, server, tokens)

    async def aclose(self) -> None:
        await self.tokens.aclose()

    @property
    def has_configured_secret_key(self) -> bool:
        """Whether access remains even if all stored keys are revoked."""
        return "secret" in self._configured_hashes

    @property
    def cached_count(self) -> int:
        return len(self._cache)

    def create_local_key(self) -> str:
        """Creates a secret key that is valid while this process runs. Commands of the same user get it."""
        key = generate_key("secret")
        self._local_hashes.add(hash_key(key))
        return key

    def invalidate(self) -> None:
        """Verifies all callers again, because keys or entities changed."""
        self._changes += 1
        self._cache = {credentials: entry._replace(valid_until=0.0) for credentials, entry in self._cache.items()}
        for listener in self._listeners:
            listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Registers a function that is called when callers may have lost their access."""
        self._listeners.append(listener)

    def authenticate(self, pairs: HeaderPairs, address: str) -> Caller | Awaitable[Caller]:
        """Returns the caller if it is cached, else an awaitable. Raises `Problem` 401, 429 or 503."""
        credentials = _read_credentials(pairs)
        entry = self._cache.get(credentials)
        now = time.monotonic()
        if entry is not None and now < entry.valid_until:
            return entry.caller
        if (entry is None or now > entry.trusted_until) and not self._is_unguessable(credentials):
            self._failed_logins.check(address)
        return self._verify_and_cache(credentials, address)

    async def is_valid(self, pairs: HeaderPairs) -> bool:
        """Whether the credentials of an open stream are still valid. Raises if the database is unavailable."""
        credentials = _read_credentials(pairs)
        entry = self._cache.get(credentials)
        if entry is not None and time.monotonic() < entry.valid_until:
            return True
        try:
            await self._verify_and_cache(credentials, None)
        except Problem as problem:
            if problem.status == 401:
                return False
            raise
        return True

    async def _verify_and_cache(self, credentials: _Credentials, address: str | None) -> Caller:
        changes = self._changes
        try:
            caller, seconds = await self._verify(credentials)
        except Problem as problem:
            self._cache.pop(credentials, None)
            is_guess = credentials.public_key is None and credentials != _Credentials()
            if problem.status == 401 and address is not None and is_guess:
                self._failed_logins.record(address)
            raise
        self.on_key_used(caller.key_id)
        if changes != self._changes:
            seconds = 0.0  # The caller may have been read before the change.
        if sum(len(value) for value in credentials if value is not None) > _MAX_CACHED_LENGTH:
            return caller
        now = time.monotonic()
        while len(self._cache) >= _MAX_CACHED:
            self._cache.pop(next(iter(self._cache)))
        self._cache.pop(credentials, None)  # Moves it to the end: the oldest entries are dropped first.
        self._cache[credentials] = _CachedCaller(caller, now + min(seconds, CACHE_SECONDS), now + _TRUSTED_SECONDS)
        return caller

    def _is_unguessable(self, credentials: _Credentials) -> bool:
        """Whether the limit on failed logins does not apply.

        A token has a signature, and new tokens also come from addresses where another client guesses keys. The local
        key belongs to the operator of this process.
        """
        if credentials.public_key is not None or not self._local_hashes:
            return credentials.public_key is not None
        key = credentials.secret_key or (credentials.authorization or b"").rpartition(b" ")[2]
        return hash_key(key.decode("latin-1")) in self._local_hashes

    async def _verify(self, credentials: _Credentials) -> tuple[IdentifiedCaller, float]:
        """Returns the caller, and for how many seconds it may be cached."""
        bearer = _parse_bearer(credentials.authorization)
        if credentials.public_key is not None:
            if credentials.secret_key is not None:
                raise _refusal("x-secret-key and x-public-key are different credentials; send one of them")
            return await self._verify_entity(_parse_key(credentials.public_key, "x-public-key"), bearer)
        key = None if credentials.secret_key is None else _parse_key(credentials.secret_key, "x-secret-key")
        if key is not None and bearer is not None and not hmac.compare_digest(key.encode(), bearer.encode()):
            raise _refusal("x-secret-key and Authorization are different credentials; send one of them")
        key = key if key is not None else bearer
        if key is None:
            raise _refusal(f"Credentials are required: {_HOW_TO_AUTHENTICATE}")
        return await self._verify_key(key), CACHE_SECONDS

    async def _verify_key(self, key: str) -> IdentifiedCaller:
        hash = hash_key(key)
        if hash in self._local_hashes:
            return SecretKeyCaller(key_id=_LOCAL_KEY_ID)
        if self._is_configured("secret", hash):
            return SecretKeyCaller(key_id=CONFIGURED_KEY_ID)
        record = None
        if key.startswith((PREFIXES["secret"], PREFIXES["tools"])):
            record = await self._ledger.read(key_rows.find_by_hash, hash)
        if record is not None and record.kind == "secret":
            return SecretKeyCaller(key_id=record.id)
        if record is not None and record.kind == "tools":
            return create_tool_key_caller(record)
        if key.startswith(PREFIXES["public"]):
            raise _refusal("Send a public key as x-public-key, with a token (Authorization: Bearer …)")
        if key.count(".") == 2:
            raise _refusal("A token requires the public key (x-public-key: pk_…)")
        raise _refusal("The key is unknown or was revoked")

    async def _verify_entity(self, key: str, token: str | None) -> tuple[IdentifiedCaller, float]:
        if token is None:
            raise _refusal("A public key requires a token of an entity (Authorization: Bearer …)")
        if token.startswith((PREFIXES["secret"], PREFIXES["tools"])):
            raise _refusal("x-public-key and the key in Authorization are different credentials; send one of them")
        hash = hash_key(key)
        key_id = CONFIGURED_KEY_ID
        if not self._is_configured("public", hash):
            record = await self._ledger.read(key_rows.find_by_hash, hash)
            if record is None or record.kind != "public":
                raise _refusal("The public key is unknown or was revoked")
            key_id = record.id
        try:
            claims = await self.tokens.verify(token)
        except InvalidToken as error:
            raise _refusal(str(error)) from None
        except IssuerUnavailable as error:
            raise unavailable(f"{error}; try again") from None
        if await self._ledger.read(entities_and_spaces.find_entity, claims.entity_id) is None:
            raise _refusal(f'The entity "{claims.entity_id}" of the token does not exist')
        caller = EntityCaller(entity_id=claims.entity_id, key_id=key_id, expires_at=claims.expires_at)
        return caller, claims.expires_at / 1000 - time.time()

    def _is_configured(self, kind: KeyKind, hash: str) -> bool:
        configured_hash = self._configured_hashes.get(kind)
        return configured_hash is not None and hmac.compare_digest(configured_hash, hash)


def require_bearer_token(token: str) -> Callable[[Scope], None]:
    """Returns a check that raises `Problem` 401 unless a request has `Authorization: Bearer <token>`."""
    if not token:
        raise ValueError("the token is empty, so every request would pass; give a longer one, or none")
    expected = token.encode()

    def check(scope: Scope) -> None:
        authorization = _read_credentials(scope["headers"]).authorization or b""
        scheme, _, value = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(value.strip(), expected):
            raise _refusal("A bearer token is required (Authorization: Bearer …)")

    return check


def _read_credentials(pairs: HeaderPairs) -> _Credentials:
    values: dict[bytes, bytes] = {}
    for name, value in pairs:
        if name in _CREDENTIAL_HEADERS:
            if name in values:
                raise _refusal(f"The header {_CREDENTIAL_HEADERS[name]} appears more than once; send it once")
            values[name] = value
    return _Credentials(*map(values.get, _CREDENTIAL_HEADERS))


def _parse_bearer(authorization: bytes | None) -> str | None:
    if authorization is None:
        return None
    scheme, _, value = authorization.strip(b" \t").partition(b" ")
    if scheme.lower() != b"bearer":
        raise _refusal(f"Authorization must be Bearer with a key or a token; {_HOW_TO_AUTHENTICATE}")
    return _parse_key(value, "Authorization: Bearer")


def _parse_key(value: bytes, header: str) -> str:
    text = value.strip(b" \t").decode("latin-1")
    if not text:
        raise _refusal(f"{header} is empty; {_HOW_TO_AUTHENTICATE}")
    if not text.isascii() or " " in text:
        raise _refusal(f"{header} is not a key or a token; {_HOW_TO_AUTHENTICATE}")
    return text


def _refusal(detail: str) -> Problem:
    return Problem(401, detail, headers=((b"www-authenticate", b"Bearer"),))
