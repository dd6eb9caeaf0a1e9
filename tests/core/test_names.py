"""Names of tools: sanitising, hashing, and the nearest name. The order of tools does not matter."""

from __future__ import annotations

import hashlib
import re
from itertools import permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from toolspace.core.names import (
    MAX_NAME,
    did_you_mean,
    is_local_name,
    nearest,
    qualify,
    qualify_all,
    sanitise,
    short_hash,
)

quick = settings(max_examples=200, deadline=None)
VALID = re.compile(r"[A-Za-z0-9_]{1,64}")
any_text = st.text(st.characters(exclude_categories=[]), max_size=90)
alike = st.text("aA_-. ", max_size=70)


@pytest.mark.spec("2.1")
def test_namespace_and_tool_are_joined_by_two_underscores() -> None:
    assert qualify("github", "search_code") == "github__search_code"


@pytest.mark.spec("2.2")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("my-tool", "my_tool"),
        ("a.b/c d", "a_b_c_d"),
        ("CamelCase9", "CamelCase9"),
        ("über", "_ber"),
        ("a\n", "a_"),
        ("", ""),
    ],
)
def test_every_other_character_becomes_an_underscore_and_case_is_kept(value: str, expected: str) -> None:
    assert sanitise(value) == expected


@pytest.mark.spec("2.2")
@pytest.mark.parametrize("size", [59, 60, 61, 62, 63, 64, 65, 100, 10_000])
def test_a_name_up_to_64_is_kept_and_a_longer_one_keeps_head_and_tail_around_a_hash(size: int) -> None:
    tool = "head" + "x" * (size - 11) + "tail"
    name = qualify("n", tool)
    plain = f"n__{tool}"
    assert len(plain) == size
    if len(plain) <= MAX_NAME:
        assert name == plain
        return
    assert len(name) == MAX_NAME
    head, digest, tail = name[:27], name[28:36], name[37:]
    assert (plain.startswith(head), plain.endswith(tail)) == (True, True)
    assert digest == short_hash(plain)
    assert (name[27], name[36]) == ("_", "_")


@pytest.mark.spec("2.2")
def test_the_hash_is_of_the_whole_name_and_the_same_everywhere() -> None:
    assert short_hash("github__search_code") == hashlib.sha256(b"github__search_code").hexdigest()[:8]
    middle_one = qualify("n", "a" * 40 + "1" + "b" * 40)
    middle_two = qualify("n", "a" * 40 + "2" + "b" * 40)
    assert middle_one != middle_two
    assert middle_one[:27] == middle_two[:27]
    assert middle_one[-27:] == middle_two[-27:]
    assert qualify("n", "a-" * 60) != qualify("n", "a_" * 60)


@pytest.mark.spec("2.3")
def test_names_that_collide_after_sanitising_all_get_the_hash() -> None:
    names = qualify_all("n", ["my-tool", "my_tool", "my.tool", "other"])
    assert names["other"] == "n__other"
    assert len({*names.values()}) == 4
    for original in ("my-tool", "my_tool", "my.tool"):
        assert names[original] == f"n__my_tool_{short_hash(f'n__{original}')}"


@pytest.mark.spec("2.3")
def test_a_tool_cannot_get_the_hashed_name_of_another() -> None:
    squatter = f"my_tool_{short_hash('n__my-tool')}"
    second = f"{squatter}_{short_hash(f'n__{squatter}')}"
    originals = ["my-tool", "my_tool", squatter, second]
    for order in permutations(originals):
        names = qualify_all("n", order)
        assert len({*names.values()}) == 4
        assert names == qualify_all("n", originals)


def test_colliding_hashes_are_hashed_again() -> None:
    # 32 bits: a provider that wants two equal ones finds them among some hundred thousand names.
    tools_by_name: dict[str, str] = {}
    pair: tuple[str, str] | None = None
    for number in range(400_000):
        tool = f"{'a' * 30}{number}{'b' * 30}"
        digest = short_hash(f"n__{tool}")
        if digest in tools_by_name:
            pair = (tools_by_name[digest], tool)
            break
        tools_by_name[digest] = tool
    assert pair is not None
    assert qualify("n", pair[0]) == qualify("n", pair[1])
    names = qualify_all("n", pair)
    assert len({*names.values()}) == 2
    assert names == qualify_all("n", reversed(pair))


@pytest.mark.spec("2.2")
@pytest.mark.spec("2.3")
@quick
@given(any_text, st.lists(any_text | alike, max_size=12))
@example("", [""])
def test_names_are_valid_unique_and_do_not_depend_on_the_order(namespace: str, tools: list[str]) -> None:
    names = qualify_all(namespace, tools)
    assert set(names) == set(tools)
    assert len(set(names.values())) == len(set(tools))
    for name in names.values():
        assert VALID.fullmatch(name)
    shuffled_tools = sorted(tools, key=short_hash)
    assert qualify_all(namespace, shuffled_tools) == names
    assert qualify_all(namespace, tools + tools) == names


@quick
@given(st.text("ab-_.", max_size=4), st.lists(st.text("ab-_.", max_size=4), max_size=20, unique=True))
def test_a_name_that_collides_with_none_has_no_hash(namespace: str, tools: list[str]) -> None:
    names = qualify_all(namespace, tools)
    for tool, name in names.items():
        alone = [sanitise(candidate) for candidate in tools].count(sanitise(tool)) == 1
        assert (name == f"{sanitise(namespace)}__{sanitise(tool)}") == alone


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("a", True),
        ("A-b_9", True),
        ("a" * 64, True),
        ("a" * 65, False),
        ("", False),
        ("a b", False),
        ("a\n", False),
        ("ä", False),
    ],
)
def test_local_names_are_what_models_accept(name: str, fits: bool) -> None:
    assert is_local_name(name) is fits


# The nearest


@pytest.mark.spec("1.7")
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("serch_code", "github__search_code"),
        ("search_code", "github__search_code"),
        ("GITHUB__SEARCH_CODE", "github__search_code"),
        ("read_fiel", "read_file"),
        ("READ_FILE", "read_file"),
        ("readfile", "read_file"),
    ],
)
def test_the_nearest_name_comes_first(wrong: str, expected: str) -> None:
    assert nearest(wrong, ["write_file", "read_file", "github__search_code", "github__list_issues"])[0] == expected


def test_no_name_is_near_nonsense() -> None:
    assert nearest("zzzz", ["read_file"]) == []
    assert nearest("", ["read_file"]) == []
    assert nearest("x", []) == []
    assert did_you_mean("zzzz", ["read_file"]) == ""
    assert did_you_mean("read_fil", ["read_file", "read_files"]) == '; did you mean "read_file" or "read_files"?'


def test_a_name_of_megabytes_gets_no_suggestions() -> None:
    assert nearest("read_file" * 1_000_000, ["read_file"]) == []


@quick
@given(any_text, st.lists(any_text, max_size=8), st.integers(0, 4))
def test_the_nearest_are_some_of_the_known_ones(name: str, candidates: list[str], count: int) -> None:
    matches = nearest(name, candidates, count or 1)
    assert set(matches) <= set(candidates)
    assert len(matches) == len(set(matches)) <= (count or 1)
