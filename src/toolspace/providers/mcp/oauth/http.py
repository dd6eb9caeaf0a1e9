"""The HTTP of OAuth: where it may go, how much is taken, what a token endpoint says. Stores nothing.

On a client of its own: no trace, header or time limit of the server's connection touches a token.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Self
from urllib.parse import quote

import httpx2
import msgspec

from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.oauth.settings import OAuthSettings, find_url_problem
from toolspace.providers.mcp.oauth.token_store import StoredLogin

_MOST_BYTES = 256 * 1024
_PATIENCE = 30.0
"""Seconds for one request to an authorization server, its answer included."""
_MARGIN = 30.0
_LONGEST_LIFE = 10 * 365 * 86400
_TOKEN = re.compile(r"[\x21-\x7e]{1,16384}")
_INTERNAL_ERROR = -32603
FORM = "application/x-www-form-urlencoded"


class AuthChallenge(msgspec.Struct, frozen=True, kw_only=True):
    """How a server turned a request down, whatever library sent it."""

    status: int
    challenge: str = ""
    """Its `WWW-Authenticate`."""
    protocol_version: str | None = None
    """The request's `MCP-Protocol-Version`."""

    @classmethod
    def from_response(cls, response: httpx2.Response) -> Self:
        return cls(
            status=response.status_code,
            challenge=response.headers.get("WWW-Authenticate", ""),
            protocol_version=response.request.headers.get("MCP-Protocol-Version"),
        )

    @property
    def requires_login(self) -> bool:
        return self.status == 401 or self.needs_more_scope

    @property
    def needs_more_scope(self) -> bool:
        """Whether the token is good, and its rights are too few."""
        return self.status == 403 and self.get_parameter("error") == "insufficient_scope"

    def get_parameter(self, field: str) -> str | None:
        """A value of the challenge, fit to be shown."""
        match = re.search(rf'\b{field}=(?:"([^"]*)"|([^\s,]+))', self.challenge[:4096])
        return None if match is None else format_error(match[1] or match[2], None)


class _BoundedBody(httpx2.AsyncByteStream):
    """A body of which only so much is taken."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        chunks = aiter(self._stream)
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > _MOST_BYTES:
                    raise ProviderError(f"an answer about authorization was longer than {_MOST_BYTES // 1024} KiB")
                yield chunk
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _OtherBody(httpx2.AsyncByteStream):
    """A body of ours in the place of the one that came."""

    def __init__(self, body: bytes, stream: httpx2.AsyncByteStream) -> None:
        self._body, self._stream = body, stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._body

    async def aclose(self) -> None:
        await self._stream.aclose()


def limit_body(response: httpx2.Response) -> None:
    """Limits what may be read of a response."""
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _BoundedBody(response.stream)


def replace_with_error(response: httpx2.Response, error: ProviderError) -> None:
    """Makes a refusal tell the reason as a JSON-RPC error, which fails the one request; an exception would take the
    MCP library's whole connection down.
    """
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": _INTERNAL_ERROR, "message": str(error)}}
    response.stream = _OtherBody(msgspec.json.encode(body), response.stream)
    for name in ("content-length", "content-encoding", "transfer-encoding"):
        response.headers.pop(name, None)
    response.headers["content-type"] = "application/json"


@functools.cache
def _trust() -> ssl.SSLContext:
    """The certificates that are believed. Loading them takes longer than a login's requests, so once."""
    return httpx2.create_ssl_context()


class OAuthHttpClient:
    """Sends what OAuth needs sent, and only to where it may go: most of the URLs come from the server."""

    def __init__(self, name: str, url: str) -> None:
        self._name, self._url = name, url
        self._client = httpx2.AsyncClient(timeout=_PATIENCE, verify=_trust())

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    async def send(self, request: httpx2.Request, *, head_only: bool = False) -> httpx2.Response:
        """The answer, with its body unless that does not matter."""
        url = str(request.url)
        shown = f"{request.url.scheme}://{request.url.host}{request.url.path}"[:200]
        if (refused := find_url_problem(url, seen_from=self._url)) is not None:
            raise ProviderError(f"server {self._name!r} names {shown!r} for its login, which {refused}")
        request.headers["Accept-Encoding"] = "identity"  # A small body must not grow to a huge one.
        try:
            async with asyncio.timeout(_PATIENCE):
                response = await self._client.send(request, stream=True)
                try:
                    if not head_only:
                        limit_body(response)
                        await response.aread()
                finally:
                    await response.aclose()
                return response
        except (httpx2.HTTPError, TimeoutError) as error:
            reason = "no answer in time" if isinstance(error, TimeoutError | httpx2.TimeoutException) else error
            raise ProviderError(f"server {self._name!r}: cannot reach {shown!r} for its login: {reason}") from None


