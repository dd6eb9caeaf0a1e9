"""Authorization at real servers: an MCP server, its authorization server, a browser, and other processes."""

from __future__ import annotations

import asyncio
import contextlib
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

from tests.providers.mcp.oauth_peer import (
    TRUST,
    Browser,
    Peer,
    connected,
    free_door,
    greeting,
    protected_server,
    serving,
)
from toolspace.errors import ConfigError, ProviderError
from toolspace.providers.mcp.oauth.authorization import AuthChallenge, create_http_auth, login, logout
from toolspace.providers.mcp.oauth.http import parse_token_response
from toolspace.providers.mcp.oauth.token_store import LoginFile, StoredLogin, TokenStore
from toolspace.providers.mcp.spec import ServerSpec

pytestmark = pytest.mark.spec("3.16")


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with protected_server() as peer:
        yield peer


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore(tmp_path / "tokens")


@pytest.fixture
async def member(peer: Peer, store: TokenStore) -> Peer:
    """The peer, where one has logged in."""
    await login("guarded", peer.spec(), store, Browser())
    return peer


def slot_of(peer: Peer, store: TokenStore, client: str | None = None) -> LoginFile:
    return store.login_file(name="guarded", url=peer.url, client_id=client)


def auth_of(peer: Peer, store: TokenStore, interact: Any = None, **changes: Any) -> Any:
    return create_http_auth("guarded", peer.spec(**changes), store=store, open_login_page=interact)


async def told(work: Any, kind: type[Exception] = MCPError) -> str:
    """The reason why it failed, whatever task groups are around it."""
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


def change(slot: LoginFile, **values: Any) -> None:
    held = slot.read()
    assert held is not None
    slot.write(msgspec.structs.replace(held, **values))


# Authorization code


async def test_a_person_logs_in_with_pkce_through_a_client_that_registered_itself(
    peer: Peer, store: TokenStore
) -> None:
    browser = Browser()
    assert await greeting(peer.url, auth_of(peer, store, browser)) == "hello you"

    (url,) = browser.urls
    query = parse_qs(urlsplit(url).query)
    assert query["code_challenge_method"] == ["S256"]
    assert query["resource"] == [peer.url]
    assert list(peer.authority.clients) == query["client_id"]
    assert "You can close this window" in browser.pages[0].text


async def test_the_listener_is_closed_when_the_login_is_done(peer: Peer, store: TokenStore) -> None:
    browser = Browser()
    await login("guarded", peer.spec(), store, browser)
    port = browser.pages[0].url.port
    assert browser.pages[0].url.host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("auth", [{"type": "authorization_code"}, {}], ids=["configured", "by itself"])
async def test_a_login_serves_programs_that_can_ask_nobody(peer: Peer, store: TokenStore, auth: Any) -> None:
    await login("guarded", peer.spec(auth=auth), store, Browser())
    assert await greeting(peer.url, auth_of(peer, store, auth=auth)) == "hello you"


async def test_without_anybody_to_ask_a_needed_login_fails_at_once_and_names_the_command(
    peer: Peer, store: TokenStore
) -> None:
    reason = await told(greeting(peer.url, auth_of(peer, store)))
    assert reason == "server 'guarded' needs a login: run `toolspace servers login guarded`"
    assert peer.authority.seen == []


async def test_without_auth_a_refusal_names_the_ways_out(peer: Peer, store: TokenStore) -> None:
    reason = await told(greeting(peer.url, auth_of(peer, store, auth={})))
    for part in ("'guarded'", "401", "`auth`", "headers", "toolspace servers login guarded"):
        assert part in reason


async def test_a_refused_stream_raises_the_reason(peer: Peer, store: TokenStore) -> None:
    async with httpx2.AsyncClient(auth=auth_of(peer, store), verify=TRUST) as client:
        with pytest.raises(ProviderError, match="needs a login"):
            await client.get(peer.url)


async def test_one_refused_call_leaves_the_connection_alone(member: Peer, store: TokenStore) -> None:
    async with connected(member.url, auth_of(member, store)) as client:
        await client.call_tool("greet", {"name": "you"})
        member.authority.expire()
        member.authority.refresh.clear()
        with pytest.raises(MCPError, match=r"needs a login.*no longer accepted"):
            await client.call_tool("greet", {"name": "you"})
        await login("guarded", member.spec(), store, Browser())
        await client.call_tool("greet", {"name": "you"})


