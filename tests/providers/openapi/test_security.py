"""Credentials are sent where the document says, are never arguments, and are never shown."""

from __future__ import annotations

import asyncio
import base64
from typing import Any
from urllib.parse import parse_qs

import pytest
from aiohttp import web

from tests.providers.openapi.services import Json, document, operation, parameter, service

pytestmark = pytest.mark.spec("3.22")

SCHEMES: Json = {
    "head": {"type": "apiKey", "in": "header", "name": "X-Key"},
    "ask": {"type": "apiKey", "in": "query", "name": "api key"},
    "jar": {"type": "apiKey", "in": "cookie", "name": "sid"},
    "basic": {"type": "http", "scheme": "basic"},
    "bearer": {"type": "http", "scheme": "Bearer"},
    "oidc": {"type": "openIdConnect", "openIdConnectUrl": "https://example.com"},
    "tls": {"type": "mutualTLS"},
    "digest": {"type": "http", "scheme": "digest"},
    "client": {
        "type": "oauth2",
        "flows": {"clientCredentials": {"tokenUrl": "/oauth/token", "scopes": {"read": "", "write": ""}}},
    },
}


def secured_document(*ways: Any, **fields: Any) -> Json:
    return document(operation(security=list(ways), **fields), components={"securitySchemes": SCHEMES})


@pytest.mark.parametrize(
    ("scheme", "credential", "header", "expected"),
    [
        ("head", "k&y", "x-key", "k&y"),
        ("head", {"apiKey": "key"}, "x-key", "key"),
        ("jar", "s3==", "cookie", "sid=s3=="),
        ("basic", {"username": "me", "password": "p:ü"}, "authorization", "Basic bWU6cDrDvA=="),
        ("basic", "me:pw", "authorization", "Basic bWU6cHc="),
        ("bearer", "tok", "authorization", "Bearer tok"),
        ("bearer", {"token": "tok"}, "authorization", "Bearer tok"),
        ("oidc", "tok", "authorization", "Bearer tok"),
        ("client", "tok", "authorization", "Bearer tok"),
    ],
)
async def test_a_credential_goes_where_its_scheme_says(
    scheme: str, credential: Any, header: str, expected: str
) -> None:
    async with service(secured_document({scheme: []}), auth={scheme: credential}) as api:
        assert (await api.capture_request()).headers[header] == expected


async def test_a_key_in_the_query_joins_the_arguments() -> None:
    async with service(secured_document({"ask": []}, parameters=[parameter("q", "query")]), auth={"ask": "k&y"}) as api:
        assert (await api.capture_request(q="x")).target == "/v1/x?q=x&api%20key=k%26y"


async def test_schemes_that_are_needed_together_are_sent_together() -> None:
    credentials = {"head": "a", "jar": "b", "bearer": "c"}
    async with service(secured_document({name: [] for name in credentials}), auth=credentials) as api:
        headers = (await api.capture_request()).headers
        assert (headers["x-key"], headers["cookie"], headers["authorization"]) == ("a", "sid=b", "Bearer c")


async def test_the_first_alternative_with_all_credentials_is_used() -> None:
    ways = ({"bearer": []}, {"head": [], "jar": []}, {"basic": []})
    async with service(secured_document(*ways), auth={"head": "k", "basic": "u:p"}) as api:
        headers = (await api.capture_request()).headers
        assert ("x-key" in headers, headers["authorization"]) == (False, "Basic dTpw")


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ([{"bearer": []}], "set openapi.api.auth.bearer to its key or token"),
        ([{"basic": []}], "set openapi.api.auth.basic to {username, password}"),
        ([{"client": []}], "set openapi.api.auth.client to {clientId, clientSecret}"),
        ([{"head": [], "jar": []}], 'for the security scheme "jar"'),
        ([{"tls": []}], "not supported"),
        ([{"digest": []}], "not supported"),
        ([{"nobody": []}], "does not describe"),
    ],
    ids=["bearer", "basic", "client", "half", "tls", "digest", "unknown"],
)
async def test_a_missing_credential_is_named_before_anything_is_sent(ways: list[Any], expected: str) -> None:
    async with service(secured_document(*ways), auth={"head": "k"}) as api:
        result = await api.call()
        assert (result.error_kind, result.executed, api.server.requests) == ("not_permitted", False, [])
        assert expected in (result.error or "")


