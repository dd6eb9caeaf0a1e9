"""The memory tools: notes persist, stay in the memory folder, and are never lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolspace import Toolspace
from toolspace.builtin.catalog import builtin_tools
from toolspace.core.tool_context import ToolContext

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def summaries(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.lstrip().startswith("> Summary:")]


@pytest.mark.spec("10.5")
async def test_memory_list_shows_every_file_with_its_summary(tools: Any, memory: Path) -> None:
    assert await tools.ok("memory_list", {}) == []
    for path, text in {
        "facts/user.md": "# User\n\n> Summary: likes tea  \r\n\n- ü\n",
        "episodes/2026/one.md": "no summary\n",
        "facts/empty.md": "> Summary:\n",
        "facts/notes.txt": "> Summary: not markdown",
    }.items():
        (memory / path).parent.mkdir(parents=True, exist_ok=True)
        (memory / path).write_bytes(text.encode())
    assert await tools.ok("memory_list", {}) == [
        {"path": "episodes/2026/one.md", "summary": None, "size": 11},
        {"path": "facts/empty.md", "summary": None, "size": 11},
        {"path": "facts/user.md", "summary": "likes tea", "size": 38},
    ]


@pytest.mark.spec("10.5")
async def test_written_content_is_read_back_unchanged(tools: Any, memory: Path) -> None:
    text = "# Ü\r\n\n> Summary: x\n$& \\1"
    write_result = await tools.ok("memory_write", {"path": "facts/a.md", "content": text})
    assert write_result == {"path": "facts/a.md", "size": len(text.encode())}
    assert await tools.ok("memory_read", {"path": "facts/a.md"}) == text
    assert (memory / "facts/a.md").read_bytes() == text.encode()


async def test_default_memory_folder_is_below_the_current_folder(work: Path) -> None:
    from toolspace.builtin.memory import memory_list, memory_write

    memory_write(path="facts/a.md", content="a", context=ToolContext())
    assert (work / ".toolspace/memory/facts/a.md").read_text() == "a"
    assert memory_list(context=ToolContext()) == [{"path": "facts/a.md", "summary": None, "size": 1}]


@pytest.mark.spec("10.5")
async def test_memory_patch_replaces_exactly_one_occurrence_literally(tools: Any, memory: Path) -> None:
    await tools.ok("memory_write", {"path": "a.md", "content": "one two two (.*)"})
    patch_result = await tools.ok("memory_patch", {"path": "a.md", "old_str": "(.*)", "new_str": "$& \\1"})
    assert patch_result == {"path": "a.md", "size": 17}
    several = {"path": "a.md", "old_str": "two", "new_str": "2"}
    await tools.call_fails("memory_patch", several, "invalid_parameters", "old_str", "2 times")
    none = {"path": "a.md", "old_str": "six", "new_str": "6"}
    await tools.call_fails("memory_patch", none, "invalid_parameters", "old_str", "0 times")
    await tools.call_fails("memory_patch", {**none, "old_str": ""}, "invalid_parameters", "old_str")
    await tools.call_fails("memory_patch", {**none, "path": "b.md"}, "execution_error", "not found")
    assert (memory / "a.md").read_text() == "one two two $& \\1"


@pytest.mark.spec("10.5")
@pytest.mark.parametrize(
    ("before", "entry", "after"),
    [
        (None, "first", "first\n"),
        ("", "first", "first\n"),
        ("one", "two", "one\ntwo\n"),
        ("one\n", "two\n", "one\ntwo\n"),
        ("one\n\n\n", "\ntwo\n\n", "one\ntwo\n"),
        ("one\r\n", "two", "one\ntwo\n"),
        ("# T\n> Summary: s\n", "- a\n- b", "# T\n> Summary: s\n- a\n- b\n"),
    ],
)
async def test_memory_append_separates_entries_by_one_line_end(
    tools: Any, memory: Path, before: str | None, entry: str, after: str
) -> None:
    if before is not None:
        memory.mkdir()
        (memory / "a.md").write_bytes(before.encode())
    append_result = await tools.ok("memory_append", {"path": "a.md", "entry": entry})
    assert append_result == {"path": "a.md", "size": len(after)}
    assert (memory / "a.md").read_bytes() == after.encode()


@pytest.mark.spec("10.5")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "> Summary: new\n\nentry\n"),
        ("text\n", "> Summary: new\n\ntext\nentry\n"),
        ("# T\n", "# T\n> Summary: new\n\nentry\n"),
        ("# T\n\ntext", "# T\n> Summary: new\n\ntext\nentry\n"),
        ("# T\n> Summary: old\ntext", "# T\n> Summary: new\ntext\nentry\n"),
        ("> Summary: a\nx\n> Summary: b\n>Summary: c\n", "> Summary: new\nx\nentry\n"),
        ("text\n# Later\n", "> Summary: new\n\ntext\n# Later\nentry\n"),
    ],
)
async def test_memory_append_keeps_one_summary_line(tools: Any, memory: Path, before: str, after: str) -> None:
    memory.mkdir()
    (memory / "a.md").write_text(before)
    await tools.ok("memory_append", {"path": "a.md", "entry": "entry", "summary": " new "})
    assert (memory / "a.md").read_text() == after
    (memory_file,) = await tools.ok("memory_list", {})
    assert memory_file["summary"] == "new"


async def test_a_summary_stays_on_one_line(tools: Any, memory: Path) -> None:
    tricky = {"path": "a.md", "entry": "x\n> Summary: false", "summary": "one\n> Summary: two\r\n\u2028three $& \\1"}
    await tools.ok("memory_append", tricky)
    await tools.ok("memory_append", {**tricky, "summary": None})
    text = (memory / "a.md").read_text()
    assert summaries(text) == ["> Summary: one > Summary: two three $& \\1"]


@quick
@given(
    st.lists(
        st.tuples(
            st.text(st.sampled_from("ab \n\r#>")) | st.just("> Summary: x"),
            st.none() | st.text(st.sampled_from("cd \n\r>")),
        ),
        min_size=1,
        max_size=5,
    )
)
async def test_any_appends_keep_one_summary_line(
    tools: Any, memory: Path, appends: list[tuple[str, str | None]]
) -> None:
    (memory / "a.md").unlink(missing_ok=True)
    given_one = False
    for entry, summary in appends:
        result = await tools.call("memory_append", {"path": "a.md", "entry": entry, "summary": summary})
        given_one = given_one or (result.ok and (summary is not None or entry == "> Summary: x"))
    text = (memory / "a.md").read_text() if (memory / "a.md").exists() else ""
    assert len(summaries(text)) == given_one


async def test_an_empty_entry_is_rejected(tools: Any) -> None:
    await tools.call_fails("memory_append", {"path": "a.md", "entry": " \n"}, "invalid_parameters", "entry")


@pytest.mark.spec("10.5")
async def test_concurrent_appends_lose_nothing(tools: Any, memory: Path) -> None:
    appends = [tools.ok("memory_append", {"path": "facts/a.md", "entry": f"- {number}"}) for number in range(40)]
    await asyncio.gather(*appends)
    lines = (memory / "facts/a.md").read_text().splitlines()
    assert sorted(lines) == sorted(f"- {number}" for number in range(40))


def test_appends_of_several_processes_lose_nothing(memory: Path) -> None:
    program = (
        "import sys\n"
        "from toolspace.builtin.memory import memory_append\n"
        "from toolspace.core.tool_context import ToolContext\n"
        "context = ToolContext(memory_dir=sys.argv[1])\n"
        "for number in range(25):\n"
        "    memory_append(path='a.md', entry=f'- {sys.argv[2]} {number}', context=context)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, str(memory), f"{number}"]) for number in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    lines = (memory / "a.md").read_text().splitlines()
    assert sorted(lines) == sorted(f"- {process} {number}" for process in range(3) for number in range(25))


@pytest.mark.spec("10.5")
@pytest.mark.parametrize("tool", ["memory_read", "memory_write", "memory_patch", "memory_append"])
async def test_no_path_leaves_the_memory_folder(tools: Any, memory: Path, tmp_path: Path, tool: str) -> None:
    secret = tmp_path / "secret.md"
    secret.write_text("secret")
    memory.mkdir()
    (memory / "link.md").symlink_to(secret)
    (memory / "up").symlink_to("..")
    rest: dict[str, Any] = {
        "memory_read": {},
        "memory_write": {"content": "x"},
        "memory_patch": {"old_str": "secret", "new_str": "x"},
        "memory_append": {"entry": "x"},
    }[tool]
    for path in ("../secret.md", str(secret), "link.md", "up/secret.md", "facts/../../secret.md", "up/new.md"):
        await tools.call_fails(tool, {"path": path, **rest}, "not_permitted", path)
    for path in ("a.txt", "a", "", "a.md/", "facts/", "a.md\0", "~/a.md", "x" * 300 + ".md"):
        await tools.call_fails(tool, {"path": path, **rest}, "invalid_parameters", "path")
    assert secret.read_text() == "secret"
    assert not (tmp_path / "new.md").exists()


async def test_memory_list_follows_no_link(tools: Any, memory: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.md").write_text("> Summary: secret")
    memory.mkdir()
    (memory / "link.md").symlink_to(tmp_path / "secret.md")
    (memory / "up").symlink_to("..")
    assert await tools.ok("memory_list", {}) == []


async def test_a_missing_or_binary_memory_file_is_a_clear_error(tools: Any, memory: Path) -> None:
    await tools.call_fails("memory_read", {"path": "facts/a.md"}, "execution_error", "not found", "memory_list")
    memory.mkdir()
    (memory / "b.md").write_bytes(b"\xff")
    (memory / "c.md").mkdir()
    await tools.call_fails("memory_read", {"path": "b.md"}, "execution_error", "not utf-8")
    await tools.call_fails("memory_read", {"path": "c.md"}, "execution_error", "folder")
    await tools.call_fails("memory_append", {"path": "c.md", "entry": "x"}, "execution_error", "folder")


@pytest.mark.parametrize("path", ["../outside.md", "../../etc/passwd", "/etc/hosts.md", "link.md"])
async def test_a_path_outside_the_memory_is_refused_by_name(path: str, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (memory / "link.md").symlink_to(tmp_path / "target.md")
    (tmp_path / "target.md").write_text("secret")
    ts = Toolspace(builtin_tools, context=ToolContext(memory_dir=memory))
    for name, arguments in (("memory_read", {}), ("memory_write", {"content": "x"})):
        result = await ts.call(name, {"path": path, **arguments})
        assert result.error_kind == "not_permitted"
        assert f'Path "{path}" escapes memory directory' in (result.error or "")
