from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Toolspace

pytestmark = pytest.mark.spec("17.1")


def complete(toolspace: Toolspace, words: str, **changes: str) -> list[str]:
    """What bash would be offered for the last word."""
    result = toolspace(
        COMP_WORDS=words, COMP_CWORD=str(len(words.split(" ")) - 1), _TOOLSPACE_COMPLETE="bash_complete", **changes
    )
    assert (result.returncode, result.stderr) == (0, "")
    return [line.partition(",")[2] for line in result.stdout.split()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(toolspace: Toolspace, shell: str) -> None:
    result = toolspace("completion", shell)

    assert result.returncode == 0
    assert f"_TOOLSPACE_COMPLETE={shell}_complete" in result.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)


def test_commands_options_and_tools_are_completed(toolspace: Toolspace) -> None:
    assert complete(toolspace, "toolspace ex") == ["explain"]
    assert complete(toolspace, "toolspace call --ti") == ["--timeout"]
    assert complete(toolspace, "toolspace call ec") == ["echo"]
    assert complete(toolspace, "toolspace explain read_") == ["read_file"]


def test_completion_is_silent_if_the_configuration_is_invalid(toolspace: Toolspace, project: Path) -> None:
    (project / "tools.py").write_text("print('noise')\nraise SystemExit(3)\n")

    assert complete(toolspace, "toolspace call ec") == []
