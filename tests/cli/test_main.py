from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Toolspace, bash, environment
from toolspace import __version__
from toolspace.cli.main import COMMANDS

pytestmark = pytest.mark.spec("17.2")


@pytest.mark.spec("17.1")
def test_help_names_every_command_and_imports_nothing_heavy(project: Path) -> None:
    heavy = ("rich", "yaml", "pydantic", "aiohttp", "asyncio", "msgspec")
    output = run_and_list_imports(project, ["--help"], heavy)

    assert all(f"  {name} " in output for name in COMMANDS)
    assert output.endswith("[]\n")


def test_only_chat_and_install_import_their_editing_libraries(project: Path) -> None:
    output = run_and_list_imports(project, ["list", "--quiet"], ("prompt_toolkit", "tomlkit", "aiohttp"))

    assert output.endswith("[]\n")


def run_and_list_imports(folder: Path, arguments: list[str], modules: tuple[str, ...]) -> str:
    """Runs a command. Returns its output and, in the last line, which of the modules it imported."""
    code = (
        f"import sys; from toolspace.cli.main import run; run({arguments!r}); "
        f"print([name for name in {modules!r} if name in sys.modules], flush=True)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=60,
    )
    return result.stdout


def test_the_version_is_printed(toolspace: Toolspace) -> None:
    assert toolspace("--version").stdout == f"toolspace {__version__}\n"


def test_a_mistyped_command_gets_the_nearest_name(toolspace: Toolspace) -> None:
    result, tool = toolspace("lst"), toolspace("read_file")

    assert (result.returncode, result.stderr) == (2, "error: there is no command 'lst'; did you mean \"list\"?\n")
    assert "toolspace call read_file" in tool.stderr


def test_without_arguments_the_help_is_printed(toolspace: Toolspace) -> None:
    result = toolspace()

    assert result.returncode == 2
    assert "Commands:" in result.stderr


@pytest.mark.parametrize("place", ["before", "after"])
def test_shared_options_work_before_and_after_the_command(toolspace: Toolspace, tmp_path: Path, place: str) -> None:
    other_file = tmp_path / "other.yaml"
    other_file.write_text("tools: {builtins: [sleep]}\n")
    options = ["--config", str(other_file), "--json", "--quiet"]

    result = toolspace(*options, "list") if place == "before" else toolspace("list", *options)

    assert [tool["name"] for tool in json.loads(result.stdout) if tool["category"] == "system"] == ["sleep"]


def test_the_configuration_is_the_named_one_or_the_nearest_upwards_or_none(
    toolspace: Toolspace, project: Path, tmp_path: Path
) -> None:
    subfolder = project / "a" / "b"
    subfolder.mkdir(parents=True)

    nearest = toolspace("list", cwd=subfolder)
    named_result = toolspace("list", cwd=tmp_path, TOOLSPACE_CONFIG=str(project / "toolspace.yaml"))
    none = toolspace("list", cwd=tmp_path)

    assert "\necho " in nearest.stdout
    assert nearest.stdout == named_result.stdout
    assert none.returncode == 0
    assert "\necho " not in none.stdout
    assert "\nread_file " in none.stdout


@pytest.mark.parametrize("kind", ["missing", "folder", "binary", "wrong", "conflict"])
def test_an_invalid_configuration_is_reported_in_one_line_and_exits_2(
    toolspace: Toolspace, project: Path, kind: str
) -> None:
    path = project / f"{kind}.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\x00\xff\xfe\x80" * 20)
    elif kind == "wrong":
        path.write_text("defaults: {toolTimeot: 5s}\n")
    elif kind == "conflict":
        (project / "more.py").write_text("from toolspace import tool\n\n\n@tool\ndef sleep() -> None: ...\n")
        path.write_text("functions: [./more.py]\n")

    result = toolspace("call", "echo", "--config", str(path))

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_json_prints_an_invalid_configuration_as_an_error_object(toolspace: Toolspace) -> None:
    result = toolspace("--json", "list", "--config", "missing.yaml")

    assert (result.returncode, result.stderr) == (2, "")
    assert json.loads(result.stdout) == {
        "error": {"kind": "config", "message": "missing.yaml: there is no such file"},
    }


def test_an_unusable_state_directory_is_reported_with_its_setting(toolspace: Toolspace, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    settings = {"TOOLSPACE_STORAGE_DIR": str(tmp_path / "file"), "TOOLSPACE_MAX_INLINE_BYTES": "1000"}
    result = toolspace("call", "give", "what=big", **settings)

    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_closed_standard_streams_do_not_break_a_command(project: Path) -> None:
    script = '"$0" -m toolspace call echo >&-; echo $?; "$0" -m toolspace call fails 2>&-; echo $?'
    result = bash(script, project)

    assert (result.stdout, result.stderr) == ("0\n1\n", "")


@pytest.mark.spec("17.3")
@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        (["list", "--quiet", "--verbose"], {}, "contradict each other"),
        (["list"], {"TOOLSPACE_LOG": "verbos"}, 'did you mean "verbose"?'),
        (["list"], {"TOOLSPACE_LOG_FORMAT": "xml"}, "the format is text or json"),
        (["list"], {"TOOLSPACE_TOOL_TIMEOUT": "soon"}, "TOOLSPACE_TOOL_TIMEOUT (environment)"),
    ],
)
def test_wrong_flags_and_variables_exit_2(
    toolspace: Toolspace, words: list[str], changes: dict[str, str], message: str
) -> None:
    result = toolspace(*words, **changes)

    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.spec("4.11")
@pytest.mark.spec("17.3")
def test_verbose_logs_the_request_and_the_response(toolspace: Toolspace) -> None:
    result = toolspace("--verbose", "call", "echo", "n=5")

    assert re.fullmatch(
        r'\[VRB\] tool request → echo\n    parameters: \{"n":5\}\n'
        r"\[VRB\] tool response ← echo\n    latency: \d+ms, output: 7 chars, status: ok\n",
        result.stderr,
    )
    assert json.loads(result.stdout) == {"n": 5}


@pytest.mark.spec("4.11")
def test_a_failure_is_a_warning_and_secrets_do_not_appear(toolspace: Toolspace) -> None:
    result = toolspace("call", "fails", "secret=opensesame", TOOLSPACE_LOG="verbose")

    assert "[WRN] tool response ← fails\n    latency: " in result.stderr
    assert "error: it broke" in result.stderr
    assert "opensesame" not in result.stderr


@pytest.mark.spec("4.11")
def test_a_name_cannot_forge_a_log_line(toolspace: Toolspace) -> None:
    result = toolspace("call", "x\n[ERR] forged\x1b[2J", "--verbose")

    assert "[ERR]" in result.stderr
    assert not any(line.startswith("[ERR]") for line in result.stderr.splitlines())


@pytest.mark.spec("4.11")
def test_the_log_can_be_one_json_object_per_line(toolspace: Toolspace) -> None:
    result = toolspace("call", "echo", "--verbose", TOOLSPACE_LOG_FORMAT="json")

    started, finished = map(json.loads, result.stderr.splitlines())
    assert (started["level"], started["event"], started["tool"]) == ("verbose", "tool_started", "echo")
    assert (finished["event"], finished["callId"]) == ("tool_finished", started["callId"])


@pytest.mark.spec("4.11")
@pytest.mark.spec("17.3")
def test_a_variable_sets_the_log_level_and_quiet_overrides_it(toolspace: Toolspace) -> None:
    assert "[VRB]" in toolspace("call", "echo", TOOLSPACE_LOG="verbose").stderr
    assert toolspace("call", "echo", "--quiet", TOOLSPACE_LOG="debug").stderr == ""
