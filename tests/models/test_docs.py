"""docs/models.md is correct: its example runs, its configurations load, it lists every provider and error kind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from toolspace.config.load import load_config
from toolspace.errors import ModelErrorKind
from toolspace.models.images import DEFAULT_IMAGE_MODELS
from toolspace.models.registry import PROVIDERS, PYDANTIC_AI_PROVIDERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()


def test_the_example_prints_what_the_page_says() -> None:
    example = ROOT / "examples" / "scripted_model.py"
    process = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True)
    assert process.stdout.startswith("They have 21 and 9 degrees.\n")
    assert "It prints `They have 21 and 9 degrees.`" in PAGE


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_provider_has_its_line(name: str) -> None:
    provider = PROVIDERS[name]
    line = next((line for line in PAGE.splitlines() if line.startswith(f"| `{name}`")), "")
    assert all(
        f"`{word}`" in line
        for word in (*provider.key_variables, *([provider.default_model] if provider.default_model else []))
    )
    assert not provider.base_url_variable or f"`{provider.base_url_variable}`" in PAGE


def test_every_pydantic_ai_provider_and_image_model_is_named() -> None:
    assert all(f"`{name}`" in PAGE for name in (*PYDANTIC_AI_PROVIDERS, *DEFAULT_IMAGE_MODELS.values()))


@pytest.mark.parametrize("kind", get_args(ModelErrorKind))
def test_every_error_kind_has_its_line(kind: str) -> None:
    assert f"\n| `{kind}` |" in PAGE


def test_every_configuration_loads(tmp_path: Path) -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        path = tmp_path / "toolspace.yaml"
        path.write_text(text)
        assert load_config(path, environ={}).warnings == ()
