"""The cost of model requests."""

from __future__ import annotations

import pytest

from toolspace.models.prices import calculate_cost, find_price

THOUSAND = 1_000


@pytest.mark.parametrize(
    ("name", "dollars_per_million"),
    [
        ("gpt-4.1", 2),
        ("gpt-4.1-2025-04-14", 2),
        ("openai/gpt-4.1", 2),
        ("gpt-4.1-mini", 0.4),
        ("gpt-6-sol-latest", 2),
        ("claude-sonnet-4-5-20250929", 3),
        ("claude-sonnet-4-5@20250929", 3),
        ("anthropic/claude-opus-5.5", 4),
        ("claude-opus-5-5", 4),
        ("claude-opus-5", 5),
        ("gemini-3.1-pro", 2),
        ("gemini-3.1-pro-preview", 2),
        ("gemini-2.5-flash-lite", 0.1),
    ],
)
def test_a_price_is_found_for_every_version_of_a_name(name: str, dollars_per_million: float) -> None:
    price = find_price(name)
    input_cost = calculate_cost(price, input=THOUSAND, cached=0, output=0)
    assert input_cost == pytest.approx(dollars_per_million / 1000)
    assert calculate_cost(price, input=THOUSAND, cached=THOUSAND, output=0) < input_cost
    assert calculate_cost(price, input=0, cached=0, output=THOUSAND) > input_cost


@pytest.mark.parametrize("name", ["gpt-4.1-giant", "gpt-oss-120b", "claude-opus-9", "llama3:8b", "", "gpt"])
def test_an_unknown_or_open_model_costs_nothing(name: str) -> None:
    assert find_price(name) is None
    assert calculate_cost(None, input=1000, cached=0, output=1000) == 0


@pytest.mark.parametrize(
    ("name", "context_window"),
    [("gpt-6.1-sol", 1_050_000), ("claude-haiku-4-5", 200_000), ("gemini-2.5-pro", 1_048_576), ("gpt-4o", 128_000)],
)
def test_the_context_window_is_known(name: str, context_window: int) -> None:
    price = find_price(name)
    assert price is not None
    assert price.context_window == context_window


def test_cached_input_is_cheaper_and_input_written_to_the_cache_is_dearer() -> None:
    price = find_price("claude-sonnet-4-5")
    tokens = 100 * THOUSAND
    assert calculate_cost(price, input=tokens, cached=0, output=0) == pytest.approx(0.3)
    assert calculate_cost(price, input=tokens, cached=tokens, output=0) == pytest.approx(0.03)
    assert calculate_cost(price, input=tokens, cached=0, output=0, cache_writes=tokens) == pytest.approx(0.375)
    assert calculate_cost(price, input=0, cached=0, output=tokens) == pytest.approx(1.5)


def test_long_requests_cost_more() -> None:
    price = find_price("gpt-6-sol")
    short = calculate_cost(price, input=272_000, cached=0, output=0)
    assert calculate_cost(price, input=544_000, cached=0, output=0) == pytest.approx(4 * short)


def test_token_counts_that_contradict_each_other_still_have_a_cost() -> None:
    assert calculate_cost(find_price("gpt-4.1"), input=10, cached=50, output=0) > 0
