"""The documentation is true: examples run as shown; every error kind, event, tool and stage has its line."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from toolspace import EventType
from toolspace.builtin.catalog import builtin_tools, tool_collections
from toolspace.errors import ErrorKind
from toolspace.orchestrator.pipeline import STAGES

ROOT = Path(__file__).parent.parent
INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *INTERNALS,
]
INCLUDED_EXAMPLE = re.compile(r"<!-- (examples/[\w./]+) -->\n```\w*\n(.*?)\n```", re.DOTALL)


def page(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_an_included_example_equals_its_file(path: Path) -> None:
    for name, example in INCLUDED_EXAMPLE.findall(path.read_text()):
        assert example == (ROOT / name).read_text().rstrip("\n"), f"{path.name} differs from {name}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_link_of_a_page_has_an_existing_target(path: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.spec("18")
def test_the_quickstart_example_prints_what_the_readme_shows() -> None:
    process = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")], capture_output=True, text=True, check=True
    )
    assert process.stdout == page("examples/quickstart.out")


def test_the_own_loop_example_runs() -> None:
    process = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_loop.py")], capture_output=True, text=True, check=True
    )
    assert "Both have 21 degrees." in process.stdout


def test_the_mcp_example_prints_what_the_page_shows() -> None:
    process = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "mcp_servers.py")], capture_output=True, text=True, check=True
    )
    assert process.stdout == page("examples/mcp_servers.out")


def test_the_configurations_of_the_readme_load(tmp_path: Path) -> None:
    import yaml

    from toolspace import Toolspace

    team, single = re.findall(r"```yaml\n(.*?)```", page("README.md"), re.DOTALL)
    (tmp_path / "team.yaml").write_text(team)
    assert Toolspace.open(tmp_path / "team.yaml").find_tool("agent__researcher") is not None
    (tmp_path / "tools.py").write_text("from toolspace import tool\n\n@tool\ndef mine() -> int:\n    return 1\n")
    (tmp_path / "toolspace.yaml").write_text(single)
    ts = Toolspace.open(tmp_path / "toolspace.yaml")
    assert ts.find_tool("mine") is not None
    explanation = ts.orchestrator.explain("http_get")
    assert explanation is not None
    assert (explanation[1].queue.value, explanation[1].cache.value) == ("web", 300)
    assert yaml.safe_load(single)


@pytest.mark.parametrize("kind", get_args(ErrorKind))
def test_every_error_kind_has_its_line(kind: str) -> None:
    assert f"\n| `{kind}` |" in page("docs/errors.md")


@pytest.mark.parametrize("event", list(EventType), ids=lambda event: event.name)
def test_every_event_has_its_line(event: EventType) -> None:
    assert f"\n| `{event.name}` | {int(event)} |" in page("docs/events.md")


@pytest.mark.parametrize("tool", builtin_tools, ids=lambda tool: tool.name)
def test_every_built_in_has_its_line_with_its_parameters(tool: object) -> None:
    name = tool.name  # type: ignore[attr-defined]
    line = next((line for line in page("docs/tools.md").splitlines() if line.startswith(f"| `{name}` |")), None)
    assert line is not None, f"docs/tools.md has no line for {name}"
    for parameter in tool.input_schema["properties"]:  # type: ignore[attr-defined]
        assert f"`{parameter}" in line, f"{name} takes {parameter}"


def test_the_documented_layers_are_the_checked_ones() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        (contract,) = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = [re.sub(r"[()]", "", line) for line in contract["layers"]]
    block = re.search(r"```\n(cli\n.*?)```", page("CONTRIBUTING.md"), re.DOTALL)
    assert block is not None
    assert block[1].replace(".py", "").splitlines() == layers
    for line in layers:
        for name in line.split(" | "):
            assert re.search(rf"^\| `{name}(/|\.py)` \|", page("ARCHITECTURE.md"), re.MULTILINE), name


@pytest.mark.parametrize("path", [ROOT / "ARCHITECTURE.md", *INTERNALS], ids=lambda path: path.name)
def test_a_file_that_the_architecture_names_exists(path: Path) -> None:
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", path.read_text()):
        assert (ROOT / "src" / "toolspace" / name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize("path", INTERNALS, ids=lambda path: path.name)
def test_a_test_that_the_internals_name_exists(path: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_every_collection_and_stage_has_its_line() -> None:
    for name in tool_collections:
        assert f"`{name}`" in page("docs/tools.md")
    for stage in STAGES:
        assert f"| `{stage.__name__}` |" in page("docs/internals/calls.md")  # type: ignore[attr-defined]
