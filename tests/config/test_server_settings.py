"""The sections of the gateway: `server` and `storage`."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolspace.config.configuration import Config
from toolspace.config.load import load_config
from toolspace.config.value_types import RateSetting
from toolspace.errors import ConfigError


def load(folder: Path, text: str, **environ: str) -> Config:
    path = folder / "toolspace.yaml"
    path.write_text(text)
    return load_config(path, environ=environ)


@pytest.mark.spec("15.1")
@pytest.mark.parametrize(
    ("url", "expected_url"),
    [
        (
            "postgresql://me:p%40ss@db:5432/tools?sslmode=require",
            "postgresql://me:p%40ss@db:5432/tools?sslmode=require",
        ),
        ("postgres://db/tools", "postgresql://db/tools"),
        ("PostgreSQL://db/tools", "postgresql://db/tools"),
        ("/var/lib/tools.db", "sqlite:////var/lib/tools.db"),
        ("sqlite:////var/lib/tools.db", "sqlite:////var/lib/tools.db"),
    ],
)
def test_a_database_is_a_postgresql_or_a_file(tmp_path: Path, url: str, expected_url: str) -> None:
    assert load(tmp_path, f"storage: {{url: '{url}'}}").storage.url == expected_url


def test_a_database_file_is_relative_to_the_configuration(tmp_path: Path) -> None:
    for url in ("./data/tools.db", "sqlite:///data/tools.db"):
        assert load(tmp_path, f"storage: {{url: '{url}'}}").storage.url == f"sqlite:///{tmp_path}/data/tools.db"


@pytest.mark.parametrize("url", ["mysql://db/tools", "redis://db", "https://db", "sqlite://", "sqlite:///", "''", "7"])
def test_another_database_is_an_error_that_names_the_supported_ones(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"toolspace.yaml:1: storage.url: expected (postgresql|sqlite)"):
        load(tmp_path, f"storage: {{url: {url}}}")


@pytest.mark.spec("8.3")
def test_without_configuration_the_gateway_listens_on_loopback_and_has_limits(tmp_path: Path) -> None:
    server = load(tmp_path, "").server

    assert (server.host, server.port) == ("127.0.0.1", 8787)
    assert server.rate_limit == RateSetting(count=100, seconds=1.0)
    assert server.secret_rate_limit is None
    assert server.secret_key is server.jwt_secret is server.jwks_url is None
    assert (server.allowed_hosts, server.allowed_origins) == ((), ())


def test_every_limit_can_be_set_and_rate_limits_can_be_removed(tmp_path: Path) -> None:
    server = load(
        tmp_path,
        "server: {rateLimit: null, secretRateLimit: 5/minute, heartbeat: 3s, stopTimeout: 250, allowedHosts: a.ex}",
        TOOLSPACE_SERVER_PORT="0",
        TOOLSPACE_SERVER_ALLOWED_ORIGINS="https://a.example,https://b.example",
    ).server

    assert server.rate_limit is None
    assert server.secret_rate_limit == RateSetting(count=5, seconds=60.0)
    assert (server.heartbeat, server.stop_timeout, server.port) == (3.0, 0.25, 0)
    assert server.allowed_hosts == ("a.ex",)
    assert server.allowed_origins == ("https://a.example", "https://b.example")


@pytest.mark.parametrize(
    "wrong",
    [
        "secretKey: short",
        "secretKey: 'sk_with a space in it'",
        "jwtSecret: thirty-one-characters-are-short",
        "publicUrl: tools.example.com",
        "jwksUrl: 'ftp://keys'",
        "publicUrl: 'http://[::1'",
        "port: 65536",
        "rateLimit: often",
        "heartbeat: 0",
        "maxStreams: 0",
    ],
)
def test_an_invalid_setting_is_an_error_that_shows_no_secret(tmp_path: Path, wrong: str) -> None:
    key, _, value = wrong.partition(": ")
    with pytest.raises(ConfigError) as error_info:
        load(tmp_path, f"server: {{{wrong}}}")

    assert f"server.{key}: expected " in str(error_info.value)
    if "Secret" in key or "secret" in key:
        assert value.strip("'") not in str(error_info.value)
