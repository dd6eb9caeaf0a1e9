"""The file tools: their results, and that they cannot leave the allowed folders."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from toolspace import Toolspace
from toolspace.builtin import files as files_module
from toolspace.builtin.files import file_tools
from toolspace.core.tool_context import ToolContext

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
not_root = pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")

TOUCHING = {
    "read_file": lambda path: {"path": path},
    "write_file": lambda path: {"path": path, "content": "stolen"},
    "list_files": lambda path: {"path": path},
    "delete_file": lambda path: {"path": path},
    "get_file_info": lambda path: {"path": path},
    "edit_file": lambda path: {"path": path, "edits": [{"old": "secret", "new": "stolen"}]},
    "grep_files": lambda path: {"pattern": "secret", "path": path},
    "move from": lambda path: {"from": path, "to": "stolen.txt"},
    "move to": lambda path: {"from": "mine.txt", "to": path, "overwrite": True},
}


@pytest.fixture
def outer_folder(tmp_path: Path) -> Path:
    """A folder that no tool may access."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.txt").write_text("secret")
    return folder


def names(listing: dict[str, Any]) -> list[str]:
    return [entry["path"] for entry in listing["files"]]


# Reading


@pytest.mark.spec("10.2")
async def test_read_file_returns_content_size_and_lines(tools: Any, work: Path) -> None:
    (work / "a.txt").write_bytes("één\r\ntwo\nthree".encode())
    assert await tools.ok("read_file", {"path": "a.txt"}) == {
        "content": "één\r\ntwo\nthree",
        "size": 16,
        "totalLines": 3,
    }
    assert (await tools.ok("read_file", {"path": str(work / "a.txt")}))["totalLines"] == 3


@pytest.mark.spec("10.2")
@pytest.mark.parametrize(
    ("window", "content"),
    [
        ({"offset": 1, "limit": 1}, "one\n"),
        ({"offset": 2}, "two\r\nthree"),
        ({"offset": 2, "limit": 1}, "two\r\n"),
        ({"offset": 3, "limit": 10**30}, "three"),
        ({"offset": 0, "limit": 1}, "one\n"),
        ({"limit": 2}, "one\ntwo\r\n"),
        ({"limit": 0}, ""),
        ({"offset": 4}, ""),
        ({"offset": 10**30}, ""),
    ],
)
async def test_offset_counts_lines_from_one(tools: Any, work: Path, window: dict[str, int], content: str) -> None:
    (work / "a.txt").write_bytes(b"one\ntwo\r\nthree")
    read = await tools.ok("read_file", {"path": "a.txt", **window})
    assert (read["content"], read["totalLines"]) == (content, 3)


@pytest.mark.parametrize("window", [{"offset": -1}, {"limit": -1}])
async def test_negative_line_numbers_are_rejected(tools: Any, work: Path, window: dict[str, int]) -> None:
    (work / "a.txt").write_text("a")
    await tools.call_fails("read_file", {"path": "a.txt", **window}, "invalid_parameters", next(iter(window)))