class TokenResponse(msgspec.Struct, omit_defaults=True):
    """A token endpoint's answer, as far as we need it."""

    access_token: str
    token_type: str = "Bearer"
    expires_in: int | float | str | None = None
    scope: str | None = None
    refresh_token: str | None = None


def parse_token_response(name: str, answer: httpx2.Response) -> TokenResponse:
    try:
        tokens = msgspec.json.decode(answer.content, type=TokenResponse)
        if tokens.token_type.lower() != "bearer":
            raise ValueError
        for token in (tokens.access_token, tokens.refresh_token):
            if token is not None and not _TOKEN.fullmatch(token):
                raise ValueError
        life = 0.0 if tokens.expires_in is None else float(tokens.expires_in)
        # Some say 0 where they mean that they do not know.
        tokens.expires_in = int(min(life, _LONGEST_LIFE)) if life >= 1 else None
    except (ValueError, OverflowError, RecursionError):  # Without its text, which may quote a token.
        raise ProviderError(
            f"login to server {name!r} failed: its authorization server gave something that is no bearer token"
        ) from None
    return tokens


def compute_renewal_time(expires_in: int | float | str | None) -> float | None:
    if expires_in is None:
        return None
    life = float(expires_in)
    return time.time() + life - min(_MARGIN, life / 10)


async def refresh_login(
    name: str, login: StoredLogin, settings: OAuthSettings, http: OAuthHttpClient
) -> StoredLogin | None:
    """A new login by the refresh token, or None where it is no longer accepted."""
    assert login.refresh_token is not None
    data = {"grant_type": "refresh_token", "refresh_token": login.refresh_token}
    if login.resource is not None:
        data["resource"] = login.resource
    answer = await http.send(_token_request(login.token_endpoint, data, login, settings))
    if answer.status_code in (400, 401, 403):
        return None
    if answer.status_code not in (200, 201):
        # A passing trouble: the refresh token stays good.
        raise ProviderError(f"cannot renew the login to server {name!r} now: {describe_oauth_error(answer)}")
    tokens = parse_token_response(name, answer)
    return msgspec.structs.replace(
        login,
        access_token=tokens.access_token,
        refresh_token=tokens.refresh_token or login.refresh_token,
        renew_at=compute_renewal_time(tokens.expires_in),
        scope=tokens.scope or login.scope,
    )


async def revoke_login(login: StoredLogin, settings: OAuthSettings, http: OAuthHttpClient) -> None:
    """Tells the authorization server that the login is over (RFC 7009), where it wants to know."""
    if login.revocation_endpoint is not None:
        token = login.refresh_token or login.access_token
        await http.send(_token_request(login.revocation_endpoint, {"token": token}, login, settings))


def _token_request(url: str, data: dict[str, str], login: StoredLogin, settings: OAuthSettings) -> httpx2.Request:
    headers: dict[str, str] = {}
    secret = settings.client_secret or login.client_secret
    data = {**data, "client_id": login.client_id}
    if secret is not None and login.client_auth == "client_secret_basic":
        pair = f"{quote(login.client_id, safe='')}:{quote(secret, safe='')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    elif secret is not None and login.client_auth == "client_secret_post":
        data["client_secret"] = secret
    return httpx2.Request("POST", url, data=data, headers=headers)


def describe_oauth_error(answer: httpx2.Response) -> str:
    """An OAuth error answer in words: its code and description (RFC 6749, 5.2), nothing else of the body."""
    status = f"HTTP {answer.status_code}"
    try:
        body: Any = msgspec.json.decode(answer.content)
        words = format_error(body["error"], body.get("error_description"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return status
    return f"{words} ({status})"


def format_error(error: object, description: object) -> str:
    words = f"{error}: {description}" if description else str(error)
    return mask_secrets("".join(char if char.isprintable() else " " for char in words[:300]))
