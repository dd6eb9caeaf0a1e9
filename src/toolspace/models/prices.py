"""What well-known models cost and how much they read at once, as their providers publish it. Asks nobody.

A model that is not in the table costs 0: better no figure than a wrong one.
"""

from __future__ import annotations

import re

import msgspec

AS_OF = "2026-11-16"
"""The day on which the table was compared with the providers' own pages."""

_VERSION = re.compile(r"(?:-|@)(?:\d{4}-?\d{2}-?\d{2}|\d{2,8}|latest|exp.*|preview.*|v\d.*)(?::.*)?|:.*")


class ModelPrice(msgspec.Struct, frozen=True):
    """US dollars per million tokens."""

    input: float
    cached: float
    """Input that the provider had read before."""
    output: float
    context_window: int
    written: float = 0.0
    """Input that the provider keeps for the next request; 0: no more than other input."""
    above: int = 0
    """Input tokens beyond which the whole request costs more; 0: never."""
    input_factor: float = 1.0
    output_factor: float = 1.0


def _openai(input: float, cached: float, output: float) -> ModelPrice:
    return ModelPrice(input, cached, output, 1_050_000, input * 1.25, 272_000, 2.0, 1.5)


def _claude(input: float, cached: float, output: float, context: int = 1_000_000) -> ModelPrice:
    return ModelPrice(input, cached, output, context, input * 1.25)


_PRICES: dict[str, ModelPrice] = {
    "gpt-6.1-sol": _openai(2, 0.1, 10),
    "gpt-6.1-terra": _openai(1, 0.05, 5),
    "gpt-6-astra": _openai(10, 1, 50),
    "gpt-6-sol": _openai(2, 0.2, 10),
    "gpt-6-luna": _openai(0.1, 0.01, 0.5),
    "gpt-5.6-sol": _openai(4, 0.4, 20),
    "gpt-5.6-terra": _openai(2, 0.2, 12),
    "gpt-5.6-luna": _openai(0.2, 0.02, 1.2),
    "gpt-5.5": ModelPrice(5, 0.5, 30, 1_000_000, 0, 272_000, 2.0, 1.5),
    "gpt-5.4": ModelPrice(2.5, 0.25, 15, 1_050_000, 0, 272_000, 2.0, 1.5),
    "gpt-5.4-mini": ModelPrice(0.75, 0.075, 4.5, 400_000),
    "gpt-5.4-nano": ModelPrice(0.2, 0.02, 1.25, 400_000),
    "gpt-5.2": ModelPrice(1.75, 0.175, 14, 400_000),
    "gpt-5.1": ModelPrice(1.25, 0.125, 10, 400_000),
    "gpt-5": ModelPrice(1.25, 0.125, 10, 400_000),
    "gpt-5-mini": ModelPrice(0.25, 0.025, 2, 400_000),
    "gpt-5-nano": ModelPrice(0.05, 0.005, 0.4, 400_000),
    "gpt-4.1": ModelPrice(2, 0.5, 8, 1_000_000),
    "gpt-4.1-mini": ModelPrice(0.4, 0.1, 1.6, 1_000_000),
    "gpt-4.1-nano": ModelPrice(0.1, 0.025, 0.4, 1_000_000),
    "gpt-4o": ModelPrice(2.5, 1.25, 10, 128_000),
    "gpt-4o-mini": ModelPrice(0.15, 0.075, 0.6, 128_000),
    "o3": ModelPrice(2, 0.5, 8, 200_000),
    "o4-mini": ModelPrice(1.1, 0.275, 4.4, 200_000),
    "claude-fable-5-1": _claude(10, 0.25, 50),
    "claude-fable-5": _claude(10, 1, 50),
    "claude-opus-5-5": _claude(4, 0.2, 20),
    "claude-opus-5": _claude(5, 0.5, 25),
    "claude-opus-4-8": _claude(5, 0.5, 25),
    "claude-opus-4-7": _claude(5, 0.5, 25),
    "claude-opus-4-6": _claude(5, 0.5, 25),
    "claude-opus-4-5": _claude(5, 0.5, 25, 200_000),
    "claude-opus-4-1": _claude(15, 1.5, 75, 200_000),
    "claude-sonnet-5-5": _claude(2, 0.1, 10),
    "claude-sonnet-5": _claude(2, 0.2, 10),
    "claude-sonnet-4-6": _claude(3, 0.3, 15),
    "claude-sonnet-4-5": _claude(3, 0.3, 15, 200_000),
    "claude-haiku-5-5": ModelPrice(0.1, 0.01, 0.5, 1_000_000, 0.125, 100_000, 5.0, 5.0),
    "claude-haiku-4-5": _claude(1, 0.1, 5, 200_000),
    "gemini-4-argon": ModelPrice(4, 0.2, 20, 1_048_576),
    "gemini-3.8-flash": ModelPrice(1.5, 0.15, 7.5, 1_000_000),
    "gemini-3.7-flash": ModelPrice(1.5, 0.15, 7.5, 1_000_000),
    "gemini-3.6-flash": ModelPrice(1.5, 0.15, 7.5, 1_000_000),
    "gemini-3.5-flash": ModelPrice(1.5, 0.15, 9, 1_000_000),
    "gemini-3.5-flash-lite": ModelPrice(0.3, 0.03, 2.5, 1_000_000),
    "gemini-3.1-flash-lite": ModelPrice(0.25, 0.025, 1.5, 1_000_000),
    "gemini-3.1-pro": ModelPrice(2, 0.2, 12, 1_048_576, 0, 200_000, 2.0, 1.5),
    "gemini-2.5-pro": ModelPrice(1.25, 0.125, 10, 1_048_576, 0, 200_000, 2.0, 1.5),
    "gemini-2.5-flash": ModelPrice(0.3, 0.03, 2.5, 1_048_576),
    "gemini-2.5-flash-lite": ModelPrice(0.1, 0.01, 0.4, 1_000_000),
}


def find_price(model: str) -> ModelPrice | None:
    """The price of a model under its provider's name for it, of whichever version: `claude-sonnet-4-5-20250929`."""
    name = model.rpartition("/")[2].lower()  # `anthropic/claude-opus-5.5`, as routers of models write it.
    if name.startswith("claude"):
        name = name.replace(".", "-")
    found = _PRICES.get(name)
    if found is None:
        longest = max((key for key in _PRICES if name.startswith(key)), key=len, default=None)
        if longest is not None and _VERSION.fullmatch(name[len(longest) :]):
            found = _PRICES[longest]
    return found


def calculate_cost(price: ModelPrice | None, *, input: int, cached: int, output: int, written: int = 0) -> float:
    """Dollars for one request. `input` counts all that was read, and `cached` and `written` are of it."""
    if price is None:
        return 0.0
    long = price.above and input > price.above
    read, said = (price.input_factor, price.output_factor) if long else (1.0, 1.0)
    plain = max(0, input - cached - written)
    dollars = plain * price.input + cached * price.cached + written * (price.written or price.input)
    return (dollars * read + output * price.output * said) / 1_000_000
