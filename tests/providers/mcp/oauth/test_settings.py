"""The `auth` setting, and the URLs that may receive tokens."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.errors import ConfigError
from toolspace.providers.mcp.oauth.settings import OAuthSettings, find_url_problem, parse_oauth_settings

pytestmark = pytest.mark.spec("3.16")


@pytest.mark.parametrize("auth", ["oauth", {}, {"type": "oauth"}, {"type": "authorization_code"}])
def test_browser_login_is_the_default(auth: object) -> None:
    assert parse_oauth_settings("x", auth) == OAuthSettings(grant="authorization_code")


def test_every_key_is_parsed() -> None:
    auth = {
        "type": "client_credentials",
        "clientId": "me",
        "clientSecret": "s3cret",
        "scopes": ["read", "write"],
        "tokenEndpointAuthMethod": "client_secret_post",
        "issuer": "https://auth.example",
    }
    settings = parse_oauth_settings("x", auth)
    assert settings == OAuthSettings(
        grant="client_credentials",
        client_id="me",
        client_secret="s3cret",
        scope="read write",
        client_auth="client_secret_post",
        issuer="https://auth.example",
    )
    assert "s3cret" not in repr(settings)
    code = parse_oauth_settings("x", {"clientMetadataUrl": "https://me.example/client.json", "redirectPort": 8123})
    assert (code.client_metadata_url, code.redirect_port) == ("https://me.example/client.json", 8123)


_WRONG: dict[str, tuple[Any, str]] = {
    "misspelt": ({"client_id": "a"}, "unknown key 'client_id'; did you mean \"clientId\""),
    "unknown": ({"zzz": 1}, "unknown key 'zzz'"),
    "number": (5, "must be a mapping or `oauth`, not int"),
    "type": ({"type": "password"}, "authorization_code or client_credentials, not 'password'"),
    "type number": ({"type": 5}, "authorization_code or client_credentials, not 5"),
    "no id": ({"type": "client_credentials", "clientSecret": "x"}, "needs clientId"),
    "no secret": ({"type": "client_credentials", "clientId": "x"}, "needs clientSecret"),
    "secret alone": ({"clientSecret": "x"}, "clientSecret without its clientId"),
    "empty": ({"clientId": " "}, "clientId must be a non-empty text"),
    "port for a program": (
        {"type": "client_credentials", "clientId": "a", "clientSecret": "b", "redirectPort": 1},
        "redirectPort is for type authorization_code",
    ),
    "port": ({"redirectPort": 0}, "a port from 1 to 65535, not 0"),
    "port bool": ({"redirectPort": True}, "a port from 1 to 65535"),
    "both scopes": ({"scope": "a", "scopes": ["b"]}, "both scope and scopes"),
    "scope breaks out": ({"scope": 'a", x="'}, "words separated by spaces"),
    "method": ({"clientId": "a", "clientSecret": "b", "tokenEndpointAuthMethod": "jwt"}, "client_secret_basic or"),
    "method alone": ({"tokenEndpointAuthMethod": "client_secret_post"}, "needs a clientSecret"),
    "metadata": ({"clientMetadataUrl": "http://me.example/x"}, "https URL with a path"),
    "metadata and id": ({"clientMetadataUrl": "https://me.example/x", "clientId": "a"}, "keep one"),
    "issuer": ({"issuer": "http://auth.example"}, "issuer must be https"),
}


@pytest.mark.parametrize(("auth", "message"), _WRONG.values(), ids=_WRONG.keys())
def test_errors_name_the_server_and_the_key(auth: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_oauth_settings("github", auth)
    assert message in str(error.value)
    assert "'github'" in str(error.value)


_KEYS = st.sampled_from(["type", "clientId", "clientSecret", "scope", "redirectPort", "issuer", "clientMetadataUrl"])
_VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.lists(st.text(max_size=5), max_size=3)


@given(auth=st.dictionaries(_KEYS | st.text(max_size=5), _VALUES, max_size=6) | _VALUES)
def test_any_value_is_parsed_or_a_config_error(auth: object) -> None:
    with contextlib.suppress(ConfigError):
        parse_oauth_settings("x", auth)


_FAR = "https://mcp.example"
_NEAR = "http://127.0.0.1:8000/mcp"


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("https://auth.example/x", _FAR),
        ("https://8.8.8.8/x", _FAR),
        ("http://127.0.0.1:9/x", _NEAR),
        ("http://localhost:9/x", _NEAR),
        ("http://[::1]:9/x", _NEAR),
        ("https://10.0.0.7/x", "https://10.0.0.8/mcp"),
    ],
)
def test_safe_urls(url: str, server: str) -> None:
    assert find_url_problem(url, named_by=server) is None


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("file:///etc/passwd", _NEAR),
        ("ftp://auth.example/x", _FAR),
        ("//auth.example", _FAR),
        ("https://", _FAR),
        ("https://[", _FAR),
        ("https://a:99999/", _FAR),
        ("http://auth.example/x", _FAR),
        ("http://auth.example/x", _NEAR),
        ("http://127.0.0.1.evil.example/", _NEAR),
        ("https://user:pass@auth.example/", _FAR),
        ("http://127.0.0.1:9/x", _FAR),
        ("https://localhost/x", _FAR),
        ("https://169.254.169.254/latest", _FAR),
        ("https://10.0.0.7/x", _FAR),
        ("https://[::ffff:127.0.0.1]/x", _FAR),
        ("https://[fe80::1%25eth0]/x", _FAR),
        ("https://0.0.0.0/x", _FAR),
    ],
)
def test_unsafe_urls(url: str, server: str) -> None:
    assert find_url_problem(url, named_by=server) is not None


@given(url=st.text(max_size=60))
def test_any_text_is_checked_as_a_url(url: str) -> None:
    find_url_problem(url, named_by=_FAR)
