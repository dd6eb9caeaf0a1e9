from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.cli.chat.line_editor import ControlKey, LineEditor, SubmittedLine, width

pytestmark = pytest.mark.spec("17.2")

LEFT, RIGHT, UP, DOWN = b"\x1b[D", b"\x1b[C", b"\x1b[A", b"\x1b[B"


def typed(*keys: bytes) -> LineEditor:
    editor = LineEditor()
    for key in keys:
        editor.feed(key)
    return editor


def test_a_line_is_submitted_as_it_was_typed() -> None:
    editor = LineEditor()
    assert editor.feed("Grüße, 東京\n".encode()) == [SubmittedLine("Grüße, 東京")]
    assert (editor.text, editor.cursor) == ("", 0)


@pytest.mark.parametrize(
    ("keys", "text", "cursor"),
    [
        ((b"abc", LEFT, b"x"), "abxc", 3),
        ((b"abc", LEFT, LEFT, LEFT, LEFT, b"x"), "xabc", 1),
        ((b"abc", b"\x01", RIGHT, b"\x7f"), "bc", 0),
        ((b"abc", b"\x1b[H", b"\x1b[3~", b"\x1b[F", b"d"), "bcd", 3),
        ((b"one two  ", b"\x17"), "one ", 4),
        ((b"one two", LEFT, LEFT, LEFT, b"\x15"), "two", 0),
        ((b"one two", LEFT, LEFT, LEFT, b"\x0b"), "one ", 4),
        ((b"abc", b"\x1b[Z\x1b[99~\x1bx\x1bOP"), "abc", 3),
        ((b"\x00\x1f\x7fa",), "a", 1),
    ],
)
def test_keys_edit_the_line(keys: tuple[bytes, ...], text: str, cursor: int) -> None:
    editor = typed(*keys)
    assert (editor.text, editor.cursor) == (text, cursor)


def test_older_lines_come_back_and_what_was_begun_is_kept() -> None:
    editor = typed(b"first\n", b"second\n", b"second\n", b"  \n", b"third")
    editor.feed(UP)
    assert editor.text == "second"
    editor.feed(UP + UP)
    assert editor.text == "first"
    editor.feed(DOWN + DOWN + DOWN)
    assert editor.text == "third"


def test_ctrl_c_and_ctrl_d_are_told_and_change_nothing() -> None:
    editor = LineEditor()
    assert editor.feed(b"\x04") == [ControlKey.END]
    assert editor.feed(b"ab\x03") == [ControlKey.INTERRUPT]
    assert editor.feed(b"\x01\x04") == []
    assert editor.text == "b"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_what_is_pasted_is_one_text_however_it_arrives(size: int) -> None:
    editor = LineEditor()
    data = b"say: \x1b[200~one\r\ntwo\x1b\x07\x03\n\x1b[201~ end"
    actions = [action for at in range(0, len(data), size) for action in editor.feed(data[at : at + size])]
    assert actions == []
    assert editor.text == "say: one\ntwo\n end"
    assert editor.feed(b"\r") == [SubmittedLine("say: one\ntwo\n end")]


def test_a_line_wider_than_the_terminal_shows_what_is_around_the_cursor() -> None:
    editor = typed(b"abcdefghij")
    assert editor.shown(6) == ("fghij", 5)
    editor.feed(b"\x01")
    assert editor.shown(6) == ("abcde", 0)
    wide = typed("東京タワー".encode())
    text, column = wide.shown(6)
    assert (text, column) == ("ワー", 4)


def test_a_message_never_outgrows_what_a_space_takes() -> None:
    editor = typed(b"x" * 99_999, b"yz")
    assert len(editor.text) == 100_000


@given(st.binary(max_size=60), st.integers(1, 30))
def test_whatever_is_typed_the_line_fits_its_place(data: bytes, columns: int) -> None:
    editor = LineEditor()
    editor.feed(data)
    text, column = editor.shown(columns)
    assert 0 <= editor.cursor <= len(editor.text)
    assert sum(map(width, text)) < columns
    assert 0 <= column < columns
    assert all(char >= " " for char in text)


@given(st.binary(max_size=60), st.integers(1, 5))
def test_keys_mean_the_same_however_they_are_cut(data: bytes, size: int) -> None:
    whole, cut = LineEditor(), LineEditor()
    actions = whole.feed(data)
    pieces = [action for at in range(0, len(data), size) for action in cut.feed(data[at : at + size])]
    assert (cut.text, cut.cursor, pieces) == (whole.text, whole.cursor, actions)
