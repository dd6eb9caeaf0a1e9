"""`edit_file`: replaces exact text, all edits or none."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def edit(*edits: dict[str, Any], path: str = "a.txt") -> dict[str, Any]:
    return {"path": path, "edits": list(edits)}


@pytest.mark.spec("10.2")
async def test_edits_are_applied_in_order(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("one two")
    result = await tools.ok("edit_file", edit({"old": "one", "new": "three"}, {"old": "three two", "new": "done"}))
    assert result == {"applied": 2}
    assert (work / "a.txt").read_text() == "done"


@pytest.mark.spec("10.2")
@pytest.mark.parametrize("new", ["$&", r"\1", r"\g<0>", r"\n", "$1", "%s", "{0}", "\\", ""])
async def test_the_replacement_is_literal(tools: Any, work: Path, new: str) -> None:
    (work / "a.txt").write_text("a(.*)b")
    await tools.ok("edit_file", edit({"old": "(.*)", "new": new}))
    assert (work / "a.txt").read_text() == f"a{new}b"


@pytest.mark.spec("10.2")
async def test_all_edits_are_applied_or_none(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("one two two")
    first = {"old": "one", "new": "1"}
    await tools.call_fails(
        "edit_file", edit(first, {"old": "six", "new": "6"}), "invalid_parameters", "edits[1]", "0 times"
    )
    await tools.call_fails(
        "edit_file", edit(first, {"old": "two", "new": "2"}), "invalid_parameters", "edits[1]", "2 times"
    )
    assert (work / "a.txt").read_text() == "one two two"
    assert os.listdir(work) == ["a.txt"]


@pytest.mark.spec("10.2")
async def test_replace_all_replaces_every_occurrence(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("two two two")
    await tools.ok("edit_file", edit({"old": "two", "new": "twotwo", "replaceAll": True}))
    assert (work / "a.txt").read_text() == "twotwo twotwo twotwo"
    none = edit({"old": "six", "new": "6", "replaceAll": True})
    await tools.call_fails("edit_file", none, "invalid_parameters", "edits[0]", "0 times")


async def test_overlapping_occurrences_count_separately(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("aaa")
    await tools.call_fails("edit_file", edit({"old": "aa", "new": "b"}), "invalid_parameters", "2 times")


@pytest.mark.parametrize(
    "edits", [[], [{"old": "", "new": "x"}], [{"old": "a"}], [{"old": "a", "new": "b", "all": True}], "a", [1]]
)
async def test_empty_edits_are_rejected(tools: Any, work: Path, edits: Any) -> None:
    (work / "a.txt").write_text("a")
    await tools.call_fails("edit_file", {"path": "a.txt", "edits": edits}, "invalid_parameters", "edits")
    assert (work / "a.txt").read_text() == "a"


@pytest.mark.spec("10.2")
async def test_byte_order_mark_line_ends_last_line_and_mode_are_kept(tools: Any, work: Path) -> None:
    path = work / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\nthree\r\nno end")
    path.chmod(0o755)
    await tools.ok("edit_file", edit({"old": "two", "new": "2"}))
    assert path.read_bytes() == b"\xef\xbb\xbfone\r\n2\nthree\r\nno end"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


async def test_edits_of_a_crlf_file_use_crlf(tools: Any, work: Path) -> None:
    path = work / "a.txt"
    path.write_bytes(b"one\r\ntwo\r\n")
    await tools.ok("edit_file", edit({"old": "one\ntwo", "new": "1\n2\n3"}))
    assert path.read_bytes() == b"1\r\n2\r\n3\r\n"
    await tools.ok("edit_file", edit({"old": "1\r\n2", "new": "x\ny"}))
    assert path.read_bytes() == b"x\ny\r\n3\r\n"


async def test_editing_a_link_changes_its_target(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("old")
    (work / "link").symlink_to("a.txt")
    await tools.ok("edit_file", edit({"old": "old", "new": "new"}, path="link"))
    assert (work / "link").is_symlink()
    assert (work / "a.txt").read_text() == "new"


@pytest.mark.parametrize("data", [b"a\0b", b"a\xffb"])
async def test_a_binary_file_is_rejected(tools: Any, work: Path, data: bytes) -> None:
    (work / "a.txt").write_bytes(data)
    await tools.call_fails("edit_file", edit({"old": "a", "new": "b"}), "execution_error", "not utf-8 text")
    assert (work / "a.txt").read_bytes() == data


async def test_a_missing_file_is_an_error_and_is_not_created(tools: Any, work: Path) -> None:
    await tools.call_fails("edit_file", edit({"old": "a", "new": "b"}), "execution_error", "not found")
    assert os.listdir(work) == []


async def test_edits_that_exceed_the_size_limit_are_rejected(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("a" * 1000)
    grow = {"old": "a", "new": "a" * 1000, "replaceAll": True}
    await tools.call_fails("edit_file", edit(*[grow] * 20), "invalid_parameters", "edits[1]", "would have more than")
    assert (work / "a.txt").read_text() == "a" * 1000


async def test_concurrent_edits_lose_nothing(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("".join(f"<{number}>" for number in range(30)))
    edits = [tools.ok("edit_file", edit({"old": f"<{number}>", "new": f"[{number}]"})) for number in range(30)]
    await asyncio.gather(*edits)
    assert (work / "a.txt").read_text() == "".join(f"[{number}]" for number in range(30))


@quick
@given(
    st.text(st.sampled_from("ab\n\rü$\\")),
    st.text(st.sampled_from("ab\n\rü$\\"), min_size=1, max_size=4),
    st.text(st.sampled_from("xy\r$&\\1")),
)
async def test_any_edit_changes_exactly_one_place(tools: Any, work: Path, text: str, old: str, new: str) -> None:
    assume("\r\n" not in text)
    (work / "a.txt").write_bytes(text.encode())
    places = [at for at in range(len(text)) if text.startswith(old, at)]
    result = await tools.call("edit_file", edit({"old": old, "new": new}))
    assert result.ok == (len(places) == 1)
    expected = text[: places[0]] + new + text[places[0] + len(old) :] if result.ok else text
    assert (work / "a.txt").read_bytes() == expected.encode()
