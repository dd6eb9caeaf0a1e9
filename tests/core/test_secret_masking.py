"""Masking of secrets: by field name, by registered value and by form."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolspace import Toolspace, tool
from toolspace.core.secret_masking import MASK, is_secret_name, mask_secrets, register_secrets

quick = settings(max_examples=150, deadline=None)


@pytest.mark.spec("4.11")
@pytest.mark.parametrize(
    "name",
    [
        "password", "Password", "db_password", "passwordHash", "passwd", "pass", "passphrase", "pwd", "secret",
        "client_secret", "clientSecret", "secretValue", "token", "access_token", "refreshToken", "api_key", "apiKey",
        "x-api-key", "APIKEY", "access_key", "private-key", "Authorization", "credentials", "Cookie", "set-cookie",
    ],
)  # fmt: skip
def test_fields_with_secret_names_are_masked_whatever_they_hold(name: str) -> None:
    assert is_secret_name(name)
    for value in ("x", 12345, 1.5, ["a"], {"user": "a", "value": "b"}, ("a",), b"x"):
        assert mask_secrets({"deep": [{name: value, "other": "seen"}]}) == {"deep": [{name: MASK, "other": "seen"}]}


@pytest.mark.parametrize(
    "name", ["path", "query", "tokens", "max_tokens", "key", "passenger", "tokenizer", "progressToken", "id", ""]
)
def test_ordinary_names_are_not_masked(name: str) -> None:
    assert mask_secrets({name: "seen"}) == {name: "seen"}


@pytest.mark.parametrize("empty", [None, "", True, False])
def test_empty_values_are_not_masked(empty: Any) -> None:
    assert mask_secrets({"password": empty}) == {"password": empty}


@pytest.mark.spec("4.11")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer abc.def-123", f"Authorization: Bearer {MASK}"),
        ("basic dXNlcjpwYXNz", f"basic {MASK}"),
        ("key sk-abcdefghijklmnop1234 used", f"key {MASK} used"),
        ("sk_live_abcdefghijklmnop", MASK),
        ("ghp_abcdefghijklmnopqrst", MASK),
        ("github_pat_abcdefghijklmnopqrst", MASK),
        ("glpat-abcdefghijklmnopqrst", MASK),
        ("xoxb-123456789012-abcdefgh", MASK),
        ("AKIAIOSFODNN7EXAMPLE", MASK),
        ("AIzaSyA1234567890abcdefghij", MASK),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_def", MASK),
        ("https://user:pass@host/x", f"https://{MASK}@host/x"),
        ("redis://:pass@host", f"redis://{MASK}@host"),
        ("GET https://h/x?api_key=abc&q=1", f"GET https://h/x?api_key={MASK}&q=1"),
        ("https://h/?q=1&access_token=abc#top", f"https://h/?q=1&access_token={MASK}#top"),
    ],
)
def test_texts_that_look_like_secrets_are_masked(text: str, expected: str) -> None:
    assert mask_secrets(text) == expected
    assert mask_secrets({"x": [text]}) == {"x": [expected]}


@pytest.mark.parametrize(
    "text",
    [
        "skip_the_first_element_of_list",
        "pkg_resources_is_deprecated_now",
        "https://host/path@1:2",
        "https://host:8080/a?b=c",
        "a basic question about it",
        "user@example.com: hello",
        "mailto:me@example.com",
    ],
)
def test_ordinary_text_is_not_masked(text: str) -> None:
    assert mask_secrets(text) == text


@pytest.mark.spec("4.11")
def test_registered_secrets_are_masked_everywhere() -> None:
    register_secrets(["hunter22-registered", "hunter22-registered-long-version", "short"])
    assert mask_secrets("login with hunter22-registered!") == f"login with {MASK}!"
    assert mask_secrets({"note": ["x", {"y": "ahunter22-registeredb"}]}) == {"note": ["x", {"y": f"a{MASK}b"}]}
    assert mask_secrets("hunter22-registered-long-version") == MASK
    assert mask_secrets("short") == "short"  # Too short: masking it would mask ordinary words.


def test_secrets_in_sets_and_tuples_are_masked() -> None:
    assert mask_secrets({"x": {"sk-abcdefghijklmnop1234"}, "y": ("sk-abcdefghijklmnop1234", 1)}) == {
        "x": [MASK],
        "y": [MASK, 1],
    }


def test_masking_does_not_change_its_input() -> None:
    value = {"password": "x", "a": ["Bearer abcdefgh"]}
    mask_secrets(value)
    assert value == {"password": "x", "a": ["Bearer abcdefgh"]}


def test_huge_data_is_cut() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = [loop]
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert "…" in str(mask_secrets(loop))
    assert "…" in str(mask_secrets(deep))


def test_long_texts_inside_data_are_cut_without_leaving_part_of_a_secret() -> None:
    for size in range(9_990, 10_010):
        text = mask_secrets({"a": "x" * size + " sk-abcdefghijklmnop1234" + "y" * 1_000_000})["a"]
        assert len(text) <= 10_001
        assert "sk-" not in text
    assert len(mask_secrets("x" * 100_000)) == 100_000
    assert len(str(mask_secrets([["x"] * 1_000] * 1_000))) < 200_000


@quick
@given(
    st.recursive(
        st.text() | st.integers() | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_a_registered_secret_is_always_masked(value: Any) -> None:
    register_secrets(["Tr0ub4dor&3"])
    assert "Tr0ub4dor&3" not in str(mask_secrets({"v": value, "t": ["xTr0ub4dor&3x", {"k": "Tr0ub4dor&3Tr0ub4dor&3"}]}))


@pytest.mark.spec("4.11")
async def test_a_call_logs_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    async def login(user: str, password: str) -> str:
        raise ValueError("no access for https://ann:s3cret-word@host with sk-abcdefghijklmnop1234")

    caplog.set_level(logging.DEBUG, logger="toolspace.calls")
    ts = Toolspace(tools=[login])
    await ts.call("login", {"user": "ann", "password": "s3cret-word"})
    await ts.call("login", '{"user": "ann", "password": ["s3cret-word"]}')
    log = "\n".join(record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG)
    assert "login" in log
    assert '"user":"ann"' in log
    assert "s3cret-word" not in log
    assert "sk-abc" not in log
