#!/usr/bin/env python3
"""Reports names that a reader has to guess at.

These are variables, parameters, attributes and functions that are a bare participle, pronoun or adverb (`found`,
`said`, `one`, `where`), and public classes whose name exists twice under `src`. A name of several words is never
reported: `matching_rows` says what it holds, `found` does not.

Used by `make check`. Usage: plain_names.py [FOLDER…]; exits with 1 if it reports anything.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import sys
from collections.abc import Iterator

DEFAULT_FOLDERS = ("src", "tests", "benchmarks", "examples", "tools")

BARE_WORDS = """
    found known given kept said begun began taken made told heard seen asked left gone held shown meant had became came
    went thought sent brought bought built caught chosen drawn driven fallen felt forgotten got gotten grown led lent
    lost met paid risen sought sold spent spoken stood stuck taught thrown understood woken won worn written done
    one ones this that these those other others another mine theirs ours yours whose who whom whoever what whatever
    which whichever where wherever when here there everywhere nowhere everyone everybody nobody somebody someone anyone
    everything nothing something anything own meanwhile again already still yet without within
    inside outside above below beside between beyond near around along away over under upon whole
"""
"""Irregular participles and past tenses, pronouns, adverbs and prepositions. A rule finds words in -ed and -ing."""
STATES = """
    allowed cached cancelled canceled closed completed connected deleted denied deprecated disabled enabled encoded
    decoded delivered executed expected expired failed finished fixed installed nested parsed required retired shared
    done skipped started stopped supported truncated unused used
"""
"""Participles that APIs, protocols and the standard library use as names of states."""
NOUNS = """
    embed feed seed speed string ring ping setting settings mapping encoding warning warnings heading reasoning
    embedding sampling streaming listing pending missing remaining padding spelling binding bindings meaning thing
    sibling ending
"""
"""Words that only look like participles."""
BARE = frozenset(BARE_WORDS.split())
ALLOWED = frozenset(STATES.split()) | frozenset(NOUNS.split())


def is_bare(name: str) -> bool:
    """Whether a name is a single word that says nothing about what it holds."""
    word = name.strip("_")
    if not word.islower() or "_" in word or word in ALLOWED:
        return False
    return word in BARE or (len(word) > 4 and word.endswith(("ed", "ing")))


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that the code binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname, node.lineno) for alias in aliases if alias.asname)
            case _:
                pass


def main(folders: list[str]) -> int:
    reports: list[str] = []
    classes: dict[str, list[str]] = collections.defaultdict(list)
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            reports += [
                f"{path}:{line}: {name}" for name, line in sorted(set(bindings(tree)), key=str) if is_bare(name)
            ]
            if pathlib.Path(folder).name != "tests":
                for node in tree.body:
                    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                        classes[node.name].append(str(path))
    duplicates = {name: paths for name, paths in classes.items() if len(paths) > 1 and "src" in folders}
    for report in reports:
        print(report)
    for name, paths in sorted(duplicates.items()):
        print(f"class {name} exists more than once: {', '.join(paths)}")
    print(f"{len(reports)} bare participles or pronouns, {len(duplicates)} public class names that exist twice")
    return 1 if reports or duplicates else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [folder for folder in DEFAULT_FOLDERS if pathlib.Path(folder).is_dir()]))
