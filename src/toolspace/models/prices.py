"""The prices and context windows of well-known models, from the data that the package genai-prices brings along.

Used by the model adapters. Never fetches newer data. Knows the models of OpenAI, Anthropic and Google, by their names
at any server; every other model costs 0, because no figure is better than a wrong one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import msgspec

_FAMILIES = {
    "openai": re.compile(r"gpt-(?!oss)|chatgpt-|o\d"),
    "anthropic": re.compile(r"claude-"),
    "google": re.compile(r"gemini-"),
}
"""Provider → the beginning of its models' names. Open models such as gpt-oss are not here: others run them for free."""
_VERSION = re.compile(r"(?:(?:-|@)(?:\d{4}-?\d{2}-?\d{2}|\d{2,8}|latest|exp.*|preview.*|v\d.*)(?::.*)?|:.*)$")
_ALIASES = {"gemini-3.1-pro": "gemini-3.1-pro-preview"}
_KNOWN_COSTS = ("demo", "openrouter")
"""Providers whose models cost nothing, or that send the cost of each request."""
_CONTEXT_WINDOWS = {"gemini-2.5-pro": 1_048_576, "gemini-3.1-pro-preview": 1_048_576}
"""Context windows that genai-prices lacks."""


class ModelPrice(msgspec.Struct, frozen=True):
    """The price of one model."""

    provider_id: str
    model_id: str
    context_window: int | None
    """In tokens, if known."""


@functools.lru_cache(256)
def find_price(model: str) -> ModelPrice | None:
    """The price of a model under its provider's name, with or without a version: `claude-sonnet-4-5-20250929`.

    The first call imports the price data, which takes 0.15 s.
    """
    name = model.rpartition("/")[2].lower()  # Routers of models write `anthropic/claude-opus-5.5`.
    provider_id = next((family for family, start in _FAMILIES.items() if start.match(name)), None)
    if provider_id is None:
        return None
    from genai_prices import Usage, calc_price

    for candidate in (name, _VERSION.sub("", name)):
        try:
            info = calc_price(Usage(), _ALIASES.get(candidate, candidate), provider_id=provider_id).model
        except LookupError:
            continue
        return ModelPrice(provider_id, info.id, info.context_window or _CONTEXT_WINDOWS.get(info.id))
    return None


def list_model_names() -> Sequence[str]:
    """The names of the models of OpenAI, Anthropic and Google that have a price."""
    from genai_prices.data_snapshot import get_snapshot

    providers = get_snapshot().providers
    return [model.id for provider in providers if provider.id in _FAMILIES for model in provider.models]


def calculate_cost(price: ModelPrice | None, *, input: int, cached: int, output: int, cache_writes: int = 0) -> float:
    """US dollars for one request. `input` counts all input tokens, including `cached` and `cache_writes` ones.

    `cached`: tokens that the provider read from its cache. `cache_writes`: tokens that it wrote to its cache.
    """
    if price is None:
        return 0.0
    from genai_prices import Usage, calc_price

    usage = Usage(
        # The library refuses parts that are larger than the whole; some servers count so.
        input_tokens=max(input, cached + cache_writes),
        cache_read_tokens=cached,
        cache_write_tokens=cache_writes,
        output_tokens=output,
    )
    return float(calc_price(usage, price.model_id, provider_id=price.provider_id).total_price)


def missing_price_problem(model: str) -> str | None:
    """Why the cost of a model, such as `openai:gpt-5`, cannot be limited; None if its price is known."""
    provider, colon, name = model.partition(":")
    if provider.lower() in _KNOWN_COSTS or find_price(name if colon else provider) is not None:
        return None
    return (
        f'the price of the model "{model}" is unknown, so limits.maxCost cannot hold; give its price in US dollars per '
        "million tokens (model.price: {input: 1.25, output: 10}), or limit limits.maxTokens instead"
    )
