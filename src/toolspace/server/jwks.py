"""The keys that an issuer of tokens publishes: fetched, kept, and fetched again. Verifies nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import aiohttp
import jwt

from toolspace.core import json_text

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

    async def fitting(self, algorithm: str, kid: str | None) -> Sequence[jwt.PyJWK]:
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
