"""OAuth with an MCP server, its authorization server, a browser, and other processes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import MCPError
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.shared.auth import OAuthClientInformationFull
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.providers.mcp.oauth.protected_server import (
    TRUST,
    Browser,
    ProtectedServer,
    connected,
    greet_through,
    open_socket,
    protected_server,
    run_app,
)
from toolspace.errors import ConfigError, ProviderError
from toolspace.providers.mcp.oauth.authorization import create_http_auth, login, logout
from toolspace.providers.mcp.oauth.http import AuthChallenge, parse_token_response
from toolspace.providers.mcp.oauth.token_store import LoginFile, StoredLogin, TokenStore
from toolspace.providers.mcp.server_spec import ServerSpec

pytestmark = pytest.mark.spec("3.16")


@pytest.fixture
async def server() -> AsyncIterator[ProtectedServer]:
    async with protected_server() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore(tmp_path / "tokens")


@pytest.fixture
async def logged_in_server(server: ProtectedServer, store: TokenStore) -> ProtectedServer:
    """The server, after a login."""
    await login("guarded", server.spec(), store, Browser())
    return server


def login_file_of(server: ProtectedServer, store: TokenStore, client: str | None = None) -> LoginFile:
    return store.login_file(name="guarded", url=server.url, client_id=client)


def create_auth(server: ProtectedServer, store: TokenStore, open_login_page: Any = None, **changes: Any) -> Any:
    return create_http_auth("guarded", server.spec(**changes), store=store, open_login_page=open_login_page)


async def error_message(work: Any, kind: type[Exception] = MCPError) -> str:
    """Returns the message of the error, out of the exception groups around it."""
    try:
        await work
    except (kind, BaseExceptionGroup) as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, kind):
            raise
        return str(error)
    raise AssertionError("it worked")


def change(login_file: LoginFile, **values: Any) -> None:
    stored_login = login_file.read()
    assert stored_login is not None
    login_file.write(msgspec.structs.replace(stored_login, **values))


# Authorization code


async def test_browser_login_uses_pkce_and_dynamic_registration(server: ProtectedServer, store: TokenStore) -> None:
    browser = Browser()
    assert await greet_through(server.url, create_auth(server, store, browser)) == "hello you"

    (url,) = browser.urls
    query = parse_qs(urlsplit(url).query)
    assert query["code_challenge_method"] == ["S256"]
    assert query["resource"] == [server.url]
    assert list(server.authorization_server.clients) == query["client_id"]
    assert "You can close this window" in browser.pages[0].text


async def test_redirect_listener_is_closed_after_the_login(server: ProtectedServer, store: TokenStore) -> None:
    browser = Browser()
    await login("guarded", server.spec(), store, browser)
    port = browser.pages[0].url.port
    assert browser.pages[0].url.host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("auth", [{"type": "authorization_code"}, {}], ids=["configured", "by itself"])
async def test_stored_login_works_without_a_browser(server: ProtectedServer, store: TokenStore, auth: Any) -> None:
    await login("guarded", server.spec(auth=auth), store, Browser())
    assert await greet_through(server.url, create_auth(server, store, auth=auth)) == "hello you"


async def test_needed_login_fails_at_once_and_names_the_command(server: ProtectedServer, store: TokenStore) -> None:
    reason = await error_message(greet_through(server.url, create_auth(server, store)))
    assert reason == "server 'guarded' needs a login: run `toolspace servers login guarded`"
    assert server.authorization_server.request_headers == []


async def test_refusal_without_auth_setting_names_what_to_do(server: ProtectedServer, store: TokenStore) -> None:
    reason = await error_message(greet_through(server.url, create_auth(server, store, auth={})))
    for part in ("'guarded'", "401", "`auth`", "headers", "toolspace servers login guarded"):
        assert part in reason


async def test_refused_stream_raises_the_reason(server: ProtectedServer, store: TokenStore) -> None:
    async with httpx2.AsyncClient(auth=create_auth(server, store), verify=TRUST) as client:
        with pytest.raises(ProviderError, match="needs a login"):
            await client.get(server.url)


async def test_refused_call_keeps_the_connection(logged_in_server: ProtectedServer, store: TokenStore) -> None:
    async with connected(logged_in_server.url, create_auth(logged_in_server, store)) as client:
        await client.call_tool("greet", {"name": "you"})
        logged_in_server.authorization_server.expire()
        logged_in_server.authorization_server.refresh.clear()
        with pytest.raises(MCPError, match=r"needs a login.*no longer accepted"):
            await client.call_tool("greet", {"name": "you"})
        await login("guarded", logged_in_server.spec(), store, Browser())
        await client.call_tool("greet", {"name": "you"})


async def test_redirect_with_wrong_state_does_not_end_the_login(server: ProtectedServer, store: TokenStore) -> None:
    answers: list[int] = []

    async def open_login_page(server: str, url: str) -> None:
        back = parse_qs(urlsplit(url).query)["redirect_uri"][0]
        async with httpx2.AsyncClient(verify=TRUST) as client:
            strays = ("code=evil&state=wrong", "code=evil", "error=x", "", "state=a&state=b&code=evil")
            urls = [*(f"{back}?{query}" for query in strays), back.replace("/callback", "/favicon.ico")]
            answers.extend([(await client.get(stray_url)).status_code for stray_url in urls])
            answers.append((await client.post(back)).status_code)
        await Browser()(server, url)

    await login("guarded", server.spec(), store, open_login_page)
    assert answers == [400, 400, 400, 400, 400, 404, 400]
    assert await greet_through(server.url, create_auth(server, store)) == "hello you"


@pytest.mark.parametrize(
    "noise",
    [b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe /callback HTTP/1.1\r\n\r\n", b"GET //[ HTTP/1.1\r\n\r\n", b"a" * 70_000],
    ids=["empty", "short", "bytes", "url", "long"],
)
async def test_invalid_requests_to_the_listener_do_not_end_the_login(
    server: ProtectedServer, store: TokenStore, noise: bytes
) -> None:
    async def open_login_page(server: str, url: str) -> None:
        port = urlsplit(parse_qs(urlsplit(url).query)["redirect_uri"][0]).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        _, silent = await asyncio.open_connection("127.0.0.1", port)  # Browsers open connections ahead of time.
        await Browser()(server, url)
        silent.close()

    await login("guarded", server.spec(), store, open_login_page)
    assert login_file_of(server, store).read() is not None


async def test_denied_login_is_reported(server: ProtectedServer, store: TokenStore) -> None:
    server.authorization_server.denies = True
    browser = Browser()
    with pytest.raises(ProviderError, match="login to server 'guarded' was refused: access_denied: not you"):
        await login("guarded", server.spec(), store, browser)
    assert "refused" in browser.pages[0].text


async def test_login_times_out(server: ProtectedServer, store: TokenStore) -> None:
    ports: list[int | None] = []

    async def look_away(server: str, url: str) -> None:
        ports.append(urlsplit(parse_qs(urlsplit(url).query)["redirect_uri"][0]).port)

    with pytest.raises(ProviderError, match=r"nobody logged in to server 'guarded' within 0\.05 s"):
        await login("guarded", server.spec(), store, look_away, timeout=0.05)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", ports[0])


async def test_concurrent_requests_share_one_login(server: ProtectedServer, store: TokenStore) -> None:
    browser = Browser()
    auth = create_auth(server, store, browser)
    headers = await asyncio.gather(
        *(auth.renew_authorization(AuthChallenge(status=401), sent_header=None) for _ in range(5))
    )
    assert len(set(headers)) == 1
    assert len(browser.urls) == 1


async def test_configured_port_client_and_scope_are_used(server: ProtectedServer, store: TokenStore) -> None:
    listening_socket, _ = open_socket()
    port = listening_socket.getsockname()[1]
    auth = {"clientId": "mine", "clientSecret": "my-own-secret", "scope": "use more", "redirectPort": port}
    with pytest.raises(ProviderError, match=f"127.0.0.1:{port}.*set another auth.redirectPort"):
        await login("guarded", server.spec(auth=auth), store, Browser())
    listening_socket.close()

    server.authorization_server.clients["mine"] = OAuthClientInformationFull.model_validate(
        {
            "client_id": "mine",
            "client_secret": "my-own-secret",
            "redirect_uris": [f"http://127.0.0.1:{port}/callback"],
            "token_endpoint_auth_method": "client_secret_basic",
            "scope": "use more",
        }
    )
    await login("guarded", server.spec(auth=auth), store, Browser())
    assert server.authorization_server.authorizations[-1].scopes == ["use", "more"]
    stored_login = login_file_of(server, store, "mine").read()
    assert stored_login is not None
    assert (stored_login.client_id, stored_login.client_secret) == ("mine", None)

    change(login_file_of(server, store, "mine"), renew_at=1.0)
    assert await greet_through(server.url, create_auth(server, store, auth=auth)) == "hello you"
    assert server.authorization_server.renewals == 1


async def test_credentials_go_only_to_the_configured_issuer(server: ProtectedServer, store: TokenStore) -> None:
    auth = {
        "type": "client_credentials",
        "clientId": "robot",
        "clientSecret": server.authorization_server.client_secrets["robot"],
        "issuer": "https://auth.example",
    }
    reason = await error_message(greet_through(server.url, create_auth(server, store, auth=auth)))
    assert "is not auth.issuer 'https://auth.example'" in reason
    assert all("authorization" not in headers for headers in server.authorization_server.request_headers)
    good = {**auth, "issuer": server.issuer}
    assert await greet_through(server.url, create_auth(server, store, auth=good)) == "hello you"


async def test_slow_tool_does_not_delay_other_calls(logged_in_server: ProtectedServer, store: TokenStore) -> None:
    async with connected(logged_in_server.url, create_auth(logged_in_server, store)) as client:
        slow = asyncio.create_task(client.call_tool("linger", {}))
        await logged_in_server.entered_event.wait()
        await client.call_tool("greet", {"name": "you"})
        assert not slow.done()
        logged_in_server.leave.set()
        await slow


MORE = AuthChallenge(status=403, challenge='Bearer error="insufficient_scope", scope="admin"')


async def test_larger_scope_is_requested_together_with_the_old_one(
    logged_in_server: ProtectedServer, store: TokenStore
) -> None:
    auth = create_auth(logged_in_server, store, Browser())
    before = await auth.get_authorization()
    assert await auth.renew_authorization(MORE, sent_header=before) != before
    assert logged_in_server.authorization_server.authorizations[-1].scopes == ["use", "admin"]


@pytest.mark.parametrize("ask", [True, False], ids=["configured scope", "no browser"])
async def test_larger_scope_that_cannot_be_requested_is_reported(
    logged_in_server: ProtectedServer, store: TokenStore, ask: bool
) -> None:
    changes = {"open_login_page": open_no_page, "auth": {"scope": "use"}} if ask else {}
    auth = create_auth(logged_in_server, store, **changes)
    with pytest.raises(ProviderError, match=r"wants more rights.*: add the scope 'admin' to auth\.scope"):
        await auth.renew_authorization(MORE, sent_header=await auth.get_authorization())


async def test_sse_transport_is_authorized(store: TokenStore) -> None:
    async with protected_server(sse=True) as server:
        spec = server.spec(transport="sse")
        await login("guarded", spec, store, Browser())
        auth = create_http_auth("guarded", spec, store=store, open_login_page=None)
        async with Client(sse_client(server.url, auth=auth)) as client:
            result = await client.call_tool("greet", {"name": "you"})
        assert "hello you" in str(result.content)


# Renewal


async def test_expiring_token_is_renewed_before_the_request(
    logged_in_server: ProtectedServer, store: TokenStore
) -> None:
    login_file = login_file_of(logged_in_server, store)
    before = login_file.read()
    change(login_file, renew_at=1.0)
    assert await greet_through(logged_in_server.url, create_auth(logged_in_server, store)) == "hello you"
    after = login_file.read()
    assert before is not None
    assert after is not None
    assert after.access_token != before.access_token
    assert after.refresh_token != before.refresh_token
    assert logged_in_server.authorization_server.renewals == 1


async def test_refused_token_is_renewed_without_a_browser(logged_in_server: ProtectedServer, store: TokenStore) -> None:
    logged_in_server.authorization_server.expire()
    browser = Browser()
    assert await greet_through(logged_in_server.url, create_auth(logged_in_server, store, browser)) == "hello you"
    assert browser.urls == []
    assert logged_in_server.authorization_server.renewals == 1


async def test_concurrent_requests_and_connections_renew_once(
    logged_in_server: ProtectedServer, store: TokenStore
) -> None:
    change(login_file_of(logged_in_server, store), renew_at=1.0)
    auths = [create_auth(logged_in_server, store) for _ in range(3)]
    headers = await asyncio.gather(*(auth.get_authorization() for auth in auths for _ in range(10)))
    assert len(set(headers)) == 1
    assert logged_in_server.authorization_server.renewals == 1


_OTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from toolspace.providers.mcp.oauth.authorization import create_http_auth
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.oauth.token_store import TokenStore
store = TokenStore(Path(sys.argv[2]))
auth = create_http_auth("guarded", ServerSpec(url=sys.argv[1]), store=store, open_login_page=None)
assert "mcp.client" not in sys.modules
print("ready", flush=True)
sys.stdin.readline()
print("going", flush=True)
print(asyncio.run(auth.get_authorization()))
"""


