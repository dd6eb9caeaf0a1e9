"""Finds the model that a configuration names: its provider, its address and its key. Asks it nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from urllib.parse import quote, urlsplit

import msgspec

from toolspace.core.defaults import MODEL_RETRIES
from toolspace.core.model import Model
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import is_secret_name, mask_secrets, register_secrets
from toolspace.errors import ModelError
from toolspace.models.http import ModelHttpClient
from toolspace.models.retry import RetryingModel

ProviderApi = Literal["chat", "responses", "messages", "generate"]
"""Which API a provider speaks: OpenAI's chat completions or responses, Anthropic's, Google's."""


class ModelProvider(msgspec.Struct, frozen=True, kw_only=True):
    """Someone who serves models."""

    api: ProviderApi = "chat"
    base_url: str = ""
    """Empty: the configuration must say it."""
    key_variables: tuple[str, ...] = ()
    """Environment variables that may hold the key, the first one first. Empty: none is needed."""
    base_url_variable: str = ""
    """The environment variable that may hold another address."""
    default_model: str | None = None
    """The one to use where nobody names one."""


PROVIDERS: Mapping[str, ModelProvider] = {
    "openai": ModelProvider(
        api="responses",
        base_url="https://api.openai.com/v1",
        key_variables=("OPENAI_API_KEY",),
        base_url_variable="OPENAI_BASE_URL",
        default_model="gpt-6.1-sol",
    ),
    "anthropic": ModelProvider(
        api="messages",
        base_url="https://api.anthropic.com",
        key_variables=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
        base_url_variable="ANTHROPIC_BASE_URL",
        default_model="claude-sonnet-5-5",
    ),
    "google": ModelProvider(
        api="generate",
        base_url="https://generativelanguage.googleapis.com",
        key_variables=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
        base_url_variable="GOOGLE_GEMINI_BASE_URL",
        default_model="gemini-3.8-flash",
    ),
    "openrouter": ModelProvider(
        base_url="https://openrouter.ai/api/v1", key_variables=("OPENROUTER_API_KEY",), default_model="openrouter/auto"
    ),
    "mistral": ModelProvider(
        base_url="https://api.mistral.ai/v1", key_variables=("MISTRAL_API_KEY",), default_model="mistral-large-latest"
    ),
    "deepseek": ModelProvider(
        base_url="https://api.deepseek.com", key_variables=("DEEPSEEK_API_KEY",), default_model="deepseek-chat"
    ),
    "groq": ModelProvider(
        base_url="https://api.groq.com/openai/v1", key_variables=("GROQ_API_KEY",), default_model="openai/gpt-oss-120b"
    ),
    "xai": ModelProvider(base_url="https://api.x.ai/v1", key_variables=("XAI_API_KEY",)),
    "together": ModelProvider(base_url="https://api.together.xyz/v1", key_variables=("TOGETHER_API_KEY",)),
    "fireworks": ModelProvider(base_url="https://api.fireworks.ai/inference/v1", key_variables=("FIREWORKS_API_KEY",)),
    "cerebras": ModelProvider(base_url="https://api.cerebras.ai/v1", key_variables=("CEREBRAS_API_KEY",)),
    "moonshotai": ModelProvider(base_url="https://api.moonshot.ai/v1", key_variables=("MOONSHOTAI_API_KEY",)),
    "nebius": ModelProvider(base_url="https://api.studio.nebius.com/v1", key_variables=("NEBIUS_API_KEY",)),
    "ollama": ModelProvider(base_url="http://127.0.0.1:11434/v1", base_url_variable="OLLAMA_BASE_URL"),
    "lmstudio": ModelProvider(base_url="http://127.0.0.1:1234/v1"),
    "openai-compatible": ModelProvider(),
}
"""Those who are asked over the adapters here."""

