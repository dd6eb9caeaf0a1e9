"""Waits on this machine for the browser to come back from a login. Knows nothing of tokens, or of the MCP library."""

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
"""Brings a person to a page to log in: `await interact(server, url)` prints the URL or opens a browser, and returns."""

_PATH = "/callback"
_MOST_HEAD = 16 * 1024
_PATIENCE = 10.0
"""Seconds for a browser to send its request once it has connected."""

_PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Toolspace</title>"
    "<body style='font-family:sans-serif;margin:4em auto;max-width:30em'><p>{}</p></body></html>"
)
_DONE = "Toolspace has got the login. You can close this window."
_DENIED = "The login was refused. You can close this window."
_STRAY = "This is not the login that Toolspace waits for."


class OAuthRedirect(msgspec.Struct, frozen=True, kw_only=True):
    """What the authorization server sent along with the browser."""

    code: str | None = None
    state: str
    issuer: str | None = None
    error: str | None = None
    error_description: str | None = None

    def __repr__(self) -> str:
        return "Redirect(…)"


class RedirectListener:
    """Takes one redirect with the right state. Anything else is answered and forgotten, so that no other page
    of the browser, and no other program, can end the login or slip in a code.
    """

    def __init__(self, port: int) -> None:
        self.uri = f"http://127.0.0.1:{port}{_PATH}"
        self._state: str | None = None
        self._arrived: asyncio.Future[OAuthRedirect] = asyncio.get_running_loop().create_future()
        self._serving: set[asyncio.Task[None]] = set()

    def expect(self, state: str) -> None:
        self._state = state

    async def wait(self) -> OAuthRedirect:
        return await self._arrived

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_PATIENCE):
                    await self._answer(await reader.readuntil(b"\r\n\r\n"), writer)
        finally:
            self._serving.discard(task)
            writer.close()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        method, target, *_ = head.partition(b"\r\n")[0].decode("ascii").split(" ")
        url = urlsplit(target)
        redirect = self._read(url.query) if method == "GET" and url.path == _PATH else None
        if redirect is None:
            await _send(writer, "404 Not Found" if url.path != _PATH else "400 Bad Request", _STRAY)
            return
        # Taken at once: while the page is on its way, nobody else's redirect counts.
        self._state = None
        try:
            await _send(writer, "200 OK", _DENIED if redirect.code is None else _DONE)
        finally:
            if not self._arrived.done():
                self._arrived.set_result(redirect)

    def _read(self, query: str) -> OAuthRedirect | None:
        values = parse_qs(query, max_num_fields=50)
        if any(len(several) > 1 for several in values.values()):
            return None
        value = {key: several[0] for key, several in values.items()}
        state = value.get("state", "")
        if self._state is None or not hmac.compare_digest(state.encode(), self._state.encode()):
            return None
        code, error = value.get("code"), value.get("error")
        if (code is None) == (error is None):
            return None
        return OAuthRedirect(
            code=code,
            state=state,
            issuer=value.get("iss"),
            error=error,
            error_description=value.get("error_description"),
        )

    async def aclose(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._arrived.cancel()


async def _send(writer: asyncio.StreamWriter, status: str, text: str) -> None:
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
    """A listener on the loopback address, at a port or at any that is free. Always closed."""
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(("127.0.0.1", port or 0))
    except OSError as error:
        door.close()
        raise ProviderError(
            f"cannot wait for the login at 127.0.0.1:{port or 0}: {error.strerror}; set another auth.redirectPort"
        ) from None
    listener = RedirectListener(door.getsockname()[1])
    server = await asyncio.start_server(listener.serve, sock=door, limit=_MOST_HEAD)
    try:
        yield listener
    finally:
        server.close()
        await listener.aclose()