async def test_concurrent_processes_renew_once(
    logged_in_server: ProtectedServer, store: TokenStore, tmp_path: Path
) -> None:
    change(login_file_of(logged_in_server, store), renew_at=1.0)
    logged_in_server.authorization_server.hold.clear()
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", _OTHER_PROCESS, logged_in_server.url, str(tmp_path / "tokens"))
    workers = [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(2)]

    async def hear(worker: asyncio.subprocess.Process) -> str:
        assert worker.stdout is not None
        return (await worker.stdout.readline()).decode().strip()

    assert [await hear(worker) for worker in workers] == ["ready", "ready"]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(b"go\n")
    assert [await hear(worker) for worker in workers] == ["going", "going"]
    own_header = asyncio.create_task(create_auth(logged_in_server, store).get_authorization())
    await logged_in_server.authorization_server.renewal_event.wait()
    logged_in_server.authorization_server.hold.set()
    worker_headers = [await hear(worker) for worker in workers]
    assert set(worker_headers) == {await own_header}
    assert logged_in_server.authorization_server.renewals == 1
    for worker in workers:
        await worker.communicate()


async def test_cancelled_caller_does_not_lose_the_new_token(
    logged_in_server: ProtectedServer, store: TokenStore
) -> None:
    change(login_file_of(logged_in_server, store), renew_at=1.0)
    logged_in_server.authorization_server.hold.clear()
    auth = create_auth(logged_in_server, store)
    caller = asyncio.create_task(auth.get_authorization())
    await logged_in_server.authorization_server.renewal_event.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    logged_in_server.authorization_server.hold.set()
    header = await auth.get_authorization()
    stored_login = login_file_of(logged_in_server, store).read()
    assert stored_login is not None
    assert header == f"Bearer {stored_login.access_token}"
    assert stored_login.access_token in logged_in_server.authorization_server.access


