"""Python tools are found by file, module and name; errors in user code are reported with their line."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from toolspace.core.tool import Tool
from toolspace.errors import ConfigError
from toolspace.providers.functions import list_loaded_files, load_functions

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def names(tools: list[Tool]) -> list[str]:
    return [tool.name for tool in tools]


TOOLS = """
    from toolspace.core.tool import tool

    @tool
    def second(x: int) -> int:
        "Doubles."
        return 2 * x

    @tool(name="first")
    def other() -> str:
        return "a"

    @tool
    def _hidden() -> str:
        return "h"

    again = second

    def plain(a: int, b: int) -> int:
        return a + b

    class Not: ...

    both = [second, plain]
    nothing = []
    number = 5
"""


@pytest.mark.spec("5.1")
def test_a_file_offers_its_public_tools_in_order_and_once(write: Any, tmp_path: Path) -> None:
    write("tools.py", TOOLS)
    assert names(load_functions("./tools.py", tmp_path)) == ["second", "first"]
    assert names(load_functions(str(tmp_path / "tools.py"), Path("/elsewhere"))) == ["second", "first"]


@pytest.mark.spec("5.1")
def test_a_module_is_found_beside_the_configuration(write: Any, tmp_path: Path) -> None:
    write("pkg_a/__init__.py", "")
    write("pkg_a/mod.py", TOOLS)
    assert names(load_functions("pkg_a.mod", tmp_path)) == ["second", "first"]
    assert names(load_functions("pkg_a.mod:other", tmp_path)) == ["first"]


@pytest.mark.spec("5.1")
@pytest.mark.parametrize(
    ("name", "expected"),
    [("second", ["second"]), ("plain", ["plain"]), ("both", ["second", "plain"]), ("_hidden", ["_hidden"])],
)
def test_one_name_may_be_a_tool_a_function_or_a_list(
    write: Any, tmp_path: Path, name: str, expected: list[str]
) -> None:
    write("tools.py", TOOLS)
    assert names(load_functions(f"./tools.py:{name}", tmp_path)) == expected


def test_type_hints_of_a_file_are_resolved(write: Any, tmp_path: Path) -> None:
    write(
        "tools.py",
        """
        from __future__ import annotations
        from dataclasses import dataclass
        from toolspace.core.tool import tool

        @dataclass
        class Point:
            x: int

        @tool
        def move(point: Point, steps: int = 1) -> str:
            "Moves."
            return ""
        """,
    )
    (move,) = load_functions("./tools.py", tmp_path)
    assert set(move.input_schema["properties"]) == {"point", "steps"}


def test_dunder_all_selects_the_tools(write: Any, tmp_path: Path) -> None:
    write("tools.py", TOOLS + '    __all__ = ["second", "_hidden"]\n')
    assert names(load_functions("./tools.py", tmp_path)) == ["second", "_hidden"]


def test_imported_tools_are_offered_only_by_name(write: Any, tmp_path: Path) -> None:
    write("shared_tools.py", TOOLS)
    write("tools.py", "from shared_tools import second\n")
    with pytest.raises(ConfigError, match="it only imports second: list the tools that it offers in __all__"):
        load_functions("./tools.py", tmp_path)
    write("tools.py", "from shared_tools import second\n__all__ = ['second']\n")
    assert names(load_functions("./tools.py", tmp_path)) == ["second"]


def test_a_package_offers_the_tools_of_its_modules(write: Any, tmp_path: Path) -> None:
    write("pkg_b/__init__.py", "from pkg_b.mod import second, other\n")
    write("pkg_b/mod.py", TOOLS)
    assert names(load_functions("pkg_b", tmp_path)) == ["second", "first"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./missing.py", r"functions: \./missing\.py: there is no file .*missing\.py"),
        ("no_such_module_here", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("./tools.py:secnd", "there is no 'secnd' in it; did you mean \"second\""),
        ("./tools.py:number", "a int is no tool; name a function or a Tool"),
        ("./tools.py:Not", "a type is no tool"),
        ("./tools.py:nothing", "the list is empty"),
        ("./empty.py", r"\./empty\.py defines no @tool function; decorate a function with @tool"),
        ("not a spec", "names no tools; write a file"),
        ("", "names no tools"),
    ],
)
def test_an_invalid_line_says_what_to_write(write: Any, tmp_path: Path, spec: str, message: str) -> None:
    write("tools.py", TOOLS)
    write("empty.py", "x = 1\n")
    with pytest.raises(ConfigError, match=message):
        load_functions(spec, tmp_path)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("x = 1\nimport no_such_library\n", r"bad\.py:2: ModuleNotFoundError: No module named 'no_such_library'"),
        ("x = 1\n\ny = 1 / 0\n", r"bad\.py:3: ZeroDivisionError: division by zero"),
        ("def f(:\n", r"bad\.py:1: SyntaxError"),
        ("import sys\nsys.exit(3)\n", r"bad\.py:2: SystemExit: 3"),
        ("import helper_bad\n", r"helper_bad\.py:2: NameError: name 'oops' is not defined"),
        (
            "from toolspace.core.tool import tool\n@tool(name='a b')\ndef f(): ...\n",
            r"bad\.py:2: .*'a b' cannot name",
        ),
    ],
)
def test_an_error_in_user_code_names_its_line(write: Any, tmp_path: Path, text: str, place: str) -> None:
    write("bad.py", text)
    write("helper_bad.py", "x = 1\noops\n")
    with pytest.raises(ConfigError, match=place):
        load_functions("./bad.py", tmp_path)


def test_neighbours_can_be_imported_immediately_and_later(write: Any, tmp_path: Path) -> None:
    write("near.py", "VALUE = 1\n")
    write("later.py", "VALUE = 2\n")
    write(
        "tools.py",
        """
        import near
        from toolspace.core.tool import tool

        @tool
        def add() -> int:
            import later
            return near.VALUE + later.VALUE
        """,
    )
    (add,) = load_functions("./tools.py", tmp_path)
    assert add() == 3  # pyright: ignore[reportCallIssue]


def test_a_neighbour_does_not_replace_a_library_of_the_same_name(write: Any, tmp_path: Path) -> None:
    write("tools.py", TOOLS)
    load_functions("./tools.py", tmp_path)
    assert sys.path[0] != str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


def test_two_lines_with_one_file_share_its_module(write: Any, tmp_path: Path) -> None:
    write("tools.py", TOOLS)
    for _ in range(2):  # The second time is a reload, which makes a new module that both share again.
        first, *_ = load_functions("./tools.py", tmp_path)
        assert load_functions("./tools.py:second", tmp_path) == [first]


@pytest.mark.spec("5.4")
@pytest.mark.parametrize("spec", ["./tools.py", "tools_again"])
def test_loading_again_reads_changed_code_even_of_equal_time_and_size(write: Any, tmp_path: Path, spec: str) -> None:
    name = "tools.py" if spec.endswith(".py") else "tools_again.py"
    imports = "from near_again import VALUE\nfrom toolspace.core.tool import tool\n"
    code = imports + "@tool\ndef {}() -> int:\n  return VALUE\n"
    for step in (1, 2, 3):
        files = write("near_again.py", f"VALUE = {step}\n"), write(name, code.format(f"get{step}"))
        for file in files:
            os.utime(file, (1_000_000_000, 1_000_000_000))
        (tool,) = load_functions(spec, tmp_path)
        assert tool.name == f"get{step}"
        assert tool() == step  # pyright: ignore[reportCallIssue]
    assert not (tmp_path / "__pycache__").exists()
    assert {tmp_path / "near_again.py", tmp_path / name} <= set(list_loaded_files())


@pytest.mark.spec("5.4")
def test_a_failed_reload_keeps_the_previous_tools(write: Any, tmp_path: Path) -> None:
    write("near_kept.py", "VALUE = 1\n")
    write(
        "tools.py",
        "import near_kept\nfrom toolspace.core.tool import tool\n"
        "@tool\ndef get() -> int:\n  import near_kept\n  return near_kept.VALUE\n",
    )
    (get,) = load_functions("./tools.py", tmp_path)
    module = sys.modules["near_kept"]
    write("tools.py", "import near_kept\n1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_functions("./tools.py", tmp_path)
    assert sys.modules["near_kept"] is module
    assert get() == 1  # pyright: ignore[reportCallIssue]


def test_a_module_that_was_already_imported_is_not_reloaded(write: Any, tmp_path: Path, monkeypatch: Any) -> None:
    write("mine_already.py", TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    module = importlib.import_module("mine_already")
    for _ in range(2):
        first, *_ = load_functions("mine_already", tmp_path)
        assert first is module.second
