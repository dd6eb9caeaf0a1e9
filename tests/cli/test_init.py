from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.cli.conftest import Toolspace
from toolspace.cli.editor_files import CLIENTS, ClientEnvironment, config_file
from toolspace.cli.editor_import import import_servers
from toolspace.cli.init import format_servers
from toolspace.config.load import load_config

pytestmark = pytest.mark.spec("17.1")


def test_init_writes_a_file_that_loads_and_says_what_to_try(toolspace: Toolspace, tmp_path: Path) -> None:
    result = toolspace("init", cwd=tmp_path)

    assert result.returncode == 0
    assert load_config(tmp_path / "toolspace.yaml", environ={}).path is not None
    assert "toolspace list\n" in result.stderr
    assert "toolspace doctor\n" in result.stderr


@pytest.mark.spec("25.1")
def test_init_creates_a_state_directory_that_git_ignores(toolspace: Toolspace, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    assert toolspace("init", str(folder), "--no-import").returncode == 0
    (folder / ".toolspace" / "toolspace.db").touch()
    status = subprocess.run(
        ["git", "-C", str(folder), "status", "--porcelain"], capture_output=True, text=True, check=True
    )
    assert status.stdout.split() == ["??", "toolspace.yaml"]
    assert toolspace("init", str(folder), "--no-import", "--force").returncode == 0


def test_init_refuses_to_replace_a_file_unless_it_is_forced(toolspace: Toolspace, project: Path) -> None:
    before = (project / "toolspace.yaml").read_text()

    first_result = toolspace("init")
    previous_text = (project / "toolspace.yaml").read_text()
    second_result = toolspace("init", str(project), "--force", "--json")

    assert (first_result.returncode, previous_text) == (2, before)
    assert "--force" in first_result.stderr
    assert json.loads(second_result.stdout) == {"path": str(project / "toolspace.yaml")}
    assert (project / "toolspace.yaml").read_text() != before


@pytest.mark.parametrize("path", ["missing/toolspace.yaml", "toolspace.json", "nowhere"])
def test_init_reports_in_one_line_why_it_cannot_write(toolspace: Toolspace, tmp_path: Path, path: str) -> None:
    result = toolspace("init", path, cwd=tmp_path)

    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {path}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "GITHUB_TOKEN", "API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return folder


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


CODEX = """
[mcp_servers.docs]
command = "docs"
args = ["--literal", "${NOT_A_VARIABLE}"]
env = { LEVEL = "1" }
env_vars = ["HOME"]
[mcp_servers.remote]
url = "https://example.com/mcp"
bearer_token_env_var = "REMOTE_TOKEN"
disabled_tools = ["drop"]
"""


def test_init_imports_the_servers_of_all_editors_with_their_origin(
    toolspace: Toolspace, tmp_path: Path, home: Path
) -> None:
    new = tmp_path / "new"
    stdio = {"command": "python3", "args": ["-m", "server"]}
    write_json(new / ".mcp.json", {"mcpServers": {"time": {"type": "stdio", **stdio, "env": {"TZ": "UTC"}}}})
    write_json(
        new / ".vscode" / "mcp.json",
        '{\n// mine\n"servers": {"web": {"type": "sse", "url": "http://localhost:1/sse"}},}',
    )
    write_json(
        home / ".claude.json", {"mcpServers": {"all": stdio}, "projects": {str(new): {"mcpServers": {"own": stdio}}}}
    )
    write_json(home / ".cursor" / "mcp.json", {"mcpServers": {"time": {"command": "other"}, "all": stdio, "empty": {}}})
    write_json(
        home / ".config" / "Claude" / "claude_desktop_config.json", {"mcpServers": {"off": {**stdio, "disabled": True}}}
    )
    write_json(home / ".codex" / "config.toml", CODEX)
    write_json(
        home / ".codeium" / "windsurf" / "mcp_config.json", {"mcpServers": {"surf": {"serverUrl": "https://x.org/mcp"}}}
    )
    write_json(
        home / ".config" / "zed" / "settings.json",
        {"context_servers": {"zed": {"command": {"path": "z", "args": ["a"]}}}},
    )

    result = toolspace("init", cwd=new)

    text = (new / "toolspace.yaml").read_text()
    config = load_config(new / "toolspace.yaml", environ={"HOME": str(home)})
    servers = config.mcp_servers
    assert result.returncode == 0, result.stderr
    assert sorted(servers) == ["all", "docs", "off", "own", "remote", "surf", "time", "web", "zed"]
    assert (servers["time"].command, servers["time"].args, servers["time"].env) == (
        "python3",
        ("-m", "server"),
        {"TZ": "UTC"},
    )
    assert (servers["web"].transport, servers["surf"].url) == ("sse", "https://x.org/mcp")
    assert servers["docs"].args == ("--literal", "${NOT_A_VARIABLE}")
    assert servers["docs"].env == {"LEVEL": "1", "HOME": str(home)}
    assert (servers["remote"].enabled, servers["remote"].tools_denied) == (False, ("drop",))
    assert (servers["zed"].command, servers["off"].enabled) == ("z", False)
    assert "# From Claude Code: " in text
    assert "# From Codex: ~/.codex/config.toml" in text
    assert "enabled: false  # Set REMOTE_TOKEN, then remove this line." in text
    assert "Skipped time (Cursor): another server has that name, from Claude Code" in result.stderr
    assert "Skipped empty (Cursor): it has neither a command nor a url" in result.stderr
    assert "all (Cursor)" not in result.stderr


SECRETS = {
    "env": "sdfkjh34987sdf",
    "flag": "topsecretvalue",
    "next": "anothersecret1",
    "header": "abc123abc123",
    "url": "urlsecret99",
    "random": "A1b2C3d4E5f6G7h8I9j0K1",
    "docker": "dockerpassword",
}


def test_no_secret_of_an_editor_is_copied_or_printed(toolspace: Toolspace, tmp_path: Path, home: Path) -> None:
    new = tmp_path / "new"
    args = [
        f"--api-key={SECRETS['flag']}",
        "--token",
        SECRETS["next"],
        "-e",
        f"DB_PASSWORD={SECRETS['docker']}",
        "--port",
        "5",
    ]
    servers = {
        "one": {"command": "one", "args": args, "env": {"API_KEY": SECRETS["env"], "LEVEL": "debug"}},
        "two": {"command": "two", "env": {"API_KEY": "a different key", "ACCOUNT": SECRETS["random"]}},
        "three": {
            "url": f"https://user:{SECRETS['url']}@example.com/mcp",
            "headers": {"Authorization": f"Bearer {SECRETS['header']}", "X-Team": "red"},
        },
        "four": {"command": "four", "env": {"GITHUB_TOKEN": "${GITHUB_TOKEN}"}},
    }
    write_json(new / ".mcp.json", {"mcpServers": servers})

    result = toolspace("init", "--json", cwd=new)
    second_run = toolspace("init", "--force", cwd=new)

    text = (new / "toolspace.yaml").read_text()
    for secret in (*SECRETS.values(), "a different key"):
        assert secret not in text + result.stdout + result.stderr + second_run.stdout + second_run.stderr
    assert "API_KEY: ${API_KEY}  # Set API_KEY: the value was not copied." in text
    assert "API_KEY: ${TWO_API_KEY}" in text
    assert 'Authorization: "Bearer ${THREE_TOKEN}"' in text
    assert "  API_KEY  (one: env API_KEY)" in second_run.stderr
    assert load_config(new / "toolspace.yaml", environ={}).mcp_servers["one"].enabled is False
    names = {name: f"<{name}>" for server in json.loads(result.stdout)["servers"] for name in server["unset"]}
    enabled_text = text.replace("enabled: false", "enabled: true")
    (new / "toolspace.yaml").write_text(enabled_text)
    config = load_config(new / "toolspace.yaml", environ=names)
    assert config.mcp_servers["one"].env == {"API_KEY": "<API_KEY>", "LEVEL": "debug"}
    assert config.mcp_servers["one"].args[-2:] == ("--port", "5")
    assert config.mcp_servers["three"].headers == {"Authorization": "Bearer <THREE_TOKEN>", "X-Team": "red"}
    assert config.mcp_servers["four"].env == {"GITHUB_TOKEN": "<GITHUB_TOKEN>"}


def test_a_variable_with_the_same_value_is_not_reported_as_unset(
    toolspace: Toolspace, tmp_path: Path, home: Path
) -> None:
    write_json(
        tmp_path / "new" / ".mcp.json", {"mcpServers": {"one": {"command": "one", "env": {"API_KEY": "the one"}}}}
    )

    same = toolspace("init", "--json", cwd=tmp_path / "new", API_KEY="the one")
    other_result = toolspace("init", "--force", "--json", cwd=tmp_path / "new", API_KEY="another")

    assert json.loads(same.stdout)["servers"][0]["unset"] == []
    assert json.loads(other_result.stdout)["servers"][0]["unset"] == ["ONE_API_KEY"]


def test_toolspace_never_imports_itself(toolspace: Toolspace, project: Path, home: Path) -> None:
    toolspace("install", "cursor")

    result = toolspace("init", "--force")

    assert "Skipped toolspace (Cursor): it is Toolspace itself" in result.stderr
    assert load_config(project / "toolspace.yaml", environ={}).mcp_servers == {}


def test_the_import_can_be_skipped_or_limited_to_one_client(toolspace: Toolspace, tmp_path: Path, home: Path) -> None:
    new = tmp_path / "new"
    write_json(new / ".mcp.json", {"mcpServers": {"a": {"command": "a"}}})
    write_json(new / ".cursor" / "mcp.json", {"mcpServers": {"b": {"command": "b"}}})

    toolspace("init", "none.yaml", "--no-import", cwd=new)
    toolspace("init", "one.yaml", "--from", "cursor", cwd=new)
    empty_result = toolspace("init", "nothing.yaml", "--from", "codex", cwd=new)
    wrong = toolspace("init", "wrong.yaml", "--from", "cursr", cwd=new)

    assert load_config(new / "none.yaml", environ={}).mcp_servers == {}
    assert list(load_config(new / "one.yaml", environ={}).mcp_servers) == ["b"]
    assert "No servers to import from codex." in empty_result.stderr
    assert (wrong.returncode, 'did you mean "cursor"' in wrong.stderr) == (2, True)


def test_an_invalid_file_of_an_editor_is_reported_and_skipped(toolspace: Toolspace, tmp_path: Path, home: Path) -> None:
    new = tmp_path / "new"
    write_json(new / ".mcp.json", '{"mcpServers": {')
    write_json(new / ".cursor" / "mcp.json", {"mcpServers": {"b": {"command": "b"}}})

    result = toolspace("init", cwd=new)

    assert result.returncode == 0
    assert "Skipped Claude Code: " in result.stderr
    assert list(load_config(new / "toolspace.yaml", environ={}).mcp_servers) == ["b"]


texts = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ["${A}", "${input:x y}", "$${", "${env:B}${", "yes"]
)
values = st.recursive(
    texts | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
raw_entries = st.fixed_dictionaries(
    {},
    optional={
        "command": texts | values,
        "args": st.lists(texts, max_size=3) | values,
        "env": st.dictionaries(texts, texts, max_size=3) | values,
        "url": texts | values,
        "headers": st.dictionaries(texts, texts, max_size=2) | values,
        "type": st.sampled_from(["stdio", "sse", "ws", "odd"]) | values,
        "cwd": texts,
        "disabled": st.booleans(),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(servers=st.dictionaries(texts, raw_entries | values, max_size=3), client=st.sampled_from(["cursor", "zed"]))
@example(servers={"a": {"command": "x", "cwd": "\0"}, "b": {"command": "x", "cwd": "~no body/x"}}, client="cursor")
def test_the_new_file_loads_for_any_content_of_an_editors_file(
    tmp_path: Path, servers: dict[str, object], client: str
) -> None:
    environment = ClientEnvironment(tmp_path, tmp_path, {}, "linux")
    write_json(config_file(CLIENTS[client], "user", environment), {CLIENTS[client].table: servers})

    servers = import_servers(environment, [client]).servers
    (tmp_path / "toolspace.yaml").write_text(format_servers(servers, tmp_path) if servers else "")

    config = load_config(tmp_path / "toolspace.yaml", environ={"HOME": "/"})
    assert set(config.mcp_servers) == {server.name for server in servers}
