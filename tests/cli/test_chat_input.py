"""The input line of a chat, in a real pseudo-terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import environment
from tests.cli.terminal import Terminal

pytestmark = pytest.mark.spec("17.2")

PROGRAM = (sys.executable, str(Path(__file__).parent / "programs" / "screen_echo.py"))
LEFT, RIGHT, UP, DOWN = "\x1b[D", "\x1b[C", "\x1b[A", "\x1b[B"
COLUMNS = 40


@contextmanager
def open_terminal(folder: Path) -> Iterator[Terminal]:
    environ = environment(TERM="xterm-256color", NO_COLOR="1")
    with Terminal(cwd=folder, environ=environ, columns=COLUMNS, program=PROGRAM) as terminal:
        terminal.wait_for("you> ")
        yield terminal


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with open_terminal(tmp_path) as terminal:
        yield terminal


@pytest.fixture(scope="module")
def shared_terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """One terminal for tests that leave an empty input line."""
    with open_terminal(tmp_path_factory.mktemp("terminal")) as terminal:
        yield terminal


def test_a_line_is_submitted_as_it_was_typed(shared_terminal: Terminal) -> None:
    shared_terminal.type("Grüße, 東京\n")

    shared_terminal.wait_for_screen("you> Grüße, 東京", "line 'Grüße, 東京' of 9", "you>")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (("abc", LEFT, "x"), "abxc"),
        (("abc", LEFT, LEFT, LEFT, LEFT, "x"), "xabc"),
        (("abc", "\x01", RIGHT, "\x7f"), "bc"),
        (("abc", "\x1b[H", "\x1b[3~", "\x1b[F", "d"), "bcd"),
        (("abc", "\x01", "\x04"), "bc"),
        (("one two  ", "\x17"), "one "),
        (("one two", LEFT, LEFT, LEFT, "\x15"), "two"),
        (("one two", LEFT, LEFT, LEFT, "\x0b"), "one "),
        (("abc", "\x1b[Z", "\x1bx", "\x1bOP"), "abc"),
    ],
)
def test_keys_edit_the_line(shared_terminal: Terminal, keys: tuple[str, ...], text: str) -> None:
    shared_terminal.type("".join(keys) + "\n")

    shared_terminal.wait_for_screen(f"you> {text}".rstrip(), f"line {text!r} of {len(text)}", "you>")


def test_arrow_keys_recall_earlier_lines_and_keep_the_unfinished_one(terminal: Terminal) -> None:
    terminal.type("first\nsecond\nsecond\n  \nthird")
    terminal.wait_for("you> third")
    terminal.type(UP)
    terminal.wait_for_screen("line '  ' of 2", "you> second")
    terminal.type(UP + UP)
    terminal.wait_for_screen("line '  ' of 2", "you> first")
    terminal.type(DOWN + DOWN + DOWN)
    terminal.wait_for_screen("line '  ' of 2", "you> third")


def test_ctrl_c_is_reported_and_ctrl_d_ends_only_on_an_empty_line(terminal: Terminal) -> None:
    terminal.type("ab\x04\x03")
    terminal.wait_for_screen("INTERRUPT", "you>")
    terminal.type("\x04")
    terminal.wait_for("END")

    assert terminal.end() == 0


def test_pasted_text_is_one_message_without_control_characters(terminal: Terminal) -> None:
    terminal.type("say: \x1b[200~one\r\ntwo\x07\x03\n\x1b[201~ end")
    terminal.wait_for("end")
    assert "line" not in terminal.output
    terminal.type("\r")

    terminal.wait_for("line " + repr("say: one\ntwo\n end"))


def test_a_long_line_wraps_and_stays_whole(terminal: Terminal) -> None:
    terminal.type("x" * 100)
    terminal.wait_for_screen("you> " + "x" * 35, "x" * 40, "x" * 25)
    terminal.type("\x01y\n")

    terminal.wait_for("of 101")


def test_a_message_has_at_most_as_many_characters_as_a_space_accepts(terminal: Terminal) -> None:
    terminal.type("\x1b[200~" + "x" * 100_005 + "\x1b[201~")
    terminal.type("\n")

    terminal.wait_for("of 100000")


def test_output_that_arrives_while_a_person_types_does_not_touch_the_line(terminal: Terminal) -> None:
    terminal.type("stream\nmore It is \nhalf a li")
    terminal.wait_until(
        lambda: _without_spinner(terminal) == ["Robot: It is", "Robot is working", "you> half a li"], "li"
    )
    terminal.type("ne\nmore late. \nend\n")
    terminal.wait_for_screen("line 'end' of 3", "Robot: It is late.", "you>")

    lines = [row for row in terminal.screen if row.startswith(("line", "Robot"))]
    assert lines == [
        "line 'stream' of 6",
        "line 'more It is ' of 11",
        "line 'half a line' of 11",
        "line 'more late. ' of 11",
        "line 'end' of 3",
        "Robot: It is late.",
    ]


@pytest.mark.spec("19.2")
def test_a_withdrawn_message_disappears_and_a_provisional_one_that_ends_stays(terminal: Terminal) -> None:
    terminal.type("provisional\nmore Let me|look.\n")
    terminal.wait_for_screen("Robot: Let me", "look.", "you>")
    terminal.type("withdraw\nprovisional\nmore It is|late.\n")
    terminal.wait_for_screen("Robot: It is", "late.", "you>")
    terminal.type("end\n")
    terminal.wait_for_screen("line 'end' of 3", "Robot: It is", "late.", "you>")

    assert "Robot: Let me" not in terminal.screen


def test_the_prompt_changes_while_a_person_types(terminal: Terminal) -> None:
    terminal.type("ask City?\nTok")
    terminal.wait_for_screen("line 'ask City?' of 9", "City? Tok")

    assert terminal.cursor_column == len("City? Tok")


def _without_spinner(terminal: Terminal) -> list[str]:
    """The last rows, without the spinner and the seconds of the activity."""
    rows = terminal.screen[-3:]
    return ["Robot is working" if "Robot is working" in row else row for row in rows]
