"""JSON Web Tokens that name an entity: verifies them with a shared secret or an issuer's public keys, and creates them.

The algorithm of a token selects the kind of key. A public key is never used as a shared secret, and a token without a
signature is never accepted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import aiohttp
import jwt
import msgspec

from toolspace.core import json_text
from toolspace.core.ids import is_id

_log = logging.getLogger("toolspace.access")

LEEWAY_SECONDS: Final = 30
"""How far the clocks of two machines may differ."""
MAX_TOKEN_SECONDS: Final = 30 * 86_400
ISSUER_ALGORITHMS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), "RSA"),
    **dict.fromkeys(("ES256", "ES384", "ES512"), "EC"),
    "EdDSA": "OKP",
}
"""Algorithm → the type of public key that it needs."""
_SECRET_ALGORITHMS: Final = {"HS256": hashlib.sha256, "HS384": hashlib.sha384, "HS512": hashlib.sha512}
_REASONS: Final[Mapping[type[Exception], str]] = {
    jwt.ExpiredSignatureError: "has expired",
    jwt.InvalidAudienceError: "is for another audience",
    jwt.InvalidIssuerError: "is from another issuer",
    jwt.ImmatureSignatureError: "is not valid yet",
}
_MAX_TOKEN_LENGTH: Final = 16 * 1024
_MAX_EXPIRY: Final = 253_402_300_799
"""The last second of the year 9999. A later `exp` counts as this one."""
_MAX_KEY_SET_BYTES: Final = 1 << 20
_MAX_KEYS: Final = 100


class InvalidToken(Exception):
    """A token is not accepted. The message says why, without quoting the token's claims."""


class IssuerUnavailable(Exception):
    """The keys of the issuer were never fetched and cannot be fetched now."""


class TokenClaims(msgspec.Struct, frozen=True):
    """What a valid token says."""

    entity_id: str
    expires_at: int
    """Unix milliseconds, including the leeway."""


class EntityTokens:
    """Verifies and creates tokens. With neither a secret nor an issuer it accepts none."""

    def __init__(
        self,
        *,
        secret: str | None,
        issuer_keys: IssuerKeys | None = None,
        claim: str = "sub",
        audience: str | None = None,
        issuer: str | None = None,
    ) -> None:
        self._secret = secret
        self._issuer_keys = issuer_keys
        self._claim = claim
        self._audience = audience
        self._issuer = issuer
        # A secret that is shorter than the digest would weaken the signature.
        secret_bytes = len(secret.encode()) if secret is not None else 0
        self._secret_algorithms = [
            name for name, digest in _SECRET_ALGORITHMS.items() if digest().digest_size <= secret_bytes
        ]

    @property
    def can_create(self) -> bool:
        """Whether tokens can be created here. Otherwise only the issuer creates them."""
        return self._secret is not None

    async def verify(self, token: str) -> TokenClaims:
        """Returns the claims of a token. Raises `InvalidToken`, or `IssuerUnavailable` if it cannot be verified now."""
        if len(token) > _MAX_TOKEN_LENGTH:
            raise InvalidToken(f"The token is longer than {_MAX_TOKEN_LENGTH} characters")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise InvalidToken("The bearer token is not a JSON Web Token") from None
        algorithm: object = header.get("alg")
        if isinstance(algorithm, str) and self._secret is not None and algorithm in _SECRET_ALGORITHMS:
            if algorithm not in self._secret_algorithms:
                raise InvalidToken(f"The JWT secret is too short for {algorithm}; sign with HS256")
            return self._read_claims(self._decode(token, self._secret, algorithm))
        if isinstance(algorithm, str) and self._issuer_keys is not None and algorithm in ISSUER_ALGORITHMS:
            return await self._verify_issued(token, algorithm, header)
        algorithms = [*self._secret_algorithms, *(ISSUER_ALGORITHMS if self._issuer_keys else ())]
        raise InvalidToken(f"The token's algorithm is not accepted; accepted: {', '.join(algorithms) or 'none'}")

    def create(self, entity_id: str, seconds: int) -> tuple[str, int]:
        """Returns a token for an entity, and when it expires, in Unix milliseconds."""
        if self._secret is None:
            raise RuntimeError("tokens are created by the configured issuer")
        now = int(time.time())
        claims: dict[str, Any] = {self._claim: entity_id, "iat": now, "exp": now + seconds}
        if self._audience is not None:
            claims["aud"] = self._audience
        if self._issuer is not None:
            claims["iss"] = self._issuer
        return jwt.encode(claims, self._secret, algorithm="HS256"), (now + seconds) * 1000

    async def aclose(self) -> None:
        if self._issuer_keys is not None:
            await self._issuer_keys.aclose()

    async def _verify_issued(self, token: str, algorithm: str, header: Mapping[str, Any]) -> TokenClaims:
        assert self._issuer_keys is not None
        kid: object = header.get("kid")
        keys = await self._issuer_keys.find_keys(algorithm, kid if isinstance(kid, str) else None)
        if not keys:
            raise InvalidToken("The token is signed with a key that its issuer does not publish")
        for key in keys[:-1]:
            try:
                return self._read_claims(self._decode(token, key, algorithm))
            except _InvalidSignature:
                continue  # A token without a key id may be signed with any of the keys.
        return self._read_claims(self._decode(token, keys[-1], algorithm))

    def _decode(self, token: str, key: jwt.PyJWK | str, algorithm: str) -> Mapping[str, Any]:
        try:
            return jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                leeway=LEEWAY_SECONDS,
                audience=self._audience,
                issuer=self._issuer,
                options={"require": ["exp"], "verify_aud": self._audience is not None},
            )
        except jwt.InvalidSignatureError:
            raise _InvalidSignature("The token's signature is invalid") from None
        except jwt.MissingRequiredClaimError as error:
            raise InvalidToken(f"The token has no {error.claim} claim") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
            reasons = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
            raise InvalidToken(f"The token {next(reasons, 'cannot be decoded')}") from None

    def _read_claims(self, claims: Mapping[str, Any]) -> TokenClaims:
        entity_id = _find_claim(claims, self._claim)
        if not isinstance(entity_id, str) or not is_id(entity_id):
            raise InvalidToken(f"The token names no entity: its claim {self._claim!r} must be the id of an entity")
        return TokenClaims(entity_id, (min(int(claims["exp"]), _MAX_EXPIRY) + LEEWAY_SECONDS) * 1000)