@pytest.mark.parametrize("renew_at", [1.0, None], ids=["expired", "refused"])
async def test_rejected_refresh_token_needs_a_new_login(
    logged_in_server: ProtectedServer, store: TokenStore, renew_at: float | None
) -> None:
    change(login_file_of(logged_in_server, store), renew_at=renew_at)
    logged_in_server.authorization_server.expire()
    logged_in_server.authorization_server.refresh.clear()
    reason = await error_message(greet_through(logged_in_server.url, create_auth(logged_in_server, store, auth={})))
    assert "needs a login: run `toolspace servers login guarded`" in reason
    assert "no longer accepted" in reason
    assert login_file_of(logged_in_server, store).read() is None
    assert await greet_through(logged_in_server.url, create_auth(logged_in_server, store, Browser())) == "hello you"


async def test_unavailable_authorization_server_keeps_the_login(
    logged_in_server: ProtectedServer, store: TokenStore
) -> None:
    logged_in_server.authorization_server.expire()
    logged_in_server.authorization_server.down = True
    reason = await error_message(greet_through(logged_in_server.url, create_auth(logged_in_server, store)))
    assert reason == "cannot renew the login to server 'guarded' now: HTTP 503"
    logged_in_server.authorization_server.down = False
    assert await greet_through(logged_in_server.url, create_auth(logged_in_server, store)) == "hello you"


