"""Sends requests of the stateless era over HTTP: one POST per request, one JSON or SSE response.

It is a dispatcher for the MCP SDK's `ClientSession` and knows nothing of tools. The SDK's own transport costs several
times as much per request (benchmark `mcp`); servers of the handshake era still need it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import aiohttp
import anyio
import anyio.abc
import msgspec
from mcp.shared.dispatcher import CallOptions, Dispatcher, OnNotify, OnNotifyIntercept, OnRequest, run_notify_intercept
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp.shared.transport_context import TransportContext
from mcp_types import INTERNAL_ERROR, METHOD_NOT_FOUND, PARSE_ERROR, REQUEST_TIMEOUT
from yarl import URL

from toolspace.core.http_client_errors import os_error_reason
from toolspace.core.sse_decoder import SseDecoder, SseSizeError
from toolspace.providers.mcp.oauth.authorization import HttpAuth
from toolspace.providers.mcp.oauth.http import AuthChallenge
from toolspace.providers.mcp.transports.base import HttpStatusError, MessageTrace, ServerUnreachable

MAX_RESPONSE_BYTES = 64 * 1024 * 1024
CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 4.0  # Shorter than servers keep it: if a connection dies under a request, its fate is unknown.
_MAX_REDIRECTS = 3
_encode_json = msgspec.json.encode
_decode_json = msgspec.json.decode


class StatelessHttpDispatcher(Dispatcher[TransportContext]):
    """Sends each request as its own POST. Closing the POST cancels the request."""

    def __init__(
        self, url: str, headers: Mapping[str, str], *, auth: HttpAuth | None = None, trace: MessageTrace | None = None
    ) -> None:
        self._url = URL(url)
        self._auth = auth
        self._headers = {**headers, "accept": "application/json, text/event-stream", "content-type": "application/json"}
        self._trace = trace
        self._ids = itertools.count(1)
        self._http: aiohttp.ClientSession | None = None
        self._on_notify: OnNotify | None = None
        self._intercept: OnNotifyIntercept | None = None

    async def run(
        self,
        on_request: OnRequest,
        on_notify: OnNotify,
        on_notify_intercept: OnNotifyIntercept | None = None,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        self._on_notify, self._intercept = on_notify, on_notify_intercept
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            # Not `trust_env`: it reads `.netrc` for every request and would send its credentials.
            proxy=_find_proxy(self._url),
            read_bufsize=2**18,
        ) as self._http:
            task_status.started()
            await anyio.sleep_forever()

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """Does nothing: clients of the stateless era send requests only."""

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        options = opts or {}
        timeout = options.get("timeout")
        if timeout is None:
            return await self._request(method, params, options)
        try:
            async with asyncio.timeout(timeout):
                return await self._request(method, params, options)
        except TimeoutError:
            raise MCPError(REQUEST_TIMEOUT, f"Request {method!r} timed out after {timeout:g} s") from None

    async def _request(self, method: str, params: Mapping[str, Any] | None, options: CallOptions) -> dict[str, Any]:
        request_id = options.get("request_id") or next(self._ids)
        if (on_progress := options.get("on_progress")) is not None:
            params = params or {}
            params = {**params, "_meta": {**params.get("_meta", {}), "progressToken": request_id}}
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": request_id, "method": method}
        if params:
            message["params"] = params
        body = _encode_json(message)
        if self._trace is not None:
            self._trace("→", body)
        headers = {**self._headers, **options.get("headers", {})}
        auth = self._auth
        if auth is None:
            return await self._post(body, headers, on_progress)
        authorization = await auth.get_authorization()
        if authorization is not None:
            headers["authorization"] = authorization
        try:
            return await self._post(body, headers, on_progress)
        except HttpStatusError as error:
            version = headers.get(MCP_PROTOCOL_VERSION_HEADER)
            challenge = AuthChallenge(status=error.status, challenge=error.challenge, protocol_version=version)
            if not challenge.requires_login:
                raise
            # The server refused the request before it handled it, so sending it again does not run it twice.
            headers["authorization"] = await auth.renew_authorization(challenge, sent_header=authorization)
        try:
            return await self._post(body, headers, on_progress)
        except HttpStatusError as error:
            raise auth.refused_error() if error.status == 401 else error from None

    async def _post(self, body: bytes, headers: dict[str, str], on_progress: Any) -> dict[str, Any]:
        http = self._http
        if http is None or http.closed:
            raise ServerUnreachable("the connection is closed", was_sent=False)
        try:
            url = self._url
            for _ in range(_MAX_REDIRECTS + 1):
                async with http.post(url, data=body, headers=headers, allow_redirects=False) as response:
                    if response.status in (307, 308) and (target := _redirect_target(url, response)) != url:
                        self._url = url = target  # Later requests go there directly.
                        continue
                    return await self._read_response(response, on_progress)
        # `from None`: these errors show the whole URL, which may hold a key.
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            reason = f"cannot connect to {self._url.host}: {os_error_reason(error)}"
            raise ServerUnreachable(reason, was_sent=False) from None
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            reason = f"the connection to {self._url.host} broke: {os_error_reason(error)}"
            raise ServerUnreachable(reason, was_sent=True) from None
        raise HttpStatusError(307, f"{self._url.host} redirects more than {_MAX_REDIRECTS} times")

    async def _read_response(self, response: aiohttp.ClientResponse, on_progress: Any) -> dict[str, Any]:
        if response.status in (401, 403):
            raise _http_error(response)
        content_type = response.content_type
        if content_type == "application/json":
            return _get_result(self._decode(await _read_body(response)), response.status)
        if content_type == "text/event-stream" and response.status < 400:
            async for data in _read_events(response):
                message = self._decode(data)
                if "method" not in message:
                    return _get_result(message, response.status)
                await self._handle_notification(message, on_progress)
            raise ServerUnreachable("the server ended its answer before the result", was_sent=True)
        if response.status >= 400:
            raise _http_error(response)
        reason = f"the server answered with {content_type or 'no content type'}, which is not MCP"
        raise HttpStatusError(response.status, reason)

    def _decode(self, data: bytes) -> dict[str, Any]:
        if self._trace is not None:
            self._trace("←", data)
        try:
            message = _decode_json(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MCPError(PARSE_ERROR, f"the server's answer is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise MCPError(PARSE_ERROR, "the server's answer is not a JSON-RPC message")
        return cast("dict[str, Any]", message)

    async def _handle_notification(self, message: dict[str, Any], on_progress: Any) -> None:
        """Handles a message before the result: progress, a log line, or a list change."""
        method, params = message["method"], message.get("params")
        if not isinstance(method, str) or "id" in message:  # Servers of the stateless era send no requests.
            return
        params = cast("dict[str, Any]", params) if isinstance(params, dict) else {}
        if method == "notifications/progress":
            if on_progress is not None and isinstance(progress := params.get("progress"), int | float):
                total, text = params.get("total"), params.get("message")
                await on_progress(
                    progress,
                    total if isinstance(total, int | float) and math.isfinite(total) else None,
                    text if isinstance(text, str) else None,
                )
            return
        if not run_notify_intercept(self._intercept, method, params) and self._on_notify is not None:
            await self._on_notify(_NoReplyContext(), method, params)


class _NoReplyContext:
    """The dispatch context of a notification, which cannot be answered here."""

    transport = TransportContext(kind="streamable-http", can_send_request=False)
    can_send_request = False
    request_id = None
    message_metadata = None
    cancel_requested: anyio.Event

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        return None

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        return None


def _redirect_target(url: URL, response: aiohttp.ClientResponse) -> URL:
    """Raises if the target has another origin: headers with keys must not go there."""
    target = url.join(URL(response.headers.get("location", "")))
    if target.origin() != url.origin():
        raise HttpStatusError(
            response.status, f"{url.host} redirects to {target.origin()}; use that as its url if you trust it"
        )
    return target


def _find_proxy(url: URL) -> str | None:
    """Returns the proxy that the environment names for a URL."""
    host = url.host or ""
    return None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(url.scheme)


def _get_result(message: dict[str, Any], status: int) -> dict[str, Any]:
    """Returns the result of a JSON-RPC response, or raises its error."""
    result = message.get("result")
    if isinstance(result, dict):
        return cast("dict[str, Any]", result)
    if isinstance(message.get("error"), dict):
        error = cast("dict[str, Any]", message["error"])
        code, text = error.get("code"), error.get("message")
        raise MCPError(
            code if isinstance(code, int) else INTERNAL_ERROR,
            text if isinstance(text, str) and text else f"HTTP {status}",
            error.get("data"),
        )
    raise MCPError(PARSE_ERROR, f"the server's answer (HTTP {status}) has neither a result nor an error")


def _http_error(response: aiohttp.ClientResponse) -> MCPError:
    if response.status == 404:
        return MCPError(METHOD_NOT_FOUND, "the server answered with HTTP 404: there is nothing at this URL")
    reason = f"the server answered with HTTP {response.status} {response.reason or ''}".strip()
    return HttpStatusError(response.status, reason, challenge=response.headers.get("www-authenticate", ""))


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    if (response.content_length or 0) > MAX_RESPONSE_BYTES:
        raise _too_large()
    if response.content_length is not None and "content-encoding" not in response.headers:
        return await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_RESPONSE_BYTES:
            raise _too_large()
    return bytes(body)


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the data of each server-sent event."""
    decoder = SseDecoder(MAX_RESPONSE_BYTES)
    try:
        async for chunk in response.content.iter_any():
            for event in decoder.feed(chunk):
                if event.data is not None:
                    yield event.data
        for event in decoder.finish():
            if event.data is not None:
                yield event.data
    except SseSizeError:
        raise _too_large() from None


def _too_large() -> MCPError:
    return MCPError(INTERNAL_ERROR, f"the server's answer is larger than {MAX_RESPONSE_BYTES // 1024 // 1024} MiB")
