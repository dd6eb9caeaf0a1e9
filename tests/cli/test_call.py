from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Toolspace, bash, environment

pytestmark = pytest.mark.spec("17.2")


@pytest.mark.spec("17.1")
def test_arguments_are_typed_and_the_result_is_readable_json(toolspace: Toolspace) -> None:
    result = toolspace("call", "echo", "n=5", "x=1", "flag=true", "text=7", "tags=a", "tags=b", "maybe=3")

    assert result.returncode == 0
    assert json.loads(result.stdout) == {
        "n": 5, "x": 1.0, "flag": True, "text": "7", "tags": ["a", "b"], "maybe": 3,
    }  # fmt: skip
    assert result.stdout.startswith('{\n  "n": 5,')
    assert result.stderr == ""


@pytest.mark.spec("17.1")
def test_args_are_read_from_the_option_a_file_and_standard_input(toolspace: Toolspace, project: Path) -> None:
    (project / "args.json").write_text('{"n": 2}')

    results = [
        toolspace("call", "echo", "--args", '{"n": 1, "text": "kept"}', "n=9"),
        toolspace("call", "echo", "--args", "@args.json"),
        toolspace("call", "echo", "--args", "-", stdin='{"n": 3}'),
    ]

    assert [json.loads(result.stdout) for result in results] == [{"n": 9, "text": "kept"}, {"n": 2}, {"n": 3}]


@pytest.mark.parametrize(("kind", "expected"), [("null", "null\n"), ("false", "false\n"), ("empty", "\n")])
def test_empty_and_false_results_are_printed(toolspace: Toolspace, kind: str, expected: str) -> None:
    result = toolspace("call", "give", f"what={kind}")

    assert (result.returncode, result.stdout, result.stderr) == (0, expected, "")


def test_json_prints_the_whole_result_object_and_nothing_else(toolspace: Toolspace) -> None:
    process = toolspace("--json", "call", "noisy")

    result = json.loads(process.stdout)
    assert (result["ok"], result["result"], result["tool"], result["kind"]) == (True, 7, "noisy", "local")
    assert "from the tool\n" in process.stderr
    assert "from its child\n" in process.stderr


def test_a_failed_call_is_reported_on_standard_error_and_exits_1(toolspace: Toolspace) -> None:
    result = toolspace("call", "fails")

    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: it broke (execution_error)\n"


def test_json_prints_a_failure_as_a_result_object(toolspace: Toolspace) -> None:
    result = toolspace("call", "fails", "--json")

    assert result.returncode == 1
    assert json.loads(result.stdout)["errorKind"] == "execution_error"
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["call", "ehco"], 'Tool "ehco" not found; did you mean "echo"? (unknown_tool)'),
        (["call", "echo", "n=five"], "Parameter validation failed: n: expected integer"),
        (["call", "read_file", "README.md"], "'README.md' is not key=value; did you mean path=README.md?"),
        (["call", "echo", "--n", "5"], "the arguments of a tool are written key=value"),
        (["call", "echo", "--args", "@missing.json"], "missing.json cannot be read: No such file"),
        (["call", "echo", "--timeout", "5"], "add the unit: 5s or 5ms"),
        (["call"], "Missing argument 'NAME'"),
    ],
)
def test_wrong_usage_exits_2_with_a_hint(toolspace: Toolspace, words: list[str], message: str) -> None:
    result = toolspace(*words)

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_json_prints_wrong_usage_as_an_error_object(toolspace: Toolspace) -> None:
    result = toolspace("call", "echo", "five", "--json")

    assert result.returncode == 2
    assert json.loads(result.stdout)["error"]["kind"] == "usage"
    assert result.stderr == ""


def test_the_timeout_option_overrides_longer_and_shorter_configured_timeouts(toolspace: Toolspace) -> None:
    shorter = toolspace("call", "waits", "--timeout", "50ms")
    longer = toolspace("call", "sleep", "duration=0.3", "--timeout", "10s", TOOLSPACE_TOOL_TIMEOUT="100ms")

    assert (shorter.returncode, shorter.stderr.splitlines()[-1]) == (
        1,
        "error: Tool execution timed out after 50ms (timeout)",
    )
    assert longer.returncode == 0


