from __future__ import annotations

import json
import os
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, Toolspace

pytestmark = pytest.mark.spec("17.1")

PROGRAM = str(Path(sys.executable).parent / "toolspace")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


def expected_entry(project: Path) -> dict[str, Any]:
    return {"command": PROGRAM, "args": ["--config", str(project / "toolspace.yaml"), "mcp"]}


CASES = [
    ("claude-code", (), ".mcp.json", "mcpServers"),
    ("claude-code", ("--scope", "user"), "~/.claude.json", "mcpServers"),
    ("claude-desktop", (), "~/.config/Claude/claude_desktop_config.json", "mcpServers"),
    ("cursor", (), ".cursor/mcp.json", "mcpServers"),
    ("cursor", ("--scope", "user"), "~/.cursor/mcp.json", "mcpServers"),
    ("vscode", (), ".vscode/mcp.json", "servers"),
    ("vscode", ("--scope", "user"), "~/.config/Code/User/mcp.json", "servers"),
    ("codex", (), "~/.codex/config.toml", "mcp_servers"),
    ("codex", ("--scope", "project"), ".codex/config.toml", "mcp_servers"),
]


@pytest.mark.parametrize(("client", "options", "file", "table"), CASES, ids=str)
def test_each_client_gets_this_toolspace_in_its_own_file(
    toolspace: Toolspace, project: Path, home: Path, client: str, options: tuple[str, ...], file: str, table: str
) -> None:
    path = home / file[2:] if file.startswith("~/") else project / file

    result = toolspace("install", client, *options)
    second_result = toolspace("install", client, *options)
    removal = toolspace("install", client, *options, "--uninstall")
    missing = toolspace("install", client, *options, "--remove")

    assert (result.returncode, second_result.returncode, removal.returncode, missing.returncode) == (0, 0, 0, 0), (
        result.stderr
    )
    assert result.stdout.startswith("Added toolspace: ")
    assert second_result.stdout.startswith("toolspace is already there: ")
    assert removal.stdout.startswith("Removed toolspace: ")
    assert missing.stdout.startswith("toolspace is not there: ")
    assert read_settings(path).get(table, {}) == {}

    toolspace("install", client, *options)
    expected = (
        {"type": "stdio", **expected_entry(project)} if client in ("claude-code", "vscode") else expected_entry(project)
    )
    assert read_settings(path)[table] == {"toolspace": expected}


def read_settings(path: Path) -> dict[str, Any]:
    text = path.read_text()
    return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)


def test_the_installed_command_starts_here_from_any_folder(toolspace: Toolspace, project: Path, home: Path) -> None:
    toolspace("install", "cursor", cwd=project)
    server = read_settings(project / ".cursor" / "mcp.json")["mcpServers"]["toolspace"]

    assert os.access(server["command"], os.X_OK)
    assert Path(server["args"][1]).is_absolute()


EXISTING_FILE = """\
{
\t// mine
\t"mcpServers": {
\t\t"other": { "command": "npx", "env": {"OTHER_TOKEN": "abcdef123456"}, "odd": null }
\t},
\t"zoom": 1.0,
\t"alpha": []
}
"""


def test_everything_else_in_the_file_stays_as_it_was(toolspace: Toolspace, project: Path, home: Path) -> None:
    path = home / ".cursor" / "mcp.json"
    path.parent.mkdir()
    path.write_text(EXISTING_FILE)
    path.chmod(0o640)

    toolspace("install", "cursor", "--scope", "user")
    added_text = path.read_text()
    toolspace("install", "cursor", "--scope", "user", "--uninstall")

    assert [line for line in EXISTING_FILE.splitlines() if line not in added_text.splitlines()] == [
        EXISTING_FILE.splitlines()[3]
    ]
    assert EXISTING_FILE.splitlines()[3] + "," in added_text.splitlines()
    assert path.read_text() == EXISTING_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(path.parent) == ["mcp.json"]


def test_an_outdated_entry_is_updated_only_where_it_differs(toolspace: Toolspace, project: Path, home: Path) -> None:
    (project / ".mcp.json").write_text(
        '{"mcpServers": {"toolspace": {"command": "/old/toolspace", "args": ["mcp"], "env": {"A": "1"}}}}'
    )

    result = toolspace("install", "claude-code", "--json")

    server = read_settings(project / ".mcp.json")["mcpServers"]["toolspace"]
    assert json.loads(result.stdout)["outcome"] == "updated"
    assert server == {**expected_entry(project), "env": {"A": "1"}, "type": "stdio"}


