"""The page of the prebuilt tools says what each takes and gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from toolspace.agents.prebuilt import goals_and_memories, plans
from toolspace.agents.prebuilt.provider import ALL_ACTIONS, get_action
from toolspace.config.load import load_config

PAGE = (Path(__file__).parents[3] / "docs" / "prebuilt.md").read_text()
ROWS = {name: (takes, gives) for name, takes, gives in re.findall(r"^\| `(\w+)` \| (`\{.*?) \| (.*?) \|$", PAGE, re.M)}
NAME = re.compile(r"(\w+)([?=])?")


def inputs(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema takes: each name, whether it may be left out, and what is inside it."""
    needed = schema.get("required", ())
    found: dict[str, Any] = {}
    for name, inner in schema["properties"].items():
        items = inner.get("items", {})
        found[name] = name not in needed, inputs(items) if "properties" in items else None
    return found


def shown(text: str) -> dict[str, Any]:
    """The same of `{key, goals: [{id?, description}], limit=5}`."""
    found: dict[str, Any] = {}
    rest = text.strip().strip("`").removeprefix("{").removesuffix("}")
    for part in re.findall(r"[\w?]+: \[\{[^}]*\}\]\??|[\w?=]+", rest):
        head, _, inner = part.partition(": ")
        matched = NAME.match(head)
        assert matched is not None
        found[matched[1]] = matched[2] is not None, shown(inner[1:-1]) if inner else None
    return found


@pytest.mark.parametrize("name", ALL_ACTIONS)
@pytest.mark.spec("9.1")
@pytest.mark.spec("9.2")
@pytest.mark.spec("9.3")
@pytest.mark.spec("9.4")
@pytest.mark.spec("9.5")
def test_every_tool_is_on_the_page_with_its_inputs(name: str) -> None:
    assert name in ROWS, f"docs/prebuilt.md has no row for {name}"
    takes, gives = ROWS[name]
    assert shown(takes) == inputs(ALL_ACTIONS[name].input_schema)
    assert gives.startswith("`{")


def test_no_tool_is_on_the_page_that_is_not_there() -> None:
    assert ROWS.keys() == ALL_ACTIONS.keys()


@pytest.mark.spec("9.6")
def test_the_older_names_are_on_the_page() -> None:
    older = PAGE.partition("## Older names")[2]
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+) \| ((?:`\w+`,? ?)+) \| (.*) \|$", older, re.M)
    named = {name: meant for left, right, _ in rows for name, meant in zip(*map(_names, (left, right)), strict=True)}
    assert len(named) == 10
    singular = {
        action.name: action for action in (*goals_and_memories.SINGULAR_MEMORY_ACTIONS, *plans.SINGULAR_PLAN_ACTIONS)
    }
    for name, meant in named.items():
        assert meant in ALL_ACTIONS
        assert get_action(name) is (singular.get(name) or ALL_ACTIONS[meant])
    for left, _, takes in rows:
        for name in _names(left):
            if name in singular:
                assert set(re.findall(r"\w+", " ".join(re.findall(r"`\{[^`]*\}`", takes)))) >= set(
                    singular[name].input_schema["properties"]
                )


def test_the_example_loads(tmp_path: Path) -> None:
    example = re.search(r"```yaml\n(.*?)```", PAGE, re.S)
    assert example is not None
    (tmp_path / "toolspace.yaml").write_text(example[1])
    assert load_config(tmp_path / "toolspace.yaml").tools.definitions["remember"].execution == {"action": "setMemory"}


def _names(cell: str) -> list[str]:
    return re.findall(r"\w+", cell)
