"""Secrets stay out of logs: by name, by value and by shape."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolspace import Toolspace, tool
from toolspace.core import secret_masking as module
from toolspace.core.secret_masking import HIDDEN, is_secret_name, redact, remember_secrets

quick = settings(max_examples=150, deadline=None)


@pytest.fixture
def memory() -> Iterator[None]:
    """The remembered secrets are the process's; a test gives back what it added."""
    before = list(module._known)
    yield
    module._known[:] = before


@pytest.mark.spec("4.11")
@pytest.mark.parametrize(
    "name",
    [
        "password", "Password", "db_password", "passwordHash", "passwd", "pass", "passphrase", "pwd", "secret",
        "client_secret", "clientSecret", "secretValue", "token", "access_token", "refreshToken", "api_key", "apiKey",
        "x-api-key", "APIKEY", "access_key", "private-key", "Authorization", "credentials", "Cookie", "set-cookie",
    ],
)  # fmt: skip
def test_what_is_named_like_a_secret_is_hidden_whatever_it_is(name: str) -> None:
    assert is_secret_name(name)
    for value in ("x", 12345, 1.5, ["a"], {"user": "a", "value": "b"}, ("a",), b"x"):
        assert redact({"deep": [{name: value, "other": "seen"}]}) == {"deep": [{name: HIDDEN, "other": "seen"}]}


@pytest.mark.parametrize(
    "name", ["path", "query", "tokens", "max_tokens", "key", "passenger", "tokenizer", "progressToken", "id", ""]
)
def test_ordinary_names_are_shown(name: str) -> None:
    assert redact({name: "seen"}) == {name: "seen"}


@pytest.mark.parametrize("empty", [None, "", True, False])
def test_nothing_is_nothing_to_hide(empty: Any) -> None:
    assert redact({"password": empty}) == {"password": empty}


@pytest.mark.spec("4.11")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abc.def-123", f"Authorization: Bearer {HIDDEN}"),
        ("basic dXNlcjpwYXNz", f"basic {HIDDEN}"),
        ("key sk-abcdefghijklmnop1234 used", f"key {HIDDEN} used"),
        ("sk_live_abcdefghijklmnop", HIDDEN),
        ("ghp_abcdefghijklmnopqrst", HIDDEN),
        ("github_pat_abcdefghijklmnopqrst", HIDDEN),
        ("glpat-abcdefghijklmnopqrst", HIDDEN),
        ("xoxb-123456789012-abcdefgh", HIDDEN),
        ("AKIAIOSFODNN7EXAMPLE", HIDDEN),
        ("AIzaSyA1234567890abcdefghij", HIDDEN),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_def", HIDDEN),
        ("https://user:pass@host/x", f"https://{HIDDEN}@host/x"),
        ("redis://:pass@host", f"redis://{HIDDEN}@host"),
        ("GET https://h/x?api_key=abc&q=1", f"GET https://h/x?api_key={HIDDEN}&q=1"),
        ("https://h/?q=1&access_token=abc#top", f"https://h/?q=1&access_token={HIDDEN}#top"),
    ],
)
def test_what_is_shaped_like_a_secret_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact({"x": [text]}) == {"x": [shown]}


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
def test_ordinary_text_is_shown_as_it_is(text: str) -> None:
    assert redact(text) == text


@pytest.mark.spec("4.11")
@pytest.mark.usefixtures("memory")
def test_known_secrets_are_hidden_wherever_they_stand() -> None:
    remember_secrets(["hunter22", "hunter22-long-version", "short"])
    assert redact("login with hunter22!") == f"login with {HIDDEN}!"
    assert redact({"note": ["x", {"y": "ahunter22b"}]}) == {"note": ["x", {"y": f"a{HIDDEN}b"}]}
    assert redact("hunter22-long-version") == HIDDEN
    assert redact("short") == "short"  # Too short to hide everywhere without hiding ordinary words.


def test_sets_and_tuples_are_looked_into() -> None:
    assert redact({"x": {"sk-abcdefghijklmnop1234"}, "y": ("sk-abcdefghijklmnop1234", 1)}) == {
        "x": [HIDDEN],
        "y": [HIDDEN, 1],
    }


def test_what_was_given_is_not_changed() -> None:
    given_ = {"password": "x", "a": ["Bearer abcdefgh"]}
    redact(given_)
    assert given_ == {"password": "x", "a": ["Bearer abcdefgh"]}


def test_data_without_end_is_cut() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = [loop]
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert "…" in str(redact(loop))
    assert "…" in str(redact(deep))


def test_megabytes_inside_data_are_cut_and_no_part_of_a_secret_is_left() -> None:
    for size in range(9_990, 10_010):
        shown = redact({"a": "x" * size + " sk-abcdefghijklmnop1234" + "y" * 1_000_000})["a"]
        assert len(shown) <= 10_001
        assert "sk-" not in shown
    assert len(redact("x" * 100_000)) == 100_000
    assert len(str(redact([["x"] * 1_000] * 1_000))) < 200_000


@quick
@given(
    st.recursive(
        st.text() | st.integers() | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
@pytest.mark.usefixtures("memory")
def test_a_known_secret_never_survives(value: Any) -> None:
    remember_secrets(["Tr0ub4dor&3"])
    assert "Tr0ub4dor&3" not in str(redact({"v": value, "t": ["xTr0ub4dor&3x", {"k": "Tr0ub4dor&3Tr0ub4dor&3"}]}))


@pytest.mark.spec("4.11")
async def test_a_call_logs_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    async def login(user: str, password: str) -> str:
        raise ValueError("no access for https://ann:s3cret-word@host with sk-abcdefghijklmnop1234")

    caplog.set_level(logging.DEBUG, logger="toolspace.calls")
    ts = Toolspace(tools=[login])
    await ts.call("login", {"user": "ann", "password": "s3cret-word"})
    await ts.call("login", '{"user": "ann", "password": ["s3cret-word"]}')
    shown = "\n".join(record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG)
    assert "login" in shown
    assert '"user":"ann"' in shown
    assert "s3cret-word" not in shown
    assert "sk-abc" not in shown