async def test_security_of_the_operation_replaces_that_of_the_document() -> None:
    document_json = document(
        {
            "/a": {"get": {"operationId": "all", "responses": {}}},
            "/b": {"get": {"operationId": "open", "security": [], "responses": {}}},
            "/c": {"get": {"operationId": "maybe", "security": [{"jar": []}, {}], "responses": {}}},
        },
        security=[{"head": []}],
        components={"securitySchemes": SCHEMES},
    )
    async with service(document_json, auth={"head": "k"}) as api:
        assert "x-key" in (await api.capture_request("all")).headers
        assert "x-key" not in (await api.capture_request("open")).headers
        assert "cookie" not in (await api.capture_request("maybe")).headers


async def test_a_credential_is_no_argument_and_is_never_shown() -> None:
    parameters = [parameter("x-key", "header"), parameter("api key", "query"), parameter("q", "query")]
    document_json = secured_document({"head": [], "ask": []}, parameters=parameters)
    async with service(document_json, auth={"head": "hush-hush", "ask": "hush-hush"}) as api:
        tool = api.tools["op"]
        assert list(tool.input_schema["properties"]) == ["q"]
        assert "hush" not in str(tool.to_dict())
        assert "hush" not in repr(api.provider.__dict__)


async def test_a_configured_header_replaces_the_scheme() -> None:
    async with service(secured_document({"client": ["read"]}), headers={"authorization": "Bearer mine"}) as api:
        assert (await api.capture_request()).headers["authorization"] == "Bearer mine"


async def test_a_credential_without_a_scheme_is_a_warning() -> None:
    async with service(secured_document({"bearer": []}), auth={"baerer": "x"}) as api:
        assert 'did you mean "bearer"' in api.provider.warnings[0]


class TokenIssuer:
    """A service that issues its own access tokens."""

    def __init__(self, *, expires_in: Any = 3600) -> None:
        self.expires_in = expires_in
        self.token_count = 0
        self.forms: list[dict[str, list[str]]] = []
        self.accepted_tokens: set[str] = set()
        self.open = asyncio.Event()
        self.open.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/oauth/token":
            self.forms.append(parse_qs((await request.read()).decode()))
            await self.open.wait()
            self.token_count += 1
            token = f"token-{self.token_count}"
            self.accepted_tokens.add(f"Bearer {token}")
            return web.json_response({"access_token": token, "expires_in": self.expires_in, "token_type": "bearer"})
        is_accepted = request.headers.get("Authorization") in self.accepted_tokens
        return web.json_response({"by": request.headers.get("Authorization")}, status=200 if is_accepted else 401)


CLIENT = {"client": {"clientId": "me", "clientSecret": "hush hush"}}


async def test_concurrent_calls_share_one_token_request() -> None:
    issuer = TokenIssuer()
    issuer.open.clear()
    async with service(secured_document({"client": ["read"]}), issuer.answer, auth=CLIENT) as api:
        calls = [asyncio.ensure_future(api.call()) for _ in range(8)]
        while not issuer.forms:  # noqa: ASYNC110 - the server says nothing.
            await asyncio.sleep(0.001)
        calls[0].cancel()
        issuer.open.set()
        results = await asyncio.gather(*calls[1:])
        assert {result.result["by"] for result in results} == {"Bearer token-1"}
        assert (await api.call()).result == {"by": "Bearer token-1"}
        assert issuer.forms == [{"grant_type": ["client_credentials"], "scope": ["read"]}]
        authorization = api.server.requests[0].headers["authorization"]
        assert authorization == "Basic " + base64.b64encode(b"me:hush+hush").decode()


async def test_a_rejected_token_is_replaced_once() -> None:
    issuer = TokenIssuer()
    async with service(secured_document({"client": []}), issuer.answer, auth=CLIENT) as api:
        assert (await api.call()).ok
        issuer.accepted_tokens.clear()
        assert (await api.call()).result == {"by": "Bearer token-2"}
    assert issuer.token_count == 2


async def test_a_service_that_rejects_every_token_gets_two_requests() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/oauth/token":
            return web.json_response({"access_token": "t"})
        return web.json_response({}, status=401)

    async with service(secured_document({"client": []}), answer, auth=CLIENT) as api:
        result = await api.call()
        assert (result.error_kind, result.extras["status"]) == ("execution_error", 401)
        assert [request.target for request in api.server.requests] == ["/oauth/token", "/v1/x"] * 2


