from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.cli.editor_files import CLIENTS, ClientEnvironment, config_file, is_toolspace
from toolspace.cli.install import remove_table, remove_value, set_table, set_value
from toolspace.config.file_formats import TextSyntaxError, parse_json

pytestmark = pytest.mark.spec("17.1")

ENTRY = {"command": "/bin/toolspace", "args": ["--config", "/a b/toolspace.yaml", "mcp"]}
PATH = ("mcpServers", "toolspace")

words = st.text(st.characters(codec="utf-8", exclude_characters="\ufeff"), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | words
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))
documents = st.dictionaries(words.filter(lambda key: key != "mcpServers"), values, max_size=4)
servers = st.dictionaries(words.filter(lambda key: key != "toolspace"), values, max_size=3)
layouts: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"indent": 2},
        {"indent": 4},
        {"indent": "\t"},
        {},
        {"separators": (",", ":")},
        {"indent": 1, "ensure_ascii": False},
    ]
)


@given(document=documents, present_servers=st.none() | servers, last=st.booleans(), layout=layouts)
def test_an_entry_is_added_to_any_json_and_removed_without_a_trace(
    document: dict[str, Any], present_servers: dict[str, Any] | None, last: bool, layout: dict[str, Any]
) -> None:
    if present_servers is not None:
        document = {**document, "mcpServers": present_servers} if last else {"mcpServers": present_servers, **document}
    text = json.dumps(document, **layout)
    expected = copy.deepcopy(document)
    expected.setdefault("mcpServers", {})["toolspace"] = ENTRY

    added_text = set_value(text, PATH, ENTRY)
    removed_text = remove_value(added_text, PATH)

    assert json.loads(added_text) == expected
    assert json.loads(removed_text) == {**document, "mcpServers": present_servers or {}}
    if present_servers:
        assert removed_text == text


JSON_WITH_COMMENTS = """\
// My servers.
{
    "mcpServers": {
        "a": {"command": "a"}, // the first
        /* "off": {}, */
        "b": {
            "command": "b" // no comma here
        }
        // the end
    },
    "other": [1, 2,], // trailing
}
"""


def test_comments_trailing_commas_and_indentation_stay() -> None:
    added_text = set_value(JSON_WITH_COMMENTS, PATH, ENTRY)

    lines = [line for line in added_text.splitlines() if line not in JSON_WITH_COMMENTS.splitlines()]
    assert parse_json(added_text).data["mcpServers"] == {
        "a": {"command": "a"},
        "b": {"command": "b"},
        "toolspace": ENTRY,
    }
    assert lines[:3] == ["        },", '        "toolspace": {', '            "command": "/bin/toolspace",']
    assert parse_json(remove_value(added_text, PATH)).data == parse_json(JSON_WITH_COMMENTS).data
    assert "// the end" in remove_value(added_text, PATH)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", '{\n  "a": {\n    "b": 1\n  }\n}\n'),
        ("{}", '{\n  "a": {\n    "b": 1\n  }\n}'),
        ('{"x":1}', '{"x":1, "a": {"b": 1}}'),
        ('{"a": {}}', '{"a": {"b": 1}}'),
        ('{\r\n\t"x": 1\r\n}\r\n', '{\r\n\t"x": 1,\r\n\t"a": {\r\n\t\t"b": 1\r\n\t}\r\n}\r\n'),
        ('\ufeff{\n "x": 1,\n}', '\ufeff{\n "x": 1,\n "a": {\n  "b": 1\n },\n}'),
        ('{"x": 1 // one\n}', '{"x": 1, // one\n  "a": {"b": 1}\n}'),
        ("// nothing yet\n", '// nothing yet\n{\n  "a": {\n    "b": 1\n  }\n}\n'),
    ],
    ids=["nothing", "empty", "one-line", "empty-table", "crlf-tabs", "bom", "comment", "only-comment"],
)
def test_a_json_file_keeps_its_style(text: str, expected: str) -> None:
    assert set_value(text, ("a", "b"), 1) == expected


def test_an_existing_value_is_replaced_in_place() -> None:
    text = '{\n  "a": {"b": [1, {"]": "}"}], "c": 2} // stays\n}\n'

    assert set_value(text, ("a", "b"), "new") == '{\n  "a": {"b": "new", "c": 2} // stays\n}\n'


@given(text=st.text('{}[]",:/* \n\\a1', max_size=30))
def test_invalid_json_is_refused(text: str) -> None:
    try:
        added_text = set_value(text, PATH, ENTRY)
    except (TextSyntaxError, TypeError):
        return
    assert parse_json(added_text).data["mcpServers"]["toolspace"] == ENTRY


TOML = """\
# My settings
model = "o5"   # the best
[mcp_servers.docs]  # documentation
command = "npx"
args = [
  "-y", # yes
  "docs]",
]
[mcp_servers.docs.env]
NOTE = '''
[mcp_servers.toolspace]
'''

# Of the projects
[projects."/a.b"]
trust_level = "trusted"
"""