async def test_a_redirect_with_a_wrong_state_is_refused_and_does_not_end_the_login(
    peer: Peer, store: TokenStore
) -> None:
    answers: list[int] = []

    async def interact(server: str, url: str) -> None:
        back = parse_qs(urlsplit(url).query)["redirect_uri"][0]
        async with httpx2.AsyncClient(verify=TRUST) as client:
            strays = ("code=evil&state=wrong", "code=evil", "error=x", "", "state=a&state=b&code=evil")
            urls = [*(f"{back}?{query}" for query in strays), back.replace("/callback", "/favicon.ico")]
            answers.extend([(await client.get(one)).status_code for one in urls])
            answers.append((await client.post(back)).status_code)
        await Browser()(server, url)

    await login("guarded", peer.spec(), store, interact)
    assert answers == [400, 400, 400, 400, 400, 404, 400]
    assert await greeting(peer.url, auth_of(peer, store)) == "hello you"


@pytest.mark.parametrize(
    "noise",
    [b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe /callback HTTP/1.1\r\n\r\n", b"GET //[ HTTP/1.1\r\n\r\n", b"a" * 70_000],
    ids=["empty", "short", "bytes", "url", "long"],
)
async def test_noise_at_the_listener_ends_nothing(peer: Peer, store: TokenStore, noise: bytes) -> None:
    async def interact(server: str, url: str) -> None:
        port = urlsplit(parse_qs(urlsplit(url).query)["redirect_uri"][0]).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        _, silent = await asyncio.open_connection("127.0.0.1", port)  # As browsers do ahead of time.
        await Browser()(server, url)
        silent.close()

    await login("guarded", peer.spec(), store, interact)
    assert slot_of(peer, store).read() is not None


async def test_the_authorization_servers_no_is_told(peer: Peer, store: TokenStore) -> None:
    peer.authority.denies = True
    browser = Browser()
    with pytest.raises(ProviderError, match="login to server 'guarded' was refused: access_denied: not you"):
        await login("guarded", peer.spec(), store, browser)
    assert "refused" in browser.pages[0].text


async def test_nobody_is_waited_for_without_end(peer: Peer, store: TokenStore) -> None:
    ports: list[int | None] = []

    async def look_away(server: str, url: str) -> None:
        ports.append(urlsplit(parse_qs(urlsplit(url).query)["redirect_uri"][0]).port)

    with pytest.raises(ProviderError, match=r"nobody logged in to server 'guarded' within 0\.05 s"):
        await login("guarded", peer.spec(), store, look_away, timeout=0.05)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", ports[0])


async def test_requests_that_need_a_login_at_once_share_one(peer: Peer, store: TokenStore) -> None:
    browser = Browser()
    auth = auth_of(peer, store, browser)
    headers = await asyncio.gather(*(auth.renew_authorization(AuthChallenge(status=401), sent=None) for _ in range(5)))
    assert len(set(headers)) == 1
    assert len(browser.urls) == 1


async def test_a_configured_port_client_and_scope_are_used(peer: Peer, store: TokenStore) -> None:
    door, _ = free_door()
    port = door.getsockname()[1]
    auth = {"clientId": "mine", "clientSecret": "my-own-secret", "scope": "use more", "redirectPort": port}
    with pytest.raises(ProviderError, match=f"127.0.0.1:{port}.*set another auth.redirectPort"):
        await login("guarded", peer.spec(auth=auth), store, Browser())
    door.close()

    peer.authority.clients["mine"] = OAuthClientInformationFull.model_validate(
        {
            "client_id": "mine",
            "client_secret": "my-own-secret",
            "redirect_uris": [f"http://127.0.0.1:{port}/callback"],
            "token_endpoint_auth_method": "client_secret_basic",
            "scope": "use more",
        }
    )
    await login("guarded", peer.spec(auth=auth), store, Browser())
    assert peer.authority.asked[-1].scopes == ["use", "more"]
    held = slot_of(peer, store, "mine").read()
    assert held is not None
    assert (held.client_id, held.client_secret) == ("mine", None)

    change(slot_of(peer, store, "mine"), renew_at=1.0)
    assert await greeting(peer.url, auth_of(peer, store, auth=auth)) == "hello you"
    assert peer.authority.renewals == 1


async def test_another_authorization_server_than_the_configured_one_gets_nothing(peer: Peer, store: TokenStore) -> None:
    auth = {
        "type": "client_credentials",
        "clientId": "robot",
        "clientSecret": peer.authority.machines["robot"],
        "issuer": "https://auth.example",
    }
    reason = await told(greeting(peer.url, auth_of(peer, store, auth=auth)))
    assert "is not auth.issuer 'https://auth.example'" in reason
    assert all("authorization" not in headers for headers in peer.authority.seen)
    good = {**auth, "issuer": peer.issuer}
    assert await greeting(peer.url, auth_of(peer, store, auth=good)) == "hello you"


async def test_a_tool_that_takes_its_time_holds_nobody_up(member: Peer, store: TokenStore) -> None:
    async with connected(member.url, auth_of(member, store)) as client:
        slow = asyncio.create_task(client.call_tool("linger", {}))
        await member.entered.wait()
        await client.call_tool("greet", {"name": "you"})
        assert not slow.done()
        member.leave.set()
        await slow


MORE = AuthChallenge(status=403, challenge='Bearer error="insufficient_scope", scope="admin"')


async def test_a_server_that_wants_more_rights_gets_them_from_the_person_beside_the_old_ones(
    member: Peer, store: TokenStore
) -> None:
    auth = auth_of(member, store, Browser())
    before = await auth.get_authorization()
    assert await auth.renew_authorization(MORE, sent=before) != before
    assert member.authority.asked[-1].scopes == ["use", "admin"]


@pytest.mark.parametrize("ask", [True, False], ids=["configured scope", "nobody there"])
async def test_more_rights_than_configured_or_without_anybody_are_told_of(
    member: Peer, store: TokenStore, ask: bool
) -> None:
    changes = {"interact": nobody, "auth": {"scope": "use"}} if ask else {}
    auth = auth_of(member, store, **changes)
    with pytest.raises(ProviderError, match=r"wants more rights.*: add the scope 'admin' to auth\.scope"):
        await auth.renew_authorization(MORE, sent=await auth.get_authorization())


async def test_the_older_stream_transport_is_authorized_too(store: TokenStore) -> None:
    async with protected_server(sse=True) as peer:
        spec = peer.spec(transport="sse")
        await login("guarded", spec, store, Browser())
        auth = create_http_auth("guarded", spec, store=store, open_login_page=None)
        async with Client(sse_client(peer.url, auth=auth)) as client:
            result = await client.call_tool("greet", {"name": "you"})
        assert "hello you" in str(result.content)


# Renewal


async def test_a_token_that_expires_is_renewed_before_the_request(member: Peer, store: TokenStore) -> None:
    slot = slot_of(member, store)
    before = slot.read()
    change(slot, renew_at=1.0)
    assert await greeting(member.url, auth_of(member, store)) == "hello you"
    after = slot.read()
    assert before is not None
    assert after is not None
    assert after.access_token != before.access_token
    assert after.refresh_token != before.refresh_token
    assert member.authority.renewals == 1


async def test_a_token_that_is_refused_is_renewed_without_a_person(member: Peer, store: TokenStore) -> None:
    member.authority.expire()
    browser = Browser()
    assert await greeting(member.url, auth_of(member, store, browser)) == "hello you"
    assert browser.urls == []
    assert member.authority.renewals == 1


async def test_many_requests_and_connections_renew_once(member: Peer, store: TokenStore) -> None:
    change(slot_of(member, store), renew_at=1.0)
    auths = [auth_of(member, store) for _ in range(3)]
    headers = await asyncio.gather(*(auth.get_authorization() for auth in auths for _ in range(10)))
    assert len(set(headers)) == 1
    assert member.authority.renewals == 1


_OTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from toolspace.providers.mcp.oauth.authorization import create_http_auth
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.oauth.token_store import TokenStore
store = TokenStore(Path(sys.argv[2]))
auth = create_http_auth("guarded", ServerSpec(url=sys.argv[1]), store=store, open_login_page=None)
assert "mcp.client" not in sys.modules
print("ready", flush=True)
sys.stdin.readline()
print("going", flush=True)
print(asyncio.run(auth.get_authorization()))
"""


async def test_processes_renew_once_between_them(member: Peer, store: TokenStore, tmp_path: Path) -> None:
    change(slot_of(member, store), renew_at=1.0)
    member.authority.hold.clear()
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", _OTHER_PROCESS, member.url, str(tmp_path / "tokens"))
    workers = [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(2)]

    async def hear(worker: asyncio.subprocess.Process) -> str:
        assert worker.stdout is not None
        return (await worker.stdout.readline()).decode().strip()

    assert [await hear(worker) for worker in workers] == ["ready", "ready"]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(b"go\n")
    assert [await hear(worker) for worker in workers] == ["going", "going"]
    mine = asyncio.create_task(auth_of(member, store).get_authorization())
    await member.authority.renewing.wait()
    member.authority.hold.set()
    theirs = [await hear(worker) for worker in workers]
    assert set(theirs) == {await mine}
    assert member.authority.renewals == 1
    for worker in workers:
        await worker.communicate()


async def test_a_caller_who_gives_up_does_not_lose_the_new_token(member: Peer, store: TokenStore) -> None:
    change(slot_of(member, store), renew_at=1.0)
    member.authority.hold.clear()
    auth = auth_of(member, store)
    caller = asyncio.create_task(auth.get_authorization())
    await member.authority.renewing.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    member.authority.hold.set()
    header = await auth.get_authorization()
    held = slot_of(member, store).read()
    assert held is not None
    assert header == f"Bearer {held.access_token}"
    assert held.access_token in member.authority.access


@pytest.mark.parametrize("renew_at", [1.0, None], ids=["expired", "refused"])
async def test_a_refresh_token_that_is_no_longer_good_means_a_new_login(
    member: Peer, store: TokenStore, renew_at: float | None
) -> None:
    change(slot_of(member, store), renew_at=renew_at)
    member.authority.expire()
    member.authority.refresh.clear()
    reason = await told(greeting(member.url, auth_of(member, store, auth={})))
    assert "needs a login: run `toolspace servers login guarded`" in reason
    assert "no longer accepted" in reason
    assert slot_of(member, store).read() is None
    assert await greeting(member.url, auth_of(member, store, Browser())) == "hello you"


async def test_an_authorization_server_that_is_down_costs_no_login(member: Peer, store: TokenStore) -> None:
    member.authority.expire()
    member.authority.down = True
    reason = await told(greeting(member.url, auth_of(member, store)))
    assert reason == "cannot renew the login to server 'guarded' now: HTTP 503"
    member.authority.down = False
    assert await greeting(member.url, auth_of(member, store)) == "hello you"


async def test_a_token_that_still_works_is_used_when_it_cannot_be_renewed(member: Peer, store: TokenStore) -> None:
    change(slot_of(member, store), renew_at=1.0)
    member.authority.down = True
    assert await greeting(member.url, auth_of(member, store)) == "hello you"


# Client credentials and headers


def machine(peer: Peer, **changes: Any) -> dict[str, Any]:
    secret = peer.authority.machines["robot"]
    return {"type": "client_credentials", "clientId": "robot", "clientSecret": secret, **changes}


async def test_a_program_gets_a_token_for_itself_and_keeps_it(peer: Peer, store: TokenStore) -> None:
    assert await greeting(peer.url, auth_of(peer, store, auth=machine(peer))) == "hello you"
    assert await greeting(peer.url, auth_of(peer, store, auth=machine(peer))) == "hello you"
    assert peer.authority.grants == [{"grant_type": "client_credentials", "resource": peer.url, "scope": "use"}]
    peer.authority.expire()
    assert await greeting(peer.url, auth_of(peer, store, auth=machine(peer, scope="use it"))) == "hello you"
    assert peer.authority.grants[-1]["scope"] == "use it"


async def test_a_wrong_secret_is_told_without_it(
    peer: Peer, store: TokenStore, caplog: pytest.LogCaptureFixture
) -> None:
    auth = machine(peer, clientSecret="hunter2-hunter2")
    with caplog.at_level(logging.DEBUG):
        reason = await told(greeting(peer.url, auth_of(peer, store, auth=auth)))
    assert reason.startswith("login to server 'guarded' failed: invalid_client")
    for text in (reason, *(record.getMessage() for record in caplog.records)):
        assert "hunter2" not in text


async def test_a_program_works_where_nothing_can_be_stored(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = TokenStore(tmp_path / "file" / "tokens")
    assert await greeting(peer.url, auth_of(peer, store, auth=machine(peer))) == "hello you"


async def test_a_header_of_ones_own_is_sent_and_its_refusal_told(peer: Peer, store: TokenStore) -> None:
    token = peer.authority.issue("me", ["use"], peer.url).access_token
    for header, works in ((f"Bearer {token}", True), ("Bearer nonsense", False)):
        headers = {"authorization": header}
        auth = auth_of(peer, store, auth={}, headers=headers)
        if works:
            assert await greeting(peer.url, auth, headers=headers) == "hello you"
        else:
            reason = await told(greeting(peer.url, auth, headers=headers))
            assert "server 'guarded' refuses the Authorization header" in reason
            assert "nonsense" not in reason


def test_what_cannot_be_authorized_is_a_config_error(store: TokenStore) -> None:
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


# Logging out, and what is never shown


async def test_logging_out_forgets_and_revokes(member: Peer, store: TokenStore) -> None:
    assert await logout("guarded", member.spec(), store) is True
    assert member.authority.refresh == {}
    assert slot_of(member, store).read() is None
    assert await logout("guarded", member.spec(), store) is False


async def test_logging_out_works_while_the_authorization_server_is_gone(member: Peer, store: TokenStore) -> None:
    nowhere, url = free_door()
    nowhere.close()
    change(slot_of(member, store), revocation_endpoint=f"{url}/revoke")
    assert await logout("guarded", member.spec(), store) is True
    assert slot_of(member, store).read() is None


async def test_no_token_is_logged_or_shown(peer: Peer, store: TokenStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        auth = auth_of(peer, store, Browser())
        assert await greeting(peer.url, auth) == "hello you"
        peer.authority.expire()
        assert await greeting(peer.url, auth) == "hello you"
    ours = "\n".join(one.getMessage() for one in caplog.records if one.name.startswith(("toolspace", "mcp.client")))
    for text in (ours, repr(auth), repr(store)):
        assert "at-" not in text
        assert "rt-" not in text


async def test_the_servers_own_headers_do_not_reach_the_authorization_server(peer: Peer, store: TokenStore) -> None:
    headers = {"x-api-key": "for the server only"}
    auth = auth_of(peer, store, Browser(), headers=headers)
    assert await greeting(peer.url, auth, headers=headers) == "hello you"
    assert peer.authority.seen
    assert all("x-api-key" not in seen for seen in peer.authority.seen)


# Servers that mean no good


@contextlib.asynccontextmanager
async def hostile(metadata: Any = None, *, prm: str | None = None, **answers: Any) -> AsyncGenerator[ServerSpec]:
    """A server that asks for a login and leads astray."""
    door, origin = free_door()

    async def refuse(request: Request) -> Response:
        where = prm or f"{origin}/prm"
        return Response(status_code=401, headers={"WWW-Authenticate": f'Bearer resource_metadata="{where}"'})

    async def resource(request: Request) -> Response:
        return JSONResponse({"resource": f"{origin}/mcp", "authorization_servers": [origin]})

    async def issuer(request: Request) -> Response:
        if callable(metadata):
            return metadata()
        usual = {f"{key}_endpoint": f"{origin}/{key}" for key in ("authorization", "token", "registration")}
        return JSONResponse({"issuer": origin, **usual, **(metadata or {})})

    def answering(path: str, value: Any) -> Route:
        async def give(request: Request) -> Response:
            return value if isinstance(value, Response) else JSONResponse(value)

        return Route(f"/{path}", give, methods=["POST"])

    routes = [
        Route("/mcp", refuse, methods=["POST", "GET"]),
        Route("/prm", resource),
        Route("/.well-known/oauth-authorization-server", issuer),
    ]
    routes += [answering(path, value) for path, value in answers.items()]
    async with serving(Starlette(routes=routes), door):
        yield ServerSpec(url=f"{origin}/mcp", auth={"type": "authorization_code"})


async def nobody(server: str, url: str) -> None:
    raise AssertionError("nobody should be asked")


async def test_a_clients_own_page_stands_for_its_registration(store: TokenStore) -> None:
    page = "https://me.example/client.json"

    async def interact(server: str, url: str) -> None:
        query = parse_qs(urlsplit(url).query)
        assert query["client_id"] == [page]
        async with httpx2.AsyncClient(verify=TRUST) as client:
            await client.get(query["redirect_uri"][0], params={"code": "c", "state": query["state"][0]})

    known = {"client_id_metadata_document_supported": True}
    async with hostile(known, token={"access_token": "t"}) as spec:
        spec = msgspec.structs.replace(spec, auth={"clientMetadataUrl": page})
        with pytest.raises(ProviderError, match="refuses the token"):
            await login("evil", spec, store, interact)
        held = store.login_file(name="evil", url=str(spec.url), client_id=None).read()
    assert held is not None
    assert held.client_id == page


async def endless() -> AsyncGenerator[bytes]:
    while True:
        yield b" " * 65536
        await asyncio.sleep(0)  # Else it would not see that nobody listens any more.


@pytest.mark.parametrize(
    ("astray", "reason"),
    [
        ({"prm": "http://metadata.example/x"}, "must be https"),
        ({"prm": "file:///etc/passwd"}, "must be an http or https URL"),
        ({"metadata": {"registration_endpoint": "http://auth.example/r"}}, "must be https"),
        ({"metadata": {"issuer": "https://other.example"}}, "issuer mismatch"),
        ({"metadata": lambda: StreamingResponse(endless())}, "longer than 256 KiB"),
        ({"registration": JSONResponse({"error": "access_denied"}, 403)}, "set auth.clientId and auth.redirectPort"),
        ({"registration": {"no": "client"}}, "Invalid registration response"),
    ],
    ids=["plain http", "file", "endpoint", "issuer", "flood", "no registration", "garbage"],
)
async def test_a_server_that_leads_astray_gets_nowhere(
    store: TokenStore, astray: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with hostile(**astray) as spec:
        with pytest.raises(ProviderError, match=reason):
            await login("evil", spec, store, nobody)
    assert "Traceback" not in caplog.text


async def test_a_page_for_the_login_that_is_not_safe_is_not_opened(store: TokenStore) -> None:
    client = {"client_id": "c", "redirect_uris": ["http://127.0.0.1/callback"]}
    async with hostile({"authorization_endpoint": "http://auth.example/"}, registration=client) as spec:
        with pytest.raises(ProviderError, match="names a page for its login which must be https"):
            await login("evil", spec, store, nobody)


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
async def test_a_token_that_is_none_is_refused_and_not_shown(
    store: TokenStore, token: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with hostile(token=token) as spec:
        auth = {"type": "client_credentials", "clientId": "c", "clientSecret": "s"}
        with caplog.at_level(logging.DEBUG), pytest.raises(ProviderError, match="login to server 'evil' failed") as e:
            await login("evil", msgspec.structs.replace(spec, auth=auth), store, nobody)
    assert "very-secret" not in str(e.value) + caplog.text


async def test_a_server_that_refuses_the_token_it_asked_for_is_told_of(store: TokenStore) -> None:
    async with hostile(token={"access_token": "t", "expires_in": 10**15}) as spec:
        auth = {"type": "client_credentials", "clientId": "c", "clientSecret": "s"}
        spec = msgspec.structs.replace(spec, auth=auth)
        with pytest.raises(ProviderError, match="refuses the token that its authorization server has just given"):
            await login("evil", spec, store, nobody)
        made = create_http_auth("evil", spec, store=store, open_login_page=None)
        reason = await told(greeting(str(spec.url), made))
        assert "refuses the token" in reason


async def test_a_server_without_a_login_says_so(store: TokenStore) -> None:
    door, origin = free_door()
    async with serving(Starlette(), door):
        with pytest.raises(ProviderError, match=r"server 'open' does not ask for a login \(HTTP 404\)"):
            await login("open", ServerSpec(url=f"{origin}/mcp"), store, nobody)


async def test_an_endless_refusal_is_cut_off(member: Peer, store: TokenStore) -> None:
    door, origin = free_door()

    async def refuse(request: Request) -> Response:
        return StreamingResponse(endless(), 401)

    held = slot_of(member, store).read()
    assert held is not None
    store.login_file(name="evil", url=f"{origin}/", client_id=None).write(held)
    async with serving(Starlette(routes=[Route("/", refuse, methods=["POST"])]), door):
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
def test_any_answer_of_a_token_endpoint_is_a_token_or_refused(body: bytes) -> None:
    try:
        tokens = parse_token_response("x", httpx2.Response(200, content=body))
    except ProviderError:
        return
    assert tokens.access_token.isprintable()
    assert tokens.expires_in is None or isinstance(tokens.expires_in, int)


def test_a_login_that_never_expires_is_never_due() -> None:
    assert not StoredLogin(access_token="a", token_endpoint="https://a.example", client_id="c").is_due()