async def test_an_expired_token_is_not_used() -> None:
    issuer = TokenIssuer(expires_in=0)
    async with service(secured_document({"client": []}), issuer.answer, auth=CLIENT) as api:
        assert [(await api.call()).result["by"] for _ in range(2)] == ["Bearer token-1", "Bearer token-2"]


async def test_scopes_token_url_and_client_auth_are_configurable() -> None:
    issuer = TokenIssuer()
    async with service(secured_document({"client": ["read"]}), issuer.answer, auth={}) as api:
        own_client = {
            **CLIENT["client"],
            "scopes": "a b",
            "tokenUrl": api.server.url("/oauth/token"),
            "clientAuth": "body",
        }
        async with service(
            secured_document({"client": ["read"]}), issuer.answer, auth={"client": own_client}
        ) as second_api:
            assert (await second_api.call()).ok
            assert second_api.server.requests[0].target == "/v1/x"
        assert issuer.forms[0]["scope"] == ["a b"]
        assert (issuer.forms[0]["client_id"], issuer.forms[0]["client_secret"]) == (["me"], ["hush hush"])


@pytest.mark.parametrize(
    "reply", [(400, '{"error": "invalid_client"}'), (200, "<html>"), (200, '{"access_token": "a\\r\\nb"}')], ids=str
)
async def test_a_missing_token_is_reported_without_the_secret(reply: tuple[int, str]) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=reply[0], text=reply[1])

    async with service(secured_document({"client": []}), answer, auth=CLIENT) as api:
        result = await api.call()
        assert (result.error_kind, result.executed) == ("transport_error", False)
        assert 'scheme "client"' in (result.error or "")
        assert "hush" not in (result.error or "")
        assert [request.target for request in api.server.requests] == ["/oauth/token"]


@pytest.mark.parametrize("place", ["query", "cookie"])
async def test_an_exploded_object_cannot_set_a_credential(place: str) -> None:
    schemes = {"securitySchemes": {"k": {"type": "apiKey", "in": place, "name": "sid"}}}
    filters = parameter("filter", place, {"type": "object"}, style="form", explode=True)
    paths = operation(parameters=[filters, parameter("Cookie", "header")], security=[{"k": []}])
    async with service(document(paths, components=schemes), auth={"k": "real"}) as api:
        refused_result = await api.call(filter={"sid": "another"})
        assert (refused_result.error_kind, api.server.requests) == ("invalid_parameters", [])
        request = await api.capture_request(filter={"a": "1"})
        assert "sid=real" in request.target + request.headers.get("cookie", "")
        if place == "cookie":
            assert "Cookie" not in api.tools["op"].input_schema["properties"]


@pytest.mark.parametrize("name", ["Content-Length", "Transfer-Encoding", "Host"])
async def test_a_key_is_never_sent_in_a_framing_header(name: str) -> None:
    schemes = {"securitySchemes": {"k": {"type": "apiKey", "in": "header", "name": name}}}
    async with service(document(operation(security=[{"k": []}]), components=schemes), auth={"k": "5"}) as api:
        result = await api.call()
        assert (result.error_kind, result.executed) == ("not_permitted", False)
        assert api.server.requests == []


async def test_a_key_in_an_unknown_location_hides_no_argument() -> None:
    schemes = {"securitySchemes": {"k": {"type": "apiKey", "in": "path", "name": "id"}}}
    paths = operation("/c/{id}", parameters=[parameter("id", "path")], security=[{"k": []}, {}])
    async with service(document(paths, components=schemes)) as api:
        assert (await api.capture_request(id="x")).target == "/v1/c/x"


async def test_credentials_that_a_service_sends_back_are_masked() -> None:
    async def echo(request: web.Request) -> web.Response:
        credentials = request.headers["Authorization"].removeprefix("Basic ")
        return web.Response(
            status=403, text=f"{base64.b64decode(credentials).decode()} {request.headers['X-Key']} is wrong"
        )

    auth = {"basic": {"username": "me", "password": "clover-1"}, "head": "clover-2"}
    async with service(secured_document({"basic": [], "head": []}), echo, auth=auth) as api:
        result = await api.call()
    assert "is wrong" in (result.error or "")
    assert "clover" not in str(result.to_dict())
