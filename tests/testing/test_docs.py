"""The code, the configuration and the declaration in docs/providers.md work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import toolspace.testing
from toolspace.config.load import load_config
from toolspace.providers.plugins import ENTRY_POINT_GROUP

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "providers.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)


@pytest.mark.spec("3.1")
def test_the_example_is_the_file() -> None:
    assert (ROOT / "examples" / "own_provider.py").read_text() == blocks("python")[0]


@pytest.mark.spec("3.1")
def test_the_contract_is_used_as_a_test_uses_it() -> None:
    example = blocks("python")[-1]
    assert example.startswith("class TestNotes(ProviderContract)")
    assert example in (ROOT / "tests" / "testing" / "test_providers.py").read_text()


@pytest.mark.spec("3.2")
def test_every_configuration_loads_and_its_provider_is_made(tmp_path: Path) -> None:
    from toolspace import Toolspace

    (tmp_path / "own_provider.py").write_text(blocks("python")[0])
    assert len(blocks("yaml")) >= 2
    for text in blocks("yaml"):
        path = tmp_path / "toolspace.yaml"
        path.write_text(text)
        assert load_config(path, environ={}).warnings == ()
        assert Toolspace.open(path, environ={"HOME": str(tmp_path)}).find_tool("notes__write") is not None


@pytest.mark.spec("3.1")
def test_the_declaration_names_the_group() -> None:
    (text,) = blocks("toml")
    assert list(tomllib.loads(text)["project"]["entry-points"]) == [ENTRY_POINT_GROUP]


def test_every_public_name_is_described() -> None:
    for name in toolspace.testing.__all__:
        assert f"`{name}" in DOCS, name