async def test_valid_token_is_used_if_renewal_fails(logged_in_server: ProtectedServer, store: TokenStore) -> None:
    change(login_file_of(logged_in_server, store), renew_at=1.0)
    logged_in_server.authorization_server.down = True
    assert await greet_through(logged_in_server.url, create_auth(logged_in_server, store)) == "hello you"


# Client credentials and headers


def client_credentials(server: ProtectedServer, **changes: Any) -> dict[str, Any]:
    secret = server.authorization_server.client_secrets["robot"]
    return {"type": "client_credentials", "clientId": "robot", "clientSecret": secret, **changes}


async def test_client_credentials_token_is_stored(server: ProtectedServer, store: TokenStore) -> None:
    assert await greet_through(server.url, create_auth(server, store, auth=client_credentials(server))) == "hello you"
    assert await greet_through(server.url, create_auth(server, store, auth=client_credentials(server))) == "hello you"
    assert server.authorization_server.grants == [
        {"grant_type": "client_credentials", "resource": server.url, "scope": "use"}
    ]
    server.authorization_server.expire()
    assert (
        await greet_through(server.url, create_auth(server, store, auth=client_credentials(server, scope="use it")))
        == "hello you"
    )
    assert server.authorization_server.grants[-1]["scope"] == "use it"