def test_another_server_of_that_name_is_not_touched(toolspace: Toolspace, project: Path, home: Path) -> None:
    text = '{\n  "mcpServers": {\n    "toolspace": {"command": "npx"}\n  }\n}'
    (project / ".mcp.json").write_text(text)

    refused_results = [toolspace("install", "claude-code"), toolspace("install", "claude-code", "--uninstall")]
    named_result = toolspace("install", "claude-code", "--name", "ours")

    assert [result.returncode for result in refused_results] == [2, 2]
    assert (
        "error: .mcp.json:3: another server is called toolspace already; choose a name with --name\n"
        in refused_results[0].stderr
    )
    assert named_result.returncode == 0
    assert read_settings(project / ".mcp.json")["mcpServers"] == {
        "toolspace": {"command": "npx"},
        "ours": {"type": "stdio", **expected_entry(project)},
    }


@pytest.mark.parametrize(
    ("client", "file", "text", "place"),
    [
        ("cursor", ".cursor/mcp.json", '{\n  "a": 1,\n  "b" 2\n}', ".cursor/mcp.json:3:"),
        ("cursor", ".cursor/mcp.json", '{"mcpServers": []}', ".cursor/mcp.json:1: mcpServers"),
        ("cursor", ".cursor/mcp.json", "[]", ".cursor/mcp.json:1:"),
        ("cursor", ".cursor/mcp.json", '{"a": "\udcff"}', ".cursor/mcp.json:1: not UTF-8"),
        ("codex", ".codex/config.toml", "a = 1\nb = \n", ".codex/config.toml:2:"),
        ("codex", ".codex/config.toml", "mcp_servers = {}\n", ".codex/config.toml: mcp_servers.toolspace is written"),
    ],
    ids=["json", "no-table", "no-object", "no-text", "toml", "inline-table"],
)
def test_a_file_that_cannot_be_changed_safely_is_refused_with_its_line(
    toolspace: Toolspace, project: Path, home: Path, client: str, file: str, text: str, place: str
) -> None:
    path = project / file
    path.parent.mkdir()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))

    result = toolspace("install", client, "--scope", "project")

    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {place}"), result.stderr
    assert path.read_bytes() == text.encode("utf-8", "surrogateescape")
    assert os.listdir(path.parent) == [path.name]


def test_a_linked_file_stays_a_link_and_a_dangling_one_is_refused(
    toolspace: Toolspace, project: Path, home: Path
) -> None:
    (home / "dotfiles").mkdir()
    (home / "dotfiles" / "claude.json").write_text('{"theme": "dark"}')
    (home / ".claude.json").symlink_to("dotfiles/claude.json")
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").symlink_to(home / "gone.toml")

    result = toolspace("install", "claude-code", "--scope", "user")
    second_result = toolspace("install", "codex")

    assert result.returncode == 0
    assert (home / ".claude.json").is_symlink()
    assert list(read_settings(home / "dotfiles" / "claude.json")) == ["theme", "mcpServers"]
    assert second_result.returncode == 2
    assert "gone.toml, which does not exist" in second_result.stderr
    assert not (home / "gone.toml").exists()


def test_a_named_pipe_instead_of_the_file_is_refused(toolspace: Toolspace, project: Path, home: Path) -> None:
    os.mkfifo(project / ".mcp.json")

    result = toolspace("install", "claude-code")

    assert (result.returncode, result.stderr) == (2, "error: .mcp.json: is not a regular file\n")


def test_dry_run_shows_the_change_without_the_secrets_around_it(
    toolspace: Toolspace, project: Path, home: Path
) -> None:
    path = home / ".cursor" / "mcp.json"
    path.parent.mkdir()
    path.write_text(EXISTING_FILE)

    result = toolspace("install", "cursor", "--scope", "user", "--dry-run")

    assert result.returncode == 0
    assert f'+\t\t\t"command": "{PROGRAM}",' in result.stdout
    assert "abcdef123456" not in result.stdout + result.stderr
    assert path.read_text() == EXISTING_FILE


def usage_error(result: Run) -> str:
    assert result.returncode == 2
    return result.stderr


def test_wrong_usage_is_reported_with_a_hint(toolspace: Toolspace, project: Path, tmp_path: Path) -> None:
    assert 'did you mean "cursor"?' in usage_error(toolspace("install", "curser"))
    assert "claude-desktop has no project scope" in usage_error(
        toolspace("install", "claude-desktop", "--scope", "project")
    )
    assert "--name 'a b'" in usage_error(toolspace("install", "cursor", "--name", "a b"))
    assert "toolspace init" in usage_error(toolspace("install", "cursor", cwd=tmp_path))
    assert "there is no such file" in usage_error(toolspace("install", "cursor", "--config", "gone.yaml"))


def test_the_project_folder_is_the_folder_of_the_configuration(toolspace: Toolspace, project: Path, home: Path) -> None:
    (project / "deep" / "down").mkdir(parents=True)

    result = toolspace("install", "claude-code", cwd=project / "deep" / "down")

    assert result.returncode == 0
    assert (project / ".mcp.json").is_file()
