"""Text search: words and passages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.core.text_search import (
    PASSAGE_CHARACTERS,
    PASSAGE_OVERLAP,
    index_document,
    join_passages,
    query_words,
    split_passages,
    split_words,
)

pytestmark = [pytest.mark.spec("9.5")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Invoices, invoice & INVOICE", ["invoice"] * 3),
        ("policies addresses statuses status bus", ["policy", "address", "statuse", "status", "bus"]),
        ("max_output_tokens=4096", ["max", "output", "token", "4096"]),
        ("Straße ÜBER ﬁne café", ["strasse", "über", "fine", "café"]),
        ("cafe\u0301", ["café"]),
        ("東京", ["東", "東京", "京"]),
        ("iPhone東京", ["iphone", "東", "東京", "京"]),
        ("x" * 100, ["x" * 64]),
        ("… — !", []),
    ],
)
def test_words_are_case_folded_and_unspaced_scripts_become_pairs(text: str, expected: list[str]) -> None:
    assert split_words(text) == expected


def test_a_query_has_letter_pairs_and_single_letters_only_if_alone() -> None:
    assert query_words("東京タワー") == ["東京", "京タ", "タワ", "ワー"]
    assert query_words("猫 cat cat") == ["猫", "cat"]


def test_passages_prefer_to_end_between_paragraphs_and_overlap() -> None:
    paragraph = "A sentence that says something. " * 25
    text = "\n\n".join([paragraph.strip()] * 5)
    parts = split_passages(text)
    assert all(len(text[start:end]) <= PASSAGE_CHARACTERS + PASSAGE_OVERLAP for start, end in parts)
    assert text[parts[0][0] : parts[0][1]].endswith("\n\n")
    for (_, end), (start, _) in pairwise(parts):
        assert start < end


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=6000) | st.text("a \n.東", max_size=6000))
def test_passages_are_bounded_and_join_to_the_text(text: str) -> None:
    for start, end in split_passages(text):
        assert 0 <= start <= end <= len(text)
        assert end - start <= PASSAGE_CHARACTERS + PASSAGE_OVERLAP
    assert join_passages(index_document("", text).passages) == text


def test_the_title_counts_for_every_passage() -> None:
    document = index_document("Parental leave", "word " * 1000)
    assert len(document.passages) > 3
    numbers = document.postings["parental"][::3]
    assert numbers == list(range(len(document.passages)))