@pytest.mark.parametrize(
    "text", [TOML, "", TOML.replace("\n", "\r\n"), TOML.rstrip()], ids=["lf", "empty", "crlf", "no-end"]
)
def test_a_table_is_added_to_toml_updated_and_removed(text: str) -> None:
    path = ("mcp_servers", "toolspace")

    added_text = set_table(text, path, ENTRY)
    updated_text = set_table(added_text, path, {"args": ["mcp"], "cwd": "/é\x7f"})

    before = tomllib.loads(text)
    expected = {**before, "mcp_servers": {**before.get("mcp_servers", {}), "toolspace": ENTRY}}
    assert added_text.startswith(text)
    assert tomllib.loads(added_text) == expected
    assert tomllib.loads(updated_text)["mcp_servers"]["toolspace"] == {**ENTRY, "args": ["mcp"], "cwd": "/é\x7f"}
    assert remove_table(updated_text, path).rstrip() == text.rstrip()


def test_a_removed_table_takes_its_inner_tables_and_leaves_the_comments_of_the_next() -> None:
    remaining = remove_table(TOML, ("mcp_servers", "docs"))

    assert (
        remaining
        == '# My settings\nmodel = "o5"   # the best\n\n# Of the projects\n[projects."/a.b"]\ntrust_level = "trusted"\n'
    )


@given(
    before=st.dictionaries(st.text(min_size=1, max_size=5), words, max_size=3),
    values=st.dictionaries(
        st.text(min_size=1, max_size=8), words | st.lists(words, max_size=3), min_size=1, max_size=3
    ),
)
def test_any_value_survives_toml(before: dict[str, str], values: dict[str, Any]) -> None:
    text = set_table("", ("first", "own"), {**before})

    expected = {"first": {"own": before}, "second": {"own": values}}
    assert tomllib.loads(set_table(text, ("second", "own"), values)) == expected


@pytest.mark.parametrize(
    ("client", "scope", "platform", "expected"),
    [
        ("claude-code", "project", "linux", "/p/.mcp.json"),
        ("claude-code", "user", "linux", "/h/.claude.json"),
        ("claude-desktop", "user", "linux", "/h/.config/Claude/claude_desktop_config.json"),
        ("claude-desktop", "user", "darwin", "/h/Library/Application Support/Claude/claude_desktop_config.json"),
        ("claude-desktop", "user", "win32", "/r/Claude/claude_desktop_config.json"),
        ("cursor", "project", "linux", "/p/.cursor/mcp.json"),
        ("cursor", "user", "win32", "/h/.cursor/mcp.json"),
        ("vscode", "project", "linux", "/p/.vscode/mcp.json"),
        ("vscode", "user", "linux", "/h/.config/Code/User/mcp.json"),
        ("vscode", "user", "darwin", "/h/Library/Application Support/Code/User/mcp.json"),
        ("codex", "user", "linux", "/h/.codex/config.toml"),
        ("codex", "project", "linux", "/p/.codex/config.toml"),
        ("windsurf", "user", "linux", "/h/.codeium/windsurf/mcp_config.json"),
        ("zed", "user", "darwin", "/h/.config/zed/settings.json"),
    ],
)
def test_the_settings_file_of_each_client_depends_on_the_platform(
    client: str, scope: Any, platform: str, expected: str
) -> None:
    environment = ClientEnvironment(Path("/p"), Path("/h"), {"APPDATA": "/r", "XDG_CONFIG_HOME": "relative"}, platform)

    assert config_file(CLIENTS[client], scope, environment) == Path(expected)


def test_environment_variables_move_the_settings_files() -> None:
    environ = {"CLAUDE_CONFIG_DIR": "/c", "CODEX_HOME": "/x", "XDG_CONFIG_HOME": "/g"}
    environment = ClientEnvironment(Path("/p"), Path("/h"), environ, "linux")

    files = [config_file(CLIENTS[key], "user", environment) for key in ("claude-code", "codex", "vscode")]

    assert files == [Path("/c/.claude.json"), Path("/x/config.toml"), Path("/g/Code/User/mcp.json")]


@pytest.mark.parametrize(
    ("command", "args", "expected"),
    [
        ("/usr/bin/toolspace", ["--config", "a", "mcp"], True),
        ("C:\\bin\\Toolspace.exe", ["mcp"], True),
        ("python3", ["-m", "toolspace", "mcp"], True),
        ("uvx", ["toolspace", "mcp"], True),
        ("npx", ["-y", "toolspace-other", "mcp"], False),
        ("toolspace", ["serve"], False),
        (None, None, False),
        (["toolspace"], {"mcp": 1}, False),
    ],
    ids=range(8),
)
def test_entries_of_toolspace_itself_are_recognized(command: Any, args: Any, expected: bool) -> None:
    assert is_toolspace(command, args) is expected
