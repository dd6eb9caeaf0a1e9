from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from tests.cli.conftest import environment
from toolspace.cli.logs import LEVELS
from toolspace.cli.main import COMMANDS, cli

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))


class Example(NamedTuple):
    command: str
    output: str


def examples() -> list[Example]:
    sessions = re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    session_parts = (re.split(r"^\$ ", session, flags=re.MULTILINE)[1:] for session in sessions)
    return [Example(*part.split("\n", 1)) for parts in session_parts for part in parts]


@pytest.mark.spec("17.1")
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.command)
def test_the_example_prints_what_the_page_says(example: Example, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    result = subprocess.run(
        ["bash", "-c", example.command],
        cwd=tmp_path,
        env=environment(PATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=60,
        check=False,
    )

    fits = doctest.OutputChecker().check_output(example.output, result.stdout, doctest.ELLIPSIS)
    assert fits, result.stdout


@pytest.mark.spec("17.1")
def test_every_command_option_and_level_has_its_line() -> None:
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert f"## {name}\n" in PAGE
        assert command is not None
        for option in (param for param in command.params if isinstance(param, click.Option)):
            assert f"`{option.opts[0]}" in PAGE or f"`{option.opts[-1]}" in PAGE, option.opts
    assert all(f"`{level}`" in PAGE for level in LEVELS)
