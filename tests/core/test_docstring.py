"""Parsing of docstrings: descriptions and arguments, in the Google, NumPy and Sphinx styles."""

from __future__ import annotations

from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolspace import tool
from toolspace.core.function_signature import Docstring, parse_docstring

quick = settings(max_examples=200, deadline=None)

GOOGLE = """Finds things.

    In two paragraphs: with a colon.

    Args:
        query (str): What to look for.
        limit (int, optional): How many,
            over two lines.

            And a paragraph.
        callback (Callable[[int], str]): Called: each time.
        left, right: Both ends.
        **extra: The rest.

    Keyword Args:
        named: By name only.

    Returns:
        dict: The things.

    Raises:
        ValueError: Not an argument.
    """

NUMPY = """Finds things.

    In two paragraphs: with a colon.

    Parameters
    ----------
    query : str
        What to look for.
    limit : int, optional
        How many,
        over two lines.

        And a paragraph.
    callback : Callable[[int], str]
        Called: each time.
    left, right
        Both ends.
    **extra
        The rest.

    Other Parameters
    ----------------
    named : {'a', 'b'}
        By name only.

    Returns
    -------
    dict
        The things.
    """

SPHINX = """Finds things.

    In two paragraphs: with a colon.

    :param str query: What to look for.
    :param limit: How many,
        over two lines.
        And a paragraph.
    :type limit: int
    :param callback: Called: each time.
    :arg left: Both ends.
    :argument right: Both ends.
    :param \\\\**extra: The rest.
    :parameter named: By name only.
    :returns: The things.
    :raises ValueError: Not an argument.
    """


@pytest.mark.spec("1.3")
@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX.replace("\\\\", "")], ids=["google", "numpy", "sphinx"])
def test_all_three_docstring_styles_give_the_same(text: str) -> None:
    assert parse_docstring(text) == Docstring(
        "Finds things.\n\nIn two paragraphs: with a colon.",
        {
            "query": "What to look for.",
            "limit": "How many, over two lines. And a paragraph.",
            "callback": "Called: each time.",
            "left": "Both ends.",
            "right": "Both ends.",
            "extra": "The rest.",
            "named": "By name only.",
        },
    )


@pytest.mark.spec("1.3")
@pytest.mark.parametrize("style", [GOOGLE, NUMPY, SPHINX.replace("\\\\", "")], ids=["google", "numpy", "sphinx"])
def test_argument_descriptions_reach_the_schema(style: str) -> None:
    def find(query: str, limit: int = 1, plain_flag: bool = False) -> None: ...

    find.__doc__ = style
    properties = tool(find).input_schema["properties"]
    assert properties["query"]["description"] == "What to look for."
    assert properties["limit"]["description"] == "How many, over two lines. And a paragraph."
    assert "description" not in properties["plain_flag"]


@pytest.mark.parametrize("text", [None, "", "  \n  "])
def test_an_empty_docstring_is_no_description(text: str | None) -> None:
    assert parse_docstring(text) == Docstring("", {})


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("One line.", "One line."),
        ("One line: with args: inside.", "One line: with args: inside."),
        ("Two lines,\nno sections.", "Two lines,\nno sections."),
        ("Note: this is no heading.\nIt goes on.", "Note: this is no heading.\nIt goes on."),
        ("First.\n\n    Second, indented.", "First.\n\nSecond, indented."),
        ("\n\n  Starts late.\n  ", "Starts late."),
        ("Args:\n    x: only arguments", ""),
        ("Short.\n\nArgs:\n", "Short."),
        ("Short.\n\nReturns:\n    a: b", "Short."),
    ],
)
def test_the_description_is_what_comes_before_the_sections(text: str, description: str) -> None:
    assert parse_docstring(text).description == description


def test_argument_like_lines_in_other_sections_are_ignored() -> None:
    text = dedent("""
        Short.

        Returns:
            x: not an argument

        Raises:
            y: neither
    """)
    assert parse_docstring(text).arguments == {}


@quick
@given(st.text(st.sampled_from("aA :\n\t-()*[],.x_") | st.characters(), max_size=300))
def test_any_docstring_can_be_parsed(text: str) -> None:
    parts = parse_docstring(text)
    assert isinstance(parts.description, str)
    assert all(name.isidentifier() or name.replace("_", "a").isalnum() for name in parts.arguments)


@pytest.mark.parametrize(
    "hostile",
    [
        "Args:\n" + "    a" * 20_000,
        "Args:\n    x (" + "(" * 50_000,
        "A\n" + "-" * 100_000 + "x",
        ":param " * 20_000 + "\n",
        "Args:\n    x: a\n" + "        \n" * 20_000,
        "Args:\n" + "a, " * 30_000 + "\n",
    ],
    ids=["words", "brackets", "dashes", "params", "blank lines", "names"],
)
def test_a_long_docstring_is_parsed_quickly(hostile: str) -> None:
    parse_docstring(hostile)
