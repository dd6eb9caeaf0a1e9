"""Opens the model that a configuration names: finds its provider, URL and key. Sends nothing.

Used by the agents, the CLI, `images` and `embeddings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from toolspace.core.defaults import MODEL_RETRIES
from toolspace.core.language_model import Model
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import is_secret_name, mask_secrets, register_secrets
from toolspace.errors import ModelError
from toolspace.models.http import ModelEndpoint, ModelHttpClient, RetryingModel

ProviderApi = Literal["chat", "responses", "messages", "generate"]
"""The API of a provider: OpenAI's chat completions or responses, Anthropic's messages, Google's generateContent."""


class ModelProvider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider of models over HTTP."""

    api: ProviderApi = "chat"
    base_url: str = ""
    """Empty: the configuration must have one."""
    key_variables: tuple[str, ...] = ()
    """Environment variables that may hold the key, in order of precedence. Empty: no key is needed."""
    base_url_variable: str = ""
    """The environment variable that may hold another URL."""
    default_model: str | None = None
    """The model if none is named."""


def _chat_provider(base_url: str, key_variable: str, default_model: str | None = None) -> ModelProvider:
    return ModelProvider(base_url=base_url, key_variables=(key_variable,), default_model=default_model)


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
    "openrouter": _chat_provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", "openrouter/auto"),
    "mistral": _chat_provider("https://api.mistral.ai/v1", "MISTRAL_API_KEY", "mistral-large-latest"),
    "deepseek": _chat_provider("https://api.deepseek.com", "DEEPSEEK_API_KEY", "deepseek-chat"),
    "groq": _chat_provider("https://api.groq.com/openai/v1", "GROQ_API_KEY", "openai/gpt-oss-120b"),
    "xai": _chat_provider("https://api.x.ai/v1", "XAI_API_KEY"),
    "together": _chat_provider("https://api.together.xyz/v1", "TOGETHER_API_KEY"),
    "fireworks": _chat_provider("https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    "cerebras": _chat_provider("https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
    "moonshotai": _chat_provider("https://api.moonshot.ai/v1", "MOONSHOTAI_API_KEY"),
    "nebius": _chat_provider("https://api.studio.nebius.com/v1", "NEBIUS_API_KEY"),
    "ollama": ModelProvider(base_url="http://127.0.0.1:11434/v1", base_url_variable="OLLAMA_BASE_URL"),
    "lmstudio": ModelProvider(base_url="http://127.0.0.1:1234/v1"),
    "openai-compatible": ModelProvider(),
}
"""The providers with an adapter in this package."""

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
_API_BY_NAME: Mapping[str, ProviderApi] = {"openai-chat": "chat", "openai-responses": "responses"}
_PROVIDER_BY_PREFIX: Mapping[str, str] = {
    "gpt-": "openai",
    "chatgpt-": "openai",
    "o1": "openai",
    "o3": "openai",
    "o4": "openai",
    "claude-": "anthropic",
    "gemini-": "google",
    "mistral-": "mistral",
    "deepseek-": "deepseek",
    "grok-": "xai",
}
"""The beginning of a model's name → its provider."""
PYDANTIC_AI_PROVIDERS = (
    "alibaba", "azure", "bedrock", "bedrock-mantle", "cohere", "crusoe", "github", "google-cloud", "heroku",
    "huggingface", "litellm", "ovhcloud", "sambanova", "snowflake", "vercel", "vllm", "zai",
)  # fmt: skip
"""The providers that Pydantic AI has an adapter for, by its names."""
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
    """Opens a model. Its first request opens a connection. Close the model, or `http` if that is given.

    Without a provider it is the OpenAI-compatible server at `base_url`, else the provider that the name implies, else
    one whose key is in the environment. Without a name it is the provider's default model. Raises `ModelError`:
    `no_key` if no key is set, `not_found` for an unknown provider.
    """
    if base_url and not provider and not parse_model_name(name or "")[0]:
        provider = "openai-compatible"
    api_key = (api_key or "").strip() or None
    provider, name = choose_model(provider, name, environ)
    if provider == DEMO:
        from toolspace.models.demo_model import DemoModel

        return DemoModel()
    credentials = [value for key, value in (headers or {}).items() if is_secret_name(key)]
    # Also without `Bearer`: servers repeat keys in other words.
    register_secrets([*filter(None, (api_key,)), *credentials, *(value.rpartition(" ")[2] for value in credentials)])
    if provider in PYDANTIC_AI_PROVIDERS:
        from toolspace.models.pydantic_ai_adapter import PydanticAIModel

        model: Model = PydanticAIModel(provider, name, base_url=base_url, api_key=api_key, headers=headers)
    else:
        model = _open_http_model(provider, name, environ, base_url, api_key, headers or {}, http)
    return RetryingModel(model, retries=retries) if retries > 0 else model


