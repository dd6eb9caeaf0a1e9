"""Opening a model: its provider, its URL and its key."""

from __future__ import annotations

from typing import Any

import pytest

from toolspace.core.language_model import Model
from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ModelError
from toolspace.models.anthropic import AnthropicModel
from toolspace.models.google import GoogleModel
from toolspace.models.http import RetryingModel
from toolspace.models.openai import OpenAIChatModel, OpenAIResponsesModel
from toolspace.models.prices import find_price
from toolspace.models.pydantic_ai_adapter import PydanticAIModel
from toolspace.models.registry import (
    PROVIDERS,
    PYDANTIC_AI_PROVIDERS,
    choose_model,
    find_default_model,
    find_key,
    open_model,
    parse_model_name,
)


def inner(model: Model) -> Any:
    assert isinstance(model, RetryingModel)
    return model.model


@pytest.mark.spec("11.7")
@pytest.mark.parametrize(
    ("provider", "name", "environ", "kind", "url"),
    [
        ("openai", "gpt-6-sol", {}, OpenAIResponsesModel, "https://api.openai.com/v1/responses"),
        ("openai-chat", "gpt-4.1", {}, OpenAIChatModel, "https://api.openai.com/v1/chat/completions"),
        (
            "openai",
            "qwen3",
            {"OPENAI_BASE_URL": "http://localhost:8000/v1/"},
            OpenAIChatModel,
            "http://localhost:8000/v1/chat/completions",
        ),
        ("Anthropic", "claude-opus-5-5", {}, AnthropicModel, "https://api.anthropic.com/v1/messages"),
        (
            "anthropic",
            "claude-opus-5-5",
            {"ANTHROPIC_BASE_URL": "http://localhost:1/v1"},
            AnthropicModel,
            "http://localhost:1/v1/messages",
        ),
        (
            "gemini",
            "gemini-3.8-flash",
            {},
            GoogleModel,
            "https://generativelanguage.googleapis.com/v1beta/models/gemini-3.8-flash:streamGenerateContent?alt=sse",
        ),
        ("groq", "x", {}, OpenAIChatModel, "https://api.groq.com/openai/v1/chat/completions"),
        ("ollama", "llama3", {}, OpenAIChatModel, "http://127.0.0.1:11434/v1/chat/completions"),
    ],
)
def test_each_provider_has_its_own_url(
    provider: str, name: str, environ: dict[str, str], kind: type[Any], url: str
) -> None:
    keys = {"OPENAI_API_KEY": "k1", "ANTHROPIC_API_KEY": "k2", "GEMINI_API_KEY": "k3", "GROQ_API_KEY": "k4"}
    model = inner(open_model(provider, name, environ={**keys, **environ}))
    assert type(model) is kind
    assert model.endpoint.url == url
    assert model.name == f"{provider.lower()}:{name}"


@pytest.mark.spec("11.7")
@pytest.mark.parametrize("provider", [name for name, entry in PROVIDERS.items() if entry.key_variables])
def test_a_missing_key_is_named_with_a_remedy(provider: str) -> None:
    with pytest.raises(ModelError) as error_info:
        open_model(provider, "some-model", environ={})
    assert error_info.value.kind == "no_key"
    assert f"set {PROVIDERS[provider].key_variables[0]} in the environment" in str(error_info.value)
    assert not error_info.value.is_transient


def test_another_server_needs_no_key() -> None:
    model = inner(open_model("openai", "qwen3", base_url="http://localhost:8000/v1", environ={}))
    assert model.endpoint.headers == {}
    assert isinstance(inner(open_model("openai-compatible", "x", base_url="http://h/v1", environ={})), OpenAIChatModel)
    bare = inner(open_model(None, "gpt-4.1", base_url="http://h/v1", environ={"OPENAI_API_KEY": "not-for-them"}))
    assert (bare.name, bare.endpoint.headers) == ("openai-compatible:gpt-4.1", {})


def test_keys_are_shown_nowhere() -> None:
    key = "not-of-a-known-form-4711"
    model = open_model("openai", "gpt-4.1", environ={"OPENAI_API_KEY": key}, headers={"X-Api-Key": "another-secret-9"})
    assert key not in repr(inner(model).endpoint)
    assert mask_secrets(f"it said {key} and another-secret-9") == "it said [hidden] and [hidden]"


def test_configured_headers_are_sent() -> None:
    model = inner(open_model("openai-chat", "x", api_key="k", headers={"X-Team": "blue"}, environ={}))
    assert model.endpoint.headers == {"Authorization": "Bearer k", "X-Team": "blue"}


