"""The pages on adapters and telemetry say what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from toolspace.core.tool_export import ToolFormat
from toolspace.integrations import opentelemetry

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["adapters.md", "telemetry.md"])
def test_each_example_on_a_page_is_the_file_that_a_test_runs(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()

    examples = re.findall(r"<!-- (examples/\S+\.py) -->\n```python\n(.*?)```", text, re.DOTALL)

    assert len(examples) == text.count("```python")
    for path, code in examples:
        assert code == (ROOT / path).read_text(), f"copy {path} into {page}"


@pytest.mark.spec("1.9")
def test_every_format_has_its_line() -> None:
    text = (ROOT / "docs" / "adapters.md").read_text()

    assert [name for name in get_args(ToolFormat) if f"| `{name}`" not in text] == []


@pytest.mark.spec("4.8")
def test_every_attribute_has_its_line_and_every_line_its_attribute() -> None:
    text = (ROOT / "docs" / "telemetry.md").read_text()
    source = Path(opentelemetry.__file__).read_text()

    attribute_names = set(re.findall(r'"((?:gen_ai|toolspace|user|error)\.[a-z_.]+)"', source))
    spans_and_loggers = {"toolspace.run", "toolspace.telemetry"}

    assert set(re.findall(r"^\| `([a-z_]+\.[a-z_.]+)`", text, re.MULTILINE)) == (
        attribute_names - spans_and_loggers | {"toolspace.run"}
    )
