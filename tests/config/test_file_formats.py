"""Parsing of all three formats: the same data, with lines, and problems with their place."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.config.file_formats import MAX_BYTES, ConfigDocument, parse_document, read_document
from toolspace.errors import ConfigError


def parse(text: str, name: str = "toolspace.yaml") -> ConfigDocument:
    return parse_document(text.encode(), name)


def complaint(content: bytes, name: str) -> str:
    """The problem of a file; its name alone if there is none."""
    try:
        parse_document(content, name)
    except ConfigError as error:
        return str(error)
    return name


def fault(text: str, name: str = "toolspace.yaml") -> str:
    with pytest.raises(ConfigError) as error_info:
        parse(text, name)
    return str(error_info.value)


YAML = """\
# comment
defaults:
  toolTimeout: 30s
mcpServers:
  github:
    args:
      - -y
      - "@mcp/github"
    env: {A: "1", B: x}
"""
JSON = """\
{
  // editors allow comments
  "defaults": {"toolTimeout": "30s"},
  "mcpServers": {
    "github": {
      "args": ["-y",
        "@mcp/github"], /* and these */
      "env": {"A": "1", "B": "x"},
    },
  },
}
"""
TOML = """\
# comment
[defaults]
toolTimeout = "30s"
[mcpServers.github]
args = [
  "-y",  # [
  "@mcp/github",
]
env = { A = "1", B = "x" }
"""
DATA = {
    "defaults": {"toolTimeout": "30s"},
    "mcpServers": {"github": {"args": ["-y", "@mcp/github"], "env": {"A": "1", "B": "x"}}},
}
ENV = ("mcpServers", "github", "env", "B")


@pytest.mark.spec("5.1")
@pytest.mark.parametrize(
    ("name", "text", "line", "last"),
    [("a.yaml", YAML, 9, 8), ("a.yml", YAML, 9, 8), ("a.json", JSON, 8, 7), ("a.toml", TOML, 9, 5)],
)
def test_all_formats_have_the_same_values_and_lines(name: str, text: str, line: int, last: int) -> None:
    for ending in ("\n", "\r\n"):
        for mark in ("", "\ufeff"):
            document = parse(mark + text.replace("\n", ending), name)
            assert document.data == DATA
            assert document.find_line(("defaults", "toolTimeout")) == 3
            assert document.find_line(ENV) == line
            assert document.find_line(("mcpServers", "github", "args", 1)) == last
            assert document.find_line((*ENV, "deeper")) == line


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.toml"])
def test_an_empty_file_is_an_empty_configuration(name: str) -> None:
    assert parse("", name).data == {}
    assert parse("\n\n", name).data == {}


def test_yaml_scalars_follow_version_1_2() -> None:
    text = """
    country: NO
    answer: yes
    port: 22:22
    code: 0123
    number: 100_000
    hex: 0x1F
    float: 1.5
    exponent: 1e3
    true: True
    nothing: ~
    date: 2026-01-01
    tagged: !!str 5
    quoted: "true"
    literal: |
      two
      lines
    """
    assert parse(text).data == {
        "country": "NO",
        "answer": "yes",
        "port": "22:22",
        "code": "0123",
        "number": 100000,
        "hex": 31,
        "float": 1.5,
        "exponent": 1000.0,
        "true": True,
        "nothing": None,
        "date": "2026-01-01",
        "tagged": "5",
        "quoted": "true",
        "literal": "two\nlines\n",
    }


def test_yaml_anchors_and_merge_keys_work_and_keep_their_lines() -> None:
    document = parse(
        "x-base: &base\n  queue: q\n  cache: 1m\n"
        "mcpServers:\n  a:\n    <<: *base\n    cache: 2m\n  b:\n    <<: [{command: x}, *base]\n"
    )
    assert document.data["mcpServers"] == {
        "a": {"queue": "q", "cache": "2m"},
        "b": {"command": "x", "queue": "q", "cache": "1m"},
    }
    assert document.find_line(("mcpServers", "a", "queue")) == 2
    assert document.find_line(("mcpServers", "a", "cache")) == 7


@pytest.mark.spec("5.2")
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", 'a.yaml:5:3: the key "c" is given twice, first in line 3'),
        ("a.json", '{"a": 1,\n "a": 2}', 'a.json:2:2: the key "a" is given twice, first in line 1'),
        ("a.toml", "a = 1\na = 2\n", "a.toml:2"),
        ("a.yaml", "a: [1, 2\nb: 3\n", "a.yaml:2:"),
        ("a.yaml", "a: 1\n\tb: 2\n", "a.yaml:2:"),
        ("a.yaml", "a: !!python/object:os.system x\n", "not allowed; write plain data"),
        ("a.yaml", "a: !custom x\n", 'the tag "!custom" is not allowed'),
        ("a.yaml", "a: 1\n---\nb: 2\n", "a.yaml:2:1: a second document begins here"),
        ("a.yaml", "a: *nowhere\n", "nowhere"),
        ("a.yaml", "a: &a [*a]\n", "stands inside the value of its anchor"),
        ("a.yaml", "? [a, b]\n: 1\n", "a key must be plain text"),
        ("a.yaml", "a:\n  <<: 5\n", '"<<" takes a mapping'),
        ("a.yaml", "- a\n- b\n", "a.yaml:1: expected a mapping of settings, got a list"),
        ("a.json", '{"a": 1\n "b": 2}', 'a.json:2:2: expected "," or "}"'),
        ("a.json", '{"a": NaN}', "NaN is not JSON"),
        ("a.json", '{"a": "\\ud800"}', "half of a surrogate pair"),
        ("a.json", '{"a": 1} x', "expected the end of the file"),
        ("a.json", "{a: 1}", "expected a key in double quotes"),
        ("a.toml", "a = \n", "a.toml:1:5"),
        ("a.ini", "a = 1", "must end in .yaml, .yml, .json or .toml"),
    ],
)
def test_a_syntax_error_names_file_line_and_reason(name: str, text: str, message: str) -> None:
    assert message in fault(text, name)


def test_text_in_another_encoding_names_the_line() -> None:
    with pytest.raises(ConfigError, match=r"toolspace\.yaml:2: not UTF-8 text"):
        parse_document(b"a: 1\nb: \xff\n", "toolspace.yaml")


def test_aliases_that_expand_to_billions_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "too many values" in fault("\n".join(lines))


def test_merge_keys_that_expand_to_billions_are_refused() -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 10)]
    assert "too many values" in fault("\n".join(lines))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "a: " + "[" * 5000 + "]" * 5000),
        ("a.json", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
        ("a.toml", "a = " + "[" * 5000 + "]" * 5000),
        ("a.toml", "a = " + "[" * 150 + "]" * 150),
        ("a.json", '{"a": ' + "9" * 5000 + "}"),
        ("a.yaml", "a: " + "9" * 5000),
        ("a.toml", "a = " + "9" * 5000),
    ],
)
def test_deep_nesting_and_huge_numbers_are_errors_not_crashes(name: str, text: str) -> None:
    assert fault(text, name).startswith(name)


def test_a_missing_file_and_a_directory_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_document(tmp_path / "toolspace.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_document(tmp_path / "folder.yaml")


def test_a_file_larger_than_any_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_document(path)


def test_toml_tables_of_arrays_have_their_lines() -> None:
    document = parse(
        '[[mcpServers]]\nname = "a"\n\n[[mcpServers]]\nname = "b"\n[mcpServers.env]\nX = """\n[\n"""\nY = 1\n',
        "a.toml",
    )
    assert document.data["mcpServers"][1] == {"name": "b", "env": {"X": "[\n", "Y": 1}}
    assert document.find_line(("mcpServers", 0, "name")) == 2
    assert document.find_line(("mcpServers", 1, "name")) == 5
    assert document.find_line(("mcpServers", 1, "env", "Y")) == 10


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), values, max_size=5))
def test_json_is_read_back_with_a_line_for_every_value(data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=1)
    document = parse(text, "a.json")
    assert document.data == data
    rows = text.split("\n")
    for path, line in document.lines.items():
        if isinstance(path[-1], str):
            assert json.dumps(path[-1]) in rows[line - 1]


@given(st.text(max_size=200), st.sampled_from(["a.yaml", "a.json", "a.toml"]))
def test_no_text_raises_anything_but_a_configuration_error(text: str, name: str) -> None:
    try:
        content = text.encode()
    except UnicodeEncodeError:
        return
    assert complaint(content, name).startswith(name)


fragments = st.lists(
    st.sampled_from(
        [
            "a: ",
            "b:\n",
            "  ",
            "- ",
            "[",
            "]",
            "{",
            "}",
            ",",
            ":",
            "&x ",
            "*x",
            "<<: ",
            "!!int ",
            "'",
            '"',
            "\n",
            "#",
            "|",
            ">",
            "1",
            "x",
            "=",
            "[[a]]\n",
            "[a]\n",
            "[a.b]\n",
            'k = "v"\n',
            '"""',
            "'''",
            "//",
            "/*",
            "*/",
        ]
    ),
    max_size=25,
).map("".join)


@given(fragments, st.sampled_from(["a.yaml", "a.json", "a.toml"]))
def test_no_mixture_of_syntax_raises_anything_but_a_configuration_error(text: str, name: str) -> None:
    try:
        document = parse(text, name)
    except ConfigError:
        return
    if name == "a.toml":
        assert document.data == tomllib.loads(text)
    for path, line in document.lines.items():
        assert 1 <= line <= text.count("\n") + 1, path


@given(st.binary(max_size=60), st.sampled_from(["a.yaml", "a.json", "a.toml"]))
def test_no_bytes_raise_anything_but_a_configuration_error(content: bytes, name: str) -> None:
    assert complaint(content, name).startswith(name)