async def test_wrong_secret_is_reported_without_showing_it(
    server: ProtectedServer, store: TokenStore, caplog: pytest.LogCaptureFixture
) -> None:
    auth = client_credentials(server, clientSecret="hunter2-hunter2")
    with caplog.at_level(logging.DEBUG):
        reason = await error_message(greet_through(server.url, create_auth(server, store, auth=auth)))
    assert reason.startswith("login to server 'guarded' failed: invalid_client")
    for text in (reason, *(record.getMessage() for record in caplog.records)):
        assert "hunter2" not in text


async def test_client_credentials_work_without_storage(server: ProtectedServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = TokenStore(tmp_path / "file" / "tokens")
    assert await greet_through(server.url, create_auth(server, store, auth=client_credentials(server))) == "hello you"


async def test_configured_header_is_sent_and_its_refusal_reported(server: ProtectedServer, store: TokenStore) -> None:
    token = server.authorization_server.issue("me", ["use"], server.url).access_token
    for header, works in ((f"Bearer {token}", True), ("Bearer nonsense", False)):
        headers = {"authorization": header}
        auth = create_auth(server, store, auth={}, headers=headers)
        if works:
            assert await greet_through(server.url, auth, headers=headers) == "hello you"
        else:
            reason = await error_message(greet_through(server.url, auth, headers=headers))
            assert "server 'guarded' refuses the Authorization header" in reason
            assert "nonsense" not in reason


def test_impossible_auth_settings_are_config_errors(store: TokenStore) -> None:
    def make(**values: Any) -> Any:
        return create_http_auth("x", ServerSpec(**values), store=store, open_login_page=None)

    assert make(command="cat") is None
    assert make(url="wss://a.example") is None
    for values, reason in (
        ({"command": "cat", "auth": {"type": "authorization_code"}}, "not over stdio"),
        ({"url": "wss://a.example", "auth": {"type": "authorization_code"}}, "not over websocket"),
        ({"url": "http://a.example", "auth": {"type": "authorization_code"}}, "must be https"),
        ({"url": "https://a.example", "auth": {"type": "oauth"}, "headers": {"Authorization": "x"}}, "keep one"),
        ({"url": "https://a.example", "auth": {"clientID": "x"}}, 'did you mean "clientId"'),
    ):
        with pytest.raises(ConfigError, match=reason):
            make(**values)


# Logout, and secrets


async def test_logout_deletes_and_revokes_the_login(logged_in_server: ProtectedServer, store: TokenStore) -> None:
    assert await logout("guarded", logged_in_server.spec(), store) is True
    assert logged_in_server.authorization_server.refresh == {}
    assert login_file_of(logged_in_server, store).read() is None
    assert await logout("guarded", logged_in_server.spec(), store) is False


async def test_logout_works_without_the_authorization_server(
    logged_in_server: ProtectedServer, store: TokenStore
) -> None:
    closed_socket, url = open_socket()
    closed_socket.close()
    change(login_file_of(logged_in_server, store), revocation_endpoint=f"{url}/revoke")
    assert await logout("guarded", logged_in_server.spec(), store) is True
    assert login_file_of(logged_in_server, store).read() is None


async def test_tokens_are_never_logged_or_shown(
    server: ProtectedServer, store: TokenStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        auth = create_auth(server, store, Browser())
        assert await greet_through(server.url, auth) == "hello you"
        server.authorization_server.expire()
        assert await greet_through(server.url, auth) == "hello you"
    own_records = "\n".join(
        record.getMessage() for record in caplog.records if record.name.startswith(("toolspace", "mcp.client"))
    )
    for text in (own_records, repr(auth), repr(store)):
        assert "at-" not in text
        assert "rt-" not in text


async def test_server_headers_are_not_sent_to_the_authorization_server(
    server: ProtectedServer, store: TokenStore
) -> None:
    headers = {"x-api-key": "for the server only"}
    auth = create_auth(server, store, Browser(), headers=headers)
    assert await greet_through(server.url, auth, headers=headers) == "hello you"
    assert server.authorization_server.request_headers
    assert all("x-api-key" not in headers for headers in server.authorization_server.request_headers)


# Hostile servers


@contextlib.asynccontextmanager
async def hostile_server(metadata: Any = None, *, prm: str | None = None, **answers: Any) -> AsyncGenerator[ServerSpec]:
    """A server that asks for a login and names wrong addresses."""
    listening_socket, origin = open_socket()

    async def refuse(request: Request) -> Response:
        metadata_url = prm or f"{origin}/prm"
        return Response(status_code=401, headers={"WWW-Authenticate": f'Bearer resource_metadata="{metadata_url}"'})

    async def resource(request: Request) -> Response:
        return JSONResponse({"resource": f"{origin}/mcp", "authorization_servers": [origin]})

    async def issuer(request: Request) -> Response:
        if callable(metadata):
            return metadata()
        usual = {f"{key}_endpoint": f"{origin}/{key}" for key in ("authorization", "token", "registration")}
        return JSONResponse({"issuer": origin, **usual, **(metadata or {})})

    def json_route(path: str, value: Any) -> Route:
        async def give(request: Request) -> Response:
            return value if isinstance(value, Response) else JSONResponse(value)

        return Route(f"/{path}", give, methods=["POST"])

    routes = [
        Route("/mcp", refuse, methods=["POST", "GET"]),
        Route("/prm", resource),
        Route("/.well-known/oauth-authorization-server", issuer),
    ]
    routes += [json_route(path, value) for path, value in answers.items()]
    async with run_app(Starlette(routes=routes), listening_socket):
        yield ServerSpec(url=f"{origin}/mcp", auth={"type": "authorization_code"})


async def open_no_page(server: str, url: str) -> None:
    raise AssertionError("no login page should be opened")


async def test_client_metadata_url_replaces_the_registration(store: TokenStore) -> None:
    page = "https://me.example/client.json"

    async def open_login_page(server: str, url: str) -> None:
        query = parse_qs(urlsplit(url).query)
        assert query["client_id"] == [page]
        async with httpx2.AsyncClient(verify=TRUST) as client:
            await client.get(query["redirect_uri"][0], params={"code": "c", "state": query["state"][0]})

    metadata = {"client_id_metadata_document_supported": True}
    async with hostile_server(metadata, token={"access_token": "t"}) as spec:
        spec = msgspec.structs.replace(spec, auth={"clientMetadataUrl": page})
        with pytest.raises(ProviderError, match="refuses the token"):
            await login("evil", spec, store, open_login_page)
        stored_login = store.login_file(name="evil", url=str(spec.url), client_id=None).read()
    assert stored_login is not None
    assert stored_login.client_id == page


async def endless() -> AsyncGenerator[bytes]:
    while True:
        yield b" " * 65536
        await asyncio.sleep(0)  # Otherwise it would not notice a disconnect.


@pytest.mark.parametrize(
    ("astray", "reason"),
    [
        ({"prm": "http://metadata.example/x"}, "must be https"),
        ({"prm": "file:///etc/passwd"}, "must be an http or https URL"),
        ({"metadata": {"registration_endpoint": "http://auth.example/r"}}, "must be https"),
        ({"metadata": {"issuer": "https://other.example"}}, "issuer mismatch"),
        ({"metadata": lambda: StreamingResponse(endless())}, "longer than 256 KiB"),
        (
            {"metadata": lambda: Response(gzip.compress(b" " * 50_000_000), headers={"content-encoding": "gzip"})},
            "longer than 256 KiB",
        ),
        ({"metadata": lambda: Response(b"x", headers={"content-encoding": "br"})}, "encoding 'br'"),
        ({"metadata": lambda: Response(b"not gzip!", headers={"content-encoding": "gzip"})}, "cannot be decompressed"),
        ({"registration": JSONResponse({"error": "access_denied"}, 403)}, "set auth.clientId and auth.redirectPort"),
        ({"registration": {"no": "client"}}, "Invalid registration response"),
    ],
    ids=[
        *("plain http", "file", "endpoint", "issuer", "flood", "bomb", "brotli", "broken gzip"),
        *("no registration", "garbage"),
    ],
)
async def test_hostile_server_cannot_redirect_the_login(
    store: TokenStore, astray: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with hostile_server(**astray) as spec:
        with pytest.raises(ProviderError, match=reason):
            await login("evil", spec, store, open_no_page)
    assert "Traceback" not in caplog.text


async def test_unsafe_login_page_is_not_opened(store: TokenStore) -> None:
    client = {"client_id": "c", "redirect_uris": ["http://127.0.0.1/callback"]}
    async with hostile_server({"authorization_endpoint": "http://auth.example/"}, registration=client) as spec:
        with pytest.raises(ProviderError, match="names a page for its login which must be https"):
            await login("evil", spec, store, open_no_page)


@pytest.mark.parametrize(
    "token",
    [
        {"refresh_token": "very-secret"},
        {"access_token": "very-secret\r\nX: 1"},
        {"access_token": "very-secret", "token_type": "mac"},
        {"access_token": ["very-secret"]},
        Response(b"very-secret", 200),
        JSONResponse({"error": ["very odd"], "access_token": "very-secret"}, 400),
    ],
    ids=["none", "header", "type", "list", "text", "error"],
)
async def test_invalid_token_response_is_refused_and_not_shown(
    store: TokenStore, token: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with hostile_server(token=token) as spec:
        auth = {"type": "client_credentials", "clientId": "c", "clientSecret": "s"}
        with caplog.at_level(logging.DEBUG), pytest.raises(ProviderError, match="login to server 'evil' failed") as e:
            await login("evil", msgspec.structs.replace(spec, auth=auth), store, open_no_page)
    assert "very-secret" not in str(e.value) + caplog.text


async def test_server_that_refuses_a_new_token_is_reported(store: TokenStore) -> None:
    async with hostile_server(token={"access_token": "t", "expires_in": 10**15}) as spec:
        auth = {"type": "client_credentials", "clientId": "c", "clientSecret": "s"}
        spec = msgspec.structs.replace(spec, auth=auth)
        with pytest.raises(ProviderError, match="refuses the token that its authorization server has just given"):
            await login("evil", spec, store, open_no_page)
        auth_object = create_http_auth("evil", spec, store=store, open_login_page=None)
        reason = await error_message(greet_through(str(spec.url), auth_object))
        assert "refuses the token" in reason


async def test_server_without_login_is_reported(store: TokenStore) -> None:
    listening_socket, origin = open_socket()
    async with run_app(Starlette(), listening_socket):
        with pytest.raises(ProviderError, match=r"server 'open' does not ask for a login \(HTTP 404\)"):
            await login("open", ServerSpec(url=f"{origin}/mcp"), store, open_no_page)


async def answer_endlessly(request: Request) -> Response:
    return StreamingResponse(endless(), 401)


async def answer_with_a_bomb(request: Request) -> Response:
    return Response(gzip.compress(b" " * 50_000_000), 401, {"content-encoding": "gzip"})


@pytest.mark.parametrize("refuse", [answer_endlessly, answer_with_a_bomb])
async def test_endless_refusal_is_cut_off(logged_in_server: ProtectedServer, store: TokenStore, refuse: Any) -> None:
    listening_socket, origin = open_socket()

    stored_login = login_file_of(logged_in_server, store).read()
    assert stored_login is not None
    store.login_file(name="evil", url=f"{origin}/", client_id=None).write(stored_login)
    async with run_app(Starlette(routes=[Route("/", refuse, methods=["POST"])]), listening_socket):
        auth = create_http_auth("evil", ServerSpec(url=f"{origin}/"), store=store, open_login_page=None)
        async with httpx2.AsyncClient(auth=auth, verify=TRUST) as client:
            with pytest.raises(ProviderError, match="longer than 256 KiB"):
                await client.post(f"{origin}/")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
_TOKEN_KEYS = st.sampled_from(["access_token", "token_type", "expires_in", "scope", "refresh_token"])


@given(
    body=st.binary(max_size=50)
    | st.dictionaries(_TOKEN_KEYS, _JSON | st.just("bearer"), max_size=5).map(msgspec.json.encode)
)
def test_any_token_response_is_valid_or_refused(body: bytes) -> None:
    try:
        tokens = parse_token_response("x", httpx2.Response(200, content=body))
    except ProviderError:
        return
    assert tokens.access_token.isprintable()
    assert tokens.expires_in is None or isinstance(tokens.expires_in, int)


def test_login_without_expiry_is_never_due() -> None:
    assert not StoredLogin(access_token="a", token_endpoint="https://a.example", client_id="c").is_due()
