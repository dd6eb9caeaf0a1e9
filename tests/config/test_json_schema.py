"""The JSON Schema for editors accepts every file that loads, and refuses what is plainly wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from toolspace.config.configuration import SECTIONS
from toolspace.config.documentation import render_starter_file
from toolspace.config.file_formats import parse_document, read_document
from toolspace.config.json_schema import build_json_schema
from toolspace.config.validation import SectionType

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "configuration.md").read_text()
EXAMPLES = re.findall(r"^```(yaml|json|toml)\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
VALIDATOR = jsonschema_rs.validator_for(build_json_schema())


def list_errors(data: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(data)]


def test_the_schema_itself_is_valid() -> None:
    assert jsonschema_rs.meta.is_valid(build_json_schema())


@pytest.mark.parametrize(("suffix", "text"), EXAMPLES)
def test_every_documented_example_is_valid(suffix: str, text: str) -> None:
    assert list_errors(parse_document(text.encode(), f"example.{suffix}").data) == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("toolspace.yaml")), ids=lambda path: path.parent.name)
def test_every_example_file_is_valid(path: Path) -> None:
    assert list_errors(read_document(path).data) == []


def test_the_starter_file_with_every_line_uncommented_is_valid() -> None:
    text = re.sub(r"^#(?! )|^#(?=  )", "", render_starter_file(), flags=re.MULTILINE)
    assert list_errors(parse_document(text.encode(), "toolspace.yaml").data) == []


@pytest.mark.parametrize(
    "data",
    [
        {"server": {"port": "${PORT}", "rateLimit": None}},
        {"defaults": {"toolTimeout": 250, "maxConcurrentTools": None}},
        {"tools": {"builtins": ["json_*"], "overrides": {"x": {"cache": False}}}},
        {"agents": ["./a.yaml", "researcher", {"name": "b", "agents": {"c": {"model": "demo"}}}]},
        {"x-anchors": {"anything": 1}, "$schema": "https://example.com/schema.json"},
    ],
)
def test_other_spellings_are_valid(data: dict[str, Any]) -> None:
    assert list_errors(data) == []


@pytest.mark.parametrize(
    "data",
    [
        {"defalts": {}},
        {"defaults": {"toolTimeot": "30s"}},
        {"server": {"port": 70000}},
        {"server": {"port": "many"}},
        {"queues": {"q": {}}},
        {"storage": {"cache": "paper"}},
        {"agents": {"a": {"limits": {"maxDepth": -1}}}},
    ],
)
def test_mistakes_are_refused(data: dict[str, Any]) -> None:
    assert list_errors(data) != []


def test_every_setting_has_its_description_and_default() -> None:
    server = build_json_schema()["properties"]["server"]["anyOf"][0]["properties"]
    assert server["port"]["default"] == 8787
    assert server["heartbeat"]["default"] == "15s"
    for section in SECTIONS.values():
        assert isinstance(section, SectionType)
        assert all(setting.effect for setting in section.settings)
