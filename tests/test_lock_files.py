"""The lock files have a hash for every package, and name no place to get it from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["requirements.lock", "benchmarks/requirements.lock"])
def test_every_package_is_pinned_with_its_hashes(name: str) -> None:
    text = re.sub(r"^ *#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    requirements = text.replace("\\\n", " ").splitlines()
    assert len(requirements) > 50
    for requirement in requirements:
        assert re.fullmatch(r"[\w.-]+==\S+( ; [^#]+?)?( +--hash=sha256:[0-9a-f]{64})+", requirement), requirement[:200]


def test_the_makefile_installs_only_packages_with_their_hashes() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    installs = [line for line in makefile.splitlines() if "pip install" in line]
    assert len(installs) == 5
    for line in installs:
        assert "--require-hashes" in line or line.endswith("--no-deps -e ."), line


def test_a_version_of_aiohttp_that_limits_decompression_is_required() -> None:
    assert '"aiohttp>=3.13.5,<4"' in (ROOT / "pyproject.toml").read_text()
