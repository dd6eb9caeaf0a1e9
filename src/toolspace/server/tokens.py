"""Tokens that name an entity: verified against a shared secret or an issuer's published keys, and made.

Which keys fit is decided by the token's algorithm alone, and each kind of key only ever meets its own algorithms: a
published key is never taken for a shared secret, and a token without a signature fits none.
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

# MERGED from jwks: The keys that an issuer of tokens publishes: fetched, kept, and fetched again. Verifies nothing.

_log = logging.getLogger("toolspace.access")

ALGORITHMS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), "RSA"),
    **dict.fromkeys(("ES256", "ES384", "ES512"), "EC"),
    "EdDSA": "OKP",
}
"""Algorithm → the type of key that it takes. None of them takes a shared secret."""
_LARGEST: Final = 1 << 20
_MOST: Final = 100


class IssuerUnavailable(Exception):
    """The issuer's keys were never fetched, and cannot be now."""


class IssuerKeys:
    """Keys by id. Those it has stay good while the issuer cannot be reached.

    A token with an unknown key makes it look again, but not more often than `pause` seconds: anyone can send one.
    """

    def __init__(self, url: str, *, pause: float = 10.0, max_age: float = 600.0, timeout: float = 5.0) -> None:
        self._url = url
        self._pause = pause
        self._max_age = max_age
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._keys: list[_Published] = []
        self._fetched_at = self._tried_at = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def find_keys(self, algorithm: str, kid: str | None) -> Sequence[jwt.PyJWK]:
        """The keys that a token of this algorithm and key id may be signed with."""
        if not self._keys:
            await self._fetch()
            if not self._keys:
                raise IssuerUnavailable("the keys of the issuer of tokens cannot be fetched now")
        elif time.monotonic() - self._fetched_at > self._max_age:
            self._begin()  # The old ones will do meanwhile.
        found = self._find(algorithm, kid)
        if not found:
            await self._fetch()
            found = self._find(algorithm, kid)
        return found

    async def aclose(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    def _find(self, algorithm: str, kid: str | None) -> list[jwt.PyJWK]:
        keys = (key.ready(algorithm) for key in self._keys if kid is None or key.kid == kid)
        return [key for key in keys if key is not None]

    async def _fetch(self) -> None:
        fetching = self._begin()
        if fetching is not None:
            # Shared by all who wait: one of them who leaves must not end it for the others.
            await asyncio.shield(fetching)

    def _begin(self) -> asyncio.Task[None] | None:
        """The fetch that is under way, or a new one; None where the last is too recent."""
        if self._fetching is None or self._fetching.done():
            if time.monotonic() - self._tried_at < self._pause:
                return None
            self._tried_at = time.monotonic()
            self._fetching = asyncio.create_task(self._refresh())
        return self._fetching

    async def _refresh(self) -> None:
        try:
            keys = _read(await self._get())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            _log.warning("the keys at %s cannot be fetched: %s", self._url, error or type(error).__name__)
            return
        self._keys = keys
        self._fetched_at = time.monotonic()

    async def _get(self) -> bytes:
        async with (
            aiohttp.ClientSession(timeout=self._timeout, trust_env=True) as session,
            session.get(self._url, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise ValueError(f"the answer is {answer.status}")
            body = bytearray()
            async for piece in answer.content.iter_chunked(65_536):
                body += piece
                if len(body) > _LARGEST:
                    raise ValueError(f"it is larger than {_LARGEST} bytes")
            return bytes(body)


class _Published:
    """One key of the set."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.kid: object = data.get("kid")
        self._data = dict(data)
        self._ready: dict[str, jwt.PyJWK | None] = {}

    def ready(self, algorithm: str) -> jwt.PyJWK | None:
        """The key for an algorithm; None where it is not meant for it, or cannot be used."""
        if algorithm not in self._ready:
            self._ready[algorithm] = self._prepare(algorithm)
        return self._ready[algorithm]

    def _prepare(self, algorithm: str) -> jwt.PyJWK | None:
        data = self._data
        if data.get("kty") != ALGORITHMS[algorithm] or data.get("use", "sig") != "sig":
            return None
        if data.get("alg", algorithm) != algorithm:
            return None
        try:
            return jwt.PyJWK(data, algorithm=algorithm)
        except (jwt.PyJWTError, ValueError, TypeError):
            return None


def _read(text: bytes) -> list[_Published]:
    document: Any = json_text.decode(text)
    found: Any = cast("Mapping[str, Any]", document).get("keys") if isinstance(document, Mapping) else None
    if not isinstance(found, list):
        raise ValueError('it is no JSON Web Key Set: {"keys": […]}')
    keys = [_Published(cast("Mapping[str, Any]", one)) for one in cast("list[Any]", found) if isinstance(one, Mapping)]
    if not keys:
        raise ValueError("it has no keys")
    return keys[:_MOST]


LEEWAY_SECONDS: Final = 30
"""How far the clocks of two machines may differ."""
MAX_TOKEN_SECONDS: Final = 30 * 86_400
_SHARED: Final = {"HS256": hashlib.sha256, "HS384": hashlib.sha384, "HS512": hashlib.sha512}
_LONGEST_TOKEN: Final = 16 * 1024
_LATEST: Final = 253_402_300_799
"""The last second of the year 9999: a token may say any number, and one has to be able to compute with it."""


class InvalidToken(Exception):
    """The token proves nothing. The message says why, without what it claims."""


class TokenClaims(msgspec.Struct, frozen=True):
    """What a token proves."""

    entity_id: str
    expires_at: int
    """Unix milliseconds, with the leeway that its clock is given."""


class EntityTokens:
    """Reads and makes tokens. With neither a secret nor an issuer it takes none."""

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
        # A secret shorter than the digest would weaken it.
        room = len(secret.encode()) if secret is not None else 0
        self._shared = [name for name, digest in _SHARED.items() if digest().digest_size <= room]

    @property
    def can_create(self) -> bool:
        """Whether tokens can be made here, or only by the issuer."""
        return self._secret is not None

    async def verify(self, token: str) -> TokenClaims:
        """Whom a token names. Raises `WrongToken`, or `IssuerUnavailable` where that cannot be told now."""
        if len(token) > _LONGEST_TOKEN:
            raise InvalidToken(f"the token is longer than {_LONGEST_TOKEN} characters")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise InvalidToken("the bearer token is no JSON Web Token") from None
        algorithm: object = header.get("alg")
        if isinstance(algorithm, str) and self._secret is not None and algorithm in _SHARED:
            if algorithm not in self._shared:
                raise InvalidToken(f"the shared secret is too short for {algorithm}; sign with HS256")
            return self._named(self._claims(token, self._secret, algorithm))
        if isinstance(algorithm, str) and self._issuer_keys is not None and algorithm in ALGORITHMS:
            return await self._verify_issued(token, algorithm, header)
        known = [*(self._shared if self._secret is not None else ()), *(ALGORITHMS if self._issuer_keys else ())]
        raise InvalidToken(f"the token's algorithm is not one of {', '.join(known) or '(none is configured)'}")

    def create(self, entity_id: str, seconds: int) -> tuple[str, int]:
        """A token for an entity, and when it ends, in Unix milliseconds."""
        if self._secret is None:
            raise RuntimeError("tokens are made by the issuer that is configured")
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
            raise InvalidToken("the token is signed with a key that its issuer does not publish")
        for key in keys[:-1]:
            try:
                return self._named(self._claims(token, key, algorithm))
            except _WrongSignature:
                continue  # A token without a key id may be of any of them.
        return self._named(self._claims(token, keys[-1], algorithm))

    def _claims(self, token: str, key: jwt.PyJWK | str, algorithm: str) -> Mapping[str, Any]:
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
        except jwt.ExpiredSignatureError:
            raise InvalidToken("the token has expired") from None
        except jwt.InvalidSignatureError:
            raise _WrongSignature("the token's signature is wrong") from None
        except jwt.MissingRequiredClaimError as error:
            raise InvalidToken(f"the token has no {error.claim} claim") from None
        except jwt.InvalidAudienceError:
            raise InvalidToken("the token is for another audience") from None
        except jwt.InvalidIssuerError:
            raise InvalidToken("the token is of another issuer") from None
        except jwt.ImmatureSignatureError:
            raise InvalidToken("the token is not valid yet") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise InvalidToken("the token cannot be read") from None

    def _named(self, claims: Mapping[str, Any]) -> TokenClaims:
        found = _claim(claims, self._claim)
        if not isinstance(found, str) or not is_id(found):
            raise InvalidToken(f"the token names no entity: its claim {self._claim!r} has to be an entity's id")
        return TokenClaims(found, (min(int(claims["exp"]), _LATEST) + LEEWAY_SECONDS) * 1000)


class _WrongSignature(InvalidToken):
    """Another key might still fit."""


def _claim(claims: Mapping[str, Any], name: str) -> object:
    """A claim by its name; where there is none, `app.entity` is looked for inside `app`."""
    if name in claims:
        return claims[name]
    found: object = dict(claims)
    for part in name.split("."):
        found = cast("Mapping[str, object]", found).get(part) if isinstance(found, dict) else None
    return found
