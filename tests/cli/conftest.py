"""Runs the real command in a process of its own, in a small project with tools of every kind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

TOOLS = '''
import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any, Literal

from toolspace import ToolContext, tool


@tool
def echo(
    n: int = 0,
    x: float = 0.0,
    flag: bool = False,
    text: str = "",
    tags: list[str] = [],
    numbers: list[int] = [],
    data: dict[str, Any] = {},
    anything: Any = None,
    maybe: int | None = None,
) -> dict[str, Any]:
    """Returns its arguments.

    Args:
        n: A whole number.
    """
    given = locals()
    return {key: value for key, value in given.items() if value not in (0, 0.0, False, "", [], {}, None)}


@tool
def give(what: Literal["null", "false", "zero", "empty", "big", "escapes", "surrogate"]) -> Any:
    """Returns an unusual result."""
    return {
        "null": None,
        "false": False,
        "zero": 0,
        "empty": "",
        "big": "head " + "x" * 200_000 + " tail",
        "escapes": "\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07",
        "surrogate": "a\\ud800b",
    }[what]


@tool
def noisy() -> int:
    """Prints, and starts a program that prints."""
    print("from the tool")
    os.system("echo from its child")
    return 7


@tool
def fails(secret: str = "") -> None:
    """Fails.

    The second paragraph is not listed.
    """
    raise ValueError("it broke")


@tool(queue="slow", cache=60)
async def lines(count: int = 3):
    """Yields line after line."""
    for number in range(count):
        yield f"line {number}\\n"


@tool
async def endless_lines():
    """Yields lines forever."""
    try:
        while True:
            yield "line\\n"
            await asyncio.sleep(0)
    finally:
        Path("stopped").touch()


@tool
async def values(count: int = 2):
    """Yields value after value."""
    for number in range(count):
        yield {"number": number}


@tool
async def announced(context: ToolContext) -> str:
    """Emits a partial value that is not part of its result."""
    context.emit_partial("working on it\\n")
    return "the result"


@tool
async def waits(context: ToolContext) -> None:
    """Waits until it is cancelled, and cleans up."""
    context.report_progress(1, 4, "still here")
    print("started", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        Path("cleaned").touch()


@tool
def stuck() -> None:
    """Blocks its thread forever."""
    print("started", flush=True)
    threading.Event().wait()


@tool
async def blocks() -> None:
    """Blocks the event loop."""
    print("started", flush=True)
    threading.Event().wait()
'''

CONFIG = """\
functions: [./tools.py]
defaults:
  toolTimeout: 20s
queues:
  slow: {concurrent: 2}
tools:
  aliases: {cat: read_file, less: cat}
  toolsDenied: [delete_file]
  overrides:
    echo:
      timeout: 5s
      maxBytes: 5000
    get_*: {enabled: false}
"""

Run = subprocess.CompletedProcess[str]
Toolspace = Callable[..., Run]


def environment(**changes: str) -> Mapping[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "", **changes}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "tools.py").write_text(TOOLS)
    (folder / "toolspace.yaml").write_text(CONFIG)
    return folder


def bash(script: str, folder: Path) -> Run:
    """Runs a bash script in which `$0` is this Python."""
    return subprocess.run(
        ["bash", "-c", script, sys.executable],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


@pytest.fixture
def toolspace(project: Path) -> Toolspace:
    """Runs `toolspace …` in the project."""

    def run(*words: str, cwd: Path = project, stdin: str | None = None, **changes: str) -> Run:
        return subprocess.run(
            [sys.executable, "-m", "toolspace", *words],
            cwd=cwd,
            input=stdin,
            env=environment(**changes),
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            check=False,
        )

    return run
