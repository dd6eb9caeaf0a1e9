"""Receives the browser's redirect after a login, on a loopback port. Knows nothing of tokens or of the MCP SDK."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from urllib.parse import parse_qs, urlsplit

import msgspec

from toolspace.errors import ProviderError

OpenLoginPage = Callable[[str, str], Awaitable[None]]
"""Shows a login page: `await open_login_page(server_name, url)` prints the URL or opens a browser, and returns."""

_PATH = "/callback"
_MAX_HEAD_BYTES = 16 * 1024
_REQUEST_SECONDS = 10.0
"""How long a browser may take to send its request after it has connected."""

_PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Toolspace</title>"
    "<body style='font-family:sans-serif;margin:4em auto;max-width:30em'><p>{}</p></body></html>"
)
_SUCCESS_TEXT = "Toolspace is logged in. You can close this window."
_REFUSED_TEXT = "The login was refused. You can close this window."
_UNEXPECTED_TEXT = "This is not the login that Toolspace waits for."


class OAuthRedirect(msgspec.Struct, frozen=True, kw_only=True):
    """The query parameters of the redirect."""

    code: str | None = None
    state: str
    issuer: str | None = None
    error: str | None = None
    error_description: str | None = None

    def __repr__(self) -> str:
        return "OAuthRedirect(…)"


class RedirectListener:
    """Accepts one redirect with the expected state.

    Any other request gets an error response and has no effect, so that no other page or program can end the login or
    inject a code.
    """

    def __init__(self, port: int) -> None:
        self.uri = f"http://127.0.0.1:{port}{_PATH}"
        self._state: str | None = None
        self._redirect: asyncio.Future[OAuthRedirect] = asyncio.get_running_loop().create_future()
        self._connections: set[asyncio.Task[None]] = set()

    def expect(self, state: str) -> None:
        self._state = state

    async def wait(self) -> OAuthRedirect:
        return await self._redirect

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_SECONDS):
                    await self._respond(await reader.readuntil(b"\r\n\r\n"), writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _respond(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        method, target, *_ = head.partition(b"\r\n")[0].decode("ascii").split(" ")
        url = urlsplit(target)
        redirect = self._parse_redirect(url.query) if method == "GET" and url.path == _PATH else None
        if redirect is None:
            await _send_page(writer, "404 Not Found" if url.path != _PATH else "400 Bad Request", _UNEXPECTED_TEXT)
            return
        # Cleared before the page is sent: from now on no other redirect is accepted.
        self._state = None
        try:
            await _send_page(writer, "200 OK", _REFUSED_TEXT if redirect.code is None else _SUCCESS_TEXT)
        finally:
            if not self._redirect.done():
                self._redirect.set_result(redirect)

    def _parse_redirect(self, query: str) -> OAuthRedirect | None:
        """Returns None if the query is not a redirect with the expected state."""
        values = parse_qs(query, max_num_fields=50)
        if any(len(duplicates) > 1 for duplicates in values.values()):
            return None
        parameters = {key: value for key, (value,) in values.items()}
        state = parameters.get("state", "")
        if self._state is None or not hmac.compare_digest(state.encode(), self._state.encode()):
            return None
        code, error = parameters.get("code"), parameters.get("error")
        if (code is None) == (error is None):
            return None
        return OAuthRedirect(
            code=code,
            state=state,
            issuer=parameters.get("iss"),
            error=error,
            error_description=parameters.get("error_description"),
        )

    async def aclose(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._redirect.cancel()


async def _send_page(writer: asyncio.StreamWriter, status: str, text: str) -> None:
    page = _PAGE.format(text).encode()
    writer.write(
        f"HTTP/1.1 {status}\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(page)}\r\n"
        "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nContent-Security-Policy: default-src 'none';"
        " style-src 'unsafe-inline'\r\nConnection: close\r\n\r\n".encode()
        + page
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()


@contextlib.asynccontextmanager
async def open_redirect_listener(port: int | None) -> AsyncGenerator[RedirectListener]:
    """Listens on the loopback address for the duration of the block, at a free port if `port` is None."""
    listening_socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening_socket.bind(("127.0.0.1", port or 0))
    except OSError as error:
        listening_socket.close()
        raise ProviderError(
            f"cannot wait for the login at 127.0.0.1:{port or 0}: {error.strerror}; set another auth.redirectPort"
        ) from None
    listener = RedirectListener(listening_socket.getsockname()[1])
    server = await asyncio.start_server(listener.serve, sock=listening_socket, limit=_MAX_HEAD_BYTES)
    try:
        yield listener
    finally:
        server.close()
        await listener.aclose()