_ALIASES: Mapping[str, str] = {
    "gemini": "google",
    "google-gla": "google",
    "google-genai": "google",
    "claude": "anthropic",
    "openai-chat": "openai",
    "openai-responses": "openai",
    "compatible": "openai-compatible",
    "grok": "xai",
    "moonshot": "moonshotai",
}
_SPEECHES: Mapping[str, ProviderApi] = {"openai-chat": "chat", "openai-responses": "responses"}
_STARTS: Mapping[str, str] = {"gpt-": "openai", "claude-": "anthropic", "gemini-": "google"}
PYDANTIC_AI_PROVIDERS = (
    "alibaba",
    "azure",
    "bedrock",
    "bedrock-mantle",
    "cohere",
    "crusoe",
    "github",
    "google-cloud",
    "heroku",
    "huggingface",
    "litellm",
    "ovhcloud",
    "sambanova",
    "snowflake",
    "vercel",
    "vllm",
    "zai",
)
"""Those who are asked through Pydantic AI, under its names for them."""
DEMO = "demo"
_ANTHROPIC_VERSION = "2023-06-01"


def open_model(
    provider: str | None,
    name: str | None,
    *,
    environ: Mapping[str, str],
    base_url: str | None = None,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    retries: int = MODEL_RETRIES,
    http: ModelHttpClient | None = None,
) -> Model:
    """The model, which opens a connection when it is asked. Close it, unless `http` is given: then close that.

    Without a provider it is whoever answers at `base_url`, as OpenAI does; else the one that the name tells, or whose
    key is in the environment. Without a name it is the provider's usual one. Raises `ModelError`: `no_key` where none
    is set, `not_found` for an unknown provider.
    """
    if base_url and not provider and not parse_model_name(name or "")[0]:
        provider = "openai-compatible"
    api_key = (api_key or "").strip() or None
    said, name = choose_model(provider, name, environ)
    if said == DEMO:
        from toolspace.models.demo.model import DemoModel

        return DemoModel()
    proofs = [value for key, value in (headers or {}).items() if is_secret_name(key)]
    # `Bearer …` also without the word: it is told in other words.
    register_secrets([*filter(None, (api_key,)), *proofs, *(value.rpartition(" ")[2] for value in proofs)])
    if said in PYDANTIC_AI_PROVIDERS:
        from toolspace.models.pydantic_ai import PydanticAIModel

        key = api_key or None
        return _again(PydanticAIModel(said, name, base_url=base_url, api_key=key, headers=headers), retries)
    found = PROVIDERS.get(_ALIASES.get(said, said))
    if found is None:
        known = (*PROVIDERS, *_ALIASES, *PYDANTIC_AI_PROVIDERS)
        near = did_you_mean(said, known) or f"; it is one of {', '.join((*PROVIDERS, *PYDANTIC_AI_PROVIDERS))}"
        raise ModelError("not_found", f"unknown model provider {said[:80]!r}{near}")
    if not name:
        raise ModelError("not_found", f"no model of {said} is named; set model.name")
    address, own = resolve_base_url(said, base_url, environ)
    variable, key = ("model.apiKey", api_key) if api_key else find_key(said, environ)
    register_secrets([key] if key else [])
    if not key and found.key_variables and own:
        raise missing_key_error(said, name)
    validate_headers({variable: key or "", **(headers or {})})
    # Others who speak as OpenAI does speak its chat completions; few its newer API.
    chats = found.api == "responses" and not own and ".azure.com/" not in f"{address}/"
    speech = _SPEECHES.get(said, "chat" if chats else found.api)
    return _again(_make(said, name, speech, address, (variable, key or ""), headers or {}, http), retries)


