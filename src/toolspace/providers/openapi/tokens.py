"""Access tokens by client credentials: fetched when needed, shared by all calls, kept until they expire."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from typing import Any, cast
from urllib.parse import quote_plus, urlencode

import msgspec
from yarl import URL

from toolspace.core import json_text
from toolspace.core.secret_masking import redact
from toolspace.errors import ToolError, ToolTransportError
from toolspace.providers.rest.client import HttpClient
from toolspace.providers.rest.request import Request

_MAX_BYTES = 1 << 20
_MARGIN = 30.0
"""Seconds before its end at which a token is not used any more: a request takes time to arrive."""
_PATIENCE = 30.0


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for tokens, and where."""

    token_url: URL
    client_id: str
    client_secret: str
    scopes: tuple[str, ...] = ()
    in_body: bool = False
    """Whether id and secret go in the form, for servers that take no basic authentication."""

    def __repr__(self) -> str:
        return f"Client({self.token_url.host})"


class Tokens:
    """The token of one client for one set of scopes."""

    def __init__(self, client: Client, http: HttpClient, scheme: str) -> None:
        self._client = client
        self._http = http
        self._scheme = scheme
        self._token: str | None = None
        self._until = 0.0
        self._fetching: asyncio.Task[str] | None = None

    async def get(self) -> str:
        """A token that holds. Calls that need one at the same time wait for the same answer."""
        if self._token is not None and time.monotonic() < self._until:
            return self._token
        loop = asyncio.get_running_loop()
        if self._fetching is None or self._fetching.done() or self._fetching.get_loop() is not loop:
            self._fetching = loop.create_task(self._fetch())
            self._fetching.add_done_callback(_retrieve)
        # Shielded: a caller that goes away must not take the others' token with it.
        return await asyncio.shield(self._fetching)

    def forget(self, token: str) -> None:
        """The service did not accept it. Another that came meanwhile stays."""
        if token == self._token:
            self._token = None

    async def aclose(self) -> None:
        if self._fetching is not None and not self._fetching.done():
            self._fetching.cancel()
            await asyncio.wait((self._fetching,))

    async def _fetch(self) -> str:
        client = self._client
        form = {"grant_type": "client_credentials"}
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        if client.scopes:
            form["scope"] = " ".join(client.scopes)
        if client.in_body:
            form |= {"client_id": client.client_id, "client_secret": client.client_secret}
        else:
            pair = f"{quote_plus(client.client_id)}:{quote_plus(client.client_secret)}"
            headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        request = Request("POST", client.token_url, headers, urlencode(form).encode())
        try:
            async with asyncio.timeout(_PATIENCE):
                answer = await self._http.fetch(request, max_bytes=_MAX_BYTES)
        except TimeoutError:
            raise self._failed(f"no answer within {_PATIENCE:.0f} s") from None
        except ToolError as error:
            raise self._failed(str(error)) from None
        try:
            said: Any = json_text.decode(answer.body)
        except ValueError:
            said = None
        given = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        token, lifetime = given.get("access_token"), given.get("expires_in")
        if answer.status != 200 or not isinstance(token, str) or not _can_be_sent(token):
            reason = given.get("error") if isinstance(given.get("error"), str) else "it gives no token"
            raise self._failed(f"status {answer.status}, {redact(json_text.describe(reason, 100))}")
        seconds = _seconds(lifetime)
        self._token = token
        self._until = time.monotonic() + max(seconds - _MARGIN, seconds / 2)
        return token

    def _failed(self, reason: str) -> ToolTransportError:
        url = self._client.token_url
        return ToolTransportError(
            f'no access token for the security scheme "{self._scheme}" from {url.host}{url.path}: {reason}',
            executed=False,
        )


def _seconds(lifetime: Any) -> float:
    if isinstance(lifetime, str) and lifetime.isdecimal() and len(lifetime) < 12:
        lifetime = int(lifetime)
    if isinstance(lifetime, int | float) and not isinstance(lifetime, bool) and 0 <= lifetime < 1e10:
        return float(lifetime)
    return 1e10  # It did not say: until the service says no.


def _can_be_sent(token: str) -> bool:
    return token != "" and token.isascii() and token.isprintable() and " " not in token


def _retrieve(task: asyncio.Task[str]) -> None:
    """Looks at a failure that nobody may be left to hear of."""
    if not task.cancelled():
        task.exception()
