"""`grep_files`: matches, skipped files, and hostile patterns."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolspace.builtin import grep
from toolspace.core.tool_context import ToolContext

quick = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def places(result: dict[str, Any]) -> list[tuple[str, int]]:
    return [(match["path"], match["line"]) for match in result["matches"]]


@pytest.mark.spec("10.2")
async def test_matches_are_lines_sorted_by_path(tools: Any, work: Path) -> None:
    write(work, {"b.py": "x\nneedle 1\r\n", "a/c.py": "needle 2", "a.txt": "nothing"})
    assert await tools.ok("grep_files", {"pattern": r"needle \d"}) == {
        "matches": [
            {"path": "a/c.py", "line": 1, "text": "needle 2"},
            {"path": "b.py", "line": 2, "text": "needle 1"},
        ],
        "truncated": False,
    }


@pytest.mark.spec("10.2")
async def test_a_search_accepts_a_folder_or_file_a_glob_and_ignore_case(tools: Any, work: Path) -> None:
    write(work, {"a.py": "Needle", "src/b.ts": "needle", "src/deep/c.py": "NEEDLE"})
    every = {"pattern": "needle", "ignoreCase": True}
    assert places(await tools.ok("grep_files", every)) == [("a.py", 1), ("src/b.ts", 1), ("src/deep/c.py", 1)]
    assert places(await tools.ok("grep_files", {"pattern": "needle"})) == [("src/b.ts", 1)]
    assert places(await tools.ok("grep_files", {**every, "path": "src"})) == [("src/b.ts", 1), ("src/deep/c.py", 1)]
    assert places(await tools.ok("grep_files", {**every, "path": "a.py"})) == [("a.py", 1)]
    assert places(await tools.ok("grep_files", {**every, "glob": "*.py"})) == [("a.py", 1), ("src/deep/c.py", 1)]
    assert places(await tools.ok("grep_files", {**every, "glob": "src/*.{ts,py}"})) == [("src/b.ts", 1)]


@pytest.mark.spec("10.2")
async def test_context_lines_are_returned(tools: Any, work: Path) -> None:
    write(work, {"a.txt": "1\n2\nx3\nx4\n5\n6"})
    result = await tools.ok("grep_files", {"pattern": "x", "context": 2})
    assert result["matches"] == [
        {"path": "a.txt", "line": 3, "text": "x3", "before": ["1", "2"], "after": ["x4", "5"]},
        {"path": "a.txt", "line": 4, "text": "x4", "before": ["2", "x3"], "after": ["5", "6"]},
    ]
    for wrong in (-1, 1000):
        await tools.call_fails("grep_files", {"pattern": "x", "context": wrong}, "invalid_parameters", "context")


@pytest.mark.spec("10.2")
async def test_binary_files_git_files_and_links_are_skipped(tools: Any, work: Path, tmp_path: Path) -> None:
    write(work, {"a.txt": "needle", ".git/config": "needle", "sub/.git": "needle", ".hidden": "needle"})
    (work / "b.bin").write_bytes(b"needle\0needle")
    (work / "latin.txt").write_bytes(b"\xff needle")
    write(tmp_path / "outside", {"secret.txt": "needle"})
    (work / "out").symlink_to(tmp_path / "outside")
    (work / "out.txt").symlink_to(tmp_path / "outside/secret.txt")
    (work / "loop").symlink_to(".")
    os.mkfifo(work / "pipe")
    result = await tools.ok("grep_files", {"pattern": "needle"})
    assert places(result) == [(".hidden", 1), ("a.txt", 1), ("latin.txt", 1)]
    await tools.call_fails("grep_files", {"pattern": "x", "path": "out"}, "not_permitted", "out")
    await tools.call_fails("grep_files", {"pattern": "x", "path": "nowhere"}, "execution_error", "not found")


IGNORED = {
    ".gitignore": "\n".join(
        [
            "# comment",
            "*.log",
            "!keep.log",
            "build/",
            "/top.txt",
            "docs/*.md",
            "**/cache/**",
            "a/**/z.txt",
            "spaced\\ ",
            "trailing   ",
            "\\#hash",
            "\\!bang",
            "[ab].tmp",
            "[!c].bak",
            "wild?.x",
            "/only/dir/",
            "",
        ]
    ),
    "app.log": "",
    "keep.log": "",
    "build/out.txt": "",
    "src/build/out.txt": "",
    "other/build": "",
    "top.txt": "",
    "src/top.txt": "",
    "docs/a.md": "",
    "docs/deep/a.md": "",
    "x/cache/y": "",
    "cache/y/z": "",
    "a/z.txt": "",
    "a/b/c/z.txt": "",
    "spaced ": "",
    "trailing": "",
    "#hash": "",
    "!bang": "",
    "a.tmp": "",
    "c.tmp": "",
    "a.bak": "",
    "c.bak": "",
    "wild1.x": "",
    "wild12.x": "",
    "only/dir/x": "",
    "sub/only/dir/x": "",
    "nested/.gitignore": "!*.log\n/app.log\nlocal\n",
    "nested/app.log": "",
    "nested/b.log": "",
    "nested/deep/app.log": "",
    "nested/deep/local": "",
    "local": "",
}


def unignored_by_git(folder: Path) -> list[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True, env=environment)
    command = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    git_output = subprocess.run(command, cwd=folder, check=True, env=environment, capture_output=True).stdout
    return sorted(path for path in git_output.decode().split("\0") if path)


@pytest.mark.spec("10.2")
@pytest.mark.skipif(shutil.which("git") is None, reason="git says what is right here")
async def test_gitignore_rules_match_git(tools: Any, work: Path) -> None:
    write(
        work, {path: text + "\nneedle\n" if path.endswith(".gitignore") else "needle" for path, text in IGNORED.items()}
    )
    expected = unignored_by_git(work)
    result = await tools.ok("grep_files", {"pattern": "needle"})
    assert sorted(path for path, _ in places(result)) == expected
    assert {"keep.log", "nested/b.log", "src/top.txt", "docs/deep/a.md"} <= set(expected)


async def test_gitignore_files_apply_up_to_the_root_of_the_repository(tools: Any, work: Path) -> None:
    write(work, {".gitignore": "*.far\n", "repo/.git/HEAD": "", "repo/.gitignore": "*.near\nskip/\n"})
    for name in ("repo/src/a.txt", "repo/src/a.near", "repo/src/a.far", "repo/skip/b.txt"):
        write(work, {name: "needle"})
    src = await tools.ok("grep_files", {"pattern": "needle", "path": "repo/src"})
    assert places(src) == [("repo/src/a.far", 1), ("repo/src/a.txt", 1)]
    skipped = await tools.ok("grep_files", {"pattern": "needle", "path": "repo/skip"})
    assert places(skipped) == [("repo/skip/b.txt", 1)]
    file = await tools.ok("grep_files", {"pattern": "needle", "path": "repo/src/a.near"})
    assert places(file) == [("repo/src/a.near", 1)]


async def test_a_gitignore_file_has_a_limited_number_of_lines(tools: Any, work: Path) -> None:
    write(work, {".gitignore": "first.txt\n" + "#\n" * 1_998 + "2000th.txt\n2001st.txt\n" + "z\n" * 50_000})
    write(work, dict.fromkeys(("first.txt", "2000th.txt", "2001st.txt"), "needle"))
    result = await tools.ok("grep_files", {"pattern": "needle"})
    assert places(result) == [("2001st.txt", 1)]


async def test_a_long_line_of_a_gitignore_file_is_no_rule(tools: Any, work: Path) -> None:
    write(work, {".gitignore": "*" * 1_001 + "\n" + "*" * 994 + "b.txt\n", "a.txt": "needle", "b.txt": "needle"})
    assert places(await tools.ok("grep_files", {"pattern": "needle"})) == [("a.txt", 1)]


async def test_the_rules_of_nested_gitignore_files_are_limited_together(tools: Any, work: Path) -> None:
    rules = "z\n" * 1_999
    write(work, {".gitignore": "*.log\n" + rules, "a/.gitignore": rules, "a/b/.gitignore": "*.tmp\n" + rules})
    for folder in ("", "a/", "a/b/"):
        write(work, {f"{folder}x.log": "needle", f"{folder}x.tmp": "needle"})
    result = await tools.ok("grep_files", {"pattern": "needle"})
    assert places(result) == [("a/b/x.log", 1), ("a/x.tmp", 1), ("x.tmp", 1)]


@pytest.mark.spec("10.2")
@pytest.mark.parametrize(
    ("pattern", "position"),
    [
        ("(a", 0),
        ("a)", 1),
        ("*a", 0),
        ("[a", 0),
        ("[z-a]", None),
        ("a{2,1}", 2),
        ("\\", 0),
        ("(?P<x>", 0),
        (r"\p{No}[", 6),
    ],
)
async def test_an_invalid_pattern_is_rejected_with_its_position(tools: Any, pattern: str, position: int | None) -> None:
    position_text = "at position" if position is None else f"at position {position}"
    await tools.call_fails("grep_files", {"pattern": pattern}, "invalid_parameters", "pattern", position_text)


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "x" * 1001,
        "((a{1000}){1000}){1000}",
        "(?:(?:a|bc){1000}){1000}",
        "a{4999999}",
        "(?R)",
        "(?:(?R))*",
        "(?P<x>a(?&x)?b)",
        "(" * 100 + "a" + ")" * 100,
        "(?x) a # comment ((",
        "a{99999999999999999999}",
    ],
)
async def test_a_pattern_that_needs_too_much_memory_is_rejected(tools: Any, work: Path, pattern: str) -> None:
    write(work, {"a.txt": "aaaa"})
    await tools.call_fails("grep_files", {"pattern": pattern}, "invalid_parameters", "pattern")


@pytest.mark.spec("10.2")
@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(x|xx)+$", "^(([x])+.)+[A-Z]([a-z])+$"])
async def test_a_slow_pattern_is_stopped(tools: Any, work: Path, pattern: str) -> None:
    write(work, {"a.txt": "x" * 5000 + "!"})
    await tools.call_fails("grep_files", {"pattern": pattern}, "execution_error", "line 1 of 'a.txt'", "simpler")


async def test_a_slow_match_on_a_very_long_line_is_skipped(
    tools: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(work, {"bundle.js": "x" * 20_000 + "!", "z.txt": "xxy"})
    result = await tools.ok("grep_files", {"pattern": "(x+x+)+y"})
    assert places(result) == [("z.txt", 1)]
    assert result["truncated"] is True


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\p{Lu}\p{Ll}+", "Ünder"),
        ("[[:alpha:]]+", "abc"),
        ("[[a]", "["),
        ("a{e<=1}", "a{e<=1}"),
        ("${name}", ""),
        (r"\{x\}", "{x}"),
        ("[]a]", "]"),
        ("[^]a]", "b"),
        (r"[\]a]b", "]b"),
        ("[a&&b]", "&"),
        ("[+--]", ","),
        (r"\d{4}-\d{2}(?#note)", "2026-01"),
        ("(?i)NEEDLE", "needle"),
        (r"(?<=a)b(?!c)", "ab"),
        (r"(\w)\1", "oo"),
        (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "123e4567-e89b-12d3-a456-426614174000"),
    ],
)
async def test_patterns_have_python_semantics(tools: Any, work: Path, pattern: str, text: str) -> None:
    write(work, {"a.txt": text or "no match"})
    result = await tools.ok("grep_files", {"pattern": pattern})
    assert bool(result["matches"]) == bool(text)


@quick
@given(
    st.lists(
        st.sampled_from(
            [
                "a",
                "b",
                ".",
                "*",
                "+",
                "?",
                "|",
                "(",
                ")",
                "(?:",
                "[",
                "]",
                "[^",
                "-",
                "{2}",
                "{1,3}",
                "{",
                "}",
                "\\",
                "&&",
            ]
        ),
        min_size=1,
        max_size=9,
    ).map("".join),
    st.text(st.sampled_from("ab-&{}[]\n\r"), max_size=8),
)
async def test_any_pattern_is_rejected_or_matches_like_python(tools: Any, work: Path, pattern: str, text: str) -> None:
    (work / "a.txt").write_bytes(text.encode())
    result = await tools.call("grep_files", {"pattern": pattern})
    try:
        python = re.compile(pattern)
        lines = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []
        expected = [number for number, line in enumerate(lines, 1) if python.search(line)]
    except re.error:
        assert result.error_kind == "invalid_parameters"
        return
    except FutureWarning:
        return
    assert result.ok, result.error
    assert [match["line"] for match in result.result["matches"]] == expected


@pytest.mark.spec("10.2")
async def test_long_lines_and_many_matches_are_truncated(
    tools: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(work, {"long.txt": "x" * 2000 + "needle" + "y" * 2000})
    (match,) = (await tools.ok("grep_files", {"pattern": "needle"}))["matches"]
    assert "needle" in match["text"]
    assert len(match["text"]) <= grep.MAX_LINE_LENGTH + 2
    assert match["text"].startswith("…")
    assert match["text"].endswith("…")

    write(work, {"many.txt": "pin\n" * grep.MAX_MATCHES})
    exact = await tools.ok("grep_files", {"pattern": "pin"})
    assert (len(exact["matches"]), exact["truncated"]) == (grep.MAX_MATCHES, False)
    write(work, {"more.txt": "pin\n"})
    more = await tools.ok("grep_files", {"pattern": "pin"})
    assert (len(more["matches"]), more["truncated"]) == (grep.MAX_MATCHES, True)


async def test_the_total_size_of_all_matches_is_limited(tools: Any, work: Path) -> None:
    write(work, {"a.txt": ("x" * 400 + "\n") * 5000})
    result = await tools.ok("grep_files", {"pattern": "x", "context": 50})
    size = sum(len(m["text"]) + sum(map(len, m["before"] + m["after"])) for m in result["matches"])
    assert result["truncated"] is True
    assert grep.MAX_MATCH_CHARACTERS / 2 < size < grep.MAX_MATCH_CHARACTERS * 20


async def test_large_files_are_skipped_unless_named(tools: Any, work: Path) -> None:
    with (work / "large.log").open("wb") as file:
        file.writelines(b"%0999d\n" % number for number in range(11_000))
        file.write(b"needle\n")
    assert places(await tools.ok("grep_files", {"pattern": "needle"})) == []
    named_file_result = await tools.ok("grep_files", {"pattern": "needle", "path": "large.log"})
    assert places(named_file_result) == [("large.log", 11_001)]


async def test_a_very_large_line_counts_as_one(tools: Any, work: Path) -> None:
    (work / "a.txt").write_bytes(b"x" * 3_000_000 + b"\nneedle")
    result = await tools.ok("grep_files", {"pattern": "needle"})
    assert places(result) == [("a.txt", 2)]
    assert result["truncated"] is True


async def test_a_search_stays_in_the_allowed_folders(tools: Any, work: Path, tmp_path: Path) -> None:
    write(tmp_path, {"secret.txt": "needle", ".gitignore": "*\n"})
    write(work, {"a.txt": "needle"})
    await tools.call_fails("grep_files", {"pattern": "needle", "path": ".."}, "not_permitted")
    result = await tools.ok("grep_files", {"pattern": "needle", "path": str(work)})
    assert places(result) == [(f"{work}/a.txt", 1)]
    empty_context = ToolContext(allowed_paths=[])
    assert await tools.ok("grep_files", {"pattern": "needle"}, context=empty_context) == {
        "matches": [],
        "truncated": False,
    }
    await tools.call_fails("grep_files", {"pattern": "needle", "path": "."}, "not_permitted", context=empty_context)
    elsewhere = ToolContext(allowed_paths=[tmp_path / "other"])
    write(tmp_path / "other", {"b.txt": "needle"})
    result = await tools.ok("grep_files", {"pattern": "needle"}, context=elsewhere)
    assert places(result) == [(f"{tmp_path}/other/b.txt", 1)]