class _InvalidSignature(InvalidToken):
    """The signature does not match this key. It may match another key of the issuer."""


class IssuerKeys:
    """Fetches and caches the public keys of a token issuer (JWKS). Verifies nothing.

    Cached keys stay valid while the issuer cannot be reached. A token with an unknown key id triggers a fetch, at most
    every `pause` seconds, because anyone can send such a token.
    """

    def __init__(self, url: str, *, pause: float = 10.0, max_age: float = 600.0, timeout: float = 5.0) -> None:
        self._url = url
        self._pause = pause
        self._max_age = max_age
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._keys: list[_PublicKey] = []
        self._fetched_at = self._tried_at = float("-inf")
        self._fetch_task: asyncio.Task[None] | None = None

    async def find_keys(self, algorithm: str, kid: str | None) -> Sequence[jwt.PyJWK]:
        """Returns the keys with which a token of this algorithm and key id may be signed."""
        if not self._keys:
            await self._fetch()
            if not self._keys:
                raise IssuerUnavailable("The keys of the token issuer cannot be fetched")
        elif time.monotonic() - self._fetched_at > self._max_age:
            self._start_fetch()  # In the background; the old keys are used meanwhile.
        keys = self._find_cached(algorithm, kid)
        if not keys:
            await self._fetch()
            keys = self._find_cached(algorithm, kid)
        return keys

    async def aclose(self) -> None:
        if self._fetch_task is not None:
            self._fetch_task.cancel()
            await asyncio.gather(self._fetch_task, return_exceptions=True)

    def _find_cached(self, algorithm: str, kid: str | None) -> list[jwt.PyJWK]:
        keys = (key.prepare(algorithm) for key in self._keys if kid is None or key.kid == kid)
        return [key for key in keys if key is not None]

    async def _fetch(self) -> None:
        if (task := self._start_fetch()) is not None:
            # Shielded: several requests share the fetch, and one that is cancelled must not cancel it for the others.
            await asyncio.shield(task)

    def _start_fetch(self) -> asyncio.Task[None] | None:
        """Returns the running fetch or a new one; None if the last one is too recent."""
        if self._fetch_task is None or self._fetch_task.done():
            if time.monotonic() - self._tried_at < self._pause:
                return None
            self._tried_at = time.monotonic()
            self._fetch_task = asyncio.create_task(self._refresh())
        return self._fetch_task

    async def _refresh(self) -> None:
        try:
            keys = _parse_key_set(await self._download())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            _log.warning("cannot fetch the token issuer's keys from %s: %s", self._url, error or type(error).__name__)
            return
        self._keys = keys
        self._fetched_at = time.monotonic()

    async def _download(self) -> bytes:
        async with (
            aiohttp.ClientSession(timeout=self._timeout, trust_env=True) as session,
            session.get(self._url, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise ValueError(f"HTTP status {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_chunked(65_536):
                body += chunk
                if len(body) > _MAX_KEY_SET_BYTES:
                    raise ValueError(f"larger than {_MAX_KEY_SET_BYTES} bytes")
            return bytes(body)


class _PublicKey:
    """One key of a JSON Web Key Set."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.kid: object = data.get("kid")
        self._data = dict(data)
        self._keys_by_algorithm: dict[str, jwt.PyJWK | None] = {}

    def prepare(self, algorithm: str) -> jwt.PyJWK | None:
        """Returns the key for an algorithm; None if it is for another algorithm or purpose, or invalid."""
        if algorithm not in self._keys_by_algorithm:
            self._keys_by_algorithm[algorithm] = self._parse(algorithm)
        return self._keys_by_algorithm[algorithm]

    def _parse(self, algorithm: str) -> jwt.PyJWK | None:
        data = self._data
        expected = {"kty": ISSUER_ALGORITHMS[algorithm], "use": "sig", "alg": algorithm}
        if "kty" not in data or any(data.get(name, value) != value for name, value in expected.items()):
            return None
        try:
            return jwt.PyJWK(data, algorithm=algorithm)
        except (jwt.PyJWTError, ValueError, TypeError):
            return None


def _parse_key_set(text: bytes) -> list[_PublicKey]:
    document: Any = json_text.decode(text)
    items: Any = cast("Mapping[str, Any]", document).get("keys") if isinstance(document, Mapping) else None
    if not isinstance(items, list):
        raise ValueError('not a JSON Web Key Set ({"keys": […]})')
    keys = [
        _PublicKey(cast("Mapping[str, Any]", item)) for item in cast("list[Any]", items) if isinstance(item, Mapping)
    ]
    if not keys:
        raise ValueError("the key set is empty")
    return keys[:_MAX_KEYS]


def _find_claim(claims: Mapping[str, Any], name: str) -> object:
    """Returns a claim by name. If there is none, a name such as `app.entity` is a path: `entity` inside `app`."""
    if name in claims:
        return claims[name]
    value: object = dict(claims)
    for part in name.split("."):
        value = cast("Mapping[str, object]", value).get(part) if isinstance(value, dict) else None
    return value