@quick
@given(
    st.text(st.sampled_from("ab\n\r\u2028\x0cü")),
    st.integers(0, 8),
    st.integers(0, 8) | st.none(),
    st.sampled_from(["utf-8", "utf-16", "utf-32-be"]),
)
async def test_any_range_of_lines_is_what_an_editor_shows(
    tools: Any, work: Path, text: str, offset: int, limit: int | None, encoding: str
) -> None:
    (work / "a.txt").write_bytes(text.encode(encoding))
    lines = [part + "\n" for part in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    if not lines[-1]:
        lines.pop()
    first = max(offset - 1, 0)
    expected = lines[first:] if limit is None else lines[first : first + limit]
    arguments = {"path": "a.txt", "offset": offset, "limit": limit, "encoding": encoding}
    read = await tools.ok("read_file", arguments)
    assert (read["content"], read["totalLines"]) == ("".join(expected), len(lines))


async def test_lines_may_cross_the_read_buffer(tools: Any, work: Path) -> None:
    lines = [f"{number} {'ü' * 50}\n" for number in range(1, 20_001)]
    (work / "a.txt").write_text("".join(lines))
    read = await tools.ok("read_file", {"path": "a.txt", "offset": 9_999, "limit": 3})
    assert (read["content"], read["totalLines"]) == ("".join(lines[9_998:10_001]), 20_000)


async def test_a_file_too_large_to_read_whole_is_read_in_parts(tools: Any, work: Path) -> None:
    with (work / "large.log").open("wb") as file:
        file.writelines(b"%08d\n" % number for number in range(1_300_000))
    await tools.call_fails("read_file", {"path": "large.log"}, "limit_exceeded", "offset and limit")
    read = await tools.ok("read_file", {"path": "large.log", "offset": 1_299_999, "limit": 5})
    assert read == {"content": "01299998\n01299999\n", "size": 11_700_000, "totalLines": 1_300_000}
    await tools.call_fails("read_file", {"path": "large.log", "offset": 1}, "limit_exceeded", "lower limit")
    await tools.call_fails("read_file", {"path": "large.log", "encoding": "base64"}, "limit_exceeded", "11,700,000")


async def test_an_endless_line_is_not_loaded(tools: Any, work: Path) -> None:
    with (work / "line.txt").open("wb") as file:
        file.writelines(b"x" * 1_000_000 for _ in range(11))
    await tools.call_fails("read_file", {"path": "line.txt", "limit": 1}, "limit_exceeded")
    read = await tools.ok("read_file", {"path": "line.txt", "offset": 2})
    assert (read["content"], read["totalLines"]) == ("", 1)


@pytest.mark.spec("10.2")
@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\0\0", b"\xff\xfe\xfa", b"text\0more", bytes(range(256))])
async def test_a_binary_file_is_read_as_base64_only(tools: Any, work: Path, data: bytes) -> None:
    (work / "a.bin").write_bytes(data)
    await tools.call_fails("read_file", {"path": "a.bin"}, "execution_error", "base64", "a.bin")
    read = await tools.ok("read_file", {"path": "a.bin", "encoding": "base64"})
    assert base64.b64decode(read["content"]) == data
    assert read["size"] == len(data)


async def test_a_file_is_read_in_the_given_encoding(tools: Any, work: Path) -> None:
    (work / "a.txt").write_bytes("größer".encode("latin-1"))
    await tools.call_fails("read_file", {"path": "a.txt"}, "execution_error", "not utf-8")
    assert (await tools.ok("read_file", {"path": "a.txt", "encoding": "ISO-8859-1"}))["content"] == "größer"


@pytest.mark.parametrize(
    "encoding", ["klingon", "", "hex", "rot13", "zlib", "idna", "unicode_escape", "a\0b", "ü", "\ud800", "x" * 5000]
)
async def test_an_unknown_encoding_is_rejected(tools: Any, work: Path, encoding: str) -> None:
    (work / "a.txt").write_text("a")
    await tools.call_fails("read_file", {"path": "a.txt", "encoding": encoding}, "invalid_parameters", "encoding")
    write = {"path": "b.txt", "content": "", "encoding": encoding}
    await tools.call_fails("write_file", write, "invalid_parameters", "encoding")


async def test_offset_and_limit_with_base64_are_rejected(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("a")
    await tools.call_fails("read_file", {"path": "a.txt", "encoding": "base64", "offset": 1}, "invalid_parameters")


# Writing


@pytest.mark.spec("10.2")
async def test_write_file_creates_folders_and_writes_the_content(tools: Any, work: Path) -> None:
    write_result = await tools.ok("write_file", {"path": "new/deep/a.txt", "content": "ü\r\n\n$&"})
    assert write_result == {"bytesWritten": 7}
    assert (work / "new/deep/a.txt").read_bytes() == b"\xc3\xbc\r\n\n$&"
    await tools.ok("write_file", {"path": "a.bin", "content": "/wCA_w", "encoding": "base64"})
    assert (work / "a.bin").read_bytes() == b"\xff\x00\x80\xff"


async def test_write_file_keeps_the_mode_and_leaves_no_temporary_file(tools: Any, work: Path) -> None:
    script = work / "run.sh"
    script.write_text("old")
    script.chmod(0o751)
    await tools.ok("write_file", {"path": "run.sh", "content": "new"})
    assert script.read_text() == "new"
    assert stat.S_IMODE(script.stat().st_mode) == 0o751
    assert os.listdir(work) == ["run.sh"]


@pytest.mark.spec("10.2")
async def test_readers_never_see_a_partial_file(tools: Any, work: Path) -> None:
    path = work / "a.txt"
    path.write_text("a" * 200_000)
    finish_event = threading.Event()
    contents: set[str] = set()

    def read() -> None:
        while not finish_event.is_set():
            contents.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for letter in "bcdefgh":
        await tools.ok("write_file", {"path": "a.txt", "content": letter * 200_000})
    finish_event.set()
    reader.join()
    assert contents <= {letter * 200_000 for letter in "abcdefgh"}


async def test_a_failed_write_keeps_the_old_content(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("old")
    await tools.call_fails("write_file", {"path": "a.txt", "content": "\ud800"}, "invalid_parameters", "content")
    latin = {"path": "a.txt", "content": "漢", "encoding": "latin-1"}
    await tools.call_fails("write_file", latin, "invalid_parameters", "utf-8")
    broken = {"path": "a.txt", "content": "%%%", "encoding": "base64"}
    await tools.call_fails("write_file", broken, "invalid_parameters", "not base64")
    assert (work / "a.txt").read_text() == "old"
    assert os.listdir(work) == ["a.txt"]


@not_root
async def test_a_write_protected_file_is_not_replaced(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("old")
    (work / "a.txt").chmod(0o444)
    await tools.call_fails("write_file", {"path": "a.txt", "content": "new"}, "not_permitted", "write-protected")


@pytest.mark.parametrize("path", ["folder", "folder/", ".", "..", "new/", "folder/."])
async def test_writing_to_a_folder_is_an_error(tools: Any, work: Path, path: str) -> None:
    (work / "folder").mkdir()
    result = await tools.call("write_file", {"path": path, "content": "x"})
    assert not result.ok
    assert os.listdir(work) == ["folder"]


# Listing


@pytest.fixture
def tree(work: Path) -> Path:
    for path in (
        "a.ts",
        "b.tsx",
        "c.py",
        "xts",
        "src/d.ts",
        "src/deep/e.ts",
        "src/deep/f.py",
        ".git/config",
        ".h/g.ts",
    ):
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(path)
    return work


@pytest.mark.spec("10.2")
async def test_list_files_returns_sorted_entries(tools: Any, tree: Path) -> None:
    (tree / "link").symlink_to("a.ts")
    listing = await tools.ok("list_files", {"path": "."})
    assert names(listing) == [".git", ".h", "a.ts", "b.tsx", "c.py", "link", "src", "xts"]
    by_name = {entry["name"]: entry for entry in listing["files"]}
    assert by_name["a.ts"]["type"] == "file"
    assert by_name["a.ts"]["size"] == 4
    assert by_name["a.ts"]["modified"].endswith("Z")
    assert by_name["src"]["type"] == "directory"
    assert by_name["link"]["type"] == "symlink"


@pytest.mark.spec("10.2")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"pattern": "*.ts"}, ["a.ts"]),
        ({"pattern": "*.ts", "recursive": True}, [".h/g.ts", "a.ts", "src/d.ts", "src/deep/e.ts"]),
        ({"pattern": "**/*.py"}, ["c.py", "src/deep/f.py"]),
        ({"pattern": "src/*.ts"}, ["src/d.ts"]),
        ({"pattern": "./src/**"}, ["src/d.ts", "src/deep", "src/deep/e.ts", "src/deep/f.py"]),
        ({"pattern": "src/**/*.ts"}, ["src/d.ts", "src/deep/e.ts"]),
        ({"pattern": "*.{ts,tsx}"}, ["a.ts", "b.tsx"]),
        ({"pattern": "{src/d,a}.ts"}, ["a.ts", "src/d.ts"]),
        ({"pattern": "[!a].?s*"}, ["b.tsx"]),
        ({"pattern": "[^a].ts*"}, ["b.tsx"]),
        ({"pattern": ".*s"}, []),
        ({"pattern": "\\*.ts"}, []),
        ({"pattern": "{a.ts"}, []),
        ({"pattern": "nothing/**/x"}, []),
    ],
)
async def test_patterns_are_globs_not_regular_expressions(
    tools: Any, tree: Path, arguments: dict[str, Any], expected: list[str]
) -> None:
    listing = await tools.ok("list_files", {"path": ".", **arguments})
    assert names(listing) == expected


