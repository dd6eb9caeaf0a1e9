"""What requests cost."""

from __future__ import annotations

import pytest

from toolspace.models.prices import calculate_cost, find_price


@pytest.mark.parametrize(
    ("name", "dollars"),
    [
        ("gpt-4.1", 2),
        ("gpt-4.1-2025-04-14", 2),
        ("openai/gpt-4.1", 2),
        ("gpt-4.1-mini", 0.4),
        ("claude-sonnet-4-5-20250929", 3),
        ("claude-sonnet-4-5@20250929", 3),
        ("anthropic/claude-opus-5.5", 4),
        ("claude-opus-5-5", 4),
        ("claude-opus-5", 5),
        ("gemini-3.1-pro-preview", 2),
        ("gemini-2.5-flash-lite", 0.1),
    ],
)
def test_a_price_is_found_under_every_version(name: str, dollars: float) -> None:
    price = find_price(name)
    assert price is not None
    assert price.input == dollars
    assert price.cached < price.input < price.output


@pytest.mark.parametrize("name", ["gpt-4.1-giant", "gpt-5.4-pro", "claude-opus-9", "llama3:8b", "", "gpt"])
def test_an_unknown_model_costs_nothing(name: str) -> None:
    assert find_price(name) is None
    assert calculate_cost(None, input=1000, cached=0, output=1000) == 0


def test_what_was_read_before_is_cheaper_and_what_is_kept_dearer() -> None:
    price = find_price("claude-sonnet-4-5")
    million = 1_000_000
    assert calculate_cost(price, input=million, cached=0, output=0) == pytest.approx(3)
    assert calculate_cost(price, input=million, cached=million, output=0) == pytest.approx(0.3)
    assert calculate_cost(price, input=million, cached=0, output=0, written=million) == pytest.approx(3.75)
    assert calculate_cost(price, input=0, cached=0, output=million) == pytest.approx(15)


def test_long_requests_cost_more() -> None:
    price = find_price("gpt-6-sol")
    short = calculate_cost(price, input=272_000, cached=0, output=0)
    assert calculate_cost(price, input=544_000, cached=0, output=0) == pytest.approx(4 * short)
