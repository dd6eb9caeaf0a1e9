"""Opens the model that a configuration names: finds its provider, URL and key. Sends nothing.

Used by the agents, the CLI, `images` and `embeddings`.
"""

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
from toolspace.models.http import ModelHttpClient, RetryingModel

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
_PROVIDER_BY_PREFIX: Mapping[str, str] = {"gpt-": "openai", "claude-": "anthropic", "gemini-": "google"}
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
        from toolspace.models.pydantic_ai import PydanticAIModel

        model = PydanticAIModel(provider, name, base_url=base_url, api_key=api_key, headers=headers)
        return _with_retries(model, retries)
    entry = _find_provider(provider)
    if entry is None:
        names = (*PROVIDERS, *_ALIASES, *PYDANTIC_AI_PROVIDERS)
        hint = did_you_mean(provider, names) or f"; it is one of {', '.join((*PROVIDERS, *PYDANTIC_AI_PROVIDERS))}"
        raise ModelError("not_found", f"unknown model provider {provider[:80]!r}{hint}")
    if not name:
        raise ModelError("not_found", f"no model of {provider} is named; set model.name")
    url, is_own_url = resolve_base_url(provider, base_url, environ)
    variable, key = ("model.apiKey", api_key) if api_key else find_key(provider, environ)
    register_secrets([key] if key else [])
    if not key and entry.key_variables and is_own_url:
        raise missing_key_error(provider, name)
    validate_headers({variable: key or "", **(headers or {})})
    # Other servers with OpenAI's API have chat completions; few have the newer API.
    is_compatible_server = entry.api == "responses" and not is_own_url and ".azure.com/" not in f"{url}/"
    api = _API_BY_NAME.get(provider, "chat" if is_compatible_server else entry.api)
    return _with_retries(_create_model(provider, name, api, url, (variable, key or ""), headers or {}, http), retries)


def choose_model(provider: str | None, name: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """The provider and the name of the model to use if the configuration leaves one of them out."""
    provider, name = (provider or "").strip().lower(), (name or "").strip()
    if not provider and name:
        provider, name = parse_model_name(name)
        if not provider:
            prefixes = _PROVIDER_BY_PREFIX.items()
            provider = next((owner for prefix, owner in prefixes if name.lower().startswith(prefix)), "")
    if not provider:
        default = find_default_model(environ)
        if default is None:
            variables = ", ".join(entry.key_variables[0] for entry in list(PROVIDERS.values())[:3])
            remedy = f"set one of {variables} in the environment, or model.provider and model.apiKey"
            raise ModelError("no_key", f"no model is configured and no key is set; {remedy}")
        return default[0], name or default[1]
    entry = _find_provider(provider)
    return provider, name or (entry.default_model if entry is not None else None) or ""


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


def resolve_base_url(provider: str, base_url: str | None, environ: Mapping[str, str]) -> tuple[str, bool]:
    """The base URL of a provider's API, and whether it is the provider's own. Raises `ModelError`."""
    entry = _find_provider(provider) or ModelProvider()
    url = (base_url or environ.get(entry.base_url_variable or "-", "") or entry.base_url).strip().rstrip("/")
    if not url:
        name = provider.strip().lower()
        raise ModelError("not_found", f"provider {name!r} has no address of its own; set model.baseUrl")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ModelError(
            "not_found", f"model.baseUrl: {str(mask_secrets(url))[:200]!r} must begin with http:// or https://"
        )
    if parts.username or parts.password:
        raise ModelError("not_found", "model.baseUrl holds a user name or password; set model.headers instead")
    return url, url == entry.base_url.rstrip("/")


def missing_key_error(provider: str, name: str) -> ModelError:
    """The error for a model without a key."""
    variable, _ = find_key(provider, {})
    remedy = f"set {variable} in the environment, or model.apiKey in the configuration"
    return ModelError("no_key", f"{provider}:{name}: no key is set; {remedy}")


def validate_headers(headers: Mapping[str, str]) -> None:
    """Raises `ModelError` for a header that cannot be sent, such as a key with a line break."""
    for name, value in headers.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise ModelError("not_permitted", f"{name[:80]!r} has characters that no header can have; set it anew")


def parse_model_name(text: str) -> tuple[str, str]:
    """`openai:gpt-6-sol` as provider and name; a name alone has the provider ""."""
    prefix, colon, name = text.partition(":")
    provider = prefix.strip().lower()
    if colon and (_find_provider(provider) is not None or provider in PYDANTIC_AI_PROVIDERS or provider == DEMO):
        return provider, name.strip()
    return "", text.strip()


def _find_provider(name: str) -> ModelProvider | None:
    name = name.strip().lower()
    return PROVIDERS.get(_ALIASES.get(name, name))


def _create_model(
    provider: str,
    name: str,
    api: ProviderApi,
    base_url: str,
    credential: tuple[str, str],
    headers: Mapping[str, str],
    http: ModelHttpClient | None,
) -> Model:
    """`credential`: the variable or setting of the key, and the key."""
    from toolspace.models.streaming import ModelEndpoint

    variable, key = credential
    match api:
        case "chat":
            from toolspace.models.openai_chat import OpenAIChatModel as ModelClass

            path, authorization = "/chat/completions", {"Authorization": f"Bearer {key}"}
        case "responses":
            from toolspace.models.openai_responses import OpenAIResponsesModel as ModelClass

            path, authorization = "/responses", {"Authorization": f"Bearer {key}"}
        case "messages":
            from toolspace.models.anthropic import AnthropicModel as ModelClass

            path = "/messages" if base_url.endswith("/v1") else "/v1/messages"
            authorization = {"x-api-key": key}
            if variable == "ANTHROPIC_AUTH_TOKEN":
                authorization = {"Authorization": f"Bearer {key}"}
        case "generate":
            from toolspace.models.google import GoogleModel as ModelClass

            resource = name if "/" in name else f"models/{name}"
            version = "" if urlsplit(base_url).path.strip("/") else "/v1beta"
            path = f"{version}/{quote(resource)}:streamGenerateContent?alt=sse"
            authorization = {"x-goog-api-key": key}
    if ".azure.com/" in f"{base_url}/":
        authorization = {"api-key": key}
    api_headers = authorization if key else {}
    if api == "messages":
        api_headers["anthropic-version"] = _ANTHROPIC_VERSION
    url = base_url if base_url.endswith(path) else base_url + path
    endpoint = ModelEndpoint(url=url, headers={**api_headers, **headers}, credential_name=variable)
    return ModelClass(provider, name, endpoint, http=http)


def _with_retries(model: Model, retries: int) -> Model:
    return RetryingModel(model, retries=retries) if retries > 0 else model
