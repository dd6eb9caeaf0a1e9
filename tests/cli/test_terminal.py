from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import environment
from tests.cli.terminal import Terminal
from toolspace.cli.output import escape_control_characters, first_line, shorten

pytestmark = pytest.mark.spec("17.2")
COLOUR = {"TERM": "xterm-256color", "NO_COLOR": ""}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[mK]")


def open_terminal(*words: str, project: Path, columns: int = 80, **changes: str) -> Terminal:
    return Terminal(*words, cwd=project, environ=environment(**{**COLOUR, **changes}), columns=columns)


def test_colour_is_used_on_terminals_unless_disabled(project: Path) -> None:
    with open_terminal("call", "echo", "n=5", project=project) as terminal:
        assert terminal.end() == 0
    with open_terminal("call", "echo", "n=5", project=project, NO_COLOR="1") as plain:
        assert plain.end() == 0

    assert '\x1b[36m"n"\x1b[0m: \x1b[33m5\x1b[0m' in terminal.output
    assert plain.output == '{\r\n  "n": 5\r\n}\r\n'


def test_a_tool_cannot_control_the_terminal(project: Path) -> None:
    with open_terminal("call", "give", "what=escapes", project=project) as terminal:
        assert terminal.end() == 0

    assert terminal.output == "\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07\r\n"


def test_the_list_fits_the_terminal(project: Path) -> None:
    with open_terminal("list", project=project, columns=60) as terminal:
        assert terminal.end() == 0

    lines = _ESCAPES.sub("", terminal.output).splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("http_request") and line.endswith("…") for line in lines)


@pytest.mark.parametrize("tool", ["waits", "stuck"])
def test_ctrl_c_cancels_the_call_and_cleans_up(project: Path, tool: str) -> None:
    with open_terminal("call", tool, project=project) as terminal:
        terminal.wait_for("started")
        terminal.type("\x03")
        code = terminal.end()

    assert code == 128 + signal.SIGINT
    assert "the call was canceled" in terminal.output
    assert (project / "cleaned").exists() == (tool == "waits")


def test_a_second_ctrl_c_ends_a_call_that_cannot_be_cancelled(project: Path) -> None:
    with open_terminal("call", "blocks", project=project) as terminal:
        terminal.wait_for("started")
        terminal.type("\x03")
        terminal.wait_for("^C\r\n")
        terminal.type("\x03")

        assert terminal.end() == 128 + signal.SIGINT


def test_a_long_call_shows_its_progress_and_removes_the_status_line(project: Path) -> None:
    with open_terminal("call", "waits", project=project) as terminal:
        terminal.wait_for("waits 1s 1/4 still here")
        terminal.type("\x03")
        terminal.end()

    after = terminal.output.rpartition("\r\x1b[K")[2]
    assert "still here" not in after


@pytest.mark.spec("4.11")
def test_log_lines_are_coloured_by_their_level(project: Path) -> None:
    with open_terminal("call", "fails", "--verbose", project=project) as terminal:
        assert terminal.end() == 1

    assert "\x1b[36m[VRB]\x1b[0m tool request → fails" in terminal.output
    assert "\x1b[33m[WRN]\x1b[0m tool response ← fails" in terminal.output


def test_only_control_characters_are_escaped() -> None:
    assert escape_control_characters("a\tb\nc é 漢\r\nd") == "a\tb\nc é 漢\nd"
    assert escape_control_characters("\x1b\x07\x7f\x9b\u202e") == "\\x1b\\x07\\u007f\\u009b\\u202e"
    assert escape_control_characters("over\rwritten") == "over\\x0dwritten"
    assert first_line("\n first \n second") == "first"
    assert first_line("") == ""


def test_wide_characters_count_twice_when_a_text_is_cut() -> None:
    assert shorten("漢" * 30, 21) == "漢" * 10 + "…"
    assert shorten("x" * 20, 20) == "x" * 20
    assert shorten("x" * 21, 20) == "x" * 19 + "…"
    assert shorten("x" * 500, None) == "x" * 500
