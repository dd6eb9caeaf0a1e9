"""The HTTP client of one MCP server, for `streamable_http` and `sse`. A failure affects one request only.

The MCP SDK's transport ends the whole connection if one POST raises an exception. This client therefore turns a
failure into an HTTP response with a JSON-RPC error. The error's `data` says what the caller could not see otherwise:
`{"sent": false}` if the request cannot have reached the server, `{"status": 401}` if the server refused it with
something other than JSON-RPC, `UNKNOWN_SESSION_DATA` for HTTP 404 to a request with a session id, whatever its body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import httpx2
import msgspec
from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST

from toolspace.core.secret_masking import mask_secrets
from toolspace.providers.mcp.oauth.http import tls_context
from toolspace.providers.mcp.transports.base import UNKNOWN_SESSION_DATA

_CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 4.0  # Shorter than servers keep it: if a connection dies under a request, its fate is unknown.
_MAX_REDIRECTS = 3
_ERROR_BODY_BYTES = 64 * 1024
_ERROR_TEXT_CHARACTERS = 300
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)
_SSE_ONLY_STATUSES = frozenset((400, 404, 405, 406, 415))
"""How a server that supports only SSE refuses a POST to the URL of its event stream."""
_DEFAULT = httpx2.USE_CLIENT_DEFAULT


class McpHttpClient(httpx2.AsyncClient):
    """Sends the configured headers with every request, and never to another origin: it follows no redirects.

    `on_refused` is called with the body of the very first message if the server refuses it like one that does not know
    streamable HTTP. If it returns True, the message is being sent in another way. `on_doubt` is called if the server
    answers HTTP 404 to a notification or to the request for an event stream, within a session.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        auth: httpx2.Auth | None,
        *,
        max_message_bytes: int,
        on_refused: Callable[[bytes], Awaitable[bool]] | None = None,
        on_doubt: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            headers=dict(headers),
            auth=auth,
            verify=tls_context(),
            follow_redirects=False,
            # The caller decides how long to wait for a response, and cancels.
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=20, keepalive_expiry=_KEEP_ALIVE_SECONDS
            ),
        )
        self._max_message_bytes = max_message_bytes
        self._on_refused = on_refused
        self._on_doubt = on_doubt

    async def send(
        self, request: httpx2.Request, *, stream: bool = False, auth: Any = _DEFAULT, follow_redirects: Any = _DEFAULT
    ) -> httpx2.Response:
        # Other requests, such as those of OAuth, keep httpx2's behaviour.
        is_message = request.method == "POST" and "text/event-stream" in request.headers.get("accept", "")
        if not is_message:
            response = await super().send(request, stream=True, auth=auth, follow_redirects=follow_redirects)
            if request.method == "GET" and _is_session_unknown(request, response):
                self._on_doubt()
            return response if stream else await _read_body(response, self._max_message_bytes)
        try:
            response = await super().send(request, stream=True, auth=auth, follow_redirects=follow_redirects)
            return await self._check_response(request, response)
        except _TooLarge as error:
            return _error_response(request, INTERNAL_ERROR, str(error), {"sent": True})
        except Exception as error:
            reason = describe_http_error(error, request.url)
            return _error_response(request, CONNECTION_CLOSED, reason, {"sent": may_have_been_sent(error)})

    async def _check_response(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        on_refused, self._on_refused = self._on_refused, None
        is_json = _content_type(response).startswith("application/json")
        if response.status_code < 400:
            return await self._check_success(request, response, is_json=is_json)
        response = await _read_body(response, self._max_message_bytes if is_json else _ERROR_BODY_BYTES)
        if _is_session_unknown(request, response):
            error_response = _error_response(request, INVALID_REQUEST, "unknown session", UNKNOWN_SESSION_DATA)
            if error_response.status_code == 202:
                self._on_doubt()
            return error_response
        if is_json and _is_json_rpc_error(response.content):
            return response
        if on_refused is not None and response.status_code in _SSE_ONLY_STATUSES and await on_refused(request.content):
            return response
        reason = f"the server answered with HTTP {response.status_code} {response.reason_phrase}".strip()
        if "html" not in _content_type(response):
            text = " ".join(response.text[: 2 * _ERROR_TEXT_CHARACTERS].split())
            if text := mask_secrets(text)[:_ERROR_TEXT_CHARACTERS]:
                reason = f"{reason}: {text}"
        data = {"status": response.status_code}
        return _error_response(request, INVALID_REQUEST, reason, data, status=response.status_code)

    async def _check_success(
        self, request: httpx2.Request, response: httpx2.Response, *, is_json: bool
    ) -> httpx2.Response:
        """Returns the response, or an error that says what is wrong if it is not MCP."""
        content_type = _content_type(response).partition(";")[0]
        if is_json:
            response = await _read_body(response, self._max_message_bytes)
            if b'"jsonrpc"' in response.content:
                return response
            reason = "the server's answer is not a JSON-RPC message; is its url right?"
        elif response.status_code != 200 or content_type in ("", "text/event-stream"):
            return response
        else:
            await response.aclose()
            reason = f"the server answered with {content_type}, which is not MCP; is its url right?"
        return _error_response(request, INVALID_REQUEST, reason, {"status": response.status_code})


class _TooLarge(httpx2.HTTPError):
    """The body of a response is larger than the limit."""


async def send_within_origin(client: httpx2.AsyncClient, request: httpx2.Request) -> httpx2.Response:
    """Sends the request and follows redirects that keep its method and origin. Does not read the response body."""
    for _ in range(_MAX_REDIRECTS):
        response = await client.send(request, stream=True)
        next_request = response.next_request
        if (
            next_request is None
            or next_request.method != request.method
            or not same_origin(request.url, next_request.url)
        ):
            return response
        await response.aclose()
        request = next_request
    return await client.send(request, stream=True)


def same_origin(first: httpx2.URL, second: httpx2.URL) -> bool:
    return (first.scheme, first.host, first.port) == (second.scheme, second.host, second.port)


def may_have_been_sent(error: Exception) -> bool:
    """Whether the server may have received the request that failed with this error."""
    return not isinstance(error, _NEVER_SENT)


def describe_http_error(error: Exception, url: httpx2.URL) -> str:
    """Describes an error without the URL's path and query, which may hold keys."""
    text = mask_secrets(" ".join(str(error).split()))[:_ERROR_TEXT_CHARACTERS] or type(error).__name__
    if isinstance(error, _NEVER_SENT):
        return f"cannot connect to {url.host}: {text}"
    if isinstance(error, httpx2.TransportError):
        return f"the connection to {url.host} broke: {text}"
    return text


async def _read_body(response: httpx2.Response, limit: int) -> httpx2.Response:
    """Returns a copy with the whole body. Raises _TooLarge above the limit; an error response is cut instead."""
    body = bytearray()
    try:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > limit:
                if response.status_code >= 400:
                    break
                raise _TooLarge(f"the server's answer is larger than {limit:,} bytes")
    finally:
        await response.aclose()
    headers = [
        (key, value)
        for key, value in response.headers.multi_items()
        if key.lower() not in ("content-encoding", "content-length", "transfer-encoding")
    ]
    return httpx2.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)


def _error_response(
    request: httpx2.Request, code: int, reason: str, data: dict[str, Any], *, status: int = 200
) -> httpx2.Response:
    try:
        message = msgspec.json.decode(request.content)
    except msgspec.DecodeError:
        message = None
    if not isinstance(message, dict) or "method" not in message or "id" not in message:
        return httpx2.Response(202, request=request)  # A notification: nothing waits for a response.
    request_id = cast("dict[str, Any]", message)["id"]
    body = {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": reason, "data": data}}
    return httpx2.Response(status, json=body, request=request)


def _is_session_unknown(request: httpx2.Request, response: httpx2.Response) -> bool:
    return response.status_code == 404 and "mcp-session-id" in request.headers


def _content_type(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "").lower()


def _is_json_rpc_error(body: bytes) -> bool:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(cast("dict[str, Any]", value).get("error"), dict)