def test_anthropic_accepts_auth_tokens() -> None:
    model = inner(open_model("anthropic", "x", environ={"ANTHROPIC_AUTH_TOKEN": "tok"}))
    assert model.endpoint.headers == {"Authorization": "Bearer tok", "anthropic-version": "2023-06-01"}


@pytest.mark.parametrize("key", ["ab\ncd", "sk-\u200bx", "a\0b"])
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ModelError, match="'OPENAI_API_KEY' has characters") as error_info:
        open_model("openai", "x", environ={"OPENAI_API_KEY": key})
    assert key not in str(error_info.value)
    assert inner(open_model("openai-chat", "x", api_key="sk-1\n", environ={})).endpoint.headers == {
        "Authorization": "Bearer sk-1"
    }


@pytest.mark.parametrize(
    ("provider", "hint"), [("opnai", 'did you mean "openai"'), ("qqq", "it is one of openai, anthropic, google")]
)
def test_an_unknown_provider_gets_a_suggestion(provider: str, hint: str) -> None:
    with pytest.raises(ModelError, match=hint) as error_info:
        open_model(provider, "x", environ={})
    assert error_info.value.kind == "not_found"


@pytest.mark.parametrize("url", ["ftp://h/v1", "localhost:8000", "http://", "http://user:pass@h/v1"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ModelError, match=r"model\.baseUrl"):
        open_model("openai", "x", base_url=url, api_key="k", environ={})
    with pytest.raises(ModelError, match="has no address of its own"):
        open_model("openai-compatible", "x", environ={})


@pytest.mark.parametrize("provider", PYDANTIC_AI_PROVIDERS)
def test_all_other_providers_use_pydantic_ai(provider: str) -> None:
    assert isinstance(inner(open_model(provider, "x", environ={})), PydanticAIModel)


@pytest.mark.parametrize(
    ("environ", "expected_provider"),
    [
        ({}, None),
        ({"OPENAI_API_KEY": " "}, None),
        ({"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k"}, "openai"),
        ({"ANTHROPIC_API_KEY": "k"}, "anthropic"),
        ({"GOOGLE_API_KEY": "k"}, "google"),
        ({"OPENROUTER_API_KEY": "k"}, "openrouter"),
    ],
)
def test_the_default_model_belongs_to_the_key_that_is_set(
    environ: dict[str, str], expected_provider: str | None
) -> None:
    expected_choice = find_default_model(environ)
    assert (expected_choice and expected_choice[0]) == expected_provider
    if expected_choice is not None:
        assert expected_choice[1] == PROVIDERS[expected_choice[0]].default_model
        assert inner(open_model(None, None, environ=environ)).name == ":".join(expected_choice)


@pytest.mark.parametrize("provider", ["openai", "anthropic", "google"])
def test_the_default_models_have_a_price(provider: str) -> None:
    assert find_price(PROVIDERS[provider].default_model or "") is not None


@pytest.mark.parametrize(
    ("provider", "name", "expected_choice"),
    [
        ("openai", None, ("openai", PROVIDERS["openai"].default_model)),
        (None, "openai:gpt-4.1", ("openai", "gpt-4.1")),
        (None, "claude-opus-5-5", ("anthropic", "claude-opus-5-5")),
        (None, "gemini-2.5-flash", ("google", "gemini-2.5-flash")),
        (None, "llama3:8b", ("mistral", "llama3:8b")),
        ("ollama", "llama3:8b", ("ollama", "llama3:8b")),
    ],
)
def test_missing_parts_of_a_model_name_are_filled_in(
    provider: str | None, name: str | None, expected_choice: tuple[str, str]
) -> None:
    assert choose_model(provider, name, {"MISTRAL_API_KEY": "k"}) == expected_choice


def test_without_any_key_the_error_has_a_remedy() -> None:
    with pytest.raises(ModelError, match="set one of OPENAI_API_KEY, ANTHROPIC_API_KEY, GEMINI_API_KEY") as error_info:
        open_model(None, None, environ={})
    assert error_info.value.kind == "no_key"


def test_names_with_a_provider_are_parsed() -> None:
    assert parse_model_name("anthropic:claude-opus-5-5") == ("anthropic", "claude-opus-5-5")
    assert parse_model_name("gpt-4.1") == ("", "gpt-4.1")
    assert find_key("google", {"GOOGLE_API_KEY": "k"}) == ("GOOGLE_API_KEY", "k")
