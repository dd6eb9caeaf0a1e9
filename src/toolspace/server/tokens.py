"""Tokens that name an entity: verified against a shared secret or an issuer's published keys, and made.

Which keys fit is decided by the token's algorithm alone, and each kind of key only ever meets its own algorithms: a
published key is never taken for a shared secret, and a token without a signature fits none.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any, Final, cast

import jwt
import msgspec

from toolspace.core.ids import is_id
from toolspace.server.jwks import ALGORITHMS, IssuerKeys

LEEWAY_SECONDS: Final = 30
"""How far the clocks of two machines may differ."""
LONGEST_SECONDS: Final = 30 * 86_400
_SHARED: Final = {"HS256": hashlib.sha256, "HS384": hashlib.sha384, "HS512": hashlib.sha512}
_LONGEST_TOKEN: Final = 16 * 1024
_LATEST: Final = 253_402_300_799
"""The last second of the year 9999: a token may say any number, and one has to be able to compute with it."""


class WrongToken(Exception):
    """The token proves nothing. The message says why, without what it claims."""


class Named(msgspec.Struct, frozen=True):
    """What a token proves."""

    entity_id: str
    expires_at: int
    """Unix milliseconds, with the leeway that its clock is given."""


class Tokens:
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
    def makes(self) -> bool:
        """Whether tokens can be made here, or only by the issuer."""
        return self._secret is not None

    async def verify(self, token: str) -> Named:
        """Whom a token names. Raises `WrongToken`, or `IssuerUnavailable` where that cannot be told now."""
        if len(token) > _LONGEST_TOKEN:
            raise WrongToken(f"the token is longer than {_LONGEST_TOKEN} characters")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise WrongToken("the bearer token is no JSON Web Token") from None
        algorithm: object = header.get("alg")
        if isinstance(algorithm, str) and self._secret is not None and algorithm in _SHARED:
            if algorithm not in self._shared:
                raise WrongToken(f"the shared secret is too short for {algorithm}; sign with HS256")
            return self._named(self._claims(token, self._secret, algorithm))
        if isinstance(algorithm, str) and self._issuer_keys is not None and algorithm in ALGORITHMS:
            return await self._verify_issued(token, algorithm, header)
        known = [*(self._shared if self._secret is not None else ()), *(ALGORITHMS if self._issuer_keys else ())]
        raise WrongToken(f"the token's algorithm is not one of {', '.join(known) or '(none is configured)'}")

    def make(self, entity_id: str, seconds: int) -> tuple[str, int]:
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

    async def _verify_issued(self, token: str, algorithm: str, header: Mapping[str, Any]) -> Named:
        assert self._issuer_keys is not None
        kid: object = header.get("kid")
        keys = await self._issuer_keys.fitting(algorithm, kid if isinstance(kid, str) else None)
        if not keys:
            raise WrongToken("the token is signed with a key that its issuer does not publish")
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
            raise WrongToken("the token has expired") from None
        except jwt.InvalidSignatureError:
            raise _WrongSignature("the token's signature is wrong") from None
        except jwt.MissingRequiredClaimError as error:
            raise WrongToken(f"the token has no {error.claim} claim") from None
        except jwt.InvalidAudienceError:
            raise WrongToken("the token is for another audience") from None
        except jwt.InvalidIssuerError:
            raise WrongToken("the token is of another issuer") from None
        except jwt.ImmatureSignatureError:
            raise WrongToken("the token is not valid yet") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise WrongToken("the token cannot be read") from None

    def _named(self, claims: Mapping[str, Any]) -> Named:
        found = _claim(claims, self._claim)
        if not isinstance(found, str) or not is_id(found):
            raise WrongToken(f"the token names no entity: its claim {self._claim!r} has to be an entity's id")
        return Named(found, (min(int(claims["exp"]), _LATEST) + LEEWAY_SECONDS) * 1000)


class _WrongSignature(WrongToken):
    """Another key might still fit."""


def _claim(claims: Mapping[str, Any], name: str) -> object:
    """A claim by its name; where there is none, `app.entity` is looked for inside `app`."""
    if name in claims:
        return claims[name]
    found: object = dict(claims)
    for part in name.split("."):
        found = cast("Mapping[str, object]", found).get(part) if isinstance(found, dict) else None
    return found
