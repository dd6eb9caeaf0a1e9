from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Toolspace, bash


@pytest.mark.spec("17.1")
def test_the_list_has_name_category_and_the_first_line_of_the_description(toolspace: Toolspace) -> None:
    result = toolspace("list")

    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in result.stdout.splitlines()}
    assert result.returncode == 0
    assert lines["fails"] == ["custom", "Fails."]
    assert lines["read_file"][0] == "file"
    assert "delete_file" not in lines, "it is denied"


@pytest.mark.spec("4.9")
def test_tokens_shows_the_cost_of_each_definition_and_the_sum(toolspace: Toolspace) -> None:
    lines = toolspace("list", "--tokens").stdout.splitlines()
    as_json = json.loads(toolspace("list", "--tokens", "--json").stdout)

    costs = {tool["name"]: tool["tokens"] for tool in as_json}
    assert all(cost > 0 for cost in costs.values())
    assert lines[-1] == f"{len(costs)} tools, {sum(costs.values()):,} tokens in all"
    assert next(line.split() for line in lines if line.startswith("echo "))[2] == f"{costs['echo']:,}"


@pytest.mark.spec("4.9")
def test_tokens_notes_when_models_see_a_search_tool(toolspace: Toolspace) -> None:
    result = toolspace("list", "--tokens", TOOLSPACE_TOOL_SEARCH_THRESHOLD="100")

    assert "agent__find_tools finds the others" in result.stderr


@pytest.mark.spec("17.1")
def test_a_category_filters_and_an_unknown_one_exits_2_with_the_list(toolspace: Toolspace) -> None:
    files = json.loads(toolspace("list", "--category", "FILE", "--json").stdout)
    wrong = toolspace("list", "--category", "fil")

    assert {tool["category"] for tool in files} == {"file"}
    assert files[0]["inputSchema"]["type"] == "object"
    assert wrong.returncode == 2
    assert 'did you mean "file"' in wrong.stderr
    assert "system, file, network" in wrong.stderr


@pytest.mark.spec("17.3")
def test_warnings_are_shown_unless_quiet(toolspace: Toolspace, tmp_path: Path) -> None:
    file = tmp_path / "toolspace.yaml"
    file.write_text("mcpServers: {github: {}}\n")

    loud, quiet = toolspace("list", "--config", str(file)), toolspace("--config", str(file), "list", "-q")

    assert "warning: " in loud.stderr
    assert "github" in loud.stderr
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert loud.stdout == quiet.stdout


@pytest.mark.spec("17.2")
def test_a_pipe_that_closes_early_is_not_an_error(project: Path) -> None:
    script = 'for words in list --help; do "$0" -m toolspace $words | true; echo ${PIPESTATUS[0]}; done'
    result = bash(script, project)

    assert (result.stdout, result.stderr) == ("0\n0\n", "")