async def test_listed_paths_work_with_the_other_tools(tools: Any, tree: Path) -> None:
    for start in ("src", "./src/", str(tree / "src"), "src/deep/.."):
        listing = await tools.ok("list_files", {"path": start, "pattern": "f.py", "recursive": True})
        (path,) = names(listing)
        assert (await tools.ok("read_file", {"path": path}))["content"] == "src/deep/f.py"


async def test_a_recursive_listing_skips_links_and_git_folders(tools: Any, tree: Path, outer_folder: Path) -> None:
    (tree / "away").symlink_to(outer_folder)
    (tree / "loop").symlink_to(".")
    listing = await tools.ok("list_files", {"path": ".", "recursive": True})
    assert {"away", "loop", ".git", ".h/g.ts"} <= set(names(listing))
    assert not any("secret" in path or path.startswith(("loop/", ".git/")) for path in names(listing))


async def test_a_long_listing_is_truncated_and_marked(tools: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_ENTRIES", 5)
    for number in range(5):
        (work / f"{number}").touch()
    assert "truncated" not in await tools.ok("list_files", {"path": "."})
    (work / "5").touch()
    listing = await tools.ok("list_files", {"path": "."})
    assert (len(listing["files"]), listing["truncated"]) == (5, True)


async def test_a_deep_tree_needs_few_open_files(tools: Any, work: Path) -> None:
    folder = work
    for _ in range(300):
        folder = folder / "d"
        folder.mkdir()
    before = len(os.listdir("/dev/fd"))
    assert len((await tools.ok("list_files", {"path": ".", "recursive": True}))["files"]) == 300
    assert len(os.listdir("/dev/fd")) == before


@not_root
async def test_unreadable_folders_are_skipped(tools: Any, tree: Path) -> None:
    (tree / "src").chmod(0)
    try:
        assert "src" in names(await tools.ok("list_files", {"path": ".", "recursive": True}))
        await tools.call_fails("list_files", {"path": "src"}, "not_permitted")
    finally:
        (tree / "src").chmod(0o755)


@pytest.mark.parametrize("pattern", ["*a" * 400 + "b", "**/" * 300 + "b", "{a,b}" * 5 + "*" * 100 + "b"])
async def test_a_hostile_glob_takes_little_time(tools: Any, work: Path, pattern: str) -> None:
    (work / ("a" * 250)).mkdir()
    (work / ("a" * 250) / ("a" * 250)).touch()
    assert names(await tools.ok("list_files", {"path": ".", "pattern": pattern, "recursive": True})) == []


@pytest.mark.parametrize("pattern", ["{a,b}" * 30, "x" * 2000, "a\0"])
async def test_a_glob_with_too_many_alternatives_is_rejected(tools: Any, pattern: str) -> None:
    await tools.call_fails("list_files", {"path": ".", "pattern": pattern}, "invalid_parameters", "pattern: ")


async def test_names_of_any_bytes_are_listed(tools: Any, work: Path) -> None:
    try:
        os.close(os.open(os.fsencode(work) + b"/\xff\xfe.txt", os.O_CREAT | os.O_WRONLY))
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert names(await tools.ok("list_files", {"path": "."})) == ["\ufffd\ufffd.txt"]


async def test_listing_a_file_is_an_error(tools: Any, tree: Path) -> None:
    await tools.call_fails("list_files", {"path": "a.ts"}, "execution_error", "not a folder")
    await tools.call_fails("list_files", {"path": "nowhere"}, "execution_error", "not found")


# Deleting


@pytest.mark.spec("10.2")
async def test_delete_file_deletes_and_a_missing_file_is_an_error(tools: Any, work: Path) -> None:
    (work / "a.txt").touch()
    assert await tools.ok("delete_file", {"path": "a.txt"}) == {"deleted": True}
    assert not (work / "a.txt").exists()
    await tools.call_fails("delete_file", {"path": "a.txt"}, "execution_error", "not found")


async def test_delete_file_rejects_folders(tools: Any, work: Path) -> None:
    (work / "folder").mkdir()
    for path in ("folder", "folder/", ".", "folder/.."):
        await tools.call_fails("delete_file", {"path": path}, "execution_error", "folder")
    assert (work / "folder").is_dir()


@pytest.mark.spec("10.2")
async def test_deleting_a_link_keeps_its_target(tools: Any, work: Path, outer_folder: Path) -> None:
    (work / "out").symlink_to(outer_folder / "secret.txt")
    (work / "dangling").symlink_to("nothing")
    (work / "folder").symlink_to(outer_folder)
    for name in ("out", "dangling", "folder"):
        assert await tools.ok("delete_file", {"path": name}) == {"deleted": True}
    assert os.listdir(work) == []
    assert (outer_folder / "secret.txt").read_text() == "secret"


# Moving


@pytest.mark.spec("10.2")
async def test_move_file_creates_folders(tools: Any, work: Path) -> None:
    data = bytes(range(256))
    (work / "a.bin").write_bytes(data)
    assert await tools.ok("move_file", {"from": "a.bin", "to": "x/y/b.bin"}) == {"success": True}
    assert (work / "x/y/b.bin").read_bytes() == data
    assert not (work / "a.bin").exists()
    await tools.ok("move_file", {"from": "x/y", "to": "z"})
    assert (work / "z/b.bin").read_bytes() == data


async def test_move_file_overwrites_only_with_overwrite(tools: Any, work: Path) -> None:
    (work / "a").write_text("a")
    (work / "b").write_text("b")
    await tools.call_fails("move_file", {"from": "a", "to": "b"}, "execution_error", "'b' exists already", "overwrite")
    assert ((work / "a").read_text(), (work / "b").read_text()) == ("a", "b")
    await tools.ok("move_file", {"from": "a", "to": "b", "overwrite": True})
    assert (work / "b").read_text() == "a"
    assert os.listdir(work) == ["b"]


async def test_move_file_errors_name_the_problem(tools: Any, work: Path) -> None:
    (work / "a").write_text("a")
    (work / "folder").mkdir()
    await tools.call_fails("move_file", {"from": "nothing", "to": "x"}, "execution_error", "'nothing' not found")
    await tools.call_fails("move_file", {"from": "a", "to": "folder", "overwrite": True}, "execution_error", "folder")
    await tools.call_fails(
        "move_file", {"from": "folder", "to": "a", "overwrite": True}, "execution_error", "is a file"
    )
    await tools.call_fails("move_file", {"from": "a", "to": "new/"}, "invalid_parameters", "to")
    await tools.call_fails("move_file", {"from": "folder", "to": "folder/x/y"}, "invalid_parameters", "inside")
    await tools.call_fails("move_file", {"to": "x"}, "invalid_parameters", "from")
    await tools.call_fails("move_file", {"from": "a", "to": "b", "force": True}, "invalid_parameters", "force")
    assert (work / "a").read_text() == "a"


async def test_of_concurrent_moves_to_one_name_one_succeeds(tools: Any, work: Path) -> None:
    for number in range(8):
        (work / f"{number}").write_text(f"{number}")
    moves = [tools.call("move_file", {"from": f"{number}", "to": "one"}) for number in range(8)]
    results = await asyncio.gather(*moves)
    assert sum(result.ok for result in results) == 1
    assert sorted(path.read_text() for path in work.iterdir()) == [f"{number}" for number in range(8)]


@pytest.fixture
def elsewhere(work: Path) -> Iterator[Path]:
    """A folder on another file system."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == work.stat().st_dev:
        pytest.skip("there is no second file system here")
    folder = shm / f"toolspace-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.spec("10.2")
async def test_move_file_works_across_file_systems(tools: Any, work: Path, elsewhere: Path) -> None:
    data = os.urandom(3_000_000)
    (work / "a.bin").write_bytes(data)
    (work / "a.bin").chmod(0o640)
    (work / "link").symlink_to("a.bin")
    (work / "folder").mkdir()
    (elsewhere / "taken").write_text("taken")
    both = ToolContext(allowed_paths=[work, elsewhere])

    arguments = {"from": "a.bin", "to": str(elsewhere / "taken")}
    await tools.call_fails("move_file", arguments, "execution_error", "exists already", context=both)
    await tools.ok("move_file", {"from": "a.bin", "to": str(elsewhere / "b.bin")}, both)
    await tools.ok("move_file", {"from": "link", "to": str(elsewhere / "link")}, both)
    folder = {"from": "folder", "to": str(elsewhere / "folder")}
    await tools.call_fails("move_file", folder, "execution_error", "another file system", context=both)

    assert (elsewhere / "b.bin").read_bytes() == data
    assert stat.S_IMODE((elsewhere / "b.bin").stat().st_mode) == 0o640
    assert os.readlink(elsewhere / "link") == "a.bin"
    assert sorted(os.listdir(elsewhere)) == ["b.bin", "link", "taken"]
    assert os.listdir(work) == ["folder"]


# File info


@pytest.mark.spec("10.2")
async def test_get_file_info_describes_files_folders_and_missing_paths(tools: Any, work: Path) -> None:
    (work / "a.txt").write_text("abc")
    (work / "link").symlink_to("a.txt")
    (work / "dangling").symlink_to("nothing")
    for name in ("a.txt", "link"):
        info = await tools.ok("get_file_info", {"path": name})
        assert (info["exists"], info["size"], info["type"]) == (True, 3, "file")
        assert info["modified"].endswith("Z")
    assert (await tools.ok("get_file_info", {"path": "."}))["type"] == "directory"
    for name in ("nothing", "no/where", "a.txt/b", "dangling"):
        info = await tools.ok("get_file_info", {"path": name})
        assert info == {"exists": False, "size": None, "modified": None, "type": None}


# Allowed paths


async def attempt(tools: Any, action: str, path: str, context: ToolContext | None = None) -> Any:
    tool = "move_file" if action.startswith("move") else action
    return await tools.call(tool, TOUCHING[action](path), context)


@pytest.mark.spec("10.2")
@pytest.mark.parametrize("action", TOUCHING)
async def test_paths_outside_the_allowed_folders_are_refused(
    tools: Any, work: Path, outer_folder: Path, action: str
) -> None:
    (work / "mine.txt").write_text("secret")
    (work / "file-link").symlink_to(outer_folder / "secret.txt")
    (work / "folder-link").symlink_to(outer_folder)
    (work / "relative-link").symlink_to("../outside")
    (work / "chain").symlink_to("folder-link")
    (work / "new-link").symlink_to(outer_folder / "new.txt")
    (work / "sub").mkdir()
    paths = [
        str(outer_folder / "secret.txt"),
        "../outside/secret.txt",
        "sub/../../outside/secret.txt",
        f"{work}/../outside/secret.txt",
        f"//{outer_folder}/secret.txt",
        "folder-link/secret.txt",
        "relative-link/secret.txt",
        "chain/secret.txt",
        "folder-link/../outside/secret.txt",
        "sub/../folder-link/new.txt",
        f"{outer_folder}/new/new.txt",
        f"{outer_folder.parent}/work-evil/new.txt",
        f"/proc/self/cwd/../{outer_folder.name}/secret.txt",
        "/etc/passwd",
        f"{outer_folder}",
    ]
    if action not in ("delete_file", "move from", "move to"):  # These take the link itself, which is inside.
        paths += ["file-link", "folder-link", "new-link"]
    for path in paths:
        result = await attempt(tools, action, path)
        assert result.error_kind == "not_permitted", (path, result)
        assert "allowed folders" in result.error
    assert os.listdir(outer_folder) == ["secret.txt"]
    assert (outer_folder / "secret.txt").read_text() == "secret"
    assert (work / "mine.txt").read_text() == "secret"


async def test_a_refusal_does_not_reveal_whether_the_file_exists(tools: Any, outer_folder: Path) -> None:
    existing_file_error = await tools.call_fails(
        "get_file_info", {"path": f"{outer_folder}/secret.txt"}, "not_permitted"
    )
    missing_file_error = await tools.call_fails(
        "get_file_info", {"path": f"{outer_folder}/absent.txt"}, "not_permitted"
    )
    assert existing_file_error.replace("secret", "absent") == missing_file_error


@pytest.mark.spec("10.2")
async def test_links_and_dots_that_stay_inside_work(tools: Any, work: Path) -> None:
    (work / "sub").mkdir()
    (work / "sub/a.txt").write_text("inside")
    (work / "file").symlink_to("sub/a.txt")
    (work / "folder").symlink_to(work / "sub")
    (work / "sub/up").symlink_to("../folder")
    for path in ("sub/../sub/a.txt", "./sub//a.txt", "file", "folder/a.txt", "sub/up/up/a.txt", f"{work}/folder/a.txt"):
        assert (await tools.ok("read_file", {"path": path}))["content"] == "inside"
    await tools.ok("write_file", {"path": "file", "content": "through the link"})
    assert (work / "file").is_symlink()
    assert (work / "sub/a.txt").read_text() == "through the link"
    (work / "to-be").symlink_to("sub/new.txt")
    await tools.ok("write_file", {"path": "to-be", "content": "new"})
    assert (work / "sub/new.txt").read_text() == "new"


async def test_a_link_to_another_allowed_folder_works(tools: Any, work: Path, outer_folder: Path) -> None:
    (work / "link").symlink_to(outer_folder)
    both = ToolContext(allowed_paths=[work, str(outer_folder)])
    assert (await tools.ok("read_file", {"path": "link/secret.txt"}, both))["content"] == "secret"


async def test_an_allowed_folder_may_be_a_link(tools: Any, work: Path, tmp_path: Path) -> None:
    (work / "a.txt").write_text("a")
    (tmp_path / "alias").symlink_to(work)
    alias_context = ToolContext(allowed_paths=[tmp_path / "alias"])
    for path in ("a.txt", f"{tmp_path}/alias/a.txt", f"{work}/a.txt"):
        assert (await tools.ok("read_file", {"path": path}, alias_context))["content"] == "a"


async def test_default_is_the_current_folder_and_an_empty_list_allows_nothing(work: Path, outer_folder: Path) -> None:
    from toolspace.builtin.files import read_file
    from toolspace.errors import ToolPermissionError

    (work / "a.txt").write_text("a")
    assert read_file(path="a.txt", context=ToolContext())["content"] == "a"
    with pytest.raises(ToolPermissionError):
        read_file(path=f"{outer_folder}/secret.txt", context=ToolContext())
    with pytest.raises(ToolPermissionError, match="none"):
        read_file(path="a.txt", context=ToolContext(allowed_paths=[]))


async def test_a_single_file_can_be_allowed(tools: Any, outer_folder: Path) -> None:
    (outer_folder / "other.txt").touch()
    only = ToolContext(allowed_paths=[outer_folder / "secret.txt"])
    assert (await tools.ok("read_file", {"path": f"{outer_folder}/secret.txt"}, only))["content"] == "secret"
    await tools.ok("write_file", {"path": f"{outer_folder}/secret.txt", "content": "new"}, only)
    await tools.call_fails("read_file", {"path": f"{outer_folder}/other.txt"}, "not_permitted", context=only)
    await tools.call_fails("list_files", {"path": f"{outer_folder}"}, "not_permitted", context=only)
    await tools.call_fails("read_file", {"path": f"{outer_folder}/secret.txt/x"}, "execution_error", context=only)


async def test_a_write_creates_a_missing_allowed_folder(tools: Any, tmp_path: Path) -> None:
    later = ToolContext(allowed_paths=[tmp_path / "later"])
    await tools.call_fails("read_file", {"path": f"{tmp_path}/later/a"}, "execution_error", "not found", context=later)
    await tools.ok("write_file", {"path": f"{tmp_path}/later/a", "content": "a"}, later)
    assert (tmp_path / "later/a").read_text() == "a"


async def test_an_allowed_folder_cannot_be_replaced_by_a_link_to_elsewhere(
    tools: Any, work: Path, outer_folder: Path
) -> None:
    (work / "inner").mkdir()
    (work / "evil").symlink_to(outer_folder)
    both = ToolContext(allowed_paths=[work, work / "inner"])
    move_away = {"from": "inner", "to": "old"}
    await tools.call_fails("move_file", move_away, "not_permitted", "allowed folders", context=both)
    (work / "inner").rmdir()
    move_over = {"from": "evil", "to": "inner"}
    await tools.call_fails("move_file", move_over, "not_permitted", "allowed folders", context=both)


@pytest.mark.parametrize(
    "path", ["", " ", "a\0b", "\ud800", "~", "~/a.txt", "x" * 300, "x/" * 3000, "a/" + "x" * 300 + "/b"]
)
@pytest.mark.parametrize("action", TOUCHING)
async def test_an_invalid_path_is_rejected(tools: Any, work: Path, action: str, path: str) -> None:
    (work / "mine.txt").write_text("mine")
    (work / "a").mkdir()
    result = await attempt(tools, action, path)
    assert result.error_kind == "invalid_parameters", result
    assert sorted(os.listdir(work)) == ["a", "mine.txt"]


@pytest.mark.parametrize("action", ["read_file", "write_file", "edit_file", "grep_files", "move from", "list_files"])
async def test_pipes_sockets_and_devices_are_rejected_without_waiting(tools: Any, work: Path, action: str) -> None:
    os.mkfifo(work / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    try:
        for path in ("pipe", "socket"):
            result = await attempt(tools, action, path)
            assert result.error_kind == "execution_error", result
            assert path in result.error
    finally:
        listener.close()
    device = await attempt(tools, action, "/dev/zero", ToolContext(allowed_paths=["/dev", work]))
    assert device.error_kind == "execution_error"
    assert "device" in device.error


async def test_circular_links_are_refused(tools: Any, work: Path) -> None:
    (work / "a").symlink_to("b")
    (work / "b").symlink_to("a")
    for action in ("read_file", "write_file", "list_files", "get_file_info"):
        result = await attempt(tools, action, "a")
        assert result.error_kind == "not_permitted", result
        assert "circular" in result.error


@quick
@given(
    st.lists(
        st.sampled_from(["..", ".", "", "sub", "out", "up", "self", "a.txt", "secret.txt", "outside", "work"]),
        max_size=8,
    ).map("/".join),
    st.booleans(),
)
@example("out/../outside/secret.txt", False)
async def test_no_path_accesses_files_outside(
    tools: Any, work: Path, outer_folder: Path, path: str, absolute: bool
) -> None:
    (work / "sub").mkdir(exist_ok=True)
    for name, target in (("out", "../outside"), ("up", ".."), ("self", ".")):
        for folder in (work, work / "sub"):
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(target)
    path = f"{work}/{path}" if absolute else path
    read = await tools.call("read_file", {"path": path})
    assert not read.ok or read.result["content"] != "secret"
    await tools.call("write_file", {"path": path, "content": "x"})
    assert os.listdir(outer_folder) == ["secret.txt"]
    assert (outer_folder / "secret.txt").read_text() == "secret"
    assert set(os.listdir(work.parent)) <= {"work", "outside", "state", "memory"}


@pytest.mark.spec("10.2")
@pytest.mark.parametrize("action", ["read_file", "write_file", "list_files", "edit_file", "grep_files", "delete_file"])
async def test_a_link_swapped_in_during_a_call_is_not_followed(
    tools: Any, work: Path, outer_folder: Path, action: str
) -> None:
    """Swaps a folder and a link to the outside as fast as possible while a tool walks through them."""
    inner_folder = work / "sub"
    inner_folder.mkdir()
    (inner_folder / "secret.txt").write_text("inside")
    (work / "spare").symlink_to(outer_folder)
    finish_event = threading.Event()

    def swap() -> None:
        while not finish_event.is_set():
            os.rename(inner_folder, work / "held")
            try:
                os.rename(work / "spare", inner_folder)
                os.rename(inner_folder, work / "spare")
                os.rename(work / "held", inner_folder)
            except OSError:  # The tool made the folder that it missed.
                shutil.rmtree(work / "held")

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(100):
            result = await attempt(tools, action, "sub" if action == "list_files" else "sub/secret.txt")
            if action == "read_file" and result.ok:
                assert result.result["content"] == "inside"
            if action in ("list_files", "grep_files") and result.ok:
                assert "outside" not in str(result.result)
                assert result.result.get("matches", []) == []
    finally:
        finish_event.set()
        swapper.join()
    assert os.listdir(outer_folder) == ["secret.txt"]
    assert (outer_folder / "secret.txt").read_text() == "secret"


async def test_a_cancelled_call_stops_reading(work: Path) -> None:
    from toolspace.errors import ToolCanceledError

    class Canceled:
        id = "call"
        canceled = True

    context = ToolContext(allowed_paths=[work])
    context.handle = Canceled()  # type: ignore[assignment]
    (work / "a.txt").write_text("a")
    for action in ("read_file", "write_file", "list_files", "grep_files"):
        function = next(file_tool for file_tool in files_module.file_tools if file_tool.name == action)
        name = "call" if action == "grep_files" else "context"
        with pytest.raises(ToolCanceledError):
            function(**TOUCHING[action]("." if action in ("list_files", "grep_files") else "a.txt"), **{name: context})
    assert (work / "a.txt").read_text() == "a"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("write_file", {"path": "conf/toolspace.yaml", "content": "tools: {}"}),
        ("edit_file", {"path": "conf/toolspace.yaml", "edits": [{"old": "a", "new": "b"}]}),
        ("delete_file", {"path": "conf/toolspace.yaml"}),
        ("move_file", {"from": "conf/toolspace.yaml", "to": "x"}),
        ("move_file", {"from": "other.txt", "to": "conf/toolspace.yaml", "overwrite": True}),
        ("move_file", {"from": "conf", "to": "gone"}),
        ("write_file", {"path": "link.yaml", "content": "tools: {}"}),
    ],
)
async def test_tools_cannot_change_configuration_files(work: Path, name: str, arguments: dict[str, Any]) -> None:
    (work / "conf").mkdir()
    protected_file = work / "conf" / "toolspace.yaml"
    protected_file.write_text("a")
    (work / "other.txt").write_text("o")
    (work / "link.yaml").symlink_to(protected_file)
    context = ToolContext(allowed_paths=[work], protected_paths=[protected_file])
    async with Toolspace(tools=file_tools, context=context) as ts:
        result = await ts.call(name, arguments)
        assert (await ts.call("read_file", {"path": "conf/toolspace.yaml"})).ok
    assert result.error_kind == "not_permitted"
    assert protected_file.read_text() == "a"
