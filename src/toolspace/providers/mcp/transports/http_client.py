"""The HTTP client of one MCP server: what fails is one request, never the connection. Knows nothing of sessions.

The SDK's transport lets an exception of one POST end everything, so a failure here is an HTTP answer that holds a
JSON-RPC error. It says in its `data` what a caller cannot see otherwise: `{"sent": false}` where the request cannot
have reached the server, `{"status": 401}` where the server refused it without a word of JSON-RPC.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, cast

import httpx2
import msgspec
from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST

from toolspace.core.secret_masking import mask_secrets

_CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 4.0  # Below what servers keep: a connection that dies under a request makes it doubtful.
_MAX_REDIRECTS = 3
_ERROR_BODY = 64 * 1024
_SHOWN = 300
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)
_SSE_ONLY = frozenset((400, 404, 405, 406, 415))
"""How servers of the oldest transport refuse a POST to the URL of their event stream."""
_DEFAULT = httpx2.USE_CLIENT_DEFAULT

Message = dict[str, Any]


class McpHttpClient(httpx2.AsyncClient):
    """Headers go with every request, and never to another origin: redirects are not followed by themselves.

    `on_refused` is asked when the very first message is refused as a server does that does not know streamable
    HTTP. If it says True, somebody else has taken that message over.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        auth: httpx2.Auth | None,
        *,
        max_message: int,
        on_refused: Callable[[bytes], Awaitable[bool]] | None = None,
    ) -> None:
        super().__init__(
            headers=dict(headers),
            auth=auth,
            verify=tls_context(),
            follow_redirects=False,
            # How long an answer may take is for the caller to say, who cancels.
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=20, keepalive_expiry=_KEEP_ALIVE_SECONDS
            ),
        )
        self._max_message = max_message
        self._on_refused = on_refused

    async def send(
        self,
        request: httpx2.Request,
        *,
        stream: bool = False,
        auth: Any = _DEFAULT,
        follow_redirects: Any = _DEFAULT,
    ) -> httpx2.Response:
        # Not those that an OAuth flow makes on its way.
        message = request.method == "POST" and "text/event-stream" in request.headers.get("accept", "")
        if not message:
            return await super().send(request, stream=stream, auth=auth, follow_redirects=follow_redirects)
        try:
            response = await super().send(request, stream=True, auth=auth, follow_redirects=follow_redirects)
            return await self._answer(request, response)
        except _TooLarge as error:
            return _failed(request, INTERNAL_ERROR, str(error), {"sent": True})
        except Exception as error:
            return _failed(
                request, CONNECTION_CLOSED, describe_http_error(error, request.url), {"sent": may_have_been_sent(error)}
            )

    async def _answer(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        first, self._on_refused = self._on_refused, None
        json = response.headers.get("content-type", "").lower().startswith("application/json")
        if response.status_code < 400:
            return await self._understood(request, response, json=json)
        response = await self._whole(response, self._max_message if json else _ERROR_BODY)
        if json and _is_rpc_error(response.content):
            return response
        if first is not None and response.status_code in _SSE_ONLY and await first(request.content):
            return response
        if response.status_code == 404 and "mcp-session-id" in request.headers:
            return response  # The SDK knows by it that the session is lost.
        status = f"HTTP {response.status_code} {response.reason_phrase}".strip()
        words = (
            mask_secrets(" ".join(response.text[: 2 * _SHOWN].split()))[:_SHOWN]
            if "html" not in _kind(response)
            else ""
        )
        refusal = f"the server answered with {status}: {words}" if words else f"the server answered with {status}"
        return _failed(request, INVALID_REQUEST, refusal, {"status": response.status_code}, response)

    async def _understood(self, request: httpx2.Request, response: httpx2.Response, *, json: bool) -> httpx2.Response:
        """The answer, unless it is that of no MCP server: what the SDK says of those is not for people."""
        kind = _kind(response).partition(";")[0]
        if json:
            response = await self._whole(response, self._max_message)
            if b'"jsonrpc"' in response.content:
                return response
            reason = "the server's answer is not a JSON-RPC message; is its url right?"
        elif response.status_code != 200 or kind in ("", "text/event-stream"):
            return response
        else:
            await response.aclose()
            reason = f"the server answered with {kind}, which is not MCP; is its url right?"
        return _failed(request, INVALID_REQUEST, reason, {"status": response.status_code})

    async def _whole(self, response: httpx2.Response, limit: int) -> httpx2.Response:
        """The same answer, read to its end: when it breaks off, it is here that it breaks."""
        chunks: list[bytes] = []
        size = 0
        try:
            async for chunk in response.aiter_bytes():
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    if response.status_code >= 400:
                        break
                    raise _TooLarge(f"the server's answer is larger than {limit:,} bytes")
        finally:
            await response.aclose()
        return _copy(response, b"".join(chunks))


class _TooLarge(Exception):
    pass


async def send_within_origin(client: httpx2.AsyncClient, request: httpx2.Request) -> httpx2.Response:
    """Sends it, and follows redirects that keep the method and the origin. Its body is not read yet."""
    for _ in range(_MAX_REDIRECTS):
        response = await client.send(request, stream=True)
        onward = response.next_request
        if onward is None or onward.method != request.method or not same_origin(request.url, onward.url):
            return response
        await response.aclose()
        request = onward
    return await client.send(request, stream=True)


def same_origin(one: httpx2.URL, other: httpx2.URL) -> bool:
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


def may_have_been_sent(error: Exception) -> bool:
    """Whether the server may have got what was being sent when this happened."""
    return not isinstance(error, _NEVER_SENT)


def describe_http_error(error: Exception, url: httpx2.URL) -> str:
    """What happened, without the URL's path and query: keys may be in there."""
    words = mask_secrets(" ".join(str(error).split()))[:_SHOWN] or type(error).__name__
    if isinstance(error, _NEVER_SENT):
        return f"cannot connect to {url.host}: {words}"
    if isinstance(error, httpx2.TransportError):
        return f"the connection to {url.host} broke: {words}"
    return words


@cache
def tls_context() -> ssl.SSLContext:
    """One for the whole process: reading the machine's certificates takes longer than most requests."""
    return httpx2.create_ssl_context()


def _failed(
    request: httpx2.Request, code: int, reason: str, data: Message, response: httpx2.Response | None = None
) -> httpx2.Response:
    status = response.status_code if response is not None else 200
    try:
        message = msgspec.json.decode(request.content)
    except msgspec.DecodeError:
        message = None
    if not isinstance(message, dict) or "method" not in message or "id" not in message:
        return httpx2.Response(202, request=request)  # Nobody waits for the answer to a notification.
    key = cast("Message", message)["id"]
    body = {"jsonrpc": "2.0", "id": key, "error": {"code": code, "message": reason, "data": data}}
    return httpx2.Response(status, json=body, request=request)


def _copy(response: httpx2.Response, content: bytes) -> httpx2.Response:
    headers = [
        (key, value)
        for key, value in response.headers.multi_items()
        if key.lower() not in ("content-encoding", "content-length", "transfer-encoding")
    ]
    return httpx2.Response(response.status_code, headers=headers, content=content, request=response.request)


def _kind(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "").lower()


def _is_rpc_error(body: bytes) -> bool:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(cast("Message", value).get("error"), dict)
