"""Tokens with a shared secret and with the keys of a real HTTP issuer."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from toolspace.server.access_tokens import EntityTokens, InvalidToken, IssuerKeys, IssuerUnavailable

SECRET = "a-shared-secret-of-more-than-sixty-four-characters-for-every-digest"


def sign_token(claims: dict[str, Any], key: Any = SECRET, algorithm: str = "HS256", **headers: Any) -> str:
    return jwt.encode({"exp": int(time.time()) + 60, **claims}, key, algorithm=algorithm, headers=headers)


def unsigned_token(claims: dict[str, Any], header: dict[str, Any]) -> str:
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in (header, claims)]
    return ".".join([*parts, ""])


async def refusal(tokens: EntityTokens, token: str) -> str:
    with pytest.raises(InvalidToken) as error_info:
        await tokens.verify(token)
    return str(error_info.value)


class KeyIssuer:
    """Publishes keys, or fails; counts the fetches."""

    def __init__(self) -> None:
        self.rsa = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.ec = ec.generate_private_key(ec.SECP256R1())
        self.ed = ed25519.Ed25519PrivateKey.generate()
        self.keys: list[dict[str, Any]] = [
            self.public_jwk("rsa-1", self.rsa, "RS256"),
            self.public_jwk("ec-1", self.ec, "ES256"),
            self.public_jwk("ed-1", self.ed, "EdDSA"),
        ]
        self.fails = False
        self.fetch_count = 0
        self.url = ""

    def public_jwk(self, kid: str, key: Any, algorithm: str) -> dict[str, Any]:
        jwk = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
        return {**jwk, "kid": kid, "use": "sig"}

    async def answer(self, _: web.Request) -> web.Response:
        self.fetch_count += 1
        return web.Response(status=500) if self.fails else web.json_response({"keys": self.keys})


@pytest.fixture
async def issuer() -> AsyncIterator[KeyIssuer]:
    new_issuer = KeyIssuer()
    app = web.Application()
    app.router.add_get("/jwks", new_issuer.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    new_issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}/jwks"
    yield new_issuer
    await runner.cleanup()


@pytest.mark.spec("8.1")
@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
async def test_a_token_signed_with_the_shared_secret_names_its_entity(algorithm: str) -> None:
    claims = await EntityTokens(secret=SECRET).verify(sign_token({"sub": "ent_1"}, algorithm=algorithm))
    assert claims.entity_id == "ent_1"
    assert claims.expires_at > time.time() * 1000


@pytest.mark.spec("8.1")
async def test_the_claim_that_names_the_entity_is_configurable() -> None:
    assert (
        await EntityTokens(secret=SECRET, claim="entity").verify(sign_token({"entity": "ent_1"}))
    ).entity_id == "ent_1"
    nested = sign_token({"app": {"entity": "ent_2"}, "sub": "someone"})
    assert (await EntityTokens(secret=SECRET, claim="app.entity").verify(nested)).entity_id == "ent_2"
    url = sign_token({"https://example.org/entity": "ent_3"})
    assert (await EntityTokens(secret=SECRET, claim="https://example.org/entity").verify(url)).entity_id == "ent_3"


@pytest.mark.parametrize(
    "claims",
    [{}, {"sub": ""}, {"sub": 7}, {"sub": None}, {"sub": ["ent_1"]}, {"sub": "ent 1"}, {"sub": "e\0nt"}],
)
async def test_a_token_that_names_no_entity_is_refused(claims: dict[str, Any]) -> None:
    tokens = EntityTokens(secret=SECRET, claim="sub")
    try:
        token = sign_token(claims)
    except TypeError:  # PyJWT does not sign a subject that is not a text; other libraries do.
        token = sign_token({"who": claims["sub"]})
        tokens = EntityTokens(secret=SECRET, claim="who")
    await refusal(tokens, token)


async def test_an_expired_token_is_refused_once_the_leeway_is_over() -> None:
    tokens = EntityTokens(secret=SECRET)
    now = int(time.time())
    assert (await tokens.verify(sign_token({"sub": "ent_1", "exp": now - 5}))).entity_id == "ent_1"
    assert "expired" in await refusal(tokens, sign_token({"sub": "ent_1", "exp": now - 60}))


async def test_a_token_without_expiry_is_refused() -> None:
    token = jwt.encode({"sub": "ent_1"}, SECRET, algorithm="HS256")
    assert "exp" in await refusal(EntityTokens(secret=SECRET), token)


async def test_a_token_that_is_not_valid_yet_is_refused() -> None:
    token = sign_token({"sub": "ent_1", "nbf": int(time.time()) + 600, "exp": int(time.time()) + 1200})
    assert "not valid yet" in await refusal(EntityTokens(secret=SECRET), token)


async def test_an_invalid_signature_is_refused() -> None:
    other_token = sign_token({"sub": "ent_1"}, key="another-secret-of-more-than-32-characters-here")
    assert "signature" in await refusal(EntityTokens(secret=SECRET), other_token)
    head, body, signature = sign_token({"sub": "ent_1"}).split(".")
    forged_claims = base64.urlsafe_b64encode(b'{"sub":"ent_2","exp":9999999999}').rstrip(b"=").decode()
    assert "signature" in await refusal(EntityTokens(secret=SECRET), ".".join((head, forged_claims, signature)))
    assert body


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "nOnE", "", None, 7, ["HS256"], {"HS256": 1}])
async def test_a_token_without_a_signature_is_refused(algorithm: Any) -> None:
    token = unsigned_token({"sub": "ent_1", "exp": 9999999999}, {"alg": algorithm, "typ": "JWT"})
    await refusal(EntityTokens(secret=SECRET), token)


async def test_a_public_key_is_never_used_as_a_shared_secret(issuer: KeyIssuer) -> None:
    """Algorithm confusion: the token is signed with the public key as HMAC secret."""
    import hashlib
    import hmac

    pem = issuer.rsa.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    unsigned_part = unsigned_token({"sub": "ent_1", "exp": 9999999999}, {"alg": "HS256", "kid": "rsa-1"}).rstrip(".")
    for secret in (pem, pem.strip(), json.dumps(issuer.keys[0]).encode()):
        signature = base64.urlsafe_b64encode(hmac.new(secret, unsigned_part.encode(), hashlib.sha256).digest())
        token = f"{unsigned_part}.{signature.rstrip(b'=').decode()}"
        tokens = EntityTokens(secret=None, issuer_keys=IssuerKeys(issuer.url))
        assert "algorithm" in await refusal(tokens, token)
        both = EntityTokens(secret=SECRET, issuer_keys=IssuerKeys(issuer.url))
        assert "signature" in await refusal(both, token)


async def test_a_symmetric_key_in_the_key_set_is_ignored(issuer: KeyIssuer) -> None:
    issuer.keys.append({"kty": "oct", "kid": "oct-1", "k": base64.urlsafe_b64encode(b"x" * 32).decode()})
    token = sign_token({"sub": "ent_1"}, key="x" * 32, kid="oct-1")
    assert "algorithm" in await refusal(EntityTokens(secret=None, issuer_keys=IssuerKeys(issuer.url)), token)


async def test_a_secret_that_is_too_short_for_an_algorithm_is_refused() -> None:
    short = "x" * 40
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        token = sign_token({"sub": "ent_1"}, key=short, algorithm="HS512")
    assert "too short" in await refusal(EntityTokens(secret=short), token)


@pytest.mark.parametrize("token", ["", ".", "..", "a.b.c", "\x00", "é.é.é", "x" * 20_000, "e30.e30.", "{}.{}.{}"])
async def test_a_text_that_is_not_a_token_is_refused(token: str) -> None:
    await refusal(EntityTokens(secret=SECRET), token)


async def test_audience_and_issuer_are_checked() -> None:
    tokens = EntityTokens(secret=SECRET, audience="here", issuer="https://login.example")
    good = {"sub": "ent_1", "aud": "here", "iss": "https://login.example"}
    assert (await tokens.verify(sign_token(good))).entity_id == "ent_1"
    assert "audience" in await refusal(tokens, sign_token({**good, "aud": "there"}))
    assert "issuer" in await refusal(tokens, sign_token({**good, "iss": "https://other.example"}))
    assert "aud" in await refusal(tokens, sign_token({"sub": "ent_1", "iss": "https://login.example"}))
    # Without a configured audience, any audience is accepted.
    assert (await EntityTokens(secret=SECRET).verify(sign_token(good))).entity_id == "ent_1"


async def test_a_created_token_is_valid() -> None:
    tokens = EntityTokens(secret=SECRET, claim="entity", audience="here", issuer="me")
    token, expires_at = tokens.create("ent_1", 60)
    claims = await tokens.verify(token)
    assert claims.entity_id == "ent_1"
    assert claims.expires_at == expires_at + 30_000


@pytest.mark.spec("8.1")
@pytest.mark.parametrize(("kid", "algorithm"), [("rsa-1", "RS256"), ("ec-1", "ES256"), ("ed-1", "EdDSA")])
async def test_a_token_from_an_issuer_names_its_entity(issuer: KeyIssuer, kid: str, algorithm: str) -> None:
    tokens = EntityTokens(secret=None, issuer_keys=IssuerKeys(issuer.url))
    key = {"rsa-1": issuer.rsa, "ec-1": issuer.ec, "ed-1": issuer.ed}[kid]
    assert (await tokens.verify(sign_token({"sub": "ent_1"}, key, algorithm, kid=kid))).entity_id == "ent_1"
    assert (await tokens.verify(sign_token({"sub": "ent_2"}, key, algorithm))).entity_id == "ent_2"
    assert issuer.fetch_count == 1
    assert not tokens.can_create
    await tokens.aclose()


async def test_a_token_signed_with_another_key_is_refused(issuer: KeyIssuer) -> None:
    stranger = ec.generate_private_key(ec.SECP256R1())
    tokens = EntityTokens(secret=None, issuer_keys=IssuerKeys(issuer.url))
    assert "signature" in await refusal(tokens, sign_token({"sub": "ent_1"}, stranger, "ES256", kid="ec-1"))
    assert "signature" in await refusal(tokens, sign_token({"sub": "ent_1"}, stranger, "ES256"))


async def test_a_new_key_is_fetched_when_a_token_names_it_but_fetches_are_limited(
    issuer: KeyIssuer,
) -> None:
    keys = IssuerKeys(issuer.url, pause=0)
    tokens = EntityTokens(secret=None, issuer_keys=keys)
    await tokens.verify(sign_token({"sub": "ent_1"}, issuer.ec, "ES256", kid="ec-1"))
    new_key = ec.generate_private_key(ec.SECP256R1())
    issuer.keys.append(issuer.public_jwk("ec-2", new_key, "ES256"))
    assert (await tokens.verify(sign_token({"sub": "ent_1"}, new_key, "ES256", kid="ec-2"))).entity_id == "ent_1"
    assert issuer.fetch_count == 2
    patient = EntityTokens(secret=None, issuer_keys=IssuerKeys(issuer.url, pause=3600))
    for number in range(5):
        await refusal(patient, sign_token({"sub": "ent_1"}, new_key, "ES256", kid=f"made-up-{number}"))
    assert issuer.fetch_count == 3


async def test_fetched_keys_stay_valid_during_an_outage_of_the_issuer(issuer: KeyIssuer) -> None:
    tokens = EntityTokens(secret=None, issuer_keys=IssuerKeys(issuer.url, pause=0, max_age=0))
    token = sign_token({"sub": "ent_1"}, issuer.ec, "ES256", kid="ec-1")
    await tokens.verify(token)
    issuer.fails = True
    for _ in range(3):
        assert (await tokens.verify(token)).entity_id == "ent_1"
    assert "does not publish" in await refusal(tokens, sign_token({"sub": "e"}, issuer.ec, "ES256", kid="other"))
    await tokens.aclose()


async def test_an_unreachable_issuer_is_not_an_invalid_token(issuer: KeyIssuer) -> None:
    issuer.fails = True
    tokens = EntityTokens(secret=None, issuer_keys=IssuerKeys(issuer.url, pause=0))
    token = sign_token({"sub": "ent_1"}, issuer.ec, "ES256", kid="ec-1")
    with pytest.raises(IssuerUnavailable):
        await tokens.verify(token)
    issuer.fails = False
    assert (await tokens.verify(token)).entity_id == "ent_1"


async def test_a_token_may_expire_after_the_year_9999() -> None:
    claims = await EntityTokens(secret=SECRET).verify(sign_token({"sub": "ent_1", "exp": 10**400}))
    assert claims.entity_id == "ent_1"
    assert claims.expires_at < 2**53