@pytest.mark.spec("4.6")
def test_a_large_result_is_complete_in_a_pipe_and_readable_by_its_handle_later(toolspace: Toolspace) -> None:
    result = toolspace("call", "give", "what=big")
    as_json = toolspace("call", "give", "what=big", "--json")
    whole_document = json.loads(as_json.stdout)
    as_json = toolspace("call", "give", "what=big", "--json", TOOLSPACE_MAX_INLINE_BYTES="1000")
    stored_result = toolspace("call", "give", "what=big", TOOLSPACE_MAX_INLINE_BYTES="1000")
    document = json.loads(as_json.stdout)
    handle = document["result"]["tool_output"]["handle"]
    read = toolspace("call", "agent__read_output", f"handle={handle}", "pattern=tail$", "--json")

    assert result.stdout.startswith("head xxx")
    assert len(result.stdout) > 100_000
    assert result.stdout.rstrip().endswith("tail")
    assert (whole_document["stored"], whole_document["result"]) == (False, result.stdout.rstrip("\n"))
    assert document["stored"] is True
    assert stored_result.stdout == result.stdout
    assert handle.startswith("session-cli-")
    assert json.loads(read.stdout)["ok"], read.stdout


@pytest.mark.spec("1.3")
def test_a_streaming_tool_prints_each_part_once_as_it_arrives(toolspace: Toolspace) -> None:
    assert toolspace("call", "lines", "count=2").stdout == "line 0\nline 1\n"
    assert toolspace("call", "values").stdout == '{"number":0}\n{"number":1}\n'


@pytest.mark.spec("1.3")
def test_a_streamed_text_that_was_stored_is_not_printed_twice(toolspace: Toolspace) -> None:
    result = toolspace("call", "lines", "count=20000")

    assert result.stdout.count("line 0\n") == 1
    assert result.stdout.endswith("line 19999\n")


def test_partial_output_does_not_replace_the_result(toolspace: Toolspace) -> None:
    """Only what a streaming tool yields is printed as it comes: of others the result alone is on standard output."""
    assert toolspace("call", "announced").stdout == "the result\n"


def test_text_that_cannot_be_encoded_is_escaped(toolspace: Toolspace) -> None:
    plain = toolspace("call", "give", "what=surrogate")
    as_json = toolspace("call", "give", "what=surrogate", "--json", PYTHONIOENCODING="ascii")

    assert plain.stdout[0] == "a"
    assert plain.stdout[-2:] == "b\n"
    assert json.loads(as_json.stdout)["ok"]
    assert toolspace("call", "echo", "text=é", PYTHONIOENCODING="ascii").stdout == '{\n  "text": "\\xe9"\n}\n'


def test_a_closed_pipe_cancels_the_call_silently(project: Path) -> None:
    script = '"$0" -m toolspace call endless_lines | head -1; echo ${PIPESTATUS[0]}'
    result = bash(script, project)

    assert (result.stdout, result.stderr) == ("line\n0\n", "")
    assert (project / "stopped").exists()


def test_a_full_disk_is_reported_in_one_line(project: Path) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "toolspace", "call", "echo", "n=1"],
            cwd=project,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert result.returncode == 1
    assert result.stderr == "error: the result cannot be written: No space left on device\n"


@pytest.mark.parametrize("tool", ["waits", "stuck"])
def test_sigterm_stops_the_call_cleans_up_and_ends_the_process(project: Path, tool: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "toolspace", "call", tool, "--json"],
        cwd=project,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline() == "started\n"
        os.kill(process.pid, signal.SIGTERM)
        result = json.loads(process.stdout.read())
        code = process.wait(timeout=30)

    assert code == 128 + signal.SIGTERM
    assert result["errorKind"] == "canceled"
    assert (project / "cleaned").exists() == (tool == "waits")
