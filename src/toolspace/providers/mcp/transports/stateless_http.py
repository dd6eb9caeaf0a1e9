"""Speaks the stateless era over HTTP: one POST per request, one JSON or SSE answer. Knows nothing of tools.

A dispatcher for the MCP library's `ClientSession`, beside its own transport, which costs several times as much per
request. Servers of the older era need that one.
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
from mcp.shared.dispatcher import (
    CallOptions,
    Dispatcher,
    OnNotify,
    OnNotifyIntercept,
    OnRequest,
    run_notify_intercept,
)
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp.shared.transport_context import TransportContext
from mcp_types import INTERNAL_ERROR, METHOD_NOT_FOUND, PARSE_ERROR, REQUEST_TIMEOUT
from yarl import URL

from toolspace.core.http_errors import os_error_reason
from toolspace.core.sse import SseDecoder, SseSizeError
from toolspace.providers.mcp.errors import HttpStatusError, ServerUnreachable
from toolspace.providers.mcp.oauth.authorization import AuthChallenge, HttpAuth
from toolspace.providers.mcp.transports.trace import TraceFunction

MAX_RESPONSE_BYTES = 64 * 1024 * 1024
_CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 4.0  # Below what servers keep: a connection that dies under a request makes it doubtful.
_MAX_REDIRECTS = 3
_encode = msgspec.json.encode
_decode = msgspec.json.decode


class StatelessHttpDispatcher(Dispatcher[TransportContext]):
    """Sends each request as a POST of its own. Closing the POST is how a request is cancelled."""

    def __init__(
        self, url: str, headers: Mapping[str, str], *, auth: HttpAuth | None = None, trace: TraceFunction | None = None
    ) -> None:
        self._url = URL(url)
        self._auth = auth
        self._headers = {
            **headers,
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
        }
        self._trace = trace
        self._ids = itertools.count(1)
        self._http: aiohttp.ClientSession | None = None
        self._on_notify: OnNotify | None = None
        self._intercept: OnNotifyIntercept | None = None
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(
        self,
        on_request: OnRequest,
        on_notify: OnNotify,
        on_notify_intercept: OnNotifyIntercept | None = None,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        self._on_notify, self._intercept = on_notify, on_notify_intercept
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                # Not `trust_env`: it reads `.netrc` for every request, and would send what stands there.
                proxy=_proxy(self._url),
                read_bufsize=2**18,
            ) as self._http,
            anyio.create_task_group() as self._tasks,
        ):
            task_status.started()
            await anyio.sleep_forever()

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """Nothing: this era has no messages to a server but requests."""

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
            raise MCPError(REQUEST_TIMEOUT, f"Request {method!r} timed out") from None

    async def _request(self, method: str, params: Mapping[str, Any] | None, options: CallOptions) -> dict[str, Any]:
        request_id = options.get("request_id") or next(self._ids)
        if (progress := options.get("on_progress")) is not None:
            given = params or {}
            params = {**given, "_meta": {**given.get("_meta", {}), "progressToken": request_id}}
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": request_id, "method": method}
        if params:
            message["params"] = params
        body = _encode(message)
        if self._trace is not None:
            self._trace("→", body)
        headers = {**self._headers, **options.get("headers", {})}
        auth = self._auth
        if auth is None:
            return await self._post(body, headers, progress)
        sent = await auth.get_authorization()
        if sent is not None:
            headers["authorization"] = sent
        try:
            return await self._post(body, headers, progress)
        except HttpStatusError as refused:
            version = headers.get(MCP_PROTOCOL_VERSION_HEADER)
            refusal = AuthChallenge(status=refused.status, challenge=refused.challenge, protocol_version=version)
            if not refusal.requires_login:
                raise
            # Refused before it was looked at: to send it once more is not to do it twice.
            headers["authorization"] = await auth.renew_authorization(refusal, sent=sent)
        try:
            return await self._post(body, headers, progress)
        except HttpStatusError as refused:
            raise auth.refused_error() if refused.status == 401 else refused from None

    async def _post(self, body: bytes, headers: dict[str, str], progress: Any) -> dict[str, Any]:
        http = self._http
        if http is None or http.closed:
            raise ServerUnreachable("the connection is closed", sent=False)
        try:
            url = self._url
            for _ in range(_MAX_REDIRECTS + 1):
                async with http.post(url, data=body, headers=headers, allow_redirects=False) as response:
                    if response.status in (307, 308) and (target := _moved(url, response)) != url:
                        self._url = url = target  # For good: the others need not ask the old place first.
                        continue
                    return await self._answer(response, progress)
        # `from None`: these carry the whole URL, and a key may be in its query.
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerUnreachable(
                f"cannot connect to {self._url.host}: {os_error_reason(error)}", sent=False
            ) from None
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise ServerUnreachable(
                f"the connection to {self._url.host} broke: {os_error_reason(error)}", sent=True
            ) from None
        raise HttpStatusError(307, f"{self._url.host} redirects more than {_MAX_REDIRECTS} times")

    async def _answer(self, response: aiohttp.ClientResponse, progress: Any) -> dict[str, Any]:
        if response.status in (401, 403):
            raise _refusal(response)
        kind = response.content_type
        if kind == "application/json":
            return _outcome(self._read(await _whole(response)), response.status)
        if kind == "text/event-stream" and response.status < 400:
            async for data in _events(response):
                message = self._read(data)
                if "method" not in message:
                    return _outcome(message, response.status)
                await self._heard(message, progress)
            raise ServerUnreachable("the server ended its answer before the result", sent=True)
        if response.status >= 400:
            raise _refusal(response)
        raise HttpStatusError(
            response.status, f"the server answered with {kind or 'no content type'}, which is not MCP"
        )

    def _read(self, data: bytes) -> dict[str, Any]:
        if self._trace is not None:
            self._trace("←", data)
        try:
            message = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MCPError(PARSE_ERROR, f"the server's answer is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise MCPError(PARSE_ERROR, "the server's answer is not a JSON-RPC message")
        return cast("dict[str, Any]", message)

    async def _heard(self, message: dict[str, Any], progress: Any) -> None:
        """A message that comes before the result: progress, a log line, a change of a list."""
        method, params = message["method"], message.get("params")
        if not isinstance(method, str) or "id" in message:  # A request: this era has none from servers.
            return
        params = cast("dict[str, Any]", params) if isinstance(params, dict) else {}
        if method == "notifications/progress":
            if progress is not None and isinstance(done := params.get("progress"), int | float):
                total, note = params.get("total"), params.get("message")
                await progress(
                    done,
                    total if isinstance(total, int | float) and math.isfinite(total) else None,
                    note if isinstance(note, str) else None,
                )
            return
        if not run_notify_intercept(self._intercept, method, params) and self._on_notify is not None:
            await self._on_notify(_NoReply(), method, params)


class _NoReply:
    """What a notification comes with here: no way back."""

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


def _moved(url: URL, response: aiohttp.ClientResponse) -> URL:
    """Where a redirect leads, within the origin: headers with keys must not go elsewhere."""
    target = url.join(URL(response.headers.get("location", "")))
    if target.origin() != url.origin():
        raise HttpStatusError(
            response.status, f"{url.host} redirects to {target.origin()}; use that as its url if you trust it"
        )
    return target


def _proxy(url: URL) -> str | None:
    """The proxy that the environment names for a URL."""
    host = url.host or ""
    return None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(url.scheme)


def _outcome(message: dict[str, Any], status: int) -> dict[str, Any]:
    result = message.get("result")
    if isinstance(result, dict):
        return cast("dict[str, Any]", result)
    error = message.get("error")
    if isinstance(error, dict):
        fault = cast("dict[str, Any]", error)
        code, text = fault.get("code"), fault.get("message")
        raise MCPError(
            code if isinstance(code, int) else INTERNAL_ERROR,
            text if isinstance(text, str) and text else f"HTTP {status}",
            fault.get("data"),
        )
    raise MCPError(PARSE_ERROR, f"the server's answer (HTTP {status}) has neither a result nor an error")


def _refusal(response: aiohttp.ClientResponse) -> MCPError:
    if response.status == 404:
        return MCPError(METHOD_NOT_FOUND, "the server answered with HTTP 404: there is nothing at this URL")
    reason = f"the server answered with HTTP {response.status} {response.reason or ''}".strip()
    return HttpStatusError(response.status, reason, challenge=response.headers.get("www-authenticate", ""))


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    if (response.content_length or 0) > MAX_RESPONSE_BYTES:
        raise _too_large()
    if response.content_length is not None and "content-encoding" not in response.headers:
        return await response.read()
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_RESPONSE_BYTES:
            raise _too_large()
    return b"".join(chunks)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
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
