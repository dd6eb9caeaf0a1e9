"""Masking of secrets and personal data in results."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace import ImagePart, JsonPart, ResourcePart, TextPart, ToolResult
from toolspace.core.result_masking import (
    mask_personal_data_in_result,
    mask_personal_text,
    mask_secret_text,
    mask_secrets_in_result,
)

pytestmark = pytest.mark.spec("23.1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Carla <carla.x+news@mail.example.com>", "Carla <[email]>"),
        ("mailto:carla@example.com?subject=x", "mailto:[email]?subject=x"),
        ("https://x.example/?user=carla%40example.org&n=1", "https://x.example/?user=[email]&n=1"),
        ("jörg@müller.example.", "[email]."),
        ("a@b@carla@example.com", "a@b@[email]"),
        ("4111 1111 1111 1111", "[card]"),
        ("card 5500-0000-0000-0004, exp 12/27", "card [card], exp 12/27"),
        ("378282246310005", "[card]"),
        ("3782 822463 10005", "[card]"),
        ("ref 2024 4111 1111 1111 1111 ok", "ref 2024 [card] ok"),
        ("4111111111111111.", "[card]."),
        ("DE89 3704 0044 0532 0130 00 is mine", "[iban] is mine"),
        ("de89370400440532013000", "[iban]"),
        ("GB82WEST12345698765432", "[iban]"),
        ("NL91-ABNA-0417-1643-00", "[iban]"),
        ("+49 30 901820", "[phone]"),
        ("+49 (0) 30 123456-7", "[phone]"),
        ("0049 170 1234567", "[phone]"),
        ("(555) 123-4567", "[phone]"),
        ("555-123-4567", "[phone]"),
        ("call 030 1234567 now", "call [phone] now"),
        ("06 12 34 56 78", "[phone]"),
        ("tel:+15551234567", "tel:[phone]"),
        ("01701234567", "[phone]"),
    ],
)
def test_personal_data_is_masked(text: str, expected: str) -> None:
    assert mask_personal_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",  # The checksum of a card is wrong.
        "DE88370400440532013000",  # The checksum of an IBAN is wrong.
        "1700000000000",
        "550e8400-e29b-41d4-a716-446655440000",
        "192.168.10.200:8080",
        "2024-01-01 12:30:00",
        "01.02.2024",
        "version 1.2.3-rc.1",
        "@decorator and user@localhost",
        "0.123456789012",
        "order 12345678",
        "0000000000000000",
    ],
)
def test_other_numbers_stay(text: str) -> None:
    assert mask_personal_text(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer [hidden]"),
        ("key sk-0123456789abcdef0123", "key [hidden]"),
        ("postgres://app:hunter2@db/x", "postgres://[hidden]@db/x"),
        ("DB_PASSWORD=hunter22 next", "DB_PASSWORD=[hidden] next"),
        ('{"api_key": "0123456789"}', '{"api_key": "[hidden]"}'),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nrest", "[hidden]\nrest"),
        ("a basic question about passwords", "a basic question about passwords"),
    ],
)
def test_secrets_are_masked(text: str, expected: str) -> None:
    assert mask_secret_text(text) == expected


def test_every_text_of_a_result_is_masked() -> None:
    mail = "carla@example.com"
    result = ToolResult(
        True,
        {"people": [{"mail": mail, "age": 40, "card": 4111111111111111}], mail: 1, "dave@example.com": 2},
        parts=(
            TextPart(text=mail),
            JsonPart(value=[mail]),
            ResourcePart(uri=f"mailto:{mail}", name=mail, text=mail),
            ImagePart(data="aGk=", fields={"_meta": {"from": mail}}),
        ),
        extras={"_meta": {"from": mail}},
        structured_content=[mail],
    )
    masked_result = mask_personal_data_in_result(result)
    assert masked_result.result == {
        "people": [{"mail": "[email]", "age": 40, "card": "[card]"}],
        "[email]": 1,
        "[email] 2": 2,
    }
    assert masked_result.parts == (
        TextPart(text="[email]"),
        JsonPart(value=["[email]"]),
        ResourcePart(uri="mailto:[email]", name="[email]", text="[email]"),
        ImagePart(data="aGk=", fields={"_meta": {"from": "[email]"}}),
    )
    assert masked_result.structured_content == ["[email]"]
    assert masked_result.extras == {"_meta": {"from": "[email]"}}
    assert mail in str(result.result)  # The result itself is unchanged.
    failure = mask_personal_data_in_result(ToolResult(False, error=f"no user {mail}", error_kind="execution_error"))
    assert failure.error == "no user [email]"


def test_values_under_secret_names_are_masked() -> None:
    value = {"user": "carla", "password": "x", "nested": [{"apiKey": ["a", "b"], "token": None}]}
    masked_result = mask_secrets_in_result(ToolResult(True, value)).result
    assert masked_result == {
        "user": "carla",
        "password": "[hidden]",
        "nested": [{"apiKey": "[hidden]", "token": None}],
    }


@pytest.mark.parametrize("offset", range(0, 40, 3))
def test_long_texts_are_masked_whole(offset: int) -> None:
    line = f"{'x' * offset}, carla@example.com, 4111 1111 1111 1111, password=hunter22\n"
    text = line * (200_000 // len(line))
    assert "carla" not in mask_personal_text(text)
    assert "1111" not in mask_personal_text(text)
    assert "hunter22" not in mask_secret_text(text)
    assert len(mask_personal_text("a" * 300_000)) == 300_000


def test_data_that_is_too_deep_is_refused() -> None:
    value: Any = "carla@example.com"
    for _ in range(300):
        value = [value]
    with pytest.raises(ValueError, match="more than 200 levels"):
        mask_personal_data_in_result(ToolResult(True, value))


@given(st.text(alphabet="aZ@.%40+-() /:0123456789DE\n,"))
def test_masking_ends_and_is_stable(text: str) -> None:
    masked_result = mask_personal_text(text)
    assert mask_personal_text(masked_result) == masked_result
    mask_secret_text(text)
