"""The page about prebuilt tools lists the input and the result of each tool."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from toolspace.agents.prebuilt import goals_memories_plans
from toolspace.agents.prebuilt.provider import ALL_ACTIONS, get_action
from toolspace.config.load import load_config

PAGE = (Path(__file__).parents[3] / "docs" / "prebuilt.md").read_text()
ROWS = {name: (takes, gives) for name, takes, gives in re.findall(r"^\| `(\w+)` \| (`\{.*?) \| (.*?) \|$", PAGE, re.M)}
NAME = re.compile(r"(\w+)([?=])?")


def inputs(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema takes: each name, whether it may be left out, and what is inside it."""
    required_names = schema.get("required", ())
    documented_fields: dict[str, Any] = {}
    for name, inner in schema["properties"].items():
        items = inner.get("items", {})
        documented_fields[name] = name not in required_names, inputs(items) if "properties" in items else None
    return documented_fields


def parse_inputs(text: str) -> dict[str, Any]:
    """The same of `{key, goals: [{id?, description}], limit=5}`."""
    documented_fields: dict[str, Any] = {}
    rest = text.strip().strip("`").removeprefix("{").removesuffix("}")
    for part in re.findall(r"[\w?]+: \[\{[^}]*\}\]\??|[\w?=]+", rest):
        head, _, inner = part.partition(": ")
        match = NAME.match(head)
        assert match is not None
        documented_fields[match[1]] = match[2] is not None, parse_inputs(inner[1:-1]) if inner else None
    return documented_fields


@pytest.mark.parametrize("name", ALL_ACTIONS)
@pytest.mark.spec("9.1")
@pytest.mark.spec("9.2")
@pytest.mark.spec("9.3")
@pytest.mark.spec("9.4")
@pytest.mark.spec("9.5")
def test_every_tool_is_on_the_page_with_its_inputs(name: str) -> None:
    assert name in ROWS, f"docs/prebuilt.md has no row for {name}"
    takes, gives = ROWS[name]
    assert parse_inputs(takes) == inputs(ALL_ACTIONS[name].input_schema)
    assert gives.startswith("`{")


def test_the_page_lists_only_existing_tools() -> None:
    assert ROWS.keys() == ALL_ACTIONS.keys()


@pytest.mark.spec("9.6")
def test_the_older_names_are_on_the_page() -> None:
    older = PAGE.partition("## Older names")[2]
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+) \| ((?:`\w+`,? ?)+) \| (.*) \|$", older, re.M)
    actions = {
        old: new for old_cell, new_cell, _ in rows for old, new in zip(*map(_names, (old_cell, new_cell)), strict=True)
    }
    assert len(actions) == 11
    singular = {action.name: action for action in goals_memories_plans.SINGULAR_ACTIONS}
    for old, new in actions.items():
        assert new in ALL_ACTIONS
        assert get_action(old) is (singular.get(old) or ALL_ACTIONS[new])
    for old_cell, _, takes in rows:
        for name in _names(old_cell):
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
