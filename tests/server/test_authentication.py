"""Authentication with keys and tokens, on real databases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import jwt
import pytest

from toolspace.config.server_settings import ServerSettings
from toolspace.server import api_keys
from toolspace.server.authentication import Authenticator
from toolspace.server.authorization import CONFIGURED_KEY_ID, Caller, EntityCaller, SecretKeyCaller, ToolKeyCaller
from toolspace.server.responses import Problem
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import entities_and_spaces
from toolspace.storage.queries import keys as rows
from toolspace.storage.queries.keys import KeyScope
from toolspace.storage.sqlite.database import SqliteDatabase

JWT_SECRET = "a-secret-for-tokens-with-32-characters"


@pytest.fixture(params=["sqlite", "postgres"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    if request.param == "sqlite":
        opened_ledger = Ledger(await SqliteDatabase.open(tmp_path / "toolspace.db"))
    else:
        from toolspace.storage.postgres.database import PostgresDatabase

        opened_ledger = Ledger(await PostgresDatabase.open(request.getfixturevalue("postgres_url")))
    yield opened_ledger
    await opened_ledger.aclose()


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Ledger]:
    opened_ledger = Ledger(await SqliteDatabase.open(tmp_path / "toolspace.db"))
    yield opened_ledger
    await opened_ledger.aclose()


async def authenticate(authenticator: Authenticator, address: str = "192.0.2.1", **headers: str) -> Caller:
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    caller = authenticator.authenticate(pairs, address)
    return caller if isinstance(caller, Caller) else await caller


async def refusal(authenticator: Authenticator, address: str = "192.0.2.1", **headers: str) -> Problem:
    with pytest.raises(Problem) as error_info:
        await authenticate(authenticator, address, **headers)
    return error_info.value


def token(entity: str, secret: str = JWT_SECRET, **claims: Any) -> str:
    return jwt.encode({"sub": entity, "exp": int(time.time()) + 60, **claims}, secret, algorithm="HS256")


# The first start


@pytest.mark.spec("8.3")
async def test_the_first_start_creates_keys_and_returns_them_once(ledger: Ledger) -> None:
    first = await api_keys.create_missing_keys(ledger, ServerSettings())
    assert first is not None
    assert first.secret is not None
    assert first.public is not None
    assert first.jwt_secret is not None
    assert await api_keys.create_missing_keys(ledger, ServerSettings()) is None
    authenticator = await Authenticator.open(ledger, ServerSettings())
    assert isinstance(await authenticate(authenticator, x_secret_key=first.secret), SecretKeyCaller)
    await ledger.write(entities_and_spaces.create_entity, "ent_1", "human", "Ann", {})
    jwt_text = token("ent_1", first.jwt_secret)
    caller = await authenticate(authenticator, x_public_key=first.public, authorization=f"Bearer {jwt_text}")
    assert isinstance(caller, EntityCaller)
    assert caller.entity_id == "ent_1"


@pytest.mark.spec("8.3")
async def test_of_processes_that_start_at_once_one_returns_the_keys(ledger: Ledger) -> None:
    created_keys = await asyncio.gather(*(api_keys.create_missing_keys(ledger, ServerSettings()) for _ in range(8)))
    returned_keys = [keys for keys in created_keys if keys is not None]
    secrets = [keys.secret for keys in returned_keys if keys.secret is not None]
    assert len(secrets) == 1
    assert len([keys for keys in returned_keys if keys.jwt_secret is not None]) == 1
    assert len(await ledger.read(rows.list_keys)) == 2
    assert isinstance(
        await authenticate(await Authenticator.open(ledger, ServerSettings()), x_secret_key=secrets[0]), SecretKeyCaller
    )


@pytest.mark.spec("8.3")
async def test_keys_are_stored_hashed(sqlite: Ledger, tmp_path: Path) -> None:
    first = await api_keys.create_missing_keys(sqlite, ServerSettings())
    assert first is not None
    _, tool_key = await api_keys.create_key(sqlite, "tools", "editor")
    file_bytes = b"".join(path.read_bytes() for path in tmp_path.glob("toolspace.db*"))
    for key in (first.secret, first.public, tool_key):
        assert key is not None
        assert api_keys.hash_key(key).encode() in file_bytes
        assert key.encode() not in file_bytes
        assert key[3:20].encode() not in file_bytes


async def test_configured_keys_work_and_are_never_stored(sqlite: Ledger, tmp_path: Path) -> None:
    server = ServerSettings(secret_key="sk_configured_secret", public_key="pk_configured_public", jwt_secret=JWT_SECRET)
    assert await api_keys.create_missing_keys(sqlite, server) is None
    authenticator = await Authenticator.open(sqlite, server)
    assert await authenticate(authenticator, authorization="Bearer sk_configured_secret") == SecretKeyCaller(
        key_id=CONFIGURED_KEY_ID
    )
    await sqlite.write(entities_and_spaces.create_entity, "ent_1", "human", "Ann", {})
    caller = await authenticate(
        authenticator, x_public_key="pk_configured_public", authorization=f"Bearer {token('ent_1')}"
    )
    assert isinstance(caller, EntityCaller)
    file_bytes = b"".join(path.read_bytes() for path in tmp_path.glob("toolspace.db*"))
    assert b"configured" not in file_bytes
    assert JWT_SECRET.encode() not in file_bytes
    # If the configured key is removed later, that start is the first one.
    later = await api_keys.create_missing_keys(sqlite, ServerSettings())
    assert later is not None
    assert later.secret is not None


# Creating and revoking keys


async def test_a_tool_key_carries_its_scope(ledger: Ledger) -> None:
    scope = KeyScope(tools_allowed=("notes__*",), tools_denied=("notes__drop",), agent_entity_id="ent_a")
    record, key = await api_keys.create_key(ledger, "tools", "editor", scope)
    assert record.hint == f"tk_…{key[-4:]}"
    authenticator = await Authenticator.open(ledger, ServerSettings())
    expected = ToolKeyCaller(
        key_id=record.id, tools_allowed=("notes__*",), tools_denied=("notes__drop",), agent_entity_id="ent_a"
    )
    assert await authenticate(authenticator, authorization=f"Bearer {key}") == expected
    assert await authenticate(authenticator, x_secret_key=key) == expected


async def test_a_revoked_key_is_invalid_at_once_here_and_soon_in_other_processes(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, key = await api_keys.create_key(ledger, "secret", "one")
    await api_keys.create_key(ledger, "secret", "two")
    local_authenticator, elsewhere = (
        await Authenticator.open(ledger, ServerSettings()),
        await Authenticator.open(ledger, ServerSettings()),
    )
    for authenticator in (local_authenticator, elsewhere):
        assert await authenticate(authenticator, x_secret_key=key) == SecretKeyCaller(key_id=record.id)
    assert await api_keys.revoke_key(ledger, record.id, has_other_access=False) == "revoked"
    local_authenticator.invalidate()
    assert (await refusal(local_authenticator, x_secret_key=key)).status == 401
    assert not await local_authenticator.is_valid([(b"x-secret-key", key.encode())])
    later = time.monotonic() + 5
    monkeypatch.setattr("toolspace.server.authentication.time.monotonic", lambda: later)
    assert (await refusal(elsewhere, x_secret_key=key)).status == 401


async def test_the_last_secret_key_is_kept_unless_there_is_other_access(ledger: Ledger) -> None:
    first, _ = await api_keys.create_key(ledger, "secret", "first")
    second, _ = await api_keys.create_key(ledger, "secret", "second")
    tools, _ = await api_keys.create_key(ledger, "tools", "tools")
    assert await api_keys.revoke_key(ledger, first.id, has_other_access=False) == "revoked"
    assert await api_keys.revoke_key(ledger, second.id, has_other_access=False) == "last"
    assert await api_keys.revoke_key(ledger, tools.id, has_other_access=False) == "revoked"
    assert await api_keys.revoke_key(ledger, "key_unknown", has_other_access=False) == "unknown"
    assert await api_keys.revoke_key(ledger, second.id, has_other_access=True) == "revoked"


async def test_revoking_the_last_two_keys_at_once_leaves_one(ledger: Ledger) -> None:
    records = [(await api_keys.create_key(ledger, "secret", f"key {number}"))[0] for number in range(4)]
    outcomes = await asyncio.gather(
        *(api_keys.revoke_key(ledger, record.id, has_other_access=False) for record in records)
    )
    assert sorted(outcomes) == ["last", "revoked", "revoked", "revoked"]


async def test_the_use_of_a_key_is_counted(ledger: Ledger) -> None:
    record, _ = await api_keys.create_key(ledger, "tools", "one")
    await ledger.write(rows.record_use, {record.id: rows.KeyUse(3, 1, 2000), "key_gone": rows.KeyUse(1, 0, 1)})
    await ledger.write(rows.record_use, {record.id: rows.KeyUse(2, 0, 1000)})
    key_record = await ledger.read(rows.find, record.id)
    assert key_record is not None
    assert (key_record.calls, key_record.failed, key_record.last_used_at) == (5, 1, 2000)


# Authenticating


@pytest.fixture
async def authenticator(sqlite: Ledger) -> Authenticator:
    server = ServerSettings(secret_key="sk_0123456789abcdef", public_key="pk_0123456789abcdef", jwt_secret=JWT_SECRET)
    await sqlite.write(entities_and_spaces.create_entity, "ent_1", "human", "Ann", {})
    return await Authenticator.open(sqlite, server)


SECRET, PUBLIC = "sk_0123456789abcdef", "pk_0123456789abcdef"


@pytest.mark.spec("8.1")
@pytest.mark.parametrize(
    "headers",
    [
        {"x_secret_key": SECRET},
        {"authorization": f"Bearer {SECRET}"},
        {"authorization": f"bearer   {SECRET} "},
        {"x_secret_key": SECRET, "authorization": f"Bearer {SECRET}"},
    ],
)
async def test_a_secret_key_is_accepted_in_either_header(
    authenticator: Authenticator, headers: Mapping[str, str]
) -> None:
    assert await authenticate(authenticator, **headers) == SecretKeyCaller(key_id=CONFIGURED_KEY_ID)


@pytest.mark.spec("8.1")
@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "Credentials are required"),
        ({"x_secret_key": ""}, "empty"),
        ({"x_secret_key": "  "}, "empty"),
        ({"authorization": ""}, "Bearer"),
        ({"authorization": "Bearer"}, "empty"),
        ({"authorization": "Bearer  "}, "empty"),
        ({"authorization": f"Basic {SECRET}"}, "Bearer"),
        ({"authorization": SECRET}, "Bearer"),
        ({"x_secret_key": "sk_wrong"}, "unknown"),
        ({"x_secret_key": SECRET + "x"}, "unknown"),
        ({"x_secret_key": SECRET[:-1]}, "unknown"),
        ({"x_secret_key": "é" * 20}, "not a key"),
        ({"x_secret_key": PUBLIC}, "x-public-key"),
        ({"authorization": f"Bearer {PUBLIC}"}, "x-public-key"),
        ({"x_public_key": PUBLIC}, "requires a token"),
        ({"x_public_key": ""}, "empty"),
        ({"x_public_key": SECRET, "authorization": lambda: f"Bearer {token('ent_1')}"}, "public key is unknown"),
        ({"x_public_key": PUBLIC, "authorization": f"Bearer {SECRET}"}, "different credentials"),
        ({"x_public_key": PUBLIC, "x_secret_key": SECRET}, "different credentials"),
        ({"x_secret_key": SECRET, "authorization": f"Bearer {SECRET}x"}, "different credentials"),
        ({"x_secret_key": SECRET, "authorization": lambda: f"Bearer {token('ent_1')}"}, "different credentials"),
        ({"authorization": lambda: f"Bearer {token('ent_1')}"}, "x-public-key"),
        ({"x_public_key": PUBLIC, "authorization": lambda: f"Bearer {token('ent_2')}"}, "does not exist"),
        ({"x_public_key": PUBLIC, "authorization": lambda: f"Bearer {token('ent_1', 'x' * 40)}"}, "signature"),
        ({"x_public_key": PUBLIC, "authorization": lambda: f"Bearer {token('ent_1', exp=1)}"}, "expired"),
    ],
)
async def test_invalid_credentials_are_refused_with_the_reason(
    authenticator: Authenticator, headers: Mapping[str, str | Callable[[], str]], says: str
) -> None:
    # Tokens are valid for a minute, so they are created now and not at collection.
    credentials = {name: value if isinstance(value, str) else value() for name, value in headers.items()}
    problem = await refusal(authenticator, **credentials)
    assert problem.status == 401
    assert says in problem.detail
    assert dict(problem.headers)[b"www-authenticate"] == b"Bearer"
    assert SECRET not in problem.detail


@pytest.mark.parametrize("name", [b"authorization", b"x-secret-key", b"x-public-key"])
async def test_a_repeated_header_is_refused(authenticator: Authenticator, name: bytes) -> None:
    for values in ((SECRET, SECRET), (SECRET, "sk_other")):
        with pytest.raises(Problem, match="more than once"):
            authenticator.authenticate([(name, value.encode()) for value in values], "")


async def test_a_cached_caller_costs_no_lookup(sqlite: Ledger) -> None:
    authenticator = await Authenticator.open(sqlite, ServerSettings())
    _, key = await api_keys.create_key(sqlite, "secret", "one")
    pairs = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
    caller = authenticator.authenticate(pairs, "")
    assert not isinstance(caller, Caller)
    cached = await caller
    assert authenticator.authenticate(pairs, "") is cached


async def test_a_cached_token_expires_in_time(sqlite: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    await sqlite.write(entities_and_spaces.create_entity, "ent_1", "human", "Ann", {})
    authenticator = await Authenticator.open(sqlite, ServerSettings(public_key=PUBLIC, jwt_secret=JWT_SECRET))
    jwt_text = token("ent_1", exp=int(time.time()) - 29)  # One second of the leeway remains.
    caller = await authenticate(authenticator, x_public_key=PUBLIC, authorization=f"Bearer {jwt_text}")
    assert isinstance(caller, EntityCaller)
    later, clock = time.time() + 2, time.monotonic() + 2
    monkeypatch.setattr("toolspace.server.authentication.time.monotonic", lambda: clock)
    monkeypatch.setattr("toolspace.server.authentication.time.time", lambda: later)

    class LaterDatetime(jwt.api_jwt.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(later, tz)

    monkeypatch.setattr("jwt.api_jwt.datetime", LaterDatetime)
    assert (await refusal(authenticator, x_public_key=PUBLIC, authorization=f"Bearer {jwt_text}")).status == 401


async def test_a_deleted_entity_is_not_authenticated(sqlite: Ledger, authenticator: Authenticator) -> None:
    headers = {"x_public_key": PUBLIC, "authorization": f"Bearer {token('ent_1')}"}
    await authenticate(authenticator, **headers)
    await sqlite.write(entities_and_spaces.delete_entity, "ent_1")
    authenticator.invalidate()
    assert (await refusal(authenticator, **headers)).status == 401


@pytest.mark.spec("8.3")
async def test_failed_logins_are_limited_and_do_not_affect_verified_callers(authenticator: Authenticator) -> None:
    await authenticate(authenticator, x_secret_key=SECRET)
    problems = [await refusal(authenticator, x_secret_key=f"sk_guess_{number}") for number in range(70)]
    assert [problem.status for problem in problems[:60]] == [401] * 60
    assert problems[-1].status == 429
    assert int(dict(problems[-1].headers)[b"retry-after"]) >= 1
    authenticator.invalidate()
    assert isinstance(await authenticate(authenticator, x_secret_key=SECRET), SecretKeyCaller)
    assert (await refusal(authenticator, "192.0.2.7", x_secret_key="sk_guess")).status == 401


async def test_a_local_key_is_not_stored(sqlite: Ledger, authenticator: Authenticator) -> None:
    key = authenticator.create_local_key()
    assert isinstance(await authenticate(authenticator, x_secret_key=key), SecretKeyCaller)
    assert await sqlite.read(rows.list_keys) == []
    other_authenticator = await Authenticator.open(sqlite, ServerSettings())
    assert (await refusal(other_authenticator, x_secret_key=key)).status == 401


async def test_a_padded_key_is_not_cached(sqlite: Ledger) -> None:
    authenticator = await Authenticator.open(sqlite, ServerSettings())
    _, key = await api_keys.create_key(sqlite, "secret", "one")
    for spaces in range(10_000, 10_010):
        assert isinstance(
            await authenticate(authenticator, authorization=f"Bearer{' ' * spaces}{key}"), SecretKeyCaller
        )
    assert authenticator.cached_count == 0


@pytest.mark.spec("8.3")
async def test_failed_logins_affect_neither_tokens_nor_the_local_key(
    sqlite: Ledger, authenticator: Authenticator
) -> None:
    await sqlite.write(entities_and_spaces.create_entity, "ann", "human", "Ann", {})
    local = authenticator.create_local_key()
    for number in range(100):
        await refusal(authenticator, x_secret_key=f"sk_guess_{number}")
    assert (await refusal(authenticator, x_secret_key=SECRET)).status == 429
    assert isinstance(
        await authenticate(authenticator, x_public_key=PUBLIC, authorization=f"Bearer {token('ann')}"), EntityCaller
    )
    assert isinstance(await authenticate(authenticator, authorization=f"Bearer {local}"), SecretKeyCaller)


@pytest.mark.spec("8.3")
async def test_expired_tokens_are_not_counted_as_failed_logins(authenticator: Authenticator) -> None:
    for number in range(100):
        expired = token("ann", exp=1_000 + number)
        assert (await refusal(authenticator, x_public_key=PUBLIC, authorization=f"Bearer {expired}")).status == 401
    assert isinstance(await authenticate(authenticator, x_secret_key=SECRET), SecretKeyCaller)
