"""Where the state of a project is: beside its configuration, or still where earlier versions had it."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolspace.config.configuration import Config
from toolspace.config.find_and_watch import mark_user_state
from toolspace.config.load import load_config

pytestmark = pytest.mark.spec("25.1")


@pytest.fixture
def user_dir(tmp_path: Path) -> Path:
    """The user's state directory."""
    return tmp_path / "home" / "toolspace"


def load_project(tmp_path: Path, name: str, text: str = "") -> Config:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "toolspace.yaml").write_text(text)
    return load_config(folder / "toolspace.yaml", environ={"XDG_STATE_HOME": str(tmp_path / "home")})


def test_two_projects_have_state_directories_of_their_own(tmp_path: Path, user_dir: Path) -> None:
    first, second = load_project(tmp_path, "first"), load_project(tmp_path, "second")
    without_file = load_config(None, environ={"XDG_STATE_HOME": str(tmp_path / "home")})

    assert first.state_dir == tmp_path / "first" / ".toolspace"
    assert second.state_dir == tmp_path / "second" / ".toolspace"
    assert without_file.state_dir == user_dir
    assert first.warnings == second.warnings == without_file.warnings == ()


def test_the_setting_has_precedence(tmp_path: Path) -> None:
    assert load_project(tmp_path, "first", "storage: {dir: ./state}").state_dir == tmp_path / "first" / "state"


@pytest.mark.parametrize("name", ["toolspace.db", "logins", "conversations", "sessions"])
def test_state_of_an_earlier_version_is_used_and_the_command_that_moves_it_works(
    tmp_path: Path, user_dir: Path, name: str
) -> None:
    (user_dir / name).mkdir(parents=True)
    before = load_project(tmp_path, "first")
    (warning,) = before.warnings
    _, _, command = warning.partition("run: ")
    words = command.split()
    Path(words[1]).rename(words[2])
    after = load_project(tmp_path, "first")

    assert before.state_dir == user_dir
    assert words == ["mv", str(user_dir), str(tmp_path / "first" / ".toolspace")]
    assert (after.state_dir, after.warnings) == (tmp_path / "first" / ".toolspace", ())
    assert (after.state_dir / name).is_dir()


def test_a_project_with_state_of_its_own_does_not_use_that_of_an_earlier_version(
    tmp_path: Path, user_dir: Path
) -> None:
    (user_dir / "logins").mkdir(parents=True)
    (tmp_path / "first" / ".toolspace").mkdir(parents=True)
    (tmp_path / "first" / ".toolspace" / "toolspace.db").touch()

    assert load_project(tmp_path, "first").state_dir == tmp_path / "first" / ".toolspace"


def test_state_without_a_configuration_is_not_taken_for_that_of_an_earlier_version(
    tmp_path: Path, user_dir: Path
) -> None:
    mark_user_state(user_dir)
    (user_dir / "toolspace.db").touch()

    assert load_project(tmp_path, "first").state_dir == tmp_path / "first" / ".toolspace"


def test_state_of_an_earlier_version_is_not_marked(tmp_path: Path, user_dir: Path) -> None:
    (user_dir / "logins").mkdir(parents=True)
    mark_user_state(user_dir)

    assert load_project(tmp_path, "first").state_dir == user_dir