def choose_model(provider: str | None, name: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """The provider and the name of the model to use if the configuration leaves one of them out."""
    provider, name = (provider or "").strip().lower(), (name or "").strip()
    if not provider and name:
        provider, name = parse_model_name(name)
        if not provider:
            provider = _find_provider_by_prefix(name)
    if not provider:
        default = find_default_model(environ)
        if default is None:
            variables = ", ".join(entry.key_variables[0] for entry in list(PROVIDERS.values())[:3])
            remedy = f"set one of {variables} in the environment, or model.provider and model.apiKey"
            raise ModelError("no_key", f"no model is configured and no key is set; {remedy}")
        return default[0], name or default[1]
    entry = _find_provider(provider)
    return provider, name or (entry.default_model if entry is not None else None) or ""


def check_model_name(text: str) -> None:
    """Raises `ModelError` if neither `provider:` before the name nor the beginning of the name decides the provider."""
    name = text.strip()
    if not name or ":" in name or _find_provider_by_prefix(name):
        return
    if (entry := _find_provider(name)) is not None:
        hint = f'; "{name}" is a provider: add a name, such as "{name}:{entry.default_model or "NAME"}"'
    else:
        from toolspace.models.prices import list_model_names  # Imported here: only a wrong name needs the price data.

        suggestions = did_you_mean(name, list_model_names())
        hint = f'{suggestions or ";"} write provider:name, such as "openai:{PROVIDERS["openai"].default_model}"'
    raise ModelError("not_found", f"unknown model {name[:80]!r}{hint}")


def _find_provider_by_prefix(name: str) -> str:
    """The provider that the beginning of a model's name decides; "" if there is none."""
    prefixes = _PROVIDER_BY_PREFIX.items()
    return next((provider for prefix, provider in prefixes if name.lower().startswith(prefix)), "")


def find_default_model(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The first provider whose key is in the environment, and its default model."""
    for name, provider in PROVIDERS.items():
        has_key = any(environ.get(variable, "").strip() for variable in provider.key_variables)
        if provider.default_model is not None and has_key:
            return name, provider.default_model
    return None


def find_key(provider: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """The variable that holds the key of a provider, and the key; without a key, the variable to set."""
    entry = _find_provider(provider)
    variables = entry.key_variables if entry is not None else ()
    for variable in variables:
        value = environ.get(variable, "").strip()
        if value:
            return variable, value
    return (variables[0] if variables else "model.apiKey"), None


class ProviderAccess(NamedTuple):
    """How to reach a provider's API."""

    base_url: str
    is_own_url: bool
    """Whether it is the provider's own URL, not that of another server with the same API."""
    credential_name: str
    """The variable or setting of the key."""
    key: str | None


def resolve_access(
    provider: str,
    name: str,
    environ: Mapping[str, str],
    *,
    section: str,
    base_url: str | None,
    api_key: str | None,
    headers: Mapping[str, str] | None,
) -> ProviderAccess:
    """The URL and the key of a model. `section` of the configuration has its settings. Raises `ModelError`."""
    entry = _find_provider(provider) or ModelProvider()
    url = (base_url or environ.get(entry.base_url_variable or "-", "") or entry.base_url).strip().rstrip("/")
    _validate_base_url(url, provider.strip().lower(), section)
    is_own_url = url == entry.base_url.rstrip("/")
    variable, key = (f"{section}.apiKey", api_key) if api_key else find_key(provider, environ)
    register_secrets([key] if key else [])
    if not key and entry.key_variables and is_own_url:
        remedy = f"set {variable} in the environment, or {section}.apiKey in the configuration"
        raise ModelError("no_key", f"{provider}:{name}: no key is set; {remedy}")
    for header, value in {variable: key or "", **(headers or {})}.items():
        if not (header + value).isascii() or not (header + value).isprintable():
            raise ModelError("not_permitted", f"{header[:80]!r} has characters that no header can have; set it anew")
    return ProviderAccess(url, is_own_url, variable, key)


def _validate_base_url(url: str, provider: str, section: str) -> None:
    if not url:
        raise ModelError("not_found", f"provider {provider!r} has no address of its own; set {section}.baseUrl")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        text = str(mask_secrets(url))[:200]
        raise ModelError("not_found", f"{section}.baseUrl: {text!r} must begin with http:// or https://")
    if parts.username or parts.password:
        raise ModelError("not_found", f"{section}.baseUrl holds a user name or password; set {section}.headers instead")


def parse_model_name(text: str) -> tuple[str, str]:
    """`openai:gpt-6-sol` as provider and name; a name alone has the provider ""."""
    prefix, colon, name = text.partition(":")
    provider = prefix.strip().lower()
    if colon and (_find_provider(provider) is not None or provider in PYDANTIC_AI_PROVIDERS or provider == DEMO):
        return provider, name.strip()
    return "", text.strip()


def google_resource(model: str) -> str:
    """The path of a Google model, encoded."""
    return quote(model if "/" in model else f"models/{model}")


def _find_provider(name: str) -> ModelProvider | None:
    name = name.strip().lower()
    return PROVIDERS.get(_ALIASES.get(name, name))


def _open_http_model(
    provider: str,
    name: str,
    environ: Mapping[str, str],
    base_url: str | None,
    api_key: str | None,
    headers: Mapping[str, str],
    http: ModelHttpClient | None,
) -> Model:
    entry = _find_provider(provider)
    if entry is None:
        names = (*PROVIDERS, *_ALIASES, *PYDANTIC_AI_PROVIDERS)
        hint = did_you_mean(provider, names) or f"; it is one of {', '.join((*PROVIDERS, *PYDANTIC_AI_PROVIDERS))}"
        raise ModelError("not_found", f"unknown model provider {provider[:80]!r}{hint}")
    if not name:
        raise ModelError("not_found", f"no model of {provider} is named; set model.name")
    access = resolve_access(
        provider, name, environ, section="model", base_url=base_url, api_key=api_key, headers=headers
    )
    base, key = access.base_url, access.key or ""
    is_azure = ".azure.com/" in f"{base}/"
    # Other servers with OpenAI's API have chat completions; few have the newer API.
    is_compatible_server = entry.api == "responses" and not access.is_own_url and not is_azure
    authorization = {"Authorization": f"Bearer {key}"}
    match _API_BY_NAME.get(provider, "chat" if is_compatible_server else entry.api):
        case "chat":
            from toolspace.models.openai import OpenAIChatModel as ModelClass

            path = "/chat/completions"
        case "responses":
            from toolspace.models.openai import OpenAIResponsesModel as ModelClass

            path = "/responses"
        case "messages":
            from toolspace.models.anthropic import AnthropicModel as ModelClass

            path = "/messages" if base.endswith("/v1") else "/v1/messages"
            if access.credential_name != "ANTHROPIC_AUTH_TOKEN":
                authorization = {"x-api-key": key}
            headers = {"anthropic-version": _ANTHROPIC_VERSION, **headers}
        case "generate":
            from toolspace.models.google import GoogleModel as ModelClass

            version = "" if urlsplit(base).path.strip("/") else "/v1beta"
            path = f"{version}/{google_resource(name)}:streamGenerateContent?alt=sse"
            authorization = {"x-goog-api-key": key}
    if is_azure:
        authorization = {"api-key": key}
    endpoint = ModelEndpoint(
        name=f"{provider}:{name}",
        url=base if base.endswith(path) else base + path,
        headers={**authorization, **headers} if key else headers,
        credential_name=access.credential_name,
    )
    return ModelClass(name, endpoint, http=http)