def choose_model(provider: str | None, name: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """The provider and the name that hold where a configuration leaves one of them open."""
    said, name = (provider or "").strip().lower(), (name or "").strip()
    if not said and name:
        said, name = parse_model_name(name)
        said = said or next((owner for start, owner in _STARTS.items() if name.lower().startswith(start)), "")
    if not said:
        found = find_default_model(environ)
        if found is None:
            variables = ", ".join(one.key_variables[0] for one in list(PROVIDERS.values())[:3])
            way = f"set one of {variables} in the environment, or model.provider and model.apiKey"
            raise ModelError("no_key", f"no model is configured and no key is set; {way}")
        return found[0], name or found[1]
    known = PROVIDERS.get(_ALIASES.get(said, said))
    return said, name or (known.default_model if known is not None and known.default_model is not None else "")


def find_default_model(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The provider whose key is in the environment, and a model of theirs."""
    for name, provider in PROVIDERS.items():
        if provider.default_model is not None and any(environ.get(key, "").strip() for key in provider.key_variables):
            return name, provider.default_model
    return None


def find_key(provider: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """The variable that holds the key of a provider, and the key; the first one to set where there is none."""
    said = provider.strip().lower()
    found = PROVIDERS.get(_ALIASES.get(said, said))
    keys = found.key_variables if found is not None else ()
    for variable in keys:
        value = environ.get(variable, "").strip()
        if value:
            return variable, value
    return (keys[0] if keys else "model.apiKey"), None


def resolve_base_url(provider: str, base_url: str | None, environ: Mapping[str, str]) -> tuple[str, bool]:
    """Where a provider's API is, and whether that is the provider's own address. Raises `ModelError`."""
    said = provider.strip().lower()
    found = PROVIDERS.get(_ALIASES.get(said, said)) or ModelProvider()
    given = base_url or environ.get(found.base_url_variable or "-", "")
    address = (given or found.base_url).strip().rstrip("/")
    if not address:
        raise ModelError("not_found", f"provider {said!r} has no address of its own; set model.baseUrl")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ModelError(
            "not_found", f"model.baseUrl: {str(mask_secrets(address))[:200]!r} must begin with http:// or https://"
        )
    if parts.username or parts.password:
        raise ModelError("not_found", "model.baseUrl holds a user name or password; set model.headers instead")
    return address, address == found.base_url.rstrip("/")


def missing_key_error(provider: str, name: str) -> ModelError:
    """What to say where there is no key."""
    variable, _ = find_key(provider, {})
    way = f"set {variable} in the environment, or model.apiKey in the configuration"
    return ModelError("no_key", f"{provider}:{name}: no key is set; {way}")


def validate_headers(headers: Mapping[str, str]) -> None:
    """Raises `ModelError` for what cannot be sent; a key with a line break was most likely cut out of a file."""
    for name, value in headers.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise ModelError("not_permitted", f"{name[:80]!r} has characters that no header can have; set it anew")


def parse_model_name(text: str) -> tuple[str, str]:
    """`openai:gpt-6-sol` as provider and name; a name alone has the provider ""."""
    provider, colon, name = text.partition(":")
    known = provider.strip().lower()
    if colon and (known in PROVIDERS or known in _ALIASES or known in PYDANTIC_AI_PROVIDERS or known == DEMO):
        return known, name.strip()
    return "", text.strip()


def _make(
    provider: str,
    name: str,
    speech: ProviderApi,
    address: str,
    key: tuple[str, str],
    headers: Mapping[str, str],
    http: ModelHttpClient | None,
) -> Model:
    from toolspace.models.streaming import ModelEndpoint

    variable, secret = key
    match speech:
        case "chat":
            from toolspace.models.openai_chat import OpenAIChatModel as Kind

            path, proof = "/chat/completions", {"Authorization": f"Bearer {secret}"}
        case "responses":
            from toolspace.models.openai_responses import OpenAIResponsesModel as Kind

            path, proof = "/responses", {"Authorization": f"Bearer {secret}"}
        case "messages":
            from toolspace.models.anthropic import AnthropicModel as Kind

            path = "/messages" if address.endswith("/v1") else "/v1/messages"
            proof = {"x-api-key": secret}
            if variable == "ANTHROPIC_AUTH_TOKEN":
                proof = {"Authorization": f"Bearer {secret}"}
        case "generate":
            from toolspace.models.google import GoogleModel as Kind

            place = name if "/" in name else f"models/{name}"
            version = "" if urlsplit(address).path.strip("/") else "/v1beta"
            path, proof = f"{version}/{quote(place)}:streamGenerateContent?alt=sse", {"x-goog-api-key": secret}
    if ".azure.com/" in f"{address}/":
        proof = {"api-key": secret}
    proof = proof if secret else {}
    if speech == "messages":
        proof["anthropic-version"] = _ANTHROPIC_VERSION
    url = address if address.endswith(path) else address + path
    endpoint = ModelEndpoint(url=url, headers={**proof, **headers}, credential_name=variable)
    return Kind(provider, name, endpoint, http=http)


def _again(model: Model, retries: int) -> Model:
    return RetryingModel(model, retries=retries) if retries > 0 else model
